//! Connections as the configuration wants them: in the clear, or over TLS with the files as they are now.

use std::fmt;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use cavern_conf::{Config, schema};
use parking_lot::Mutex;
use rustls::client::Resumption;
use rustls::crypto::ring;
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, CommonState, RootCertStore, ServerConfig, version};
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;
use tokio::time::Instant;
use tokio_rustls::{TlsAcceptor, TlsConnector, server};

use crate::certificate::{CertificateInfo, identity_of, read_certificates, read_key};
use crate::error::SecurityError;
use crate::handshake::{ClientStream, explained, take_leave};
use crate::identity::{Identity, Role};
use crate::verify::{Clients, Servers, Wanted};

/// The files are looked at again for a connection that is made so long after the last time.
pub(crate) const LOOK_AGAIN: Duration = Duration::from_secs(1);
/// A server's name must be one; which one, no process of a cluster looks at. Certificates of an
/// [`Authority`](crate::Authority) have it for others who do.
pub(crate) const SERVER_NAME: &str = "cavern";
/// What HTTP ports speak, as [`Protocol::name`].
const HTTP: &[u8] = b"http/1.1";

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
    fn name(self) -> &'static [u8] {
        match self {
            Self::Grpc => b"h2",
            Self::Data => b"cavern-data/2",
        }
    }

    /// What a server of this role is spoken to in.
    fn with(role: Role) -> Self {
        if role == Role::Worker { Self::Data } else { Self::Grpc }
    }
}

/// TLS 1.3 in both directions, with the certificate of this process.
pub struct Tls {
    files: schema::Security,
    cluster: String,
    /// That the certificate must be of, if it matters.
    role: Option<Role>,
    current: Mutex<Current>,
}

struct Current {
    loaded: Arc<Loaded>,
    /// Of the three files when they were last read, whether they could be used or not.
    stamps: [Stamp; 3],
    looked: Instant,
}

/// What tells one file from its successor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Stamp {
    inode: u64,
    changed: (i64, i64),
    length: u64,
}

struct Loaded {
    info: CertificateInfo,
    identity: Identity,
    grpc: Arc<ServerConfig>,
    data: Arc<ServerConfig>,
    /// For clients of HTTP ports, which need not have a certificate.
    to_anybody: Arc<ServerConfig>,
    to_master: Arc<ClientConfig>,
    to_worker: Arc<ClientConfig>,
}

impl fmt::Debug for Tls {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Tls").field("files", &self.files).finish_non_exhaustive()
    }
}

impl Tls {
    fn new(files: schema::Security, cluster: &str, role: Option<Role>) -> Result<Self, SecurityError> {
        let stamps = stamps(&files);
        let loaded = Arc::new(load(&files, cluster, role)?);
        let current = Mutex::new(Current { loaded, stamps, looked: Instant::now() });
        Ok(Self { files, cluster: cluster.to_owned(), role, current })
    }

    /// With the files as they are. What cannot be used leaves the last that could be in force, and is said in the log.
    fn loaded(&self) -> Arc<Loaded> {
        let mut current = self.current.lock();
        if current.looked.elapsed() >= LOOK_AGAIN {
            current.looked = Instant::now();
            let stamps = stamps(&self.files);
            if stamps != current.stamps {
                // A pair that is replaced file by file does not fit meanwhile: it is read again when it changes again.
                current.stamps = stamps;
                match load(&self.files, &self.cluster, self.role) {
                    Ok(loaded) => {
                        tracing::info!(identity = %loaded.identity, "the certificate was replaced");
                        current.loaded = Arc::new(loaded);
                    }
                    Err(error) => tracing::warn!("the former certificate stays in force: {error}"),
                }
            }
        }
        current.loaded.clone()
    }

    /// Who this process is.
    pub fn identity(&self) -> Identity {
        self.loaded().identity.clone()
    }

    /// What the certificate says that new connections have.
    pub fn certificate(&self) -> CertificateInfo {
        self.loaded().info.clone()
    }

    /// Who is on the other side of a connection whose handshake is done.
    ///
    /// # Errors
    /// It has shown nothing that says so.
    pub fn peer(connection: &CommonState) -> io::Result<Identity> {
        let first = connection.peer_certificates().and_then(|certificates| certificates.first());
        let first = first.ok_or_else(|| io::Error::other("the other side has shown no certificate"))?;
        identity_of(first).map_err(io::Error::other)
    }

    /// Shakes hands with a server that must be of this role (a master or a worker). The caller bounds the time.
    ///
    /// # Errors
    /// Those of the connection, and what this side finds wrong with the other's certificate. What the other finds wrong
    /// with that of this process is told by the first read.
    pub async fn connect(&self, stream: TcpStream, to: Role) -> io::Result<ClientStream> {
        let loaded = self.loaded();
        let config = if to == Role::Worker { &loaded.to_worker } else { &loaded.to_master };
        let name = ServerName::try_from(SERVER_NAME).map_err(io::Error::other)?;
        let connected = TlsConnector::from(config.clone()).connect(name, stream).await.map_err(explained)?;
        // What it names is among what was offered: the handshake looks at that.
        if connected.get_ref().1.alpn_protocol().is_none() {
            return Err(nameless(Protocol::with(to)));
        }
        Ok(ClientStream(connected))
    }

    /// Shakes hands with a client, of whatever role, that offers to speak this protocol. The caller bounds the time.
    ///
    /// # Errors
    /// Those of the connection, what either side finds wrong with the other's certificate, and a client that offers
    /// another protocol, or none; the other side has been told then.
    pub async fn accept(&self, stream: TcpStream, protocol: Protocol) -> io::Result<server::TlsStream<TcpStream>> {
        let loaded = self.loaded();
        let config = if protocol == Protocol::Data { &loaded.data } else { &loaded.grpc };
        let mut accepted = accept(config.clone(), stream).await?;
        if accepted.get_ref().1.alpn_protocol().is_none() {
            // A handshake in which the client offers nothing succeeds.
            let _ = accepted.shutdown().await;
            take_leave(accepted.into_inner().0).await;
            return Err(nameless(protocol));
        }
        Ok(accepted)
    }

    /// Shakes hands with a client of an HTTP port. It need not show a certificate; one that it shows is as right as
    /// those of others. Nor need it name HTTP, as many health checks do not, but it offers nothing else.
    pub(crate) async fn accept_anybody(&self, stream: TcpStream) -> io::Result<server::TlsStream<TcpStream>> {
        accept(self.loaded().to_anybody.clone(), stream).await
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

fn stamps(files: &schema::Security) -> [Stamp; 3] {
    [&files.ca, &files.certificate, &files.key].map(|path| stamp(path).unwrap_or_default())
}

pub(crate) fn stamp(path: &Path) -> io::Result<Stamp> {
    let found = std::fs::metadata(path)?;
    Ok(Stamp { inode: found.ino(), changed: (found.ctime(), found.ctime_nsec()), length: found.len() })
}

fn load(files: &schema::Security, cluster: &str, role: Option<Role>) -> Result<Loaded, SecurityError> {
    let unusable = |reason: String| SecurityError::unusable("certificate", &files.certificate, reason);
    let mut roots = RootCertStore::empty();
    for authority in read_certificates("ca", &files.ca)? {
        roots.add(authority).map_err(|error| SecurityError::unusable("ca", &files.ca, error))?;
    }
    let roots = Arc::new(roots);
    let chain = read_certificates("certificate", &files.certificate)?;
    let info = CertificateInfo::of(&chain[0]).map_err(unusable)?;
    let identity = identity_of(&chain[0]).map_err(unusable)?;
    if identity.cluster != cluster {
        return Err(unusable(format!("it is of {identity}, and cluster.name is \"{cluster}\"")));
    }
    if let Some(role) = role.filter(|role| identity.role != *role) {
        return Err(unusable(format!("it is of {identity}, and nobody takes this process for a {role} with it")));
    }
    let provider = Arc::new(ring::default_provider());
    let server = |wanted: Wanted, protocol: &[u8]| {
        let clients = Clients::new(roots.clone(), provider.clone(), cluster, wanted)
            .map_err(|reason| SecurityError::unusable("ca", &files.ca, reason))?;
        let mut server = ServerConfig::builder_with_provider(provider.clone())
            .with_protocol_versions(&[&version::TLS13])
            .map_err(|error| unusable(error.to_string()))?
            .with_client_cert_verifier(Arc::new(clients))
            .with_single_cert(chain.clone(), read_key(&files.key)?)
            .map_err(|error| unusable(format!("it does not fit to security.key: {error}")))?;
        // Whoever comes back shows its certificate again.
        server.send_tls13_tickets = 0;
        server.alpn_protocols = vec![protocol.to_vec()];
        Ok::<_, SecurityError>(Arc::new(server))
    };
    let [grpc, data] = [Protocol::Grpc, Protocol::Data].map(|protocol| server(Wanted::Always, protocol.name()));
    let (grpc, data, to_anybody) = (grpc?, data?, server(Wanted::IfThereIsOne, HTTP)?);
    let client = |role: Role| {
        let servers = Servers {
            roots: roots.clone(),
            algorithms: provider.signature_verification_algorithms,
            cluster: cluster.to_owned(),
            role,
        };
        let mut client = ClientConfig::builder_with_provider(provider.clone())
            .with_protocol_versions(&[&version::TLS13])
            .map_err(|error| unusable(error.to_string()))?
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(servers))
            .with_client_auth_cert(chain.clone(), read_key(&files.key)?)
            .map_err(|error| unusable(format!("it does not fit to security.key: {error}")))?;
        client.resumption = Resumption::disabled();
        client.alpn_protocols = vec![Protocol::with(role).name().to_vec()];
        Ok(Arc::new(client))
    };
    let (to_master, to_worker) = (client(Role::Master)?, client(Role::Worker)?);
    Ok(Loaded { info, identity, grpc, data, to_anybody, to_master, to_worker })
}
