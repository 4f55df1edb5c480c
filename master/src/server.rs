//! One master process from its configuration to its orderly end.

mod incoming;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use cavern_conf::process::{HttpServer, bind_tcp, ensure_dir, raise_descriptor_limit, ready};
use cavern_conf::{Config, host};
use cavern_net::WorkerPool;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::MasterError;
use crate::clock::Clock;
use crate::jobs::{BlockFiller, Jobs, PooledWorkers};
use crate::leader::Leadership;
use crate::listing::{ListingOptions, Listings, Looks};
use crate::metrics::MasterMetrics;
use crate::mounts::{Mounts, Vault};
use crate::namespace::Lookups;
use crate::persist::{ObjectWriter, PersistOptions, Persistence};
use crate::raft::{Consensus, ConsensusConfig};
use crate::repair::{Repair, RepairOptions};
use crate::service::Services;
use crate::sessions::WatchHub;
use crate::state::{StateReader, Tables};
use crate::workers::Workers;

/// How long calls in flight may take at the end.
const DRAIN: Duration = Duration::from_secs(5);
/// Connections that send nothing but must be alive are asked so often.
const KEEPALIVE: Duration = Duration::from_secs(10);
/// Calls of one connection at a time.
const STREAMS_MAX: u32 = 1024;

/// Binds the ports, prints the ready line (`cv master ready grpc=… http=…`), serves until `stop` is cancelled and
/// drains.
///
/// # Errors
/// Whatever keeps the master from serving: a taken port, a data directory that is in use or not writable, a broken
/// database.
pub async fn run(config: Config, stop: CancellationToken) -> Result<(), MasterError> {
    let grpc = bind_tcp(&config.master.listen, "master.listen").await?;
    let http = HttpServer::bind(&config.master.http_listen).await?;
    let master = Master::start(config, grpc, Arc::new(PooledClientFactory), Clock::default()).await?;
    let health = {
        let consensus = master.services.consensus.clone();
        move || consensus.progress().2
    };
    let addresses = [("grpc", master.address.clone()), ("http", http.local_addr().to_string())];
    let registry = master.metrics.registry.clone();
    let web = host::spawn(http.serve(axum::Router::new(), registry, health, stop.clone()));
    ready("master", &addresses);
    stop.cancelled().await;
    master.stop().await;
    if web.await.is_err() {
        tracing::warn!("the HTTP port ended by a panic");
    }
    Ok(())
}

/// The way to the workers.
pub struct WorkerClients {
    pub filler: Arc<dyn BlockFiller>,
    pub writer: Arc<dyn ObjectWriter>,
    pub pool: Option<Arc<WorkerPool>>,
}

/// Makes the way to the workers, once these are known; tests have their own.
pub trait WorkerClientFactory {
    fn make(&self, config: &Config, workers: Arc<Workers>, cluster_id: &str) -> WorkerClients;
}

struct PooledClientFactory;

impl WorkerClientFactory for PooledClientFactory {
    fn make(&self, config: &Config, workers: Arc<Workers>, cluster_id: &str) -> WorkerClients {
        let pool = WorkerPool::new(&config.client, "master");
        let pooled = Arc::new(PooledWorkers::new(pool.clone(), workers, cluster_id.to_owned()));
        WorkerClients { filler: pooled.clone(), writer: pooled, pool: Some(pool) }
    }
}

/// A master that serves gRPC on a bound port.
pub struct Master {
    pub services: Services,
    pub address: String,
    pub metrics: MasterMetrics,
    pool: Option<Arc<WorkerPool>>,
    /// Cancelled when the database is closed.
    database: CancellationToken,
    server: JoinHandle<Result<(), tonic::transport::Error>>,
    leadership: Leadership,
    stop: CancellationToken,
}

impl Master {
    /// Opens the state, waits until the log is applied, and begins to serve.
    pub async fn start(
        config: Config,
        grpc: TcpListener,
        fillers: Arc<dyn WorkerClientFactory + Send + Sync>,
        clock: Clock,
    ) -> Result<Self, MasterError> {
        let conf = config.master.clone();
        ensure_dir(&conf.data_dir, "master.data_dir")?;
        let address = grpc.local_addr().map_err(MasterError::io(PathBuf::from(&conf.listen)))?.to_string();
        let metrics = MasterMetrics::new();
        metrics.registry.with_registry(cavern_ufs::register_metrics);
        let clock = Arc::new(clock);
        let data_dir = conf.data_dir.clone();
        let cache_bytes = conf.metadata_cache.bytes();
        let opened = tokio::task::spawn_blocking(move || {
            let (database, high_water) = crate::recovery::open(&data_dir, cache_bytes)?;
            Ok::<_, MasterError>((Arc::new(database), high_water, Vault::open(&data_dir)?))
        });
        let opened = opened.await.map_err(|error| MasterError::Consensus(error.to_string()))?;
        let (database, high_water, vault) = opened?;
        clock.witness(Tables::new(&database).counters()?.now_ns);
        let watch = Arc::new(WatchHub::new(conf.session_lease.get(), &clock, metrics.clone()));
        let consensus = Consensus::start(
            database.clone(),
            ConsensusConfig {
                cluster_name: &config.cluster.name,
                snapshots: &conf.data_dir.join("snapshots"),
                snapshot_entries: conf.snapshot_entries,
                new_cluster_id: new_cluster_id(),
                clock: clock.clone(),
            },
            watch.clone(),
            metrics.raft.clone(),
        )
        .await?;
        let consensus = Arc::new(consensus);
        // The rest of the log has been applied meanwhile.
        clock.witness(Tables::new(&database).counters()?.now_ns);
        let proposer = consensus.proposer();
        let cluster_id = Tables::new(&database).cluster_id()?;
        let cluster_id = cluster_id.ok_or_else(|| MasterError::Corrupt("the cluster id, which is missing,".into()))?;
        watch.set_cluster_id(&cluster_id);
        let mounts = Arc::new(Mounts::new(database.clone(), vault, config.ufs.clone()));
        let reader = StateReader::new(database.clone(), clock);
        let listings = Listings::new(
            reader.clone(),
            mounts.clone(),
            proposer.clone(),
            metrics.listing.clone(),
            ListingOptions {
                concurrency: conf.list_concurrency,
                looks: Looks::new(&config.fuse),
                cluster_id: cluster_id.as_str().into(),
            },
        );
        let workers = Arc::new(Workers::new(
            database.clone(),
            proposer.clone(),
            conf.worker_timeout.get(),
            cluster_id.clone(),
            metrics.clone(),
        ));
        let lookups = Lookups {
            reader: reader.clone(),
            listings,
            mounts: mounts.clone(),
            watch: watch.clone(),
            refresh_wait: conf.refresh_wait.get(),
        };
        let WorkerClients { filler, writer, pool } = fillers.make(&config, workers.clone(), &cluster_id);
        let options = PersistOptions { delay: conf.persist_delay.get(), concurrency: conf.persist_concurrency };
        let persistence = Persistence::new(
            lookups.clone(),
            proposer.clone(),
            writer.clone(),
            &cluster_id,
            &options,
            metrics.persist.clone(),
        );
        let jobs = Jobs::new(
            lookups.clone(),
            proposer.clone(),
            filler,
            conf.load_concurrency,
            persistence.clone(),
            metrics.jobs.clone(),
        );
        let options = RepairOptions { after: conf.repair_after.get(), concurrency: conf.repair_concurrency };
        let repair = Repair::new(
            (reader, watch.clone()),
            proposer.clone(),
            writer,
            workers.clone(),
            &cluster_id,
            &options,
            metrics.repair.clone(),
        );
        let stop = CancellationToken::new();
        let services = Services {
            lookups,
            mounts,
            watch,
            workers,
            jobs,
            persistence,
            repair,
            consensus,
            proposer,
            cluster_id: cluster_id.into(),
            heartbeat_ms: u32::try_from(conf.heartbeat.get().as_millis()).unwrap_or(u32::MAX),
            tasks: TaskTracker::new(),
            stop: stop.clone(),
        };
        let closing = database.closed();
        let leadership = Leadership::begin(&services, database, &metrics, high_water).await?;
        let server = tonic::transport::Server::builder()
            .http2_keepalive_interval(Some(KEEPALIVE))
            .max_concurrent_streams(STREAMS_MAX);
        let router = services.clone().router(server);
        let incoming = incoming::incoming(grpc, raise_descriptor_limit());
        let ended = stop.clone();
        let server = host::spawn(router.serve_with_incoming_shutdown(incoming, async move { ended.cancelled().await }));
        Ok(Self { services, address, metrics, pool, database: closing, server, leadership, stop })
    }

    /// Lets calls in flight end, and stops everything in the order in which it depends on each other.
    pub async fn stop(self) {
        let Self { services, pool, database, mut server, leadership, stop, .. } = self;
        stop.cancel();
        services.watch.close();
        services.tasks.close();
        services.tasks.wait().await;
        if tokio::time::timeout(DRAIN, &mut server).await.is_err() {
            tracing::warn!("calls in flight did not end in time");
            server.abort();
            let _ = server.await;
        }
        leadership.end().await;
        if let Some(pool) = pool {
            pool.shutdown().await;
        }
        services.consensus.stop().await;
        drop(services);
        // A read that was given up, or a snapshot, may still be at work on the blocking pool. The directory is free for
        // the next process when this returns.
        if tokio::time::timeout(DRAIN, database.cancelled()).await.is_err() {
            tracing::warn!("the database is still in use at the end");
        }
    }
}

fn new_cluster_id() -> String {
    use ring::rand::SecureRandom;
    let mut bytes = [0u8; 8];
    // Without random numbers the time of day must do: the id only distinguishes clusters.
    if ring::rand::SystemRandom::new().fill(&mut bytes).is_err() {
        bytes = host::wall_ns().to_be_bytes();
    }
    format!("{:016x}", u64::from_be_bytes(bytes))
}
