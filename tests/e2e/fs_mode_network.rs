//! Files of fs-mode mounts whose blocks come over the network: what a network damages is noticed, and what was read
//! ahead gives way to whatever changes the file.

use std::fs::{self, File};
use std::io::{self, Read as _, Write as _};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use cavern_tests::{Child, Cluster, Options, eventually};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use rustix::io::Errno;

use super::running::Running;

const PATIENCE: Duration = Duration::from_secs(60);
const MIB: usize = 1 << 20;
/// What a bad network flips a bit of.
const MARK: &[u8] = b"<- flip a bit ->";
const MARK_EVERY: usize = 4096;

/// Between a worker and whoever connects to it.
struct Wire {
    address: SocketAddr,
    is_bad: Arc<AtomicBool>,
}

impl Wire {
    fn before(worker: &str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (address, is_bad) = (listener.local_addr().unwrap(), Arc::new(AtomicBool::new(false)));
        let (worker, flips) = (worker.to_owned(), is_bad.clone());
        thread::spawn(move || {
            for client in listener.incoming() {
                // A worker that is not there refuses connections.
                let (Ok(client), Ok(worker)) = (client, TcpStream::connect(&worker)) else { continue };
                let back = (worker.try_clone().unwrap(), client.try_clone().unwrap());
                let flips = flips.clone();
                thread::spawn(move || pass(client, worker, |_| {}));
                thread::spawn(move || {
                    pass(back.0, back.1, |piece| {
                        if flips.load(Ordering::Acquire) {
                            flip(piece);
                        }
                    });
                });
            }
        });
        Self { address, is_bad }
    }

    fn set_bad(&self, is_bad: bool) {
        self.is_bad.store(is_bad, Ordering::Release);
    }
}

/// Leads a stream from one end to the other until either ends.
fn pass(mut from: TcpStream, mut to: TcpStream, change: impl Fn(&mut [u8])) {
    let mut piece = vec![0; 64 << 10];
    loop {
        let read = match from.read(&mut piece) {
            Ok(0) => break,
            Ok(read) => read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(_) => break,
        };
        change(&mut piece[..read]);
        if to.write_all(&piece[..read]).is_err() {
            break;
        }
    }
    let _gone = (from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both));
}

fn flip(piece: &mut [u8]) {
    for at in 0..piece.len() {
        if piece[at..].starts_with(MARK) {
            piece[at] ^= 1;
        }
    }
}

fn noise(seed: u64, length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    StdRng::seed_from_u64(seed).fill(&mut bytes[..]);
    bytes
}

/// Everything is forgotten but what workers and the master have.
fn forget(cluster: &Cluster) {
    cluster.stop("fuse0");
    cluster.start("fuse0");
}

/// Starts the worker that was stopped, to be reached over the wire. Masters take it in there when they have heard
/// nothing of it for `master.worker_timeout`.
fn start_behind(cluster: &Cluster, worker: &Child, wire: &Wire) -> Running {
    let conf = cluster.directory().join("behind.toml");
    let (masters, dir) = (&cluster.at_start.masters[0].grpc, worker.dirs[0].display());
    let text = format!(
        "[cluster]\nmasters = [\"{masters}\"]\n[worker]\nlisten = \"{}\"\nadvertise = \"{}\"\nhttp_listen = \"{}\"\n\
         dirs = [\"[SSD]{dir}\"]\n",
        worker.data, wire.address, worker.http
    );
    fs::write(&conf, text).unwrap();
    let running = Running::start(cluster, &["worker", "--conf", conf.to_str().unwrap()]);
    eventually("the worker has the address of the wire", PATIENCE, || {
        let nodes = cluster.cv(&["node", "list", "--json"]).json();
        let is_there = |node: &serde_json::Value| node["data"] == wire.address.to_string() && node["state"] == "live";
        nodes.as_array().unwrap().iter().any(is_there).then_some(())
    });
    running
}

#[test]
fn bytes_that_a_network_damages_are_read_from_another_replica_or_not_at_all() {
    let conf = "[master]\nheartbeat = \"200ms\"\nworker_timeout = \"2s\"\nrepair_after = \"1s\"\n\
        persist_delay = \"1h\"\n\
        [client]\nlocal_descriptors = false\nworker_timeout = \"1s\"\nread_timeout = \"3s\"\n";
    let cluster = Cluster::up(Options { workers: 2, conf: conf.to_owned(), ..Options::default() });
    let worker = cluster.at_start.workers[0].clone();
    cluster.stop("worker0");
    let wire = Wire::before(&worker.data);
    let _running = start_behind(&cluster, &worker, &wire);
    cluster.s3.create_bucket("bucket");
    cluster.mount_fs_mode("s3://bucket/fs", "/fs", &["--block-size", "1MiB", "--replicas", "2"]);

    // So many blocks that each worker is the first one of some.
    let (path, mut bytes) = (cluster.path("fs/file"), noise(1, 16 * MIB));
    bytes.chunks_mut(MARK_EVERY).for_each(|part| part[..MARK.len()].copy_from_slice(MARK));
    let mut file = File::create(&path).unwrap();
    file.write_all(&bytes).unwrap();
    file.sync_all().unwrap();
    drop(file);
    eventually("each block has two replicas", PATIENCE, || {
        let shown = cluster.cv(&["fs", "blocks", "/fs/file", "--json"]).json();
        let there = shown.as_array().unwrap().iter().filter(|view| view["path"].as_str() != Some(""));
        (there.count() == 32).then_some(())
    });

    forget(&cluster);
    wire.set_bad(true);
    assert!(fs::read(&path).unwrap() == bytes, "whatever one worker's network does");
    let seen = cluster.at_start.fuse[0].metric("cavern_client_corrupt_chunks_total").unwrap();
    assert!(seen > 0, "nothing came over the bad wire: {}", cluster.logs());
    eventually("the worker counts it", PATIENCE, || {
        worker.metric("cavern_worker_corrupt_chunks_total").filter(|counted| *counted > 0)
    });
    eventually("the report tells of it", PATIENCE, || {
        cluster.cv(&["report"]).stdout.contains("failed the checksum").then_some(())
    });

    cluster.stop("worker1");
    forget(&cluster);
    let error = fs::read(&path).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(Errno::IO.raw_os_error()), "{error}");
    wire.set_bad(false);
    eventually("the right bytes are there", PATIENCE, || (fs::read(&path).ok()? == bytes).then_some(()));
}

#[test]
fn what_was_read_ahead_over_the_network_gives_way_to_whatever_changes_the_file() {
    let conf = "[client]\nlocal_descriptors = false\n".to_owned();
    let cluster = Cluster::up(Options { more_mounts: vec!["second"], conf, ..Options::default() });
    cluster.s3.create_bucket("bucket");
    cluster.mount_fs_mode("s3://bucket/fs", "/fs", &[]);
    let path = cluster.path("fs/file");
    let elsewhere = cluster.at_start.fuse[1].mount_point.join("fs/file");
    let mut bytes = noise(2, 8 * MIB);
    fs::write(&path, &bytes).unwrap();
    let ahead = || cluster.at_start.fuse[0].metric("cavern_client_readahead_bytes_total").unwrap();

    for round in 0..4 {
        forget(&cluster);
        let (before, reader) = (ahead(), File::open(&path).unwrap());
        let mut part = vec![0; MIB / 8];
        for at in (0..MIB).step_by(part.len()) {
            reader.read_exact_at(&mut part, at as u64).unwrap();
            assert!(part == bytes[at..at + part.len()], "round {round} at {at}");
        }
        eventually("it is read ahead", PATIENCE, || (ahead() > before).then_some(()));
        let new = noise(10 + round, 300_000);
        let at = MIB + 100_000;
        match round {
            0 | 1 => {
                let writer = if round == 0 { &path } else { &elsewhere };
                let writer = File::options().write(true).open(writer).unwrap();
                writer.write_all_at(&new, at as u64).unwrap();
                bytes[at..at + new.len()].copy_from_slice(&new);
            }
            _ => {
                let writer = File::options().write(true).open(if round == 2 { &path } else { &elsewhere }).unwrap();
                writer.set_len(at as u64).unwrap();
                writer.set_len(bytes.len() as u64).unwrap();
                bytes[at..].fill(0);
            }
        }
        let mut all = vec![0; bytes.len()];
        let mut reads = || {
            reader.read_exact_at(&mut all, 0).ok()?;
            (all == bytes).then_some(())
        };
        if round % 2 == 0 {
            assert!(reads().is_some(), "round {round}: what this client has changed shows at once");
        } else {
            eventually("what the other client has changed shows", PATIENCE, reads);
        }
    }
}
