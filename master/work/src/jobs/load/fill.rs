//! Blocks on their way to the workers.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use cavern_conf::backoff;
use cavern_proto::master::{JobKind, Kind};
use tokio::sync::OwnedSemaphorePermit;
use tokio_util::task::TaskTracker;

use super::Loader;
use super::blocks::{File, Wanted};
use crate::error::WorkError;
use crate::jobs::running::RunningJob;
use crate::mounts::OpenMount;
use crate::workers::calls::{Failure, Filled};

/// Blocks and bytes of one request to a worker, at most.
const REQUEST_BLOCKS: usize = 32;
const REQUEST_BYTES: u64 = 64 << 20;
/// Attempts for a block.
const ATTEMPTS: u32 = 4;
const NO_WORKER: &str = "no worker is live: start one";

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
    wanted: Wanted,
    mount: Arc<OpenMount>,
    file: Arc<FileProgress>,
    /// Which of its replicas; only the first counts in the job's bytes.
    rank: usize,
    /// Its part of the job's bytes, wherever the content moves.
    bytes: u64,
}

impl Block {
    fn key(&self) -> &str {
        self.wanted.item.block.as_ref().map_or("", |block| block.key.as_str())
    }

    fn present(&self, job: &RunningJob, fetched_bytes: u64) {
        if self.rank == 0 {
            job.bytes_done(self.bytes, fetched_bytes);
        }
        self.file.block_ended(job, true);
    }

    /// So much of it is cached, where nothing is loaded.
    fn found(&self, job: &RunningJob, cached_bytes: u64) {
        job.bytes_done(cached_bytes.min(self.bytes), 0);
        self.file.block_ended(job, cached_bytes >= self.bytes);
    }

    fn failed(&self, job: &RunningJob, reason: &str) {
        job.failed(&format!("{}: {reason}", self.key()));
        self.file.block_ended(job, false);
    }

    fn replaced(&self, job: &RunningJob, reason: &str) {
        let remedy = match self.wanted.inode {
            0 => "the listing is older than that: `cv refresh` makes it anew",
            _ => "somebody else has changed the bucket: `cv refresh` takes that in",
        };
        self.failed(job, &format!("{reason}; {remedy}"));
    }
}

/// Collects blocks into requests, worker by worker.
pub struct Batches {
    loader: Loader,
    pub job: Arc<RunningJob>,
    waiting: HashMap<u64, Vec<Block>>,
    tasks: TaskTracker,
}

impl Batches {
    pub fn new(loader: Loader, job: Arc<RunningJob>) -> Self {
        Self { loader, job, waiting: HashMap::new(), tasks: TaskTracker::new() }
    }

    /// Has a file filled, or looked at.
    pub async fn add(&mut self, mount: &Arc<OpenMount>, file: File) -> Result<(), WorkError> {
        if self.job.kind == JobKind::LoadMetadata {
            self.job.add_file(0);
            self.job.file_done();
            return Ok(());
        }
        self.job.add_file(file.bytes);
        let (mut count, mut bytes, mut first) = (0u32, 0, None);
        for wanted in file.wanted(mount) {
            count += 1;
            bytes += u64::from(wanted.bytes);
            first = first.or(Some(wanted.content));
        }
        // The rest is where it belongs.
        self.job.bytes_done(file.bytes.saturating_sub(bytes), 0);
        let Some(content) = first else {
            self.job.file_done();
            return Ok(());
        };
        let placement = self.loader.filler.placement()?;
        // Readers ask the first replica.
        let replicas = if self.job.kind == JobKind::Check { 1 } else { mount.mount.replicas.max(1) as usize };
        let placed = placement.candidates(content, 0, replicas).iter().count();
        if placed == 0 {
            self.job.failed(NO_WORKER);
            return Ok(());
        }
        let blocks = count.saturating_mul(u32::try_from(placed).unwrap_or(1));
        let progress = Arc::new(FileProgress { blocks: AtomicU32::new(blocks), failed: AtomicBool::new(false) });
        for wanted in file.wanted(mount) {
            for (rank, worker) in placement.candidates(content, wanted.index, replicas).iter().enumerate() {
                let (wanted, mount, file) = (wanted.clone(), mount.clone(), progress.clone());
                let bytes = u64::from(wanted.bytes);
                self.push(worker, Block { wanted, mount, file, rank, bytes }).await;
            }
        }
        Ok(())
    }

    async fn push(&mut self, worker: u64, block: Block) {
        let most = REQUEST_BLOCKS.min(self.loader.concurrency as usize);
        let waiting = self.waiting.entry(worker).or_default();
        waiting.push(block);
        let bytes = || waiting.iter().map(|block| block.bytes).sum::<u64>();
        if waiting.len() >= most || bytes() >= REQUEST_BYTES {
            let blocks = std::mem::take(waiting);
            self.send(worker, blocks).await;
        }
    }

    /// Sends a request when as many blocks may be in flight, and does not wait for its end.
    async fn send(&self, worker: u64, blocks: Vec<Block>) {
        let count = u32::try_from(blocks.len()).unwrap_or(self.loader.concurrency).min(self.loader.concurrency);
        let Ok(permit) = self.loader.blocks.clone().acquire_many_owned(count).await else { return };
        let (loader, job) = (self.loader.clone(), self.job.clone());
        self.tasks.spawn(async move { loader.fill(&job, worker, blocks, permit).await });
    }

    /// Waits until all blocks have ended.
    pub async fn finish(&mut self) {
        for (worker, blocks) in std::mem::take(&mut self.waiting) {
            self.send(worker, blocks).await;
        }
        self.tasks.close();
        self.tasks.wait().await;
    }
}

/// Blocks that are to be tried again.
#[derive(Default)]
struct RetryBatch {
    /// Why the last of them is.
    error: String,
    /// By the workers that are asked.
    blocks: HashMap<u64, Vec<Block>>,
}

impl RetryBatch {
    fn add(&mut self, worker: u64, blocks: impl IntoIterator<Item = Block>, error: String) {
        self.blocks.entry(worker).or_default().extend(blocks);
        self.error = error;
    }
}

impl Loader {
    /// Fills blocks, and tries again what may work the second time.
    async fn fill(&self, job: &RunningJob, worker: u64, blocks: Vec<Block>, _permit: OwnedSemaphorePermit) {
        let mut again = RetryBatch::default();
        again.add(worker, blocks, String::new());
        let mut backoff = backoff::LOAD.begin();
        for attempt in 0..ATTEMPTS {
            let requests = std::mem::take(&mut again.blocks);
            let attempt = async {
                if attempt > 0 {
                    backoff.wait().await;
                }
                for (worker, blocks) in requests {
                    self.request(job, worker, blocks, &mut again).await;
                }
            };
            tokio::select! {
                () = attempt => {}
                () = job.cancel.cancelled() => return,
            }
            if again.blocks.is_empty() {
                return;
            }
        }
        for block in again.blocks.values().flatten() {
            block.failed(job, &again.error);
        }
    }

    async fn request(&self, job: &RunningJob, worker: u64, blocks: Vec<Block>, again: &mut RetryBatch) {
        if job.kind == JobKind::Check {
            let names = blocks.iter().map(|block| block.wanted.item.block.clone().unwrap_or_default()).collect();
            match self.filler.cached(worker, names).await {
                Ok(cached) => blocks.into_iter().zip(cached).for_each(|(block, bytes)| block.found(job, bytes)),
                Err(error) => again.add(worker, blocks, error),
            }
            return;
        }
        let items = blocks.iter().map(|block| block.wanted.item.clone()).collect();
        let filled = match self.filler.fill(worker, items).await {
            Ok(filled) => filled,
            Err(error) => return again.add(worker, blocks, error),
        };
        for (block, filled) in blocks.into_iter().zip(filled) {
            match filled {
                Filled::Present { fetched_bytes } => block.present(job, fetched_bytes),
                Filled::Failed { reason, failure: Failure::Transient } => again.add(worker, [block], reason),
                Filled::Failed { reason, failure: Failure::Final } => block.failed(job, &reason),
                Filled::Failed { reason, failure: Failure::Replaced } => {
                    if let Some((worker, block)) = self.follow(job, block, &reason).await {
                        again.add(worker, [block], reason);
                    }
                }
            }
        }
    }

    /// The bucket has not got the object of a block. The content of a file may have moved: gives the block that has it
    /// now, and its worker.
    async fn follow(&self, job: &RunningJob, block: Block, reason: &str) -> Option<(u64, Block)> {
        let inode = block.wanted.inode;
        if inode == 0 {
            block.replaced(job, reason);
            return None;
        }
        let read = self.lookups.reader.read(move |tables| {
            let record = tables.inode(inode)?.filter(|record| record.kind() == Kind::File && !record.unlinked);
            record.map(|record| File::of_content(tables, inode, record)).transpose()
        });
        let now = match read.await {
            Ok(file) => file.and_then(|file| file.block(&block.mount, block.wanted.index)),
            Err(error) => {
                block.failed(job, &error.to_string());
                return None;
            }
        };
        match now {
            // It has been written meanwhile, or is gone: nothing is left to be loaded.
            None => block.present(job, 0),
            Some(wanted) if wanted.content == block.wanted.content => block.replaced(job, reason),
            Some(wanted) => {
                let replicas = block.mount.mount.replicas.max(1) as usize;
                let placement = self.filler.placement();
                let candidates =
                    placement.map(|placement| placement.candidates(wanted.content, wanted.index, replicas));
                match candidates.map(|found| found.iter().nth(block.rank).or_else(|| found.first())) {
                    Ok(Some(worker)) => return Some((worker, Block { wanted, ..block })),
                    Ok(None) => block.failed(job, NO_WORKER),
                    Err(error) => block.failed(job, &error.to_string()),
                }
            }
        }
        None
    }
}
