//! What clients hand to workers that others are to read.

use std::os::unix::fs::MetadataExt as _;

use cavern_net::{NetError, WorkerPool};
use cavern_proto::ContentId;
use cavern_proto::data::{
    BlockRef, Range, ReserveRequest, Status as BlockStatus, SyncRequest, WriteRequest, read_request,
};
use cavern_proto::master::{StatusRequest, Worker, WorkerTable};

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

#[test]
fn no_client_is_told_where_the_files_of_a_worker_are() {
    let cluster = up();
    let paths = |role| {
        let somebody = Somebody::of(&cluster, role);
        let mut calls = ClusterClient::new(somebody.channel(&cluster));
        let table = somebody.answer(calls.list_workers(ListWorkersRequest {})).unwrap().into_inner();
        table.workers.into_iter().flat_map(|worker| worker.disks).map(|disk| disk.path).collect::<Vec<_>>()
    };
    let shown = || Some(paths(Role::Admin)).filter(|paths| !paths.is_empty());
    assert!(eventually("the worker tells of its disks", PATIENCE, shown).iter().all(|path| path.starts_with('/')));
    let hidden = paths(Role::Client);
    assert!(!hidden.is_empty() && hidden.iter().all(String::is_empty), "{hidden:?}");
}

#[test]
fn blocks_are_neither_read_nor_written_by_clients_that_their_mount_is_not_there_for() {
    const CONTENT: &[u8] = b"what nobody else reads";
    let cluster = up();
    cluster.seed("bucket", "x/", 1, 1000);
    cluster.mount_fs_mode("s3://bucket/work", "/work", &[]);
    let path = cluster.path("work/f");
    fs::write(&path, CONTENT).unwrap();
    fs::File::open(&path).unwrap().sync_all().unwrap();
    let rules = ["mount", "update", "/work", "--client", "fuse0"];
    // The master takes rules as soon as it has agreed with itself that it knows what they are.
    eventually("the rules are taken", PATIENCE, || (cluster.try_cv(&rules).code == 0).then_some(()));

    let [attacker, worker, admin] = [Role::Client, Role::Worker, Role::Admin].map(|role| Somebody::of(&cluster, role));
    let mut calls = ClusterClient::new(admin.channel(&cluster));
    let status = admin.answer(calls.status(StatusRequest::default())).unwrap().into_inner();
    let (cluster_id, workers, mount) = (status.cluster_id, status.workers.unwrap(), &status.mounts.unwrap().mounts[0]);
    let [Worker { id, .. }] = workers.workers[..] else { panic!("{workers:?}") };
    let inode = fs::metadata(&path).unwrap().ino();
    let name_of = |inode| BlockRef::of_inode(&cluster_id, inode, 0, 0, mount.block_size, mount.id);
    let name = name_of(inode);
    let read = |somebody: &Somebody, pool: &WorkerPool| {
        let range = Some(Range { offset: 0, length: CONTENT.len() as u32 });
        let items = vec![read_request::Item { block: Some(name.clone()), range, part: None }];
        somebody.runtime.block_on(pool.read(id, items, PATIENCE)).map(|(_, bytes)| bytes)
    };
    let [evil, good] = [&attacker, &worker].map(|somebody| pool_of(somebody, &cluster_id, &workers));
    let denied = |what: &str, refused: Option<NetError>| match refused {
        Some(NetError::WorkerStatus { status: BlockStatus::PermissionDenied, message, .. }) => {
            assert!(message.contains("is not there for the client \"attacker\""), "{what}: {message}");
        }
        other => panic!("{what}: {other:?}"),
    };
    let write = |inode| {
        let request = WriteRequest { block: Some(name_of(inode)), ..WriteRequest::default() };
        attacker.runtime.block_on(evil.write(id, request, bytes::Bytes::from_static(b"evil"), PATIENCE)).err()
    };
    let reserve = ReserveRequest { block: Some(name_of(inode + 1000)), ..ReserveRequest::default() };
    let refused = eventually("the worker has heard of the rules", PATIENCE, || read(&attacker, &evil).err());
    denied("Read", Some(refused));
    denied("Write", write(inode));
    denied("Write of what is not there yet", write(inode + 1000));
    denied("Reserve", attacker.runtime.block_on(evil.reserve(id, reserve, PATIENCE)).err());
    denied("Query", attacker.runtime.block_on(evil.query(id, vec![name.clone()])).err());

    // That was the block's name, and it is as it was.
    assert!(read(&worker, &good).unwrap() == CONTENT);
    let ahead = worker.runtime.block_on(good.query(id, vec![name_of(inode + 1000)])).unwrap();
    assert!(!ahead.items[0].known);
    assert_eq!(fs::read(&path).unwrap(), CONTENT);

    // Another rule holds as soon as the worker has heard of it.
    cluster.cv(&["mount", "update", "/work", "--client", "fuse0", "--client", "attacker=ro"]);
    eventually("it is let in", PATIENCE, || read(&attacker, &evil).is_ok().then_some(()));
    attacker.runtime.block_on(evil.shutdown());
    worker.runtime.block_on(good.shutdown());
}

#[test]
fn what_clients_and_workers_say_of_a_block_turns_off_no_disk() {
    let cluster = up();
    cluster.seed("bucket", "x/", 1, 1000);
    cluster.mount_fs_mode("s3://bucket/work", "/work", &[]);
    let [attacker, worker, admin] = [Role::Client, Role::Worker, Role::Admin].map(|role| Somebody::of(&cluster, role));
    let mut calls = ClusterClient::new(admin.channel(&cluster));
    let status = admin.answer(calls.status(StatusRequest::default())).unwrap().into_inner();
    let (cluster_id, workers, mount) = (status.cluster_id, status.workers.unwrap(), &status.mounts.unwrap().mounts[0]);
    let [Worker { id, .. }] = workers.workers[..] else { panic!("{workers:?}") };
    let [evil, other] = [&attacker, &worker].map(|somebody| pool_of(somebody, &cluster_id, &workers));
    let made_up = BlockRef::of_inode(&cluster_id, 77_777, 0, 0, mount.block_size, mount.id);
    let begin = WriteRequest { block: Some(made_up.clone()), ..WriteRequest::default() };
    attacker.runtime.block_on(evil.write(id, begin, bytes::Bytes::from_static(b"x"), PATIENCE)).unwrap();
    let lines = || fs::read_to_string(&cluster.at_start.workers[0].log).unwrap().lines().count();
    let before = lines();
    let failed = SyncRequest { failed: vec![made_up; 50], ..SyncRequest::default() };
    for _ in 0..4 {
        attacker.runtime.block_on(evil.sync(id, failed.clone(), PATIENCE)).unwrap();
    }
    let refused = worker.runtime.block_on(other.sync(id, failed, PATIENCE)).err();
    let denied = BlockStatus::PermissionDenied;
    assert!(matches!(&refused, Some(NetError::WorkerStatus { status, .. }) if *status == denied), "{refused:?}");
    assert!(lines() - before < 5, "{}", cluster.logs());

    // Files are made, read and synced as before.
    let path = cluster.path("work/f");
    fs::write(&path, "content").unwrap();
    fs::File::open(&path).unwrap().sync_all().unwrap();
    assert_eq!(fs::read(&path).unwrap(), b"content");
    let report = cluster.cv(&["report", "--json"]).json();
    assert_eq!(report["workers"][0]["disks"][0]["healthy"], true, "{report}");
    attacker.runtime.block_on(evil.shutdown());
    worker.runtime.block_on(other.shutdown());
}

#[test]
fn names_of_blocks_of_other_mounts_cannot_be_taken() {
    let cluster = up();
    cluster.seed("bucket", "x/", 1, 1000);
    cluster.mount_fs_mode("s3://bucket/a", "/a", &[]);
    cluster.mount_fs_mode("s3://bucket/b", "/b", &[]);
    let rules = ["mount", "update", "/b", "--client", "fuse0"];
    eventually("the rules are taken", PATIENCE, || (cluster.try_cv(&rules).code == 0).then_some(()));
    fs::write(cluster.path("b/first"), "first").unwrap();
    let first = fs::metadata(cluster.path("b/first")).unwrap().ino();
    let [attacker, admin] = [Role::Client, Role::Admin].map(|role| Somebody::of(&cluster, role));
    let mut calls = ClusterClient::new(admin.channel(&cluster));
    let status = admin.answer(calls.status(StatusRequest::default())).unwrap().into_inner();
    let (cluster_id, workers, mounts) = (status.cluster_id, status.workers.unwrap(), status.mounts.unwrap().mounts);
    let [Worker { id, .. }] = workers.workers[..] else { panic!("{workers:?}") };
    let mount = |path: &str| mounts.iter().find(|mount| mount.path == path).unwrap();
    let (own, other) = (mount("/a"), mount("/b"));
    let pool = pool_of(&attacker, &cluster_id, &workers);
    let write = |block: BlockRef| {
        let request = WriteRequest { block: Some(block), ..WriteRequest::default() };
        attacker.runtime.block_on(pool.write(id, request, bytes::Bytes::from_static(b"evil"), PATIENCE))
    };
    // Whatever inode comes next: as it is, said to be of the own mount, and as one of that.
    for inode in first + 1..first + 40 {
        let theirs = BlockRef::of_inode(&cluster_id, inode, 0, 0, other.block_size, other.id);
        let refused = write(theirs.clone());
        let status = |refused| match refused {
            Err(NetError::WorkerStatus { status, .. }) => status,
            other => panic!("{other:?}"),
        };
        assert_eq!(status(refused), BlockStatus::PermissionDenied);
        assert_eq!(status(write(BlockRef { mount_id: own.id, ..theirs })), BlockStatus::BadRequest);
        write(BlockRef::of_inode(&cluster_id, inode, 0, 0, own.block_size, own.id)).unwrap();
    }
    for number in 0..40 {
        let path = cluster.path(format!("b/{number}"));
        fs::write(&path, "content").unwrap();
        fs::File::open(&path).unwrap().sync_all().unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"content");
    }
    attacker.runtime.block_on(pool.shutdown());
}
