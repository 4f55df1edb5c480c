//! All processes of a mount are killed at the same moment: the worker of the host has its journal, and what the mount
//! had answered is made.

use std::fs::{self, File};
use std::io::Write as _;
use std::time::Duration;

use cavern_conf::{Config, Failpoint};
use cavern_security::{Authority, Identity, Role};
use cavern_tests::{Child, Cluster, Options, Process, eventually};
use rustix::process::Signal;

use crate::client_restart::{content, replace_by_death};
use crate::fs_mode_delegations::{Mounts, change_all, tree};
use crate::fs_mode_lease::Stopped;

const PATIENCE: Duration = Duration::from_secs(60);

fn up(conf: &str) -> Mounts {
    let mounts = Mounts::up(Options { conf: conf.to_owned(), failpoints: true, ..Options::default() });
    await_journals(&mounts, 2);
    mounts
}

fn worker_metric(mounts: &Mounts, name: &str) -> Option<u64> {
    mounts.cluster.status().workers[0].metric(&format!("cavern_worker_{name}"))
}

/// The worker has the journals of so many mounts.
fn await_journals(mounts: &Mounts, count: u64) {
    eventually(&format!("{count} journals are kept"), PATIENCE, || {
        (worker_metric(mounts, "journals") == Some(count)).then_some(())
    });
}

fn replays(mounts: &Mounts) -> u64 {
    worker_metric(mounts, "replays_total").unwrap()
}

/// Supervisor and daemon of the first mount. To be asked for while the master answers.
struct Processes {
    supervisor: Child,
    daemon: Process,
}

impl Processes {
    fn of(mounts: &Mounts) -> Self {
        let supervisor = mounts.cluster.status().fuse[0].clone();
        let daemon = Process::of(&supervisor);
        Self { supervisor, daemon }
    }

    /// Kills both, neither of which has another moment.
    fn kill(self, mounts: &Mounts, before: impl FnOnce()) {
        self.daemon.signal(Signal::STOP);
        before();
        mounts.cluster.signal(&self.supervisor, Signal::KILL);
        self.daemon.signal(Signal::KILL);
    }
}

/// Writes to a file that stays open: the master does not know while it is stopped.
fn write(mut file: &File, number: usize) -> Vec<u8> {
    let bytes = content(number, 700_000);
    file.write_all(&bytes).unwrap();
    bytes
}

#[test]
fn what_was_answered_and_written_outlives_the_death_of_supervisor_and_daemon_at_once() {
    let mounts = up("");
    for round in 0..4 {
        let held = mounts.held(&format!("held-{round}"));
        let there = mounts.there.join(format!("held-{round}"));
        let (open, there_open) =
            (mounts.here.join(format!("open-{round}")), mounts.there.join(format!("open-{round}")));
        // What is made in there later has its number: it comes behind what was sent.
        fs::write(held.join("written"), content(round, 3000)).unwrap();
        let file = File::create(&open).unwrap();
        let processes = Processes::of(&mounts);
        let stopped = mounts.stop_master();
        let bytes = write(&file, round);
        let mut expected = change_all(&held);
        expected.insert("written".into(), (0o100_644, content(round, 3000)));
        processes.kill(&mounts, || {});
        drop(stopped);
        drop(file);
        // Whoever comes first, another mount or the next one here.
        if round % 2 == 0 {
            assert_eq!(tree(&there), expected, "round {round}");
            // The length of a file that nobody holds is committed a moment later.
            eventually("the length is known", PATIENCE, || (fs::read(&there_open).ok()? == bytes).then_some(()));
            mounts.cluster.start("fuse");
        } else {
            mounts.cluster.start("fuse");
            assert_eq!(tree(&held), expected, "round {round}");
            assert!(fs::read(&open).unwrap() == bytes, "round {round}");
        }
        assert_eq!(tree(&held), expected, "round {round}");
        assert_eq!(tree(&there), expected, "round {round}");
        for path in [&open, &there_open] {
            assert!(fs::read(path).unwrap() == bytes, "round {round}: {}", path.display());
        }
        assert_eq!(replays(&mounts), round as u64 + 1);
        // The dead one's is gone with what was left.
        await_journals(&mounts, 2);
    }
}

#[test]
fn a_replay_that_is_killed_is_finished_by_another_one() {
    let mounts = up("[master]\nsession_lease = \"30s\"\n");
    let points = [Failpoint::ReplayBegun, Failpoint::WriteBackSent, Failpoint::WriteBackMade, Failpoint::CommitBegun];
    for (round, point) in points.into_iter().enumerate() {
        let held = mounts.held(&format!("held-{round}"));
        let there = mounts.there.join(format!("held-{round}"));
        let file = File::create(mounts.here.join(format!("open-{round}"))).unwrap();
        let before = replays(&mounts);
        let processes = Processes::of(&mounts);
        let stopped = mounts.stop_master();
        let bytes = write(&file, round);
        let expected = change_all(&held);
        processes.kill(&mounts, || mounts.cluster.arm(point, 1));
        drop(stopped);
        drop(file);
        eventually(&format!("a replay dies at {}", point.name()), PATIENCE, || {
            mounts.cluster.has_died_at(point).then_some(())
        });
        assert_eq!(tree(&there), expected, "{}", point.name());
        await_journals(&mounts, 1);
        assert!(fs::read(mounts.there.join(format!("open-{round}"))).unwrap() == bytes, "{}", point.name());
        assert_eq!(replays(&mounts) - before, 2, "{}", point.name());
        mounts.cluster.start("fuse");
        await_journals(&mounts, 2);
    }
}

#[test]
fn a_replay_whose_certificate_is_that_of_another_client_leaves_the_rest_to_one_that_may() {
    let conf = "[master]\nsession_lease = \"60s\"\n".to_owned();
    let mounts = Mounts::up(Options { conf, secure: true, ..Options::default() });
    await_journals(&mounts, 2);
    let held = mounts.held("held");
    let there = mounts.there.join("held");
    let before = replays(&mounts);
    // What the worker's processes show, and what somebody else has.
    let security = Config::load(Some(&mounts.cluster.status().conf)).unwrap().security;
    let authority = Authority::open(&mounts.cluster.directory().join("certificates")).unwrap();
    let elsewhere = tempfile::tempdir_in(mounts.cluster.directory()).unwrap();
    let name = Config::load(Some(&mounts.cluster.status().conf)).unwrap().cluster.name;
    let stranger = Identity::new(&name, Role::Client, "stranger").unwrap();
    let strangers = authority.issue(&stranger, Duration::from_secs(3600), elsewhere.path(), "stranger").unwrap();
    let own = ["certificate", "key"].map(|file| elsewhere.path().join(file));
    for (path, kept) in [&security.certificate, &security.key].into_iter().zip(&own) {
        fs::copy(path, kept).unwrap();
    }
    let processes = Processes::of(&mounts);
    let stopped = mounts.stop_master();
    let expected = change_all(&held);
    processes.kill(&mounts, || {
        fs::copy(&strangers.certificate, &security.certificate).unwrap();
        fs::copy(&strangers.key, &security.key).unwrap();
    });
    drop(stopped);
    eventually("two attempts come to nothing", PATIENCE, || {
        (worker_metric(&mounts, "replays_total")? >= before + 2).then_some(())
    });
    for (kept, path) in own.iter().zip([&security.certificate, &security.key]) {
        fs::copy(kept, path).unwrap();
    }
    assert_eq!(tree(&there), expected);
    await_journals(&mounts, 1);
}

#[test]
fn nothing_is_replayed_after_an_orderly_end_or_the_death_of_the_daemon_alone() {
    let mounts = up("");
    let held = mounts.held("held");
    for round in 0..2 {
        let directory = held.join(round.to_string());
        fs::create_dir(&directory).unwrap();
        let expected = change_all(&directory);
        replace_by_death(&mounts.cluster);
        assert_eq!(tree(&directory), expected);
    }
    await_journals(&mounts, 2);
    let next = mounts.held("next");
    let expected = change_all(&next);
    mounts.cluster.stop("fuse");
    await_journals(&mounts, 1);
    assert_eq!(replays(&mounts), 0);
    assert_eq!(tree(&mounts.there.join("next")), expected);
    mounts.cluster.start("fuse");
    await_journals(&mounts, 2);
    assert_eq!(replays(&mounts), 0);
}

#[test]
fn a_worker_that_stands_still_keeps_nobody_from_mounting_and_is_named() {
    let cluster = Cluster::up(Options::default());
    let seeded = cluster.seed("bucket", "", 3, 5000);
    cluster.mount("s3://bucket", "/data", &[]);
    cluster.stop("fuse");
    let worker = cluster.status().workers[0].clone();
    let stopped = Stopped::new(&worker);
    // Whether there is something that it would have to make, nobody knows.
    cluster.start("fuse");
    cluster.assert_tree("data", "", &seeded);
    drop(stopped);
    let log = fs::read_to_string(&cluster.at_start.fuse[0].log).unwrap();
    let said = |what: &str| assert_eq!(log.matches(what).count(), 1, "{what}: {log}");
    said("the worker of this host is waited for: it may have what the mount before had answered last worker=1");
    said("the worker of this host does not answer in time");
}

#[test]
fn a_worker_that_was_started_again_is_handed_the_journals_anew() {
    let mounts = up("[master]\nsession_lease = \"30s\"\n");
    mounts.cluster.stop("worker0");
    mounts.cluster.start("worker0");
    await_journals(&mounts, 2);
    mounts.cluster.kill("worker0");
    mounts.cluster.start("worker0");
    await_journals(&mounts, 2);
    let held = mounts.held("held");
    let processes = Processes::of(&mounts);
    let stopped = mounts.stop_master();
    let expected = change_all(&held);
    processes.kill(&mounts, || {});
    drop(stopped);
    assert_eq!(tree(&mounts.there.join("held")), expected);
    assert_eq!(replays(&mounts), 1);
}

#[test]
fn a_replay_that_comes_when_the_session_is_over_says_what_is_lost() {
    // It outlasts what is done while the master is stopped.
    let mounts = up("[master]\nsession_lease = \"4s\"\n");
    let held = mounts.held("held");
    let worker = mounts.cluster.at_start.workers[0].clone();
    let processes = Processes::of(&mounts);
    let stopped = mounts.stop_master();
    change_all(&held);
    mounts.cluster.signal(&worker, Signal::STOP);
    processes.kill(&mounts, || {});
    drop(stopped);
    // The other mount waits until the session is over.
    let seen = tree(&mounts.there.join("held"));
    mounts.cluster.signal(&worker, Signal::CONT);
    let said = "the session of the mount is over: up to so many changes that it had answered are lost";
    eventually("the log says so", PATIENCE, || {
        let log = fs::read_to_string(&worker.log).unwrap();
        log.lines().any(|line| line.contains(said) && line.contains("changes=")).then_some(())
    });
    await_journals(&mounts, 1);
    assert_eq!(tree(&mounts.there.join("held")), seen, "nothing is made any more");
    mounts.cluster.start("fuse");
    assert_eq!(tree(&held), seen);
    fs::write(held.join("later"), "later").unwrap();
    assert_eq!(fs::read(mounts.there.join("held/later")).unwrap(), b"later");
}
