//! WRITE.
//!
//! What a write brings goes to the workers, or to where it is staged, before it is answered, on the event loop's own
//! thread where that takes no question; others see it with the close, or some seconds later.

use std::sync::Arc;

use bytes::Bytes;
use cavern_client::{ClientError, File, PageCacheHint};

use super::open_handle::OpenHandle;
use super::parts::Inner;
use crate::kernel::{Caller, Reply};

/// What a WRITE asks for besides.
#[derive(Clone, Copy)]
pub(super) struct WriteArgs {
    pub is_sync: bool,
    /// The offset is where the kernel believes the end of the file to be.
    pub appends: bool,
    /// The writer may not keep the set-user-ID bit and the like.
    pub kills_privileges: bool,
    pub caller: Caller,
    /// As FLUSH names whoever closes.
    pub writer: Option<u64>,
}

impl Inner {
    pub(super) fn write(self: &Arc<Self>, fh: u64, offset: u64, data: &[u8], how: WriteArgs, reply: Reply) {
        let Some(handle) = self.files.handles.get(fh).filter(|handle| !handle.file.is_read_only()) else {
            return reply.error(self.files.lost.errno(fh));
        };
        if how.appends && handle.appends {
            return self.append(handle, offset, data, how, reply);
        }
        // At most what one request holds.
        let size = data.len() as u32;
        let loses = self.loses_by_write(&handle.file, &how);
        if !loses && !how.is_sync && handle.file.write_now(offset, data, how.writer).is_some() {
            return self.answer_written(&handle, (offset, size), &how, reply);
        }
        let (this, data) = (Arc::clone(self), Bytes::copy_from_slice(data));
        reply.run_uninterruptible(move |reply| async move {
            let written = this.write_file(&handle.file, offset, data, how, loses).await;
            this.answer_with("write", written, reply, |(), reply| {
                this.answer_written(&handle, (offset, size), &how, reply)
            });
        });
    }

    /// Writes to where the file ends by now, which others may have moved. The kernel asks anew how long the file is
    /// after every write.
    fn append(self: &Arc<Self>, handle: Arc<OpenHandle>, believed: u64, data: &[u8], how: WriteArgs, reply: Reply) {
        let size = data.len() as u32;
        let begun = self.mount_journal.begun_append(&reply);
        let loses = self.loses_by_write(&handle.file, &how);
        if !loses
            && !how.is_sync
            && begun.is_none()
            && let Some(end) = handle.file.end_now()
        {
            let noted = self.mount_journal.note_append(&reply, end.offset);
            if handle.file.write_now(end.offset, data, how.writer).is_some() {
                let reply = reply.keeping(noted);
                return self.answer_appended(&handle, (believed, end.offset, size), &how, reply);
            }
        }
        let (this, data) = (Arc::clone(self), Bytes::copy_from_slice(data));
        reply.run_uninterruptible(move |reply| async move {
            let file = &handle.file;
            let (noted, known) = begun.unzip();
            let written = async {
                let end = file.end(known).await?;
                let noted = noted.or_else(|| this.mount_journal.note_append(&reply, end.offset));
                this.write_file(file, end.offset, data, how, loses).await?;
                Ok((end, noted))
            };
            this.answer_with("write", written.await, reply, |(end, noted), reply| {
                this.answer_appended(&handle, (believed, end.offset, size), &how, reply.keeping(noted));
            });
        });
    }

    fn answer_appended(&self, handle: &OpenHandle, at: (u64, u64, u32), how: &WriteArgs, reply: Reply) {
        let (believed, offset, size) = at;
        if believed == offset {
            return self.answer_written(handle, (offset, size), how, reply);
        }
        // The kernel has forgotten the pages of another place.
        self.invalidations.written(self.root.to_kernel(handle.file.inode()), offset, size, reply);
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
    fn answer_written(&self, handle: &OpenHandle, (offset, size): (u64, u32), how: &WriteArgs, reply: Reply) {
        let file = &handle.file;
        if how.writer.is_some() && file.page_cache_hint().is_some_and(PageCacheHint::may_be_cached) {
            return self.invalidations.written(self.root.to_kernel(file.inode()), offset, size, reply);
        }
        self.changed_by(handle.how.node);
        reply.written(size);
    }
}
