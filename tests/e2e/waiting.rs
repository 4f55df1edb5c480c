//! What is slow is waited for: programs go on when it answers, and may be killed meanwhile.

use std::fs::{self, File};
use std::io::Write as _;
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use cavern_tests::{Cluster, Options, eventually};
use rustix::process::Signal;

use crate::fs_mode_lease::Stopped;

const PATIENCE: Duration = Duration::from_secs(30);

#[test]
fn reads_wait_for_a_bucket_that_says_nothing_for_longer_than_one_read_may_take() {
    let conf = "[client]\nread_timeout = \"1s\"\nworker_timeout = \"500ms\"\n".to_owned();
    let cluster = Cluster::up(Options { conf, ..Options::default() });
    let seeded = cluster.seed("bucket", "", 8, 50_000);
    cluster.mount("s3://bucket", "/data", &[]);
    let shown: Vec<_> =
        seeded.into_iter().map(|(key, content)| (cluster.path(format!("data/{key}")), content)).collect();
    // Names and attributes are known.
    assert!(shown.iter().all(|(path, content)| path.metadata().unwrap().len() == content.len() as u64));
    let s3 = cluster.status().s3.child;
    cluster.signal(&s3, Signal::STOP);
    let began = Instant::now();
    let readers: Vec<_> =
        shown.into_iter().map(|(path, content)| thread::spawn(move || (fs::read(path), content))).collect();
    let log = || fs::read_to_string(&cluster.status().fuse[0].log).unwrap();
    eventually("the log says that they wait", PATIENCE, || log().contains("reads wait for the bucket").then_some(()));
    // How long the bucket says nothing is what is tested.
    thread::sleep(Duration::from_secs(4).saturating_sub(began.elapsed()));
    assert!(readers.iter().all(|reader| !reader.is_finished()), "nobody has got an error");
    cluster.signal(&s3, Signal::CONT);
    for reader in readers {
        let (read, content) = reader.join().unwrap();
        assert!(read.unwrap() == content);
    }
    eventually("the log says that they go on", PATIENCE, || log().contains("the bucket answers again").then_some(()));
}

#[test]
fn changes_wait_for_a_master_that_stands_still_for_longer_than_a_question_may_take() {
    let conf = "[client]\nmetadata_timeout = \"1s\"\ndirectory_delegations = false\n".to_owned();
    let cluster = Cluster::up(Options { conf, ..Options::default() });
    cluster.s3.create_bucket("bucket");
    cluster.mount_fs_mode("s3://bucket/fs", "/fs", &[]);
    let at = |name: &str| cluster.path("fs").join(name);
    for name in ["unlinked", "renamed", "cut", "attributes", "written"] {
        fs::write(at(name), "content").unwrap();
    }
    fs::create_dir(at("removed")).unwrap();
    for directory in ["made-in", "killed-in"] {
        fs::create_dir(at(directory)).unwrap();
    }
    // Started before a file is open here: it would close what it gets of that first.
    let waiting = ["-c", "read go; exec mkdir \"$0\"", at("killed-in/made").to_str().unwrap()].map(str::to_owned);
    let mut killed = Command::new("sh").args(waiting).stdin(Stdio::piped()).spawn().unwrap();
    let mut written = File::options().append(true).open(at("written")).unwrap();
    let cut = File::options().write(true).open(at("cut")).unwrap();
    let stopped = Stopped::new(&cluster.status().masters[0]);
    let began = Instant::now();
    let top = cluster.path("fs");
    let change = |change: fn(&Path) -> std::io::Result<()>| {
        let top = top.clone();
        thread::spawn(move || change(&top))
    };
    let mut changes = vec![
        ("unlink", change(|top| fs::remove_file(top.join("unlinked")))),
        ("rename", change(|top| fs::rename(top.join("renamed"), top.join("made-in/renamed")))),
        ("rmdir", change(|top| fs::remove_dir(top.join("removed")))),
        ("mkdir", change(|top| fs::create_dir(top.join("made-in/made")))),
        (
            "chmod",
            change(|top| {
                fs::set_permissions(top.join("attributes"), std::os::unix::fs::PermissionsExt::from_mode(0o600))
            }),
        ),
    ];
    changes.push(("truncate", thread::spawn(move || cut.set_len(3))));
    changes.push(("fsync", thread::spawn(move || written.write_all(b", more").and_then(|()| written.sync_all()))));
    // A killed program leaves.
    killed.stdin.take().unwrap().write_all(b"go\n").unwrap();
    thread::sleep(Duration::from_secs(1));
    killed.kill().unwrap();
    let status = killed.wait().unwrap();
    assert_eq!(status.signal(), Some(libc::SIGKILL));
    let left = began.elapsed();
    assert!(left < Duration::from_secs(15), "{left:?}");
    thread::sleep(Duration::from_secs(7).saturating_sub(began.elapsed()));
    for (what, change) in &changes {
        assert!(!change.is_finished(), "{what} has ended");
    }
    drop(stopped);
    for (what, change) in changes {
        change.join().unwrap().unwrap_or_else(|error| panic!("{what}: {error}"));
    }
    assert!(!at("unlinked").exists() && !at("removed").exists() && at("made-in/made").is_dir());
    assert_eq!(fs::read(at("made-in/renamed")).unwrap(), b"content");
    assert_eq!(
        (fs::read(at("cut")).unwrap(), fs::read(at("written")).unwrap()),
        (b"con".to_vec(), b"content, more".to_vec())
    );
}
