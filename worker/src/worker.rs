//! The life of a worker process: open the store, bind the ports, serve, drain.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use cavern_conf::process::{self, Metrics};
use cavern_conf::{Config, DirSpec, schema};
use cavern_net::{MasterChannel, WorkerPool};
use cavern_proto::master::{Worker, WorkerState};
use cavern_security::{AuditLog, HttpAccess, HttpServer, KeyWrapping, Role, TenantCollector, Transport};
use tokio::net::UnixListener;
use tokio::sync::{Semaphore, mpsc};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::error::WorkerError;
use crate::heartbeat::Heartbeat;
use crate::journals::Journals;
use crate::local_peers::{LocalPeers, bind_unix};
use crate::membership::Membership;
use crate::memory::Budget;
use crate::metrics::WorkerMetrics;
use crate::mounts::Mounts;
use crate::orphan_blocks::OrphanCollector;
use crate::parts::WorkerParts;
use crate::server::{self, Admission, Cores, Server, Service};
use crate::store::{self, BlockTable, StoreCollector, StoreOptions, Stores};

/// Evictions that wait to be sent to clients: as many files as a client keeps by default, so that all can be freed at a
/// time.
const EVICTION_QUEUE: usize = 131_072;
/// How often directories are looked at for relief and expiry.
const RELIEF_INTERVAL: Duration = Duration::from_millis(20);
const EXPIRY_INTERVAL: Duration = Duration::from_secs(30);
/// How often the free space of the file systems is looked at.
const SPACE_INTERVAL: Duration = Duration::from_secs(1);
/// Buffers have at least this budget.
const MIN_MEMORY_BYTES: u64 = 32 << 20;
/// Fills that still run when the worker stops may take this long.
const FILL_DRAIN: Duration = Duration::from_secs(3);

/// Runs a worker until `stop` is cancelled; then drains and returns.
///
/// Directories are opened first, then the ports are bound, then the ready line is printed; the master need not be
/// there.
///
/// # Errors
/// What keeps the worker from starting, or a master of another cluster.
pub async fn run(config: Config, stop: CancellationToken) -> Result<(), WorkerError> {
    Box::pin(run_with_replays(config, Vec::new(), stop)).await
}

/// Runs a worker that keeps journals of mounts. With the arguments `replay` this executable makes what a mount had
/// answered whose journal is its standard input; without any, no journals are kept.
///
/// # Errors
/// Those of [`run`].
pub async fn run_with_replays(
    config: Config,
    replay: Vec<OsString>,
    stop: CancellationToken,
) -> Result<(), WorkerError> {
    let directories = config.worker.dir_specs().map_err(|error| invalid_dirs(&config.worker, error.to_string()))?;
    if directories.is_empty() || directories.len() > usize::from(u8::MAX) {
        return Err(invalid_dirs(&config.worker, "name between 1 and 255 directories".to_owned()));
    }
    let registry = Metrics::new("worker");
    registry.with_registry(cavern_ufs::register_metrics);
    let metrics = WorkerMetrics::register(&registry);
    let transport = Transport::of_server(&config, Role::Worker)?;
    let audit = AuditLog::open(&config.worker.audit_log)?;
    transport.register_metrics(&registry);
    let access = HttpAccess::of(&config.security, &transport, &audit)?;
    let master = MasterChannel::new(&config)?;
    let socket = socket_path(&config.worker, &directories)?;

    let (evictions_in, evictions) = mpsc::channel(EVICTION_QUEUE);
    let keys = key_wrapping(&config.worker).await?;
    // An open block may have a second descriptor while it is filled, and connections need some too.
    let (conf, budget) = (config.worker.clone(), config.budgets.worker.clone());
    let open_blocks = (process::raise_descriptor_limit() / 4).min(budget.open_blocks);
    let max_open_blocks = usize::try_from(open_blocks).unwrap_or(usize::MAX);
    let options = StoreOptions { conf, directories, max_open_blocks, keys: keys.clone(), budget: budget.clone() };
    let opening = metrics.clone();
    let (stores, cleanup) = tokio::task::spawn_blocking(move || store::open(options, opening, evictions_in)).await??;
    registry.register_collector(StoreCollector(stores.table.clone()));

    let Ports { server, journals: journal_listener, http, worker } =
        Ports::bind(&config.worker, &socket, &keys).await?;
    let parts = parts(&config, stores, master, metrics);
    let pool = WorkerPool::new(&config.client, transport.clone(), "worker");
    let journals = Journals::new(replay, parts.membership.clone(), parts.metrics.clone(), stop.clone());
    let (rest, since) = (config.worker.orphan_block_grace.get(), Instant::now());
    let orphans = Arc::new(OrphanCollector { parts: parts.clone(), journals: journals.clone(), rest, since });
    let service = Service::new(parts.clone(), &config.worker, pool);
    let service = Arc::new(Service { orphans: Some(orphans.clone()), ..service });
    announce(&worker);

    let cores = Arc::new(Cores::start(budget.threads, budget.blocking_threads).map_err(WorkerError::Threads)?);
    let tenants = server::tenants(&config.worker, parts.memory.kib, budget.blocking_threads);
    registry.register_collector(TenantCollector::new(tenants.clone(), "cavern_worker"));
    let admission = Admission { transport, audit, tenants };
    let table = parts.stores.table.clone();
    let keeping_journals = async {
        if let Some((listener, path)) = journal_listener {
            journals.clone().serve(listener, path).await;
        }
    };
    let keep_link = async {
        let result = Heartbeat { parts: parts.clone(), worker }.run(stop.clone()).await;
        stop.cancel();
        result
    };
    let cleaning = stop.clone();
    // Whatever ends first with an error ends the others.
    let (result, cleaned, (), (), (), ()) = tokio::join!(
        keep_link,
        tokio::task::spawn_blocking(move || cleanup.run(&cleaning)),
        server.serve(service.clone(), admission, evictions, cores.clone(), stop.clone()),
        http.serve(access, axum::Router::new(), registry, move || health_of(&table), stop.clone()),
        tend((&parts, &*orphans), &service, &journals, &config.worker, &stop),
        keeping_journals,
    );
    drain(&service).await;
    parts.master.shutdown().await;
    // The threads were at fills until now; their end is waited for.
    let table = parts.stores.table.clone();
    tokio::task::spawn_blocking(move || (drop(cores), table.flush())).await?;
    cleaned?;
    info!("stopped");
    result
}

/// What the process listens on.
struct Ports {
    server: Server,
    /// For journals of mounts, with its path.
    journals: Option<(UnixListener, PathBuf)>,
    http: HttpServer,
    /// What is published of that.
    worker: Worker,
}

impl Ports {
    async fn bind(worker: &schema::Worker, socket: &Path, keys: &KeyWrapping) -> Result<Self, WorkerError> {
        let local_peers = LocalPeers::of(worker)?;
        // Whoever has a file that is encrypted can do nothing with it.
        let local_peers = (!keys.is_there()).then_some(local_peers);
        let server = Server::bind(&worker.listen, socket, local_peers).await?;
        let path = cavern_net::journals::socket_path(server.socket_path());
        // Whoever hands over a journal has it replayed with the rights of this process: that is not for a group.
        let journals = match bind_unix(&path, LocalPeers::default()).await {
            Ok(listener) => Some((listener, path)),
            // The path of the other socket is short enough; clients do without this one.
            Err(error @ WorkerError::SocketPath { .. }) => {
                warn!("journals of mounts are not kept: {error}");
                None
            }
            Err(error) => return Err(error),
        };
        let http = HttpServer::bind(&worker.http_listen).await?;
        let worker = Worker {
            data_address: advertised(worker, &server),
            socket_path: server.socket_path().display().to_string(),
            http_address: http.local_addr().to_string(),
            host: host_name(),
            state: WorkerState::Live.into(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            ..Worker::default()
        };
        Ok(Self { server, journals, http, worker })
    }
}

fn announce(worker: &Worker) {
    let Worker { data_address: data, socket_path: socket, http_address: http, .. } = worker;
    process::ready("worker", &[("data", data.clone()), ("socket", socket.clone()), ("http", http.clone())]);
    info!(data, socket, http, "serving");
}

/// What all parts of the worker work with.
fn parts(config: &Config, stores: Stores, master: MasterChannel, metrics: WorkerMetrics) -> WorkerParts {
    let memory_kib = config.worker.memory_budget.bytes().max(MIN_MEMORY_BYTES) / 1024;
    let memory_kib = u32::try_from(memory_kib).unwrap_or(u32::MAX).min(Semaphore::MAX_PERMITS as u32);
    // Clients know it by that before a master has heard of this start.
    let (_, worker_id, cluster_id) = stores.table.identity();
    let membership = Arc::new(Membership::remembered(worker_id, &cluster_id));
    let mounts = Arc::new(Mounts::new(master.clone(), config.ufs.clone()));
    WorkerParts { stores, mounts, master, membership, metrics, memory: Budget::new(memory_kib) }
}

/// Looks after what is in the stores, until `stop`.
async fn tend(
    (parts, orphans): (&WorkerParts, &OrphanCollector),
    service: &Service,
    journals: &Arc<Journals>,
    worker: &schema::Worker,
    stop: &CancellationToken,
) {
    let Stores { table, cache, data } = parts.stores.clone();
    let (relieved, expired, mounts) = (cache.clone(), cache.clone(), parts.mounts.clone());
    // Keeps the capacity of each directory to what its file system has, and what is charged for blocks to what they
    // take.
    let keep_to_disks = move || {
        data.settle();
        table.fit_to_file_systems();
    };
    tokio::join!(
        store::scrub(cache.clone(), worker.scrub_rate.bytes(), stop.clone()),
        // Keeps directories below their high watermarks.
        every(RELIEF_INTERVAL, stop, || cache.needs_relief(), move || while relieved.relieve() {}),
        every(SPACE_INTERVAL, stop, || true, keep_to_disks),
        // Marks blocks that their mount does not want to keep any longer.
        every(EXPIRY_INTERVAL, stop, || true, move || expired.expire(|mount| mounts.ttl_seconds(mount))),
        orphans.run(stop.clone()),
        service.reserved.clone().run(journals.clone(), stop.clone()),
    );
}

/// Lets what was begun come to its end, for a while.
async fn drain(service: &Service) {
    if tokio::time::timeout(FILL_DRAIN, service.fills.finish()).await.is_err() {
        warn!("stopped while fills were running: what they had not written is fetched again");
    }
    if tokio::time::timeout(FILL_DRAIN, service.uploads.finish()).await.is_err() {
        warn!("stopped while uploads were given up: the bucket may keep parts of them until it tidies up");
    }
}

fn invalid_dirs(worker: &schema::Worker, reason: String) -> WorkerError {
    WorkerError::Config { key: "worker.dirs", value: worker.dirs.join(", "), reason }
}

async fn key_wrapping(worker: &schema::Worker) -> Result<Arc<KeyWrapping>, WorkerError> {
    let (current, former) = (worker.key_encryption_key.clone(), worker.previous_key_encryption_key.clone());
    let load = move || {
        let settings = ("worker.key_encryption_key", "worker.previous_key_encryption_key");
        KeyWrapping::load((settings.0, &current), (settings.1, &former))
    };
    Ok(Arc::new(tokio::task::spawn_blocking(load).await??))
}

/// Clients of this host may have another working directory, so the path is made absolute.
fn socket_path(worker: &schema::Worker, directories: &[DirSpec]) -> Result<PathBuf, WorkerError> {
    if worker.socket.as_os_str().is_empty() {
        return Ok(directories.first().map(|first| first.path.join("worker.sock")).unwrap_or_default());
    }
    std::path::absolute(&worker.socket).map_err(|error| WorkerError::Config {
        key: "worker.socket",
        value: worker.socket.display().to_string(),
        reason: error.to_string(),
    })
}

/// Where clients of other hosts find the data plane.
fn advertised(worker: &schema::Worker, server: &Server) -> String {
    let address = server.address();
    if !worker.advertise.is_empty() {
        return worker.advertise.clone();
    }
    if address.ip().is_unspecified() { format!("{}:{}", host_name(), address.port()) } else { address.to_string() }
}

fn host_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

fn health_of(table: &BlockTable) -> Result<(), String> {
    let usage = table.usage();
    let failed: Vec<_> = usage.iter().filter(|disk| !disk.healthy).collect();
    match failed.first() {
        Some(first) if failed.len() == usage.len() => {
            Err(format!("no data directory works; {}: {}", first.path, first.error))
        }
        _ => Ok(()),
    }
}

/// Does what may wait for a disk when it is due, after each interval, until `stop`.
async fn every(
    interval: Duration,
    stop: &CancellationToken,
    is_due: impl Fn() -> bool,
    work: impl Fn() + Clone + Send + 'static,
) {
    while stop.run_until_cancelled(tokio::time::sleep(interval)).await.is_some() {
        if is_due() && tokio::task::spawn_blocking(work.clone()).await.is_err() {
            return;
        }
    }
}
