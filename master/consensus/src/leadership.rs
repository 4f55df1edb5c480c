//! The begin and the end of a leadership, for those who do something as long as this master has it.

use std::sync::Arc;
use std::time::Duration;

use cavern_conf::host;
use cavern_proto::record::InitCluster;
use cavern_proto::record::command::Command;
use cavern_state::{Database, Tables, feature_version};
use tokio::task::JoinHandle;
use tokio::time::Instant;

use crate::clock::Clock;
use crate::error::Result;
use crate::{Consensus, LeaderId, LeaderLease, Proposer, until};

/// Between two looks whether a majority still answers.
const LOOK_PERIOD: Duration = Duration::from_millis(100);
/// A leader that no majority has answered for this long gives up: its clients find another sooner.
const ALONE_MAX: Duration = Duration::from_secs(3);
/// Pause before what could not begin in a leadership is tried again.
pub const RETRY_PAUSE: Duration = Duration::from_millis(200);

/// Returns when this master has a leadership in which it can propose.
pub async fn leadership_won(consensus: &Consensus) -> LeaderId {
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

/// Returns when this master has this leadership no more.
pub async fn leadership_lost(consensus: &Consensus, lead: LeaderId) {
    let mut observed = consensus.observe();
    until(&mut observed, |observed| consensus.leads_as(observed) != Some(lead)).await;
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

/// The way into the log for a leadership, and the task that serves it, once all that was in the log before is applied
/// here.
///
/// # Errors
/// [`ConsensusError::NotLeading`] and [`ConsensusError::Unavailable`] when the leadership is over before that. The task
/// has nothing to do then, and ends.
pub async fn open_log(
    database: &Arc<Database>,
    clock: &Arc<Clock>,
    consensus: &Consensus,
    lead: LeaderId,
) -> Result<(Proposer, JoinHandle<()>)> {
    clock.witness(Tables::new(database).counters()?.now_ns);
    let (proposer, serve) = consensus.proposer(lead, clock.clone());
    let proposals = spawn(serve);
    let cluster_id = consensus.identity.cluster_id.clone();
    let init =
        Command::Init(InitCluster { cluster_id, now_ns: clock.now_ns(), feature_version: feature_version::FIRST });
    proposer.propose(init).await?;
    // The rest of the log has been applied meanwhile.
    clock.witness(Tables::new(database).counters()?.now_ns);
    Ok((proposer, proposals))
}

fn spawn(task: impl Future<Output = ()> + Send + 'static) -> JoinHandle<()> {
    #[cfg(test)]
    if let Some(simulated) = crate::simulation::Host::current() {
        return simulated.spawn(task);
    }
    host::spawn(task)
}
