use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use cavern_conf::Config;
use rustls::crypto::ring;
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, version};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpSocket};
use tokio::time::timeout;
use tokio_rustls::TlsConnector;

use super::*;
use crate::authority::{Authority, Issued};
use crate::certificate::{read_certificates, read_key};
use crate::transport::Transport;
use crate::trust::Trust;
use crate::verify::Servers;

const PATIENCE: Duration = Duration::from_secs(20);
const CLUSTER: &str = "cluster-1";

/// How a process of this role speaks, with a certificate of this authority.
fn tls(authority: &Authority, home: &Path, role: Role) -> Arc<Tls> {
    let identity = Identity::new(CLUSTER, role, "here").unwrap();
    let issued = authority.issue(&identity, Duration::from_secs(3600), home, role.name()).unwrap();
    let mut config = Config::default();
    config.cluster.name = CLUSTER.to_owned();
    config.security.ca = authority.certificate().to_owned();
    config.security.certificate = issued.certificate;
    config.security.key = issued.key;
    config.security.revoked = authority.revoke(&[], None).unwrap().path;
    match Transport::of(&config).unwrap() {
        Transport::Tls(tls) => tls,
        Transport::Plain => panic!("it is configured"),
    }
}

/// Both ends of a connection, whose sockets have buffers of about so many bytes.
async fn connected(buffer: u32) -> (TlsSocket, TlsSocket) {
    let home = tempfile::tempdir().unwrap();
    let authority = Authority::create(home.path(), CLUSTER).unwrap();
    let (client, worker) = (tls(&authority, home.path(), Role::Client), tls(&authority, home.path(), Role::Worker));
    let (near, far) = stream_pair(buffer).await;
    let (near, far) = tokio::join!(TlsSocket::connect(&client, near, Role::Worker), TlsSocket::accept(&worker, far));
    (near.unwrap(), far.unwrap())
}

async fn stream_pair(buffer: u32) -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(buffer).unwrap();
    socket.set_send_buffer_size(buffer).unwrap();
    let near = socket.connect(listener.local_addr().unwrap()).await.unwrap();
    (near, listener.accept().await.unwrap().0)
}

/// A sequence that looks like chance, and is the same each time.
struct Chance(u64);

impl Chance {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % bound
    }
}

fn noise(seed: u64, length: usize) -> Vec<u8> {
    let mut chance = Chance(seed);
    (0..length).map(|_| chance.below(256) as u8).collect()
}

/// `None` where nothing can be done now.
fn now(outcome: io::Result<usize>) -> Option<usize> {
    match outcome {
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => None,
        outcome => Some(outcome.unwrap()),
    }
}

async fn readable(socket: &TlsSocket) {
    timeout(PATIENCE, socket.ready(Interest::READABLE)).await.expect("nothing is told of").unwrap();
}

/// Sends and receives, in pieces of this size at most, until all of it is done.
async fn exchange(socket: &TlsSocket, outgoing: &[u8], incoming: usize, piece: usize, seed: u64) -> Vec<u8> {
    let (mut chance, mut sent, mut received) = (Chance(seed), 0, BytesMut::new());
    loop {
        while sent < outgoing.len() {
            if chance.below(50) == 0 {
                socket.connection.lock().refresh_traffic_keys().unwrap();
            }
            let rest = &outgoing[sent..];
            let end = (1 + chance.below(piece)).min(rest.len());
            let (first, second) = rest[..end].split_at(chance.below(end + 1));
            let Some(count) = now(socket.try_write_vectored(&[IoSlice::new(first), IoSlice::new(second)])) else {
                break;
            };
            sent += count;
        }
        while received.len() < incoming {
            let limit = 1 + chance.below(piece);
            received.reserve(limit);
            let Some(count) = now(socket.try_read(&mut (&mut received).limit(limit))) else { break };
            assert!(0 < count && count <= limit);
        }
        let is_sent = sent == outgoing.len() && !socket.has_unsent();
        let interest = match (received.len() < incoming, is_sent) {
            (true, true) => Interest::READABLE,
            (true, false) => Interest::READABLE | Interest::WRITABLE,
            (false, false) => Interest::WRITABLE,
            (false, true) => return received.to_vec(),
        };
        timeout(PATIENCE, socket.ready(interest)).await.expect("it goes no further").unwrap();
        now(socket.flush());
    }
}

#[tokio::test]
async fn what_is_sent_both_ways_in_any_pieces_arrives() {
    for (seed, buffer, piece) in
        [(1, 4 << 10, 700), (2, 4 << 10, 200_000), (3, 64 << 10, 20_000), (4, 1 << 20, 5_000_000)]
    {
        let (near, far) = connected(buffer).await;
        let (there, back) = (noise(seed, 3_000_000), noise(seed + 10, 2_000_000));
        let (came_back, came) = tokio::join!(
            exchange(&near, &there, back.len(), piece, seed),
            exchange(&far, &back, there.len(), piece, seed + 20)
        );
        assert!(came == there && came_back == back, "{buffer} {piece}");
        assert_eq!((near.peer().role, far.peer().role), (Role::Worker, Role::Client));
    }
}

#[tokio::test]
async fn what_nobody_has_taken_yet_is_told_of_at_once() {
    let (near, far) = connected(64 << 10).await;
    let sent = noise(5, 40_000);
    assert_eq!(near.try_write_vectored(&[IoSlice::new(&sent)]).unwrap(), sent.len());
    let mut received = BytesMut::new();
    while received.len() < sent.len() {
        // The socket itself says nothing any more.
        readable(&far).await;
        received.reserve(10_000);
        now(far.try_read(&mut (&mut received).limit(10)));
    }
    assert_eq!(received, sent);
    assert!(now(far.try_read(&mut received)).is_none());
    let more = timeout(Duration::from_millis(30), far.ready(Interest::READABLE)).await;
    assert!(more.is_err(), "nothing is left: {more:?}");
}

#[tokio::test]
async fn what_the_socket_did_not_take_goes_out_without_more_to_send() {
    let (near, far) = connected(4 << 10).await;
    let sent = noise(6, 8 << 20);
    let mut taken = 0;
    while let Some(count) = now(near.try_write_vectored(&[IoSlice::new(&sent[taken..])])) {
        taken += count;
    }
    assert!(near.has_unsent() && taken < sent.len(), "{taken}");
    assert!(near.connection.lock().process_new_packets().unwrap().tls_bytes_to_write() < UNSENT_BYTES + 1000);
    let send_rest = async {
        while near.has_unsent() {
            timeout(PATIENCE, near.ready(Interest::WRITABLE)).await.unwrap().unwrap();
            now(near.flush());
        }
    };
    let (received, ()) = tokio::join!(exchange(&far, &[], taken, 1 << 20, 7), send_rest);
    assert_eq!(received, sent[..taken]);
    assert_eq!(near.flush().unwrap(), 0);
}

#[tokio::test]
async fn the_end_comes_after_all_that_was_sent_and_once_more() {
    for says_so in [false, true] {
        let (near, far) = connected(64 << 10).await;
        let sent = noise(8, 30_000);
        assert_eq!(near.try_write_vectored(&[IoSlice::new(&sent)]).unwrap(), sent.len());
        if says_so {
            near.connection.lock().send_close_notify();
            near.flush().unwrap();
        }
        let _open = says_so.then_some(near);
        let mut received = BytesMut::new();
        loop {
            readable(&far).await;
            received.reserve(7_000);
            if now(far.try_read(&mut (&mut received).limit(7_000))) == Some(0) {
                break;
            }
        }
        assert_eq!(received, sent);
        readable(&far).await;
        received.reserve(10);
        assert_eq!(far.try_read(&mut received).unwrap(), 0);
    }
}

#[tokio::test]
async fn a_record_that_was_changed_on_its_way_ends_the_connection() {
    let (near, far) = connected(64 << 10).await;
    let record = [&[23, 3, 3, 0, 100][..], &[7; 100]].concat();
    assert_eq!(near.stream.try_write(&record).unwrap(), record.len());
    readable(&far).await;
    let mut received = BytesMut::with_capacity(1000);
    let error = far.try_read(&mut received).unwrap_err();
    assert!(error.to_string().contains("changed on its way"), "{error}");
    // The other side is told.
    readable(&near).await;
    let error = near.try_read(&mut received).unwrap_err();
    assert!(error.to_string().contains("BadRecordMac"), "{error}");
}

#[tokio::test]
async fn who_does_not_speak_tls_is_refused_and_told_of() {
    let home = tempfile::tempdir().unwrap();
    let authority = Authority::create(home.path(), CLUSTER).unwrap();
    let (client, worker) = (tls(&authority, home.path(), Role::Client), tls(&authority, home.path(), Role::Worker));
    let (mut near, far) = stream_pair(64 << 10).await;
    near.write_all(b"GET / HTTP/1.1\r\n\r\n").await.unwrap();
    let (refused, told) = tokio::join!(TlsSocket::accept(&worker, far), async {
        let mut told = Vec::new();
        near.read_to_end(&mut told).await.unwrap();
        drop(near);
        told
    });
    assert!(refused.unwrap_err().to_string().contains("does not speak TLS"));
    assert_eq!(told[0], 21, "an alert");
    let (near, mut far) = stream_pair(64 << 10).await;
    far.write_all(&[b'C', b'V', b'D', b'1', 1, 0, 0, 0]).await.unwrap();
    let refused = TlsSocket::connect(&client, near, Role::Worker).await.unwrap_err();
    assert!(refused.to_string().contains("does not speak TLS"), "{refused}");
}

#[tokio::test]
async fn a_socket_ends_when_the_certificate_of_the_other_side_is_revoked() {
    let home = tempfile::tempdir().unwrap();
    let authority = Authority::create(home.path(), CLUSTER).unwrap();
    let (client, worker) = (tls(&authority, home.path(), Role::Client), tls(&authority, home.path(), Role::Worker));
    let connect = || async {
        let (near, far) = stream_pair(64 << 10).await;
        let both =
            async { tokio::join!(TlsSocket::connect(&client, near, Role::Worker), TlsSocket::accept(&worker, far)) };
        let (near, far) = both.await;
        (near.unwrap(), far.unwrap())
    };
    // One that waits, and one whose client says something all the time.
    let ((_silent, waiting), (near, busy)) = (connect().await, connect().await);
    authority.revoke(&[home.path().join("client.pem")], None).unwrap();
    let serve = async {
        let mut received = BytesMut::new();
        loop {
            now(near.try_write_vectored(&[IoSlice::new(b"more")]));
            received.clear();
            received.reserve(1000);
            match busy.try_read(&mut received) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => tokio::task::yield_now().await,
                Err(error) => return error,
                Ok(_) => {}
            }
        }
    };
    let both = async { tokio::join!(waiting.ready(Interest::READABLE), serve) };
    let (waited, read) = timeout(PATIENCE, both).await.expect("it goes on");
    for error in [waited.unwrap_err(), read, busy.try_write_vectored(&[IoSlice::new(b"x")]).unwrap_err()] {
        assert!(error.to_string().contains("is revoked"), "{error}");
    }
    assert!(waiting.check().is_err());
}

/// A client of another make, which does not look at whether its own certificate is of this cluster, or has none.
async fn connect_as(authority: &Authority, issued: Option<&Issued>, stream: TcpStream) {
    let authorities = read_certificates("ca", authority.certificate()).unwrap();
    let provider = Arc::new(ring::default_provider());
    let trust = Arc::new(Trust::new(authorities, Vec::new(), &provider).unwrap());
    let servers = Servers { trust, cluster: CLUSTER.to_owned(), role: Role::Worker };
    let client = ClientConfig::builder_with_provider(provider).with_protocol_versions(&[&version::TLS13]).unwrap();
    let client = client.dangerous().with_custom_certificate_verifier(Arc::new(servers));
    let client = match issued {
        Some(issued) => {
            let chain = read_certificates("certificate", &issued.certificate).unwrap();
            client.with_client_auth_cert(chain, read_key(&issued.key).unwrap()).unwrap()
        }
        None => client.with_no_client_auth(),
    };
    let name = ServerName::try_from("cavern").unwrap();
    let mut connected = TlsConnector::from(Arc::new(client)).connect(name, stream).await.unwrap();
    let refused = connected.read(&mut [0]).await;
    assert!(refused.is_err(), "{refused:?}");
}

#[tokio::test]
async fn clients_of_other_clusters_and_without_a_certificate_are_refused() {
    let home = tempfile::tempdir().unwrap();
    let authority = Authority::create(home.path(), CLUSTER).unwrap();
    let worker = tls(&authority, home.path(), Role::Worker);
    let other = Identity::new("cluster-2", Role::Client, "here").unwrap();
    let other = authority.issue(&other, Duration::from_secs(3600), home.path(), "other").unwrap();
    for (issued, text) in [(Some(&other), "is of another cluster"), (None, "shows no certificate")] {
        let (near, far) = stream_pair(64 << 10).await;
        let (refused, ()) = tokio::join!(TlsSocket::accept(&worker, far), connect_as(&authority, issued, near));
        let refused = refused.unwrap_err().to_string();
        assert!(refused.contains(text), "{refused}");
    }
}
