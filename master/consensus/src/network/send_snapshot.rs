//! A snapshot to another master: what it does not have yet, piece by piece, no faster than the calls of clients bear.

use std::time::Duration;

use cavern_proto::raft::{SnapshotOffer, SnapshotPiece, Target};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until};
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;

use super::{Calls, convert};
use crate::blocking::blocking;
use crate::error::{ConsensusError, Result};
use crate::snapshot::Outgoing;
use crate::types::{Snapshot, Vote, to_json};

/// Pieces read ahead of the connection.
const AHEAD: usize = 2;
/// Bytes a second: the leader's disk and network are those of the clients.
const RATE: u64 = 100 << 20;

/// Returns the other one's vote, when it has installed the snapshot.
pub async fn send(mut calls: Calls, target: Option<Target>, vote: Vote, snapshot: Snapshot) -> Result<Vote, Status> {
    let meta = to_json(&snapshot.meta, "the description of a snapshot")?;
    let outgoing = blocking(move || Outgoing::open(&snapshot.snapshot)).await?;
    let offer =
        SnapshotOffer { target, ballot: Some(convert::ballot(&vote)), meta: meta.into(), files: outgoing.files() };
    let progress = calls.offer_snapshot(offer.clone()).await?.into_inner();
    let missing = outgoing.missing(&progress);
    tracing::info!(pieces = missing.len(), files = offer.files.len(), "sending a snapshot to another master");
    let (pieces, stream) = mpsc::channel(AHEAD);
    let feed = async move {
        let first = SnapshotPiece { offer: Some(offer), ..SnapshotPiece::default() };
        if pieces.send(first).await.is_err() {
            return Ok(());
        }
        let (begin, mut sent) = (Instant::now(), 0);
        for (file, offset) in missing {
            let reader = outgoing.clone();
            let piece = blocking(move || reader.read(file, offset)).await?;
            sent += piece.data.len() as u64;
            if pieces.send(piece).await.is_err() {
                break;
            }
            sleep_until(begin + Duration::from_micros(sent.saturating_mul(1_000_000) / RATE)).await;
        }
        Ok::<_, ConsensusError>(())
    };
    let call = calls.send_snapshot(ReceiverStream::new(stream));
    let (fed, answered) = tokio::join!(feed, call);
    let ballot = answered?.into_inner().ballot;
    fed?;
    Ok(convert::vote(&convert::required(ballot, "the ballot")?))
}
