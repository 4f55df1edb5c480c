//! What sessions leave behind: results and held inodes of those that are over, and inodes without names that nobody
//! holds.

use std::collections::BTreeSet;

use cavern_conf::Failpoint;
use cavern_consensus::{Consensus, Proposer};
use cavern_proto::record::EndSessionStep;
use cavern_state::StepProgress;
use cavern_state::outcome::ReapUnlinked;
use futures::future::join_all;

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

/// How far inodes without names have been looked at.
#[derive(Debug, Default)]
pub struct ReapCursor {
    /// The last that was looked at.
    after: u64,
    /// Mounts that a client may see which has not taken in what it was told, or may come back: they are left out until
    /// the others have been looked at.
    held_up: BTreeSet<u32>,
}

/// Deletes inodes that had lost their last name when every session that may see their mount had taken in that they had,
/// those of clients that may come back included: who has an inode open says so then.
pub async fn reap_unlinked(
    cursor: &mut ReapCursor,
    watch: &WatchHub,
    consensus: &Consensus,
    proposer: &Proposer,
    reader: &StateReader,
) -> Result<(), WorkError> {
    let (after, left_out) = (cursor.after, cursor.held_up.clone());
    let look = reader.read(move |tables| Ok(tables.unreferenced(after, &left_out, REAP_MAX)?));
    let (mut unlinked, last) = look.await?;
    cursor.after = last.unwrap_or_default();
    if last.is_none() {
        cursor.held_up.clear();
    }
    if unlinked.is_empty() {
        return Ok(());
    }
    // The sessions may not have been notified yet of what the tables show.
    consensus.wait_notified().await?;
    let (seq, mounts) = (watch.seq(), unlinked.iter().map(|(_, mount_id)| *mount_id).collect::<BTreeSet<_>>());
    let wait = |mount_id| async move { (mount_id, watch.wait_all_acknowledged(mount_id, seq).await) };
    let waited = join_all(mounts.into_iter().map(wait)).await;
    cursor.held_up.extend(waited.into_iter().filter(|(_, have)| !have).map(|(mount_id, _)| mount_id));
    unlinked.retain(|(_, mount_id)| !cursor.held_up.contains(mount_id));
    let unlinked: Vec<u64> = unlinked.into_iter().map(|(inode, _)| inode).collect();
    let reaped = proposer.propose_all(unlinked.iter().copied().map(ReapUnlinked)).await?;
    for (inode, mut reaped) in unlinked.into_iter().zip(reaped) {
        // A file with very many blocks goes step by step.
        while reaped.more {
            reaped = proposer.propose(ReapUnlinked(inode)).await?;
        }
    }
    Ok(())
}
