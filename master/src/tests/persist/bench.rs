//! A master with an fs-mode mount, and what its bucket should have.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use cavern_conf::{Config, Interval};
use cavern_consensus::Clock;
use cavern_proto::master::mutation::Change;
use cavern_proto::master::{
    CommitContent, CreateInode, Existing, Extent, FreeFate, Kind, Mount, Mutation, MutationResult, PersistStatus,
    RemoveName, RenameMode, RenameName, SetAttr, WriteType,
};
use cavern_proto::record::command::Command;
use cavern_proto::record::{FreeContent, InodeRecord, Mutate};
use cavern_state::records::mode;
use cavern_state::{Outcome, Tables, schema};
use cavern_ufs::MemoryBucket;
use cavern_work::WorkError;

use super::fake::{Fake, HOLE, body, written};
use crate::tests::harness::{TestMaster, eventually, name, new_bucket};

/// A master with an fs-mode mount of a bucket of its own.
pub struct Fixture {
    pub master: Option<TestMaster>,
    pub fake: Fake,
    pub bucket: MemoryBucket,
    pub root: u64,
    pub seq: u64,
    /// What is in the blocks of files.
    pub model: HashMap<u64, Vec<String>>,
}

const PREFIX: &str = "top/";
pub const BLOCK: u64 = 1 << 10;

impl Fixture {
    pub async fn new() -> Self {
        Self::with(&[]).await
    }

    /// With objects that are there before, which nothing brings into the namespace yet.
    pub async fn with(objects: &[(&str, Bytes)]) -> Self {
        Self::start(objects, Duration::from_millis(5)).await
    }

    /// Nothing is brought to the bucket by itself, as far as a test can observe.
    pub async fn idle() -> Self {
        Self::start(&[], Duration::from_secs(3600)).await
    }

    pub async fn start(objects: &[(&str, Bytes)], persist_delay: Duration) -> Self {
        let (bucket, uri) = new_bucket();
        for (key, content) in objects {
            bucket.put(key, content.clone());
        }
        let existing = if objects.is_empty() { Existing::None } else { Existing::Indexed };
        let uri = format!("{uri}/top");
        let fake = Fake::new(&uri);
        let mut config = Config::default();
        config.master.persist_delay = Interval::millis(u64::try_from(persist_delay.as_millis()).unwrap());
        let dir = Arc::new(tempfile::tempdir().unwrap());
        let master = TestMaster::with(config, dir, Arc::new(fake.clone())).await.unwrap();
        master.register_workers(3).await;
        let mount = Mount {
            path: "/m".into(),
            uri,
            write_type: WriteType::FsMode as i32,
            created_ns: 5,
            block_size: BLOCK,
            existing: existing as i32,
            ..Mount::default()
        };
        let root = master.attach(mount).await.root_inode;
        Self { master: Some(master), fake, bucket, root, seq: 0, model: HashMap::new() }
    }

    pub fn master(&self) -> &TestMaster {
        self.master.as_ref().unwrap()
    }

    pub async fn restart(&mut self) {
        self.restart_at(Clock::default()).await;
    }

    pub async fn restart_at(&mut self, clock: Clock) {
        let (dir, config) = self.master.take().unwrap().end().await;
        self.master = Some(TestMaster::at(config, dir, Arc::new(self.fake.clone()), clock).await.unwrap());
    }

    /// Makes a change; 0 when it was refused.
    pub async fn change(&mut self, change: Change) -> u64 {
        let result = self.try_change(change).await;
        if result.errno == 0 { result.inode } else { 0 }
    }

    pub async fn try_change(&mut self, change: Change) -> MutationResult {
        self.seq += 1;
        let services = self.master().services();
        let mutation = Mutation { seq: self.seq, uid: 1, gid: 2, change: Some(change), ..Mutation::default() };
        let now_ns = services.lookups.reader.clock().now_ns();
        let mutate =
            Mutate { session: 1, answered: self.seq - 1, now_ns, mutation: Some(mutation), ..Mutate::default() };
        match services.proposer.propose(Command::Mutate(mutate)).await.unwrap() {
            Outcome::Mutated(result, _) => *result,
            other => panic!("{other:?}"),
        }
    }

    pub async fn create(&mut self, parent: u64, text: &str, kind: Kind) -> u64 {
        let target = if kind == Kind::Symlink { name("to") } else { Bytes::new() };
        let create =
            CreateInode { parent, name: name(text), kind: kind as i32, mode: 0o640, target, ..Default::default() };
        self.change(Change::Create(create)).await
    }

    pub async fn rename(&mut self, from: (u64, &str), to: (u64, &str), mode: RenameMode) -> u64 {
        let rename = RenameName {
            parent: from.0,
            name: name(from.1),
            new_parent: to.0,
            new_name: name(to.1),
            mode: mode as i32,
        };
        self.change(Change::Rename(rename)).await
    }

    pub async fn remove(&mut self, parent: u64, text: &str, directory: bool) -> u64 {
        self.change(Change::Remove(RemoveName { parent, name: name(text), directory })).await
    }

    pub async fn commit(&mut self, inode: u64, index: u32, generation: u32, workers: Vec<u64>) -> u64 {
        let made = vec![Extent { index, generation, workers, ..Extent::default() }];
        let grow_to = u64::from(index + 1) * BLOCK;
        let commit = CommitContent { inode, grow_to, made, changed: true };
        let done = self.change(Change::Commit(commit)).await;
        if done != 0 {
            let blocks = self.model.entry(inode).or_default();
            blocks.resize(blocks.len().max(index as usize + 1), HOLE.to_owned());
            blocks[index as usize] = written(inode, generation);
        }
        done
    }

    pub async fn cut(&mut self, inode: u64, size: u64) -> u64 {
        let done = self.change(Change::SetAttr(SetAttr { inode, size: Some(size), ..SetAttr::default() })).await;
        if done != 0 {
            self.model.entry(inode).or_default().resize(size.div_ceil(BLOCK) as usize, HOLE.to_owned());
        }
        done
    }

    /// Drops the blocks of a file.
    pub async fn free(&self, inode: u64) -> FreeFate {
        self.free_by(Command::FreeContent(FreeContent { inode, session: 0 })).await
    }

    /// The same at the wish of a session, whose own holds do not count.
    pub async fn free_own(&self, inode: u64, session: u64) -> FreeFate {
        self.free_by(Command::FreeContent(FreeContent { inode, session })).await
    }

    async fn free_by(&self, command: Command) -> FreeFate {
        let outcome = self.master().services().proposer.propose(command).await.unwrap();
        let Outcome::Freed(freed) = outcome else { panic!("{outcome:?}") };
        freed.fate()
    }

    /// What a client reads of a file, as the layout says where it is; `None` while its origin is elsewhere.
    pub async fn read(&self, inode: u64) -> Option<Vec<String>> {
        let read = self
            .master()
            .services()
            .lookups
            .reader
            .read(move |tables| Ok((tables.inode(inode)?.unwrap_or_default(), tables.extents(inode, 0)?)));
        let (record, extents) = read.await.unwrap();
        let mut blocks = vec![HOLE.to_owned(); record.size.div_ceil(BLOCK) as usize];
        if let Some(origin) = record.origin {
            let words = self.fake.words(&origin.key, &origin.etag).await.ok()?;
            let valid = origin.valid.div_ceil(BLOCK) as usize;
            for (block, word) in blocks.iter_mut().zip(words).take(valid) {
                *block = word;
            }
        }
        for extent in extents {
            if let Some(block) = blocks.get_mut(extent.index as usize) {
                *block = written(inode, extent.generation);
            }
        }
        Some(blocks)
    }

    pub async fn status(&self, path: &str) -> PersistStatus {
        self.master().services().persistence.status(path, u64::MAX).await.unwrap()
    }

    /// Has what is at a path, and below it, brought to the bucket now.
    pub async fn bring(&self, path: &str) {
        let persistence = &self.master().services().persistence;
        let waited = persistence.expedite(persistence.scope(path).await.unwrap(), u64::MAX);
        eventually(|| async { waited.left().await.unwrap().items() == 0 }).await;
    }

    pub async fn settled(&self) {
        eventually(|| async {
            let status = self.status("/m").await;
            status.files == 0 && status.deletions == 0
        })
        .await;
    }

    /// The objects that the namespace asks for: keys, contents, modes.
    pub async fn wanted(&self) -> BTreeMap<String, (Bytes, String)> {
        let (root, model) = (self.root, self.model.clone());
        let read = self.master().services().lookups.reader.read(move |tables| {
            let mut wanted = BTreeMap::new();
            collect(tables, &model, root, PREFIX, &mut wanted)?;
            Ok(wanted)
        });
        read.await.unwrap()
    }

    pub fn objects(&self) -> BTreeMap<String, (Bytes, String)> {
        let object = |key: String| {
            let (bytes, metadata) = self.bucket.object(&key).unwrap();
            (key, (bytes, metadata["mode"].clone()))
        };
        self.bucket.keys().into_iter().map(object).collect()
    }

    /// When all is done, the bucket is the namespace, and nothing is left to be noted.
    pub async fn check(&self) {
        self.settled().await;
        assert_eq!(self.objects(), self.wanted().await);
        let known: BTreeMap<String, String> = self
            .master()
            .services()
            .lookups
            .reader
            .read(|tables| {
                let objects = tables.rows(schema::Objects, ()).page(usize::MAX, |row| {
                    let ((_, key), object) = row.entry()?;
                    Ok((key.to_owned(), object.etag))
                })?;
                Ok(objects.into_iter().collect())
            })
            .await
            .unwrap();
        let mut there = BTreeMap::new();
        for key in self.bucket.keys() {
            there.insert(key.clone(), self.fake.ufs.head(&key).await.unwrap().etag);
        }
        assert_eq!(known, there, "what is noted of the objects is what they are");
        for (inode, blocks) in &self.model {
            let inode = *inode;
            let known =
                self.master().services().lookups.reader.read(move |tables| Ok(tables.inode(inode)?)).await.unwrap();
            if known.is_some() {
                assert_eq!(self.read(inode).await.as_ref(), Some(blocks), "inode {inode}");
            }
        }
    }

    pub async fn end(self) {
        self.master.unwrap().stop().await;
    }
}

fn collect(
    tables: Tables<'_>,
    model: &HashMap<u64, Vec<String>>,
    directory: u64,
    prefix: &str,
    wanted: &mut BTreeMap<String, (Bytes, String)>,
) -> Result<(), WorkError> {
    let (entries, _) = tables.page(directory, None, usize::MAX)?;
    for (text, inode, record) in entries {
        let key = format!("{prefix}{}", std::str::from_utf8(&text).unwrap());
        let kind = record.kind();
        let shown = |record: &InodeRecord, bits: u32| (bits | mode(record)).to_string();
        if kind == Kind::Directory {
            let key = format!("{key}/");
            collect(tables, model, inode, &key, wanted)?;
            wanted.insert(key, (body(&[], &[]), shown(&record, 0o040_000)));
        } else {
            let none = Vec::new();
            let blocks = model.get(&inode).filter(|_| kind == Kind::File).unwrap_or(&none);
            let bits = if kind == Kind::Symlink { 0o120_000 } else { 0o100_000 };
            wanted.insert(key, (body(&record.target, blocks), shown(&record, bits)));
        }
    }
    Ok(())
}
