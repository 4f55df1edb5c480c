//! A whole worker beside a master that does as the test says: registration, heartbeats, mounts, restart, refusal.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on should stop there")]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use cavern_conf::Config;
use cavern_proto::ContentId;
use cavern_proto::data::{self, BlockRef, ReadReply, ReadRequest, read_request};
use cavern_proto::frame::{FrameHeader, FrameKind, HEADER_BYTES, PROTOCOL_VERSION, encode_frame};
use cavern_proto::master::cluster_server::{Cluster, ClusterServer};
use cavern_proto::master::*;
use cavern_ufs::{MemoryBucket, Ufs};
use cavern_worker::WorkerError;
use parking_lot::Mutex;
use prost::Message;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpSocket, TcpStream, UnixStream};
use tokio::task::JoinHandle;
use tokio_stream::wrappers::TcpListenerStream;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};

const PATIENCE: Duration = Duration::from_secs(20);

#[derive(Default)]
struct Script {
    cluster_id: Mutex<String>,
    registered: Mutex<Vec<RegisterWorkerRequest>>,
    beats: Mutex<Vec<HeartbeatRequest>>,
    mounts: Mutex<MountTable>,
    forget: AtomicBool,
    group_epoch: AtomicU64,
}

#[derive(Clone)]
struct FakeMaster(Arc<Script>);

macro_rules! not_asked {
    ($($method:ident($request:ty) -> $reply:ty;)*) => {
        #[tonic::async_trait]
        impl Cluster for FakeMaster {
            type WatchStream = tokio_stream::Empty<Result<WatchEvent, Status>>;
            type LoadFilesStream = tokio_stream::Empty<Result<Job, Status>>;
            type FsckStream = tokio_stream::Empty<Result<FsckProgress, Status>>;

            async fn register_worker(
                &self,
                request: Request<RegisterWorkerRequest>,
            ) -> Result<Response<RegisterWorkerReply>, Status> {
                self.0.registered.lock().push(request.into_inner());
                let cluster_id = self.0.cluster_id.lock().clone();
                let (worker_id, heartbeat_ms) = (5, 50);
                Ok(Response::new(RegisterWorkerReply { worker_id, cluster_id, heartbeat_ms, ..Default::default() }))
            }

            async fn heartbeat(&self, request: Request<HeartbeatRequest>) -> Result<Response<HeartbeatReply>, Status> {
                let request = request.into_inner();
                let group_epoch = self.0.group_epoch.load(Ordering::Relaxed);
                let is_known = request.group_epoch == group_epoch;
                let masters = if is_known { Vec::new() } else { vec!["127.0.0.1:1".to_owned()] };
                self.0.beats.lock().push(request);
                let register = self.0.forget.swap(false, Ordering::Relaxed);
                let mounts_epoch = self.0.mounts.lock().epoch;
                let (workers_epoch, term) = (1, 0);
                Ok(Response::new(HeartbeatReply {
                    workers_epoch,
                    mounts_epoch,
                    register,
                    group_epoch,
                    term,
                    masters,
                    ..HeartbeatReply::default()
                }))
            }

            async fn get_credentials(&self, _: Request<ListMountsRequest>) -> Result<Response<MountTable>, Status> {
                Ok(Response::new(self.0.mounts.lock().clone()))
            }

            $(async fn $method(&self, _: Request<$request>) -> Result<Response<$reply>, Status> {
                Err(Status::unimplemented(stringify!($method)))
            })*
        }
    };
}

not_asked! {
    watch(tonic::Streaming<WatchRequest>) -> Self::WatchStream;
    list_workers(ListWorkersRequest) -> WorkerTable;
    list_mounts(ListMountsRequest) -> MountTable;
    vend_keys(VendKeysRequest) -> VendedKeys;
    list_claims(ListClaimsRequest) -> ClaimList;
    list_unavailable(ListUnavailableRequest) -> UnavailableFiles;
    drain_worker(DrainWorkerRequest) -> WorkerBlocks;
    get_worker_blocks(WorkerBlocksRequest) -> WorkerBlocks;
    remove_worker(RemoveWorkerRequest) -> RemoveWorkerReply;
    mount(MountRequest) -> MountReply;
    unmount(UnmountRequest) -> UnmountReply;
    update_mount(UpdateMountRequest) -> MountReply;
    index_mount(IndexMountRequest) -> MountReply;
    submit_load(SubmitLoadRequest) -> Job;
    load_files(LoadFilesRequest) -> Self::LoadFilesStream;
    submit_export(SubmitExportRequest) -> Job;
    retry_job(GetJobRequest) -> Job;
    get_job(GetJobRequest) -> Job;
    list_jobs(ListJobsRequest) -> JobList;
    cancel_job(GetJobRequest) -> Job;
    get_persist_status(PersistStatusRequest) -> PersistStatus;
    resolve_lost(ResolveLostRequest) -> ResolveLostReply;
    fsck(FsckRequest) -> Self::FsckStream;
    status(StatusRequest) -> ClusterStatus;
}

struct Running {
    stop: CancellationToken,
    task: JoinHandle<Result<(), WorkerError>>,
}

impl Running {
    fn start(config: &Config) -> Self {
        let stop = CancellationToken::new();
        let task = tokio::spawn(cavern_worker::run(config.clone(), stop.clone()));
        Self { stop, task }
    }

    async fn outcome(self) -> Result<(), WorkerError> {
        tokio::time::timeout(PATIENCE, self.task).await.expect("the worker did not end").unwrap()
    }

    async fn end(self) {
        self.stop.cancel();
        self.outcome().await.unwrap();
    }
}

fn config(dir: &tempfile::TempDir, master: &str) -> Config {
    let mut config = Config::default();
    config.cluster.masters = vec![master.to_owned()];
    config.worker.listen = "127.0.0.1:0".to_owned();
    config.worker.http_listen = "127.0.0.1:0".to_owned();
    config.worker.dirs = vec![format!("[SSD:64MiB]{}", dir.path().display())];
    config
}

async fn serve(script: &Arc<Script>, listener: TcpListener) -> JoinHandle<()> {
    let service = ClusterServer::new(FakeMaster(script.clone()));
    tokio::spawn(async move {
        let server = tonic::transport::Server::builder().add_service(service);
        server.serve_with_incoming(TcpListenerStream::new(listener)).await.unwrap();
    })
}

async fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let until = tokio::time::Instant::now() + PATIENCE;
    while !holds() {
        assert!(tokio::time::Instant::now() < until, "{what}: not within {PATIENCE:?}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

async fn receive(stream: &mut (impl AsyncRead + Unpin)) -> (FrameHeader, Vec<u8>, Vec<u8>) {
    let mut head = [0; HEADER_BYTES];
    stream.read_exact(&mut head).await.unwrap();
    let header = FrameHeader::decode(&head).unwrap();
    let (mut message, mut payload) = (vec![0; header.message_bytes as usize], vec![0; header.payload_bytes as usize]);
    stream.read_exact(&mut message).await.unwrap();
    stream.read_exact(&mut payload).await.unwrap();
    (header, message, payload)
}

async fn greet(stream: &mut (impl AsyncRead + AsyncWrite + Unpin)) -> data::Hello {
    let hello = data::Hello { protocol: PROTOCOL_VERSION, cluster_id: "c1".to_owned(), ..Default::default() };
    stream.write_all(&encode_frame(FrameKind::Hello, 1, &hello, 0)).await.unwrap();
    let (header, message, _) = receive(stream).await;
    assert_eq!(header.kind, FrameKind::Hello);
    data::Hello::decode(&message[..]).unwrap()
}

async fn read(address: &str, block: &BlockRef) -> (data::Status, Vec<u8>) {
    let mut stream = TcpStream::connect(address).await.unwrap();
    greet(&mut stream).await;
    let range = Some(data::Range { offset: 0, length: u32::MAX });
    let items = vec![read_request::Item { block: Some(block.clone()), range, part: None }];
    let request = ReadRequest { items, deadline_ms: 10_000 };
    stream.write_all(&encode_frame(FrameKind::Read, 2, &request, 0)).await.unwrap();
    let (_, message, payload) = receive(&mut stream).await;
    (ReadReply::decode(&message[..]).unwrap().items[0].status(), payload)
}

async fn fetch(address: &str, path: &str) -> String {
    let mut stream = TcpStream::connect(address).await.unwrap();
    let request = format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut reply = String::new();
    stream.read_to_string(&mut reply).await.unwrap();
    reply
}

fn put(bucket: &str, key: &str, bytes: &[u8], config: &Config) -> BlockRef {
    let etag = MemoryBucket::named(bucket).put(key, bytes.to_vec());
    let ufs = Ufs::open(&format!("memory://{bucket}"), &Default::default(), &config.ufs).unwrap();
    let content = ContentId::of_object(ufs.store_id(), key, &etag, bytes.len() as u64, 1 << 20);
    BlockRef {
        content_id: content.as_bytes().to_vec().into(),
        index: 0,
        block_size: 1 << 20,
        mount_id: 3,
        key: key.to_owned(),
        etag,
        object_length: bytes.len() as u64,
        ..BlockRef::default()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_serves_registers_and_survives_restarts() {
    let dir = tempfile::tempdir().unwrap();
    // Held, so that nobody else gets the port while the master is gone.
    let held = TcpSocket::new_v4().unwrap();
    held.set_reuseaddr(true).unwrap();
    held.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let master = held.local_addr().unwrap().to_string();
    let listener = TcpListener::bind(&master).await.unwrap();
    let config = config(&dir, &master);
    let script = Arc::new(Script::default());
    *script.cluster_id.lock() = "c1".to_owned();
    let server = serve(&script, listener).await;

    let worker = Running::start(&config);
    eventually("registration", || !script.registered.lock().is_empty()).await;
    let first = script.registered.lock()[0].clone();
    let me = first.worker.clone().unwrap();
    assert_eq!((first.uuid.len(), first.cluster_id.as_str()), (16, ""));
    assert_eq!(me.socket_path, dir.path().join("worker.sock").to_str().unwrap());
    assert_eq!(me.capacity_bytes, 64 << 20);
    eventually("heartbeats", || script.beats.lock().len() >= 3).await;
    assert_eq!(script.beats.lock()[0].worker_id, 5);

    let block = put("worker-process", "a", &[7; 50_000], &config);
    assert_eq!(read(&me.data_address, &block).await.0, data::Status::UnknownMount);
    let mount = Mount { id: 3, path: "/m".to_owned(), uri: "memory://worker-process".to_owned(), ..Default::default() };
    *script.mounts.lock() = MountTable { epoch: 9, mounts: vec![mount], status: vec![] };
    let beats = script.beats.lock().len();
    eventually("two further heartbeats", || script.beats.lock().len() >= beats + 2).await;
    assert_eq!(read(&me.data_address, &block).await, (data::Status::Ok, vec![7; 50_000]));
    eventually("a report of the block", || script.beats.lock().last().is_some_and(|beat| beat.blocks == 1)).await;

    script.group_epoch.store(4, Ordering::Relaxed);
    let knows = || script.beats.lock().last().is_some_and(|beat| beat.group_epoch == 4);
    eventually("the master hears that its group is known", knows).await;

    script.forget.store(true, Ordering::Relaxed);
    eventually("registration again", || script.registered.lock().len() == 2).await;
    assert_eq!(script.registered.lock()[1].cluster_id, "c1");

    assert!(fetch(&me.http_address, "/healthz").await.contains("\"ok\""));
    let metrics = fetch(&me.http_address, "/metrics").await;
    for line in ["cavern_worker_misses_total 1", "cavern_worker_ufs_bytes_total 50000", "cavern_worker_used_bytes{"] {
        assert!(metrics.contains(line), "{line} is not in\n{metrics}");
    }

    // The master goes; the worker serves on.
    server.abort();
    assert!(server.await.is_err());
    assert_eq!(read(&me.data_address, &block).await.0, data::Status::Ok);
    worker.end().await;
    assert!(TcpStream::connect(&me.data_address).await.is_err());

    // It starts without a master, is for clients who it was, has its blocks, and finds the master when that is back.
    let worker = Running::start(&config);
    let socket = dir.path().join("worker.sock");
    eventually("the socket", || std::os::unix::net::UnixStream::connect(&socket).is_ok()).await;
    assert_eq!(greet(&mut UnixStream::connect(&socket).await.unwrap()).await.worker_id, 5);
    let listener = TcpListener::bind(&master).await.unwrap();
    let server = serve(&script, listener).await;
    eventually("registration after the restart", || script.registered.lock().len() == 3).await;
    let again = script.registered.lock()[2].clone();
    assert_eq!((again.uuid, again.cluster_id.as_str()), (first.uuid, "c1"));
    let me = again.worker.unwrap();
    assert_eq!(me.blocks, 1);
    MemoryBucket::named("worker-process").delete("a");
    assert_eq!(read(&me.data_address, &block).await, (data::Status::Ok, vec![7; 50_000]), "from the disk");
    worker.end().await;
    server.abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn another_clusters_master_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let config = config(&dir, &listener.local_addr().unwrap().to_string());
    let script = Arc::new(Script::default());
    *script.cluster_id.lock() = "c1".to_owned();
    let server = serve(&script, listener).await;
    let worker = Running::start(&config);
    eventually("registration", || !script.beats.lock().is_empty()).await;
    worker.end().await;
    *script.cluster_id.lock() = "c2".to_owned();
    let error = Running::start(&config).outcome().await.unwrap_err();
    assert!(matches!(error, WorkerError::ForeignCluster { .. }), "{error}");
    assert!(error.to_string().contains("worker.json"));
    server.abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn what_keeps_a_worker_from_starting_is_said_in_one_sentence() {
    let dir = tempfile::tempdir().unwrap();
    let good = config(&dir, "127.0.0.1:9");
    let taken = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let file = tempfile::NamedTempFile::new().unwrap();
    type Change<'a> = Box<dyn Fn(&mut Config) + 'a>;
    let cases: Vec<(Change<'_>, &str)> = vec![
        (Box::new(|config| config.worker.dirs = vec!["/no/tier".to_owned()]), "worker.dirs"),
        (Box::new(|config| config.worker.dirs = vec![]), "worker.dirs"),
        (Box::new(|config| config.worker.dirs = vec![format!("[SSD]{}", file.path().display())]), "worker.dirs"),
        (Box::new(|config| config.cluster.masters = vec!["not an address".to_owned()]), "cluster.masters"),
        (Box::new(|config| config.worker.listen = taken.local_addr().unwrap().to_string()), "worker.listen"),
        (Box::new(|config| config.worker.socket = format!("/{}", "x".repeat(200)).into()), "107"),
        (Box::new(|config| config.worker.http_listen = taken.local_addr().unwrap().to_string()), "http_listen"),
    ];
    for (change, expected) in cases {
        let mut config = good.clone();
        change(&mut config);
        let error = Running::start(&config).outcome().await.unwrap_err().to_string();
        assert!(error.contains(expected) && !error.contains('\n'), "{expected}: {error}");
    }
    let worker = Running::start(&good);
    // The file may be there from a start that failed later: an answer shows that this worker has the directory.
    eventually("the socket", || std::os::unix::net::UnixStream::connect(dir.path().join("worker.sock")).is_ok()).await;
    let error = Running::start(&good).outcome().await.unwrap_err();
    assert!(matches!(error, WorkerError::DirectoryInUse(_)), "{error}");
    worker.end().await;
}
