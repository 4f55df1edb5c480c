//! Content that only the bucket has: it is there, whatever becomes of names, keys and confirmations.

use std::sync::atomic::Ordering;

use cavern_proto::master::mutation::Change;
use cavern_proto::master::{FreeFate, Kind, RenameMode, SetAttr};
use cavern_proto::record::BeginObjects;
use cavern_proto::record::command::Command;
use cavern_state::Outcome;

use super::bench::{BLOCK, Fixture};
use crate::tests::harness::eventually;

impl Fixture {
    /// A file of three blocks, written to the bucket.
    async fn written_file(&mut self, text: &str) -> u64 {
        let root = self.root;
        let file = self.create(root, text, Kind::File).await;
        for index in 0..3 {
            self.commit(file, index, 0, vec![1]).await;
        }
        self.settled().await;
        file
    }

    async fn generation(&self, inode: u64) -> u32 {
        let read = self.master().services().lookups.reader.read(move |tables| Ok(tables.inode(inode)?));
        read.await.unwrap().unwrap().generation
    }

    /// The last write of a key is made, and the master never receives the answer.
    async fn lose_confirmation(&mut self, key: &str, change: impl AsyncFnOnce(&mut Self)) {
        let before = self.fake.ufs.head(key).await.unwrap().etag;
        self.fake.is_lost.store(1, Ordering::Release);
        change(self).await;
        eventually(|| async { self.fake.ufs.head(key).await.unwrap().etag != before }).await;
        self.restart().await;
        self.fake.is_lost.store(0, Ordering::Release);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn only_what_the_bucket_has_and_nobody_holds_is_dropped() {
    let mut bench = Fixture::new().await;
    let root = bench.root;
    assert_eq!(bench.free(root).await, FreeFate::Nothing);
    bench.fake.is_away.store(1, Ordering::Release);
    let file = bench.create(root, "f", Kind::File).await;
    assert_eq!(bench.free(file).await, FreeFate::Nothing);
    bench.commit(file, 0, 0, vec![1]).await;
    assert_eq!(bench.free(file).await, FreeFate::Dirty);
    bench.fake.is_away.store(0, Ordering::Release);
    bench.settled().await;
    bench.change(Change::AddOpenRef(file)).await;
    assert_eq!(bench.free(file).await, FreeFate::Open);
    assert_eq!(bench.free_own(file, 2).await, FreeFate::Open);
    assert_eq!(bench.free_own(file, 1).await, FreeFate::Freed);
    bench.change(Change::DropOpenRef(file)).await;
    assert_eq!(bench.free(file).await, FreeFate::Nothing);
    eventually(|| async { bench.fake.freed.lock().contains(&(1, 0)) }).await;
    // What is written now has other names than what is dropped.
    assert_eq!(bench.commit(file, 0, 0, vec![1]).await, 0);
    assert_eq!(bench.commit(file, 0, 1, vec![1]).await, file);
    bench.check().await;
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_of_both_is_written_as_one() {
    let mut bench = Fixture::new().await;
    let file = bench.written_file("f").await;
    assert_eq!(bench.free(file).await, FreeFate::Freed);
    let generation = bench.generation(file).await;
    bench.commit(file, 1, generation, vec![1]).await;
    bench.check().await;
    // Cut and lengthened: what was cut off does not come back.
    assert_eq!(bench.free(file).await, FreeFate::Freed);
    bench.cut(file, BLOCK).await;
    bench.cut(file, 3 * BLOCK).await;
    bench.check().await;
    bench.change(Change::SetAttr(SetAttr { inode: file, mode: Some(0o600), ..SetAttr::default() })).await;
    bench.check().await;
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_upload_whose_confirmation_was_lost_is_known_again() {
    let mut bench = Fixture::new().await;
    let root = bench.root;
    let file = bench.written_file("f").await;
    assert_eq!(bench.free(file).await, FreeFate::Freed);
    let generation = bench.generation(file).await;
    bench
        .lose_confirmation("top/f", async |bench| {
            assert_eq!(bench.commit(file, 1, generation, vec![1]).await, file);
        })
        .await;
    bench.check().await;
    // Of a file that only has other attributes, and of one that goes on changing.
    assert_eq!(bench.free(file).await, FreeFate::Freed);
    let mode = SetAttr { inode: file, mode: Some(0o600), ..SetAttr::default() };
    bench
        .lose_confirmation("top/f", async |bench| {
            assert_eq!(bench.change(Change::SetAttr(mode)).await, file);
        })
        .await;
    let generation = bench.generation(file).await;
    bench.commit(file, 2, generation, vec![1]).await;
    bench.rename((root, "f"), (root, "g"), RenameMode::Replace).await;
    bench.check().await;
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_somebody_else_put_in_the_place_of_content_is_told_and_left_alone() {
    let mut bench = Fixture::new().await;
    let file = bench.written_file("f").await;
    assert_eq!(bench.free(file).await, FreeFate::Freed);
    bench.bucket.put("top/f", "not ours");
    let generation = bench.generation(file).await;
    bench.commit(file, 1, generation, vec![1]).await;
    eventually(|| async { bench.status("/m").await.last_error.contains("by somebody else") }).await;
    assert_eq!(bench.bucket.object("top/f").unwrap().0, "not ours");
    // It keeps nobody else from the name.
    let root = bench.root;
    bench.change(Change::AddOpenRef(file)).await;
    bench.remove(root, "f", false).await;
    bench.written_file("f").await;
    bench.change(Change::DropOpenRef(file)).await;
    bench.check().await;
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn names_are_exchanged_and_taken_over() {
    let mut bench = Fixture::new().await;
    let root = bench.root;
    let (one, other) = (bench.written_file("one").await, bench.written_file("other").await);
    assert_eq!((bench.free(one).await, bench.free(other).await), (FreeFate::Freed, FreeFate::Freed));
    bench.rename((root, "one"), (root, "other"), RenameMode::Exchange).await;
    bench.check().await;
    // The name of a file that is renamed is taken at once, and by a file that is only in the bucket itself.
    bench.rename((root, "one"), (root, "moved"), RenameMode::Replace).await;
    bench.rename((root, "other"), (root, "one"), RenameMode::Replace).await;
    bench.check().await;
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_object_that_another_file_may_write_over_counts_for_nothing() {
    let mut bench = Fixture::new().await;
    let (one, other) = (bench.written_file("one").await, bench.written_file("other").await);
    // As when names were exchanged, and the other file is written under its new name first.
    let begin = |key: &str| Command::BeginObjects(BeginObjects { inode: other, keys: vec![key.to_owned()] });
    let begun = bench.master().services().proposer.propose(begin("top/one")).await.unwrap();
    assert_eq!(begun, Outcome::Began { is_named: true });
    assert_eq!(bench.free(one).await, FreeFate::Dirty);
    // Having its name once more, the first one is written again.
    bench.change(Change::SetAttr(SetAttr { inode: one, mode: Some(0o600), ..SetAttr::default() })).await;
    bench.settled().await;
    assert_eq!(bench.free(one).await, FreeFate::Freed);
    // What is all that there is of a file is written over by nobody.
    let begun = bench.master().services().proposer.propose(begin("top/one")).await.unwrap();
    assert_eq!(begun, Outcome::OutOfDate);
    // The other file gives up what it was never called.
    bench.change(Change::SetAttr(SetAttr { inode: other, mode: Some(0o600), ..SetAttr::default() })).await;
    bench.check().await;
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_removed_file_that_is_open_keeps_its_content() {
    let mut bench = Fixture::new().await;
    let root = bench.root;
    let file = bench.written_file("f").await;
    assert_eq!(bench.free(file).await, FreeFate::Freed);
    let content = bench.read(file).await.unwrap();
    bench.change(Change::AddOpenRef(file)).await;
    bench.remove(root, "f", false).await;
    bench.settled().await;
    assert_eq!(bench.read(file).await.unwrap(), content);
    // Its name is taken by another.
    let other = bench.written_file("f").await;
    bench.settled().await;
    assert_eq!(bench.read(file).await.unwrap(), content);
    assert_eq!(bench.bucket.keys().len(), 2, "{:?}", bench.bucket.keys());
    bench.change(Change::DropOpenRef(file)).await;
    eventually(|| async { bench.bucket.keys() == ["top/f"] }).await;
    assert_eq!(bench.read(other).await, bench.model.get(&other).cloned());
    bench.check().await;
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn where_a_worker_is_nearly_full_the_oldest_clean_files_go_first() {
    let mut bench = Fixture::new().await;
    let mut files = Vec::new();
    for text in ["a", "b", "c", "d"] {
        files.push(bench.written_file(text).await);
    }
    bench.change(Change::AddOpenRef(files[0])).await;
    bench.fake.is_away.store(1, Ordering::Release);
    bench.commit(files[1], 0, 0, vec![1]).await;
    // Twelve blocks. Two are to go: with the first file that may go, three do.
    *bench.fake.disk.lock() = (15 * BLOCK, 12 * BLOCK - BLOCK / 2);
    let dropped = || bench.fake.freed.lock().len();
    eventually(|| async { dropped() >= 3 }).await;
    assert_eq!(bench.fake.disk.lock().0, 15 * BLOCK);
    *bench.fake.disk.lock() = (15 * BLOCK, 9 * BLOCK);
    for (file, is_dropped) in files.iter().copied().zip([false, false, true, false]) {
        let read = bench.master().services().lookups.reader.read(move |tables| Ok(tables.extents(file, 0)?));
        assert_eq!(read.await.unwrap().is_empty(), is_dropped, "inode {file}");
    }
    bench.fake.is_away.store(0, Ordering::Release);
    bench.check().await;
    bench.end().await;
}
