//! Peers whose connections are open, and whose certificates are looked at again for as long as they are.
//!
//! A handshake says that a certificate holds at its moment. One thread looks once in a second at the files of
//! `[security]`, and then again at each chain of which a part has ended since, and at all chains when other authorities
//! or other lists of revoked certificates are in force. Who is refused now is written down and counted, and his
//! connections end: each waits for that beside its socket, and asks an atomic before it reads or writes.
//!
//! Others may keep a [`PeerCertificate`] for longer than its connection, as a master does for the sessions of clients.

use std::collections::HashMap;
use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, OnceLock};
use std::thread;
use std::time::Duration;

use cavern_conf::host;
use cavern_conf::process::Metrics;
use parking_lot::Mutex;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use rustls::pki_types::{CertificateDer, UnixTime};
use rustls::{CertificateError, Error};
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};

use crate::certificate::{CertificateInfo, end_of, identity_of};
use crate::files::{Files, LOOK_AGAIN, Loaded};
use crate::identity::Identity;
use crate::trust::Side;

/// All peers of a process. See the module.
pub(crate) struct Peers {
    files: Arc<Files>,
    known: Mutex<HashMap<u64, Arc<Known>>>,
    /// Peers that there have been.
    numbers: AtomicU64,
    /// Whether the thread runs: from the first peer on.
    is_watched: Mutex<bool>,
}

/// A process may speak in several ways, and has one page of metrics.
static CLOSED: LazyLock<Family<ClosedLabels, Counter>> = LazyLock::new(Family::default);

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ClosedLabels {
    reason: &'static str,
}

struct Known {
    /// As it was shown: the peer's own certificate first.
    chain: Vec<CertificateDer<'static>>,
    identity: Identity,
    side: Side,
    address: Option<SocketAddr>,
    /// What was in force when the chain was looked at last.
    epoch: AtomicU64,
    /// When it is to be looked at again, in seconds since the epoch.
    ends: AtomicI64,
    refusal: OnceLock<Refusal>,
    /// When there is a refusal.
    refused: CancellationToken,
}

/// Why a certificate does not hold any more.
#[derive(Clone, Debug, PartialEq, Eq, Hash, thiserror::Error)]
enum Refusal {
    #[error("its certificate is revoked")]
    Revoked,
    #[error("its certificate has expired")]
    Expired,
    #[error("no authority of security.ca has signed its certificate any more")]
    UnknownAuthority,
    #[error("its certificate does not hold any more ({0})")]
    Other(String),
}

/// The certificate of a peer, as it is judged now. Cheap to clone.
#[derive(Clone)]
pub struct PeerCertificate(Arc<Kept>);

/// Known until nobody asks any more.
struct Kept {
    number: u64,
    known: Arc<Known>,
    peers: Arc<Peers>,
}

impl Drop for Kept {
    fn drop(&mut self) {
        self.peers.known.lock().remove(&self.number);
    }
}

impl fmt::Debug for PeerCertificate {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Known { identity, refusal, .. } = &*self.0.known;
        out.debug_struct("PeerCertificate")
            .field("identity", identity)
            .field("refusal", refusal)
            .finish_non_exhaustive()
    }
}

impl PeerCertificate {
    /// Whose it is.
    pub fn identity(&self) -> &Identity {
        &self.0.known.identity
    }

    /// What it says.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn info(&self) -> io::Result<CertificateInfo> {
        CertificateInfo::of(&self.0.known.chain[0]).map_err(io::Error::other)
    }

    /// Whether it is on a list of revoked certificates, as was found out when another list came into force. One whose
    /// time was over before, or that no authority stands for any more, is not.
    pub fn is_revoked(&self) -> bool {
        matches!(self.0.known.refusal.get(), Some(Refusal::Revoked))
    }

    /// # Errors
    /// It does not hold any more, and the connection has to end.
    pub(crate) fn check(&self) -> io::Result<()> {
        match self.0.known.refusal.get() {
            None => Ok(()),
            Some(refusal) => {
                let text = format!("the connection of {} is closed: {refusal}", self.identity());
                Err(io::Error::new(io::ErrorKind::ConnectionAborted, text))
            }
        }
    }

    /// Ready when the certificate does not hold any more.
    pub(crate) fn refusal(&self) -> WaitForCancellationFutureOwned {
        self.0.known.refused.clone().cancelled_owned()
    }

    /// Returns when the certificate does not hold any more.
    pub(crate) async fn refused(&self) {
        self.0.known.refused.cancelled().await;
    }
}

impl Peers {
    pub fn new(files: Arc<Files>) -> Self {
        Self { files, known: Mutex::default(), numbers: AtomicU64::new(0), is_watched: Mutex::new(false) }
    }

    /// A peer with a chain that was found right with what was in force in this epoch.
    ///
    /// # Errors
    /// The certificate names nobody, or the system has no thread to look at it again.
    pub fn add(
        self: &Arc<Self>,
        chain: &[CertificateDer<'static>],
        side: Side,
        epoch: u64,
        address: Option<SocketAddr>,
    ) -> io::Result<PeerCertificate> {
        let known = Arc::new(Known {
            identity: identity_of(&chain[0]).map_err(io::Error::other)?,
            ends: AtomicI64::new(next_end(chain, seconds(now()))),
            chain: chain.to_vec(),
            side,
            address,
            epoch: AtomicU64::new(epoch),
            refusal: OnceLock::new(),
            refused: CancellationToken::new(),
        });
        self.watch()?;
        let number = self.numbers.fetch_add(1, Ordering::Relaxed);
        self.known.lock().insert(number, known.clone());
        Ok(PeerCertificate(Arc::new(Kept { number, known, peers: self.clone() })))
    }

    /// Starts the thread, which ends a second after the last who has to do with these peers.
    fn watch(self: &Arc<Self>) -> io::Result<()> {
        let mut is_watched = self.is_watched.lock();
        if !*is_watched {
            let peers = Arc::downgrade(self);
            let watch = move || {
                let mut overdue = 0;
                loop {
                    thread::sleep(LOOK_AGAIN);
                    let Some(peers) = peers.upgrade() else { return };
                    let loaded = peers.files.loaded();
                    peers.look_again(&loaded);
                    warn_of_overdue(&loaded, &mut overdue);
                }
            };
            thread::Builder::new().name("certificates".to_owned()).spawn(watch)?;
            *is_watched = true;
        }
        Ok(())
    }

    /// Looks at the certificates that may not hold any more.
    fn look_again(&self, loaded: &Loaded) {
        let now = now();
        let due: Vec<Arc<Known>> = {
            let known = self.known.lock();
            known.values().filter(|known| known.is_due(loaded.epoch, seconds(now))).cloned().collect()
        };
        // Connections of one process show the same chain.
        let mut verdicts: HashMap<(Side, &[CertificateDer<'static>]), Option<Refusal>> = HashMap::new();
        let mut closed: HashMap<(&Identity, Refusal), Vec<Option<SocketAddr>>> = HashMap::new();
        for known in &due {
            let judge = || {
                let verified = loaded.trust.verify(known.side, &known.chain[0], &known.chain[1..], now);
                verified.err().map(|error| Refusal::of(&error))
            };
            let verdict = verdicts.entry((known.side, &known.chain[..])).or_insert_with(judge);
            match verdict.clone() {
                None => {
                    known.epoch.store(loaded.epoch, Ordering::Relaxed);
                    known.ends.store(next_end(&known.chain, seconds(now)), Ordering::Relaxed);
                }
                Some(refusal) => {
                    closed.entry((&known.identity, refusal.clone())).or_default().push(known.address);
                    CLOSED.get_or_create(&ClosedLabels { reason: refusal.name() }).inc();
                    if known.refusal.set(refusal).is_ok() {
                        known.refused.cancel();
                    }
                }
            }
        }
        for ((identity, refusal), addresses) in closed {
            let address = addresses.iter().flatten().next().map(SocketAddr::to_string).unwrap_or_default();
            let connections = addresses.len();
            tracing::warn!(address, connections, "the connection of {identity} is closed: {refusal}");
        }
    }
}

impl Known {
    fn is_due(&self, epoch: u64, now: i64) -> bool {
        let is_due = self.epoch.load(Ordering::Relaxed) < epoch || self.ends.load(Ordering::Relaxed) < now;
        is_due && self.refusal.get().is_none()
    }
}

impl Refusal {
    fn of(error: &Error) -> Self {
        match error {
            Error::InvalidCertificate(CertificateError::Revoked) => Self::Revoked,
            Error::InvalidCertificate(CertificateError::Expired | CertificateError::ExpiredContext { .. }) => {
                Self::Expired
            }
            // The other authority may have the name of the one that is not there any more.
            Error::InvalidCertificate(CertificateError::UnknownIssuer | CertificateError::BadSignature) => {
                Self::UnknownAuthority
            }
            error => Self::Other(error.to_string()),
        }
    }

    /// Among the metrics.
    fn name(&self) -> &'static str {
        match self {
            Self::Revoked => "revoked",
            Self::Expired => "expired",
            Self::UnknownAuthority => "authority",
            Self::Other(_) => "other",
        }
    }
}

/// Adds `cavern_peer_connections_closed` to the metrics of a process.
pub(crate) fn register_metrics(metrics: &Metrics) {
    for reason in [Refusal::Revoked, Refusal::Expired, Refusal::UnknownAuthority, Refusal::Other(String::new())] {
        drop(CLOSED.get_or_create(&ClosedLabels { reason: reason.name() }));
    }
    let help = "Connections that were closed because the certificate of the other side did not hold any more";
    metrics.register("peer_connections_closed", help, CLOSED.clone());
}

/// The time of day, for certificates.
pub(crate) fn now() -> UnixTime {
    UnixTime::since_unix_epoch(Duration::from_nanos(host::wall_ns().try_into().unwrap_or_default()))
}

fn seconds(time: UnixTime) -> i64 {
    time.as_secs().try_into().unwrap_or(i64::MAX)
}

/// When the next certificate of a chain ends. Some that have ended already may not have mattered.
fn next_end(chain: &[CertificateDer<'_>], now: i64) -> i64 {
    chain.iter().map(end_of).filter(|end| *end >= now).min().unwrap_or(i64::MAX)
}

/// Says once of the lists in force that one of them was to be replaced.
fn warn_of_overdue(loaded: &Loaded, warned: &mut u64) {
    let now = seconds(now());
    if *warned != loaded.epoch && loaded.trust.next_update.is_some_and(|next| next < now) {
        *warned = loaded.epoch;
        tracing::warn!(
            "a list of revoked certificates (security.revoked) is out of date, and stays in force: its authority was \
             to make the next one before now"
        );
    }
}
