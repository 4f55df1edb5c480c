//! A file that is open: read, written, synced and closed in the same way whatever stands behind it.
//!
//! Which that is, is decided once, when the file is opened or made (`open`): an object, of which a handle has one
//! version, and only reads it ([`OpenFile`]); a file of an fs-mode mount ([`FsFile`]); or a file of a cache-mode mount
//! that is being written, and goes to the bucket as a whole object with a close or a sync ([`StagedFile`]).
//! `set_attributes` is about what is not bytes.

mod open;
mod replace;
mod set_attributes;
mod staged_handle;

use std::any::Any;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use bytes::Bytes;
use cavern_proto::journal::KernelBlock;
use rustix::io::Errno;
use tokio_util::sync::CancellationToken;

pub use open::{Access, CreatedFile, NewFile, Opened};
pub use replace::Replacement;
pub use set_attributes::{AttributeChange, BucketDefaults};
use staged_handle::StagedHandle;

use crate::activity::Activity;
use crate::error::ClientError;
use crate::fs_file::{FileEnd, FsFile, KernelReads, LocalSync, Seek, WriteBehindOutcome};
use crate::metadata::Node;
use crate::page_cache_hint::PageCacheHint;
use crate::read::{CachedRead, DiskRead, OpenFile};

/// What an operation on a file has changed beside the file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[must_use = "kernels keep listings"]
pub struct Effects {
    /// The directory whose listing shows the file otherwise now.
    pub listing: Option<u64>,
}

/// How room is to be had for a range of a file: see fallocate(2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Allocation {
    /// What is there becomes zeros.
    pub zero: bool,
    /// There is room for all of it then.
    pub reserve: bool,
    /// The file becomes as long as the range ends.
    pub grow: bool,
}

/// An open file. Cheap to clone; with its last clone it is closed, and what was written and not flushed is lost.
#[derive(Clone)]
pub struct File {
    backing: Backing,
}

#[derive(Clone)]
enum Backing {
    Object(Arc<OpenFile>),
    FsFile(Arc<FsFile>),
    Staged(Arc<StagedHandle>),
}

/// Does the same with whatever stands behind a file.
macro_rules! with_backing {
    ($file:expr, $content:ident => $work:expr) => {
        match &$file.backing {
            Backing::Object($content) => $work,
            Backing::FsFile($content) => $work,
            Backing::Staged($content) => $work,
        }
    };
}

impl File {
    pub(crate) fn of_content(content: Arc<FsFile>) -> Self {
        Backing::FsFile(content).into()
    }

    /// A version of an object, which never changes.
    fn object(&self) -> Option<&Arc<OpenFile>> {
        if let Backing::Object(file) = &self.backing { Some(file) } else { None }
    }

    /// A file of an fs-mode mount, which others may change as well.
    fn content(&self) -> Option<&Arc<FsFile>> {
        if let Backing::FsFile(file) = &self.backing { Some(file) } else { None }
    }

    /// A file of a cache-mode mount that is being written, here alone.
    fn staged(&self) -> Option<&StagedHandle> {
        if let Backing::Staged(file) = &self.backing { Some(file) } else { None }
    }

    /// What is counted of the mount that it is in.
    fn activity(&self) -> Option<&Activity> {
        let mount = match &self.backing {
            Backing::Object(file) => file.node().mount.as_deref()?,
            Backing::FsFile(file) => file.mount(),
            Backing::Staged(file) => file.mount(),
        };
        Some(mount.activity())
    }

    fn has_read(&self, bytes: usize) {
        if let Some(activity) = self.activity() {
            activity.has_read(bytes);
        }
    }

    fn has_written(&self, bytes: usize) {
        if let Some(activity) = self.activity() {
            activity.has_written(bytes);
        }
    }

    /// In the namespace, or one of this process alone: see [`is_of_this_process`](crate::is_of_this_process).
    pub fn inode(&self) -> u64 {
        with_backing!(self, file => file.inode())
    }

    /// Bytes, with all that was written. Asks the master where that is not known.
    pub async fn size(&self) -> Result<u64, ClientError> {
        match self.content() {
            Some(file) => file.size().await,
            None => Ok(self.own_size()),
        }
    }

    /// Bytes of a file that nobody else changes.
    fn own_size(&self) -> u64 {
        self.object().map_or_else(|| self.staged().map_or(0, |file| file.node().size), |file| file.node().size)
    }

    /// The node of a file whose bytes never change, under this inode: it may be gone from the namespace while the file
    /// is open. Its failed reads are counted and logged by the client, which knows what it tried.
    pub fn version_node(&self) -> Option<&Arc<Node>> {
        self.object().map(|file| file.node())
    }

    /// Whether the pages that a kernel has kept since the inode was opened before are still right; asked once for each
    /// open, of which `node` is what the file was opened by.
    pub fn keeps_pages(&self, node: &Node) -> bool {
        // Any other inode is one version for ever, or this process's own.
        self.content().is_none_or(|file| file.keeps_pages(node))
    }

    /// Whether the close of a handle matters that has only read: it may have locked the file.
    pub fn locks_end_with_close(&self) -> bool {
        self.content().is_some()
    }

    /// Whether it cannot be written to by way of this handle.
    pub fn is_read_only(&self) -> bool {
        self.object().is_some()
    }

    /// What is kept with the descriptor of the whole file, when it is one complete local block, and never changes: see
    /// [`OpenFile::with_local_descriptor`].
    pub fn with_local_descriptor<T: Any + Send + Sync>(
        &self,
        make: impl FnOnce(BorrowedFd<'_>) -> Option<T>,
    ) -> Option<Arc<T>> {
        self.object()?.with_local_descriptor(make)
    }

    /// What is kept with the block of an fs-mode file, as long as the file is that block alone: see
    /// [`FsFile::kernel_block`].
    pub fn kernel_block<T: Any + Send + Sync>(
        &self,
        others: Option<&KernelBlock>,
        make: impl FnOnce(BorrowedFd<'_>) -> Option<T>,
    ) -> Option<(KernelBlock, Arc<T>, KernelReads)> {
        self.content()?.kernel_block(others, make)
    }

    /// A process before this one has had the kernel read it by itself.
    pub fn begin_kernel_reads(&self) -> Option<KernelReads> {
        self.content().map(FsFile::begin_kernel_reads)
    }

    /// Whether [`find_block`](Self::find_block) may find what [`kernel_block`](Self::kernel_block) needs.
    pub fn awaits_block(&self) -> bool {
        self.content().is_some_and(|file| file.awaits_block())
    }

    /// Asks where the one block of a file is. Bounded as [`read`](Self::read).
    ///
    /// # Errors
    /// Those of [`read`](Self::read).
    pub async fn find_block(&self) -> Result<(), ClientError> {
        match self.content() {
            Some(file) => file.find_block().await,
            None => Ok(()),
        }
    }

    /// Whether all bytes of the file are in a block that a kernel reads in its place, as far as others have told of
    /// what they changed.
    ///
    /// # Errors
    /// The master does not say.
    pub async fn reads_current(&self, block: &KernelBlock) -> Result<bool, ClientError> {
        match self.content() {
            Some(file) => file.reads_current(block).await,
            None => Ok(true),
        }
    }

    /// Who keeps what was read; `None` where nothing is ever written.
    pub fn page_cache_hint(&self) -> Option<&PageCacheHint> {
        let of_staged = || self.staged().map(|file| file.page_cache_hint());
        self.content().map(|file| file.page_cache_hint()).or_else(of_staged)
    }

    /// Reads without waiting, for event loops. `None` when that is not possible for the whole range (use `read`); else
    /// the bytes read, fewer than asked only at the end of the file.
    pub fn read_now(&self, offset: u64, buffer: &mut [u8]) -> Option<usize> {
        let read = match self.content() {
            Some(file) => file.read_now(offset, buffer),
            None => self.object()?.read_now(offset, buffer),
        };
        read.inspect(|bytes| self.has_read(*bytes))
    }

    /// As [`read_now`](Self::read_now); and without a copy, where all of the bytes are in a buffer of what was read
    /// ahead. For large reads, and readers who keep what they read: see [`read_direct`](Self::read_direct).
    pub fn try_read_cached(&self, offset: u64, buffer: &mut [u8]) -> Option<CachedRead> {
        let read = match self.content() {
            Some(file) => file.try_read_cached(offset, buffer),
            None => self.object()?.try_read_cached(offset, buffer),
        };
        read.inspect(|read| match read {
            CachedRead::Copied(bytes) => self.has_read(*bytes),
            CachedRead::Buffered(bytes) => self.has_read(bytes.len()),
        })
    }

    /// A read from a local disk that is better made on a thread of its own than by `read`; `None` where there is no
    /// such disk, or too much is under way.
    pub fn disk_read(&self, offset: u64, length: usize) -> Option<DiskRead> {
        let read = self.object()?.disk_read(offset, length)?;
        // At most `length`.
        self.has_read(self.own_size().saturating_sub(offset).min(length as u64) as usize);
        Some(read)
    }

    /// Reads `length` bytes at `offset`, fewer only at the end of the file. Bounded by `client.read_timeout`. `Stale`
    /// when the version is gone.
    pub async fn read(&self, offset: u64, length: usize) -> Result<Bytes, ClientError> {
        let read = with_backing!(self, file => file.read(offset, length).await);
        read.inspect(|bytes| self.has_read(bytes.len()))
    }

    /// As [`read`](Self::read), for a reader who keeps nothing of what he reads, as with `O_DIRECT`: of a file that
    /// others may change, nothing that was read ahead will do. Nor will [`try_read_cached`](Self::try_read_cached).
    pub async fn read_direct(&self, offset: u64, length: usize) -> Result<Bytes, ClientError> {
        let Some(file) = self.content() else { return self.read(offset, length).await };
        file.read_direct(offset, length).await.inspect(|bytes| self.has_read(bytes.len()))
    }

    /// Writes all of `bytes` at `offset` without waiting, for event loops; `None`: use `write`. The writer is named as
    /// by [`flush`](Self::flush).
    pub fn write_now(&self, offset: u64, bytes: &[u8], writer: Option<u64>) -> Option<()> {
        let written = match self.content() {
            Some(file) => file
                .write_now(offset, bytes)
                .or_else(|| (file.write_behind(offset, bytes) == WriteBehindOutcome::Taken).then_some(())),
            None => self.staged()?.file.write_now(offset, bytes, writer),
        };
        written.inspect(|()| self.has_written(bytes.len()))
    }

    /// Somebody opens the file to append to it. Whether its end is known, whoever else appends to it: then
    /// [`end`](Self::end) says where it is. It is of files of fs-mode mounts.
    pub fn opened_to_append(&self) -> bool {
        self.content().inspect(|file| file.opened_to_append()).is_some()
    }

    /// As [`end`](Self::end), without asking, for event loops; `None`: use that.
    pub fn end_now(&self) -> Option<FileEnd> {
        self.content()?.end_now()
    }

    /// Where the next bytes go that are appended; `known` when it is where bytes went whose writing is asked for once
    /// more. The end of what only this client writes is what a kernel believes.
    pub async fn end(&self, known: Option<u64>) -> Result<FileEnd, ClientError> {
        match self.content() {
            Some(file) => file.end(known).await,
            None => Err(ClientError::Invalid(format!("inode {}: its end is known to kernels alone", self.inode()))),
        }
    }

    /// Writes all of `bytes` at `offset`. Bounded by `client.read_timeout`, but for an upload of the file that is under
    /// way. What fails in flight to a worker may be returned by a later write, flush or sync.
    pub async fn write(&self, offset: u64, bytes: Bytes, writer: Option<u64>) -> Result<(), ClientError> {
        let length = bytes.len();
        let written = match (self.content(), self.staged()) {
            (Some(file), _) => file.write_soon(offset, bytes).await,
            (_, Some(file)) => file.file.write(offset, bytes, writer).await,
            (None, None) => {
                let reason = format!("inode {} was opened to be read", self.inode());
                Err(ClientError::Refused { errno: Errno::BADF.raw_os_error(), reason })
            }
        };
        written.inspect(|()| self.has_written(length))
    }

    /// Writes all of `bytes` and syncs them, as `O_SYNC` asks. Of a bucket that asks nothing: no object is there before
    /// a close or a sync.
    pub async fn write_synced(&self, offset: u64, bytes: Bytes, writer: Option<u64>) -> Result<(), ClientError> {
        let Some(file) = self.content() else { return self.write(offset, bytes, writer).await };
        let length = bytes.len();
        file.write(offset, bytes).await?;
        self.has_written(length);
        let Some(sync) = file.local_sync() else { return file.sync().await };
        tokio::task::spawn_blocking(|| sync.run()).await.map_err(|_stopped| ClientError::Shutdown)?
    }

    /// Whether something was written that others cannot see yet, and a last close is to bring.
    pub fn is_dirty(&self) -> bool {
        // What the bucket did not take when it was asked is given up.
        self.content().is_some_and(|file| !file.is_committed())
            || self.staged().is_some_and(|file| file.is_dirty() && !file.has_failed())
    }

    /// Whether a close by `closer`, who may have written nothing, is to bring what others cannot see yet.
    pub fn is_dirty_for(&self, closer: u64) -> bool {
        self.content().is_some_and(|file| !file.is_committed() || file.has_loss())
            || self.staged().is_some_and(|file| file.is_flushed_by(closer))
    }

    /// Brings what was written to where others see it: it is what a close is answered with.
    ///
    /// # Errors
    /// Of an fs-mode file, those of [`FsFile::flush`]; of a staged one, what the bucket said.
    pub async fn flush(&self) -> Result<Effects, ClientError> {
        if let Some(file) = self.content() {
            file.flush().await?;
        }
        match self.staged() {
            Some(file) => file.commit().await,
            None => Ok(Effects::default()),
        }
    }

    /// A handle is closed, and what was written by it is flushed: see [`FsFile::end_writing`].
    pub fn end_writing(&self) {
        if let Some(file) = self.content() {
            file.end_writing();
        }
    }

    /// A sync of bytes that takes nothing but disks of this host: to be run on a thread that may block. `None`: use
    /// `sync`.
    pub fn local_sync(&self) -> Option<LocalSync> {
        self.content()?.local_sync()
    }

    /// Flushes the file, and makes what was written durable.
    pub async fn sync(&self) -> Result<Effects, ClientError> {
        match self.content() {
            Some(file) => file.sync().await.map(|()| Effects::default()),
            None => self.flush().await,
        }
    }

    /// Where data, or a hole, begins from `offset` on, where that takes no question; `None`: use `seek`.
    pub fn seek_now(&self, offset: u64, what: Seek) -> Option<Option<u64>> {
        self.content().is_none().then(|| seek_in_data(self.own_size(), offset, what))
    }

    /// Where data, or a hole, begins from `offset` on, as lseek(2) says it. `None` behind the end, and where no data
    /// follows.
    pub async fn seek(&self, offset: u64, what: Seek) -> Result<Option<u64>, ClientError> {
        match self.content() {
            Some(file) => file.seek(offset, what).await,
            None => Ok(seek_in_data(self.own_size(), offset, what)),
        }
    }

    /// Has room, zeros, or both in a range.
    ///
    /// # Errors
    /// `EOPNOTSUPP` of objects.
    pub async fn allocate(&self, range: std::ops::Range<u64>, how: Allocation) -> Result<(), ClientError> {
        let file = self.content().ok_or_else(|| unsupported("an object has no room before it is written"))?;
        if how.zero {
            file.zero(range.clone()).await?;
        }
        if how.reserve { file.allocate(range, how.grow).await } else { Ok(()) }
    }

    /// Whether [`copy_from`](Self::copy_from) can do better than whoever reads and writes.
    pub fn can_copy_from(&self, source: &Self) -> bool {
        self.content().is_some() && source.content().is_some()
    }

    /// Copies up to `length` bytes of `source`, from `from` on, to `to`: see [`FsFile::copy_from`].
    ///
    /// # Errors
    /// `EOPNOTSUPP` where [`can_copy_from`](Self::can_copy_from) says no.
    pub async fn copy_from(
        &self,
        source: &Self,
        from: u64,
        to: u64,
        length: u64,
        stop: &CancellationToken,
    ) -> Result<u64, ClientError> {
        let files = self.content().zip(source.content());
        let (file, source) = files.ok_or_else(|| unsupported("only files of fs-mode mounts are copied here"))?;
        file.copy_from(source, from, to, length, stop).await
    }

    /// Somebody writes who may leave no bits that let the file run with the rights of others. False: the master has
    /// these bits, and must be asked to take them.
    pub fn kill_privileges(&self) -> bool {
        self.staged().inspect(|file| file.kill_privileges());
        self.content().is_none()
    }
}

fn unsupported(reason: &str) -> ClientError {
    ClientError::Refused { errno: Errno::OPNOTSUPP.raw_os_error(), reason: reason.to_owned() }
}

/// In an object, which is data from its beginning to its end.
fn seek_in_data(size: u64, offset: u64, what: Seek) -> Option<u64> {
    let at = match what {
        Seek::Data => offset,
        Seek::Hole => size,
    };
    (offset < size).then_some(at)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_object_is_data_and_ends_in_a_hole() {
        assert_eq!([seek_in_data(10, 3, Seek::Data), seek_in_data(10, 3, Seek::Hole)], [Some(3), Some(10)]);
        assert_eq!([seek_in_data(10, 10, Seek::Data), seek_in_data(10, 10, Seek::Hole)], [None, None]);
        assert_eq!(seek_in_data(0, 0, Seek::Hole), None);
    }
}
