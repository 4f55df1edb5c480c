//! `cv fsck`: what somebody has done to disks and to a bucket is found, and mended where something else has what is
//! gone; what waits in vain, and what is not there, is told of; and of what is under way, nothing is.

use std::collections::BTreeSet;
use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use cavern_tests::{Cluster, Finished, Options, eventually};
use serde_json::{Value, json};

const PATIENCE: Duration = Duration::from_secs(60);
const MIB: u64 = 1 << 20;

/// What is under way ends within seconds, and only then is what was found looked at once more. Workers that are away
/// for a moment are not replaced.
const CONF: &str = r#"
[master]
heartbeat = "200ms"
worker_timeout = "2s"
session_lease = "2s"
persist_delay = "100ms"
repair_after = "1h"
"#;

/// Two workers, both of which have each block of `/fs`.
fn mounted(options: Options) -> Cluster {
    let cluster = Cluster::up(Options { workers: 2, ..options });
    cluster.s3.create_bucket("bucket");
    cluster.s3.put("bucket", "fs/existing", noise(9, 300_000));
    cluster.mount_fs_mode("s3://bucket/fs", "/fs", &["--block-size", "1MiB", "--replicas", "2"]);
    cluster
}

fn noise(seed: u64, length: u64) -> Vec<u8> {
    (0..length).map(|at| ((at + seed).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 37) as u8).collect()
}

/// What a run has found, with its exit code and what it said.
fn fsck(cluster: &Cluster, arguments: &[&str]) -> (Vec<Value>, Finished) {
    let done = cluster.try_cv(&[&["fsck", "--json"][..], arguments].concat());
    let found = done.stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    (found, done)
}

/// Kinds and paths, without the numbers of workers.
fn kinds<'a>(found: impl IntoIterator<Item = &'a Value>) -> BTreeSet<(&'a str, &'a str)> {
    let path = |finding: &'a Value| match finding["path"].as_str().unwrap() {
        path if path.starts_with("worker ") => "worker",
        path => path,
    };
    found.into_iter().map(|finding| (finding["kind"].as_str().unwrap(), path(finding))).collect()
}

fn expected<'a>(parts: &[&[(&'a str, &'a str)]]) -> BTreeSet<(&'a str, &'a str)> {
    parts.concat().into_iter().collect()
}

fn is_repaired(finding: &&Value) -> bool {
    finding["repaired"] != ""
}

/// The file of the only block of a file at a worker of this host.
fn block_of(cluster: &Cluster, path: &str, worker: usize) -> PathBuf {
    let directory = &cluster.at_start.workers[worker].dirs[0];
    eventually(&format!("worker {worker} has {path}"), PATIENCE, || {
        let shown = cluster.cv(&["fs", "blocks", path, "--json"]).json();
        let mut files = shown.as_array().unwrap().iter().map(|view| PathBuf::from(view["path"].as_str().unwrap()));
        files.find(|file| file.starts_with(directory))
    })
}

/// Whether a worker is recorded to have the only block of a file, and has it.
fn has_block(cluster: &Cluster, path: &str, worker: usize) -> bool {
    let directory = &cluster.at_start.workers[worker].dirs[0];
    let shown = cluster.cv(&["fs", "blocks", path, "--json"]).json();
    let mut files = shown.as_array().unwrap().iter().map(|view| PathBuf::from(view["path"].as_str().unwrap()));
    files.any(|file| file.starts_with(directory) && file.exists())
}

/// The files of blocks that workers have of objects.
fn cached(cluster: &Cluster) -> Vec<PathBuf> {
    let folders =
        cluster.at_start.workers.iter().flat_map(|worker| fs::read_dir(worker.dirs[0].join("blocks")).unwrap());
    let files = folders.flat_map(|folder| fs::read_dir(folder.unwrap().path()).unwrap());
    files.map(|file| file.unwrap().path()).collect()
}

/// Flips a bit of a file.
fn damage(path: &Path) {
    let file = OpenOptions::new().read(true).write(true).open(path).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, 5).unwrap();
    file.write_all_at(&[byte[0] ^ 1], 5).unwrap();
}

#[test]
fn faults_of_disks_and_of_the_bucket_are_found_and_mended_where_something_else_has_it() {
    let cluster = mounted(Options { conf: CONF.to_owned(), ..Options::default() });
    let path = |name: &str| cluster.path("fs").join(name);
    let content = |name: &str| noise(name.len() as u64, 300_000);
    let names = ["one", "both", "long", "rotten", "unwritten", "other", "kept"];
    for name in names {
        fs::write(path(name), content(name)).unwrap();
        File::open(path(name)).unwrap().sync_all().unwrap();
    }
    assert!(fs::read(path("existing")).unwrap() == noise(9, 300_000));
    cluster.cv(&["persist", "wait", "/fs", "--timeout", "60s"]);
    let block = |name: &str, worker: usize| block_of(&cluster, &format!("/fs/{name}"), worker);
    // A block that is no file's, which a worker finds when it starts. By itself it frees that after an hour.
    let kept = block("kept", 1);
    cluster.stop("worker1");
    let name = kept.file_name().unwrap().to_str().unwrap();
    let digit = if &name[31..32] == "0" { "1" } else { "0" };
    let stray = kept.with_file_name(format!("{}{digit}{}", &name[..31], &name[32..]));
    fs::copy(&kept, &stray).unwrap();
    cluster.start("worker1");
    eventually("both workers are there", PATIENCE, || {
        let nodes = cluster.cv(&["node", "list", "--json"]).json();
        nodes.as_array().unwrap().iter().all(|node| node["state"] == "live").then_some(())
    });
    let at_rest = || stray.metadata().unwrap().modified().unwrap().elapsed().unwrap() > Duration::from_secs(3);
    eventually("nobody has written to it", PATIENCE, || at_rest().then_some(()));
    let arguments = ["--deep", "--orphan-block-grace", "1s"];

    let long = block("long", 0);
    fs::remove_file(block("one", 0)).unwrap();
    for worker in 0..2 {
        fs::remove_file(block("both", worker)).unwrap();
    }
    OpenOptions::new().write(true).open(&long).unwrap().set_len(2 * MIB).unwrap();
    damage(&block("rotten", 1));
    cached(&cluster).iter().for_each(|path| damage(path));
    cluster.s3.delete("bucket", "fs/unwritten");
    cluster.s3.put("bucket", "fs/other", "other");
    cluster.s3.put("bucket", "fs/strange", "strange");
    let not_mended = [
        ("wrong_length", "/fs/long"),
        ("stray_block", "worker"),
        ("changed_object", "/fs/other"),
        ("unknown_object", "object \"fs/strange\""),
    ];
    let mended = [
        ("missing_block", "/fs/one"),
        ("missing_block", "/fs/both"),
        ("damaged_block", "/fs/rotten"),
        ("missing_object", "/fs/unwritten"),
    ];
    // A worker drops what is damaged of an object when it finds it.
    let dropped = [("damaged_block", "worker")];
    let (found, done) = fsck(&cluster, &arguments);
    assert_eq!((kinds(&found), done.code), (expected(&[&not_mended, &mended, &dropped]), 1), "{}", done.stderr);
    assert_eq!(kinds(found.iter().filter(is_repaired)), expected(&[&dropped]), "nobody asked for more");
    assert!(!has_block(&cluster, "/fs/one", 0), "nothing was mended");

    let (found, done) = fsck(&cluster, &[&arguments[..], &["--repair"]].concat());
    assert_eq!((kinds(&found), done.code), (expected(&[&not_mended, &mended]), 1), "{}", done.stderr);
    assert_eq!(kinds(found.iter().filter(is_repaired)), expected(&[&mended]));
    cluster.cv(&["persist", "wait", "/fs", "--timeout", "60s"]);
    assert!(cluster.s3.get("bucket", "fs/unwritten") == content("unwritten"));
    assert_eq!(cluster.s3.get("bucket", "fs/other"), "other", "it may be what somebody wants");
    for path in ["/fs/one", "/fs/rotten"] {
        let has_both = || (0..2).all(|worker| has_block(&cluster, path, worker));
        eventually("both workers have it again", PATIENCE, || has_both().then_some(()));
    }
    // Nobody reads what he has of before.
    cluster.stop("fuse0");
    cluster.start("fuse0");
    for name in names {
        assert!(fs::read(path(name)).unwrap() == content(name), "{name}");
    }
    assert!(fs::read(path("existing")).unwrap() == noise(9, 300_000));
    // What is left, a person mends.
    OpenOptions::new().write(true).open(&long).unwrap().set_len(300_000).unwrap();
    cluster.s3.delete("bucket", "fs/strange");
    let (found, done) = fsck(&cluster, &[&arguments[..2], &["1h"]].concat());
    assert_eq!((kinds(&found), done.code), (expected(&[&[("changed_object", "/fs/other")]]), 1), "{}", done.stderr);
    let (found, done) = fsck(&cluster, &["/fs/one", "--deep"]);
    assert_eq!((found.len(), done.code), (0, 0), "{}", done.stderr);
    assert!(done.stderr.contains("nothing found"), "{}", done.stderr);
}

#[test]
fn what_is_tried_in_vain_is_told_with_the_reason_and_what_is_not_looked_at_by_the_exit_code() {
    let cluster = mounted(Options { conf: CONF.to_owned(), ..Options::default() });
    let path = |name: &str| cluster.path("fs").join(name);
    for name in ["kept", "deleted"] {
        fs::write(path(name), name).unwrap();
    }
    cluster.cv(&["persist", "wait", "/fs", "--timeout", "60s"]);
    cluster.s3.add_fault(&json!({"kind": "403", "operations": ["PUT"], "key_prefix": "fs/denied"}));
    cluster.s3.add_fault(&json!({"kind": "403", "operations": ["DELETE"], "key_prefix": "fs/deleted"}));
    fs::write(path("denied"), "denied").unwrap();
    fs::remove_file(path("deleted")).unwrap();
    let stuck = [("stuck_intent", "/fs/denied"), ("stuck_deletion", "object \"fs/deleted\"")];
    eventually("they have been tried for long enough", PATIENCE, || {
        let (found, done) = fsck(&cluster, &[]);
        assert!(found.iter().all(|finding| finding["cause"] != ""), "{found:?}");
        (kinds(&found) == expected(&[&stuck]) && done.code == 1).then_some(())
    });
    cluster.s3.clear_faults();
    cluster.cv(&["persist", "wait", "/fs", "--timeout", "60s"]);

    let nowhere = cluster.try_cv(&["fsck", "/nowhere"]);
    assert!(nowhere.code == 4 && nowhere.stderr.contains("/nowhere"), "{nowhere:?}");
    cluster.kill("worker1");
    eventually("the worker is lost", PATIENCE, || {
        let nodes = cluster.cv(&["node", "list", "--json"]).json();
        nodes.as_array().unwrap().iter().any(|node| node["state"] == "lost").then_some(())
    });
    let not_looked_at = "is not there: what it has is not looked at";
    let (found, done) = fsck(&cluster, &[]);
    let lacking = [("too_few_replicas", "/fs/kept"), ("too_few_replicas", "/fs/denied")];
    assert_eq!((kinds(&found), done.code), (expected(&[&lacking]), 1), "{}", done.stderr);
    assert!(done.stderr.contains(not_looked_at), "{}", done.stderr);
    let (found, done) = fsck(&cluster, &["/fs/existing"]);
    assert_eq!((found.len(), done.code), (0, 2), "{}", done.stderr);
    assert!(done.stderr.contains(not_looked_at), "{}", done.stderr);
}

/// However it ends, whoever waits for that ends, too.
struct Done<'a>(&'a AtomicBool);

impl Drop for Done<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

#[test]
fn nothing_is_found_while_files_are_written_moved_deleted_and_brought_to_the_bucket() {
    let conf = "[master]\npersist_delay = \"100ms\"\n".to_owned();
    let cluster = mounted(Options { masters: 3, secure: true, conf, ..Options::default() });
    let (is_done, rounds) = (AtomicBool::new(false), AtomicU64::new(0));
    thread::scope(|scope| {
        for writer in 0..4_u64 {
            let (top, is_done, rounds) = (cluster.path(format!("fs/{writer}")), &is_done, &rounds);
            scope.spawn(move || {
                for round in 0.. {
                    if is_done.load(Ordering::Acquire) {
                        break;
                    }
                    write_round(&top, writer, round);
                    rounds.fetch_add(1, Ordering::AcqRel);
                }
            });
        }
        let _done = Done(&is_done);
        for (number, arguments) in [&["--deep"][..], &[]].into_iter().cycle().enumerate() {
            if number > 1 && rounds.load(Ordering::Acquire) > 20 {
                break;
            }
            let (found, done) = fsck(&cluster, arguments);
            assert_eq!((found, done.code), (Vec::<Value>::new(), 0), "{}", done.stderr);
        }
    });
    cluster.cv(&["persist", "wait", "/fs", "--timeout", "60s"]);
    let (found, done) = fsck(&cluster, &["--deep"]);
    assert_eq!((found, done.code), (Vec::<Value>::new(), 0), "{}", done.stderr);
}

/// Makes a directory with files, changes some, moves some, and deletes what the round before the last one has left.
fn write_round(top: &Path, writer: u64, round: u64) {
    let directory = top.join(format!("{round}"));
    fs::create_dir_all(&directory).unwrap();
    for file in 0..6 {
        let length = if file == 0 { 3 * MIB } else { 5000 * (file + 1) };
        fs::write(directory.join(format!("f{file}")), noise(writer + round + file, length)).unwrap();
    }
    fs::rename(directory.join("f1"), directory.join("f2")).unwrap();
    let changed = OpenOptions::new().write(true).open(directory.join("f0")).unwrap();
    changed.write_all_at(b"changed", MIB - 3).unwrap();
    changed.set_len(MIB + MIB / 2).unwrap();
    changed.sync_data().unwrap();
    fs::hard_link(directory.join("f3"), directory.join("link")).unwrap();
    fs::remove_file(directory.join("f4")).unwrap();
    fs::rename(&directory, top.join(format!("moved-{round}"))).unwrap();
    if let Some(before) = round.checked_sub(2) {
        fs::remove_dir_all(top.join(format!("moved-{before}"))).unwrap();
    }
}
