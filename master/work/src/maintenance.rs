//! Ticks of sessions and workers, and, in steps of bounded size, what commands have left for later.

use std::sync::Arc;
use std::time::Duration;

use cavern_consensus::{Consensus, Proposer};
use cavern_proto::record::{CountUsage, ReapOrphans};
use cavern_state::{Database, Family, Tables, tables, usage};
use futures::FutureExt as _;

use crate::background::{BackgroundTask, Next, Pace, TaskGroup, TaskList};
use crate::error::WorkError;
use crate::metrics::MasterMetrics;
use crate::namespace::Lookups;
use crate::sessions::{self, ReapCursor};
use crate::workers::Workers;

/// Period of ticks to the sessions, of the gauges, and of looks at what is left.
const TICK: Duration = Duration::from_secs(1);
/// Inodes that one reaping step deletes.
pub const REAP_STEP: u32 = 100;
/// Inodes that one counting step looks at.
pub const COUNT_STEP: u32 = 500;

/// What it works with. Cheap to clone.
#[derive(Clone)]
pub struct Maintenance {
    pub lookups: Lookups,
    pub workers: Arc<Workers>,
    pub consensus: Arc<Consensus>,
    pub proposer: Proposer,
    pub database: Arc<Database>,
    pub metrics: MasterMetrics,
}

impl Maintenance {
    /// Begins all of it.
    pub fn start(self, background: &TaskGroup, list: &TaskList) {
        // Several in a lease: a client counts its lease from what it said before the last of them.
        let period = TICK.min(self.lookups.watch.lease() / 4);
        let task = |name, period| BackgroundTask::new(name, Pace::every(period)).steady();
        list.start(background, task("tick", period), self.clone(), |maintenance| maintenance.tick().boxed());
        // Others may be waiting for what these hold, so nothing else is done in between.
        list.start(background, task("end-sessions", period), self.clone(), |maintenance| {
            maintenance.end_sessions().boxed()
        });
        let reaping = (self, ReapCursor::default());
        list.start(background, task("reap", TICK), reaping, |(maintenance, cursor)| maintenance.reap(cursor).boxed());
    }

    /// Ticks, worker timeouts, and gauges.
    async fn tick(&self) -> Result<Next, WorkError> {
        self.lookups.watch.tick();
        let expired = self.workers.expire().await;
        let unlisted = self.lookups.mounts.status().iter().map(|status| status.unlisted_directories).sum::<u64>();
        self.metrics.listing.unlisted.set(i64::try_from(unlisted).unwrap_or(i64::MAX));
        expired.map(|()| Next::Rest)
    }

    /// Ends the sessions whose lease is over.
    async fn end_sessions(&self) -> Result<Next, WorkError> {
        let Lookups { watch, reader, .. } = &self.lookups;
        sessions::end_courtesy(watch, &self.proposer, reader).await.map(|()| Next::Rest)
    }

    /// Deletes what sessions have left behind and what was taken out of the namespace, and counts what quotas need to
    /// know. What fails keeps nothing else from being done.
    async fn reap(&self, cursor: &mut ReapCursor) -> Result<Next, WorkError> {
        let Lookups { watch, reader, .. } = &self.lookups;
        let left_behind = sessions::reap_unlinked(cursor, watch, &self.consensus, &self.proposer, reader).await;
        let counted = self.count_usage().await;
        let has_orphans = !matches!(tables::first_id(&self.database, Family::Orphan), Ok(None));
        let reaped = if has_orphans { self.reap_orphans().await } else { Ok(()) };
        left_behind.and(counted).and(reaped).map(|()| Next::Rest)
    }

    /// Deletes what was taken out of the namespace, step by step, until nothing is left.
    async fn reap_orphans(&self) -> Result<(), WorkError> {
        let mut from = 0;
        loop {
            let reaped = self.proposer.propose(ReapOrphans { limit: REAP_STEP, from }).await?;
            match reaped.more {
                true => from = reaped.next,
                // Directories below others may be older than those.
                false if from > 0 => from = 0,
                false => return Ok(()),
            }
        }
    }

    /// Counts what is below directories, while there are quotas and not everything has been counted.
    async fn count_usage(&self) -> Result<(), WorkError> {
        let counted = Tables::new(&self.database).counters()?.counted;
        if matches!(counted, usage::NOTHING | usage::ALL) {
            return Ok(());
        }
        while self.proposer.propose(CountUsage { limit: COUNT_STEP }).await? {}
        Ok(())
    }
}
