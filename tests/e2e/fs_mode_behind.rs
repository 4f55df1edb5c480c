//! Writing behind: what goes to a worker over the network is acknowledged before the worker has it, and is found by
//! everybody nevertheless.

use std::fs::{self, File};
use std::io::{Read as _, Write as _};
use std::os::unix::fs::FileExt as _;
use std::time::Duration;

use cavern_tests::{Cluster, Options, eventually, within};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use rustix::io::Errno;
use rustix::process::Signal;

const PATIENCE: Duration = Duration::from_secs(60);
/// Bytes that are written first, and for which the workers are asked; the room goes on to 256 KiB.
const BEGINNING: usize = 200_000;

fn mounted(client: &str) -> Cluster {
    let conf = format!("[master]\nworker_timeout = \"60s\"\n[client]\nlocal_descriptors = false\n{client}\n");
    // A program that another test starts closes its copies of the descriptors first, and so waits, as what is written
    // next does, for a worker that stands still.
    let cluster = Cluster::up(Options { more_mounts: vec!["second"], conf, ..Options::default() });
    cluster.s3.create_bucket("bucket");
    cluster.mount_fs_mode("s3://bucket/fs", "/fs", &[]);
    cluster
}

fn noise(length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    StdRng::seed_from_u64(1).fill(&mut bytes[..]);
    bytes
}

/// Requests, and their bytes.
fn write_behind_requests(cluster: &Cluster) -> (u64, u64) {
    let metric = |name: &str| cluster.at_start.fuse[0].metric(name).unwrap();
    (metric("cavern_client_write_behind_requests_total"), metric("cavern_client_write_behind_bytes_total"))
}

#[test]
fn small_writes_go_on_while_their_worker_is_slow_and_share_a_request() {
    let cluster = mounted("worker_timeout = \"60s\"\nread_timeout = \"60s\"");
    let (path, bytes) = (cluster.path("fs/file"), noise(BEGINNING + 50_000));
    let mut file = File::create(&path).unwrap();
    file.write_all(&bytes[..BEGINNING]).unwrap();
    let worker = &cluster.at_start.workers[0];
    cluster.signal(worker, Signal::STOP);
    let (mut writer, rest) = (file.try_clone().unwrap(), bytes[BEGINNING..].to_vec());
    // Closing would wait for the worker.
    let (written, writer) = within("writes to a worker that stands still", PATIENCE, move || {
        (rest.chunks(50).try_for_each(|piece| writer.write_all(piece)), writer)
    });
    let size = fs::metadata(&path).unwrap().len();
    let reader = std::thread::spawn({
        let path = path.clone();
        move || fs::read(path).unwrap()
    });
    cluster.signal(worker, Signal::CONT);
    written.unwrap();
    assert_eq!(size, bytes.len() as u64, "the length is that of what was written");
    assert!(reader.join().unwrap() == bytes, "who reads waits for what is behind");
    assert_eq!(write_behind_requests(&cluster), (2, 50_000), "what gathers while one request is under way is one more");
    drop((file, writer));
    let elsewhere = cluster.at_start.fuse[1].mount_point.join("fs/file");
    eventually("the other mount has it", PATIENCE, || (fs::read(&elsewhere).ok()? == bytes).then_some(()));
}

#[test]
fn a_failure_is_told_once_by_the_next_sync_at_the_latest() {
    // As long as a sync may take on a busy disk, and no longer: a write to the dead worker lasts so long.
    let cluster = mounted("worker_timeout = \"3s\"\nread_timeout = \"6s\"");
    let (path, mut bytes) = (cluster.path("fs/file"), noise(BEGINNING));
    let mut file = File::options().read(true).write(true).create(true).truncate(true).open(&path).unwrap();
    file.write_all(&bytes).unwrap();
    cluster.kill("worker0");
    // The write itself, where it was not taken, or the sync.
    let error = file.write_all(b"lost").and_then(|()| file.sync_all()).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(Errno::IO.raw_os_error()));
    cluster.start("worker0");
    eventually("the worker is back", PATIENCE, || file.read_at(&mut [0; 10], 0).ok());
    file.sync_all().unwrap();
    assert_eq!(file.metadata().unwrap().len(), bytes.len() as u64, "what failed is not there");
    file.write_all_at(b"kept", bytes.len() as u64).unwrap();
    file.sync_all().unwrap();
    bytes.extend_from_slice(b"kept");
    let mut read = Vec::new();
    File::open(&path).unwrap().read_to_end(&mut read).unwrap();
    assert!(read == bytes);
}

#[test]
fn nothing_is_written_behind_where_that_is_switched_off_or_a_write_is_to_be_synced() {
    use std::os::unix::fs::OpenOptionsExt as _;
    for (client, flags) in [("write_behind = \"0B\"", rustix::fs::OFlags::empty()), ("", rustix::fs::OFlags::SYNC)] {
        let cluster = mounted(client);
        let bytes = noise(BEGINNING + 5_000);
        let path = cluster.path("fs/file");
        let mut options = File::options();
        let options = options.write(true).create(true).custom_flags(flags.bits().cast_signed());
        let mut file = options.open(&path).unwrap();
        bytes.chunks(5_000).for_each(|piece| file.write_all(piece).unwrap());
        assert_eq!(write_behind_requests(&cluster), (0, 0), "{client} {flags:?}");
        drop(file);
        assert!(fs::read(&path).unwrap() == bytes);
    }
}
