//! Connections as the configuration wants them: in the clear, or over TLS with the files as they are now.

use std::io;
use std::sync::Arc;

use cavern_conf::{Config, schema};
use rustls::ServerConfig;
use rustls::pki_types::ServerName;
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;
use tokio_rustls::{TlsAcceptor, TlsConnector, TlsStream, server};

use crate::certificate::CertificateInfo;
use crate::error::SecurityError;
use crate::files::Files;
use crate::handshake::{PeerStream, explained, take_leave};
use crate::identity::{Identity, Role};
use crate::peers::Peers;
use crate::trust::Side;

/// A server's name must be one; which one, no process of a cluster looks at. Certificates of an
/// [`Authority`](crate::Authority) have it for others who do.
pub(crate) const SERVER_NAME: &str = "cavern";
/// What HTTP ports speak, as [`Protocol::name`].
pub(crate) const HTTP: &[u8] = b"http/1.1";

/// How the processes of a cluster speak to each other.
#[derive(Clone, Debug)]
pub enum Transport {
    /// In the clear: whoever reaches a port may do everything.
    Plain,
    Tls(Arc<Tls>),
}

impl Transport {
    /// What `[security]` asks for.
    ///
    /// # Errors
    /// A file cannot be read, or is not what it is said to be.
    pub fn of(config: &Config) -> Result<Self, SecurityError> {
        Self::with_role(config, None)
    }

    /// What `[security]` asks for of a process that others connect to: its certificate is of this role.
    ///
    /// # Errors
    /// As [`Self::of`], and where it is of another.
    pub fn of_server(config: &Config, role: Role) -> Result<Self, SecurityError> {
        Self::with_role(config, Some(role))
    }

    fn with_role(config: &Config, role: Option<Role>) -> Result<Self, SecurityError> {
        if !config.security.is_on() {
            return Ok(Self::Plain);
        }
        Ok(Self::Tls(Arc::new(Tls::new(config.security.clone(), &config.cluster.name, role)?)))
    }
}

/// What is spoken between processes. Both sides of a connection name it (ALPN), so that nobody leads a client of one
/// port to another, although the ports of a process show the same certificate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// With a master.
    Grpc,
    /// Frames, with a worker.
    Data,
}

impl Protocol {
    /// As TLS has it. That of frames has the version of these.
    pub(crate) fn name(self) -> &'static [u8] {
        match self {
            Self::Grpc => b"h2",
            Self::Data => b"cavern-data/2",
        }
    }

    /// What a server of this role is spoken to in.
    pub(crate) fn with(role: Role) -> Self {
        if role == Role::Worker { Self::Data } else { Self::Grpc }
    }
}

/// TLS 1.3 in both directions, with the certificate of this process.
pub struct Tls {
    files: Arc<Files>,
    peers: Arc<Peers>,
}

cavern_conf::debug_only!(Tls { files });

impl Tls {
    fn new(files: schema::Security, cluster: &str, role: Option<Role>) -> Result<Self, SecurityError> {
        let files = Arc::new(Files::open(files, cluster, role)?);
        Ok(Self { peers: Arc::new(Peers::new(files.clone())), files })
    }

    /// Who this process is.
    pub fn identity(&self) -> Identity {
        self.files.loaded().own.identity.clone()
    }

    /// What the certificate says that new connections have.
    pub fn certificate(&self) -> CertificateInfo {
        self.files.loaded().own.info.clone()
    }

    /// Why others refuse that certificate, who have the files of this process: no authority of `security.ca` has signed
    /// it, say, or it has ended, or is revoked.
    pub fn certificate_refusal(&self) -> Option<String> {
        self.files.loaded().check_own().err().map(|error| error.to_string())
    }

    /// When the first of the lists of revoked certificates was to be replaced, in seconds since the epoch; `None` where
    /// there is no list.
    pub(crate) fn next_update(&self) -> Option<i64> {
        self.files.loaded().trust.next_update
    }

    /// Shakes hands with a server that must be of this role (a master or a worker). The caller bounds the time.
    ///
    /// # Errors
    /// Those of the connection, and what this side finds wrong with the other's certificate. What the other finds wrong
    /// with that of this process is told by the first read.
    pub async fn connect(&self, stream: TcpStream, to: Role) -> io::Result<PeerStream> {
        let loaded = self.files.loaded();
        let config = if to == Role::Worker { &loaded.to_worker } else { &loaded.to_master };
        let name = ServerName::try_from(SERVER_NAME).map_err(io::Error::other)?;
        let connected = TlsConnector::from(config.clone()).connect(name, stream).await.map_err(explained)?;
        // What it names is among what was offered: the handshake looks at that.
        if connected.get_ref().1.alpn_protocol().is_none() {
            return Err(nameless(Protocol::with(to)));
        }
        self.known(connected.into(), Side::Server, loaded.epoch)
    }

    /// Shakes hands with a client, of whatever role, that offers to speak this protocol. The caller bounds the time.
    ///
    /// # Errors
    /// Those of the connection, what either side finds wrong with the other's certificate, and a client that offers
    /// another protocol, or none; the other side has been told then.
    pub async fn accept(&self, stream: TcpStream, protocol: Protocol) -> io::Result<PeerStream> {
        let loaded = self.files.loaded();
        let config = if protocol == Protocol::Data { &loaded.data } else { &loaded.grpc };
        let mut accepted = accept(config.clone(), stream).await?;
        if accepted.get_ref().1.alpn_protocol().is_none() {
            // A handshake in which the client offers nothing succeeds.
            let _ = accepted.shutdown().await;
            take_leave(accepted.into_inner().0).await;
            return Err(nameless(protocol));
        }
        self.known(accepted.into(), Side::Client, loaded.epoch)
    }

    /// Shakes hands with a client of an HTTP port. It need not show a certificate; one that it shows is as right as
    /// those of others. Nor need it name HTTP, as many health checks do not, but it offers nothing else.
    pub(crate) async fn accept_anybody(&self, stream: TcpStream) -> io::Result<PeerStream> {
        let loaded = self.files.loaded();
        let accepted = accept(loaded.to_anybody.clone(), stream).await?;
        self.known(accepted.into(), Side::Client, loaded.epoch)
    }

    /// A connection whose handshake is done, with what was trusted in that epoch.
    fn known(&self, stream: TlsStream<TcpStream>, side: Side, epoch: u64) -> io::Result<PeerStream> {
        let (socket, connection) = stream.get_ref();
        let chain = connection.peer_certificates().unwrap_or_default();
        let address = socket.peer_addr().ok();
        let shown = (!chain.is_empty()).then(|| self.peers.add(chain, side, epoch, address)).transpose()?;
        Ok(PeerStream::new(stream, shown))
    }
}

/// Why a connection is closed on which the other side has named no protocol.
fn nameless(wanted: Protocol) -> io::Error {
    let wanted = String::from_utf8_lossy(wanted.name());
    let text = format!(
        "the other side names no protocol (ALPN), and {wanted} is spoken here: use the same version of cv on both sides"
    );
    io::Error::new(io::ErrorKind::InvalidData, text)
}

async fn accept(config: Arc<ServerConfig>, stream: TcpStream) -> io::Result<server::TlsStream<TcpStream>> {
    match TlsAcceptor::from(config).accept(stream).into_fallible().await {
        Ok(accepted) => Ok(accepted),
        Err((error, stream)) => {
            take_leave(stream).await;
            Err(explained(error))
        }
    }
}
