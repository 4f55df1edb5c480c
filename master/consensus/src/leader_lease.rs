//! How long a leader may believe that it leads.
//!
//! Followers give no vote while they have heard of their leader within the longest election timeout. So one that was
//! acknowledged by a majority that recently is the only one, and what it reads of its own state is the newest there is.
//! Later somebody else may lead, and have acknowledged changes that this one knows nothing of.
//!
//! A leader that gives its leadership away frees its followers of that, so its lease ends before it does
//! ([`LastTransfer`]). A follower that was restarted does not know of whom it has heard, so it elects nobody until that
//! does not matter any more ([`Promise`]).

use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Duration;

use cavern_state::{Database, Tables};
use openraft::async_runtime::watch::WatchReceiver as _;
use openraft::type_config::TypeConfigExt as _;
use openraft::type_config::alias::InstantOf;
use openraft::{Instant as _, RaftMetrics};
use parking_lot::Mutex;

use super::observe::{self, Observed};
use super::state_machine::Raft;
use super::types::{LeaderId, Types};
use crate::blocking::run_blocking;
use crate::error::{ConsensusError, Result};

/// An election begins when a leader has been silent for the longest of these and one of them by chance.
pub const ELECTION: RangeInclusive<Duration> = Duration::from_millis(400)..=Duration::from_millis(800);
/// Clocks of different hosts need not run equally fast.
const LEASE: Duration = Duration::from_millis(700);

/// Whether one leadership of this master goes on. Cheap to clone.
#[derive(Clone)]
pub struct LeaderLease {
    observed: Observed,
    pub lead: LeaderId,
    given_away: LastTransfer,
}

/// The last leadership that this master was to give to another, whether that one took it or not. Cheap to clone.
#[derive(Clone, Default)]
pub struct LastTransfer(Arc<Mutex<Option<LeaderId>>>);

impl LastTransfer {
    pub fn set(&self, lead: LeaderId) {
        *self.0.lock() = Some(lead);
    }

    fn is(&self, lead: LeaderId) -> bool {
        *self.0.lock() == Some(lead)
    }
}

/// The promise to a leader that a follower may have given before it was restarted, with its end.
#[derive(Clone, Copy, Default)]
pub struct Promise(Option<InstantOf<Types>>);

impl Promise {
    /// Of a follower that is starting.
    pub fn begin() -> Self {
        Self(Some(Types::now() + *ELECTION.end()))
    }

    /// Returns when the consensus may begin: no election of its own comes before the end then, nor one together with
    /// those of all others.
    pub async fn wait(self) {
        if let Some(end) = self.0 {
            Types::sleep_until(end - *ELECTION.start()).await;
        }
    }

    /// Whether a vote may be given.
    ///
    /// # Errors
    /// [`ConsensusError::Unavailable`] until the end.
    pub fn check(self) -> Result {
        if self.0.is_some_and(|end| Types::now() < end) {
            let reason = "this master was started a moment ago, and gives no votes yet";
            return Err(ConsensusError::Unavailable(reason.to_owned()));
        }
        Ok(())
    }
}

impl LeaderLease {
    pub(super) fn new(raft: &Raft, lead: LeaderId, given_away: LastTransfer) -> Self {
        Self { observed: raft.metrics(), lead, given_away }
    }

    /// What has been read before this call was the newest there was at the time of the reading.
    ///
    /// # Errors
    /// [`ConsensusError::NotLeading`] when that is not known.
    pub fn check(&self) -> Result {
        if self.holds() {
            return Ok(());
        }
        Err(ConsensusError::NotLeading(observe::not_leading(&self.observed.borrow_watched(), self.lead.node_id)))
    }

    /// Reads the tables of a database on the threads that may wait. All that `read` reads is of one moment, after the
    /// call, and no other master has acknowledged anything newer by then.
    ///
    /// # Errors
    /// Those of `read`, and [`ConsensusError::NotLeading`] when somebody else may have led at that moment.
    pub async fn read<T, E>(
        &self,
        database: Arc<Database>,
        read: impl FnOnce(Tables<'_>) -> Result<T, E> + Send + 'static,
    ) -> Result<T, E>
    where
        T: Send + 'static,
        E: From<ConsensusError> + Send + 'static,
    {
        let result = run_blocking(move || {
            let snapshot = database.raw().snapshot();
            read(Tables::at(&database, &snapshot))
        })
        .await;
        let result = result.map_err(|error| ConsensusError::Unavailable(format!("a read was given up: {error}")))?;
        self.check()?;
        result
    }

    /// Whether it does at this moment.
    pub fn holds(&self) -> bool {
        let metrics = self.observed.borrow_watched();
        let leads = metrics.vote.committed && metrics.vote.leader_id == self.lead && !self.given_away.is(self.lead);
        leads && metrics.running_state.is_ok() && is_acknowledged(&metrics)
    }
}

/// Whether a majority has acknowledged this master lately.
pub fn is_acknowledged(metrics: &RaftMetrics<Types>) -> bool {
    let acknowledged = || metrics.last_quorum_acked.is_some_and(|at| at.elapsed() < LEASE);
    metrics.membership_config.voter_ids().count() == 1 || acknowledged()
}

impl LeaderLease {
    /// That of the only master there is, which has no log: it never ends. For tests of what a leader has.
    #[doc(hidden)]
    pub fn of_one() -> Self {
        use std::collections::BTreeSet;

        use super::types::{Membership, StoredMembership, Vote};

        let mut metrics = RaftMetrics::<Types>::new_initial(1);
        metrics.vote = Vote::new_committed(1, 1);
        let membership = Membership::new_with_defaults(vec![BTreeSet::from([1])], [1]);
        metrics.membership_config = Arc::new(StoredMembership::new(None, membership));
        let (observed, lead) = (Types::watch_channel(metrics).1, LeaderId { term: 1, node_id: 1 });
        Self { observed, lead, given_away: LastTransfer::default() }
    }
}
