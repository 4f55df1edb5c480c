//! `cv node drain` and `remove`: a worker leaves, and nothing is lost unless somebody says so.

use std::fs;
use std::io::Write as _;
use std::path::PathBuf;
use std::thread;
use std::time::Duration;

use cavern_tests::{Cluster, Options, eventually, within};
use serde_json::Value;

const PATIENCE: Duration = Duration::from_secs(60);

/// Lost workers are noticed within seconds; nothing is repaired by itself, and buckets get nothing.
const CONF: &str = r#"
[master]
heartbeat = "200ms"
worker_timeout = "2s"
repair_after = "1h"
persist_delay = "1h"
"#;

fn mounted(workers: usize) -> Cluster {
    let cluster = Cluster::up(Options { workers, conf: CONF.to_owned(), ..Options::default() });
    cluster.s3.create_bucket("bucket");
    cluster.mount_fs_mode("s3://bucket/fs", "/fs", &["--block-size", "1MiB", "--replicas", "1"]);
    cluster
}

/// A worker as `cv node list` shows it.
fn node(cluster: &Cluster, worker: u64) -> Option<Value> {
    let nodes = cluster.cv(&["node", "list", "--json"]).json();
    nodes.as_array().unwrap().iter().find(|node| node["id"].as_u64() == Some(worker)).cloned()
}

/// The child of the cluster that is a worker of the worker table.
fn child_of(cluster: &Cluster, worker: u64) -> usize {
    let data = node(cluster, worker).unwrap()["data"].as_str().unwrap().to_owned();
    cluster.at_start.workers.iter().position(|child| child.data == data).unwrap()
}

/// Where the blocks of a file are.
fn workers_of(cluster: &Cluster, path: &str) -> Vec<u64> {
    let shown = cluster.cv(&["fs", "blocks", path, "--json"]).json();
    shown.as_array().unwrap().iter().map(|view| view["worker"].as_u64().unwrap()).collect()
}

/// Files of two blocks, and their content.
fn write_files(cluster: &Cluster, folder: &str, count: usize) -> Vec<(PathBuf, Vec<u8>)> {
    fs::create_dir(cluster.path(folder)).unwrap();
    let file = |number: usize| (cluster.path(format!("{folder}/{number}")), vec![number as u8 + 1; (1 << 20) + number]);
    let files: Vec<_> = (0..count).map(file).collect();
    for (path, content) in &files {
        fs::write(path, content).unwrap();
    }
    files
}

#[test]
fn a_worker_is_emptied_while_files_are_written_and_leaves_for_good() {
    let cluster = mounted(3);
    let files = write_files(&cluster, "fs/before", 12);
    let leaves = workers_of(&cluster, "/fs/before/0")[0];
    let number = leaves.to_string();
    let child = child_of(&cluster, leaves);
    let name = format!("worker{child}");

    let early = cluster.try_cv(&["node", "remove", &number]);
    assert!(early.code == 1 && early.stderr.contains(&format!("cv node drain {number}")), "{early:?}");
    assert_eq!(cluster.try_cv(&["node", "drain", "77"]).code, 4);

    // Somebody goes on writing to a file all the time.
    let log = cluster.path("fs/log");
    let lines = thread::scope(|scope| {
        let writer = scope.spawn(|| {
            let mut file = fs::File::create(&log).unwrap();
            let mut lines = 0;
            while !fs::exists(cluster.path("fs/enough")).unwrap() {
                writeln!(file, "{lines:0100}").unwrap();
                if lines % 100 == 0 {
                    file.sync_data().unwrap();
                }
                lines += 1;
            }
            lines
        });
        let drained = cluster.try_cv(&["node", "drain", &number, "--watch", "--json"]);
        fs::write(cluster.path("fs/enough"), "").unwrap();
        let lines = writer.join().unwrap();
        assert_eq!(drained.code, 0, "{drained:?}");
        let last: Value = serde_json::from_str(drained.stdout.lines().last().unwrap()).unwrap();
        assert_eq!((last["blocks"].as_u64(), last["draining"].as_bool()), (Some(0), Some(true)), "{last}");
        lines
    });
    assert_eq!(fs::read_to_string(&log).unwrap().lines().count(), lines);
    assert_eq!(node(&cluster, leaves).unwrap()["draining"], true);
    let table = cluster.cv(&["node", "list"]).stdout;
    assert!(table.contains("live, draining"), "{table}");
    // It takes nothing new, over a restart of everybody.
    for process in ["master0", &name] {
        cluster.stop(process);
        cluster.start(process);
    }
    let more = write_files(&cluster, "fs/after", 12);
    for folder in ["before", "after"] {
        for file in 0..12 {
            let workers = workers_of(&cluster, &format!("/fs/{folder}/{file}"));
            assert!(!workers.contains(&leaves), "{folder}/{file}: {workers:?}");
        }
    }

    let removed = cluster.cv(&["node", "remove", &number]).stdout;
    assert!(removed.contains("nothing was at it alone"), "{removed}");
    assert!(node(&cluster, leaves).is_none());
    // It gets that as an error, ends, and is not taken in again.
    let log_of = |name: &str| fs::read_to_string(cluster.directory().join(format!("log/{name}.log"))).unwrap();
    eventually("the worker has ended", PATIENCE, || (cluster.status().workers[child].state == "crashed").then_some(()));
    assert!(log_of(&name).contains("was removed with `cv node remove`"), "{}", log_of(&name));
    for (path, content) in files.iter().chain(&more) {
        assert!(fs::read(path).unwrap() == *content, "{}", path.display());
    }
    // With empty directories it is a new one.
    let dirs = cluster.status().workers[child].dirs.clone();
    for dir in &dirs {
        fs::rename(dir, dir.with_extension("removed")).unwrap();
    }
    cluster.start(&name);
    let data = cluster.at_start.workers[child].data.as_str();
    // It is ready a moment before the master knows it.
    let id = eventually("the master knows it", PATIENCE, || {
        let nodes = cluster.cv(&["node", "list", "--json"]).json();
        let again = nodes.as_array().unwrap().iter().find(|node| node["data"] == data);
        again.map(|node| node["id"].as_u64().unwrap())
    });
    assert!(id > 3, "{id}");
}

#[test]
fn what_is_at_one_worker_alone_keeps_it_from_being_removed() {
    let cluster = mounted(2);
    let files = write_files(&cluster, "fs/files", 8);
    let leaves = workers_of(&cluster, "/fs/files/0")[0];
    let number = leaves.to_string();
    let child = format!("worker{}", child_of(&cluster, leaves));
    // A drain that is taken back: the worker takes blocks again.
    cluster.cv(&["node", "drain", &number]);
    assert!(cluster.cv(&["node", "drain", &number, "--undo"]).stdout.contains("takes blocks"));
    assert_eq!(node(&cluster, leaves).unwrap()["draining"], false);
    write_files(&cluster, "fs/again", 8);
    assert!((0..8).any(|file| workers_of(&cluster, &format!("/fs/again/{file}")).contains(&leaves)));
    // Of two, one stays.
    let other = if leaves == 1 { "2" } else { "1" };
    cluster.cv(&["node", "drain", other]);
    let last = cluster.try_cv(&["node", "drain", &number]);
    assert!(last.code == 1 && last.stderr.contains("no other live worker"), "{last:?}");
    cluster.cv(&["node", "drain", other, "--undo"]);

    cluster.stop(&child);
    eventually("the worker is lost", PATIENCE, || (node(&cluster, leaves)?["state"] == "lost").then_some(()));
    let hit = |file: &usize| workers_of(&cluster, &format!("/fs/files/{file}")).contains(&leaves);
    let hit: Vec<usize> = (0..8).filter(hit).collect();
    assert!(!hit.is_empty());
    let refused = cluster.try_cv(&["node", "remove", &number]);
    assert!(refused.code == 1 && refused.stderr.contains("--force"), "{refused:?}");
    assert!(refused.stderr.contains(&format!("/fs/files/{}", hit[0])), "{refused:?}");

    // It was only away: with it there is everything.
    cluster.start(&child);
    eventually("the worker is back", PATIENCE, || (node(&cluster, leaves)?["state"] == "live").then_some(()));
    for (path, content) in &files {
        assert!(fs::read(path).unwrap() == *content, "{}", path.display());
    }
    cluster.stop(&child);
    eventually("the worker is lost", PATIENCE, || (node(&cluster, leaves)?["state"] == "lost").then_some(()));
    let forced = cluster.cv(&["node", "remove", &number, "--force", "--json"]).json();
    assert!(forced["removed"] == true && forced["files"].as_u64().unwrap() >= hit.len() as u64, "{forced}");
    // The kernel has pages of what was read before.
    cluster.stop("fuse0");
    cluster.start("fuse0");
    // What is lost is said to be, and the rest is there.
    let answers = within("answers", PATIENCE, {
        let paths: Vec<PathBuf> = files.iter().map(|(path, _)| path.clone()).collect();
        move || paths.iter().map(|path| fs::read(path).ok()).collect::<Vec<_>>()
    });
    for (file, (answer, (_, content))) in answers.iter().zip(&files).enumerate() {
        assert_eq!(answer.as_ref() == Some(content), !hit.contains(&file), "{file}");
    }
}
