//! Who waits for locks, and the ways in which they end.

use super::*;
use crate::{Database, Family, Outcome, apply, blocking_lock};
use cavern_proto::master::mutation::Change as Asked;
use cavern_proto::master::{CreateInode, Mount, Mutation, MutationResult, WriteType};
use cavern_proto::record::command::Command as Kind;
use cavern_proto::record::{AttachMount, Command, EndSessionStep, InitCluster, Mutate};

fn lock(owner: u64, r#type: LockType, start: u64, end: u64) -> Lock {
    Lock { session: 7, owner, pid: 1, r#type: r#type.into(), start, end }
}

/// A state with two files, and sessions that change it.
struct Fixture {
    database: Database,
    files: [u64; 2],
    seq: u64,
    _dir: tempfile::TempDir,
}

const AGAIN: i32 = Errno::AGAIN.raw_os_error();
const DEADLOCK: i32 = Errno::DEADLK.raw_os_error();

impl Fixture {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let database = Database::open(dir.path(), 1 << 20).unwrap();
        let mut bench = Self { database, files: [0; 2], seq: 0, _dir: dir };
        bench.run(Kind::Init(InitCluster { cluster_id: "c".into(), now_ns: 1, feature_version: 1 }));
        let write_type = WriteType::FsMode as i32;
        let mount = Mount { path: "/m".into(), uri: "memory://m".into(), write_type, ..Mount::default() };
        let attach = AttachMount { mount: Some(mount), mounts_epoch: 0 };
        let (Outcome::Mount(mount), _) = bench.run(Kind::AttachMount(attach)) else { panic!("no mount") };
        for (number, name) in ["a", "b"].into_iter().enumerate() {
            let (parent, name) = (mount.root_inode, name.into());
            let create = CreateInode { parent, name, kind: InodeKind::File.into(), ..CreateInode::default() };
            bench.files[number] = bench.change(1, Asked::Create(create)).0.inode;
        }
        bench
    }

    /// What a command did, and which sessions are notified that a lock was granted.
    fn run(&self, command: Kind) -> (Outcome, Vec<(u64, u64)>) {
        let mut transaction = Transaction::new(&self.database).unwrap();
        let outcome = apply(&mut transaction, Command { command: Some(command) }).unwrap();
        let (writes, changes) = transaction.finish().unwrap();
        self.database.write(writes.into_batch(&self.database)).unwrap();
        let granted = changes.list.into_iter().filter_map(|change| match change {
            Change::LockGranted { session, waiter } => Some((session, waiter)),
            _ => None,
        });
        (outcome, granted.collect())
    }

    fn change(&mut self, session: u64, change: Asked) -> (MutationResult, Vec<(u64, u64)>) {
        self.seq += 1;
        let mutation = Some(Mutation { seq: self.seq, uid: 0, gid: 0, change: Some(change), ..Mutation::default() });
        match self.run(Kind::Mutate(Mutate { session, answered: 0, now_ns: 1, mutation, ..Mutate::default() })) {
            (Outcome::Mutated(result, _), granted) => (*result, granted),
            (other, _) => panic!("{other:?}"),
        }
    }

    fn ask(&mut self, session: u64, set: SetLock) -> (i32, Vec<(u64, u64)>) {
        let (result, granted) = self.change(session, Asked::SetLock(set));
        (result.errno, granted)
    }

    fn set(&self, kind: LockKind, file: usize, lock: Lock) -> SetLock {
        SetLock { inode: self.files[file], kind: kind.into(), lock: Some(lock), ..SetLock::default() }
    }

    fn try_lock(&mut self, session: u64, file: usize, lock: Lock) -> i32 {
        let set = self.set(LockKind::Posix, file, lock);
        self.ask(session, set).0
    }

    fn wait(&mut self, session: u64, waiter: u64, file: usize, lock: Lock) -> i32 {
        let set = SetLock { waiter, wait: true, ..self.set(LockKind::Posix, file, lock) };
        self.ask(session, set).0
    }

    fn end(&self, session: u64) -> Vec<(u64, u64)> {
        let step = EndSessionStep { session, limit: 256, part: 0, now_ns: 1 };
        let (Outcome::StepProgress(progress), granted) = self.run(Kind::EndSessionStep(step)) else {
            panic!("no step")
        };
        assert!(!progress.more);
        granted
    }

    fn is_clean(&self) -> bool {
        let tables = Tables::new(&self.database);
        tables.keys(Family::Lock).next().is_none() && tables.keys(Family::LockSession).next().is_none()
    }
}

use LockType::{Exclusive, Shared, Unlocked};
use cavern_proto::master::Kind as InodeKind;

#[test]
fn who_waits_is_told_in_the_order_of_arrival() {
    let mut bench = Fixture::new();
    assert_eq!(bench.try_lock(1, 0, lock(1, Exclusive, 0, 9)), 0);
    assert_eq!(bench.try_lock(2, 0, lock(1, Shared, 5, 5)), AGAIN);
    assert_eq!(bench.wait(2, 1, 0, lock(1, Exclusive, 5, 20)), AGAIN);
    assert_eq!(bench.wait(3, 1, 0, lock(1, Exclusive, 9, 9)), AGAIN);
    // Asked again, it keeps its place.
    assert_eq!(bench.wait(2, 1, 0, lock(1, Exclusive, 5, 20)), AGAIN);
    let unlock = bench.set(LockKind::Posix, 0, lock(1, Unlocked, 0, LAST_BYTE));
    assert_eq!(bench.ask(1, unlock), (0, vec![(2, 1)]));
    // Granted, and asked for again because the client did not receive the event.
    assert_eq!(bench.wait(2, 1, 0, lock(1, Exclusive, 5, 20)), 0);
    assert_eq!(bench.ask(2, unlock), (0, vec![(3, 1)]));
    assert_eq!(bench.ask(3, unlock), (0, vec![]));
    assert!(bench.is_clean());
}

#[test]
fn who_gives_up_waiting_leaves_the_queue() {
    let mut bench = Fixture::new();
    assert_eq!(bench.try_lock(1, 0, lock(1, Exclusive, 0, 9)), 0);
    let want = lock(1, Exclusive, 0, 0);
    assert_eq!(bench.wait(2, 8, 0, want), AGAIN);
    let give_up = SetLock { waiter: 8, ..bench.set(LockKind::Posix, 0, want) };
    assert_eq!(bench.ask(2, give_up), (AGAIN, vec![]));
    let unlock = bench.set(LockKind::Posix, 0, lock(1, Unlocked, 0, LAST_BYTE));
    assert_eq!(bench.ask(1, unlock), (0, vec![]));
    assert!(bench.is_clean());
    // Too late: it has the lock, and the answer says so.
    assert_eq!(bench.try_lock(1, 0, lock(1, Exclusive, 0, 9)), 0);
    assert_eq!(bench.wait(2, 9, 0, want), AGAIN);
    assert_eq!(bench.ask(1, unlock), (0, vec![(2, 9)]));
    assert_eq!(bench.ask(2, SetLock { waiter: 9, ..give_up }), (0, vec![]));
}

#[test]
fn a_circle_of_waiting_is_refused_across_files_and_sessions() {
    let mut bench = Fixture::new();
    assert_eq!(bench.try_lock(1, 0, lock(1, Exclusive, 0, 0)), 0);
    assert_eq!(bench.try_lock(2, 1, lock(1, Exclusive, 0, 0)), 0);
    assert_eq!(bench.try_lock(2, 1, lock(2, Exclusive, 5, 5)), 0);
    assert_eq!(bench.wait(2, 1, 0, lock(2, Shared, 0, 0)), AGAIN);
    // Of another owner of that session, who waits for nothing.
    assert_eq!(bench.wait(1, 1, 1, lock(3, Shared, 0, 0)), AGAIN);
    assert_eq!(bench.wait(1, 2, 1, lock(1, Shared, 0, 9)), DEADLOCK);
    // Without waiting, it is merely locked.
    assert_eq!(bench.try_lock(1, 1, lock(1, Shared, 0, 9)), AGAIN);
    // An upgrade that two of them want.
    assert_eq!(bench.try_lock(4, 0, lock(1, Shared, 50, 50)), 0);
    assert_eq!(bench.try_lock(5, 0, lock(1, Shared, 50, 50)), 0);
    assert_eq!(bench.wait(4, 1, 0, lock(1, Exclusive, 50, 50)), AGAIN);
    assert_eq!(bench.wait(5, 1, 0, lock(1, Exclusive, 50, 50)), DEADLOCK);
}

#[test]
fn the_end_of_a_session_frees_its_locks_and_ends_its_waiting() {
    let mut bench = Fixture::new();
    assert_eq!(bench.try_lock(1, 0, lock(1, Exclusive, 0, 9)), 0);
    assert_eq!(bench.try_lock(1, 1, lock(2, Shared, 0, 9)), 0);
    assert_eq!(bench.wait(2, 1, 0, lock(1, Exclusive, 0, 9)), AGAIN);
    assert_eq!(bench.wait(3, 1, 0, lock(1, Exclusive, 0, 9)), AGAIN);
    assert_eq!(bench.end(2), []);
    assert_eq!(bench.end(1), [(3, 1)]);
    assert_eq!(bench.try_lock(4, 1, lock(1, Exclusive, 0, 9)), 0);
    assert_eq!(bench.end(3), []);
    assert_eq!(bench.end(4), []);
    assert!(bench.is_clean());
}

#[test]
fn flocks_are_of_whole_files_and_know_nothing_of_the_others() {
    let mut bench = Fixture::new();
    assert_eq!(bench.try_lock(1, 0, lock(1, Exclusive, 0, LAST_BYTE)), 0);
    let flock = |bench: &Fixture, r#type| bench.set(LockKind::Flock, 0, lock(1, r#type, 5, 6));
    let (shared, exclusive) = (flock(&bench, Shared), flock(&bench, Exclusive));
    assert_eq!(bench.ask(2, shared).0, 0);
    assert_eq!(bench.ask(3, shared).0, 0);
    assert_eq!(bench.ask(4, exclusive).0, AGAIN);
    assert_eq!(bench.ask(4, SetLock { wait: true, waiter: 1, ..exclusive }).0, AGAIN);
    // Both want more: each gives up what it has before it waits, so the first of those who wait gets its turn.
    assert_eq!(bench.ask(2, SetLock { wait: true, waiter: 1, ..exclusive }), (AGAIN, vec![]));
    assert_eq!(bench.ask(3, SetLock { wait: true, waiter: 1, ..exclusive }), (AGAIN, vec![(4, 1)]));
    let unlock = flock(&bench, Unlocked);
    assert_eq!(bench.ask(4, unlock), (0, vec![(2, 1)]));
    let tables = Tables::new(&bench.database);
    let found = |lock: Lock| blocking_lock(tables, bench.files[0], LockKind::Flock, &lock).unwrap();
    assert_eq!(found(Lock { session: 9, ..lock(1, Shared, 0, 0) }).map(|lock| lock.session), Some(2));
    assert_eq!(found(Lock { session: 2, ..lock(1, Exclusive, 0, 0) }), None);
}

#[test]
fn locks_without_sense_are_refused() {
    let mut bench = Fixture::new();
    let invalid = Errno::INVAL.raw_os_error();
    assert_eq!(bench.try_lock(1, 0, lock(1, Shared, 5, 4)), invalid);
    assert_eq!(bench.try_lock(1, 0, lock(1, Shared, 0, LAST_BYTE + 1)), invalid);
    let unknown = Lock { r#type: 9, ..lock(1, Shared, 0, 0) };
    assert_eq!(bench.try_lock(1, 0, unknown), invalid);
    let set = bench.set(LockKind::Unspecified, 0, lock(1, Shared, 0, 0));
    assert_eq!(bench.ask(1, set).0, invalid);
    let gone = SetLock { inode: 999, ..bench.set(LockKind::Posix, 0, lock(1, Shared, 0, 0)) };
    assert_eq!(bench.ask(1, gone).0, Errno::STALE.raw_os_error());
    for byte in 0..LOCKS_MAX as u64 {
        assert_eq!(bench.try_lock(1, 0, lock(1, Shared, 2 * byte, 2 * byte)), 0);
    }
    assert_eq!(bench.try_lock(1, 0, lock(1, Shared, 1 << 40, 1 << 40)), Errno::NOLCK.raw_os_error());
    assert_eq!(bench.try_lock(1, 0, lock(1, Unlocked, 0, 0)), 0);
}

#[test]
fn holes_in_a_lock_are_locks_as_well() {
    let mut bench = Fixture::new();
    assert_eq!(bench.try_lock(1, 0, lock(1, Exclusive, 0, LAST_BYTE)), 0);
    let hole = |number: u64| lock(1, Unlocked, 2 * number + 1, 2 * number + 1);
    for number in 1..LOCKS_MAX as u64 {
        assert_eq!(bench.try_lock(1, 0, hole(number)), 0, "{number}");
    }
    let held = |bench: &Fixture| Tables::new(&bench.database).locks(bench.files[0], LockKind::Posix).unwrap().held;
    let before = held(&bench);
    assert_eq!(before.len(), LOCKS_MAX);
    assert_eq!(bench.try_lock(1, 0, hole(LOCKS_MAX as u64)), Errno::NOLCK.raw_os_error());
    assert_eq!(held(&bench), before, "nothing of it was let go of");
    // What leaves no more than there were is.
    assert_eq!(bench.try_lock(1, 0, lock(1, Unlocked, 0, 8)), 0);
    assert_eq!(bench.try_lock(1, 0, lock(1, Unlocked, 0, LAST_BYTE)), 0);
    assert!(bench.is_clean());
}
