//! Secured connections, for tests.

use std::sync::Arc;
use std::time::Duration;

use cavern_conf::Config;
use cavern_security::{Authority, Identity, Role, Tls, TlsSocket, Transport};
use tokio::net::{TcpListener, TcpStream};

/// Both ends of a connection of a client to a worker.
pub(super) async fn pair() -> (TlsSocket, TlsSocket) {
    let home = tempfile::tempdir().unwrap();
    let authority = Authority::create(home.path(), "cavern").unwrap();
    let tls = |role: Role| -> Arc<Tls> {
        let identity = Identity::new("cavern", role, "here").unwrap();
        let issued = authority.issue(&identity, Duration::from_secs(3600), home.path(), role.name()).unwrap();
        let mut config = Config::default();
        config.cluster.name = "cavern".to_owned();
        config.security.ca = authority.certificate().to_owned();
        config.security.certificate = issued.certificate;
        config.security.key = issued.key;
        let Transport::Tls(tls) = Transport::of(&config).unwrap() else { panic!("it is configured") };
        tls
    };
    let (client, worker) = (tls(Role::Client), tls(Role::Worker));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let near = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
    let (far, _) = listener.accept().await.unwrap();
    let (near, far) = tokio::join!(TlsSocket::connect(&client, near, Role::Worker), TlsSocket::accept(&worker, far));
    (near.unwrap(), far.unwrap())
}
