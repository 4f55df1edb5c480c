//! The bucket's server stops answering (SIGSTOP): what is cached is read at full speed, the rest fails in time and is
//! logged, and nothing needs a restart afterwards.

use std::fs;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cavern_tests::{Cluster, Options, eventually, within};
use rustix::process::Signal;

use crate::readers::{Readers, drop_caches, shown_at};

const READ_TIMEOUT: Duration = Duration::from_secs(3);
const METADATA_TIMEOUT: Duration = Duration::from_secs(2);
/// `master.refresh_wait`: the listing is old, so a newer one is waited for first.
const REFRESH_WAIT: Duration = Duration::from_millis(500);
/// What an answer may come too late by, on a busy machine.
const SLACK: Duration = Duration::from_millis(1500);
const CONF: &str = "\
    [client]\nread_timeout = \"3s\"\nbucket_timeout = \"3s\"\nworker_timeout = \"2s\"\nmetadata_timeout = \"2s\"\n\
    [master]\nrefresh_wait = \"500ms\"\n";

#[test]
fn what_is_cached_is_served_and_the_rest_fails_in_time_and_heals() {
    let cluster = Cluster::up(Options { conf: CONF.to_owned(), ..Options::default() });
    let seeded = cluster.seed("bucket", "", 400, 50_000);
    for name in ["small", "large", "later"] {
        let size = if name == "large" { 4 << 20 } else { 10_000 };
        cluster.s3.put("bucket", &format!("cold/{name}"), vec![1; size]);
    }
    // Old listings too are served while the bucket is silent.
    cluster.mount("s3://bucket", "/data", &["--metadata-ttl", "1s"]);
    cluster.mount("s3://bucket", "/strict", &["--consistency", "always"]);
    fs::read(cluster.path("strict/0000/000000.bin")).unwrap();
    let tree = shown_at(&cluster.path("data"), "", &seeded);
    Readers::start(8, &tree).finish();
    let names = |folder: &str| fs::read_dir(cluster.path(folder)).map(Iterator::count);
    assert_eq!((names("data").unwrap(), names("data/cold").unwrap()), (5, 3));
    let warm = read_all(&tree);

    let s3 = cluster.status().s3.child;
    cluster.signal(&s3, Signal::STOP);
    let log_before = fuse_log(&cluster);

    // At full speed: without the kernel's pages, each file is opened and read from the worker's store.
    let stopped = read_all(&tree);
    eprintln!("{} cached files: {warm:?} before, {stopped:?} with the bucket stopped", tree.len());
    assert!(stopped < warm * 3 + SLACK, "{stopped:?} for the cached files, {warm:?} before");

    // An uncached file: EIO in time, and one line.
    for name in ["small", "large"] {
        let before = fuse_log(&cluster).len();
        let path = cluster.path("data/cold").join(name);
        let (error, took) = within("an uncached read", READ_TIMEOUT + METADATA_TIMEOUT + SLACK, move || {
            let began = Instant::now();
            (fs::read(path).unwrap_err(), began.elapsed())
        });
        assert_eq!(error.raw_os_error(), Some(rustix::io::Errno::IO.raw_os_error()), "{name}: {error}");
        assert!(took < READ_TIMEOUT + REFRESH_WAIT + SLACK, "{name}: EIO after {took:?}");
        let log = fuse_log(&cluster).split_off(before);
        let lines: Vec<_> = log.lines().filter(|line| line.contains(name)).collect();
        assert_eq!(lines.len(), 1, "{name}: {log}");
        eprintln!("uncached {name}: EIO after {took:?}: {}", lines[0]);
    }

    // Where each open asks the bucket, it cannot be answered; also in time, with one line.
    let before = fuse_log(&cluster).len();
    let path = cluster.path("strict/0000/000000.bin");
    let (error, took) = within("a checked open", METADATA_TIMEOUT + SLACK, move || {
        let began = Instant::now();
        (fs::read(path).unwrap_err(), began.elapsed())
    });
    assert_eq!(error.raw_os_error(), Some(rustix::io::Errno::IO.raw_os_error()), "{error}");
    let log = fuse_log(&cluster).split_off(before);
    assert_eq!(log.lines().filter(|line| line.contains("000000.bin")).count(), 1, "{log}");
    eprintln!("checked open: EIO after {took:?}: {log}");

    // Listings and attributes that are known.
    for (folder, entries) in [("data", 5), ("data/cold", 3), ("data/0000", 100), ("data/0003", 100)] {
        let path = cluster.path(folder);
        let (count, took) = within("a listing", METADATA_TIMEOUT + SLACK, move || {
            let began = Instant::now();
            let entries = fs::read_dir(path).unwrap();
            (entries.filter(|entry| entry.as_ref().unwrap().metadata().is_ok()).count(), began.elapsed())
        });
        assert!(count == entries && took < METADATA_TIMEOUT, "{folder}: {count} entries after {took:?}");
    }

    cluster.signal(&s3, Signal::CONT);
    let healing = Instant::now();
    let path = cluster.path("data/cold");
    for name in ["small", "large", "later"] {
        let path = path.join(name);
        eventually(&format!("{name} is readable again"), Duration::from_secs(10), || {
            let path = path.clone();
            within("a read", READ_TIMEOUT * 2, move || fs::read(path)).ok().filter(|read| read.iter().all(|b| *b == 1))
        });
    }
    // New objects show up as before.
    cluster.s3.put("bucket", "cold/new", "new");
    eventually("a new object appears", Duration::from_secs(10), || fs::read(path.join("new")).ok());
    eprintln!("healed after {:?}", healing.elapsed());
    let log = fuse_log(&cluster).split_off(log_before.len());
    let noise = log.lines().filter(|line| line.contains("WARN") || line.contains("ERROR")).count();
    assert!(noise <= 10, "{noise} lines in the log of the FUSE client:\n{log}");
}

fn read_all(tree: &Arc<crate::readers::Tree>) -> Duration {
    drop_caches();
    let began = Instant::now();
    Readers::start(8, tree).finish();
    began.elapsed()
}

fn fuse_log(cluster: &Cluster) -> String {
    fs::read_to_string(&cluster.at_start.fuse[0].log).unwrap()
}
