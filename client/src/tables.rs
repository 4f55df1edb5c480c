//! The mount table and the worker table, kept current: fetched at the start, when the master announces another epoch,
//! and when an entry names a mount that is not in the table. What workers say of themselves begins no epoch: whoever
//! wants to know how full they are has their table renewed.
//!
//! A mount table is in force at once, and says what views have frozen. It is *settled* when nothing is written any more
//! that was begun with an earlier one: the master is told ([`Tables::settled`]). When all clients have told it, another
//! table says so, and frozen blocks are replaced ([`MountView::is_settled`]).

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use cavern_conf::{backoff, schema};
use cavern_net::WorkerPool;
use cavern_net::master::{MasterChannel, Stubs};
use cavern_proto::master::{ListMountsRequest, ListWorkersRequest};
use cavern_security::Role;
use futures::future::{BoxFuture, join};
use parking_lot::{Mutex, RwLock};
use tokio::sync::{Notify, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::error::ClientError;
use crate::mounts::{MountView, Mounts};
use crate::single_flight::SingleFlight;

/// How old the worker table may be where it is to be renewed, and how long that is waited for.
const RENEW_AFTER: Duration = Duration::from_secs(1);
const RENEW_WAIT: Duration = Duration::from_secs(1);

/// Completes when nothing is written any more to files of these mounts that was begun before.
type Settle = Box<dyn Fn(Vec<Arc<MountView>>) -> BoxFuture<'static, ()> + Send + Sync>;

pub(crate) struct Tables {
    master: MasterChannel,
    pool: Arc<WorkerPool>,
    ufs: schema::Ufs,
    mounts: RwLock<Arc<Mounts>>,
    /// Mounts are fetched by one at a time: no table takes the place of a later one.
    fetching: tokio::sync::Mutex<()>,
    /// There is another mount table.
    replaced: Notify,
    settle: OnceLock<Settle>,
    /// Epoch of the last mount table that is settled.
    settled: watch::Sender<u64>,
    /// When the worker table was to be renewed last.
    renewed: Mutex<Option<Instant>>,
    worker_fetches: Mutex<WorkerFetches>,
    flights: SingleFlight<(), Result<(), ClientError>>,
    stale: Stale,
}

/// How often the worker table was asked for, and which of these times gave the one that is in force.
#[derive(Default)]
struct WorkerFetches {
    begun: u64,
    taken: u64,
}

/// Which tables are to be fetched again.
#[derive(Default)]
struct Stale {
    mounts: AtomicBool,
    workers: AtomicBool,
    wake: Notify,
    /// How often another mount table was, or may have been, announced; and how often it had been when the one that is
    /// here was asked for.
    announced: AtomicU64,
    fetched: AtomicU64,
}

impl Tables {
    pub(crate) fn new(master: MasterChannel, pool: Arc<WorkerPool>, ufs: &schema::Ufs) -> Self {
        Self {
            master,
            pool,
            ufs: ufs.clone(),
            mounts: RwLock::default(),
            fetching: tokio::sync::Mutex::default(),
            replaced: Notify::new(),
            settle: OnceLock::new(),
            settled: watch::Sender::new(0),
            renewed: Mutex::default(),
            worker_fetches: Mutex::default(),
            flights: SingleFlight::default(),
            stale: Stale::default(),
        }
    }

    pub(crate) fn mounts(&self) -> Arc<Mounts> {
        self.mounts.read().clone()
    }

    /// The mount of an entry, from the table or from the master. An error when the master does not know it either.
    pub(crate) async fn mount(self: &Arc<Self>, id: u32) -> Result<Arc<MountView>, ClientError> {
        if let Some(mount) = self.mounts.read().get(id) {
            return Ok(mount.clone());
        }
        let tables = self.clone();
        self.flights.join((), async move { tables.fetch_mounts().await }).await?;
        let mounts = self.mounts();
        mounts.get(id).cloned().ok_or_else(|| ClientError::Mount { mount: id, cause: "unknown to the master".into() })
    }

    pub(crate) fn set_cluster_id(&self, id: &str) {
        self.pool.set_cluster_id(id);
    }

    /// Asks for the mount table to be fetched again.
    pub(crate) fn mounts_changed(&self, epoch: u64) {
        if self.mounts.read().epoch() != epoch {
            self.refetch_mounts();
        }
    }

    /// Asks for it whatever its epoch: it is not current until it has come.
    pub(crate) fn refetch_mounts(&self) {
        self.stale.announced.fetch_add(1, Ordering::AcqRel);
        self.stale.mounts.store(true, Ordering::Relaxed);
        self.stale.wake.notify_one();
    }

    /// Whether the mount table is not older than whatever has been announced.
    pub(crate) fn has_current_mounts(&self) -> bool {
        self.stale.fetched.load(Ordering::Acquire) == self.stale.announced.load(Ordering::Acquire)
    }

    /// Asks for the worker table to be fetched again.
    pub(crate) fn workers_changed(&self, epoch: u64) {
        if self.pool.placement().epoch() != epoch {
            self.stale.workers.store(true, Ordering::Relaxed);
            self.stale.wake.notify_one();
        }
    }

    /// Asks for both.
    pub(crate) fn everything_changed(&self) {
        self.stale.workers.store(true, Ordering::Relaxed);
        self.refetch_mounts();
    }

    /// Fetches both now.
    pub(crate) async fn fetch(&self) -> Result<(), ClientError> {
        self.fetch_mounts().await?;
        self.fetch_workers().await
    }

    async fn fetch_mounts(&self) -> Result<(), ClientError> {
        let _one = self.fetching.lock().await;
        let announced = self.stale.announced.load(Ordering::Acquire);
        // Whoever runs the cluster reads from its workers only, and is not given what they read with.
        let is_of_person = self.pool.own_role().is_some_and(Role::is_of_person);
        let table = if is_of_person {
            let ask = |mut stubs: Stubs| async move { stubs.cluster.list_mounts(ListMountsRequest {}).await };
            self.master.call_patiently("ListMounts", ask).await?
        } else {
            let ask = |mut stubs: Stubs| async move { stubs.cluster.get_credentials(ListMountsRequest {}).await };
            self.master.call_patiently("GetCredentials", ask).await?
        };
        let known = self.mounts();
        let mounts = Arc::new(Mounts::new(table, &known, &self.ufs, (!is_of_person).then_some(&self.master)));
        *self.mounts.write() = mounts;
        self.stale.fetched.store(announced, Ordering::Release);
        self.replaced.notify_one();
        Ok(())
    }

    async fn fetch_workers(&self) -> Result<(), ClientError> {
        let number = {
            let mut fetches = self.worker_fetches.lock();
            fetches.begun += 1;
            fetches.begun
        };
        let ask = |mut stubs: Stubs| async move { stubs.cluster.list_workers(ListWorkersRequest {}).await };
        let table = self.master.call_patiently("ListWorkers", ask).await?;
        let mut fetches = self.worker_fetches.lock();
        // What was asked for later has all that was announced before this was asked for. Epochs do not tell: a master
        // that is restored begins with an earlier one.
        if fetches.taken < number {
            fetches.taken = number;
            self.pool.set_workers(&table);
        }
        Ok(())
    }

    /// Fetches the worker table, unless it is hardly older. When the master does not answer at once, the old one stays.
    pub(crate) async fn renew_workers(&self) {
        {
            let mut renewed = self.renewed.lock();
            if renewed.is_some_and(|renewed| renewed.elapsed() < RENEW_AFTER) {
                return;
            }
            *renewed = Some(Instant::now());
        }
        if let Ok(Err(error)) = tokio::time::timeout(RENEW_WAIT, self.fetch_workers()).await {
            tracing::debug!("the worker table is not renewed: {error}");
        }
    }

    /// Whom to ask: see [`Metadata::on_frozen`](crate::Metadata::on_frozen).
    pub(crate) fn on_frozen(
        &self,
        settle: impl Fn(Vec<Arc<MountView>>) -> BoxFuture<'static, ()> + Send + Sync + 'static,
    ) {
        let _is_set = self.settle.set(Box::new(settle));
    }

    /// Epoch of the mount table by which all goes that is written; 0 before the first.
    pub(crate) fn settled(&self) -> u64 {
        *self.settled.borrow()
    }

    /// Completes when that is another.
    pub(crate) async fn settles_beyond(&self, epoch: u64) {
        let mut settled = self.settled.subscribe();
        // Its sender is here.
        let _never_gone = settled.wait_for(|settled| *settled != epoch).await;
    }

    /// Has all that is written go by each new mount table.
    async fn settle_tables(&self) {
        let mut frozen: HashMap<u32, u32> = HashMap::new();
        loop {
            let mounts = self.mounts();
            if mounts.epoch() != self.settled() {
                let now: Vec<(Arc<MountView>, u32)> =
                    mounts.iter().map(|mount| (mount.clone(), mount.frozen_below())).collect();
                let before = |mount: &MountView| frozen.get(&mount.id()).copied().unwrap_or_default();
                let grown = now.iter().filter(|(mount, below)| before(mount) < *below);
                let grown: Vec<Arc<MountView>> = grown.map(|(mount, _)| mount.clone()).collect();
                if let Some(settle) = self.settle.get().filter(|_| !grown.is_empty()) {
                    settle(grown).await;
                }
                for (mount, below) in &now {
                    mount.settle_here(*below);
                }
                frozen = now.iter().map(|(mount, below)| (mount.id(), *below)).collect();
                self.settled.send_replace(mounts.epoch());
            }
            self.replaced.notified().await;
        }
    }

    /// Fetches what was asked for until `stop`; `mounts_replaced` is called after every new mount table.
    pub(crate) async fn run_updater(&self, stop: CancellationToken, mounts_replaced: impl Fn(&Mounts)) {
        // What is being written may wait for the next table of workers.
        stop.run_until_cancelled(join(self.update_tables(mounts_replaced), self.settle_tables())).await;
    }

    async fn update_tables(&self, mounts_replaced: impl Fn(&Mounts)) {
        let mut backoff = backoff::MASTER.begin();
        loop {
            self.stale.wake.notified().await;
            if self.stale.mounts.swap(false, Ordering::Relaxed) {
                if self.fetch_mounts().await.is_ok() {
                    mounts_replaced(&self.mounts());
                } else {
                    self.stale.mounts.store(true, Ordering::Relaxed);
                }
            }
            if self.stale.workers.swap(false, Ordering::Relaxed) && self.fetch_workers().await.is_err() {
                self.stale.workers.store(true, Ordering::Relaxed);
            }
            if self.stale.mounts.load(Ordering::Relaxed) || self.stale.workers.load(Ordering::Relaxed) {
                backoff.wait().await;
                self.stale.wake.notify_one();
            } else {
                backoff.reset();
            }
        }
    }
}
