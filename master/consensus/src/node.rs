//! One master's part of the consensus: its start, its end, and what it shows of itself.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use cavern_proto::NotLeading;
use cavern_state::{CurrentDatabase, Database};
use openraft::async_runtime::watch::WatchReceiver as _;
use openraft::errors::{InitializeError, RaftError};
use openraft::{Config, RaftMetrics, ReadPolicy, ServerState, SnapshotPolicy};
use parking_lot::Mutex;
use tokio::task::{JoinHandle, spawn_blocking};
use tokio_util::sync::CancellationToken;

use super::identity::Identity;
use super::leader_lease::{self, ELECTION, LastTransfer, LeaderLease, Promise};
use super::log_retention::{self, LogLimits};
use super::log_store::{LogSize, LogStore, has_log, log_state};
use super::network::{Network, PeerConnector};
use super::observe::{self, Observed};
use super::position::read_position;
use super::proposer::Proposer;
use super::server::IncomingTransfer;
use super::snapshot::Snapshots;
use super::state_machine::{ChangeListener, Raft, StateMachine, finish_installation};
use super::threads::RaftThreads;
use super::types::{LeaderId, Node, NodeId, Types};
use crate::clock::Clock;
use crate::error::{ConsensusError, Result};
use crate::metrics::ConsensusMetrics;

/// How long an end waits for the threads.
const STOP_TIMEOUT: Duration = Duration::from_secs(10);
/// Between two signs of life of a leader: several in the shortest election timeout.
const HEARTBEAT: Duration = Duration::from_millis(150);
/// Entries that a master may lack which is to vote: it has them soon. Where two vote then, clients wait for that.
const LAG: u64 = 200;

/// What a node must know at its start.
pub struct ConsensusConfig<'a> {
    pub cluster_name: &'a str,
    pub identity: Identity,
    /// Where the other masters and the clients reach this one.
    pub address: String,
    /// Directory of the snapshots.
    pub snapshots: &'a Path,
    pub log: LogLimits,
    pub connector: PeerConnector,
    /// The feature version up to which this program knows commands.
    pub known: u32,
}

/// A running node.
pub struct Consensus {
    pub identity: Identity,
    /// Where others reach this master.
    pub address: String,
    /// To other masters.
    pub connector: PeerConnector,
    pub(super) raft: Raft,
    pub(super) snapshots: Snapshots,
    metrics: ConsensusMetrics,
    threads: RaftThreads,
    pub(super) log_size: Arc<Mutex<LogSize>>,
    pub(super) limits: LogLimits,
    running: Mutex<Option<Running>>,
    pub(super) given_away: LastTransfer,
    pub(super) promise: Promise,
    pub(super) arrival: IncomingTransfer,
    /// Index of the last entry that the log had when this process was started; 0 for none.
    pub log_at_start: u64,
}

/// What ends with it, beside what is on its threads only.
struct Running {
    /// None in a simulation, which has no threads.
    log: Option<thread::JoinHandle<()>>,
    retention: JoinHandle<()>,
    stop_retention: CancellationToken,
}

impl Consensus {
    /// Starts the node, which goes on where it was. It leads, or follows whoever does, some time after this.
    pub async fn start(
        database: Arc<CurrentDatabase>,
        config: ConsensusConfig<'_>,
        listener: Arc<dyn ChangeListener>,
        metrics: ConsensusMetrics,
    ) -> Result<Self> {
        let ConsensusConfig { cluster_name, identity, address, snapshots, log: limits, connector, known } = config;
        let snapshots = Snapshots::open(snapshots.to_owned())?;
        finish_installation(&database, &snapshots)?;
        let (log, log_thread) = start_log(database.clone(), limits, &metrics)?;
        let is_alone = is_alone(&database.get(), identity.node_id)?;
        let log_at_start = log_state(&database.get())?.last_log_id.map_or(0, |id| id.index);
        let promise = if has_log(&database.get())? && !is_alone { Promise::begin() } else { Promise::default() };
        let machine = StateMachine::open(database, snapshots.clone(), listener, metrics.clone(), known)?;
        let raft_config = Config {
            cluster_name: cluster_name.to_owned(),
            election_timeout_min: ELECTION.start().as_millis() as u64,
            election_timeout_max: ELECTION.end().as_millis() as u64,
            heartbeat_interval: HEARTBEAT.as_millis() as u64,
            // Both are for `log_retention` to do.
            snapshot_policy: SnapshotPolicy::Never,
            max_in_snapshot_log_to_keep: u64::MAX,
            replication_lag_threshold: LAG,
            max_payload_entries: 1024,
            enable_pre_vote: Some(true),
            // What it has sent to others may not be on its disk: in the same term it would write something else there.
            enable_leader_restore: Some(false),
            ..Config::default()
        };
        let raft_config = Arc::new(raft_config.validate().map_err(fatal)?);
        promise.wait().await;
        let network = Network::new(&identity.cluster_id, identity.node_id, connector.clone());
        let threads = RaftThreads::start()?;
        let raft = threads.spawn(Raft::new(identity.node_id, raft_config, network, log.clone(), machine))?;
        let raft = raft.await.map_err(fatal)?.map_err(fatal)?;
        let (log_size, stop_retention) = (log.size(), CancellationToken::new());
        let retention = log_retention::run(raft.clone(), log, limits, metrics.clone(), stop_retention.clone());
        let running = Running { log: log_thread, retention: threads.spawn(retention)?, stop_retention };
        let running = Mutex::new(Some(running));
        let given_away = LastTransfer::default();
        let node = Self {
            identity,
            address,
            connector,
            raft,
            snapshots,
            metrics,
            threads,
            log_size,
            limits,
            running,
            given_away,
            promise,
            arrival: IncomingTransfer::default(),
            log_at_start,
        };
        if is_alone {
            // There is nobody to wait for.
            node.raft.trigger().elect(false).await.map_err(fatal)?;
        }
        if let Some(members) = node.identity.founds.clone()
            && let Err(error) = node.found(&members).await
        {
            node.stop().await;
            return Err(error);
        }
        Ok(node)
    }

    /// Begins the cluster with these members, unless that was done before.
    async fn found(&self, members: &[String]) -> Result {
        let members = (1..).zip(members).map(|(id, address)| (id, Node::new(address)));
        match self.raft.initialize(members.collect::<BTreeMap<NodeId, Node>>()).await {
            Ok(()) | Err(RaftError::APIError(InitializeError::NotAllowed(_))) => Ok(()),
            Err(error) => Err(fatal(error)),
        }
    }

    /// Changes with everything that there is to see, and so also when this master begins or ceases to lead.
    pub fn observe(&self) -> Observed {
        self.raft.metrics()
    }

    /// The lead that this master has, if it has one.
    pub fn leads(&self) -> Option<LeaderId> {
        self.leads_as(&self.raft.metrics().borrow_watched())
    }

    /// The leadership that this master has, by what is being observed. Who holds that must not ask for it again: a
    /// writer that waits in between would wait for ever, and with it the consensus.
    pub fn leads_as(&self, observed: &RaftMetrics<Types>) -> Option<LeaderId> {
        let is_leader = observed.state == ServerState::Leader && observed.running_state.is_ok();
        let vote = observed.vote;
        (is_leader && vote.committed && vote.leader_id.node_id == self.identity.node_id).then_some(vote.leader_id)
    }

    /// Whether this master leads, and can put something into the log: a majority has answered it, and all that was in
    /// the log before is applied.
    pub fn can_propose(&self, observed: &RaftMetrics<Types>) -> bool {
        self.leads_as(observed).is_some_and(|lead| {
            let has_begun = observed.last_applied.is_some_and(|last| last.leader_id == lead);
            has_begun && leader_lease::is_acknowledged(observed)
        })
    }

    /// Whether there are other masters who could lead.
    pub fn has_others(&self) -> bool {
        self.raft.metrics().borrow_watched().membership_config.voter_ids().count() > 1
    }

    /// For the proposals of one leadership, with the task that serves them.
    pub fn proposer(&self, lead: LeaderId, clock: Arc<Clock>) -> (Proposer, impl Future<Output = ()> + Send + use<>) {
        Proposer::new(self.raft.clone(), lead, clock, self.metrics.clone())
    }

    /// Says whether this master still has a leadership.
    pub fn lease(&self, lead: LeaderId) -> LeaderLease {
        LeaderLease::new(&self.raft, lead, self.given_away.clone())
    }

    /// Who leads, for one who asked the wrong master.
    pub fn not_leading(&self) -> NotLeading {
        observe::not_leading(&self.raft.metrics().borrow_watched(), self.identity.node_id)
    }

    /// Returns when the [`ChangeListener`] has been notified of everything that the database shows at the moment: an
    /// entry is in the database before that.
    pub async fn wait_notified(&self) -> Result {
        self.raft.ensure_linearizable(ReadPolicy::ReadIndex).await.map(drop).map_err(fatal)
    }

    /// Index of the last applied entry, the leader's id, and what broke, if anything did.
    pub fn progress(&self) -> (u64, u64, Result<(), String>) {
        let metrics = self.raft.metrics();
        let metrics = metrics.borrow_watched();
        let applied = metrics.last_applied.map_or(0, |id| id.index);
        let state = metrics.running_state.clone().map_err(|error| error.to_string());
        (applied, metrics.current_leader.unwrap_or(0), state)
    }

    /// Stops consensus and joins its threads. Proposals fail from now on; a second call does nothing.
    pub async fn stop(&self) {
        let Some(Running { log, retention, stop_retention }) = self.running.lock().take() else { return };
        stop_retention.cancel();
        if retention.await.is_err() {
            tracing::warn!("the retention task of the log ended by a panic");
        }
        if self.raft.shutdown().await.is_err() {
            tracing::warn!("the consensus task ended by a panic");
        }
        self.threads.stop(STOP_TIMEOUT).await;
        let Some(log) = log else { return };
        match tokio::time::timeout(STOP_TIMEOUT, spawn_blocking(move || log.join())).await {
            Ok(Ok(Ok(()))) => {}
            Ok(_) => tracing::warn!("the thread of the log ended by a panic"),
            Err(_) => tracing::warn!("the thread of the log did not end in time"),
        }
    }
}

/// Whether it is the only master that votes.
fn is_alone(database: &Database, own: NodeId) -> Result<bool> {
    let (_, membership) = read_position(database)?;
    Ok(membership.voter_ids().eq([own]))
}

fn start_log(
    database: Arc<CurrentDatabase>,
    limits: LogLimits,
    metrics: &ConsensusMetrics,
) -> Result<(LogStore, Option<thread::JoinHandle<()>>)> {
    #[cfg(test)]
    if let Some(host) = super::simulation::Host::current() {
        return Ok((LogStore::start_on(&host, database, limits.mark_bytes())?, None));
    }
    let (log, thread) = LogStore::start(database, limits.mark_bytes(), metrics.clone())?;
    Ok((log, Some(thread)))
}

pub(super) fn fatal(error: impl std::fmt::Display) -> ConsensusError {
    ConsensusError::Unavailable(error.to_string())
}
