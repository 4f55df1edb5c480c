//! Reading files: descriptors of local blocks first, then buffers, then the ladder of workers and the bucket.
//!
//! `location` says where a block is, one of an object or one of an fs-mode file, and all else is the same for both:
//! `reader` has the steps that every reader takes, `source_fallback` the choice of the source, `fetch` one attempt at
//! one source, `outage_wait` the wait for a bucket that cannot be reached. `file` is the handle of an object, and the
//! way to its descriptors; that of an fs-mode file is in `fs_file`. `descriptor_cache` and `buffers` hold what
//! was obtained, `block_files` keeps what others have opened among the descriptors, `kept_files` what the kernel knows
//! of blocks without their descriptors, `close_queue` lets go of what was evicted, `readahead` decides what to ask for
//! early, `hedge` when to ask twice; `local_file` reads from files of blocks of this host, `disk_read` does so on a
//! thread of its own.

mod block_files;
mod buffers;
mod close_queue;
mod descriptor_cache;
mod disk_read;
pub(crate) mod fetch;
mod file;
mod hedge;
mod kept_files;
pub(crate) mod local_file;
mod location;
mod outage_wait;
mod readahead;
mod reader;
mod source_fallback;
pub(crate) mod span;

use std::sync::Arc;
use std::time::Duration;

use cavern_conf::Config;
use cavern_conf::process::LogLimit;
use cavern_net::WorkerPool;
use cavern_proto::BlockId;
use tokio::sync::Semaphore;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::error::ClientError;
use crate::memory::{Charge, MemoryBudget};
use crate::metadata::{Metadata, Node};
use crate::mounts::ObjectVersion;
use crate::single_flight::SingleFlight;
use crate::stats::Stats;
use buffers::{Buffers, Purpose, TrimPolicy};
use close_queue::CloseQueue;
use descriptor_cache::DescriptorCache;
use hedge::Hedge;
use kept_files::{CONFIRM_EVERY, KeptFiles};
use outage_wait::OutageWaiters;

pub(crate) use block_files::{BlockFiles, WholeFile};
pub use disk_read::DiskRead;
pub use file::OpenFile;
pub(crate) use location::ReplicatedBlock;
pub(crate) use reader::{BlockReader, REMOTE_PIECE_BYTES};

/// Files up to this size are made present when they are opened.
const EAGER_BYTES: u64 = 1 << 20;
/// Requests of read-ahead in flight, of all handles.
const AHEAD_REQUESTS: usize = 256;
/// What reads that are put together from several may take of the memory budget at most. They are rare: reads across the
/// boundary of two blocks.
const JOINING_BYTES: u64 = 16 << 20;
/// Files that a worker is asked about at a time.
const CONFIRM_BATCH: usize = 4096;
/// Buffers of the network that are kept for what comes next, at most, and at most this fraction of the memory budget.
const SPARE_BYTES: u64 = 16 << 20;
const SPARE_FRACTION: u64 = 8;
/// How often idle descriptors and buffers are looked for.
const SWEEP_EVERY: Duration = Duration::from_secs(10);

/// Opens files. Cheap to clone.
#[derive(Clone)]
pub struct Files {
    core: Arc<Core>,
}

/// What all open files share.
struct Core {
    metadata: Metadata,
    pool: Arc<WorkerPool>,
    stats: Arc<Stats>,
    read_timeout: Duration,
    bucket_timeout: Duration,
    worker_timeout: Duration,
    /// 0: no read-ahead.
    readahead_max: u64,
    memory: Arc<MemoryBudget>,
    /// The part of it that is set apart for reads that are put together from several.
    joining: MemoryBudget,
    buffers: Arc<Buffers>,
    descriptors: Arc<DescriptorCache>,
    closing: Arc<CloseQueue>,
    /// Of reads of objects, which may have to be fetched from a bucket first.
    object_hedge: Hedge,
    /// Of reads of blocks of fs-mode files, which their workers have.
    replica_hedge: Hedge,
    outages: OutageWaiters,
    /// By errno.
    failures: LogLimit<i32>,
    successors: SingleFlight<u64, Option<Arc<Node>>>,
    ahead_slots: Arc<Semaphore>,
    disk_slots: Arc<Semaphore>,
    tasks: TaskTracker,
    stop: CancellationToken,
    /// Event loops that call `read_now` run outside the runtime.
    runtime: tokio::runtime::Handle,
}

impl Files {
    /// Inside a tokio runtime, where read-ahead will run.
    pub(crate) fn new(metadata: Metadata, pool: Arc<WorkerPool>, stats: Arc<Stats>, config: &Config) -> Self {
        let conf = &config.client;
        let kept = KeptFiles::new(config.fuse.passthrough_files, stats.clone());
        let descriptors = Arc::new(DescriptorCache::new(conf.descriptor_cache, kept, stats.clone()));
        let (tasks, runtime) = (TaskTracker::new(), tokio::runtime::Handle::current());
        let closing = CloseQueue::new(descriptors.clone(), tasks.clone(), runtime.clone());
        let listener = closing.clone();
        pool.on_evicted(move |evicted| {
            listener.evicted(evicted.blocks.iter().filter_map(|block| {
                let content = cavern_proto::ContentId::from_slice(&block.content_id)?;
                Some((BlockId { content, index: block.index }, block.incarnation))
            }));
        });
        pool.keep_buffers(SPARE_BYTES.min(conf.memory_budget.bytes() / SPARE_FRACTION) as usize);
        let budget = MemoryBudget::new(conf.memory_budget.bytes(), stats.clone());
        let (memory, joining) = budget.set_apart(JOINING_BYTES);
        let buffers = Buffers::new(stats.clone());
        let kept = buffers.clone();
        memory.when_short(move |wanted| kept.make_room(wanted, TrimPolicy::Nothing));
        let core = Core {
            metadata,
            pool,
            read_timeout: conf.read_timeout.get(),
            bucket_timeout: conf.bucket_timeout.get(),
            worker_timeout: conf.worker_timeout.get(),
            readahead_max: if config.fuse.direct { 0 } else { conf.readahead_max.bytes() },
            memory: Arc::new(memory),
            joining,
            buffers,
            descriptors,
            closing,
            object_hedge: Hedge::new(conf.hedge_percent),
            replica_hedge: Hedge::new(conf.hedge_percent),
            outages: OutageWaiters::default(),
            failures: LogLimit::default(),
            successors: SingleFlight::default(),
            ahead_slots: Arc::new(Semaphore::new(AHEAD_REQUESTS)),
            disk_slots: Arc::new(Semaphore::new(disk_read::AT_A_TIME)),
            tasks,
            stop: CancellationToken::new(),
            runtime,
            stats,
        };
        Self { core: Arc::new(core) }
    }

    /// Memory for bytes that are read in other ways than here, as soon as there is so much. Who holds some waits for
    /// none.
    pub(crate) async fn charge(&self, bytes: u64, deadline: Instant) -> Result<Charge, ClientError> {
        let wait = deadline.saturating_duration_since(Instant::now());
        self.core.charge(bytes, Purpose::Read, wait).await
    }

    /// Memory for what is put together from several reads, which wait for theirs while this is held.
    pub(crate) async fn charge_joined(&self, bytes: u64, deadline: Instant) -> Result<Charge, ClientError> {
        self.core.charge_joined(bytes, deadline).await
    }

    /// The memory budget of the process, for what is read and for all else.
    pub(crate) fn memory(&self) -> &Arc<MemoryBudget> {
        &self.core.memory
    }

    /// A reader of blocks of a file that may change.
    pub(crate) fn reader(&self) -> BlockReader {
        BlockReader::shared(self.core.clone())
    }

    /// Where files of blocks are kept open that are opened otherwise than here.
    pub(crate) fn block_files(&self) -> BlockFiles {
        BlockFiles::new(self.core.descriptors.clone(), self.core.closing.clone())
    }

    /// Opens a file for reading. A small file (up to 1 MiB) is made present at once, so that a version that is gone
    /// shows here as `Stale`; a larger one needs no I/O. When it is `Stale`, the name leads to the new version by then.
    /// Bounded as [`OpenFile::read`], and each question whether the version is current by `client.metadata_timeout`.
    pub async fn open(&self, node: &Arc<Node>) -> Result<Arc<OpenFile>, ClientError> {
        check_file(node)?;
        if node.is_always_checked() {
            let current = match self.core.metadata.current(node).await {
                // An answer, not a failure: the object is gone.
                Err(error @ ClientError::NotFound(_)) => return Err(error),
                current => current.map_err(|error| self.core.failed(node, error))?,
            };
            if current.inode != node.inode {
                return Err(ClientError::Stale(node.to_string()));
            }
        }
        match self.core.open(node).await {
            Ok(file) => Ok(Arc::new(file)),
            Err(error) => Err(self.core.failed_read(node, error).await),
        }
    }

    /// Opens without I/O where nothing has to be asked: an empty file, a small one that is present, a large one.
    /// `None`: use `open`.
    pub fn open_cached(&self, node: &Arc<Node>) -> Option<Arc<OpenFile>> {
        if check_file(node).is_err() || node.is_always_checked() {
            return None;
        }
        let file = OpenFile::new(self.core.clone(), node.clone()).ok()?;
        (node.size > EAGER_BYTES || file.is_present()).then(|| Arc::new(file))
    }

    /// A handle without any I/O: nothing is made present, and whether the version is still there shows at a read. Never
    /// checks a file with `consistency = always`.
    pub fn handle(&self, node: &Arc<Node>) -> Result<Arc<OpenFile>, ClientError> {
        check_file(node)?;
        OpenFile::new(self.core.clone(), node.clone()).map(Arc::new)
    }

    /// A handle on an object that is (a part of) the content of a file, without any I/O.
    pub(crate) fn open_object(&self, node: Arc<Node>, object: ObjectVersion) -> Arc<OpenFile> {
        Arc::new(OpenFile::of(self.core.clone(), node, Some(object)))
    }

    /// Closes what is idle, and lets go of what workers do not have any more, now and then, until `stop`.
    pub(crate) async fn sweep(&self, stop: CancellationToken) {
        let mut confirmed = Instant::now();
        loop {
            tokio::select! {
                () = tokio::time::sleep(SWEEP_EVERY) => {}
                () = stop.cancelled() => return,
            }
            self.core.closing.sweep().await;
            self.core.buffers.sweep();
            self.core.pool.trim_buffers();
            if confirmed.elapsed() >= CONFIRM_EVERY {
                stop.run_until_cancelled(self.confirm()).await;
                confirmed = Instant::now();
            }
        }
    }

    /// Asks workers about the files of theirs that are held, tells them which were read, and lets go of those that are
    /// not of their blocks any more. A worker that does not answer evicts nothing either, or is asked the next time.
    pub(crate) async fn confirm(&self) {
        for (worker, held) in self.core.descriptors.held() {
            for batch in held.chunks(CONFIRM_BATCH) {
                let files: Vec<_> = batch.iter().map(|file| (file.block, file.is_read)).collect();
                match self.core.pool.confirm(worker, &files).await {
                    Ok(now) => {
                        let gone = batch.iter().zip(now).filter(|(file, now)| *now != Some(file.incarnation));
                        self.core.closing.evicted(gone.map(|(file, _)| (file.block, file.incarnation)));
                    }
                    Err(error) => {
                        tracing::debug!(worker, "files of its blocks could not be confirmed: {error}");
                        break;
                    }
                }
            }
        }
    }

    /// Ends what runs in the background, and lets go of descriptors and buffers.
    pub(crate) async fn shutdown(&self) {
        self.core.stop.cancel();
        self.core.tasks.close();
        self.core.tasks.wait().await;
        self.core.descriptors.clear();
        self.core.buffers.clear();
    }
}

impl Core {
    /// Opens a file; a small one is made present.
    async fn open(self: &Arc<Self>, node: &Arc<Node>) -> Result<OpenFile, ClientError> {
        let file = OpenFile::new(self.clone(), node.clone())?;
        if node.size <= EAGER_BYTES {
            file.make_present().await?;
        }
        Ok(file)
    }

    /// What the name of a version that is gone leads to by now; in the metadata cache from then on. `None` when it
    /// leads nowhere or to the same version still, or when nobody answered.
    async fn successor(self: &Arc<Self>, node: &Arc<Node>) -> Option<Arc<Node>> {
        let (core, stale) = (self.clone(), node.clone());
        let asked = async move {
            let current = core.metadata.current(&stale).await;
            let current = current.inspect_err(|error| tracing::debug!(file = %stale, "asked anew: {error}"));
            current.ok().filter(|current| current.inode != stale.inode)
        };
        self.successors.join(node.inode, asked).await
    }

    /// A failed read or open. When the version is gone, the name is asked anew before the failure is returned, so that
    /// a caller that looks it up again finds the new version.
    async fn failed_read(self: &Arc<Self>, node: &Arc<Node>, error: ClientError) -> ClientError {
        if error.is_version_gone() {
            self.successor(node).await;
        }
        self.failed(node, error)
    }

    /// Counts and logs a failed read or open.
    fn failed(&self, node: &Arc<Node>, error: ClientError) -> ClientError {
        if !error.is_version_gone() {
            self.stats.read_errors.inc();
            if let Some(suppressed) = self.failures.admit(error.errno()) {
                tracing::warn!(file = %node, suppressed, "read failed: {error}");
            }
            return error;
        }
        self.stats.stale_reads.inc();
        tracing::debug!(file = %node, "its version is gone: {error}");
        ClientError::Stale(node.to_string())
    }
}

fn check_file(node: &Node) -> Result<(), ClientError> {
    if node.is_directory() { Err(ClientError::IsADirectory(node.to_string())) } else { Ok(()) }
}
