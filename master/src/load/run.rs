//! Runs jobs.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use bytes::Bytes;
use cavern_client::{Placement, WorkerPool};
use cavern_proto::content::block_length;
use cavern_proto::data::{self, BlockRef, open_request};
use cavern_proto::master::{Entry, Job, JobState, Kind};
use cavern_proto::record::command::Command;
use cavern_proto::{ContentId, record::InodeRecord};
use futures::future::BoxFuture;
use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::job::RunningJob;
use crate::MasterError;
use crate::listing::{Visit, Walk};
use crate::lookup::Lookups;
use crate::mounts::OpenMount;
use crate::raft::Proposer;
use crate::state::records::etag;
use crate::state::{Directory, Outcome};
use crate::workers::Workers;

/// Jobs that run at a time.
const JOBS_MAX: usize = 16;
/// Blocks and bytes of one request to a worker, at most.
const REQUEST_BLOCKS: usize = 32;
const REQUEST_BYTES: u64 = 64 << 20;
/// Time for one request: its bytes at a rate that any bucket reaches, retries of the worker included.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(120);
/// Attempts for a block, and the pause before the second.
const ATTEMPTS: u32 = 4;
const RETRY_PAUSE: Duration = Duration::from_millis(500);
/// How often progress goes into the log.
const SAVE_INTERVAL: Duration = Duration::from_secs(5);
/// Entries of a directory read at a time.
const PAGE_ENTRIES: usize = 1000;

/// What became of one block.
pub enum Filled {
    /// Present now; so many bytes of it came from the bucket.
    Present {
        fetched_bytes: u64,
    },
    Failed {
        reason: String,
        may_retry: bool,
    },
}

/// The way to the workers.
pub trait BlockFiller: Send + Sync + 'static {
    /// The live workers, for placement.
    fn placement(&self) -> Result<Arc<Placement>, MasterError>;

    /// Has a worker fill blocks; one result per block, in order. An error is about the worker: another try may help.
    fn fill(&self, worker: u64, items: Vec<open_request::Item>) -> BoxFuture<'_, Result<Vec<Filled>, String>>;
}

/// The workers over the data plane.
pub struct PooledWorkers {
    pool: Arc<WorkerPool>,
    workers: Arc<Workers>,
    cluster_id: String,
}

impl PooledWorkers {
    pub fn new(pool: Arc<WorkerPool>, workers: Arc<Workers>, cluster_id: String) -> Self {
        Self { pool, workers, cluster_id }
    }

    pub(crate) fn pool(&self) -> &WorkerPool {
        &self.pool
    }

    pub(crate) fn workers(&self) -> &Workers {
        &self.workers
    }
}

impl BlockFiller for PooledWorkers {
    fn placement(&self) -> Result<Arc<Placement>, MasterError> {
        let table = self.workers.table()?;
        if table.epoch != self.pool.placement().epoch() {
            self.pool.set_table(&self.cluster_id, &table);
        }
        Ok(self.pool.placement())
    }

    fn fill(&self, worker: u64, items: Vec<open_request::Item>) -> BoxFuture<'_, Result<Vec<Filled>, String>> {
        Box::pin(async move {
            let reply = self.pool.fill(worker, items, REQUEST_TIMEOUT).await.map_err(|error| error.to_string())?;
            let outcome = |item: data::open_reply::Item| match item.status() {
                data::Status::Ok => Filled::Present { fetched_bytes: item.fetched_bytes },
                status => Filled::Failed {
                    may_retry: !matches!(
                        status,
                        data::Status::NotFound | data::Status::VersionChanged | data::Status::Denied
                    ),
                    reason: reason(status, item.message),
                },
            };
            Ok(reply.items.into_iter().map(outcome).collect())
        })
    }
}

fn reason(status: data::Status, message: String) -> String {
    let message = if message.is_empty() { status.as_str_name().to_owned() } else { message };
    match status {
        data::Status::NotFound | data::Status::VersionChanged => {
            format!("{message}; the listing is older than that: `cv refresh` makes it anew")
        }
        _ => message,
    }
}

/// All load jobs.
pub struct Loads {
    lookups: Lookups,
    proposer: Proposer,
    filler: Arc<dyn BlockFiller>,
    /// Blocks in flight, over all jobs.
    blocks: Arc<Semaphore>,
    concurrency: u32,
    running: Mutex<HashMap<u64, Arc<RunningJob>>>,
    tasks: TaskTracker,
    stop: CancellationToken,
}

impl Loads {
    pub fn new(lookups: Lookups, proposer: Proposer, filler: Arc<dyn BlockFiller>, concurrency: usize) -> Arc<Self> {
        let concurrency = u32::try_from(concurrency.clamp(1, 1 << 16)).unwrap_or(1);
        Arc::new(Self {
            lookups,
            proposer,
            filler,
            blocks: Arc::new(Semaphore::new(concurrency as usize)),
            concurrency,
            running: Mutex::default(),
            tasks: TaskTracker::new(),
            stop: CancellationToken::new(),
        })
    }

    /// Goes on with the jobs that the log says are running.
    pub async fn resume(self: &Arc<Self>) -> Result<(), MasterError> {
        for job in self.lookups.listings.read(|tables| tables.jobs()).await? {
            if job.state() == JobState::Running {
                tracing::info!(job = job.id, path = job.path, "a load job goes on");
                // The walk begins anew, and so does its count.
                let anew =
                    Job { id: job.id, path: job.path, state: job.state, started_ns: job.started_ns, ..Job::default() };
                self.spawn(anew);
            }
        }
        Ok(())
    }

    /// Records a new job and starts it.
    pub async fn submit(self: &Arc<Self>, path: &str) -> Result<Job, MasterError> {
        self.lookups.resolve(path).await?;
        if self.running.lock().len() >= JOBS_MAX {
            return Err(MasterError::Overloaded(format!(
                "{JOBS_MAX} load jobs run already: wait for one, or cancel one"
            )));
        }
        let started_ns = self.lookups.listings.clock().now_ns();
        let mut job = Job { path: path.to_owned(), state: JobState::Running as i32, started_ns, ..Job::default() };
        match self.proposer.propose(Command::PutJob(job.clone())).await? {
            Outcome::Job(id) => job.id = id,
            other => return Err(MasterError::Refused(format!("a job was answered by {other:?}"))),
        }
        self.spawn(job.clone());
        Ok(job)
    }

    pub async fn get(&self, id: u64) -> Result<Job, MasterError> {
        if let Some(running) = self.running.lock().get(&id) {
            return Ok(running.snapshot());
        }
        let job = self.lookups.listings.read(move |tables| tables.job(id)).await?;
        job.ok_or_else(|| MasterError::NotFound(format!("there is no job {id}: cv report lists the jobs")))
    }

    pub async fn list(&self) -> Result<Vec<Job>, MasterError> {
        let jobs = self.lookups.listings.read(|tables| tables.jobs()).await?;
        let running = self.running.lock();
        Ok(jobs.into_iter().map(|job| running.get(&job.id).map_or(job, |running| running.snapshot())).collect())
    }

    /// Cancels a job, and answers when the log says so; one that has ended stays as it is.
    pub async fn cancel(&self, id: u64) -> Result<Job, MasterError> {
        let running = self.running.lock().get(&id).cloned();
        if let Some(running) = running {
            running.cancel.cancel();
            running.recorded.cancelled().await;
        }
        self.get(id).await
    }

    /// Stops what runs and waits for it; the jobs go on after a restart.
    pub async fn shutdown(&self) {
        self.stop.cancel();
        self.tasks.close();
        self.tasks.wait().await;
    }

    fn spawn(self: &Arc<Self>, job: Job) {
        let job = Arc::new(RunningJob::new(job, self.stop.child_token()));
        self.running.lock().insert(job.id, job.clone());
        let loads = self.clone();
        self.tasks.spawn(async move {
            tokio::select! {
                result = loads.run(&job) => if let Err(error) = result {
                    job.failed(&error.to_string());
                },
                () = job.cancel.cancelled() => {}
            }
            if !loads.stop.is_cancelled() {
                let ended = job.end(loads.lookups.listings.clock().now_ns());
                tracing::info!(job = ended.id, path = ended.path, errors = ended.errors, "a load job ended");
                if let Err(error) = loads.proposer.propose(Command::PutJob(ended)).await {
                    tracing::warn!(job = job.id, "the end of a load job is not recorded: {error}");
                }
            }
            loads.running.lock().remove(&job.id);
            job.recorded.cancel();
        });
    }

    async fn run(self: &Arc<Self>, job: &Arc<RunningJob>) -> Result<(), MasterError> {
        let save = async {
            loop {
                tokio::time::sleep(SAVE_INTERVAL).await;
                // The next one, or the end, makes up for one that fails.
                let _ = self.proposer.propose(Command::PutJob(job.snapshot())).await;
            }
        };
        tokio::select! {
            result = self.load(job) => result,
            () = save => Ok(()),
        }
    }

    async fn load(self: &Arc<Self>, job: &Arc<RunningJob>) -> Result<(), MasterError> {
        let path = job.snapshot().path;
        let mut entry = self.lookups.resolve(&path).await?;
        let attr = entry.attr.unwrap_or_default();
        let mut batches =
            Batches { loads: self.clone(), job: job.clone(), waiting: HashMap::new(), tasks: TaskTracker::new() };
        if attr.kind() == Kind::Directory {
            let mut walk = Walk::new(self.lookups.listings.clone(), attr.inode, Visit::Fresh, true);
            while let Some(visited) = walk.next().await {
                match visited {
                    Ok((inode, _)) => self.load_directory(&mut batches, inode).await?,
                    Err((_, error)) => job.failed(&error.to_string()),
                }
            }
        } else {
            // Known from the listing of its directory, which is renewed like those of a walk.
            self.lookups.touch(&[entry.parent], true).await?;
            entry = self.lookups.resolve(&path).await?;
            self.load_file(&mut batches, &entry).await?;
        }
        job.walked();
        batches.finish().await;
        Ok(())
    }

    async fn load_directory(&self, batches: &mut Batches, inode: u64) -> Result<(), MasterError> {
        let listings = &self.lookups.listings;
        let Some(directory) = listings.read(move |tables| tables.directory(inode)).await? else { return Ok(()) };
        if directory.mount_id == 0 {
            return Ok(());
        }
        let mount = self.lookups.mounts.get(directory.mount_id)?;
        let mut after: Option<Bytes> = None;
        loop {
            let from = after.take();
            let (page, end) = listings.read(move |tables| tables.page(inode, from.as_deref(), PAGE_ENTRIES)).await?;
            after = page.last().map(|(name, _, _)| name.clone());
            for (name, _, record) in page {
                if record.kind() == Kind::File {
                    let file = File::of_record(&mount, &directory, &name, &record);
                    batches.add(&mount, file).await?;
                }
            }
            if end || after.is_none() {
                return Ok(());
            }
        }
    }

    async fn load_file(&self, batches: &mut Batches, entry: &Entry) -> Result<(), MasterError> {
        let mount = self.lookups.mounts.get(entry.mount_id)?;
        let length = entry.attr.unwrap_or_default().size;
        batches.add(&mount, File { key: entry.key.clone(), etag: entry.etag.clone(), length }).await
    }
}

/// One version of one object.
struct File {
    key: String,
    etag: String,
    length: u64,
}

impl File {
    fn of_record(mount: &OpenMount, directory: &Directory, name: &[u8], record: &InodeRecord) -> Self {
        let prefix = directory.key_prefix(mount.ufs.prefix()).unwrap_or_default();
        Self { key: format!("{prefix}{}", String::from_utf8_lossy(name)), etag: etag(record), length: record.size }
    }
}

/// What is left of a file, shared by its blocks.
struct FileProgress {
    blocks: AtomicU32,
    failed: AtomicBool,
}

impl FileProgress {
    fn block_ended(&self, job: &RunningJob, is_present: bool) {
        if !is_present {
            self.failed.store(true, Ordering::Relaxed);
        }
        if self.blocks.fetch_sub(1, Ordering::AcqRel) == 1 && !self.failed.load(Ordering::Relaxed) {
            job.file_done();
        }
    }
}

/// A block on its way to a worker.
struct Block {
    item: open_request::Item,
    bytes: u64,
    file: Arc<FileProgress>,
    /// Only the first replica counts in the job's bytes.
    is_first: bool,
}

/// Collects blocks into requests, worker by worker.
struct Batches {
    loads: Arc<Loads>,
    job: Arc<RunningJob>,
    waiting: HashMap<u64, Vec<Block>>,
    tasks: TaskTracker,
}

impl Batches {
    async fn add(&mut self, mount: &OpenMount, file: File) -> Result<(), MasterError> {
        self.job.add_file(file.length);
        if file.length == 0 {
            self.job.file_done();
            return Ok(());
        }
        let block_size = mount.mount.block_size;
        let content = ContentId::of_object(mount.ufs.store_id(), &file.key, &file.etag, file.length, block_size);
        let count = u32::try_from(file.length.div_ceil(block_size)).unwrap_or(u32::MAX);
        let placement = self.loads.filler.placement()?;
        let replicas = mount.mount.replicas.max(1) as usize;
        let placed = placement.candidates(content, 0, replicas).iter().count();
        if placed == 0 {
            self.job.failed("no worker is live: start one");
            return Ok(());
        }
        let blocks = count.saturating_mul(u32::try_from(placed).unwrap_or(1));
        let progress = Arc::new(FileProgress { blocks: AtomicU32::new(blocks), failed: AtomicBool::new(false) });
        for index in 0..count {
            let length = block_length(file.length, block_size, index);
            let block = BlockRef {
                content_id: Bytes::copy_from_slice(content.as_bytes()),
                index,
                block_size,
                mount_id: mount.id(),
                key: file.key.clone(),
                etag: file.etag.clone(),
                object_length: file.length,
                data: false,
            };
            for (rank, worker) in placement.candidates(content, index, replicas).iter().enumerate() {
                let item =
                    open_request::Item { block: Some(block.clone()), want: vec![data::Range { offset: 0, length }] };
                let block = Block { item, bytes: u64::from(length), file: progress.clone(), is_first: rank == 0 };
                self.push(worker, block).await;
            }
        }
        Ok(())
    }

    async fn push(&mut self, worker: u64, block: Block) {
        let most = REQUEST_BLOCKS.min(self.loads.concurrency as usize);
        let waiting = self.waiting.entry(worker).or_default();
        waiting.push(block);
        if waiting.len() >= most || waiting.iter().map(|block| block.bytes).sum::<u64>() >= REQUEST_BYTES {
            let blocks = std::mem::take(waiting);
            self.send(worker, blocks).await;
        }
    }

    /// Sends a request when as many blocks may be in flight, and does not wait for its end.
    async fn send(&self, worker: u64, blocks: Vec<Block>) {
        let count = u32::try_from(blocks.len()).unwrap_or(self.loads.concurrency).min(self.loads.concurrency);
        let Ok(permit) = self.loads.blocks.clone().acquire_many_owned(count).await else { return };
        let (loads, job) = (self.loads.clone(), self.job.clone());
        self.tasks.spawn(async move { fill(&loads, &job, worker, blocks, permit).await });
    }

    async fn finish(&mut self) {
        for (worker, blocks) in std::mem::take(&mut self.waiting) {
            self.send(worker, blocks).await;
        }
        self.tasks.close();
        self.tasks.wait().await;
    }
}

/// Fills blocks, and tries again what may work the second time.
async fn fill(loads: &Loads, job: &RunningJob, worker: u64, mut blocks: Vec<Block>, _permit: OwnedSemaphorePermit) {
    let mut last_error = String::new();
    for attempt in 0..ATTEMPTS {
        if attempt > 0 {
            let pause = RETRY_PAUSE * (1 << (attempt - 1));
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                () = job.cancel.cancelled() => return,
            }
        }
        let items = blocks.iter().map(|block| block.item.clone()).collect();
        let answer = tokio::select! {
            answer = loads.filler.fill(worker, items) => answer,
            () = job.cancel.cancelled() => return,
        };
        let filled = match answer {
            Ok(filled) => filled,
            Err(error) => {
                last_error = error;
                continue;
            }
        };
        let mut again = Vec::new();
        for (block, filled) in blocks.into_iter().zip(filled) {
            match filled {
                Filled::Present { fetched_bytes } => {
                    if block.is_first {
                        job.bytes_done(block.bytes, fetched_bytes);
                    }
                    block.file.block_ended(job, true);
                }
                Filled::Failed { reason, may_retry: true } => {
                    last_error = reason;
                    again.push(block);
                }
                Filled::Failed { reason, may_retry: false } => {
                    let key = block.item.block.as_ref().map_or("", |block| block.key.as_str());
                    job.failed(&format!("{key}: {reason}"));
                    block.file.block_ended(job, false);
                }
            }
        }
        blocks = again;
        if blocks.is_empty() {
            return;
        }
    }
    for block in blocks {
        let key = block.item.block.as_ref().map_or("", |block| block.key.as_str());
        job.failed(&format!("{key}: {last_error}"));
        block.file.block_ended(job, false);
    }
}
