//! The bucket follows the namespace: whatever is done to names and files, whatever fails, and whenever the master is
//! begun anew, in the end it has an object for each name, with the right content and metadata, and no other.

pub mod bench;
mod detaching;
mod existing;
mod exports;
mod external;
mod fake;
mod fsck;
mod loads;
mod lost;
mod origins;
mod pacing;
mod random;

use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use cavern_proto::master::mutation::Change;
use cavern_proto::master::{CreateInode, Extent, Kind, LinkInode, RenameMode, RenameName, SetXattr, WorkerState};
use cavern_work::mounts::changes::DetachPolicy;
use tokio::time::Instant;

use self::bench::Fixture;
use super::harness::{eventually, name};

#[tokio::test(flavor = "multi_thread")]
async fn files_links_and_directories_become_objects_and_go_again() {
    let mut bench = Fixture::new().await;
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
    let mut bench = Fixture::new().await;
    let root = bench.root;
    let begun = Instant::now();
    let file = bench.create(root, "f", Kind::File).await;
    for change in 0..200u32 {
        bench.commit(file, change % 3, 0, vec![1]).await;
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    bench.settled().await;
    let writes = bench.fake.written.lock().iter().filter(|key| *key == "top/f").count();
    // The first come soon after each other. Then it is left alone for longer each time, for 50 ms at most; where
    // changes are slow, more of these fit in.
    let took = begun.elapsed();
    let most = 5 + took.as_millis() / 25;
    assert!((2..=most).contains(&(writes as u128)), "{writes} writes of 200 changes in {took:?}");
    bench.check_file(file).await;
    bench.end().await;
}

impl Fixture {
    async fn check_file(&self, inode: u64) {
        let wanted = self.wanted().await;
        let content = fake::body(&[], self.model.get(&inode).map_or(&[], Vec::as_slice));
        assert!(wanted.values().any(|(wanted, _)| *wanted == content));
        assert_eq!(self.objects(), wanted);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_renamed_directory_is_one_intent_that_is_spread_across_restarts() {
    let mut bench = Fixture::new().await;
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
    // Others may have failed before it.
    eventually(|| async { bench.status("/m/z/b/f0007").await.last_error == "on purpose" }).await;
    let up_to = bench.status("/m").await.change;
    let status = bench.status("/m/z/b/f0007").await;
    assert!(status.files >= 1 && status.bytes == 0, "{status:?}");
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
    let mut bench = Fixture::new().await;
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
    let mut bench = Fixture::new().await;
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
async fn an_object_stays_until_its_file_is_elsewhere_though_the_file_before_it_gives_the_key_up() {
    let mut bench = Fixture::idle().await;
    let root = bench.root;
    for moved in ["first", "second"] {
        let file = bench.create(root, "a", Kind::File).await;
        bench.commit(file, 0, 0, vec![1]).await;
        bench.bring("/m/a").await;
        bench.rename((root, "a"), (root, moved), RenameMode::Replace).await;
    }
    bench.bring("/m/first").await;
    eventually(|| async { bench.status("/m").await.deletions == 0 }).await;
    assert_eq!(bench.bucket.keys(), ["top/a", "top/first"]);
    // Back where it was it has its object.
    bench.rename((root, "second"), (root, "a"), RenameMode::Replace).await;
    bench.bring("/m").await;
    bench.check().await;
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_name_that_another_file_has_got_is_not_written_for_the_one_of_many_names_that_had_it() {
    let mut bench = Fixture::idle().await;
    let root = bench.root;
    let file = bench.create(root, "000", Kind::File).await;
    bench.commit(file, 0, 0, vec![1]).await;
    // More than are confirmed together.
    for number in 1..300 {
        let name = name(&format!("{number:03}"));
        bench.change(Change::Link(LinkInode { inode: file, parent: root, name })).await;
    }
    let gate = bench.fake.writes.clone();
    let held = gate.write().await;
    let persistence = &bench.master().services().persistence;
    let waited = persistence.expedite(persistence.scope("/m").await.unwrap(), u64::MAX);
    let under_way = bench.fake.under_way.clone();
    eventually(|| async { under_way.load(Ordering::Acquire) == 1 }).await;
    bench.remove(root, "299", false).await;
    let other = bench.create(root, "299", Kind::File).await;
    bench.commit(other, 0, 0, vec![1]).await;
    drop(held);
    eventually(|| async { waited.left().await.unwrap().items() == 0 }).await;
    bench.check().await;
    drop(waited);
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_object_that_comes_after_its_worker_and_its_file_are_gone_is_deleted() {
    let mut bench = Fixture::new().await;
    let root = bench.root;
    bench.fake.arrives_within.store(2000, Ordering::Release);
    bench.fake.is_lost.store(1, Ordering::Release);
    bench.create(root, "f", Kind::File).await;
    eventually(|| async { bench.bucket.keys() == ["top/f"] }).await;
    bench.remove(root, "f", false).await;
    eventually(|| async { bench.bucket.keys().is_empty() }).await;
    bench.bucket.put("top/f", "what the store was still at");
    bench.settled().await;
    assert!(bench.bucket.keys().is_empty());
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn dropped_blocks_are_freed_at_workers_that_are_there() {
    let mut bench = Fixture::new().await;
    let root = bench.root;
    *bench.fake.live.lock() = vec![(1, WorkerState::Live), (2, WorkerState::Lost)];
    let file = bench.create(root, "f", Kind::File).await;
    bench.commit(file, 0, 0, vec![1, 2]).await;
    bench.commit(file, 1, 0, vec![1]).await;
    // Worker 3 is not in the table that placement goes by.
    bench.commit(file, 2, 0, vec![3]).await;
    bench.cut(file, 0).await;
    let left = async |bench: &Fixture| {
        let read = bench.master().services().lookups.reader.read(|tables| Ok(tables.garbage(0, 10)?));
        read.await.unwrap()
    };
    eventually(|| async {
        let left = left(&bench).await;
        left.len() == 1 && left[0].1.extents == [Extent { workers: vec![2], ..Extent::default() }]
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
    let mut bench = Fixture::new().await;
    let root = bench.root;
    let directory = bench.create(root, "d", Kind::Directory).await;
    bench.settled().await;
    bench.fake.is_away.store(1, Ordering::Release);
    let file = bench.create(directory, "f", Kind::File).await;
    bench.commit(file, 0, 0, vec![1]).await;
    bench.remove(root, "none", false).await;
    let services = bench.master().services().clone();
    let refused = services.unmount_bucket("/m", DetachPolicy::Keep).await.unwrap_err();
    assert!(refused.to_string().contains("cv persist wait /m"), "{refused}");
    services.unmount_bucket("/m", DetachPolicy::Discard).await.unwrap();
    // What was noted of it goes, its blocks are freed, and the bucket stays as it is.
    eventually(|| async {
        let left = services.lookups.reader.read(|tables| {
            Ok(tables.intents(0, 10)?.len()
                + tables.deletions(None, 10)?.len()
                + tables.garbage(0, 10)?.len()
                + tables.keys(cavern_state::Family::Object).count())
        });
        left.await.unwrap() == 0 && bench.fake.freed.lock().contains(&(1, 0))
    })
    .await;
    assert_eq!(bench.bucket.keys(), ["top/d/"]);
    bench.end().await;
}
