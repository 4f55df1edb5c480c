//! Locks of files in directories delegated to a mount: they wait for no master, whoever else asks sees them, and they
//! end with their owner, their client, and no sooner.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use cavern_conf::Failpoint;
use cavern_tests::{Options, eventually};
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};
use rustix::process::{Pid, Signal, kill_process};

use crate::client_restart::{daemon, kill_daemon};
use crate::fs_mode_delegations::{LONG_LEASE, Mounts};
use crate::fs_mode_locks::{AT_ONCE, EAGAIN, EXCLUSIVE, Locker, SHARED, UNLOCK};

const PATIENCE: Duration = Duration::from_secs(60);

/// A file in a directory delegated to the first mount, as both mounts have it.
fn held_file(mounts: &Mounts, name: &str) -> (PathBuf, PathBuf) {
    let here = mounts.held(name).join("file");
    File::create(&here).unwrap();
    (here, mounts.there.join(name).join("file"))
}

fn nothing_is_lost(mounts: &Mounts) {
    assert_eq!(mounts.counter("cavern_client_lost_changes_total"), 0);
}

#[test]
fn locks_wait_for_no_master_and_whoever_asks_sees_them() {
    let mounts = Mounts::up(Options::default());
    let (here, there) = held_file(&mounts, "held");
    let (mut one, mut neighbour) = (Locker::with(&here), Locker::with(&here));
    let stopped = mounts.stop_master();
    assert_eq!(one.ask(&format!("lockf f {EXCLUSIVE} 10 5")), "ok");
    assert_eq!(one.ask(&format!("lockf f {SHARED} 30 5")), "ok");
    assert_eq!(neighbour.ask(&format!("lockf f {} 12 1", SHARED | AT_ONCE)), EAGAIN);
    assert_eq!(neighbour.ask(&format!("lockf f {SHARED} 30 5")), "ok");
    assert_eq!(neighbour.ask("find f 1"), format!("1 10 5 {}", one.child.id()));
    assert_eq!(one.ask(&format!("lockf f {UNLOCK} 12 1")), "ok");
    assert_eq!(one.flock(EXCLUSIVE), "ok");
    assert_eq!(neighbour.flock(SHARED | AT_ONCE), EAGAIN);
    drop(stopped);
    let mut other = Locker::with(&there);
    assert_eq!(other.ask(&format!("lockf f {} 10 1", SHARED | AT_ONCE)), EAGAIN);
    assert_eq!(other.ask("find f 0"), "1 10 2 0", "of a process of another host");
    assert_eq!(other.ask(&format!("lockf f {} 12 1", EXCLUSIVE | AT_ONCE)), "ok");
    assert_eq!(other.ask(&format!("lockf f {} 34 1", EXCLUSIVE | AT_ONCE)), EAGAIN);
    assert_eq!(other.flock(SHARED | AT_ONCE), EAGAIN);
    other.wait(&format!("lockf f {EXCLUSIVE} 10 5"));
    assert_eq!(one.ask(&format!("lockf f {UNLOCK} 0 0")), "ok");
    assert_eq!(other.answer(), "ok");
    assert_eq!(one.ask(&format!("lockf f {} 13 1", EXCLUSIVE | AT_ONCE)), EAGAIN);
    assert_eq!(one.ask("close f"), "ok");
    eventually("the flock is gone", PATIENCE, || (other.flock(EXCLUSIVE | AT_ONCE) == "ok").then_some(()));
    nothing_is_lost(&mounts);
}

#[test]
fn what_is_unlocked_before_it_is_sent_costs_the_master_nothing() {
    const PAIRS: u64 = 1000;
    let mounts = Mounts::up(Options { conf: LONG_LEASE.to_owned(), ..Options::default() });
    let (here, there) = held_file(&mounts, "held");
    let mut one = Locker::with(&here);
    let stopped = mounts.stop_master();
    assert_eq!(one.ask(&format!("pairs f {PAIRS}")), "ok");
    drop(stopped);
    let undone = mounts.counter("cavern_client_undone_changes_total");
    eprintln!("{undone} of {PAIRS} locks were undone");
    assert!(undone > PAIRS / 2, "{undone}");
    assert_eq!(one.ask(&format!("lockf f {EXCLUSIVE} 20 5")), "ok");
    // What an owner has beside that stays.
    assert_eq!(one.ask(&format!("pairs f {PAIRS}")), "ok");
    let mut other = Locker::with(&there);
    assert_eq!(other.ask("find f 0"), "1 20 5 0");
    assert_eq!(other.ask(&format!("lockf f {} 0 20", EXCLUSIVE | AT_ONCE)), "ok");
    nothing_is_lost(&mounts);
}

#[test]
fn the_death_of_the_daemon_ends_no_lock_and_brings_none_back() {
    let mounts = Mounts::up(Options::default());
    let (here, there) = held_file(&mounts, "held");
    let (mut one, mut two) = (Locker::with(&here), Locker::with(&here));
    let stopped = mounts.stop_master();
    assert_eq!(one.ask(&format!("lockf f {EXCLUSIVE} 10 5")), "ok");
    assert_eq!(one.flock(EXCLUSIVE), "ok");
    assert_eq!(two.ask(&format!("lockf f {EXCLUSIVE} 50 5")), "ok");
    assert_eq!(two.ask(&format!("lockf f {UNLOCK} 50 5")), "ok");
    kill_daemon(&mounts.cluster);
    drop(stopped);
    assert_eq!(two.ask(&format!("lockf f {} 10 5", EXCLUSIVE | AT_ONCE)), EAGAIN);
    let mut other = Locker::with(&there);
    assert_eq!(other.ask("find f 0"), "1 10 5 0");
    assert_eq!(other.ask(&format!("lockf f {} 50 5", EXCLUSIVE | AT_ONCE)), "ok");
    assert_eq!(other.flock(SHARED | AT_ONCE), EAGAIN);
    other.wait(&format!("lockf f {EXCLUSIVE} 10 5"));
    assert_eq!(one.ask("close f"), "ok");
    assert_eq!(other.answer(), "ok");
    eventually("the flock is gone", PATIENCE, || (other.flock(EXCLUSIVE | AT_ONCE) == "ok").then_some(()));
}

#[test]
fn a_daemon_that_dies_before_it_answers_has_made_each_lock_once() {
    let mounts = Mounts::up(Options { failpoints: true, ..Options::default() });
    for pass in 1..=4 {
        let (here, there) = held_file(&mounts, &format!("held-{pass}"));
        let (mut one, mut two) = (Locker::with(&here), Locker::with(&here));
        mounts.cluster.arm(Failpoint::ChangeJournaled, pass);
        assert_eq!(one.ask(&format!("lockf f {EXCLUSIVE} 10 5")), "ok");
        assert_eq!(one.flock(EXCLUSIVE), "ok");
        assert_eq!(two.ask(&format!("lockf f {EXCLUSIVE} 50 5")), "ok");
        assert_eq!(two.ask(&format!("lockf f {UNLOCK} 50 5")), "ok");
        // Of what is sent already, so that it is an entry of its own.
        assert_eq!(one.ask(&format!("lockf f {EXCLUSIVE} 70 5")), "ok");
        File::create(here.with_file_name("another")).unwrap().sync_all().unwrap();
        assert_eq!(one.ask(&format!("lockf f {UNLOCK} 70 5")), "ok");
        eventually("the daemon has died", PATIENCE, || {
            mounts.cluster.has_died_at(Failpoint::ChangeJournaled).then_some(())
        });
        let mut other = Locker::with(&there);
        assert_eq!(other.ask(&format!("lockf f {} 10 5", EXCLUSIVE | AT_ONCE)), EAGAIN, "pass {pass}");
        assert_eq!(other.ask(&format!("lockf f {} 15 0", EXCLUSIVE | AT_ONCE)), "ok", "pass {pass}");
        assert_eq!(other.flock(SHARED | AT_ONCE), EAGAIN, "pass {pass}");
        assert_eq!(one.ask(&format!("lockf f {UNLOCK} 0 0")), "ok");
        assert_eq!(one.flock(UNLOCK), "ok");
        assert_eq!(other.ask(&format!("lockf f {} 0 0", EXCLUSIVE | AT_ONCE)), "ok", "pass {pass}");
        assert_eq!(other.flock(EXCLUSIVE | AT_ONCE), "ok", "pass {pass}");
    }
}

#[test]
fn the_locks_of_a_client_that_is_killed_end_with_its_lease() {
    let mounts = Mounts::up(Options { conf: "[master]\nsession_lease = \"3s\"\n".to_owned(), ..Options::default() });
    let (here, there) = held_file(&mounts, "held");
    let mut one = Locker::with(&here);
    assert_eq!(one.ask(&format!("lockf f {EXCLUSIVE} 10 5")), "ok");
    let mut other = Locker::with(&there);
    other.wait(&format!("lockf f {EXCLUSIVE} 0 0"));
    // In another directory, of which nobody has asked yet.
    let (here, there) = held_file(&mounts, "unseen");
    let mut two = Locker::with(&here);
    assert_eq!(two.ask(&format!("lockf f {EXCLUSIVE} 10 5")), "ok");
    let served = daemon(&mounts.cluster).unwrap();
    mounts.cluster.kill("fuse0");
    // It may have ended with the supervisor.
    let _gone = kill_process(Pid::from_raw(served).unwrap(), Signal::KILL);
    let began = Instant::now();
    assert_eq!(other.answer(), "ok");
    assert!(began.elapsed() < Duration::from_secs(15), "{:?}", began.elapsed());
    let mut third = Locker::with(&there);
    assert_eq!(third.ask(&format!("lockf f {EXCLUSIVE} 0 0")), "ok");
}

#[test]
fn what_is_counted_up_under_a_lock_counts_everybody_who_comes() {
    const EACH: usize = 40;
    let mounts = Mounts::up(Options::default());
    let (here, there) = held_file(&mounts, "held");
    let mut lockers: Vec<Locker> = (0..3).map(|_| Locker::with(&here)).collect();
    for locker in &mut lockers {
        locker.send(&format!("count f {EACH}"));
    }
    lockers.iter().for_each(|locker| assert_eq!(locker.answer(), "ok"));
    assert_eq!(fs::read_to_string(&here).unwrap(), (3 * EACH).to_string());
    for locker in &mut lockers {
        locker.send(&format!("count f {EACH}"));
    }
    lockers.push(Locker::with(&there));
    lockers[3].send(&format!("count f {EACH}"));
    lockers.iter().for_each(|locker| assert_eq!(locker.answer(), "ok"));
    for path in [&here, &there] {
        assert_eq!(fs::read_to_string(path).unwrap(), (7 * EACH).to_string());
    }
    nothing_is_lost(&mounts);
}

/// An answer, without what is another one in another process.
fn said(answer: String) -> String {
    if answer.split(' ').count() == 4 { "something".to_owned() } else { answer }
}

/// What a locker is asked next.
fn any_command(random: &mut StdRng, path: &Path) -> Vec<String> {
    let (start, length) = (random.random_range(0..12), random.random_range(1..6));
    let kind = [SHARED, EXCLUSIVE][random.random_range(0..2)] | AT_ONCE;
    match random.random_range(0..12) {
        0..=4 => vec![format!("lockf f {kind} {start} {length}")],
        5..=6 => vec![format!("lockf f {UNLOCK} {start} {length}")],
        7 => vec![format!("lockf f {UNLOCK} 0 0")],
        8 => vec![format!("flock f {kind}")],
        9 => vec![format!("flock f {UNLOCK}")],
        10 => vec![format!("find f {}", random.random_range(0..2))],
        _ => vec!["close f".to_owned(), format!("open f {}", path.display())],
    }
}

#[test]
fn each_answer_is_the_one_of_a_local_directory() {
    let mounts = Mounts::up(Options::default());
    let local = tempfile::tempdir().unwrap();
    for round in 0..6 {
        let (mut random, name) = (StdRng::seed_from_u64(round), format!("round-{round}"));
        let (here, there) = held_file(&mounts, &name);
        let beside = local.path().join(&name);
        File::create(&beside).unwrap();
        let mut lockers: Vec<_> = (0..3).map(|_| [Locker::with(&beside), Locker::with(&here)]).collect();
        for step in 0..80 {
            let [expected, found] = &mut lockers[random.random_range(0..3)];
            let mut same = random.clone();
            let (asked, other) = (any_command(&mut random, &beside), any_command(&mut same, &here));
            for (asked, other) in asked.iter().zip(&other) {
                let (expected, found) = (said(expected.ask(asked)), said(found.ask(other)));
                assert_eq!(found, expected, "round {round}, step {step}: {asked}");
            }
        }
        let (mut expected, mut found) = (Locker::with(&beside), Locker::with(&there));
        for byte in 0..20 {
            for kind in [SHARED, EXCLUSIVE] {
                let asked = format!("lockf f {} {byte} 1", kind | AT_ONCE);
                assert_eq!(found.ask(&asked), expected.ask(&asked), "round {round}: {asked}");
                let unlock = format!("lockf f {UNLOCK} {byte} 1");
                assert_eq!((found.ask(&unlock), expected.ask(&unlock)), ("ok".to_owned(), "ok".to_owned()));
            }
        }
        for kind in [SHARED, EXCLUSIVE] {
            assert_eq!(found.flock(kind | AT_ONCE), expected.flock(kind | AT_ONCE), "round {round}");
        }
    }
    nothing_is_lost(&mounts);
}

#[test]
fn programs_of_one_host_lock_each_other_out() {
    const EACH: usize = 15;
    let mounts = Mounts::up(Options::default());
    let held = mounts.held("held");
    fs::write(held.join("count"), "0\n").unwrap();
    let counting = "for _ in $(seq $1); do flock lock sh -c 'read n < count; echo $((n + 1)) > count' || exit 1; done";
    let writing = r#"
import sqlite3, sys
connection = sqlite3.connect("database", timeout=60, isolation_level=None)
if sys.argv[1] == "first":
    assert connection.execute("PRAGMA journal_mode=WAL").fetchone()[0] == "wal"
    connection.execute("CREATE TABLE rows (writer TEXT, number INTEGER)")
for number in range(int(sys.argv[2])):
    connection.execute("BEGIN IMMEDIATE")
    connection.execute("INSERT INTO rows VALUES (?, ?)", (sys.argv[1], number))
    connection.execute("COMMIT")
"#;
    let started =
        |program: &str, arguments: &[&str]| Command::new(program).args(arguments).current_dir(&held).spawn().unwrap();
    let each = EACH.to_string();
    assert!(started("python3", &["-c", writing, "first", "0"]).wait().unwrap().success());
    let mut children: Vec<_> = (0..2).map(|_| started("sh", &["-c", counting, "sh", &each])).collect();
    children.extend(["1", "2"].map(|writer| started("python3", &["-c", writing, writer, &each])));
    for mut child in children {
        assert!(child.wait().unwrap().success());
    }
    let there = mounts.there.join("held");
    assert_eq!(fs::read_to_string(there.join("count")).unwrap().trim(), (2 * EACH).to_string());
    let count = r#"
import sqlite3
connection = sqlite3.connect("database")
said = [connection.execute(asked).fetchone()[0] for asked in ("PRAGMA integrity_check", "SELECT count(*) FROM rows")]
print(*said)
"#;
    let output = Command::new("python3").args(["-c", count]).current_dir(&there).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), format!("ok {}", 2 * EACH), "{output:?}");
    nothing_is_lost(&mounts);
}
