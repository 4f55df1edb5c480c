//! The way to other masters: one connection to each, and the calls of the consensus over it.
//!
//! A master is addressed by its id in the cluster; the address is that of the membership. Each message says whom it is
//! meant for, so that a process that has taken over an address is not taken for the master that was there.

pub mod convert;
mod reachability;
mod send_snapshot;

use std::collections::HashMap;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use cavern_proto::raft::raft_client::RaftClient;
use cavern_proto::raft::{HandOverRequest, Target, append_reply, hand_over_reply};
use openraft::OptionalSend;
use openraft::errors::{NetworkError, RPCError, ReplicationClosed, StreamingError, Timeout, Unreachable};
use openraft::network::{Backoff, RPCOption, RPCTypes, RaftNetworkFactory, RaftNetworkV2};
use openraft::raft::{
    AppendEntriesRequest, AppendEntriesResponse, SnapshotResponse, TransferLeaderError, TransferLeaderRequest,
    TransferLeaderResponse, VoteRequest, VoteResponse,
};
use parking_lot::Mutex;
#[cfg(not(test))]
use tonic::transport::Channel;
use tonic::transport::Endpoint;
use tonic::{Code, Response, Status};

use self::reachability::Reachability;
use super::types::{Checkpoint, Node, NodeId, Snapshot, Types, Vote};
use crate::error::{ConsensusError, Result};

/// Longest message between masters: an entry has at most 4 MiB of commands, and some more of encoding.
pub const MESSAGE_MAX: usize = 16 << 20;
/// To connect to another master.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);
/// An idle connection is asked so often whether the other side is there, and given up when it does not answer as long.
const KEEP_ALIVE: Duration = Duration::from_secs(1);
/// Entries may wait for a disk: longer than a heartbeat. One that takes this long is sent again.
const APPEND_TIMEOUT: Duration = Duration::from_secs(2);
/// Pause before a master that cannot be reached is tried again: an election must not wait for it.
const UNREACHABLE_PAUSE: Duration = Duration::from_millis(100);

#[cfg(not(test))]
pub type Transport = Channel;
/// The transport of the network of a simulation.
#[cfg(test)]
pub type Transport = super::simulation::Transport;

/// Calls to one master.
pub type Calls = RaftClient<Transport>;

/// The ways to other masters, as the configuration wants them.
#[derive(Clone, Debug)]
pub struct PeerConnector(pub cavern_security::Transport);

impl PeerConnector {
    /// Calls to the master at an address, over a connection of their own. It is made when it is first used, and again
    /// when it breaks.
    ///
    /// # Errors
    /// The address is none.
    pub fn calls(&self, address: &str) -> Result<Calls> {
        self.to(address).map(calls)
    }

    fn to(&self, address: &str) -> Result<Transport> {
        #[cfg(test)]
        if let Some(host) = super::simulation::Host::current() {
            return Ok(host.way_to(address));
        }
        let channel = cavern_net::master::channel(&endpoint(address)?, &self.0);
        #[cfg(test)]
        let channel = Transport::Network(channel);
        Ok(channel)
    }
}

fn endpoint(address: &str) -> Result<Endpoint> {
    let endpoint = Endpoint::from_shared(format!("http://{address}"));
    let endpoint = endpoint.map_err(|error| ConsensusError::Invalid(format!("the address \"{address}\": {error}")))?;
    Ok(endpoint
        .connect_timeout(CONNECT_TIMEOUT)
        .tcp_nodelay(true)
        .http2_keep_alive_interval(KEEP_ALIVE)
        .keep_alive_timeout(KEEP_ALIVE)
        .keep_alive_while_idle(true))
}

fn calls(channel: Transport) -> Calls {
    RaftClient::new(channel).max_decoding_message_size(MESSAGE_MAX).max_encoding_message_size(MESSAGE_MAX)
}

/// Makes connections to other masters.
pub struct Network {
    cluster_id: Arc<str>,
    own: NodeId,
    connector: PeerConnector,
    /// By address.
    others: Arc<Mutex<HashMap<String, Other>>>,
}

/// The connection to another master.
#[derive(Clone)]
struct Other {
    calls: Calls,
    reachability: Arc<Reachability>,
}

impl Network {
    pub fn new(cluster_id: &str, own: NodeId, connector: PeerConnector) -> Self {
        Self { cluster_id: cluster_id.into(), own, connector, others: Arc::default() }
    }
}

/// Another master.
pub struct Peer {
    cluster_id: Arc<str>,
    own: NodeId,
    target: NodeId,
    /// Why there is none: an address that is none.
    other: Result<Other, String>,
}

impl RaftNetworkFactory<Types> for Network {
    type Network = Peer;

    async fn new_client(&mut self, target: NodeId, node: &Node) -> Peer {
        let mut others = self.others.lock();
        let other = match others.get(&node.addr) {
            Some(known) => Ok(known.clone()),
            None => self.connector.calls(&node.addr).map(|calls| {
                let other = Other { calls, reachability: Arc::new(Reachability::of(&node.addr)) };
                others.insert(node.addr.clone(), other.clone());
                other
            }),
        };
        let other = other.map_err(|error| error.to_string());
        Peer { cluster_id: self.cluster_id.clone(), own: self.own, target, other }
    }
}

impl Peer {
    fn target(&self) -> Option<Target> {
        Some(Target { cluster_id: self.cluster_id.to_string(), node_id: self.target })
    }

    /// One call, within a time.
    async fn call<T, F>(
        &self,
        what: RPCTypes,
        within: Duration,
        call: impl FnOnce(Calls) -> F,
    ) -> Result<T, RPCError<Types>>
    where
        F: Future<Output = Result<Response<T>, Status>>,
    {
        let Other { calls, reachability } = match &self.other {
            Ok(other) => other,
            Err(reason) => return Err(Unreachable::from_string(reason).into()),
        };
        match tokio::time::timeout(within, call(calls.clone())).await {
            Ok(Ok(answer)) => {
                reachability.reached(self.target);
                Ok(answer.into_inner())
            }
            Ok(Err(status)) => {
                reachability.not_reached(self.target, &cavern_net::master::innermost(&status));
                Err(failure(&status))
            }
            Err(_elapsed) => {
                reachability.not_reached(self.target, "no answer in time");
                Err(Timeout { action: what, id: self.own, target: self.target, timeout: within }.into())
            }
        }
    }

    async fn ask_for_vote(
        &self,
        rpc: VoteRequest<Types>,
        option: RPCOption,
        is_pre_vote: bool,
    ) -> Result<VoteResponse<Types>, RPCError<Types>> {
        let request = convert::vote_request(self.target(), &rpc);
        let reply = self.call(RPCTypes::Vote, option.soft_ttl(), |mut calls| async move {
            if is_pre_vote { calls.pre_vote(request).await } else { calls.vote(request).await }
        });
        convert::vote_response(reply.await?).map_err(senseless)
    }
}

/// What another master's refusal means to the consensus, which tries again in any case, later where it is unreachable.
fn failure(status: &Status) -> RPCError<Types> {
    match status.code() {
        // Not there, or not who he was.
        Code::Unavailable | Code::FailedPrecondition | Code::Unimplemented => {
            Unreachable::from_string(cavern_net::master::innermost(status)).into()
        }
        _ => NetworkError::from_string(status.message()).into(),
    }
}

fn senseless(error: ConsensusError) -> RPCError<Types> {
    NetworkError::from_string(error).into()
}

impl RaftNetworkV2<Types> for Peer {
    type SnapshotData = Checkpoint;

    async fn append_entries(
        &mut self,
        rpc: AppendEntriesRequest<Types>,
        option: RPCOption,
    ) -> Result<AppendEntriesResponse<Types>, RPCError<Types>> {
        // A heartbeat that is late is followed by the next.
        let within = if rpc.entries.is_empty() { option.soft_ttl().max(UNREACHABLE_PAUSE) } else { APPEND_TIMEOUT };
        let request = convert::append_request(self.target(), rpc).map_err(senseless)?;
        let reply = self.call(RPCTypes::AppendEntries, within, |mut calls| async move { calls.append(request).await });
        Ok(match convert::required(reply.await?.outcome, "the answer to entries").map_err(senseless)? {
            append_reply::Outcome::Done(_) => AppendEntriesResponse::Success,
            append_reply::Outcome::Conflict(_) => AppendEntriesResponse::Conflict,
            append_reply::Outcome::Higher(ballot) => AppendEntriesResponse::HigherVote(convert::vote(&ballot)),
            append_reply::Outcome::Partly(position) => {
                AppendEntriesResponse::PartialSuccess(Some(convert::log_id(&position).map_err(senseless)?))
            }
        })
    }

    async fn vote(
        &mut self,
        rpc: VoteRequest<Types>,
        option: RPCOption,
    ) -> Result<VoteResponse<Types>, RPCError<Types>> {
        self.ask_for_vote(rpc, option, false).await
    }

    async fn pre_vote(
        &mut self,
        rpc: VoteRequest<Types>,
        option: RPCOption,
    ) -> Result<VoteResponse<Types>, RPCError<Types>> {
        self.ask_for_vote(rpc, option, true).await
    }

    async fn full_snapshot(
        &mut self,
        vote: Vote,
        snapshot: Snapshot,
        cancel: impl Future<Output = ReplicationClosed> + OptionalSend + 'static,
        _: RPCOption,
    ) -> Result<SnapshotResponse<Types>, StreamingError<Types>> {
        let calls = match &self.other {
            Ok(other) => other.calls.clone(),
            Err(reason) => return Err(Unreachable::from_string(reason).into()),
        };
        let sending = send_snapshot::send(calls, self.target(), vote, snapshot);
        tokio::select! {
            biased;
            sent = sending => match sent {
                Ok(vote) => Ok(SnapshotResponse::new(vote)),
                Err(status) => {
                    tracing::warn!(to = self.target, "a snapshot was not taken: {}", status.message());
                    Err(failure(&status).into())
                }
            },
            closed = cancel => Err(closed.into()),
        }
    }

    async fn transfer_leader(
        &mut self,
        request: TransferLeaderRequest<Types>,
        option: RPCOption,
    ) -> Result<TransferLeaderResponse<Types>, RPCError<Types>> {
        let message = HandOverRequest {
            target: self.target(),
            from: Some(convert::ballot(request.from_leader())),
            to: *request.to_node_id(),
            last: request.last_log_id().map(convert::position),
        };
        let reply = self.call(RPCTypes::TransferLeader, option.hard_ttl(), |mut calls| async move {
            calls.hand_over(message).await
        });
        match convert::required(reply.await?.outcome, "the answer to a hand-over").map_err(senseless)? {
            hand_over_reply::Outcome::Done(_) => Ok(Ok(())),
            hand_over_reply::Outcome::Refused(reason) => {
                tracing::info!(to = self.target, "the lead was not taken: {reason}");
                let (expected, actual) = (request.last_log_id().copied(), None);
                Ok(Err(TransferLeaderError::LogNotFlushed { expected, actual }))
            }
        }
    }

    fn backoff(&self) -> Option<Backoff> {
        Some(Backoff::new(std::iter::repeat(UNREACHABLE_PAUSE)))
    }
}
