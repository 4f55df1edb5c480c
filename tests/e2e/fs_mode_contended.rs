//! Clients that change the same directories at the same time wait for each other's changes, and not for each other's
//! kernels.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use cavern_tests::{Cluster, Options, number};

/// For any one call, on a machine that is busy.
const LONGEST: Duration = Duration::from_secs(1);
/// Where a call may wait for the other client to forget what it has cached.
const LONGEST_BESIDE_STRICT: Duration = Duration::from_secs(2);

/// The calls of one thread.
#[derive(Default)]
struct Calls {
    longest: Duration,
    failed: Vec<String>,
}

impl Calls {
    fn make<T>(&mut self, what: &str, path: &Path, call: impl FnOnce() -> io::Result<T>) {
        let begun = Instant::now();
        let outcome = call();
        let took = begun.elapsed();
        self.longest = self.longest.max(took);
        if let Err(error) = outcome {
            self.failed.push(format!("{what} {} after {took:.1?}: {error}", path.display()));
        }
    }
}

/// What they have in common, each a thread that begins when all are there.
fn at_once<'a>(threads: impl ExactSizeIterator<Item = Box<dyn FnOnce() -> Calls + Send + 'a>>) -> Calls {
    let begin = Barrier::new(threads.len());
    thread::scope(|scope| {
        let begin = &begin;
        let start = |run: Box<dyn FnOnce() -> Calls + Send + 'a>| {
            scope.spawn(move || {
                begin.wait();
                run()
            })
        };
        let started: Vec<_> = threads.map(start).collect();
        started.into_iter().map(|thread| thread.join().unwrap()).fold(Calls::default(), |mut all, calls| {
            all.longest = all.longest.max(calls.longest);
            all.failed.extend(calls.failed);
            all
        })
    })
}

/// As `mkdir -p` does.
fn make_directory(path: &Path) -> io::Result<()> {
    fs::create_dir(path).or_else(|error| if path.is_dir() { Ok(()) } else { Err(error) })
}

/// 50 names, five to a branch, one in the other.
fn make_tree(top: &Path) -> Calls {
    let mut calls = Calls::default();
    calls.make("mkdir", top, || make_directory(top));
    for branch in 0..10 {
        let mut path = top.join(branch.to_string());
        for below in ["a", "b", "c", "d", "e"] {
            path.push(below);
            let parent = path.parent().unwrap().to_owned();
            if below == "a" {
                calls.make("mkdir", &parent, || make_directory(&parent));
            }
            calls.make("mkdir", &path, || make_directory(&path));
        }
    }
    calls
}

/// What every rank of a job does when it starts.
#[test]
fn two_mounts_make_the_same_directories_without_waiting_for_each_others_kernels() {
    let cluster = Cluster::up(Options { more_mounts: vec!["second"], ..Options::default() });
    cluster.s3.create_bucket("bucket");
    cluster.mount_fs_mode("s3://bucket/fs", "/fs", &[]);
    let mounts = [cluster.path("fs"), cluster.at_start.fuse[1].mount_point.join("fs")];
    let mut longest = Duration::ZERO;
    for round in 0..number("CAVERN_ROUNDS", 12) {
        let tops: Vec<PathBuf> = mounts.iter().map(|mount| mount.join(round.to_string())).collect();
        let ranks = [&tops[0], &tops[1], &tops[0], &tops[1]];
        let calls = at_once(ranks.into_iter().map(|top| Box::new(|| make_tree(top)) as Box<_>));
        eprintln!("round {round}: longest call {:.1?}", calls.longest);
        assert!(calls.failed.is_empty(), "round {round}: {:#?}", calls.failed);
        longest = longest.max(calls.longest);
    }
    eprintln!("two mounts, the same directories: longest call {longest:.1?}");
    assert!(longest < LONGEST, "{longest:?}");
}

/// Creates, renames and removes files of names that nobody else uses.
fn change_names(directory: &Path, own: &str) -> Calls {
    let mut calls = Calls::default();
    for number in 0..40 {
        let [made, moved] = ["made", "moved"].map(|state| directory.join(format!("{own}-{number}-{state}")));
        calls.make("create", &made, || fs::File::create_new(&made));
        calls.make("rename", &made, || fs::rename(&made, &moved));
        if number % 2 == 0 {
            calls.make("unlink", &moved, || fs::remove_file(&moved));
        }
    }
    calls
}

#[test]
fn a_mount_beside_a_strict_one_keeps_it_waiting_for_no_directory() {
    let cluster = Cluster::up(Options { more_mounts: vec!["second"], ..Options::default() });
    cluster.s3.create_bucket("bucket");
    cluster.mount_fs_mode("s3://bucket/fs", "/fs", &[]);
    cluster.mount_fs_mode("s3://bucket/strict", "/strict", &["--consistency", "strict"]);
    let clients = [cluster.path(""), cluster.at_start.fuse[1].mount_point.clone()];
    let mut longest = Duration::ZERO;
    for round in 0..number("CAVERN_ROUNDS", 4) {
        let directories: Vec<PathBuf> =
            clients.iter().flat_map(|client| ["fs", "strict"].map(|mount| client.join(mount))).collect();
        let directories: Vec<PathBuf> = directories.iter().map(|mount| mount.join(round.to_string())).collect();
        directories.iter().for_each(|directory| make_directory(directory).unwrap());
        let begun = Instant::now();
        let named = directories.iter().zip(["a", "b", "c", "d"]);
        let calls = at_once(named.map(|(directory, own)| Box::new(|| change_names(directory, own)) as Box<_>));
        eprintln!("round {round}: longest call {:.1?} of {:.1?}", calls.longest, begun.elapsed());
        assert!(calls.failed.is_empty(), "round {round}: {:#?}", calls.failed);
        longest = longest.max(calls.longest);
        for pair in [[0, 2], [1, 3]] {
            let count = pair.map(|mount| fs::read_dir(&directories[mount]).unwrap().count());
            assert_eq!(count, [40, 40], "round {round}");
        }
    }
    eprintln!("a default and a strict mount: longest call {longest:.1?}");
    assert!(longest < LONGEST_BESIDE_STRICT, "{longest:?}");
}
