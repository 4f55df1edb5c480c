//! OPEN, READ and RELEASE of files.
//!
//! What a handle reads is one version of one object. When that version is gone at open, the answer is `ESTALE`: the
//! kernel then looks the path up once more by itself and opens what it leads to. The client has brought its metadata up
//! to date before it reports such an error, so that this second look finds the new version.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use cavern_client::OpenFile;
use tracing::warn;

use super::Inner;
use super::failed_reads::FailedReads;
use crate::kernel::abi::fopen;
use crate::kernel::{Backing, Delivery, Reply};

/// An open file as the kernel has it.
pub struct FileHandle {
    file: Arc<OpenFile>,
    failed: FailedReads,
}

impl Inner {
    pub(super) fn open(self: &Arc<Self>, kernel_node: u64, flags: u32, reply: Reply) {
        let flags = flags.cast_signed();
        if flags & libc::O_ACCMODE != libc::O_RDONLY || flags & libc::O_TRUNC != 0 {
            return reply.error(libc::EROFS);
        }
        let node = self.known_node(kernel_node);
        if let Some(node) = &node
            && let Some(file) = self.client.files().open_cached(node)
        {
            return self.opened(file, reply);
        }
        let this = Arc::clone(self);
        reply.defer(move |reply| async move {
            let node = match node {
                Some(node) => node,
                None => match this.node(kernel_node).await {
                    Ok(node) => node,
                    Err(error) if error.is_version_gone() => return reply.error(libc::ESTALE),
                    Err(error) => return this.failures.answer(reply, "open", &error),
                },
            };
            match this.client.files().open(&node).await {
                Ok(file) => this.opened(file, reply),
                Err(error) if error.is_version_gone() => reply.error(libc::ESTALE),
                // The client has logged what it tried.
                Err(error) => reply.error(error.errno()),
            }
        });
    }

    fn opened(&self, file: Arc<OpenFile>, reply: Reply) {
        let inode = file.node().inode;
        let backing = self.open_inodes.opened(file.node(), || self.backing_of(&file, &reply));
        let number = self.files.insert(Arc::new(FileHandle { file, failed: FailedReads::default() }));
        let delivery = match backing {
            Some(backing) => {
                self.passthrough_opens.fetch_add(1, Relaxed);
                reply.opened_passthrough(number, &backing)
            }
            None if self.direct => reply.opened(number, fopen::DIRECT_IO),
            // An inode is one version for ever: its pages stay right for as long as the kernel has room for them.
            None => reply.opened(number, fopen::KEEP_CACHE),
        };
        if delivery == Delivery::Refused {
            self.files.remove(number);
            self.open_inodes.closed(inode);
        }
    }

    /// The file's one complete local block, registered with the kernel.
    fn backing_of(&self, file: &OpenFile, reply: &Reply) -> Option<Backing> {
        if !self.passthrough.load(Relaxed) {
            return None;
        }
        match reply.register(file.local_descriptor()?) {
            Ok(backing) => Some(backing),
            Err(cause) => {
                // No right, or blocks on a stacked file system: it will be the same for the next.
                if self.passthrough.swap(false, Relaxed) {
                    warn!(%cause, "the kernel refuses passthrough: reads go through cv fuse");
                }
                None
            }
        }
    }

    pub(super) fn read(self: &Arc<Self>, fh: u64, offset: u64, size: u32, reply: Reply, payload: &mut [u8]) {
        let Some(handle) = self.files.get(fh) else { return reply.error(libc::EBADF) };
        let length = payload.len().min(size as usize);
        let bytes = offset..offset.saturating_add(length as u64);
        if let Some(errno) = handle.failed.take(&bytes, Instant::now()) {
            return reply.error(errno);
        }
        if let Some(read) = handle.file.read_now(offset, &mut payload[..length]) {
            return reply.bytes(&payload[..read]);
        }
        let direct = self.direct;
        reply.defer(move |reply| async move {
            match handle.file.read(offset, length).await {
                Ok(bytes) => reply.bytes(&bytes),
                Err(error) => {
                    // The client has logged what it tried. Without pages there is no read-ahead to ask twice.
                    if !direct {
                        handle.failed.add(bytes, error.errno(), Instant::now());
                    }
                    reply.error(error.errno());
                }
            }
        });
    }

    pub(super) fn release(&self, fh: u64, reply: Reply) {
        // Answered first: nobody waits for what dropping the file may take.
        let handle = self.files.remove(fh);
        if let Some(handle) = &handle {
            self.open_inodes.closed(handle.file.node().inode);
        }
        reply.done();
        drop(handle);
    }
}
