//! Quotas of directories in fs-mode mounts: nothing grows beyond them, what is acknowledged stays, and the figures are
//! exact whatever is killed.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::FileExt as _;
use std::time::Duration;

use cavern_tests::{Cluster, Options, eventually};
use rustix::io::Errno;
use serde_json::{Value, json};

const FAILED: i32 = 1;
const USAGE: i32 = 2;
const NOT_FOUND: i32 = 4;
/// For figures to be counted.
const PATIENCE: Duration = Duration::from_secs(60);

fn mounted(options: &[&str]) -> Cluster {
    let cluster = Cluster::up(Options::default());
    cluster.s3.create_bucket("bucket");
    cluster.mount_fs_mode("s3://bucket/fs", "/fs", options);
    cluster
}

#[track_caller]
fn errno<T: std::fmt::Debug>(result: io::Result<T>) -> Errno {
    Errno::from_io_error(&result.unwrap_err()).unwrap()
}

/// Bytes and inodes that are counted for a directory which has a quota.
fn used(cluster: &Cluster, path: &str) -> (u64, u64) {
    let quotas = cluster.cv(&["fs", "quota", "get", path, "--json"]).json();
    let own = quotas.as_array().unwrap().iter().find(|quota| quota["path"] == path).unwrap().clone();
    (own["bytes"].as_u64().unwrap(), own["inodes"].as_u64().unwrap())
}

#[test]
fn nothing_grows_beyond_a_quota_and_what_was_acknowledged_stays() {
    let cluster = mounted(&[]);
    let at = |path: &str| cluster.path("fs/d").join(path);
    fs::create_dir(at("")).unwrap();
    fs::write(at("before"), vec![1; 1000]).unwrap();
    cluster.cv(&["fs", "quota", "set", "/fs/d", "--bytes", "1MiB", "--inodes", "4"]);
    assert_eq!(used(&cluster, "/fs/d"), (1000, 1), "what was there has been counted");

    // Inodes: whatever makes one.
    fs::create_dir(at("below")).unwrap();
    fs::write(at("below/file"), "").unwrap();
    fs::hard_link(at("before"), at("again")).unwrap();
    std::os::unix::fs::symlink("before", at("link")).unwrap();
    assert_eq!(errno(fs::create_dir(at("below/more"))), Errno::DQUOT);
    assert_eq!(errno(File::create(at("more"))), Errno::DQUOT);
    assert_eq!(errno(std::os::unix::fs::symlink("a", at("more"))), Errno::DQUOT);
    fs::write(cluster.path("fs/outside"), "outside").unwrap();
    assert_eq!(errno(fs::rename(cluster.path("fs/outside"), at("more"))), Errno::DQUOT);
    fs::rename(cluster.path("fs/outside"), at("below/file")).unwrap();
    fs::remove_file(at("link")).unwrap();
    fs::write(at("file"), vec![2; 500_000]).unwrap();
    assert_eq!(used(&cluster, "/fs/d"), (1000 + 7 + 500_000, 4));

    // Bytes: of a length that is set, and of what is written.
    assert_eq!(errno(OpenOptions::new().write(true).open(at("file")).unwrap().set_len(2 << 20)), Errno::DQUOT);
    let mut file = OpenOptions::new().append(true).open(at("file")).unwrap();
    file.write_all(&vec![3; 400_000]).unwrap();
    file.sync_all().unwrap();
    file.write_all(&vec![4; 400_000]).unwrap();
    assert_eq!(errno(file.sync_all()), Errno::DQUOT);
    // What is written over bytes that are there needs no room.
    let other = OpenOptions::new().write(true).open(at("before")).unwrap();
    other.write_all_at(b"over", 0).unwrap();
    other.sync_all().unwrap();
    // With room it can be synced, and is all there.
    cluster.cv(&["fs", "quota", "set", "/fs/d", "--bytes", "2MiB"]);
    file.sync_all().unwrap();
    drop(file);
    let content =
        cluster.cv(&["fs", "get", "/fs/d/file", cluster.directory().join("copy").to_str().unwrap(), "--json"]);
    assert_eq!(content.json()["bytes"], 1_300_000);
    let content = fs::read(cluster.directory().join("copy")).unwrap();
    let pieces = [&[2; 500_000][..], &[3; 400_000], &[4; 400_000]].concat();
    assert!(content == pieces, "the bytes that were acknowledged");

    // `df` in the directory shows the quota; elsewhere the workers.
    let shown = rustix::fs::statvfs(at("below")).unwrap();
    assert_eq!((shown.f_files, shown.f_ffree), (4, 0));
    let (bytes, _) = used(&cluster, "/fs/d");
    assert!(
        shown.f_bavail * shown.f_frsize <= (2 << 20) - bytes && shown.f_blocks * shown.f_frsize <= (2 << 20) + 8192
    );
    let outside = rustix::fs::statvfs(cluster.path("fs")).unwrap();
    assert!(outside.f_blocks * outside.f_frsize > 2 << 20 && outside.f_files == 0);
}

#[test]
fn who_writes_much_hears_of_it_from_a_write() {
    let cluster = mounted(&["--block-size", "1MiB"]);
    let top = cluster.path("fs/d");
    fs::create_dir(&top).unwrap();
    cluster.cv(&["fs", "quota", "set", "/fs/d", "--bytes", "8MiB"]);
    let mut file = File::create(top.join("stream")).unwrap();
    let mut written = 0_u64;
    let refused = loop {
        match file.write_all(&vec![5; 256 << 10]) {
            Ok(()) => written += 256 << 10,
            Err(error) => break error,
        }
        assert!(written < 32 << 20, "nobody says that there is no room");
    };
    assert_eq!(Errno::from_io_error(&refused), Some(Errno::DQUOT));
    assert!((7 << 20..=11 << 20).contains(&written), "{written} bytes");
    let (length, _) = used(&cluster, "/fs/d");
    assert!((6 << 20..=8 << 20).contains(&length), "{length} bytes are there");
    assert_eq!(errno(file.sync_all()), Errno::DQUOT);
    // There is a way out: less.
    file.set_len(7 << 20).unwrap();
    file.sync_all().unwrap();
    assert_eq!(used(&cluster, "/fs/d"), (7 << 20, 1));
    assert!(fs::read(top.join("stream")).unwrap().iter().all(|byte| *byte == 5), "every byte is as it was written");
    file.set_len(10).unwrap();
    drop(file);
    assert_eq!(used(&cluster, "/fs/d"), (10, 1));
    fs::write(top.join("other"), vec![6; 4 << 20]).unwrap();
}

/// A directory as `quota list` reports it.
fn row(path: &str, bytes: u64, inodes: u64, max_inodes: u64) -> Value {
    json!({"path": path, "bytes": bytes, "max_bytes": null, "inodes": inodes, "max_inodes": max_inodes})
}

#[test]
fn figures_follow_renames_and_survive_a_killed_master() {
    let cluster = mounted(&[]);
    let top = cluster.path("fs");
    for user in ["a", "b"] {
        fs::create_dir_all(top.join(user).join("run/deep")).unwrap();
        for number in 0..20 {
            fs::write(top.join(user).join(format!("run/deep/{number}")), vec![7; 1000]).unwrap();
        }
    }
    for (path, inodes) in [("/fs", "100"), ("/fs/a", "60"), ("/fs/b", "30")] {
        cluster.cv(&["fs", "quota", "set", path, "--inodes", inodes]);
    }
    let figures = || ["/fs", "/fs/a", "/fs/b"].map(|path| used(&cluster, path));
    assert_eq!(figures(), [(40_000, 46), (20_000, 22), (20_000, 22)]);
    assert_eq!(errno(fs::rename(top.join("a/run"), top.join("b/run2"))), Errno::DQUOT, "b has room for 8");
    fs::rename(top.join("b/run"), top.join("a/run2")).unwrap();
    assert_eq!(figures(), [(40_000, 46), (40_000, 44), (0, 0)]);
    cluster.kill("master");
    cluster.start("master");
    assert_eq!(figures(), [(40_000, 46), (40_000, 44), (0, 0)]);
    for number in 0..16 {
        fs::write(top.join(format!("a/{number}")), "").unwrap();
    }
    assert_eq!(errno(File::create(top.join("a/16"))), Errno::DQUOT);
    let removed = cluster.cv(&["fs", "rm", "-r", "--json", "/fs/a/run2"]).json();
    assert_eq!(removed, json!({"removed": 22}));
    assert_eq!(figures(), [(20_000, 40), (20_000, 38), (0, 0)]);
    let all = cluster.cv(&["fs", "quota", "list", "--json"]).json();
    let mut rows: Vec<Value> = all.as_array().unwrap().clone();
    rows.sort_by_key(|row| row["path"].to_string());
    assert_eq!(rows, [row("/fs", 20_000, 40, 100), row("/fs/a", 20_000, 38, 60), row("/fs/b", 0, 0, 30)]);
}

#[test]
fn quotas_are_shown_changed_and_taken_away() {
    let cluster = mounted(&[]);
    let quota = |arguments: &[&str]| cluster.try_cv(&[&["fs", "quota"], arguments].concat());
    assert_eq!(quota(&["list"]).stdout, "no directory has a quota\n");
    fs::create_dir_all(cluster.path("fs/d/below")).unwrap();
    fs::write(cluster.path("fs/d/below/file"), vec![0; 512 << 10]).unwrap();
    assert_eq!(quota(&["get", "/fs/d"]).stdout, "no quota holds for /fs/d\n");
    cluster.cv(&["fs", "quota", "set", "/fs/d", "--bytes", "1MiB"]);
    cluster.cv(&["fs", "quota", "set", "/fs/d", "--inodes", "10"]);
    cluster.cv(&["fs", "quota", "set", "/fs/d/below", "--inodes", "1"]);
    let said = quota(&["get", "/fs/d/below/file"]).stdout;
    let lines: Vec<Vec<&str>> = said.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(lines[1].last(), Some(&"/fs/d/below"), "nearest first: {said}");
    assert_eq!(lines[2].last(), Some(&"/fs/d"), "{said}");
    assert!(lines[2].contains(&"50.0") && lines[2].contains(&"20.0") && said.contains("1.00 MiB"), "{said}");
    cluster.cv(&["fs", "quota", "set", "/fs/d", "--bytes", "none"]);
    let own = quota(&["get", "/fs/d", "--json"]).json();
    assert_eq!(own, json!([row("/fs/d", 512 << 10, 2, 10)]));
    cluster.cv(&["fs", "quota", "clear", "/fs/d"]);
    let again = quota(&["clear", "/fs/d"]);
    assert!(again.code == NOT_FOUND && again.stderr.contains("/fs/d has no quota"), "{again:?}");
    fs::remove_dir_all(cluster.path("fs/d")).unwrap();
    eventually("the quota goes with its directory", PATIENCE, || {
        (quota(&["list", "--json"]).json() == json!([])).then_some(())
    });

    let file = cluster.path("fs/file");
    fs::write(file, "").unwrap();
    let refused = quota(&["set", "/fs/file", "--bytes", "1MiB"]);
    assert!(refused.code == FAILED && refused.stderr.contains("not a directory"), "{refused:?}");
    assert_eq!(quota(&["set", "/fs", "--bytes", "0"]).code, USAGE);
    assert_eq!(quota(&["set", "/fs"]).code, USAGE);
    assert_eq!(quota(&["set", "/fs/none", "--inodes", "1"]).code, NOT_FOUND);
}
