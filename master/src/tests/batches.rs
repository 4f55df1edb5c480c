//! Commands that share a write batch do what they would do one by one: the same answers, the same notifications, the
//! same tables. What many of them write is written once.

use bytes::Bytes;
use cavern_proto::ROOT_INODE;
use cavern_proto::master::mutation::Change;
use cavern_proto::master::{
    CommitContent, CreateInode, Existing, Extent, Job, Kind as InodeKind, LinkInode, Lock, LockKind, LockType, Mount,
    Mutation, RemoveName, RenameName, SetAttr, SetLock, SetOpenRefs, SetQuota, SetTtl, SetXattr, View, Worker,
    WriteType,
};
use cavern_proto::record::command::Command as Kind;
use cavern_proto::record::{
    AdoptListing, ApplyListing, AttachMount, BeginObjects, BeginView, BlockOf, Command, CountUsage, Deleted,
    DrainWorker, DropBlocks, EndSessionStep, Expire, FinishView, FreeContent, Freed, FreezeView, GiveUpReplicas,
    ImportExternalChange, InitCluster, JoinReplica, ListedEntry, ListingGroup, Mutate, ObjectRecord, Persisted,
    PersistedObject, PropagateIntent, PutIndex, PutWorker, ReapOrphans, ReleaseKept, RemoveMount, RemoveView,
    RemoveWorker, SetWorkerState, SettleReplica, Stray,
};
use cavern_state::{Changes, Database, Family, Outcome, Tables, Transaction, WriteBatchOverlay, apply};
use proptest::prelude::*;
use rocksdb::IteratorMode;

const BLOCK: u64 = 1 << 20;
/// Of the mounts: in fs-mode, in cache-mode, and in fs-mode over a bucket that has something.
const ROOTS: [u64; 3] = [ROOT_INODE + 1, ROOT_INODE + 2, ROOT_INODE + 3];

/// What is chosen of a command: of what kind it is, and what it is about.
type Choice = (u8, [u8; 5]);

fn name(chosen: u8) -> Bytes {
    Bytes::from(format!("{}", char::from(b'a' + chosen % 4)))
}

/// Something that is there, most of the time.
fn inode(chosen: u8) -> u64 {
    ROOT_INODE + 1 + u64::from(chosen % 16)
}

/// A directory that takes names, more often than not.
fn directory(chosen: u8) -> u64 {
    if chosen.is_multiple_of(2) { ROOTS[0] } else { inode(chosen / 2) }
}

fn extent(a: u8, b: u8) -> Extent {
    let workers = vec![1 + u64::from(b % 3)];
    Extent { index: u32::from(a % 4), generation: u32::from(b / 128), workers, ..Extent::default() }
}

fn listed(chosen: u8) -> ListedEntry {
    let kind = if chosen.is_multiple_of(5) { InodeKind::Directory } else { InodeKind::File } as i32;
    let etag = format!("e{}", chosen % 3);
    ListedEntry { name: name(chosen / 4), kind, size: 7, mtime_ns: 3, etag, restored: None }
}

fn mutation(kind: u8, [a, b, c, d, _]: [u8; 5]) -> Change {
    match kind {
        0..=3 => {
            let kind = if b.is_multiple_of(3) { InodeKind::Directory } else { InodeKind::File } as i32;
            Change::Create(CreateInode { parent: directory(a), name: name(c), kind, mode: 0o644, ..Default::default() })
        }
        4 => Change::Link(LinkInode { inode: inode(a), parent: directory(b), name: name(c) }),
        5..=7 => Change::Remove(RemoveName { parent: directory(a), name: name(b), directory: c.is_multiple_of(3) }),
        8..=10 => {
            let (new_parent, new_name, mode) = (directory(b), name(d), i32::from(c / 64 % 3));
            Change::Rename(RenameName { parent: directory(a), name: name(c), new_parent, new_name, mode })
        }
        11 => {
            let size = b.is_multiple_of(2).then_some(u64::from(c) * BLOCK / 64);
            Change::SetAttr(SetAttr { inode: inode(a), mode: Some(u32::from(b)), size, ..SetAttr::default() })
        }
        12 => {
            let (name, value) = (format!("user.{}", b % 2).into(), vec![c].into());
            Change::SetXattr(SetXattr { inode: inode(a), name, value, ..SetXattr::default() })
        }
        13 | 14 => {
            let grow_to = u64::from(d % 8) * BLOCK;
            // In the place of another, now and then.
            let made = Extent { replaces: d.is_multiple_of(4).then_some(0), ..extent(b, c) };
            Change::Commit(CommitContent { inode: inode(a), grow_to, made: vec![made], changed: true })
        }
        15 => Change::AddOpenRef(inode(a)),
        16 => Change::DropOpenRef(inode(a)),
        17 => Change::SetOpenRefs(SetOpenRefs { opened: vec![inode(a), inode(b)], closed: vec![inode(c)] }),
        18 => {
            let kind = [LockType::Exclusive, LockType::Shared, LockType::Unlocked][usize::from(b % 3)] as i32;
            let lock = Lock { owner: u64::from(c % 2), r#type: kind, start: 0, end: 9, ..Lock::default() };
            let (kind, waiter) = (LockKind::Posix as i32, u64::from(d));
            let lock = Some(lock);
            Change::SetLock(SetLock { inode: inode(a), kind, lock, waiter, wait: d.is_multiple_of(2) })
        }
        19 => {
            let max_inodes = Some(u64::from(b % 4) * 4);
            Change::SetQuota(SetQuota { inode: directory(a), max_bytes: None, max_inodes })
        }
        _ => Change::SetTtl(SetTtl { inode: directory(a), seconds: u64::from(b % 2), action: i32::from(c % 3) }),
    }
}

fn command((kind, chosen): Choice, number: u64) -> Kind {
    let [a, b, c, d, e] = chosen;
    let (now_ns, mount_id) = (1000 + number as i64, 1 + u32::from(e % 3));
    let key = format!("{}", char::from(b'a' + b % 4));
    match kind {
        0..=20 => {
            let session = 7 + u64::from(e % 2);
            // Now and then one that was sent before.
            let seq = if d.is_multiple_of(16) { number.saturating_sub(2) } else { number } + 1;
            let mutation =
                Some(Mutation { seq, uid: 1, gid: 2, change: Some(mutation(kind, chosen)), ..Mutation::default() });
            Kind::Mutate(Mutate { session, answered: number.saturating_sub(3), now_ns, mutation, ..Mutate::default() })
        }
        21 => Kind::ReapUnlinked(inode(a)),
        22 => {
            let ctime_ns = 1000 + (number as i64).saturating_sub(i64::from(b % 4));
            Kind::Expire(Expire { inode: inode(a), ctime_ns, now_ns: now_ns + 1_000_000_000 })
        }
        23 => Kind::PropagateIntent(PropagateIntent { inode: directory(a), limit: 2 }),
        24 => Kind::BeginObjects(BeginObjects { inode: inode(a), keys: vec![key] }),
        25 | 26 => {
            let object = Some(ObjectRecord { etag: "e".into(), size: 5, ..ObjectRecord::default() });
            let (objects, gone) =
                (vec![PersistedObject { key, object }], vec![format!("{}", char::from(b'a' + c % 4))]);
            Kind::Persisted(Persisted { inode: inode(a), change: number * u64::from(d % 3), objects, gone })
        }
        27 => Kind::Deleted(Deleted { mount_id, key, change: u64::from(c) }),
        28 => Kind::FreeContent(FreeContent { inode: inode(a), session: 0 }),
        29 => match b % 3 {
            0 => Kind::DropBlocks(DropBlocks { number: u64::from(a % 8), limit: 2 }),
            1 => Kind::Freed(Freed { number: u64::from(a % 8), workers: vec![1, 2] }),
            _ => Kind::CountUsage(CountUsage { limit: 3 }),
        },
        30 => Kind::JoinReplica(JoinReplica {
            inode: inode(a),
            extent: Some(Extent { joining: 1 + u64::from(d % 3), ..extent(b, c) }),
        }),
        31 => match d % 2 {
            0 => Kind::SettleReplica(SettleReplica {
                inode: inode(a),
                extent: Some(Extent { joining: 1 + u64::from(d % 3), ..extent(b, c) }),
                joined: true,
                keep: vec![1, 2, 3],
            }),
            _ => Kind::GiveUpReplicas(GiveUpReplicas {
                worker_id: 1 + u64::from(b % 3),
                blocks: vec![BlockOf { inode: inode(a), index: u32::from(c % 4) }],
                others: vec![1, 2, 3],
            }),
        },
        32 => Kind::EndSessionStep(EndSessionStep {
            session: 7 + u64::from(e % 2),
            limit: 32,
            part: 0,
            now_ns: i64::from(e % 3),
        }),
        33 => match b % 6 {
            0 => Kind::WorkerState(SetWorkerState { worker_id: 1, state: i32::from(a % 3) }),
            1 => Kind::PutJob(Job { id: u64::from(a % 3), state: i32::from(c % 4), ..Job::default() }),
            2 => Kind::DrainWorker(DrainWorker { worker_id: 1 + u64::from(a % 3), draining: c.is_multiple_of(2) }),
            3 => Kind::RemoveWorker(RemoveWorker { worker_id: 4 + u64::from(a % 3), with_replicas: false }),
            _ => put_worker(3 + a % 3, 3 + c % 3, ["", "a", "b"][usize::from(d % 3)]),
        },
        34 => {
            let path = vec![name(a)];
            let directory = if a.is_multiple_of(2) { path } else { Vec::new() };
            let (upsert, remove) = (vec![listed(b), listed(c)], vec![name(d)]);
            let group = ListingGroup { directory, upsert, remove, listed_ns: now_ns, ..ListingGroup::default() };
            Kind::Listing(ApplyListing { mount_id: 2, groups: vec![group], now_ns, ..ApplyListing::default() })
        }
        35 => Kind::AdoptListing(AdoptListing {
            mount_id: 3,
            directory: if a.is_multiple_of(2) { ROOTS[2] } else { inode(a) },
            entries: vec![listed(b), listed(c)],
            complete: d.is_multiple_of(4),
            now_ns,
            ..AdoptListing::default()
        }),
        36 => Kind::ImportExternalChange(ImportExternalChange {
            listing: Some(AdoptListing {
                mount_id: 3,
                directory: ROOTS[2],
                entries: b.is_multiple_of(2).then(|| ListedEntry { name: name(a), ..listed(c) }).into_iter().collect(),
                now_ns,
                ..AdoptListing::default()
            }),
            name: name(a),
            etag: format!("e{}", d % 3),
            ..ImportExternalChange::default()
        }),
        37 => Kind::ReapOrphans(ReapOrphans { limit: 1 + u32::from(a % 3), from: 0 }),
        38 => match b % 8 {
            0 => Kind::RemoveMount(RemoveMount { mount_id, change: 0, discard: true }),
            1 => Kind::PutIndex(PutIndex { mount_id, index: Some(Default::default()) }),
            2 => Kind::EndSessionStep(EndSessionStep { session: 7, limit: 10_000, part: 0, now_ns }),
            _ => attach(Mount { path: format!("/n{}", a % 2), uri: "memory://n".into(), ..Mount::default() }),
        },
        39 | 40 => view_command(chosen, mount_id),
        _ => Kind::Init(InitCluster { cluster_id: "c".into(), now_ns, feature_version: 1 }),
    }
}

fn view_command([a, b, c, d, _]: [u8; 5], mount_id: u32) -> Kind {
    let (id, name) = (1 + u32::from(c % 6), format!("v{}", d % 8));
    let view = View { id, name, mount_id, store_mount_id: 1 + u32::from(d % 3), ..View::default() };
    match b % 6 {
        0 | 1 => Kind::BeginView(BeginView { view: Some(view) }),
        2 => Kind::FreezeView(FreezeView { id, settled: a % 2 == 0 }),
        3 => Kind::FinishView(FinishView { view: Some(view) }),
        4 => Kind::RemoveView(RemoveView { id, deleted: a % 3 == 0 }),
        _ => {
            let block = |index: u8| Stray { inode: inode(a), generation: u32::from(d % 4), index: u32::from(index) };
            Kind::ReleaseKept(ReleaseKept { blocks: (0..4).map(block).collect() })
        }
    }
}

fn put_worker(uuid: u8, port: u8, owner: &str) -> Kind {
    let worker = Some(Worker { data_address: format!("h:{port}"), ..Worker::default() });
    let (uuid, owner) = (Bytes::copy_from_slice(&[uuid; 16]), owner.to_owned());
    Kind::PutWorker(PutWorker { uuid, worker, owner, owner_max: 2 })
}

/// Compared with whatever mount table there is then: see [`replay`].
fn attach(mount: Mount) -> Kind {
    Kind::AttachMount(AttachMount { mount: Some(mount), mounts_epoch: 0 })
}

/// Mounts, and the workers that have blocks.
fn begin() -> Vec<Kind> {
    let mount = |path: &str, write_type: WriteType, existing: Existing| {
        let (path, uri) = (path.to_owned(), format!("memory://{path}"));
        let (write_type, existing) = (write_type as i32, existing as i32);
        attach(Mount { path, uri, write_type, existing, block_size: BLOCK, created_ns: 1, ..Mount::default() })
    };
    vec![
        Kind::Init(InitCluster { cluster_id: "c".into(), now_ns: 1, feature_version: 1 }),
        mount("/f", WriteType::FsMode, Existing::None),
        mount("/c", WriteType::CacheMode, Existing::None),
        mount("/e", WriteType::FsMode, Existing::Indexed),
        put_worker(0, 0, ""),
        put_worker(1, 1, ""),
        put_worker(2, 2, ""),
    ]
}

/// What the commands answered, whom they notify of what, and every key and value of the state.
#[derive(Debug, PartialEq)]
struct Result {
    outcomes: Vec<Outcome>,
    changes: Vec<String>,
    tables: Vec<(Family, Vec<u8>, Vec<u8>)>,
    refused: usize,
}

/// Applies commands, those together that `is_last` does not separate.
fn replay(commands: &[Kind], is_last: impl Fn(usize) -> bool) -> Result {
    let dir = tempfile::tempdir().unwrap();
    let database = Database::open(dir.path(), 1 << 20).unwrap();
    let (mut outcomes, mut changes, mut tables) = (Vec::new(), Vec::new(), Vec::new());
    let mut unwritten = WriteBatchOverlay::default();
    for (number, mut kind) in commands.iter().cloned().enumerate() {
        let mut transaction = Transaction::on(Tables::with(&database, &unwritten)).unwrap();
        if let Kind::AttachMount(attach) = &mut kind {
            attach.mounts_epoch = transaction.counters.mounts_epoch;
        }
        outcomes.push(apply(&mut transaction, Command { command: Some(kind) }).unwrap());
        let (writes, changed) = transaction.finish().unwrap();
        changes.push(shown(&changed));
        unwritten.add(writes);
        if is_last(number) || unwritten.is_due() || number + 1 == commands.len() {
            database.write(std::mem::take(&mut unwritten).into_batch(&database)).unwrap();
        }
    }
    for &family in Family::STATE {
        for item in database.raw().iterator_cf(database.family(family), IteratorMode::Start) {
            let (key, value) = item.unwrap();
            tables.push((family, key.to_vec(), value.to_vec()));
        }
    }
    let is_refused = |outcome: &&Outcome| match outcome {
        Outcome::Mutated(result, _) => result.errno != 0,
        outcome => matches!(outcome, Outcome::Refused(_)),
    };
    let refused = outcomes.iter().filter(is_refused).count();
    Result { outcomes, changes, tables, refused }
}

fn shown(changes: &Changes) -> String {
    let mut inodes: Vec<_> = changes.inodes.iter().collect();
    inodes.sort_by_key(|(inode, _)| **inode);
    format!("{:?} {:?} {:?} {:?} {inodes:?}", changes.origin, changes.list, changes.seen, changes.strict_mount)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, ..ProptestConfig::default() })]
    #[test]
    fn commands_do_together_what_they_do_one_by_one(
        choices in prop::collection::vec((0u8..42, any::<[u8; 5]>()), 0..250),
        length in 2usize..60,
    ) {
        let mut commands = begin();
        commands.extend(choices.into_iter().zip(0u64..).map(|(choice, number)| command(choice, number)));
        let one_by_one = replay(&commands, |_| true);
        let together = replay(&commands, |number| number % length == length - 1);
        for (number, (alone, together)) in one_by_one.outcomes.iter().zip(&together.outcomes).enumerate() {
            prop_assert_eq!(alone, together, "command {}: {:?}", number, &commands[number]);
        }
        prop_assert_eq!(&one_by_one.changes, &together.changes);
        for (alone, together) in one_by_one.tables.iter().zip(&together.tables) {
            prop_assert_eq!(alone, together);
        }
        prop_assert_eq!(one_by_one.tables.len(), together.tables.len());
    }
}

/// A test that refuses nearly all would show nothing.
#[test]
fn most_of_what_is_tested_is_done() {
    let choice = |number: u64| {
        let at = number.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(17).wrapping_mul(0x2545_f491_4f6c_dd1d);
        let bytes = at.to_be_bytes();
        (bytes[0] % 42, [bytes[1], bytes[2], bytes[3], bytes[4], bytes[5]])
    };
    let commands = begin().into_iter().chain((0..2000).map(|number| command(choice(number), number)));
    let commands: Vec<Kind> = commands.collect();
    let result = replay(&commands, |number| number % 40 == 39);
    assert!(result.refused * 10 < commands.len() * 8, "{} of {} are refused", result.refused, commands.len());
    let families = Family::STATE.iter().filter(|family| result.tables.iter().any(|(of, ..)| of == *family));
    assert!(families.count() >= 20, "records of many kinds are there at the end");
}

fn create(number: u64, parent: u64) -> Kind {
    let create = CreateInode {
        parent,
        name: format!("name-{number}").into(),
        kind: InodeKind::File as i32,
        ..CreateInode::default()
    };
    let mutation =
        Mutation { seq: number + 1, uid: 0, gid: 0, change: Some(Change::Create(create)), ..Mutation::default() };
    Kind::Mutate(Mutate { session: 7, answered: number, now_ns: 9, mutation: Some(mutation), ..Mutate::default() })
}

#[test]
fn what_many_commands_change_is_written_once() {
    const FILES: u64 = 100;
    let dir = tempfile::tempdir().unwrap();
    let database = Database::open(dir.path(), 1 << 20).unwrap();
    let run = |commands: Vec<Kind>| {
        let mut unwritten = WriteBatchOverlay::default();
        for kind in commands {
            let mut transaction = Transaction::on(Tables::with(&database, &unwritten)).unwrap();
            apply(&mut transaction, Command { command: Some(kind) }).unwrap();
            unwritten.add(transaction.finish().unwrap().0);
        }
        let batch = unwritten.into_batch(&database);
        let records = batch.len();
        database.write(batch).unwrap();
        records as u64
    };
    run(begin());
    let below = |name: &str, number| {
        let kind = InodeKind::Directory as i32;
        let create = CreateInode { parent: ROOTS[0], name: name.to_owned().into(), kind, ..CreateInode::default() };
        let mutation =
            Mutation { seq: number, uid: 0, gid: 0, change: Some(Change::Create(create)), ..Mutation::default() };
        Kind::Mutate(Mutate { session: 8, answered: 0, now_ns: 9, mutation: Some(mutation), ..Mutate::default() })
    };
    run(vec![below("d", 1)]);
    let parent = Tables::new(&database).dentry(ROOTS[0], b"d").unwrap().unwrap().inode;
    let records = run((0..FILES).map(|number| create(number, parent)).collect());
    // Of each file its inode, its name, its intent, and the answer; once the directory and its intent, the session, the
    // counters, and the number of the mount's last change.
    assert_eq!(records, FILES * 4 + 5);
}
