//! The `Raft` service: what other masters ask of this one, and what `cv raft` does.

use std::sync::Arc;

use cavern_consensus::{Consensus, offer_of};
use cavern_proto::raft::raft_server::Raft;
use cavern_proto::raft::{
    AddMasterRequest, AppendReply, AppendRequest, GetGroupRequest, Group, HandOverReply, HandOverRequest, JoinReply,
    JoinRequest, MakeSnapshotRequest, RemoveMasterRequest, RotateSecretsReply, RotateSecretsRequest, SettleKeysReply,
    SettleKeysRequest, SnapshotOffer, SnapshotPiece, SnapshotProgress, SnapshotReply, TakeKeyReply, TakeKeyRequest,
    Target, TransferLeadershipRequest, VoteReply, VoteRequest,
};
use cavern_state::outcome::ReserveMasterId;
use cavern_work::{Request, WorkError};
use tokio::sync::Mutex;
use tonic::{Response, Streaming};

use super::call::{Answer, OrStatus as _};
use super::guard::is_about;
use crate::announce::announce;
use crate::blocking::blocking;
use crate::bootstrap::{Bootstrap, ask_group, described};
use crate::error::MasterError;
use crate::leader_election::LeaderElection;
use crate::services::Services;
use crate::{feature_version, rotation};

/// The `Raft` service. Cheap to clone.
#[derive(Clone)]
pub struct RaftService {
    bootstrap: Arc<Bootstrap>,
    election: Arc<LeaderElection>,
    /// One change of the group is made at a time.
    changing: Arc<Mutex<()>>,
}

impl RaftService {
    pub fn new(bootstrap: Arc<Bootstrap>, election: Arc<LeaderElection>) -> Self {
        Self { bootstrap, election, changing: Arc::default() }
    }

    fn running(&self) -> Result<&Arc<Consensus>, MasterError> {
        let consensus = self.bootstrap.consensus.get();
        consensus.ok_or_else(|| WorkError::unavailable("this master has no place in a cluster yet".into()).into())
    }

    async fn add(&self, address: &str) -> Result<Group, MasterError> {
        cavern_conf::check_master(address).map_err(WorkError::Invalid)?;
        let consensus = self.running()?;
        let _changing = self.changing.lock().await;
        let group = described(consensus);
        let term = self.election.term().ok_or_else(|| self.election.not_leading())?;
        // Whoever asks again, since no answer came, has what was asked for.
        if group.members.iter().any(|member| member.address == address && member.votes) {
            return Ok(Group { unaware: announce(&term.services).await?, ..group });
        }
        let Services { proposer, lookups, .. } = &term.services;
        // One that was given a place, but did not come to vote: it goes on.
        let begun = group.members.iter().find(|member| member.address == address);
        let own_place = ask_group(&self.bootstrap.connector, address).await?;
        feature_version::check_joining(&own_place, feature_version::agreed(&lookups.reader).await?)?;
        let node_id = match begun {
            Some(begun) => begun.node_id,
            None if own_place.cluster_id == group.cluster_id && own_place.members.is_empty() => own_place.node_id,
            None => {
                let taken = group.members.iter().map(|member| member.node_id).max().unwrap_or(0);
                proposer.propose(ReserveMasterId(taken)).await?.map_err(WorkError::Refused)?
            }
        };
        self.bootstrap.give_place(&group.cluster_id, node_id, address).await?;
        let target = Target { cluster_id: group.cluster_id, node_id };
        rotation::give_to_joining(&term.services, &self.bootstrap, target, address).await?;
        consensus.add(node_id, address).await?;
        let unaware = announce(&term.services).await?;
        if self.election.term().is_none_or(|now| now.services.term != term.services.term) {
            // Nobody was told by a term that is over.
            return Err(self.election.not_leading());
        }
        consensus.let_vote(node_id, address).await?;
        Ok(Group { unaware, ..described(consensus) })
    }

    /// Has the numbers of all members be known as given. Those of founders are not, and nobody may have the number of
    /// one that leaves: its directory may come back.
    async fn count_ids(&self, group: &Group) -> Result<(), MasterError> {
        let term = self.election.term().ok_or_else(|| self.election.not_leading())?;
        let largest = group.members.iter().map(|member| member.node_id).max().unwrap_or(0);
        let counted = term.services.lookups.reader.read(|tables| Ok(tables.counters()?.master)).await?;
        if counted < largest {
            // Where no numbers are left, none is given again.
            let _counted = term.services.proposer.propose(ReserveMasterId(largest - 1)).await?;
        }
        Ok(())
    }

    async fn rotate(&self, request: &Request) -> Result<RotateSecretsReply, MasterError> {
        let _changing = self.changing.lock().await;
        let consensus = self.running()?;
        let term = self.election.term().ok_or_else(|| self.election.not_leading())?;
        rotation::rotate(request, &term.services, consensus, self.bootstrap.sealer()?, &self.bootstrap.database).await
    }
}

#[tonic::async_trait]
impl Raft for RaftService {
    async fn append(&self, request: tonic::Request<AppendRequest>) -> Answer<AppendReply> {
        let request = request.into_inner();
        let consensus = self.bootstrap.consensus_for(request.target.as_ref())?;
        Ok(Response::new(consensus.append(request).await?))
    }

    async fn vote(&self, request: tonic::Request<VoteRequest>) -> Answer<VoteReply> {
        let request = request.get_ref();
        Ok(Response::new(self.bootstrap.consensus_for(request.target.as_ref())?.vote(request).await?))
    }

    async fn pre_vote(&self, request: tonic::Request<VoteRequest>) -> Answer<VoteReply> {
        let request = request.get_ref();
        Ok(Response::new(self.bootstrap.consensus_for(request.target.as_ref())?.pre_vote(request).await?))
    }

    async fn hand_over(&self, request: tonic::Request<HandOverRequest>) -> Answer<HandOverReply> {
        let request = request.into_inner();
        let consensus = self.bootstrap.consensus_for(request.target.as_ref())?;
        Ok(Response::new(consensus.take_over(request).await?))
    }

    async fn offer_snapshot(&self, request: tonic::Request<SnapshotOffer>) -> Answer<SnapshotProgress> {
        let offer = request.into_inner();
        let consensus = self.bootstrap.consensus_for(offer.target.as_ref())?;
        Ok(Response::new(consensus.consider(offer).await?))
    }

    async fn send_snapshot(&self, request: tonic::Request<Streaming<SnapshotPiece>>) -> Answer<SnapshotReply> {
        let mut pieces = request.into_inner();
        let offer = offer_of(&mut pieces).await?;
        let consensus = self.bootstrap.consensus_for(offer.target.as_ref())?;
        Ok(Response::new(consensus.receive_snapshot(offer, pieces).await?))
    }

    async fn get_group(&self, _: tonic::Request<GetGroupRequest>) -> Answer<Group> {
        Ok(Response::new(self.bootstrap.group()))
    }

    async fn join(&self, request: tonic::Request<JoinRequest>) -> Answer<JoinReply> {
        is_about(&request, |asked| format!("master {}", asked.node_id));
        self.bootstrap.join(request.into_inner()).await?;
        Ok(Response::new(JoinReply {}))
    }

    async fn take_key(&self, request: tonic::Request<TakeKeyRequest>) -> Answer<TakeKeyReply> {
        let TakeKeyRequest { target, generation, key } = request.into_inner();
        self.bootstrap.consensus_for(target.as_ref())?;
        let sealer = self.bootstrap.sealer()?.clone();
        blocking(move || Ok(sealer.take(generation, &key)?)).await?;
        Ok(Response::new(TakeKeyReply {}))
    }

    async fn settle_keys(&self, request: tonic::Request<SettleKeysRequest>) -> Answer<SettleKeysReply> {
        let SettleKeysRequest { target, generation } = request.into_inner();
        self.bootstrap.consensus_for(target.as_ref())?;
        let settled = rotation::settle_from(self.bootstrap.sealer()?, &self.bootstrap.database, generation).await?;
        Ok(Response::new(SettleKeysReply { settled }))
    }

    async fn rotate_secrets(&self, request: tonic::Request<RotateSecretsRequest>) -> Answer<RotateSecretsReply> {
        let request = Request::new(request.into_inner().request_id).or_status()?;
        // A caller who is gone must not leave half of it.
        let service = self.clone();
        let rotated = self.election.tasks.spawn(async move { service.rotate(&request).await });
        Ok(Response::new(rotated.await.map_err(|error| WorkError::unavailable(error.to_string())).or_status()??))
    }

    async fn add_master(&self, request: tonic::Request<AddMasterRequest>) -> Answer<Group> {
        is_about(&request, |asked| asked.address.clone());
        // A caller who is gone must not leave half of it.
        let (service, address) = (self.clone(), request.into_inner().address);
        let added = self.election.tasks.spawn(async move { service.add(&address).await });
        Ok(Response::new(added.await.map_err(|error| WorkError::unavailable(error.to_string())).or_status()??))
    }

    async fn remove_master(&self, request: tonic::Request<RemoveMasterRequest>) -> Answer<Group> {
        is_about(&request, |asked| format!("master {}", asked.node_id));
        let _changing = self.changing.lock().await;
        let consensus = self.running()?;
        self.count_ids(&consensus.group()).await?;
        consensus.remove(request.into_inner().node_id).await?;
        Ok(Response::new(described(consensus)))
    }

    async fn transfer_leadership(&self, request: tonic::Request<TransferLeadershipRequest>) -> Answer<Group> {
        is_about(&request, |asked| format!("master {}", asked.node_id));
        let consensus = self.running()?;
        if consensus.leads().is_none() {
            return Err(self.election.not_leading().into());
        }
        consensus.hand_over(request.into_inner().node_id).await?;
        Ok(Response::new(described(consensus)))
    }

    async fn make_snapshot(&self, _: tonic::Request<MakeSnapshotRequest>) -> Answer<Group> {
        let consensus = self.running()?;
        consensus.make_snapshot().await?;
        Ok(Response::new(described(consensus)))
    }
}
