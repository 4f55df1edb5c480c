//! Directories that were there before a mount came to use them alone: after a few changes they are delegated to it, and
//! others see all that is answered there.

use std::fs::{self, File};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use cavern_tests::{Options, eventually};

use crate::fs_mode_delegations::{Mounts, tree};

const PATIENCE: Duration = Duration::from_secs(60);

fn up() -> Mounts {
    let conf = "[master]\nsession_lease = \"3s\"\npersist_delay = \"100ms\"\n".to_owned();
    Mounts::up(Options { conf, ..Options::default() })
}

/// A directory that the first mount has made, and does not hold any more: somebody has looked who has gone.
fn old_directory(mounts: &Mounts) -> PathBuf {
    let directory = mounts.held("old");
    fs::write(directory.join("log"), "").unwrap();
    mounts.cluster.cv(&["fs", "ls", "/fs/old"]);
    directory
}

fn append(path: &Path, line: &str) {
    File::options().append(true).open(path).unwrap().write_all(line.as_bytes()).unwrap();
}

/// Appends to a log until the first mount answers for that itself; what is in the log then.
fn append_until_delegated(mounts: &Mounts, log: &Path) -> String {
    let mut content = String::new();
    let before = mounts.answered();
    append(log, "first\n");
    content.push_str("first\n");
    assert_eq!(mounts.answered(), before, "it is not delegated yet");
    eventually("the directory is delegated", PATIENCE, || {
        for _ in 0..3 {
            append(log, "next\n");
            content.push_str("next\n");
        }
        (mounts.answered() > before).then_some(())
    });
    content
}

#[test]
fn a_log_in_an_old_directory_is_appended_to_without_the_master_until_others_use_it() {
    let mounts = up();
    let (here, there) = (old_directory(&mounts), mounts.there.join("old"));
    let mut content = append_until_delegated(&mounts, &here.join("log"));
    let stopped = mounts.stop_master();
    for number in 0..20 {
        let line = format!("line {number}\n");
        append(&here.join("log"), &line);
        content.push_str(&line);
    }
    drop(stopped);
    assert_eq!(fs::read_to_string(there.join("log")).unwrap(), content);
    // Two that use it in turn have it from the master, as ever.
    let before = mounts.answered();
    for number in 0..10 {
        for (who, directory) in [("here", &here), ("there", &there)] {
            let line = format!("{who} {number}\n");
            append(&directory.join("log"), &line);
            content.push_str(&line);
        }
    }
    assert_eq!(fs::read_to_string(here.join("log")).unwrap(), content);
    assert_eq!(mounts.answered(), before);
    assert_eq!(mounts.counter("cavern_client_lost_changes_total"), 0);
}

#[test]
fn an_old_directory_is_emptied_and_filled_without_the_master_also_when_the_bucket_has_it() {
    let mounts = up();
    let (here, there) = (old_directory(&mounts), mounts.there.join("old"));
    for number in 0..40 {
        fs::write(here.join(number.to_string()), format!("content of {number}")).unwrap();
    }
    mounts.cluster.cv(&["persist", "wait", "/fs", "--timeout", "60s"]);
    assert_eq!(tree(&here).len(), 41);
    // Both are answered here when all names are known.
    eventually("names are known", PATIENCE, || {
        let before = mounts.answered();
        let probe = here.join("probe");
        File::create(&probe).unwrap();
        fs::remove_file(&probe).unwrap();
        (mounts.answered() >= before + 2).then_some(())
    });
    let stopped = mounts.stop_master();
    for number in 0..40 {
        fs::remove_file(here.join(number.to_string())).unwrap();
    }
    File::create(here.join("new")).unwrap();
    fs::rename(here.join("new"), here.join("newer")).unwrap();
    drop(stopped);
    let names: Vec<_> = tree(&there).into_keys().collect();
    assert_eq!(names, [PathBuf::from("log"), PathBuf::from("newer")]);
    mounts.cluster.cv(&["persist", "wait", "/fs", "--timeout", "60s"]);
    assert_eq!(mounts.counter("cavern_client_lost_changes_total"), 0);
}
