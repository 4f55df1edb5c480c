//! FLUSH, FSYNC and RELEASE: what was written goes to where others see it.
//!
//! What a close and fsync(2) are answered is what the master has said, or the bucket.

use std::sync::Arc;

use cavern_client::{ClientError, Effects, File};

use super::parts::Inner;
use crate::kernel::Reply;

impl Inner {
    /// A descriptor is closed: what was written is flushed before the locks that guarded it end.
    pub(super) fn flush(self: &Arc<Self>, kernel_node: u64, fh: u64, lock_owner: u64, reply: Reply) {
        if self.files.has_no_open() {
            return reply.error(libc::ENOSYS);
        }
        if self.files.lost.contains(fh) {
            return reply.error(libc::EIO);
        }
        let inode = self.root.to_namespace(kernel_node);
        let handle = self.files.handles.get(fh).filter(|handle| handle.file.is_dirty_for(lock_owner));
        let has_locks = self.ends_locks(inode, fh, lock_owner);
        if handle.is_none() && !has_locks {
            return reply.done();
        }
        let this = Arc::clone(self);
        reply.run_uninterruptible(move |reply| async move {
            let flushed = match handle {
                Some(handle) => this.flush_file(&handle.file).await,
                None => Ok(()),
            };
            if has_locks {
                this.unlock_closed(inode, lock_owner).await;
            }
            this.answer_done("close", flushed, reply);
        });
    }

    pub(super) fn fsync(self: &Arc<Self>, kernel_node: u64, fh: u64, reply: Reply) {
        if self.files.lost.contains(fh) {
            return reply.error(libc::EIO);
        }
        let Some(handle) = self.files.handles.get(fh).filter(|handle| !handle.file.is_read_only()) else {
            return self.settle(kernel_node, reply);
        };
        let this = Arc::clone(self);
        if let Some(sync) = handle.file.local_sync() {
            return reply.defer_blocking(move |reply| this.answer_done("fsync", sync.run(), reply));
        }
        reply.run_uninterruptible(move |reply| async move {
            let synced = handle.file.sync().await.map(|effects| this.apply_effects(effects));
            this.answer_done("fsync", synced, reply);
        });
    }

    /// fsync(2) of a directory, or of what was not written to through this handle: its names are in the master's log.
    pub(super) fn settle(self: &Arc<Self>, kernel_node: u64, reply: Reply) {
        let inode = self.root.to_namespace(kernel_node);
        if !self.client.metadata().is_unsettled(inode) {
            return reply.done();
        }
        let this = Arc::clone(self);
        reply.run_uninterruptible(move |reply| async move {
            let settled = this.client.metadata().settle(inode).await;
            this.answer_done("fsync", settled, reply);
        });
    }

    /// The last descriptor is closed. What a mapping wrote after the last flush is flushed now, before the locks end.
    pub(super) fn release(self: &Arc<Self>, kernel_node: u64, fh: u64, reply: Reply) {
        let handle = self.files.closed(fh);
        let locks = self.ending(kernel_node, fh);
        let Some(handle) = handle else { return reply.done() };
        if !handle.file.is_dirty() {
            if self.files.passthrough.for_fs_mode {
                handle.file.end_writing();
            }
            drop(locks);
            // Answered first: nobody waits for what dropping the file may take.
            reply.done();
            return drop(handle);
        }
        let this = Arc::clone(self);
        reply.run_uninterruptible(move |reply| async move {
            if let Err(error) = this.flush_file(&handle.file).await {
                tracing::warn!(inode = handle.file.inode(), "what was written last is lost: {error}");
            }
            drop((locks, handle));
            reply.done();
        });
    }

    pub(super) async fn flush_file(&self, file: &File) -> Result<(), ClientError> {
        file.flush().await.map(|effects| self.apply_effects(effects))
    }

    /// Has the kernel forget what an operation has changed beside the file.
    pub(super) fn apply_effects(&self, effects: Effects) {
        if let Some(directory) = effects.listing {
            self.invalidations.listings().changed_here(directory);
        }
    }
}
