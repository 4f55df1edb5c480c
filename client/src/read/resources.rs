//! What all open files share: ways to the bytes, what was read of them, and how much of each there may be.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use cavern_conf::Config;
use cavern_conf::process::LogLimit;
use cavern_net::WorkerPool;
use cavern_proto::data::BlockRef;
use cavern_proto::{BlockId, ContentId};
use tokio::runtime::Handle;
use tokio::sync::Semaphore;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::buffers::{BufferKey, Buffers, FetchClaim, Purpose, TrimPolicy};
use super::descriptors::{BlockFile, Descriptors};
use super::hedge::Hedge;
use super::outage_wait::OutageWaiters;
use super::span::Span;
use crate::error::ClientError;
use crate::memory::{Charge, MemoryBudget};
use crate::metadata::{Metadata, Node};
use crate::single_flight::SingleFlight;
use crate::stages::Stage;
use crate::stats::Stats;

/// Requests of read-ahead in flight, of all handles.
const AHEAD_REQUESTS: usize = 256;
/// Reads on threads of their own, by those that the process has for disks: half of them, which is enough for one disk's
/// queue. Beyond that reads go the usual way, and so do those that a disk fails, for which the others are.
const DISK_READS_PART: usize = 2;
/// What reads that are put together from several may take of the memory budget at most. They are rare: reads across the
/// boundary of two blocks.
const JOINING_BYTES: u64 = 16 << 20;
/// Buffers of the network that are kept for what comes next, at most, and at most this fraction of the memory budget.
const SPARE_BYTES: u64 = 16 << 20;
const SPARE_FRACTION: u64 = 8;

/// What all open files share.
pub(super) struct Core {
    pub metadata: Metadata,
    pub pool: Arc<WorkerPool>,
    pub stats: Arc<Stats>,
    pub limits: Limits,
    pub memory: Arc<MemoryBudget>,
    /// The part of it that is set apart for reads that are put together from several.
    joining: MemoryBudget,
    pub buffers: Arc<Buffers>,
    pub descriptors: Arc<Descriptors>,
    pub hedges: Hedges,
    pub outages: OutageWaiters,
    versions: Versions,
    pub background: Background,
}

/// How long a read may take, and how far it is read ahead.
pub(crate) struct Limits {
    /// All sources together.
    pub read: Duration,
    /// When the bucket is away or slow.
    pub bucket: Duration,
    /// One attempt at one worker.
    pub worker: Duration,
    /// Bytes; 0: no read-ahead.
    pub readahead_max: u64,
}

/// When a read is sent twice: each kind takes as long as it takes, and has its own share.
pub(super) struct Hedges {
    /// Of objects, which may have to be fetched from a bucket first.
    pub object: Hedge,
    /// Of blocks of fs-mode files, which their workers have.
    pub replica: Hedge,
}

/// What is known of versions that could not be read.
#[derive(Default)]
struct Versions {
    successors: SingleFlight<u64, Option<Arc<Node>>>,
    /// By errno.
    failures: LogLimit<i32>,
}

/// What runs beside reads, and how much of it at a time.
pub(super) struct Background {
    pub ahead_slots: Arc<Semaphore>,
    pub disk_slots: Arc<Semaphore>,
    pub tasks: TaskTracker,
    pub stop: CancellationToken,
    /// Event loops that call `read_now` run outside the runtime.
    pub runtime: Handle,
}

impl Core {
    pub(super) fn new(metadata: Metadata, pool: Arc<WorkerPool>, stats: Arc<Stats>, config: &Config) -> Arc<Self> {
        let conf = &config.client;
        let (tasks, runtime) = (TaskTracker::new(), Handle::current());
        let room = (conf.descriptor_cache, config.fuse.passthrough_files);
        let descriptors = Descriptors::new(room, stats.clone(), tasks.clone(), runtime.clone());
        let known = descriptors.clone();
        pool.on_evicted(move |worker, evicted| {
            known.release(evicted.blocks.iter().filter_map(|block| {
                let content = ContentId::from_slice(&block.content_id)?;
                let incarnation = block.incarnation;
                Some(BlockFile { block: BlockId { content, index: block.index }, worker, incarnation })
            }));
        });
        pool.keep_buffers(SPARE_BYTES.min(conf.memory_budget.bytes() / SPARE_FRACTION) as usize);
        let (memory, joining) = MemoryBudget::new(conf.memory_budget.bytes(), stats.clone()).set_apart(JOINING_BYTES);
        let buffers = Buffers::new(stats.clone());
        let kept = buffers.clone();
        memory.when_short(move |wanted| kept.make_room(wanted, TrimPolicy::Nothing));
        Arc::new(Self {
            metadata,
            pool,
            limits: Limits {
                read: conf.read_timeout.get(),
                bucket: conf.bucket_timeout.get(),
                worker: conf.worker_timeout.get(),
                readahead_max: if config.fuse.direct { 0 } else { conf.readahead_max.bytes() },
            },
            memory: Arc::new(memory),
            joining,
            buffers,
            descriptors,
            hedges: Hedges { object: Hedge::new(conf.hedge_percent), replica: Hedge::new(conf.hedge_percent) },
            outages: OutageWaiters::default(),
            versions: Versions::default(),
            background: Background {
                ahead_slots: Arc::new(Semaphore::new(AHEAD_REQUESTS)),
                disk_slots: Arc::new(Semaphore::new(config.budgets.client.blocking_threads / DISK_READS_PART)),
                tasks,
                stop: CancellationToken::new(),
                runtime,
            },
            stats,
        })
    }

    /// When a read that begins now ends: all sources together have `client.read_timeout`, and are tried again for
    /// `client.bucket_timeout` if the bucket is away or slow.
    pub(super) fn read_deadline(&self) -> Instant {
        Instant::now() + self.limits.read.max(self.limits.bucket)
    }

    /// A failed read or open. When the version is gone, the name is asked anew before the failure is returned, so that
    /// a caller that looks it up again finds the new version.
    pub(super) async fn failed_read(self: &Arc<Self>, node: &Arc<Node>, error: ClientError) -> ClientError {
        if error.is_version_gone() {
            let (core, stale) = (self.clone(), node.clone());
            // In the metadata cache from then on.
            let asked = async move {
                let current = core.metadata.current(&stale).await;
                let current = current.inspect_err(|error| tracing::debug!(file = %stale, "asked anew: {error}"));
                current.ok().filter(|current| current.inode != stale.inode)
            };
            Box::pin(self.versions.successors.join(node.inode, asked)).await;
        }
        self.failed(node, error)
    }

    /// Counts and logs a failed read or open.
    pub(super) fn failed(&self, node: &Arc<Node>, error: ClientError) -> ClientError {
        if !error.is_version_gone() {
            self.stats.read_errors.inc();
            if let Some(suppressed) = self.versions.failures.admit(error.errno()) {
                tracing::warn!(file = %node, suppressed, "read failed: {error}");
            }
            return error;
        }
        self.stats.stale_reads.inc();
        tracing::debug!(file = %node, "its version is gone: {error}");
        ClientError::Stale(node.to_string())
    }

    /// How long a read may wait for its turn to have memory: it is the process that is busy, no worker's deadline
    /// counts. Less than the whole read may take, so that the failure names its cause.
    pub(super) fn memory_wait(&self) -> Duration {
        self.limits.read * 9 / 10
    }

    /// Memory for a buffer. No read may wait here that holds memory already. What waits in buffers makes room for
    /// reads; for read-ahead only what has been read does.
    pub(super) async fn charge(&self, bytes: u64, purpose: Purpose, wait: Duration) -> Result<Charge, ClientError> {
        if let Some(charge) = self.memory.try_charge(bytes) {
            return Ok(charge);
        }
        if purpose == Purpose::Readahead {
            self.buffers.make_room(bytes, TrimPolicy::Left);
            return self.memory.try_charge(bytes).ok_or(ClientError::Memory { waited_ms: 0 });
        }
        let _turn = Stage::Queue.begin();
        self.memory.want(bytes).charge(wait).await
    }

    /// Memory for what is put together from several reads, which wait for theirs while this is held: it comes from a
    /// part that is set apart, for which no such read waits. Bounded by `client.read_timeout`, too.
    pub(super) async fn charge_joined(&self, bytes: u64, deadline: Instant) -> Result<Charge, ClientError> {
        let _turn = Stage::Queue.begin();
        let wait = deadline.saturating_duration_since(Instant::now()).min(self.limits.read);
        self.joining.want(bytes).charge(wait).await
    }

    /// Bytes out of a buffer go to whoever reads them.
    pub(super) fn given(&self, block: BufferKey, span: &Span) {
        self.stats.read_by_buffer(span.length());
        self.buffers.note_given(block, span);
    }

    /// Puts what was fetched where all who want it find it. While others wait for memory it does not stay longer than
    /// somebody waits for it; nor does anything else.
    pub(super) fn keep(&self, claim: FetchClaim, bytes: &Bytes) {
        claim.fulfil(bytes);
        self.give_up(TrimPolicy::Awaited);
    }

    /// Lets go of buffers, should anybody wait for memory.
    pub(super) fn give_up(&self, spare: TrimPolicy) {
        let wanted = self.memory.wanted_bytes();
        if wanted > 0 {
            self.buffers.make_room(wanted, spare);
        }
    }

    /// Has the worker look at chunks that are not what they should be: it drops those of an object that are wrong, and
    /// fetches them again.
    pub(super) fn report_corrupt(&self, worker: u64, block: BlockRef, chunks: Vec<u32>) {
        self.stats.corrupt_chunks.inc_by(chunks.len() as u64);
        let pool = self.pool.clone();
        self.background.spawn(self.background.stop.clone(), async move {
            if let Err(error) = pool.report_corrupt(worker, block, chunks).await {
                tracing::debug!("a corrupt chunk could not be reported: {error}");
            }
        });
    }

    /// Runs a piece of read-ahead in the background, unless `until` comes first; skipped when too many run.
    pub(super) fn in_background(
        &self,
        until: CancellationToken,
        work: impl Future<Output = Result<(), ClientError>> + Send + 'static,
    ) {
        let Ok(slot) = self.background.ahead_slots.clone().try_acquire_owned() else { return };
        self.background.spawn(until, async move {
            if let Err(error) = work.await {
                // The read that needs the bytes meets the error again, and reports it.
                tracing::debug!("read-ahead: {error}");
            }
            drop(slot);
        });
    }
}

impl Background {
    /// Runs work unless `until` comes first.
    pub(super) fn spawn(&self, until: CancellationToken, work: impl Future<Output = ()> + Send + 'static) {
        let task = async move { _ = until.run_until_cancelled(work).await };
        self.tasks.spawn_on(task, &self.runtime);
    }
}

/// The end of a read, which may have been what a buffer was kept for.
pub(super) struct SweepOnDrop<'a>(pub &'a Core);

impl Drop for SweepOnDrop<'_> {
    fn drop(&mut self) {
        self.0.give_up(TrimPolicy::Nothing);
    }
}
