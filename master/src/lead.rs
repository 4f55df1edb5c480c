//! Whether this master leads: a term is begun when it comes to, and ended when it no longer does.

use std::sync::Arc;
use std::time::Duration;

use cavern_proto::NotLeading;
use parking_lot::RwLock;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::MasterError;
use crate::group::Seat;
use crate::raft::{Consensus, LeaderId, LeaderLease, until};
use crate::sessions::CurrentSessions;
use crate::term::{Term, TermContext};

/// Between two looks whether a majority still answers.
const LOOK_PERIOD: Duration = Duration::from_millis(100);
/// A leader that no majority has answered for this long ends its term: its clients find another sooner.
const ALONE_MAX: Duration = Duration::from_secs(3);
/// Pause before a term that could not begin is tried again.
pub const RETRY_PAUSE: Duration = Duration::from_millis(200);

/// See the module.
pub struct Lead {
    seat: Arc<Seat>,
    sessions: Arc<CurrentSessions>,
    term: RwLock<Option<Arc<Term>>>,
    tasks: TaskTracker,
}

impl Lead {
    pub fn new(seat: Arc<Seat>) -> Self {
        Self { seat, sessions: Arc::default(), term: RwLock::default(), tasks: TaskTracker::new() }
    }

    /// For the state machine.
    pub fn sessions(&self) -> Arc<CurrentSessions> {
        self.sessions.clone()
    }

    /// The term in which this master leads, if it does.
    pub fn term(&self) -> Option<Arc<Term>> {
        self.term.read().clone()
    }

    /// The answer to one who asked the wrong master.
    pub fn not_leading(&self) -> MasterError {
        MasterError::NotLeading(self.seat.consensus().map_or(NotLeading { leader: None }, |node| node.not_leading()))
    }

    /// For what goes on when its caller is gone.
    pub fn tasks(&self) -> &TaskTracker {
        &self.tasks
    }

    /// Begins and ends terms until `stop`.
    pub async fn run(&self, context: &TermContext, stop: &CancellationToken) {
        let consensus = &context.consensus;
        while let Some(lead) = stop.run_until_cancelled(next_lead(consensus)).await {
            match Term::begin(context, lead, &self.sessions, stop).await {
                Ok(term) => self.serve(consensus, lead, Arc::new(term), stop).await,
                Err(error) => {
                    tracing::warn!(term = lead.term, "the term cannot begin: {error}");
                    let _stopped = stop.run_until_cancelled(tokio::time::sleep(RETRY_PAUSE)).await;
                }
            }
            self.sessions.set(None);
        }
        self.tasks.close();
        self.tasks.wait().await;
    }

    async fn serve(&self, consensus: &Consensus, lead: LeaderId, term: Arc<Term>, stop: &CancellationToken) {
        tracing::info!(term = lead.term, "this master leads");
        *self.term.write() = Some(term.clone());
        tokio::select! {
            () = lead_is_over(consensus, lead) => tracing::info!(term = lead.term, "this master leads no more"),
            () = alone(&term.services.lease) => {
                tracing::warn!(term = lead.term, "no majority of the masters answers: the term ends");
            }
            () = stop.cancelled() => {}
        }
        *self.term.write() = None;
        term.end().await;
    }
}

/// Returns when this master has a lead in which it can propose.
pub async fn next_lead(consensus: &Consensus) -> LeaderId {
    let mut observed = consensus.observe();
    while until(&mut observed, |observed| consensus.can_propose(observed)).await {
        // It may have lasted for a moment only.
        if let Some(lead) = consensus.leads() {
            return lead;
        }
    }
    // The consensus is over; so is the process, soon.
    std::future::pending().await
}

pub async fn lead_is_over(consensus: &Consensus, lead: LeaderId) {
    let mut observed = consensus.observe();
    until(&mut observed, |observed| consensus.lead_in(observed) != Some(lead)).await;
}

/// Returns when no majority has answered for a while.
pub async fn alone(lease: &LeaderLease) {
    let mut since: Option<Instant> = None;
    loop {
        tokio::time::sleep(LOOK_PERIOD).await;
        since = if lease.holds() { None } else { Some(since.unwrap_or_else(Instant::now)) };
        if since.is_some_and(|since| since.elapsed() >= ALONE_MAX) {
            return;
        }
    }
}
