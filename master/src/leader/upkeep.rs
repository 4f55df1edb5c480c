//! Ticks of sessions and workers, and, in steps of bounded size, what commands have left for later.

use std::sync::Arc;
use std::time::Duration;

use cavern_consensus::Proposer;
use cavern_proto::record::{CountUsage, ReapOrphans};
use cavern_state::{Database, Family, Tables, tables, usage};
use futures::FutureExt as _;

use crate::background::{BackgroundTask, Next, Pace, TaskGroup};
use crate::error::MasterError;
use crate::metrics::MasterMetrics;
use crate::services::Services;
use crate::sessions;

/// Period of ticks to the sessions, of the gauges, and of looks at what is left.
const TICK: Duration = Duration::from_secs(1);
/// Inodes that one reaping step deletes.
pub const REAP_STEP: u32 = 100;
/// Inodes that one counting step looks at.
pub const COUNT_STEP: u32 = 500;

/// Begins all of it.
pub fn start(background: &TaskGroup, services: &Services, database: &Arc<Database>, metrics: &MasterMetrics) {
    let list = &services.background;
    // Several in a lease: a client counts its lease from what it said before the last of them.
    let ticks = || Pace::every(TICK.min(services.watch.lease() / 4));
    let state = (services.clone(), metrics.clone());
    list.start(background, BackgroundTask::new("tick", ticks()).steady(), state, |(services, metrics)| {
        tick(services, metrics).boxed()
    });
    // Others may be waiting for what these hold, so nothing else is done in between.
    let task = BackgroundTask::new("end-sessions", ticks()).steady();
    list.start(background, task, services.clone(), |services| end_sessions(services).boxed());
    let state = (services.clone(), database.clone());
    list.start(background, BackgroundTask::new("reap", Pace::every(TICK)).steady(), state, |(services, database)| {
        reap(services, database).boxed()
    });
}

/// Ticks, worker timeouts, and gauges.
async fn tick(services: &Services, metrics: &MasterMetrics) -> Result<Next, MasterError> {
    services.watch.tick();
    let expired = services.workers.expire().await;
    let unlisted = services.mounts.status().iter().map(|status| status.unlisted_directories).sum::<u64>();
    metrics.listing.unlisted.set(i64::try_from(unlisted).unwrap_or(i64::MAX));
    expired.map(|()| Next::Rest)
}

/// Ends the sessions whose lease is over.
async fn end_sessions(services: &Services) -> Result<Next, MasterError> {
    sessions::end_lapsed(services).await.map(|()| Next::Rest)
}

/// Deletes what sessions have left behind and what was taken out of the namespace, and counts what quotas need to know.
/// What fails keeps nothing else from being done.
async fn reap(services: &Services, database: &Database) -> Result<Next, MasterError> {
    let left_behind = sessions::reap_unlinked(services).await;
    let counted = count_usage(&services.proposer, database).await;
    let has_orphans = !matches!(tables::first_id(database, Family::Orphan), Ok(None));
    let reaped = if has_orphans { reap_orphans(&services.proposer).await } else { Ok(()) };
    left_behind.and(counted).and(reaped).map(|()| Next::Rest)
}

/// Deletes what was taken out of the namespace, step by step, until nothing is left.
async fn reap_orphans(proposer: &Proposer) -> Result<(), MasterError> {
    let mut from = 0;
    loop {
        let reaped = proposer.propose(ReapOrphans { limit: REAP_STEP, from }).await?;
        match reaped.more {
            true => from = reaped.next,
            // Directories below others may be older than those.
            false if from > 0 => from = 0,
            false => return Ok(()),
        }
    }
}

/// Counts what is below directories, while there are quotas and not everything has been counted.
async fn count_usage(proposer: &Proposer, database: &Database) -> Result<(), MasterError> {
    let counted = Tables::new(database).counters()?.counted;
    if matches!(counted, usage::NOTHING | usage::ALL) {
        return Ok(());
    }
    while proposer.propose(CountUsage { limit: COUNT_STEP }).await? {}
    Ok(())
}
