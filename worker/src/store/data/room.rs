//! How data blocks come and go: lookup, creation, room, writes, and freeing by name.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use cavern_conf::{Failpoint, Tier};
use cavern_proto::chunk::{chunk_range, chunks_touching};
use cavern_proto::{BlockId, ChunkMap};
use parking_lot::Mutex;

use super::{DataTarget, ZeroOutcome, chunks_of, units_of_chunks};
use crate::store::block::{Block, BlockPlace};
use crate::store::placement::{self, Candidate};
use crate::store::residence::slot_of;
use crate::store::table::{Entry, Segment, UNIT_BYTES, hash_of};
use crate::store::{Eviction, Lookup, Residents, Store, StoreError, Touch, is_out_of_space};

/// A request whose block is freed under its hands begins anew this often.
const MAX_ROUNDS: usize = 3;

impl Store {
    /// The data block, if it is here. *Blocking* when it is closed.
    ///
    /// # Errors
    /// It is not here, has another length or is one of another mount, or its file cannot be opened.
    pub fn find_data(&self, target: &DataTarget, touch: Touch) -> Result<Arc<Block>, StoreError> {
        let block = match self.get(&target.id, touch) {
            Lookup::Open(block) => block,
            Lookup::Closed => self.load_data(&target.id)?.ok_or(StoreError::NoSuchBlock)?,
            Lookup::Absent => return Err(StoreError::NoSuchBlock),
        };
        if !block.is_data() {
            return Err(StoreError::Mismatch("the content id stands for a block of an object".to_owned()));
        }
        if block.length() != target.length {
            let message = format!("the block has {} bytes, not {}", block.length(), target.length);
            return Err(StoreError::Mismatch(message));
        }
        // Its name says nothing of the mount, and a right is one for a mount.
        if block.mount_id() != target.mount_id {
            let message = format!("the block is one of mount {}, not of {}", block.mount_id(), target.mount_id);
            return Err(StoreError::Mismatch(message));
        }
        Ok(block)
    }

    /// Opens a data block that is here but closed; `None` when it has gone. *Blocking*.
    pub(in crate::store) fn load_data(&self, id: &BlockId) -> Result<Option<Arc<Block>>, StoreError> {
        for _ in 0..MAX_ROUNDS {
            let (place, state) = {
                let residents = self.residents.lock();
                let table = &residents.cache.table;
                let Some(entry) = table.find(id).and_then(|slot| table.at(slot)) else { return Ok(None) };
                if let Some(block) = &entry.open {
                    return Ok(Some(block.clone()));
                }
                if !entry.is_data() {
                    return Err(StoreError::Mismatch("the content id stands for a block of an object".to_owned()));
                }
                (self.place(entry), entry.data.clone())
            };
            let (directory, path, incarnation) = (place.directory, place.path.clone(), place.incarnation);
            match Block::open_data(place, state) {
                Ok(block) => {
                    if let Some(block) = self.keep_data_open(Arc::new(block)) {
                        return Ok(Some(block));
                    }
                }
                Err(source) => {
                    if source.kind() == io::ErrorKind::NotFound {
                        // It may be about to be freed: then its name goes as well.
                        let _freed = self.stripe(id).lock();
                        if !self.is_resident(id, incarnation) {
                            continue;
                        }
                    }
                    tracing::error!(block = %id, file = %path.display(), error = %source,
                        "the file of a block of an fs-mode file cannot be opened: what it holds is missing until it is \
                         back");
                    if !matches!(source.kind(), io::ErrorKind::NotFound | io::ErrorKind::InvalidData) {
                        self.directory_failed(directory, "opening a data block", &source);
                    }
                    return Err(StoreError::Io { action: "opening a data block", source });
                }
            }
        }
        Err(StoreError::Dropped)
    }

    /// Which of those that ever had its name a data block is, and the bytes that it takes; `None` when it is not here.
    pub fn data_use(&self, id: &BlockId) -> Option<(u64, u64)> {
        let residents = self.residents.lock();
        let table = &residents.cache.table;
        let entry = table.find(id).and_then(|slot| table.at(slot)).filter(|entry| entry.is_data())?;
        Some((entry.incarnation, u64::from(entry.units) * u64::from(UNIT_BYTES)))
    }

    fn is_resident(&self, id: &BlockId, incarnation: u64) -> bool {
        let residents = self.residents.lock();
        let table = &residents.cache.table;
        table.find(id).and_then(|slot| table.at(slot)).is_some_and(|entry| entry.incarnation == incarnation)
    }

    /// Registers a data block that was opened, or gives the one that was there first; `None` when it was freed, or
    /// opened and closed again, meanwhile.
    fn keep_data_open(&self, block: Arc<Block>) -> Option<Arc<Block>> {
        let mut residents = self.residents.lock();
        let Residents { cache, open } = &mut *residents;
        let slot = cache.table.find(block.id())?;
        let entry = cache.table.at_mut(slot).filter(|entry| entry.incarnation == block.incarnation())?;
        if let Some(first) = &entry.open {
            return Some(first.clone());
        }
        let own = block.data()?;
        match &entry.data {
            Some(known) if !Arc::ptr_eq(known, own) => return None,
            Some(_) => entry.open = Some(block.clone()),
            None => {
                entry.open = Some(block.clone());
                entry.data = Some(own.clone());
            }
        }
        let closed = open.opened(&mut cache.table, slot);
        drop(residents);
        drop(closed);
        Some(block)
    }

    /// Makes room for ranges of a data block, and the block if it is not here. *Blocking*.
    ///
    /// # Errors
    /// [`StoreError::NoSpace`], and then nothing was changed; or the disk failed.
    pub fn reserve_data(&self, target: &DataTarget, ranges: &[Range<u32>]) -> Result<Arc<Block>, StoreError> {
        let (block, _) = self.obtain(target, &chunks_of(ranges.iter().cloned()))?;
        Ok(block)
    }

    /// Zeroes ranges of a data block, then writes bytes to it; makes the block if it is not here. *Blocking*.
    ///
    /// # Errors
    /// As [`Self::reserve_data`]; but when the file system, not the capacity, has no space left, a part may have been
    /// written.
    pub fn write_data(
        &self,
        target: &DataTarget,
        offset: u32,
        bytes: &[u8],
        zero: &[Range<u32>],
    ) -> Result<Arc<Block>, StoreError> {
        let written = offset..offset + bytes.len() as u32;
        let chunks = chunks_of([written.clone()]);
        let mut last = StoreError::Dropped;
        for _ in 0..MAX_ROUNDS {
            let (block, fresh) = self.obtain(target, &chunks)?;
            match self.apply_write(&block, &written, bytes, zero) {
                Ok(()) => {
                    Failpoint::WriteStored.pass();
                    self.disk_succeeded(&block);
                    return Ok(block);
                }
                Err((reached, error)) if is_out_of_space(&error) => {
                    let reached = chunks_of(std::iter::once(offset..offset + reached as u32));
                    self.uncharge(&block, fresh.iter().filter(|index| !reached.contains(*index)));
                    self.out_of_space(&block);
                    last = StoreError::NoSpace;
                }
                // Freed before its file could be opened for writing.
                Err((_, error)) if error.kind() == io::ErrorKind::NotFound => last = StoreError::Dropped,
                Err((_, error)) => return Err(self.disk_failed(&block, "writing a data block", error)),
            }
        }
        Err(last)
    }

    fn apply_write(
        &self,
        block: &Block,
        written: &Range<u32>,
        bytes: &[u8],
        zero: &[Range<u32>],
    ) -> Result<(), (usize, io::Error)> {
        for range in zero.iter().filter(|range| !range.is_empty()) {
            if block.zero(range).map_err(|error| (0, error))? == ZeroOutcome::Freed {
                let kept = chunks_touching(written.start, written.len() as u32);
                let whole = chunks_touching(range.start, range.len() as u32).filter(|index| {
                    let chunk = chunk_range(*index, block.length());
                    range.start <= chunk.start && chunk.end <= range.end
                });
                self.uncharge(block, whole.filter(|index| !kept.contains(index)));
            }
        }
        block.write_bytes(written.start, bytes)
    }

    /// The block with these chunks charged, made if need be; and which of them were not charged before.
    fn obtain(&self, target: &DataTarget, chunks: &ChunkMap) -> Result<(Arc<Block>, ChunkMap), StoreError> {
        for _ in 0..MAX_ROUNDS {
            let block = match self.find_data(target, Touch::None) {
                Ok(block) => block,
                Err(StoreError::NoSuchBlock) => match self.make_data(target, chunks)? {
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
    fn charge(&self, block: &Block, chunks: &ChunkMap) -> Result<ChunkMap, StoreError> {
        let Some(data) = block.data() else { return Err(StoreError::NoSuchBlock) };
        let directory = &self.directories[block.directory()];
        if !directory.is_healthy() {
            let source = io::Error::other(format!("its directory was given up: {}", directory.last_error()));
            return Err(StoreError::Io { action: "writing a data block", source });
        }
        let now = self.now();
        let mut evicted = Vec::new();
        let charge = |residents: &mut Residents, evicted: &mut Vec<Entry>| -> Result<ChunkMap, StoreError> {
            let cache = &mut residents.cache;
            let slot = slot_of(cache, block).ok_or(StoreError::Dropped)?;
            let mut charged = data.charged.lock();
            let mut fresh = ChunkMap::new();
            chunks.iter().filter(|index| !charged.contains(*index)).for_each(|index| {
                fresh.insert(index);
            });
            let units = units_of_chunks(&fresh, block.length());
            let space = &cache.spaces[block.directory()];
            // Nothing is evicted in vain.
            if units > 0 && space.data() + u64::from(units) > space.capacity() {
                return Err(StoreError::NoSpace);
            }
            if units > 0 {
                let room = cache.make_room(block.directory(), u64::from(units), now, evicted);
                room.map_err(|_| StoreError::NoSpace)?;
            }
            cache.charge(slot, units);
            fresh.iter().for_each(|index| {
                charged.insert(index);
            });
            drop(charged);
            self.note_reservation(block.id(), data);
            Ok(fresh)
        };
        let result = charge(&mut self.residents.lock(), &mut evicted);
        self.discard_evicted(evicted);
        result
    }

    fn uncharge(&self, block: &Block, chunks: impl Iterator<Item = u32>) {
        let Some(data) = block.data() else { return };
        let mut residents = self.residents.lock();
        let cache = &mut residents.cache;
        let Some(slot) = slot_of(cache, block) else { return };
        let mut charged = data.charged.lock();
        let mut allocated = data.allocated.lock();
        let mut units = 0;
        for index in chunks {
            allocated.remove(index);
            if charged.contains(index) {
                charged.remove(index);
                units += crate::store::chunk_units(index, block.length());
            }
        }
        cache.discharge(slot, units);
    }

    /// Makes a data block with these chunks charged; `None` when somebody else was faster.
    fn make_data(&self, target: &DataTarget, chunks: &ChunkMap) -> Result<Option<Arc<Block>>, StoreError> {
        let _alone = self.stripe(&target.id).lock();
        if !matches!(self.get(&target.id, Touch::None), Lookup::Absent) {
            return Ok(None);
        }
        let units = units_of_chunks(chunks, target.length);
        let directory = self.choose_for_data(target, units)?;
        let incarnation = self.new_incarnation();
        let DataTarget { id, length, mount_id } = *target;
        let path = self.directories[directory].data_path(&id, incarnation, mount_id);
        let cipher = self.directories[directory].cipher.clone();
        let place = BlockPlace { id, incarnation, length, mount_id, directory, path, cipher };
        let block = match Block::create_data(place, chunks.clone()) {
            Ok(block) => Arc::new(block),
            Err(error) if is_out_of_space(&error) => {
                self.directory_out_of_space(directory);
                return Err(StoreError::NoSpace);
            }
            Err(source) => {
                self.directory_failed(directory, "creating a data block", &source);
                return Err(StoreError::Io { action: "creating a data block", source });
            }
        };
        Failpoint::BlockMade.pass();
        if !self.enter_data(&block, units) {
            let _ = std::fs::remove_file(block.path());
            return Err(StoreError::NoSpace);
        }
        Ok(Some(block))
    }

    /// Registers a data block whose file has just been made, with what is charged for it; false when there is no room.
    /// The caller holds the stripe.
    pub(super) fn enter_data(&self, block: &Arc<Block>, units: u32) -> bool {
        let (now, directory) = (self.now(), block.directory());
        let (mut evicted, mut closed) = (Vec::new(), Vec::new());
        let made = {
            let mut residents = self.residents.lock();
            let Residents { cache, open } = &mut *residents;
            // A cached block of the same name cannot be: it would be one of another content.
            let free = cache.table.find(block.id()).is_none();
            let made = free && cache.make_room(directory, u64::from(units), now, &mut evicted).is_ok();
            if made {
                let (incarnation, length, mount_id) = (block.incarnation(), block.length(), block.mount_id());
                let mut entry = Entry::new(*block.id(), incarnation, length, mount_id, directory as u8);
                entry.segment = Segment::Data;
                entry.units = units;
                entry.last_used = now;
                entry.open = Some(block.clone());
                entry.data = block.data().cloned();
                let slot = cache.insert(entry);
                if let Some(data) = block.data() {
                    self.note_reservation(block.id(), data);
                }
                closed = open.opened(&mut cache.table, slot);
            }
            made
        };
        drop(closed);
        self.discard_evicted(evicted);
        made
    }

    /// The directory for a new data block that begins with `units`: one that can hold all of it if there is one. Memory
    /// is no place for what must outlive a power failure, unless there is nothing else.
    pub(super) fn choose_for_data(&self, target: &DataTarget, units: u32) -> Result<usize, StoreError> {
        let residents = self.residents.lock();
        let spaces = residents.cache.spaces.iter();
        let durable = self.directories.iter().any(|directory| directory.tier() != Tier::Mem);
        let healthy: Vec<(Candidate, u64)> = (spaces.zip(&self.directories).enumerate())
            .filter(|(_, (_, directory))| directory.is_healthy() && !(durable && directory.tier() == Tier::Mem))
            .map(|(position, (space, directory))| {
                let (tier, capacity, free) = (directory.tier(), space.capacity(), space.free());
                (Candidate { position, tier, capacity, free }, capacity.saturating_sub(space.data()))
            })
            .collect();
        drop(residents);
        if healthy.is_empty() {
            return Err(StoreError::NoDirectory);
        }
        let whole = target.length.div_ceil(UNIT_BYTES);
        for need in [whole, units].map(u64::from) {
            let able = healthy.iter().filter(|(_, attainable)| *attainable >= need.max(1));
            let able: Vec<Candidate> = able.map(|(candidate, _)| *candidate).collect();
            if let Some(position) = placement::choose(&able, hash_of(&target.id), need) {
                return Ok(position);
            }
        }
        Err(StoreError::NoSpace)
    }

    /// Removes a data block for good, whichever mount it is of; gives the bytes that it took, or `None` when it is not
    /// here or its file cannot be deleted. Descriptors of it go on working. *Blocking*.
    pub fn free_data(&self, id: &BlockId) -> Option<u64> {
        self.free_data_if(id, |_| true)
    }

    /// The same; one of another mount stays.
    pub fn free_data_of(&self, target: &DataTarget) -> Option<u64> {
        self.free_data_if(&target.id, |place| place.mount_id == target.mount_id)
    }

    /// The same, unless `is_free` says otherwise when nobody can make the block.
    pub(super) fn free_data_if(&self, id: &BlockId, is_free: impl FnOnce(&BlockPlace) -> bool) -> Option<u64> {
        let _alone = self.stripe(id).lock();
        let place = {
            let residents = self.residents.lock();
            let table = &residents.cache.table;
            let entry = table.find(id).and_then(|slot| table.at(slot)).filter(|entry| entry.is_data())?;
            self.place(entry)
        };
        if !is_free(&place) {
            return None;
        }
        // Not synced: should a power failure bring the file back, it is freed once more.
        match std::fs::remove_file(&place.path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                self.directory_failed(place.directory, "deleting a data block", &error);
                return None;
            }
            _ => {}
        }
        Failpoint::BlockFreed.pass();
        let removed = {
            let mut residents = self.residents.lock();
            let slot = residents.cache.table.find(id)?;
            residents.cache.remove(slot)?
        };
        if let Some(block) = &removed.open {
            block.kill();
        }
        if removed.shared {
            // What does not fit is dropped: clients close idle descriptors by themselves.
            let _ = self.evictions.try_send(Eviction { id: removed.id, incarnation: removed.incarnation });
        }
        Some(u64::from(removed.units) * u64::from(UNIT_BYTES))
    }

    /// Keeps apart those who make and free one block.
    pub(super) fn stripe(&self, id: &BlockId) -> &Mutex<()> {
        &self.stripes[hash_of(id) as usize % self.stripes.len()]
    }
}
