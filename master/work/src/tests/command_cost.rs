//! No command is long, whatever the data: the log serves nobody else while one is applied.
//!
//! What a command does is counted, not timed: the records that it reads, passes over and writes, as the database counts
//! them, those that have just been deleted among them. So the figures hold on a busy machine. The time that the
//! processor spends is bounded as well, generously: it shows work that is done in memory.

use std::collections::BTreeMap;
use std::time::Duration;

use bytes::Bytes;
use cavern_proto::master::mutation::Change;
use cavern_proto::master::{
    CommitContent, CreateInode, Extent, Kind as InodeKind, LinkInode, Lock, LockKind, LockType, Mount, Mutation,
    MutationResult, RemoveName, RenameMode, RenameName, SetAttr, SetLock, SetQuota, SetTtl, TtlAction, View, Worker,
    WriteType,
};
use cavern_proto::record::command::Command as Kind;
use cavern_proto::record::{
    AdoptListing, ApplyListing, AttachMount, BeginObjects, BeginView, Command, CountUsage, Deleted, DropBlocks,
    EndSessionStep, Expire, FreeContent, Freed, FreezeView, InitCluster, ListedEntry, ListingGroup, Mutate, Persisted,
    PersistedObject, PropagateIntent, PutIndex, PutWorker, ReapOrphans, ReleaseKept, RemoveMount, RemoveView, Stray,
};
use cavern_state::{AT_ONCE, Database, Family, Outcome, StepProgress, Tables, Transaction, apply};
use rocksdb::perf::{PerfContext, PerfMetric, PerfStatsLevel, set_perf_stats};
use rustix::time::{ClockId, clock_gettime};

use crate::listing::{adopt, portions};
use crate::maintenance::{COUNT_STEP, REAP_STEP};
use crate::persist::intents::PROPAGATED_MAX;
use crate::persist::plan::{self, Step};
use crate::sessions::END_STEP;

/// Records of one command: ten milliseconds, or a little more. The longest are those that pass over names that have
/// just been removed.
const RECORDS: u64 = 10_000;
const PROCESSOR: Duration = Duration::from_millis(200);
const BLOCK: u64 = 64 << 20;
const BLOCKS: u32 = 1 << 18;

/// What is counted for each record: read by its key, or sought.
const READ: [PerfMetric; 2] = [PerfMetric::GetFromMemtableCount, PerfMetric::SeekOnMemtableCount];
/// Passed over by a scan, or found to be deleted: so many cost as much as one that is read.
const PASSED: [PerfMetric; 2] = [PerfMetric::InternalKeySkippedCount, PerfMetric::InternalDeleteSkippedCount];
const PASSED_FOR_ONE: u64 = 16;

struct Fixture {
    database: Database,
    mount: Mount,
    seq: u64,
    now_ns: i64,
    counts: PerfContext,
    /// By what the command is part of.
    heaviest: BTreeMap<&'static str, (u64, Duration)>,
    _dir: tempfile::TempDir,
}

fn processor_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec.try_into().unwrap(), time.tv_nsec.try_into().unwrap())
}

fn name(number: usize) -> Bytes {
    format!("name-{number:06}").into()
}

impl Fixture {
    fn new(write_type: WriteType) -> Self {
        set_perf_stats(PerfStatsLevel::EnableCount);
        let dir = tempfile::tempdir().unwrap();
        let database = Database::open(dir.path(), 64 << 20).unwrap();
        let (mount, counts, heaviest) = (Mount::default(), PerfContext::default(), BTreeMap::new());
        let mut bench = Self { database, mount, seq: 0, now_ns: 1, counts, heaviest, _dir: dir };
        bench.run("init", Kind::Init(InitCluster { cluster_id: "c".into(), now_ns: 1, feature_version: 1 }));
        let worker = Some(Worker { data_address: "worker:1".into(), ..Worker::default() });
        bench.run("worker", Kind::PutWorker(PutWorker { uuid: vec![1; 16].into(), worker, ..PutWorker::default() }));
        let (path, uri, write_type) = ("/m".to_owned(), "memory://m".to_owned(), write_type as i32);
        let mount = Mount { path, uri, write_type, block_size: BLOCK, created_ns: 1, ..Mount::default() };
        bench.mount = bench.mount(mount);
        bench
    }

    fn mount(&mut self, mount: Mount) -> Mount {
        let mounts_epoch = self.tables().counters().unwrap().mounts_epoch;
        let attach = AttachMount { mount: Some(mount), mounts_epoch };
        let Outcome::Mount(mount) = self.run("mount", Kind::AttachMount(attach)) else { panic!("not mounted") };
        *mount
    }

    fn unmount(&mut self, mount_id: u32) {
        let outcome = self.run("unmount", Kind::RemoveMount(RemoveMount { mount_id, change: 0, discard: true }));
        assert!(matches!(outcome, Outcome::Mount(_)), "{outcome:?}");
    }

    fn run(&mut self, what: &'static str, command: Kind) -> Outcome {
        self.counts.reset();
        let began = processor_time();
        let mut transaction = Transaction::new(&self.database).unwrap();
        let outcome = apply(&mut transaction, Command { command: Some(command) }).unwrap();
        let sum = |metrics: [PerfMetric; 2]| metrics.iter().map(|metric| self.counts.metric(*metric)).sum::<u64>();
        let records = transaction.writes() as u64 + sum(READ) + sum(PASSED) / PASSED_FOR_ONE;
        self.database.write(transaction.finish().unwrap().0.into_batch(&self.database)).unwrap();
        let time = processor_time() - began;
        let heaviest = self.heaviest.entry(what).or_default();
        *heaviest = (heaviest.0.max(records), heaviest.1.max(time));
        outcome
    }

    /// Says which were too long, if any were.
    fn check(self) {
        println!("{:#?}", self.heaviest);
        let is_long = |(_, (records, time)): &(&&str, &(u64, Duration))| *records > RECORDS || *time > PROCESSOR;
        let long: Vec<_> = self.heaviest.iter().filter(is_long).collect();
        assert!(long.is_empty(), "{long:?}");
    }

    fn tables(&self) -> Tables<'_> {
        Tables::new(&self.database)
    }

    fn change(&mut self, what: &'static str, change: Change) -> MutationResult {
        self.seq += 1;
        self.now_ns += 1;
        let mutation = Mutation { seq: self.seq, uid: 0, gid: 0, change: Some(change), ..Mutation::default() };
        let (answered, now_ns) = (self.seq - 1, self.now_ns);
        let mutate = Mutate { session: 7, answered, now_ns, mutation: Some(mutation), ..Mutate::default() };
        let Outcome::Mutated(result, _) = self.run(what, Kind::Mutate(mutate)) else { panic!("no result") };
        *result
    }

    fn done(&mut self, what: &'static str, change: Change) -> u64 {
        let result = self.change(what, change);
        assert_eq!(result.errno, 0, "{what}: {}", result.reason);
        result.inode
    }

    fn create(&mut self, parent: u64, name: Bytes, kind: InodeKind) -> u64 {
        let create = CreateInode { parent, name, kind: kind as i32, mode: 0o700, ..CreateInode::default() };
        self.done("create", Change::Create(create))
    }

    fn remove(&mut self, what: &'static str, parent: u64, name: Bytes, directory: bool) {
        self.done(what, Change::Remove(RemoveName { parent, name, directory }));
    }

    fn rename(&mut self, parent: u64, from: Bytes, to: Bytes) {
        let mode = RenameMode::Replace as i32;
        let rename = RenameName { parent, name: from, new_parent: parent, new_name: to, mode };
        self.done("rename", Change::Rename(rename));
    }

    /// Brings what is planned for an inode to a bucket that takes everything.
    fn persist(&mut self, inode: u64) {
        loop {
            let planned = plan::plan(self.tables(), "c", inode, &self.mount, "").unwrap().unwrap();
            let mut work = match planned {
                Step::Write(work) => work,
                Step::Propagate => {
                    self.run("spread", Kind::PropagateIntent(PropagateIntent { inode, limit: PROPAGATED_MAX }));
                    continue;
                }
                Step::None => return,
                Step::KeyOccupied { .. } => panic!("{planned:?}"),
            };
            for portion in work.portions() {
                let new = portion.writes.iter().filter(|write| write.is_new).map(|write| write.key.clone()).collect();
                self.run("objects begin", Kind::BeginObjects(BeginObjects { inode, keys: new }));
                let object = |write: &plan::Write| {
                    let object = Some(work.content.object("etag".into()));
                    PersistedObject { key: write.key.clone(), object }
                };
                let objects = portion.writes.iter().map(object).collect();
                let persisted = Persisted { inode, change: portion.change, objects, gone: portion.gone };
                self.run("persisted", Kind::Persisted(persisted));
            }
        }
    }

    /// Carries out the deletions; gives how many there were.
    fn delete_objects(&mut self) -> usize {
        let deletion = self.tables().deletions(None, usize::MAX).unwrap();
        for deletion in &deletion {
            let (mount_id, key, change) = (deletion.mount_id, deletion.key.clone(), deletion.record.change);
            self.run("deleted", Kind::Deleted(Deleted { mount_id, key, change }));
        }
        deletion.len()
    }

    fn reap_unlinked(&mut self, inode: u64) {
        let mut reap = || self.run("unlinked reaped", Kind::ReapUnlinked(inode));
        while matches!(reap(), Outcome::StepProgress(reaped) if reaped.more) {}
        assert_eq!(self.tables().inode(inode).unwrap(), None);
    }

    fn reap_orphans(&mut self) {
        let mut from = 0;
        loop {
            let outcome = self.run("orphans reaped", Kind::ReapOrphans(ReapOrphans { limit: REAP_STEP, from }));
            let Outcome::StepProgress(reaped) = outcome else { panic!("{outcome:?}") };
            match reaped.more {
                true => from = reaped.next,
                false if from == 0 => break,
                false => from = 0,
            }
        }
    }

    fn count(&mut self) {
        while self.run("usage counted", Kind::CountUsage(CountUsage { limit: COUNT_STEP }))
            == (Outcome::Counted { more: true })
        {}
    }

    /// Blocks that are to be freed, after what was cut off has been dropped.
    fn garbage(&mut self) -> usize {
        let mut after = 0;
        let mut blocks = 0;
        while let Some((number, record)) = self.tables().garbage(after, 1).unwrap().pop() {
            after = number;
            while record.is_cut
                && matches!(
                    self.run("blocks dropped", Kind::DropBlocks(DropBlocks { number, limit: AT_ONCE as u32 })),
                    Outcome::StepProgress(reaped) if reaped.more
                )
            {}
            blocks += record.extents.len();
            self.run("blocks freed", Kind::Freed(Freed { number, workers: vec![1] }));
        }
        assert!(self.tables().garbage(0, 1).unwrap().is_empty());
        blocks
    }

    fn commit(&mut self, inode: u64, indexes: std::ops::Range<u32>, generation: u32) {
        // As many as a client sends.
        for first in indexes.clone().step_by(250) {
            let block = |index| Extent { index, generation, workers: vec![1], ..Extent::default() };
            let made: Vec<Extent> = (first..indexes.end.min(first + 250)).map(block).collect();
            let grow_to = u64::from(made[made.len() - 1].index + 1) * BLOCK;
            self.done("commit", Change::Commit(CommitContent { inode, grow_to, made, changed: true }));
        }
    }

    fn cut(&mut self, inode: u64, blocks: u32) {
        let size = Some(u64::from(blocks) * BLOCK);
        self.done("cut", Change::SetAttr(SetAttr { inode, size, ..SetAttr::default() }));
    }

    fn indexes(&self, inode: u64) -> Vec<u32> {
        self.tables().extents(inode, 0).unwrap().iter().map(|extent| extent.index).collect()
    }
}

#[test]
fn a_file_with_forty_thousand_names_comes_and_goes_in_short_commands() {
    const LINKS: usize = 40_000;
    let mut bench = Fixture::new(WriteType::FsMode);
    let root = bench.mount.root_inode;
    let directory = bench.create(root, "d".into(), InodeKind::Directory);
    let file = bench.create(root, "f".into(), InodeKind::File);
    for number in 0..LINKS {
        let link = LinkInode { inode: file, parent: directory, name: name(number) };
        bench.done("link", Change::Link(link));
    }
    bench.persist(file);
    bench.persist(directory);
    assert_eq!(bench.tables().objects_of(file).count(), LINKS + 1);

    bench.rename(root, "d".into(), "e".into());
    bench.persist(directory);
    bench.persist(file);
    assert_eq!(bench.tables().objects_of(file).count(), LINKS + 1);
    assert_eq!(bench.delete_objects(), LINKS + 1);
    bench.commit(file, 0..3, 0);
    bench.persist(file);
    bench.run("free", Kind::FreeContent(FreeContent { inode: file, session: 0 }));
    bench.done("utimens", Change::SetAttr(SetAttr { inode: file, mode: Some(0o600), ..SetAttr::default() }));
    bench.persist(file);

    // In their order, against it, and the rest as nobody would: the bucket follows half of the way.
    for number in 0..LINKS / 4 {
        bench.remove("unlink", directory, name(number), false);
    }
    for number in (LINKS / 2..LINKS).rev() {
        bench.remove("unlink", directory, name(number), false);
    }
    bench.persist(file);
    bench.remove("unlink", root, "f".into(), false);
    for number in (LINKS / 4..LINKS / 2).map(|number| LINKS / 4 + number * 7919 % (LINKS / 4)) {
        bench.remove("unlink", directory, name(number), false);
    }
    bench.remove("rmdir", root, "e".into(), true);
    assert!(bench.tables().inode(file).unwrap().unwrap().unlinked);
    bench.run("unlinked reaped", Kind::ReapUnlinked(file));
    assert!(bench.tables().inode(file).unwrap().is_some(), "its objects are still to be given up");
    bench.persist(file);
    assert!(bench.tables().objects_of(file).next().is_none() && bench.tables().intent(file).unwrap().is_none());
    assert_eq!(bench.delete_objects(), LINKS + 2);
    bench.reap_unlinked(file);
    bench.check();
}

#[test]
fn a_file_of_sixteen_tebibytes_comes_and_goes_in_short_commands() {
    let mut bench = Fixture::new(WriteType::FsMode);
    let file = bench.create(bench.mount.root_inode, "f".into(), InodeKind::File);
    bench.commit(file, 0..BLOCKS, 0);
    assert_eq!(bench.tables().inode(file).unwrap().unwrap().size, 1 << 44);
    bench.cut(file, BLOCKS - 3);
    bench.cut(file, 5);
    assert_eq!(bench.indexes(file), [0, 1, 2, 3, 4]);
    assert_eq!(bench.garbage(), BLOCKS as usize - 5);
    assert_eq!(bench.tables().recorded_extents(file, 0).count(), 5);

    bench.commit(file, 5..BLOCKS, 2);
    bench.persist(file);
    let Outcome::Freed(freed) = bench.run("free", Kind::FreeContent(FreeContent { inode: file, session: 0 })) else {
        panic!("not freed")
    };
    assert_eq!((freed.blocks, freed.bytes), (u64::from(BLOCKS), 1 << 44));
    assert!(bench.indexes(file).is_empty());
    assert_eq!(bench.garbage(), BLOCKS as usize);

    bench.commit(file, 0..BLOCKS, 3);
    bench.remove("unlink", bench.mount.root_inode, "f".into(), false);
    bench.reap_unlinked(file);
    assert_eq!(bench.garbage(), BLOCKS as usize);
    bench.check();
}

#[test]
fn blocks_that_are_written_while_others_are_being_dropped_are_there() {
    let mut bench = Fixture::new(WriteType::FsMode);
    let file = bench.create(bench.mount.root_inode, "f".into(), InodeKind::File);
    let many = AT_ONCE as u32 * 3;
    bench.commit(file, 0..many, 0);
    bench.cut(file, 10);
    // Over those that were cut off, and beyond.
    let written = |generation: u32| [many - 2, many - 1, many + 5].map(|index| (index, generation));
    bench.commit(file, many - 2..many, 1);
    bench.commit(file, many + 5..many + 6, 1);
    let there = |bench: &Fixture| {
        let extents = bench.tables().extents(file, 10).unwrap();
        extents.iter().map(|extent| (extent.index, extent.generation)).collect::<Vec<_>>()
    };
    assert_eq!(there(&bench), written(1));
    // Another cut, of as many again, while the first is on its way.
    bench.commit(file, 10..many, 1);
    bench.cut(file, 20);
    bench.commit(file, many - 2..many, 2);
    bench.commit(file, many + 5..many + 6, 2);
    let expected: Vec<(u32, u32)> = (10..20).map(|index| (index, 1)).chain(written(2)).collect();
    assert_eq!(there(&bench), expected);
    assert!(bench.tables().extent(file, 500).unwrap().is_none());
    assert!(bench.tables().recorded_extent(file, 900).unwrap().is_some(), "its record is still there");
    let freed = bench.garbage();
    assert_eq!(there(&bench), expected);
    assert_eq!(bench.tables().recorded_extents(file, 10).count(), expected.len());
    assert!(bench.tables().inode(file).unwrap().unwrap().cuts.is_empty());
    // Each name of a block once: all of the first generation but ten, and of the second all but those of the ten that
    // are there.
    assert_eq!(freed, (many as usize - 10) + (many as usize - 20 + 1));
    let at_worker = bench.tables().replicas_at(1, None, usize::MAX).unwrap().len();
    assert_eq!(at_worker, 10 + expected.len());
    bench.check();
}

#[test]
fn blocks_that_views_have_come_and_go_in_short_commands() {
    const MANY: u32 = 1 << 12;
    let mut bench = Fixture::new(WriteType::FsMode);
    let file = bench.create(bench.mount.root_inode, "f".into(), InodeKind::File);
    bench.commit(file, 0..MANY, 0);
    let view = |number: u32| {
        let mount_id = bench.mount.id;
        View { name: format!("v{number}"), mount_id, store_mount_id: mount_id, ..View::default() }
    };
    let views: Vec<View> = (1..=100).map(view).collect();
    for view in views {
        bench.run("view begins", Kind::BeginView(BeginView { view: Some(view) }));
    }
    for id in 1..=100 {
        for settled in [false, true] {
            bench.run("view is frozen", Kind::FreezeView(FreezeView { id, settled }));
        }
    }
    // A quarter is written to, and the rest is cut off.
    let generation = 100;
    for first in (0..MANY / 4).step_by(250) {
        let block = |index| {
            let (workers, replaces) = (vec![1], Some(0));
            Extent { index, generation, workers, replaces, ..Extent::default() }
        };
        let made = (first..(MANY / 4).min(first + 250)).map(block).collect();
        bench.done("replace", Change::Commit(CommitContent { inode: file, made, ..CommitContent::default() }));
    }
    bench.cut(file, MANY / 4);
    assert_eq!(bench.garbage(), 0);
    assert_eq!(bench.tables().counters().unwrap().kept, u64::from(MANY));
    for id in 1..=100 {
        bench.run("view is removed", Kind::RemoveView(RemoveView { id, deleted: false }));
    }
    loop {
        let page = bench.tables().kept_after(None).take(AT_ONCE).map(|row| row.unwrap().0);
        let blocks: Vec<Stray> = page.collect();
        if blocks.is_empty() {
            break;
        }
        bench.run("released", Kind::ReleaseKept(ReleaseKept { blocks }));
    }
    assert_eq!(bench.garbage(), MANY as usize);
    bench.check();
}

#[test]
fn a_directory_of_a_hundred_thousand_objects_comes_and_goes_in_short_commands() {
    const NAMES: usize = 100_000;
    let mut bench = Fixture::new(WriteType::CacheMode);
    let list = |bench: &mut Fixture, directory: &[Bytes], upsert: Vec<ListedEntry>, remove: Vec<Bytes>| {
        let group = ListingGroup { directory: directory.to_vec(), upsert, remove, ..ListingGroup::default() };
        for groups in portions(vec![group]) {
            let mount_id = bench.mount.id;
            bench
                .run("listing", Kind::Listing(ApplyListing { mount_id, groups, now_ns: 1, ..ApplyListing::default() }));
        }
    };
    let entry = |name: Bytes, kind: InodeKind, etag: &str| ListedEntry {
        name,
        kind: kind as i32,
        etag: etag.to_owned(),
        ..ListedEntry::default()
    };
    let below = [Bytes::from_static(b"d")];
    for etag in ["1", "2"] {
        let files = (0..NAMES).map(|number| entry(name(number), InodeKind::File, etag)).collect();
        list(&mut bench, &below, files, Vec::new());
    }
    list(&mut bench, &below, Vec::new(), (0..NAMES / 2).map(name).collect());
    // A directory in each of as many.
    let deep = (0..20_000).map(|number| ListingGroup {
        directory: vec![below[0].clone(), name(number), name(0)],
        upsert: vec![entry("f".into(), InodeKind::File, "1")],
        ..ListingGroup::default()
    });
    for groups in portions(deep.collect()) {
        let mount_id = bench.mount.id;
        bench.run("listing", Kind::Listing(ApplyListing { mount_id, groups, now_ns: 1, ..ApplyListing::default() }));
    }
    // An object takes its place.
    list(&mut bench, &[], vec![entry("d".into(), InodeKind::File, "1")], Vec::new());
    bench.reap_orphans();
    // The root of the namespace, that of the mount, and the object.
    assert_eq!(bench.tables().counters().unwrap().inodes, 3);

    let files = (0..NAMES).map(|number| entry(name(number), InodeKind::File, "1")).collect();
    list(&mut bench, &[], files, Vec::new());
    bench.unmount(bench.mount.id);
    bench.reap_orphans();
    assert_eq!(bench.tables().counters().unwrap().inodes, 1);
    bench.check();
}

#[test]
fn a_directory_of_a_hundred_thousand_files_comes_and_goes_in_short_commands() {
    const NAMES: usize = 100_000;
    let mut bench = Fixture::new(WriteType::FsMode);
    let root = bench.mount.root_inode;
    let directory = bench.create(root, "d".into(), InodeKind::Directory);
    let quota = SetQuota { inode: root, max_inodes: Some(1 << 40), ..SetQuota::default() };
    bench.done("quota", Change::SetQuota(quota));
    for number in 0..NAMES {
        let file = bench.create(directory, name(number), InodeKind::File);
        if number % 100 == 0 {
            bench.commit(file, 0..1, 0);
        }
    }
    bench.count();
    bench.rename(root, "d".into(), "e".into());
    bench.persist(directory);
    assert_eq!(bench.tables().intents(0, usize::MAX).unwrap().len(), NAMES);
    let removed = RemoveName { parent: root, name: "e".into(), directory: true };
    assert_ne!(bench.change("rmdir", Change::Remove(removed)).errno, 0, "it is not empty");
    bench.done("quota", Change::SetQuota(SetQuota { max_inodes: Some(0), ..quota }));
    bench.done("quota", Change::SetQuota(quota));
    bench.count();
    assert_eq!(bench.tables().usage(root).unwrap().inodes as usize, NAMES + 1);
    bench.done("ttl", Change::SetTtl(SetTtl { inode: root, seconds: 1, action: TtlAction::Delete as i32 }));
    for number in 0..NAMES / 2 {
        let file = bench.tables().dentry(directory, &name(number)).unwrap().unwrap().inode;
        let ctime_ns = bench.tables().inode(file).unwrap().unwrap().ctime_ns;
        let now_ns = bench.now_ns + 1_000_000_000;
        let outcome = bench.run("expire", Kind::Expire(Expire { inode: file, ctime_ns, now_ns }));
        assert_eq!(outcome, Outcome::Done);
        bench.reap_unlinked(file);
    }
    for number in NAMES / 2..NAMES {
        bench.remove("unlink", directory, name(number), false);
    }
    bench.remove("rmdir", root, "e".into(), true);
    bench.check();
}

#[test]
fn a_mount_of_a_hundred_thousand_objects_is_recorded_and_detached_in_short_commands() {
    const NAMES: usize = 100_000;
    let mut bench = Fixture::new(WriteType::FsMode);
    let existing = cavern_proto::master::Existing::Indexed as i32;
    let (write_type, path) = (WriteType::FsMode as i32, "/n".to_owned());
    let mount = Mount { path, uri: "memory://n".into(), write_type, existing, block_size: BLOCK, ..Mount::default() };
    let mount = bench.mount(mount);
    let entry = |number: usize| ListedEntry {
        name: name(number),
        kind: if number.is_multiple_of(10) { InodeKind::Directory } else { InodeKind::File } as i32,
        etag: "1".into(),
        size: 1,
        ..ListedEntry::default()
    };
    let part = AdoptListing { mount_id: mount.id, directory: mount.root_inode, now_ns: 5, ..AdoptListing::default() };
    for first in (0..NAMES).step_by(adopt::ENTRIES) {
        let last = NAMES.min(first + adopt::ENTRIES);
        let entries = (first..last).map(entry).collect();
        let listing = AdoptListing { entries, complete: last == NAMES, ..part.clone() };
        bench.run("adopted", Kind::AdoptListing(listing));
    }
    let file = bench.tables().dentry(mount.root_inode, &name(1)).unwrap().unwrap().inode;
    for index in (0..BLOCKS / 2).step_by(1000) {
        bench.commit(file, index..index + 1000, 0);
    }
    bench.run("index", Kind::PutIndex(PutIndex { mount_id: mount.id, index: None }));
    bench.unmount(mount.id);
    bench.reap_orphans();
    assert_eq!(bench.garbage(), (BLOCKS / 2).next_multiple_of(1000) as usize);
    for family in [Family::Object, Family::Origin, Family::Extent, Family::Unlisted, Family::Noted] {
        assert_eq!(bench.tables().keys(family).count(), 0, "{family:?}");
    }
    bench.check();
}

#[test]
fn a_session_with_fifteen_thousand_holds_and_locks_ends_in_short_commands() {
    const FILES: usize = 15_000;
    let mut bench = Fixture::new(WriteType::FsMode);
    let root = bench.mount.root_inode;
    for number in 0..FILES {
        let file = bench.create(root, name(number), InodeKind::File);
        bench.done("hold", Change::AddOpenRef(file));
        let lock = Lock { r#type: LockType::Exclusive as i32, ..Lock::default() };
        let kind = LockKind::Flock as i32;
        bench.done("lock", Change::SetLock(SetLock { inode: file, kind, lock: Some(lock), ..SetLock::default() }));
    }
    let mut step = EndSessionStep { session: 7, limit: END_STEP, part: 0, now_ns: 9 };
    while let Outcome::StepProgress(StepProgress { more: true, next, .. }) =
        bench.run("session ends", Kind::EndSessionStep(step))
    {
        step.part = next as u32;
    }
    for family in [Family::OpenRef, Family::Lock, Family::LockSession, Family::Result] {
        assert_eq!(bench.tables().keys(family).count(), 0, "{family:?}");
    }
    bench.check();
}

#[test]
fn a_deadlock_among_hundreds_of_processes_with_many_locks_is_looked_for_in_short_commands() {
    const FILES: usize = 9000;
    const OWNERS: usize = 300;
    let mut bench = Fixture::new(WriteType::FsMode);
    let root = bench.mount.root_inode;
    let files: Vec<u64> = (0..FILES).map(|number| bench.create(root, name(number), InodeKind::File)).collect();
    let lock = |inode: u64, owner: usize, wait: bool| {
        let lock =
            Lock { owner: owner as u64, r#type: LockType::Exclusive as i32, start: 0, end: 9, ..Lock::default() };
        let (kind, waiter) = (LockKind::Posix as i32, owner as u64 + 1);
        Change::SetLock(SetLock { inode, kind, lock: Some(lock), waiter, wait })
    };
    for (number, inode) in files.iter().enumerate() {
        bench.done("lock", lock(*inode, number.min(OWNERS), false));
    }
    // Each waits for the next one, and the last for the first.
    for owner in 0..OWNERS - 1 {
        let waits = bench.change("wait", lock(files[owner + 1], owner, true));
        assert_eq!(waits.errno, rustix::io::Errno::AGAIN.raw_os_error(), "{}", waits.reason);
    }
    let circle = bench.change("wait", lock(files[0], OWNERS - 1, true));
    assert_eq!(circle.errno, rustix::io::Errno::DEADLK.raw_os_error(), "{}", circle.reason);
    bench.check();
}
