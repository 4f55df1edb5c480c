//! Replicas of fs-mode files that are lacking: the leader has workers copy blocks from each other (decision 10).
//!
//! - [`scan`](self::scan): blocks that lack something are found.
//! - [`plan`](self::plan): what a block lacks, and who is to get it.
//! - [`block`](self::block): one copy: nobody writes to the block from its beginning to its end.
//! - [`claims`](self::claims): what each worker is to keep.
//! - [`strays`](self::strays): what workers have of blocks that they are no part of any more, to be freed.
//! - [`kept`](self::kept): blocks that only views have, to be freed when these go.
//! - [`unavailable`](self::unavailable): files of which nobody who is there has everything.
//! - [`decommission`](self::decommission): workers that are emptied, and taken out of the table.
//!
//! What is to be done is found by two indexes: of blocks that have fewer replicas than their mount asks for, and of
//! replicas by worker, for workers that are being emptied, or have been lost for `master.repair_after`. What fails is
//! tried again, with pauses that grow.

mod availability;
mod block;
pub mod claims;
mod decommission;
mod describe;
mod kept;
mod plan;
mod scan;
mod strays;
mod unavailable;

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use cavern_conf::schema;
use cavern_consensus::Proposer;
use cavern_proto::master::WorkerState;
use cavern_state::FileBlock;
use parking_lot::Mutex;
use tokio::sync::{Semaphore, watch};
use tokio::time::Instant;

use self::availability::AvailabilityMap;
pub(crate) use self::describe::describe;
use crate::background::TaskGroup;
use crate::error::WorkError;
use crate::metrics::RepairMetrics;
use crate::reader::StateReader;
use crate::sessions::WatchHub;
use crate::workers::Workers;
use crate::workers::calls::ObjectWriter;

/// Blocks looked at with one read.
const PAGE: usize = 500;

/// What repair works with.
pub struct Repair {
    reader: StateReader,
    watch: Arc<WatchHub>,
    proposer: Proposer,
    writer: Arc<dyn ObjectWriter>,
    workers: Arc<Workers>,
    cluster_id: Arc<str>,
    /// How long a worker is lost before others get what it had.
    after: Duration,
    /// Blocks copied at a time.
    permits: Arc<Semaphore>,
    progress: Mutex<RepairProgress>,
    /// Told of when blocks that were kept may be nobody's.
    views_removed: watch::Sender<()>,
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

impl Repair {
    pub fn new(
        (reader, watch): (StateReader, Arc<WatchHub>),
        proposer: Proposer,
        writer: Arc<dyn ObjectWriter>,
        workers: Arc<Workers>,
        cluster_id: Arc<str>,
        conf: &schema::Master,
        metrics: RepairMetrics,
    ) -> Arc<Self> {
        Arc::new(Self {
            reader,
            watch,
            proposer,
            writer,
            workers,
            cluster_id,
            after: conf.repair_after.get(),
            permits: Arc::new(Semaphore::new(conf.repair_concurrency.clamp(1, Semaphore::MAX_PERMITS))),
            progress: Mutex::default(),
            views_removed: watch::Sender::new(()),
            metrics,
            tasks: TaskGroup::default(),
        })
    }

    /// Stops, and waits for what is under way to be given up: it is cleaned up after a restart.
    pub async fn shutdown(&self) {
        self.tasks.shutdown().await;
    }

    fn availability(&self) -> Result<AvailabilityMap, WorkError> {
        let placement = self.writer.placement()?;
        let lost = placement.workers().iter().filter(|worker| worker.state() != WorkerState::Live);
        let lost = lost.filter(|worker| self.workers.silent_for(worker.id) >= self.after);
        Ok(AvailabilityMap { lost: lost.map(|worker| worker.id).collect(), placement })
    }
}
