//! Views: found, fetched and read, against workers and buckets that are well and that are not.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "what fails here fails the test")]

mod support;

use std::fs::File;
use std::io::{Read as _, Seek as _};
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use cavern_client::view::OpenView;
use cavern_client::{Client, ClientError};
use cavern_conf::{ByteSize, Config};
use cavern_proto::data::Status;
use cavern_proto::master::View;
use cavern_proto::record::ViewFile;
use cavern_ufs::MemoryBucket;
use support::views::{BuiltView, build_view};
use support::{FakeMaster, FakeWorker, Mood, config, connect, content, until};

const MIB: usize = 1 << 20;

/// A cluster with a view of a mount whose blocks have 1 MiB.
struct Cluster {
    master: FakeMaster,
    bucket: MemoryBucket,
    workers: Vec<FakeWorker>,
    config: Config,
    staging: tempfile::TempDir,
}

impl Cluster {
    async fn new(name: &str, workers: Vec<FakeWorker>) -> Self {
        let master = FakeMaster::start(name).await;
        master.set_workers(workers.iter().map(FakeWorker::entry).collect());
        let (mut config, staging) = (config(&master), tempfile::tempdir().unwrap());
        config.client.staging_directory = staging.path().to_owned();
        config.client.hedge_percent = 0;
        Self { master, bucket: MemoryBucket::named(name), workers, config, staging }
    }

    /// Stores an object in the bucket and at every worker.
    fn put(&self, key: &str, bytes: &[u8]) -> String {
        let etag = self.bucket.put(key, bytes.to_vec());
        self.workers.iter().for_each(|worker| worker.put(key, &etag, bytes.to_vec()));
        etag
    }

    /// Stores an object, and says how a view has it.
    fn file(&self, name: &str, bytes: &[u8]) -> ViewFile {
        let mut file = ViewFile { name: name.to_owned().into(), size: bytes.len() as u64, ..ViewFile::default() };
        file.set_object_etag(&self.put(name, bytes));
        file
    }

    /// Stores a view's object, and has the master know it.
    fn store(&self, built: &BuiltView) -> View {
        let etag = self.put(&built.view.key, &built.object);
        let view = View { etag, ..built.view.clone() };
        self.master.views.put(&view);
        view
    }

    /// The mount is one of files, of which a view has all blocks of generation 7.
    fn fs_mode(&self) {
        self.master.fs_mode();
        self.master.freeze(8);
    }

    /// Views have all blocks of earlier generations than this, as the client knows.
    async fn freeze(&self, below: u32) {
        self.master.freeze(below);
        let epoch = self.master.announce_mounts();
        self.master.settled_by(epoch).await;
    }

    async fn client(&self) -> Arc<Client> {
        connect(&self.config).await
    }

    async fn open(&self, client: &Client, view: &View) -> Arc<OpenView> {
        client.views().open(view).await.unwrap()
    }

    async fn stop(self, client: Arc<Client>) {
        client.shutdown().await;
        for worker in &self.workers {
            worker.kill().await;
        }
    }
}

/// Whole devices, as they should be.
fn devices(built: &BuiltView, contents: &[Vec<u8>]) -> Vec<Vec<u8>> {
    let empty = |blocks: &u32| vec![0; *blocks as usize * 4096];
    let mut devices: Vec<Vec<u8>> = built.view.device_blocks.iter().map(empty).collect();
    for ((device, offset), bytes) in built.places.iter().zip(contents) {
        devices[usize::from(*device) - 1][*offset as usize..][..bytes.len()].copy_from_slice(bytes);
    }
    devices
}

/// Places at random: a number below a limit, and a length.
fn places(count: usize, limit: usize) -> impl Iterator<Item = (usize, usize)> {
    let mut state = 9u64;
    (0..count).map(move |_| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let start = (state >> 20) as usize % limit;
        (start, (1 + (state >> 45) as usize % 300_000).min(limit - start))
    })
}

/// Reads a range in both ways: all of it, or an error.
async fn read(view: &OpenView, device: u16, range: Range<usize>) -> Result<Vec<u8>, ClientError> {
    let mut buffer = vec![0xee; range.len()];
    let now = view.read_device_now(device, range.start as u64, &mut buffer).then_some(buffer);
    let read = view.read_device(device, range.start as u64, range.len()).await?;
    assert_eq!(read.len(), range.len(), "never fewer");
    assert!(now.is_none_or(|now| now == read), "both say the same");
    Ok(read.to_vec())
}

#[tokio::test(flavor = "multi_thread")]
async fn any_range_of_a_device_is_what_the_files_are_there() {
    let sockets = tempfile::tempdir().unwrap();
    let local = FakeWorker::local(1, sockets.path()).await;
    for (name, workers) in [
        ("view-local", vec![local]),
        ("view-remote", vec![FakeWorker::remote(1).await, FakeWorker::remote(2).await]),
        ("view-bucket", vec![]),
    ] {
        let cluster = Cluster::new(name, workers).await;
        let sizes = (0..40).map(|number| 1 + number * number * 97).chain([4096, 3 * MIB + 5, 50_000, MIB, 2 * MIB]);
        let contents: Vec<_> = sizes.enumerate().map(|(seed, size)| content(seed as u64, size)).collect();
        let files: Vec<_> =
            contents.iter().enumerate().map(|(number, bytes)| cluster.file(&format!("f{number:03}"), bytes)).collect();
        let built = build_view(3, "v", &files, &[0, 7, 41], &[20, 42]);
        let view = cluster.store(&built);
        let client = cluster.client().await;
        let open = cluster.open(&client, &view).await;
        let expected = devices(&built, &contents);
        for (device, expected) in (1..).zip(&expected) {
            assert_eq!(open.device_bytes(device), Some(expected.len() as u64));
            for (start, length) in places(60, expected.len()) {
                let got = read(&open, device, start..start + length).await.unwrap();
                assert!(got == expected[start..start + length], "{name}: {length} bytes at {start} of {device}");
            }
            let end = expected.len();
            assert!(read(&open, device, end - 1..end + 1).await.is_err(), "there is no more");
            assert!(!open.read_device_now(device, end as u64, &mut [0]));
        }
        assert_eq!((open.device_bytes(0), open.device_bytes(4)), (None, None));

        // The same files by their names.
        let root = open.image().root().unwrap();
        for (number, bytes) in contents.iter().enumerate() {
            let file = open.image().lookup(&root, format!("f{number:03}").as_bytes()).unwrap().unwrap();
            let nid = file.nid;
            assert!(open.read_file(nid, 0, bytes.len() + 10).await.unwrap() == *bytes, "{name}: {number}");
            let middle = bytes.len() / 2;
            assert!(
                open.read_file(nid, middle as u64, 9).await.unwrap()
                    == bytes[middle..].get(..9).unwrap_or(&bytes[middle..])
            );
            assert_eq!(open.read_file(nid, bytes.len() as u64, 5).await.unwrap().len(), 0);
        }
        let stats = client.stats();
        assert!(stats.view_reads.get() > 180 && stats.view_bytes.get() > 0);
        assert_eq!((stats.view_errors.get(), stats.read_errors.get(), stats.stale_reads.get()), (3, 0, 0), "{name}");
        cluster.stop(client).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_there_in_memory_is_read_without_a_request() {
    let sockets = tempfile::tempdir().unwrap();
    let cluster = Cluster::new("view-warm", vec![FakeWorker::local(1, sockets.path()).await]).await;
    let contents = [content(1, 50_000), content(2, 900_000)];
    let files = [cluster.file("a", &contents[0]), cluster.file("b", &contents[1])];
    let built = build_view(3, "v", &files, &[], &[]);
    let view = cluster.store(&built);
    let client = cluster.client().await;
    let open = cluster.open(&client, &view).await;
    let device = devices(&built, &contents).remove(0);
    let mut buffer = vec![0xee; device.len()];
    assert!(!open.read_device_now(1, 0, &mut buffer));
    // A byte of a small file has all of it come.
    assert_eq!(open.read_device(1, 100, 1).await.unwrap(), device[100..101]);
    assert_eq!(open.read_device(1, 53_248 + 800_000, 1).await.unwrap(), device[53_248 + 800_000..][..1]);
    let worker = &cluster.workers[0];
    let asked = worker.count("Open") + worker.count("Fill") + worker.count("Read");
    assert!(open.read_device_now(1, 0, &mut buffer) && buffer == device);
    assert_eq!(worker.count("Open") + worker.count("Fill") + worker.count("Read"), asked);
    cluster.stop(client).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_that_is_nowhere_is_an_error_of_whatever_has_a_byte_of_it() {
    let mut cluster = Cluster::new("view-gone", vec![FakeWorker::remote(1).await]).await;
    cluster.config.client.readahead_max = ByteSize::mib(0);
    let contents = [content(1, 50_000), content(2, 10_000), content(3, 70_000)];
    let names = ["a", "b", "c"];
    let files: Vec<_> = names.iter().zip(&contents).map(|(name, bytes)| cluster.file(name, bytes)).collect();
    let built = build_view(3, "v", &files, &[], &[]);
    let view = cluster.store(&built);
    let client = cluster.client().await;
    let open = cluster.open(&client, &view).await;
    let device = devices(&built, &contents).remove(0);
    let (_, of_b) = built.places[1];
    let of_b = of_b as usize..of_b as usize + 10_000;
    // The bucket has another object, and the worker has none: it says what the bucket said.
    cluster.bucket.put("b", content(9, 10_000));
    cluster.workers[0].set_mood(Mood::Refuses(Status::VersionChanged));
    for range in [of_b.clone(), of_b.start - 5..of_b.start + 1, of_b.end - 1..of_b.end + 5000, 0..device.len()] {
        let error = read(&open, 1, range.clone()).await.unwrap_err();
        let text = error.to_string();
        assert!(matches!(error, ClientError::View { .. }) && error.errno() == 5, "{range:?}: {text}");
        assert!(text.starts_with("view v: b (/m/b, bytes ") && text.contains("version"), "{text}");
    }
    for range in [0..of_b.start, of_b.end..device.len()] {
        assert!(read(&open, 1, range.clone()).await.unwrap() == device[range]);
    }
    assert_eq!(client.stats().view_errors.get(), 4);

    // Another worker has the block still.
    cluster.workers[0].set_mood(Mood::Well);
    assert!(read(&open, 1, of_b.clone()).await.unwrap() == device[of_b]);
    cluster.stop(client).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bucket_that_keeps_versions_has_what_the_view_has() {
    let cluster = Cluster::new("view-versions", vec![]).await;
    cluster.bucket.keep_versions();
    let contents = [content(1, 50_000), content(2, 3 * MIB)];
    let files = [cluster.file("a", &contents[0]), cluster.file("b", &contents[1])];
    let built = build_view(3, "v", &files, &[], &[]);
    let view = cluster.store(&built);
    cluster.bucket.put("a", content(8, 50_000));
    cluster.bucket.delete("b");
    let client = cluster.client().await;
    let open = cluster.open(&client, &view).await;
    let device = devices(&built, &contents).remove(0);
    for (start, length) in places(50, device.len()) {
        assert!(read(&open, 1, start..start + length).await.unwrap() == device[start..start + length]);
    }
    cluster.stop(client).await;
}

/// A file of an fs-mode mount in blocks of 1 MiB, all of generation 7 but for those that are not there.
fn blocks_file(name: &str, inode: u64, size: usize, missing: &[usize]) -> ViewFile {
    let generation = |index: usize| if missing.contains(&index) { 0 } else { 8 };
    let generations = (0..size.div_ceil(MIB)).map(generation).collect();
    ViewFile { name: name.to_owned().into(), size: size as u64, inode, generations, ..ViewFile::default() }
}

#[tokio::test(flavor = "multi_thread")]
async fn blocks_of_files_are_read_where_their_masters_say() {
    let sockets = tempfile::tempdir().unwrap();
    let local = FakeWorker::local(1, sockets.path()).await;
    for (name, workers) in [("view-blocks-local", vec![local]), ("view-blocks", vec![FakeWorker::remote(1).await])] {
        let cluster = Cluster::new(name, workers).await;
        cluster.fs_mode();
        let bytes = content(4, 3 * MIB + 1234);
        // All blocks are this at the worker; the file has no second block, and an object for a part of that.
        cluster.workers[0].put("", "", bytes.clone());
        let old = content(5, MIB + 5000);
        let mut file = blocks_file("f", 77, bytes.len(), &[1]);
        file.set_object_etag(&cluster.put("f", &old));
        (file.object_size, file.valid) = (Some(old.len() as u64), Some(MIB as u64 + 4321));
        let mut expected = bytes.clone();
        expected[MIB..2 * MIB].fill(0);
        expected[MIB..MIB + 4321].copy_from_slice(&old[MIB..MIB + 4321]);
        let built = build_view(3, "v", &[file], &[], &[]);
        let view = cluster.store(&built);
        cluster.master.views.locate(77, &[&[1], &[], &[1], &[1]]);
        let client = cluster.client().await;
        let open = cluster.open(&client, &view).await;
        let device = devices(&built, &[expected]).remove(0);
        for (start, length) in places(40, device.len()) {
            let got = read(&open, 1, start..start + length).await.unwrap();
            assert!(got == device[start..start + length], "{name}: {length} at {start}");
        }
        assert_eq!(cluster.master.views.count("LocateBlocks"), 1, "{name}: it is known then");
        cluster.stop(client).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_block_that_no_worker_has_is_read_of_an_object_that_is_the_whole_file() {
    let cluster = Cluster::new("view-blocks-lost", vec![FakeWorker::remote(1).await]).await;
    cluster.fs_mode();
    let bytes = content(6, MIB + 100_000);
    let whole = ViewFile { is_whole: true, ..blocks_file("whole", 78, bytes.len(), &[]) };
    let mut files = [blocks_file("alone", 77, bytes.len(), &[]), whole];
    files[1].set_object_etag(&cluster.put("whole", &bytes));
    let built = build_view(3, "v", &files, &[], &[]);
    let view = cluster.store(&built);
    cluster.master.views.locate(77, &[&[1], &[1]]);
    cluster.master.views.locate(78, &[&[1], &[1]]);
    let client = cluster.client().await;
    let open = cluster.open(&client, &view).await;
    cluster.workers[0].set_mood(Mood::Refuses(Status::NoSuchBlock));
    for _ in 0..2 {
        let error = read(&open, 1, 0..5000).await.unwrap_err().to_string();
        assert!(error.starts_with("view v: inode 77 (/m/alone, bytes 0-4999) cannot be read: "), "{error}");
    }
    assert_eq!(cluster.master.views.count("LocateBlocks"), 4, "what is known may have changed");
    let of_whole = built.places[1].1 as usize;
    // A worker that has neither gives way to the bucket.
    assert!(read(&open, 1, of_whole..of_whole + bytes.len()).await.unwrap() == bytes);
    cluster.stop(client).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn blocks_that_nobody_has_frozen_any_more_are_read_of_no_view() {
    let sockets = tempfile::tempdir().unwrap();
    let local = FakeWorker::local(1, sockets.path()).await;
    for (name, workers) in [("view-thawed-local", vec![local]), ("view-thawed", vec![FakeWorker::remote(1).await])] {
        let cluster = Cluster::new(name, workers).await;
        cluster.fs_mode();
        let (bytes, after) = (content(4, MIB), content(5, MIB));
        cluster.workers[0].put_data((77, 7, 0), bytes.clone());
        let built = build_view(3, "v", &[blocks_file("f", 77, MIB, &[])], &[], &[]);
        let view = cluster.store(&built);
        cluster.master.views.locate(77, &[&[1]]);
        let client = cluster.client().await;
        let open = cluster.open(&client, &view).await;
        for _ in 0..2 {
            assert!(read(&open, 1, 0..MIB).await.unwrap() == bytes, "{name}");
        }
        assert_eq!(cluster.master.views.count("LocateBlocks"), 1);
        // Another view has frozen less: who is not sure asks.
        cluster.freeze(7).await;
        let mut buffer = vec![0; MIB];
        assert!(!open.read_device_now(1, 0, &mut buffer));
        assert!(read(&open, 1, 0..MIB).await.unwrap() == bytes, "{name}");
        assert_eq!(cluster.master.views.count("LocateBlocks"), 2);
        // The view is gone, and the block is written to.
        cluster.master.views.remove(3);
        cluster.freeze(0).await;
        cluster.workers[0].put_data((77, 7, 0), after);
        for range in [0..MIB, 5000..6000] {
            assert!(read(&open, 1, range).await.is_err(), "{name}");
        }
        cluster.stop(client).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_files_that_follow_are_there_before_they_are_read() {
    let sockets = tempfile::tempdir().unwrap();
    let local = FakeWorker::local(1, sockets.path()).await;
    for (name, workers) in [("view-ahead-local", vec![local]), ("view-ahead", vec![FakeWorker::remote(1).await])] {
        let cluster = Cluster::new(name, workers).await;
        let contents: Vec<_> = (0..12).map(|seed| content(seed, 50_000)).collect();
        let files: Vec<_> =
            contents.iter().enumerate().map(|(number, bytes)| cluster.file(&format!("f{number:03}"), bytes)).collect();
        let built = build_view(3, "v", &files, &[], &[]);
        let view = cluster.store(&built);
        let client = cluster.client().await;
        let open = cluster.open(&client, &view).await;
        let start = |number: usize| built.places[number].1;
        for (number, content) in contents.iter().enumerate().take(3) {
            assert_eq!(open.read_device(1, start(number), 50_000).await.unwrap(), *content);
        }
        let mut buffer = vec![0; 50_000];
        until("the next ones are here", || open.read_device_now(1, start(8), &mut buffer)).await;
        assert!(buffer == contents[8], "{name}");
        cluster.stop(client).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_image_is_fetched_once_on_a_host_and_then_needs_no_master() {
    let cluster = Cluster::new("view-copies", vec![FakeWorker::remote(1).await]).await;
    let bytes = content(1, 50_000);
    let built = build_view(3, "v", &[cluster.file("a", &bytes)], &[], &[]);
    let view = cluster.store(&built);
    let (one, other) = (cluster.client().await, cluster.client().await);
    let (here, there, again) = futures::join!(one.views().open(&view), one.views().open_id(3), one.views().open(&view));
    let here = here.unwrap();
    assert!(Arc::ptr_eq(&here, &there.unwrap()) && Arc::ptr_eq(&here, &again.unwrap()));
    assert!(Arc::ptr_eq(&one.views().opened(3).unwrap(), &here) && one.views().opened(4).is_none());
    assert_eq!(one.stats().view_fetches.get(), 1);
    let copied = std::fs::read(here.image_path()).unwrap();
    let kept = copied.len();
    assert!(copied == built.object[..kept] && kept > 8192, "image, pages and index");
    assert!(here.image_path().starts_with(cluster.staging.path()));

    cluster.master.kill();
    let shown = other.views().open_id(3).await.unwrap();
    assert_eq!(other.stats().view_fetches.get(), 0, "it is on this host");
    assert!(shown.read_device(1, 0, 50_000).await.unwrap() == bytes);
    assert_eq!(other.views().list().await.unwrap().iter().map(|view| view.id).collect::<Vec<_>>(), [3]);
    assert_eq!(other.views().named("v").await.unwrap(), view);
    assert!(other.views().named("w").await.is_err_and(|error| !matches!(error, ClientError::NotFound(_))));
    assert!(other.views().open_id(4).await.is_err());
    one.shutdown().await;
    cluster.stop(other).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn views_are_found_by_name_and_what_is_gone_leaves() {
    let cluster = Cluster::new("view-names", vec![]).await;
    let client = cluster.client().await;
    let views = client.views();
    assert!(views.list().await.unwrap().is_empty());
    assert!(matches!(views.named("v").await, Err(ClientError::NotFound(_))));
    let view = cluster.store(&build_view(3, "v", &[cluster.file("a", b"bytes")], &[], &[]));
    assert_eq!(views.named("v").await.unwrap(), view, "at once");
    let open = cluster.open(&client, &view).await;
    let copy = open.image_path().to_owned();
    cluster.master.views.remove(3);
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(10);
    while views.opened(3).is_some() {
        assert!(std::time::Instant::now() < deadline, "the list is renewed");
        views.list().await.unwrap();
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
    assert!(matches!(views.named("v").await, Err(ClientError::NotFound(_))));
    assert_eq!(open.read_device(1, 0, 5).await.unwrap(), "bytes", "whoever shows it reads on");
    views.sweep().await;
    assert!(copy.exists(), "while it is shown");
    drop(open);
    views.sweep().await;
    assert!(!copy.exists());
    assert!(matches!(views.open_id(3).await, Err(ClientError::NotFound(_))));
    cluster.stop(client).await;
}

/// Names of all files below a directory.
fn files_below(directory: &Path) -> usize {
    let entries = std::fs::read_dir(directory).unwrap().map(Result::unwrap);
    entries.map(|entry| if entry.path().is_dir() { files_below(&entry.path()) } else { 1 }).sum()
}

#[tokio::test(flavor = "multi_thread")]
async fn an_object_that_is_not_what_was_stored_is_not_shown() {
    let cluster = Cluster::new("view-damaged", vec![]).await;
    let built = build_view(3, "v", &[cluster.file("a", &content(1, 50_000))], &[], &[]);
    let length = built.object.len();
    let client = cluster.client().await;
    let mut flipped = built.object.clone();
    flipped[5000] ^= 1;
    for (object, said) in [(flipped, "hash"), (built.object[..length - 20].to_vec(), "cannot be read")] {
        let etag = cluster.bucket.put(&built.view.key, object);
        let view = View { etag, ..built.view.clone() };
        // Only what a host keeps is read for that: the end is not missed.
        let error = match client.views().open(&view).await {
            Err(error) => error.to_string(),
            Ok(_) if said == "cannot be read" => continue,
            Ok(_) => panic!("it is another image"),
        };
        assert!(error.contains(said) && error.starts_with("view v: ") && error.contains(&view.key), "{error}");
        assert_eq!(files_below(cluster.staging.path()), 0);
    }
    cluster.stop(client).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_image_is_looked_into_without_waiting_where_it_is_in_memory() {
    let cluster = Cluster::new("view-look", vec![]).await;
    let built = build_view(3, "v", &[cluster.file("a", &content(1, 50_000))], &[], &[]);
    let view = cluster.store(&built);
    let client = cluster.client().await;
    let open = cluster.open(&client, &view).await;
    let nid = open.look(|_, image| Ok(image.root()?.nid)).await.unwrap();
    assert!(open.look_now(|_, image| image.root()).is_none_or(|root| root.unwrap().nid == nid));
    let failed = open.look(|_, image| image.inode(1 << 40)).await.unwrap_err();
    assert!(failed.to_string().starts_with("view v: "), "{failed}");
    // What cannot be read at once is left to a thread that may wait, and is an error then.
    File::options().write(true).open(open.image_path()).unwrap().set_len(4096).unwrap();
    assert!(open.look_now(|_, image| image.root()).is_none());
    let failed = open.look(|_, image| image.root()).await.unwrap_err();
    assert!(failed.to_string().starts_with("view v: "), "{failed}");
    assert!(matches!(open.read_file(nid, 0, 5).await, Err(ClientError::View { .. })));
    assert_eq!(client.stats().view_errors.get(), 1);
    // Whoever looks the view up has its image fetched anew, for a name that leads to none.
    std::fs::remove_file(open.image_path()).unwrap();
    let anew = cluster.open(&client, &view).await;
    assert!(!Arc::ptr_eq(&anew, &open) && anew.image_path().exists());
    assert_eq!((anew.image().root().unwrap().nid, client.stats().view_fetches.get()), (nid, 2));
    cluster.stop(client).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_view_is_exported_as_it_is_stored() {
    let cluster = Cluster::new("view-export", vec![FakeWorker::remote(1).await]).await;
    let built = build_view(3, "v", &[cluster.file("a", &content(1, 50_000))], &[], &[]);
    let view = cluster.store(&built);
    let client = cluster.client().await;
    let mut file = tempfile::tempfile().unwrap();
    let last = std::sync::atomic::AtomicU64::new(0);
    let told = |bytes| last.store(bytes, std::sync::atomic::Ordering::Relaxed);
    client.views().export(&view, file.try_clone().unwrap(), told).await.unwrap();
    let mut exported = Vec::new();
    file.rewind().unwrap();
    file.read_to_end(&mut exported).unwrap();
    assert!(exported == built.object);
    assert_eq!(last.into_inner(), view.object_bytes);

    // The end is what it is to be, too.
    let mut other = built.object.clone();
    *other.last_mut().unwrap() ^= 1;
    let etag = cluster.put(&view.key, &other);
    let view = View { etag, ..view };
    let to: File = tempfile::tempfile().unwrap();
    assert!(matches!(client.views().export(&view, to, |_| {}).await, Err(ClientError::View { .. })));
    cluster.stop(client).await;
}
