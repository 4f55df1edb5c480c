//! Directories delegated to sessions, command by command.

mod steps;

use std::collections::BTreeSet;

use bytes::Bytes;
use cavern_proto::master::mutation::Change;
use cavern_proto::master::{
    CommitContent, LinkInode, Lock, LockKind, LockType, Mount, Mutation, MutationResult, RefreshFate, RemoveName,
    RenameName, SetAttr, SetLock, SetOpenRefs, SetQuota, SetTtl, SetXattr, TtlAction, WriteType,
};
use cavern_proto::record::command::Command as Kinds;
use cavern_proto::record::{
    AdoptListing, AttachMount, Command, CountUsage, DentryRecord, EndSessionStep, Expire, ImportExternalChange,
    InitCluster, ListedEntry, Mutate, RemoveMount,
};
use prost::Message as _;
use rocksdb::IteratorMode;

use super::super::context::Caller;
use super::*;
use crate::commands::results::RANGES_MAX;
use crate::records::is_directory;
use crate::schema::encode_key;
use crate::{Database, DelegationChange, Family, Outcome, StepProgress, Tables, apply};

/// When commands are put into the log.
const NOW: i64 = 1000;
/// The session that holds what it makes, and another one.
const HOLDER: u64 = 7;
const OTHER: u64 = 8;

struct Fixture {
    database: Database,
    mount: Mount,
    root: u64,
    seq: u64,
    _dir: tempfile::TempDir,
}

fn name(text: &str) -> Bytes {
    Bytes::copy_from_slice(text.as_bytes())
}

fn creation(parent: u64, text: &str, kind: Kind) -> CreateInode {
    CreateInode { parent, name: name(text), kind: kind as i32, mode: 0o700, ..CreateInode::default() }
}

fn create(parent: u64, text: &str, kind: Kind) -> Change {
    Change::Create(creation(parent, text, kind))
}

fn remove(parent: u64, text: &str, directory: bool) -> Change {
    Change::Remove(RemoveName { parent, name: name(text), directory })
}

fn rename(from: (u64, &str), to: (u64, &str)) -> Change {
    let ((parent, old), (new_parent, new)) = (from, to);
    Change::Rename(RenameName { parent, name: name(old), new_parent, new_name: name(new), mode: 0 })
}

fn chmod(inode: u64) -> Change {
    Change::SetAttr(SetAttr { inode, mode: Some(0o711), ..SetAttr::default() })
}

fn let_go(directories: &[u64]) -> Change {
    Change::ReturnDelegations(ReturnDelegations { directories: directories.to_vec(), all: false })
}

const STALE: i32 = Errno::STALE.raw_os_error();
const INVALID: i32 = Errno::INVAL.raw_os_error();
const AGAIN: i32 = Errno::AGAIN.raw_os_error();

impl Fixture {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let database = Database::open(dir.path(), 1 << 20).unwrap();
        let mut bench = Self { database, mount: Mount::default(), root: 0, seq: 0, _dir: dir };
        bench.run(Kinds::Init(InitCluster { cluster_id: "c".into(), now_ns: 1, feature_version: 1 }));
        let (uri, write_type) = ("memory://m".to_owned(), WriteType::FsMode as i32);
        let mount = Mount { path: "/m".into(), uri, write_type, block_size: 1 << 20, ..Mount::default() };
        let attach = AttachMount { mount: Some(mount), mounts_epoch: 0 };
        let Outcome::Mount(mount) = bench.run(Kinds::AttachMount(attach)) else { panic!("no mount") };
        (bench.root, bench.mount) = (mount.root_inode, *mount);
        bench
    }

    fn tables(&self) -> Tables<'_> {
        Tables::new(&self.database)
    }

    fn run(&mut self, command: Kinds) -> Outcome {
        self.run_with_changes(command).0
    }

    fn run_with_changes(&mut self, command: Kinds) -> (Outcome, Vec<DelegationChange>) {
        let mut transaction = Transaction::new(&self.database).unwrap();
        let outcome = apply(&mut transaction, Command { command: Some(command) }).unwrap();
        let (writes, changes) = transaction.finish().unwrap();
        self.database.write(writes.into_batch(&self.database)).unwrap();
        self.check();
        (outcome, changes.delegations)
    }

    /// Whatever was done, the records of what is held agree with each other, and say so of directories that are there.
    fn check(&self) {
        let (tables, all) = (self.tables(), self.tables().all_delegations().unwrap());
        assert_eq!(tables.counters().unwrap().delegations, all.len() as u64);
        let sessions: BTreeSet<u64> = all.iter().map(|held| held.session).chain([HOLDER, OTHER]).collect();
        let mut of_sessions = Vec::new();
        for session in sessions {
            let of_session = tables.directories_of(session, usize::MAX).unwrap();
            assert_eq!(tables.delegation_count(session).unwrap(), of_session.len() as u64);
            of_sessions.extend(of_session);
        }
        of_sessions.sort_by_key(|held| (held.mount_id, held.directory));
        assert_eq!(of_sessions, all);
        for held in all {
            let record = tables.inode(held.directory).unwrap().unwrap();
            assert!(is_directory(&record) && !record.unlinked && record.mount_id == held.mount_id);
        }
    }

    fn mutate(&mut self, session: u64, mutation: Mutation) -> MutationResult {
        self.seq += 1;
        self.repeat(session, Mutation { seq: self.seq, ..mutation })
    }

    fn repeat(&mut self, session: u64, mutation: Mutation) -> MutationResult {
        let mutate = Mutate { session, answered: 0, now_ns: NOW, mutation: Some(mutation), ..Mutate::default() };
        let Outcome::Mutated(result, _) = self.run(Kinds::Mutate(mutate)) else { panic!("no result") };
        *result
    }

    /// A change that the master is asked for, and waited for.
    fn change(&mut self, session: u64, change: Change) -> MutationResult {
        self.mutate(session, Mutation { change: Some(change), ..Mutation::default() })
    }

    fn done(&mut self, session: u64, change: Change) -> u64 {
        let result = self.change(session, change);
        assert_eq!(result.errno, 0, "{}", result.reason);
        result.inode
    }

    /// A change that the session has answered for.
    fn answered(&mut self, session: u64, change: Change) -> MutationResult {
        self.mutate(session, Mutation { change: Some(change), is_write_back: true, ..Mutation::default() })
    }

    /// A directory that the session has made, to hold it.
    fn make(&mut self, session: u64, parent: u64, text: &str) -> MutationResult {
        self.change(session, Change::Create(CreateInode { delegate: true, ..creation(parent, text, Kind::Directory) }))
    }

    fn held(&mut self, text: &str) -> u64 {
        let made = self.make(HOLDER, self.root, text);
        assert!(made.errno == 0 && made.delegated, "{made:?}");
        made.inode
    }

    fn holder(&self, directory: u64) -> Option<u64> {
        self.tables().holder(self.mount.id, directory).unwrap()
    }

    /// Changes the state without a command.
    fn write(&self, change: impl FnOnce(&mut Transaction<'_>)) {
        let mut transaction = Transaction::new(&self.database).unwrap();
        change(&mut transaction);
        let (writes, _) = transaction.finish().unwrap();
        self.database.write(writes.into_batch(&self.database)).unwrap();
        self.check();
    }

    /// Gives a directory so many more names, of files.
    fn add_names(&self, directory: u64, count: u64) {
        self.write(|transaction| {
            for number in 0..count {
                let record = DentryRecord { inode: u64::MAX - number, kind: Kind::File as i32 };
                transaction.put_dentry(directory, format!("file {number}").as_bytes(), record);
            }
            let mut record = transaction.inode(directory).unwrap().unwrap();
            records::count_entries(&mut record, count as i64);
            transaction.put_inode(directory, record);
        });
    }

    /// Makes so many directories in another one, and has a session hold them.
    fn hold_many(&self, session: u64, parent: u64, count: u64) {
        self.write(|transaction| {
            let mount_id = self.mount.id;
            for number in 0..count {
                let record = records::directory_record(parent, name(&number.to_string()), mount_id, NOW);
                let directory = transaction.create_inode(record);
                transaction.put(schema::DirectoryDelegations, (mount_id, directory), &session);
                transaction.put(schema::SessionDelegations, (session, directory), &mount_id);
            }
            let before = transaction.before().delegation_count(session).unwrap();
            transaction.put(schema::DelegationCounts, session, &(before + count));
            transaction.counters.delegations += count;
        });
    }

    /// All of the state but results, and the sessions that have them.
    fn dump(&self) -> Vec<(Family, Vec<u8>, Vec<u8>)> {
        let mut dump = Vec::new();
        for &family in Family::STATE.iter().filter(|family| !matches!(family, Family::Result | Family::Session)) {
            for item in self.database.raw().iterator_cf(self.database.family(family), IteratorMode::Start) {
                let (key, value) = item.unwrap();
                dump.push((family, key.to_vec(), value.to_vec()));
            }
        }
        dump
    }

    /// A change that must be refused, and change nothing.
    #[track_caller]
    fn refused(&mut self, what: &str, ask: impl FnOnce(&mut Self) -> MutationResult) -> MutationResult {
        let before = self.dump();
        let result = ask(self);
        assert!(result.errno != 0, "{what}");
        assert!(self.dump() == before, "{what} has left something behind");
        result
    }
}

#[test]
fn a_directory_is_held_from_its_first_moment_on() {
    let mut bench = Fixture::new();
    let mutation = Mutation {
        seq: 1,
        change: Some(Change::Create(CreateInode { delegate: true, ..creation(bench.root, "d", Kind::Directory) })),
        ..Mutation::default()
    };
    let mutate = Mutate { session: HOLDER, now_ns: NOW, mutation: Some(mutation.clone()), ..Mutate::default() };
    let (outcome, changes) = bench.run_with_changes(Kinds::Mutate(mutate));
    let Outcome::Mutated(made, _) = outcome else { panic!("{outcome:?}") };
    assert!(made.errno == 0 && made.delegated);
    let held = DirectoryDelegation { mount_id: bench.mount.id, directory: made.inode, session: HOLDER };
    assert_eq!(
        (changes, bench.tables().all_delegations().unwrap()),
        (vec![DelegationChange::Granted(held)], vec![held])
    );
    // The answer may have been lost.
    assert_eq!(bench.repeat(HOLDER, mutation), *made);
    assert_eq!(bench.tables().counters().unwrap().delegations, 1);
    bench.seq = 1;

    // Nothing else is held by being made: who knows what others have seen of it?
    let plain = bench.change(HOLDER, create(bench.root, "e", Kind::Directory));
    let file = CreateInode { delegate: true, ..creation(bench.root, "f", Kind::File) };
    let file = bench.change(HOLDER, Change::Create(file));
    let again = bench.make(HOLDER, bench.root, "d");
    let nobody = bench.make(0, bench.root, "of nobody");
    assert!([plain, file, again, nobody].iter().all(|result| !result.delegated));
    assert_eq!(bench.tables().all_delegations().unwrap(), [held]);
}

/// The wish to hold a directory, as a master that leads has it.
fn wish(inode: u64, step: AcquireStep) -> Change {
    Change::AcquireDelegation(AcquireDelegation { inode, step: step.into() })
}

#[test]
fn a_directory_that_was_there_is_held_when_the_leader_lets_and_nobody_has_it() {
    let mut bench = Fixture::new();
    let root = bench.root;
    let (d, file) =
        (bench.done(OTHER, create(root, "d", Kind::Directory)), bench.done(OTHER, create(root, "f", Kind::File)));
    let not_yet = [
        (HOLDER, wish(d, AcquireStep::Later)),
        (HOLDER, wish(d, AcquireStep::Announce)),
        (0, wish(d, AcquireStep::Grant)),
    ];
    for (session, wish) in not_yet {
        let result = bench.change(session, wish.clone());
        assert!(result.errno == 0 && !result.delegated && bench.holder(d).is_none(), "{wish:?} by {session}");
    }
    let announced = |bench: &mut Fixture| {
        bench.seq += 1;
        let change = Some(wish(d, AcquireStep::Announce));
        let mutation = Some(Mutation { seq: bench.seq, change, ..Mutation::default() });
        bench.run_with_changes(Kinds::Mutate(Mutate { session: HOLDER, now_ns: NOW, mutation, ..Mutate::default() })).1
    };
    assert_eq!(announced(&mut bench), [DelegationChange::Announced(d)]);
    let no_directory = bench.refused("a file", |bench| bench.change(HOLDER, wish(file, AcquireStep::Grant)));
    assert_eq!(no_directory.errno, Errno::NOTDIR.raw_os_error());
    for _ in 0..2 {
        bench.seq += 1;
        let change = Some(wish(d, AcquireStep::Grant));
        let mutation = Some(Mutation { seq: bench.seq, change, ..Mutation::default() });
        let mutate = Mutate { session: HOLDER, now_ns: NOW, mutation, ..Mutate::default() };
        let (outcome, changes) = bench.run_with_changes(Kinds::Mutate(mutate));
        let Outcome::Mutated(result, _) = outcome else { panic!("{outcome:?}") };
        assert!(result.delegated && changes.contains(&DelegationChange::Decided(d)), "{result:?}");
        assert_eq!(bench.holder(d), Some(HOLDER));
    }
    assert_eq!(bench.answered(HOLDER, create(d, "inside", Kind::File)).errno, 0);
    let others = bench.refused("another's", |bench| bench.change(OTHER, wish(d, AcquireStep::Grant)));
    assert_eq!((others.errno, others.delegated_elsewhere), (AGAIN, d));
    // Whoever has returned one may get it again; what was answered for comes before.
    bench.done(HOLDER, let_go(&[d]));
    assert_eq!(bench.answered(HOLDER, create(d, "late", Kind::File)).errno, STALE);
    assert!(bench.change(OTHER, wish(d, AcquireStep::Grant)).delegated);
    assert!(!bench.change(HOLDER, wish(root, AcquireStep::Grant)).delegated, "another session holds one in it");
    bench.done(OTHER, let_go(&[d]));
    assert!(bench.change(HOLDER, wish(root, AcquireStep::Grant)).delegated, "the root of a mount as well");
    bench.done(HOLDER, let_go(&[root]));

    bench.done(OTHER, Change::SetQuota(SetQuota { inode: root, max_bytes: Some(1 << 40), max_inodes: None }));
    assert!(!bench.change(HOLDER, wish(d, AcquireStep::Grant)).delegated, "below a quota");
    assert!(announced(&mut bench).is_empty(), "nobody is told to forget it for that");
    bench.done(OTHER, Change::SetQuota(SetQuota { inode: root, max_bytes: None, max_inodes: None }));
    bench.write(|transaction| {
        let record = transaction.inode(d).unwrap().unwrap();
        transaction.update_inode(d, InodeRecord { listed_ns: 0, ..record });
    });
    assert!(!bench.change(HOLDER, wish(d, AcquireStep::Grant)).delegated, "not all of its names are known");
}

#[test]
fn a_directory_is_held_when_no_other_session_holds_one_in_it_however_many_are_held_elsewhere() {
    const MANY: u64 = LOOKED_AT_MAX as u64;
    let mut bench = Fixture::new();
    let root = bench.root;
    let mut made = |parent, text: &str| bench.done(OTHER, create(parent, text, Kind::Directory));
    let (few, many, elsewhere) = (made(root, "few"), made(root, "many"), made(root, "elsewhere"));
    let (in_few, in_many) = (made(few, "inner"), made(many, "inner"));
    bench.add_names(many, MANY);
    let is_granted = |bench: &mut Fixture, directory| {
        let result = bench.change(HOLDER, wish(directory, AcquireStep::Grant));
        assert_eq!(result.errno, 0, "{}", result.reason);
        bench.done(HOLDER, let_go(&[directory]));
        result.delegated
    };
    // What the session holds itself counts for nothing.
    bench.hold_many(HOLDER, elsewhere, 5 * MANY);
    bench.hold_many(OTHER, elsewhere, 1);
    assert!(is_granted(&mut bench, few) && is_granted(&mut bench, many));
    bench.hold_many(OTHER, elsewhere, MANY - 2);
    assert!(bench.change(OTHER, wish(in_many, AcquireStep::Grant)).delegated);
    assert!(is_granted(&mut bench, few) && !is_granted(&mut bench, many), "it is found among what others hold");
    bench.done(OTHER, let_go(&[in_many]));
    assert!(is_granted(&mut bench, many));

    bench.hold_many(OTHER, elsewhere, 2);
    assert!(is_granted(&mut bench, few), "it has few names");
    assert!(!is_granted(&mut bench, many), "nobody looks at so many, neither here nor there");
    assert!(bench.change(OTHER, wish(in_few, AcquireStep::Grant)).delegated);
    assert!(!is_granted(&mut bench, few), "it is found by its name");
}

#[test]
fn whoever_else_changes_something_there_is_told_what_to_recall() {
    let mut bench = Fixture::new();
    let (root, d) = (bench.root, bench.held("d"));
    let file = bench.done(HOLDER, create(d, "f", Kind::File));
    let inner = bench.done(HOLDER, create(d, "inner", Kind::Directory));
    let outside = bench.done(OTHER, create(root, "outside", Kind::File));
    let elsewhere = bench.done(OTHER, create(root, "elsewhere", Kind::Directory));
    let lock = Lock { r#type: LockType::Exclusive as i32, end: 10, owner: 1, ..Lock::default() };
    let set_lock = SetLock { inode: file, kind: LockKind::Posix as i32, lock: Some(lock), ..SetLock::default() };
    let xattr = SetXattr { inode: file, name: name("user.a"), value: name("1"), ..SetXattr::default() };
    let changes = [
        create(d, "g", Kind::File),
        create(inner, "g", Kind::File),
        remove(d, "f", false),
        remove(root, "d", true),
        Change::Link(LinkInode { inode: file, parent: root, name: name("link") }),
        Change::Link(LinkInode { inode: outside, parent: d, name: name("link") }),
        rename((d, "f"), (root, "f")),
        rename((root, "outside"), (d, "f")),
        rename((root, "d"), (root, "moved")),
        rename((root, "elsewhere"), (root, "d")),
        rename((root, "elsewhere"), (d, "inner")),
        chmod(d),
        chmod(file),
        Change::SetXattr(xattr),
        Change::Commit(CommitContent { inode: file, grow_to: 5, ..CommitContent::default() }),
        Change::SetLock(set_lock),
    ];
    for session in [OTHER, 0] {
        for change in &changes {
            let shown = format!("{change:?} by {session}");
            let refused = bench.refused(&shown, |bench| bench.change(session, change.clone()));
            assert_eq!((refused.errno, refused.delegated_elsewhere), (AGAIN, d), "{shown}: {}", refused.reason);
            assert!(refused.reason.contains("/m/d") && refused.reason.contains("let go"), "{}", refused.reason);
        }
    }
    // The holder goes on, in whatever way.
    for change in changes.iter().take(2) {
        bench.done(HOLDER, change.clone());
    }
    // To hold an open file changes nothing.
    let hold = SetOpenRefs { opened: vec![file], closed: Vec::new() };
    assert_eq!(bench.change(OTHER, Change::SetOpenRefs(hold)).gone, [0; 0]);

    bench.done(HOLDER, let_go(&[d, elsewhere, 999, d]));
    assert_eq!(bench.holder(d), None);
    bench.done(OTHER, remove(d, "g", false));
    bench.done(OTHER, rename((root, "d"), (root, "moved")));
}

#[test]
fn what_a_session_has_answered_for_counts_as_long_as_it_holds_the_directory() {
    let mut bench = Fixture::new();
    let (root, d) = (bench.root, bench.held("d"));
    let made = bench.answered(HOLDER, create(d, "f", Kind::File));
    let file = made.inode;
    assert_eq!(made.errno, 0, "{}", made.reason);
    // One that is made in there is held whatever the bounds are: who made it has answered so already.
    let full = DELEGATIONS_MAX.encode_to_vec();
    let key = encode_key::<schema::DelegationCounts>(&HOLDER);
    let real = bench.tables().delegation_count(HOLDER).unwrap();
    bench.database.raw().put_cf(bench.database.family(Family::Meta), &key, full).unwrap();
    let mut transaction = Transaction::new(&bench.database).unwrap();
    let caller = Caller { session: HOLDER, now_ns: NOW, made_ns: NOW, ..Caller::default() };
    let mutating = MutationContext::of(&mut transaction, caller);
    assert!(!mutating.may_delegate(root).unwrap(), "it has too many");
    drop(transaction);
    let inner = CreateInode { delegate: true, ..creation(d, "inner", Kind::Directory) };
    let mutation =
        Mutation { seq: 100, change: Some(Change::Create(inner)), is_write_back: true, ..Mutation::default() };
    let mutate = Mutate { session: HOLDER, now_ns: NOW, mutation: Some(mutation), ..Mutate::default() };
    let mut transaction = Transaction::new(&bench.database).unwrap();
    let outcome = apply(&mut transaction, Command { command: Some(Kinds::Mutate(mutate)) }).unwrap();
    bench.database.write(transaction.finish().unwrap().0.into_batch(&bench.database)).unwrap();
    bench.database.raw().put_cf(bench.database.family(Family::Meta), &key, (real + 1).encode_to_vec()).unwrap();
    let Outcome::Mutated(inner, _) = outcome else { panic!("{outcome:?}") };
    assert!(inner.delegated);
    let inner = inner.inode;
    bench.seq = 100;
    for change in [create(inner, "g", Kind::File), rename((inner, "g"), (d, "g")), chmod(d), chmod(file)] {
        let result = bench.answered(HOLDER, change);
        assert_eq!(result.errno, 0, "{}", result.reason);
    }
    // Beyond what it holds it has answered for nothing.
    for change in [create(root, "h", Kind::File), rename((d, "f"), (root, "f")), chmod(root)] {
        let shown = format!("{change:?}");
        assert_eq!(bench.refused(&shown, |bench| bench.answered(HOLDER, change)).errno, STALE, "{shown}");
    }
    let by_another = bench.refused("by another", |bench| bench.answered(OTHER, create(d, "h", Kind::File)));
    assert_eq!(by_another.errno, STALE);

    let late = [
        create(d, "late", Kind::File),
        remove(d, "f", false),
        rename((d, "f"), (inner, "f")),
        chmod(file),
        Change::AddOpenRef(file),
        Change::Commit(CommitContent { inode: file, grow_to: 5, ..CommitContent::default() }),
    ];
    bench.done(HOLDER, let_go(&[d]));
    for change in &late {
        let shown = format!("{change:?}");
        let refused = bench.refused(&shown, |bench| bench.answered(HOLDER, change.clone()));
        assert_eq!((refused.errno, refused.delegated_elsewhere), (STALE, 0), "{shown}: {}", refused.reason);
    }
    let still = bench.answered(HOLDER, create(inner, "still", Kind::File));
    assert_eq!(still.errno, 0, "{}", still.reason);
    bench.run(Kinds::EndSessionStep(EndSessionStep { session: HOLDER, limit: 256, part: 0, now_ns: NOW }));
    assert_eq!(bench.holder(inner), None);
    let late = bench.refused("after the end", |bench| bench.answered(HOLDER, create(inner, "late", Kind::File)));
    assert_eq!(late.errno, STALE);
}

#[test]
fn a_lock_that_was_answered_counts_as_long_and_an_unlock_takes_only_what_is_its_own() {
    let mut bench = Fixture::new();
    let d = bench.held("d");
    let file = bench.answered(HOLDER, create(d, "f", Kind::File)).inode;
    let set = |r#type: LockType, start: u64| {
        let lock = Lock { r#type: r#type.into(), start, end: start, owner: 1, ..Lock::default() };
        Change::SetLock(SetLock { inode: file, kind: LockKind::Posix.into(), lock: Some(lock), ..SetLock::default() })
    };
    for start in [1, 3] {
        assert_eq!(bench.answered(HOLDER, set(LockType::Exclusive, start)).errno, 0);
    }
    bench.done(HOLDER, let_go(&[d]));
    bench.done(OTHER, set(LockType::Exclusive, 5));
    let late = bench.refused("a lock", |bench| bench.answered(HOLDER, set(LockType::Exclusive, 7)));
    assert_eq!(late.errno, STALE, "{}", late.reason);
    for start in [1, 5] {
        assert_eq!(bench.answered(HOLDER, set(LockType::Unlocked, start)).errno, 0);
    }
    let held = bench.tables().locks(file, LockKind::Posix).unwrap().held;
    assert_eq!(held.iter().map(|lock| (lock.session, lock.start)).collect::<Vec<_>>(), [(HOLDER, 3), (OTHER, 5)]);
}

#[test]
fn from_the_first_step_of_its_end_a_session_changes_nothing_any_more() {
    const DIRECTORIES: usize = 20;
    let mut bench = Fixture::new();
    let held: Vec<u64> = (0..DIRECTORIES).map(|number| bench.held(&number.to_string())).collect();
    let step = |part| Kinds::EndSessionStep(EndSessionStep { session: HOLDER, limit: 16, part, now_ns: NOW });
    let Outcome::StepProgress(progress) = bench.run(step(0)) else { panic!("no progress") };
    assert!(progress.more);
    assert_eq!((bench.holder(held[0]), bench.holder(held[DIRECTORIES - 1])), (None, Some(HOLDER)));
    let last = held[DIRECTORIES - 1];
    let late = bench.refused("in between", |bench| bench.answered(HOLDER, create(last, "late", Kind::File)));
    assert_eq!(late.errno, STALE);
    assert_eq!(bench.change(OTHER, create(last, "early", Kind::File)).delegated_elsewhere, last);
    let made = bench.make(HOLDER, bench.root, "another");
    assert!(made.errno == 0 && !made.delegated, "it would be held for ever");
    let mut next = progress.next;
    while let Outcome::StepProgress(StepProgress { more: true, next: part, .. }) = bench.run(step(next as u32)) {
        next = part;
    }
    assert!(bench.tables().all_delegations().unwrap().is_empty());
    assert!(bench.tables().session(HOLDER).unwrap().is_none());
    bench.done(OTHER, create(last, "early", Kind::File));
}

#[test]
fn all_that_a_session_holds_can_be_let_go_of_at_once() {
    let mut bench = Fixture::new();
    let held: Vec<u64> = (0..5).map(|number| bench.held(&number.to_string())).collect();
    let others = bench.make(OTHER, bench.root, "of another").inode;
    bench.done(HOLDER, let_go(&[others, held[1]]));
    assert_eq!((bench.holder(others), bench.holder(held[1]), bench.holder(held[2])), (Some(OTHER), None, Some(HOLDER)));
    let many = bench.refused("too many", |bench| bench.change(HOLDER, let_go(&[5; RETURN_MAX + 1])));
    assert_eq!(many.errno, INVALID);
    for _ in 0..2 {
        bench.done(HOLDER, Change::ReturnDelegations(ReturnDelegations { directories: Vec::new(), all: true }));
        assert_eq!(bench.tables().all_delegations().unwrap().len(), 1);
    }
}

#[test]
fn what_a_session_makes_has_a_number_that_it_has_reserved() {
    let mut bench = Fixture::new();
    let (root, d) = (bench.root, bench.held("d"));
    for count in [0, NUMBERS_MAX + 1] {
        let refused = bench.refused("a count", |bench| bench.change(HOLDER, Change::ReserveInodes(count)));
        assert_eq!(refused.errno, INVALID);
    }
    let before = bench.tables().counters().unwrap().inode;
    let first = bench.done(HOLDER, Change::ReserveInodes(10));
    assert_eq!((first, bench.tables().counters().unwrap().inode), (before + 1, before + 10));
    let numbered =
        |parent, text: &str, inode| Change::Create(CreateInode { inode, ..creation(parent, text, Kind::File) });
    let inodes = bench.tables().counters().unwrap().inodes;
    assert_eq!(bench.answered(HOLDER, numbered(d, "last", first + 9)).inode, first + 9);
    assert_eq!(bench.done(HOLDER, numbered(root, "first", first)), first);
    assert_eq!(bench.tables().counters().unwrap().inodes, inodes + 2);
    assert_eq!(bench.tables().dentry(d, b"last").unwrap().unwrap().inode, first + 9);
    for (what, session, number) in [
        ("one that is there", HOLDER, first),
        ("one before", HOLDER, first - 1),
        ("one behind", HOLDER, first + 10),
        ("one of another", OTHER, first + 1),
        ("one of nobody", 0, first + 1),
    ] {
        let refused = bench.refused(what, |bench| bench.change(session, numbered(root, "new", number)));
        assert_eq!(refused.errno, INVALID, "{what}: {}", refused.reason);
    }
    assert_eq!(bench.done(OTHER, create(root, "plain", Kind::File)), first + 10, "others have other numbers");

    // Beyond some reservations the oldest is forgotten.
    let firsts: Vec<u64> = (0..RANGES_MAX).map(|_| bench.done(HOLDER, Change::ReserveInodes(NUMBERS_MAX))).collect();
    let forgotten = bench.change(HOLDER, numbered(root, "new", first + 1));
    assert_eq!(forgotten.errno, INVALID);
    for (number, first) in firsts.into_iter().enumerate() {
        bench.done(HOLDER, numbered(root, &format!("of {number}"), first + 65_535));
    }
    let other = bench.done(OTHER, Change::ReserveInodes(1));
    bench.run(Kinds::EndSessionStep(EndSessionStep { session: OTHER, limit: 256, part: 0, now_ns: NOW }));
    assert_eq!(bench.change(OTHER, numbered(root, "late", other)).errno, INVALID, "they go with the session");
}

#[test]
fn the_times_are_those_of_the_change() {
    const MADE: i64 = 77;
    let mut bench = Fixture::new();
    let d = bench.held("d");
    let mut made_at = |change, made_ns| {
        bench.mutate(HOLDER, Mutation { change: Some(change), made_ns, is_write_back: true, ..Mutation::default() })
    };
    let file = made_at(create(d, "f", Kind::File), MADE);
    assert_eq!(made_at(create(d, "g", Kind::File), -1).errno, INVALID);
    let file = file.inode;
    let inner = made_at(create(d, "inner", Kind::Directory), MADE + 1).inode;
    let touch =
        SetAttr { inode: file, mtime: Some(cavern_proto::master::Time { now: true, ns: 0 }), ..SetAttr::default() };
    let touched = made_at(Change::SetAttr(touch), MADE + 2);
    assert_eq!(touched.errno, 0, "{}", touched.reason);
    let record = |inode| bench.tables().inode(inode).unwrap().unwrap();
    let (file, d, directory) = (record(file), record(d), record(inner));
    assert_eq!(
        (file.btime_ns, file.atime_ns, file.mtime_ns, file.ctime_ns),
        (Some(MADE), Some(MADE), MADE + 2, MADE + 2)
    );
    assert_eq!((d.mtime_ns, d.ctime_ns, d.btime_ns), (MADE + 1, MADE + 1, Some(NOW)));
    assert_eq!(
        (directory.mtime_ns, directory.listed_ns),
        (MADE + 1, NOW),
        "that it is whole the master knows since now"
    );
    let intent = bench.tables().intent(inner).unwrap().unwrap();
    assert_eq!(intent.changed_ns, NOW, "the bucket lacks it since the master has it");
}

#[test]
fn no_change_was_made_long_after_now() {
    let mut bench = Fixture::new();
    let d = bench.held("d");
    let change = Some(create(d, "f", Kind::File));
    let made = bench.mutate(HOLDER, Mutation { change, made_ns: i64::MAX, is_write_back: true, ..Mutation::default() });
    assert_eq!(made.errno, 0, "{}", made.reason);
    let record = bench.tables().inode(made.inode).unwrap().unwrap();
    assert!(record.ctime_ns <= NOW + 300_000_000_000, "{}: it would live for ever", record.ctime_ns);
}

#[test]
fn nothing_is_held_where_quotas_or_times_to_live_count() {
    let mut bench = Fixture::new();
    let root = bench.root;
    let governed = bench.done(OTHER, create(root, "governed", Kind::Directory));
    let below = bench.done(OTHER, create(governed, "below", Kind::Directory));
    let quota = |inode| Change::SetQuota(SetQuota { inode, max_bytes: Some(1000), max_inodes: Some(2) });
    let ttl = |inode, seconds| Change::SetTtl(SetTtl { inode, seconds, action: 0 });
    let ended = |inode| Change::SetQuota(SetQuota { inode, max_bytes: Some(0), max_inodes: Some(0) });
    for (set, unset) in [(quota(governed), ended(governed)), (ttl(governed, 9), ttl(governed, 0))] {
        bench.done(OTHER, set);
        let made = bench.make(HOLDER, below, "d");
        assert!(made.errno == 0 && !made.delegated);
        bench.done(HOLDER, remove(below, "d", true));
        let made = bench.make(HOLDER, root, "beside");
        assert!(made.delegated, "elsewhere it is");
        bench.done(HOLDER, remove(root, "beside", true));
        bench.done(OTHER, unset);
    }
    // Neither comes to count where something is held, by whomever.
    let d = bench.held("d");
    for session in [HOLDER, OTHER] {
        for change in [quota(governed), ttl(governed, 9), ttl(root, 0)] {
            let shown = format!("{change:?} by {session}");
            let refused = bench.refused(&shown, |bench| bench.change(session, change));
            assert_eq!((refused.errno, refused.delegated_elsewhere), (AGAIN, d), "{shown}");
        }
    }
    // A directory that comes to be below a quota exceeds it rather than lose what was answered.
    bench.done(HOLDER, let_go(&[d]));
    bench.done(OTHER, quota(governed));
    while let Outcome::Counted { more: true } = bench.run(Kinds::CountUsage(CountUsage { limit: 100 })) {}
    let held = bench.held("held");
    bench.done(HOLDER, rename((root, "held"), (below, "held")));
    assert_eq!(bench.change(HOLDER, create(held, "asked", Kind::File)).errno, Errno::DQUOT.raw_os_error());
    let answered = bench.answered(HOLDER, create(held, "answered", Kind::File));
    assert_eq!(answered.errno, 0, "{}", answered.reason);
}

#[test]
fn it_is_held_under_whatever_name_and_no_longer_than_it_is_there() {
    let mut bench = Fixture::new();
    let (root, d) = (bench.root, bench.held("d"));
    bench.done(HOLDER, rename((root, "d"), (root, "moved")));
    assert_eq!(bench.holder(d), Some(HOLDER));
    bench.done(HOLDER, remove(root, "moved", true));
    assert_eq!(bench.holder(d), None);
    let (replaced, other) = (bench.held("replaced"), bench.held("other"));
    bench.done(HOLDER, rename((root, "other"), (root, "replaced")));
    assert_eq!((bench.holder(replaced), bench.holder(other)), (None, Some(HOLDER)));
    // With a mount everything goes, unless it is to be kept.
    let mount_id = bench.mount.id;
    let without = |discard| Kinds::RemoveMount(RemoveMount { mount_id, change: u64::MAX, discard });
    assert_eq!(bench.run(without(false)), Outcome::OutOfDate);
    assert!(matches!(bench.run(without(true)), Outcome::Mount(_)));
    assert!(bench.tables().all_delegations().unwrap().is_empty());
    assert!(bench.answered(HOLDER, create(other, "late", Kind::File)).errno != 0);
}

#[test]
fn what_the_master_does_by_itself_waits_as_well() {
    let mut bench = Fixture::new();
    let ruled = bench.done(OTHER, create(bench.root, "r", Kind::Directory));
    let rule = SetTtl { inode: ruled, seconds: 1, action: TtlAction::Delete as i32 };
    bench.done(OTHER, Change::SetTtl(rule));
    let (root, d) = (bench.root, bench.held("d"));
    bench.done(HOLDER, rename((root, "d"), (ruled, "d")));
    let file = bench.answered(HOLDER, create(d, "f", Kind::File)).inode;
    let expire = Kinds::Expire(Expire { inode: file, ctime_ns: NOW, now_ns: NOW + 1_000_000_000 });
    assert_eq!(bench.run(expire.clone()), Outcome::Delegated(d));
    let there = ListedEntry { name: name("new"), kind: Kind::File as i32, etag: "e".into(), ..ListedEntry::default() };
    let listing = AdoptListing {
        mount_id: bench.mount.id,
        directory: d,
        key_prefix: "r/d/".into(),
        entries: vec![there],
        now_ns: NOW,
        ..AdoptListing::default()
    };
    let taken = ImportExternalChange {
        listing: Some(listing),
        path: name("r/d/"),
        name: name("new"),
        ..ImportExternalChange::default()
    };
    let taken = Kinds::ImportExternalChange(taken);
    assert_eq!(bench.run(taken.clone()), Outcome::Imported(RefreshFate::Pending));
    bench.done(HOLDER, let_go(&[d]));
    assert_eq!(bench.run(taken), Outcome::Imported(RefreshFate::Added));
    assert_eq!(bench.run(expire), Outcome::Done);
}
