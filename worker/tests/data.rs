//! Blocks of fs-mode files from the client's side: over both routes, from many tasks, and through kill -9 of a worker's
//! process.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on should stop there")]

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use cavern_conf::Config;
use cavern_net::{NetError, WorkerPool};
use cavern_proto::data::{self, BlockRef, Range, Status, SyncRequest, WriteRequest, read_request};
use cavern_proto::frame::MAX_WRITE_BYTES;
use cavern_proto::master::{Worker, WorkerTable};
use cavern_security::Transport;
use tokio::net::TcpSocket;
use tokio_util::sync::CancellationToken;

const PATIENCE: Duration = Duration::from_secs(20);
const MIB: u64 = 1 << 20;
/// What a worker that knows no master calls itself.
const WORKER: u64 = 0;
/// Where the process of a worker keeps its blocks, and the port that it serves.
const HOME: &str = "CAVERN_TEST_WORKER_HOME";
const PORT: &str = "CAVERN_TEST_WORKER_PORT";

fn config(home: &Path, port: u16) -> Config {
    let mut config = Config::default();
    config.cluster.masters = vec!["127.0.0.1:9".to_owned()];
    config.worker.listen = format!("127.0.0.1:{port}");
    config.worker.http_listen = "127.0.0.1:0".to_owned();
    config.worker.dirs = vec![format!("[SSD:64MiB]{}", home.display())];
    config
}

fn reservation(block: BlockRef, ranges: Vec<Range>) -> data::ReserveRequest {
    data::ReserveRequest { block: Some(block), ranges, ..Default::default() }
}

fn of_blocks(blocks: Vec<BlockRef>) -> SyncRequest {
    SyncRequest { blocks, failed: Vec::new() }
}

/// A port that nobody else gets while the socket is held, and where one worker after another may listen.
fn held_port() -> (TcpSocket, u16) {
    let held = TcpSocket::new_v4().unwrap();
    held.set_reuseaddr(true).unwrap();
    held.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let port = held.local_addr().unwrap().port();
    (held, port)
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Way {
    Unix,
    Tcp,
}

/// Connections to the one worker, which must come up soon.
async fn connect(home: &Path, port: u16, way: Way) -> Arc<WorkerPool> {
    let mut client = Config::default().client;
    client.local_descriptors = way == Way::Unix;
    let socket_path = home.join("worker.sock").display().to_string();
    let worker = Worker { id: WORKER, data_address: format!("127.0.0.1:{port}"), socket_path, ..Default::default() };
    let until = Instant::now() + PATIENCE;
    loop {
        let pool = WorkerPool::new(&client, Transport::Plain, "test");
        pool.set_table("", &WorkerTable { workers: vec![worker.clone()], ..Default::default() });
        let route = pool.route(WORKER).await.unwrap();
        let as_wanted = (route == cavern_net::Route::Local) == (way == Way::Unix);
        match pool.sync(WORKER, SyncRequest::default(), PATIENCE).await {
            Ok(()) if as_wanted => return pool,
            answer => assert!(Instant::now() < until, "the worker does not come up: {answer:?}"),
        }
        pool.shutdown().await;
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

fn block(inode: u64, block_size: u64) -> BlockRef {
    BlockRef::of_inode("cluster", inode, 1, 0, block_size, 1)
}

fn write_at(block: BlockRef, offset: u32) -> WriteRequest {
    WriteRequest { block: Some(block), offset, ..Default::default() }
}

fn noise(seed: u64, length: usize) -> Vec<u8> {
    (0..length as u64).map(|at| (seed.wrapping_add(at).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 41) as u8).collect()
}

async fn read(pool: &WorkerPool, block: BlockRef) -> (Status, Bytes) {
    let range = Some(Range { offset: 0, length: block.block_size as u32 });
    let items = vec![read_request::Item { block: Some(block), range, part: None }];
    let (reply, payload) = pool.read(WORKER, items, PATIENCE).await.unwrap();
    (reply.items[0].status(), payload)
}

fn status_of<T: std::fmt::Debug>(result: Result<T, NetError>) -> Status {
    match result {
        Err(NetError::WorkerStatus { status, .. }) => status,
        other => panic!("{other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_reserves_writes_syncs_and_frees() {
    let (home, (_held, port)) = (tempfile::tempdir().unwrap(), held_port());
    let stop = CancellationToken::new();
    let worker = tokio::spawn(cavern_worker::run(config(home.path(), port), stop.clone()));
    for way in [Way::Unix, Way::Tcp] {
        let pool = connect(home.path(), port, way).await;
        let one = block(way as u64, 8 * MIB);
        let bytes = noise(1, MAX_WRITE_BYTES as usize);
        let request = WriteRequest { sync: true, ..write_at(one.clone(), 0) };
        let written = pool.write(WORKER, request, bytes.clone().into(), PATIENCE).await.unwrap();
        let too_much = Bytes::from(vec![0; MAX_WRITE_BYTES as usize + 1]);
        let refused = pool.write(WORKER, write_at(one.clone(), 0), too_much, PATIENCE).await;
        assert!(matches!(refused, Err(NetError::Invalid(_))));
        let (status, payload) = read(&pool, one.clone()).await;
        assert!(status == Status::Ok && payload == bytes);

        let ranges = vec![Range { offset: 0, length: 100 }];
        let reserved = pool.reserve(WORKER, reservation(one.clone(), ranges), PATIENCE).await.unwrap();
        assert_eq!(reserved.incarnation, written.incarnation);
        assert_eq!(reserved.descriptor.is_some(), way == Way::Unix);
        if let Some(descriptor) = reserved.descriptor {
            File::from(descriptor).write_all_at(b"through", 3).unwrap();
            pool.sync(WORKER, of_blocks(vec![one.clone()]), PATIENCE).await.unwrap();
            assert_eq!(read(&pool, one.clone()).await.1[3..10], *b"through");
        }
        let all = vec![Range { offset: 0, length: 65 << 20 }];
        let full = pool.reserve(WORKER, reservation(block(50, 128 * MIB), all), PATIENCE).await.unwrap_err();
        assert!(matches!(full, NetError::WorkerStatus { status: Status::NoSpace, .. }), "{full}");
        assert_eq!(status_of(pool.sync(WORKER, of_blocks(vec![block(50, MIB)]), PATIENCE).await), Status::NoSuchBlock);
        let outside = pool.write(WORKER, write_at(one.clone(), 8 << 20), Bytes::from_static(b"x"), PATIENCE).await;
        assert_eq!(status_of(outside), Status::BadRequest);

        // More in flight than a connection takes at a time.
        let writes = (0..24).map(|part| {
            let (pool, bytes) = (pool.clone(), noise(part, 2 << 20));
            let target = block(100 + part / 4, 8 * MIB);
            tokio::spawn(async move {
                let request = write_at(target, (part % 4 * 2 * MIB) as u32);
                pool.write(WORKER, request, bytes.into(), PATIENCE).await.unwrap();
            })
        });
        for write in writes.collect::<Vec<_>>() {
            write.await.unwrap();
        }
        for inode in 0..6 {
            let expected: Vec<u8> = (inode * 4..inode * 4 + 4).flat_map(|part| noise(part, 2 << 20)).collect();
            assert!(read(&pool, block(100 + inode, 8 * MIB)).await.1 == expected);
        }
        let mut gone: Vec<BlockRef> = (0..6).map(|inode| block(100 + inode, 8 * MIB)).collect();
        gone.push(one.clone());
        assert_eq!(pool.free(WORKER, gone).await.unwrap().blocks, 7);
        assert_eq!(read(&pool, one).await.0, Status::NoSuchBlock);
        pool.shutdown().await;
    }
    stop.cancel();
    worker.await.unwrap().unwrap();
}

/// Not a test: the process that [`Process`] starts, this same file run once more.
#[test]
fn process_of_a_worker() {
    let (Ok(home), Ok(port)) = (std::env::var(HOME), std::env::var(PORT)) else { return };
    let config = config(Path::new(&home), port.parse().unwrap());
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(cavern_worker::run(config, CancellationToken::new())).unwrap();
}

struct Process(Child);

impl Process {
    fn start(home: &Path, port: u16) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["process_of_a_worker", "--exact", "--nocapture"]);
        command.env(HOME, home).env(PORT, port.to_string()).stdout(Stdio::null());
        Self(command.spawn().unwrap())
    }

    fn kill(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _gone_already = self.0.kill();
        let _gone_already = self.0.wait();
    }
}

const BLOCK_BYTES: usize = 300_000;

/// What one block must hold. The last change may not have been answered: it is there or not, byte by byte.
struct Known {
    inode: u64,
    bytes: Vec<u8>,
    exists: bool,
    unanswered: Option<(usize, Vec<u8>)>,
}

impl Known {
    fn block(&self) -> BlockRef {
        block(self.inode, BLOCK_BYTES as u64)
    }

    async fn check(&mut self, pool: &WorkerPool) {
        let (status, payload) = read(pool, self.block()).await;
        let unanswered = self.unanswered.take();
        if status == Status::NoSuchBlock {
            assert!(!self.exists, "block {} is gone", self.inode);
            return;
        }
        assert_eq!(status, Status::Ok);
        for (at, (found, known)) in payload.iter().zip(&self.bytes).enumerate() {
            let new = unanswered.as_ref().and_then(|(start, new)| new.get(at.checked_sub(*start)?));
            assert!(found == known || Some(found) == new, "byte {at} of block {} is wrong", self.inode);
        }
        assert_eq!(payload.len(), BLOCK_BYTES);
        self.bytes = payload.to_vec();
        self.exists = true;
    }
}

/// Changes its own blocks until the worker is gone.
async fn change(pool: Arc<WorkerPool>, mut own: Vec<Known>, mut seed: u64, done: Arc<AtomicUsize>) -> Vec<Known> {
    loop {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let pick = |shift: u32, limit: usize| (seed >> shift) as usize % limit;
        let which = pick(60, own.len());
        let known = &mut own[which];
        let start = pick(20, BLOCK_BYTES);
        let bytes = noise(seed, pick(40, BLOCK_BYTES - start).min(60_000));
        let block = known.block();
        let written = if seed >> 33 & 3 == 0 {
            let ranges = vec![Range { offset: start as u32, length: bytes.len() as u32 }];
            match pool.reserve(WORKER, reservation(block.clone(), ranges), PATIENCE).await {
                Ok(data) => {
                    known.exists = true;
                    match data.descriptor {
                        // What a descriptor took is in the file, whatever becomes of the worker.
                        Some(file) => File::from(file)
                            .write_all_at(&bytes, start as u64)
                            .map_err(|error| NetError::Invalid(error.to_string())),
                        None => pool
                            .write(WORKER, write_at(block, start as u32), bytes.clone().into(), PATIENCE)
                            .await
                            .map(drop),
                    }
                }
                Err(error) => Err(error),
            }
        } else {
            let request = WriteRequest { sync: seed >> 35 & 1 == 0, ..write_at(block, start as u32) };
            pool.write(WORKER, request, bytes.clone().into(), PATIENCE).await.map(drop)
        };
        match written {
            Ok(()) => {
                known.exists = true;
                known.bytes[start..start + bytes.len()].copy_from_slice(&bytes);
                done.fetch_add(1, Ordering::Relaxed);
            }
            Err(error) => {
                assert!(matches!(error, NetError::WorkerConnection { .. }), "{error}");
                known.unanswered = Some((start, bytes));
                return own;
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn kill_9_in_the_middle_of_writes_loses_nothing_that_was_answered() {
    let (home, (_held, port)) = (tempfile::tempdir().unwrap(), held_port());
    let fresh = |inode| Known { inode, bytes: vec![0; BLOCK_BYTES], exists: false, unanswered: None };
    let mut own: Vec<Vec<Known>> = (0..4).map(|task| (0..4).map(|block| fresh(task * 4 + block)).collect()).collect();
    let mut worker = Process::start(home.path(), port);
    for round in 0..4 {
        let near = connect(home.path(), port, Way::Unix).await;
        let far = connect(home.path(), port, Way::Tcp).await;
        for known in own.iter_mut().flatten() {
            known.check(&far).await;
        }
        let done = Arc::new(AtomicUsize::new(0));
        let tasks: Vec<_> = (own.drain(..).zip(0u64..))
            .map(|(blocks, task)| {
                let pool = if task % 2 == 0 { near.clone() } else { far.clone() };
                tokio::spawn(change(pool, blocks, round * 1000 + task, done.clone()))
            })
            .collect();
        let until = Instant::now() + PATIENCE;
        while done.load(Ordering::Relaxed) < 100 + 37 * round as usize {
            assert!(Instant::now() < until, "too few writes in {PATIENCE:?}");
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        worker.kill();
        for task in tasks {
            own.push(task.await.unwrap());
        }
        near.shutdown().await;
        far.shutdown().await;
        worker = Process::start(home.path(), port);
    }
    let pool = connect(home.path(), port, Way::Tcp).await;
    for known in own.iter_mut().flatten() {
        known.check(&pool).await;
    }
    // An index that is not what it was takes nothing with it.
    pool.shutdown().await;
    worker.kill();
    std::fs::remove_file(home.path().join("index/CURRENT")).unwrap();
    let _worker = Process::start(home.path(), port);
    let pool = connect(home.path(), port, Way::Tcp).await;
    for known in own.iter_mut().flatten() {
        let existed = known.exists;
        known.check(&pool).await;
        assert_eq!(known.exists, existed);
    }
    assert!(home.path().join("index.damaged-1").exists());
    let blocks: Vec<BlockRef> = own.iter().flatten().map(Known::block).collect();
    let freed: data::FreeReply = pool.free(WORKER, blocks).await.unwrap();
    assert_eq!(freed.blocks as usize, own.iter().flatten().filter(|known| known.exists).count());
    pool.shutdown().await;
}
