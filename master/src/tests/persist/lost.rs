//! Files of which workers have lost blocks: they are told from those of a worker that is away, and given up by name.

use std::sync::atomic::Ordering;

use cavern_proto::master::{Kind, LostAction, ResolveLostReply, WorkerState};
use cavern_work::WorkError;

use super::super::harness::eventually;
use super::bench::{BLOCK, Fixture};
use super::fake::{HOLE, written};

impl Fixture {
    async fn resolve(&self, path: &str, action: LostAction) -> Result<ResolveLostReply, WorkError> {
        self.master().services().persistence.resolve_lost(path, action).await
    }

    /// Waits until exactly these files are known to have lost blocks.
    async fn known_lost(&self, paths: &[&str]) {
        eventually(|| async {
            let status = self.status("/m").await;
            let mut listed: Vec<String> = status.lost.into_iter().map(|file| file.path).collect();
            listed.sort();
            listed == paths && status.lost_files == paths.len() as u64
        })
        .await;
    }

    fn live(&self, workers: &[(u64, WorkerState)]) {
        *self.fake.live.lock() = workers.to_vec();
    }

    fn lose(&self, worker: u64, index: u32) {
        self.fake.lost.lock().push((worker, index));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_block_is_lost_when_all_of_its_workers_are_live_and_none_has_it() {
    use WorkerState::{Live, Lost};
    let mut bench = Fixture::new().await;
    bench.live(&[(1, Live), (2, Lost)]);
    (1..=2).for_each(|worker| bench.lose(worker, 0));
    bench.lose(1, 1);
    let root = bench.root;
    let files = [("away", 0, vec![1, 2]), ("gone", 0, vec![1]), ("other", 1, vec![1, 2])];
    for (text, index, workers) in files {
        let file = bench.create(root, text, Kind::File).await;
        bench.commit(file, index, 0, workers).await;
    }
    bench.known_lost(&["/m/gone"]).await;
    eventually(|| async { !bench.status("/m/away").await.last_error.is_empty() }).await;
    eventually(|| async { !bench.status("/m/other").await.last_error.is_empty() }).await;
    let refused = bench.resolve("/m/away", LostAction::Drop).await.unwrap_err();
    assert!(matches!(&refused, WorkError::Refused(reason) if reason.contains("/m/away")), "{refused}");
    let tried = bench.resolve("/m", LostAction::Retry).await.unwrap();
    assert_eq!((tried.files, tried.still_lost, tried.blocks), (1, 1, 0));
    assert!(tried.last_error.contains("cv persist drop"), "{}", tried.last_error);

    // The worker is back: of two files it has not got a block either, of one it has.
    bench.live(&[(1, Live), (2, Live)]);
    bench.known_lost(&["/m/away", "/m/gone"]).await;
    // And when one is there that had been lost, it is as before.
    bench.fake.lost.lock().clear();
    let tried = bench.resolve("/m", LostAction::Retry).await.unwrap();
    assert_eq!((tried.files, tried.still_lost, tried.last_error.as_str()), (2, 0, ""));
    bench.check().await;
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn lost_blocks_of_a_file_that_the_bucket_never_had_become_zeros() {
    let mut bench = Fixture::new().await;
    bench.lose(1, 1);
    bench.lose(1, 3);
    let (root, whole) = (bench.root, vec![1]);
    let file = bench.create(root, "f", Kind::File).await;
    for index in 0..4 {
        bench.commit(file, index, 0, whole.clone()).await;
    }
    bench.known_lost(&["/m/f"]).await;
    // Another leader finds it out as well.
    bench.restart().await;
    bench.known_lost(&["/m/f"]).await;
    let dropped = bench.resolve("/m/f", LostAction::Drop).await.unwrap();
    assert_eq!((dropped.files, dropped.still_lost, dropped.reverted, dropped.zeroed, dropped.blocks), (1, 0, 0, 1, 2));
    let blocks = bench.model.get_mut(&file).unwrap();
    (blocks[1], blocks[3]) = (HOLE.to_owned(), HOLE.to_owned());
    bench.check().await;
    assert!(bench.resolve("/m/f", LostAction::Drop).await.is_err(), "there is nothing to give up any more");
    // What is written there later is another block.
    bench.fake.lost.lock().clear();
    assert_eq!(bench.commit(file, 1, 0, whole.clone()).await, 0);
    let record = bench.lookups().reader.read(move |tables| Ok(tables.inode(file)?)).await.unwrap().unwrap();
    assert_eq!(bench.commit(file, 1, record.generation, whole).await, file);
    bench.check().await;
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_with_lost_blocks_goes_back_to_what_the_bucket_has() {
    let mut bench = Fixture::new().await;
    let root = bench.root;
    for (text, is_freed) in [("blocks", false), ("origin", true)] {
        let file = bench.create(root, text, Kind::File).await;
        bench.commit(file, 0, 0, vec![1]).await;
        bench.commit(file, 1, 0, vec![1]).await;
        bench.settled().await;
        if is_freed {
            bench.free(file).await;
        }
        bench.lose(1, 2);
        let generation = u32::from(is_freed);
        bench.fake.is_away.store(1, Ordering::Release);
        // Of the version in the bucket, only a part is left here.
        bench.cut(file, BLOCK).await;
        bench.commit(file, 2, generation + 1, vec![1]).await;
        let path = format!("/m/{text}");
        // An attempt to write what was left by the cut has failed by then.
        bench.known_lost(&[&path]).await;
        bench.fake.is_away.store(0, Ordering::Release);
        let dropped = bench.resolve("/m", LostAction::Drop).await.unwrap();
        assert_eq!((dropped.files, dropped.reverted, dropped.zeroed, dropped.blocks), (1, 1, 0, 1));
        *bench.model.get_mut(&file).unwrap() = vec![written(file, 0), written(file, 0)];
        bench.check().await;
        bench.fake.lost.lock().clear();
        assert_eq!(bench.commit(file, 2, generation + 2, vec![1]).await, file);
        bench.check().await;
    }
    bench.end().await;
}
