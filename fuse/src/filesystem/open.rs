//! OPEN, READ and RELEASE of files.
//!
//! Files of fs-mode mounts are [`content`](super::content)'s, those that are being written in cache-mode mounts
//! [`staged`](super::staged)'s; this is about objects, which are only read. What a handle of an object reads is one
//! version of one object. When that version is gone at open, the answer is `ESTALE`: the kernel then looks the path up
//! once more by itself and opens what it leads to. The client has brought its metadata up to date before it reports
//! such an error, so that this second look finds the new version.
//!
//! With `fuse.no_open` there is no OPEN to answer: the first one is answered with `ENOSYS`, and the kernel opens and
//! closes by itself from then on. A version that is gone then shows at the first read.

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use bytes::Bytes;
use cavern_client::{ClientError, FsFile, Node, OpenFile, StagedFile, StagedFiles};
use rustix::buffer::spare_capacity;
use rustix::io::Errno;
use tokio::runtime::Handle;
use tracing::warn;

use super::Inner;
use super::failed_reads::FailedReads;
use crate::kernel::abi::fopen;
use crate::kernel::{Backing, Caller, Delivery, Reply};

/// What a READ asks for.
#[derive(Clone, Copy)]
pub(super) struct ReadArgs {
    pub offset: u64,
    pub size: u32,
    /// The kernel keeps it, in pages.
    pub is_kept: bool,
}

/// An open file as the kernel has it.
pub(super) enum OpenHandle {
    Object(Arc<FileHandle>),
    /// Of an fs-mode mount.
    FsFile(Arc<FsFile>),
    /// Of a cache-mode mount, and being written.
    Staged(Arc<StagedFile>),
}

/// An open object.
pub struct FileHandle {
    pub(super) file: Arc<OpenFile>,
    failed: FailedReads,
}

impl FileHandle {
    fn new(file: Arc<OpenFile>) -> Self {
        Self { file, failed: FailedReads::default() }
    }
}

impl Inner {
    pub(super) fn open(self: &Arc<Self>, kernel_node: u64, caller: Caller, flags: u32, reply: Reply) {
        let flags = flags.cast_signed();
        let is_to_write = flags & libc::O_ACCMODE != libc::O_RDONLY || flags & libc::O_TRUNC != 0;
        if is_to_write && !self.has_writable() {
            return reply.error(libc::EROFS);
        }
        if self.unopened.is_some() {
            return reply.error(libc::ENOSYS);
        }
        let inode = self.root.to_namespace(kernel_node);
        if StagedFiles::is_staged(inode) {
            return self.open_staged(inode, caller, flags, reply);
        }
        if let Some(file) = self.second_opens.file(inode).filter(|_| !is_to_write) {
            return self.opened(file, flags, reply);
        }
        let node = self.known_node(kernel_node);
        if let Some(node) = node.as_ref().filter(|node| node.is_fs_mode()) {
            return self.open_content(Arc::clone(node), flags, reply);
        }
        if is_to_write && let Some(node) = &node {
            return self.begin_to_write(node, caller, reply);
        }
        if let Some(node) = &node
            && let Some(file) = self.client.files().open_cached(node)
        {
            return self.opened(file, flags, reply);
        }
        let this = Arc::clone(self);
        reply.defer(move |reply| async move {
            let node = match node {
                Some(node) => node,
                None => match this.node(kernel_node).await {
                    Ok(node) => node,
                    Err(error) if error.is_version_gone() && is_to_write => {
                        this.second_opens.expect_writer(caller.thread);
                        return reply.error(libc::ESTALE);
                    }
                    Err(error) if error.is_version_gone() => return this.refuse_stale_open(None, reply),
                    Err(error) => return this.failures.answer(reply, "open", &error),
                },
            };
            if node.is_fs_mode() {
                return this.open_content(node, flags, reply);
            }
            if is_to_write {
                return this.begin_to_write(&node, caller, reply);
            }
            match this.client.files().open(&node).await {
                Ok(file) => this.opened(file, flags, reply),
                Err(error) if error.is_version_gone() => this.refuse_stale_open(Some(&node), reply),
                // The client has logged what it tried.
                Err(error) => reply.error(error.errno()),
            }
        });
    }

    fn refuse_stale_open(&self, node: Option<&Node>, reply: Reply) {
        self.second_opens.expect(node);
        reply.error(libc::ESTALE);
    }

    fn opened(&self, file: Arc<OpenFile>, flags: i32, reply: Reply) {
        let inode = file.node().inode;
        let backing = self.open_inodes.opened(file.node(), || self.backing_of(&file, &reply));
        let number = self.files.insert(Arc::new(OpenHandle::Object(Arc::new(FileHandle::new(file)))));
        let delivery = match backing {
            Some(backing) => {
                self.passthrough_opens.fetch_add(1, Relaxed);
                reply.opened_passthrough(number, &backing)
            }
            None if self.direct => reply.opened(number, fopen::DIRECT_IO | fopen::NOFLUSH),
            // As a direct file its reads can be interrupted; through the pages' own way for O_DIRECT not even SIGKILL
            // could.
            None if flags & libc::O_DIRECT != 0 => {
                reply.opened(number, fopen::DIRECT_IO | fopen::KEEP_CACHE | fopen::NOFLUSH)
            }
            // An inode is one version for ever: its pages stay right for as long as the kernel has room for them.
            None => reply.opened(number, fopen::KEEP_CACHE | fopen::NOFLUSH),
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

    pub(super) fn read(self: &Arc<Self>, kernel_node: u64, fh: u64, read: ReadArgs, reply: Reply, payload: &mut [u8]) {
        let ReadArgs { offset, size, .. } = read;
        let handle = match &self.unopened {
            None => match self.files.get(fh).as_deref() {
                Some(OpenHandle::Object(handle)) => Some(Arc::clone(handle)),
                Some(OpenHandle::FsFile(content)) => return self.read_content(content, read, reply, payload),
                Some(OpenHandle::Staged(file)) => return self.read_staged(file, read, reply),
                None => None,
            },
            Some(unopened) => {
                let make = || self.client.files().handle(&self.known_node(kernel_node)?).ok().map(FileHandle::new);
                let handle = unopened.get(self.root.to_namespace(kernel_node), make);
                if handle.is_none() {
                    return self.read_unknown(kernel_node, offset, size, reply);
                }
                handle
            }
        };
        let Some(handle) = handle else { return reply.error(libc::EBADF) };
        let length = payload.len().min(size as usize);
        let bytes = offset..offset.saturating_add(length as u64);
        if let Some(errno) = handle.failed.take(&bytes, Instant::now()) {
            return reply.error(errno);
        }
        if let Some(read) = handle.file.read_now(offset, &mut payload[..length]) {
            return reply.bytes(&payload[..read]);
        }
        if handle.file.local_descriptor().is_some()
            && let Ok(slot) = Arc::clone(&self.disk_reads).try_acquire_owned()
            && let Some(memory) = handle.file.reserve(length)
        {
            let this = Arc::clone(self);
            return reply.defer_blocking(move |reply| {
                this.read_from_disk(&handle, offset, length, reply);
                drop((slot, memory));
            });
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

    /// A read without an open, of an inode that the client has forgotten, or of a file of an fs-mode mount.
    fn read_unknown(self: &Arc<Self>, kernel_node: u64, offset: u64, size: u32, reply: Reply) {
        let this = Arc::clone(self);
        reply.defer(move |reply| async move {
            match this.read_inode(kernel_node, offset, size as usize).await {
                Ok(bytes) => reply.bytes(&bytes),
                Err(error) if error.is_version_gone() => reply.error(libc::ESTALE),
                Err(error) => this.failures.answer(reply, "read", &error),
            }
        });
    }

    async fn read_inode(&self, kernel_node: u64, offset: u64, size: usize) -> Result<Bytes, ClientError> {
        let node = self.node(kernel_node).await?;
        if node.is_fs_mode() {
            let content = self.client.contents().open(&node).await?;
            return Ok(content.read(offset, size).await?.into());
        }
        self.client.files().handle(&node)?.read(offset, size).await
    }

    /// Reads the file's one local block, whose pages are not in memory. The client could do it too, but every change
    /// of threads on the way costs as much as the read.
    fn read_from_disk(&self, handle: &FileHandle, offset: u64, length: usize, reply: Reply) {
        let file = &handle.file;
        if let Some(bytes) =
            file.local_descriptor().and_then(|block| read_exactly(block, offset, length, file.node().size))
        {
            let stats = self.client.stats();
            stats.descriptor_reads.inc();
            stats.descriptor_bytes.inc_by(bytes.len() as u64);
            return reply.bytes(&bytes);
        }
        // A failed disk: the client finds another way.
        match Handle::current().block_on(file.read(offset, length)) {
            Ok(bytes) => reply.bytes(&bytes),
            Err(error) => {
                handle.failed.add(offset..offset.saturating_add(length as u64), error.errno(), Instant::now());
                reply.error(error.errno());
            }
        }
    }

    pub(super) fn release(self: &Arc<Self>, kernel_node: u64, fh: u64, reply: Reply) {
        let handle = self.files.remove(fh);
        let locks = self.ending(kernel_node, fh);
        match handle.as_deref() {
            Some(OpenHandle::FsFile(content)) => self.release_content(content, locks, reply),
            Some(OpenHandle::Staged(file)) => {
                drop(locks);
                self.release_staged(file, reply);
            }
            Some(OpenHandle::Object(handle)) => {
                drop(locks);
                self.open_inodes.closed(handle.file.node().inode);
                // Answered first: nobody waits for what dropping the file may take.
                reply.done();
            }
            None => reply.done(),
        }
        drop(handle);
    }
}

/// Up to `length` bytes at `offset` of a block that is a whole file of `size` bytes; `None` when they cannot be read.
fn read_exactly(block: BorrowedFd<'_>, offset: u64, length: usize, size: u64) -> Option<Vec<u8>> {
    // At most `length`, which is in memory's range.
    let wanted = size.saturating_sub(offset).min(length as u64) as usize;
    let mut bytes = Vec::with_capacity(wanted);
    while bytes.len() < wanted {
        let at = offset + bytes.len() as u64;
        match rustix::io::pread(block, spare_capacity(&mut bytes), at) {
            Ok(0) => return None,
            Ok(_) => {}
            Err(Errno::INTR) => {}
            Err(cause) => {
                warn!(%cause, "a local block cannot be read");
                return None;
            }
        }
    }
    bytes.truncate(wanted);
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn a_block_is_read_exactly_or_not_at_all() {
        let mut block = tempfile::tempfile().unwrap();
        block.write_all(b"0123456789").unwrap();
        let read = |offset, length, size| read_exactly(block.as_fd(), offset, length, size);
        assert_eq!(read(2, 3, 10).unwrap(), b"234");
        assert_eq!(read(8, 100, 10).unwrap(), b"89");
        assert_eq!(read(10, 5, 10).unwrap(), b"");
        assert_eq!(read(50, 5, 10).unwrap(), b"");
        assert_eq!(read(0, 4, 4).unwrap(), b"0123", "the file ends before the block does");
        assert_eq!(read(8, 5, 20), None, "the block is shorter than it should be");
        let (_reader, writer) = std::io::pipe().unwrap();
        assert_eq!(read_exactly(writer.as_fd(), 0, 5, 10), None);
    }
}
