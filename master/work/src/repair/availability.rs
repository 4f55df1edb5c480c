//! Which workers are there.

use std::collections::HashSet;
use std::sync::Arc;

use cavern_net::Placement;
use cavern_proto::master::WorkerState;

/// Whether a worker counts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Availability {
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
pub(super) struct AvailabilityMap {
    pub placement: Arc<Placement>,
    pub lost: HashSet<u64>,
}

impl AvailabilityMap {
    pub(super) fn of(&self, worker: u64) -> Availability {
        match self.placement.worker(worker) {
            Some(known) if known.state() == WorkerState::Live && known.draining => Availability::Draining,
            Some(known) if known.state() == WorkerState::Live => Availability::Live,
            Some(_) if !self.lost.contains(&worker) => Availability::Offline,
            _ => Availability::Lost,
        }
    }

    /// Whether what a worker has can be read.
    pub(super) fn is_there(&self, worker: u64) -> bool {
        matches!(self.of(worker), Availability::Live | Availability::Draining)
    }
}
