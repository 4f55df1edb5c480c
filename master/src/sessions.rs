//! What sessions leave behind: results and held inodes of those that are over, and inodes without names that nobody holds.

use cavern_proto::record::command::Command;

use crate::MasterError;
use crate::service::Services;

/// Inodes deleted in one round.
const REAP_MAX: usize = 1000;

/// Ends, in the log, the sessions whose lease is over.
pub async fn end_lapsed(services: &Services) -> Result<(), MasterError> {
    let recorded = services.lookups.listings.read(|tables| tables.session_ids()).await?;
    for session in recorded {
        if services.watch.is_over(session) {
            services.proposer.propose(Command::EndSession(session)).await?;
        }
    }
    Ok(())
}

/// Deletes inodes that had lost their last name when every session had taken in that they had.
pub async fn reap_unlinked(services: &Services) -> Result<(), MasterError> {
    // Who has an inode open and was away may come back for a lease.
    if !services.watch.has_settled() {
        return Ok(());
    }
    let unlinked = services.lookups.listings.read(|tables| tables.unheld(REAP_MAX)).await?;
    if unlinked.is_empty() {
        return Ok(());
    }
    // What the tables show may not have been told yet.
    services.consensus.wait_told().await?;
    if !services.watch.wait_settled(services.watch.seq()).await {
        return Ok(());
    }
    services.proposer.propose_all(unlinked.into_iter().map(Command::ReapUnlinked)).await?;
    Ok(())
}
