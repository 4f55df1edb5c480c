//! `.cv/trace`: what slow requests of a mount waited for.

use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{self, Read as _};
use std::os::unix::fs::{FileExt as _, PermissionsExt as _};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use cavern_tests::{COUNTED, Cluster, Options, eventually};
use rustix::io::Errno;
use serde_json::json;

use crate::client_restart::up;

const PATIENCE: Duration = Duration::from_secs(30);
/// How long the bucket takes for a GET, and what of it may be lost in a column that is rounded.
const LATENCY: Duration = Duration::from_secs(1);
const NEARLY: f64 = 995.0;

/// One request of the trace. Times are in milliseconds.
#[derive(Debug)]
struct Line {
    operation: String,
    total: f64,
    descriptor: f64,
    network: f64,
    fetch: f64,
    bucket: f64,
    /// All parts together.
    parts: f64,
    range: String,
    path: String,
}

#[track_caller]
fn trace(cluster: &Cluster) -> String {
    fs::read_to_string(cluster.path(".cv/trace")).unwrap()
}

/// The requests about paths that end so, the slowest first.
#[track_caller]
fn lines(text: &str, path_ends: &str) -> Vec<Line> {
    let lines = text.lines().skip_while(|line| !line.starts_with("TIME (UTC)")).skip(1);
    let parse = |line: &str| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let times: Vec<f64> = fields[2..11].iter().map(|time| time.parse().unwrap()).collect();
        Line {
            operation: fields[1].to_owned(),
            total: times[0],
            descriptor: times[3],
            network: times[5],
            fetch: times[6],
            bucket: times[7],
            parts: times[1..].iter().sum(),
            range: fields[11].to_owned(),
            path: fields[13..].join(" "),
        }
    };
    lines.map(parse).filter(|line| line.path.ends_with(path_ends)).collect()
}

/// What the slowest of all requests about a file waited for.
#[track_caller]
fn slowest(cluster: &Cluster, path_ends: &str) -> Line {
    let text = trace(cluster);
    let line = lines(&text, path_ends).into_iter().next();
    let line = line.unwrap_or_else(|| panic!("nothing about {path_ends} in {text}"));
    // Each is rounded.
    assert!((line.parts - line.total).abs() < 1.0, "{line:?}");
    line
}

#[track_caller]
fn errno<T: std::fmt::Debug>(result: io::Result<T>) -> Errno {
    Errno::from_io_error(&result.unwrap_err()).unwrap()
}

fn slow_gets(cluster: &Cluster) {
    cluster.s3.add_fault(&json!({"latency_ms": LATENCY.as_millis() as u64, "operations": ["GET"]}));
}

#[test]
fn a_slow_read_shows_whom_it_waited_for() {
    let cluster = Cluster::up(Options { conf: COUNTED.into(), ..Options::default() });
    let seeded = cluster.seed("objects", "", 3, 50_000);
    let names: Vec<&String> = seeded.keys().collect();
    cluster.s3.put("objects", "large.bin", vec![7; 3 << 20]);
    cluster.mount("s3://objects", "/data", &[]);
    let read = |name: &str| fs::read(cluster.path("data").join(name)).unwrap();
    read(names[0]);
    assert!(lines(&trace(&cluster), names[0]).iter().all(|line| line.total < NEARLY));

    slow_gets(&cluster);
    read(names[1]);
    let line = slowest(&cluster, names[1]);
    assert_eq!((line.operation.as_str(), line.path.as_str()), ("open", format!("/data/{}", names[1]).as_str()));
    // The worker of this host fetches it.
    assert!(line.total >= NEARLY && line.fetch >= NEARLY && line.bucket == 0.0, "{line:?}");
    assert!(line.descriptor + line.network < line.fetch / 2.0, "the worker itself is quick: {line:?}");
    let mut part = [0; 4096];
    File::open(cluster.path("data/large.bin")).unwrap().read_exact_at(&mut part, 1 << 20).unwrap();
    let line = slowest(&cluster, "large.bin");
    assert_eq!(line.operation, "read");
    assert!(line.range.starts_with("1048576+"), "{line:?}");
    assert!(line.fetch >= NEARLY && line.bucket == 0.0, "{line:?}");

    cluster.kill("worker0");
    read(names[2]);
    let line = slowest(&cluster, names[2]);
    assert!(line.bucket >= NEARLY && line.bucket > line.total / 2.0, "{line:?}");

    // What is answered at once is not there, and what comes first sums up all.
    cluster.s3.clear_faults();
    let text = trace(&cluster);
    let first = text.split("The slowest of them").next().unwrap();
    assert!(first.starts_with("In the last 10 minutes ") && first.contains(" took 10ms or longer."), "{text}");
    let bucket = first.lines().find(|line| line.starts_with("bucket")).unwrap();
    assert!(bucket.split_whitespace().nth(1).unwrap().parse::<f64>().unwrap() >= NEARLY, "{text}");
}

#[test]
fn what_comes_over_the_network_counts_for_the_network_and_for_each_who_waits() {
    let conf = format!("{COUNTED}local_descriptors = false\n[fuse]\ntrace_above = \"100ms\"\n");
    let cluster = Cluster::up(Options { conf, ..Options::default() });
    cluster.s3.create_bucket("objects");
    cluster.s3.put("objects", "large.bin", vec![7; 3 << 20]);
    cluster.mount("s3://objects", "/data", &[]);
    let path = cluster.path("data/large.bin");
    fs::metadata(&path).unwrap();
    slow_gets(&cluster);
    // Past the pages of the kernel, both ask for the same.
    let began = Instant::now();
    let readers = [0, 4096].map(|at| {
        let path = path.clone();
        std::thread::spawn(move || {
            let mut part = [0; 4096];
            File::open(&path).unwrap().read_exact_at(&mut part, at).unwrap();
        })
    });
    readers.into_iter().for_each(|reader| reader.join().unwrap());
    assert!(began.elapsed() >= LATENCY);
    let line = slowest(&cluster, "large.bin");
    assert!(line.fetch >= NEARLY && line.descriptor == 0.0 && line.bucket == 0.0, "{line:?}");
    let text = trace(&cluster);
    assert!(text.contains(" took 100ms or longer."), "{text}");
    // A busy machine may have taken as long to look the file up, and to open it.
    for line in lines(&text, "large.bin") {
        assert!(line.total >= 100.0 && (line.operation != "read" || line.fetch > line.total / 2.0), "{text}");
    }
}

#[test]
fn it_is_in_no_listing_and_cannot_be_changed() {
    let cluster = Cluster::up(Options::default());
    cluster.s3.create_bucket("bucket");
    cluster.mount_fs_mode("s3://bucket/fs", "/fs", &[]);
    let (root, own, trace) = (cluster.mount_point(), cluster.path(".cv"), cluster.path(".cv/trace"));
    let names = |of: &Path| {
        let names: Vec<_> = fs::read_dir(of).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        names
    };
    assert_eq!(names(root), ["fs"]);
    assert_eq!(names(&own), ["trace"]);
    assert_eq!(names(root), ["fs"], "having been looked up, it is shown no more than before");
    assert!(fs::metadata(cluster.path("fs/.cv")).is_err(), "it is in the root alone");
    assert_eq!(errno(fs::metadata(own.join("other"))), Errno::NOENT);
    let looks = fs::metadata(&trace).unwrap();
    assert!(looks.is_file() && looks.permissions().mode() & 0o7777 == 0o444, "{looks:?}");

    assert_eq!(errno(OpenOptions::new().write(true).open(&trace)), Errno::ROFS);
    assert_eq!(errno(OpenOptions::new().append(true).open(&trace)), Errno::ROFS);
    assert_eq!(errno(File::create(own.join("new"))), Errno::ROFS);
    assert_eq!(errno(fs::create_dir(own.join("new"))), Errno::ROFS);
    assert_eq!(errno(fs::remove_file(&trace)), Errno::ROFS);
    assert_eq!(errno(fs::rename(&trace, own.join("new"))), Errno::ROFS);
    assert_eq!(errno(fs::set_permissions(&trace, Permissions::from_mode(0o666))), Errno::ROFS);
    fs::write(cluster.path("fs/file"), b"x").unwrap();
    assert_eq!(errno(fs::rename(cluster.path("fs/file"), own.join("new"))), Errno::ROFS);
    assert_eq!(errno(fs::hard_link(&trace, cluster.path("fs/link"))), Errno::ROFS);
    assert_eq!(fs::read(cluster.path("fs/file")).unwrap(), b"x");

    // Whoever may use the mount may read it.
    let mut cat = Command::new("cat");
    let read = cat.arg(&trace).uid(65_534).gid(65_534).output().unwrap();
    assert!(read.status.success() && read.stdout.starts_with(b"In the last 10 minutes "), "{read:?}");
    // In pieces, as one text.
    let (mut whole, mut byte) = (Vec::new(), [0]);
    let mut file = File::open(&trace).unwrap();
    while file.read(&mut byte).unwrap() == 1 {
        whole.push(byte[0]);
    }
    assert!(whole.ends_with(b"\n") && whole.starts_with(b"In the last 10 minutes "));
    // No lock that is in anybody's way, no attribute, and none of it costs others theirs.
    let lock = |operation| rustix::fs::flock(&file, operation);
    assert_eq!(lock(rustix::fs::FlockOperation::NonBlockingLockExclusive), Err(Errno::NOLCK));
    lock(rustix::fs::FlockOperation::NonBlockingLockShared).unwrap();
    let other = File::open(cluster.path("fs/file")).unwrap();
    rustix::fs::flock(&other, rustix::fs::FlockOperation::NonBlockingLockShared).unwrap();
}

#[test]
fn a_name_of_the_namespace_goes_first() {
    let cluster = Cluster::up(Options::default());
    cluster.s3.create_bucket("objects");
    cluster.s3.put("objects", "file", "content");
    assert!(cluster.path(".cv/trace").exists());
    cluster.mount("s3://objects", "/.cv", &[]);
    eventually("the mount is there", PATIENCE, || fs::read(cluster.path(".cv/file")).ok());
    assert!(!cluster.path(".cv/trace").exists());
    let listed = fs::read_dir(cluster.mount_point()).unwrap().any(|entry| entry.unwrap().file_name() == ".cv");
    assert!(listed, "it is one as any other");
    cluster.cv(&["umount", "/.cv"]);
    eventually("the trace is there again", PATIENCE, || fs::read(cluster.path(".cv/trace")).ok());
}

#[test]
fn it_outlives_the_process_that_serves_the_mount() {
    let cluster = up(Options { conf: COUNTED.into(), ..Options::default() });
    cluster.s3.put("bucket", "file", vec![1; 50_000]);
    cluster.s3.put("bucket", "first", vec![1; 50_000]);
    cluster.mount("s3://bucket", "/data", &[]);
    let open = File::open(cluster.path(".cv/trace")).unwrap();
    let directory = File::open(cluster.path(".cv")).unwrap();
    cluster.cv(&["fuse", "reload", "--mount-point", cluster.mount_point().to_str().unwrap()]);
    let mut begins = [0; 23];
    open.read_exact_at(&mut begins, 0).unwrap();
    assert_eq!(&begins, b"In the last 10 minutes ");
    assert_eq!(rustix::fs::Dir::read_from(&directory).unwrap().count(), 3);
    // Until a worker has answered once, it is not known to be on this host.
    fs::read(cluster.path("data/first")).unwrap();
    slow_gets(&cluster);
    fs::read(cluster.path("data/file")).unwrap();
    let line = slowest(&cluster, "/data/file");
    assert!(line.fetch >= NEARLY, "{line:?}");
}
