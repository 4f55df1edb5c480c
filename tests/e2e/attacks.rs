//! Attacks on a cluster whose connections are secured: by whoever reaches its ports, and by processes of it that do
//! what is not theirs. Each is refused, and nothing has changed then.

use std::fs;
use std::future::Future;
use std::io::{Read as _, Write as _};
use std::net::{Shutdown, TcpStream};
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use cavern_conf::Config;
use cavern_net::master::channel;
use cavern_proto::data::{FreeRequest, Hello};
use cavern_proto::frame::{FrameKind, PROTOCOL_VERSION, encode_frame};
use cavern_proto::master::cluster_client::ClusterClient;
use cavern_proto::master::namespace_client::NamespaceClient;
use cavern_proto::master::{
    CheckOpenRefsRequest, HeartbeatRequest, ListMountsRequest, ListWorkersRequest, Mount, MountRequest, MutateRequest,
    RegisterWorkerRequest, RemoveWorkerRequest, ResolveRequest, UnmountRequest, WatchRequest,
};
use cavern_proto::raft::raft_client::RaftClient;
use cavern_proto::raft::{GetGroupRequest, JoinRequest, RemoveMasterRequest, TakeKeyRequest, VoteRequest};
use cavern_security::{Authority, Identity, Role, Tls, Transport};
use cavern_tests::{Cluster, Options, eventually};
use serde_json::Value;
use tempfile::TempDir;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Status};

mod blocks;
mod clients;
mod floods;
mod pages;
mod people;
mod revoked;
mod sockets;
mod users;
mod vended;
mod workers;

const PATIENCE: Duration = Duration::from_secs(10);
const DAY: Duration = Duration::from_secs(86_400);

fn up() -> Cluster {
    Cluster::up(Options { secure: true, ..Options::default() })
}

/// The name of the cluster under test.
fn name_of(cluster: &Cluster) -> String {
    Config::load(Some(&cluster.status().conf)).unwrap().cluster.name
}

/// Somebody with a certificate.
struct Somebody {
    runtime: tokio::runtime::Runtime,
    transport: Transport,
    _files: TempDir,
}

impl Somebody {
    /// With a certificate that `authority` signs; `trusted` says whom it believes.
    fn signed(authority: &Authority, trusted: &Path, identity: &Identity, holds: Duration) -> Self {
        let files = tempfile::tempdir().unwrap();
        let issued = authority.issue(identity, holds, files.path(), "somebody").unwrap();
        let mut config = Config::default();
        config.cluster.name.clone_from(&identity.cluster);
        config.security.ca = trusted.to_owned();
        (config.security.certificate, config.security.key) = (issued.certificate, issued.key);
        let transport = Transport::of(&config).unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        Self { runtime, transport, _files: files }
    }

    /// Of this cluster, in a role.
    fn of(cluster: &Cluster, role: Role) -> Self {
        let authority = Authority::open(&cluster.directory().join("certificates")).unwrap();
        let identity = Identity::new(&name_of(cluster), role, "attacker").unwrap();
        Self::signed(&authority, authority.certificate(), &identity, DAY)
    }

    fn tls(&self) -> &Tls {
        match &self.transport {
            Transport::Tls(tls) => tls,
            Transport::Plain => unreachable!("it has a certificate"),
        }
    }

    fn channel(&self, cluster: &Cluster) -> Channel {
        let address = &cluster.at_start.masters[0].grpc;
        let _context = self.runtime.enter();
        let endpoint = Endpoint::from_shared(format!("http://{address}")).unwrap().connect_timeout(PATIENCE);
        channel(&endpoint, &self.transport)
    }

    fn answer<T>(&self, call: impl Future<Output = Result<T, Status>>) -> Result<T, Status> {
        self.runtime.block_on(async { tokio::time::timeout(PATIENCE, call).await.expect("no answer") })
    }

    /// What the worker's data port answers to bytes, up to `end` or the end of the connection; an error where it takes
    /// the connection for nobody's.
    fn ask_worker(&self, cluster: &Cluster, bytes: &[u8], end: &str) -> std::io::Result<String> {
        self.runtime.block_on(async {
            let stream = tokio::net::TcpStream::connect(&cluster.at_start.workers[0].data).await?;
            let mut stream = self.tls().connect(stream, Role::Worker).await?;
            stream.write_all(bytes).await?;
            stream.flush().await?;
            let (mut answer, mut piece) = (String::new(), vec![0; 4096]);
            loop {
                let read = tokio::time::timeout(PATIENCE, stream.read(&mut piece)).await.expect("no answer")?;
                answer.push_str(&String::from_utf8_lossy(&piece[..read]));
                if read == 0 || answer.contains(end) {
                    return Ok(answer);
                }
            }
        })
    }
}

fn hello() -> Vec<u8> {
    let hello = Hello { protocol: PROTOCOL_VERSION, peer: "attacker".to_owned(), ..Hello::default() };
    encode_frame(FrameKind::Hello, 0, &hello, 0)
}

/// In seconds since 1970.
fn now() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs().cast_signed()
}

/// What an attack must not change. What changes by itself at first has come to its end: mounts are indexed, and workers
/// have told of their disks.
fn state(cluster: &Cluster) -> Vec<String> {
    let shown = [&["mount", "--json"][..], &["node", "list", "--json"], &["raft", "status", "--json"]];
    eventually("all mounts are indexed, and all workers have told of their disks", PATIENCE, || {
        let said = shown.map(|command| cluster.cv(command));
        let [mounts, workers] = [&said[0], &said[1]].map(|said| said.json());
        let is_indexed = |mount: &Value| mount["status"]["indexing"] == false;
        let has_told = |worker: &Value| worker["disks"].as_array().is_some_and(|disks| !disks.is_empty());
        let is_at_rest = mounts.as_array()?.iter().all(is_indexed) && workers.as_array()?.iter().all(has_told);
        is_at_rest.then(|| said.map(|said| without_times(&said.stdout)).to_vec())
    })
}

/// Without numbers, which grow by themselves.
fn without_times(text: &str) -> String {
    text.chars().filter(|c| !c.is_ascii_digit()).collect()
}

#[test]
fn nobody_comes_in_without_a_certificate_of_the_cluster() {
    let cluster = up();
    let own = Authority::open(&cluster.directory().join("certificates")).unwrap();
    let elsewhere = tempfile::tempdir().unwrap();
    let foreign = Authority::create(elsewhere.path(), "cavern").unwrap();
    let name = name_of(&cluster);
    let identity = |cluster: &str| Identity::new(cluster, Role::Admin, "attacker").unwrap();
    let trusted = own.certificate();
    let strangers = [
        ("signed by another authority", Somebody::signed(&foreign, trusted, &identity(&name), DAY)),
        ("over", Somebody::signed(&own, trusted, &identity(&name), Duration::ZERO)),
        ("of another cluster", Somebody::signed(&own, trusted, &identity("another"), DAY)),
    ];
    let end = strangers[1].1.tls().certificate().not_after;
    eventually("a certificate is over", PATIENCE, || (now() > end).then_some(()));
    let before = state(&cluster);
    for (what, somebody) in &strangers {
        let mut calls = RaftClient::new(somebody.channel(&cluster));
        let refused = somebody.answer(calls.get_group(GetGroupRequest {})).expect_err(what);
        assert!(std::error::Error::source(&refused).is_some(), "{what}: the master answered {refused:?}");
        let answer = somebody.ask_worker(&cluster, &hello(), "");
        assert!(answer.as_ref().map_or(true, String::is_empty), "{what}: the worker answered {answer:?}");
    }
    // In the clear.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let plain = runtime.block_on(async {
        let endpoint = Endpoint::from_shared(format!("http://{}", cluster.at_start.masters[0].grpc)).unwrap();
        let mut calls = ClusterClient::new(endpoint.connect().await.unwrap());
        tokio::time::timeout(PATIENCE, calls.list_workers(ListWorkersRequest {})).await.expect("no answer")
    });
    assert!(std::error::Error::source(&plain.unwrap_err()).is_some());
    let mut plain = TcpStream::connect(&cluster.at_start.workers[0].data).unwrap();
    plain.set_read_timeout(Some(PATIENCE)).unwrap();
    plain.write_all(&hello()).unwrap();
    let mut answer = Vec::new();
    // Perhaps an alert, and the end.
    let _end = plain.read_to_end(&mut answer);
    assert!(answer.len() < 16 && !answer.starts_with(&hello()[..4]), "{answer:?}");
    assert_eq!(state(&cluster), before);
}

/// Somebody has asked for what he may not have, and was told so in these words.
fn assert_denied(what: &str, answered: Option<Status>, words: &str) {
    let status = answered.unwrap_or_else(|| panic!("{what} was accepted"));
    assert_eq!(status.code(), Code::PermissionDenied, "{what}: {status:?}");
    assert!(status.message().contains(words), "{what}: {status:?}");
}

#[test]
fn a_process_of_the_cluster_does_only_what_is_its_own() {
    let cluster = up();
    let tree = cluster.seed("bucket", "", 5, 50_000);
    cluster.mount("s3://bucket", "/data", &[]);
    cluster.assert_tree("data", "", &tree);
    let before = state(&cluster);
    let [client, worker, admin, master] =
        [Role::Client, Role::Worker, Role::Admin, Role::Master].map(|role| Somebody::of(&cluster, role));
    let refused = |what: &str, answered: Option<Status>| assert_denied(what, answered, "/attacker may not call");
    for somebody in [&client, &worker, &master] {
        let mut calls = ClusterClient::new(somebody.channel(&cluster));
        let mount = Mount { path: "/evil".to_owned(), uri: "file:///".to_owned(), ..Mount::default() };
        let mount = MountRequest { mount: Some(mount), ..MountRequest::default() };
        refused("Mount", somebody.answer(calls.mount(mount)).err());
        let unmount = UnmountRequest { path: "/data".to_owned(), discard: true, ..UnmountRequest::default() };
        refused("Unmount", somebody.answer(calls.unmount(unmount)).err());
        let remove = RemoveWorkerRequest { worker_id: 1, ..RemoveWorkerRequest::default() };
        refused("RemoveWorker", somebody.answer(calls.remove_worker(remove)).err());
        let mut calls = RaftClient::new(somebody.channel(&cluster));
        let remove = RemoveMasterRequest { node_id: 1 };
        refused("RemoveMaster", somebody.answer(calls.remove_master(remove)).err());
    }
    for somebody in [&client, &admin, &master] {
        let mut calls = ClusterClient::new(somebody.channel(&cluster));
        let register = RegisterWorkerRequest::default();
        refused("RegisterWorker", somebody.answer(calls.register_worker(register)).err());
        refused("Heartbeat", somebody.answer(calls.heartbeat(HeartbeatRequest::default())).err());
    }
    for somebody in [&client, &worker, &admin] {
        let mut calls = RaftClient::new(somebody.channel(&cluster));
        refused("Vote", somebody.answer(calls.vote(VoteRequest::default())).err());
        refused("Join", somebody.answer(calls.join(JoinRequest::default())).err());
        refused("TakeKey", somebody.answer(calls.take_key(TakeKeyRequest::default())).err());
    }
    for somebody in [&worker, &master] {
        let mut calls = NamespaceClient::new(somebody.channel(&cluster));
        let resolve = ResolveRequest { path: "/data".to_owned(), ..ResolveRequest::default() };
        refused("Resolve", somebody.answer(calls.resolve(resolve)).err());
    }
    // Credentials are for those who speak to buckets.
    for somebody in [&admin, &master] {
        let mut calls = ClusterClient::new(somebody.channel(&cluster));
        refused("GetCredentials", somebody.answer(calls.get_credentials(ListMountsRequest {})).err());
    }
    let secret = &cluster.at_start.s3.secret_key;
    let mut calls = ClusterClient::new(admin.channel(&cluster));
    let listed = admin.answer(calls.list_mounts(ListMountsRequest {})).unwrap().into_inner();
    assert!(!listed.mounts.is_empty() && listed.mounts[0].options.values().all(|value| value != secret));
    let mut calls = ClusterClient::new(client.channel(&cluster));
    let with = client.answer(calls.get_credentials(ListMountsRequest {})).unwrap().into_inner();
    assert!(with.mounts[0].options.values().any(|value| value == secret));

    // Only masters have blocks freed.
    let mut bytes = hello();
    bytes.extend(encode_frame(FrameKind::Free, 1, &FreeRequest::default(), 0));
    for somebody in [&client, &worker] {
        let answer = somebody.ask_worker(&cluster, &bytes, "may not ask for Free").unwrap();
        assert!(answer.contains("may not ask for Free"), "{answer}");
    }
    assert_eq!(state(&cluster), before);
    cluster.assert_tree("data", "", &tree);
}

#[test]
fn nobody_speaks_for_the_session_of_another() {
    let cluster = up();
    let tree = cluster.seed("bucket", "", 5, 50_000);
    cluster.mount("s3://bucket", "/data", &[]);
    let log = fs::read_to_string(&cluster.at_start.masters[0].log).unwrap();
    let sessions = log.lines().filter(|line| line.contains("a client's session begins"));
    let number = |line: &str| line.split("session=").nth(1)?.split_whitespace().next()?.parse().ok();
    let victim: u64 = sessions.filter_map(number).next_back().expect("the mount has a session");
    let attacker = Somebody::of(&cluster, Role::Client);
    let refused = |what: &str, answered: Option<Status>| assert_denied(what, answered, "is not that of cavern://");
    let mut calls = ClusterClient::new(attacker.channel(&cluster));
    let take_up = WatchRequest { client: "a".to_owned(), session: victim, ..WatchRequest::default() };
    refused("Watch", attacker.answer(calls.watch(tokio_stream::iter([take_up]))).err());
    let mut calls = NamespaceClient::new(attacker.channel(&cluster));
    let ask = ResolveRequest { path: "/data".to_owned(), session: victim };
    refused("Resolve", attacker.answer(calls.resolve(ask)).err());
    let holds = CheckOpenRefsRequest { session: victim, ..CheckOpenRefsRequest::default() };
    refused("CheckOpenRefs", attacker.answer(calls.check_open_refs(holds)).err());
    let changes = MutateRequest { session: victim, ..MutateRequest::default() };
    let mutate = async { calls.mutate(tokio_stream::iter([changes])).await?.into_inner().message().await };
    refused("Mutate", attacker.answer(mutate).err());
    cluster.assert_tree("data", "", &tree);
    let after = fs::read_to_string(&cluster.at_start.masters[0].log).unwrap();
    let lapsed = format!("session={victim}");
    assert_eq!(after.matches(&lapsed).count(), log.matches(&lapsed).count(), "it goes on");
}

#[test]
fn garbage_ends_no_process_and_keeps_nobody_out() {
    let cluster = up();
    let tree = cluster.seed("bucket", "", 5, 50_000);
    cluster.mount("s3://bucket", "/data", &[]);
    let (master, worker) = (&cluster.at_start.masters[0], &cluster.at_start.workers[0]);
    let ports = [&master.grpc, &worker.data, &master.http, &worker.http];
    let mut oversized = vec![0x16, 3, 1, 0xff, 0xff];
    oversized.extend(vec![0; 70_000]);
    let garbage: [&[u8]; 6] = [
        b"\0",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\xff\xff\xff\x04\0\0\0\0\0",
        // The head of a ClientHello that never comes.
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"\x15\x03\x03\x00\x02\x02\x28",
        &oversized,
    ];
    let mut left_open = Vec::new();
    for port in ports {
        for bytes in garbage {
            let mut stream = TcpStream::connect(port).unwrap();
            // It may be closed while it is sent.
            let _sent = stream.write_all(bytes);
            let _ended = stream.shutdown(Shutdown::Write);
            let mut half = TcpStream::connect(port).unwrap();
            let _sent = half.write_all(bytes);
            left_open.push(half);
        }
    }
    cluster.assert_tree("data", "", &tree);
    let now = cluster.status();
    assert_eq!(now.masters[0].pid, master.pid);
    assert_eq!(now.workers[0].pid, worker.pid);
    drop(left_open);
}
