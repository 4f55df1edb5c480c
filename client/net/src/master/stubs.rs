//! The stubs of one master.

use std::sync::Arc;
use std::time::Duration;

use cavern_proto::master::cluster_client::ClusterClient;
use cavern_proto::master::namespace_client::NamespaceClient;
use cavern_proto::master::views_client::ViewsClient;
use cavern_proto::raft::raft_client::RaftClient;
use cavern_security::Transport;
use tonic::transport::{Channel, Endpoint};

use super::channel::connected;
use super::innermost;
use super::members::Origin;
use crate::error::NetError;

/// Longest message taken from a master; pages of a listing are far smaller.
const MESSAGE_BYTES_MAX: usize = 64 << 20;
/// Between pings. A connection on which one stays unanswered for this long is given up.
pub(super) const KEEP_ALIVE: Duration = Duration::from_secs(2);
/// Between pings of a command, whose calls may take long.
pub(super) const PATIENT_KEEP_ALIVE: Duration = Duration::from_secs(5);

/// The stubs of one master, to call directly or inside a call of [`MasterChannel`](super::MasterChannel).
#[derive(Clone, Debug)]
pub struct Stubs {
    pub namespace: NamespaceClient<Channel>,
    pub cluster: ClusterClient<Channel>,
    pub views: ViewsClient<Channel>,
    /// What every master answers, leading or not.
    pub raft: RaftClient<Channel>,
    address: Arc<str>,
    pub(super) origin: Origin,
}

impl Stubs {
    pub(super) fn new(channel: Channel, address: Arc<str>, origin: Origin) -> Self {
        Self {
            namespace: NamespaceClient::new(channel.clone()).max_decoding_message_size(MESSAGE_BYTES_MAX),
            cluster: ClusterClient::new(channel.clone()).max_decoding_message_size(MESSAGE_BYTES_MAX),
            views: ViewsClient::new(channel.clone()).max_decoding_message_size(MESSAGE_BYTES_MAX),
            raft: RaftClient::new(channel),
            address,
            origin,
        }
    }

    /// Connects to the master at an address, whether it leads or not.
    ///
    /// # Errors
    /// The cause, as the system has it.
    pub async fn connect(address: &str, connect_timeout: Duration, transport: &Transport) -> Result<Self, String> {
        let endpoint = endpoint(address, connect_timeout, PATIENT_KEEP_ALIVE).map_err(|error| error.to_string())?;
        let channel = connected(&endpoint, transport).await.map_err(|error| innermost(&error))?;
        Ok(Self::new(channel, Arc::from(address), Origin::default()))
    }

    /// `host:port` of the master.
    pub fn address(&self) -> &str {
        &self.address
    }
}

pub(super) fn endpoint(address: &str, connect_timeout: Duration, keep_alive: Duration) -> Result<Endpoint, NetError> {
    let endpoint = Endpoint::from_shared(format!("http://{address}"))
        .map_err(|error| NetError::Invalid(format!("cluster.masters: \"{address}\": {error}")))?;
    Ok(endpoint
        .connect_timeout(connect_timeout)
        .tcp_nodelay(true)
        .http2_keep_alive_interval(KEEP_ALIVE)
        .keep_alive_timeout(keep_alive)
        .keep_alive_while_idle(true))
}
