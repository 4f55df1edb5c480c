//! copy_file_range(2) on fs-mode mounts: done by `cv fuse`, with the results that it has locally.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::process::Command;

use cavern_tests::{Cluster, Options};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use rustix::io::Errno;

const MIB: u64 = 1 << 20;

fn mounted(options: Options) -> Cluster {
    let cluster = Cluster::up(options);
    cluster.s3.create_bucket("bucket");
    cluster.mount_fs_mode("s3://bucket/fs", "/fs", &["--block-size", "1MiB"]);
    cluster
}

fn noise(length: u64) -> Vec<u8> {
    let mut bytes = vec![0; length as usize];
    StdRng::seed_from_u64(length).fill(&mut bytes[..]);
    bytes
}

fn open(path: &Path) -> File {
    OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path).unwrap()
}

/// copy_file_range(2) until nothing is left; how many bytes that were.
fn copy(from: (&File, u64), to: (&File, u64), length: u64) -> Result<u64, Errno> {
    let (mut at, mut there) = (from.1, to.1);
    while at < from.1 + length {
        let left = (from.1 + length - at) as usize;
        if rustix::fs::copy_file_range(from.0, Some(&mut at), to.0, Some(&mut there), left)? == 0 {
            break;
        }
    }
    Ok(at - from.1)
}

/// Bytes that the kernel has written, and those that were copied without it.
fn passed(cluster: &Cluster) -> (u64, u64) {
    let metric = |name| cluster.status().fuse[0].metric(name).unwrap();
    (metric("cavern_fuse_written_bytes"), metric("cavern_fuse_copied_bytes"))
}

#[test]
fn files_are_copied_without_the_kernel_seeing_the_bytes() {
    let cluster = mounted(Options { workers: 2, more_mounts: vec!["second"], ..Options::default() });
    let content = noise(9 * MIB + 1234);
    fs::write(cluster.path("fs/from"), &content).unwrap();
    let (from, to) = (open(&cluster.path("fs/from")), open(&cluster.path("fs/to")));
    let before = passed(&cluster);
    assert_eq!(copy((&from, 0), (&to, 0), u64::MAX / 4), Ok(content.len() as u64), "up to the end, and no further");
    let after = passed(&cluster);
    assert_eq!((after.0 - before.0, after.1 - before.1), (0, content.len() as u64));
    assert!(fs::read(cluster.path("fs/to")).unwrap() == content);

    // Within one file, and behind its end; over what was there.
    assert_eq!(copy((&to, 100), (&to, 5 * MIB + 7), 3 * MIB), Ok(3 * MIB));
    assert_eq!(copy((&from, MIB - 5), (&to, 12 * MIB), 10), Ok(10));
    let mut expected = content.clone();
    expected.copy_within(100..100 + 3 * MIB as usize, 5 * MIB as usize + 7);
    expected.resize(12 * MIB as usize, 0);
    expected.extend_from_slice(&content[MIB as usize - 5..MIB as usize + 5]);
    assert!(fs::read(cluster.path("fs/to")).unwrap() == expected);
    drop(to);
    // What was closed is there on another mount.
    let there = cluster.at_start.fuse[1].mount_point.join("fs/to");
    cavern_tests::eventually("the copy is on the other mount", std::time::Duration::from_secs(30), || {
        (fs::metadata(&there).ok()?.len() == expected.len() as u64).then_some(())
    });
    assert!(fs::read(&there).unwrap() == expected);
    assert!(cluster.status().fuse[0].metric("cavern_fuse_requests_total{operation=\"copy_file_range\"").is_some());
}

#[test]
fn holes_stay_holes_and_what_only_the_bucket_has_is_copied_too() {
    let cluster = mounted(Options { conf: "[master]\npersist_delay = \"100ms\"\n".into(), ..Options::default() });
    let content = noise(3 * MIB + 77);
    fs::write(cluster.path("fs/dropped"), &content).unwrap();
    cluster.cv(&["persist", "wait", "/fs", "--timeout", "60s"]);
    assert_eq!(cluster.cv(&["fs", "free", "/fs/dropped", "--json"]).json()["blocks"], 4);
    let (from, to) = (open(&cluster.path("fs/dropped")), open(&cluster.path("fs/again")));
    assert_eq!(copy((&from, 1000), (&to, 5), MIB * 2), Ok(MIB * 2));
    let read = fs::read(cluster.path("fs/again")).unwrap();
    assert!(read[..5] == [0; 5] && read[5..] == content[1000..1000 + 2 * MIB as usize]);
    drop((from, to));

    // Last: nobody waits until the bucket has it.
    let (sparse, copied) = (open(&cluster.path("fs/sparse")), open(&cluster.path("fs/copied")));
    sparse.set_len(1 << 36).unwrap();
    sparse.write_all_at(b"middle", 40 << 30).unwrap();
    copied.write_all_at(&noise(2 * MIB), 0).unwrap();
    assert_eq!(copy((&sparse, 0), (&copied, 0), 1 << 36), Ok(1 << 36));
    assert_eq!(copied.metadata().unwrap().len(), 1 << 36);
    let used = cluster.status().workers[0].metric("cavern_worker_data_bytes").unwrap();
    assert!(used <= 16 * MIB, "{used} bytes at the worker for six that are no hole");
    let mut read = vec![1; 3 * MIB as usize];
    copied.read_exact_at(&mut read, 0).unwrap();
    assert!(read.iter().all(|byte| *byte == 0), "what was there is overwritten by the hole");
    copied.read_exact_at(&mut read[..8], (40 << 30) - 1).unwrap();
    assert_eq!(&read[..8], b"\0middle\0");
    drop((sparse, copied));
    fs::remove_file(cluster.path("fs/sparse")).unwrap();
    fs::remove_file(cluster.path("fs/copied")).unwrap();
}

#[test]
fn what_cannot_be_copied_is_refused_as_it_is_locally() {
    let cluster = mounted(Options::default());
    cluster.s3.put("bucket", "objects/object", noise(100_000));
    cluster.mount("s3://bucket/objects", "/objects", &[]);
    let local = tempfile::tempdir_in("/var/tmp").unwrap();
    let refusals = |directory: &Path| {
        fs::write(directory.join("f"), noise(50_000)).unwrap();
        let file = open(&directory.join("f"));
        let appending = OpenOptions::new().append(true).open(directory.join("f")).unwrap();
        let reading = File::open(directory.join("f")).unwrap();
        let folder = File::open(directory).unwrap();
        [
            copy((&file, 0), (&file, 10), 20),
            copy((&file, 10), (&file, 0), 20),
            copy((&file, 0), (&file, 20), 20),
            copy((&file, 0), (&appending, 0), 20),
            copy((&file, 0), (&reading, 100), 20),
            copy((&appending, 0), (&file, 100), 20),
            copy((&folder, 0), (&file, 100), 20),
            copy((&file, 50_000), (&file, 0), 20),
            copy((&file, 49_990), (&file, 0), 20),
            copy((&file, 0), (&file, 60_000), 0),
        ]
    };
    let expected = refusals(local.path());
    assert_eq!(refusals(&cluster.path("fs")), expected);
    assert_eq!(expected[0], Err(Errno::INVAL));

    // Beyond what a file may have.
    let file = open(&cluster.path("fs/f"));
    assert_eq!(copy((&file, 0), (&file, 1 << 44), 10), Err(Errno::FBIG));
    assert_eq!(copy((&file, 0), (&file, (1 << 44) - 4), 10), Err(Errno::FBIG), "when that part has been copied");
    assert_eq!(file.metadata().unwrap().len(), 1 << 44);
    file.set_len(50_000).unwrap();

    // A limit of the process.
    let script = "import os, resource, signal, sys\n\
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n\
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n\
        a, b = os.open('f', os.O_RDONLY), os.open('g', os.O_RDWR | os.O_CREAT)\n\
        print(os.copy_file_range(a, b, 5000, 0, 0))\n\
        try: os.copy_file_range(a, b, 5000, 0, 1000)\n\
        except OSError as error: print(error.errno)\n";
    let limited = |directory: &Path| {
        let done = Command::new("python3").args(["-c", script]).current_dir(directory).output().unwrap();
        (String::from_utf8(done.stdout).unwrap(), fs::metadata(directory.join("g")).unwrap().len())
    };
    assert_eq!(limited(&cluster.path("fs")), limited(local.path()));

    // An object is copied by the kernel.
    let object = File::open(cluster.path("objects/object")).unwrap();
    assert_eq!(copy((&object, 0), (&file, 0), 100_000), Ok(100_000));
    drop(file);
    assert!(fs::read(cluster.path("fs/f")).unwrap() == noise(100_000));
}
