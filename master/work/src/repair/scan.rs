//! Looks for blocks that lack replicas, and has them worked on.

use std::sync::Arc;
use std::time::Duration;

use cavern_conf::backoff;
use cavern_state::FileBlock;
use futures::FutureExt as _;
use tokio::time::Instant;

use super::availability::{Availability, AvailabilityMap};
use super::plan::{Step, plan};
use super::{Failure, PAGE, Repair, kept, strays, unavailable};
use crate::background::{BackgroundTask, Next, Pace, TaskList};
use crate::error::WorkError;

/// Between two looks at everything.
const PAUSE: Duration = Duration::from_millis(500);
/// After a look that took long the pause is so many times as long.
const REST: u32 = 10;
/// Failures that are remembered; beyond it a block is tried again at once.
const REMEMBERED: usize = 10_000;

impl Repair {
    /// Begins to work.
    pub fn start(self: &Arc<Self>, list: &TaskList) {
        let scan = BackgroundTask::new("repair-replicas", Pace::after_at_least(PAUSE, REST));
        list.start(&self.tasks, scan, self.clone(), |repair| repair.scan_all().boxed());
        let strays = BackgroundTask::new("free-strays", Pace::after(strays::PAUSE));
        list.start(&self.tasks, strays, self.clone(), |repair| repair.free_strays().boxed());
        let pace = Pace::after(kept::PAUSE).woken_by(self.views_removed.subscribe());
        let kept = BackgroundTask::new("release-kept", pace).with_backoff(backoff::REPLICA);
        list.start(&self.tasks, kept, self.clone(), |repair| repair.release_kept().boxed());
        let count = BackgroundTask::new("count-unavailable", Pace::after_at_least(unavailable::PAUSE, REST));
        list.start(&self.tasks, count, self.clone(), |repair| repair.count_unavailable().boxed());
    }

    /// Begins to work on all blocks that lack replicas.
    async fn scan_all(self: &Arc<Self>) -> Result<Next, WorkError> {
        let availability = self.availability()?;
        let mut after = None;
        loop {
            let page = self.reader.read(move |tables| Ok(tables.repairs(after, PAGE)?)).await?;
            let Some(last) = page.last() else { break };
            after = Some(*last);
            self.start_due(page, &availability).await?;
        }
        let workers = self.reader.read(|tables| Ok(tables.workers_with_replicas()?)).await?;
        let leave = |worker: &u64| matches!(availability.of(*worker), Availability::Lost | Availability::Draining);
        for worker in workers.into_iter().filter(leave) {
            let mut after = None;
            loop {
                let page = self.reader.read(move |tables| Ok(tables.replicas_at(worker, after, PAGE)?)).await?;
                let Some(last) = page.last() else { break };
                after = Some(*last);
                self.start_due(page, &availability).await?;
            }
        }
        Ok(Next::Rest)
    }

    /// Begins to work on those of the blocks that lack something that they can be given.
    async fn start_due(
        self: &Arc<Self>,
        page: Vec<FileBlock>,
        availability: &AvailabilityMap,
    ) -> Result<(), WorkError> {
        let page: Vec<(FileBlock, Vec<u64>)> = {
            let (progress, now) = (self.progress.lock(), Instant::now());
            let idle = page.into_iter().filter(|at| !progress.busy.contains(at));
            let due = idle.filter(|at| progress.failures.get(at).is_none_or(|failure| failure.until <= now));
            let tried =
                |at: &FileBlock| progress.failures.get(at).map_or_else(Vec::new, |failure| failure.tried.clone());
            due.map(|at| (at, tried(&at))).collect()
        };
        let (availability, cluster_id) = (availability.clone(), self.cluster_id.clone());
        let steps = self.reader.read(move |tables| {
            let step = |(at, tried): (FileBlock, Vec<u64>)| plan(tables, &availability, &cluster_id, at, &tried);
            page.into_iter().filter_map(|at| step(at).transpose()).collect::<Result<Vec<Step>, WorkError>>()
        });
        for step in steps.await? {
            let Ok(permit) = self.permits.clone().acquire_owned().await else { return Ok(()) };
            let at = step.at();
            if !self.progress.lock().busy.insert(at) {
                continue;
            }
            let repair = self.clone();
            self.tasks.spawn(async move {
                let done = repair.execute_step(&step).await;
                repair.record_result(&step, done);
                drop(permit);
            });
        }
        Ok(())
    }

    /// Why the last attempt to give a block its replica failed, if there was one since the last that did not.
    pub fn failure(&self, at: FileBlock) -> Option<String> {
        self.progress.lock().failures.get(&at).map(|failure| failure.reason.clone())
    }

    fn record_result(&self, step: &Step, done: Result<(), String>) {
        let mut progress = self.progress.lock();
        let at = step.at();
        progress.busy.remove(&at);
        let Err(error) = done else {
            progress.failures.remove(&at);
            return;
        };
        self.metrics.failures.inc();
        let (inode, index) = at;
        tracing::debug!(inode, index, "a block gets its replica later: {error}");
        if progress.failures.len() >= REMEMBERED && !progress.failures.contains_key(&at) {
            let now = Instant::now();
            progress.failures.retain(|_, failure| now < failure.until);
        }
        let failure = progress.failures.remove(&at);
        let (before, mut tried) = failure.map_or((0, Vec::new()), |failure| (failure.count, failure.tried));
        tried.extend(step.target());
        if progress.failures.len() < REMEMBERED {
            let until = Instant::now() + backoff::REPLICA.pause(before);
            progress.failures.insert(at, Failure { count: before + 1, until, reason: error, tried });
        }
    }
}
