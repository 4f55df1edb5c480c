use std::fmt::{self, Display};
use std::net::SocketAddr;
use std::sync::{Arc, OnceLock};

use cavern_security::{Identity, OverLimit, PeerCertificate, Tenant, TenantConnection};

/// Where a connection comes from, and, when its handshake is done, from whom.
#[derive(Clone, Debug, Default)]
pub struct Peer {
    pub address: PeerAddress,
    /// Whether the other side must show who it is.
    pub secured: bool,
    pub identity: Arc<OnceLock<Identity>>,
    /// The certificate that says so.
    pub certificate: Arc<OnceLock<PeerCertificate>>,
    /// Its place among the connections of a client that has shown its identity; or why it has none, which all of its
    /// calls are answered.
    pub tenant: Arc<OnceLock<Result<TenantConnection, OverLimit>>>,
}

impl Peer {
    /// The client that it is, where connections are secured.
    ///
    /// # Errors
    /// It has too many connections.
    pub fn tenant(&self) -> Result<Option<&Arc<Tenant>>, &OverLimit> {
        match self.tenant.get() {
            Some(Ok(connection)) => Ok(Some(connection)),
            Some(Err(reason)) => Err(reason),
            None => Ok(None),
        }
    }
}

/// `None` where the connection has ended meanwhile.
#[derive(Clone, Copy, Debug, Default)]
pub struct PeerAddress(pub Option<SocketAddr>);

impl Display for PeerAddress {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(address) => address.fmt(out),
            None => out.write_str("unknown"),
        }
    }
}
