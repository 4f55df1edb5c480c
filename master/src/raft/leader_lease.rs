//! How long a leader may believe that it leads.
//!
//! Followers give no vote while they have heard of their leader within the longest election timeout. So one that was
//! acknowledged by a majority that recently is the only one, and what it reads of its own state is the newest there is.
//! Later somebody else may lead, and have acknowledged changes that this one knows nothing of.

use std::ops::RangeInclusive;
use std::time::Duration;

use openraft::Instant as _;
use openraft::async_runtime::watch::WatchReceiver as _;

use super::observe::{self, Observed};
use super::types::{LeaderId, Raft};
use crate::MasterError;

/// An election begins when a leader has been silent for the longest of these and one of them by chance.
pub const ELECTION: RangeInclusive<Duration> = Duration::from_millis(400)..=Duration::from_millis(800);
/// Clocks of different hosts need not run equally fast.
const LEASE: Duration = Duration::from_millis(700);

/// Whether one lead of this master goes on. Cheap to clone.
#[derive(Clone)]
pub struct LeaderLease {
    observed: Observed,
    lead: LeaderId,
}

impl LeaderLease {
    pub(super) fn new(raft: &Raft, lead: LeaderId) -> Self {
        Self { observed: raft.metrics(), lead }
    }

    /// What has been read before this call was the newest there was at the time of the reading.
    ///
    /// # Errors
    /// [`MasterError::NotLeading`] when that is not known.
    pub fn check(&self) -> Result<(), MasterError> {
        if self.holds() {
            return Ok(());
        }
        Err(MasterError::NotLeading(observe::not_leading(&self.observed.borrow_watched(), self.lead.node_id)))
    }

    pub fn holds(&self) -> bool {
        let metrics = self.observed.borrow_watched();
        let leads = metrics.vote.committed && metrics.vote.leader_id == self.lead;
        let acknowledged = || metrics.last_quorum_acked.is_some_and(|at| at.elapsed() < LEASE);
        leads && metrics.running_state.is_ok() && (metrics.membership_config.voter_ids().count() == 1 || acknowledged())
    }
}

#[cfg(test)]
impl LeaderLease {
    /// That of the only master there is.
    pub fn of_one() -> Self {
        use std::collections::{BTreeMap, BTreeSet};

        use openraft::RaftMetrics;
        use openraft::type_config::TypeConfigExt;

        use super::types::{Membership, Node, StoredMembership, Types, Vote};

        let mut metrics = RaftMetrics::<Types>::new_initial(1);
        metrics.vote = Vote::new_committed(1, 1);
        let nodes = BTreeMap::from([(1, Node::new("here:1"))]);
        let membership = Membership::new(vec![BTreeSet::from([1])], nodes).expect("one voter is a membership");
        metrics.membership_config = std::sync::Arc::new(StoredMembership::new(None, membership));
        Self { observed: Types::watch_channel(metrics).1, lead: LeaderId { term: 1, node_id: 1 } }
    }
}
