//! What `cv fsck` finds: each fault that is planted, and nothing else; and what it mends.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use cavern_fsck::Fsck;
use cavern_proto::data::Status;
use cavern_proto::master::mutation::Change;
use cavern_proto::master::{
    Finding, FindingKind, FsckRequest, Kind, LinkInode, RenameMode, SetQuota, View, WorkerState,
};
use cavern_proto::record::{
    BeginView, DentryRecord, ExtentRecord, FinishView, FreezeView, InodeRecord, RemoveView, UsageRecord,
};
use cavern_state::schema::{self, encode_key};
use cavern_state::{Family, Tables};
use cavern_work::WorkError;
use prost::Message as _;
use rocksdb::WriteBatch;
use tokio::sync::mpsc;

use super::bench::{BLOCK, Fixture};
use crate::tests::harness::{PATIENCE, eventually, name};

/// Of inodes that there are not: of the first there are blocks.
const NOBODY: u64 = 999_999;
const NOTHING: u64 = NOBODY + 1;

impl Fixture {
    /// What is found, and what could not be looked at.
    async fn fsck(&self, request: FsckRequest) -> (Vec<Finding>, Vec<String>) {
        let fsck = Fsck { settle: Duration::from_millis(10), ..self.master().services().fsck.clone() };
        let (answers, mut messages) = mpsc::channel(4);
        let running = tokio::spawn(async move { fsck.run(request, &answers).await });
        let (mut found, mut missed) = (Vec::new(), Vec::new());
        while let Some(message) = tokio::time::timeout(PATIENCE, messages.recv()).await.unwrap() {
            let message = message.unwrap();
            found.extend(message.findings);
            missed.extend(message.missed);
        }
        let last = running.await.unwrap().unwrap();
        found.extend(last.findings);
        missed.extend(last.missed);
        (found, missed)
    }

    async fn found(&self, request: FsckRequest) -> BTreeSet<(FindingKind, String)> {
        let (found, missed) = self.fsck(request).await;
        assert_eq!(missed, Vec::<String>::new());
        kinds(&found)
    }

    async fn look<T: Send + 'static>(
        &self,
        look: impl FnOnce(Tables<'_>) -> Result<T, WorkError> + Send + 'static,
    ) -> T {
        self.master().services().lookups.reader.read(look).await.unwrap()
    }

    /// Writes a row, or deletes it, as no command does.
    async fn plant(&self, family: Family, key: Vec<u8>, value: Option<Vec<u8>>) {
        self.look(move |tables| {
            let (database, mut batch) = (tables.database(), WriteBatch::default());
            match value {
                Some(value) => batch.put_cf(database.family(family), key, value),
                None => batch.delete_cf(database.family(family), key),
            }
            Ok(database.write(batch)?)
        })
        .await;
    }

    async fn plant_inode(&self, inode: u64, change: impl FnOnce(&mut InodeRecord)) {
        let mut record = self.look(move |tables| Ok(tables.inode(inode)?)).await.unwrap();
        change(&mut record);
        self.plant(Family::Inode, encode_key::<schema::Inodes>(&inode), Some(record.encode_to_vec())).await;
    }

    /// A file with one block, which workers know by its index.
    async fn file_of_block(&mut self, text: &str, index: u32, workers: Vec<u64>) -> u64 {
        let inode = self.create(self.root, text, Kind::File).await;
        assert_eq!(self.commit(inode, index, 0, workers).await, inode);
        inode
    }

    fn all_live(&self) {
        *self.fake.live.lock() = (1..=3).map(|worker| (worker, WorkerState::Live)).collect();
    }
}

fn whole() -> FsckRequest {
    FsckRequest { path: "/".into(), ..FsckRequest::default() }
}

fn kinds(found: &[Finding]) -> BTreeSet<(FindingKind, String)> {
    found.iter().map(|finding| (finding.kind(), finding.path.clone())).collect()
}

fn expected(kinds: &[(FindingKind, &str)]) -> BTreeSet<(FindingKind, String)> {
    kinds.iter().map(|(kind, path)| (*kind, (*path).to_owned())).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn faults_of_the_tables_are_found_and_mended_where_that_is_safe() {
    use FindingKind::{
        BlockIndex, BlockWithoutFile, DanglingName, EntryCount, LinkCount, LostIntent, NamelessInode, ObjectIndex,
        ParentLoop, Usage,
    };
    let mut bench = Fixture::new().await;
    bench.all_live();
    let root = bench.root;
    let directory = bench.create(root, "d", Kind::Directory).await;
    let file = bench.create(directory, "f", Kind::File).await;
    bench.commit(file, 0, 0, vec![1]).await;
    bench.change(Change::Link(LinkInode { inode: file, parent: root, name: name("g") })).await;
    let lost = bench.create(root, "lost", Kind::File).await;
    let changed = bench.create(root, "changed", Kind::File).await;
    let above = bench.create(root, "a", Kind::Directory).await;
    let below = bench.create(above, "b", Kind::Directory).await;
    let quota = SetQuota { inode: directory, max_bytes: Some(1 << 30), max_inodes: None };
    bench.change(Change::SetQuota(quota)).await;
    eventually(|| bench.look(|tables| Ok(tables.quotas(0)?.counted))).await;
    bench.settled().await;
    assert_eq!(bench.found(whole()).await, expected(&[]));

    let leads_to = |inode: u64| Some(DentryRecord { inode, kind: Kind::File as i32 }.encode_to_vec());
    let key = |parent: u64, text: &'static str| encode_key::<schema::Dentries>(&(parent, text.as_bytes()));
    bench.plant(Family::Dentry, key(root, "ghost"), leads_to(NOTHING)).await;
    bench.plant(Family::Dentry, key(root, "kept"), leads_to(NOBODY)).await;
    bench.plant(Family::Dentry, key(root, "lost"), None).await;
    bench.plant_inode(directory, |record| (record.entries, record.nlink) = (Some(5), 9)).await;
    bench.plant_inode(file, |record| record.nlink = 3).await;
    bench.plant_inode(changed, |record| record.version += 1).await;
    bench.plant_inode(above, |record| record.parent = below).await;
    let usage = UsageRecord { bytes: 1, inodes: 100 };
    bench.plant(Family::Usage, encode_key::<schema::Usage>(&directory), Some(usage.encode_to_vec())).await;
    let block = (file, 0_u32);
    bench.plant(Family::Replica, encode_key::<schema::Replicas>(&(1_u64, block)), None).await;
    bench.plant(Family::Replica, encode_key::<schema::Replicas>(&(2_u64, block)), Some(Vec::new())).await;
    let extent = ExtentRecord { workers: vec![1], ..ExtentRecord::default() };
    bench.plant(Family::Extent, encode_key::<schema::Extents>(&(NOBODY, 0_u32)), Some(extent.encode_to_vec())).await;
    let mount_id = bench.master().services().mounts.all_recorded().unwrap()[0].id;
    let noted = encode_key::<schema::Noted>(&(mount_id, "top/nobody"));
    bench.plant(Family::Noted, noted, Some(NOBODY.encode_to_vec())).await;

    let shown = |inode: u64| format!("inode {inode}");
    let (nobody, above, below) = (shown(NOBODY), shown(above), shown(below));
    let all = [
        (DanglingName, "/m/ghost"),
        (DanglingName, "/m/kept"),
        (NamelessInode, "/m/lost"),
        (EntryCount, "/m/d"),
        (LinkCount, "/m/d"),
        (LinkCount, "/m/d/f"),
        (LostIntent, "/m/changed"),
        (ParentLoop, &above[..]),
        (ParentLoop, &below[..]),
        (DanglingName, "/m/a"),
        (Usage, "/m/d"),
        // What is in it does not add up in the one above either.
        (Usage, "/m"),
        (BlockIndex, "/m/d/f"),
        (BlockWithoutFile, &nobody[..]),
        (ObjectIndex, &nobody[..]),
    ];
    let (found, missed) = bench.fsck(whole()).await;
    assert_eq!((kinds(&found), missed), (expected(&all), Vec::new()));
    assert!(found.iter().all(|finding| finding.repaired.is_empty()), "nobody asked for that: {found:?}");
    let of_block = found.iter().filter(|finding| finding.kind() == BlockIndex);
    assert_eq!(of_block.map(|finding| finding.worker).collect::<BTreeSet<_>>(), BTreeSet::from([0, 2]));
    // Of a part of the namespace, what is about that.
    let part = bench.found(FsckRequest { path: "/m/d".into(), ..whole() }).await;
    let in_part = [(EntryCount, "/m/d"), (LinkCount, "/m/d"), (LinkCount, "/m/d/f"), (Usage, "/m/d")];
    assert_eq!(part, expected(&[&in_part[..], &[(BlockIndex, "/m/d/f")]].concat()));

    let (found, _) = bench.fsck(FsckRequest { repair: true, ..whole() }).await;
    let repaired = found.into_iter().filter(|finding| !finding.repaired.is_empty()).collect::<Vec<_>>();
    let mended = [
        (DanglingName, "/m/ghost"),
        (EntryCount, "/m/d"),
        (LinkCount, "/m/d"),
        (LostIntent, "/m/changed"),
        (Usage, "/m/d"),
        (Usage, "/m"),
        (BlockIndex, "/m/d/f"),
    ];
    assert_eq!(kinds(&repaired), expected(&mended));
    eventually(|| bench.look(|tables| Ok(tables.quotas(0)?.counted))).await;
    bench.settled().await;
    let left = [
        (NamelessInode, "/m/lost"),
        (LinkCount, "/m/d/f"),
        (ParentLoop, &above[..]),
        (ParentLoop, &below[..]),
        (DanglingName, "/m/a"),
        (DanglingName, "/m/kept"),
        (BlockIndex, "/m/d/f"),
        (BlockWithoutFile, &nobody[..]),
        (ObjectIndex, &nobody[..]),
    ];
    let (found, _) = bench.fsck(whole()).await;
    let found = found.into_iter().filter(|finding| finding.kind() != Usage).collect::<Vec<_>>();
    assert_eq!(kinds(&found), expected(&left), "what a loop holds cannot be counted");
    assert!(bench.look(move |tables| Ok(tables.inode(lost)?)).await.is_some(), "it is nowhere else");
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_buckets_and_workers_lack_is_found_and_mended_where_something_else_has_it() {
    use FindingKind::{
        ChangedObject, DamagedBlock, MissingBlock, MissingObject, StrayBlock, UnknownObject, UnreadableBlock,
        WrongLength,
    };
    let mut bench = Fixture::new().await;
    bench.all_live();
    let clean = bench.file_of_block("clean", 0, vec![1]).await;
    bench.file_of_block("copied", 1, vec![1, 2]).await;
    bench.file_of_block("short", 2, vec![1]).await;
    bench.file_of_block("unread", 3, vec![1]).await;
    bench.file_of_block("rotten", 4, vec![1, 2]).await;
    bench.file_of_block("gone", 5, vec![1]).await;
    bench.file_of_block("replaced", 6, vec![1]).await;
    bench.settled().await;
    let deep = FsckRequest { deep: true, ..whole() };
    assert_eq!(bench.found(deep.clone()).await, expected(&[]));

    let say = |worker, index, status, crc| {
        bench.fake.said.lock().insert((worker, index), (status, crc));
    };
    say(1, 0, Status::NoSuchBlock, 0);
    say(1, 1, Status::NoSuchBlock, 0);
    say(1, 2, Status::BadRequest, 0);
    say(1, 3, Status::IoError, 0);
    say(2, 4, Status::Ok, 77);
    bench.fake.orphans.lock().push((3, "block.0".to_owned()));
    bench.bucket.delete("top/gone");
    bench.bucket.put("top/replaced", &b"other"[..]);
    bench.bucket.put("top/strange", &b"other"[..]);
    // These are told of by the mount.
    bench.bucket.put("top/clean/below", &b"hidden"[..]);
    bench.bucket.put("top/a//b", &b"no name"[..]);
    let all = [
        (MissingBlock, "/m/clean"),
        (MissingBlock, "/m/copied"),
        (WrongLength, "/m/short"),
        (UnreadableBlock, "/m/unread"),
        (DamagedBlock, "/m/rotten"),
        (StrayBlock, "worker 3"),
        (MissingObject, "/m/gone"),
        (ChangedObject, "/m/replaced"),
        (UnknownObject, "object \"top/strange\""),
    ];
    assert_eq!(bench.found(deep.clone()).await, expected(&all));

    let (found, _) = bench.fsck(FsckRequest { repair: true, ..deep }).await;
    let repaired = found.into_iter().filter(|finding| !finding.repaired.is_empty()).collect::<Vec<_>>();
    let mended = [
        (MissingBlock, "/m/clean"),
        (MissingBlock, "/m/copied"),
        (DamagedBlock, "/m/rotten"),
        (MissingObject, "/m/gone"),
    ];
    assert_eq!(kinds(&repaired), expected(&mended));
    bench.settled().await;
    assert!(bench.bucket.keys().contains(&"top/gone".to_owned()));
    assert_eq!(bench.bucket.object("top/replaced").unwrap().0, "other", "it may be what somebody wants");
    assert!(bench.bucket.keys().contains(&"top/strange".to_owned()));
    let has_blocks = bench.look(move |tables| Ok(!tables.extents(clean, 0)?.is_empty())).await;
    assert!(!has_blocks, "it is read from its object");
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_views_lack_is_found() {
    use FindingKind::{MissingBlock, MissingView};
    let mut bench = Fixture::new().await;
    bench.all_live();
    let file = bench.file_of_block("f", 0, vec![1, 2]).await;
    bench.settled().await;
    let proposer = bench.master().services().proposer.clone();
    let mount_id = bench.master().services().mounts.all_recorded().unwrap()[0].id;
    let key = "top/.cavern-view-0".to_owned();
    let view = View { name: "v".into(), mount_id, store_mount_id: mount_id, key, ..View::default() };
    let view = *proposer.propose(BeginView { view: Some(view) }).await.unwrap().unwrap();
    for settled in [false, true] {
        proposer.propose(FreezeView { id: view.id, settled }).await.unwrap().unwrap();
    }
    bench.cut(file, 0).await;
    bench.settled().await;
    assert_eq!(bench.found(whole()).await, expected(&[]), "it is being made");

    let etag = bench.bucket.put(&view.key, &b"image"[..]);
    let ready = View { etag, object_bytes: 5, ..view.clone() };
    proposer.propose(FinishView { view: Some(ready) }).await.unwrap().unwrap();
    assert_eq!(bench.found(whole()).await, expected(&[]));
    bench.fake.said.lock().insert((2, 0), (Status::NoSuchBlock, 0));
    bench.bucket.put(&view.key, &b"another"[..]);
    let (found, missed) = bench.fsck(FsckRequest { repair: true, ..whole() }).await;
    assert_eq!((kinds(&found), missed), (expected(&[(MissingBlock, "/m/f"), (MissingView, "v")]), Vec::new()));
    assert!(found.iter().all(|finding| finding.repaired.is_empty()), "{found:?}");
    let block = found.iter().find(|finding| finding.kind() == MissingBlock).unwrap();
    assert!(block.worker == 2 && block.detail.contains("kept for views"), "{}", block.detail);
    bench.bucket.delete(&view.key);
    assert!(bench.found(whole()).await.contains(&(MissingView, "v".to_owned())));

    proposer.propose(RemoveView { id: view.id, deleted: false }).await.unwrap().unwrap();
    bench.master().services().repair.views_removed();
    eventually(|| bench.look(|tables| Ok(tables.counters()?.kept == 0))).await;
    assert_eq!(bench.found(whole()).await, expected(&[]));
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_waits_for_longer_than_it_may_is_found_with_the_reason() {
    use FindingKind::{StuckIntent, TooFewReplicas};
    let mut bench = Fixture::new().await;
    bench.all_live();
    bench.file_of_block("old", 0, vec![2]).await;
    bench.settled().await;
    assert_eq!(bench.found(whole()).await, expected(&[]));

    *bench.fake.live.lock() = (1..=3).map(|worker| (worker, WorkerState::Lost)).collect();
    let (found, missed) = bench.fsck(whole()).await;
    assert_eq!(kinds(&found), expected(&[(TooFewReplicas, "/m/old")]));
    assert_eq!(missed, ["worker 2 is not there: what it has is not looked at"]);
    *bench.fake.live.lock() = vec![(1, WorkerState::Live), (2, WorkerState::Lost)];
    let (found, _) = bench.fsck(whole()).await;
    assert_eq!(kinds(&found), expected(&[]), "a worker that could take it is there");

    bench.all_live();
    bench.fake.is_denied.store(1, Ordering::Release);
    bench.create(bench.root, "new", Kind::File).await;
    eventually(|| async {
        let (found, _) = bench.fsck(whole()).await;
        let is_known = found.iter().all(|finding| finding.cause == "on purpose");
        is_known && kinds(&found) == expected(&[(StuckIntent, "/m/new")])
    })
    .await;
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_found_while_files_come_change_move_and_go() {
    let mut bench = Fixture::new().await;
    bench.all_live();
    let root = bench.root;
    let rounds = Arc::new(AtomicU64::new(0));
    let looking = {
        let fsck = Fsck { settle: Duration::from_millis(300), ..bench.master().services().fsck.clone() };
        let rounds = rounds.clone();
        tokio::spawn(async move {
            let (mut told, mut looks) = (Vec::new(), 0);
            // However fast a look is, and however slow the changes.
            while looks < 4 || rounds.load(Ordering::Acquire) <= 10 {
                looks += 1;
                let (answers, mut messages) = mpsc::channel(4);
                let request = FsckRequest { deep: true, ..whole() };
                let (last, ()) = tokio::join!(
                    async {
                        let answers = answers;
                        fsck.run(request, &answers).await.unwrap()
                    },
                    async {
                        while let Some(message) = messages.recv().await {
                            told.extend(message.unwrap().findings);
                        }
                    }
                );
                told.extend(last.findings);
            }
            told
        })
    };
    while !looking.is_finished() {
        let round = rounds.fetch_add(1, Ordering::AcqRel) + 1;
        let (directory, other) = (format!("d{}", round % 3), format!("d{}", (round + 1) % 3));
        let parent = bench.create(root, &directory, Kind::Directory).await;
        if parent != 0 {
            for number in 0..5_u32 {
                let file = bench.create(parent, &format!("f{number}"), Kind::File).await;
                bench.commit(file, number, 0, vec![1 + u64::from(number) % 3]).await;
                if number == 2 {
                    bench.cut(file, BLOCK / 2).await;
                }
            }
            bench.rename((parent, "f0"), (parent, "f1"), RenameMode::Replace).await;
            bench.remove(parent, "f3", false).await;
        }
        bench.rename((root, &directory), (root, &other), RenameMode::Exchange).await;
        if round.is_multiple_of(4) {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
    let found = looking.await.unwrap();
    assert!(found.is_empty(), "after {rounds:?} rounds: {found:?}");
    bench.end().await;
}
