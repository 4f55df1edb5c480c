//! Directories that a mount has made, and holds: what is changed there is answered before the master has it, whoever
//! else looks sees all of it, and no death of a process takes any of it away.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write as _;
use std::os::unix::fs::{FileExt as _, MetadataExt as _, PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::Duration;

use cavern_conf::Failpoint;
use cavern_tests::{Cluster, Options, eventually};
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};
use rustix::fs::FallocateFlags;
use rustix::process::{Pid, Signal, kill_process};

use crate::bucket::Bucket;
use crate::client_restart::{daemon, kill_daemon};
use crate::fs_mode_lease::Stopped;

const PATIENCE: Duration = Duration::from_secs(60);
/// For a test that has much answered here while the master is stopped: nothing is when the lease is over.
pub const LONG_LEASE: &str = "[master]\nsession_lease = \"60s\"\n";

/// Two mounts of a bucket, whose daemons have successors.
pub struct Mounts {
    pub cluster: Cluster,
    pub here: PathBuf,
    pub there: PathBuf,
}

impl Mounts {
    pub fn up(options: Options) -> Self {
        let conf = format!("[client]\nmetadata_timeout = \"60s\"\n{}", options.conf);
        let cluster = Cluster::up(Options { supervised: true, more_mounts: vec!["second"], conf, ..options });
        cluster.s3.create_bucket("bucket");
        cluster.mount_fs_mode("s3://bucket/fs", "/fs", &[]);
        let (here, there) = (cluster.path("fs"), cluster.at_start.fuse[1].mount_point.join("fs"));
        Self { cluster, here, there }
    }

    /// Changes that the first mount has answered before the master had them.
    pub fn answered(&self) -> u64 {
        self.counter("cavern_client_write_back_changes_total")
    }

    pub fn counter(&self, name: &str) -> u64 {
        self.cluster.status().fuse[0].metric(name).unwrap_or(0)
    }

    /// A directory that the first mount has made, and in which it answers.
    pub fn held(&self, name: &str) -> PathBuf {
        let directory = self.here.join(name);
        fs::create_dir(&directory).unwrap();
        let before = self.answered();
        eventually("changes are answered here", PATIENCE, || {
            let probe = directory.join("probe");
            File::create(&probe).unwrap();
            fs::remove_file(&probe).unwrap();
            (self.answered() > before).then_some(())
        });
        directory
    }

    pub fn stop_master(&self) -> Stopped {
        Stopped::new(&self.cluster.at_start.masters[0])
    }
}

/// What is below a directory: of each path its kind and permissions, and its content or where it leads.
pub fn tree(directory: &Path) -> BTreeMap<PathBuf, (u32, Vec<u8>)> {
    let mut found = BTreeMap::new();
    let mut waiting = vec![directory.to_owned()];
    while let Some(next) = waiting.pop() {
        for entry in fs::read_dir(&next).unwrap() {
            let path = entry.unwrap().path();
            let metadata = fs::symlink_metadata(&path).unwrap();
            let content = match metadata.file_type() {
                kind if kind.is_symlink() => fs::read_link(&path).unwrap().into_os_string().into_encoded_bytes(),
                kind if kind.is_file() => fs::read(&path).unwrap(),
                _ => {
                    waiting.push(path.clone());
                    Vec::new()
                }
            };
            found.insert(path.strip_prefix(directory).unwrap().to_owned(), (metadata.mode(), content));
        }
    }
    found
}

/// Every kind of change that is answered at once; what is there afterwards.
pub fn change_all(directory: &Path) -> BTreeMap<PathBuf, (u32, Vec<u8>)> {
    let at = |name: &str| directory.join(name);
    fs::create_dir(at("sub")).unwrap();
    fs::create_dir(at("empty")).unwrap();
    for name in ["plain", "renamed", "replaces", "replaced", "moved", "gone", "sub/below"] {
        File::create(at(name)).unwrap();
    }
    symlink("sub/below", at("link")).unwrap();
    fs::set_permissions(at("plain"), fs::Permissions::from_mode(0o640)).unwrap();
    fs::rename(at("renamed"), at("new-name")).unwrap();
    fs::set_permissions(at("replaces"), fs::Permissions::from_mode(0o600)).unwrap();
    fs::rename(at("replaces"), at("replaced")).unwrap();
    fs::rename(at("moved"), at("sub/moved")).unwrap();
    fs::remove_file(at("gone")).unwrap();
    fs::remove_dir(at("empty")).unwrap();
    let file = |mode: u32| (0o100_000 | mode, Vec::new());
    let expected = [
        ("sub", (0o040_755, Vec::new())),
        ("plain", file(0o640)),
        ("new-name", file(0o644)),
        ("replaced", file(0o600)),
        ("sub/below", file(0o644)),
        ("sub/moved", file(0o644)),
        ("link", (0o120_777, b"sub/below".to_vec())),
    ];
    expected.into_iter().map(|(name, found)| (PathBuf::from(name), found)).collect()
}

#[test]
fn changes_in_a_directory_that_was_made_here_wait_for_no_master_and_fsync_does() {
    let mounts = Mounts::up(Options::default());
    let held = mounts.held("held");
    let stopped = mounts.stop_master();
    let expected = change_all(&held);
    for (path, (mode, _)) in &expected {
        assert_eq!(fs::symlink_metadata(held.join(path)).unwrap().mode(), *mode, "{}", path.display());
    }
    assert!(!held.join("gone").exists());
    let synced = {
        let path = held.join("plain");
        thread::spawn(move || File::open(path).unwrap().sync_all())
    };
    let directory_synced = {
        let path = held.clone();
        thread::spawn(move || File::open(path).unwrap().sync_all())
    };
    thread::sleep(Duration::from_millis(300));
    assert!(!synced.is_finished() && !directory_synced.is_finished(), "the master has nothing in its log");
    drop(stopped);
    synced.join().unwrap().unwrap();
    directory_synced.join().unwrap().unwrap();
    assert_eq!(tree(&mounts.there.join("held")), expected);
    assert_eq!(tree(&held), expected);
    assert_eq!(mounts.counter("cavern_client_lost_changes_total"), 0);
}

#[test]
fn whoever_looks_sees_all_that_was_answered_and_changes_it() {
    let mounts = Mounts::up(Options::default());
    let mut random = StdRng::seed_from_u64(3);
    for round in 0..20 {
        let name = format!("round-{round}");
        let (here, there) = (mounts.held(&name), mounts.there.join(&name));
        let mut expected = BTreeMap::new();
        for number in 0..random.random_range(1..40) {
            let (file, content) = (format!("{number}"), format!("content of {number}").repeat(number));
            fs::write(here.join(&file), &content).unwrap();
            expected.insert(PathBuf::from(file), (0o100_644, content.into_bytes()));
        }
        match round % 4 {
            0 => assert_eq!(tree(&there), expected),
            1 => {
                fs::write(there.join("other"), "theirs").unwrap();
                expected.insert("other".into(), (0o100_644, b"theirs".to_vec()));
            }
            2 => {
                fs::rename(there.join("0"), there.join("1")).unwrap();
                let moved = expected.remove(Path::new("0")).unwrap();
                expected.insert("1".into(), moved);
            }
            _ => {
                fs::remove_file(there.join("0")).unwrap();
                expected.remove(Path::new("0"));
            }
        }
        fs::write(here.join("last"), "ours").unwrap();
        expected.insert("last".into(), (0o100_644, b"ours".to_vec()));
        // Somebody who has looked already is notified.
        eventually("the other mount shows it", PATIENCE, || (tree(&there) == expected).then_some(()));
        assert_eq!(tree(&here), expected, "round {round}");
    }
}

#[test]
fn a_listing_shows_directories_with_what_was_just_made_in_them() {
    let mounts = Mounts::up(Options::default());
    let held = mounts.held("held");
    for number in 0..50 {
        let directory = held.join(format!("{number}"));
        fs::create_dir(&directory).unwrap();
        fs::create_dir(directory.join("below")).unwrap();
        // With the attributes of the entries, which the kernel keeps.
        assert_eq!(fs::read_dir(&held).unwrap().count(), number + 1);
        assert_eq!(fs::metadata(&directory).unwrap().nlink(), 3, "{number}");
    }
}

#[test]
fn the_death_of_the_daemon_takes_nothing_away_that_was_answered() {
    let mounts = Mounts::up(Options::default());
    let held = mounts.held("held");
    let kept = File::options().append(true).create(true).open(held.join("kept")).unwrap();
    append_new(&held.join("grown"));
    append(&held.join("grown"), b"more ");
    let stopped = mounts.stop_master();
    let mut expected = change_all(&held);
    expected.insert("kept".into(), (0o100_644, b"and written".to_vec()));
    // Its commits are one.
    (0..5).for_each(|_| append(&held.join("grown"), b"more "));
    expected.insert("grown".into(), (0o100_644, b"newmore more more more more more ".to_vec()));
    kill_daemon(&mounts.cluster);
    drop(stopped);
    (&kept).write_all(b"and written").unwrap();
    drop(kept);
    assert_eq!(tree(&mounts.there.join("held")), expected);
    assert_eq!(tree(&held), expected);
    // Its successor holds what it makes itself.
    let next = mounts.held("next");
    let expected = change_all(&next);
    assert_eq!(tree(&mounts.there.join("next")), expected);
}

#[test]
fn a_daemon_that_dies_before_it_answers_has_made_each_change_once() {
    let mounts = Mounts::up(Options { failpoints: true, ..Options::default() });
    for pass in [1, 5, 9, 14] {
        let held = mounts.held(&format!("held-{pass}"));
        mounts.cluster.arm(Failpoint::ChangeJournaled, pass);
        let expected = change_all(&held);
        eventually("the daemon has died", PATIENCE, || {
            mounts.cluster.has_died_at(Failpoint::ChangeJournaled).then_some(())
        });
        assert_eq!(tree(&mounts.there.join(format!("held-{pass}"))), expected, "pass {pass}");
        assert_eq!(tree(&held), expected, "pass {pass}");
    }
}

#[test]
fn what_a_daemon_was_making_when_it_died_is_not_held_by_the_next() {
    let mounts = Mounts::up(Options { failpoints: true, ..Options::default() });
    let sub = mounts.held("held").join("sub");
    mounts.cluster.arm(Failpoint::ChangeJournaled, 1);
    fs::create_dir(&sub).unwrap();
    eventually("the daemon has died", PATIENCE, || {
        mounts.cluster.has_died_at(Failpoint::ChangeJournaled).then_some(())
    });
    for number in 0..200 {
        File::create(sub.join(format!("{number}"))).unwrap();
    }
    File::open(&sub).unwrap().sync_all().unwrap();
    assert_eq!(fs::read_dir(mounts.there.join("held/sub")).unwrap().count(), 200);
    assert_eq!(mounts.counter("cavern_client_lost_changes_total"), 0);
}

#[test]
fn a_tree_that_is_unpacked_is_the_one_that_was_packed() {
    let mounts = Mounts::up(Options::default());
    let source = mounts.cluster.directory().join("source");
    for number in 0..300 {
        let directory = source.join(format!("{}", number / 20));
        fs::create_dir_all(&directory).unwrap();
        let path = directory.join(format!("file-{number}"));
        fs::write(&path, vec![number as u8; number * 37]).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600 | (number as u32 % 64))).unwrap();
    }
    let run = |program: &str, arguments: &[&str]| {
        let output = Command::new(program).args(arguments).output().unwrap();
        assert!(output.status.success(), "{program} {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    };
    let text = |path: &Path| path.to_str().unwrap().to_owned();
    let archive = mounts.cluster.directory().join("archive.tar");
    run("tar", &["-C", &text(&source), "-cf", &text(&archive), "."]);
    let expected = tree(&source);
    let held = mounts.held("held");
    run("tar", &["-C", &text(&held), "-xpf", &text(&archive)]);
    run("cp", &["-a", &text(&held), &text(&mounts.here.join("copy"))]);
    for name in ["held", "copy"] {
        assert_eq!(tree(&mounts.there.join(name)), expected, "{name}");
        let times = |directory: &Path| -> BTreeMap<_, _> {
            let found = expected.keys().map(|path| (path, fs::metadata(directory.join(path)).unwrap()));
            found.map(|(path, metadata)| (path.clone(), metadata.mtime())).collect()
        };
        assert_eq!(times(&mounts.here.join(name)), times(&source), "{name}");
        assert_eq!(times(&mounts.there.join(name)), times(&source), "{name}");
    }
    run("rm", &["-r", &text(&mounts.here.join("copy"))]);
    eventually("it is gone there, too", PATIENCE, || (!mounts.there.join("copy").exists()).then_some(()));
    assert_eq!(mounts.counter("cavern_client_lost_changes_total"), 0);
}

#[test]
fn a_client_that_is_away_for_too_long_is_told_what_is_lost_and_others_go_on() {
    // With a lease that outlasts what is done while the master is stopped.
    let mounts = Mounts::up(Options::default());
    let held = mounts.held("held");
    let file = File::create(held.join("open")).unwrap();
    file.sync_all().unwrap();
    let away = {
        let stopped = mounts.stop_master();
        // What is on its way to the master is made when that goes on: the rest is not sent yet.
        for number in 0..20 {
            File::create(held.join(format!("{number}"))).unwrap();
            thread::sleep(Duration::from_millis(15));
        }
        fs::set_permissions(held.join("open"), fs::Permissions::from_mode(0o600)).unwrap();
        let away = Stopped::new(&mounts.cluster.at_start.fuse[0]);
        drop(stopped);
        away
    };
    // Once the session of the other one is over.
    let there = mounts.there.join("held");
    let seen = fs::read_dir(&there).unwrap().count();
    fs::write(there.join("theirs"), "theirs").unwrap();
    fs::set_permissions(there.join("open"), fs::Permissions::from_mode(0o400)).unwrap();
    drop(away);
    let told = file.sync_all().expect_err("what was answered is lost");
    assert_eq!(told.raw_os_error(), Some(rustix::io::Errno::IO.raw_os_error()));
    file.sync_all().expect("it is told once");
    // And nothing of the other's work is.
    assert_eq!(fs::metadata(there.join("open")).unwrap().mode() & 0o777, 0o400);
    assert_eq!(fs::metadata(held.join("open")).unwrap().mode() & 0o777, 0o400);
    assert_eq!(fs::read_dir(&there).unwrap().count(), seen + 1);
    assert_eq!(tree(&held), tree(&there));
    assert_eq!(fs::read(held.join("theirs")).unwrap(), b"theirs");
}

#[test]
fn what_was_answered_outlives_a_lapsed_session_that_nobody_contradicts() {
    // With a lease that outlasts what is done while the master is stopped.
    let mounts = Mounts::up(Options::default());
    let (held, other) = (mounts.held("held"), mounts.held("other"));
    let file = File::create(held.join("open")).unwrap();
    file.sync_all().unwrap();
    let away = {
        let stopped = mounts.stop_master();
        for number in 0..20 {
            fs::write(held.join(format!("{number}")), format!("{number}")).unwrap();
            File::create(other.join(format!("{number}"))).unwrap();
        }
        fs::rename(held.join("open"), held.join("renamed")).unwrap();
        let away = Stopped::new(&mounts.cluster.at_start.fuse[0]);
        drop(stopped);
        away
    };
    let log = &mounts.cluster.at_start.masters[0].log;
    eventually("the session has lapsed", PATIENCE, || {
        fs::read_to_string(log).unwrap().contains("a client's session has lapsed").then_some(())
    });
    // Others go on.
    fs::write(mounts.there.join("theirs"), "theirs").unwrap();
    drop(away);
    file.sync_all().unwrap();
    let (held_there, other_there) = (mounts.there.join("held"), mounts.there.join("other"));
    assert_eq!(tree(&held_there), tree(&held));
    assert_eq!(fs::read_dir(&held_there).unwrap().count(), 21);
    assert_eq!(fs::read(held_there.join("19")).unwrap(), b"19");
    assert!(held_there.join("renamed").exists());
    assert_eq!(fs::read_dir(&other_there).unwrap().count(), 20);
    assert_eq!(fs::read(mounts.here.join("theirs")).unwrap(), b"theirs");
    assert_eq!(mounts.counter("cavern_client_lost_changes_total"), 0);
}

#[test]
fn a_quota_holds_for_what_is_made_after_it() {
    let mounts = Mounts::up(Options::default());
    let held = mounts.held("held");
    File::create(held.join("first")).unwrap();
    mounts.cluster.cv(&["fs", "quota", "set", "/fs/held", "--inodes", "3"]);
    let made: Vec<_> = (0..5).map(|number| File::create(held.join(format!("{number}")))).collect();
    let errors: Vec<_> = made.iter().filter_map(|made| made.as_ref().err()?.raw_os_error()).collect();
    assert!(!errors.is_empty() && errors.iter().all(|errno| *errno == rustix::io::Errno::DQUOT.raw_os_error()));
    assert_eq!(tree(&held), tree(&mounts.there.join("held")));
}

/// Opens a file once more, and appends to it.
fn append(path: &Path, bytes: &[u8]) {
    File::options().append(true).open(path).unwrap().write_all(bytes).unwrap();
}

#[test]
fn a_file_is_appended_to_and_its_bytes_are_synced_without_the_master() {
    let mounts = Mounts::up(Options { conf: LONG_LEASE.to_owned(), ..Options::default() });
    let held = mounts.held("held");
    let log = held.join("log");
    fs::write(&log, [b'-'; 10_000]).unwrap();
    append(&log, b"first");
    let file = File::options().read(true).write(true).open(&log).unwrap();
    file.sync_all().unwrap();
    let mut expected = [b'-'; 10_000].to_vec();
    expected.extend(b"first");

    let stopped = mounts.stop_master();
    for number in 0..50_u64 {
        let bytes = format!("over {number}");
        file.write_all_at(bytes.as_bytes(), number * 100).unwrap();
        expected[(number * 100) as usize..][..bytes.len()].copy_from_slice(bytes.as_bytes());
        match number % 2 {
            0 => file.sync_data().unwrap(),
            _ => file.sync_all().unwrap(),
        }
    }
    for number in 0..50 {
        append(&log, format!("line {number}\n").as_bytes());
        expected.extend(format!("line {number}\n").as_bytes());
        assert_eq!(fs::metadata(&log).unwrap().len(), expected.len() as u64);
    }
    let longer = {
        let file = file.try_clone().unwrap();
        thread::spawn(move || file.sync_data())
    };
    thread::sleep(Duration::from_millis(300));
    assert!(!longer.is_finished(), "the master does not know how long it is");
    let merged = mounts.counter("cavern_client_merged_changes_total");
    assert!(merged >= 90, "{merged} of a hundred commits became part of another one");
    drop(stopped);
    longer.join().unwrap().unwrap();
    assert!(fs::read(mounts.there.join("held/log")).unwrap() == expected);
    assert!(fs::read(&log).unwrap() == expected);
    assert_eq!(mounts.counter("cavern_client_lost_changes_total"), 0);
}

#[test]
fn room_behind_the_end_of_a_file_counts_as_on_another_mount_once_it_is_synced() {
    const MIB: u64 = 1 << 20;
    let mounts = Mounts::up(Options::default());
    let path = mounts.held("held").join("file");
    let file = File::create(&path).unwrap();
    file.write_all_at(&[1; 100], 0).unwrap();
    // In another block than the content.
    rustix::fs::fallocate(&file, FallocateFlags::KEEP_SIZE, 600 * MIB, MIB).unwrap();
    file.sync_all().unwrap();
    let before = mounts.answered();
    file.write_all_at(&[2; 5000], 0).unwrap();
    file.sync_all().unwrap();
    assert!(mounts.answered() > before, "the second commit is answered here");
    let there = fs::metadata(mounts.there.join("held/file")).unwrap();
    assert!(there.len() == 5000 && there.blocks() * 512 >= MIB, "{there:?}");
    assert_eq!(fs::metadata(&path).unwrap().blocks(), there.blocks());
}

#[test]
fn a_file_stays_open_for_its_next_writer_though_who_made_it_has_it_open_as_well() {
    let mounts = Mounts::up(Options::default());
    let log = mounts.held("held").join("log");
    let made = File::options().append(true).create_new(true).open(&log).unwrap();
    (&made).write_all(b"new").unwrap();
    // One of its descriptors is closed, and what was written is committed.
    drop(made.try_clone().unwrap());
    append(&log, b"er");
    drop(made);
    let before = mounts.counter("cavern_client_layout_misses_total");
    let stopped = mounts.stop_master();
    for _ in 0..3 {
        append(&log, b" and newer");
    }
    drop(stopped);
    assert_eq!(fs::read(mounts.there.join("held/log")).unwrap(), b"newer and newer and newer and newer");
    assert_eq!(mounts.counter("cavern_client_layout_misses_total"), before);
}

#[test]
fn a_file_that_stays_open_for_its_next_writer_goes_when_it_is_removed() {
    let mounts = Mounts::up(Options::default());
    let held = mounts.held("held");
    let log = held.join("log");
    fs::write(&log, [b'-'; 300_000]).unwrap();
    append(&log, b"more");
    let used = || mounts.cluster.cv(&["fs", "du", "/fs/held"]).stdout;
    fs::remove_file(&log).unwrap();
    append_new(&log);
    assert_eq!(fs::read(&log).unwrap(), b"new");
    fs::rename(&log, held.join("renamed")).unwrap();
    append(&held.join("renamed"), b"er");
    assert_eq!(fs::read(mounts.there.join("held/renamed")).unwrap(), b"newer");
    let used = used();
    assert!(!used.contains("300"), "{used}");
}

fn append_new(path: &Path) {
    File::options().append(true).create_new(true).open(path).unwrap().write_all(b"new").unwrap();
}

#[test]
fn what_was_synced_without_the_master_outlives_its_client_and_gets_to_the_bucket() {
    let conf = "[master]\npersist_delay = \"100ms\"\n".to_owned();
    let mounts = Mounts::up(Options { conf, ..Options::default() });
    let held = mounts.held("held");
    let path = held.join("file");
    fs::write(&path, [b'-'; 100_000]).unwrap();
    append(&path, b"end");
    let file = File::options().write(true).open(&path).unwrap();
    file.sync_all().unwrap();
    let mut expected = [b'-'; 100_000].to_vec();
    expected.extend(b"end");
    let bucket = Bucket::of(&mounts.cluster, "bucket");
    // Nobody waits for the bucket: that would end the directory's being held.
    let bucket_has = |expected: &[u8]| {
        let objects = bucket.objects_below("fs/held/");
        objects.get("fs/held/file").is_some_and(|object| object == expected).then_some(())
    };
    eventually("the bucket has it", PATIENCE, || bucket_has(&expected));
    let before = fs::metadata(&path).unwrap().modified().unwrap();

    let supervisor = &mounts.cluster.at_start.fuse[0];
    let daemon = daemon(&mounts.cluster).unwrap();
    let stopped = mounts.stop_master();
    file.write_all_at(b"synced", 50_000).unwrap();
    file.sync_all().unwrap();
    expected[50_000..50_006].copy_from_slice(b"synced");
    mounts.cluster.signal(supervisor, Signal::KILL);
    kill_process(Pid::from_raw(daemon).unwrap(), Signal::KILL).unwrap();
    drop(stopped);
    assert!(fs::read(mounts.there.join("held/file")).unwrap() == expected);
    assert!(fs::metadata(mounts.there.join("held/file")).unwrap().modified().unwrap() > before);
    eventually("the bucket has that, too", PATIENCE, || bucket_has(&expected));
}

#[test]
fn who_waits_for_the_bucket_waits_for_what_was_answered() {
    let conf = format!("{LONG_LEASE}persist_delay = \"0s\"\n");
    let mounts = Mounts::up(Options { conf, ..Options::default() });
    let held = mounts.held("held");
    let stopped = mounts.stop_master();
    // More than is on its way at a time.
    let names: Vec<_> = (0..1500).map(|number| format!("{number:04}")).collect();
    for name in &names {
        File::create(held.join(name)).unwrap();
    }
    let mut waiting = mounts.cluster.command(&["persist", "wait", "/fs/held"]).spawn().unwrap();
    drop(stopped);
    assert!(waiting.wait().unwrap().success());
    for name in [&names[0], &names[1499]] {
        assert_eq!(mounts.cluster.s3.get("bucket", &format!("fs/held/{name}")).len(), 0, "{name}");
    }
}

#[test]
fn with_synced_names_nothing_is_answered_before_the_master_has_it() {
    let mounts = Mounts::up(Options::default());
    mounts.held("held");
    mounts.cluster.mount_fs_mode("s3://bucket/synced", "/synced", &["--names", "synced"]);
    let answered = mounts.answered();
    let expected = change_all(&mounts.cluster.path("synced"));
    assert_eq!(mounts.answered(), answered);
    assert_eq!(tree(&mounts.cluster.path("synced")), expected);
    let listed = mounts.cluster.cv(&["mount", "--json"]).stdout;
    let listed: Vec<serde_json::Value> = serde_json::from_str(&listed).unwrap();
    let names: Vec<_> =
        listed.iter().map(|mount| [&mount["path"], &mount["names"]].map(|text| text.as_str())).collect();
    assert_eq!(names, [[Some("/fs"), Some("delegated")], [Some("/synced"), Some("synced")]]);
    let mut refused = mounts.cluster.command(&["mount", "s3://bucket/c", "/c", "--write-type", "cache-mode"]);
    let refused = refused.args(["--names", "synced"]).output().unwrap();
    assert!(!refused.status.success());
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(said.contains("only the names of an fs-mode mount"), "{said}");
}

#[test]
fn thousands_of_files_are_made_where_every_worker_is_asked_over_the_network() {
    let mounts = Mounts::up(Options { conf: "local_descriptors = false\n".to_owned(), ..Options::default() });
    let held = mounts.held("held");
    for number in 0..4000 {
        fs::write(held.join(format!("{number}")), b"x").unwrap();
    }
    File::open(&held).unwrap().sync_all().unwrap();
    assert_eq!(fs::read_dir(mounts.there.join("held")).unwrap().count(), 4000);
    assert_eq!(mounts.counter("cavern_client_lost_changes_total"), 0);
}
