//! The bucket of an fs-mode mount follows the namespace: key by key, through everything that fails meanwhile.

mod lost;
mod pacing;
mod tree_stores;
mod writer;

use std::fs;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::time::Duration;

use bytes::Bytes;
use cavern_tests::{COUNTED, Cluster, Options, eventually};
use rand::rngs::StdRng;
use rand::{RngCore, SeedableRng};
use rustix::process::Signal;
use serde_json::json;
use writer::Writer;

use crate::bucket::Objects;

const PATIENCE: Duration = Duration::from_secs(60);

fn cluster(workers: usize) -> Cluster {
    let conf = format!("[master]\npersist_delay = \"100ms\"\n{COUNTED}");
    Cluster::up(Options { workers, conf, ..Options::default() })
}

fn mounted(workers: usize) -> Cluster {
    let cluster = cluster(workers);
    cluster.s3.create_bucket("bucket");
    cluster.mount_fs_mode("s3://bucket/fs", "/fs", &[]);
    cluster
}

fn noise(seed: u64, length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    StdRng::seed_from_u64(seed).fill_bytes(&mut bytes);
    bytes
}

fn objects(entries: &[(&str, &[u8])]) -> Objects {
    entries.iter().map(|(key, content)| ((*key).to_owned(), Bytes::copy_from_slice(content))).collect()
}

#[track_caller]
fn assert_same(bucket: &Objects, expected: &Objects) {
    let keys = |objects: &Objects| objects.keys().cloned().collect::<Vec<_>>();
    assert_eq!(keys(bucket), keys(expected));
    for (key, content) in expected {
        assert!(bucket[key] == content, "{key}: {} bytes where {} are wanted", bucket[key].len(), content.len());
    }
}

/// A gauge of the master, as its metrics page has it.
fn gauge(cluster: &Cluster, name: &str) -> Option<u64> {
    cluster.status().masters[0].metric(name)
}

/// Bytes of blocks of files, at all workers.
fn data_bytes(cluster: &Cluster) -> u64 {
    let workers = cluster.status().workers;
    workers.iter().map(|worker| worker.metric("cavern_worker_data_bytes").unwrap()).sum()
}

#[test]
fn files_of_all_kinds_are_objects_and_go_with_their_names() {
    let cluster = mounted(2);
    let mut writer = Writer::new(&cluster);
    let (small, large) = (noise(1, 50_000), noise(2, 70 << 20));
    fs::create_dir_all(cluster.path("fs/run/checkpoints")).unwrap();
    symlink("run/small", cluster.path("fs/latest")).unwrap();
    writer.create("/fs/run", "small", &small);
    writer.create("/fs/run", "empty", b"");
    // Two blocks, at two workers.
    writer.create("/fs/run/checkpoints", "large", &large);
    fs::hard_link(cluster.path("fs/run/small"), cluster.path("fs/other")).unwrap();
    cluster.cv(&["persist", "wait", "/fs", "--timeout", "60s"]);
    let expected = objects(&[
        ("fs/latest", b"run/small"),
        ("fs/other", &small),
        ("fs/run/", b""),
        ("fs/run/checkpoints/", b""),
        ("fs/run/checkpoints/large", &large),
        ("fs/run/empty", b""),
        ("fs/run/small", &small),
    ]);
    assert_same(&writer.bucket(), &expected);

    let more = noise(3, 9 << 20);
    writer.replace("/fs/run/small", &more);
    fs::rename(cluster.path("fs/run"), cluster.path("fs/done")).unwrap();
    fs::remove_file(cluster.path("fs/latest")).unwrap();
    let waited = cluster.cv(&["persist", "wait", "/fs", "--json", "--timeout", "60s"]);
    let last: serde_json::Value = serde_json::from_str(waited.stdout.lines().last().unwrap()).unwrap();
    assert_eq!((&last["files"], &last["deletions"], &last["path"]), (&json!(0), &json!(0), &json!("/fs")));
    let expected = objects(&[
        ("fs/done/", b""),
        ("fs/done/checkpoints/", b""),
        ("fs/done/checkpoints/large", &large),
        ("fs/done/empty", b""),
        ("fs/done/small", &more),
        ("fs/other", &more),
    ]);
    assert_same(&writer.bucket(), &expected);
    assert!(data_bytes(&cluster) >= 79 << 20);

    fs::remove_dir_all(cluster.path("fs/done")).unwrap();
    fs::remove_file(cluster.path("fs/other")).unwrap();
    cluster.cv(&["persist", "wait", "/fs", "--timeout", "60s"]);
    assert!(writer.bucket().is_empty());
    eventually("the blocks are freed", PATIENCE, || (data_bytes(&cluster) == 0).then_some(()));
    let nowhere = cluster.try_cv(&["persist", "status", "/fs/nowhere"]);
    assert_eq!(nowhere.code, 4, "{nowhere:?}");
}

#[test]
fn large_content_that_the_bucket_has_is_not_sent_again() {
    let cluster = mounted(1);
    let mut writer = Writer::new(&cluster);
    let large = noise(1, 20 << 20);
    writer.create("/fs", "large", &large);
    let wait = || cluster.cv(&["persist", "wait", "/fs", "--timeout", "60s"]);
    wait();
    cluster.s3.reset_stats();
    fs::rename(cluster.path("fs/large"), cluster.path("fs/moved")).unwrap();
    wait();
    fs::set_permissions(cluster.path("fs/moved"), fs::Permissions::from_mode(0o600)).unwrap();
    wait();
    fs::hard_link(cluster.path("fs/moved"), cluster.path("fs/other")).unwrap();
    wait();
    let requests = |kind| cluster.s3.requests(kind);
    assert_eq!((requests("PUT"), requests("GET"), requests("COPY")), (0, 0, 3));
    assert_same(&writer.bucket(), &objects(&[("fs/moved", &large), ("fs/other", &large)]));

    // What somebody else has put there instead is not taken for it.
    fs::remove_file(cluster.path("fs/other")).unwrap();
    wait();
    cluster.s3.put("bucket", "fs/moved", noise(2, 20 << 20));
    fs::rename(cluster.path("fs/moved"), cluster.path("fs/last")).unwrap();
    wait();
    assert!(writer.bucket()["fs/last"] == large);

    // A store that copies nothing is sent what workers have.
    cluster.s3.add_fault(&json!({ "kind": "403", "operations": ["COPY"] }));
    fs::rename(cluster.path("fs/last"), cluster.path("fs/sent")).unwrap();
    wait();
    let bucket = writer.bucket();
    assert!(bucket["fs/sent"] == large && !bucket.contains_key("fs/last"));
}

#[test]
fn a_bucket_that_is_away_delays_persistence_and_nothing_else() {
    let cluster = mounted(1);
    let mut writer = Writer::new(&cluster);
    cluster.s3.add_fault(&json!({"kind": "503"}));
    let mut expected = Objects::new();
    for number in 0..40 {
        let content = noise(number, 30_000);
        writer.create("/fs", &format!("f{number:02}"), &content);
        expected.insert(format!("fs/f{number:02}"), content.into());
    }
    let status = || cluster.cv(&["persist", "status", "/fs", "--json"]).json();
    let behind = eventually("an error is reported", PATIENCE, || {
        let status = status();
        status["last_error"].as_str().is_some_and(|error| error.contains("unavailable")).then_some(status)
    });
    assert_eq!((&behind["files"], &behind["bytes"]), (&json!(40), &json!(40 * 30_000)));
    assert!(behind["oldest_seconds"].as_f64().unwrap() > 0.0);
    let late = cluster.try_cv(&["persist", "wait", "/fs", "--timeout", "1s"]);
    assert_eq!(late.code, 1, "{late:?}");
    assert!(late.stderr.contains("40 files") && late.stderr.contains("unavailable"), "{}", late.stderr);
    let umount = cluster.try_cv(&["umount", "/fs"]);
    assert_eq!(umount.code, 1, "{umount:?}");
    assert!(umount.stderr.contains("40 files") && umount.stderr.contains("--discard"), "{}", umount.stderr);
    eventually("the gauge", PATIENCE, || {
        (gauge(&cluster, "cavern_master_persist_backlog_files") == Some(40)).then_some(())
    });
    cluster.s3.clear_faults();
    cluster.cv(&["persist", "wait", "/fs", "--timeout", "60s"]);
    assert_same(&writer.bucket(), &expected);

    // One that hangs is no different.
    let s3 = cluster.status().s3.child;
    cluster.signal(&s3, Signal::STOP);
    for number in 0..10 {
        let content = noise(100 + number, 1000);
        writer.replace(&format!("/fs/f{number:02}"), &content);
        expected.insert(format!("fs/f{number:02}"), content.into());
    }
    fs::create_dir(cluster.path("fs/d")).unwrap();
    expected.insert("fs/d/".to_owned(), Bytes::new());
    assert_eq!(cluster.try_cv(&["persist", "wait", "/fs/f00", "--timeout", "1s"]).code, 1);
    cluster.signal(&s3, Signal::CONT);
    cluster.cv(&["persist", "wait", "/fs", "--timeout", "60s"]);
    assert_same(&writer.bucket(), &expected);
    let mounts = cluster.cv(&["mount", "--json"]).json();
    assert!(!mounts.to_string().contains("unavailable"), "what is over is reported no more: {mounts}");
    cluster.cv(&["umount", "/fs"]);
    assert_same(&writer.bucket(), &expected);
}

#[test]
fn what_a_kill_interrupts_is_done_in_the_end() {
    let cluster = mounted(1);
    let mut expected = Objects::new();
    // Slow enough to be caught in the middle.
    cluster.s3.add_fault(&json!({"latency_ms": 60}));
    for round in 0..4 {
        let mut writer = Writer::new(&cluster);
        let directory = format!("d{round}");
        fs::create_dir(cluster.path(format!("fs/{directory}"))).unwrap();
        expected.insert(format!("fs/r{round}/"), Bytes::new());
        for number in 0..60 {
            let content = noise(round * 1000 + number, if number == 0 { 20 << 20 } else { 10_000 });
            writer.create(&format!("/fs/{directory}"), &format!("f{number:02}"), &content);
            expected.insert(format!("fs/r{round}/f{number:02}"), content.into());
        }
        let begun = |least: usize| {
            eventually("persistence is under way", PATIENCE, || {
                let left = cluster.cv(&["persist", "status", "/fs", "--json"]).json();
                (left["files"].as_u64().unwrap() as usize <= 61 - least).then_some(())
            });
        };
        begun(5);
        fs::rename(cluster.path(format!("fs/{directory}")), cluster.path(format!("fs/r{round}"))).unwrap();
        if round > 0 {
            // Of the round before some go again.
            for number in 0..10 {
                fs::remove_file(cluster.path(format!("fs/r{}/f{number:02}", round - 1))).unwrap();
                expected.remove(&format!("fs/r{}/f{number:02}", round - 1));
            }
        }
        let child = if round % 2 == 0 { "worker0" } else { "master" };
        cluster.kill(child);
        cluster.start(child);
    }
    cluster.s3.clear_faults();
    let wait = cluster.try_cv(&["persist", "wait", "/fs", "--timeout", "90s"]);
    assert_eq!(wait.code, 0, "{wait:?}");
    assert_same(&Writer::new(&cluster).bucket(), &expected);
}
