//! Bad input, wherever it can come from: a clear error or none, no panic, nothing lost, nothing wrong served.
//!
//! | room | what is bad | cases |
//! |---|---|---|
//! | `mounts` | credentials, endpoints, buckets, options and paths of `cv mount` and `cv umount` | 43 |
//! | `blocks` | files of cached blocks: flipped, cut, emptied, extended, swapped, deleted, replaced | 15 |
//! | `index` | the files of a worker's index, and `worker.json` | 15 |
//! | `database` | the files of a master's database | 15 |
//! | `ports` | bytes that are no protocol on seven ports, peers that say nothing | 18 |
//! | `frames` | frames and calls that are well formed and absurd | 95 |
//! | `full_disk` | a file system without space under a worker, and space that returns | 2 |
//! | `objects` | buckets that lie: bodies, lengths, versions, listings | 21 |
//!
//! Configuration, flags and what keeps a process from starting are in `command_line`, `faults/refusals` and
//! `conf/tests/refusals.rs`; buckets that break the protocol on the wire in `ufs/tests/hostile.rs`.

mod blocks;
mod database;
mod frames;
mod full_disk;
mod index;
mod mounts;
mod objects;
mod ports;
mod server;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;
use std::{fs, io};

use bytes::Bytes;
use cavern_tests::{Child, Cluster, cv_path, eventually};

const PATIENCE: Duration = Duration::from_secs(60);
/// Requests can be counted, every read reaches the FUSE client, and nothing is waited for longer than a test may last.
const CONF: &str = "[client]\nhedge_percent = 0\n[fuse]\ndirect = true\n\
    [ufs]\nconnect_timeout = \"1s\"\nrequest_timeout = \"1s\"\nio_timeout = \"1s\"\nretries = 1\nretry_backoff = \
    \"10ms\"\n";

/// One sentence on stderr, no panic, and all fragments in it.
#[track_caller]
fn assert_sentence(what: &str, stderr: &str, fragments: &[&str]) {
    let lines: Vec<_> = stderr.lines().collect();
    assert!(lines.len() == 1 && lines[0].starts_with("cv: "), "{what}: not one sentence: {stderr}");
    assert!(!stderr.contains("panicked"), "{what}: {stderr}");
    for fragment in fragments {
        assert!(stderr.contains(fragment), "{what} does not say {fragment:?}: {stderr}");
    }
}

/// Starts a process of the cluster that must refuse to, with the cluster's configuration and what the environment
/// changes of it; answers what it said.
#[track_caller]
fn refusal(cluster: &Cluster, role: &str, environment: &[(&str, &str)]) -> String {
    // One that starts all the same is ended, and fails the test with exit code 0 or 124.
    let mut command = Command::new("timeout");
    command.args(["--kill-after=5", "20"]).arg(cv_path()).arg(role).arg("--conf").arg(&cluster.at_start.conf);
    command.env("CV_LOG__LEVEL", "error").envs(environment.iter().copied());
    let output = command.output().unwrap();
    let (stdout, stderr) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert_eq!(output.status.code(), Some(1), "cv {role} with {environment:?}: {stdout}{stderr}");
    assert!(!stdout.contains("ready"), "{stdout}{stderr}");
    stderr.into_owned()
}

/// The value of a counter of a process; 0 when it has none of this name.
#[track_caller]
fn counter(child: &Child, name: &str) -> u64 {
    let metrics = child.page("/metrics").unwrap().body;
    let line = metrics.lines().find(|line| !line.starts_with('#') && line.contains(name));
    line.map_or(0, |line| line.rsplit(' ').next().unwrap().parse().unwrap())
}

/// Starts the worker again, and the client when masters know of that: whatever it reads it asks the worker for.
#[track_caller]
fn start_worker(cluster: &Cluster) {
    cluster.start("worker0");
    eventually("the worker is live", PATIENCE, || {
        (cluster.cv(&["node", "list", "--json"]).json()[0]["state"] == "live").then_some(())
    });
    restart_fuse(cluster);
}

/// What a client holds by itself says nothing of the worker.
#[track_caller]
fn restart_fuse(cluster: &Cluster) {
    cluster.stop("fuse");
    cluster.start("fuse");
}

/// Plain files below a directory whose name satisfies the test, by path.
fn files(directory: &Path, wanted: impl Fn(&str) -> bool + Copy) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        let kind = entry.file_type().unwrap();
        if kind.is_dir() {
            found.extend(files(&entry.path(), wanted));
        } else if kind.is_file() && wanted(entry.file_name().to_str().unwrap()) {
            found.push(entry.path());
        }
    }
    found.sort();
    found
}

fn copy_tree(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap().map(Result::unwrap) {
        let target = to.join(entry.file_name());
        match entry.file_type().unwrap() {
            kind if kind.is_dir() => copy_tree(&entry.path(), &target),
            // Sockets are no part of what is stored.
            kind if kind.is_file() => drop(fs::copy(entry.path(), target).unwrap()),
            _ => {}
        }
    }
}

/// Cuts a file to a length.
fn cut(path: &Path, length: u64) {
    fs::File::options().write(true).open(path).unwrap().set_len(length).unwrap();
}

/// Changes some bytes in the middle of a file.
fn scribble(path: &Path) {
    let mut bytes = fs::read(path).unwrap();
    let middle = bytes.len() / 2;
    let end = (middle + 64).min(bytes.len());
    bytes[middle..end].iter_mut().for_each(|byte| *byte ^= 0x5a);
    fs::write(path, bytes).unwrap();
}

/// Reads a tree through the first mount from the FUSE client, not from pages of the kernel, and compares every byte.
#[track_caller]
fn assert_read(cluster: &Cluster, below: &str, tree: &BTreeMap<String, Bytes>) {
    cluster.assert_tree(below, "", tree);
}

/// What a read answers, with a deadline.
fn read(path: PathBuf) -> io::Result<Vec<u8>> {
    cavern_tests::within("a read", Duration::from_secs(40), move || fs::read(path))
}
