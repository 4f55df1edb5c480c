//! The data plane over real sockets, from a client's side: frames out, frames and descriptors in.

use std::fs::File;
use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;

use bytes::{Buf, BytesMut};
use cavern_conf::process::Metrics;
use cavern_conf::{Budgets, ByteSize, schema};
use cavern_net::Socket;
use cavern_proto::chunk::{CHUNK_BYTES, ChunkMap};
use cavern_proto::data::*;
use cavern_proto::frame::{FrameHeader, HEADER_BYTES, MAX_MESSAGE_BYTES, PROTOCOL_VERSION};
use cavern_proto::master::{Mount, MountTable, WriteType};
use cavern_proto::{BlockId, ContentId};
use cavern_security::{AuditLog, Tenants, Transport};
use cavern_ufs::MemoryBucket;
use proptest::prelude::*;
use prost::Message;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags};
use tokio::io::{AsyncReadExt, AsyncWriteExt, Interest};
use tokio::net::{TcpStream, UnixStream};
use tokio::sync::Semaphore;
use tokio::task::JoinHandle;

use super::outgoing::{FilePayload, Outgoing, Segment};
use super::requests::MAX_INFLIGHT_BYTES;
use super::*;
use crate::membership::Membership;
use crate::memory::Budget;
use crate::metrics::WorkerMetrics;
use crate::mounts::Mounts;
use crate::mounts::tests::no_master;
use crate::parts::WorkerParts;
use crate::persist::Uploads;
use crate::store::{StoreOptions, Stores, Touch};

mod copy;
mod inspect;
mod origin;
mod persist;
mod secured;

const MIB: u64 = 1 << 20;
const PATIENCE: Duration = Duration::from_secs(20);

/// A worker's data plane with a bucket in memory and no master.
pub(super) struct Fixture {
    pub(super) home: tempfile::TempDir,
    pub(super) bucket: MemoryBucket,
    store_id: String,
    pub(super) stores: Stores,
    pub(super) memory: Arc<Semaphore>,
    membership: Arc<Membership>,
    /// The way to other workers.
    pool: Arc<cavern_net::WorkerPool>,
    uploads: Arc<Uploads>,
    mounts: Arc<Mounts>,
    pub(super) metrics: WorkerMetrics,
    address: SocketAddr,
    socket: PathBuf,
    tenants: Tenants,
    stop: CancellationToken,
    task: JoinHandle<()>,
}

impl Fixture {
    pub(super) async fn new(name: &str) -> Self {
        Self::secured(name, Transport::Plain).await
    }

    /// The same whose TCP port is served so.
    async fn secured(name: &str, transport: Transport) -> Self {
        let home = tempfile::tempdir().unwrap();
        let metrics = WorkerMetrics::register(&Metrics::new("worker"));
        let options = StoreOptions {
            directories: vec![format!("[SSD:256MiB]{}", home.path().display()).parse().unwrap()],
            conf: schema::Worker {
                high_watermark: 0.98,
                low_watermark: 0.96,
                fill_size_max: ByteSize::mib(8),
                index_cache: ByteSize::mib(1),
                ..schema::Worker::default()
            },
            max_open_blocks: 10_000,
            keys: Arc::default(),
            budget: Budgets::default().worker,
        };
        let (evicted, evictions) = mpsc::channel(1000);
        let (stores, _) = crate::store::open(options, metrics.clone(), evicted).unwrap();
        let link = no_master();
        let mounts = Arc::new(Mounts::new(link, schema::Ufs { retries: 0, ..Default::default() }));
        let uri = format!("memory://server-{name}");
        let mount = Mount { id: 1, uri, write_type: WriteType::FsMode as i32, ..Default::default() };
        mounts.apply(MountTable { epoch: 1, mounts: vec![mount], status: vec![] });
        let membership = Arc::new(Membership::default());
        membership.set(7, "cluster-1");
        let parts = WorkerParts {
            stores: stores.clone(),
            mounts: mounts.clone(),
            master: no_master(),
            membership: membership.clone(),
            metrics: metrics.clone(),
            memory: Budget::new(64 << 10),
        };
        let socket = home.path().join("w.sock");
        let server = Server::bind("127.0.0.1:0", &socket, Some(LocalPeers::default())).await.unwrap();
        let address = server.address();
        let stop = CancellationToken::new();
        let pool = cavern_net::WorkerPool::new(&schema::Client::default(), Transport::Plain, "test");
        let memory = parts.memory.all.clone();
        let background_upload_rate = ByteSize::mib(8);
        let conf = schema::Worker { fill_concurrency: 16, background_upload_rate, ..schema::Worker::default() };
        let service = Arc::new(Service::new(parts, &conf, pool.clone()));
        let uploads = service.uploads.clone();
        let tenants = super::tenants(&schema::Worker::default(), 64 << 10, 64);
        let admission = Admission { transport, audit: AuditLog::default(), tenants: tenants.clone() };
        let cores = Arc::new(Cores::start(2, 64).unwrap());
        let task = tokio::spawn(server.serve(service, admission, evictions, cores, stop.clone()));
        let store_id = mounts.ufs(1).await.unwrap().store_id().to_owned();
        let bucket = MemoryBucket::named(&format!("server-{name}"));
        Self {
            home,
            bucket,
            store_id,
            stores,
            memory,
            membership,
            pool,
            uploads,
            mounts,
            metrics,
            address,
            socket,
            tenants,
            stop,
            task,
        }
    }

    pub(super) fn put(&self, key: &str, bytes: &[u8], block_size: u64) -> BlockRef {
        let etag = self.bucket.put(key, bytes.to_vec());
        let content = ContentId::of_object(&self.store_id, key, &etag, bytes.len() as u64, block_size);
        BlockRef {
            content_id: content.as_bytes().to_vec().into(),
            index: 0,
            block_size,
            mount_id: 1,
            key: key.to_owned(),
            etag,
            object_length: bytes.len() as u64,
            ..BlockRef::default()
        }
    }

    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }

    pub(super) fn socket(&self) -> &Path {
        &self.socket
    }

    pub(super) async fn tcp(&self) -> Client {
        self.tcp_as(7).await
    }

    /// The same, of a worker with this id.
    async fn tcp_as(&self, id: u64) -> Client {
        Client::greet(Stream::Tcp(TcpStream::connect(self.address).await.unwrap()), id).await
    }

    /// A connection of a master that leads in a term.
    pub(super) async fn master(&self, term: u64) -> Client {
        Client::greet_as(Stream::Tcp(TcpStream::connect(self.address).await.unwrap()), 7, term).await
    }

    pub(super) async fn unix(&self) -> Client {
        Client::greet(Stream::Unix(UnixStream::connect(&self.socket).await.unwrap()), 7).await
    }

    pub(super) async fn end(self) {
        self.stop.cancel();
        tokio::time::timeout(PATIENCE, self.task).await.unwrap().unwrap();
        assert!(!self.socket.exists());
    }
}

enum Stream {
    Tcp(TcpStream),
    Unix(UnixStream),
}

pub(super) struct Answer {
    pub(super) kind: FrameKind,
    pub(super) request_id: u64,
    message: Bytes,
    payload: Bytes,
}

impl Answer {
    pub(super) fn decode<M: Message + Default>(&self, kind: FrameKind) -> M {
        assert_eq!(self.kind, kind, "{:?}", Failure::decode(self.message.clone()));
        M::decode(self.message.clone()).unwrap()
    }
}

pub(super) struct Client {
    stream: Stream,
    incoming: BytesMut,
    pub(super) descriptors: Vec<OwnedFd>,
    next_id: u64,
}

impl Client {
    fn new(stream: Stream) -> Self {
        Self { stream, incoming: BytesMut::new(), descriptors: Vec::new(), next_id: 0 }
    }

    async fn greet(stream: Stream, worker_id: u64) -> Self {
        Self::greet_as(stream, worker_id, 0).await
    }

    /// The same for a master that leads in a term.
    async fn greet_as(stream: Stream, worker_id: u64, term: u64) -> Self {
        let mut client = Self::new(stream);
        let hello = Hello { protocol: PROTOCOL_VERSION, peer: "test".into(), term, ..Default::default() };
        let id = client.send(FrameKind::Hello, &hello).await;
        let answer = client.receive().await.unwrap();
        assert_eq!(answer.request_id, id);
        let reply: Hello = answer.decode(FrameKind::Hello);
        assert_eq!((reply.worker_id, reply.cluster_id.as_str()), (worker_id, "cluster-1"));
        client
    }

    pub(super) async fn send_raw(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        match &mut self.stream {
            Stream::Tcp(stream) => stream.write_all(bytes).await,
            Stream::Unix(stream) => stream.write_all(bytes).await,
        }
    }

    pub(super) async fn send(&mut self, kind: FrameKind, message: &impl Message) -> u64 {
        self.send_with(kind, message, &[]).await
    }

    pub(super) async fn send_with(&mut self, kind: FrameKind, message: &impl Message, payload: &[u8]) -> u64 {
        self.next_id += 1;
        let frame = encode_frame(kind, self.next_id, message, payload.len() as u32);
        self.send_raw(&frame).await.unwrap();
        self.send_raw(payload).await.unwrap();
        self.next_id
    }

    /// The next frame; `None` at the end of the stream.
    pub(super) async fn receive(&mut self) -> Option<Answer> {
        tokio::time::timeout(PATIENCE, self.receive_frame()).await.expect("no answer in time")
    }

    async fn receive_frame(&mut self) -> Option<Answer> {
        loop {
            if let Some(head) = self.incoming.first_chunk::<HEADER_BYTES>() {
                let header = FrameHeader::decode(head).unwrap();
                let (message, payload) = (header.message_bytes as usize, header.payload_bytes as usize);
                if self.incoming.len() >= HEADER_BYTES + message + payload {
                    self.incoming.advance(HEADER_BYTES);
                    let message = self.incoming.split_to(message).freeze();
                    let payload = self.incoming.split_to(payload).freeze();
                    return Some(Answer { kind: header.kind, request_id: header.request_id, message, payload });
                }
            }
            if self.receive_bytes().await == 0 {
                return None;
            }
        }
    }

    async fn receive_bytes(&mut self) -> usize {
        match &mut self.stream {
            // A worker that closes with our bytes unread resets the connection.
            Stream::Tcp(stream) => stream.read_buf(&mut self.incoming).await.unwrap_or(0),
            Stream::Unix(stream) => loop {
                stream.ready(Interest::READABLE).await.unwrap();
                let mut bytes = [0; 65_536];
                let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(250))];
                let mut control = RecvAncillaryBuffer::new(&mut space);
                let received = stream.try_io(Interest::READABLE, || {
                    let mut slices = [IoSliceMut::new(&mut bytes)];
                    Ok(rustix::net::recvmsg(stream.as_fd(), &mut slices, &mut control, RecvFlags::CMSG_CLOEXEC)?)
                });
                match received {
                    Ok(received) => {
                        for message in control.drain() {
                            if let RecvAncillaryMessage::ScmRights(descriptors) = message {
                                self.descriptors.extend(descriptors);
                            }
                        }
                        self.incoming.extend_from_slice(&bytes[..received.bytes]);
                        return received.bytes;
                    }
                    Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
                    Err(_) => return 0,
                }
            },
        }
    }

    pub(super) async fn read(&mut self, items: Vec<(BlockRef, u32, u32)>) -> (ReadReply, Bytes) {
        let items = items.into_iter().map(|(block, offset, length)| read_request::Item {
            block: Some(block),
            range: Some(Range { offset, length }),
            part: None,
        });
        self.send(FrameKind::Read, &ReadRequest { items: items.collect(), deadline_ms: 10_000 }).await;
        let answer = self.receive().await.unwrap();
        (answer.decode(FrameKind::ReadReply), answer.payload)
    }

    /// One part of the whole block.
    async fn read_part(&mut self, block: &BlockRef, part: std::ops::Range<u32>) -> (read_reply::Item, Bytes) {
        let part = Some(Range { offset: part.start, length: part.end.wrapping_sub(part.start) });
        let range = Some(Range { offset: 0, length: u32::MAX });
        let items = vec![read_request::Item { block: Some(block.clone()), range, part }];
        self.send(FrameKind::Read, &ReadRequest { items, deadline_ms: 10_000 }).await;
        let answer = self.receive().await.unwrap();
        let reply: ReadReply = answer.decode(FrameKind::ReadReply);
        (reply.items.into_iter().next().unwrap(), answer.payload)
    }

    pub(super) async fn open(&mut self, blocks: Vec<BlockRef>) -> OpenReply {
        let items = blocks.into_iter().map(|block| open_request::Item { block: Some(block), want: vec![] });
        self.send(FrameKind::Open, &OpenRequest { items: items.collect(), deadline_ms: 10_000 }).await;
        self.receive().await.unwrap().decode(FrameKind::OpenReply)
    }
}

pub(super) fn noise(length: usize) -> Vec<u8> {
    (0..length as u64).map(|at| (at.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 37) as u8).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn reads_come_with_checksums_cold_and_warm() {
    let bench = Fixture::new("reads").await;
    let bytes = noise(3 * CHUNK_BYTES as usize + 77);
    let block = bench.put("a", &bytes, 4 * MIB);
    let mut client = bench.tcp().await;
    for _ in 0..2 {
        let (reply, payload) = client.read(vec![(block.clone(), 1000, 3 * CHUNK_BYTES - 1000)]).await;
        assert_eq!(reply.items[0].status(), Status::Ok);
        assert_eq!(payload, bytes[1000..3 * CHUNK_BYTES as usize]);
        let chunk =
            |index: usize| crc32c::crc32c(&bytes[index * CHUNK_BYTES as usize..(index + 1) * CHUNK_BYTES as usize]);
        assert_eq!(reply.items[0].chunk_crcs, [chunk(1), chunk(2)]);
        // Cut at the block's end, whose short chunk has a checksum too.
        let (reply, payload) = client.read(vec![(block.clone(), 3 * CHUNK_BYTES, u32::MAX)]).await;
        assert_eq!((reply.items[0].length, &payload[..]), (77, &bytes[3 * CHUNK_BYTES as usize..]));
        assert_eq!(reply.items[0].chunk_crcs, [crc32c::crc32c(&payload)]);
    }
    assert_eq!(bench.metrics.ufs_bytes.get(), bytes.len() as u64);
    assert_eq!((bench.metrics.hits.get(), bench.metrics.misses.get()), (2, 2));
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn parts_come_with_checksums_of_their_own() {
    let bench = Fixture::new("parts").await;
    let bytes = noise(3 * CHUNK_BYTES as usize + 5000);
    let block = bench.put("a", &bytes, 4 * MIB);
    let mut client = bench.tcp().await;
    let length = bytes.len() as u32;
    // Cold and warm; across two chunks; up to the end of the block.
    for part in [0..4096, 0..4096, CHUNK_BYTES - 4096..CHUNK_BYTES + 8192, 3 * CHUNK_BYTES + 4096..length] {
        let (item, payload) = client.read_part(&block, part.clone()).await;
        assert_eq!((item.status(), item.length), (Status::Ok, part.len() as u32), "{part:?}");
        assert_eq!(payload, bytes[part.start as usize..part.end as usize], "{part:?}");
        assert_eq!(item.part_crcs, payload.chunks(4096).map(crc32c::crc32c).collect::<Vec<_>>(), "{part:?}");
        assert!(item.chunk_crcs.is_empty());
    }
    for part in [5..4096, 0..4095, 0..0, 3 * CHUNK_BYTES + 4096..length + 1, 4096..u32::MAX] {
        assert_eq!(client.read_part(&block, part.clone()).await.0.status(), Status::BadRequest, "{part:?}");
    }
    let data = BlockRef { data: true, ..block.clone() };
    assert_ne!(client.read_part(&data, 0..4096).await.0.status(), Status::Ok);
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn damage_of_a_part_shows_in_its_checksum_or_is_found_before() {
    let bench = Fixture::new("damaged-part").await;
    let bytes = noise(2 * CHUNK_BYTES as usize);
    let block = bench.put("a", &bytes, MIB);
    let mut client = bench.tcp().await;
    client.read(vec![(block.clone(), 0, 2 * CHUNK_BYTES)]).await;
    // Of the first chunk, the checksums of parts are known before the damage; of the second one they are not.
    client.read_part(&block, 0..4096).await;
    client.send(FrameKind::Query, &QueryRequest { blocks: vec![block.clone()], held: None }).await;
    let reply: QueryReply = client.receive().await.unwrap().decode(FrameKind::QueryReply);
    let mut damaged = bytes.clone();
    damaged[5] ^= 1;
    damaged[CHUNK_BYTES as usize + 5] ^= 1;
    std::fs::write(&reply.items[0].path, damaged).unwrap();
    let (item, payload) = client.read_part(&block, 0..4096).await;
    assert_eq!(item.status(), Status::Ok);
    assert_ne!(item.part_crcs, [crc32c::crc32c(&payload)], "the client sees it");
    let second = CHUNK_BYTES..CHUNK_BYTES + 4096;
    let (item, _) = client.read_part(&block, second.clone()).await;
    assert_eq!(item.status(), Status::IoError, "{}", item.message);
    assert_eq!(bench.metrics.corrupt_chunks.get(), 1);
    let (item, payload) = client.read_part(&block, second).await;
    assert_eq!((item.status(), &payload[..]), (Status::Ok, &bytes[CHUNK_BYTES as usize..][..4096]), "fetched again");
    assert_eq!(item.part_crcs, [crc32c::crc32c(&payload)]);
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_batch_tells_each_item_its_own_fate() {
    let bench = Fixture::new("batch").await;
    let (one, two) = (noise(50_000), noise(70_000));
    let (block_one, block_two) = (bench.put("one", &one, MIB), bench.put("two", &two, MIB));
    let stale = bench.put("three", &one, MIB);
    bench.bucket.put("three", one.clone());
    let gone = BlockRef { key: "gone".into(), ..bench.put("gone", &one, MIB) };
    bench.bucket.delete("gone");
    let unknown = BlockRef { mount_id: 99, ..bench.put("unknown", &one, MIB) };
    let nonsense = BlockRef { content_id: vec![1; 3].into(), ..block_one.clone() };
    let mut client = bench.tcp().await;
    let items = vec![
        (block_one, 0, 50_000),
        (stale, 0, 10),
        (gone, 0, 10),
        (unknown, 0, 10),
        (nonsense, 0, 10),
        (block_two, 60_000, 20_000),
    ];
    for _ in 0..2 {
        let (reply, payload) = client.read(items.clone()).await;
        let statuses: Vec<Status> = reply.items.iter().map(|item| item.status()).collect();
        let expected = [
            Status::Ok,
            Status::VersionChanged,
            Status::NotFound,
            Status::UnknownMount,
            Status::BadRequest,
            Status::Ok,
        ];
        assert_eq!(statuses, expected);
        assert_eq!(payload, [&one[..], &two[60_000..]].concat());
        assert!(reply.items[1..5].iter().all(|item| !item.message.is_empty() && item.length == 0));
    }
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn descriptors_come_in_order_and_stay_good_after_eviction() {
    let bench = Fixture::new("descriptors").await;
    let contents: Vec<Vec<u8>> = (0..200).map(|value| noise(1000 + value)).collect();
    let blocks: Vec<BlockRef> =
        contents.iter().enumerate().map(|(value, bytes)| bench.put(&format!("k{value}"), bytes, MIB)).collect();
    let mut client = bench.unix().await;
    for round in 0..2 {
        let reply = client.open(blocks.clone()).await;
        assert_eq!(client.descriptors.len(), 200);
        for ((item, descriptor), bytes) in reply.items.iter().zip(client.descriptors.drain(..)).zip(&contents) {
            assert_eq!((item.status(), item.length as usize), (Status::Ok, bytes.len()));
            assert!(ChunkMap::from_bytes(&item.present).contains(0));
            assert_eq!(item.fetched_bytes, if round == 0 { bytes.len() as u64 } else { 0 });
            let file = File::from(descriptor);
            let mut read = vec![0; bytes.len()];
            file.read_exact_at(&mut read, 0).unwrap();
            assert_eq!(&read, bytes);
            assert!(file.write_at(b"x", 0).is_err(), "clients cannot write to blocks");
        }
    }
    // A failed item has no descriptor; those of the others keep their order.
    let bad = BlockRef { object_length: 0, ..blocks[0].clone() };
    let reply = client.open(vec![blocks[3].clone(), bad, blocks[5].clone()]).await;
    let statuses: Vec<Status> = reply.items.iter().map(|item| item.status()).collect();
    assert_eq!(statuses, [Status::Ok, Status::BadRequest, Status::Ok]);
    let files: Vec<File> = client.descriptors.drain(..).map(File::from).collect();
    assert_eq!(files.iter().map(|file| file.metadata().unwrap().len()).collect::<Vec<_>>(), [1003, 1005]);

    client.send(FrameKind::Free, &FreeRequest { blocks: vec![blocks[3].clone()] }).await;
    let (mut freed, mut notified) = (false, false);
    while !freed || !notified {
        let answer = client.receive().await.unwrap();
        if answer.kind == FrameKind::Evicted {
            let evicted: Evicted = answer.decode(FrameKind::Evicted);
            assert_eq!(evicted.blocks[0].content_id, blocks[3].content_id);
            assert_eq!(evicted.blocks[0].incarnation, reply.items[0].incarnation);
            notified = true;
        } else {
            assert_eq!(answer.decode::<FreeReply>(FrameKind::FreeReply), FreeReply { blocks: 1, bytes: 4096 });
            freed = true;
        }
    }
    let mut read = vec![0; 1003];
    files[0].read_exact_at(&mut read, 0).unwrap();
    assert_eq!(read, contents[3]);
    let again = client.open(vec![blocks[3].clone()]).await;
    assert_ne!(again.items[0].incarnation, reply.items[0].incarnation);
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn fills_and_queries_say_what_is_here() {
    let bench = Fixture::new("fills").await;
    let bytes = noise(10 * CHUNK_BYTES as usize);
    let block = bench.put("a", &bytes, 64 * MIB);
    let mut client = bench.tcp().await;
    let query = QueryRequest { blocks: vec![block.clone()], held: None };
    client.send(FrameKind::Query, &query).await;
    let reply: QueryReply = client.receive().await.unwrap().decode(FrameKind::QueryReply);
    assert!(!reply.items[0].known);
    let want =
        vec![Range { offset: 3 * CHUNK_BYTES, length: CHUNK_BYTES + 1 }, Range { offset: 9 * CHUNK_BYTES, length: 1 }];
    let items = vec![open_request::Item { block: Some(block.clone()), want }];
    client.send(FrameKind::Fill, &FillRequest { items, deadline_ms: 0 }).await;
    let filled: FillReply = client.receive().await.unwrap().decode(FrameKind::FillReply);
    assert_eq!((filled.items[0].status(), filled.items[0].fetched_bytes), (Status::Ok, 3 * u64::from(CHUNK_BYTES)));
    client.send(FrameKind::Query, &query).await;
    let reply: QueryReply = client.receive().await.unwrap().decode(FrameKind::QueryReply);
    assert_eq!(ChunkMap::from_bytes(&reply.items[0].present).iter().collect::<Vec<_>>(), [3, 4, 9]);
    assert!(reply.items[0].path.starts_with(bench.home.path().to_str().unwrap()));
    assert_eq!((bench.metrics.hits.get(), bench.metrics.misses.get()), (0, 0), "neither is a use");
    // Who has the files names them without more.
    let named = |content_id: Bytes, index| BlockRef { content_id, index, ..BlockRef::default() };
    let blocks = vec![named(block.content_id.clone(), 0), named(block.content_id, 1), named(Bytes::from("?"), 0)];
    client.send(FrameKind::Query, &QueryRequest { blocks, held: Some(Bytes::from_static(&[1])) }).await;
    let held: QueryReply = client.receive().await.unwrap().decode(FrameKind::QueryReply);
    let known: Vec<_> = held.items.iter().map(|item| (item.known, item.incarnation)).collect();
    assert_eq!(known, [(true, reply.items[0].incarnation), (false, 0), (false, 0)]);
    assert!(held.items[0].path.is_empty());
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_chunk_reported_as_corrupt_is_checked_and_fetched_again() {
    let bench = Fixture::new("corrupt").await;
    let bytes = noise(2 * CHUNK_BYTES as usize);
    let block = bench.put("a", &bytes, MIB);
    let mut client = bench.tcp().await;
    client.read(vec![(block.clone(), 0, 2 * CHUNK_BYTES)]).await;
    client.send(FrameKind::Query, &QueryRequest { blocks: vec![block.clone()], held: None }).await;
    let reply: QueryReply = client.receive().await.unwrap().decode(FrameKind::QueryReply);
    let mut damaged = bytes.clone();
    damaged[5] ^= 1;
    std::fs::write(&reply.items[0].path, damaged).unwrap();
    let report = CorruptRequest { block: Some(block.clone()), chunks: vec![0, 1, 5000] };
    client.send(FrameKind::Corrupt, &report).await;
    client.receive().await.unwrap().decode::<CorruptReply>(FrameKind::CorruptReply);
    assert_eq!(bench.metrics.corrupt_chunks.get(), 1);
    let (_, payload) = client.read(vec![(block, 0, 2 * CHUNK_BYTES)]).await;
    assert_eq!(payload, bytes);
    assert_eq!(bench.metrics.ufs_bytes.get(), 3 * u64::from(CHUNK_BYTES));
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn answers_overtake_one_another_and_can_be_cancelled() {
    let bench = Fixture::new("order").await;
    let bytes = noise(1000);
    let (slow, fast) = (bench.put("slow", &bytes, MIB), bench.put("fast", &bytes, MIB));
    let mut client = bench.tcp().await;
    client.read(vec![(fast.clone(), 0, 1000)]).await;
    bench.mounts.inject(1, cavern_ufs::Faults { delay: Duration::from_secs(60), ..Default::default() });
    let item = |block: &BlockRef| read_request::Item {
        block: Some(block.clone()),
        range: Some(Range { offset: 0, length: 1000 }),
        part: None,
    };
    let slow_id = client.send(FrameKind::Read, &ReadRequest { items: vec![item(&slow)], deadline_ms: 60_000 }).await;
    let fast_id = client.send(FrameKind::Read, &ReadRequest { items: vec![item(&fast)], deadline_ms: 0 }).await;
    assert_eq!(client.receive().await.unwrap().request_id, fast_id);
    let short_id = client.send(FrameKind::Read, &ReadRequest { items: vec![item(&slow)], deadline_ms: 100 }).await;
    let expired = client.receive().await.unwrap();
    assert_eq!(expired.request_id, short_id);
    assert_eq!(expired.decode::<ReadReply>(FrameKind::ReadReply).items[0].status(), Status::Deadline);
    client.send(FrameKind::Cancel, &Cancel { request_id: slow_id }).await;
    let after = client.send(FrameKind::Read, &ReadRequest { items: vec![item(&fast)], deadline_ms: 0 }).await;
    assert_eq!(client.receive().await.unwrap().request_id, after);
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn cancelled_requests_give_back_their_share_of_the_connection() {
    let bench = Fixture::new("cancelled").await;
    let bytes = noise(MIB as usize);
    let (slow, fast) = (bench.put("slow", &bytes, MIB), bench.put("fast", &bytes, MIB));
    let mut client = bench.tcp().await;
    client.read(vec![(fast.clone(), 0, 1000)]).await;
    bench.mounts.inject(1, cavern_ufs::Faults { delay: Duration::from_secs(60), ..Default::default() });
    // Together more than one connection may have in flight.
    for _ in 0..2 * u64::from(MAX_INFLIGHT_BYTES) / MIB {
        let range = Some(Range { offset: 0, length: MIB as u32 });
        let items = vec![read_request::Item { block: Some(slow.clone()), range, part: None }];
        let request_id = client.send(FrameKind::Read, &ReadRequest { items, deadline_ms: 60_000 }).await;
        client.send(FrameKind::Cancel, &Cancel { request_id }).await;
    }
    let (_, payload) = client.read(vec![(fast, 0, 1000)]).await;
    assert_eq!(payload, bytes[..1000]);
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn more_is_in_flight_than_buffers_hold() {
    // 100 requests of 1 MiB each, sent before any answer is read: the worker stops reading, and goes on.
    let bench = Fixture::new("flow").await;
    let bytes = noise(MIB as usize);
    let blocks: Vec<BlockRef> = (0..4).map(|value| bench.put(&format!("k{value}"), &bytes, MIB)).collect();
    let mut client = bench.tcp().await;
    for position in 0..100 {
        let block = Some(blocks[position % 4].clone());
        let item = read_request::Item { block, range: Some(Range { offset: 0, length: MIB as u32 }), part: None };
        client.send(FrameKind::Read, &ReadRequest { items: vec![item], deadline_ms: 20_000 }).await;
    }
    let mut seen = Vec::new();
    for _ in 0..100 {
        let answer = client.receive().await.unwrap();
        assert_eq!(answer.payload, bytes);
        seen.push(answer.request_id);
    }
    seen.sort_unstable();
    assert_eq!(seen, (2..102).collect::<Vec<_>>());
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn whole_chunks_are_sent_out_of_the_file_among_other_answers() {
    let bench = Fixture::new("sendfile").await;
    let bytes = noise(3 * CHUNK_BYTES as usize + 77_000);
    let (block, length) = (bench.put("a", &bytes, MIB), bytes.len() as u32);
    let mut client = bench.tcp().await;
    client.read(vec![(block.clone(), 0, length)]).await;
    assert_eq!(bench.metrics.sendfile_bytes.get(), 0, "it came from the bucket");
    // Of the last two not all is in whole chunks, or it is little.
    let ranges = [(0, length), (CHUNK_BYTES, 2 * CHUNK_BYTES), (5, CHUNK_BYTES), (3 * CHUNK_BYTES, 9000)];
    let mut asked = std::collections::HashMap::new();
    for (offset, length) in ranges.into_iter().cycle().take(40) {
        let range = Some(Range { offset, length });
        let items = vec![read_request::Item { block: Some(block.clone()), range, part: None }];
        let id = client.send(FrameKind::Read, &ReadRequest { items, deadline_ms: 20_000 }).await;
        asked.insert(id, offset as usize..(offset + length) as usize);
    }
    for _ in 0..40 {
        let answer = client.receive().await.unwrap();
        let range = asked.remove(&answer.request_id).unwrap();
        assert_eq!(answer.payload, bytes[range.clone()], "{range:?}");
        let reply: ReadReply = answer.decode(FrameKind::ReadReply);
        if range.start % CHUNK_BYTES as usize == 0 && range.len() > 9000 {
            let found: Vec<u32> = answer.payload.chunks(CHUNK_BYTES as usize).map(crc32c::crc32c).collect();
            assert_eq!(reply.items[0].chunk_crcs, found, "{range:?}");
        }
    }
    assert_eq!(bench.metrics.sendfile_bytes.get(), 10 * u64::from(length + 2 * CHUNK_BYTES));
    // Within its last page, where the page cache cannot tell.
    let path = bench.stores.cache.find(&block_id(&block), Touch::None).unwrap().path().to_owned();
    File::options().write(true).open(&path).unwrap().set_len(u64::from(length) - 10).unwrap();
    let (reply, _) = client.read(vec![(block.clone(), 0, length)]).await;
    assert_eq!(reply.items[0].status(), Status::IoError, "{}", reply.items[0].message);
    let (reply, payload) = client.read(vec![(block, 0, length)]).await;
    assert_eq!((reply.items[0].status(), payload), (Status::Ok, Bytes::from(bytes)), "fetched again");
    bench.end().await;
}

fn block_id(block: &BlockRef) -> BlockId {
    BlockId { content: ContentId::from_slice(&block.content_id).unwrap(), index: block.index }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_that_ends_while_it_is_sent_leaves_zeros_and_the_next_answer_in_its_place() {
    let bench = Fixture::new("cut-file").await;
    let bytes = noise(100_000);
    let block = bench.put("a", &bytes, MIB);
    bench.tcp().await.read(vec![(block.clone(), 0, 100_000)]).await;
    let cached = bench.stores.cache.find(&block_id(&block), Touch::None).unwrap();
    File::options().write(true).open(cached.path()).unwrap().set_len(60_000).unwrap();
    // What was seen long ago is looked at once more, and read by a thread that cannot read it.
    for (seen, end) in [(soon(), 60_000), (long_ago(), 10)] {
        let (received, _) = send_between(FilePayload { block: cached.clone(), bytes: 10..100_000, seen }).await;
        let zeros = vec![0; 100_000 - end];
        assert!(received == [&b"head"[..], &bytes[10..end], &zeros, b"next"].concat(), "{end} bytes of the file");
    }
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_has_left_the_page_cache_before_its_turn_is_read_by_a_thread_that_may_wait() {
    let bench = Fixture::new("gone-pages").await;
    let bytes = noise(3 * CHUNK_BYTES as usize);
    let (block, length) = (bench.put("a", &bytes, MIB), bytes.len() as u32);
    bench.tcp().await.read(vec![(block.clone(), 0, length)]).await;
    let cached = bench.stores.cache.find(&block_id(&block), Touch::None).unwrap();
    for is_dropped in [false, true] {
        if is_dropped {
            let file = File::open(cached.path()).unwrap();
            file.sync_all().unwrap();
            rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
        }
        // They stay in a file system that is in memory; and a kernel before Linux 6.5 never says that they are there.
        let is_gone = !cached.can_be_sent(&(10..length));
        let payload = FilePayload { block: cached.clone(), bytes: 10..length, seen: long_ago() };
        let (received, times_read) = send_between(payload).await;
        assert!(received == [&b"head"[..], &bytes[10..], b"next"].concat());
        assert_eq!(times_read > 0, is_gone);
    }
    bench.end().await;
}

fn soon() -> tokio::time::Instant {
    tokio::time::Instant::now() + PATIENCE
}

fn long_ago() -> tokio::time::Instant {
    tokio::time::Instant::now() - Duration::from_secs(1)
}

/// Sends a payload out of a file, between other bytes; gives what arrives, and how often something was read for it.
async fn send_between(payload: FilePayload) -> (Vec<u8>, u32) {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let mut far = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
    let near = Socket::Tcp(listener.accept().await.unwrap().0);
    let mut outgoing = Outgoing::new(Arc::new(Semaphore::new(0)));
    let count = 4 + payload.bytes.len() + 4;
    outgoing.push(Segment { bytes: b"head".to_vec().into(), payload: Some(payload), ..Segment::default() });
    outgoing.push(Segment { bytes: b"next".to_vec().into(), ..Segment::default() });
    assert_eq!(outgoing.bytes(), count);
    let send = async {
        let mut times_read = 0;
        loop {
            outgoing.flush(&near).unwrap();
            if outgoing.is_empty() {
                break times_read;
            }
            tokio::select! {
                ready = near.ready(Interest::WRITABLE), if outgoing.wants_socket() => {
                    ready.unwrap();
                }
                () = outgoing.take_read() => times_read += 1,
            }
        }
    };
    let mut received = vec![1; count];
    let (received_all, times_read) =
        tokio::time::timeout(PATIENCE, async { tokio::join!(far.read_exact(&mut received), send) }).await.unwrap();
    assert_eq!(received_all.unwrap(), count);
    assert_eq!(outgoing.bytes(), 0);
    (received, times_read)
}

#[tokio::test(flavor = "multi_thread")]
async fn long_requests_wait_for_memory_and_short_ones_do_not() {
    let bench = Fixture::new("requests").await;
    let block = bench.put("a", &noise(100), 64 * MIB);
    let query = |count| QueryRequest { blocks: vec![block.clone(); count], held: None };
    // Of 16 MiB for requests a message that is not all here takes 4, and what it may turn out to be.
    let mut unfinished = bench.tcp().await;
    let mut begun = encode_frame(FrameKind::Query, 8, &query(1), 0);
    let head =
        FrameHeader { kind: FrameKind::Query, request_id: 9, message_bytes: MAX_MESSAGE_BYTES, payload_bytes: 0 };
    begun.extend(head.encode());
    unfinished.send_raw(&begun).await.unwrap();
    assert_eq!(unfinished.receive().await.unwrap().request_id, 8);
    let mut long = bench.tcp().await;
    let id = long.send(FrameKind::Query, &query(3000)).await;
    let waiting = tokio::time::timeout(Duration::from_millis(200), long.receive()).await;
    assert!(waiting.is_err(), "answered without memory");
    let mut short = bench.tcp().await;
    let passed = short.send(FrameKind::Query, &query(1)).await;
    assert_eq!(short.receive().await.unwrap().request_id, passed);
    drop(unfinished);
    let answer = long.receive().await.unwrap();
    assert_eq!(answer.request_id, id);
    assert_eq!(answer.decode::<QueryReply>(FrameKind::QueryReply).items.len(), 3000);
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn strangers_are_told_why() {
    let bench = Fixture::new("strangers").await;
    let connect = async || Client::new(Stream::Tcp(TcpStream::connect(bench.address).await.unwrap()));
    let refused_with = async |mut client: Client, text: &str| {
        let failure: Failure = client.receive().await.unwrap().decode(FrameKind::Failure);
        assert!(failure.status() == Status::BadRequest && failure.message.contains(text), "{failure:?}");
        assert!(client.receive().await.is_none(), "the connection is closed");
    };
    let mut client = connect().await;
    client.send_raw(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n").await.unwrap();
    refused_with(client, "another protocol").await;
    let mut client = connect().await;
    client.send(FrameKind::Read, &ReadRequest::default()).await;
    refused_with(client, "hello").await;
    let mut client = connect().await;
    client.send(FrameKind::Hello, &Hello { protocol: 99, ..Default::default() }).await;
    refused_with(client, "protocol 99").await;
    let mut client = connect().await;
    let hello = Hello { protocol: PROTOCOL_VERSION, cluster_id: "cluster-2".into(), ..Default::default() };
    client.send(FrameKind::Hello, &hello).await;
    refused_with(client, "cluster-1").await;
    let mut client = bench.tcp().await;
    client.send_raw(&encode_frame(FrameKind::Read, 1, &ReadRequest::default(), 10)).await.unwrap();
    refused_with(client, "payload").await;
    let mut client = bench.tcp().await;
    client.send(FrameKind::ReadReply, &ReadReply::default()).await;
    refused_with(client, "requests").await;

    // A request that makes no sense is refused alone.
    let mut client = bench.tcp().await;
    client.send(FrameKind::Open, &OpenRequest::default()).await;
    let failure: Failure = client.receive().await.unwrap().decode(FrameKind::Failure);
    assert!(failure.message.contains("Unix socket"));
    let (reply, _) = client.read(vec![]).await;
    assert!(reply.items.is_empty());
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn sockets_are_taken_over_from_the_dead_only() {
    let home = tempfile::tempdir().unwrap();
    let path = home.path().join("w.sock");
    let first = Server::bind("127.0.0.1:0", &path, Some(LocalPeers::default())).await.unwrap();
    assert!(matches!(
        Server::bind("127.0.0.1:0", &path, Some(LocalPeers::default())).await,
        Err(WorkerError::SocketInUse(_))
    ));
    drop(first);
    assert!(path.exists(), "as after a crash");
    assert!(Server::bind("127.0.0.1:0", &path, Some(LocalPeers::default())).await.is_ok());
    let long = home.path().join("x".repeat(120));
    assert!(matches!(
        Server::bind("127.0.0.1:0", &long, Some(LocalPeers::default())).await,
        Err(WorkerError::SocketPath { .. })
    ));
    let file = home.path().join("file");
    std::fs::write(&file, "precious").unwrap();
    assert!(matches!(
        Server::bind("127.0.0.1:0", &file, Some(LocalPeers::default())).await,
        Err(WorkerError::Listen { .. })
    ));
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "precious");
}

/// Frames that are garbage in their own ways.
fn garbage() -> impl Strategy<Value = Vec<u8>> {
    let any_bytes = prop::collection::vec(any::<u8>(), 0..300);
    let framed =
        (1u8..=22, any::<u64>(), prop::collection::vec(any::<u8>(), 0..300)).prop_map(|(kind, id, message)| {
            let mut frame = encode_frame(FrameKind::Hello, id, &(), 0);
            frame[4] = kind;
            frame[16..20].copy_from_slice(&(message.len() as u32).to_le_bytes());
            frame.extend_from_slice(&message);
            frame
        });
    let id = BlockId { content: ContentId::of_object("s", "k", "e", 1, 1), index: 0 };
    let requests = (any::<u32>(), any::<u32>(), any::<u32>(), any::<u64>(), any::<u64>(), 0usize..20, any::<u32>())
        .prop_map(move |(offset, length, index, block_size, object_length, id_bytes, deadline_ms)| {
            let block = BlockRef {
                content_id: id.content.as_bytes()[..id_bytes.min(16)].to_vec().into(),
                index,
                block_size,
                object_length,
                ..Default::default()
            };
            let part = (index % 2 == 0).then_some(Range { offset: offset.wrapping_add(index), length: deadline_ms });
            let range = Some(Range { offset, length });
            let item = read_request::Item { block: Some(block.clone()), range, part };
            let read = ReadRequest { items: vec![item], deadline_ms: deadline_ms % 50 + 1 };
            let item = open_request::Item { block: Some(block), want: vec![Range { offset, length }] };
            let open = OpenRequest { items: vec![item], deadline_ms: deadline_ms % 50 + 1 };
            [encode_frame(FrameKind::Read, 1, &read, 0), encode_frame(FrameKind::Open, 2, &open, 0)].concat()
        });
    let payload = prop::collection::vec(any::<u8>(), 0..300);
    let writes = (any::<u32>(), any::<u32>(), any::<u64>(), 0usize..20, payload, 0u32..9 << 20).prop_map(
        move |(offset, length, block_size, id_bytes, payload, announced)| {
            let content_id = id.content.as_bytes()[..id_bytes.min(16)].to_vec().into();
            let block = Some(BlockRef { content_id, block_size, data: true, ..Default::default() });
            let range = Range { offset, length };
            let write = WriteRequest {
                block: block.clone(),
                offset,
                zero: vec![range],
                sync: true,
                deadline_ms: 10,
                begins: false,
                cut: None,
            };
            // With some of what it announces, or more.
            let mut frames = encode_frame(FrameKind::Write, 3, &write, announced % 600);
            frames.extend_from_slice(&payload);
            let sync = SyncRequest { blocks: block.iter().cloned().collect(), failed: Vec::new() };
            frames.extend(encode_frame(
                FrameKind::Reserve,
                4,
                &ReserveRequest { block, ranges: vec![range], ..Default::default() },
                0,
            ));
            frames.extend(encode_frame(FrameKind::Sync, 5, &sync, announced));
            frames
        },
    );
    prop_oneof![any_bytes, framed, requests, writes]
}

#[test]
fn garbage_never_harms_the_worker() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let bench = runtime.block_on(Fixture::new("garbage"));
    let bytes = noise(1000);
    let block = bench.put("a", &bytes, MIB);
    let config = ProptestConfig { cases: 150, ..ProptestConfig::default() };
    proptest!(config, |(frames in prop::collection::vec(garbage(), 1..5), greet: bool, unix: bool)| {
        runtime.block_on(async {
            let mut client = match (greet, unix) {
                (true, true) => bench.unix().await,
                (true, false) => bench.tcp().await,
                (false, _) => Client::new(Stream::Tcp(TcpStream::connect(bench.address).await.unwrap())),
            };
            for frame in frames {
                // The worker may have hung up already.
                if client.send_raw(&frame).await.is_err() {
                    break;
                }
            }
            drop(client);
            let mut honest = bench.tcp().await;
            let (_, payload) = honest.read(vec![(block.clone(), 0, 1000)]).await;
            assert_eq!(payload, bytes);
        });
    });
    assert_eq!(bench.stores.table.usage()[0].blocks, 1);
    runtime.block_on(bench.end());
}
