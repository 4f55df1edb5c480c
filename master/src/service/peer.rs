use std::fmt::{self, Display};
use std::net::SocketAddr;
use std::sync::{Arc, OnceLock};

use cavern_security::Identity;

/// Where a connection comes from, and, when its handshake is done, from whom.
#[derive(Clone, Debug)]
pub struct Peer {
    pub address: PeerAddress,
    /// Whether the other side must show who it is.
    pub secured: bool,
    pub identity: Arc<OnceLock<Identity>>,
}

/// `None` where the connection has ended meanwhile.
#[derive(Clone, Copy, Debug)]
pub struct PeerAddress(pub Option<SocketAddr>);

impl Display for PeerAddress {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(address) => address.fmt(out),
            None => out.write_str("unknown"),
        }
    }
}
