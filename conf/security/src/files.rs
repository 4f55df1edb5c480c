//! The files of `[security]` as they are now: who this process is, and whom it believes.
//!
//! They are looked at again when they are asked for, once in a [`LOOK_AGAIN`] at most. Each part by itself stays as it
//! was while its file cannot be used: a certificate that does not fit its key keeps no list of revoked ones out of
//! force.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use cavern_conf::schema;
use parking_lot::Mutex;
use rustls::client::Resumption;
use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{CertificateError, ClientConfig, Error, ServerConfig, version};
use tokio::time::Instant;

use crate::certificate::{CertificateInfo, identity_of, read_certificates, read_key};
use crate::error::SecurityError;
use crate::identity::{Identity, Role};
use crate::peers::now;
use crate::transport::{HTTP, Protocol};
use crate::trust::{Side, Trust, read_authorities, read_revoked};
use crate::verify::{Clients, Servers, Wanted};

/// The files are looked at again so long after the last time.
pub(crate) const LOOK_AGAIN: Duration = Duration::from_secs(1);

/// The files of `[security]`, loaded again when they change.
pub(crate) struct Files {
    paths: schema::Security,
    cluster: String,
    /// That the certificate must be of, if it matters.
    role: Option<Role>,
    provider: Arc<CryptoProvider>,
    current: Mutex<Current>,
}

struct Current {
    loaded: Arc<Loaded>,
    /// Of the files when they were last read, whether they could be used or not.
    stamps: [Stamp; 4],
    looked: Instant,
}

/// What tells one file from its successor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Stamp {
    inode: u64,
    changed: (i64, i64),
    length: u64,
}

/// What the files say.
pub(crate) struct Loaded {
    /// Rises whenever others are believed.
    pub epoch: u64,
    pub trust: Arc<Trust>,
    pub own: Arc<Own>,
    pub grpc: Arc<ServerConfig>,
    pub data: Arc<ServerConfig>,
    /// For clients of HTTP ports, which need not have a certificate.
    pub to_anybody: Arc<ServerConfig>,
    pub to_master: Arc<ClientConfig>,
    pub to_worker: Arc<ClientConfig>,
}

/// What this process shows.
pub(crate) struct Own {
    pub info: CertificateInfo,
    pub identity: Identity,
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
}

cavern_conf::debug_only!(Files { paths });

impl Files {
    /// # Errors
    /// One cannot be read, or is not what it is said to be.
    pub fn open(paths: schema::Security, cluster: &str, role: Option<Role>) -> Result<Self, SecurityError> {
        let stamps = stamps(&paths);
        let provider = Arc::new(ring::default_provider());
        let authorities = read_authorities(&paths.ca)?;
        let lists = read_revoked(&paths.revoked, &authorities, &provider)?;
        let trust = Trust::new(authorities, lists, &provider);
        let trust = Arc::new(trust.map_err(|reason| SecurityError::unusable("ca", &paths.ca, reason))?);
        let own = Arc::new(Own::read(&paths, cluster, role)?);
        let loaded = Arc::new(Loaded::new(&paths, &provider, 1, trust, own)?);
        let current = Mutex::new(Current { loaded, stamps, looked: Instant::now() });
        Ok(Self { paths, cluster: cluster.to_owned(), role, provider, current })
    }

    /// With the files as they are. What cannot be used leaves the last that could be in force, and is said in the log.
    pub fn loaded(&self) -> Arc<Loaded> {
        let mut current = self.current.lock();
        if current.looked.elapsed() >= LOOK_AGAIN {
            current.looked = Instant::now();
            let stamps = stamps(&self.paths);
            if stamps != current.stamps {
                // A pair that is replaced file by file does not fit meanwhile: it is read again when it changes again.
                current.stamps = stamps;
                let mut is_late = false;
                if let Some(loaded) = self.load_again(&current.loaded, &mut is_late) {
                    current.loaded = Arc::new(loaded);
                }
                if is_late {
                    // Nothing is wrong with the file: it is read again, although it does not change.
                    current.stamps = Default::default();
                }
            }
        }
        current.loaded.clone()
    }

    /// `None` where nothing has changed that can be used. Sets `is_late` where a file is to be read once more.
    fn load_again(&self, former: &Loaded, is_late: &mut bool) -> Option<Loaded> {
        let Self { paths, cluster, role, provider, .. } = self;
        let authorities = read_authorities(&paths.ca).unwrap_or_else(|error| {
            *is_late |= may_be_read_later(&error);
            tracing::warn!("the former authorities stay in force: {error}");
            former.trust.authorities.clone()
        });
        let lists = read_revoked(&paths.revoked, &authorities, provider).unwrap_or_else(|error| {
            *is_late |= may_be_read_later(&error);
            tracing::warn!("the former list of revoked certificates stays in force: {error}");
            former.trust.lists.clone()
        });
        let (mut trust, mut epoch) = (former.trust.clone(), former.epoch);
        if authorities != trust.authorities || lists != trust.lists {
            match Trust::new(authorities, lists, provider) {
                Ok(changed) => {
                    tracing::info!("the authorities, or the certificates that they have revoked, are others now");
                    (trust, epoch) = (Arc::new(changed), epoch + 1);
                }
                Err(error) => tracing::warn!("the former authorities stay in force: {error}"),
            }
        }
        let load = |own: Arc<Own>| Loaded::new(paths, provider, epoch, trust.clone(), own);
        let own = Own::read(paths, cluster, *role).and_then(|own| {
            let is_other = own.chain != former.own.chain;
            load(Arc::new(own)).map(|loaded| (loaded, is_other))
        });
        match own {
            Ok((loaded, is_other)) => {
                if is_other {
                    tracing::info!(identity = %loaded.own.identity, "the certificate was replaced");
                }
                Some(loaded)
            }
            Err(error) => {
                *is_late |= may_be_read_later(&error);
                tracing::warn!("the former certificate stays in force: {error}");
                load(former.own.clone()).ok()
            }
        }
    }
}

/// Whether the system could not read a file at that moment. What is missing or closed has another stamp when it is not.
fn may_be_read_later(error: &SecurityError) -> bool {
    use io::ErrorKind::{NotFound, PermissionDenied};
    matches!(error, SecurityError::Unreadable { source, .. } if !matches!(source.kind(), NotFound | PermissionDenied))
}

impl Own {
    fn read(paths: &schema::Security, cluster: &str, role: Option<Role>) -> Result<Self, SecurityError> {
        let unusable = |reason: String| SecurityError::unusable("certificate", &paths.certificate, reason);
        let chain = read_certificates("certificate", &paths.certificate)?;
        let info = CertificateInfo::of(&chain[0]).map_err(unusable)?;
        let identity = identity_of(&chain[0]).map_err(unusable)?;
        if identity.cluster != cluster {
            return Err(unusable(format!("it is of {identity}, and cluster.name is \"{cluster}\"")));
        }
        if let Some(role) = role.filter(|role| identity.role != *role) {
            return Err(unusable(format!("it is of {identity}, not of a {role}: make one by `cv cert issue {role}`")));
        }
        Ok(Self { info, identity, chain, key: read_key(&paths.key)? })
    }
}

impl Loaded {
    fn new(
        paths: &schema::Security,
        provider: &Arc<CryptoProvider>,
        epoch: u64,
        trust: Arc<Trust>,
        own: Arc<Own>,
    ) -> Result<Self, SecurityError> {
        let unusable = |reason: String| SecurityError::unusable("certificate", &paths.certificate, reason);
        let cluster = &own.identity.cluster;
        let server = |wanted: Wanted, protocol: &[u8]| {
            let clients = Clients { trust: trust.clone(), cluster: cluster.clone(), wanted };
            let mut server = ServerConfig::builder_with_provider(provider.clone())
                .with_protocol_versions(&[&version::TLS13])
                .map_err(|error| unusable(error.to_string()))?
                .with_client_cert_verifier(Arc::new(clients))
                .with_single_cert(own.chain.clone(), own.key.clone_key())
                .map_err(|error| unusable(format!("it does not fit to security.key: {error}")))?;
            // Whoever comes back shows its certificate again.
            server.send_tls13_tickets = 0;
            server.alpn_protocols = vec![protocol.to_vec()];
            Ok::<_, SecurityError>(Arc::new(server))
        };
        let client = |role: Role| {
            let servers = Servers { trust: trust.clone(), cluster: cluster.clone(), role };
            let mut client = ClientConfig::builder_with_provider(provider.clone())
                .with_protocol_versions(&[&version::TLS13])
                .map_err(|error| unusable(error.to_string()))?
                .dangerous()
                .with_custom_certificate_verifier(Arc::new(servers))
                .with_client_auth_cert(own.chain.clone(), own.key.clone_key())
                .map_err(|error| unusable(format!("it does not fit to security.key: {error}")))?;
            client.resumption = Resumption::disabled();
            client.alpn_protocols = vec![Protocol::with(role).name().to_vec()];
            Ok::<_, SecurityError>(Arc::new(client))
        };
        let [grpc, data] = [Protocol::Grpc, Protocol::Data].map(|protocol| server(Wanted::Always, protocol.name()));
        let (grpc, data, to_anybody) = (grpc?, data?, server(Wanted::IfThereIsOne, HTTP)?);
        let (to_master, to_worker) = (client(Role::Master)?, client(Role::Worker)?);
        let shown = trust.verify(Side::Client, &own.chain[0], &own.chain[1..], now());
        if matches!(shown, Err(Error::InvalidCertificate(CertificateError::Revoked))) {
            tracing::warn!(
                "{} has a certificate that is revoked, which nobody takes: replace security.certificate",
                own.identity
            );
        }
        Ok(Self { epoch, trust, own, grpc, data, to_anybody, to_master, to_worker })
    }

    /// Whether who believes the same authorities takes the certificate of this process, now, on each side of a
    /// connection on which it shows it.
    pub fn check_own(&self) -> Result<(), Error> {
        let Own { chain, identity, .. } = &*self.own;
        let sides: &[Side] = if identity.role.listens() { &[Side::Client, Side::Server] } else { &[Side::Client] };
        sides.iter().try_for_each(|side| self.trust.verify(*side, &chain[0], &chain[1..], now()))
    }
}

fn stamps(paths: &schema::Security) -> [Stamp; 4] {
    [&paths.ca, &paths.certificate, &paths.key, &paths.revoked].map(|path| stamp(path).unwrap_or_default())
}

pub(crate) fn stamp(path: &Path) -> io::Result<Stamp> {
    let found = std::fs::metadata(path)?;
    Ok(Stamp { inode: found.ino(), changed: (found.ctime(), found.ctime_nsec()), length: found.len() })
}
