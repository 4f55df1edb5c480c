//! What serves a mount is killed, or replaced, while the mount is in use: programs wait for a moment, and notice
//! nothing else.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::{Read as _, Seek as _, SeekFrom, Write as _};
use std::os::unix::fs::{FileExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use cavern_conf::Failpoint;
use cavern_tests::{Cluster, Options, eventually, number};
use rustix::fs::{FlockOperation, flock};
use rustix::process::{Pid, Signal, kill_process};

use crate::fs_mode_lease::Stopped;

const PATIENCE: Duration = Duration::from_secs(30);

pub fn up(options: Options) -> Cluster {
    let cluster = Cluster::up(Options { supervised: true, ..options });
    cluster.s3.create_bucket("bucket");
    cluster
}

/// The process that serves the first mount.
pub fn daemon(cluster: &Cluster) -> Option<i32> {
    cluster.status().fuse[0].daemon()
}

pub fn kill_daemon(cluster: &Cluster) -> i32 {
    let pid = eventually("the mount is served", PATIENCE, || daemon(cluster));
    kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL).unwrap();
    pid
}

/// Kills the daemon, and waits until another one serves the mount.
pub fn replace_by_death(cluster: &Cluster) {
    let before = kill_daemon(cluster);
    eventually("another process serves the mount", PATIENCE, || daemon(cluster).filter(|pid| *pid != before));
    assert!(cluster.status().mounted);
}

/// A file as a process reads it that has nothing to do with the mount.
fn by_another_way(cluster: &Cluster, path: &str) -> Vec<u8> {
    let output = cluster.command(&["fs", "cat", path]).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    output.stdout
}

/// Bytes that say where they belong.
pub fn content(number: usize, length: usize) -> Vec<u8> {
    (0..length).map(|at| (number.wrapping_mul(31) ^ at ^ (at >> 8)) as u8).collect()
}

#[test]
fn open_files_directories_and_locks_outlive_the_death_of_the_daemon() {
    let cluster = up(Options::default());
    let seeded = cluster.seed("objects", "", 40, 300_000);
    cluster.mount("s3://objects", "/data", &[]);
    cluster.mount_fs_mode("s3://bucket/fs", "/fs", &[]);
    let names: Vec<_> = (0..3000).map(|number| format!("entry-{number:04}")).collect();
    fs::create_dir(cluster.path("fs/many")).unwrap();
    for name in &names {
        File::create(cluster.path("fs/many").join(name)).unwrap();
    }
    let (key, object) = seeded.first_key_value().unwrap();
    let mut reading = File::open(cluster.path("data").join(key)).unwrap();
    let mut begin = vec![0; 1000];
    reading.read_exact(&mut begin).unwrap();

    let mut writing = OpenOptions::new().create_new(true).read(true).write(true).open(cluster.path("fs/new")).unwrap();
    writing.write_all(&content(1, 700_000)).unwrap();
    let unlinked = OpenOptions::new().create_new(true).read(true).write(true).open(cluster.path("fs/gone")).unwrap();
    unlinked.write_all_at(&content(2, 5000), 0).unwrap();
    fs::remove_file(cluster.path("fs/gone")).unwrap();
    let locked = File::create(cluster.path("fs/locked")).unwrap();
    flock(&locked, FlockOperation::LockExclusive).unwrap();
    // A working directory, and a listing of which a part has been read.
    let mut shell = Command::new("sh");
    shell.current_dir(cluster.path("fs")).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut shell = shell.spawn().unwrap();
    let mut listing = fs::read_dir(cluster.path("fs/many")).unwrap();
    let mut listed: Vec<_> = listing.by_ref().take(100).map(|entry| entry.unwrap().file_name()).collect();

    for round in 0..3_u8 {
        replace_by_death(&cluster);
        writing.write_all(&[round; 1000]).unwrap();
        unlinked.write_all_at(&[round; 10], 5000 + u64::from(round) * 10).unwrap();
        let second = File::open(cluster.path("fs/locked")).unwrap();
        flock(&second, FlockOperation::NonBlockingLockExclusive).expect_err("somebody has it locked");
    }
    let mut rest = Vec::new();
    reading.read_to_end(&mut rest).unwrap();
    assert!([begin, rest].concat() == *object, "the object as it was opened");
    listed.extend(listing.map(|entry| entry.unwrap().file_name()));
    listed.sort();
    assert!(listed.iter().map(|name| name.to_str().unwrap()).eq(names.iter().map(String::as_str)));

    writing.sync_all().unwrap();
    let expected = [content(1, 700_000), vec![0; 1000], vec![1; 1000], vec![2; 1000]].concat();
    let mut read = Vec::new();
    writing.seek(SeekFrom::Start(0)).unwrap();
    writing.read_to_end(&mut read).unwrap();
    assert!(read == expected, "{} bytes in place of {}", read.len(), expected.len());
    drop(writing);
    assert!(by_another_way(&cluster, "/fs/new") == expected, "the same by another way");
    assert_eq!(unlinked.metadata().unwrap().nlink(), 0);
    let mut read = vec![0; 5030];
    unlinked.read_exact_at(&mut read, 0).unwrap();
    assert!(read == [content(2, 5000), vec![0; 10], vec![1; 10], vec![2; 10]].concat());
    drop(locked);
    let second = File::open(cluster.path("fs/locked")).unwrap();
    eventually("the lock ends with the file", PATIENCE, || {
        flock(&second, FlockOperation::NonBlockingLockExclusive).ok()
    });
    shell.stdin.take().unwrap().write_all(b"cat new | wc -c; pwd\n").unwrap();
    let output = shell.wait_with_output().unwrap();
    let said = format!("703000\n{}\n", cluster.path("fs").display());
    assert_eq!(String::from_utf8_lossy(&output.stdout), said);
    cluster.assert_tree("data", "", &seeded);
}

/// Copies a tree of many small files and a few large ones, and compares it.
fn copy_and_compare(cluster: &Cluster, from: &Path, expected: &BTreeMap<String, Vec<u8>>) {
    let to = cluster.path("fs/copy");
    let copied = Command::new("cp").arg("-r").arg(from).arg(&to).output().unwrap();
    assert!(copied.status.success(), "{}", String::from_utf8_lossy(&copied.stderr));
    let back = from.with_file_name("back");
    let copied = Command::new("cp").arg("-r").arg(&to).arg(&back).output().unwrap();
    assert!(copied.status.success(), "{}", String::from_utf8_lossy(&copied.stderr));
    for (name, content) in expected {
        for directory in [&to, &back] {
            let path = directory.join(name);
            let read = fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
            assert!(read == *content, "{}: {} bytes, wrong content", path.display(), read.len());
        }
    }
    let compared = Command::new("diff").arg("-r").arg(from).arg(&to).output().unwrap();
    assert!(compared.status.success(), "{}", String::from_utf8_lossy(&compared.stdout));
    let removed = Command::new("rm").arg("-r").arg(&to).output().unwrap();
    assert!(removed.status.success(), "{}", String::from_utf8_lossy(&removed.stderr));
    fs::remove_dir_all(back).unwrap();
}

/// Runs something while daemons are replaced all the time; it is told how often that was by now.
fn meanwhile(cluster: &Cluster, replace: impl Fn() + Sync, work: impl FnOnce(&AtomicUsize)) {
    let (is_over, times) = (AtomicBool::new(false), AtomicUsize::new(0));
    thread::scope(|scope| {
        let replacing = scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                eventually("the mount is served", PATIENCE, || daemon(cluster));
                replace();
                times.fetch_add(1, Ordering::Relaxed);
                // Not more often than twenty times a minute, which would end the mount.
                thread::sleep(Duration::from_millis(3500));
            }
        });
        // Also if it fails.
        struct Over<'a>(&'a AtomicBool);
        impl Drop for Over<'_> {
            fn drop(&mut self) {
                self.0.store(true, Ordering::Relaxed);
            }
        }
        let over = Over(&is_over);
        work(&times);
        drop(over);
        replacing.join().unwrap();
    });
}

fn tree(directory: &Path) -> (PathBuf, BTreeMap<String, Vec<u8>>) {
    let from = directory.join("from");
    let mut expected = BTreeMap::new();
    for number in 0..usize::try_from(number("CAVERN_FILES", 1500)).unwrap() {
        let length = if number.is_multiple_of(300) { 5_000_000 } else { number * 13 % 40_000 };
        expected.insert(format!("d{}/f{number}", number % 20), content(number, length));
    }
    for (name, content) in &expected {
        let path = from.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    }
    (from, expected)
}

#[test]
fn a_copy_in_and_out_survives_deaths_and_replacements() {
    let cluster = up(Options { ..Options::default() });
    cluster.mount_fs_mode("s3://bucket/fs", "/fs", &[]);
    let (from, expected) = tree(cluster.directory());
    fs::write(cluster.path("fs/open"), content(7, 3_000_000)).unwrap();
    let open = File::open(cluster.path("fs/open")).unwrap();
    let mut shell = Command::new("sh");
    let mut shell = shell.current_dir(cluster.path("fs")).stdin(Stdio::piped()).spawn().unwrap();
    let is_death = AtomicBool::new(false);
    let mount_point = cluster.mount_point().to_str().unwrap();
    let replace = || {
        if is_death.fetch_not(Ordering::Relaxed) {
            replace_by_death(&cluster);
        } else {
            cluster.cv(&["fuse", "reload", "--mount-point", mount_point]);
        }
    };
    meanwhile(&cluster, replace, |times| {
        let mut rounds = 0;
        while rounds < 2 || times.load(Ordering::Relaxed) < 3 {
            copy_and_compare(&cluster, &from, &expected);
            rounds += 1;
        }
        eprintln!("replaced {times:?} times in {rounds} rounds");
    });
    let mut read = vec![0; 3_000_000];
    open.read_exact_at(&mut read, 0).unwrap();
    assert!(read == content(7, 3_000_000));
    shell.stdin.take().unwrap().write_all(b"test -e open && rm open\n").unwrap();
    assert!(shell.wait().unwrap().success());
    fs::metadata(cluster.path("fs/open")).expect_err("the shell has removed it");
}

/// What programs do while the daemon dies at a point: everything is answered as if nothing had happened.
fn work_through(cluster: &Cluster, point: Failpoint, round: usize) {
    cluster.arm(point, 3);
    let mut number = 0;
    eventually(&format!("the daemon dies at {}", point.name()), PATIENCE, || {
        number += 1;
        // In turn in a directory delegated to the mount, and in one that it does not.
        let directory = match number % 2 {
            0 => format!("directory-{round}-{number}"),
            _ => String::new(),
        };
        let place = cluster.path("fs").join(&directory);
        fs::create_dir_all(&place).unwrap();
        let path = |name: &str| place.join(format!("{name}{number}-{round}"));
        let (made, moved) = (path("made"), path("moved"));
        let mut file = OpenOptions::new().create_new(true).read(true).write(true).mode(0o644).open(&made).unwrap();
        file.write_all(&content(number, 150_000)).unwrap();
        file.write_all_at(&content(number + 1, 1000), 2_300_000).unwrap();
        file.sync_all().unwrap();
        fs::rename(&made, &moved).unwrap();
        fs::metadata(&made).expect_err("it has another name");
        fs::hard_link(&moved, &made).unwrap();
        fs::remove_file(&made).unwrap();
        file.set_len(2_300_500).unwrap();
        file.set_len(2_400_000).unwrap();
        drop(file);
        let mut expected = content(number, 150_000);
        expected.resize(2_300_000, 0);
        expected.extend(&content(number + 1, 1000)[..500]);
        expected.resize(2_400_000, 0);
        assert!(fs::read(&moved).unwrap() == expected, "{} with {}", moved.display(), point.name());
        assert!(
            by_another_way(cluster, &format!("/fs/{directory}/moved{number}-{round}")) == expected,
            "{}",
            point.name()
        );
        fs::create_dir(&made).unwrap();
        fs::remove_dir(&made).unwrap();
        fs::remove_file(&moved).unwrap();
        if !directory.is_empty() {
            fs::remove_dir(&place).unwrap();
        }
        cluster.has_died_at(point).then_some(())
    });
}

fn die_at_each_point(local_descriptors: bool, workers: usize) {
    let conf = format!(
        "[master]\nsession_lease = \"30s\"\n[client]\nmetadata_timeout = \"60s\"\nread_timeout = \"60s\"\n\
         local_descriptors = {local_descriptors}\n"
    );
    let cluster = up(Options { failpoints: true, workers, conf, ..Options::default() });
    cluster.mount_fs_mode("s3://bucket/fs", "/fs", &["--block-size", "1MiB", "--replicas", &workers.to_string()]);
    // One comes after the death of another daemon (see the crash tests), and over the network no block is granted.
    let is_met = |point: &Failpoint| match point {
        Failpoint::ReplayBegun => false,
        Failpoint::BlockPreallocated => local_descriptors,
        point => point.role() == "fuse",
    };
    let points = Failpoint::ALL.iter().copied().filter(is_met);
    let mut rounds = 0;
    for (round, point) in points.enumerate() {
        work_through(&cluster, point, round);
        rounds += 1;
    }
    assert!(rounds > 9, "{rounds}");
    assert_eq!(fs::read_dir(cluster.path("fs")).unwrap().count(), 0);
}

#[test]
fn nothing_is_lost_or_done_twice_wherever_the_daemon_dies() {
    die_at_each_point(true, 1);
}

#[test]
fn nor_is_it_when_blocks_are_written_over_the_network() {
    die_at_each_point(false, 2);
}

/// A supervisor that is killed leaves its daemon a moment, and that tells the master what was answered.
#[test]
fn what_was_answered_outlives_the_death_of_the_supervisor() {
    let cluster = up(Options::default());
    cluster.mount_fs_mode("s3://bucket/fs", "/fs", &[]);
    for round in 0..5 {
        let directory = cluster.path(format!("fs/{round}"));
        fs::create_dir(&directory).unwrap();
        let made = AtomicUsize::new(0);
        let mut left = thread::scope(|scope| {
            let writing = scope.spawn(|| {
                let mut left = Vec::new();
                for number in 0.. {
                    let path = directory.join(number.to_string());
                    let is_made = fs::write(&path, content(number, 3000)).is_ok();
                    // Every third one is gone again.
                    let is_gone = number % 3 == 0 && is_made && fs::remove_file(&path).is_ok();
                    if !is_made || number % 3 == 0 && !is_gone {
                        break;
                    }
                    left.extend((!is_gone).then_some(number));
                    made.fetch_add(1, Ordering::Relaxed);
                }
                left
            });
            eventually("files are made", PATIENCE, || (made.load(Ordering::Relaxed) > 100 * (round + 1)).then_some(()));
            cluster.signal(&cluster.status().fuse[0], Signal::KILL);
            writing.join().unwrap()
        });
        cluster.start("fuse");
        left.sort_unstable();
        for number in &left {
            let read = fs::read(directory.join(number.to_string()));
            assert!(read.unwrap_or_default() == content(*number, 3000), "{number} of {}", left.len());
        }
        // And one more at most, which had no answer.
        let found = fs::read_dir(&directory).unwrap().count();
        assert!(found == left.len() || found == left.len() + 1, "{found} in place of {}", left.len());
    }
}

/// While the daemon tells its last, bytes go on being written that need nobody: they are in it, or have no answer.
#[test]
fn nothing_is_answered_that_is_not_among_the_last_words_of_the_daemon() {
    const PIECE: usize = 100;
    let cluster = up(Options::default());
    cluster.mount_fs_mode("s3://bucket/fs", "/fs", &[]);
    let directory = cluster.path("fs/held");
    fs::create_dir(&directory).unwrap();
    let mut file = File::create(directory.join("log")).unwrap();
    let mut length = 0;
    // The master knows the block, and drops it no more.
    for _ in 0..2 {
        file.write_all(&content(length / PIECE, PIECE)).unwrap();
        file.sync_all().unwrap();
        length += PIECE;
    }
    let status = cluster.status();
    // Nobody else has the journal.
    cluster.signal(&status.workers[0], Signal::KILL);
    let stopped = Stopped::new(&status.masters[0]);
    file.write_all(&content(length / PIECE, PIECE)).unwrap();
    length += PIECE;
    cluster.signal(&status.fuse[0], Signal::KILL);
    thread::scope(|scope| {
        // Well within the second that it has.
        scope.spawn(|| {
            thread::sleep(Duration::from_millis(100));
            drop(stopped);
        });
        while file.write_all(&content(length / PIECE, PIECE)).is_ok() {
            length += PIECE;
        }
    });
    drop(file);
    cluster.start("worker0");
    cluster.start("fuse");
    let found = fs::read(directory.join("log")).unwrap();
    assert!(found.len() >= length, "{} of {length} bytes", found.len());
    assert!(found.chunks(PIECE).enumerate().all(|(number, piece)| piece == content(number, PIECE)));
}

#[test]
fn what_is_being_written_to_a_bucket_is_lost_and_says_so() {
    let cluster = up(Options::default());
    cluster.mount("s3://bucket", "/data", &["--access-mode", "read_write"]);
    let mut writing = File::create(cluster.path("data/new")).unwrap();
    writing.write_all(b"not an object yet").unwrap();
    let mount_point = cluster.mount_point().to_str().unwrap();
    let refused = cluster.try_cv(&["fuse", "reload", "--mount-point", mount_point]);
    assert_eq!(refused.code, 1, "{refused:?}");
    assert!(refused.stderr.contains("1 files of cache-mode mounts are being written"), "{refused:?}");
    replace_by_death(&cluster);
    assert_eq!(writing.write(b"more").unwrap_err().raw_os_error(), Some(libc::EIO));
    assert_eq!(rustix::fs::fsync(&writing).unwrap_err(), rustix::io::Errno::IO);
    drop(writing);
    // The mount is as good as before.
    fs::write(cluster.path("data/other"), "an object").unwrap();
    assert_eq!(fs::read(cluster.path("data/other")).unwrap(), b"an object");
}

#[test]
fn a_mount_ends_with_its_supervisor_and_is_made_again_in_its_place() {
    let cluster = up(Options::default());
    let seeded = cluster.seed("objects", "", 10, 1000);
    cluster.mount("s3://objects", "/data", &[]);
    cluster.assert_tree("data", "", &seeded);
    let served = daemon(&cluster).unwrap();
    cluster.signal(&cluster.status().fuse[0], Signal::KILL);
    eventually("the daemon ends, too", PATIENCE, || (!Path::new(&format!("/proc/{served}")).exists()).then_some(()));
    let dead = fs::read_dir(cluster.mount_point()).unwrap_err();
    assert_eq!(dead.raw_os_error(), Some(libc::ENOTCONN));
    cluster.start("fuse");
    cluster.assert_tree("data", "", &seeded);
    // And an orderly end leaves none.
    cluster.stop("fuse");
    assert!(!cluster.status().mounted);
    let mount_point = cluster.mount_point().to_str().unwrap();
    let refused = cluster.try_cv(&["fuse", "reload", "--mount-point", mount_point]);
    assert!(refused.code == 4 && refused.stderr.contains("is no mount of cv fuse"), "{refused:?}");
}
