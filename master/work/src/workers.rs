//! The worker table: who is registered (in the log), who is alive (in memory), and what the last heartbeats said.
//!
//! Heartbeats are not logged; only that a worker is lost or back. After a restart of the master everyone keeps the
//! state that the log has, and has `worker_timeout` to send a heartbeat.

pub mod calls;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use cavern_conf::host;
use cavern_conf::process::LogLimit;
use cavern_consensus::Proposer;
use cavern_proto::master::{
    FetchFailure, HeartbeatRequest, RegisterWorkerRequest, Worker, WorkerHits, WorkerState, WorkerTable,
};
use cavern_proto::record::command::Command;
use cavern_proto::record::{PutWorker, SetWorkerState, WorkerRecord};
use cavern_security::Identity;
use cavern_state::outcome::Registration;
use cavern_state::{Database, Tables, refusal_of_owner};
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::error::WorkError;
use crate::metrics::MasterMetrics;
use crate::pause_detector::{PauseDetector, excuse};

/// Bytes of any text that a worker reports, at most.
const TEXT_MAX: usize = 4096;
const DISKS_MAX: usize = 256;
/// Mounts that one worker may report as failing, and characters of what it says of each.
const FETCH_FAILURES_MAX: usize = 64;
const FETCH_FAILURE_CHARS: usize = 1000;
/// Mounts that one worker may say something of.
const HITS_MAX: usize = 1000;

/// Whether it is for `asker` to speak for a worker.
///
/// # Errors
/// [`WorkError::Denied`].
pub fn check_worker_owner(record: &WorkerRecord, asker: Option<&Identity>) -> Result<(), WorkError> {
    let refusal = asker.and_then(|asker| refusal_of_owner(record, &asker.name));
    refusal.map_or(Ok(()), |reason| Err(WorkError::Denied(reason)))
}

/// The workers of the cluster.
pub struct Workers {
    database: Arc<Database>,
    proposer: Proposer,
    timeout: Duration,
    /// How many workers may register with the same certificate.
    per_certificate: u32,
    cluster_id: String,
    /// Workers that have said nothing yet count as heard then.
    started: Mutex<Instant>,
    pause_detector: Mutex<PauseDetector>,
    reports: Mutex<HashMap<u64, Report>>,
    /// Some worker knows other masters than before, or is lost.
    progress: Notify,
    /// Who has registered a worker.
    registrations: LogLimit<Option<Identity>>,
    metrics: MasterMetrics,
}

/// The last heartbeat of a worker.
#[derive(Clone)]
struct Report {
    received_at: Instant,
    /// What it said, cut to what is kept of it.
    told: HeartbeatRequest,
    /// What its clock is ahead of this one's, where it says.
    clock_ahead_ms: Option<i64>,
}

impl Workers {
    pub fn new(
        database: Arc<Database>,
        proposer: Proposer,
        timeout: Duration,
        per_certificate: u32,
        cluster_id: String,
        metrics: MasterMetrics,
    ) -> Self {
        let (started, pause_detector) = (Mutex::new(Instant::now()), Mutex::new(PauseDetector::now()));
        let (reports, progress, registrations) = (Mutex::default(), Notify::new(), LogLimit::default());
        Self {
            database,
            proposer,
            timeout,
            per_certificate,
            cluster_id,
            started,
            pause_detector,
            reports,
            progress,
            registrations,
            metrics,
        }
    }

    /// Registers a worker, or renews what is known of it; returns its id and the table's epoch. `asker` says whose
    /// certificate it has shown, where connections are secured; nobody else speaks for it from then on.
    ///
    /// # Errors
    /// [`WorkError::Denied`] when it is the worker of another, [`WorkError::AlreadyExists`] when the same one is
    /// alive at another address, [`WorkError::Refused`] when it was removed, is of another cluster, or its certificate
    /// has as many workers as it may have.
    pub async fn register(
        &self,
        request: RegisterWorkerRequest,
        asker: Option<&Identity>,
    ) -> Result<(u64, u64), WorkError> {
        let worker = request.worker.unwrap_or_default();
        if request.uuid.len() != 16 {
            return Err(WorkError::Invalid(format!("a worker's uuid has 16 bytes, not {}", request.uuid.len())));
        }
        if !request.cluster_id.is_empty() && request.cluster_id != self.cluster_id {
            return Err(WorkError::Refused(format!(
                "the worker at {} belongs to cluster {}, this is cluster {}: its directories may hold the only copy of \
                 files, so see first that cluster.masters names the master of that cluster; for a worker of this \
                 cluster, name other directories in worker.dirs",
                worker.data_address, request.cluster_id, self.cluster_id
            )));
        }
        let texts = [&worker.data_address, &worker.socket_path, &worker.http_address, &worker.host, &worker.version];
        if worker.data_address.is_empty() || texts.iter().any(|text| text.len() > TEXT_MAX) {
            return Err(WorkError::Invalid("a worker has a data address, and no text of more than 4 KiB".into()));
        }
        self.check_is_one(&request.uuid, &worker.data_address, asker)?;
        let mut told = HeartbeatRequest {
            used_bytes: worker.used_bytes,
            capacity_bytes: worker.capacity_bytes,
            blocks: worker.blocks,
            disks: worker.disks.clone(),
            ..HeartbeatRequest::default()
        };
        told.disks.truncate(DISKS_MAX);
        // What changes with every heartbeat is not logged.
        let logged = Worker {
            used_bytes: 0,
            blocks: 0,
            last_heartbeat_age_ms: 0,
            disks: Vec::new(),
            counters: None,
            clock_ahead_ms: None,
            ..worker
        };
        let owner = asker.map_or_else(String::new, |asker| asker.name.clone());
        let (uuid, owner_max) = (Bytes::clone(&request.uuid), self.per_certificate);
        let put = PutWorker { uuid, worker: Some(logged.clone()), owner, owner_max };
        match self.proposer.propose(put).await? {
            Registration::Registered { id, epoch } => {
                let report = Report { received_at: Instant::now(), told, clock_ahead_ms: None };
                self.reports.lock().insert(id, report);
                if let Some(suppressed) = self.registrations.admit(asker.cloned()) {
                    tracing::info!(worker = id, address = logged.data_address, suppressed, "a worker has registered");
                }
                Ok((id, epoch))
            }
            Registration::Refused(reason) => Err(WorkError::Refused(reason)),
            Registration::Denied(reason) => Err(WorkError::Denied(reason)),
        }
    }

    /// Refuses a worker that is alive at another address: the directories of one of the two are a copy.
    fn check_is_one(&self, uuid: &[u8], address: &str, asker: Option<&Identity>) -> Result<(), WorkError> {
        let records = Tables::new(&self.database).workers()?;
        let Some(same) = records.into_iter().find(|record| record.uuid == uuid) else { return Ok(()) };
        check_worker_owner(&same, asker)?;
        let Some(Worker { id, data_address, .. }) = same.worker.filter(|known| known.data_address != address) else {
            return Ok(());
        };
        if self.silent_for(id) >= self.timeout {
            return Ok(());
        }
        Err(WorkError::AlreadyExists(format!(
            "worker {id} is alive at {data_address}, and the one at {address} says so, too: one has a copy of \
             the other's directories. If it is a new one, start it with empty ones; if worker {id} has moved, it is \
             taken in when nothing was heard from {data_address} for {:?}",
            self.timeout
        )))
    }

    /// Takes a heartbeat in; false when the worker is not known and must register: also one that has not done so yet
    /// under its own name, or from where it is.
    ///
    /// # Errors
    /// As [`Self::register`].
    pub async fn heartbeat(&self, mut told: HeartbeatRequest, asker: Option<&Identity>) -> Result<bool, WorkError> {
        let id = told.worker_id;
        let Some(record) = Tables::new(&self.database).worker(id)? else {
            self.reports.lock().remove(&id);
            return Ok(false);
        };
        check_worker_owner(&record, asker)?;
        if asker.is_some() && record.owner.is_empty() {
            return Ok(false);
        }
        let Some(worker) = record.worker else { return Ok(false) };
        if !told.data_address.is_empty() && told.data_address != worker.data_address {
            return Ok(false);
        }
        told.disks.truncate(DISKS_MAX);
        told.hits.truncate(HITS_MAX);
        told.fetch_failures = bounded(id, told.fetch_failures);
        let clock_ahead_ms = (told.wall_ns != 0).then(|| told.wall_ns.saturating_sub(host::wall_ns()) / 1_000_000);
        let group_epoch = told.group_epoch;
        let before = self.reports.lock().insert(id, Report { received_at: Instant::now(), told, clock_ahead_ms });
        if before.is_none_or(|before| before.told.group_epoch != group_epoch) {
            self.progress.notify_waiters();
        }
        if worker.state() != WorkerState::Live {
            self.set_state(id, WorkerState::Live).await?;
            tracing::info!(worker = id, address = worker.data_address, "a worker is back");
        }
        Ok(true)
    }

    /// What live workers say that they cannot fetch, by worker.
    pub fn fetch_failures(&self) -> Result<Vec<FetchFailure>, WorkError> {
        Ok(self.of_live(|_, report| report.told.fetch_failures.clone())?.concat())
    }

    /// What live workers were asked for since they started, mount by mount.
    pub fn hits(&self) -> Result<Vec<WorkerHits>, WorkError> {
        self.of_live(|worker_id, report| WorkerHits { worker_id, mounts: report.told.hits.clone() })
    }

    fn live(&self) -> Result<impl Iterator<Item = Worker> + use<>, WorkError> {
        let records = Tables::new(&self.database).workers()?;
        let workers = records.into_iter().filter_map(|record| record.worker);
        Ok(workers.filter(|worker| worker.state() == WorkerState::Live))
    }

    /// Something of the last heartbeat of each live worker.
    fn of_live<T>(&self, what: impl Fn(u64, &Report) -> T) -> Result<Vec<T>, WorkError> {
        let live = self.live()?;
        let reports = self.reports.lock();
        Ok(live.filter_map(|worker| Some(what(worker.id, reports.get(&worker.id)?))).collect())
    }

    /// For how long a worker has sent no heartbeat; never longer than since this master's start.
    pub fn silent_for(&self, worker: u64) -> Duration {
        let reports = self.reports.lock();
        reports.get(&worker).map_or_else(|| *self.started.lock(), |report| report.received_at).elapsed()
    }

    /// Nothing was heard from a worker for the timeout, for tests.
    #[doc(hidden)]
    pub fn hear_nothing_of(&self, worker: u64) {
        if let Some(report) = self.reports.lock().get_mut(&worker) {
            report.received_at -= self.timeout;
        }
    }

    /// Marks as lost each worker that has sent no heartbeat for the timeout. To be called more often than that.
    pub async fn expire(&self) -> Result<(), WorkError> {
        let missed = self.pause_detector.lock().missed(self.timeout / 2);
        if !missed.is_zero() {
            let mut reports = self.reports.lock();
            excuse(reports.values_mut().map(|report| &mut report.received_at), missed);
            excuse([&mut *self.started.lock()], missed);
        }
        let workers = Tables::new(&self.database).workers()?;
        let (mut live, mut lost) = (0, 0);
        for worker in workers.into_iter().filter_map(|record| record.worker) {
            if worker.state() != WorkerState::Live {
                lost += 1;
                continue;
            }
            if self.silent_for(worker.id) < self.timeout {
                live += 1;
                continue;
            }
            lost += 1;
            tracing::warn!(worker = worker.id, address = worker.data_address, "a worker is lost");
            self.set_state(worker.id, WorkerState::Lost).await?;
            self.progress.notify_waiters();
        }
        self.metrics.gauges.workers_live.set(live);
        self.metrics.gauges.workers_lost.set(lost);
        Ok(())
    }

    /// Returns when all live workers know the masters of an epoch, at the latest after `wait`. Gives the names of those
    /// that have not said so.
    pub async fn wait_group_known(&self, epoch: u64, wait: Duration) -> Result<Vec<String>, WorkError> {
        let deadline = Instant::now() + wait;
        loop {
            let changed = self.progress.notified();
            tokio::pin!(changed);
            // Registered before looking, so that no heartbeat in between is missed.
            changed.as_mut().enable();
            let unaware = self.unaware(epoch)?;
            if unaware.is_empty() || tokio::time::timeout_at(deadline, changed).await.is_err() {
                return Ok(unaware);
            }
        }
    }

    fn unaware(&self, epoch: u64) -> Result<Vec<String>, WorkError> {
        let live = self.live()?;
        let reports = self.reports.lock();
        let knows = |worker: &Worker| reports.get(&worker.id).is_some_and(|report| report.told.group_epoch >= epoch);
        Ok(live.filter(|worker| !knows(worker)).map(|worker| format!("worker {}", worker.data_address)).collect())
    }

    async fn set_state(&self, worker_id: u64, state: WorkerState) -> Result<(), WorkError> {
        let command = Command::WorkerState(SetWorkerState { worker_id, state: state as i32 });
        self.proposer.propose(command).await?;
        Ok(())
    }

    /// The table with what the last heartbeats said. The capacity is the registered one, which placement goes by and
    /// which moves the epoch when it changes.
    pub fn table(&self) -> Result<WorkerTable, WorkError> {
        let tables = Tables::new(&self.database);
        // Before the rows: a change in between gives a newer table an older number, and is fetched again.
        let epoch = tables.counters()?.workers_epoch;
        let records = tables.workers()?;
        let reports = self.reports.lock();
        let workers = records.into_iter().filter_map(|record| record.worker).map(|mut worker| {
            if let Some(report) = reports.get(&worker.id) {
                worker.used_bytes = report.told.used_bytes;
                worker.blocks = report.told.blocks;
                worker.last_heartbeat_age_ms =
                    i64::try_from(report.received_at.elapsed().as_millis()).unwrap_or(i64::MAX);
                worker.disks.clone_from(&report.told.disks);
                worker.counters = Some(report.told.counters.unwrap_or_default());
                worker.clock_ahead_ms = report.clock_ahead_ms;
                if worker.capacity_bytes == 0 {
                    worker.capacity_bytes = report.told.capacity_bytes;
                }
            } else {
                worker.last_heartbeat_age_ms = -1;
            }
            worker
        });
        Ok(WorkerTable { epoch, workers: workers.collect() })
    }
}

/// What a worker reports, as far as it is taken in.
fn bounded(worker_id: u64, mut reported: Vec<FetchFailure>) -> Vec<FetchFailure> {
    reported.truncate(FETCH_FAILURES_MAX);
    let cut = |text: String| match text.char_indices().nth(FETCH_FAILURE_CHARS) {
        Some((end, _)) => text[..end].to_owned(),
        None => text,
    };
    reported.into_iter().map(|failure| FetchFailure { worker_id, message: cut(failure.message), ..failure }).collect()
}
