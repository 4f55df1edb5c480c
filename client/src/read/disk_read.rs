//! A read of a file's one complete local block whose pages are not in memory. An asynchronous read does it too, but
//! every change of threads on its way costs as much as the read.

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use bytes::Bytes;
use rustix::buffer::spare_capacity;
use rustix::io::Errno;
use tokio::sync::OwnedSemaphorePermit;
use tracing::warn;

use super::file::OpenFile;
use crate::error::ClientError;
use crate::memory::Charge;
use crate::stages::Stage;

/// A read that has its place in the disk's queue, and its memory of the budget.
pub struct DiskRead {
    file: Arc<OpenFile>,
    offset: u64,
    length: usize,
    slot: OwnedSemaphorePermit,
    memory: Charge,
}

impl OpenFile {
    /// `None` where the file is not one complete local block, or the disk's queue or the budget is full.
    pub fn disk_read(self: &Arc<Self>, offset: u64, length: usize) -> Option<DiskRead> {
        self.local_descriptor()?;
        let core = self.core();
        let slot = Arc::clone(&core.background.disk_slots).try_acquire_owned().ok()?;
        let memory = core.memory.try_charge(length as u64)?;
        Some(DiskRead { file: Arc::clone(self), offset, length, slot, memory })
    }
}

impl DiskRead {
    /// Reads, as [`OpenFile::read`] does; on a thread that may wait.
    pub fn run(self) -> Result<Bytes, ClientError> {
        // The slot is given back with the answer: what goes another way waits for threads of the same kind.
        let Self { file, offset, length, slot: _slot, memory } = self;
        let core = file.core();
        let disk = Stage::Disk.begin();
        let read = file.local_descriptor().and_then(|block| read_exactly(block, offset, length, file.node().size));
        drop(disk);
        match read {
            Some(bytes) => {
                core.stats.read_by_descriptor(bytes.len());
                Ok(memory.hold(bytes))
            }
            // A failed disk: there is another way, which has its own memory.
            None => {
                drop(memory);
                core.background.runtime.block_on(file.read(offset, length))
            }
        }
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
