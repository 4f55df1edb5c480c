//! Making what was written durable at the workers.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use cavern_conf::{Failpoint, FileUsage, backoff};
use cavern_proto::data::{BlockRef, SyncRequest};
use futures::future::{join, join_all};
use tokio::time::Instant;

use super::block::OpenBlock;
use super::blocks::is_worker_failure;
use super::file::FsFile;
use super::layout::{Layout, LocatedBlock};
use super::state::{Known, State};
use crate::error::ClientError;

/// What an fsync(2) of a file takes whose bytes alone are to be brought to disks of this host: no question to a worker,
/// and none to the master, which gets to know of the bytes with what else this session has answered.
pub struct LocalSync {
    content: Arc<FsFile>,
    blocks: Vec<(u32, Arc<OpenBlock>)>,
}

impl LocalSync {
    /// Returns when everything that was written before is durable. *Blocking*.
    ///
    /// # Errors
    /// Those of [`FsFile::sync`], which is tried when a disk fails.
    pub fn run(self) -> Result<(), ClientError> {
        Failpoint::SyncBegun.pass();
        let failed: Vec<_> = self.blocks.iter().filter(|(_, open)| !is_synced_here(open)).collect();
        let content = &self.content;
        content.shared.runtime.block_on(async {
            if failed.is_empty() {
                Failpoint::SyncedAtWorkers.pass();
                content.commit_written().await?;
                return content.shared.metadata.settle_names(content.inode).await;
            }
            for (_, open) in &failed {
                content.tell_of_failed_sync(open).await;
            }
            let indexes: Vec<u32> = failed.iter().map(|(index, _)| *index).collect();
            if let Some(layout) = content.state.lock().layout_mut() {
                layout.must_be_synced(&indexes);
            }
            content.sync().await
        })
    }
}

/// Whether the bytes of a block are on the disks of this host by now, in the files that its workers have.
fn is_synced_here(open: &OpenBlock) -> bool {
    open.replicas.iter().all(|replica| {
        let Some(file) = &replica.file else { return false };
        rustix::fs::fdatasync(&**file).is_ok() && FileUsage::of(file).is_ok_and(|used| used.links > 0)
    })
}

/// The workers that failed to sync blocks, with the reasons.
type Failures = HashMap<u64, ClientError>;

/// A block that is being synced.
struct BlockSync {
    index: u32,
    located: LocatedBlock,
    /// Those of its workers that have not synced it, and are not given up.
    unsynced_at: Vec<u64>,
}

impl BlockSync {
    fn new(index: u32, located: &LocatedBlock) -> Self {
        Self { index, located: located.clone(), unsynced_at: located.workers.clone() }
    }

    /// No worker has synced it.
    fn is_on_no_disk(&self) -> bool {
        self.unsynced_at.len() == self.located.workers.len()
    }
}

impl FsFile {
    /// A sync that asks nobody; `None` where it has to: use [`sync`](Self::sync). That is so unless the file is held
    /// and as long as the master knows, all workers of its blocks are on this host and have synced them once, and the
    /// session holds the delegation of its directory. Whatever becomes of the session, the master then counts the file
    /// as changed.
    pub fn local_sync(self: &Arc<Self>) -> Option<LocalSync> {
        let metadata = &self.shared.metadata;
        if !self.behind.is_drained() || !self.open_ref.is_taken() || !metadata.is_delegated(self.inode) {
            return None;
        }
        let mut state = self.state.lock();
        let State { known, seen, ends_marked, lost, .. } = &mut *state;
        let is_known = *ends_marked && lost.is_none() && *seen == self.kept.changes();
        let Known { layout, blocks, .. } = known.as_ref().filter(|known| is_known && known.layout.is_overwritten())?;
        let here = |index: u32| {
            let open = blocks.get(&index).filter(|open| open.is_local() && open.is_named.load(Relaxed))?;
            layout.accepts_at(index, open).then(|| (index, open.clone()))
        };
        let blocks = layout.to_be_synced()?.map(here).collect::<Option<Vec<_>>>()?;
        Some(LocalSync { content: self.clone(), blocks })
    }

    /// A worker cannot know that what it has in its page cache never got to its disk.
    async fn tell_of_failed_sync(&self, open: &OpenBlock) {
        for replica in &open.replicas {
            let (pool, wait) = (&self.shared.pool, self.shared.worker_timeout());
            let request = SyncRequest { blocks: Vec::new(), failed: vec![open.name.clone()] };
            let told = pool.sync(replica.worker, request, wait).await;
            if let Err(error) = told {
                let (inode, worker) = (self.inode, replica.worker);
                tracing::error!(inode, worker, "a worker does not know that a block could not be synced: {error}");
            }
        }
    }

    /// Returns when everything that was written before, by whomever, is on the disks of its workers, and known to the
    /// master. Those who ask while a sync is under way share the next one. Each is bounded by `client.read_timeout`.
    pub async fn sync(&self) -> Result<(), ClientError> {
        self.turns.syncs.join_round(self.sync_all()).await
    }

    async fn sync_all(&self) -> Result<(), ClientError> {
        self.behind.drain_checked().await?;
        let deadline = Instant::now() + self.shared.timeout();
        let blocks = self.use_known(|known| known.layout.begin_sync()).await?;
        Failpoint::SyncBegun.pass();
        // The disks of the workers and of the master work at the same time.
        let (committed, synced) = join(self.commit_synced(&blocks), self.sync_blocks(&blocks, deadline)).await;
        if let Err(error) = synced {
            if let Some(layout) = self.state.lock().layout_mut() {
                layout.sync_failed(&blocks);
            }
            return Err(error);
        }
        Failpoint::SyncedAtWorkers.pass();
        committed?;
        let has_urgent = |layout: &Layout| blocks.iter().any(|index| layout.is_urgent(*index));
        let gave_up = self.state.lock().layout().is_some_and(has_urgent);
        if gave_up {
            self.commit().await?;
            self.shared.metadata.settle(self.inode).await?;
        }
        if let Some(layout) = self.state.lock().layout_mut() {
            layout.synced();
        }
        self.note();
        Ok(())
    }

    /// Commits what is being synced, so that it is not dropped before it is; what was answered here is in the master's
    /// log then, too: the names that lead to the file are.
    async fn commit_synced(&self, blocks: &[u32]) -> Result<(), ClientError> {
        if blocks.is_empty() || self.is_committed() { self.commit().await } else { self.commit_and_keep_open().await }?;
        let is_marked = self.open_ref.is_taken() && self.state.lock().ends_marked;
        match is_marked {
            true => self.shared.metadata.settle_names(self.inode).await,
            false => self.shared.metadata.settle(self.inode).await,
        }
    }

    pub(super) async fn sync_blocks(&self, blocks: &[u32], deadline: Instant) -> Result<(), ClientError> {
        if blocks.is_empty() {
            return Ok(());
        }
        // What has been dropped by now the bucket has.
        self.pin_blocks().await?;
        let located = |known: &mut Known| -> Vec<BlockSync> {
            blocks.iter().filter_map(|index| Some(BlockSync::new(*index, known.layout.block(*index)?))).collect()
        };
        let mut syncs = self.use_known(located).await?;
        let mut patience = self.shared.timeout();
        loop {
            let failures = self.sync_round(&syncs, patience).await;
            if let Some(error) = failures.values().find(|error| !is_worker_failure(error)) {
                return Err(error.clone());
            }
            syncs.retain_mut(|block| {
                block.unsynced_at.retain(|worker| failures.contains_key(worker));
                let is_synced = block.unsynced_at.is_empty();
                if is_synced {
                    self.note_named(block.index, &block.located);
                }
                !is_synced
            });
            let failure = self.why_unsynced(&syncs, &failures)?;
            self.give_up_unsynced(&mut syncs, &failures);
            // What a worker has in its page cache survives its death: one that comes back will do.
            let Some(failure) = failure else { return Ok(()) };
            if !backoff::BLOCK.begin().wait_before(deadline).await {
                return Err(failure);
            }
            patience = deadline.saturating_duration_since(Instant::now()).max(self.shared.worker_timeout());
        }
    }

    /// Asks each worker once for all blocks that it has not synced, and returns those that fail, with the reasons. The
    /// only worker of a block is asked for as long as `patience`, others for `client.worker_timeout`.
    async fn sync_round(&self, syncs: &[BlockSync], patience: Duration) -> Failures {
        let mut at_workers: HashMap<u64, Vec<BlockRef>> = HashMap::new();
        for BlockSync { index, located, unsynced_at } in syncs {
            for worker in unsynced_at {
                at_workers.entry(*worker).or_default().push(self.name_of(*index, located.generation));
            }
        }
        let is_alone = |worker: u64| syncs.iter().any(|block| block.located.workers == [worker]);
        let asked = at_workers.into_iter().map(|(worker, blocks)| {
            let wait = if is_alone(worker) { patience } else { self.shared.worker_timeout() };
            let synced =
                self.asking(worker, self.shared.pool.sync(worker, SyncRequest { blocks, failed: Vec::new() }, wait));
            async move { (worker, synced.await) }
        });
        join_all(asked).await.into_iter().filter_map(|(worker, synced)| Some((worker, synced.err()?))).collect()
    }

    /// Why blocks are on the disk of no worker; `None` when there is no such block.
    ///
    /// # Errors
    /// The failure of a block that another round would not sync either.
    fn why_unsynced(&self, syncs: &[BlockSync], failures: &Failures) -> Result<Option<ClientError>, ClientError> {
        let mut first = None;
        for block in syncs.iter().filter(|block| block.is_on_no_disk()) {
            let of_workers = block.unsynced_at.iter().filter_map(|worker| failures.get(worker));
            let Some(failure) = of_workers.max_by_key(|failure| failure.is_transient_at_worker()) else { continue };
            let failure = self.unavailable_if_lost(block.index, failure.clone());
            if !failure.is_transient_at_worker() {
                return Err(failure);
            }
            first = first.or(Some(failure));
        }
        Ok(first)
    }

    /// Gives up the failed replicas of blocks that another worker has synced. Those stay whose worker is asked again,
    /// since it has a block that is on no disk.
    fn give_up_unsynced(&self, syncs: &mut Vec<BlockSync>, failures: &Failures) {
        let on_no_disk = syncs.iter().filter(|block| block.is_on_no_disk());
        let awaited: HashSet<u64> = on_no_disk.flat_map(|block| block.unsynced_at.iter().copied()).collect();
        let may_sync = |worker: &u64| {
            awaited.contains(worker) && failures.get(worker).is_some_and(ClientError::is_transient_at_worker)
        };
        syncs.retain_mut(|block| {
            if block.is_on_no_disk() {
                return true;
            }
            let (asked_again, lost): (Vec<u64>, Vec<u64>) = block.unsynced_at.iter().copied().partition(may_sync);
            if !lost.is_empty() {
                self.give_up_replicas(block.index, block.located.generation, &lost);
            }
            block.unsynced_at = asked_again;
            !block.unsynced_at.is_empty()
        });
    }

    /// All workers of a block have synced it.
    fn note_named(&self, index: u32, known: &LocatedBlock) {
        let state = self.state.lock();
        let open = state.known.as_ref().and_then(|state| state.blocks.get(&index));
        if let Some(open) = open.filter(|open| known.is_at(open.generation, &open.replicas)) {
            open.is_named.store(true, Relaxed);
        }
    }
}
