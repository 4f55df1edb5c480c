//! READ.

use std::sync::Arc;

use bytes::Bytes;
use cavern_client::{CachedRead, ClientError};
use tokio::time::Instant;

use super::open_handle::OpenHandle;
use super::parts::Inner;
use crate::kernel::Reply;
use crate::trace::Target;

/// From this size on, bytes in a buffer are looked for before all else, so that they are not copied once more.
const BUFFERED_BYTES: usize = 16 << 10;

/// What a READ asks for.
#[derive(Clone, Copy)]
pub(super) struct ReadArgs {
    pub offset: u64,
    pub size: u32,
    /// The kernel keeps it, in pages.
    pub is_kept: bool,
}

impl Inner {
    pub(super) fn read(self: &Arc<Self>, kernel_node: u64, fh: u64, read: ReadArgs, reply: Reply, payload: &mut [u8]) {
        let handle = match &self.files.unopened {
            None => self.files.handles.get(fh),
            Some(unopened) => {
                let make = || self.client.open_unchecked(&self.known_node(kernel_node)?).map(OpenHandle::new);
                let handle = unopened.get(self.root.to_namespace(kernel_node), make);
                if handle.is_none() {
                    return self.read_unopened(kernel_node, read, reply);
                }
                handle
            }
        };
        let Some(handle) = handle else { return reply.error(self.files.lost.errno(fh)) };
        let ReadArgs { offset, size, is_kept } = read;
        if is_kept && let Some(copies) = handle.file.page_cache_hint() {
            copies.set();
        }
        let length = payload.len().min(size as usize);
        if let Some(errno) = handle.failed.take(&(offset..offset.saturating_add(length as u64)), Instant::now()) {
            return reply.error(errno);
        }
        let into = &mut payload[..length];
        let at_hand = if length >= BUFFERED_BYTES && (is_kept || handle.file.is_read_only()) {
            handle.file.try_read_cached(offset, into)
        } else {
            handle.file.read_now(offset, into).map(CachedRead::Copied)
        };
        match at_hand {
            Some(CachedRead::Copied(read)) => return reply.bytes(&payload[..read]),
            Some(CachedRead::Buffered(bytes)) => return reply.bytes(&bytes),
            None => {}
        }
        let this = Arc::clone(self);
        let (inode, node) = (handle.file.inode(), handle.file.version_node().cloned());
        let target = Target { inode, node, range: Some((offset, length)), ..Target::default() };
        let reply = reply.traced(&self.trace.requests, target);
        if let Some(disk) = handle.file.disk_read(offset, length) {
            return reply.defer_blocking(move |reply| this.answer_read(&handle, read, disk.run(), reply));
        }
        let task = move |reply| async move {
            let bytes = if is_kept {
                handle.file.read(offset, length).await
            } else {
                handle.file.read_direct(offset, length).await
            };
            this.answer_read(&handle, read, bytes, reply);
        };
        // Its request is sent before another thread has woken up, or read-ahead has sent one.
        reply.begin(task);
    }

    fn answer_read(&self, handle: &OpenHandle, read: ReadArgs, bytes: Result<Bytes, ClientError>, reply: Reply) {
        let error = match bytes {
            Ok(bytes) => return reply.bytes(&bytes),
            Err(error) => error,
        };
        // Without pages there is no read-ahead to ask twice. What can be written to may be there at the next look.
        if read.is_kept && !self.features.direct && handle.file.version_node().is_some() {
            let bytes = read.offset..read.offset.saturating_add(read.size.into());
            handle.failed.add(bytes, error.errno(), Instant::now());
        }
        // Those of a version of an object are logged by the client, which knows what it tried.
        if handle.file.version_node().is_some() {
            reply.error(error.errno());
        } else {
            self.failures.answer(reply, "read", &error);
        }
    }

    /// A read without an open, of an inode that the client has forgotten, or of a file that can be written to.
    fn read_unopened(self: &Arc<Self>, kernel_node: u64, read: ReadArgs, reply: Reply) {
        let this = Arc::clone(self);
        let (inode, range) = (self.root.to_namespace(kernel_node), Some((read.offset, read.size as usize)));
        let reply = reply.traced(&self.trace.requests, Target { inode, range, ..Target::default() });
        reply.defer(move |reply| async move {
            match this.read_inode(kernel_node, read).await {
                Ok(bytes) => reply.bytes(&bytes),
                Err(error) if error.is_version_gone() => reply.error(libc::ESTALE),
                Err(error) => this.failures.answer(reply, "read", &error),
            }
        });
    }

    async fn read_inode(&self, kernel_node: u64, read: ReadArgs) -> Result<Bytes, ClientError> {
        let node = self.node(kernel_node).await?;
        let file = match self.client.open_unchecked(&node) {
            Some(file) => file,
            None => self.client.open_to_read(&node).await?,
        };
        let length = read.size as usize;
        if read.is_kept { file.read(read.offset, length).await } else { file.read_direct(read.offset, length).await }
    }
}
