//! SIGTERM ends each process with 0 once what is in flight has been answered, and `cv local down` leaves nothing
//! behind.

use std::fs;
use std::os::unix::fs::FileTypeExt as _;
use std::path::Path;
use std::time::{Duration, Instant};

use cavern_tests::{COUNTED, Child, Cluster, Options, Process, eventually};
use rustix::process::Signal;
use serde_json::json;

use crate::readers::{Readers, shown_at};

const FILES: usize = 500;
/// From SIGTERM to the end, with requests in flight.
const DRAINED: Duration = Duration::from_secs(5);

#[test]
fn each_process_drains_and_ends_with_0() {
    let cluster = Cluster::up(Options { conf: COUNTED.to_owned(), ..Options::default() });
    let seeded = cluster.seed("bucket", "", FILES, 50_000);
    cluster.mount("s3://bucket", "/data", &[]);
    let tree = shown_at(&cluster.path("data"), "", &seeded);

    // Under readers of cold files, whose requests are in flight all the time: they notice nothing.
    let readers = Readers::start(8, &tree);
    readers.wait_for(FILES / 10);
    terminate(&cluster, "worker0", |cluster| cluster.status().workers[0].clone());
    cluster.start("worker0");
    terminate(&cluster, "master", |cluster| cluster.status().masters[0].clone());
    cluster.start("master");
    readers.finish();

    // A read that is in flight when the client gets SIGTERM is answered first.
    cluster.s3.put("bucket", "slow", vec![5; 10_000]);
    cluster.cv(&["refresh", "/data"]);
    fs::metadata(cluster.path("data/slow")).unwrap();
    cluster.s3.add_fault(&json!({ "latency_ms": 700, "operations": ["GET"] }));
    cluster.s3.reset_stats();
    let slow = std::thread::spawn({
        let path = cluster.path("data/slow");
        move || fs::read(path)
    });
    eventually("the read has reached the bucket", Duration::from_secs(5), || {
        (cluster.s3.requests("GET") > 0).then_some(())
    });
    terminate(&cluster, "fuse", |cluster| cluster.status().fuse[0].clone());
    assert_eq!(slow.join().unwrap().unwrap(), vec![5; 10_000]);
    cluster.s3.clear_faults();

    // With a file held open, it ends too.
    cluster.start("fuse");
    let _open = fs::File::open(cluster.path("data/slow")).unwrap();
    terminate(&cluster, "fuse", |cluster| cluster.status().fuse[0].clone());
    assert!(!cluster.status().mounted);
    terminate(&cluster, "s3", |cluster| cluster.status().s3.child);
}

/// SIGTERM, not through cv; a child that ends with another code than 0 is shown as crashed.
#[track_caller]
fn terminate(cluster: &Cluster, name: &str, child: impl Fn(&Cluster) -> Child) {
    let began = Instant::now();
    cluster.signal(&child(cluster), Signal::TERM);
    let ended = eventually(&format!("{name} ends"), Duration::from_secs(20), || {
        Some(child(cluster)).filter(|child| child.state != "running")
    });
    let took = began.elapsed();
    eprintln!("{name}: {} {took:?} after SIGTERM", ended.state);
    assert_eq!(ended.state, "stopped", "{name}: {}", fs::read_to_string(&ended.log).unwrap());
    assert!(took < DRAINED, "{name} took {took:?}");
}

#[test]
fn down_leaves_no_mount_no_process_and_no_socket() {
    let cluster = Cluster::up(Options { workers: 2, more_mounts: vec!["second"], ..Options::default() });
    cluster.seed("bucket", "", 10, 1000);
    cluster.mount("s3://bucket", "/data", &[]);
    let directory = cluster.directory().to_str().unwrap();
    // Each worker has one socket for blocks, and one for journals.
    assert_eq!((mounts_below(directory), sockets_below(cluster.directory())), (2, 4));
    // s3, master, two workers, two clients, each with what starts it again when it crashes; and clients with daemons.
    let status = cluster.status();
    let expected = 12 + status.fuse.iter().filter_map(Child::daemon).count();
    assert_eq!(processes_of(directory).len(), expected, "{:?}", processes_of(directory));

    // The worst case: one killed, the others not answering, and both mounts in use.
    let _open = fs::File::open(cluster.path("data/0000/000000.bin")).unwrap();
    cluster.kill("worker1");
    cluster.kill("fuse1");
    let status = cluster.status();
    for child in [&status.masters[0], &status.workers[0], &status.fuse[0], &status.s3.child] {
        Process::of(child).signal(Signal::STOP);
    }
    let began = Instant::now();
    let down = cluster.cv(&["local", "down", "--dir", directory]);
    eprintln!("down after {:?}: {}{}", began.elapsed(), down.stdout, down.stderr);
    assert!(began.elapsed() < Duration::from_secs(10));
    assert_eq!((mounts_below(directory), sockets_below(cluster.directory())), (0, 0));
    // Supervisors end a moment after their children.
    eventually("all processes end", Duration::from_secs(20), || processes_of(directory).is_empty().then_some(()));
}

fn mounts_below(directory: &str) -> usize {
    let table = fs::read_to_string("/proc/self/mountinfo").unwrap();
    table.lines().filter(|line| line.split(' ').nth(4).is_some_and(|path| path.starts_with(directory))).count()
}

fn sockets_below(directory: &Path) -> usize {
    let entries = fs::read_dir(directory).unwrap().map(Result::unwrap);
    let count = |entry: fs::DirEntry| {
        let kind = entry.file_type().unwrap();
        // Mounts have none; and a dead one cannot be looked into.
        if kind.is_dir() && fs::read_dir(entry.path()).is_ok() {
            sockets_below(&entry.path())
        } else {
            usize::from(kind.is_socket())
        }
    };
    entries.map(count).sum()
}

/// Processes that work in the cluster's directory.
fn processes_of(directory: &str) -> Vec<String> {
    let processes = fs::read_dir("/proc")
        .unwrap()
        .flatten()
        .filter(|entry| fs::read_link(entry.path().join("cwd")).is_ok_and(|cwd| cwd.starts_with(directory)));
    processes
        .map(|entry| fs::read_to_string(entry.path().join("cmdline")).unwrap_or_default().replace('\0', " "))
        .collect()
}
