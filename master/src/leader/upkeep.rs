//! Ticks of sessions and workers, and, in steps of bounded size, what commands have
//! left for later.

use std::sync::Arc;
use std::time::Duration;

use cavern_proto::record::command::Command;
use cavern_proto::record::{CountUsage, ReapOrphans};
use tokio_util::sync::CancellationToken;

use crate::metrics::MasterMetrics;
use crate::raft::Proposer;
use crate::service::Services;
use crate::state::{Database, Family, Outcome, Tables, tables, usage};
use crate::{MasterError, sessions};

/// Period of ticks to the sessions, of the gauges, and of looks at what is left.
const TICK: Duration = Duration::from_secs(1);
/// Inodes that one reaping step deletes.
pub const REAP_STEP: u32 = 100;
/// Inodes that one counting step looks at.
pub const COUNT_STEP: u32 = 500;

/// Ticks, worker timeouts, and gauges.
pub async fn keep_time(services: Services, metrics: MasterMetrics, stop: CancellationToken) {
    // Several in a lease: a client counts its lease from what it said before the last of them.
    let mut ticks = tokio::time::interval(TICK.min(services.watch.lease() / 4));
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            _ = ticks.tick() => {}
            () = stop.cancelled() => return,
        }
        services.watch.tick();
        if let Err(error) = services.workers.expire().await {
            tracing::warn!("the worker table is not up to date: {error}");
        }
        let unlisted = services.mounts.status().iter().map(|status| status.unlisted_directories).sum::<u64>();
        metrics.listing.unlisted.set(i64::try_from(unlisted).unwrap_or(i64::MAX));
    }
}

/// Ends the sessions whose lease is over. Others may be waiting for what they hold, so nothing else is done in between.
pub async fn keep_ending_sessions(services: Services, stop: CancellationToken) {
    let mut ticks = tokio::time::interval(TICK.min(services.watch.lease() / 4));
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            _ = ticks.tick() => {}
            () = stop.cancelled() => return,
        }
        tokio::select! {
            ended = sessions::end_lapsed(&services) => if let Err(error) = ended {
                tracing::warn!("sessions that are over are not ended: {error}");
            },
            () = stop.cancelled() => return,
        }
    }
}

/// Deletes what was taken out of the namespace, and counts what quotas need to know.
pub async fn keep_reaping(services: Services, database: Arc<Database>, stop: CancellationToken) {
    let mut ticks = tokio::time::interval(TICK);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            _ = ticks.tick() => {}
            () = stop.cancelled() => return,
        }
        tokio::select! {
            reaped = sessions::reap_unlinked(&services) => if let Err(error) = reaped {
                tracing::warn!("what sessions left behind is not cleaned up: {error}");
            },
            () = stop.cancelled() => return,
        }
        tokio::select! {
            counted = count_usage(&services.proposer, &database) => if let Err(error) = counted {
                tracing::warn!("what is below directories with quotas is not counted: {error}");
            },
            () = stop.cancelled() => return,
        }
        let has_orphans = tables::first_id(&database, Family::Orphan);
        if !matches!(has_orphans, Ok(None)) {
            tokio::select! {
                reaped = reap_orphans(&services.proposer) => if let Err(error) = reaped {
                    tracing::warn!("deleted directories are not cleaned up: {error}");
                },
                () = stop.cancelled() => return,
            }
        }
    }
}

/// Deletes what was taken out of the namespace, step by step, until nothing is left.
async fn reap_orphans(proposer: &Proposer) -> Result<(), MasterError> {
    let mut from = 0;
    loop {
        match proposer.propose(Command::ReapOrphans(ReapOrphans { limit: REAP_STEP, from })).await? {
            Outcome::StepProgress(reaped) if reaped.more => from = reaped.next,
            // Directories below others may be older than those.
            _ if from > 0 => from = 0,
            _ => return Ok(()),
        }
    }
}

/// Counts what is below directories, while there are quotas and not everything has been counted.
async fn count_usage(proposer: &Proposer, database: &Database) -> Result<(), MasterError> {
    let counted = Tables::new(database).counters()?.counted;
    if matches!(counted, usage::NOTHING | usage::ALL) {
        return Ok(());
    }
    while let Outcome::Counted { more: true } =
        proposer.propose(Command::CountUsage(CountUsage { limit: COUNT_STEP })).await?
    {}
    Ok(())
}
