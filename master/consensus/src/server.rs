//! What other masters ask of this one: the calls of the `Raft` service that the consensus answers. Whoever serves them
//! has seen to it that they are meant for this master.

use cavern_proto::raft::{
    AppendReply, AppendRequest, HandOverReply, HandOverRequest, SnapshotOffer, SnapshotPiece, SnapshotProgress,
    SnapshotReply, SnapshotTransfer, VoteReply, VoteRequest, append_reply, hand_over_reply,
};
use futures::{Stream, StreamExt};
use openraft::raft::{AppendEntriesResponse, TransferLeaderRequest};
use parking_lot::Mutex;
use tonic::Status;

use super::network::convert;
use super::node::{Consensus, fatal};
use super::snapshot::Incoming;
use super::types::Snapshot;
use crate::blocking::blocking;
use crate::error::{ConsensusError, Result};

/// A snapshot that comes from another master.
#[derive(Default)]
pub struct IncomingTransfer {
    /// One comes at a time.
    only: tokio::sync::Mutex<()>,
    /// How far it is, for those who wait for it.
    transfer: Mutex<Option<SnapshotTransfer>>,
}

impl IncomingTransfer {
    /// How far a snapshot is that comes at the moment.
    pub fn transfer(&self) -> Option<SnapshotTransfer> {
        *self.transfer.lock()
    }

    fn show(&self, begin: SnapshotTransfer) -> Shown<'_> {
        *self.transfer.lock() = Some(begin);
        Shown(self)
    }

    fn add(&self, bytes: usize) {
        if let Some(transfer) = &mut *self.transfer.lock() {
            transfer.received = transfer.received.saturating_add(bytes as u64);
        }
    }
}

/// As long as it comes.
struct Shown<'a>(&'a IncomingTransfer);

impl Drop for Shown<'_> {
    fn drop(&mut self) {
        *self.0.transfer.lock() = None;
    }
}

/// The offer that the pieces of a snapshot begin with.
///
/// # Errors
/// [`ConsensusError::Invalid`] for a snapshot that is not offered, [`ConsensusError::Unavailable`] where it breaks off.
pub async fn offer_of(
    pieces: &mut (impl Stream<Item = Result<SnapshotPiece, Status>> + Unpin),
) -> Result<SnapshotOffer> {
    let first = pieces.next().await.transpose().map_err(broken)?;
    convert::required(first.and_then(|first| first.offer), "the offer of a snapshot")
}

fn broken(status: Status) -> ConsensusError {
    ConsensusError::Unavailable(format!("a snapshot broke off: {}", status.message()))
}

fn is_taken() -> ConsensusError {
    ConsensusError::Overloaded("a snapshot is being taken in already".into())
}

impl Consensus {
    /// Entries of a leader, or a sign of life.
    pub async fn append(&self, request: AppendRequest) -> Result<AppendReply> {
        let answer = self.raft.append_entries(convert::append_entries(request)?).await.map_err(fatal)?;
        let outcome = match answer {
            AppendEntriesResponse::Success => append_reply::Outcome::Done(true),
            AppendEntriesResponse::PartialSuccess(Some(position)) => {
                append_reply::Outcome::Partly(convert::position(&position))
            }
            AppendEntriesResponse::PartialSuccess(None) | AppendEntriesResponse::Conflict => {
                append_reply::Outcome::Conflict(true)
            }
            AppendEntriesResponse::HigherVote(vote) => append_reply::Outcome::Higher(convert::ballot(&vote)),
        };
        Ok(AppendReply { outcome: Some(outcome) })
    }

    /// # Errors
    /// [`ConsensusError::Unavailable`] for a moment after the start, too.
    pub async fn vote(&self, request: &VoteRequest) -> Result<VoteReply> {
        self.promise.check()?;
        let answer = self.raft.vote(convert::vote_of_request(request)?).await.map_err(fatal)?;
        Ok(convert::vote_reply(&answer))
    }

    /// Whether this master would give its vote.
    ///
    /// # Errors
    /// As [`Self::vote`].
    pub async fn pre_vote(&self, request: &VoteRequest) -> Result<VoteReply> {
        self.promise.check()?;
        let answer = self.raft.pre_vote(convert::vote_of_request(request)?).await.map_err(fatal)?;
        Ok(convert::vote_reply(&answer))
    }

    /// Takes the leadership that another master gives away.
    pub async fn take_over(&self, request: HandOverRequest) -> Result<HandOverReply> {
        let from = convert::vote(&convert::required(request.from, "the ballot")?);
        let asked =
            TransferLeaderRequest::new(from, request.to, request.last.as_ref().map(convert::log_id).transpose()?);
        let outcome = match self.raft.handle_transfer_leader(asked).await.map_err(fatal)? {
            Ok(()) => hand_over_reply::Outcome::Done(true),
            Err(error) => hand_over_reply::Outcome::Refused(error.to_string()),
        };
        Ok(HandOverReply { outcome: Some(outcome) })
    }

    /// What is here of a snapshot already.
    ///
    /// # Errors
    /// [`ConsensusError::Overloaded`] while another comes.
    pub async fn consider(&self, offer: SnapshotOffer) -> Result<SnapshotProgress> {
        let Ok(_only) = self.arrival.only.try_lock() else { return Err(is_taken()) };
        let snapshots = self.snapshots.clone();
        blocking(move || Ok(Incoming::begin(&snapshots, offer)?.progress())).await
    }

    /// Takes a snapshot in: its offer (see [`offer_of`]), and what comes behind that.
    ///
    /// # Errors
    /// [`ConsensusError::Overloaded`] while another comes, [`ConsensusError::Unavailable`] where it breaks off.
    pub async fn receive_snapshot(
        &self,
        offer: SnapshotOffer,
        mut pieces: impl Stream<Item = Result<SnapshotPiece, Status>> + Unpin + Send,
    ) -> Result<SnapshotReply> {
        let vote = convert::vote(&convert::required(offer.ballot, "the ballot")?);
        let Ok(_only) = self.arrival.only.try_lock() else { return Err(is_taken()) };
        let snapshots = self.snapshots.clone();
        let mut incoming = blocking(move || Incoming::begin(&snapshots, offer)).await?;
        let _shown = self.arrival.show(incoming.transfer());
        while let Some(piece) = pieces.next().await {
            let piece = piece.map_err(broken)?;
            self.arrival.add(piece.data.len());
            incoming = blocking(move || {
                incoming.write(&piece)?;
                Ok(incoming)
            })
            .await?;
        }
        let (meta, snapshot) = blocking(move || incoming.finish()).await?;
        tracing::info!(entry = meta.last_log_id.map(|id| id.index), "a snapshot of another master is here");
        let installed = self.raft.install_full_snapshot(vote, Snapshot { meta, snapshot }).await;
        let own = installed.map_err(fatal)?.vote;
        Ok(SnapshotReply { ballot: Some(convert::ballot(&own)) })
    }
}
