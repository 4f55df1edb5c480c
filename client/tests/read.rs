//! Reads over every step of the ladder, against workers that are well, slow, wrong, silent and gone.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "what fails here fails the test")]

mod support;

use std::sync::Arc;
use std::time::{Duration, Instant};

use cavern_client::{Access, CachedLookup, CachedRead, Client, ClientError, File, Node, Opened};
use cavern_conf::{ByteSize, Config, Interval};
use cavern_proto::CHUNK_BYTES;
use cavern_proto::data::Status;
use cavern_proto::master::Worker;
use cavern_ufs::MemoryBucket;
use support::master::MOUNT_ROOT;
use support::{FakeMaster, FakeWorker, Mood, config, connect, content, until};

const MIB: usize = 1 << 20;

/// A cluster of one master, the given workers, and a bucket.
struct Cluster {
    master: FakeMaster,
    bucket: MemoryBucket,
    workers: Vec<FakeWorker>,
    config: Config,
}

impl Cluster {
    async fn new(name: &str, workers: Vec<FakeWorker>) -> Self {
        let master = FakeMaster::start(name).await;
        master.set_workers(workers.iter().map(FakeWorker::entry).collect());
        let config = config(&master);
        Self { master, bucket: MemoryBucket::named(name), workers, config }
    }

    /// Stores an object in the bucket, at every worker, and in the namespace.
    fn put(&self, key: &str, bytes: &[u8]) {
        let etag = self.bucket.put(key, bytes.to_vec());
        self.workers.iter().for_each(|worker| worker.put(key, &etag, bytes.to_vec()));
        self.master.put_file(MOUNT_ROOT, key, &etag, bytes.len() as u64);
    }

    async fn client(&self) -> Arc<Client> {
        connect(&self.config).await
    }

    async fn stop(self, client: Arc<Client>) {
        client.shutdown().await;
        for worker in &self.workers {
            worker.kill().await;
        }
    }
}

async fn lookup(client: &Client, name: &str) -> Arc<Node> {
    client.metadata().lookup(MOUNT_ROOT, name.as_bytes()).await.unwrap()
}

async fn open(client: &Client, name: &str) -> File {
    client.open_to_read(&lookup(client, name).await).await.unwrap()
}

/// Opens a file without asking anybody.
fn open_cached(client: &Client, node: &Arc<Node>) -> Option<File> {
    match client.open_cached(node, Access::Read, 0)?.unwrap() {
        Opened::File(file) => Some(file),
        Opened::Redirected(node) => panic!("{node} is not the one that is read"),
    }
}

/// Chunks of `length` bytes in an order that looks random, each once.
fn shuffled(count: usize, seed: usize) -> impl Iterator<Item = usize> {
    assert!(count.is_power_of_two());
    (0..count).map(move |number| (number * 5 + seed * 2 + 1) * 0x9e37_79b1 % count)
}

#[tokio::test(flavor = "multi_thread")]
async fn small_files_come_with_their_descriptor_and_need_nobody_afterwards() {
    let sockets = tempfile::tempdir().unwrap();
    let cluster = Cluster::new("small", vec![FakeWorker::local(1, sockets.path()).await]).await;
    let bytes = content(1, 50_000);
    cluster.put("a", &bytes);
    cluster.put("empty", b"");
    let client = cluster.client().await;
    let node = lookup(&client, "a").await;
    assert!(open_cached(&client, &node).is_none());
    let file = client.open_to_read(&node).await.unwrap();
    assert_eq!(file.read(0, 100_000).await.unwrap(), bytes);
    let again = open_cached(&client, &node).expect("its descriptor is cached");
    let mut buffer = vec![0; 100_000];
    assert_eq!(again.read_now(0, &mut buffer), Some(50_000));
    assert_eq!(buffer[..50_000], bytes);
    assert_eq!(again.read_now(49_000, &mut buffer), Some(1000));
    assert_eq!(buffer[..1000], bytes[49_000..]);
    assert_eq!(again.read_now(50_000, &mut buffer), Some(0));
    assert_eq!(again.read(u64::MAX, 10).await.unwrap().len(), 0);
    let kept = again.with_local_descriptor(|_| Some(7)).unwrap();
    let other = client.open_to_read(&node).await.unwrap().with_local_descriptor(|_| Some(8));
    assert!(Arc::ptr_eq(&kept, &other.unwrap()), "all who open the block have the same");
    let worker = &cluster.workers[0];
    assert_eq!((worker.count("Open"), worker.count("Fill"), worker.count("Read")), (1, 0, 0));
    let empty = open_cached(&client, &lookup(&client, "empty").await).unwrap();
    assert_eq!(empty.read(0, 10).await.unwrap().len(), 0);
    let root = client.metadata().node(MOUNT_ROOT).await.unwrap();
    assert!(matches!(client.open_to_read(&root).await, Err(ClientError::IsADirectory(_))));
    cluster.stop(client).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn evicted_blocks_stay_readable_and_are_opened_anew_for_what_is_missing() {
    let sockets = tempfile::tempdir().unwrap();
    let mut cluster = Cluster::new("evicted", vec![FakeWorker::local(1, sockets.path()).await]).await;
    cluster.config.client.readahead_max = ByteSize::mib(0);
    let bytes = content(2, MIB + 300_000);
    cluster.put("a", &bytes);
    let client = cluster.client().await;
    let file = open(&client, "a").await;
    assert_eq!(file.read(0, 1000).await.unwrap(), bytes[..1000]);
    assert_eq!(client.stats().descriptors.get(), 1);
    cluster.workers[0].evict_all();
    until("the idle descriptor is closed", || client.stats().descriptors.get() == 0).await;
    let mut buffer = [0; 1000];
    assert_eq!(file.read_now(0, &mut buffer), Some(1000), "the handle keeps its own");
    assert_eq!(buffer, bytes[..1000]);
    assert_eq!(file.read(0, 2 * MIB).await.unwrap(), bytes);
    assert_eq!(cluster.workers[0].count("Open"), 3, "two blocks, one of them twice");
    cluster.stop(client).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn reads_at_any_place_give_the_bytes_of_the_object() {
    let sockets = tempfile::tempdir().unwrap();
    let local = FakeWorker::local(1, sockets.path()).await;
    for (name, workers) in [
        ("any-local", vec![local]),
        ("any-remote", vec![FakeWorker::remote(1).await, FakeWorker::remote(2).await]),
        ("any-bucket", vec![]),
    ] {
        let cluster = Cluster::new(name, workers).await;
        let bytes = content(3, 3 * MIB + 77_777);
        cluster.put("a", &bytes);
        let client = cluster.client().await;
        let file = open(&client, "a").await;
        let mut state = 7u64;
        for _ in 0..200 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let offset = (state >> 20) as usize % (bytes.len() + 1000);
            let length = (state >> 50) as usize * 100;
            let expected = &bytes[offset.min(bytes.len())..(offset + length).min(bytes.len())];
            let mut buffer = vec![0; length];
            if let Some(count) = file.read_now(offset as u64, &mut buffer) {
                assert!(buffer[..count] == *expected, "{name}: read_now at {offset}, {length}");
            }
            let read = file.read(offset as u64, length).await.unwrap();
            assert!(read == expected, "{name}: read at {offset}, {length}: {} bytes", read.len());
        }
        assert_eq!(client.stats().read_errors.get(), 0);
        cluster.stop(client).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn random_readers_fetch_only_the_chunks_they_touch() {
    let sockets = tempfile::tempdir().unwrap();
    for (name, worker) in
        [("random-local", FakeWorker::local(1, sockets.path()).await), ("random-remote", FakeWorker::remote(1).await)]
    {
        let mut cluster = Cluster::new(name, vec![worker]).await;
        cluster.config.client.hedge_percent = 0;
        let chunk = CHUNK_BYTES as usize;
        let bytes = content(4, 256 * chunk);
        cluster.put("a", &bytes);
        let client = cluster.client().await;
        let file = open(&client, "a").await;
        for number in shuffled(256, 0).take(100) {
            let read = file.read((number * chunk) as u64, chunk).await.unwrap();
            assert!(read == bytes[number * chunk..(number + 1) * chunk], "{name}: chunk {number}");
        }
        let fetched = cluster.workers[0].filled_bytes().max(cluster.workers[0].sent_bytes());
        assert!(fetched <= 130 * chunk as u64, "{name}: {fetched} bytes for 100 chunks");
        cluster.stop(client).await;
    }
}

/// Reads of a few bytes each at random places of a file of `length` bytes: offset and length.
fn scattered(length: usize, count: u64) -> impl Iterator<Item = (usize, usize)> {
    let mut state = 11u64;
    (0..count).map(move |_| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let (offset, wanted) = ((state >> 20) as usize % length, 1 + (state >> 50) as usize % 9000);
        (offset, wanted.min(length - offset))
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn small_random_reads_move_the_parts_they_touch() {
    // Blocks of 1 MiB, of which the last is short, and ends within a part.
    let length = 40 * MIB + 77_777;
    let bytes = content(21, length);
    for (name, knows_parts) in [("parts", true), ("parts-old-worker", false)] {
        let mut cluster = Cluster::new(name, vec![FakeWorker::remote(1).await]).await;
        cluster.config.client.hedge_percent = 0;
        cluster.put("a", &bytes);
        if !knows_parts {
            cluster.workers[0].forget_parts();
        }
        let client = cluster.client().await;
        let file = open(&client, "a").await;
        let ends = [(length - 1, 1), (length - 5000, 5000), (128 << 10, 1), ((128 << 10) - 1, 2), (MIB - 3, 6)];
        let (mut reads, mut wanted) = (0, 0);
        for (offset, wanted_bytes) in scattered(length, 300).chain(ends) {
            let read = file.read(offset as u64, wanted_bytes).await.unwrap();
            assert!(read == bytes[offset..offset + wanted_bytes], "{name}: {wanted_bytes} at {offset}");
            (reads, wanted) = (reads + 1, wanted + wanted_bytes + 2 * 4096);
        }
        let worker = &cluster.workers[0];
        if knows_parts {
            assert!(worker.count("Parts") >= reads - 10, "{name}: {} of {reads}", worker.count("Parts"));
            let begun = 6 * CHUNK_BYTES as usize;
            assert!(worker.sent_bytes() <= (wanted + begun) as u64, "{name}: {} bytes", worker.sent_bytes());
        } else {
            assert_eq!(worker.count("Parts"), 0);
            let buffered = client.stats().buffer_reads.get();
            assert!(worker.count("Read") < reads, "{name}: {buffered} reads found a chunk that came before");
        }
        assert_eq!((client.stats().read_errors.get(), client.stats().bucket_reads.get()), (0, 0), "{name}");
        cluster.stop(client).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wrong_part_is_reported_and_read_elsewhere() {
    let cluster = Cluster::new("wrong-part", vec![FakeWorker::remote(1).await]).await;
    let bytes = content(22, 16 * MIB);
    cluster.put("a", &bytes);
    let client = cluster.client().await;
    let file = open(&client, "a").await;
    for (offset, length) in scattered(bytes.len(), 20) {
        file.read(offset as u64, length).await.unwrap();
    }
    cluster.workers[0].set_mood(Mood::Corrupts);
    let parts = cluster.workers[0].count("Parts");
    for (offset, length) in scattered(bytes.len() - MIB, 30).skip(20) {
        assert!(file.read((offset + MIB) as u64, length).await.unwrap() == bytes[offset + MIB..offset + MIB + length]);
    }
    assert!(cluster.workers[0].count("Parts") > parts);
    let corrupt = client.stats().corrupt_chunks.get();
    assert!(corrupt > 0 && client.stats().bucket_reads.get() >= corrupt);
    until("the worker hears of it", || cluster.workers[0].count("Corrupt") == corrupt).await;
    cluster.stop(client).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn random_readers_of_parts_stay_within_the_budget() {
    let mut cluster = Cluster::new("parts-budget", vec![FakeWorker::remote(1).await]).await;
    cluster.config.client.memory_budget = ByteSize::mib(1);
    cluster.config.client.read_timeout = Interval::secs(60);
    cluster.config.client.worker_timeout = Interval::secs(60);
    let bytes = content(23, 8 * MIB);
    cluster.put("a", &bytes);
    let client = cluster.client().await;
    let file = open(&client, "a").await;
    let readers = (0..64).map(|reader| {
        let (client, bytes, file) = (&client, &bytes, &file);
        async move {
            for (offset, length) in scattered(bytes.len(), 80).skip(reader) {
                let read = file.read(offset as u64, length).await.unwrap();
                assert!(read == bytes[offset..offset + length], "{reader}: {length} at {offset}");
                assert!(client.stats().budget_used_bytes.get() <= MIB as i64);
            }
        }
    });
    futures::future::join_all(readers).await;
    drop(file);
    client.shutdown().await;
    until("every buffer is given back", || client.stats().budget_used_bytes.get() == 0).await;
    cluster.stop(client).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sequential_reader_finds_its_bytes_already_there() {
    let sockets = tempfile::tempdir().unwrap();
    for (name, worker) in
        [("stream-local", FakeWorker::local(1, sockets.path()).await), ("stream-remote", FakeWorker::remote(1).await)]
    {
        let mut cluster = Cluster::new(name, vec![worker]).await;
        cluster.config.client.hedge_percent = 0;
        let bytes = content(5, 24 * MIB);
        cluster.put("a", &bytes);
        let client = cluster.client().await;
        let file = open(&client, "a").await;
        let mut without_waiting = 0;
        for start in (0..bytes.len()).step_by(MIB / 4) {
            let mut buffer = vec![0; MIB / 4];
            if file.read_now(start as u64, &mut buffer).is_some() {
                without_waiting += 1;
            } else {
                buffer = file.read(start as u64, MIB / 4).await.unwrap().to_vec();
            }
            assert!(buffer == bytes[start..start + MIB / 4], "{name} at {start}");
            // A reader that does something with its bytes.
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        assert!(without_waiting >= 70, "{name}: {without_waiting} of 96 reads");
        let stats = client.stats();
        assert!(stats.readahead_bytes.get() >= 20 * MIB as u64, "{name}: {}", stats.readahead_bytes.get());
        let asked = stats.local_opens.get() + stats.local_fills.get() + stats.remote_reads.get();
        assert!(asked <= 30, "{name}: {asked} requests were waited for");
        cluster.stop(client).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn wrong_bytes_are_reported_and_read_elsewhere() {
    let cluster = Cluster::new("corrupt", vec![FakeWorker::remote(1).await]).await;
    let bytes = content(6, 200_000);
    cluster.put("a", &bytes);
    cluster.workers[0].set_mood(Mood::Corrupts);
    let client = cluster.client().await;
    assert!(open(&client, "a").await.read(0, MIB).await.unwrap() == bytes);
    assert_eq!(client.stats().corrupt_chunks.get(), 1);
    until("the worker hears of it", || cluster.workers[0].count("Corrupt") == 1).await;
    cluster.stop(client).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_misbehaves_gives_way_to_the_next_source() {
    for (name, mood) in [
        ("babbles", Mood::Babbles),
        ("closes", Mood::Closes),
        ("hangs", Mood::Hangs),
        ("overloaded", Mood::Refuses(Status::Overloaded)),
        ("disk", Mood::Refuses(Status::IoError)),
        ("unknown", Mood::Refuses(Status::UnknownMount)),
        ("bucket", Mood::Refuses(Status::UfsUnavailable)),
    ] {
        let sockets = tempfile::tempdir().unwrap();
        for (way, worker) in
            [("local", FakeWorker::local(1, sockets.path()).await), ("remote", FakeWorker::remote(1).await)]
        {
            let mut cluster = Cluster::new(&format!("{name}-{way}"), vec![worker]).await;
            cluster.config.client.worker_timeout = Interval::millis(700);
            cluster.config.client.read_timeout = Interval::secs(20);
            let bytes = content(7, 100_000);
            cluster.put("a", &bytes);
            cluster.workers[0].set_mood(mood);
            let client = cluster.client().await;
            let started = Instant::now();
            let read = open(&client, "a").await.read(0, MIB).await.unwrap();
            assert!(read == bytes, "{name} {way}");
            assert!(started.elapsed() < Duration::from_secs(10), "{name} {way}: {:?}", started.elapsed());
            assert_eq!(client.stats().bucket_reads.get(), 1, "{name} {way}");
            cluster.stop(client).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_is_read_on_though_its_only_worker_ends_the_connection_instead_of_answering() {
    let sockets = tempfile::tempdir().unwrap();
    let cluster = Cluster::new("closes", vec![FakeWorker::local(1, sockets.path()).await]).await;
    let (worker, bytes) = (cluster.workers[0].clone(), content(1, 50_000));
    cluster.master.fs_mode();
    cluster.master.put_block(MOUNT_ROOT, "f", 1, bytes.len() as u64);
    worker.put("", "", bytes.clone());
    let client = cluster.client().await;
    let file = open(&client, "f").await;
    worker.set_mood(Mood::Closes);
    let reading = tokio::spawn(async move { file.read(0, 100_000).await });
    until("it is asked for the block", || worker.count("Closed") > 0).await;
    worker.set_mood(Mood::Well);
    assert_eq!(reading.await.unwrap().unwrap(), bytes);
    cluster.stop(client).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn who_has_waited_for_a_master_longer_than_a_read_may_take_is_served_when_it_is_back() {
    let sockets = tempfile::tempdir().unwrap();
    for (name, worker) in
        [("late-local", FakeWorker::local(1, sockets.path()).await), ("late-remote", FakeWorker::remote(1).await)]
    {
        let mut cluster = Cluster::new(name, vec![worker]).await;
        let bytes = content(26, 300_000);
        cluster.workers[0].put("", "", bytes.clone());
        cluster.workers[0].keep_cold();
        cluster.master.fs_mode();
        cluster.master.put_block(MOUNT_ROOT, "f", 1, bytes.len() as u64);
        cluster.config.client.read_timeout = Interval::millis(400);
        cluster.config.client.worker_timeout = Interval::secs(10);
        cluster.config.client.change_timeout = Interval::secs(20);
        let client = cluster.client().await;
        let file = open(&client, "f").await;
        cluster.master.hang(true);
        let asked = cluster.master.count("GetLayout");
        let reading = tokio::spawn(async move { file.read(0, 100_000).await });
        until("the layout is asked for", || cluster.master.count("GetLayout") > asked).await;
        let since = Instant::now();
        until("the read is late", || since.elapsed() > Duration::from_millis(800)).await;
        cluster.master.hang(false);
        assert!(reading.await.unwrap().unwrap() == bytes[..100_000], "{name}");
        cluster.stop(client).await;
    }
}

/// A cluster with one file of an fs-mode mount, `f`, of one block, at workers on other hosts; and its inode.
async fn fs_mode(name: &str, workers: u64, bytes: &[u8]) -> (Cluster, u64) {
    let ids: Vec<u64> = (1..=workers).collect();
    let workers = futures::future::join_all(ids.iter().map(|id| FakeWorker::remote(*id))).await;
    let cluster = Cluster::new(name, workers).await;
    cluster.master.fs_mode();
    cluster.master.configure(|mount| mount.block_size = 64 * MIB as u64);
    let inode = cluster.master.put_replicas(MOUNT_ROOT, "f", &ids, bytes.len() as u64);
    put_block(&cluster, bytes);
    (cluster, inode)
}

fn put_block(cluster: &Cluster, bytes: &[u8]) {
    cluster.workers.iter().for_each(|worker| worker.put("", "", bytes.to_vec()));
}

/// Bytes that are in a buffer as a whole.
fn read_buffered(file: &File, offset: u64, length: usize) -> Option<bytes::Bytes> {
    match file.try_read_cached(offset, &mut vec![0; length])? {
        CachedRead::Buffered(bytes) => Some(bytes),
        CachedRead::Copied(copied) => panic!("{copied} bytes of a file that is at other hosts"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sequential_reader_of_a_file_that_may_change_finds_its_bytes_already_there() {
    let bytes = content(5, 24 * MIB);
    let (mut cluster, _) = fs_mode("fs-stream", 1, &bytes).await;
    cluster.config.client.hedge_percent = 0;
    let client = cluster.client().await;
    let file = open(&client, "f").await;
    let mut without_waiting = 0;
    for start in (0..bytes.len()).step_by(MIB / 4) {
        let buffered = read_buffered(&file, start as u64, MIB / 4);
        without_waiting += u32::from(buffered.is_some());
        let read = match buffered {
            Some(bytes) => bytes,
            None => file.read(start as u64, MIB / 4).await.unwrap(),
        };
        assert!(read == bytes[start..start + MIB / 4], "at {start}");
        // A reader that does something with its bytes.
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert!(without_waiting >= 60, "{without_waiting} of 96 reads");
    let stats = client.stats();
    assert!(stats.readahead_bytes.get() >= 20 * MIB as u64, "{}", stats.readahead_bytes.get());
    assert!(stats.remote_reads.get() <= 40, "{} requests were waited for", stats.remote_reads.get());
    drop(file);
    until("nothing of a closed file is kept", || client.stats().budget_used_bytes.get() == 0).await;
    cluster.stop(client).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_read_ahead_is_of_use_though_a_replica_could_not_be_opened() {
    let bytes = content(31, 8 * MIB);
    let (mut cluster, _) = fs_mode("fs-left-out", 1, &bytes).await;
    cluster.config.client.hedge_percent = 0;
    // No table has the other worker.
    cluster.master.put_replicas(MOUNT_ROOT, "g", &[1, 2], bytes.len() as u64);
    let client = cluster.client().await;
    let file = open(&client, "g").await;
    for start in (0..bytes.len()).step_by(MIB / 4) {
        assert!(file.read(start as u64, MIB / 4).await.unwrap() == bytes[start..start + MIB / 4], "at {start}");
    }
    let buffered = client.stats().buffer_reads.get();
    assert!(buffered >= 10, "{buffered} of 32 reads found their bytes in a buffer");
    cluster.stop(client).await;
}

/// Reads a stream until what comes next is in a buffer, and replaces the bytes at the workers.
async fn buffer_and_replace(cluster: &Cluster, file: &File, old: &[u8], new: &[u8]) {
    for start in (0..MIB / 2).step_by(MIB / 8) {
        assert!(file.read(start as u64, MIB / 8).await.unwrap() == old[start..start + MIB / 8]);
    }
    until("it is read ahead", || read_buffered(file, AHEAD, 1000).is_some()).await;
    put_block(cluster, new);
    let ahead = AHEAD as usize..AHEAD as usize + 1000;
    assert!(file.read(AHEAD, 1000).await.unwrap() == old[ahead.clone()], "it is in a buffer");
    assert!(file.read_direct(AHEAD, 1000).await.unwrap() == new[ahead], "who keeps nothing reads what is there");
}

/// What the first window has.
const AHEAD: u64 = 600 << 10;

#[tokio::test(flavor = "multi_thread")]
async fn what_was_read_ahead_is_given_out_no_more_when_the_file_may_have_changed() {
    let (old, new) = (content(21, 4 * MIB), content(22, 4 * MIB));
    let ahead = AHEAD as usize..AHEAD as usize + 1000;

    let (cluster, inode) = fs_mode("fs-changed", 1, &old).await;
    let client = cluster.client().await;
    let file = open(&client, "f").await;
    buffer_and_replace(&cluster, &file, &old, &new).await;
    let before = client.stats().invalidations.get();
    cluster.master.change_content(inode);
    until("the change is known", || client.stats().invalidations.get() > before).await;
    assert!(read_buffered(&file, AHEAD, 1000).is_none());
    assert!(file.read(AHEAD, 1000).await.unwrap() == new[ahead.clone()], "another client has changed it");
    cluster.stop(client).await;

    let (cluster, _) = fs_mode("fs-opened", 1, &old).await;
    let client = cluster.client().await;
    let (node, file) = (lookup(&client, "f").await, open(&client, "f").await);
    buffer_and_replace(&cluster, &file, &old, &new).await;
    assert!(!file.keeps_pages(&node), "nothing is known of the pages of before");
    assert!(file.read(AHEAD, 1000).await.unwrap() == new[ahead.clone()], "pages and buffers go together");
    cluster.stop(client).await;

    let (cluster, _) = fs_mode("fs-lapsed", 1, &old).await;
    // It can be waited for, and does not end before something is buffered.
    cluster.master.set_lease(Duration::from_secs(3));
    let client = cluster.client().await;
    let file = open(&client, "f").await;
    buffer_and_replace(&cluster, &file, &old, &new).await;
    cluster.master.hang(true);
    let deadline = Instant::now() + Duration::from_secs(30);
    while file.read(AHEAD, 1000).await.unwrap() != new[ahead.clone()] {
        assert!(Instant::now() < deadline, "without a lease nobody tells of changes");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    cluster.master.hang(false);
    cluster.stop(client).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_read_ahead_in_a_strict_mount() {
    let bytes = content(23, 4 * MIB);
    let (cluster, _) = fs_mode("fs-strict", 1, &bytes).await;
    cluster.master.configure(|mount| mount.consistency = cavern_proto::master::Consistency::Strict.into());
    let client = cluster.client().await;
    let file = open(&client, "f").await;
    for start in (0..4 * MIB).step_by(MIB / 4) {
        assert!(file.read(start as u64, MIB / 4).await.unwrap() == bytes[start..start + MIB / 4]);
    }
    assert_eq!((client.stats().readahead_bytes.get(), client.stats().remote_reads.get()), (0, 16));
    cluster.stop(client).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn wrong_bytes_of_a_replica_are_reported_and_read_from_another_or_not_at_all() {
    let bytes = content(24, 200_000);
    let (mut cluster, _) = fs_mode("fs-corrupt", 2, &bytes).await;
    cluster.config.client.hedge_percent = 0;
    cluster.config.client.worker_timeout = Interval::millis(700);
    cluster.config.client.read_timeout = Interval::millis(2000);
    cluster.workers[0].set_mood(Mood::Corrupts);
    let client = cluster.client().await;
    let file = open(&client, "f").await;
    assert!(file.read(0, MIB).await.unwrap() == bytes);
    assert_eq!(client.stats().corrupt_chunks.get(), 1);
    until("the worker hears of it", || cluster.workers[0].count("Corrupt") == 1).await;
    cluster.workers[1].set_mood(Mood::Corrupts);
    let error = file.read(150_000, 1000).await.unwrap_err();
    assert!(matches!(error, ClientError::Corrupt { .. }), "{error}");
    assert_eq!(error.errno(), rustix::io::Errno::IO.raw_os_error());
    cluster.workers[0].set_mood(Mood::Refuses(Status::NoSuchBlock));
    cluster.workers[1].set_mood(Mood::Well);
    assert!(file.read(150_000, 1000).await.unwrap() == bytes[150_000..151_000]);
    cluster.stop(client).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn bytes_that_were_damaged_once_are_asked_for_again_while_no_other_replica_answers() {
    let bytes = content(30, 200_000);
    for (name, replicas) in [("fs-flip", 1), ("fs-flip-and-restart", 2)] {
        let (mut cluster, _) = fs_mode(name, replicas, &bytes).await;
        cluster.config.client.hedge_percent = 0;
        cluster.config.client.read_timeout = Interval::secs(10);
        let (client, last) = (cluster.client().await, cluster.workers.last().unwrap().clone());
        let file = open(&client, "f").await;
        if replicas > 1 {
            cluster.workers[0].kill().await;
        }
        last.set_mood(Mood::Corrupts);
        let reading = tokio::spawn(async move { file.read(0, MIB).await });
        until("damaged bytes have come", || client.stats().corrupt_chunks.get() > 0).await;
        last.set_mood(Mood::Well);
        assert!(reading.await.unwrap().unwrap() == bytes, "{name}");
        cluster.stop(client).await;
    }
}

/// Two replicas of the bytes, and a client that has read so often that it knows how long an answer takes, and may ask
/// twice some times. A worker that fails is left alone for longer than a test takes.
async fn hedging(name: &str, worker_timeout: Interval, bytes: &[u8]) -> (Cluster, Arc<Client>, File) {
    let (mut cluster, _) = Box::pin(fs_mode(name, 2, bytes)).await;
    cluster.config.client.hedge_percent = 50;
    cluster.config.client.read_timeout = Interval::secs(20);
    cluster.config.client.worker_timeout = worker_timeout;
    cluster.config.client.worker_backoff = Interval::secs(30);
    cluster.config.client.worker_backoff_max = Interval::secs(30);
    let client = Box::pin(cluster.client()).await;
    let file = open(&client, "f").await;
    for number in 0..40 {
        assert!(file.read_direct(number * 100_000, 1000).await.is_ok());
    }
    (cluster, client, file)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slow_replica_is_overtaken_by_another() {
    let bytes = content(25, 4 * MIB);
    let (cluster, client, file) = hedging("fs-hedge", Interval::secs(10), &bytes).await;
    let won = client.stats().hedges_won.get();
    cluster.workers[0].set_mood(Mood::Slow(Duration::from_secs(5)));
    let started = Instant::now();
    assert!(file.read(3_000_000, 1000).await.unwrap() == bytes[3_000_000..3_001_000]);
    assert!(started.elapsed() < Duration::from_secs(4), "{:?}", started.elapsed());
    assert_eq!(client.stats().hedges_won.get(), won + 1);
    cluster.stop(client).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_silent_replica_that_was_overtaken_is_left_alone() {
    let bytes = content(27, 4 * MIB);
    let (cluster, client, file) = hedging("fs-silent", Interval::secs(2), &bytes).await;
    let errors = client.stats().worker_errors.get();
    cluster.workers[0].set_mood(Mood::Hangs);
    assert!(file.read_direct(1_000_000, 1000).await.unwrap() == bytes[1_000_000..1_001_000]);
    until("the silent one counts as failed", || client.stats().worker_errors.get() > errors).await;
    let asked = (client.stats().hedges.get(), cluster.workers[0].count("Read"));
    for at in (0..MIB).step_by(100_000) {
        assert!(file.read_direct(at as u64, 1000).await.unwrap() == bytes[at..at + 1000]);
    }
    assert_eq!((client.stats().hedges.get(), cluster.workers[0].count("Read")), asked, "no read asks it, nor waits");
    cluster.stop(client).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn no_replica_that_failed_lately_is_asked_beside_a_slow_one() {
    let bytes = content(28, 4 * MIB);
    let (cluster, client, file) = hedging("fs-resting", Interval::secs(10), &bytes).await;
    cluster.workers[1].kill().await;
    cluster.workers[0].set_mood(Mood::Slow(Duration::from_secs(1)));
    let errors = client.stats().worker_errors.get();
    assert!(file.read_direct(1_000_000, 1000).await.unwrap() == bytes[1_000_000..1_001_000]);
    assert!(client.stats().worker_errors.get() > errors, "the dead one was asked");
    let hedges = client.stats().hedges.get();
    for at in [0, 100_000, 200_000] {
        assert!(file.read_direct(at as u64, 1000).await.unwrap() == bytes[at..at + 1000]);
    }
    assert_eq!(client.stats().hedges.get(), hedges);
    cluster.stop(client).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reader_overtakes_read_ahead_that_a_replica_is_slow_to_answer() {
    const PART: usize = MIB / 8;
    let bytes = content(29, 4 * MIB);
    let (cluster, client, file) = hedging("fs-ahead", Interval::secs(10), &bytes).await;
    assert!(file.read(0, PART).await.unwrap() == bytes[..PART]);
    cluster.workers[0].set_mood(Mood::Hangs);
    let (started, before) = (Instant::now(), client.stats().readahead_bytes.get());
    // The second read begins the read-ahead, and the third wants what that has asked for.
    for start in [PART, 2 * PART] {
        assert!(file.read(start as u64, PART).await.unwrap() == bytes[start..start + PART], "at {start}");
    }
    assert!(client.stats().readahead_bytes.get() > before, "nothing was read ahead");
    assert!(started.elapsed() < Duration::from_secs(5), "{:?}", started.elapsed());
    cluster.stop(client).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dead_worker_is_left_alone_and_used_again_when_it_is_back() {
    let cluster = Cluster::new("dead-worker", vec![FakeWorker::remote(1).await]).await;
    let files: Vec<Vec<u8>> = (0..20).map(|number| content(number, 10_000)).collect();
    for (number, bytes) in files.iter().enumerate() {
        cluster.put(&number.to_string(), bytes);
    }
    let client = cluster.client().await;
    cluster.workers[0].kill().await;
    let started = Instant::now();
    for (number, bytes) in files.iter().enumerate().take(10) {
        assert!(open(&client, &number.to_string()).await.read(0, MIB).await.unwrap() == *bytes);
    }
    assert!(started.elapsed() < Duration::from_secs(5), "{:?}", started.elapsed());
    assert!(client.stats().worker_errors.get() >= 1);
    let other = FakeWorker::remote(2).await;
    for (number, bytes) in files.iter().enumerate() {
        let etag = lookup(&client, &number.to_string()).await.etag();
        other.put(&number.to_string(), &etag, bytes.clone());
    }
    cluster.master.set_workers(vec![other.entry()]);
    until("the table is known", || client.workers().worker(2).is_some()).await;
    let before = client.stats().bucket_reads.get();
    for (number, bytes) in files.iter().enumerate().skip(10) {
        assert!(open(&client, &number.to_string()).await.read(0, MIB).await.unwrap() == *bytes);
    }
    assert_eq!(client.stats().bucket_reads.get(), before);
    other.kill().await;
    cluster.stop(client).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_table_of_workers_that_comes_late_replaces_no_later_one() {
    let cluster = Cluster::new("late-table", Vec::new()).await;
    let client = cluster.client().await;
    let asked = || cluster.master.count("ListWorkers");
    until("the session has begun", || asked() == 2).await;
    let release = cluster.master.hold_workers();
    let renewed = client.clone();
    let renewed = tokio::spawn(async move { renewed.renew_workers().await });
    until("somebody wants to know how full the workers are", || asked() == 3).await;
    cluster.master.set_workers(vec![Worker { id: 7, ..Worker::default() }]);
    let is_known = || client.workers().worker(7).is_some();
    until("the new worker is known", is_known).await;
    drop(release);
    renewed.await.unwrap();
    assert!(is_known(), "the answer is that of before");
    cluster.stop(client).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_version_that_is_gone_is_stale_and_the_name_is_asked_anew() {
    let sockets = tempfile::tempdir().unwrap();
    let cluster = Cluster::new("stale", vec![FakeWorker::local(1, sockets.path()).await]).await;
    cluster.put("a", &content(8, 1000));
    let client = cluster.client().await;
    let old = lookup(&client, "a").await;
    cluster.master.settled().await;
    // The bucket and the worker have another version, of which the master has not notified the client yet.
    cluster.workers[0].set_mood(Mood::Refuses(Status::VersionChanged));
    let error = client.open_to_read(&old).await.err().unwrap();
    assert_eq!(error.errno(), 116, "{error}");
    assert_eq!((cluster.master.count("Revalidate"), client.stats().stale_reads.get()), (1, 1));
    assert_eq!(client.stats().bucket_reads.get(), 0, "no other source has that version");
    cluster.stop(client).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_name_of_a_version_that_is_gone_leads_to_the_next_at_once() {
    let sockets = tempfile::tempdir().unwrap();
    let cluster = Cluster::new("follow", vec![FakeWorker::local(1, sockets.path()).await]).await;
    // The worker never had this one, and the bucket has it no more.
    cluster.master.put_file(MOUNT_ROOT, "a", "gone", 1000);
    let client = cluster.client().await;
    let old = lookup(&client, "a").await;
    cluster.put("a", &content(9, 1001));
    cluster.master.settled().await;
    assert_eq!(client.open_to_read(&old).await.err().unwrap().errno(), 116);
    let CachedLookup::Hit(new) = client.metadata().cached_lookup(MOUNT_ROOT, b"a") else {
        panic!("the caches know nothing newer");
    };
    assert_ne!(new.inode, old.inode);
    let file = client.open_to_read(&new).await.unwrap();
    assert!(file.read(0, MIB).await.unwrap() == content(9, 1001));
    cluster.stop(client).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn without_any_source_the_read_fails_within_its_deadline() {
    let mut cluster = Cluster::new("nothing", vec![FakeWorker::remote(1).await]).await;
    cluster.config.client.worker_timeout = Interval::millis(700);
    cluster.put("a", &content(9, 2 * MIB));
    let client = cluster.client().await;
    let file = open(&client, "a").await;
    cluster.workers[0].set_mood(Mood::Hangs);
    assert!(cluster.bucket.delete("a"));
    let started = Instant::now();
    let error = file.read(0, 1000).await.unwrap_err();
    assert!(started.elapsed() < Duration::from_secs(5), "{:?}", started.elapsed());
    assert_eq!(error.errno(), 116, "the bucket says that it is gone: {error}");
    cluster.stop(client).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slow_worker_is_overtaken_within_the_share_of_hedging() {
    let mut cluster = Cluster::new("hedge", vec![FakeWorker::remote(1).await]).await;
    cluster.config.client.hedge_percent = 50;
    cluster.config.client.read_timeout = Interval::secs(20);
    cluster.config.client.worker_timeout = Interval::secs(10);
    let bytes = content(10, 1000);
    (0..60).for_each(|number| cluster.put(&number.to_string(), &bytes));
    let client = cluster.client().await;
    for number in 0..40 {
        open(&client, &number.to_string()).await;
    }
    let hedges = || (client.stats().hedges.get(), client.stats().hedges_won.get());
    // On a machine that is busy one of those may have been slow, too.
    let before = hedges();
    cluster.workers[0].set_mood(Mood::Slow(Duration::from_secs(5)));
    let started = Instant::now();
    assert!(open(&client, "41").await.read(0, MIB).await.unwrap() == bytes);
    assert!(started.elapsed() < Duration::from_secs(4), "{:?}", started.elapsed());
    assert_eq!(hedges(), (before.0 + 1, before.1 + 1));
    // The slow request goes on, so that the worker has the block the next time.
    assert_eq!(cluster.workers[0].count("Cancel"), 0);
    cluster.stop(client).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn many_readers_at_once_stay_within_the_budget() {
    for (name, remote) in [("budget-remote", true), ("budget-bucket", false)] {
        let workers = if remote { vec![FakeWorker::remote(1).await] } else { vec![] };
        let mut cluster = Cluster::new(name, workers).await;
        cluster.config.client.memory_budget = ByteSize::mib(8);
        cluster.config.client.readahead_max = ByteSize::mib(4);
        cluster.config.client.read_timeout = Interval::secs(60);
        cluster.config.client.worker_timeout = Interval::secs(60);
        let bytes = content(11, 4 * MIB);
        cluster.put("a", &bytes);
        let client = cluster.client().await;
        let node = lookup(&client, "a").await;
        let files: Vec<_> = (0..200).map(|_| open_cached(&client, &node).unwrap()).collect();
        let reads = files.iter().enumerate().map(|(number, file)| {
            let (client, bytes) = (&client, &bytes);
            async move {
                for step in 0..4 {
                    let start = ((number + step) % 4) * MIB;
                    let read = file.read(start as u64, MIB).await.unwrap();
                    assert!(read == bytes[start..start + MIB]);
                    assert!(client.stats().budget_used_bytes.get() <= 8 * MIB as i64);
                }
            }
        });
        futures::future::join_all(reads).await;
        drop(files);
        client.shutdown().await;
        until("every buffer is given back", || client.stats().budget_used_bytes.get() == 0).await;
        cluster.stop(client).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn reads_that_wait_for_memory_get_that_of_buffers_nobody_reads() {
    for (name, remote, readahead) in
        [("tiny-remote", true, 0), ("tiny-bucket", false, 0), ("tiny-ahead", true, 1), ("tiny-ahead-bucket", false, 1)]
    {
        let workers = if remote { vec![FakeWorker::remote(1).await] } else { vec![] };
        let mut cluster = Cluster::new(name, workers).await;
        cluster.config.client.memory_budget = ByteSize::mib(1);
        cluster.config.client.readahead_max = ByteSize::mib(readahead);
        cluster.config.client.hedge_percent = 0;
        // Idle buffers are swept after 30 s: no read waits for that.
        cluster.config.client.read_timeout = Interval::secs(20);
        cluster.config.client.worker_timeout = Interval::secs(20);
        let files: Vec<Vec<u8>> = (0..8).map(|number| content(number, 2 * MIB)).collect();
        for (number, bytes) in files.iter().enumerate() {
            cluster.put(&number.to_string(), bytes);
        }
        let client = cluster.client().await;
        let started = Instant::now();
        let readers = (0..32).map(|reader| {
            let (client, files) = (&client, &files);
            async move {
                let file = open(client, &(reader % 8).to_string()).await;
                let bytes = &files[reader % 8];
                // Across the boundary of two blocks as well, in sizes of a kernel and odd ones.
                let length = [128 << 10, 300_000][reader / 8 % 2];
                for start in (reader * 1000..bytes.len()).step_by(length) {
                    let read = file.read(start as u64, length).await.unwrap();
                    assert!(read == bytes[start..(start + length).min(bytes.len())], "{reader} at {start}");
                }
            }
        });
        futures::future::join_all(readers).await;
        eprintln!("{name}: {:?}, {} requests", started.elapsed(), client.stats().remote_reads.get());
        assert_eq!(client.stats().read_errors.get(), 0, "{name}");
        assert!(started.elapsed() < Duration::from_secs(15), "{name}: {:?}", started.elapsed());
        cluster.stop(client).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn reads_across_blocks_do_not_wait_for_memory_that_they_hold_themselves() {
    let mut cluster = Cluster::new("across", vec![FakeWorker::remote(1).await]).await;
    cluster.config.client.memory_budget = ByteSize::mib(1);
    cluster.config.client.readahead_max = ByteSize::mib(0);
    cluster.config.client.read_timeout = Interval::secs(20);
    let bytes = content(12, 2 * MIB);
    cluster.put("a", &bytes);
    let client = cluster.client().await;
    let file = open(&client, "a").await;
    let reads = (0..16).map(|number| {
        let (file, bytes, start) = (&file, &bytes, MIB / 2 + number * 1000);
        async move { assert!(file.read(start as u64, MIB).await.unwrap() == bytes[start..start + MIB]) }
    });
    let started = Instant::now();
    futures::future::join_all(reads).await;
    assert!(started.elapsed() < Duration::from_secs(15), "{:?}", started.elapsed());
    cluster.stop(client).await;
}
