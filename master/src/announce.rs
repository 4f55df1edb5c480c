//! A master that joins is made known before it votes.
//!
//! Clients and workers hear of the masters from the one that leads, with each event and each heartbeat. Who has not
//! heard of a new one when the leader dies does not find the next: it asks those that it knows for ever. So the leader
//! tells all of them as soon as the new master learns, and has it vote when they have said that they know it. Who
//! begins later is told with the first message.
//!
//! That takes the time of a heartbeat at most, and never longer than a lease: by then a session that says nothing is
//! over. Whoever is left is named to the one who asked for the new master.

use cavern_work::WorkError;

use crate::services::Services;

/// Tells all clients and workers who the masters are. Returns when they know, at the latest after a lease, with the
/// names of those that have not said so.
pub async fn announce(services: &Services) -> Result<Vec<String>, WorkError> {
    let epoch = services.consensus.group_epoch();
    services.watch.announce_group();
    let lease = services.watch.lease();
    let (clients, workers) =
        tokio::join!(services.watch.wait_group_known(epoch), services.workers.wait_group_known(epoch, lease));
    let unaware: Vec<String> = clients.into_iter().chain(workers?).collect();
    if !unaware.is_empty() {
        tracing::warn!("a new master votes, and these have not said that they know it: {}", unaware.join(", "));
    }
    Ok(unaware)
}
