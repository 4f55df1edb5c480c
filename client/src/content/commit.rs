//! Making what was written known to the master, and durable at the workers.

use std::collections::HashMap;

use cavern_conf::Failpoint;
use cavern_proto::data::BlockRef;
use cavern_proto::master::mutation::Change;
use cavern_proto::master::{CommitContent, Extent};
use futures::future::{join, join_all};
use rustix::io::Errno;
use tokio::time::Instant;

use super::FsFile;
use super::blocks::is_worker_failure;
use super::layout::{COMMIT_BLOCKS, Layout, LocatedBlock, Uncommitted};
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
    /// Tells the master of what was written: new blocks, the new length. Returns at once when it knows.
    ///
    /// # Errors
    /// What could not be told is told with the next commit, `EDQUOT` among the reasons; but what was written to blocks
    /// that another client has cut off meanwhile is lost, and said to be once.
    pub async fn commit(&self) -> Result<(), ClientError> {
        if self.is_committed() {
            return Ok(());
        }
        self.behind.drain_checked().await?;
        self.commit_written().await
    }

    /// The same of what is at its workers by now.
    pub(super) async fn commit_written(&self) -> Result<(), ClientError> {
        let _one = self.committing.lock().await;
        self.tell_commit().await?;
        match self.state.lock().lost.take() {
            Some(cause) => Err(ClientError::OutcomeUnknown { cause }),
            None => Ok(()),
        }
    }

    /// The same while nobody waits for it, and only while the master is there. What was lost is told to whoever commits
    /// next.
    pub async fn commit_meanwhile(&self) -> Result<(), ClientError> {
        if !self.shared.metadata.has_session() {
            return Ok(());
        }
        // Somebody may be about to write to blocks that could be dropped as soon as the master knows them.
        self.hold().await?;
        let _one = self.committing.lock().await;
        self.tell_commit().await
    }

    /// What the master does not take any more is noted as lost, and not told again.
    async fn tell_commit(&self) -> Result<(), ClientError> {
        match self.try_commit().await {
            Err(ClientError::Refused { errno, reason }) if errno == Errno::STALE.raw_os_error() => {
                tracing::debug!(inode = self.inode, "a commit is based on an old layout: {reason}");
                self.load_now().await?;
            }
            Err(error) if error.errno() == Errno::DQUOT.raw_os_error() => {
                self.commit_blocks_only().await?;
                return Err(error);
            }
            result => return result,
        }
        let result = self.try_commit().await;
        if let Err(ClientError::Refused { reason, .. }) = &result {
            tracing::warn!(inode = self.inode, "what was written is given up: {reason}");
            let mut state = self.state.lock();
            (state.seen, state.lost) = (u64::MAX, Some(reason.clone()));
            if let Some(layout) = state.layout.as_mut() {
                layout.forget_uncommitted();
            }
            return Ok(());
        }
        result
    }

    /// The file must not grow as it would: it keeps what was written for another attempt, when there is room perhaps.
    /// That it was changed is told anyway, since others may see it, and so are its blocks, which are freed with it.
    async fn commit_blocks_only(&self) -> Result<(), ClientError> {
        let begun = self.state.lock().layout.as_mut().map(Layout::begin_blocks);
        let Some((uncommitted, made)) = begun else { return Ok(()) };
        let made = self.with_allocated(made);
        self.tell(CommitContent { inode: self.inode, grow_to: 0, made, changed: true }, uncommitted).await
    }

    async fn try_commit(&self) -> Result<(), ClientError> {
        // What is written meanwhile is not told at the moment, but all of what was there.
        loop {
            let begun = self.state.lock().layout.as_mut().and_then(Layout::begin_commit);
            let Some((uncommitted, made)) = begun else { return Ok(()) };
            let (is_last, made) = (made.len() < COMMIT_BLOCKS, self.with_allocated(made));
            let (inode, grow_to, changed) = (self.inode, uncommitted.grow_to, uncommitted.changed);
            self.tell(CommitContent { inode, grow_to, made, changed }, uncommitted).await?;
            if is_last {
                return Ok(());
            }
        }
    }

    /// The blocks with what each takes at a worker, where that is known here.
    fn with_allocated(&self, mut made: Vec<Extent>) -> Vec<Extent> {
        let open: Vec<_> = {
            let state = self.state.lock();
            made.iter().map(|extent| state.blocks.get(&extent.index).cloned()).collect()
        };
        for (extent, open) in made.iter_mut().zip(open) {
            let open = open.filter(|open| open.generation == extent.generation);
            extent.allocated = open.and_then(|open| open.allocated());
        }
        made
    }

    async fn tell(&self, commit: CommitContent, uncommitted: Uncommitted) -> Result<(), ClientError> {
        Failpoint::CommitBegun.pass();
        let told = commit.made.clone();
        let result = self.shared.metadata.change(Change::Commit(commit), 0, 0).await;
        Failpoint::CommitAnswered.pass();
        let mut state = self.state.lock();
        let Some(layout) = state.layout.as_mut() else { return result.map(drop) };
        match result {
            Ok(changed) => {
                let attr = changed.result.attributes.iter().find(|attr| attr.inode == self.inode);
                if !attr.is_some_and(|attr| layout.committed(&uncommitted, &told, attr)) {
                    state.seen = u64::MAX;
                }
                Ok(())
            }
            Err(error) => {
                layout.commit_failed(uncommitted);
                Err(error)
            }
        }
    }

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
        let (synced, committed) = join(self.sync_blocks(&blocks, deadline), self.commit()).await;
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
        if gave_up { self.commit().await } else { Ok(()) }
    }

    async fn sync_blocks(&self, blocks: &[u32], deadline: Instant) -> Result<(), ClientError> {
        if blocks.is_empty() {
            return Ok(());
        }
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
