//! Connections over TLS: what goes over them, who is refused, and what nobody does for whoever has not the role.

use std::time::Instant;

use cavern_conf::Config;
use cavern_net::{NetError, WorkerPool};
use cavern_proto::master::{ClientRule, Worker, WorkerTable};
use cavern_security::{Authority, Identity, Role, Transport};

use super::persist::{BLOCK, block, request};
use super::*;
use crate::fill::BlockSource;

const CLUSTER: &str = "cavern";
const HOUR: Duration = Duration::from_secs(3600);
const WORKER: u64 = 7;

/// Makes certificates.
struct Certificates {
    home: tempfile::TempDir,
    authority: Authority,
}

impl Certificates {
    fn new() -> Self {
        let home = tempfile::tempdir().unwrap();
        let authority = Authority::create(home.path(), CLUSTER).unwrap();
        Self { home, authority }
    }

    fn transport(&self, role: Role) -> Transport {
        self.transport_of(&self.authority, CLUSTER, role, HOUR)
    }

    /// With a certificate of that authority, which this one's processes are to trust.
    fn transport_of(&self, authority: &Authority, cluster: &str, role: Role, holds: Duration) -> Transport {
        let place = tempfile::tempdir_in(self.home.path()).unwrap();
        let identity = Identity::new(cluster, role, "here").unwrap();
        let issued = authority.issue(&identity, holds, place.path(), "here").unwrap();
        let mut config = Config::default();
        config.cluster.name = cluster.to_owned();
        config.security.ca = self.authority.certificate().to_owned();
        config.security.certificate = issued.certificate;
        config.security.key = issued.key;
        Transport::of(&config).unwrap()
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    Tcp,
    Any,
}

impl Fixture {
    fn table(&self, way: Way) -> WorkerTable {
        let socket_path = if way == Way::Any { self.socket().display().to_string() } else { String::new() };
        let data_address = self.address().to_string();
        WorkerTable {
            workers: vec![Worker { id: WORKER, data_address, socket_path, ..Default::default() }],
            ..Default::default()
        }
    }

    fn pool_of(&self, transport: Transport) -> Arc<WorkerPool> {
        let pool = WorkerPool::new(&schema::Client::default(), transport, "test");
        pool.set_table("cluster-1", &self.table(Way::Tcp));
        pool
    }

    fn pool_of_master(&self, transport: Transport, term: u64, way: Way) -> Arc<WorkerPool> {
        let pool = WorkerPool::of_master(&schema::Client::default(), transport, term);
        pool.set_table("cluster-1", &self.table(way));
        pool
    }
}

async fn write_block(pool: &WorkerPool, name: &BlockRef, bytes: &[u8]) -> Result<(), NetError> {
    let request = WriteRequest { block: Some(name.clone()), ..Default::default() };
    pool.write(WORKER, request, Bytes::copy_from_slice(bytes), PATIENCE).await.map(drop)
}

fn read_items(name: &BlockRef, length: usize) -> Vec<read_request::Item> {
    let range = Some(Range { offset: 0, length: length as u32 });
    vec![read_request::Item { block: Some(name.clone()), range, part: None }]
}

async fn read_block(pool: &WorkerPool, name: &BlockRef, length: usize) -> Bytes {
    let (reply, payload) = pool.read(WORKER, read_items(name, length), PATIENCE).await.unwrap();
    assert_eq!(reply.items[0].status(), Status::Ok, "{}", reply.items[0].message);
    payload
}

async fn is_here(pool: &WorkerPool, name: &BlockRef) -> bool {
    pool.query(WORKER, vec![name.clone()]).await.unwrap().items[0].known
}

#[track_caller]
fn denied<T: std::fmt::Debug>(outcome: Result<T, NetError>, who: &str) {
    match outcome {
        Err(NetError::WorkerStatus { status: Status::PermissionDenied, message, .. }) => {
            assert!(message.contains(who), "{message}");
        }
        other => panic!("{other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn blocks_are_read_and_written_over_tls() {
    let certificates = Certificates::new();
    let bench = Fixture::secured("tls", certificates.transport(Role::Worker)).await;
    let pool = bench.pool_of(certificates.transport(Role::Client));
    // Uploads and answers of all sizes, of each connection several at a time.
    let writing = (0..12u64).map(|inode| {
        let pool = pool.clone();
        tokio::spawn(async move {
            let bytes = noise((5 << (2 * inode)).min(BLOCK as usize));
            let bytes = &bytes[..];
            write_block(&pool, &block(inode, 0), bytes).await.unwrap();
            let request = SyncRequest { blocks: vec![block(inode, 0)], failed: Vec::new() };
            pool.sync(WORKER, request, PATIENCE).await.unwrap();
            assert!(read_block(&pool, &block(inode, 0), bytes.len()).await == *bytes, "{inode}");
        })
    });
    for written in writing.collect::<Vec<_>>() {
        written.await.unwrap();
    }
    let large = noise(BLOCK as usize);
    let cached = bench.put("large", &large, 64 * MIB);
    let reading = (0..16).map(|_| {
        let (pool, cached) = (pool.clone(), cached.clone());
        tokio::spawn(async move { read_block(&pool, &cached, BLOCK as usize).await })
    });
    for read in reading.collect::<Vec<_>>() {
        assert!(read.await.unwrap() == large);
    }
    write_block(&pool, &block(20, 0), &large).await.unwrap();
    assert!(read_block(&pool, &block(20, 0), large.len()).await == large);
    pool.shutdown().await;
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn strangers_are_refused_and_told_why() {
    let (certificates, foreign) = (Certificates::new(), Certificates::new());
    let bench = Fixture::secured("strangers-tls", certificates.transport(Role::Worker)).await;
    let refused = async |transport: Transport, text: &str| {
        let before = bench.metrics.connections_refused.get();
        let pool = bench.pool_of(transport);
        match pool.query(WORKER, vec![block(1, 0)]).await {
            Err(NetError::WorkerConnection { cause, .. }) => assert!(cause.contains(text), "{text}: {cause}"),
            other => panic!("{text}: {other:?}"),
        }
        pool.shutdown().await;
        let until = tokio::time::Instant::now() + PATIENCE;
        while bench.metrics.connections_refused.get() == before {
            assert!(tokio::time::Instant::now() < until, "{text}: the worker has noticed nothing");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    refused(Transport::Plain, "speaks TLS").await;
    let foreign_one = certificates.transport_of(&foreign.authority, CLUSTER, Role::Client, HOUR);
    refused(foreign_one, "refuses the certificate of this process").await;
    let other_cluster = certificates.transport_of(&certificates.authority, "other", Role::Client, HOUR);
    refused(other_cluster, "of another cluster").await;
    let expired = certificates.transport_of(&certificates.authority, CLUSTER, Role::Client, Duration::ZERO);
    // It holds until the second of its making is over.
    tokio::time::sleep(Duration::from_millis(1500)).await;
    refused(expired, "CertificateExpired").await;
    // Who trusts another authority does not speak to this worker.
    refused(foreign.transport(Role::Client), "the certificate of the other side is refused").await;
    let pool = bench.pool_of(certificates.transport(Role::Client));
    assert!(!is_here(&pool, &block(1, 0)).await);
    pool.shutdown().await;
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn who_is_no_worker_is_not_taken_for_one() {
    let certificates = Certificates::new();
    for (server, text) in [(certificates.transport(Role::Master), "is no worker"), (Transport::Plain, "not speak TLS")]
    {
        let bench = Fixture::secured("no-worker", server).await;
        let pool = bench.pool_of(certificates.transport(Role::Client));
        match pool.query(WORKER, vec![block(1, 0)]).await {
            Err(NetError::WorkerConnection { cause, .. }) => assert!(cause.contains(text), "{cause}"),
            other => panic!("{other:?}"),
        }
        pool.shutdown().await;
        bench.end().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn who_says_nothing_holds_up_nobody() {
    let certificates = Certificates::new();
    let bench = Fixture::secured("silent-tls", certificates.transport(Role::Worker)).await;
    let mut silent = Vec::new();
    for _ in 0..100 {
        silent.push(TcpStream::connect(bench.address()).await.unwrap());
    }
    let pool = bench.pool_of(certificates.transport(Role::Client));
    let asked = tokio::time::timeout(Duration::from_secs(5), is_here(&pool, &block(1, 0))).await;
    assert!(!asked.expect("the silent ones are waited for"));
    assert!(bench.metrics.connections.get() > 100, "they count");
    pool.shutdown().await;
    // The end does not wait for them either.
    tokio::time::timeout(Duration::from_secs(5), bench.end()).await.unwrap();
    drop(silent);
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_done_for_who_has_not_the_role() {
    let certificates = Certificates::new();
    let bench = Fixture::secured("roles", certificates.transport(Role::Worker)).await;
    let bytes = noise(100_000);
    let name = block(1, 0);
    let client = bench.pool_of(certificates.transport(Role::Client));
    write_block(&client, &name, &bytes).await.unwrap();

    denied(client.free(WORKER, vec![name.clone()]).await, "cavern://cavern/client/here may not ask for Free");
    denied(client.persist(WORKER, request("object", 1, 1000, &[0], WORKER), PATIENCE).await, "Persist");
    let copy = CopyRequest { block: Some(block(2, 0)), workers: vec![WORKER], deadline_ms: 1000 };
    denied(client.copy(WORKER, copy, PATIENCE).await, "Copy");
    denied(client.inspect(WORKER, InspectRequest::default(), PATIENCE).await, "Inspect");
    let worker = bench.pool_of(certificates.transport(Role::Worker));
    // The payload is thrown away, and the connection goes on.
    denied(write_block(&worker, &name, &noise(3 << 20)).await, "cavern://cavern/worker/here may not ask for Write");
    denied(write_block(&worker, &block(3, 0), &noise(1 << 20)).await, "Write");
    // A master may look which blocks are here; it reads none of them.
    let master = bench.pool_of(certificates.transport(Role::Master));
    assert!(is_here(&master, &name).await && !is_here(&master, &block(2, 0)).await);
    denied(master.read(WORKER, read_items(&name, bytes.len()), PATIENCE).await, "Read");
    let admin = bench.pool_of(certificates.transport(Role::Admin));
    denied(admin.free(WORKER, vec![name.clone()]).await, "may not free blocks of files");
    let cached = bench.put("a", &bytes, MIB);
    assert!(read_block(&admin, &cached, bytes.len()).await == bytes);
    assert_eq!(admin.free(WORKER, vec![cached]).await.unwrap().blocks, 1);

    assert!(!is_here(&worker, &block(2, 0)).await && !is_here(&worker, &block(3, 0)).await);
    assert!(read_block(&worker, &name, bytes.len()).await == bytes);
    assert_eq!(bench.bucket.keys(), ["a"]);
    for pool in [client, worker, admin, master] {
        pool.shutdown().await;
    }
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn blocks_are_for_the_clients_that_their_mount_is_there_for() {
    let certificates = Certificates::new();
    let bench = Fixture::secured("rights", certificates.transport(Role::Worker)).await;
    let rule = |epoch, client: &str, read_only| {
        let clients = vec![ClientRule { name: client.to_owned(), read_only, ..ClientRule::default() }];
        let uri = "memory://server-rights".to_owned();
        let mount = Mount { id: 1, uri, write_type: WriteType::FsMode as i32, clients, ..Default::default() };
        bench.mounts.apply(MountTable { epoch, mounts: vec![mount], status: vec![] });
    };
    let (bytes, other) = (noise(100_000), noise(3 << 20));
    let (name, cached) = (block(1, 0), bench.put("a", &bytes, MIB));
    let client = bench.pool_of(certificates.transport(Role::Client));
    write_block(&client, &name, &bytes).await.unwrap();
    let admin = bench.pool_of(certificates.transport(Role::Admin));
    for (pool, is_told) in [(&client, false), (&admin, true)] {
        let reply = pool.query(WORKER, vec![name.clone()]).await.unwrap();
        assert_eq!(!reply.items[0].path.is_empty(), is_told, "where its file is: {}", reply.items[0].path);
    }

    rule(2, "somebody", false);
    denied(write_block(&client, &name, &other).await, "mount 1 is not there for the client \"here\"");
    denied(write_block(&client, &block(2, 0), &other).await, "not there for");
    denied(
        client.sync(WORKER, SyncRequest { blocks: vec![name.clone()], ..SyncRequest::default() }, PATIENCE).await,
        "not there for",
    );
    denied(client.query(WORKER, vec![name.clone()]).await, "not there for");
    let reserve = ReserveRequest { block: Some(block(3, 0)), ..ReserveRequest::default() };
    denied(client.reserve(WORKER, reserve, PATIENCE).await, "not there for");
    for name in [&name, &cached] {
        denied(client.read(WORKER, read_items(name, bytes.len()), PATIENCE).await, "not there for");
    }

    rule(3, "here", true);
    assert!(read_block(&client, &name, bytes.len()).await == bytes);
    assert!(read_block(&client, &cached, bytes.len()).await == bytes);
    denied(write_block(&client, &name, &other).await, "mount 1 is only read by the client \"here\"");
    // Nobody is in between who could know of another mount.
    match client.query(WORKER, vec![BlockRef { mount_id: 9, ..name.clone() }]).await {
        Err(NetError::WorkerStatus { status: Status::UnknownMount, .. }) => {}
        other => panic!("{other:?}"),
    }

    // Nothing was done, and others are not concerned.
    rule(4, "somebody", false);
    let worker = bench.pool_of(certificates.transport(Role::Worker));
    assert!(read_block(&worker, &name, bytes.len()).await == bytes);
    assert!(!is_here(&worker, &block(2, 0)).await && !is_here(&worker, &block(3, 0)).await);
    let here = bench.pool_of_master(Transport::Plain, 0, Way::Any);
    assert!(is_here(&here, &name).await);
    rule(5, "here", false);
    write_block(&client, &block(2, 0), &other).await.unwrap();
    assert!(read_block(&client, &block(2, 0), other.len()).await == other);
    for pool in [client, admin, worker, here] {
        pool.shutdown().await;
    }
    bench.end().await;
}

/// Also what is given up: nothing of it is done later.
#[tokio::test(flavor = "multi_thread")]
async fn what_waits_for_a_disk_to_have_objects_takes_a_turn_of_its_client() {
    const SOON: Duration = Duration::from_millis(20);
    let certificates = Certificates::new();
    let bench = Fixture::secured("disk-turns", certificates.transport(Role::Worker)).await;
    let pool = bench.pool_of(certificates.transport(Role::Client));
    let admin = bench.pool_of(certificates.transport(Role::Admin));
    let bytes = noise(300_000);
    let cached = bench.put("a", &bytes, MIB);
    let origin = Some(cached.clone());
    let reserve =
        ReserveRequest { block: Some(block(1, 0)), origin, origin_bytes: 300_000, ..ReserveRequest::default() };
    // A connection is there when the turns are taken.
    assert!(!is_here(&pool, &cached).await);
    let identity = Identity::new(CLUSTER, Role::Client, "here").unwrap();
    let connection = bench.tenants.admit(&identity).unwrap().unwrap();
    let turns = connection.disk_turns.clone();
    let all = u32::try_from(turns.available_permits()).unwrap();
    let waiting = turns.acquire_many_owned(all).await.unwrap();
    for _ in 0..20 {
        let read = pool.read(WORKER, read_items(&cached, bytes.len()), PATIENCE);
        assert!(tokio::time::timeout(SOON, read).await.is_err(), "it has no turn");
        let reserved = pool.reserve(WORKER, reserve.clone(), PATIENCE);
        assert!(tokio::time::timeout(SOON, reserved).await.is_err(), "it has no turn");
    }
    assert!(!is_here(&admin, &cached).await && !is_here(&admin, &block(1, 0)).await);
    drop(waiting);
    assert!(read_block(&pool, &cached, bytes.len()).await == bytes);
    pool.reserve(WORKER, reserve, PATIENCE).await.unwrap();
    assert!(read_block(&pool, &block(1, 0), bytes.len()).await == bytes);
    for pool in [pool, admin] {
        pool.shutdown().await;
    }
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn each_block_that_is_waited_for_takes_a_turn_at_the_bucket() {
    let certificates = Certificates::new();
    let bench = Fixture::secured("bucket-turns", certificates.transport(Role::Worker)).await;
    let pool = bench.pool_of(certificates.transport(Role::Client));
    let blocks: Vec<_> = (0..4).map(|number| bench.put(&format!("k{number}"), &noise(1000), MIB)).collect();
    bench.mounts.inject(1, cavern_ufs::Faults { delay: Duration::from_secs(60), ..Default::default() });
    let identity = Identity::new(CLUSTER, Role::Client, "here").unwrap();
    let connection = bench.tenants.admit(&identity).unwrap().unwrap();
    let before = connection.turns.available_permits();
    let until_left = async |left: usize| {
        let until = tokio::time::Instant::now() + PATIENCE;
        while connection.turns.available_permits() != left {
            assert!(tokio::time::Instant::now() < until, "{} of {before}", connection.turns.available_permits());
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let items = blocks.iter().flat_map(|name| read_items(name, 1000)).collect();
    let reading = tokio::spawn({
        let pool = pool.clone();
        async move { pool.read(WORKER, items, PATIENCE).await.map(drop) }
    });
    until_left(before - 4).await;
    reading.abort();
    until_left(before).await;
    pool.shutdown().await;
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn that_a_block_could_not_be_synced_is_heard_while_all_syncs_wait_for_a_disk() {
    let certificates = Certificates::new();
    let bench = Fixture::secured("heard", certificates.transport(Role::Worker)).await;
    let pool = bench.pool_of(certificates.transport(Role::Client));
    let (name, target) = (block(1, 0), BlockSource::parse_data(block(1, 0)).unwrap());
    write_block(&pool, &name, b"data").await.unwrap();
    let identity = Identity::new(CLUSTER, Role::Client, "here").unwrap();
    let connection = bench.tenants.admit(&identity).unwrap().unwrap();
    let turns = connection.sync_turns.clone();
    let all = u32::try_from(turns.available_permits()).unwrap();
    let waiting = turns.acquire_many_owned(all).await.unwrap();
    let telling = tokio::spawn({
        let (pool, name) = (pool.clone(), name.clone());
        let request = SyncRequest { blocks: Vec::new(), failed: vec![name] };
        async move { pool.sync(WORKER, request, PATIENCE).await }
    });
    let until = tokio::time::Instant::now() + PATIENCE;
    while bench.stores.data.sync(&[target]).is_ok() {
        assert!(tokio::time::Instant::now() < until, "the worker has not heard of it");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    // What the disk says of that takes a turn.
    drop(waiting);
    telling.await.unwrap().unwrap();
    match pool.sync(WORKER, SyncRequest { blocks: vec![name], failed: Vec::new() }, PATIENCE).await {
        Err(NetError::WorkerStatus { status: Status::IoError, message, .. }) => {
            assert!(message.contains("earlier sync"), "{message}");
        }
        other => panic!("{other:?}"),
    }
    pool.shutdown().await;
    bench.end().await;
}

/// A frame about a block; `None` for one that is about none, or no request of a client.
fn about(kind: FrameKind, name: &BlockRef) -> Option<Vec<u8>> {
    let (block, blocks) = (Some(name.clone()), vec![name.clone()]);
    let items = vec![open_request::Item { block: block.clone(), want: Vec::new() }];
    let items_to_read = read_items(name, 1);
    Some(match kind {
        FrameKind::Read => encode_frame(kind, 1, &ReadRequest { items: items_to_read, deadline_ms: 0 }, 0),
        FrameKind::Open => encode_frame(kind, 1, &OpenRequest { items, deadline_ms: 0 }, 0),
        FrameKind::Fill => encode_frame(kind, 1, &FillRequest { items, deadline_ms: 0 }, 0),
        FrameKind::Query => encode_frame(kind, 1, &QueryRequest { blocks, held: None }, 0),
        FrameKind::Corrupt => encode_frame(kind, 1, &CorruptRequest { block, ..Default::default() }, 0),
        FrameKind::Reserve => encode_frame(kind, 1, &ReserveRequest { block, ..Default::default() }, 0),
        FrameKind::Write => encode_frame(kind, 1, &WriteRequest { block, ..Default::default() }, 0),
        FrameKind::Sync => encode_frame(kind, 1, &SyncRequest { blocks, ..Default::default() }, 0),
        FrameKind::Hello
        | FrameKind::Cancel
        | FrameKind::Free
        | FrameKind::Persist
        | FrameKind::Copy
        | FrameKind::Inspect => return None,
        FrameKind::ReadReply
        | FrameKind::OpenReply
        | FrameKind::FillReply
        | FrameKind::QueryReply
        | FrameKind::FreeReply
        | FrameKind::CorruptReply
        | FrameKind::ReserveReply
        | FrameKind::WriteReply
        | FrameKind::SyncReply
        | FrameKind::PersistReply
        | FrameKind::CopyReply
        | FrameKind::InspectReply
        | FrameKind::Evicted
        | FrameKind::Failure => return None,
    })
}

/// The text of the next frame.
async fn next_text(stream: &mut (impl AsyncReadExt + Unpin)) -> String {
    let mut head = [0; HEADER_BYTES];
    tokio::time::timeout(PATIENCE, stream.read_exact(&mut head)).await.unwrap().unwrap();
    let header = FrameHeader::decode(&head).unwrap();
    let mut message = vec![0; header.message_bytes as usize + header.payload_bytes as usize];
    stream.read_exact(&mut message).await.unwrap();
    String::from_utf8_lossy(&message).into_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn each_frame_about_blocks_is_judged_by_the_mount_that_it_names() {
    let certificates = Certificates::new();
    let bench = Fixture::secured("walk", certificates.transport(Role::Worker)).await;
    let mount = |id, client: &str| {
        let clients = vec![ClientRule { name: client.to_owned(), ..ClientRule::default() }];
        let (uri, write_type) = (format!("memory://server-walk-{id}"), WriteType::FsMode as i32);
        Mount { id, uri, write_type, clients, ..Default::default() }
    };
    let mounts = vec![mount(1, "somebody"), mount(2, "here")];
    bench.mounts.apply(MountTable { epoch: 2, mounts, status: vec![] });
    let transport = certificates.transport(Role::Client);
    let Transport::Tls(tls) = &transport else { panic!("{transport:?}") };
    let stream = TcpStream::connect(bench.address()).await.unwrap();
    let mut stream = tls.connect(stream, Role::Worker).await.unwrap();
    let hello = Hello { protocol: PROTOCOL_VERSION, peer: "test".to_owned(), ..Default::default() };
    stream.write_all(&encode_frame(FrameKind::Hello, 0, &hello, 0)).await.unwrap();
    stream.flush().await.unwrap();
    next_text(&mut stream).await;
    let mut asked = async |what: &str, frame: &[u8], refusal: &str| {
        stream.write_all(frame).await.unwrap();
        stream.flush().await.unwrap();
        let answer = next_text(&mut stream).await;
        assert!(answer.contains(refusal), "{what}: {answer}");
    };
    let (theirs, hidden) = (block(1, 0), "mount 1 is not there for the client \"here\"");
    for [name, roles, judged_by, _] in crate::server::roles::documented() {
        let kind = FrameKind::ALL.into_iter().find(|kind| format!("{kind:?}") == name).unwrap();
        let frame = about(kind, &theirs);
        assert_eq!(judged_by == "mount", frame.is_some(), "{name}");
        assert!(frame.is_none() || roles.contains("client"), "{name}");
        let Some(frame) = frame else { continue };
        asked(name, &frame, hidden).await;
        // Said to be of the mount that is there.
        let claimed = about(kind, &BlockRef { mount_id: 2, ..theirs.clone() }).unwrap();
        asked(name, &claimed, "is not that of the file, generation and mount named").await;
    }
    // Beside what is its own.
    let (own, theirs) = (BlockRef::of_inode("cluster-1", 9, 0, 0, BLOCK, 2), Some(theirs));
    let failed = SyncRequest { blocks: vec![own.clone()], failed: theirs.iter().cloned().collect() };
    let held = Some(Bytes::from_static(&[1]));
    let confirm = QueryRequest { blocks: [own.clone()].into_iter().chain(theirs.clone()).collect(), held };
    let begin = ReserveRequest { block: Some(own), origin: theirs, ..ReserveRequest::default() };
    asked("a failed sync", &encode_frame(FrameKind::Sync, 1, &failed, 0), hidden).await;
    asked("a confirmation", &encode_frame(FrameKind::Query, 1, &confirm, 0), hidden).await;
    asked("an origin", &encode_frame(FrameKind::Reserve, 1, &begin, 0), hidden).await;
    assert_eq!(bench.stores.table.usage()[0].data_bytes, 0);
    drop(stream);
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_written_and_read_in_a_mount_waits_for_its_rate() {
    let certificates = Certificates::new();
    let bench = Fixture::secured("paced", certificates.transport(Role::Worker)).await;
    let mount = |id, bytes_per_second| {
        let rule = ClientRule { name: "here".to_owned(), bytes_per_second, ..ClientRule::default() };
        let uri = format!("memory://server-paced-{id}");
        Mount { id, uri, write_type: WriteType::FsMode as i32, clients: vec![rule], ..Default::default() }
    };
    bench.mounts.apply(MountTable { epoch: 2, mounts: vec![mount(1, 2 << 20), mount(2, 0)], status: vec![] });
    let in_other = |number| BlockRef::of_inode("cluster-1", number, 0, 0, BLOCK, 2);
    let bytes = noise(1 << 20);
    let client = bench.pool_of(certificates.transport(Role::Client));
    write_block(&client, &in_other(9), &bytes).await.unwrap();
    let began = Instant::now();
    // More than a pool has connections: each waits for what was written on it.
    for number in 1..=6 {
        write_block(&client, &block(number, 0), &bytes).await.unwrap();
    }
    assert!(began.elapsed() > Duration::from_millis(600), "{:?}", began.elapsed());
    let began = Instant::now();
    let read = async {
        for number in 1..=2 {
            assert!(read_block(&client, &block(number, 0), bytes.len()).await == bytes);
        }
        began.elapsed()
    };
    let read_elsewhere = async {
        // At first behind what was written, then beside what is read.
        let mut began = Instant::now();
        for number in 0..16 {
            assert!(read_block(&client, &in_other(9), bytes.len()).await == bytes);
            if number == 7 {
                began = Instant::now();
            }
        }
        began.elapsed()
    };
    let (waited, elsewhere) = tokio::join!(read, read_elsewhere);
    assert!(waited > Duration::from_millis(600) && elsewhere < waited, "{waited:?} {elsewhere:?}");
    client.shutdown().await;
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn only_masters_lead() {
    let certificates = Certificates::new();
    let bench = Fixture::secured("terms", certificates.transport(Role::Worker)).await;
    let client = bench.pool_of(certificates.transport(Role::Client));
    write_block(&client, &block(1, 0), &noise(1000)).await.unwrap();
    write_block(&client, &block(2, 0), &noise(1000)).await.unwrap();
    // A client that says that it leads in a later term.
    let liar = bench.pool_of_master(certificates.transport(Role::Client), 99, Way::Tcp);
    denied(liar.free(WORKER, vec![block(1, 0)]).await, "client");
    let liar_here = bench.pool_of_master(Transport::Plain, 98, Way::Any);
    assert!(is_here(&liar_here, &block(1, 0)).await);
    // Also a process of this host.
    denied(liar_here.free(WORKER, vec![block(1, 0)]).await, "over the Unix socket");
    assert!(!bench.membership.is_over(1));

    // A master on the worker's host gives its orders where it is known.
    let master = bench.pool_of_master(certificates.transport(Role::Master), 5, Way::Any);
    assert_eq!(master.free(WORKER, vec![block(1, 0)]).await.unwrap().blocks, 1);
    assert!(bench.membership.is_over(4) && !bench.membership.is_over(5));
    let persisted = master.persist(WORKER, request("object", 2, 1000, &[0], WORKER), PATIENCE).await.unwrap();
    assert_eq!(persisted.status(), Status::Ok, "{}", persisted.message);
    assert!(!is_here(&client, &block(1, 0)).await && is_here(&client, &block(2, 0)).await);
    for pool in [client, liar, liar_here, master] {
        pool.shutdown().await;
    }
    bench.end().await;
}
