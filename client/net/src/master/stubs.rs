//! The stubs of one master, and the way of a command to the one that leads.
//!
//! A command has no time to learn who leads from its failures, and its calls take as long as they take, without any
//! retries. So it asks the masters first, in the order of the configuration, and follows what they say.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use cavern_conf::{Config, check_master};
use cavern_proto::master::cluster_client::ClusterClient;
use cavern_proto::master::namespace_client::NamespaceClient;
use cavern_proto::raft::GetGroupRequest;
use cavern_proto::raft::raft_client::RaftClient;
use cavern_security::Transport;
use tokio::time::{Instant, sleep, timeout};
use tonic::Code;
use tonic::transport::{Channel, Endpoint};

use super::channel::connected;
use super::members::Origin;
use super::{NO_ANSWER, NO_LEADER, innermost};
use crate::error::NetError;

/// Longest message taken from a master; pages of a listing are far smaller.
const MESSAGE_BYTES_MAX: usize = 64 << 20;
/// Between pings. A connection on which one stays unanswered for this long is given up.
pub(super) const KEEP_ALIVE: Duration = Duration::from_secs(2);
/// The same where nothing else could be asked.
const PATIENT_KEEP_ALIVE: Duration = Duration::from_secs(5);
/// For a master to say who leads, which it does without asking anybody.
const GROUP_WAIT: Duration = Duration::from_secs(1);
/// Between two rounds, while nobody leads: an election takes a second or two.
const GROUP_PAUSE: Duration = Duration::from_millis(100);
/// Masters asked in one round, those included that others named.
const ROUND_MAX: usize = 16;

/// The stubs of one master, to call directly or inside a call of [`MasterChannel`](super::MasterChannel).
#[derive(Clone, Debug)]
pub struct Stubs {
    pub namespace: NamespaceClient<Channel>,
    pub cluster: ClusterClient<Channel>,
    /// What every master answers, leading or not.
    pub raft: RaftClient<Channel>,
    address: Arc<str>,
    pub(super) origin: Origin,
}

/// What a master says when it is asked who leads.
enum Lead {
    Here(Box<Stubs>),
    /// The address of another one.
    At(String),
    /// Nobody that it knows of, and why it says so.
    Nowhere(String),
    /// There is no master to be asked.
    Unreachable(String),
}

impl Stubs {
    pub(super) fn new(channel: Channel, address: Arc<str>, origin: Origin) -> Self {
        Self {
            namespace: NamespaceClient::new(channel.clone()).max_decoding_message_size(MESSAGE_BYTES_MAX),
            cluster: ClusterClient::new(channel.clone()).max_decoding_message_size(MESSAGE_BYTES_MAX),
            raft: RaftClient::new(channel),
            address,
            origin,
        }
    }

    /// `host:port` of the master.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Connects to the master that leads: for commands, whose calls take as long as they take unless the master does
    /// not even answer pings. Tries for `client.metadata_timeout` while no master leads, and not again where none can
    /// be reached.
    ///
    /// The stubs stay with this master. Who gets [`NotLeading`](cavern_proto::NotLeading) from it, or no answer,
    /// connects anew.
    ///
    /// # Errors
    /// [`NetError::MasterUnavailable`] says what became of each, in their order; [`NetError::Invalid`] names an address
    /// of the configuration that is none, or a file of `[security]` that is not usable.
    pub async fn connect(config: &Config) -> Result<Self, NetError> {
        let deadline = Instant::now() + config.client.metadata_timeout.get();
        let transport = Transport::of(config)?;
        loop {
            let mut said: Vec<(String, String)> = Vec::new();
            let mut is_any_reached = false;
            let mut to_ask = VecDeque::from(config.cluster.masters.clone());
            while let Some(address) = to_ask.pop_front() {
                if said.len() >= ROUND_MAX || said.iter().any(|(asked, _)| *asked == address) {
                    continue;
                }
                let answer = match ask(&address, config.client.connect_timeout.get(), &transport).await? {
                    Lead::Here(stubs) => return Ok(*stubs),
                    Lead::At(leader) => {
                        let answer = format!("says that the one at {leader} leads");
                        is_any_reached = true;
                        to_ask.push_front(leader);
                        answer
                    }
                    Lead::Nowhere(answer) => {
                        is_any_reached = true;
                        answer
                    }
                    Lead::Unreachable(cause) => cause,
                };
                said.push((address, answer));
            }
            if !is_any_reached || Instant::now() + GROUP_PAUSE >= deadline {
                return Err(unavailable(config, &said, is_any_reached));
            }
            sleep(GROUP_PAUSE).await;
        }
    }
}

fn unavailable(config: &Config, said: &[(String, String)], is_any_reached: bool) -> NetError {
    let each: Vec<String> = match said {
        [(_, only)] => vec![only.clone()],
        several => several.iter().map(|(address, answer)| format!("{address}: {answer}")).collect(),
    };
    let each = each.join("; ");
    let cause = if is_any_reached { format!("{NO_LEADER} ({each})") } else { each };
    NetError::MasterUnavailable { masters: config.cluster.masters.join(", "), cause }
}

async fn ask(address: &str, connect_timeout: Duration, transport: &Transport) -> Result<Lead, NetError> {
    let endpoint = endpoint(address, connect_timeout, PATIENT_KEEP_ALIVE)?;
    let channel = match connected(&endpoint, transport).await {
        Ok(channel) => channel,
        Err(error) => return Ok(Lead::Unreachable(innermost(&error))),
    };
    let mut stubs = Stubs::new(channel, Arc::from(address), Origin::default());
    let group = match timeout(GROUP_WAIT, stubs.raft.get_group(GetGroupRequest {})).await {
        Ok(Ok(group)) => group.into_inner(),
        // A master of a version that has no groups is the only one.
        Ok(Err(status)) if status.code() == Code::Unimplemented => return Ok(Lead::Here(Box::new(stubs))),
        // Nobody that can be spoken to: one side speaks TLS and the other does not, or refuses a certificate.
        Ok(Err(status)) if std::error::Error::source(&status).is_some() => {
            return Ok(Lead::Unreachable(innermost(&status)));
        }
        Ok(Err(status)) => return Ok(Lead::Nowhere(status.message().to_owned())),
        Err(_elapsed) => return Ok(Lead::Nowhere(NO_ANSWER.to_owned())),
    };
    if group.leader == 0 {
        let reason = if group.node_id == 0 { "has no place in a cluster yet" } else { "knows no leader" };
        return Ok(Lead::Nowhere(reason.to_owned()));
    }
    if group.leader == group.node_id {
        return Ok(Lead::Here(Box::new(stubs)));
    }
    let leader = group.members.into_iter().find(|member| member.node_id == group.leader);
    Ok(match leader.filter(|leader| check_master(&leader.address).is_ok()) {
        Some(leader) => Lead::At(leader.address),
        None => Lead::Nowhere(format!("says that master {} leads, and not where that is", group.leader)),
    })
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
