//! Making what was written durable at the workers.

use std::collections::HashMap;

use cavern_conf::Failpoint;
use cavern_proto::data::BlockRef;
use futures::future::{join, join_all};
use tokio::time::Instant;

use super::FsFile;
use super::blocks::is_worker_failure;
use super::layout::{Layout, LocatedBlock};
use super::read::{PAUSE, is_transient};
use crate::error::ClientError;

/// How long a worker is asked.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum RetryPolicy {
    /// There are others.
    OneAttempt,
    UntilDeadline,
}

impl FsFile {
    /// Returns when everything that was written before is on the disks of its workers, and known to the master. Those
    /// who ask while a sync is under way share the next one. Each is bounded by `client.read_timeout`.
    pub async fn sync(&self) -> Result<(), ClientError> {
        self.syncs.join_round(self.sync_all()).await
    }

    async fn sync_all(&self) -> Result<(), ClientError> {
        self.behind.drain_checked().await?;
        let deadline = Instant::now() + self.shared.timeout;
        let blocks = self.state.lock().layout.as_mut().map_or_else(Vec::new, |layout| layout.begin_sync());
        Failpoint::SyncBegun.pass();
        // The disks of the workers and of the master work at the same time.
        let (committed, synced) = join(self.commit_synced(&blocks), self.sync_blocks(&blocks, deadline)).await;
        if let Err(error) = synced {
            if let Some(layout) = self.state.lock().layout.as_mut() {
                layout.sync_failed(&blocks);
            }
            return Err(error);
        }
        Failpoint::SyncedAtWorkers.pass();
        committed?;
        let has_urgent = |layout: &Layout| blocks.iter().any(|index| layout.is_urgent(*index));
        let gave_up = self.state.lock().layout.as_ref().is_some_and(has_urgent);
        if gave_up {
            self.commit().await?;
            self.shared.metadata.settle(self.inode).await?;
        }
        if let Some(layout) = self.state.lock().layout.as_mut() {
            layout.synced();
        }
        self.note();
        Ok(())
    }

    /// Commits what is being synced, so that it is not dropped before it is; what was answered here is in the master's
    /// log then, too: the names that lead to the file are.
    async fn commit_synced(&self, blocks: &[u32]) -> Result<(), ClientError> {
        if blocks.is_empty() || self.is_committed() { self.commit().await } else { self.commit_and_hold().await }?;
        self.shared.metadata.settle(self.inode).await
    }

    async fn sync_blocks(&self, blocks: &[u32], deadline: Instant) -> Result<(), ClientError> {
        if blocks.is_empty() {
            return Ok(());
        }
        // What has been dropped by now the bucket has.
        self.pin_blocks().await?;
        self.use_layout(|_, _| ()).await?;
        let mut at_workers: HashMap<u64, Vec<BlockRef>> = HashMap::new();
        let known: Vec<_> = {
            let state = self.state.lock();
            let layout = state.layout.as_ref();
            blocks.iter().filter_map(|index| Some((*index, layout?.block(*index)?.clone()))).collect()
        };
        for (index, known) in &known {
            for worker in &known.workers {
                at_workers.entry(*worker).or_default().push(self.name_of(*index, known.generation));
            }
        }
        let is_alone = |worker: &u64| known.iter().any(|(_, known)| known.workers == [*worker]);
        let syncs = at_workers.into_iter().map(|(worker, names)| {
            let patience = if is_alone(&worker) { RetryPolicy::UntilDeadline } else { RetryPolicy::OneAttempt };
            async move { (worker, self.sync_at(worker, names, patience, deadline).await) }
        });
        let failed: HashMap<u64, ClientError> =
            join_all(syncs).await.into_iter().filter_map(|(worker, result)| Some((worker, result.err()?))).collect();
        for (index, known) in known {
            let lost: Vec<u64> = known.workers.iter().copied().filter(|worker| failed.contains_key(worker)).collect();
            let Some(error) = lost.first().and_then(|worker| failed.get(worker)) else { continue };
            if !is_worker_failure(error) {
                return Err(error.clone());
            }
            if lost.len() < known.workers.len() {
                self.give_up_replicas(index, known.generation, &lost);
                continue;
            }
            // All of them, or the only one, which has been waited for: one that comes back will do.
            self.sync_any(index, &known, error.clone(), deadline).await?;
        }
        Ok(())
    }

    /// Syncs a block at whichever of its workers answers first again.
    async fn sync_any(
        &self,
        index: u32,
        known: &LocatedBlock,
        mut failure: ClientError,
        deadline: Instant,
    ) -> Result<(), ClientError> {
        loop {
            failure = self.unavailable_if_lost(index, failure);
            if !is_transient(&failure) || Instant::now() + PAUSE >= deadline {
                return Err(failure);
            }
            tokio::time::sleep(PAUSE).await;
            let names = || vec![self.name_of(index, known.generation)];
            let syncs = known.workers.iter().map(|worker| async {
                (*worker, self.sync_at(*worker, names(), RetryPolicy::OneAttempt, deadline).await)
            });
            let (done, lost): (Vec<_>, Vec<_>) =
                join_all(syncs).await.into_iter().partition(|(_, synced)| synced.is_ok());
            if !done.is_empty() {
                let lost: Vec<u64> = lost.into_iter().map(|(worker, _)| worker).collect();
                if !lost.is_empty() {
                    self.give_up_replicas(index, known.generation, &lost);
                }
                return Ok(());
            }
            if let Some((_, Err(error))) = lost.into_iter().next() {
                failure = error;
            }
        }
    }

    /// Syncs blocks at one worker. What it has in its page cache survives its death, so the only one is worth waiting
    /// for.
    async fn sync_at(
        &self,
        worker: u64,
        names: Vec<BlockRef>,
        patience: RetryPolicy,
        deadline: Instant,
    ) -> Result<(), ClientError> {
        let (first, wait) = (
            names.first().map_or(0, |name| name.index),
            match patience {
                RetryPolicy::OneAttempt => self.shared.worker_timeout,
                RetryPolicy::UntilDeadline => self.shared.timeout,
            },
        );
        loop {
            let synced = self.asking(worker, self.shared.pool.sync(worker, names.clone(), wait)).await;
            let Err(error) = synced else { return Ok(()) };
            let error = self.unavailable_if_lost(first, error);
            if patience == RetryPolicy::OneAttempt || !is_transient(&error) || Instant::now() + PAUSE >= deadline {
                return Err(error);
            }
            tokio::time::sleep(PAUSE).await;
        }
    }
}
