//! Open descriptors of block files of the worker on this host.
//!
//! A descriptor outlives the eviction of its block: the worker unlinks, it never truncates, so what was present when
//! the worker said so stays readable. Idle descriptors are closed after a while, and when the worker says that it
//! evicted their blocks, since they keep the space of unlinked files.

use std::collections::HashMap;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use cavern_proto::chunk::chunk_count;
use cavern_proto::{BlockId, ChunkMap};
use quick_cache::sync::Cache;

use super::kept_files::{Held, KeptFiles, LastUse, remove_idle};
use super::local_file::{PastEnd, read_now};
use crate::stats::Stats;

/// A descriptor that nobody used for this long is closed.
const IDLE: Duration = Duration::from_secs(30);

/// The file of one block, and which of its chunks may be read from it.
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
    used: LastUse,
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

    /// Of a block all of which is there, however long it is.
    pub(super) fn complete(file: OwnedFd, worker: u64, incarnation: u64) -> Self {
        Self::new(file, worker, incarnation, 0, &ChunkMap::new())
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
        self.touch();
        read_now(&self.file, offset, buffer, PastEnd::Missing)
    }

    /// It is read from.
    pub(super) fn touch(&self) {
        self.used.touch();
    }
}

impl AsFd for Descriptor {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// Descriptors by block, bounded; the least useful go first. And what users keep of the same files.
#[derive(Debug)]
pub(super) struct DescriptorCache {
    descriptors: Cache<BlockId, Arc<Descriptor>>,
    capacity: usize,
    kept: KeptFiles,
    stats: Arc<Stats>,
}

impl DescriptorCache {
    pub(super) fn new(capacity: usize, kept: KeptFiles, stats: Arc<Stats>) -> Self {
        Self { descriptors: Cache::new(capacity.max(1)), capacity, kept, stats }
    }

    /// There is room for so many fewer than otherwise.
    pub(super) fn leave_room(&self, descriptors: usize) {
        self.descriptors.set_capacity(self.capacity.saturating_sub(descriptors).max(1) as u64);
    }

    pub(super) fn get(&self, block: &BlockId) -> Option<Arc<Descriptor>> {
        self.descriptors.get(block)
    }

    pub(super) fn insert(&self, block: BlockId, descriptor: Arc<Descriptor>) {
        self.kept.forget_others(&block, descriptor.incarnation);
        self.descriptors.insert(block, descriptor);
        self.stats.descriptors.set(self.descriptors.len() as i64);
    }

    /// Forgets this very descriptor, and what is kept of its file: reading from it failed.
    pub(super) fn remove(&self, block: &BlockId, descriptor: &Arc<Descriptor>) {
        self.descriptors.remove_if(block, |cached| Arc::ptr_eq(cached, descriptor));
        self.kept.forget(block, descriptor.incarnation);
    }

    /// Takes out that incarnation of the block, unless somebody reads from it.
    pub(super) fn take(&self, block: &BlockId, incarnation: u64) -> Option<OwnedFd> {
        let (_, taken) = self.descriptors.remove_if(block, |cached| cached.incarnation == incarnation)?;
        Arc::into_inner(taken).map(|descriptor| descriptor.file)
    }

    /// What is kept of files of blocks without their descriptors.
    pub(super) fn kept(&self) -> &KeptFiles {
        &self.kept
    }

    /// Whether that incarnation of the block is here; counts as no use.
    pub(super) fn holds(&self, block: &BlockId, incarnation: u64) -> bool {
        self.descriptors.peek(block).is_some_and(|cached| cached.incarnation == incarnation)
            || self.kept.holds(block, incarnation)
    }

    /// Lets go of that incarnation of the block. *Blocking*, as closing the last descriptor of an unlinked file is.
    pub(super) fn close(&self, block: &BlockId, incarnation: u64) {
        drop(self.descriptors.remove_if(block, |cached| cached.incarnation == incarnation));
        self.kept.forget(block, incarnation);
        self.stats.descriptors.set(self.descriptors.len() as i64);
    }

    /// All that is here, by worker.
    pub(super) fn held(&self) -> HashMap<u64, Vec<Held>> {
        let mut held: HashMap<u64, Vec<Held>> = HashMap::new();
        for (worker, file) in self.kept.held() {
            held.entry(worker).or_default().push(file);
        }
        for (block, descriptor) in self.descriptors.iter() {
            if !self.kept.holds(&block, descriptor.incarnation) {
                let is_read = descriptor.used.is_of_late();
                let file = Held { block, incarnation: descriptor.incarnation, is_read };
                held.entry(descriptor.worker).or_default().push(file);
            }
        }
        held
    }

    /// Closes what is idle. *Blocking*, but without a lock that readers need.
    pub(super) fn sweep(&self) {
        remove_idle(&self.descriptors, |descriptor| descriptor.used.ago() >= IDLE);
        self.stats.descriptors.set(self.descriptors.len() as i64);
        self.kept.sweep();
    }

    pub(super) fn clear(&self) {
        self.descriptors.clear();
        self.stats.descriptors.set(0);
        self.kept.clear();
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
