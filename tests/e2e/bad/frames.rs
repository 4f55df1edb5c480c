//! Well-formed frames of the data plane, and well-formed calls to the master, whose values are absurd: each is refused
//! by itself, in time, and nobody else notices.
//!
//! Frames, over TCP and the Unix socket: a request before the hello, another protocol, another cluster, a hello that is
//! too long, an answer for a request, an unknown kind, reserved bytes, a payload, a message of 5 MB, one that does not
//! decode, two million empty items, descriptors over TCP; blocks with a short content id, a key of 10 KB, a block size
//! of 0 and 2^64, past the end, an offset of 2^32, an unknown mount, bytes of another key, the same range a million
//! times, unknown requests to cancel, chunks that are not there.
//!
//! Calls: unknown inodes, empty, long and illegal names, a name of 10 MB, deep and long paths, too many directories, a
//! mount of nothing, heartbeats of strangers, registrations without sense, unknown jobs.

use std::io::Write as _;
use std::time::Duration;

use cavern_proto::data::{
    BlockRef, Cancel, CorruptRequest, Failure, FillReply, FillRequest, FreeRequest, Hello, OpenReply, OpenRequest,
    QueryReply, QueryRequest, Range, ReadReply, ReadRequest, Status, open_request, read_request,
};
use cavern_proto::frame::{FrameHeader, FrameKind, HEADER_BYTES, PROTOCOL_VERSION, encode_frame};
use cavern_proto::master::cluster_client::ClusterClient;
use cavern_proto::master::namespace_client::NamespaceClient;
use cavern_proto::master::*;
use cavern_tests::{Cluster, Options, eventually};
use prost::Message;
use tonic::Code;
use tonic::transport::Channel;

use super::CONF;
use super::ports::{Port, Reader, Stream, Watched};

const PATIENCE: Duration = Duration::from_secs(10);

fn frame(kind: FrameKind, id: u64, message: &impl Message) -> Vec<u8> {
    encode_frame(kind, id, message, 0)
}

fn hello() -> Hello {
    Hello { protocol: PROTOCOL_VERSION, peer: "test".to_owned(), ..Hello::default() }
}

/// The next frame that answers a request; `None` when the connection ends.
fn next(stream: &mut dyn Stream) -> Option<(FrameHeader, Vec<u8>)> {
    let mut head = [0; HEADER_BYTES];
    stream.read_exact(&mut head).ok()?;
    let header = FrameHeader::decode(&head).unwrap();
    let mut message = vec![0; header.message_bytes as usize];
    stream.read_exact(&mut message).ok()?;
    let mut payload = vec![0; header.payload_bytes as usize];
    stream.read_exact(&mut payload).ok()?;
    Some((header, message))
}

/// A connection that has said hello.
fn greeted(port: &Port) -> Box<dyn Stream> {
    let mut stream = port.connect(PATIENCE);
    stream.write_all(&frame(FrameKind::Hello, 0, &hello())).unwrap();
    let (header, _) = next(&mut *stream).expect("a greeting");
    assert_eq!(header.kind, FrameKind::Hello);
    stream
}

/// A failure, then the end of the connection.
#[track_caller]
fn assert_cut_off(what: &str, mut stream: Box<dyn Stream>, bytes: &[u8]) {
    // It may be cut off before all is sent.
    let _ = stream.write_all(bytes);
    while let Some((header, message)) = next(&mut *stream) {
        assert_eq!(header.kind, FrameKind::Failure, "{what}");
        let failure = Failure::decode(&*message).unwrap();
        assert!(failure.status() == Status::BadRequest && !failure.message.is_empty(), "{what}: {failure:?}");
    }
}

/// A block of the first object, as a client names it.
fn good(entry: &Entry) -> BlockRef {
    let size = entry.attr.unwrap().size;
    BlockRef {
        content_id: vec![7; 16].into(),
        index: 0,
        block_size: 64 << 20,
        mount_id: entry.mount_id,
        key: entry.key.clone(),
        etag: entry.etag.clone(),
        object_length: size,
        ..BlockRef::default()
    }
}

/// The statuses of an answer.
fn statuses(header: FrameHeader, message: &[u8]) -> Vec<Status> {
    match header.kind {
        FrameKind::ReadReply => ReadReply::decode(message).unwrap().items.iter().map(|item| item.status()).collect(),
        FrameKind::OpenReply => OpenReply::decode(message).unwrap().items.iter().map(|item| item.status()).collect(),
        FrameKind::FillReply => FillReply::decode(message).unwrap().items.iter().map(|item| item.status()).collect(),
        FrameKind::Failure => vec![Failure::decode(message).unwrap().status()],
        FrameKind::QueryReply => {
            let items = QueryReply::decode(message).unwrap().items;
            items.iter().map(|item| if item.known { Status::Ok } else { Status::NotFound }).collect()
        }
        FrameKind::FreeReply | FrameKind::CorruptReply => vec![],
        other => panic!("{other:?} answers nothing"),
    }
}

fn broken_frames(cluster: &str) -> Vec<(&'static str, bool, Vec<u8>)> {
    let header = |at: usize, value: u8| {
        let mut bytes = frame(FrameKind::Query, 5, &QueryRequest::default());
        bytes[at] = value;
        bytes
    };
    let raw = |kind: FrameKind, message: &[u8]| {
        let header = FrameHeader { kind, request_id: 3, message_bytes: message.len() as u32, payload_bytes: 0 };
        [&header.encode()[..], message].concat()
    };
    let bomb = [0x0a, 0].repeat((4 << 20) / 2);
    vec![
        ("a request before the hello", false, frame(FrameKind::Query, 1, &QueryRequest::default())),
        ("another protocol", false, frame(FrameKind::Hello, 0, &Hello { protocol: 99, ..hello() })),
        ("another cluster", false, frame(FrameKind::Hello, 0, &Hello { cluster_id: format!("{cluster}x"), ..hello() })),
        ("a long hello", false, frame(FrameKind::Hello, 0, &Hello { peer: "p".repeat(5000), ..hello() })),
        ("an answer", true, frame(FrameKind::ReadReply, 1, &ReadReply::default())),
        ("an unknown kind", true, header(4, 99)),
        ("reserved bytes", true, header(6, 1)),
        ("a payload", true, header(20, 1)),
        ("a message of 5 MB", true, header(18, 80)),
        ("a message of 4 GB", true, header(19, 0xff)),
        ("a message that does not decode", true, raw(FrameKind::Read, &[0x0a, 0xff, 0xff])),
        ("a group that does not end", true, raw(FrameKind::Read, &[0x0b; 1000])),
        ("two million empty items to read", true, raw(FrameKind::Read, &bomb)),
        ("two million empty items to fill", true, raw(FrameKind::Fill, &bomb)),
        ("two million empty blocks to free", true, raw(FrameKind::Free, &bomb)),
        ("two million empty blocks to look for", true, raw(FrameKind::Query, &bomb)),
    ]
}

fn absurd_requests(good: &BlockRef) -> Vec<(&'static str, FrameKind, Vec<u8>)> {
    let read = |block: BlockRef, offset, length| {
        let item = read_request::Item { block: Some(block), range: Some(Range { offset, length }), part: None };
        ReadRequest { items: vec![item], deadline_ms: 1000 }.encode_to_vec()
    };
    let want = |block: BlockRef, want: Vec<Range>| FillRequest {
        items: vec![open_request::Item { block: Some(block), want }],
        deadline_ms: 1000,
    };
    let all = |change: fn(&mut BlockRef)| {
        let mut block = good.clone();
        change(&mut block);
        read(block, 0, 100)
    };
    let whole = Range { offset: 0, length: u32::MAX };
    vec![
        (
            "no block at all",
            FrameKind::Read,
            ReadRequest { items: vec![Default::default()], deadline_ms: 0 }.encode_to_vec(),
        ),
        ("a short content id", FrameKind::Read, all(|block| block.content_id = vec![1; 3].into())),
        ("a long key", FrameKind::Read, all(|block| block.key = "k".repeat(10_000))),
        ("an empty key", FrameKind::Read, all(|block| block.key = String::new())),
        ("a long etag", FrameKind::Read, all(|block| block.etag = "e".repeat(10_000))),
        ("a block size of 0", FrameKind::Read, all(|block| block.block_size = 0)),
        ("a block size of 2^64", FrameKind::Read, all(|block| block.block_size = u64::MAX)),
        ("a block past the end", FrameKind::Read, all(|block| block.index = u32::MAX)),
        (
            "an object of 2^64 bytes",
            FrameKind::Read,
            all(|block| {
                block.object_length = u64::MAX;
                block.index = u32::MAX;
            }),
        ),
        ("an empty object", FrameKind::Read, all(|block| block.object_length = 0)),
        ("an unknown mount", FrameKind::Read, all(|block| block.mount_id = u32::MAX)),
        ("bytes under a name that is not theirs", FrameKind::Read, all(|_| ())),
        ("an offset of 2^32", FrameKind::Read, read(good.clone(), u32::MAX, u32::MAX)),
        ("the same range a million times", FrameKind::Fill, want(good.clone(), vec![whole; 500_000]).encode_to_vec()),
        (
            "a block that nobody has",
            FrameKind::Query,
            QueryRequest { blocks: vec![good.clone(), BlockRef::default()], held: None }.encode_to_vec(),
        ),
        (
            "a block that nobody has, to free",
            FrameKind::Free,
            FreeRequest { blocks: vec![good.clone()] }.encode_to_vec(),
        ),
        (
            "chunks that are not there",
            FrameKind::Corrupt,
            CorruptRequest { block: Some(good.clone()), chunks: vec![u32::MAX; 100_000] }.encode_to_vec(),
        ),
    ]
}

fn up() -> (Cluster, std::collections::BTreeMap<String, bytes::Bytes>) {
    let cluster = Cluster::up(Options { conf: CONF.to_owned(), ..Options::default() });
    let tree = cluster.seed("bucket", "", 10, 30_000);
    cluster.mount("s3://bucket", "/data", &[]);
    cluster.assert_tree("data", "", &tree);
    (cluster, tree)
}

/// The clients of a master, and a runtime to call it from.
struct Master {
    runtime: tokio::runtime::Runtime,
    namespace: NamespaceClient<Channel>,
    cluster: ClusterClient<Channel>,
}

impl Master {
    fn of(cluster: &Cluster) -> Self {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let endpoint = Channel::from_shared(format!("http://{}", cluster.at_start.masters[0].grpc)).unwrap();
        let channel = runtime.block_on(endpoint.connect()).unwrap();
        Self { runtime, namespace: NamespaceClient::new(channel.clone()), cluster: ClusterClient::new(channel) }
    }

    /// The status of a call that must fail, in time.
    #[track_caller]
    fn refused<T>(&self, what: &str, call: impl Future<Output = Result<T, tonic::Status>>) {
        let answer = self.runtime.block_on(async { tokio::time::timeout(PATIENCE, call).await });
        let status =
            answer.unwrap_or_else(|_| panic!("{what}: no answer")).err().unwrap_or_else(|| panic!("{what}: accepted"));
        let clear = [
            Code::InvalidArgument,
            Code::NotFound,
            Code::FailedPrecondition,
            Code::OutOfRange,
            Code::ResourceExhausted,
            Code::AlreadyExists,
        ];
        assert!(clear.contains(&status.code()) && !status.message().is_empty(), "{what}: {status:?}");
        eprintln!("{what}: {}", status.message());
    }
}

#[test]
fn frames_with_absurd_values_are_refused_one_by_one() {
    let (cluster, tree) = up();
    let mut master = Master::of(&cluster);
    let key = tree.keys().next().unwrap();
    let path = format!("/data/{key}");
    let entry =
        master.runtime.block_on(master.namespace.resolve(ResolveRequest { path, session: 0 })).unwrap().into_inner();
    let status = master.runtime.block_on(master.cluster.status(StatusRequest::default())).unwrap().into_inner();
    let (watched, reader) = (Watched::start(&cluster), Reader::start(&cluster, "data", &tree));
    let worker = &cluster.at_start.workers[0];
    let (tcp, unix) = (Port::Tcp(worker.data.clone()), Port::Unix(worker.socket.clone()));
    for port in [&tcp, &unix] {
        for (what, after_hello, bytes) in broken_frames(&status.cluster_id) {
            let stream = if after_hello { greeted(port) } else { port.connect(PATIENCE) };
            assert_cut_off(what, stream, &bytes);
        }
        let mut stream = greeted(port);
        for (id, (what, kind, message)) in (1..).zip(absurd_requests(&good(&entry))) {
            let header = FrameHeader { kind, request_id: id, message_bytes: message.len() as u32, payload_bytes: 0 };
            // A cancellation of what nobody asked has no answer, and no effect.
            let cancel = frame(FrameKind::Cancel, 0, &Cancel { request_id: u64::MAX });
            stream.write_all(&[&cancel[..], &header.encode(), &message].concat()).unwrap();
            let (header, message) = next(&mut *stream).unwrap_or_else(|| panic!("{what}: no answer"));
            assert_eq!(header.request_id, id, "{what}");
            let statuses = statuses(header, &message);
            assert!(statuses.iter().all(|status| *status != Status::Ok), "{what}: {statuses:?}");
        }
    }
    // Descriptors go over the Unix socket only.
    let mut stream = greeted(&tcp);
    stream.write_all(&frame(FrameKind::Open, 1, &OpenRequest::default())).unwrap();
    let (header, message) = next(&mut *stream).unwrap();
    assert_eq!(statuses(header, &message), [Status::BadRequest]);
    reader.finish();
    watched.finish(&cluster);
}

#[test]
fn calls_with_absurd_values_are_refused_one_by_one() {
    let (cluster, tree) = up();
    let master = Master::of(&cluster);
    let (watched, reader) = (Watched::start(&cluster), Reader::start(&cluster, "data", &tree));
    let shown = || cluster.cv(&["mount", "--json"]).json();
    let mounts = eventually("the index is complete", PATIENCE, || {
        Some(shown()).filter(|mounts| mounts[0]["status"]["indexing"] == false)
    });
    let (namespace, calls) = (|| master.namespace.clone(), || master.cluster.clone());
    let names: [(&str, Vec<u8>); 7] = [
        ("an empty name", vec![]),
        ("a name of 256 bytes", vec![b'n'; 256]),
        ("a name of 10 MB", vec![b'n'; 10 << 20]),
        ("a dot", b".".to_vec()),
        ("two dots", b"..".to_vec()),
        ("a slash", b"a/b".to_vec()),
        ("a NUL", b"a\0b".to_vec()),
    ];
    for (what, name) in names {
        let request = LookupRequest { parent: 1, name: name.clone().into(), session: 0 };
        master.refused(what, async { namespace().lookup(request).await });
        let request = RevalidateRequest { parent: 1, name: name.into(), ..RevalidateRequest::default() };
        master.refused(what, async { namespace().revalidate(request).await });
    }
    for inode in [0, 1 << 40, u64::MAX] {
        let name = bytes::Bytes::from_static(b"n");
        let request = LookupRequest { parent: inode, name, session: 0 };
        master.refused("an unknown parent", async { namespace().lookup(request).await });
        master
            .refused("an unknown inode", async { namespace().get_inode(GetInodeRequest { inode, session: 0 }).await });
        let request = ReadDirRequest { inode, after_name: vec![0xff; 1000].into(), limit: u64::MAX, session: 0 };
        master.refused("an unknown directory", async { namespace().read_dir(request).await });
    }
    let paths = [String::new(), "relative".to_owned(), "/a/../b".to_owned(), "/a".repeat(1100), "/x".repeat(500_000)];
    for path in paths {
        let what = format!("the path {path:.20}");
        let request = ResolveRequest { path: path.clone(), session: 0 };
        master.refused(&what, async { namespace().resolve(request).await });
        let request = UnmountRequest { path: path.clone(), discard: true, ..UnmountRequest::default() };
        master.refused(&what, async { calls().unmount(request).await });
        let request = RefreshRequest { path: path.clone(), recursive: true, dry_run: false };
        master.refused(&what, async { namespace().refresh(request).await?.into_inner().message().await });
        let request = UsageRequest { path: path.clone() };
        master.refused(&what, async { namespace().usage(request).await?.into_inner().message().await });
        master.refused(&what, async {
            calls().submit_load(SubmitLoadRequest { path: path.clone(), ..Default::default() }).await
        });
        master
            .refused(&what, async { calls().submit_export(SubmitExportRequest { path, ..Default::default() }).await });
    }
    let directories = vec![u64::MAX; 20_000];
    master.refused("many directories", async {
        namespace().refresh_listings(RefreshListingsRequest { directories, wait: true, session: u64::MAX }).await
    });
    master.refused("a mount of nothing", async { calls().mount(MountRequest::default()).await });
    let mount = Mount { path: "/x".into(), uri: "s3://b".into(), write_type: 77, ..Mount::default() };
    let request = MountRequest { mount: Some(mount), ..MountRequest::default() };
    master.refused("an unknown write type", async { calls().mount(request).await });
    let job = || GetJobRequest { id: u64::MAX, ..GetJobRequest::default() };
    master.refused("a job that is none", async { calls().get_job(job()).await });
    master.refused("a job to try again", async { calls().retry_job(job()).await });
    master.refused("a job to cancel", async { calls().cancel_job(job()).await });
    let odd = SubmitLoadRequest { path: "/".into(), request_id: vec![7; 15].into(), ..Default::default() };
    master.refused("an id of a request that is none", async { calls().submit_load(odd).await });
    let worker = |uuid: usize, address: &str| RegisterWorkerRequest {
        uuid: vec![1; uuid].into(),
        cluster_id: String::new(),
        worker: Some(Worker { data_address: address.to_owned(), ..Worker::default() }),
    };
    for (what, request) in [
        ("a worker without a uuid", worker(0, "h:1")),
        ("a worker with a long uuid", worker(1000, "h:1")),
        ("a worker without an address", worker(16, "")),
        ("a worker with a long address", worker(16, &"h".repeat(10_000))),
        ("a worker of another cluster", RegisterWorkerRequest { cluster_id: "other".into(), ..worker(16, "h:1") }),
    ] {
        master.refused(what, async { calls().register_worker(request).await });
    }
    // Half a million disks, each of two bytes: more than a request may have. A stranger's heartbeat is no error.
    let request = HeartbeatRequest { disks: vec![DiskReport::default(); 600_000], ..HeartbeatRequest::default() };
    master.refused("many disks", async { calls().heartbeat(request).await });
    let request = HeartbeatRequest { worker_id: u64::MAX, ..HeartbeatRequest::default() };
    let reply = master.runtime.block_on(async { calls().heartbeat(request).await }).unwrap().into_inner();
    assert!(reply.register);
    let quiet = futures::stream::empty::<WatchRequest>();
    master.refused("a session without a name", async { calls().watch(quiet).await });
    assert_eq!(shown(), mounts);
    assert_eq!(cluster.cv(&["node", "list", "--json"]).json().as_array().map(Vec::len), Some(1));
    reader.finish();
    watched.finish(&cluster);
}
