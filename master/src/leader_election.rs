//! Whether this master leads: a term is begun when it comes to, and ended when it no longer does.

use std::sync::Arc;

use cavern_consensus::leadership::{RETRY_PAUSE, alone, leadership_lost, leadership_won};
use cavern_consensus::{Consensus, ConsensusError, LeaderId};
use cavern_proto::NotLeading;
use cavern_work::sessions::CurrentSessions;
use parking_lot::RwLock;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::bootstrap::Bootstrap;
use crate::error::MasterError;
use crate::leader_state::{LeaderContext, LeaderState};

/// Begins and ends the terms of this master.
pub struct LeaderElection {
    bootstrap: Arc<Bootstrap>,
    /// For the state machine.
    pub sessions: Arc<CurrentSessions>,
    term: RwLock<Option<Arc<LeaderState>>>,
    /// Of what goes on when its caller is gone.
    pub tasks: TaskTracker,
}

impl LeaderElection {
    pub fn new(bootstrap: Arc<Bootstrap>) -> Self {
        Self { bootstrap, sessions: Arc::default(), term: RwLock::default(), tasks: TaskTracker::new() }
    }

    /// The term in which this master leads, if it does.
    pub fn term(&self) -> Option<Arc<LeaderState>> {
        self.term.read().clone()
    }

    /// The answer to one who asked the wrong master.
    pub fn not_leading(&self) -> MasterError {
        let answer = self.bootstrap.consensus.get().map_or(NotLeading { leader: None }, |node| node.not_leading());
        ConsensusError::NotLeading(answer).into()
    }

    /// Begins and ends terms until `stop`.
    pub async fn run(&self, context: &LeaderContext, stop: &CancellationToken) {
        let consensus = &context.consensus;
        while let Some(lead) = stop.run_until_cancelled(leadership_won(consensus)).await {
            match LeaderState::begin(context, lead, &self.sessions, stop).await {
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

    async fn serve(&self, consensus: &Consensus, lead: LeaderId, term: Arc<LeaderState>, stop: &CancellationToken) {
        tracing::info!(term = lead.term, "this master leads");
        *self.term.write() = Some(term.clone());
        tokio::select! {
            () = leadership_lost(consensus, lead) => tracing::info!(term = lead.term, "this master leads no more"),
            () = alone(&term.services.lease) => {
                tracing::warn!(term = lead.term, "no majority of the masters answers: the term ends");
            }
            () = stop.cancelled() => {}
        }
        *self.term.write() = None;
        term.end().await;
    }
}
