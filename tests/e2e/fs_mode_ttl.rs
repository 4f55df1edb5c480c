//! Files of fs-mode mounts that live for a time only.

use std::fs::{self, File};
use std::io::Write as _;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::time::{Duration, SystemTime};

use cavern_tests::{Cluster, Options, eventually};

use crate::bucket::Bucket;

const PATIENCE: Duration = Duration::from_secs(60);

fn mounted() -> Cluster {
    let conf = "[master]\npersist_delay = \"20ms\"\n".to_owned();
    let cluster = Cluster::up(Options { conf, ..Options::default() });
    cluster.s3.create_bucket("bucket");
    cluster.mount_fs_mode("s3://bucket/fs", "/fs", &["--block-size", "1MiB"]);
    cluster
}

#[track_caller]
fn gone(path: &Path) {
    eventually(&format!("{} is gone", path.display()), PATIENCE, || path.symlink_metadata().is_err().then_some(()));
}

#[test]
fn files_are_removed_when_their_time_is_over_and_nothing_else() {
    let cluster = mounted();
    let at = |name: &str| cluster.path(format!("fs/{name}"));
    fs::create_dir_all(at("scratch/keep")).unwrap();
    fs::create_dir(at("slow")).unwrap();
    let set = |path: &str, time: &str, action: &str| {
        cluster.cv(&["fs", "ttl", "set", path, time, "--action", action]);
    };
    set("/fs/scratch", "1s", "delete");
    set("/fs/scratch/keep", "1s", "none");
    set("/fs/slow", "1h", "delete");
    // What somebody writes to stays, though it is the oldest.
    let mut written = File::create(at("scratch/written")).unwrap();
    written.write_all(b"one").unwrap();
    written.sync_all().unwrap();
    written.write_all(b"two").unwrap();
    // An old mtime says nothing.
    let copied = File::create(at("slow/copied")).unwrap();
    copied.set_modified(SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000_000)).unwrap();
    fs::write(at("scratch/keep/file"), "kept").unwrap();
    fs::create_dir(at("scratch/below")).unwrap();
    // The time of the first name may be over before there is the second one.
    fs::write(at("elsewhere"), vec![7; 200_000]).unwrap();
    for name in ["scratch/below/file", "scratch/second"] {
        fs::hard_link(at("elsewhere"), at(name)).unwrap();
    }
    fs::remove_file(at("elsewhere")).unwrap();
    symlink("nowhere", at("scratch/link")).unwrap();
    for name in ["scratch/below/file", "scratch/second", "scratch/link"] {
        gone(&at(name));
    }
    assert_eq!(fs::read(at("scratch/written")).unwrap(), b"onetwo");
    assert!(at("scratch/below").is_dir() && at("slow/copied").is_file());
    assert_eq!(fs::read(at("scratch/keep/file")).unwrap(), b"kept");
    drop(written);
    gone(&at("scratch/written"));
    cluster.cv(&["persist", "wait", "/fs", "--timeout", "60s"]);
    let keys: Vec<String> = Bucket::of(&cluster, "bucket").objects().into_keys().collect();
    assert_eq!(
        keys,
        ["fs/scratch/", "fs/scratch/below/", "fs/scratch/keep/", "fs/scratch/keep/file", "fs/slow/", "fs/slow/copied"]
    );
}

#[test]
fn blocks_are_dropped_when_the_time_of_files_is_over() {
    let cluster = mounted();
    let path = cluster.path("fs/file");
    let content: Vec<u8> = (0..3_000_000u32).map(|at| (at.wrapping_mul(2_654_435_761) >> 11) as u8).collect();
    fs::write(&path, &content).unwrap();
    let blocks = || cluster.cv(&["fs", "blocks", "/fs/file", "--json"]).json().as_array().unwrap().len();
    assert_eq!(blocks(), 3);
    cluster.cv(&["fs", "ttl", "set", "/fs", "1s", "--action", "free"]);
    eventually("the blocks are dropped", PATIENCE, || {
        (cluster.status().masters[0].metric("cavern_master_ttl_freed_files_total")? > 0).then_some(())
    });
    assert!(fs::read(&path).unwrap() == content);
}

#[test]
fn rules_are_shown_kept_and_taken_away() {
    let cluster = mounted();
    fs::create_dir_all(cluster.path("fs/a/b")).unwrap();
    cluster.cv(&["fs", "ttl", "set", "/fs", "30d", "--action", "free"]);
    cluster.cv(&["fs", "ttl", "set", "/fs/a/b", "12h", "--action", "delete"]);
    cluster.kill("master0");
    cluster.start("master0");
    let of = |path: &str| cluster.cv(&["fs", "ttl", "get", path, "--json"]).json();
    let rules = of("/fs/a/b");
    assert_eq!(
        (&rules[0]["path"], &rules[0]["seconds"], &rules[0]["action"]),
        (&"/fs/a/b".into(), &43_200.into(), &"delete".into())
    );
    assert_eq!((&rules[1]["path"], &rules[1]["action"]), (&"/fs".into(), &"free".into()));
    assert_eq!(of("/fs/a").as_array().unwrap().len(), 1);
    assert!(cluster.cv(&["fs", "ttl", "list"]).stdout.contains("12h"));
    cluster.cv(&["fs", "ttl", "clear", "/fs"]);
    // A rule goes with its directory.
    fs::remove_dir(cluster.path("fs/a/b")).unwrap();
    assert!(cluster.cv(&["fs", "ttl", "list"]).stdout.contains("no directory has a rule"));
    let refused = |arguments: &[&str], what: &str| {
        let finished = cluster.try_cv(arguments);
        assert!(finished.code != 0 && finished.stderr.contains(what), "{arguments:?}: {}", finished.stderr);
    };
    refused(&["fs", "ttl", "clear", "/fs/a"], "has no rule of its own");
    refused(&["fs", "ttl", "set", "/fs/a", "10ms", "--action", "free"], "a second at least");
    refused(&["fs", "ttl", "set", "/fs/a", "7", "--action", "free"], "unit");
    refused(&["fs", "ttl", "set", "/fs/none", "7d", "--action", "free"], "/fs/none");
}
