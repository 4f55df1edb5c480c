//! Syncs of files of an fs-mode mount whose workers fail for a while.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "what fails here fails the test")]

mod support;

use std::sync::Arc;

use cavern_client::{Client, File};
use cavern_proto::master::Extent;
use support::master::MOUNT_ROOT;
use support::{FakeMaster, FakeWorker, connect, patient};

const MIB: u64 = 1 << 20;

async fn started(name: &str, workers: &[FakeWorker]) -> (FakeMaster, Arc<Client>) {
    let master = FakeMaster::start(name).await;
    master.fs_mode();
    master.set_workers(workers.iter().map(FakeWorker::entry).collect());
    let client = connect(&patient(&master)).await;
    (master, client)
}

async fn open(client: &Client, inode: u64) -> File {
    client.open_to_read(&client.metadata().node(inode).await.unwrap()).await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn all_blocks_of_a_worker_that_fails_for_a_while_are_asked_for_by_one_request() {
    let worker = FakeWorker::remote(1).await;
    let (master, client) = started("sync-alone", std::slice::from_ref(&worker)).await;
    let blocks = vec![&[1_u64][..]; 300];
    let file = open(&client, master.put_blocks(MOUNT_ROOT, "f", &blocks, 300 * MIB)).await;
    worker.fail_syncs(3);
    let _ = file.sync().await.unwrap();
    assert_eq!((worker.count("Sync"), worker.count("Synced")), (4, 300));
    client.shutdown().await;
    worker.kill().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failed_replica_is_given_up_unless_its_worker_is_the_only_one_of_another_block() {
    let [one, two] = [FakeWorker::remote(1).await, FakeWorker::remote(2).await];
    let (master, client) = started("sync-replicas", &[one.clone(), two.clone()]).await;
    let file = open(&client, master.put_blocks(MOUNT_ROOT, "waited-for", &[&[1], &[1, 2]], 2 * MIB)).await;
    one.fail_syncs(2);
    let _ = file.sync().await.unwrap();
    assert_eq!((one.count("Sync"), one.count("Synced")), (3, 2));
    assert_eq!((two.count("Sync"), two.count("Synced")), (1, 1));
    assert!(master.mutations(|mutations| mutations.committed.is_empty()));

    let file = open(&client, master.put_blocks(MOUNT_ROOT, "given-up", &[&[1, 2]], MIB)).await;
    one.fail_syncs(1);
    let _ = file.sync().await.unwrap();
    assert_eq!((one.count("Sync"), two.count("Sync")), (4, 2));
    let of = |block: &Extent| block.workers.clone();
    let left: Vec<Vec<u64>> = master.mutations(|mutations| mutations.committed.iter().map(of).collect());
    assert_eq!(left, [vec![2]], "the master is told before the sync is answered");
    client.shutdown().await;
    one.kill().await;
    two.kill().await;
}
