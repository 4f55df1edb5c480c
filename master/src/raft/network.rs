//! The way to other masters. A cluster has one voter in this version, so nothing ever asks for it; should a membership
//! name another node all the same, that node is unreachable, which is the truth.

use std::future::Future;

use openraft::error::{Fatal, RPCError, RaftError, ReplicationClosed, StreamingError, Unreachable};
use openraft::network::{RPCOption, RaftNetwork, RaftNetworkFactory};
use openraft::raft::{AppendEntriesRequest, AppendEntriesResponse, SnapshotResponse, VoteRequest, VoteResponse};
use openraft::{OptionalSend, Snapshot, Vote};

use super::types::{Node, NodeId, Types};

/// Makes connections to other masters.
pub struct Network;

/// A master that cannot be reached.
pub struct UnreachablePeer(NodeId);

impl UnreachablePeer {
    fn unreachable(&self) -> Unreachable {
        Unreachable::new(&std::io::Error::other(format!("this version has no connection to master {}", self.0)))
    }
}

impl RaftNetworkFactory<Types> for Network {
    type Network = UnreachablePeer;

    async fn new_client(&mut self, target: NodeId, _: &Node) -> UnreachablePeer {
        UnreachablePeer(target)
    }
}

impl RaftNetwork<Types> for UnreachablePeer {
    async fn append_entries(
        &mut self,
        _: AppendEntriesRequest<Types>,
        _: RPCOption,
    ) -> Result<AppendEntriesResponse<NodeId>, RPCError<NodeId, Node, RaftError<NodeId>>> {
        Err(self.unreachable().into())
    }

    async fn vote(
        &mut self,
        _: VoteRequest<NodeId>,
        _: RPCOption,
    ) -> Result<VoteResponse<NodeId>, RPCError<NodeId, Node, RaftError<NodeId>>> {
        Err(self.unreachable().into())
    }

    async fn full_snapshot(
        &mut self,
        _: Vote<NodeId>,
        _: Snapshot<Types>,
        _: impl Future<Output = ReplicationClosed> + OptionalSend + 'static,
        _: RPCOption,
    ) -> Result<SnapshotResponse<NodeId>, StreamingError<Types, Fatal<NodeId>>> {
        Err(StreamingError::Unreachable(self.unreachable()))
    }
}
