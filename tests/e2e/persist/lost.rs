//! Blocks that a host has lost with its power: the files are told of, and given up by name.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use cavern_tests::{Cluster, Options, eventually, within};
use rustix::io::Errno;
use serde_json::json;

use super::{PATIENCE, mounted, noise};

/// The files that are the blocks of a file, at their workers.
fn blocks(cluster: &Cluster, path: &str) -> Vec<PathBuf> {
    let shown = cluster.cv(&["fs", "blocks", path, "--json"]).json();
    let blocks: Vec<PathBuf> =
        shown.as_array().unwrap().iter().map(|view| view["path"].as_str().unwrap().into()).collect();
    assert!(!blocks.is_empty() && blocks.iter().all(|path| path.exists()), "{shown}");
    blocks
}

/// The worker that has a block.
fn child_of(cluster: &Cluster, block: &Path) -> String {
    let has = |child: &cavern_tests::Child| child.dirs.iter().any(|directory| block.starts_with(directory));
    let position = cluster.at_start.workers.iter().position(has).unwrap();
    format!("worker{position}")
}

#[test]
fn files_with_lost_blocks_end_the_wait_are_listed_and_given_up_by_name() {
    let cluster = mounted(1);
    let path = |name: &str| cluster.path("fs").join(name);
    let (first, second) = (noise(1, 300_000), noise(2, 200_000));
    fs::write(path("old"), &first).unwrap();
    cluster.cv(&["persist", "wait", "/fs", "--timeout", "60s"]);
    cluster.s3.add_fault(&json!({"kind": "503"}));
    for name in ["old", "new", "whole"] {
        fs::write(path(name), &second).unwrap();
    }
    let lost: Vec<PathBuf> = ["/fs/old", "/fs/new"].iter().flat_map(|path| blocks(&cluster, path)).collect();
    cluster.stop("fuse0");
    cluster.kill("worker0");
    lost.iter().for_each(|block| fs::remove_file(block).unwrap());
    cluster.start("worker0");
    cluster.start("fuse0");
    cluster.s3.clear_faults();

    let waited = cluster.try_cv(&["persist", "wait", "/fs", "--timeout", "60s"]);
    assert_eq!(waited.code, 1, "{waited:?}");
    for word in ["2 files have lost blocks", "/fs/old", "/fs/new", "cv persist drop"] {
        assert!(waited.stderr.contains(word), "{word}: {}", waited.stderr);
    }
    let report = cluster.cv(&["report", "--json"]).json();
    let mut paths: Vec<&str> =
        report["lost"]["paths"].as_array().unwrap().iter().flat_map(|path| path.as_str()).collect();
    paths.sort_unstable();
    assert_eq!((&report["lost"]["files"], paths), (&json!(2), vec!["/fs/new", "/fs/old"]));
    assert_eq!(report["unavailable"]["files"], 0);
    let report = cluster.cv(&["report"]).stdout;
    assert!(report.contains("none of their workers has") && report.contains("/fs/new"), "{report}");
    for name in ["old", "new"] {
        let path = path(name);
        let read = within("an answer", Duration::from_secs(10), move || fs::read(path));
        assert_eq!(Errno::from_io_error(&read.unwrap_err()), Some(Errno::IO), "{name}");
    }
    assert!(fs::read(path("whole")).unwrap() == second);
    let tried = cluster.try_cv(&["persist", "retry", "/fs/new"]);
    assert_eq!(tried.code, 1, "{tried:?}");
    assert!(tried.stderr.contains("1 file still with lost blocks"), "{}", tried.stderr);
    let refused = cluster.try_cv(&["persist", "drop", "/fs/whole"]);
    assert_eq!(refused.code, 1, "{refused:?}");
    assert!(refused.stderr.contains("/fs/whole"), "{}", refused.stderr);

    let dropped = cluster.cv(&["persist", "drop", "/fs/new", "--json"]).json();
    assert_eq!((&dropped["zeroed"], &dropped["reverted"], &dropped["blocks"]), (&json!(1), &json!(0), &json!(1)));
    let dropped = cluster.cv(&["persist", "drop", "/fs/old", "--json"]).json();
    assert_eq!((&dropped["zeroed"], &dropped["reverted"], &dropped["blocks"]), (&json!(0), &json!(1), &json!(1)));
    cluster.cv(&["persist", "wait", "/fs", "--timeout", "60s"]);
    assert_eq!(cluster.cv(&["report", "--json"]).json()["lost"]["files"], 0);
    let zeros = vec![0; second.len()];
    for (name, content) in [("old", &first), ("new", &zeros), ("whole", &second)] {
        eventually(&format!("{name} is read"), PATIENCE, || (fs::read(path(name)).ok()? == *content).then_some(()));
        assert!(cluster.s3.get("bucket", &format!("fs/{name}")) == *content, "{name} in the bucket");
    }
    // They are files like all others.
    fs::write(path("new"), &first).unwrap();
    cluster.cv(&["persist", "wait", "/fs", "--timeout", "60s"]);
    assert!(fs::read(path("new")).unwrap() == first);
}

#[test]
fn what_one_of_two_workers_has_lost_is_written_from_the_other() {
    let conf = "[master]\npersist_delay = \"100ms\"\n".to_owned();
    let cluster = Cluster::up(Options { workers: 3, conf, ..Options::default() });
    cluster.s3.create_bucket("bucket");
    cluster.mount_fs_mode("s3://bucket/fs", "/fs", &["--replicas", "2", "--block-size", "1MiB"]);
    cluster.s3.add_fault(&json!({"kind": "503"}));
    let content = noise(1, 16 << 20);
    fs::write(cluster.path("fs/file"), &content).unwrap();
    // The first of the two that have each block: whoever has neither asks that one first.
    let shown = cluster.cv(&["fs", "blocks", "/fs/file", "--json"]).json();
    let mut first = BTreeMap::new();
    for view in shown.as_array().unwrap() {
        first.entry(view["index"].as_u64().unwrap()).or_insert_with(|| PathBuf::from(view["path"].as_str().unwrap()));
    }
    assert_eq!(first.len(), 16, "{shown}");
    let workers = ["worker0", "worker1", "worker2"];
    cluster.stop("fuse0");
    workers.iter().for_each(|worker| cluster.kill(worker));
    first.values().for_each(|block| fs::remove_file(block).unwrap());
    workers.iter().for_each(|worker| cluster.start(worker));
    cluster.start("fuse0");
    cluster.s3.clear_faults();
    cluster.cv(&["persist", "wait", "/fs", "--timeout", "60s"]);
    assert!(cluster.s3.get("bucket", "fs/file") == content);
}

#[test]
fn a_file_whose_worker_is_away_has_lost_nothing() {
    let conf = "[master]\npersist_delay = \"100ms\"\nheartbeat = \"200ms\"\nworker_timeout = \"2s\"\n".to_owned();
    let cluster = Cluster::up(Options { workers: 2, conf, ..Options::default() });
    cluster.s3.create_bucket("bucket");
    cluster.mount_fs_mode("s3://bucket/fs", "/fs", &["--replicas", "1"]);
    cluster.s3.add_fault(&json!({"kind": "503"}));
    let content = noise(1, 200_000);
    fs::write(cluster.path("fs/file"), &content).unwrap();
    let worker = child_of(&cluster, &blocks(&cluster, "/fs/file")[0]);
    cluster.kill(&worker);
    cluster.s3.clear_faults();
    eventually("the worker is known to be lost", PATIENCE, || {
        let report = cluster.cv(&["report", "--json"]).json();
        (report["unavailable"]["files"] == 1).then_some(())
    });
    // It is tried without the worker.
    eventually("it could not be written", PATIENCE, || {
        let status = cluster.cv(&["persist", "status", "/fs/file", "--json"]).json();
        (status["last_error"] != "" && !status["last_error"].as_str()?.contains("unavailable")).then_some(())
    });
    let waited = cluster.try_cv(&["persist", "wait", "/fs", "--timeout", "2s"]);
    assert_eq!(waited.code, 1, "{waited:?}");
    assert!(waited.stderr.contains("the time is over") && !waited.stderr.contains("lost blocks"), "{}", waited.stderr);
    assert_eq!(cluster.cv(&["report", "--json"]).json()["lost"]["files"], 0);
    assert_eq!(cluster.try_cv(&["persist", "drop", "/fs"]).code, 1);
    cluster.start(&worker);
    cluster.cv(&["persist", "wait", "/fs", "--timeout", "60s"]);
    assert!(fs::read(cluster.path("fs/file")).unwrap() == content);
    assert!(cluster.s3.get("bucket", "fs/file") == content);
}
