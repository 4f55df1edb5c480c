//! One client, or somebody without a certificate, takes all that it can get. Another client works on, and the memory of
//! the processes stays within bounds.

use std::marker::PhantomData;
use std::sync::Arc;
use std::time::Instant;

use bytes::{BufMut as _, Bytes};
use cavern_conf::process::raise_descriptor_limit;
use cavern_net::{NetError, WorkerPool};
use cavern_proto::ContentId;
use cavern_proto::data::{
    BlockRef, Range, ReadRequest, ReserveRequest, Status as BlockStatus, WriteRequest, read_request,
};
use cavern_proto::frame::{FrameHeader, MAX_MESSAGE_BYTES};
use cavern_proto::master::{Entry, MutateReply, ReadDirRequest, StatusRequest, Worker, WorkerTable};
use cavern_proto::raft::Group;
use cavern_tests::{Child, Process};
use futures::StreamExt as _;
use prost::Message;
use tokio_stream::wrappers::ReceiverStream;
use tonic::client::Grpc;
use tonic::codec::{Codec, EncodeBuf, Encoder};
use tonic::codegen::http::uri::PathAndQuery;
use tonic_prost::ProstDecoder;

use super::*;
use crate::bucket::Bucket;

/// The victim has its answer by then, while the attack goes on.
const SOON: Duration = Duration::from_secs(3);
const MIB: usize = 1 << 20;
/// Beside what a process has by itself.
const MEMORY_MAX: u64 = 400 << 20;

fn up_with(conf: &str) -> Cluster {
    Cluster::up(Options { secure: true, conf: conf.to_owned(), ..Options::default() })
}

impl Somebody {
    /// A client of the cluster with this name.
    fn client(cluster: &Cluster, name: &str) -> Self {
        let authority = Authority::open(&cluster.directory().join("certificates")).unwrap();
        let identity = Identity::new(&name_of(cluster), Role::Client, name).unwrap();
        Self::signed(&authority, authority.certificate(), &identity, DAY)
    }

    fn pool(&self, workers: &WorkerTable) -> Arc<WorkerPool> {
        let mut conf = Config::default().client;
        conf.local_descriptors = false;
        let pool = WorkerPool::new(&conf, self.transport.clone(), "somebody");
        pool.set_table("", workers);
        pool
    }

    /// A new connection, on which a path is asked for.
    fn resolve(&self, cluster: &Cluster, path: &str) -> Result<Entry, Status> {
        let mut calls = NamespaceClient::new(self.channel(cluster));
        let resolve = ResolveRequest { path: path.to_owned(), session: 0 };
        self.answer(calls.resolve(resolve)).map(tonic::Response::into_inner)
    }

    /// How many names a directory has; `None` when that is not told soon.
    fn listed(&self, cluster: &Cluster, inode: u64) -> Option<usize> {
        let mut calls = NamespaceClient::new(self.channel(cluster));
        let listed = async {
            let mut pages =
                calls.read_dir(ReadDirRequest { inode, ..ReadDirRequest::default() }).await.unwrap().into_inner();
            let mut names = 0;
            while let Some(page) = pages.message().await.unwrap() {
                names += page.entries.len();
            }
            names
        };
        self.runtime.block_on(async { tokio::time::timeout(SOON, listed).await.ok() })
    }

    fn workers(&self, cluster: &Cluster) -> WorkerTable {
        let mut calls = ClusterClient::new(self.channel(cluster));
        self.answer(calls.list_workers(ListWorkersRequest {})).unwrap().into_inner()
    }
}

/// A master and a worker answer a client that nobody has heard of before.
fn assert_served(cluster: &Cluster, name: &str) {
    let victim = Somebody::client(cluster, name);
    let began = Instant::now();
    victim.resolve(cluster, "/").unwrap();
    assert!(victim.ask_worker(cluster, &hello(), "cv worker").unwrap().contains("cv worker"));
    assert!(began.elapsed() < SOON, "{:?}", began.elapsed());
}

fn assert_small(cluster: &Cluster) {
    let status = cluster.status();
    for child in status.masters.iter().chain(&status.workers) {
        let memory = Process::of(child).peak_memory();
        assert!(memory < MEMORY_MAX, "{} has had {} MiB", child.log.display(), memory >> 20);
    }
}

fn connect(port: &str, bytes: &[u8]) -> TcpStream {
    let mut stream = TcpStream::connect(port).unwrap();
    // It may have been closed meanwhile.
    let _sent = stream.write_all(bytes);
    stream
}

#[test]
fn thousands_of_connections_that_say_too_little_keep_nobody_out() {
    raise_descriptor_limit();
    let cluster = up();
    let status = cluster.status();
    let (master, worker) = (&status.masters[0], &status.workers[0]);
    // The head of a ClientHello that never comes.
    let half = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03";
    let mut open = Vec::new();
    // More than each has places for: of the master's 1024 are for those of whom nothing is known, of the worker's 4096
    // for all, and of pages 256.
    for (port, count) in [(&master.grpc, 2500), (&worker.data, 5000), (&master.http, 1200), (&worker.http, 1200)] {
        open.extend((0..count).map(|_| connect(port, half)));
        assert_served(&cluster, "victim");
        for child in [master, worker] {
            let began = Instant::now();
            assert_eq!(child.page("/healthz").unwrap().status, 200);
            assert!(began.elapsed() < SOON, "{}: {:?}", child.http, began.elapsed());
        }
        open.clear();
    }
    assert_small(&cluster);
}

#[test]
fn connections_are_bounded_for_each_client_and_what_is_over_is_told_so() {
    let cluster = up_with("[master]\nclient_connections = 8\n[worker]\nclient_connections = 8\n");
    let attacker = Somebody::client(&cluster, "attacker");
    let channels: Vec<_> = (0..20).map(|_| attacker.channel(&cluster)).collect();
    let asked = channels.iter().map(|channel| {
        let mut calls = NamespaceClient::new(channel.clone());
        attacker.answer(calls.resolve(ResolveRequest { path: "/".to_owned(), session: 0 })).err()
    });
    let refused: Vec<Status> = asked.flatten().collect();
    assert_eq!(refused.len(), 12);
    for status in &refused {
        assert_eq!(status.code(), Code::ResourceExhausted);
        assert!(status.message().contains("/client/attacker has 8 connections already"), "{status:?}");
        assert!(status.message().contains("raise master.client_connections"), "{status:?}");
    }
    let mut open = Vec::new();
    let mut answers = Vec::new();
    for _ in 0..20 {
        let (stream, answer) = attacker.runtime.block_on(async {
            let stream = tokio::net::TcpStream::connect(&cluster.at_start.workers[0].data).await.unwrap();
            let mut stream = attacker.tls().connect(stream, Role::Worker).await.unwrap();
            stream.write_all(&hello()).await.unwrap();
            stream.flush().await.unwrap();
            let mut answer = vec![0; 4096];
            let read = tokio::time::timeout(PATIENCE, stream.read(&mut answer)).await.expect("no answer").unwrap();
            (stream, String::from_utf8_lossy(&answer[..read]).into_owned())
        });
        open.push(stream);
        answers.push(answer);
    }
    let over: Vec<&String> = answers.iter().filter(|answer| answer.contains("worker.client_connections")).collect();
    assert_eq!(over.len(), 12, "{answers:?}");
    assert_eq!(answers.iter().filter(|answer| answer.contains("cv worker")).count(), 8, "{answers:?}");
    assert_served(&cluster, "victim");
    // Who lets go of some has others.
    drop((open, channels));
    eventually("the attacker is served again", PATIENCE, || attacker.resolve(&cluster, "/").ok());
}

#[test]
fn ten_thousand_sessions_of_one_client_leave_room_for_others() {
    let cluster = up();
    let attacker = Somebody::client(&cluster, "attacker");
    // As many streams as a connection may have, on as many as it takes.
    let clients: Vec<_> = (0..20).map(|_| ClusterClient::new(attacker.channel(&cluster))).collect();
    let (keep, opened) = attacker.runtime.block_on(async {
        let open = (0..10_000).map(|number| {
            let mut calls = clients[number % clients.len()].clone();
            async move {
                let (messages, stream) = tokio::sync::mpsc::channel(1);
                let first = WatchRequest { client: "flood".to_owned(), ..WatchRequest::default() };
                messages.send(first).await.unwrap();
                let opened = tokio::time::timeout(PATIENCE, calls.watch(ReceiverStream::new(stream))).await;
                (messages, opened.unwrap_or_else(|_| Err(Status::deadline_exceeded("no answer"))))
            }
        });
        let opened: Vec<_> = futures::stream::iter(open).buffer_unordered(2000).collect().await;
        opened.into_iter().unzip::<_, _, Vec<_>, Vec<_>>()
    });
    let sessions = opened.iter().filter(|opened| opened.is_ok()).count();
    let default = Config::default().master;
    assert!((1..=default.client_sessions).contains(&sessions), "{sessions} sessions");
    let refused: Vec<&Status> = opened.iter().filter_map(|opened| opened.as_ref().err()).collect();
    assert!(refused.iter().all(|status| status.code() == Code::ResourceExhausted), "{:?}", refused.first());
    assert!(refused.iter().any(|status| status.message().contains("master.client_sessions")), "{:?}", refused.first());

    let victim = Somebody::client(&cluster, "victim");
    let mut calls = ClusterClient::new(victim.channel(&cluster));
    let first = WatchRequest { client: "victim".to_owned(), ..WatchRequest::default() };
    victim.answer(calls.watch(tokio_stream::iter([first]))).unwrap();
    assert_served(&cluster, "victim");
    assert_small(&cluster);
    drop((keep, opened));
}

#[test]
fn streams_that_nobody_reads_leave_the_master_to_others() {
    let cluster = up_with("[master]\nclient_calls = 1024\n");
    cluster.seed("bucket", "x/", 1, 10);
    cluster.mount_fs_mode("s3://bucket/work", "/data", &[]);
    fs::create_dir(cluster.path("data/d")).unwrap();
    for number in 0..3000 {
        fs::File::create(cluster.path(format!("data/d/{number}"))).unwrap();
    }
    // The master has them.
    fs::File::open(cluster.path("data/d")).unwrap().sync_all().unwrap();
    let attacker = Somebody::client(&cluster, "attacker");
    let inode = attacker.resolve(&cluster, "/data/d").unwrap().attr.unwrap().inode;
    let clients: Vec<_> = (0..4).map(|_| NamespaceClient::new(attacker.channel(&cluster))).collect();
    let streams: Vec<_> = attacker.runtime.block_on(async {
        let open = (0..2500).map(|number| {
            let mut calls = clients[number % clients.len()].clone();
            let read = ReadDirRequest { inode, ..ReadDirRequest::default() };
            async move { tokio::time::timeout(SOON, calls.read_dir(read)).await }
        });
        futures::future::join_all(open).await
    });
    let refused = streams.iter().flatten().filter_map(|stream| stream.as_ref().err());
    let over = refused.filter(|status| status.message().contains("master.client_calls")).count();
    assert!(over > 0, "all of them are open");
    assert_served(&cluster, "victim");
    fs::metadata(cluster.path("data/d")).unwrap();
    // Its own listings wait for those that it does not take, and nobody else's.
    let victim = Somebody::client(&cluster, "victim");
    assert_eq!(victim.listed(&cluster, inode), Some(3000));
    assert_small(&cluster);
    drop(streams);
    assert_eq!(attacker.listed(&cluster, inode), Some(3000), "they are over");
}

/// Sends bytes as they are, and takes answers of this kind.
struct Raw<T>(PhantomData<T>);

impl<T: Message + Default + Send + 'static> Codec for Raw<T> {
    type Encode = Bytes;
    type Decode = T;
    type Encoder = Self;
    type Decoder = ProstDecoder<T>;

    fn encoder(&mut self) -> Self {
        Self(PhantomData)
    }

    fn decoder(&mut self) -> ProstDecoder<T> {
        ProstDecoder::default()
    }
}

impl<T> Encoder for Raw<T> {
    type Item = Bytes;
    type Error = Status;

    fn encode(&mut self, message: Bytes, into: &mut EncodeBuf<'_>) -> Result<(), Status> {
        into.put(message);
        Ok(())
    }
}

#[test]
fn changes_that_would_be_hundreds_of_times_as_large_in_memory_are_refused() {
    let cluster = up_with("");
    let attacker = Somebody::client(&cluster, "attacker");
    let channels: Vec<_> = (0..8).map(|_| attacker.channel(&cluster)).collect();
    // Empty changes; and one with empty blocks.
    let changes = Bytes::from([0x12, 0].repeat(500_000));
    let mut made = vec![0x12, 0, 0, 0, 0x6a, 0, 0, 0];
    made.extend([0x1a, 0].repeat(500_000));
    for (at, length) in [(1, made.len() - 4), (5, made.len() - 8)] {
        let varint = [length as u8 | 0x80, (length >> 7) as u8 | 0x80, (length >> 14) as u8];
        made[at..at + 3].copy_from_slice(&varint);
    }
    let calls = [changes, Bytes::from(made)];
    let answers: Vec<_> = attacker.runtime.block_on(async {
        let send = (0..150).map(|number| {
            let (mut calls, channel) = (calls.iter().cycle().skip(number % 2), &channels[number % channels.len()]);
            let (call, mut channel) = (calls.next().unwrap().clone(), Grpc::new(channel.clone()));
            async move {
                channel.ready().await.unwrap();
                let path = PathAndQuery::from_static("/cavern.master.v1.Namespace/Mutate");
                let stream = futures::stream::once(async { call }).chain(futures::stream::pending());
                let codec = Raw(PhantomData::<MutateReply>);
                let mut answers = channel.streaming(tonic::Request::new(stream), path, codec).await?.into_inner();
                answers.message().await.map(drop)
            }
        });
        let sent = futures::future::join_all(send);
        tokio::time::timeout(PATIENCE * 6, sent).await.expect("some are not answered")
    });
    // Those that find no room among so many are told to come again; all others are too many changes.
    let is_judged = |answer: Result<(), tonic::Status>| {
        let refused = answer.unwrap_err();
        let is_judged = refused.code() == Code::InvalidArgument && refused.message().contains("changes");
        assert!(is_judged || refused.code() == Code::Unavailable, "{refused}");
        is_judged
    };
    let judged = answers.into_iter().map(is_judged).filter(|judged| *judged).count();
    assert!(judged >= 16, "{judged}");
    assert_served(&cluster, "victim");
    assert_small(&cluster);
}

#[test]
fn clients_send_the_group_of_masters_short_messages_only() {
    let cluster = up_with("");
    let attacker = Somebody::client(&cluster, "attacker");
    // A field that nobody knows, of this many bytes.
    let padded = |length: usize| {
        let varint = [length as u8 | 0x80, (length >> 7) as u8 | 0x80, (length >> 14) as u8];
        Bytes::from([&[0x7a][..], &varint[..], &vec![0; length]].concat())
    };
    let channel = attacker.channel(&cluster);
    let ask = async |length: usize| {
        let mut channel = Grpc::new(channel.clone());
        channel.ready().await.unwrap();
        let path = PathAndQuery::from_static("/cavern.raft.v1.Raft/GetGroup");
        let codec = Raw(PhantomData::<Group>);
        channel.unary(tonic::Request::new(padded(length)), path, codec).await.map(tonic::Response::into_inner)
    };
    let answers = attacker.runtime.block_on(async {
        let sent = futures::future::join(ask(60_000), ask(100_000));
        tokio::time::timeout(PATIENCE, sent).await.expect("some are not answered")
    });
    assert!(!answers.0.unwrap().cluster_id.is_empty());
    let refused = answers.1.unwrap_err();
    assert!(refused.code() == Code::OutOfRange && refused.message().contains("65536"), "{refused}");
    assert_served(&cluster, "victim");
}

/// A mounted object of one block that the worker has.
fn cached_block(cluster: &Cluster, somebody: &Somebody, bytes: usize) -> BlockRef {
    cluster.s3.create_bucket("bucket");
    let etag = cluster.s3.put("bucket", "big", vec![7; bytes]);
    cluster.mount("s3://bucket", "/data", &[]);
    let bucket = Bucket::of(cluster, "bucket");
    assert_eq!(fs::read(cluster.path("data/big")).unwrap().len(), bytes);
    let mut calls = ClusterClient::new(somebody.channel(cluster));
    let mounts = somebody.answer(calls.list_mounts(ListMountsRequest {})).unwrap().into_inner().mounts;
    let (block_size, length) = (mounts[0].block_size, bytes as u64);
    let id = ContentId::of_object(bucket.ufs.store_id(), "big", &etag, length, block_size);
    BlockRef {
        content_id: id.as_bytes().to_vec().into(),
        block_size,
        mount_id: mounts[0].id,
        key: "big".to_owned(),
        etag,
        object_length: length,
        ..BlockRef::default()
    }
}

fn read_of(block: &BlockRef, length: usize) -> Vec<read_request::Item> {
    let range = Some(Range { offset: 0, length: length as u32 });
    vec![read_request::Item { block: Some(block.clone()), range, part: None }]
}

/// Reads 4 MiB of a block so often, each time when the last has come, over connections of its own.
fn read_times(somebody: &Somebody, workers: &WorkerTable, block: &BlockRef, times: usize) {
    let pool = somebody.runtime.block_on(async { somebody.pool(workers) });
    for _ in 0..times {
        let read = pool.read(workers.workers[0].id, read_of(block, 4 * MIB), PATIENCE);
        let (_, payload): (_, Bytes) = somebody.runtime.block_on(read).unwrap();
        assert_eq!(payload.len(), 4 * MIB);
    }
    somebody.runtime.block_on(pool.shutdown());
}

#[test]
fn answers_that_nobody_takes_leave_memory_for_others() {
    let cluster = up_with("[worker]\nmemory_budget = \"64MiB\"\n");
    let attacker = Somebody::client(&cluster, "attacker");
    let block = cached_block(&cluster, &attacker, 16 * MIB);
    let worker = &cluster.at_start.workers[0];
    let mut bytes = hello();
    for id in 1..=16 {
        let request = ReadRequest { items: read_of(&block, 16 * MIB), ..ReadRequest::default() };
        bytes.extend(encode_frame(FrameKind::Read, id, &request, 0));
    }
    let stalled: Vec<_> = attacker.runtime.block_on(async {
        let open = (0..64).map(|_| async {
            let stream = tokio::net::TcpStream::connect(&worker.data).await.unwrap();
            let mut stream = attacker.tls().connect(stream, Role::Worker).await.unwrap();
            stream.write_all(&bytes).await.unwrap();
            stream.flush().await.unwrap();
            // What it reads is the greeting.
            stream.read_exact(&mut [0; 16]).await.unwrap();
            stream
        });
        futures::future::join_all(open).await
    });
    let victim = Somebody::client(&cluster, "victim");
    let workers = victim.workers(&cluster);
    let [Worker { id, .. }] = &workers.workers[..] else { panic!("{workers:?}") };
    let pool = victim.runtime.block_on(async { victim.pool(&workers) });
    for _ in 0..20 {
        let began = Instant::now();
        let (reply, payload) = victim.runtime.block_on(pool.read(*id, read_of(&block, 4 * MIB), PATIENCE)).unwrap();
        assert_eq!(payload.len(), 4 * MIB, "{reply:?}");
        assert!(began.elapsed() < SOON, "{:?}", began.elapsed());
    }
    assert_small(&cluster);
    victim.runtime.block_on(pool.shutdown());
    drop(stalled);
}

#[test]
fn messages_that_never_end_take_no_more_memory_than_their_client_may_have() {
    let cluster = up_with("[worker]\nmemory_budget = \"64MiB\"\n");
    let attacker = Somebody::client(&cluster, "attacker");
    let worker = &cluster.at_start.workers[0];
    let memory = || Process::of(worker).peak_memory();
    let before = memory();
    let mut bytes = hello();
    let head =
        FrameHeader { kind: FrameKind::Query, request_id: 1, message_bytes: MAX_MESSAGE_BYTES, payload_bytes: 0 };
    bytes.extend(head.encode());
    // All of it but the last byte.
    bytes.resize(bytes.len() + MAX_MESSAGE_BYTES as usize - 1, 0);
    let held: Vec<_> = attacker.runtime.block_on(async {
        let open = (0..150).map(|_| async {
            let stream = tokio::net::TcpStream::connect(&worker.data).await.unwrap();
            let mut stream = attacker.tls().connect(stream, Role::Worker).await.unwrap();
            // What the worker does not take is in the buffers of sockets, or here.
            let _sent = tokio::time::timeout(SOON, stream.write_all(&bytes)).await;
            stream
        });
        futures::future::join_all(open).await
    });
    assert_served(&cluster, "victim");
    // It is 600 MiB.
    let taken = (memory() - before) >> 20;
    assert!(taken < 150, "the worker has {taken} MiB for messages");
    assert_small(&cluster);
    drop(held);
}

/// A value of a client's metrics; seconds come as such.
fn shown(child: &Child, metric: &str, client: &str) -> f64 {
    let page = child.page("/metrics").unwrap().body;
    let begins = format!("{metric}{{client=\"{client}\"}} ");
    let value = page.lines().find_map(|line| line.strip_prefix(&begins)).unwrap_or_else(|| panic!("{begins}: {page}"));
    value.parse().unwrap()
}

#[test]
fn a_client_goes_on_no_faster_than_its_rate_and_another_does_not_wait_for_it() {
    let conf = "[master]\nclient_operations_per_second = 1000\n[worker]\nclient_bytes_per_second = \"16MiB\"\n";
    let cluster = up_with(conf);
    let [attacker, victim] = ["attacker", "victim"].map(|name| Somebody::client(&cluster, name));
    let status = cluster.status();
    let (master, worker) = (&status.masters[0], &status.workers[0]);
    let block = cached_block(&cluster, &attacker, 8 * MIB);

    let calls = NamespaceClient::new(attacker.channel(&cluster));
    let flood = async {
        let resolve = ResolveRequest { path: "/data".to_owned(), session: 0 };
        let all = (0..3000).map(|_| {
            let (mut calls, resolve) = (calls.clone(), resolve.clone());
            async move { calls.resolve(resolve).await.unwrap() }
        });
        futures::stream::iter(all).buffer_unordered(200).collect::<Vec<_>>().await
    };
    let began = Instant::now();
    std::thread::scope(|scope| {
        let flooding = scope.spawn(|| attacker.runtime.block_on(flood));
        while !flooding.is_finished() {
            let asked = Instant::now();
            victim.resolve(&cluster, "/data").unwrap();
            // It keeps to its own rate.
            std::thread::sleep(Duration::from_millis(5));
            assert!(asked.elapsed() < SOON / 3, "{:?}", asked.elapsed());
        }
        assert_eq!(flooding.join().unwrap().len(), 3000);
    });
    assert!(began.elapsed() > Duration::from_millis(2500), "{:?}", began.elapsed());
    assert!(shown(master, "cavern_master_client_operations_total", "attacker") >= 3000.0);
    assert!(shown(master, "cavern_master_client_waited_seconds_total", "attacker") > 1.0);
    assert_eq!(shown(master, "cavern_master_client_waited_seconds_total", "victim"), 0.0);

    let workers = attacker.workers(&cluster);
    let read = |somebody: &Somebody, times: usize| read_times(somebody, &workers, &block, times);
    let began = Instant::now();
    std::thread::scope(|scope| {
        let flooding = scope.spawn(|| read(&attacker, 12));
        let asked = Instant::now();
        read(&victim, 1);
        assert!(asked.elapsed() < SOON / 3, "{:?}", asked.elapsed());
        flooding.join().unwrap();
    });
    // 44 of 48 MiB are waited for, but for those of a fifth of a second.
    assert!(began.elapsed() > Duration::from_secs(2), "{:?}", began.elapsed());
    assert_eq!(shown(worker, "cavern_worker_client_bytes_total", "attacker"), (48 * MIB) as f64);
    assert!(shown(worker, "cavern_worker_client_waited_seconds_total", "attacker") > 1.0);
    // What it read itself is a little more than what it may read at once.
    assert!(shown(worker, "cavern_worker_client_waited_seconds_total", "victim") < 0.5);
}

#[test]
fn a_mount_has_a_rate_for_each_client_and_others_go_on_beside_it() {
    let cluster = up_with("");
    let [attacker, victim] = ["attacker", "victim"].map(|name| Somebody::client(&cluster, name));
    let status = cluster.status();
    let (master, worker) = (&status.masters[0], &status.workers[0]);
    let block = cached_block(&cluster, &attacker, 8 * MIB);
    cluster.s3.create_bucket("else");
    cluster.mount("s3://else", "/else", &[]);
    let limited = "attacker=ro,operations=20,bytes=8MiB";
    cluster.cv(&["mount", "update", "/data", "--client", limited, "--client", "*"]);
    let shown_rules = cluster.cv(&["mount"]).stdout;
    assert!(shown_rules.contains(&format!("there for {limited}, * only")), "{shown_rules}");

    let ask = |path: &str, times: usize, at_once: usize| {
        let calls = NamespaceClient::new(attacker.channel(&cluster));
        let resolve = ResolveRequest { path: path.to_owned(), session: 0 };
        let all = (0..times).map(|_| {
            let (mut calls, resolve) = (calls.clone(), resolve.clone());
            async move { calls.resolve(resolve).await }
        });
        let asked = futures::stream::iter(all).buffer_unordered(at_once).collect::<Vec<_>>();
        attacker.runtime.block_on(asked)
    };
    let began = Instant::now();
    std::thread::scope(|scope| {
        let limited = scope.spawn(|| ask("/data", 60, 20));
        // The same client in another mount, where so many would take a quarter of a minute at that rate.
        assert!(ask("/else", 300, 20).iter().all(Result::is_ok));
        assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
        assert!(limited.join().unwrap().iter().all(Result::is_ok));
    });
    // All but those of a fifth of a second are waited for.
    assert!(began.elapsed() > Duration::from_millis(2500), "{:?}", began.elapsed());
    assert!(shown(master, "cavern_master_client_waited_seconds_total", "attacker") > 1.0);
    // Nobody waits for longer than he would wait for an answer.
    let refused = ask("/data", 400, 400).into_iter().find_map(Result::err).unwrap();
    assert_eq!(refused.code(), Code::ResourceExhausted);
    assert!(refused.message().contains("more than the 20 operations in a second that its rule of mount"), "{refused}");
    let asked = Instant::now();
    victim.resolve(&cluster, "/data").unwrap();
    assert!(asked.elapsed() < SOON);

    let workers = attacker.workers(&cluster);
    let read = |somebody: &Somebody, times: usize| read_times(somebody, &workers, &block, times);
    let began = Instant::now();
    read(&attacker, 7);
    // 20 of 28 MiB, but for those of a fifth of a second, and the last one is for who comes next.
    assert!(began.elapsed() > Duration::from_secs(2), "{:?}", began.elapsed());
    assert!(shown(worker, "cavern_worker_client_waited_seconds_total", "attacker") > 1.0);
    let began = Instant::now();
    read(&victim, 7);
    assert!(began.elapsed() < SOON, "{:?}", began.elapsed());
    cluster.cv(&["mount", "update", "/data", "--client", "attacker=ro", "--client", "*"]);
    let until = Instant::now() + PATIENCE;
    loop {
        let began = Instant::now();
        assert!(ask("/data", 100, 20).iter().all(Result::is_ok));
        if began.elapsed() < Duration::from_secs(1) {
            break;
        }
        assert!(Instant::now() < until, "it still waits");
    }
}

#[test]
fn who_makes_blocks_that_no_file_has_is_refused_at_a_bound_and_others_write_on() {
    const BLOCK: u32 = 1 << 20;
    // The mount is one of another host, as far as its worker knows.
    let conf = "[client]\nlocal_descriptors = false\n\
                [worker]\nclient_reserved = \"64MiB\"\nreservation_timeout = \"10s\"\n";
    let cluster = up_with(conf);
    cluster.seed("bucket", "x/", 1, 1000);
    cluster.mount_fs_mode("s3://bucket/work", "/work", &["--block-size", "1MiB"]);
    let admin = Somebody::of(&cluster, Role::Admin);
    let mut calls = ClusterClient::new(admin.channel(&cluster));
    let status = admin.answer(calls.status(StatusRequest::default())).unwrap().into_inner();
    let (cluster_id, mount) = (status.cluster_id, &status.mounts.unwrap().mounts[0]);
    let [attacker, victim] = ["attacker", "victim"].map(|name| Somebody::client(&cluster, name));
    let workers = attacker.workers(&cluster);
    let [Worker { id, .. }] = workers.workers[..] else { panic!("{workers:?}") };
    let [evil, good] = [&attacker, &victim].map(|somebody| somebody.pool(&workers));
    let take = |somebody: &Somebody, pool: &WorkerPool, inode: u64| {
        let block = Some(BlockRef::of_inode(&cluster_id, inode, 0, 0, mount.block_size, mount.id));
        let ranges = vec![Range { offset: 0, length: BLOCK }];
        let request = ReserveRequest { block, ranges, allocate: true, ..ReserveRequest::default() };
        somebody.runtime.block_on(pool.reserve(id, request, PATIENCE)).map(drop)
    };
    let made_up = 1 << 40;
    let mut made = 0;
    let refusal = loop {
        match take(&attacker, &evil, made_up + made) {
            Ok(()) => made += 1,
            Err(refusal) => break refusal,
        }
        assert!(made <= 64, "{made} blocks");
    };
    assert_eq!(made, 64);
    let NetError::WorkerStatus { status, message, .. } = &refusal else { panic!("{refusal:?}") };
    assert_eq!(*status, BlockStatus::NoSpace);
    assert!(message.contains("the client \"attacker\" has 64MiB") && message.contains("raise worker"), "{message}");
    // By writes as well.
    let block = Some(BlockRef::of_inode(&cluster_id, made_up + made, 0, 0, mount.block_size, mount.id));
    let request = WriteRequest { block, ..WriteRequest::default() };
    let payload = Bytes::from(vec![1; BLOCK as usize]);
    assert!(attacker.runtime.block_on(evil.write(id, request, payload, PATIENCE)).is_err());

    // Others go on, and whoever commits what it writes has no bound.
    take(&victim, &good, 2 * made_up).unwrap();
    let content: Vec<u8> = (0..160 * MIB).map(|at| (at >> 12) as u8).collect();
    let path = cluster.path("work/f");
    fs::write(&path, &content).unwrap();
    fs::File::open(&path).unwrap().sync_all().unwrap();
    // What no file has makes room again, and all that files have stays.
    let freed = || cluster.status().workers[0].metric("cavern_worker_orphan_blocks_total").unwrap();
    eventually("what no file has is freed", 6 * PATIENCE, || (freed() >= made).then_some(()));
    take(&attacker, &evil, made_up).unwrap();
    assert!(fs::read(&path).unwrap() == content);
    attacker.runtime.block_on(evil.shutdown());
    victim.runtime.block_on(good.shutdown());
}

/// Lines of a log with these words, and how many more they say were left out.
fn told(child: &Child, words: &str) -> (usize, u64) {
    let log = fs::read_to_string(&child.log).unwrap();
    let lines: Vec<&str> = log.lines().filter(|line| line.contains(words)).collect();
    let left_out = lines.iter().filter_map(|line| {
        let (_, rest) = line.split_once("suppressed=")?;
        rest.split(|character: char| !character.is_ascii_digit()).next()?.parse::<u64>().ok()
    });
    (lines.len(), left_out.sum())
}

/// Does something `COUNT` times, and then until the log has a line that counts the others. There are no more lines than
/// ten in a second.
#[track_caller]
fn assert_throttled(child: &Child, words: &str, mut does: impl FnMut()) {
    const COUNT: usize = 60;
    let (begun, (before, left_out_before)) = (Instant::now(), told(child, words));
    (0..COUNT).for_each(|_| does());
    eventually(&format!("{words}: the rest is counted"), PATIENCE, || {
        does();
        (told(child, words).1 > left_out_before).then_some(())
    });
    let lines = told(child, words).0 - before;
    let most = 10 * (begun.elapsed().as_secs() as usize + 2);
    assert!((1..=most).contains(&lines), "{lines} lines \"{words}\" in {:?}", begun.elapsed());
}

#[test]
fn peers_do_not_flood_the_logs() {
    let cluster = up_with("");
    let (master, worker) = (&cluster.at_start.masters[0], &cluster.at_start.workers[0]);
    let garbage = |address: &str| {
        let mut stream = TcpStream::connect(address).unwrap();
        stream.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
        let _ = stream.shutdown(Shutdown::Write);
        let _ = stream.read_to_end(&mut Vec::new());
    };
    assert_throttled(master, "a connection is refused", || garbage(&master.grpc));
    assert_throttled(worker, "a connection is refused", || garbage(&worker.data));

    // A client that comes and goes.
    let attacker = Somebody::of(&cluster, Role::Client);
    let mut calls = ClusterClient::new(attacker.channel(&cluster));
    assert_throttled(master, "a client's session begins", || {
        let first = WatchRequest { client: "flood".to_owned(), ..WatchRequest::default() };
        attacker.answer(calls.watch(tokio_stream::iter([first]))).unwrap();
    });
    // Others are told of at once.
    let other = Somebody::client(&cluster, "other");
    let mut calls = ClusterClient::new(other.channel(&cluster));
    let first = WatchRequest { client: "somebody-else".to_owned(), ..WatchRequest::default() };
    other.answer(calls.watch(tokio_stream::iter([first]))).unwrap();
    eventually("the session of another client is in the log", PATIENCE, || {
        fs::read_to_string(&master.log).unwrap().contains("client=\"somebody-else\"").then_some(())
    });
}
