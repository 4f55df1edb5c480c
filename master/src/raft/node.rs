//! One voter: its start, its end, and what it shows of itself.

use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use cavern_conf::host;
use cavern_proto::record::InitCluster;
use cavern_proto::record::command::Command as Kind;
use openraft::{Config, SnapshotPolicy};
use parking_lot::Mutex;
use tokio::task;

use super::log_store::LogStore;
use super::network::Network;
use super::proposer::Proposer;
use super::snapshot::Snapshots;
use super::state_machine::{ChangeListener, StateMachine};
use super::types::{Node, NodeId, Raft};
use crate::MasterError;
use crate::clock::Clock;
use crate::metrics::RaftMetrics;
use crate::state::Database;

/// The id of the only voter.
const NODE_ID: NodeId = 1;

/// How long a start waits until everything committed before is applied.
const READY_TIMEOUT: Duration = Duration::from_secs(60);
/// How long an end waits for the threads.
const STOP_TIMEOUT: Duration = Duration::from_secs(10);

/// What a node must know at its start.
pub struct ConsensusConfig<'a> {
    pub cluster_name: &'a str,
    /// Directory of the snapshots.
    pub snapshots: &'a Path,
    pub snapshot_entries: u64,
    /// The id that the cluster gets if this is its first start.
    pub new_cluster_id: String,
    pub clock: Arc<Clock>,
}

/// A running node.
pub struct Consensus {
    raft: Raft,
    proposer: Proposer,
    running: Mutex<Option<Running>>,
}

/// What `stop` waits for.
struct Running {
    proposals: task::JoinHandle<()>,
    log: JoinHandle<()>,
}

impl Consensus {
    /// Starts the node. When this returns, everything that was ever acknowledged is applied, and reads of the database
    /// are up to date.
    pub async fn start(
        database: Arc<Database>,
        config: ConsensusConfig<'_>,
        listener: Arc<dyn ChangeListener>,
        metrics: RaftMetrics,
    ) -> Result<Self, MasterError> {
        let snapshots = Snapshots::open(config.snapshots.to_owned())?;
        let (log, log_thread) = LogStore::start(database.clone(), metrics.clone())?;
        let machine = StateMachine::open(database, snapshots, listener, metrics.clone())?;
        let fatal = |error: &dyn std::fmt::Display| MasterError::Consensus(error.to_string());
        let raft_config = Config {
            cluster_name: config.cluster_name.to_owned(),
            election_timeout_min: 1000,
            election_timeout_max: 2000,
            heartbeat_interval: 250,
            snapshot_policy: SnapshotPolicy::LogsSinceLast(config.snapshot_entries.max(1)),
            max_in_snapshot_log_to_keep: (config.snapshot_entries / 10).min(1000),
            purge_batch_size: 256,
            ..Config::default()
        };
        let raft_config = Arc::new(raft_config.validate().map_err(|error| fatal(&error))?);
        let raft = Raft::new(NODE_ID, raft_config, Network, log, machine).await.map_err(|error| fatal(&error))?;
        if raft.is_initialized().await.map_err(|error| fatal(&error))? {
            // The only voter need not wait for an election timeout.
            raft.trigger().elect().await.map_err(|error| fatal(&error))?;
        } else {
            let members = std::collections::BTreeMap::from([(NODE_ID, Node::default())]);
            raft.initialize(members).await.map_err(|error| fatal(&error))?;
        }
        let (proposer, serve) = Proposer::new(raft.clone(), config.clock.clone(), metrics);
        let proposals = host::spawn(serve);
        let running = Running { proposals, log: log_thread };
        let node = Self { raft, proposer, running: Mutex::new(Some(running)) };
        match node.become_ready(config.new_cluster_id, &config.clock).await {
            Ok(()) => Ok(node),
            Err(error) => {
                node.stop().await;
                Err(error)
            }
        }
    }

    /// Leads, and applies a first command of the new term: everything before it is applied then, too.
    async fn become_ready(&self, cluster_id: String, clock: &Clock) -> Result<(), MasterError> {
        let leads = self.raft.wait(Some(READY_TIMEOUT)).current_leader(NODE_ID, "the only voter leads").await;
        leads.map_err(|error| MasterError::Consensus(format!("the only voter did not come to lead: {error}")))?;
        let init = Kind::Init(InitCluster { cluster_id, now_ns: clock.now_ns() });
        let proposer = self.proposer();
        let applied = tokio::time::timeout(READY_TIMEOUT, proposer.propose(init)).await;
        applied.map_err(|_| MasterError::Consensus(format!("the log was not applied within {READY_TIMEOUT:?}")))??;
        Ok(())
    }

    /// For proposals.
    pub fn proposer(&self) -> Proposer {
        self.proposer.clone()
    }

    /// Returns when the [`ChangeListener`] has been notified of everything that the database shows at the moment: an
    /// entry is in the database before that.
    pub async fn wait_notified(&self) -> Result<(), MasterError> {
        let applied = self.raft.ensure_linearizable().await;
        applied.map(drop).map_err(|error| MasterError::Consensus(error.to_string()))
    }

    /// Index of the last applied entry, the leader's id, and what broke, if anything did.
    pub fn progress(&self) -> (u64, u64, Result<(), String>) {
        let metrics = self.raft.metrics();
        let metrics = metrics.borrow();
        let applied = metrics.last_applied.map_or(0, |id| id.index);
        let state = metrics.running_state.as_ref().map(|_| ()).map_err(ToString::to_string);
        (applied, metrics.current_leader.unwrap_or(0), state)
    }

    /// Stops consensus and joins its thread. Proposals fail from now on; a second call does nothing.
    pub async fn stop(&self) {
        let Some(Running { proposals, log }) = self.running.lock().take() else { return };
        if self.raft.shutdown().await.is_err() {
            tracing::warn!("the consensus task ended by a panic");
        }
        proposals.abort();
        // Aborted, which is how it is meant to end.
        let _ = proposals.await;
        match tokio::time::timeout(STOP_TIMEOUT, task::spawn_blocking(move || log.join())).await {
            Ok(Ok(Ok(()))) => {}
            Ok(_) => tracing::warn!("the thread of the log ended by a panic"),
            Err(_) => tracing::warn!("the thread of the log did not end in time"),
        }
    }
}
