//! One descriptor of the file of a block on this host, and which of its chunks may be read from it.
//!
//! It outlives the eviction of its block: the worker unlinks, it never truncates, so what was present when the worker
//! said so stays readable.

use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use cavern_proto::chunk::chunk_count;
use cavern_proto::{BlockId, ChunkMap};
use tokio::time::Instant;

use super::descriptors::BlockFile;
use super::local_file::{PastEnd, read_now};

/// The file of one block.
#[derive(Debug)]
pub(super) struct Descriptor {
    file: OwnedFd,
    /// The worker that gave it.
    pub worker: u64,
    /// Names this file of the block: after an eviction there is another.
    pub incarnation: u64,
    /// Bytes of the block.
    pub length: u32,
    /// Bit i of word i / 64: chunk i is present and verified. Bits are only ever set.
    present: Box<[AtomicU64]>,
    /// Chunks not yet present.
    missing: AtomicU32,
    unreadable: AtomicBool,
    pub used: LastUse,
}

impl Descriptor {
    pub(super) fn new(file: OwnedFd, worker: u64, incarnation: u64, length: u32, present: &ChunkMap) -> Self {
        let chunks = chunk_count(length);
        let descriptor = Self {
            file,
            worker,
            incarnation,
            length,
            present: (0..chunks.div_ceil(64)).map(|_| AtomicU64::new(0)).collect(),
            missing: AtomicU32::new(chunks),
            unreadable: AtomicBool::new(false),
            used: LastUse::now(),
        };
        descriptor.add(present);
        descriptor
    }

    /// Which of the files of this block it is of.
    pub(super) fn file_of(&self, block: BlockId) -> BlockFile {
        BlockFile { block, worker: self.worker, incarnation: self.incarnation }
    }

    pub(super) fn is(&self, file: &BlockFile) -> bool {
        (self.worker, self.incarnation) == (file.worker, file.incarnation)
    }

    pub(super) fn into_file(self) -> OwnedFd {
        self.file
    }

    /// More chunks are present.
    pub(super) fn add(&self, present: &ChunkMap) {
        let chunks = chunk_count(self.length);
        for chunk in present.iter().take_while(|chunk| *chunk < chunks) {
            let bit = 1 << (chunk % 64);
            if self.present[chunk as usize / 64].fetch_or(bit, Ordering::Release) & bit == 0 {
                self.missing.fetch_sub(1, Ordering::Relaxed);
            }
        }
    }

    pub(super) fn contains_all(&self, mut chunks: Range<u32>) -> bool {
        let is_present = |chunk| {
            let word = self.present.get(chunk as usize / 64);
            word.is_some_and(|word| word.load(Ordering::Acquire) >> (chunk % 64) & 1 == 1)
        };
        self.is_complete() || (!self.unreadable.load(Ordering::Relaxed) && chunks.all(is_present))
    }

    pub(super) fn is_complete(&self) -> bool {
        self.missing.load(Ordering::Acquire) == 0 && !self.unreadable.load(Ordering::Relaxed)
    }

    /// Reading failed: from now on nothing counts as present.
    pub(super) fn give_up(&self) {
        self.unreadable.store(true, Ordering::Relaxed);
    }

    /// Whether the file has all the bytes of the block.
    pub(super) fn is_whole(&self) -> bool {
        rustix::fs::fstat(&self.file).is_ok_and(|status| status.st_size >= i64::from(self.length))
    }

    /// Fills `buffer` from `offset` without waiting for the disk; false when not all of it is in the page cache.
    pub(super) fn read_now(&self, offset: u64, buffer: &mut [u8]) -> bool {
        self.used.touch();
        read_now(&self.file, offset, buffer, PastEnd::Missing)
    }
}

impl AsFd for Descriptor {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// When something was used last, in seconds: cheap to set again and again.
#[derive(Debug)]
pub(super) struct LastUse {
    epoch: Instant,
    /// Seconds since `epoch`.
    seconds: AtomicU32,
}

impl LastUse {
    pub(super) fn now() -> Self {
        Self { epoch: Instant::now(), seconds: AtomicU32::new(0) }
    }

    pub(super) fn touch(&self) {
        let now = self.epoch.elapsed().as_secs() as u32;
        if self.seconds.load(Ordering::Relaxed) != now {
            self.seconds.store(now, Ordering::Relaxed);
        }
    }

    /// For how long nobody has used it.
    pub(super) fn ago(&self) -> Duration {
        self.epoch.elapsed().saturating_sub(Duration::from_secs(u64::from(self.seconds.load(Ordering::Relaxed))))
    }
}

#[cfg(test)]
mod tests {
    use cavern_proto::CHUNK_BYTES;

    use super::*;

    fn map(chunks: &[u32]) -> ChunkMap {
        let mut map = ChunkMap::new();
        for chunk in chunks {
            map.insert(*chunk);
        }
        map
    }

    #[test]
    fn presence_only_grows_and_stays_within_the_block() {
        let file = tempfile::tempfile().unwrap();
        let descriptor = Descriptor::new(file.into(), 1, 1, 3 * CHUNK_BYTES + 1, &map(&[1, 70]));
        assert!(descriptor.contains_all(1..2) && !descriptor.contains_all(0..2) && !descriptor.is_complete());
        descriptor.add(&map(&[0, 1, 2]));
        assert!(!descriptor.is_complete() && !descriptor.contains_all(3..4));
        descriptor.add(&map(&[3]));
        assert!(descriptor.is_complete() && descriptor.contains_all(0..4));
        descriptor.give_up();
        assert!(!descriptor.is_complete() && !descriptor.contains_all(0..1));
    }

    #[test]
    fn a_file_that_was_cut_off_is_not_whole() {
        let file = tempfile::tempfile().unwrap();
        let descriptor = Descriptor::new(file.into(), 1, 1, 10, &map(&[0]));
        assert!(!descriptor.is_whole());
        rustix::fs::ftruncate(descriptor.as_fd(), 10).unwrap();
        assert!(descriptor.is_whole());
    }
}
