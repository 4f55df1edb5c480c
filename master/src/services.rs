//! What a leader has, for as long as it leads: the gRPC services speak for it, and so do its tasks.

use std::sync::Arc;

use cavern_consensus::{Consensus, LeaderLease, Proposer};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::background::TaskList;
use crate::jobs::Jobs;
use crate::lost_pasts::LostPasts;
use crate::mounts::Mounts;
use crate::mounts::changes::MountChanges;
use crate::namespace::Lookups;
use crate::persist::Persistence;
use crate::repair::Repair;
use crate::sessions::WatchHub;
use crate::workers::Workers;

/// See the module. Cheap to clone.
#[derive(Clone)]
pub struct Services {
    pub lookups: Lookups,
    pub mounts: Arc<Mounts>,
    pub mount_changes: MountChanges,
    pub watch: Arc<WatchHub>,
    pub workers: Arc<Workers>,
    pub lost_pasts: Arc<LostPasts>,
    pub jobs: Arc<Jobs>,
    pub persistence: Arc<Persistence>,
    pub repair: Arc<Repair>,
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
