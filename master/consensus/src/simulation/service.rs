//! The gRPC service of a simulated master: what other masters call.

use std::sync::Arc;

use cavern_proto::raft::raft_server::Raft;
use cavern_proto::raft::{
    AddMasterRequest, AppendReply, AppendRequest, GetGroupRequest, Group, HandOverReply, HandOverRequest, JoinReply,
    JoinRequest, MakeSnapshotRequest, RemoveMasterRequest, RotateSecretsReply, RotateSecretsRequest, SettleKeysReply,
    SettleKeysRequest, SnapshotOffer, SnapshotPiece, SnapshotProgress, SnapshotReply, TakeKeyReply, TakeKeyRequest,
    TransferLeadershipRequest, VoteReply, VoteRequest,
};
use tonic::{Request, Response, Status, Streaming};

use crate::{Consensus, offer_of};

/// What other masters call. Cheap to clone.
#[derive(Clone)]
pub struct Service(pub Arc<Consensus>);

/// Nobody asks for it in a simulation.
fn nobody_asks<T>() -> Result<Response<T>, Status> {
    Err(Status::unimplemented("no simulated master is asked for this"))
}

#[tonic::async_trait]
impl Raft for Service {
    async fn append(&self, request: Request<AppendRequest>) -> Result<Response<AppendReply>, Status> {
        Ok(Response::new(self.0.append(request.into_inner()).await?))
    }

    async fn vote(&self, request: Request<VoteRequest>) -> Result<Response<VoteReply>, Status> {
        Ok(Response::new(self.0.vote(request.get_ref()).await?))
    }

    async fn pre_vote(&self, request: Request<VoteRequest>) -> Result<Response<VoteReply>, Status> {
        Ok(Response::new(self.0.pre_vote(request.get_ref()).await?))
    }

    async fn hand_over(&self, request: Request<HandOverRequest>) -> Result<Response<HandOverReply>, Status> {
        Ok(Response::new(self.0.take_over(request.into_inner()).await?))
    }

    async fn offer_snapshot(&self, request: Request<SnapshotOffer>) -> Result<Response<SnapshotProgress>, Status> {
        Ok(Response::new(self.0.consider(request.into_inner()).await?))
    }

    async fn send_snapshot(
        &self,
        request: Request<Streaming<SnapshotPiece>>,
    ) -> Result<Response<SnapshotReply>, Status> {
        let mut pieces = request.into_inner();
        let offer = offer_of(&mut pieces).await?;
        Ok(Response::new(self.0.receive_snapshot(offer, pieces).await?))
    }

    async fn get_group(&self, _: Request<GetGroupRequest>) -> Result<Response<Group>, Status> {
        Ok(Response::new(self.0.group()))
    }

    async fn join(&self, _: Request<JoinRequest>) -> Result<Response<JoinReply>, Status> {
        nobody_asks()
    }

    async fn take_key(&self, _: Request<TakeKeyRequest>) -> Result<Response<TakeKeyReply>, Status> {
        nobody_asks()
    }

    async fn settle_keys(&self, _: Request<SettleKeysRequest>) -> Result<Response<SettleKeysReply>, Status> {
        nobody_asks()
    }

    async fn rotate_secrets(&self, _: Request<RotateSecretsRequest>) -> Result<Response<RotateSecretsReply>, Status> {
        nobody_asks()
    }

    async fn add_master(&self, _: Request<AddMasterRequest>) -> Result<Response<Group>, Status> {
        nobody_asks()
    }

    async fn remove_master(&self, _: Request<RemoveMasterRequest>) -> Result<Response<Group>, Status> {
        nobody_asks()
    }

    async fn transfer_leadership(&self, _: Request<TransferLeadershipRequest>) -> Result<Response<Group>, Status> {
        nobody_asks()
    }

    async fn make_snapshot(&self, _: Request<MakeSnapshotRequest>) -> Result<Response<Group>, Status> {
        nobody_asks()
    }
}
