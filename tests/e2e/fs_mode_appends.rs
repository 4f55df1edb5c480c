//! Programs that append to the same file from two mounts, with a lock, or in turn; and from one whose daemon dies.

use std::fs::{self, File, OpenOptions};
use std::io::Write as _;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::Duration;

use cavern_tests::{Cluster, Options, eventually};
use rustix::fs::{FlockOperation, fcntl_lock, flock};

use crate::client_restart::{replace_by_death, up};

const PATIENCE: Duration = Duration::from_secs(30);
const LINES: usize = 100;

/// The top of each kind of mount, at two mount points.
fn at_two_mounts() -> (Cluster, Vec<[PathBuf; 2]>) {
    let cluster = Cluster::up(Options { more_mounts: vec!["second"], ..Options::default() });
    cluster.s3.create_bucket("bucket");
    cluster.mount_fs_mode("s3://bucket/data", "/data", &[]);
    cluster.mount_fs_mode("s3://bucket/strict", "/strict", &["--consistency", "strict"]);
    let tops = ["data", "strict"].map(|top| [cluster.path(top), cluster.directory().join("second").join(top)]);
    (cluster, tops.into())
}

fn line(who: usize, number: usize) -> String {
    format!("{who} {number:04} {}\n", "x".repeat(number % 50))
}

/// Asserts that the file has every line of both, those of each in their order.
#[track_caller]
fn assert_lines(what: &str, content: &str) {
    for who in 0..2 {
        let start = format!("{who} ");
        let found: Vec<_> = content.split_inclusive('\n').filter(|line| line.starts_with(&start)).collect();
        let wanted: Vec<_> = (0..LINES).map(|number| line(who, number)).collect();
        assert!(found == wanted, "{what}: {} lines of {LINES} of {who}: {found:?}", found.len());
    }
    assert_eq!(content.len(), (0..LINES).map(|number| 2 * line(0, number).len()).sum::<usize>(), "{what}");
}

/// Has two programs append lines, each through its own mount; `append` is one of them.
fn at_once(paths: [PathBuf; 2], append: impl Fn(&PathBuf, usize) + Copy + Send + 'static) {
    let begin = Arc::new(Barrier::new(2));
    let programs = [0, 1].map(|who| {
        let (path, begin) = (paths[who].clone(), Arc::clone(&begin));
        thread::spawn(move || {
            begin.wait();
            append(&path, who);
        })
    });
    programs.into_iter().for_each(|program| program.join().unwrap());
}

fn to_append(path: &PathBuf, reads: bool) -> File {
    OpenOptions::new().read(reads).append(true).open(path).unwrap()
}

#[test]
fn nothing_that_is_appended_under_a_lock_is_lost() {
    let (_cluster, tops) = at_two_mounts();
    for (top, kind) in tops.into_iter().zip(["default", "strict"]) {
        for (locks, reads) in [("flock", false), ("flock", true), ("fcntl", false), ("fcntl", true)] {
            let what = format!("{kind} {locks} reads: {reads}");
            let paths = top.clone().map(|top| top.join(format!("{locks}-{reads}")));
            fs::write(&paths[0], "").unwrap();
            eventually("the other mount has it", PATIENCE, || paths[1].exists().then_some(()));
            at_once(paths.clone(), move |path, who| {
                let mut file = to_append(path, reads || locks == "fcntl");
                let lock = |file: &File, operation| match locks {
                    "flock" => flock(file, operation).unwrap(),
                    _ => fcntl_lock(file, operation).unwrap(),
                };
                for number in 0..LINES {
                    lock(&file, FlockOperation::LockExclusive);
                    file.write_all(line(who, number).as_bytes()).unwrap();
                    lock(&file, FlockOperation::Unlock);
                }
            });
            // Whoever locks it sees all of it.
            for path in &paths {
                let file = to_append(path, true);
                flock(&file, FlockOperation::LockShared).unwrap();
                assert_lines(&what, &fs::read_to_string(path).unwrap());
            }
        }
    }
}

#[test]
fn whoever_opens_a_file_after_others_have_closed_it_appends_to_what_they_wrote() {
    let (_cluster, tops) = at_two_mounts();
    for (top, kind) in tops.into_iter().zip(["default", "strict"]) {
        for reads in [false, true] {
            let paths = top.clone().map(|top| top.join(format!("in-turn-{reads}")));
            fs::write(&paths[0], "").unwrap();
            eventually("the other mount has it", PATIENCE, || paths[1].exists().then_some(()));
            for number in 0..LINES {
                for (who, path) in paths.iter().enumerate() {
                    to_append(path, reads).write_all(line(who, number).as_bytes()).unwrap();
                }
            }
            for path in &paths {
                eventually("all is seen", PATIENCE, || {
                    (path.metadata().unwrap().len() as usize
                        == 2 * (0..LINES).map(|at| line(0, at).len()).sum::<usize>())
                    .then_some(())
                });
                assert_lines(&format!("{kind} reads: {reads}"), &fs::read_to_string(path).unwrap());
            }
        }
    }
}

/// The kernel sends a write again that a daemon has begun, and not answered.
#[test]
fn what_is_appended_while_daemons_die_is_there_once() {
    let cluster = up(Options::default());
    cluster.mount_fs_mode("s3://bucket/fs", "/fs", &[]);
    let (is_over, done) = (AtomicBool::new(false), AtomicUsize::new(0));
    let written = thread::scope(|scope| {
        let programs: Vec<_> = (0..8)
            .map(|program| {
                let (is_over, done, path) = (&is_over, &done, cluster.path(format!("fs/log{program}")));
                scope.spawn(move || {
                    let mut log =
                        OpenOptions::new().read(program % 2 == 0).append(true).create(true).open(&path).unwrap();
                    let mut wanted = String::new();
                    while !is_over.load(Ordering::Relaxed) {
                        let line = line(program, wanted.len() % 10_000);
                        log.write_all(line.as_bytes()).unwrap();
                        wanted.push_str(&line);
                        done.fetch_add(1, Ordering::Relaxed);
                    }
                    (path, wanted)
                })
            })
            .collect();
        for _ in 0..6 {
            let before = done.load(Ordering::Relaxed);
            replace_by_death(&cluster);
            eventually("programs go on", PATIENCE, || (done.load(Ordering::Relaxed) > before + 100).then_some(()));
        }
        is_over.store(true, Ordering::Relaxed);
        programs.into_iter().map(|program| program.join().unwrap()).collect::<Vec<_>>()
    });
    for (path, wanted) in written {
        let found = fs::read_to_string(&path).unwrap();
        assert!(found == wanted, "{}: {} bytes of {}", path.display(), found.len(), wanted.len());
    }
}
