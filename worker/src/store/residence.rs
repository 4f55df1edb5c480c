//! How blocks come, stay and go: lookup, creation, room, publication, verification, eviction.
//!
//! One lock guards the table of blocks and the eviction lists; it is held for a few hundred nanoseconds, never during
//! I/O. What goes is taken out of the table under the lock, and its index entry and file are removed after it; a block
//! that comes back in between gets a new incarnation, hence another file, and `Index::remove` spares its record.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use cavern_proto::BlockId;

use super::block::{Block, BlockPlace};
use super::eviction::Cache;
use super::placement::{self, Candidate};
use super::table::{Entry, hash_of};
use super::{Eviction, Lookup, Residents, Store, StoreError, Touch, chunk_units, index, is_out_of_space};

/// Blocks evicted per round towards the low watermark, so that no round holds the lock for long.
const RELIEF_BATCH: usize = 64;
/// Blocks that are confirmed under the lock at a time.
const CONFIRM_BATCH: usize = 256;
/// Entries looked at per round of walks over all blocks.
const WALK_BATCH: u32 = 10_000;

impl Store {
    /// Finds a block, and counts the use.
    pub fn get(&self, id: &BlockId, touch: Touch) -> Lookup {
        let now = self.now();
        let mut residents = self.residents.lock();
        let cache = &mut residents.cache;
        let Some(slot) = cache.table.find(id) else {
            if matches!(touch, Touch::Open | Touch::Read(_)) {
                cache.count_use(id);
            }
            return Lookup::Absent;
        };
        let Some(entry) = cache.table.at_mut(slot) else { return Lookup::Absent };
        let lookup = entry.open.as_ref().map_or(Lookup::Closed, |block| Lookup::Open(block.clone()));
        let counts = match touch {
            Touch::None => return lookup,
            Touch::Refresh => false,
            Touch::Open => {
                entry.shared = true;
                true
            }
            Touch::Read(bytes) => {
                entry.credit = entry.credit.saturating_add(bytes);
                let whole = entry.credit >= entry.length;
                entry.credit -= if whole { entry.length } else { 0 };
                whole
            }
        };
        cache.touch(slot, now);
        if counts {
            cache.count_use(id);
        }
        lookup
    }

    /// The incarnations of blocks of which clients have descriptors, as far as they are here. Those with `true` were
    /// read, and count as used.
    pub fn confirm(&self, files: &[(Option<BlockId>, bool)]) -> Vec<Option<u64>> {
        let now = self.now();
        let mut incarnations = Vec::with_capacity(files.len());
        for batch in files.chunks(CONFIRM_BATCH) {
            let mut residents = self.residents.lock();
            let cache = &mut residents.cache;
            incarnations.extend(batch.iter().map(|(id, is_read)| {
                let slot = cache.table.find(id.as_ref()?)?;
                let entry = cache.table.at_mut(slot)?;
                // Also where it was handed out by the process before.
                entry.shared = true;
                let (id, incarnation) = (entry.id, entry.incarnation);
                if *is_read {
                    cache.touch(slot, now);
                    cache.count_use(&id);
                }
                Some(incarnation)
            }));
        }
        incarnations
    }

    /// Opens a block that is here but closed; `None` when it has gone, or its file has. *Blocking*.
    pub fn load(&self, id: &BlockId) -> Option<Arc<Block>> {
        let (place, verified) = {
            let residents = self.residents.lock();
            let table = &residents.cache.table;
            let entry = table.find(id).and_then(|slot| table.at(slot))?;
            if let Some(block) = &entry.open {
                return Some(block.clone());
            }
            if entry.is_data() {
                drop(residents);
                // Why not, if it cannot be opened, is in the log.
                return self.load_data(id).ok().flatten();
            }
            (self.place(entry), entry.verified)
        };
        let directory = &self.directories[place.directory];
        let record = match directory.index.get(id) {
            Ok(record) => record.filter(|record| record.incarnation == place.incarnation),
            Err(error) => {
                self.directory_failed(place.directory, "reading the block index", &error);
                None
            }
        };
        let incarnation = place.incarnation;
        let opened =
            record.ok_or(io::ErrorKind::NotFound.into()).and_then(|record| Block::open(place, &record, verified));
        match opened {
            Ok(block) => self.keep_open(Arc::new(block)),
            Err(error) => {
                // A symbolic link is not followed: it is not what we made.
                let is_link = error.raw_os_error() == Some(rustix::io::Errno::LOOP.raw_os_error());
                if error.kind() == io::ErrorKind::NotFound || is_link {
                    self.metrics.corrupt_chunks.inc();
                    tracing::warn!(block = %id, incarnation, "the file or the record of a block is gone: the block is \
                        fetched again");
                    self.forget(id, incarnation);
                } else {
                    tracing::warn!(block = %id, %error, "cannot open the file of a block");
                }
                None
            }
        }
    }

    pub(super) fn place(&self, entry: &Entry) -> BlockPlace {
        let directory = usize::from(entry.directory);
        let path = if entry.is_data() {
            self.directories[directory].data_path(&entry.id, entry.incarnation, entry.mount_id)
        } else {
            self.directories[directory].block_path(&entry.id, entry.incarnation)
        };
        BlockPlace {
            id: entry.id,
            incarnation: entry.incarnation,
            length: entry.length,
            mount_id: entry.mount_id,
            directory,
            path,
            cipher: self.directories[directory].cipher.clone(),
        }
    }

    /// Registers a block that was opened; gives the one that was there first.
    fn keep_open(&self, block: Arc<Block>) -> Option<Arc<Block>> {
        let mut residents = self.residents.lock();
        let Residents { cache, open } = &mut *residents;
        let slot = cache.table.find(block.id())?;
        let entry = cache.table.at_mut(slot).filter(|entry| entry.incarnation == block.incarnation())?;
        if let Some(first) = &entry.open {
            return Some(first.clone());
        }
        entry.open = Some(block.clone());
        let closed = open.opened(&mut cache.table, slot);
        drop(residents);
        drop(closed);
        Some(block)
    }

    /// The block, made with no chunk present if it is not here. *Blocking* when it is here but closed.
    ///
    /// # Errors
    /// No directory works, or the file cannot be made.
    pub fn create(&self, id: &BlockId, length: u32, mount_id: u32, touch: Touch) -> Result<Arc<Block>, StoreError> {
        match self.get(id, Touch::None) {
            Lookup::Open(block) => return Ok(block),
            Lookup::Closed => {
                if let Some(block) = self.load(id) {
                    return Ok(block);
                }
            }
            Lookup::Absent => {}
        }
        let directory = self.choose_directory(id, length)?;
        let incarnation = self.new_incarnation();
        let path = self.directories[directory].block_path(id, incarnation);
        let cipher = self.directories[directory].cipher.clone();
        let place = BlockPlace { id: *id, incarnation, length, mount_id, directory, path, cipher };
        let block = match Block::create(place) {
            Ok(block) => Arc::new(block),
            Err(source) if is_out_of_space(&source) => {
                self.directory_out_of_space(directory);
                return Err(StoreError::Full);
            }
            Err(source) => {
                self.directory_failed(directory, "creating a block file", &source);
                return Err(StoreError::Io { action: "creating a block file", source });
            }
        };
        let now = self.now();
        let mut residents = self.residents.lock();
        let Residents { cache, open } = &mut *residents;
        if cache.table.find(id).is_some() {
            // Somebody else was faster: theirs is the block, ours goes again.
            drop(residents);
            let _ = std::fs::remove_file(block.path());
            return match self.get(id, Touch::None) {
                Lookup::Open(block) => Ok(block),
                Lookup::Closed | Lookup::Absent => self.load(id).ok_or(StoreError::Dropped),
            };
        }
        let mut entry = Entry::new(*id, incarnation, length, mount_id, directory as u8);
        entry.last_used = now;
        entry.shared = touch == Touch::Open;
        entry.open = Some(block.clone());
        let slot = cache.insert(entry);
        let closed = open.opened(&mut cache.table, slot);
        drop(residents);
        drop(closed);
        Ok(block)
    }

    fn choose_directory(&self, id: &BlockId, length: u32) -> Result<usize, StoreError> {
        let need = u64::from(length.div_ceil(super::UNIT_BYTES));
        let residents = self.residents.lock();
        let healthy = residents.cache.spaces.iter().zip(&self.directories).enumerate();
        let mut any_healthy = false;
        let candidates: Vec<Candidate> = healthy
            .filter(|(_, (_, directory))| directory.is_healthy())
            .inspect(|_| any_healthy = true)
            .filter(|(_, (space, _))| space.capacity() > 0)
            .map(|(position, (space, directory))| Candidate {
                position,
                tier: directory.tier(),
                capacity: space.capacity(),
                free: space.free(),
            })
            .collect();
        drop(residents);
        let none = if any_healthy { StoreError::Full } else { StoreError::NoDirectory };
        placement::choose(&candidates, hash_of(id), need).ok_or(none)
    }

    /// Accounts for chunks that are about to be written, evicting other blocks if need be, those of the same mount
    /// first where it has its share. Every chunk must end in [`Self::publish`] or [`Self::release`].
    ///
    /// # Errors
    /// No room, or the block was dropped.
    pub fn reserve(&self, block: &Block, chunks: Range<u32>) -> Result<(), StoreError> {
        let units: u32 = chunks.map(|index| chunk_units(index, block.length())).sum();
        let now = self.now();
        let mut evicted = Vec::new();
        let result = {
            let mut residents = self.residents.lock();
            let cache = &mut residents.cache;
            // Nothing is evicted for a block that is gone; one that is here stays, because the caller holds it.
            slot_of(cache, block).ok_or(StoreError::Dropped).and_then(|slot| {
                cache.keep_share(block.directory(), block.mount_id(), u64::from(units), now, &mut evicted);
                let room = cache.make_room(block.directory(), u64::from(units), now, &mut evicted);
                room.map(|()| cache.charge(slot, units)).map_err(|_| StoreError::Full)
            })
        };
        self.discard_evicted(evicted);
        result
    }

    /// Gives back the room of chunks that were not written after all.
    pub fn release(&self, block: &Block, chunks: Range<u32>) {
        let units: u32 = chunks.map(|index| chunk_units(index, block.length())).sum();
        self.discharge(block, units);
    }

    fn discharge(&self, block: &Block, units: u32) {
        let mut residents = self.residents.lock();
        let cache = &mut residents.cache;
        if let Some(slot) = slot_of(cache, block) {
            cache.discharge(slot, units);
        }
    }

    /// Makes a chunk visible whose bytes were written.
    pub(crate) fn publish(&self, block: &Block, index: u32, crc: u32) {
        let mut state = block.state();
        if let Some(slot) = state.crcs.get_mut(index as usize) {
            *slot = crc;
        }
        state.present.insert(index);
        state.verified.insert(index);
    }

    /// Puts the index entry of a block as it is now, unless the block was dropped.
    ///
    /// # Errors
    /// The index cannot be written.
    pub(crate) fn record(&self, block: &Block) -> Result<(), StoreError> {
        let records = &self.directories[block.directory()].index;
        records.put(block.id(), || (!block.is_dead()).then(|| block.record())).map_err(|error| {
            if index::is_out_of_space(&error) {
                self.directory_out_of_space(block.directory());
                return StoreError::Full;
            }
            self.directory_failed(block.directory(), "writing the block index", &error);
            StoreError::Io { action: "writing the block index", source: io::Error::other(error) }
        })
    }

    /// Checks the chunks that are present but not yet believed; bad ones are dropped. *Blocking*.
    ///
    /// # Errors
    /// The disk failed.
    pub(crate) fn verify(&self, block: &Block, chunks: Range<u32>) -> Result<(), StoreError> {
        let doubtful: Vec<u32> = {
            let state = block.state();
            chunks.filter(|index| state.present.contains(*index) && !state.verified.contains(*index)).collect()
        };
        let (mut bad, mut buffer) = (Vec::new(), Vec::new());
        for index in doubtful {
            match block.check_chunk(index, &mut buffer) {
                Ok(true) => {
                    let mut state = block.state();
                    if state.present.contains(index) {
                        state.verified.insert(index);
                    }
                }
                Ok(false) => bad.push(index),
                Err(source) => return Err(self.disk_failed(block, "reading", source)),
            }
        }
        self.drop_chunks(block, &bad);
        Ok(())
    }

    /// Checks chunks that somebody found to be wrong; those that are, are dropped. *Blocking*.
    pub fn recheck(&self, block: &Block, chunks: &[u32]) -> Result<(), StoreError> {
        if block.is_data() {
            return Ok(());
        }
        {
            let mut state = block.state();
            chunks.iter().for_each(|index| state.verified.remove(*index));
        }
        chunks.iter().try_for_each(|index| self.verify(block, *index..index.saturating_add(1)))
    }

    /// Forgets chunks whose bytes are not what they should be; they are fetched again when asked for.
    pub(crate) fn drop_chunks(&self, block: &Block, chunks: &[u32]) {
        if chunks.is_empty() || block.is_data() {
            return;
        }
        let (dropped, empty) = {
            let mut state = block.state();
            let there: Vec<u32> = chunks.iter().copied().filter(|index| state.present.contains(*index)).collect();
            for index in &there {
                state.present.remove(*index);
                state.verified.remove(*index);
            }
            (there, state.present.count() == 0)
        };
        if dropped.is_empty() {
            return;
        }
        self.metrics.corrupt_chunks.inc_by(dropped.len() as u64);
        tracing::warn!(block = %block.id(), file = %block.path().display(), chunks = ?dropped,
            "dropped chunks with a wrong checksum; they will be fetched again");
        self.discharge(block, dropped.iter().map(|index| chunk_units(*index, block.length())).sum());
        if empty {
            self.forget(block.id(), block.incarnation());
        } else if let Err(error) = self.record(block) {
            tracing::warn!(block = %block.id(), %error, "the index still names dropped chunks; their checksums will \
                tell");
        }
    }

    /// Drops a block after a fill in vain, if nothing of it is here.
    pub(crate) fn forget_if_empty(&self, block: &Block) {
        if block.state().present.count() == 0 {
            let removed = {
                let mut residents = self.residents.lock();
                let cache = &mut residents.cache;
                let slot = slot_of(cache, block);
                // Units are those of other fills of the same block that still run.
                let idle = slot.filter(|slot| cache.table.at(*slot).is_some_and(|entry| entry.units == 0));
                idle.and_then(|slot| cache.remove(slot))
            };
            self.discard(removed);
        }
    }

    /// Drops a cached block on request; gives the bytes that it took.
    pub fn remove(&self, id: &BlockId) -> Option<u64> {
        let removed = {
            let mut residents = self.residents.lock();
            let table = &residents.cache.table;
            let slot = table.find(id).filter(|slot| table.at(*slot).is_some_and(|entry| !entry.is_data()))?;
            residents.cache.remove(slot)?
        };
        let bytes = u64::from(removed.units) * u64::from(super::UNIT_BYTES);
        self.discard([removed]);
        Some(bytes)
    }

    fn forget(&self, id: &BlockId, incarnation: u64) {
        let removed = {
            let mut residents = self.residents.lock();
            let cache = &mut residents.cache;
            let slot = cache.table.find(id);
            let slot = slot.filter(|slot| cache.table.at(*slot).is_some_and(|entry| entry.incarnation == incarnation));
            slot.and_then(|slot| cache.remove(slot))
        };
        self.discard(removed);
    }

    /// Removes what is left of evicted entries.
    pub(super) fn discard_evicted(&self, evicted: Vec<Entry>) {
        if evicted.is_empty() {
            return;
        }
        self.metrics.evicted_blocks.inc_by(evicted.len() as u64);
        self.discard(evicted);
    }

    fn discard(&self, removed: impl IntoIterator<Item = Entry>) {
        for entry in removed {
            let place = self.place(&entry);
            if let Some(block) = &entry.open {
                block.kill();
            }
            if entry.shared {
                // What does not fit is dropped: clients close idle descriptors by themselves.
                let _ = self.evictions.try_send(Eviction { id: entry.id, incarnation: entry.incarnation });
            }
            if !self.directories[place.directory].is_healthy() {
                continue;
            }
            super::forget_record(&self.directories[place.directory].index, &entry);
            match std::fs::remove_file(&place.path) {
                // Somebody else's directory in the place of a file is no fault of the disk, and not ours to delete.
                Err(error) if !matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::IsADirectory) => {
                    self.directory_failed(place.directory, "deleting a block file", &error);
                }
                _ => {}
            }
        }
    }

    /// Whether some directory is filled above its high watermark, or by a mount above the share of that.
    pub fn needs_relief(&self) -> bool {
        let residents = self.residents.lock();
        (0..self.directories.len()).any(|position| residents.cache.needs_relief(position))
    }

    /// Evicts from directories above the high watermark towards the low one, sparing blocks that were just used, and
    /// in the same way what mounts have above their shares of that. *Blocking*. Says whether anything went: if so,
    /// there may be more to do.
    pub fn relieve(&self) -> bool {
        let now = self.now();
        let mut any = false;
        for position in 0..self.directories.len() {
            let mut evicted = Vec::new();
            {
                let mut residents = self.residents.lock();
                residents.cache.relieve(position, now, RELIEF_BATCH, &mut evicted);
                let rejected = std::mem::take(&mut residents.cache.tally).rejected;
                self.metrics.admissions_rejected.inc_by(rejected);
            }
            any |= !evicted.is_empty();
            self.discard_evicted(evicted);
        }
        any
    }

    /// Evicts what exceeds the capacity after a start with a smaller one. What exceeds the share of a mount is for
    /// [`Self::relieve`].
    pub(super) fn fit_capacity(&self) {
        for position in 0..self.directories.len() {
            let (now, mut evicted) = (self.now(), Vec::new());
            let mut residents = self.residents.lock();
            let _ = residents.cache.make_room(position, 0, now, &mut evicted);
            drop(residents);
            self.discard_evicted(evicted);
        }
    }

    /// Marks blocks that were unused for longer than their mount's ttl, in seconds; those go first when room is needed.
    /// Takes the lock for a part of the blocks at a time.
    pub fn expire(&self, ttl_of: impl Fn(u32) -> Option<u32>) {
        let now = self.now();
        let mut from = 0;
        loop {
            let mut residents = self.residents.lock();
            let until = residents.cache.table.slot_count().min(from + WALK_BATCH);
            for slot in from..until {
                let Some(entry) = residents.cache.table.at(slot) else { continue };
                if entry.expired || entry.is_data() {
                    continue;
                }
                let old = ttl_of(entry.mount_id).is_some_and(|ttl| now.saturating_sub(entry.last_used) > ttl);
                if old && !entry.busy() {
                    residents.cache.expire(slot);
                }
            }
            from = until;
            if until == residents.cache.table.slot_count() {
                return;
            }
        }
    }

    /// Forgets all cached blocks of a directory that failed; gives how many. Data blocks stay known: what can still be
    /// read of them is, and nobody must take them for blocks that never were.
    pub(super) fn forget_directory(&self, position: usize) -> u64 {
        let (mut from, mut forgotten) = (0, 0);
        loop {
            let mut removed = Vec::new();
            let mut residents = self.residents.lock();
            let cache = &mut residents.cache;
            let until = cache.table.slot_count().min(from + WALK_BATCH);
            for slot in from..until {
                let entry = cache.table.at(slot).filter(|entry| !entry.is_data());
                if entry.is_some_and(|entry| usize::from(entry.directory) == position) {
                    removed.extend(cache.remove(slot));
                }
            }
            from = until;
            let end = until == cache.table.slot_count();
            drop(residents);
            forgotten += removed.len() as u64;
            self.discard(removed);
            if end {
                return forgotten;
            }
        }
    }
}

/// The slot of a block, unless it was dropped, or dropped and made again.
pub(super) fn slot_of(cache: &Cache, block: &Block) -> Option<u32> {
    let slot = cache.table.find(block.id())?;
    cache.table.at(slot).is_some_and(|entry| entry.incarnation == block.incarnation()).then_some(slot)
}
