//! WRITE.
//!
//! What a write brings goes to the workers, or to where it is staged, before it is answered, on the event loop's own
//! thread where that takes no question; others see it with the close, or some seconds later.

use std::sync::Arc;

use bytes::Bytes;
use cavern_client::{ClientError, Copies, File};

use super::Inner;
use crate::kernel::{Caller, Reply};

/// What a WRITE asks for besides.
#[derive(Clone, Copy)]
pub(super) struct WriteArgs {
    pub is_sync: bool,
    /// The writer may not keep the set-user-ID bit and the like.
    pub kills_privileges: bool,
    pub caller: Caller,
    /// As FLUSH names whoever closes.
    pub writer: Option<u64>,
}

impl Inner {
    pub(super) fn write(self: &Arc<Self>, fh: u64, offset: u64, data: &[u8], how: WriteArgs, reply: Reply) {
        let Some(handle) = self.files.get(fh).filter(|handle| !handle.file.is_read_only()) else {
            return reply.error(self.lost.errno(fh));
        };
        // At most what one request holds.
        let size = data.len() as u32;
        let loses = self.loses_by_write(&handle.file, &how);
        if !loses && !how.is_sync && handle.file.write_now(offset, data, how.writer).is_some() {
            return self.answer_written(&handle.file, (offset, size), &how, reply);
        }
        let (this, data) = (Arc::clone(self), Bytes::copy_from_slice(data));
        reply.run_uninterruptible(move |reply| async move {
            match this.write_file(&handle.file, offset, data, how, loses).await {
                Ok(()) => this.answer_written(&handle.file, (offset, size), &how, reply),
                Err(error) => this.failures.answer(reply, "write", &error),
            }
        });
    }

    async fn write_file(
        &self,
        file: &File,
        offset: u64,
        data: Bytes,
        how: WriteArgs,
        loses: bool,
    ) -> Result<(), ClientError> {
        if loses {
            self.lose_by_write(file.inode(), how.caller, how.kills_privileges).await?;
        }
        if how.is_sync {
            file.write_synced(offset, data, how.writer).await
        } else {
            file.write(offset, data, how.writer).await
        }
    }

    /// What was not written by way of the kernel's pages must be out of these before it is answered: the kernel forgets
    /// them when it begins with such a write, but others may have read them anew since, and of a write that its program
    /// does not wait for the kernel forgets them no second time.
    fn answer_written(&self, file: &File, (offset, size): (u64, u32), how: &WriteArgs, reply: Reply) {
        if how.writer.is_some() && file.copies().is_some_and(Copies::may_be_kept) {
            self.invalidations.written(self.root.to_kernel(file.inode()), offset, size, reply);
        } else {
            reply.written(size);
        }
    }
}
