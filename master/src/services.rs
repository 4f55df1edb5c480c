//! What a leader has, for as long as it leads: the gRPC services speak for it, and so do its tasks.

use std::sync::Arc;

use cavern_consensus::{Consensus, LeaderLease, Proposer};
use cavern_fsck::Fsck;
use cavern_work::background::TaskList;
use cavern_work::jobs::Jobs;
use cavern_work::mounts::Mounts;
use cavern_work::mounts::changes::MountChanges;
use cavern_work::namespace::Lookups;
use cavern_work::persist::Persistence;
use cavern_work::repair::Repair;
use cavern_work::sessions::WatchHub;
use cavern_work::views::ViewMaker;
use cavern_work::workers::Workers;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::rollback_detector::RollbackDetector;

/// What a leader has. Cheap to clone.
#[derive(Clone)]
pub struct Services {
    pub lookups: Lookups,
    pub mounts: Arc<Mounts>,
    pub mount_changes: MountChanges,
    pub watch: Arc<WatchHub>,
    pub workers: Arc<Workers>,
    pub rollbacks: Arc<RollbackDetector>,
    pub jobs: Arc<Jobs>,
    pub persistence: Arc<Persistence>,
    pub repair: Arc<Repair>,
    pub views: ViewMaker,
    pub fsck: Fsck,
    pub consensus: Arc<Consensus>,
    pub lease: LeaderLease,
    pub proposer: Proposer,
    pub cluster_id: Arc<str>,
    /// In which this master leads.
    pub term: u64,
    pub heartbeat_ms: u32,
    /// What goes on in the background, and how it fares.
    pub background: TaskList,
    /// Tasks of answers that are streamed, and their end.
    pub tasks: TaskTracker,
    pub stop: CancellationToken,
}
