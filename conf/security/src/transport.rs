//! Connections as the configuration wants them: in the clear, or over TLS with the files as they are now.

use std::fmt;
use std::io;
use std::sync::Arc;

use cavern_conf::{Config, schema};
use rustls::ServerConfig;
use rustls::pki_types::ServerName;
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

    /// The same for a process that others connect to: its certificate is of this role.
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

/// TLS 1.3 in both directions, with the certificate of this process.
pub struct Tls {
    files: Arc<Files>,
    peers: Arc<Peers>,
}

impl fmt::Debug for Tls {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Tls").field("files", &self.files).finish_non_exhaustive()
    }
}

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
        self.known(connected.into(), Side::Server, loaded.epoch)
    }

    /// Shakes hands with a client, of whatever role. The caller bounds the time.
    ///
    /// # Errors
    /// Those of the connection, and what either side finds wrong with the other's certificate; the other side has been
    /// told then.
    pub async fn accept(&self, stream: TcpStream) -> io::Result<PeerStream> {
        let loaded = self.files.loaded();
        let accepted = accept(loaded.server.clone(), stream).await?;
        self.known(accepted.into(), Side::Client, loaded.epoch)
    }

    /// The same with a client that need not show a certificate. One that it shows is as right as those of others.
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

async fn accept(config: Arc<ServerConfig>, stream: TcpStream) -> io::Result<server::TlsStream<TcpStream>> {
    match TlsAcceptor::from(config).accept(stream).into_fallible().await {
        Ok(accepted) => Ok(accepted),
        Err((error, stream)) => {
            take_leave(stream).await;
            Err(explained(error))
        }
    }
}
