//! Room for data blocks, and what is written into it.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use cavern_conf::{Failpoint, Tier};
use cavern_proto::ChunkMap;
use cavern_proto::chunk::{chunks_touching, whole_chunks};

use super::block::{DataBlock, ZeroOutcome, chunks_of};
use super::{DataStore, DataTarget, MAX_ROUNDS};
use crate::store::block::Block;
use crate::store::block_file::BlockPlace;
use crate::store::error::{StoreError, is_out_of_space};
use crate::store::eviction::Cache;
use crate::store::placement::{self, Candidate};
use crate::store::slab::{Entry, hash_of};
use crate::store::space::{UNIT_BYTES, units_of_chunks};
use crate::store::table::Touch;

impl DataStore {
    /// Makes room for ranges of a data block, and the block if it is not here. *Blocking*.
    ///
    /// # Errors
    /// [`StoreError::NoSpace`], and then nothing was changed; or the disk failed.
    pub fn reserve(&self, target: &DataTarget, ranges: &[Range<u32>]) -> Result<Arc<DataBlock>, StoreError> {
        let (block, _) = self.obtain(target, &chunks_of(ranges.iter().cloned()))?;
        Ok(block)
    }

    /// Zeroes ranges of a data block, then writes bytes to it; makes the block if it is not here. *Blocking*.
    ///
    /// # Errors
    /// As [`Self::reserve`]; but when the file system, not the capacity, has no space left, a part may have been
    /// written.
    pub fn write(
        &self,
        target: &DataTarget,
        offset: u32,
        bytes: &[u8],
        zero: &[Range<u32>],
    ) -> Result<Arc<DataBlock>, StoreError> {
        let written = offset..offset + bytes.len() as u32;
        let chunks = chunks_of([written.clone()]);
        let mut last = StoreError::Dropped;
        for _ in 0..MAX_ROUNDS {
            let (block, fresh) = self.obtain(target, &chunks)?;
            match self.apply_write(&block, &written, bytes, zero) {
                Ok(()) => {
                    Failpoint::WriteStored.pass();
                    self.table.disk_succeeded(&block);
                    return Ok(block);
                }
                Err((reached, error)) if is_out_of_space(&error) => {
                    let reached = chunks_of(std::iter::once(offset..offset + reached as u32));
                    self.uncharge(&block, fresh.iter().filter(|index| !reached.contains(*index)));
                    self.table.out_of_space(block.directory());
                    last = StoreError::NoSpace;
                }
                // Freed before its file could be opened for writing.
                Err((_, error)) if error.kind() == io::ErrorKind::NotFound => last = StoreError::Dropped,
                Err((_, error)) => return Err(self.table.disk_failed(&block, "writing a data block", error)),
            }
        }
        Err(last)
    }

    /// Makes zeros of a range of a data block that is behind the end of its file by now: the block's own file ends
    /// where the range begins, unless it goes on behind it. *Blocking*.
    ///
    /// # Errors
    /// The block is not here, or the disk failed.
    pub fn cut(&self, target: &DataTarget, range: &Range<u32>) -> Result<(), StoreError> {
        let block = self.find(target, Touch::None)?;
        let cut = block.cut(range).map_err(|error| self.table.disk_failed(&block, "cutting a data block", error))?;
        if cut == ZeroOutcome::Freed {
            self.uncharge(&block, whole_chunks(range, block.length()));
        }
        Ok(())
    }

    fn apply_write(
        &self,
        block: &DataBlock,
        written: &Range<u32>,
        bytes: &[u8],
        zero: &[Range<u32>],
    ) -> Result<(), (usize, io::Error)> {
        for range in zero.iter().filter(|range| !range.is_empty()) {
            if block.zero(range).map_err(|error| (0, error))? == ZeroOutcome::Freed {
                let kept = chunks_touching(written.start, written.len() as u32);
                self.uncharge(block, whole_chunks(range, block.length()).filter(|index| !kept.contains(index)));
            }
        }
        block.write_bytes(written.start, bytes)
    }

    /// The block with these chunks charged, made if need be; and which of them were not charged before.
    fn obtain(&self, target: &DataTarget, chunks: &ChunkMap) -> Result<(Arc<DataBlock>, ChunkMap), StoreError> {
        for _ in 0..MAX_ROUNDS {
            let block = match self.find(target, Touch::None) {
                Ok(block) => block,
                Err(StoreError::NoSuchBlock) => match self.make(target, chunks)? {
                    Some(block) => return Ok((block, chunks.clone())),
                    None => continue,
                },
                Err(error) => return Err(error),
            };
            match self.charge(&block, chunks) {
                Err(StoreError::Dropped) => {}
                charged => return Ok((block, charged?)),
            }
        }
        Err(StoreError::Dropped)
    }

    /// Accounts for those chunks of a data block that were not accounted for, evicting cached blocks if need be; gives
    /// them.
    fn charge(&self, block: &DataBlock, chunks: &ChunkMap) -> Result<ChunkMap, StoreError> {
        let data = block.state();
        let directory = &self.table.directories[block.directory()];
        if !directory.is_healthy() {
            let source = io::Error::other(format!("its directory was given up: {}", directory.health.last_error()));
            return Err(StoreError::Io { action: "writing a data block", source });
        }
        let mut residents = self.table.lock();
        let cache = &mut residents.cache;
        let slot = cache.slab.find_as(block.id(), block.incarnation()).ok_or(StoreError::Dropped)?;
        let mut charged = data.charged.lock();
        let fresh: ChunkMap = chunks.iter().filter(|index| !charged.contains(*index)).collect();
        let units = units_of_chunks(fresh.iter(), block.length());
        if units > 0 {
            make_room_for_data(cache, block.directory(), units)?;
        }
        cache.charge(slot, i64::from(units));
        charged.extend(fresh.iter());
        drop(charged);
        self.note_reservation(block.id(), data);
        Ok(fresh)
    }

    fn uncharge(&self, block: &DataBlock, chunks: impl Iterator<Item = u32>) {
        let mut residents = self.table.lock();
        let cache = &mut residents.cache;
        let Some(slot) = cache.slab.find_as(block.id(), block.incarnation()) else { return };
        let mut charged = block.state().charged.lock();
        let mut allocated = block.state().allocated.lock();
        let mut gone = Vec::new();
        for index in chunks {
            allocated.remove(index);
            if charged.contains(index) {
                charged.remove(index);
                gone.push(index);
            }
        }
        cache.charge(slot, -i64::from(units_of_chunks(gone, block.length())));
    }

    /// Makes a block with these chunks charged; `None` when somebody else was faster.
    fn make(&self, target: &DataTarget, chunks: &ChunkMap) -> Result<Option<Arc<DataBlock>>, StoreError> {
        let _alone = self.stripe(&target.id).lock();
        if !self.get(&target.id, Touch::None).is_absent() {
            return Ok(None);
        }
        let units = units_of_chunks(chunks.iter(), target.length);
        let place = self.choose_place(target, units)?;
        let directory = place.directory;
        let failed = |source| self.table.not_made(directory, "creating a data block", source, StoreError::NoSpace);
        let block = Arc::new(DataBlock::create(place, None, chunks.clone()).map_err(failed)?);
        Failpoint::BlockMade.pass();
        self.enter(&block, units)?;
        Ok(Some(block))
    }

    /// Registers a block whose file has just been made, with what is charged for it. The caller holds the stripe.
    ///
    /// # Errors
    /// [`StoreError::NoSpace`], and the file is gone.
    pub(super) fn enter(&self, block: &Arc<DataBlock>, units: u32) -> Result<(), StoreError> {
        let mut residents = self.table.lock();
        let cache = &mut residents.cache;
        // A cached block of the same name cannot be: it would be one of another content.
        let is_free = cache.slab.find(block.id()).is_none();
        if !is_free || cache.make_room(block.directory(), u64::from(units)).is_err() {
            drop(residents);
            let _ = std::fs::remove_file(block.path());
            return Err(StoreError::NoSpace);
        }
        let (incarnation, length, mount_id) = (block.incarnation(), block.length(), block.mount_id());
        let mut entry = Entry::of_data(*block.id(), incarnation, length, mount_id, block.directory() as u8);
        (entry.units, entry.last_used) = (units, cache.now);
        residents.insert(entry, Block::Data(block.clone()));
        self.note_reservation(block.id(), block.state());
        Ok(())
    }

    /// Where the file of a new block is to be that begins with `units`.
    pub(super) fn choose_place(&self, target: &DataTarget, units: u32) -> Result<BlockPlace, StoreError> {
        let directory = self.choose_directory(target, units)?;
        let DataTarget { id, length, mount_id } = *target;
        let incarnation = self.table.new_incarnation();
        Ok(self.table.place(&Entry::of_data(id, incarnation, length, mount_id, directory as u8)))
    }

    /// The directory for a new block that begins with `units`: one that can hold all of it if there is one. Memory is
    /// no place for what must outlive a power failure, unless there is nothing else.
    fn choose_directory(&self, target: &DataTarget, units: u32) -> Result<usize, StoreError> {
        let durable = self.table.directories.iter().any(|directory| directory.spec.tier != Tier::Mem);
        let mut healthy = self.table.candidates();
        healthy.retain(|candidate| !(durable && candidate.tier == Tier::Mem));
        if healthy.is_empty() {
            return Err(StoreError::NoDirectory);
        }
        let whole = target.length.div_ceil(UNIT_BYTES);
        for need in [whole, units].map(u64::from) {
            let able = healthy.iter().filter(|of| of.capacity.saturating_sub(of.data) >= need.max(1));
            let able: Vec<Candidate> = able.copied().collect();
            if let Some(position) = placement::choose(&able, hash_of(&target.id), need) {
                return Ok(position);
            }
        }
        Err(StoreError::NoSpace)
    }
}

/// Evicts cached blocks until so many units more fit in a directory.
///
/// # Errors
/// [`StoreError::NoSpace`].
pub(super) fn make_room_for_data(cache: &mut Cache, directory: usize, units: u32) -> Result<(), StoreError> {
    let space = &cache.spaces[directory];
    // Nothing is evicted in vain.
    if space.data.units + u64::from(units) > space.limits.capacity {
        return Err(StoreError::NoSpace);
    }
    cache.make_room(directory, u64::from(units)).map_err(|_| StoreError::NoSpace)
}
