//! What clients hand to workers that others are to read.

use cavern_net::WorkerPool;
use cavern_proto::ContentId;
use cavern_proto::data::{BlockRef, WriteRequest};
use cavern_proto::master::{Worker, WorkerTable};

use super::*;
use crate::bucket::Bucket;

/// The way of somebody of another host to the workers.
fn pool_of(somebody: &Somebody, cluster_id: &str, workers: &WorkerTable) -> std::sync::Arc<WorkerPool> {
    let mut conf = Config::default().client;
    conf.local_descriptors = false;
    let pool = WorkerPool::new(&conf, somebody.transport.clone(), "attacker");
    pool.set_table(cluster_id, workers);
    pool
}

#[test]
fn wrong_bytes_of_an_object_are_shown_to_nobody() {
    let cluster = up();
    let tree = cluster.seed("bucket", "", 5, 50_000);
    cluster.mount("s3://bucket", "/data", &[]);
    let bucket = Bucket::of(&cluster, "bucket");
    let attacker = Somebody::of(&cluster, Role::Client);
    let mut calls = ClusterClient::new(attacker.channel(&cluster));
    let mounts = attacker.answer(calls.get_credentials(ListMountsRequest {})).unwrap().into_inner().mounts;
    let workers = attacker.answer(calls.list_workers(ListWorkersRequest {})).unwrap().into_inner();
    let [Worker { id: worker, .. }] = &workers.workers[..] else { panic!("{workers:?}") };
    let pool = pool_of(&attacker, "", &workers);
    for (key, content) in &tree {
        let etag = bucket.runtime.block_on(bucket.ufs.head(key)).unwrap().etag;
        let (block_size, length) = (mounts[0].block_size, content.len() as u64);
        let id = ContentId::of_object(bucket.ufs.store_id(), key, &etag, length, block_size);
        let block = BlockRef {
            content_id: id.as_bytes().to_vec().into(),
            block_size,
            mount_id: mounts[0].id,
            key: key.clone(),
            etag,
            object_length: length,
            ..BlockRef::default()
        };
        let request = WriteRequest { block: Some(block), ..WriteRequest::default() };
        let evil = bytes::Bytes::from(vec![b'x'; content.len()]);
        // As if it had just written them to the bucket. It is told nothing else than anybody who has.
        attacker.runtime.block_on(pool.write(*worker, request, evil, PATIENCE)).unwrap();
    }
    cluster.assert_tree("data", "", &tree);
    attacker.runtime.block_on(pool.shutdown());
}
