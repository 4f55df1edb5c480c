//! Who gets a connection: whoever shows the right certificate, as the files are now.

// Helpers outside of `#[test]` functions count as code to clippy.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::fs;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use cavern_conf::Config;
use cavern_security::{Authority, Identity, Issued, PeerStream, Protocol, Role, Tls, Transport};
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::{ClientConfig, DigitallySignedStruct, ServerConfig, SignatureScheme};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::{TlsAcceptor, TlsConnector};

const DAY: Duration = Duration::from_secs(86_400);
const PATIENCE: Duration = Duration::from_secs(30);

/// An authority, and what it has signed.
struct HandshakeSlot {
    directory: TempDir,
    authority: Authority,
    cluster: &'static str,
}

impl HandshakeSlot {
    fn of(cluster: &'static str) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let authority = Authority::create(directory.path(), cluster).unwrap();
        Self { directory, authority, cluster }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// The configuration of a process with a certificate that holds for so long.
    fn config(&self, role: Role, name: &str, holds: Duration) -> Config {
        let identity = Identity::new(self.cluster, role, name).unwrap();
        let issued = self.authority.issue(&identity, holds, self.directory.path(), &identity.file_name()).unwrap();
        let mut config = Config::default();
        config.cluster.name = self.cluster.to_owned();
        config.security.ca = self.authority.certificate().to_owned();
        config.security.certificate = issued.certificate;
        config.security.key = issued.key;
        config
    }

    fn tls(&self, role: Role, name: &str) -> Arc<Tls> {
        tls(&self.config(role, name, DAY))
    }
}

fn tls(config: &Config) -> Arc<Tls> {
    match Transport::of(config).unwrap() {
        Transport::Tls(tls) => tls,
        Transport::Plain => panic!("it has certificates"),
    }
}

/// A connection within this process.
async fn pair() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let connected = TcpStream::connect(listener.local_addr().unwrap());
    let (accepted, connected) = tokio::join!(listener.accept(), connected);
    (accepted.unwrap().0, connected.unwrap())
}

/// What each side sees of the other once both have said something: a client is through with its part of the handshake
/// before the server has looked at its certificate.
async fn meet(server: &Tls, client: &Tls, to: Role) -> (io::Result<Identity>, io::Result<Identity>) {
    let (accepted, connected) = pair().await;
    let protocol = if to == Role::Worker { Protocol::Data } else { Protocol::Grpc };
    let serve = async {
        let mut stream = server.accept(accepted, protocol).await?;
        let mut byte = [0];
        stream.read_exact(&mut byte).await?;
        stream.write_all(&byte).await?;
        stream.shutdown().await?;
        Ok(stream.certificate()?.identity().clone())
    };
    let ask = async {
        let mut stream = client.connect(connected, to).await?;
        stream.write_all(b"x").await?;
        let mut byte = [0];
        stream.read_exact(&mut byte).await?;
        assert_eq!(&byte, b"x");
        Ok(stream.certificate()?.identity().clone())
    };
    let both = async { tokio::join!(serve, ask) };
    tokio::time::timeout(PATIENCE, both).await.expect("a handshake ends")
}

async fn meets(server: &Tls, client: &Tls, to: Role) -> (String, String) {
    let (client_seen, server_seen) = meet(server, client, to).await;
    (client_seen.unwrap().to_string(), server_seen.unwrap().to_string())
}

/// Why both sides are refused.
async fn refused(server: &Tls, client: &Tls, to: Role) -> (String, String) {
    match meet(server, client, to).await {
        (Err(server), Err(client)) => (server.to_string(), client.to_string()),
        met => panic!("they meet: {met:?}"),
    }
}

#[tokio::test]
async fn each_side_knows_the_other() {
    let place = HandshakeSlot::of("lab");
    let (master, worker) = (place.tls(Role::Master, "m"), place.tls(Role::Worker, "w"));
    for (role, name) in [(Role::Client, "c"), (Role::Admin, "a"), (Role::Master, "m2"), (Role::Worker, "w2")] {
        let client = place.tls(role, name);
        let expected = format!("cavern://lab/{role}/{name}");
        let seen = meets(&master, &client, Role::Master).await;
        assert_eq!(seen, (expected.clone(), "cavern://lab/master/m".to_owned()));
        let seen = meets(&worker, &client, Role::Worker).await;
        assert_eq!(seen, (expected, "cavern://lab/worker/w".to_owned()));
    }
}

#[tokio::test]
async fn nobody_passes_for_a_server_of_another_role() {
    let place = HandshakeSlot::of("lab");
    let client = place.tls(Role::Client, "c");
    // Certificates of clients are signed for no server; those of servers say which.
    for (server, to) in [(Role::Client, Role::Master), (Role::Admin, Role::Worker)] {
        refused(&place.tls(server, "x"), &client, to).await;
    }
    let (_, seen) = refused(&place.tls(Role::Worker, "w"), &client, Role::Master).await;
    assert!(seen.contains("cavern://lab/worker/w is no master"), "{seen}");
    refused(&place.tls(Role::Master, "m"), &client, Role::Worker).await;
}

#[tokio::test]
async fn who_is_of_another_cluster_stays_outside() {
    let (own, other) = (HandshakeSlot::of("lab"), HandshakeSlot::of("lab"));
    let master = own.tls(Role::Master, "m");
    // By another authority, though for a cluster of the same name: for a client that looks, and for a server when the
    // client knows that of the server.
    let mut foreign = other.config(Role::Client, "c", DAY);
    refused(&master, &tls(&foreign), Role::Master).await;
    foreign.security.ca = own.authority.certificate().to_owned();
    let (seen, _) = refused(&master, &tls(&foreign), Role::Master).await;
    assert!(seen.contains("certificate of the other side is refused"), "{seen}");
    // By the same authority, for another cluster.
    let identity = Identity::new("elsewhere", Role::Client, "c").unwrap();
    let issued = own.authority.issue(&identity, DAY, own.directory.path(), "elsewhere").unwrap();
    let mut config = Config::default();
    config.cluster.name = "elsewhere".to_owned();
    config.security.ca = own.authority.certificate().to_owned();
    config.security.certificate = issued.certificate.clone();
    config.security.key = issued.key.clone();
    let (_, seen) = refused(&master, &tls(&config), Role::Master).await;
    assert!(seen.contains("cavern://lab/master/m is of another cluster than \"elsewhere\""), "{seen}");
    let seen = refuses_stranger(&master, Some(&issued)).await;
    assert!(seen.contains("of another cluster than \"lab\""), "{seen}");
}

#[tokio::test]
async fn a_server_takes_nobody_who_does_not_say_who_he_is() {
    let place = HandshakeSlot::of("lab");
    let master = place.tls(Role::Master, "m");
    let seen = refuses_stranger(&master, None).await;
    assert!(seen.contains("shows no certificate"), "{seen}");
    // The authority itself is no process.
    let authority = Issued { certificate: place.authority.certificate().to_owned(), key: place.path("ca-key.pem") };
    refuses_stranger(&master, Some(&authority)).await;
}

/// Takes every server: a client that wants in, whoever is there.
#[derive(Debug)]
struct Anybody;

impl ServerCertVerifier for Anybody {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn verify_tls13_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        ring::default_provider().signature_verification_algorithms.supported_schemes()
    }
}

/// Why a server refuses a client of somebody else's making, with this certificate or none.
async fn refuses_stranger(server: &Tls, shown: Option<&Issued>) -> String {
    let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap()
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(Anybody));
    let config = match shown {
        Some(files) => {
            let chain = vec![CertificateDer::from_pem_file(&files.certificate).unwrap()];
            builder.with_client_auth_cert(chain, PrivateKeyDer::from_pem_file(&files.key).unwrap()).unwrap()
        }
        None => builder.with_no_client_auth(),
    };
    let (accepted, connected) = pair().await;
    let name = ServerName::try_from("anything").unwrap();
    let ask = async {
        if let Ok(mut stream) = TlsConnector::from(Arc::new(config)).connect(name, connected).await {
            // Nothing comes but the refusal.
            assert!(stream.read_u8().await.is_err());
        }
    };
    let both = async { tokio::join!(server.accept(accepted, Protocol::Grpc), ask) };
    let (served, ()) = tokio::time::timeout(PATIENCE, both).await.expect("a handshake ends");
    served.expect_err("the server refuses").to_string()
}

#[tokio::test]
async fn a_certificate_that_has_ended_is_refused_by_both_sides() {
    let place = HandshakeSlot::of("lab");
    let short = Duration::from_secs(1);
    let (master, client) = (place.tls(Role::Master, "m"), place.tls(Role::Client, "c"));
    let old_master = tls(&place.config(Role::Master, "old", short));
    let old_client = tls(&place.config(Role::Client, "old", short));
    while old_client.certificate().remaining_secs() >= 0 || old_master.certificate().remaining_secs() >= 0 {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    refused(&master, &old_client, Role::Master).await;
    refused(&old_master, &client, Role::Master).await;
}

#[tokio::test]
async fn who_has_no_certificate_or_speaks_something_else_is_refused_and_others_are_not() {
    let place = HandshakeSlot::of("lab");
    let (master, client) = (place.tls(Role::Master, "m"), place.tls(Role::Client, "c"));
    for said in [&b"GET / HTTP/1.1\r\n\r\n"[..], b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", &[0x16, 3, 1, 255, 255], &[]] {
        let (accepted, mut connected) = pair().await;
        connected.write_all(said).await.unwrap();
        connected.shutdown().await.unwrap();
        let accepted = tokio::time::timeout(PATIENCE, master.accept(accepted, Protocol::Grpc)).await.unwrap();
        assert!(accepted.is_err(), "{said:?}");
    }
    meets(&master, &client, Role::Master).await;
}

#[tokio::test]
async fn who_means_another_port_or_names_no_protocol_is_refused() {
    let place = HandshakeSlot::of("lab");
    let (master, worker, client) =
        (place.tls(Role::Master, "m"), place.tls(Role::Worker, "w"), place.tls(Role::Client, "c"));
    for (server, protocol, to) in [(&master, Protocol::Data, Role::Master), (&worker, Protocol::Grpc, Role::Worker)] {
        let (accepted, connected) = pair().await;
        let both = async { tokio::join!(server.accept(accepted, protocol), client.connect(connected, to)) };
        let (served, asked) = tokio::time::timeout(PATIENCE, both).await.expect("a handshake ends");
        for refused in [served.unwrap_err(), asked.unwrap_err()] {
            assert!(refused.to_string().contains("another protocol (ALPN)"), "{refused}");
        }
    }
    // With a right certificate.
    let config = place.config(Role::Client, "old", DAY).security;
    let issued = Issued { certificate: config.certificate, key: config.key };
    let seen = refuses_stranger(&master, Some(&issued)).await;
    assert!(seen.contains("names no protocol (ALPN), and h2 is spoken here"), "{seen}");

    // A server that chooses none.
    let chain = vec![CertificateDer::from_pem_file(place.path("master-m.pem")).unwrap()];
    let key = PrivateKeyDer::from_pem_file(place.path("master-m-key.pem")).unwrap();
    let config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(chain, key)
        .unwrap();
    let (accepted, connected) = pair().await;
    let accept = TlsAcceptor::from(Arc::new(config)).accept(accepted);
    let both = async { tokio::join!(accept, client.connect(connected, Role::Master)) };
    let (_, refused) = tokio::time::timeout(PATIENCE, both).await.expect("a handshake ends");
    let refused = refused.unwrap_err();
    assert!(refused.to_string().contains("names no protocol (ALPN)"), "{refused}");
}

/// Puts the files of one process into the place of those of another.
fn replace(place: &HandshakeSlot, from: &str, to: &str) {
    for ending in [".pem", "-key.pem"] {
        fs::rename(place.path(&format!("{from}{ending}")), place.path(&format!("{to}{ending}"))).unwrap();
    }
}

/// Waits until a process is who it is to be.
async fn becomes(tls: &Tls, name: &str) {
    let wait = async {
        while tls.identity().name != name {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(PATIENCE, wait).await.expect("the files are read again");
}

#[tokio::test]
async fn replaced_files_are_those_of_the_next_connection_and_broken_ones_change_nothing() {
    let place = HandshakeSlot::of("lab");
    let (master, client) = (place.tls(Role::Master, "m"), place.tls(Role::Client, "c"));
    place.tls(Role::Client, "next");
    place.tls(Role::Client, "last");
    let as_first = meets(&master, &client, Role::Master).await;
    assert_eq!(as_first.0, "cavern://lab/client/c");

    replace(&place, "client-next", "client-c");
    becomes(&client, "next").await;
    assert_eq!(meets(&master, &client, Role::Master).await.0, "cavern://lab/client/next");

    // Garbage, a key that does not fit, and no file at all; each is looked at, and the former stays.
    let (certificate, key) = (place.path("client-c.pem"), place.path("client-c-key.pem"));
    let good = [&certificate, &key].map(|path| fs::read(path).unwrap());
    for broken in 0..3 {
        match broken {
            0 => fs::write(&certificate, "no certificate").unwrap(),
            1 => drop(fs::copy(place.path("ca-key.pem"), &key).unwrap()),
            _ => fs::remove_file(&certificate).unwrap(),
        }
        tokio::time::sleep(Duration::from_millis(1100)).await;
        assert_eq!(meets(&master, &client, Role::Master).await.0, "cavern://lab/client/next", "{broken}");
        fs::write(&certificate, &good[0]).unwrap();
        fs::write(&key, &good[1]).unwrap();
    }
    replace(&place, "client-last", "client-c");
    becomes(&client, "last").await;
    assert_eq!(meets(&master, &client, Role::Master).await.0, "cavern://lab/client/last");
}

#[tokio::test]
async fn an_authority_is_replaced_while_both_are_known() {
    let (old, new) = (HandshakeSlot::of("lab"), HandshakeSlot::of("lab"));
    let bundle = old.path("bundle.pem");
    let with_bundle = |config: Config| {
        let mut config = config;
        config.security.ca = bundle.clone();
        config
    };
    let texts = [&old, &new].map(|place| fs::read_to_string(place.authority.certificate()).unwrap());
    fs::write(&bundle, texts.concat()).unwrap();
    let master = tls(&with_bundle(old.config(Role::Master, "m", DAY)));
    for (place, name) in [(&old, "old"), (&new, "new")] {
        let client = tls(&with_bundle(place.config(Role::Client, name, DAY)));
        assert_eq!(meets(&master, &client, Role::Master).await.0, format!("cavern://lab/client/{name}"));
    }
}

/// Both ends of a connection to a master: its own first.
async fn connected(master: &Tls, client: &Tls) -> (PeerStream, PeerStream) {
    let (accepted, connected) = pair().await;
    let both = async { tokio::join!(master.accept(accepted, Protocol::Grpc), client.connect(connected, Role::Master)) };
    let (own, other) = tokio::time::timeout(PATIENCE, both).await.expect("a handshake ends");
    (own.unwrap(), other.unwrap())
}

/// Why a connection ends on which nobody says anything.
async fn ends(stream: &mut PeerStream) -> String {
    let read = tokio::time::timeout(PATIENCE, stream.read_u8()).await.expect("it is not closed");
    read.expect_err("nobody says anything").to_string()
}

async fn goes_on((own, other): &mut (PeerStream, PeerStream)) {
    own.write_u8(7).await.unwrap();
    own.flush().await.unwrap();
    assert_eq!(tokio::time::timeout(PATIENCE, other.read_u8()).await.unwrap().unwrap(), 7);
}

fn issued(place: &HandshakeSlot, name: &str) -> PathBuf {
    place.path(&format!("{name}.pem"))
}

#[tokio::test]
async fn who_is_on_the_list_is_refused_by_both_sides_and_open_connections_end() {
    let place = HandshakeSlot::of("lab");
    let list = place.authority.revoke(&[], None).unwrap().path;
    let with_list = |role, name| {
        let mut config = place.config(role, name, DAY);
        config.security.revoked.clone_from(&list);
        tls(&config)
    };
    let (master, stolen, other) =
        (with_list(Role::Master, "m"), with_list(Role::Client, "stolen"), with_list(Role::Client, "other"));
    let (mut own, _far) = connected(&master, &stolen).await;
    let mut others = connected(&master, &other).await;
    place.authority.revoke(&[issued(&place, "client-stolen")], None).unwrap();
    let why = ends(&mut own).await;
    assert!(why.contains("cavern://lab/client/stolen") && why.contains("is revoked"), "{why}");
    let certificate = own.certificate().unwrap();
    assert!(certificate.is_revoked() && !others.0.certificate().unwrap().is_revoked());
    assert!(own.write_u8(1).await.is_err(), "nothing is written to it either");
    let (seen, told) = refused(&master, &stolen, Role::Master).await;
    assert!(seen.contains("Revoked") && told.contains("CertificateRevoked"), "{seen}; {told}");
    goes_on(&mut others).await;
    // Another certificate of the same name is another one.
    let renewed = place.authority.issue(
        &Identity::new("lab", Role::Client, "stolen").unwrap(),
        DAY,
        place.directory.path(),
        "renewed",
    );
    let mut config = place.config(Role::Client, "unused", DAY);
    let Issued { certificate, key } = renewed.unwrap();
    (config.security.certificate, config.security.key) = (certificate, key);
    assert_eq!(meets(&master, &tls(&config), Role::Master).await.0, "cavern://lab/client/stolen");

    // A server is revoked as clients are.
    place.authority.revoke(&[issued(&place, "master-m")], None).unwrap();
    let why = ends(&mut others.1).await;
    assert!(why.contains("cavern://lab/master/m") && why.contains("is revoked"), "{why}");
    let (_, seen) = refused(&master, &other, Role::Master).await;
    assert!(seen.contains("Revoked"), "{seen}");
}

#[tokio::test]
async fn a_list_that_cannot_be_used_is_refused_at_the_start_and_leaves_the_former_in_force() {
    let (place, foreign) = (HandshakeSlot::of("lab"), HandshakeSlot::of("lab"));
    let mut config = place.config(Role::Master, "m", DAY);
    config.security.revoked = place.path("crl.pem");
    let refused_at_start = |expected: &str| {
        let error = Transport::of(&config).unwrap_err().to_string();
        assert!(error.contains("security.revoked") && error.contains(expected), "{error}");
    };
    refused_at_start("cannot read");
    place.authority.revoke(&[], None).unwrap();
    let master = tls(&config);
    let (stolen, other) = (place.tls(Role::Client, "stolen"), place.tls(Role::Client, "other"));
    place.authority.revoke(&[issued(&place, "client-stolen")], None).unwrap();
    let deadline = tokio::time::Instant::now() + PATIENCE;
    while meet(&master, &stolen, Role::Master).await.0.is_ok() {
        assert!(tokio::time::Instant::now() < deadline, "the list is not read");
    }

    let good = fs::read(&config.security.revoked).unwrap();
    // By an authority of the same name.
    let foreign_list = fs::read(foreign.authority.revoke(&[], None).unwrap().path).unwrap();
    let certificate = fs::read(place.authority.certificate()).unwrap();
    let mut broken = good.clone();
    broken.truncate(good.len() / 2);
    let unusable = [
        (&certificate, "no certificate revocation list"),
        (&foreign_list, "no authority of security.ca has signed"),
        (&broken, ""),
    ];
    for (content, expected) in unusable {
        let beside = place.path("beside");
        fs::write(&beside, content).unwrap();
        fs::rename(&beside, &config.security.revoked).unwrap();
        refused_at_start(expected);
        // It is looked at meanwhile.
        tokio::time::sleep(Duration::from_millis(1100)).await;
        refused(&master, &stolen, Role::Master).await;
        meets(&master, &other, Role::Master).await;
    }
    fs::remove_file(&config.security.revoked).unwrap();
    tokio::time::sleep(Duration::from_millis(1100)).await;
    refused(&master, &stolen, Role::Master).await;
}

#[tokio::test]
async fn an_open_connection_ends_with_the_certificate_of_the_other_side() {
    let place = HandshakeSlot::of("lab");
    let short = Duration::from_secs(5);
    let (master, client) = (place.tls(Role::Master, "m"), place.tls(Role::Client, "c"));
    let mut others = connected(&master, &client).await;
    let old_master = tls(&place.config(Role::Master, "old", short));
    let old_client = tls(&place.config(Role::Client, "old", short));
    let (mut own, _far) = connected(&master, &old_client).await;
    let (_own, mut far) = connected(&old_master, &client).await;
    for (stream, whose) in [(&mut own, "cavern://lab/client/old"), (&mut far, "cavern://lab/master/old")] {
        let why = ends(stream).await;
        assert!(why.contains(whose) && why.contains("has expired"), "{why}");
        assert!(!stream.certificate().unwrap().is_revoked());
    }
    goes_on(&mut others).await;
}

#[tokio::test]
async fn an_open_connection_ends_with_its_authority_and_lists_are_about_their_own_only() {
    // Both have one name.
    let (old, new) = (HandshakeSlot::of("lab"), HandshakeSlot::of("lab"));
    let bundle = new.path("bundle.pem");
    let texts = [&old, &new].map(|place| fs::read_to_string(place.authority.certificate()).unwrap());
    fs::write(&bundle, texts.concat()).unwrap();
    let list = old.authority.revoke(&[], None).unwrap().path;
    let with_both = |place: &HandshakeSlot, role, name| {
        let mut config = place.config(role, name, DAY);
        (config.security.ca, config.security.revoked) = (bundle.clone(), list.clone());
        tls(&config)
    };
    let master = with_both(&new, Role::Master, "m");
    let (old_client, new_client) = (with_both(&old, Role::Client, "old"), with_both(&new, Role::Client, "new"));
    let (mut own, _far) = connected(&master, &old_client).await;
    let mut others = connected(&master, &new_client).await;
    let beside = new.path("beside");
    fs::write(&beside, &texts[1]).unwrap();
    fs::rename(&beside, &bundle).unwrap();
    let why = ends(&mut own).await;
    assert!(why.contains("cavern://lab/client/old") && why.contains("no authority"), "{why}");
    refused(&master, &old_client, Role::Master).await;
    goes_on(&mut others).await;
}
