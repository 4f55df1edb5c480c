//! The bucket follows the namespace: whatever is done to names and files, whatever fails, and whenever the master is begun
//! anew, in the end it has an object for each name, with the right content and metadata, and no other.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use cavern_client::Placement;
use cavern_conf::{Config, Interval};
use cavern_proto::data::{BlockRef, PersistReply, PersistRequest, Status};
use cavern_proto::master::mutation::Change;
use cavern_proto::master::{
    CommitContent, CreateInode, Extent, Kind, LinkInode, Mount, Mutation, PersistStatus, RemoveName, RenameMode,
    RenameName, SetAttr, SetXattr, Worker, WorkerState, WorkerTable, WriteType,
};
use cavern_proto::record::command::Command;
use cavern_proto::record::{InodeRecord, Mutate};
use cavern_ufs::{MemoryBucket, Metadata, Replaces, Ufs, UfsError};
use futures::future::BoxFuture;
use parking_lot::Mutex;
use proptest::prelude::*;

use super::harness::{NoWorkers, TestMaster, eventually, name, new_bucket};
use crate::MasterError;
use crate::attach::Unwritten;
use crate::persist::ObjectWriter;
use crate::server::{MakeFiller, WayToWorkers};
use crate::state::records::mode;
use crate::state::{Outcome, Tables};
use crate::workers::Workers;

/// Workers that make objects of the names of blocks, and fail as they are told to.
#[derive(Clone)]
struct Fake {
    ufs: Ufs,
    /// Of a hundred requests so many fail.
    trouble: Arc<AtomicU32>,
    dice: Arc<AtomicU64>,
    /// All requests fail, as if the bucket were away.
    is_away: Arc<AtomicU32>,
    written: Arc<Mutex<Vec<String>>>,
    freed: Arc<Mutex<Vec<(u64, u32)>>>,
    live: Arc<Mutex<Vec<(u64, WorkerState)>>>,
}

impl Fake {
    fn new(uri: &str) -> Self {
        let conf = cavern_conf::schema::Ufs { retries: 0, ..Default::default() };
        Self {
            ufs: Ufs::open(uri, &Default::default(), &conf).unwrap(),
            trouble: Arc::default(),
            dice: Arc::new(AtomicU64::new(1)),
            is_away: Arc::default(),
            written: Arc::default(),
            freed: Arc::default(),
            live: Arc::new(Mutex::new(vec![(1, WorkerState::Live)])),
        }
    }

    fn roll(&self) -> u64 {
        let step = |seed: u64| Some(seed.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f));
        self.dice.fetch_update(Ordering::AcqRel, Ordering::Acquire, step).unwrap() >> 33
    }

    async fn write(&self, request: PersistRequest) -> Result<PersistReply, String> {
        let answer = |status: Status, etag: String| {
            Ok(PersistReply { status: status.into(), message: "on purpose".to_owned(), etag })
        };
        if self.is_away.load(Ordering::Acquire) > 0 {
            return answer(Status::UfsUnavailable, String::new());
        }
        let trouble = self.roll() % 100 < u64::from(self.trouble.load(Ordering::Acquire));
        let fate = if trouble { self.roll() % 4 } else { 9 };
        tokio::time::sleep(Duration::from_micros(self.roll() % 2000)).await;
        match fate {
            0 => return Err("the worker went away before".to_owned()),
            1 => return answer(Status::Changed, String::new()),
            _ => {}
        }
        let extents: Vec<(u32, u32)> =
            request.indexes.iter().copied().zip(request.generations.iter().copied()).collect();
        let body = body(request.inode, request.length, &request.inline, &extents);
        let metadata: Metadata = request.metadata.into_iter().map(|item| (item.name, item.value)).collect();
        let replaces =
            if request.replaces.is_empty() { Replaces::Nothing } else { Replaces::Version(&request.replaces) };
        let put = self.ufs.put(&request.key, &body, &metadata, replaces).await;
        tokio::time::sleep(Duration::from_micros(self.roll() % 2000)).await;
        if fate == 2 {
            return Err("the worker went away after".to_owned());
        }
        self.written.lock().push(request.key.clone());
        match put {
            Ok(etag) => answer(Status::Ok, etag),
            Err(UfsError::VersionChanged { .. } | UfsError::NotFound { .. }) => {
                let there = self.ufs.head(&request.key).await.map(|there| there.etag).unwrap_or_default();
                answer(Status::VersionChanged, there)
            }
            Err(error) => Err(error.to_string()),
        }
    }
}

/// What stands for the content of a file.
fn body(inode: u64, length: u64, inline: &[u8], extents: &[(u32, u32)]) -> Bytes {
    if inline.is_empty() { format!("{inode} {length} {extents:?}").into() } else { Bytes::copy_from_slice(inline) }
}

impl MakeFiller for Fake {
    fn make(&self, _: &Config, _: Arc<Workers>, _: &str) -> WayToWorkers {
        WayToWorkers { filler: Arc::new(NoWorkers), writer: Arc::new(self.clone()), pool: None }
    }
}

impl ObjectWriter for Fake {
    fn placement(&self) -> Result<Arc<Placement>, MasterError> {
        let worker = |(id, state): &(u64, WorkerState)| Worker { id: *id, state: *state as i32, ..Worker::default() };
        let workers = self.live.lock().iter().map(worker).collect();
        Ok(Arc::new(Placement::new(&WorkerTable { epoch: 1, workers })))
    }

    fn persist(&self, _: u64, request: PersistRequest) -> BoxFuture<'_, Result<PersistReply, String>> {
        Box::pin(self.write(request))
    }

    fn free(&self, worker: u64, blocks: Vec<BlockRef>) -> BoxFuture<'_, Result<(), String>> {
        self.freed.lock().extend(blocks.iter().map(|block| (worker, block.index)));
        Box::pin(async { Ok(()) })
    }
}

/// A master with an fs-mode mount of a bucket of its own.
struct Bench {
    master: Option<TestMaster>,
    fake: Fake,
    bucket: MemoryBucket,
    root: u64,
    seq: u64,
}

const PREFIX: &str = "top/";

impl Bench {
    async fn new() -> Self {
        let (bucket, uri) = new_bucket();
        let uri = format!("{uri}/top");
        let fake = Fake::new(&uri);
        let mut config = Config::default();
        config.master.persist_delay = Interval::millis(5);
        let dir = Arc::new(tempfile::tempdir().unwrap());
        let master = TestMaster::with(config, dir, Arc::new(fake.clone())).await.unwrap();
        let mount = Mount {
            path: "/m".into(),
            uri,
            write_type: WriteType::FsMode as i32,
            created_ns: 5,
            block_size: 1 << 20,
            ..Mount::default()
        };
        let Outcome::Mount(mount) = master.services().proposer.propose(Command::Mount(mount)).await.unwrap() else {
            panic!("not mounted")
        };
        Self { master: Some(master), fake, bucket, root: mount.root_inode, seq: 0 }
    }

    fn master(&self) -> &TestMaster {
        self.master.as_ref().unwrap()
    }

    async fn restart(&mut self) {
        let TestMaster { dir, master, config } = self.master.take().unwrap();
        master.stop().await;
        self.master = Some(TestMaster::with(config, dir, Arc::new(self.fake.clone())).await.unwrap());
    }

    /// Makes a change; 0 when it was refused.
    async fn change(&mut self, change: Change) -> u64 {
        self.seq += 1;
        let services = self.master().services();
        let mutation = Mutation { seq: self.seq, uid: 1, gid: 2, change: Some(change) };
        let now_ns = services.lookups.listings.clock().now_ns();
        let mutate = Mutate { session: 1, answered: self.seq - 1, now_ns, mutation: Some(mutation) };
        match services.proposer.propose(Command::Mutate(mutate)).await.unwrap() {
            Outcome::Mutated(result) if result.errno == 0 => result.inode,
            Outcome::Mutated(_) => 0,
            other => panic!("{other:?}"),
        }
    }

    async fn create(&mut self, parent: u64, text: &str, kind: Kind) -> u64 {
        let target = if kind == Kind::Symlink { name("to") } else { Bytes::new() };
        let create =
            CreateInode { parent, name: name(text), kind: kind as i32, mode: 0o640, target, ..Default::default() };
        self.change(Change::Create(create)).await
    }

    async fn rename(&mut self, from: (u64, &str), to: (u64, &str), mode: RenameMode) -> u64 {
        let rename = RenameName {
            parent: from.0,
            name: name(from.1),
            new_parent: to.0,
            new_name: name(to.1),
            mode: mode as i32,
        };
        self.change(Change::Rename(rename)).await
    }

    async fn remove(&mut self, parent: u64, text: &str, directory: bool) -> u64 {
        self.change(Change::Remove(RemoveName { parent, name: name(text), directory })).await
    }

    async fn commit(&mut self, inode: u64, index: u32, generation: u32, workers: Vec<u64>) -> u64 {
        let made = vec![Extent { index, generation, workers }];
        let grow_to = u64::from(index + 1) << 20;
        self.change(Change::Commit(CommitContent { inode, grow_to, made, changed: true })).await
    }

    async fn cut(&mut self, inode: u64, size: u64) -> u64 {
        self.change(Change::SetAttr(SetAttr { inode, size: Some(size), ..SetAttr::default() })).await
    }

    async fn status(&self, path: &str) -> PersistStatus {
        self.master().services().persistence.status(path, u64::MAX).await.unwrap()
    }

    async fn settled(&self) {
        eventually(|| async {
            let status = self.status("/m").await;
            status.files == 0 && status.deletions == 0
        })
        .await;
    }

    /// The objects that the namespace asks for: keys, contents, modes.
    async fn wanted(&self) -> BTreeMap<String, (Bytes, String)> {
        let root = self.root;
        let read = self.master().services().lookups.listings.read(move |tables| {
            let mut wanted = BTreeMap::new();
            collect(tables, root, PREFIX, &mut wanted)?;
            Ok(wanted)
        });
        read.await.unwrap()
    }

    fn objects(&self) -> BTreeMap<String, (Bytes, String)> {
        let object = |key: String| {
            let (bytes, metadata) = self.bucket.object(&key).unwrap();
            (key, (bytes, metadata["mode"].clone()))
        };
        self.bucket.keys().into_iter().map(object).collect()
    }

    /// When all is done, the bucket is the namespace, and nothing is left to be noted.
    async fn check(&self) {
        self.settled().await;
        assert_eq!(self.objects(), self.wanted().await);
        let known: BTreeMap<String, String> = self
            .master()
            .services()
            .lookups
            .listings
            .read(|tables| {
                let inodes = 1..=tables.counters()?.inode;
                let objects = inodes.map(|inode| tables.objects(inode)).collect::<Result<Vec<_>, _>>()?;
                Ok(objects.into_iter().flatten().map(|(key, object)| (key, object.etag)).collect())
            })
            .await
            .unwrap();
        let mut there = BTreeMap::new();
        for key in self.bucket.keys() {
            there.insert(key.clone(), self.fake.ufs.head(&key).await.unwrap().etag);
        }
        assert_eq!(known, there, "what is noted of the objects is what they are");
    }

    async fn end(self) {
        self.master.unwrap().master.stop().await;
    }
}

fn collect(
    tables: Tables<'_>,
    directory: u64,
    prefix: &str,
    wanted: &mut BTreeMap<String, (Bytes, String)>,
) -> Result<(), MasterError> {
    let (entries, _) = tables.page(directory, None, usize::MAX)?;
    for (text, inode, record) in entries {
        let key = format!("{prefix}{}", std::str::from_utf8(&text).unwrap());
        let kind = record.kind();
        let shown = |record: &InodeRecord, bits: u32| (bits | mode(record)).to_string();
        if kind == Kind::Directory {
            let key = format!("{key}/");
            collect(tables, inode, &key, wanted)?;
            wanted.insert(key, (body(inode, 0, &[], &[]), shown(&record, 0o040_000)));
        } else {
            let blocks = record.size.div_ceil(1 << 20);
            let extents = tables.extents(inode, 0)?;
            let extents: Vec<(u32, u32)> = extents
                .iter()
                .filter(|extent| u64::from(extent.index) < blocks)
                .map(|extent| (extent.index, extent.generation))
                .collect();
            let bits = if kind == Kind::Symlink { 0o120_000 } else { 0o100_000 };
            wanted.insert(key, (body(inode, record.size, &record.target, &extents), shown(&record, bits)));
        }
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn files_links_and_directories_become_objects_and_go_again() {
    let mut bench = Bench::new().await;
    let root = bench.root;
    let directory = bench.create(root, "d", Kind::Directory).await;
    let file = bench.create(directory, "f", Kind::File).await;
    bench.commit(file, 0, 0, vec![1]).await;
    bench.create(root, "l", Kind::Symlink).await;
    bench.create(root, "p", Kind::Fifo).await;
    bench.change(Change::Link(LinkInode { inode: file, parent: root, name: name("g") })).await;
    bench.settled().await;
    let keys = ["top/d/", "top/d/f", "top/g", "top/l", "top/p"];
    assert_eq!(bench.bucket.keys(), keys);
    let (content, metadata) = bench.bucket.object("top/g").unwrap();
    assert_eq!(content, bench.bucket.object("top/d/f").unwrap().0);
    assert_eq!((metadata["mode"].as_str(), metadata["uid"].as_str(), metadata["gid"].as_str()), ("33184", "1", "2"));
    assert_eq!(bench.bucket.object("top/l").unwrap().0, "to");

    let xattr = SetXattr { inode: file, name: name("user.a"), value: name("1"), ..SetXattr::default() };
    bench.change(Change::SetXattr(xattr)).await;
    bench.settled().await;
    assert!(bench.bucket.object("top/g").unwrap().1.contains_key("xattr"));
    bench.remove(directory, "f", false).await;
    bench.remove(root, "d", true).await;
    bench.rename((root, "l"), (root, "p"), RenameMode::Replace).await;
    bench.settled().await;
    assert_eq!(bench.bucket.keys(), ["top/g", "top/p"]);
    assert_eq!(bench.bucket.object("top/p").unwrap().0, "to");
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_that_changes_all_the_time_is_written_now_and_then() {
    let mut bench = Bench::new().await;
    let root = bench.root;
    let file = bench.create(root, "f", Kind::File).await;
    for change in 0..200u32 {
        bench.commit(file, change % 3, 0, vec![1]).await;
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    bench.settled().await;
    let writes = bench.fake.written.lock().iter().filter(|key| *key == "top/f").count();
    assert!((2..60).contains(&writes), "{writes} writes of 200 changes");
    bench.check_file(file).await;
    bench.end().await;
}

impl Bench {
    async fn check_file(&self, inode: u64) {
        let wanted = self.wanted().await;
        assert!(wanted.values().any(|(content, _)| content.starts_with(format!("{inode} ").as_bytes())));
        assert_eq!(self.objects(), wanted);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_renamed_directory_is_one_intent_that_is_spread_across_restarts() {
    let mut bench = Bench::new().await;
    let root = bench.root;
    let top = bench.create(root, "a", Kind::Directory).await;
    let below = bench.create(top, "b", Kind::Directory).await;
    // More than one command spreads.
    for number in 0..600 {
        bench.create(below, &format!("f{number:04}"), Kind::File).await;
    }
    bench.settled().await;
    assert_eq!(bench.bucket.keys().len(), 602);
    bench.fake.is_away.store(1, Ordering::Release);
    bench.rename((root, "a"), (root, "z"), RenameMode::Replace).await;
    bench.restart().await;
    eventually(|| async { !bench.status("/m").await.last_error.is_empty() }).await;
    let up_to = bench.status("/m").await.change;
    let status = bench.status("/m/z/b/f0007").await;
    assert!(status.files >= 1 && status.bytes == 0 && status.last_error == "on purpose", "{status:?}");
    assert_eq!(bench.bucket.keys().iter().filter(|key| key.starts_with("top/a/")).count(), 602, "nothing goes first");
    bench.fake.is_away.store(0, Ordering::Release);
    tokio::time::sleep(Duration::from_millis(300)).await;
    bench.restart().await;
    // What the rename entails counts as a part of it.
    eventually(|| async {
        let left = bench.master().services().persistence.status("/m", up_to).await.unwrap();
        left.files == 0 && left.deletions == 0
    })
    .await;
    assert!(!bench.bucket.keys().iter().any(|key| key.starts_with("top/a/")));
    bench.check().await;
    assert_eq!(bench.bucket.keys().iter().filter(|key| key.starts_with("top/z/b/f")).count(), 600);
    // There and back: what lies below is where it was.
    bench.fake.is_away.store(1, Ordering::Release);
    let writes = bench.fake.written.lock().len();
    bench.rename((root, "z"), (root, "y"), RenameMode::Replace).await;
    eventually(|| async { bench.status("/m/y/b").await.files > 100 }).await;
    bench.rename((root, "y"), (root, "z"), RenameMode::Replace).await;
    // Nothing needs the worker any more; whatever was under way to it has failed by the time that nothing is left.
    eventually(|| async { bench.status("/m").await.files == 0 }).await;
    bench.fake.is_away.store(0, Ordering::Release);
    bench.check().await;
    assert_eq!(bench.fake.written.lock().len(), writes);
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_a_key_is_told_and_keeps_nobody_else_waiting() {
    let mut bench = Bench::new().await;
    let root = bench.root;
    let odd =
        CreateInode { parent: root, name: Bytes::from_static(b"\xff"), kind: Kind::File as i32, ..Default::default() };
    bench.change(Change::Create(odd)).await;
    bench.create(root, "good", Kind::File).await;
    eventually(|| async { bench.bucket.object("top/good").is_some() }).await;
    eventually(|| async { bench.status("/m").await.last_error.contains("not UTF-8") }).await;
    eventually(|| async { bench.status("/m").await.files == 1 }).await;
    assert_eq!(bench.status("/m/good").await.files, 0);
    let rename = RenameName {
        parent: root,
        name: Bytes::from_static(b"\xff"),
        new_parent: root,
        new_name: name("better"),
        mode: 0,
    };
    bench.change(Change::Rename(rename)).await;
    bench.check().await;
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_object_that_is_in_the_way_is_replaced() {
    let mut bench = Bench::new().await;
    let root = bench.root;
    bench.bucket.put("top/f", "from elsewhere");
    let file = bench.create(root, "f", Kind::File).await;
    bench.settled().await;
    bench.check_file(file).await;
    // And one that somebody has replaced is deleted all the same.
    bench.bucket.put("top/f", "from elsewhere again");
    bench.remove(root, "f", false).await;
    bench.check().await;
    assert!(bench.bucket.keys().is_empty());
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn dropped_blocks_are_freed_at_workers_that_are_there() {
    let mut bench = Bench::new().await;
    let root = bench.root;
    *bench.fake.live.lock() = vec![(1, WorkerState::Live), (2, WorkerState::Lost)];
    let file = bench.create(root, "f", Kind::File).await;
    bench.commit(file, 0, 0, vec![1, 2]).await;
    bench.commit(file, 1, 0, vec![1]).await;
    // Worker 3 is in no table any more.
    bench.commit(file, 2, 0, vec![3]).await;
    bench.cut(file, 0).await;
    let left = async |bench: &Bench| {
        let read = bench.master().services().lookups.listings.read(|tables| tables.garbage(0, 10));
        read.await.unwrap()
    };
    eventually(|| async {
        let left = left(&bench).await;
        left.len() == 1 && left[0].1.extents == [Extent { index: 0, generation: 0, workers: vec![2] }]
    })
    .await;
    let mut freed = bench.fake.freed.lock().clone();
    freed.sort_unstable();
    freed.dedup();
    assert_eq!(freed, [(1, 0), (1, 1)]);
    *bench.fake.live.lock() = vec![(1, WorkerState::Live), (2, WorkerState::Live)];
    eventually(|| async { left(&bench).await.is_empty() }).await;
    assert!(bench.fake.freed.lock().contains(&(2, 0)));
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_mount_with_unwritten_changes_goes_only_when_they_are_given_up() {
    let mut bench = Bench::new().await;
    let root = bench.root;
    let directory = bench.create(root, "d", Kind::Directory).await;
    bench.settled().await;
    bench.fake.is_away.store(1, Ordering::Release);
    let file = bench.create(directory, "f", Kind::File).await;
    bench.commit(file, 0, 0, vec![1]).await;
    bench.remove(root, "none", false).await;
    let services = bench.master().services().clone();
    let refused = services.unmount_bucket("/m", Unwritten::Keep).await.unwrap_err();
    assert!(refused.to_string().contains("cv persist wait /m"), "{refused}");
    services.unmount_bucket("/m", Unwritten::Discard).await.unwrap();
    // What was noted of it goes, its blocks are freed, and the bucket stays as it is.
    eventually(|| async {
        let left = services.lookups.listings.read(|tables| {
            let objects = (1..=tables.counters()?.inode).map(|inode| tables.objects(inode));
            let objects: usize = objects.map(|objects| objects.map(|objects| objects.len())).sum::<Result<_, _>>()?;
            Ok(tables.intents(0, 10)?.len()
                + tables.deletions(None, 10)?.len()
                + tables.garbage(0, 10)?.len()
                + objects)
        });
        left.await.unwrap() == 0 && bench.fake.freed.lock().contains(&(1, 0))
    })
    .await;
    assert_eq!(bench.bucket.keys(), ["top/d/"]);
    bench.end().await;
}

#[derive(Clone, Debug)]
enum Op {
    Create(u8, u8, u8),
    Commit(u8, u8),
    Cut(u8, u8),
    Chmod(u8, u16),
    Link(u8, u8, u8),
    Rename(u8, u8, u8, u8, bool),
    Remove(u8, u8),
    Pause(u8),
    Restart,
    Trouble(u8),
}

fn op() -> impl Strategy<Value = Op> {
    let (place, text) = (any::<u8>(), 0..5u8);
    prop_oneof![
        6 => (place, text.clone(), 0..6u8).prop_map(|(at, text, kind)| Op::Create(at, text, kind)),
        4 => (place, 0..3u8).prop_map(|(file, index)| Op::Commit(file, index)),
        1 => (place, 0..3u8).prop_map(|(file, blocks)| Op::Cut(file, blocks)),
        1 => (place, 0..0o777u16).prop_map(|(inode, mode)| Op::Chmod(inode, mode)),
        1 => (place, place, text.clone()).prop_map(|(file, at, text)| Op::Link(file, at, text)),
        5 => (place, text.clone(), place, text.clone(), any::<bool>())
            .prop_map(|(from, old, to, new, swap)| Op::Rename(from, old, to, new, swap)),
        4 => (place, text).prop_map(|(at, text)| Op::Remove(at, text)),
        3 => (0..12u8).prop_map(Op::Pause),
        1 => Just(Op::Restart),
        1 => (0..60u8).prop_map(Op::Trouble),
    ]
}

async fn run(ops: Vec<Op>) {
    let mut bench = Bench::new().await;
    let mut directories = vec![bench.root];
    let mut inodes = vec![bench.root];
    let text = |number: u8| format!("n{number}");
    for op in ops {
        let directory = |at: u8| directories[usize::from(at) % directories.len()];
        let inode = |at: u8| inodes[usize::from(at) % inodes.len()];
        match op {
            Op::Create(at, number, kind) => {
                let kind = [Kind::File, Kind::File, Kind::File, Kind::Directory, Kind::Directory, Kind::Symlink]
                    [usize::from(kind)];
                let made = bench.create(directory(at), &text(number), kind).await;
                if made != 0 {
                    inodes.push(made);
                    directories.extend((kind == Kind::Directory).then_some(made));
                }
            }
            Op::Commit(file, index) => {
                let file = inode(file);
                let generation = bench.master().services().lookups.listings.read(move |tables| {
                    let known = tables.extent(file, u32::from(index))?.map(|extent| extent.generation);
                    Ok(known.or(tables.inode(file)?.map(|record| record.generation)))
                });
                let generation = generation.await.unwrap().unwrap_or_default();
                bench.commit(file, u32::from(index), generation, vec![1]).await;
            }
            Op::Cut(file, blocks) => {
                bench.cut(inode(file), u64::from(blocks) << 20).await;
            }
            Op::Chmod(at, mode) if inode(at) != bench.root => {
                let set = SetAttr { inode: inode(at), mode: Some(u32::from(mode)), ..SetAttr::default() };
                bench.change(Change::SetAttr(set)).await;
            }
            Op::Chmod(..) => {}
            Op::Link(file, at, number) => {
                let link = LinkInode { inode: inode(file), parent: directory(at), name: name(&text(number)) };
                bench.change(Change::Link(link)).await;
            }
            Op::Rename(from, old, to, new, swap) => {
                let mode = if swap { RenameMode::Exchange } else { RenameMode::Replace };
                bench.rename((directory(from), &text(old)), (directory(to), &text(new)), mode).await;
            }
            Op::Remove(at, number) => {
                if bench.remove(directory(at), &text(number), false).await == 0 {
                    bench.remove(directory(at), &text(number), true).await;
                }
            }
            Op::Pause(ms) => tokio::time::sleep(Duration::from_millis(u64::from(ms))).await,
            Op::Restart => bench.restart().await,
            Op::Trouble(percent) => bench.fake.trouble.store(u32::from(percent), Ordering::Release),
        }
    }
    bench.fake.trouble.store(0, Ordering::Release);
    bench.check().await;
    assert_eq!(bench.status("/").await.files, 0);
    bench.end().await;
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, max_shrink_iters: 30, ..ProptestConfig::default() })]

    #[test]
    fn the_bucket_becomes_the_namespace(ops in proptest::collection::vec(op(), 1..120)) {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        runtime.block_on(run(ops));
    }
}
