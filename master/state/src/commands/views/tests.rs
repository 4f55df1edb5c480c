//! What views keep, and for how long: whatever happens to files, a block is there as long as a file or a view has it,
//! and no longer.

use std::collections::{BTreeMap, BTreeSet};

use cavern_proto::master::mutation::Change;
use cavern_proto::master::{
    CommitContent, CreateInode, Kind as InodeKind, Mount, Mutation, MutationResult, RemoveName, SetAttr, Worker,
};
use cavern_proto::record::command::Command as Kind;
use cavern_proto::record::{
    AttachMount, Command, DropLost, FreeContent, FreezeView, InitCluster, JoinReplica, Mutate, ObjectRecord, Persisted,
    PersistedObject, PutWorker, RemoveMount, RemoveView, UpdateMount,
};
use proptest::prelude::*;

use super::*;
use crate::records::next_generation;
use crate::{Database, Tables, apply};

const BLOCK: u64 = 1 << 20;
const SESSION: u64 = 7;

/// A name of a block: inode, generation, index.
type Name = (u64, u32, u32);

struct Fixture {
    database: Database,
    mount: Mount,
    seq: u64,
    _dir: tempfile::TempDir,
}

impl Fixture {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let database = Database::open(dir.path(), 1 << 20).unwrap();
        let mut bench = Self { database, mount: Mount::default(), seq: 0, _dir: dir };
        bench.run(Kind::Init(InitCluster { cluster_id: "c".into(), now_ns: 1, feature_version: 1 }));
        for number in 1..=2_u8 {
            let worker = Some(Worker { data_address: format!("worker{number}:1"), ..Worker::default() });
            bench.run(Kind::PutWorker(PutWorker { uuid: vec![number; 16].into(), worker, ..PutWorker::default() }));
        }
        bench.mount = bench.attach("/m", WriteType::FsMode);
        bench
    }

    fn attach(&mut self, path: &str, write_type: WriteType) -> Mount {
        let (uri, write_type) = (format!("memory:/{path}"), write_type as i32);
        let (frozen_below, frozen_inodes, settled_below) = (9, 9, 9);
        let mount = Mount {
            path: path.into(),
            uri,
            write_type,
            block_size: BLOCK,
            replicas: 1,
            frozen_below,
            frozen_inodes,
            settled_below,
            ..Mount::default()
        };
        let mounts_epoch = self.tables().counters().unwrap().mounts_epoch;
        match self.run(Kind::AttachMount(AttachMount { mount: Some(mount), mounts_epoch })) {
            Outcome::Mount(mount) => *mount,
            other => panic!("{other:?}"),
        }
    }

    fn tables(&self) -> Tables<'_> {
        Tables::new(&self.database)
    }

    fn run(&mut self, command: Kind) -> Outcome {
        let mut transaction = Transaction::new(&self.database).unwrap();
        let outcome = apply(&mut transaction, Command { command: Some(command) }).unwrap();
        self.database.write(transaction.finish().unwrap().0.into_batch(&self.database)).unwrap();
        outcome
    }

    fn change(&mut self, change: Change) -> MutationResult {
        self.seq += 1;
        let mutation = Some(Mutation { seq: self.seq, change: Some(change), ..Mutation::default() });
        let (answered, now_ns) = (self.seq - 1, self.seq as i64);
        match self.run(Kind::Mutate(Mutate { session: SESSION, answered, now_ns, mutation, ..Mutate::default() })) {
            Outcome::Mutated(result, _) => *result,
            other => panic!("{other:?}"),
        }
    }

    fn done(&mut self, change: Change) -> u64 {
        let result = self.change(change);
        assert_eq!(result.errno, 0, "{}", result.reason);
        result.inode
    }

    fn file(&mut self, name: &str) -> u64 {
        let (parent, kind) = (self.mount.root_inode, InodeKind::File as i32);
        self.done(Change::Create(CreateInode { parent, name: name.to_owned().into(), kind, ..CreateInode::default() }))
    }

    fn block(index: u32, generation: u32, replaces: Option<u32>) -> Extent {
        Extent { index, generation, replaces, workers: vec![1], allocated: Some(4096), ..Extent::default() }
    }

    fn commit(&mut self, inode: u64, made: Extent) -> MutationResult {
        let grow_to = u64::from(made.index + 1) * BLOCK;
        self.change(Change::Commit(CommitContent { inode, grow_to, made: vec![made], changed: true }))
    }

    /// Of the blocks of a file that are made next.
    fn next(&self, inode: u64) -> u32 {
        let record = self.tables().inode(inode).unwrap().unwrap();
        next_generation(&self.tables().counters().unwrap(), inode, &record)
    }

    fn make(&mut self, inode: u64, index: u32) -> Name {
        let generation = self.next(inode);
        let result = self.commit(inode, Self::block(index, generation, None));
        assert_eq!(result.errno, 0, "{}", result.reason);
        (inode, generation, index)
    }

    fn cut(&mut self, inode: u64, blocks: u64) {
        self.done(Change::SetAttr(SetAttr { inode, size: Some(blocks * BLOCK), ..SetAttr::default() }));
    }

    fn unlink(&mut self, inode: u64, name: &str) {
        let (parent, name) = (self.mount.root_inode, name.to_owned().into());
        self.done(Change::Remove(RemoveName { parent, name, directory: false }));
        // What the bucket is to give up is given up.
        if let Some(intent) = self.tables().intent(inode).unwrap() {
            let change = intent.change;
            self.run(Kind::Persisted(Persisted { inode, change, ..Persisted::default() }));
        }
        self.run(Kind::ReapUnlinked(inode));
        assert_eq!(self.tables().inode(inode).unwrap(), None);
    }

    fn begin(&mut self, name: &str) -> View {
        let id = self.mount.id;
        let view = View { name: name.into(), path: "/m".into(), mount_id: id, store_mount_id: id, ..View::default() };
        shown(self.run(Kind::BeginView(BeginView { view: Some(view) })))
    }

    /// And all clients go by that.
    fn freeze(&mut self, id: u32) -> View {
        shown(self.run(Kind::FreezeView(FreezeView { id, settled: false })));
        self.settle(id)
    }

    fn settle(&mut self, id: u32) -> View {
        shown(self.run(Kind::FreezeView(FreezeView { id, settled: true })))
    }

    fn remove(&mut self, id: u32) -> View {
        shown(self.run(Kind::RemoveView(RemoveView { id, deleted: false })))
    }

    /// What the leader does when views have gone.
    fn release(&mut self) {
        let blocks = self.tables().kept_after(None).map(|row| row.unwrap().0).collect();
        assert_eq!(self.run(Kind::ReleaseKept(ReleaseKept { blocks })), Outcome::Done);
    }

    fn kept(&self) -> BTreeSet<Name> {
        let kept: Vec<Stray> = self.tables().kept_after(None).map(|row| row.unwrap().0).collect();
        assert_eq!(self.tables().counters().unwrap().kept, kept.len() as u64);
        kept.into_iter().map(|block| (block.inode, block.generation, block.index)).collect()
    }

    fn garbage(&self) -> BTreeSet<Name> {
        let (mut all, mut count) = (BTreeSet::new(), 0);
        for (_, record) in self.tables().garbage(0, usize::MAX).unwrap() {
            assert!(!record.is_cut);
            count += record.extents.len();
            all.extend(record.extents.iter().map(|extent| (record.inode, extent.generation, extent.index)));
        }
        assert_eq!(all.len(), count, "a block is freed twice");
        all
    }

    fn frozen(&self) -> (u32, u64) {
        let mount = self.tables().mount(self.mount.id).unwrap().unwrap();
        (mount.frozen_below, mount.frozen_inodes)
    }

    fn settled(&self) -> u32 {
        self.tables().mount(self.mount.id).unwrap().unwrap().settled_below
    }
}

fn shown(outcome: Outcome) -> View {
    match outcome {
        Outcome::View(view) => *view,
        other => panic!("{other:?}"),
    }
}

#[track_caller]
fn refused(outcome: Outcome, part: &str) {
    match outcome {
        Outcome::Refused(reason) => assert!(reason.contains(part), "{reason}"),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_view_is_made_in_steps_and_what_is_none_is_refused() {
    let mut bench = Fixture::new();
    assert_eq!((bench.frozen(), bench.settled()), ((0, 0), 0), "whatever is asked for");
    let file = bench.file("f");
    bench.make(file, 0);
    let begun = bench.begin("a");
    assert_eq!((begun.id, begun.state(), begun.generation), (1, ViewState::Creating, u32::MAX));
    let again = View { name: "a".into(), mount_id: 1, store_mount_id: 1, ..View::default() };
    refused(bench.run(Kind::BeginView(BeginView { view: Some(again.clone()) })), "a view a of /m already");
    for wrong in [View { mount_id: 9, ..again.clone() }, View { store_mount_id: 9, ..again }] {
        let wrong = Some(View { name: "b".into(), ..wrong });
        refused(bench.run(Kind::BeginView(BeginView { view: wrong })), "gone");
    }
    let freezing = |id: u32, settled: bool| Kind::FreezeView(FreezeView { id, settled });
    refused(bench.run(freezing(2, false)), "no view 2");
    refused(bench.run(freezing(1, true)), "none that is frozen");
    refused(bench.run(Kind::FinishView(FinishView { view: Some(begun.clone()) })), "not frozen yet");

    bench.cut(file, 0);
    let epoch = bench.tables().counters().unwrap().mounts_epoch;
    let frozen = shown(bench.run(freezing(1, false)));
    let counters = bench.tables().counters().unwrap();
    assert_eq!((frozen.generation, frozen.last_inode), (2, counters.inode), "later than that of the cut");
    assert_eq!((bench.frozen(), counters.mounts_epoch), ((2, counters.inode), epoch + 1));
    assert_eq!((counters.frozen_views, counters.unfrozen_views), (1, 0));
    assert_eq!(bench.next(file), 2);
    refused(bench.run(freezing(1, false)), "to be frozen");
    assert_eq!(bench.settled(), 0);
    refused(bench.run(Kind::FinishView(FinishView { view: Some(frozen.clone()) })), "not frozen yet");
    assert_eq!(bench.settle(1), frozen);
    assert_eq!((bench.settled(), bench.tables().counters().unwrap().mounts_epoch), (2, epoch + 2));

    let made = View { etag: "e".into(), names: 5, name: "other".into(), generation: 77, ..begun };
    let ready = shown(bench.run(Kind::FinishView(FinishView { view: Some(made) })));
    assert_eq!(ready, View { etag: "e".into(), names: 5, state: ViewState::Ready as i32, ..frozen });
    refused(bench.run(Kind::FinishView(FinishView { view: Some(ready.clone()) })), "being made");
    assert_eq!((bench.tables().views().unwrap(), bench.tables().view(1).unwrap()), (vec![ready.clone()], Some(ready)));

    // Other options leave what is frozen, and the mount stays as long as there are views.
    let mounts_epoch = bench.tables().counters().unwrap().mounts_epoch;
    let mount = Some(Mount { ttl_ms: 5, ..bench.mount.clone() });
    assert!(matches!(bench.run(Kind::UpdateMount(UpdateMount { mount, mounts_epoch })), Outcome::Mount(_)));
    assert_eq!((bench.frozen(), bench.settled()), ((2, counters.inode), 2));
    let unmount = Kind::RemoveMount(RemoveMount { mount_id: 1, change: 0, discard: true });
    assert_eq!(bench.run(unmount.clone()), Outcome::OutOfDate);
    bench.remove(1);
    assert_eq!((bench.frozen(), bench.settled()), ((0, 0), 0));
    refused(bench.run(Kind::RemoveView(RemoveView { id: 1, deleted: false })), "no view 1");
    assert_eq!(bench.begin("a").id, 2, "no number is given twice");
    bench.remove(2);
    assert!(matches!(bench.run(unmount), Outcome::Mount(_)));
}

#[test]
fn a_view_of_objects_keeps_no_blocks() {
    let mut bench = Fixture::new();
    let cache = bench.attach("/n", WriteType::CacheMode);
    let of = |name: &str, mount_id: u32, imported: bool| {
        let view = View { name: name.into(), mount_id, store_mount_id: mount_id, imported, ..View::default() };
        Kind::BeginView(BeginView { view: Some(view) })
    };
    let views = [of("a", cache.id, false), of("b", 1, true)].map(|begin| shown(bench.run(begin)));
    let file = bench.file("f");
    let block = bench.make(file, 0);
    bench.cut(file, 0);
    assert_eq!((bench.garbage(), bench.kept()), (BTreeSet::from([block]), BTreeSet::new()));
    let epoch = bench.tables().counters().unwrap().mounts_epoch;
    for view in views {
        assert_eq!((view.generation, view.last_inode), (0, 0));
        for (settled, why) in [(false, "to be frozen"), (true, "that is frozen")] {
            refused(bench.run(Kind::FreezeView(FreezeView { id: view.id, settled })), why);
        }
        let ready = shown(bench.run(Kind::FinishView(FinishView { view: Some(view) })));
        bench.remove(ready.id);
    }
    assert_eq!(bench.tables().counters().unwrap().mounts_epoch, epoch, "nothing was frozen");
}

#[test]
fn there_are_so_many_views_and_no_more() {
    let mut bench = Fixture::new();
    let mut transaction = Transaction::new(&bench.database).unwrap();
    for id in 1..=VIEWS_MAX as u32 {
        transaction.put(schema::Views, id, &View { id, name: format!("v{id}"), ..View::default() });
    }
    bench.database.write(transaction.finish().unwrap().0.into_batch(&bench.database)).unwrap();
    let one_more = View { name: "more".into(), mount_id: 1, store_mount_id: 1, ..View::default() };
    refused(bench.run(Kind::BeginView(BeginView { view: Some(one_more) })), "as many as there may be");
}

#[test]
fn a_block_that_a_view_has_is_kept_until_it_goes() {
    let mut bench = Fixture::new();
    let files: Vec<u64> = ["over", "cut", "gone", "free", "lost"].map(|name| bench.file(name)).into();
    let blocks: BTreeSet<Name> = files.iter().map(|file| bench.make(*file, 0)).collect();
    // In the bucket is what is freed.
    let record = bench.tables().inode(files[3]).unwrap().unwrap();
    let object = ObjectRecord { etag: "e".into(), size: record.size, version: record.version, ..Default::default() };
    let objects = vec![PersistedObject { key: "free".into(), object: Some(object) }];
    let change = bench.tables().intent(files[3]).unwrap().unwrap().change;
    bench.run(Kind::Persisted(Persisted { inode: files[3], change, objects, gone: Vec::new() }));

    let id = bench.begin("v").id;
    bench.freeze(id);
    let later = bench.file("later");
    let of_later = bench.make(later, 0);
    bench.cut(later, 0);
    assert_eq!(bench.garbage(), BTreeSet::from([of_later]), "the view does not have it");

    let (_, generation, _) = *blocks.first().unwrap();
    let next = bench.next(files[0]);
    let replaced = bench.commit(files[0], Fixture::block(0, next, Some(generation)));
    assert_eq!(replaced.errno, 0, "{}", replaced.reason);
    // A copy that is under way is none of the replicas: it is freed.
    let joined = Extent { joining: 2, replaces: None, allocated: None, ..Fixture::block(0, generation, None) };
    bench.run(Kind::JoinReplica(JoinReplica { inode: files[1], extent: Some(joined) }));
    bench.cut(files[1], 0);
    bench.unlink(files[2], "gone");
    let freed = bench.run(Kind::FreeContent(FreeContent { inode: files[3], session: SESSION }));
    assert!(matches!(freed, Outcome::Freed(freed) if freed.blocks == 1));
    let extents = bench.tables().extents(files[4], 0).unwrap();
    let lost = Kind::DropLost(DropLost { inode: files[4], blocks: extents, now_ns: 9 });
    assert_eq!(bench.run(lost), Outcome::LostDropped { reverted: false });

    assert_eq!((bench.kept(), bench.garbage()), (blocks.clone(), BTreeSet::from([of_later])));
    let rows: Vec<_> = bench.tables().kept_blocks(files[1]).map(Result::unwrap).collect();
    assert_eq!(rows.len(), 1);
    assert_eq!(rows[0].1.workers, [1]);
    let strays = bench.tables().strays(None, 9).unwrap();
    assert_eq!(strays.iter().map(|stray| (stray.worker, stray.stray.inode)).collect::<Vec<_>>(), [(2, files[1])]);
    let counted = [1, 2].map(|worker| bench.tables().count_kept_at(worker).unwrap());
    assert_eq!(counted, [blocks.len() as u64, 0]);

    bench.release();
    assert_eq!(bench.kept(), blocks, "as long as the view is there");
    bench.remove(id);
    bench.release();
    let all: BTreeSet<Name> = blocks.iter().copied().chain([of_later]).collect();
    assert_eq!((bench.kept(), bench.garbage()), (BTreeSet::new(), all));
}

#[test]
fn a_view_that_is_not_frozen_yet_has_whatever_is_there() {
    let mut bench = Fixture::new();
    let file = bench.file("f");
    let first = bench.make(file, 0);
    bench.cut(file, 0);
    let id = bench.begin("v").id;
    let second = bench.make(file, 0);
    bench.cut(file, 0);
    let third = bench.make(file, 0);
    let emptied = SetAttr { inode: file, size: Some(0), keeps_block: true, ..SetAttr::default() };
    bench.done(Change::SetAttr(emptied));
    let both = BTreeSet::from([second, third]);
    assert_eq!((bench.garbage(), bench.kept()), (BTreeSet::from([first]), both), "it is not kept for the file");
    bench.freeze(id);
    // What is made later, by whoever does not know that yet, counts as frozen.
    let generation = bench.tables().inode(file).unwrap().unwrap().generation;
    assert_eq!(bench.commit(file, Fixture::block(0, generation, None)).errno, 0);
    bench.done(Change::SetAttr(emptied));
    assert_eq!(bench.kept().len(), 3);
    let own = bench.make(file, 0);
    bench.done(Change::SetAttr(emptied));
    assert_eq!(bench.tables().extents(file, 0).unwrap()[0].generation, own.1, "what is the file's alone stays");

    // A later view does not have what was gone before, and one that is given up takes all along.
    let next = bench.begin("w").id;
    bench.remove(id);
    bench.release();
    assert_eq!(bench.kept(), BTreeSet::new());
    bench.done(Change::Commit(CommitContent { inode: file, grow_to: BLOCK, ..CommitContent::default() }));
    bench.cut(file, 0);
    assert_eq!(bench.kept(), BTreeSet::from([own]));
    bench.remove(next);
    bench.release();
    assert_eq!(bench.kept(), BTreeSet::new());
}

#[test]
fn a_frozen_block_is_replaced_once_and_by_what_began_as_it() {
    let stale = rustix::io::Errno::STALE.raw_os_error();
    let mut bench = Fixture::new();
    let file = bench.file("f");
    let made = Extent { workers: vec![1, 2], ..Fixture::block(0, 0, None) };
    assert_eq!(bench.commit(file, made).errno, 0);
    let views = [bench.begin("a").id, bench.begin("b").id];
    bench.freeze(views[0]);
    let early = bench.next(file);
    shown(bench.run(Kind::FreezeView(FreezeView { id: views[1], settled: false })));
    let next = bench.next(file);
    assert_eq!((early, next), (1, 2));
    let copied = Extent { allocated: Some(8192), ..Fixture::block(0, next, Some(0)) };
    assert_eq!(bench.commit(file, copied.clone()).errno, stale, "others may be writing to it still");
    bench.settle(views[1]);
    for (wrong, why) in [
        (Fixture::block(0, early, Some(0)), "the later view has it"),
        (Fixture::block(0, next, None), "it does not say what it began as"),
        (Fixture::block(0, next, Some(1)), "of another"),
        (Fixture::block(0, next + 1, Some(0)), "of a generation that has not begun"),
        (Fixture::block(1, next, Some(0)), "of none"),
        (Extent { workers: vec![9], ..Fixture::block(0, next, Some(0)) }, "at no worker that has it"),
    ] {
        assert_eq!(bench.commit(file, wrong).errno, stale, "{why}");
    }
    assert_eq!(bench.commit(file, copied.clone()).errno, 0);
    let now = bench.tables().extents(file, 0).unwrap();
    assert_eq!(now, [Extent { replaces: None, ..copied.clone() }], "where it began");
    assert_eq!(bench.tables().inode(file).unwrap().unwrap().allocated, Some(8192));
    assert_eq!(bench.kept(), BTreeSet::from([(file, 0, 0)]));
    assert_eq!(bench.tables().kept_blocks(file).next().unwrap().unwrap().1.workers, [1, 2]);
    assert!(bench.tables().replicas_at(2, None, 9).unwrap().is_empty());
    // Another client has made the same block.
    assert_eq!(bench.commit(file, copied.clone()).errno, 0);
    // What no view has any more may have been written to since it was copied.
    let third = bench.begin("c").id;
    bench.freeze(third);
    let late = Fixture::block(0, bench.next(file), Some(next));
    bench.remove(third);
    assert_eq!((bench.frozen().0, bench.settled()), (next, next));
    assert_eq!(bench.commit(file, late.clone()).errno, stale, "only the view that is gone had it");
    for id in views {
        bench.remove(id);
    }
    bench.release();
    assert_eq!((bench.frozen(), bench.garbage()), ((0, 0), BTreeSet::from([(file, 0, 0)])));
    assert_eq!(bench.commit(file, late).errno, stale);
    assert_eq!(bench.commit(file, Fixture::block(0, next, None)).errno, 0, "written in place");
}

/// What happens next; numbers choose among what there is.
#[derive(Clone, Debug)]
enum Step {
    Create,
    /// By a client that goes by the mount table, or by one that does not yet.
    Write {
        file: usize,
        index: u32,
        knows: bool,
    },
    Cut {
        file: usize,
        blocks: u64,
    },
    Unlink {
        file: usize,
    },
    Lose {
        file: usize,
    },
    Begin,
    Freeze {
        view: usize,
    },
    Remove {
        view: usize,
    },
    Release,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        2 => Just(Step::Create),
        10 => (0usize..4, 0u32..3, prop::bool::weighted(0.8))
            .prop_map(|(file, index, knows)| Step::Write { file, index, knows }),
        3 => (0usize..4, 0u64..3).prop_map(|(file, blocks)| Step::Cut { file, blocks }),
        1 => (0usize..4).prop_map(|file| Step::Unlink { file }),
        1 => (0usize..4).prop_map(|file| Step::Lose { file }),
        3 => Just(Step::Begin),
        4 => (0usize..4).prop_map(|view| Step::Freeze { view }),
        3 => (0usize..4).prop_map(|view| Step::Remove { view }),
        2 => Just(Step::Release),
    ]
}

/// What is to be there.
#[derive(Default)]
struct Model {
    files: Vec<(u64, String)>,
    views: Vec<View>,
    /// When each view began, and what there was then, and when it was frozen.
    began: BTreeMap<u32, (usize, BTreeSet<Name>)>,
    /// When each block was lost that a file has had; of those that files have, never.
    lost: BTreeMap<Name, Option<usize>>,
    now: usize,
}

impl Model {
    fn is_had(&self, name: &Name) -> bool {
        let (inode, generation, _) = *name;
        self.views.iter().any(|view| {
            let (began, _) = &self.began[&view.id];
            let was_there = self.lost[name].is_none_or(|lost| lost > *began);
            was_there && generation < view.generation && inode <= view.last_inode
        })
    }

    fn take(&mut self, bench: &mut Fixture, step: &Step) {
        let file = |number: usize| self.files.get(number % self.files.len().max(1)).map(|(inode, _)| *inode);
        let view = |number: usize| self.views.get(number % self.views.len().max(1)).map(|view| view.id);
        match *step {
            Step::Create => {
                let name = format!("f{}", self.now);
                self.files.push((bench.file(&name), name));
            }
            Step::Write { file: number, index, knows } => {
                let Some(file) = file(number) else { return };
                let known = bench.tables().extent(file, index).unwrap();
                let (below, inodes) = bench.frozen();
                let is_frozen = |generation: u32| knows && generation < below && file <= inodes;
                let oldest = bench.tables().inode(file).unwrap().unwrap().generation;
                let made = match known {
                    Some(known) if is_frozen(known.generation) => {
                        Fixture::block(index, bench.next(file), Some(known.generation))
                    }
                    Some(known) => Fixture::block(index, known.generation, None),
                    None => Fixture::block(index, if knows { bench.next(file) } else { oldest }, None),
                };
                let result = bench.commit(file, made);
                assert_eq!(result.errno, 0, "{}", result.reason);
            }
            Step::Cut { file: number, blocks } => {
                let Some(file) = file(number) else { return };
                bench.cut(file, blocks);
            }
            Step::Unlink { file: number } => {
                if self.files.is_empty() {
                    return;
                }
                let (inode, name) = self.files.remove(number % self.files.len());
                bench.unlink(inode, &name);
            }
            Step::Lose { file: number } => {
                let Some(inode) = file(number) else { return };
                let blocks: Vec<Extent> = bench.tables().extents(inode, 0).unwrap().into_iter().take(1).collect();
                if !blocks.is_empty() {
                    let dropped = bench.run(Kind::DropLost(DropLost { inode, blocks, now_ns: 9 }));
                    assert_eq!(dropped, Outcome::LostDropped { reverted: false });
                }
            }
            Step::Begin if self.views.len() < 4 => {
                let view = bench.begin(&format!("v{}", self.now));
                self.began.insert(view.id, (self.now, self.there(bench)));
                self.views.push(view);
            }
            Step::Freeze { view: number } => {
                let Some(id) = view(number) else { return };
                let is_unfrozen = |view: &&mut View| view.id == id && view.generation == u32::MAX;
                let Some(known) = self.views.iter_mut().find(is_unfrozen) else { return };
                *known = bench.freeze(id);
            }
            Step::Remove { view: number } => {
                let Some(id) = view(number) else { return };
                bench.remove(id);
                self.views.retain(|view| view.id != id);
            }
            Step::Begin | Step::Release => bench.release(),
        }
    }

    /// The blocks that files have.
    fn there(&self, bench: &Fixture) -> BTreeSet<Name> {
        let mut there = BTreeSet::new();
        for (inode, _) in &self.files {
            let extents = bench.tables().extents(*inode, 0).unwrap();
            there.extend(extents.iter().map(|extent| (*inode, extent.generation, extent.index)));
        }
        there
    }

    fn check(&mut self, bench: &Fixture, step: &Step) {
        let there = self.there(bench);
        for name in &there {
            let before = self.lost.insert(*name, None);
            assert!(before.is_none_or(|lost| lost.is_none()), "{name:?} is there once more");
        }
        for (name, lost) in &mut self.lost {
            if lost.is_none() && !there.contains(name) {
                *lost = Some(self.now);
            }
        }
        let (kept, freed) = (bench.kept(), bench.garbage());
        let had: BTreeSet<Name> =
            self.lost.keys().filter(|name| !there.contains(*name) && self.is_had(name)).copied().collect();
        assert!(had.is_subset(&kept), "{step:?}: {had:?} of {kept:?}");
        if matches!(step, Step::Release) {
            assert_eq!(kept, had, "it is kept for nobody");
        }
        // Each is in one place.
        let all = there.len() + kept.len() + freed.len();
        let union: BTreeSet<Name> = there.iter().chain(&kept).chain(&freed).copied().collect();
        assert_eq!((all, union.len()), (self.lost.len(), self.lost.len()), "{step:?}");
        for view in &self.views {
            let needed = &self.began[&view.id].1;
            assert!(needed.is_disjoint(&freed), "{step:?}: the view {} lacks something", view.id);
        }
        self.now += 1;
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, ..ProptestConfig::default() })]
    #[test]
    fn rolling_views_leave_nothing(steps in prop::collection::vec(step(), 0..80)) {
        let (mut bench, mut model) = (Fixture::new(), Model::default());
        // In the end there is nothing left.
        let removals = [3, 2, 1, 0].map(|view| Step::Remove { view });
        let last = [Step::Release].into_iter().chain(removals).chain([Step::Release]);
        for step in steps.into_iter().chain(last) {
            model.take(&mut bench, &step);
            model.check(&bench, &step);
        }
        prop_assert!(model.views.is_empty() && bench.kept().is_empty());
        let counters = bench.tables().counters().unwrap();
        prop_assert_eq!((counters.frozen_views, counters.unfrozen_views, counters.kept), (0, 0, 0));
        prop_assert_eq!(bench.frozen(), (0, 0));
    }
}
