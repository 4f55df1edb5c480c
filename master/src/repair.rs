//! Replicas of fs-mode files that are lacking: the leader has workers copy blocks from each other (decision 10).
//!
//! - [`plan`](self::plan): what a block lacks, and who is to get it.
//! - [`block`](self::block): one copy: nobody writes to the block from its beginning to its end.
//! - [`claims`](self::claims): what each worker is to keep.
//! - [`strays`](self::strays): what workers have of blocks that they are no part of any more, to be freed.
//! - [`unavailable`](self::unavailable): files of which nobody who is there has everything.
//! - [`decommission`](self::decommission): workers that are emptied, and taken out of the table.
//!
//! What is to be done is found by two indexes: of blocks that have fewer replicas than their mount asks for, and of
//! replicas by worker, for workers that are being emptied, or have been lost for `master.repair_after`. What fails is
//! tried again, with pauses that grow.

mod block;
pub(crate) mod claims;
mod decommission;
mod plan;
mod strays;
mod unavailable;

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use cavern_conf::backoff;
use cavern_consensus::Proposer;
use cavern_net::Placement;
use cavern_proto::ContentId;
use cavern_proto::master::WorkerState;
use cavern_state::FileBlock;
use futures::FutureExt as _;
use parking_lot::Mutex;
use tokio::sync::Semaphore;
use tokio::time::Instant;

use self::plan::{Step, plan};
pub(crate) use self::unavailable::describe;
use crate::background::{BackgroundTask, Next, Pace, TaskGroup, TaskList};
use crate::error::MasterError;
use crate::metrics::RepairMetrics;
use crate::persist::ObjectWriter;
use crate::reader::StateReader;
use crate::sessions::WatchHub;
use crate::workers::Workers;

/// Blocks looked at with one read.
const PAGE: usize = 500;
/// Between two looks at everything.
const PAUSE: Duration = Duration::from_millis(500);
/// After a look that took long the pause is so many times as long.
const REST: u32 = 10;
/// Failures that are remembered; beyond it a block is tried again at once.
const REMEMBERED: usize = 10_000;

/// How repair goes about it.
pub struct RepairOptions {
    /// How long a worker is lost before others get what it had.
    pub after: Duration,
    /// Blocks copied at a time.
    pub concurrency: usize,
}

/// What repair works with.
pub struct Repair {
    reader: StateReader,
    watch: Arc<WatchHub>,
    proposer: Proposer,
    writer: Arc<dyn ObjectWriter>,
    workers: Arc<Workers>,
    cluster_id: Arc<str>,
    after: Duration,
    permits: Arc<Semaphore>,
    progress: Mutex<RepairProgress>,
    metrics: RepairMetrics,
    tasks: TaskGroup,
}

/// What is under way, and what has failed: in memory, since a new leader may begin anew.
#[derive(Default)]
struct RepairProgress {
    busy: HashSet<FileBlock>,
    failures: HashMap<FileBlock, Failure>,
}

/// What is known of a block that could not be copied.
struct Failure {
    count: u32,
    until: Instant,
    reason: String,
    /// Workers that could not take it.
    tried: Vec<u64>,
}

/// Whether a worker counts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Availability {
    Live,
    /// It is there, and is being emptied.
    Draining,
    /// It may be back soon.
    Offline,
    /// It is gone, or has been away for too long.
    Lost,
}

/// The workers, as they stood at a moment.
#[derive(Clone)]
pub(crate) struct AvailabilityMap {
    placement: Arc<Placement>,
    lost: HashSet<u64>,
}

impl AvailabilityMap {
    /// Live workers that take blocks, the best for a block first.
    fn candidates(&self, content: ContentId, index: u32) -> Vec<u64> {
        self.placement.ranked(content, index)
    }

    pub(crate) fn of(&self, worker: u64) -> Availability {
        match self.placement.worker(worker) {
            Some(known) if known.state() == WorkerState::Live && known.draining => Availability::Draining,
            Some(known) if known.state() == WorkerState::Live => Availability::Live,
            Some(_) if !self.lost.contains(&worker) => Availability::Offline,
            _ => Availability::Lost,
        }
    }

    /// Whether what a worker has can be read.
    pub(crate) fn is_there(&self, worker: u64) -> bool {
        matches!(self.of(worker), Availability::Live | Availability::Draining)
    }
}

impl Repair {
    pub fn new(
        (reader, watch): (StateReader, Arc<WatchHub>),
        proposer: Proposer,
        writer: Arc<dyn ObjectWriter>,
        workers: Arc<Workers>,
        cluster_id: &str,
        options: &RepairOptions,
        metrics: RepairMetrics,
    ) -> Arc<Self> {
        Arc::new(Self {
            reader,
            watch,
            proposer,
            writer,
            workers,
            cluster_id: cluster_id.into(),
            after: options.after,
            permits: Arc::new(Semaphore::new(options.concurrency.clamp(1, Semaphore::MAX_PERMITS))),
            progress: Mutex::default(),
            metrics,
            tasks: TaskGroup::default(),
        })
    }

    /// Begins to work.
    pub fn start(self: &Arc<Self>, list: &TaskList) {
        let scan = BackgroundTask::new("repair-replicas", Pace::after_at_least(PAUSE, REST));
        list.start(&self.tasks, scan, self.clone(), |repair| repair.scan_all().boxed());
        let strays = BackgroundTask::new("free-strays", Pace::after(strays::PAUSE));
        list.start(&self.tasks, strays, self.clone(), |repair| repair.free_strays().boxed());
        let count = BackgroundTask::new("count-unavailable", Pace::after_at_least(unavailable::PAUSE, REST));
        list.start(&self.tasks, count, self.clone(), |repair| repair.count_unavailable().boxed());
    }

    /// Stops, and waits for what is under way to be given up: it is cleaned up after a restart.
    pub async fn shutdown(&self) {
        self.tasks.shutdown().await;
    }

    pub(crate) fn availability(&self) -> Result<AvailabilityMap, MasterError> {
        let placement = self.writer.placement()?;
        let lost = placement.workers().iter().filter(|worker| worker.state() != WorkerState::Live);
        let lost = lost.filter(|worker| self.workers.silent_for(worker.id) >= self.after);
        Ok(AvailabilityMap { lost: lost.map(|worker| worker.id).collect(), placement })
    }

    /// Begins to work on all blocks that lack replicas.
    async fn scan_all(self: &Arc<Self>) -> Result<Next, MasterError> {
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
    ) -> Result<(), MasterError> {
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
            page.into_iter().filter_map(|at| step(at).transpose()).collect::<Result<Vec<Step>, MasterError>>()
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
