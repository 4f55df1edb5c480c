//! Making what was written known to the master.

use std::time::Duration;

use cavern_conf::Failpoint;
use cavern_proto::master::mutation::Change;
use cavern_proto::master::{CommitContent, User};
use futures::future::join;
use futures::stream::{self, StreamExt as _};
use rustix::io::Errno;

use super::file::FsFile;
use super::layout::{CommitBatch, Layout};
use super::open_file_table::OpenFileTable;
use crate::error::ClientError;

/// What is written is known to the master so soon, if nobody closes or syncs it before. Sooner than
/// `master.persist_delay` usually is, so that a file which is being written does not look as if it had come to rest.
const COMMIT_EVERY: Duration = Duration::from_secs(3);
/// Files that are committed at a time.
const COMMITS: usize = 64;

impl OpenFileTable {
    /// Commits what has been written to files that are open, every [`COMMIT_EVERY`]; closes those that stayed open, and
    /// gives back blocks that nobody has needed.
    pub(crate) async fn run_committer(&self) {
        loop {
            tokio::time::sleep(COMMIT_EVERY).await;
            self.commit_all().await;
            self.shared.metadata.end_close_grace(COMMIT_EVERY);
            self.return_blocks(COMMIT_EVERY).await;
        }
    }

    /// Commits what has been written to files that are open.
    pub(crate) async fn commit_all(&self) {
        let commits = self.uncommitted().into_iter().map(|file| async move {
            if let Err(error) = file.commit_in_background().await {
                tracing::debug!(inode = file.inode(), "not committed for now: {error}");
            }
        });
        stream::iter(commits).buffer_unordered(COMMITS).collect::<()>().await;
    }
}

impl FsFile {
    /// Has the master judge whether a user may write to the file; what is committed until it is closed here for the
    /// last time is checked no more, unless the session ends meanwhile. Then it is by this user.
    pub async fn open_to_write(&self, read: bool, user: User) -> Result<(), ClientError> {
        self.kept.take_write_ref(read, user.clone()).await?;
        self.is_written_by(Some(&user));
        Ok(())
    }

    /// Commits what was written: new blocks, the new length. Returns at once when the master knows all of it.
    ///
    /// # Errors
    /// What could not be committed is committed with the next attempt, `EDQUOT` among the reasons; but what was written
    /// to blocks that another client has cut off meanwhile is lost, and that is returned once.
    pub async fn commit(&self) -> Result<(), ClientError> {
        if self.is_committed() {
            return Ok(());
        }
        self.behind.drain_checked().await?;
        self.commit_written().await
    }

    /// Commits what is at its workers by now. What the master knows it may drop: where somebody may be writing to it,
    /// it is held with the commit; whoever begins to write later holds it first.
    pub(super) async fn commit_written(&self) -> Result<(), ClientError> {
        match self.gate.try_write() {
            Ok(_alone) => self.note_unreferenced_commit(),
            Err(_somebody_writes) => return self.commit_and_keep_open().await,
        }
        self.commit_unreferenced().await
    }

    /// As [`Self::commit_written`]; the master drops nothing of it until the file is closed.
    pub(super) async fn commit_and_keep_open(&self) -> Result<(), ClientError> {
        // In this order, one behind the other: the master gets to know of no block that is not held.
        let (held, committed) = join(self.take_ref(), self.commit_unreferenced()).await;
        committed.and(held)
    }

    /// As [`Self::commit_written`], for a caller that keeps all others from writing.
    pub(super) async fn commit_exclusive(&self) -> Result<(), ClientError> {
        self.note_unreferenced_commit();
        self.commit_unreferenced().await
    }

    /// From now on whoever wants to write holds the file first, if there is anything to be committed.
    fn note_unreferenced_commit(&self) {
        if !self.state.lock().layout().is_none_or(Layout::is_committed) {
            self.open_ref.committed_unreferenced();
        }
    }

    async fn commit_unreferenced(&self) -> Result<(), ClientError> {
        let _one = self.turns.committing.lock().await;
        self.commit_locked().await?;
        match self.state.lock().lost.take() {
            Some(cause) => Err(ClientError::OutcomeUnknown { cause }),
            None => Ok(()),
        }
    }

    /// As [`Self::commit_written`], while nobody waits for it, and only while the master is there. What is lost is
    /// returned to whoever commits next.
    pub(super) async fn commit_in_background(&self) -> Result<(), ClientError> {
        if !self.shared.metadata.has_session() {
            return Ok(());
        }
        // A writer may be about to write to blocks that could be dropped as soon as the master knows them.
        self.take_ref().await?;
        let _one = self.turns.committing.lock().await;
        self.commit_locked().await
    }

    /// Commits batch by batch all that was written before it began. To be called with `committing` locked.
    async fn commit_locked(&self) -> Result<(), ClientError> {
        let mut is_rebased = false;
        while let Some(batch) = self.next_batch(Layout::begin_commit) {
            let is_last = batch.is_last;
            match self.send_commit(batch).await {
                Ok(()) if is_last => break,
                Ok(()) => {}
                Err(ClientError::Refused { errno, reason })
                    if errno == Errno::STALE.raw_os_error() && (self.give_up_replacements() || !is_rebased) =>
                {
                    tracing::debug!(inode = self.inode, "a commit is based on an old layout: {reason}");
                    self.load_now().await?;
                    is_rebased = true;
                }
                Err(error) if error.errno() == Errno::DQUOT.raw_os_error() => {
                    self.commit_without_growth().await?;
                    return Err(error);
                }
                Err(ClientError::Refused { reason, .. }) if is_rebased => {
                    self.drop_uncommitted(reason);
                    break;
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// The file must not grow as it would: its new length is kept for another attempt, when there is room perhaps. Its
    /// blocks are committed, so that they are freed with it, and that it was changed, since others may see that.
    async fn commit_without_growth(&self) -> Result<(), ClientError> {
        match self.next_batch(|layout| Some(layout.begin_blocks())) {
            Some(batch) => self.send_commit(batch).await,
            None => Ok(()),
        }
    }

    /// Takes from the layout what is to be committed; the blocks with what each takes at a worker, where that is known
    /// here.
    fn next_batch(&self, begin: impl FnOnce(&mut Layout) -> Option<CommitBatch>) -> Option<CommitBatch> {
        let (mut batch, open) = {
            let mut state = self.state.lock();
            let known = state.known.as_mut()?;
            let batch = begin(&mut known.layout)?;
            let open: Vec<_> = batch.extents.iter().map(|extent| known.blocks.get(&extent.index).cloned()).collect();
            (batch, open)
        };
        for (extent, open) in batch.extents.iter_mut().zip(open) {
            let open = open.filter(|open| open.generation == extent.generation);
            extent.allocated = open.and_then(|open| open.allocated());
        }
        Some(batch)
    }

    async fn send_commit(&self, batch: CommitBatch) -> Result<(), ClientError> {
        let CommitBatch { grow_to, changed, extents, .. } = batch;
        let commit = CommitContent { inode: self.inode, grow_to, made: extents.clone(), changed };
        Failpoint::CommitBegun.pass();
        let writer = self.state.lock().writer.clone();
        let result = self.shared.metadata.change_by(Change::Commit(commit), (0, 0), writer).await;
        Failpoint::CommitAnswered.pass();
        {
            let mut state = self.state.lock();
            match (&result, state.layout_mut()) {
                (_, None) => {}
                (Err(_), Some(layout)) => layout.commit_failed(),
                (Ok(changed), Some(layout)) => {
                    let before = layout.version();
                    let attr = changed.attr_of(self.inode);
                    if attr.is_some_and(|attr| layout.committed(&extents, attr)) {
                        self.shared.pages.advance(self.inode, before, layout.version());
                    } else {
                        state.outdate();
                        self.shared.pages.forget(self.inode);
                    }
                }
            }
        }
        self.note();
        result.map(drop)
    }

    /// What was to take the places of blocks that views had is nothing that anybody was answered for: whoever was about
    /// to write does it once more, as it is by then. Whether there was any.
    fn give_up_replacements(&self) -> bool {
        self.state.lock().layout_mut().is_some_and(Layout::give_up_replacements)
    }

    /// The master will never take what was written: the next who commits gets to know, once.
    fn drop_uncommitted(&self, reason: String) {
        tracing::warn!(inode = self.inode, "what was written is given up: {reason}");
        {
            let mut state = self.state.lock();
            state.lost = Some(reason);
            state.outdate();
            if let Some(layout) = state.layout_mut() {
                layout.forget_uncommitted();
            }
        }
        self.note();
    }
}
