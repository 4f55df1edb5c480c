//! Short outages: whoever waits is served when they are over, within his own deadline, and what is refused is refused
//! at once.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use cavern_tests::{Cluster, Options, eventually, within};
use rustix::io::Errno;
use serde_json::json;

const PATIENCE: Duration = Duration::from_secs(60);
/// So long that it is the outage that ends the waiting, on a busy machine too.
const CONF: &str = "[client]\nread_timeout = \"60s\"\nmetadata_timeout = \"60s\"\n";
const OUTAGE: Duration = Duration::from_secs(3);

#[test]
fn a_bucket_that_refuses_connections_for_a_moment_costs_nobody_an_error() {
    let cluster = Cluster::up(Options { conf: CONF.to_owned(), ..Options::default() });
    let seeded = cluster.seed("bucket", "", 60, 50_000);
    cluster.s3.put("bucket", "large", vec![7; 6 << 20]);
    for name in ["file", "denied"] {
        cluster.s3.put("bucket", &format!("unlisted/{name}"), "content");
    }
    cluster.mount("s3://bucket", "/data", &["--metadata-ttl", "1h"]);
    cluster.s3.create_bucket("written");
    cluster.mount("s3://written", "/written", &["--access-mode", "read_write"]);
    assert_eq!(fs::read_dir(cluster.path("data/0000")).unwrap().count(), seeded.len());
    cluster.s3.create_bucket("posix");
    cluster.mount_fs_mode("s3://posix/fs", "/fs", &[]);
    fs::write(cluster.path("fs/freed"), vec![5; 300_000]).unwrap();
    cluster.cv(&["persist", "wait", "/fs", "--timeout", "60s"]);
    assert_eq!(cluster.cv(&["fs", "free", "/fs/freed", "--json"]).json()["blocks"], 1);
    let before = fs::metadata(cluster.path("data/large")).unwrap().len();

    cluster.kill("s3");
    let began = Instant::now();
    let read = |path: PathBuf, expected: Vec<u8>| {
        thread::spawn(move || {
            let bytes = fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
            assert!(bytes == expected, "{}: {} bytes", path.display(), bytes.len());
        })
    };
    let mut waiting: Vec<_> =
        seeded.iter().map(|(key, content)| read(cluster.path("data").join(key), content.to_vec())).collect();
    waiting.push(read(cluster.path("data/large"), vec![7; before as usize]));
    waiting.push(read(cluster.path("data/unlisted/file"), b"content".to_vec()));
    waiting.push(read(cluster.path("fs/freed"), vec![5; 300_000]));
    let written = cluster.path("written/file");
    waiting.push(thread::spawn(move || fs::write(&written, "written").unwrap()));
    thread::sleep(OUTAGE.saturating_sub(began.elapsed()));
    assert!(waiting.iter().all(|waiting| !waiting.is_finished()), "somebody was answered without a bucket");
    cluster.start("s3");
    waiting.into_iter().for_each(|waiting| waiting.join().unwrap());
    assert_eq!(cluster.s3.get("written", "file"), "written");

    // What the bucket refuses is not waited for.
    cluster.s3.add_fault(&json!({ "kind": "403", "operations": ["GET"] }));
    let path = cluster.path("data/unlisted/denied");
    let (denied, took) = within("a read that is refused", PATIENCE, move || {
        let began = Instant::now();
        (fs::read(path).unwrap_err(), began.elapsed())
    });
    assert_eq!(Errno::from_io_error(&denied), Some(Errno::ACCESS), "{denied}");
    assert!(took < PATIENCE / 2, "{took:?}");
}

/// Looks at everything again and again: listings, attributes, and names that are not there.
fn look_around(root: &Path, done: &AtomicBool, rounds: &AtomicUsize) {
    let mut number = 0;
    while !done.load(Ordering::Relaxed) {
        let mut left = vec![root.to_owned()];
        while let Some(directory) = left.pop() {
            let entries = fs::read_dir(&directory).and_then(Iterator::collect::<io::Result<Vec<_>>>);
            for entry in entries.unwrap_or_else(|error| panic!("{}: {error}", directory.display())) {
                let attributes = fs::symlink_metadata(entry.path());
                if attributes.unwrap_or_else(|error| panic!("{}: {error}", entry.path().display())).is_dir() {
                    left.push(entry.path());
                }
            }
            number += 1;
            let unknown = directory.join(format!("unknown{number}"));
            let error = fs::File::open(&unknown).unwrap_err();
            assert_eq!(Errno::from_io_error(&error), Some(Errno::NOENT), "{}: {error}", unknown.display());
        }
        rounds.fetch_add(1, Ordering::Relaxed);
    }
}

#[test]
fn a_master_that_restarts_costs_no_lookup_and_no_listing_an_error() {
    let cluster = Cluster::up(Options { conf: CONF.to_owned(), ..Options::default() });
    cluster.s3.create_bucket("bucket");
    for directory in 0..20 {
        for file in 0..30 {
            cluster.s3.put("bucket", &format!("{directory}/{file}"), "content");
        }
    }
    cluster.mount("s3://bucket", "/data", &["--metadata-ttl", "1h"]);
    let (done, rounds) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    let users: Vec<_> = (0..4)
        .map(|_| {
            let (root, done, rounds) = (cluster.path("data"), done.clone(), rounds.clone());
            thread::spawn(move || look_around(&root, &done, &rounds))
        })
        .collect();
    let go_on = || {
        let before = rounds.load(Ordering::Relaxed);
        let is_over = || users.iter().any(thread::JoinHandle::is_finished);
        eventually("all is seen again", PATIENCE, || {
            (is_over() || rounds.load(Ordering::Relaxed) > before + users.len()).then_some(())
        });
    };
    go_on();
    for round in 0..4 {
        // In order, and not.
        match round % 2 {
            0 => cluster.kill("master"),
            _ => cluster.stop("master"),
        }
        cluster.start("master");
        go_on();
    }
    done.store(true, Ordering::Relaxed);
    users.into_iter().for_each(|user| user.join().unwrap());
}
