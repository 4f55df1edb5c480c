//! The fill engine against a bucket in memory: what is fetched, how often, and what is answered when it goes wrong.

use std::path::Path;
use std::time::Duration;

use bytes::Bytes;
use cavern_conf::process::Metrics;
use cavern_conf::{Budgets, ByteSize, schema};
use cavern_proto::ContentId;
use cavern_proto::data::BlockRef;
use cavern_proto::master::{Mount, MountTable};
use cavern_ufs::{Faults, MemoryBucket};
use tokio::sync::mpsc;

use super::*;
use crate::error::WorkerError;
use crate::memory::Budget;
use crate::metrics::WorkerMetrics;
use crate::mounts::Mounts;
use crate::mounts::tests::no_master;
use crate::store::StoreOptions;

const MIB: u64 = 1 << 20;

struct Fixture {
    _home: tempfile::TempDir,
    bucket: MemoryBucket,
    uri: String,
    mounts: Arc<Mounts>,
    fills: Arc<Fills>,
    metrics: WorkerMetrics,
}

fn open_fills(home: &Path, uri: &str, capacity: u64) -> (Arc<Fills>, Arc<Mounts>, WorkerMetrics) {
    let metrics = WorkerMetrics::register(&Metrics::new("worker"));
    let options = StoreOptions {
        directories: vec![format!("[SSD:{capacity}B]{}", home.display()).parse().unwrap()],
        conf: schema::Worker {
            high_watermark: 0.98,
            low_watermark: 0.96,
            fill_size_max: ByteSize::mib(1),
            index_cache: ByteSize::mib(1),
            ..schema::Worker::default()
        },
        max_open_blocks: 100,
        keys: Arc::default(),
        budget: Budgets::default().worker,
    };
    let deadline = std::time::Instant::now() + Duration::from_secs(10);
    let stores = loop {
        match crate::store::open(options.clone(), metrics.clone(), mpsc::channel(64).0) {
            // A program that another test starts has a copy of the lock for a moment.
            Err(WorkerError::DirectoryInUse(_)) if std::time::Instant::now() < deadline => {
                std::thread::sleep(Duration::from_millis(5));
            }
            opened => break opened.unwrap().0,
        }
    };
    let link = no_master();
    let conf = schema::Ufs { retries: 0, ..Default::default() };
    let mounts = Arc::new(Mounts::new(link, conf));
    let mount = Mount { id: 1, uri: uri.to_owned(), ..Default::default() };
    mounts.apply(MountTable { epoch: 1, mounts: vec![mount], status: vec![] });
    let parts = WorkerParts {
        stores,
        mounts: mounts.clone(),
        master: no_master(),
        membership: Arc::default(),
        metrics: metrics.clone(),
        memory: Budget::new(64 << 10),
    };
    let conf = schema::Worker { fill_concurrency: 8, fill_size_max: ByteSize::mib(1), ..schema::Worker::default() };
    let fills = Fills::new(parts, &conf);
    (Arc::new(fills), mounts, metrics)
}

fn object(reference: BlockRef) -> Arc<ObjectBlock> {
    match BlockSource::parse(reference).unwrap() {
        BlockSource::Object(object) => object,
        BlockSource::Data(target) => panic!("{target:?}"),
    }
}

impl Fixture {
    fn new(name: &str, capacity: u64) -> Self {
        let home = tempfile::tempdir().unwrap();
        let uri = format!("memory://fill-{name}");
        let (fills, mounts, metrics) = open_fills(home.path(), &uri, capacity);
        let bucket = MemoryBucket::named(&format!("fill-{name}"));
        Self { _home: home, bucket, uri, mounts, fills, metrics }
    }

    async fn source(&self, key: &str, etag: &str, length: u64, block_size: u64, index: u32) -> Arc<ObjectBlock> {
        let store = self.mounts.ufs(1).await.unwrap().store_id().to_owned();
        let content = ContentId::of_object(&store, key, etag, length, block_size);
        let reference = BlockRef {
            content_id: content.as_bytes().to_vec().into(),
            index,
            block_size,
            mount_id: 1,
            key: key.to_owned(),
            etag: etag.to_owned(),
            object_length: length,
            ..BlockRef::default()
        };
        object(reference)
    }

    async fn ensure(&self, source: &Arc<ObjectBlock>, chunks: Range<u32>) -> Result<Filled, Refusal> {
        self.fills.ensure(source, &[chunks], Touch::Open, (None, Instant::now())).await
    }
}

fn noise(length: usize) -> Vec<u8> {
    (0..length as u64).map(|at| (at.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 33) as u8).collect()
}

fn content(block: &CachedBlock, range: Range<u32>) -> Vec<u8> {
    let mut bytes = vec![0; range.len()];
    block.read(range.start, &mut bytes).unwrap();
    bytes
}

#[tokio::test(flavor = "multi_thread")]
async fn many_askers_one_get() {
    let bench = Fixture::new("single-flight", 16 * MIB);
    let bytes = noise(50_000);
    let etag = bench.bucket.put("a", bytes.clone());
    bench.mounts.inject(1, Faults { delay: Duration::from_millis(50), ..Default::default() });
    let source = bench.source("a", &etag, 50_000, 64 * MIB, 0).await;
    let asks = (0..100).map(|_| bench.ensure(&source, 0..1));
    let filled: Vec<Filled> = futures::future::try_join_all(asks).await.unwrap();
    assert!(filled.iter().all(|filled| content(&filled.block, 0..50_000) == bytes));
    assert_eq!(filled.iter().map(|filled| filled.fetched_bytes).sum::<u64>(), 50_000, "one of them fetched");
    assert_eq!((bench.metrics.ufs_requests.get(), bench.metrics.ufs_bytes.get()), (1, 50_000));
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_client_has_written_is_not_fetched() {
    let bench = Fixture::new("kept", 64 * MIB);
    let length = 3 * MIB + 1000;
    let bytes = noise(length as usize);
    let etag = bench.bucket.put("a", bytes.clone());
    let source = bench.source("a", &etag, length, 64 * MIB, 0).await;
    // The last chunk is there already; the first MiB comes twice.
    bench.ensure(&source, 24..25).await.unwrap();
    for range in [0..1 << 20, 0..length as usize] {
        let first = range.start as u32 / CHUNK_BYTES;
        bench.fills.populate(&source, first, Bytes::copy_from_slice(&bytes[range])).await.unwrap();
    }
    let filled = bench.ensure(&source, 0..25).await.unwrap();
    assert!(content(&filled.block, 0..length as u32) == bytes);
    assert_eq!((filled.fetched_bytes, bench.metrics.ufs_bytes.get()), (0, 1000));
    assert!(bench.fills.runs.lock().is_empty());
    let other = bench.source("b", &etag, length, 64 * MIB, 0).await;
    bench.mounts.apply(MountTable { epoch: 2, mounts: vec![], status: vec![] });
    assert_eq!(bench.fills.populate(&other, 0, bytes.into()).await.unwrap_err().status, Status::UnknownMount);
}

#[tokio::test(flavor = "multi_thread")]
async fn only_missing_chunks_are_fetched_in_runs() {
    let bench = Fixture::new("runs", 64 * MIB);
    let length = 5 * MIB + 1000;
    let bytes = noise(length as usize);
    let etag = bench.bucket.put("big", bytes.clone());
    // Block 1 of two: the last 2 MiB and 1,000 bytes.
    let source = bench.source("big", &etag, length, 3 * MIB, 1).await;
    let chunk = CHUNK_BYTES;
    let filled = bench.ensure(&source, 5..6).await.unwrap();
    assert_eq!(filled.fetched_bytes, u64::from(chunk));
    assert_eq!(bench.metrics.ufs_requests.get(), 1);
    let filled = bench.ensure(&source, 0..17).await.unwrap();
    // 0..5, then 6..14 and 14..17 because a GET is at most a MiB.
    assert_eq!(bench.metrics.ufs_requests.get(), 4);
    assert_eq!(filled.fetched_bytes, 2 * MIB + 1000 - u64::from(chunk));
    assert_eq!(content(&filled.block, 0..2 * MIB as u32 + 1000), bytes[3 * MIB as usize..]);
    assert_eq!(bench.ensure(&source, 3..9).await.unwrap().fetched_bytes, 0);
    assert_eq!(bench.metrics.ufs_bytes.get(), 2 * MIB + 1000);
}

#[tokio::test(flavor = "multi_thread")]
async fn another_version_or_no_object_leaves_nothing_behind() {
    let bench = Fixture::new("versions", 16 * MIB);
    let old = bench.bucket.put("a", noise(1000));
    let source = bench.source("a", &old, 1000, MIB, 0).await;
    bench.bucket.put("a", noise(1000));
    assert_eq!(bench.ensure(&source, 0..1).await.unwrap_err().status, Status::VersionChanged);
    let missing = bench.source("nowhere", "e", 1000, MIB, 0).await;
    assert_eq!(bench.ensure(&missing, 0..1).await.unwrap_err().status, Status::NotFound);
    let usage = &bench.fills.parts.stores.table.usage()[0];
    assert_eq!((usage.blocks, usage.used_bytes), (0, 0));
    assert!(bench.fills.runs.lock().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_view_has_is_fetched_also_where_it_was_replaced_or_deleted() {
    let bench = Fixture::new("pinned", 16 * MIB);
    let (replaced, deleted) = (noise(300_000), noise(1000));
    let etags = [bench.bucket.put("a", replaced.clone()), bench.bucket.put("b", deleted.clone())];
    let pinned = async |key: &str, etag: &str, length: usize| {
        let mut object = (*bench.source(key, etag, length as u64, MIB, 0).await).clone();
        object.is_pinned = true;
        Arc::new(object)
    };
    let (of_a, of_b) = (pinned("a", &etags[0], 300_000).await, pinned("b", &etags[1], 1000).await);
    bench.bucket.keep_versions();
    bench.bucket.put("a", noise(5));
    bench.bucket.delete("b");
    let plain = bench.source("a", &etags[0], 300_000, MIB, 0).await;
    assert_eq!(bench.ensure(&plain, 0..1).await.unwrap_err().status, Status::VersionChanged);
    for (source, bytes) in [(&of_a, &replaced), (&of_b, &deleted)] {
        let filled = bench.ensure(source, 0..bytes.len().div_ceil(CHUNK_BYTES as usize) as u32).await.unwrap();
        assert!(content(&filled.block, 0..bytes.len() as u32) == *bytes, "{}", source.key);
    }
    // It is the same block, whoever asks.
    assert_eq!(bench.ensure(&plain, 0..1).await.unwrap().fetched_bytes, 0);
    let nowhere = pinned("a", "another", 1000).await;
    assert_eq!(bench.ensure(&nowhere, 0..1).await.unwrap_err().status, Status::VersionChanged);
    assert!(bench.mounts.failures.report().is_empty(), "the bucket is well");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failure_is_told_to_all_and_remembered_by_none() {
    let bench = Fixture::new("failures", 16 * MIB);
    let etag = bench.bucket.put("a", noise(3 * MIB as usize));
    let source = bench.source("a", &etag, 3 * MIB, 4 * MIB, 0).await;
    let every = std::num::NonZeroU64::new(1);
    let delay = Duration::from_millis(20);
    bench.mounts.inject(1, Faults { fail_every: every, delay, ..Default::default() });
    let asks = futures::future::join_all((0..10).map(|_| bench.ensure(&source, 0..4))).await;
    assert!(asks.iter().all(|ask| ask.as_ref().unwrap_err().status == Status::UfsUnavailable));
    bench.mounts.apply(MountTable { epoch: 2, ..Default::default() });
    let mount = Mount { id: 1, uri: bench.uri.clone(), ..Default::default() };
    bench.mounts.apply(MountTable { epoch: 3, mounts: vec![mount], status: vec![] });
    assert_eq!(bench.ensure(&source, 0..4).await.unwrap().fetched_bytes, 4 * u64::from(CHUNK_BYTES));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_abandoned_run_is_not_sent() {
    let bench = Fixture::new("abandoned", 16 * MIB);
    let etag = bench.bucket.put("a", noise(1000));
    let source = bench.source("a", &etag, 1000, MIB, 0).await;
    let turns = bench.fills.gets.acquire_many(8).await.unwrap();
    let ask = tokio::time::timeout(Duration::from_millis(50), bench.ensure(&source, 0..1)).await;
    assert!(ask.is_err());
    drop(turns);
    bench.fills.finish().await;
    assert_eq!(bench.metrics.ufs_requests.get(), 0);
    assert_eq!(bench.fills.parts.stores.table.usage()[0].blocks, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_content_id_that_is_not_the_keys_is_refused() {
    let bench = Fixture::new("ids", 16 * MIB);
    let etag = bench.bucket.put("a", noise(1000));
    let content = ContentId::of_object("memory://another", "a", &etag, 1000, MIB);
    let reference = BlockRef {
        content_id: content.as_bytes().to_vec().into(),
        index: 0,
        block_size: MIB,
        mount_id: 1,
        key: "a".into(),
        etag,
        object_length: 1000,
        ..BlockRef::default()
    };
    let source = object(reference);
    assert_eq!(bench.ensure(&source, 0..1).await.unwrap_err().status, Status::BadRequest);
    assert_eq!(bench.fills.parts.stores.table.usage()[0].blocks, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn more_than_the_cache_holds_flows_through_it() {
    let bench = Fixture::new("flow", 4 * MIB);
    let bytes = noise(2 * MIB as usize);
    let mut etags = Vec::new();
    (0..20).for_each(|key| etags.push(bench.bucket.put(&format!("k{key}"), bytes.clone())));
    let read = |key: usize| {
        let (bench, etag, bytes) = (&bench, etags[key].clone(), &bytes);
        async move {
            let source = bench.source(&format!("k{key}"), &etag, 2 * MIB, 2 * MIB, 0).await;
            // What overflows is refused as overloaded: the client goes elsewhere.
            match bench.ensure(&source, 0..16).await {
                Ok(filled) => assert_eq!(&content(&filled.block, 0..2 * MIB as u32), bytes),
                Err(refusal) => assert_eq!(refusal.status, Status::Overloaded),
            }
            assert!(bench.fills.parts.stores.table.usage()[0].used_bytes <= 4 * MIB);
        }
    };
    for round in 0..3 {
        futures::future::join_all((0..20).map(|key| read((key + round) % 20))).await;
    }
    for (key, etag) in etags.iter().enumerate() {
        let source = bench.source(&format!("k{key}"), etag, 2 * MIB, 2 * MIB, 0).await;
        // What the last ones had under way may still be there for a moment.
        let alone = async {
            while let Err(refusal) = bench.ensure(&source, 0..16).await {
                assert_eq!(refusal.status, Status::Overloaded);
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(Duration::from_secs(10), alone).await.expect("alone there is room");
    }
    bench.fills.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_damaged_on_disk_is_fetched_again() {
    let home = tempfile::tempdir().unwrap();
    let bucket = MemoryBucket::named("fill-damage");
    let bytes = noise(3 * CHUNK_BYTES as usize);
    let etag = bucket.put("a", bytes.clone());
    let (fills, mounts, metrics) = open_fills(home.path(), "memory://fill-damage", 16 * MIB);
    let bench = Fixture { _home: home, bucket, uri: String::new(), mounts, fills, metrics };
    let source = bench.source("a", &etag, bytes.len() as u64, MIB, 0).await;
    let path = bench.ensure(&source, 0..3).await.unwrap().block.path().to_owned();
    bench.fills.finish().await;
    let Fixture { _home: home, bucket, fills, mounts, metrics, .. } = bench;
    drop((fills, mounts, metrics));

    let mut damaged = std::fs::read(&path).unwrap();
    damaged[CHUNK_BYTES as usize] ^= 0xff;
    damaged.truncate(2 * CHUNK_BYTES as usize + 10);
    std::fs::write(&path, damaged).unwrap();
    let (fills, mounts, metrics) = open_fills(home.path(), "memory://fill-damage", 16 * MIB);
    let bench = Fixture { _home: home, bucket, uri: String::new(), mounts, fills, metrics };
    let filled = bench.ensure(&source, 0..3).await.unwrap();
    assert_eq!(content(&filled.block, 0..bytes.len() as u32), bytes);
    assert_eq!(filled.fetched_bytes, 2 * u64::from(CHUNK_BYTES));
    assert_eq!(bench.metrics.corrupt_chunks.get(), 2);
}
