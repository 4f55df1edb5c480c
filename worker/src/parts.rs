//! What all parts of a worker work with.

use std::sync::Arc;

use cavern_net::MasterChannel;

use crate::membership::Membership;
use crate::memory::Budget;
use crate::metrics::WorkerMetrics;
use crate::mounts::Mounts;
use crate::store::Stores;

/// What all parts of a worker work with. Cheap to clone, and each clone means the same ones.
#[derive(Clone, Debug)]
pub struct WorkerParts {
    pub stores: Stores,
    pub mounts: Arc<Mounts>,
    pub master: MasterChannel,
    pub membership: Arc<Membership>,
    pub metrics: WorkerMetrics,
    /// For buffers.
    pub memory: Budget,
}
