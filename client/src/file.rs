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
use rustix::io::Errno;
use tokio_util::sync::CancellationToken;

pub use open::{Access, CreatedFile, NewFile, Opened};
pub use replace::Replacement;
pub use set_attributes::{AttributeChange, BucketDefaults};
use staged_handle::StagedHandle;

use crate::cached_copies::Copies;
use crate::error::ClientError;
use crate::fs_file::{FileEnd, FsFile, KernelBlock, KernelReads, LocalSync, ReadAtHand, Seek, WriteBehindOutcome};
use crate::metadata::Node;
use crate::read::{DiskRead, OpenFile};

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

impl File {
    pub(crate) fn of_content(content: Arc<FsFile>) -> Self {
        Self { backing: Backing::FsFile(content) }
    }

    /// In the namespace, or one of this process alone: see [`is_of_this_process`](crate::is_of_this_process).
    pub fn inode(&self) -> u64 {
        match &self.backing {
            Backing::Object(file) => file.node().inode,
            Backing::FsFile(file) => file.inode(),
            Backing::Staged(file) => file.inode(),
        }
    }

    /// Bytes, with all that was written. Asks the master where that is not known.
    pub async fn size(&self) -> Result<u64, ClientError> {
        match &self.backing {
            Backing::Object(file) => Ok(file.node().size),
            Backing::FsFile(file) => file.size().await,
            Backing::Staged(file) => Ok(file.node().size),
        }
    }

    /// The node of a file whose bytes never change, under this inode: it may be gone from the namespace while the file
    /// is open.
    pub fn version_node(&self) -> Option<&Arc<Node>> {
        match &self.backing {
            Backing::Object(file) => Some(file.node()),
            Backing::FsFile(_) | Backing::Staged(_) => None,
        }
    }

    /// Whether the pages that a kernel has kept since the inode was opened before are still right; asked once for each
    /// open, of which `node` is what the file was opened by.
    pub fn keeps_pages(&self, node: &Node) -> bool {
        match &self.backing {
            // An inode is one version for ever, or this process's own.
            Backing::Object(_) | Backing::Staged(_) => true,
            Backing::FsFile(file) => file.keeps_pages(node),
        }
    }

    /// Whether the close of a handle matters that has only read: it may have locked the file.
    pub fn locks_end_with_close(&self) -> bool {
        matches!(self.backing, Backing::FsFile(_))
    }

    /// Whether it cannot be written to by way of this handle.
    pub fn is_read_only(&self) -> bool {
        matches!(self.backing, Backing::Object(_))
    }

    /// What is kept with the descriptor of the whole file, when it is one complete local block, and never changes: see
    /// [`OpenFile::with_local_descriptor`].
    pub fn with_local_descriptor<T: Any + Send + Sync>(
        &self,
        make: impl FnOnce(BorrowedFd<'_>) -> Option<T>,
    ) -> Option<Arc<T>> {
        match &self.backing {
            Backing::Object(file) => file.with_local_descriptor(make),
            Backing::FsFile(_) | Backing::Staged(_) => None,
        }
    }

    /// The same of a file of an fs-mode mount, as long as it is that block: see [`FsFile::kernel_block`].
    pub fn kernel_block<T: Any + Send + Sync>(
        &self,
        make: impl FnOnce(BorrowedFd<'_>) -> Option<T>,
    ) -> Option<(KernelBlock, Arc<T>, KernelReads)> {
        match &self.backing {
            Backing::FsFile(file) => file.kernel_block(make),
            Backing::Object(_) | Backing::Staged(_) => None,
        }
    }

    /// A process before this one has had the kernel read it by itself.
    pub fn begin_kernel_reads(&self) -> Option<KernelReads> {
        match &self.backing {
            Backing::FsFile(file) => Some(file.begin_kernel_reads()),
            Backing::Object(_) | Backing::Staged(_) => None,
        }
    }

    /// Has [`keeps_pages`](Self::keeps_pages) say no the next time.
    pub fn forget_pages(&self) {
        if let Backing::FsFile(file) = &self.backing {
            file.forget_pages();
        }
    }

    /// Whether [`find_block`](Self::find_block) may find what [`kernel_block`](Self::kernel_block) needs.
    pub fn awaits_block(&self) -> bool {
        match &self.backing {
            Backing::FsFile(file) => file.awaits_block(),
            Backing::Object(_) | Backing::Staged(_) => false,
        }
    }

    /// Asks where the one block of a file is. Bounded as [`read`](Self::read).
    ///
    /// # Errors
    /// Those of [`read`](Self::read).
    pub async fn find_block(&self) -> Result<(), ClientError> {
        match &self.backing {
            Backing::FsFile(file) => file.find_block().await,
            Backing::Object(_) | Backing::Staged(_) => Ok(()),
        }
    }

    /// Whether all bytes of the file are in a block that a kernel reads in its place, as far as others have told of
    /// what they changed.
    ///
    /// # Errors
    /// The master does not say.
    pub async fn reads_current(&self, block: &KernelBlock) -> Result<bool, ClientError> {
        match &self.backing {
            Backing::FsFile(file) => file.reads_current(block).await,
            Backing::Object(_) | Backing::Staged(_) => Ok(true),
        }
    }

    /// Who keeps what was read; `None` where nothing is ever written.
    pub fn copies(&self) -> Option<&Copies> {
        match &self.backing {
            Backing::Object(_) => None,
            Backing::FsFile(file) => Some(file.copies()),
            Backing::Staged(file) => Some(file.copies()),
        }
    }

    /// Whether failed reads are counted and logged by the client, which knows what it tried.
    pub fn logs_failed_reads(&self) -> bool {
        matches!(self.backing, Backing::Object(_))
    }

    /// Reads without waiting, for event loops. `None` when that is not possible for the whole range (use `read`); else
    /// the bytes read, fewer than asked only at the end of the file.
    pub fn read_now(&self, offset: u64, buffer: &mut [u8]) -> Option<usize> {
        match &self.backing {
            Backing::Object(file) => file.read_now(offset, buffer),
            Backing::FsFile(file) => file.read_now(offset, buffer),
            Backing::Staged(_) => None,
        }
    }

    /// As [`read_now`](Self::read_now); and without a copy, where all of the bytes are in a buffer of what was read
    /// ahead. For large reads, and readers who keep what they read: see [`read_direct`](Self::read_direct).
    pub fn read_at_hand(&self, offset: u64, buffer: &mut [u8]) -> Option<ReadAtHand> {
        match &self.backing {
            Backing::Object(file) => match file.read_buffered(offset, buffer.len()) {
                Some(bytes) => Some(ReadAtHand::Buffered(bytes)),
                None => file.read_now(offset, buffer).map(ReadAtHand::Copied),
            },
            Backing::FsFile(file) => file.read_at_hand(offset, buffer),
            Backing::Staged(_) => None,
        }
    }

    /// A read from a local disk that is better made on a thread of its own than by `read`; `None` where there is no
    /// such disk, or too much is under way.
    pub fn disk_read(&self, offset: u64, length: usize) -> Option<DiskRead> {
        match &self.backing {
            Backing::Object(file) => file.disk_read(offset, length),
            Backing::FsFile(_) | Backing::Staged(_) => None,
        }
    }

    /// Reads `length` bytes at `offset`, fewer only at the end of the file. Bounded by `client.read_timeout`. `Stale`
    /// when the version is gone.
    pub async fn read(&self, offset: u64, length: usize) -> Result<Bytes, ClientError> {
        match &self.backing {
            Backing::Object(file) => file.read(offset, length).await,
            Backing::FsFile(file) => file.read(offset, length).await,
            Backing::Staged(file) => file.read(offset, length).await,
        }
    }

    /// As [`read`](Self::read), for a reader who keeps nothing of what he reads, as with `O_DIRECT`: of a file that
    /// others may change, nothing that was read ahead will do. Nor will [`read_at_hand`](Self::read_at_hand).
    pub async fn read_direct(&self, offset: u64, length: usize) -> Result<Bytes, ClientError> {
        match &self.backing {
            Backing::FsFile(file) => file.read_direct(offset, length).await,
            Backing::Object(_) | Backing::Staged(_) => self.read(offset, length).await,
        }
    }

    /// Writes all of `bytes` at `offset` without waiting, for event loops; `None`: use `write`. The writer is named as
    /// by [`flush`](Self::flush).
    pub fn write_now(&self, offset: u64, bytes: &[u8], writer: Option<u64>) -> Option<()> {
        match &self.backing {
            Backing::Object(_) => None,
            Backing::FsFile(file) => file
                .write_now(offset, bytes)
                .or_else(|| (file.write_behind(offset, bytes) == WriteBehindOutcome::Taken).then_some(())),
            Backing::Staged(file) => file.file().write_now(offset, bytes, writer),
        }
    }

    /// Somebody opens the file to append to it. Whether its end is known, whoever else appends to it: then
    /// [`end`](Self::end) says where it is. It is of files of fs-mode mounts.
    pub fn opened_to_append(&self) -> bool {
        match &self.backing {
            Backing::FsFile(file) => {
                file.opened_to_append();
                true
            }
            Backing::Object(_) | Backing::Staged(_) => false,
        }
    }

    /// As [`end`](Self::end), without asking, for event loops; `None`: use that.
    pub fn end_now(&self) -> Option<FileEnd> {
        match &self.backing {
            Backing::FsFile(file) => file.end_now(),
            Backing::Object(_) | Backing::Staged(_) => None,
        }
    }

    /// Where the next bytes go that are appended; `known` when it is where bytes went whose writing is asked for once
    /// more. The end of what only this client writes is what a kernel believes.
    pub async fn end(&self, known: Option<u64>) -> Result<FileEnd, ClientError> {
        match &self.backing {
            Backing::FsFile(file) => file.end(known).await,
            Backing::Object(_) | Backing::Staged(_) => {
                Err(ClientError::Invalid(format!("inode {}: its end is known to kernels alone", self.inode())))
            }
        }
    }

    /// Writes all of `bytes` at `offset`. Bounded by `client.read_timeout`, but for an upload of the file that is under
    /// way. What fails in flight to a worker may be returned by a later write, flush or sync.
    pub async fn write(&self, offset: u64, bytes: Bytes, writer: Option<u64>) -> Result<(), ClientError> {
        match &self.backing {
            Backing::Object(file) => Err(read_only(file.node())),
            Backing::FsFile(file) => file.write_soon(offset, bytes).await,
            Backing::Staged(file) => file.file().write(offset, bytes, writer).await,
        }
    }

    /// The same for `O_SYNC`. Of a bucket that asks nothing: no object is there before a close or a sync.
    pub async fn write_synced(&self, offset: u64, bytes: Bytes, writer: Option<u64>) -> Result<(), ClientError> {
        match &self.backing {
            Backing::FsFile(file) => {
                file.write(offset, bytes).await?;
                let Some(sync) = file.local_sync() else { return file.sync().await };
                tokio::task::spawn_blocking(|| sync.run()).await.map_err(|_stopped| ClientError::Shutdown)?
            }
            Backing::Object(_) | Backing::Staged(_) => self.write(offset, bytes, writer).await,
        }
    }

    /// Whether something was written that others cannot see yet, and a last close is to bring.
    pub fn is_dirty(&self) -> bool {
        match &self.backing {
            Backing::Object(_) => false,
            Backing::FsFile(file) => !file.is_committed(),
            // What the bucket did not take when it was asked is given up.
            Backing::Staged(file) => file.is_dirty() && !file.has_failed(),
        }
    }

    /// The same of a close by somebody, who may not be among those who have written.
    pub fn is_dirty_for(&self, closer: u64) -> bool {
        match &self.backing {
            Backing::Object(_) => false,
            Backing::FsFile(file) => !file.is_committed() || file.has_loss(),
            Backing::Staged(file) => file.is_flushed_by(closer),
        }
    }

    /// Brings what was written to where others see it: it is what a close is answered with.
    ///
    /// # Errors
    /// Of an fs-mode file, those of [`FsFile::flush`]; of a staged one, what the bucket said.
    pub async fn flush(&self) -> Result<Effects, ClientError> {
        match &self.backing {
            Backing::Object(_) => Ok(Effects::default()),
            Backing::FsFile(file) => file.flush().await.map(|()| Effects::default()),
            Backing::Staged(file) => file.commit().await,
        }
    }

    /// The same of bytes that need nothing else to be durable than disks of this host: to be run on a thread that may
    /// block. `None`: use `sync`.
    pub fn local_sync(&self) -> Option<LocalSync> {
        match &self.backing {
            Backing::FsFile(file) => file.local_sync(),
            Backing::Object(_) | Backing::Staged(_) => None,
        }
    }

    /// The same, and it is durable.
    pub async fn sync(&self) -> Result<Effects, ClientError> {
        match &self.backing {
            Backing::FsFile(file) => file.sync().await.map(|()| Effects::default()),
            Backing::Object(_) | Backing::Staged(_) => self.flush().await,
        }
    }

    /// Where data, or a hole, begins from `offset` on, where that takes no question; `None`: use `seek`.
    pub fn seek_now(&self, offset: u64, what: Seek) -> Option<Option<u64>> {
        match &self.backing {
            Backing::Object(file) => Some(seek_in_data(file.node().size, offset, what)),
            Backing::FsFile(_) => None,
            Backing::Staged(file) => Some(seek_in_data(file.node().size, offset, what)),
        }
    }

    /// The same: as lseek(2). `None` behind the end, and where no data follows.
    pub async fn seek(&self, offset: u64, what: Seek) -> Result<Option<u64>, ClientError> {
        match &self.backing {
            Backing::FsFile(file) => file.seek(offset, what).await,
            Backing::Object(_) | Backing::Staged(_) => Ok(self.seek_now(offset, what).flatten()),
        }
    }

    /// Has room, zeros, or both in a range.
    ///
    /// # Errors
    /// `EOPNOTSUPP` of objects.
    pub async fn allocate(&self, range: std::ops::Range<u64>, how: Allocation) -> Result<(), ClientError> {
        let Backing::FsFile(file) = &self.backing else {
            return Err(unsupported("an object has no room before it is written"));
        };
        if how.zero {
            file.zero(range.clone()).await?;
        }
        if how.reserve { file.allocate(range, how.grow).await } else { Ok(()) }
    }

    /// Whether [`copy_from`](Self::copy_from) can do better than whoever reads and writes.
    pub fn can_copy_from(&self, source: &Self) -> bool {
        matches!((&self.backing, &source.backing), (Backing::FsFile(_), Backing::FsFile(_)))
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
        match (&self.backing, &source.backing) {
            (Backing::FsFile(file), Backing::FsFile(source)) => file.copy_from(source, from, to, length, stop).await,
            _ => Err(unsupported("only files of fs-mode mounts are copied here")),
        }
    }

    /// Somebody writes who may leave no bits that let the file run with the rights of others. False: the master has
    /// these bits, and must be asked to take them.
    pub fn kill_privileges(&self) -> bool {
        match &self.backing {
            Backing::Object(_) => true,
            Backing::FsFile(_) => false,
            Backing::Staged(file) => {
                file.kill_privileges();
                true
            }
        }
    }
}

fn read_only(node: &Node) -> ClientError {
    let reason = format!("{node} was opened to be read");
    ClientError::Refused { errno: Errno::BADF.raw_os_error(), reason }
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
