//! One master process from its configuration to its orderly end.

mod incoming;
mod maintenance;

use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use cavern_conf::process::{MissingDir, bind_tcp, ensure_dir, raise_descriptor_limit, ready};
use cavern_conf::{Config, host};
use cavern_consensus::{
    Clock, Consensus, ConsensusConfig, LeaderLease, LogLimits, MESSAGE_MAX, PeerConnector, recovery, run_blocking,
    until,
};
use cavern_net::WorkerPool;
use cavern_proto::master::cluster_server::ClusterServer;
use cavern_proto::master::namespace_server::NamespaceServer;
use cavern_proto::master::views_server::ViewsServer;
use cavern_proto::raft::raft_server::RaftServer;
use cavern_security::{AuditLog, HttpAccess, HttpServer, KeyWrapping, Role, TenantCollector, Transport};
use cavern_state::{Free, Resources, StateError};
use cavern_work::WorkError;
use cavern_work::metrics::MasterMetrics;
use cavern_work::mounts::{KeyDirectory, SecretSealer};
use cavern_work::workers::Workers;
use cavern_work::workers::calls::PooledWorkers;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tonic::transport::server::{Router, Server};

use crate::blocking::blocking;
use crate::bootstrap::Bootstrap;
use crate::error::MasterError;
use crate::feature_version::FEATURE_VERSION;
use crate::leader_election::LeaderElection;
use crate::leader_state::{LeaderContext, WorkerClientFactory, WorkerClients};
use crate::service::{ANSWER_MAX, Guarded, LeaderOnly, REQUEST_MAX, RaftService, tenants};

/// How long calls in flight may take at the end.
const DRAIN: Duration = Duration::from_secs(5);
/// Connections that send nothing but must be alive are asked so often.
const KEEPALIVE: Duration = Duration::from_secs(10);
/// Calls of one connection at a time.
const STREAMS_MAX: u32 = 1024;
/// Calls of one connection that are ended for errors of its peer, before it is closed. `tonic` has no bound of its own.
const ERROR_RESETS_MAX: usize = 1024;
/// Between two looks whether the group has a leader.
const READY_POLL: Duration = Duration::from_millis(5);

/// Binds the ports, prints the ready line (`cv master ready grpc=… http=…`), serves until `stop` is cancelled and
/// drains.
///
/// # Errors
/// Whatever keeps the master from serving: a taken port, a data directory that is in use or not writable, a broken
/// database, a disk that is full or fails.
pub async fn run(config: Config, stop: CancellationToken) -> Result<(), MasterError> {
    let transport = Transport::of_server(&config, Role::Master)?;
    let workers = Arc::new(PooledClientFactory { transport: transport.clone() });
    let grpc = bind_tcp(&config.master.listen, "master.listen").await?;
    let http = HttpServer::bind(&config.master.http_listen).await?;
    let http_address = http.local_addr().to_string();
    // The audit log may be in it.
    let missing = MissingDir::of("master.create_dir", config.master.create_dir);
    ensure_dir(&config.master.data_dir, "master.data_dir", missing)?;
    let audit = AuditLog::open(&config.master.audit_log)?.with_deletes(config.master.audit_deletes);
    let access = HttpAccess::of(&config.security, &transport, &audit)?;
    let metrics = MasterMetrics::default();
    let running: Arc<OnceLock<Arc<Consensus>>> = Arc::default();
    let health = {
        let running = running.clone();
        move || running.get().map_or_else(|| Err("it waits for its group".to_owned()), |node| node.progress().2)
    };
    // A master that waits for others can be looked at.
    let web = http.serve(access, axum::Router::new(), metrics.registry.clone(), health, stop.clone());
    let web = host::spawn(web);
    let started = Master::start(config, grpc, workers, Clock::default(), metrics, audit, stop.clone()).await;
    let ended = match started {
        Ok(Some(master)) => {
            // It is set once.
            let _ = running.set(master.consensus.clone());
            ready("master", &[("grpc", master.address.clone()), ("http", http_address)]);
            serve_until(master, &stop).await
        }
        Ok(None) => Ok(()),
        Err(error) => Err(error),
    };
    stop.cancel();
    if web.await.is_err() {
        tracing::warn!("the HTTP port ended by a panic");
    }
    ended
}

/// Returns when it is stopped, or cannot go on.
async fn serve_until(master: Master, stop: &CancellationToken) -> Result<(), MasterError> {
    let failure = tokio::select! {
        () = stop.cancelled() => None,
        failure = master.failed() => Some(failure),
    };
    master.stop().await;
    failure.map_or(Ok(()), |reason| Err(MasterError::Failed(reason)))
}

struct PooledClientFactory {
    transport: Transport,
}

impl WorkerClientFactory for PooledClientFactory {
    fn make(&self, config: &Config, workers: Arc<Workers>, cluster_id: &str, lease: LeaderLease) -> WorkerClients {
        let pool = WorkerPool::of_master(&config.client, self.transport.clone(), lease.lead.term);
        let pooled = Arc::new(PooledWorkers { pool: pool.clone(), workers, cluster_id: cluster_id.to_owned(), lease });
        WorkerClients { filler: pooled.clone(), writer: pooled, pool: Some(pool) }
    }
}

/// A master that serves gRPC on a bound port.
pub struct Master {
    pub election: Arc<LeaderElection>,
    pub address: String,
    consensus: Arc<Consensus>,
    /// Set when the database is closed.
    database: Free,
    server: JoinHandle<Result<(), tonic::transport::Error>>,
    leading: JoinHandle<()>,
    maintenance: JoinHandle<()>,
    ending: CancellationToken,
}

impl Master {
    /// Opens the state, serves other masters, and returns when this one is part of a group that has a leader; the
    /// clients of one that leads are served by then. `None` when `stop` is cancelled before that.
    pub async fn start(
        config: Config,
        grpc: TcpListener,
        workers: Arc<dyn WorkerClientFactory + Send + Sync>,
        clock: Clock,
        metrics: MasterMetrics,
        audit: AuditLog,
        stop: CancellationToken,
    ) -> Result<Option<Self>, MasterError> {
        let conf = config.master.clone();
        ensure_dir(&conf.data_dir, "master.data_dir", MissingDir::Create)?;
        let address = grpc.local_addr().map_err(StateError::io(PathBuf::from(&conf.listen)))?.to_string();
        metrics.registry.with_registry(cavern_ufs::register_metrics);
        let master = conf.clone();
        let keys = blocking(move || {
            let wrapping = KeyWrapping::load(
                ("master.key_encryption_key", &master.key_encryption_key),
                ("master.previous_key_encryption_key", &master.previous_key_encryption_key),
            )?;
            Ok(KeyDirectory::new(master.data_dir, wrapping))
        });
        let keys = keys.await?;
        let budget = &config.budgets.master;
        let (data_dir, resources) = (conf.data_dir.clone(), Resources::new(conf.metadata_cache.bytes(), budget));
        let opened = blocking(move || Ok(recovery::open(&data_dir, resources)?)).await?;
        let (database, high_water) = (Arc::new(opened.0), opened.1);
        let free = database.free();
        let transport = Transport::of_server(&config, Role::Master)?;
        transport.register_metrics(&metrics.registry);
        let connector = PeerConnector(transport.clone());
        let own_address = advertised(&config, &address)?;
        let bootstrap = Arc::new(Bootstrap::new(database.clone(), keys.clone(), own_address, connector.clone())?);
        let election = Arc::new(LeaderElection::new(bootstrap.clone()));
        // What runs goes on until another master has the leadership, whoever wants this one to stop.
        let ending = CancellationToken::new();
        let tenants = tenants(&conf);
        metrics.registry.register_collector(TenantCollector::new(tenants.clone(), "cavern_master"));
        let incoming = incoming::incoming(grpc, transport, tenants, raise_descriptor_limit());
        let router = router(audit, &bootstrap, &election);
        let server = host::spawn(router.serve_with_incoming_shutdown(incoming, ending.clone().cancelled_owned()));
        let started = async {
            let identity = bootstrap.place(&config.cluster.masters, new_cluster_id()).await?;
            let sealer = blocking(move || Ok(SecretSealer::open(&keys)?)).await?;
            let consensus = Consensus::start(
                database.clone(),
                ConsensusConfig {
                    cluster_name: &config.cluster.name,
                    identity,
                    address: bootstrap.address.clone(),
                    snapshots: &conf.data_dir.join("snapshots"),
                    log: LogLimits {
                        snapshot_after: conf.snapshot_after.bytes(),
                        keep: conf.log_retention.get(),
                        size_max: conf.log_size_max.bytes(),
                    },
                    connector,
                    known: FEATURE_VERSION,
                },
                election.sessions.clone(),
                metrics.consensus.clone(),
            )
            .await?;
            let (consensus, sealer) = (Arc::new(consensus), Arc::new(sealer));
            // This is done once.
            let _ = bootstrap.sealer.set(sealer.clone());
            let _ = bootstrap.consensus.set(consensus.clone());
            Ok((consensus, sealer))
        };
        let (consensus, sealer) = match stop.run_until_cancelled(Box::pin(started)).await {
            Some(Ok(started)) => started,
            Some(Err(error)) => {
                ending.cancel();
                end_server(server).await;
                return Err(error);
            }
            None => {
                ending.cancel();
                end_server(server).await;
                return Ok(None);
            }
        };
        let context = LeaderContext {
            config,
            database: database.clone(),
            sealer: sealer.clone(),
            clock: Arc::new(clock),
            metrics: metrics.clone(),
            workers,
            consensus: consensus.clone(),
        };
        let (own, until) = (election.clone(), ending.clone());
        let leading = host::spawn(async move { own.run(&context, &until).await });
        let maintenance =
            maintenance::run(consensus.clone(), database, sealer, metrics.clone(), high_water, ending.clone());
        let maintenance = host::spawn(maintenance);
        let master = Self { election, address, consensus, database: free, server, leading, maintenance, ending };
        // It keeps the database open, for whose end `stop` waits.
        drop(bootstrap);
        if master.is_ready(&stop).await {
            return Ok(Some(master));
        }
        let failure = master.consensus.progress().2;
        master.stop().await;
        failure.map(|()| None).map_err(MasterError::Failed)
    }

    /// Waits until clients who come here get an answer, if only that another one leads. False when it will not be so.
    async fn is_ready(&self, stop: &CancellationToken) -> bool {
        let own = self.consensus.identity.node_id;
        loop {
            let (_, leader, state) = self.consensus.progress();
            if stop.is_cancelled() || state.is_err() {
                return false;
            }
            if self.election.term().is_some() || (leader != 0 && leader != own) {
                return true;
            }
            let _stopped = stop.run_until_cancelled(tokio::time::sleep(READY_POLL)).await;
        }
    }

    /// What its consensus shows.
    #[cfg(test)]
    pub fn observe(&self) -> cavern_consensus::Observed {
        self.consensus.observe()
    }

    /// Returns with the reason when this master can go on no longer.
    pub async fn failed(&self) -> String {
        let mut observed = self.consensus.observe();
        until(&mut observed, |metrics| metrics.running_state.is_err()).await;
        self.consensus.progress().2.err().unwrap_or_else(|| "the consensus has ended".to_owned())
    }

    /// Lets another master lead, calls in flight end, and stops everything in the order in which it depends on each
    /// other.
    pub async fn stop(self) {
        let Self { election, consensus, database, server, leading, maintenance, ending, .. } = self;
        if consensus.leads().is_some() && consensus.has_others() {
            // Otherwise they find out by themselves that this one is gone, later.
            if let Err(error) = consensus.hand_over(0).await {
                tracing::info!("nobody takes the lead: {error}");
            }
        }
        ending.cancel();
        join(leading, "the term").await;
        end_server(server).await;
        consensus.stop().await;
        join(maintenance, "the maintenance").await;
        drop((consensus, election));
        // A read that was given up, or a snapshot, may still be at work on the blocking pool. The directory is free for
        // the next process when this returns.
        // Where all threads of the pool are taken, the wait does not even begin.
        let is_free = tokio::time::timeout(DRAIN * 2, run_blocking(move || database.wait(DRAIN))).await;
        if !matches!(is_free, Ok(Ok(true))) {
            tracing::warn!("the database is still in use at the end");
        }
    }
}

/// Where others reach this master.
fn advertised(config: &Config, bound: &str) -> Result<String, MasterError> {
    let address = config.master_address().map_err(WorkError::Invalid)?;
    // A port that the system has chosen is known only now.
    Ok(if address.ends_with(":0") { bound.to_owned() } else { address })
}

/// What calls are made to, and how connections are served.
fn router(audit: AuditLog, bootstrap: &Arc<Bootstrap>, election: &Arc<LeaderElection>) -> Router {
    let masters = RaftServer::new(RaftService::new(bootstrap.clone(), election.clone()))
        .max_decoding_message_size(MESSAGE_MAX)
        .max_encoding_message_size(MESSAGE_MAX);
    let namespace = LeaderOnly::new(election, |services| {
        NamespaceServer::new(services).max_decoding_message_size(REQUEST_MAX).max_encoding_message_size(ANSWER_MAX)
    });
    let cluster = LeaderOnly::new(election, |services| {
        ClusterServer::new(services).max_decoding_message_size(REQUEST_MAX).max_encoding_message_size(ANSWER_MAX)
    });
    let views = LeaderOnly::new(election, |services| {
        ViewsServer::new(services).max_decoding_message_size(REQUEST_MAX).max_encoding_message_size(ANSWER_MAX)
    });
    Server::builder()
        .http2_keepalive_interval(Some(KEEPALIVE))
        .max_concurrent_streams(STREAMS_MAX)
        .http2_max_local_error_reset_streams(Some(ERROR_RESETS_MAX))
        .add_service(Guarded::new(masters, audit.clone()))
        .add_service(Guarded::new(namespace, audit.clone()))
        .add_service(Guarded::new(cluster, audit.clone()))
        .add_service(Guarded::new(views, audit))
}

async fn end_server(mut server: JoinHandle<Result<(), tonic::transport::Error>>) {
    if tokio::time::timeout(DRAIN, &mut server).await.is_err() {
        tracing::warn!("calls in flight did not end in time");
        server.abort();
        let _ = server.await;
    }
}

async fn join(task: JoinHandle<()>, what: &str) {
    if task.await.is_err() {
        tracing::warn!("{what} ended by a panic");
    }
}

fn new_cluster_id() -> String {
    // Without random numbers the time of day must do: the id only distinguishes clusters.
    let bytes = cavern_security::random_bytes().unwrap_or_else(|_none| host::wall_ns().to_be_bytes());
    format!("{:016x}", u64::from_be_bytes(bytes))
}
