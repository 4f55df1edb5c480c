//! Loads of files in fs-mode mounts: what only the bucket has is filled, wherever it is by then.

use cavern_proto::master::{FreeFate, Job, JobKind, JobState, Kind, RenameMode};
use cavern_work::Request;

use super::bench::{BLOCK, Fixture};
use crate::tests::harness::eventually;

impl Fixture {
    async fn loaded(&self, path: &str) -> Job {
        let begun =
            self.master().services().jobs.submit_once(&Request::default(), JobKind::Load, path, 0).await.unwrap();
        self.ended(begun.id).await
    }

    fn filled(&self) -> Vec<(String, u32, u32)> {
        let mut filled = std::mem::take(&mut *self.fake.filled.lock());
        filled.sort();
        filled
    }
}

fn block(key: &str, index: u32, length: u64) -> (String, u32, u32) {
    (key.to_owned(), index, u32::try_from(length).unwrap())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_load_fills_what_no_block_of_a_file_has() {
    let mut bench = Fixture::new().await;
    let directory = bench.create(bench.root, "d", Kind::Directory).await;
    let dropped = bench.create(directory, "dropped", Kind::File).await;
    let kept = bench.create(directory, "kept", Kind::File).await;
    bench.create(directory, "link", Kind::Symlink).await;
    for index in 0..4 {
        bench.commit(dropped, index, 0, vec![1]).await;
    }
    bench.commit(kept, 0, 0, vec![1]).await;
    bench.settled().await;
    assert_eq!(bench.free(dropped).await, FreeFate::Freed);
    // Block 1 is at workers again, block 3 is cut in the middle.
    bench.commit(dropped, 1, 1, vec![1]).await;
    bench.cut(dropped, 3 * BLOCK + 5).await;
    bench.settled().await;
    let bytes = 3 * BLOCK + 5 + BLOCK;
    for path in ["/m", "/m/d/dropped"] {
        let loaded = bench.loaded(path).await;
        assert_eq!((loaded.state(), loaded.last_error.as_str()), (JobState::Done, ""));
        let (files, bytes) = if path == "/m" { (2, bytes) } else { (1, bytes - BLOCK) };
        assert_eq!((loaded.files_total, loaded.files_done), (files, files), "{path}");
        assert_eq!((loaded.bytes_total, loaded.bytes_done), (bytes, bytes), "{path}");
        assert_eq!(loaded.bytes_fetched, 2 * BLOCK + 5, "{path}");
        let key = "top/d/dropped";
        assert_eq!(bench.filled(), [block(key, 0, BLOCK), block(key, 2, BLOCK), block(key, 3, 5)], "{path}");
    }
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn content_that_moves_while_it_is_loaded_is_followed() {
    let mut bench = Fixture::new().await;
    let root = bench.root;
    let moved = bench.create(root, "moved", Kind::File).await;
    let removed = bench.create(root, "removed", Kind::File).await;
    let taken = bench.create(root, "taken", Kind::File).await;
    for file in [moved, removed, taken] {
        bench.commit(file, 0, 0, vec![1]).await;
    }
    bench.settled().await;
    for file in [moved, removed, taken] {
        assert_eq!(bench.free(file).await, FreeFate::Freed);
    }
    let hold = bench.fake.fills.clone().write_owned().await;
    let jobs = bench.master().services().jobs.clone();
    let begun = jobs.submit_once(&Request::default(), JobKind::Load, "/m", 0).await.unwrap();
    eventually(|| async { jobs.get(begun.id).await.unwrap().walked }).await;
    bench.rename((root, "moved"), (root, "elsewhere"), RenameMode::Replace).await;
    bench.remove(root, "removed", false).await;
    bench.settled().await;
    assert_eq!(bench.bucket.keys(), ["top/elsewhere", "top/taken"]);
    // By somebody else.
    bench.bucket.put("top/taken", "another");
    drop(hold);
    let failed = bench.ended(begun.id).await;
    assert_eq!((failed.state(), failed.errors, failed.files_done), (JobState::Failed, 1, 2));
    assert!(failed.last_error.starts_with("top/taken: ") && failed.last_error.contains("cv refresh"), "{failed:?}");
    assert_eq!(bench.filled(), [block("top/elsewhere", 0, BLOCK)]);
    drop(jobs);
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn files_of_an_existing_prefix_are_indexed_and_loaded() {
    let content = |length: usize| bytes::Bytes::from(vec![b'x'; length]);
    let bench = Fixture::with(&[("top/a/b/f", content(2000)), ("top/g", content(10))]).await;
    let loaded = bench.loaded("/m").await;
    assert_eq!((loaded.state(), loaded.files_done, loaded.bytes_fetched), (JobState::Done, 2, 2010));
    let expected = [block("top/a/b/f", 0, BLOCK), block("top/a/b/f", 1, 2000 - BLOCK), block("top/g", 0, 10)];
    assert_eq!(bench.filled(), expected);
    bench.end().await;
}
