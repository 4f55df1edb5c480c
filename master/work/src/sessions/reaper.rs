//! What sessions leave behind: results and held inodes of those that are over, and inodes without names that nobody
//! holds.

use cavern_conf::Failpoint;
use cavern_consensus::{Consensus, Proposer};
use cavern_proto::record::EndSessionStep;
use cavern_state::StepProgress;
use cavern_state::outcome::ReapUnlinked;

use super::watch::WatchHub;
use crate::error::WorkError;
use crate::reader::StateReader;

/// Inodes deleted in one round.
const REAP_MAX: usize = 1000;
/// What one command takes from a session that is over: other commands wait meanwhile.
pub const END_STEP: u32 = 256;

/// Ends, in the log, the sessions whose lease is over and that nothing keeps. Locks do not: others may ask for them
/// once only.
pub async fn end_courtesy(watch: &WatchHub, proposer: &Proposer, reader: &StateReader) -> Result<(), WorkError> {
    for session in reader.read(|tables| Ok(tables.session_ids()?)).await? {
        if watch.outlives_lease(session) {
            let locks = reader.read(move |tables| Ok(tables.locks_of(session, 1)?)).await?;
            if !locks.is_empty() {
                watch.end_with_lease(session);
            }
        }
        if watch.is_over(session) {
            end(proposer, reader, session).await?;
            watch.forget(session);
        }
    }
    Ok(())
}

/// Ends a session in the log. What it had locked is free when this returns, and everything that it held.
pub async fn end(proposer: &Proposer, reader: &StateReader, session: u64) -> Result<(), WorkError> {
    let mut step = EndSessionStep { session, limit: END_STEP, part: 0, now_ns: reader.clock().now_ns() };
    while let StepProgress { more: true, next, .. } = proposer.propose(step).await? {
        Failpoint::SessionEnding.pass();
        step.part = next as u32;
    }
    Ok(())
}

/// Deletes inodes that had lost their last name when every session had taken in that they had.
pub async fn reap_unlinked(
    watch: &WatchHub,
    consensus: &Consensus,
    proposer: &Proposer,
    reader: &StateReader,
) -> Result<(), WorkError> {
    // Who has an inode open and was away may come back for a lease.
    if !watch.has_settled() {
        return Ok(());
    }
    let unlinked = reader.read(|tables| Ok(tables.unreferenced(REAP_MAX)?)).await?;
    if unlinked.is_empty() {
        return Ok(());
    }
    // The sessions may not have been notified yet of what the tables show.
    consensus.wait_notified().await?;
    if !watch.wait_all_acknowledged(watch.seq()).await {
        return Ok(());
    }
    let reaped = proposer.propose_all(unlinked.iter().copied().map(ReapUnlinked)).await?;
    for (inode, mut reaped) in unlinked.into_iter().zip(reaped) {
        // A file with very many blocks goes step by step.
        while reaped.more {
            reaped = proposer.propose(ReapUnlinked(inode)).await?;
        }
    }
    Ok(())
}
