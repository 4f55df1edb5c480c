//! The cached blocks: lookup, creation, room, publication and verification of chunks of objects.
//!
//! A block becomes visible to this process chunk by chunk as its bytes are written, and to the next start when its
//! index entry is put. Eviction removes the index entry first and the file after it, and never touches the bytes of a
//! file: whoever holds a descriptor goes on reading what it promised.

pub(super) mod block;
mod part_checksums;
mod relief;
pub(super) mod scrub;

use std::io;
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use cavern_proto::BlockId;
use cavern_proto::chunk::chunk_range;

use self::block::CachedBlock;
use self::part_checksums::PartChecksums;
use super::block::Block;
use super::block_file::{ReadError, ReadWait};
use super::error::{StoreError, is_out_of_space};
use super::index;
use super::placement;
use super::slab::{Entry, Lookup, hash_of};
use super::space::{UNIT_BYTES, units_of_chunks};
use super::table::{BlockTable, Touch};

/// The cached blocks of a worker.
#[derive(Debug)]
pub struct CacheStore {
    table: Arc<BlockTable>,
    part_checksums: PartChecksums,
}

impl CacheStore {
    pub(super) fn new(table: Arc<BlockTable>) -> Self {
        Self { table, part_checksums: PartChecksums::new() }
    }

    /// Finds a block, and counts the use.
    pub fn get(&self, id: &BlockId, touch: Touch) -> Lookup<CachedBlock> {
        self.table.get(id, touch, Entry::look_up_cached)
    }

    /// The block, if it is here. *Blocking* when it is closed.
    pub fn find(&self, id: &BlockId, touch: Touch) -> Option<Arc<CachedBlock>> {
        match self.get(id, touch) {
            Lookup::Open(block) => Some(block),
            Lookup::Closed => self.load(id),
            Lookup::Other | Lookup::Absent => None,
        }
    }

    /// Opens a block that is here but closed; `None` when it has gone, or its file has. *Blocking*.
    pub fn load(&self, id: &BlockId) -> Option<Arc<CachedBlock>> {
        let (place, verified) = {
            let residents = self.table.lock();
            let entry = residents.cache.slab.get(id)?;
            let cached = entry.cached()?;
            if let Some(block) = &cached.open {
                return Some(block.clone());
            }
            (self.table.place(entry), cached.verified)
        };
        let directory = &self.table.directories[place.directory];
        let record = match directory.index.get(id) {
            Ok(record) => record.filter(|record| record.incarnation == place.incarnation),
            Err(error) => {
                self.table.directory_failed(place.directory, "reading the block index", &error);
                None
            }
        };
        let incarnation = place.incarnation;
        let opened =
            record.ok_or(io::ErrorKind::NotFound.into()).and_then(|record| CachedBlock::open(place, &record, verified));
        match opened {
            Ok(block) => self.keep_open(Arc::new(block)),
            Err(error) => {
                // A symbolic link is not followed: it is not what we made.
                let is_link = error.raw_os_error() == Some(rustix::io::Errno::LOOP.raw_os_error());
                if error.kind() == io::ErrorKind::NotFound || is_link {
                    self.table.metrics.corrupt_chunks.inc();
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

    /// Registers a block that was opened; gives the one that was there first.
    fn keep_open(&self, block: Arc<CachedBlock>) -> Option<Arc<CachedBlock>> {
        let mut residents = self.table.lock();
        let slab = &residents.cache.slab;
        let slot = slab.find_as(block.id(), block.incarnation())?;
        if let Some(first) = slab.at(slot)?.cached()?.open.clone() {
            return Some(first);
        }
        residents.open(slot, Block::Cached(block.clone()));
        Some(block)
    }

    /// The block, made with no chunk present if it is not here. *Blocking* when it is here but closed.
    ///
    /// # Errors
    /// A block of an fs-mode file has the name, no directory works, or the file cannot be made.
    pub fn create(
        &self,
        id: &BlockId,
        length: u32,
        mount_id: u32,
        touch: Touch,
    ) -> Result<Arc<CachedBlock>, StoreError> {
        match self.get(id, Touch::None) {
            Lookup::Open(block) => return Ok(block),
            Lookup::Closed => {
                if let Some(block) = self.load(id) {
                    return Ok(block);
                }
            }
            Lookup::Other => return Err(StoreError::Mismatch("the content id stands for another block".to_owned())),
            Lookup::Absent => {}
        }
        let directory = self.choose_directory(id, length)?;
        let mut entry = Entry::new(*id, self.table.new_incarnation(), length, mount_id, directory as u8);
        let made = CachedBlock::create(self.table.place(&entry));
        let failed = |source| self.table.not_made(directory, "creating a block file", source, StoreError::Full);
        let block = Arc::new(made.map_err(failed)?);
        entry.last_used = self.table.now();
        entry.shared = touch == Touch::Open;
        let mut residents = self.table.lock();
        if residents.cache.slab.find(id).is_some() {
            // Somebody else was faster: theirs is the block, ours goes again.
            drop(residents);
            let _ = std::fs::remove_file(block.path());
            return self.find(id, Touch::None).ok_or(StoreError::Dropped);
        }
        residents.insert(entry, Block::Cached(block.clone()));
        Ok(block)
    }

    fn choose_directory(&self, id: &BlockId, length: u32) -> Result<usize, StoreError> {
        let mut candidates = self.table.candidates();
        if candidates.is_empty() {
            return Err(StoreError::NoDirectory);
        }
        candidates.retain(|candidate| candidate.capacity > 0);
        let need = u64::from(length.div_ceil(UNIT_BYTES));
        placement::choose(&candidates, hash_of(id), need).ok_or(StoreError::Full)
    }

    /// Accounts for chunks that are about to be written, evicting other blocks if need be, those of the same mount
    /// first where it has its share. Every chunk must end in [`Self::write`] or [`Self::release`].
    ///
    /// # Errors
    /// No room, or the block was dropped.
    pub fn reserve(&self, block: &CachedBlock, chunks: Range<u32>) -> Result<(), StoreError> {
        let units = units_of_chunks(chunks, block.length());
        let mut residents = self.table.lock();
        let cache = &mut residents.cache;
        // Nothing is evicted for a block that is gone; one that is here stays, because the caller holds it.
        let slot = cache.slab.find_as(block.id(), block.incarnation()).ok_or(StoreError::Dropped)?;
        cache.keep_share(block.directory(), block.mount_id(), u64::from(units));
        cache.make_room(block.directory(), u64::from(units)).map_err(|_| StoreError::Full)?;
        cache.charge(slot, i64::from(units));
        Ok(())
    }

    /// Gives back the room of chunks that were not written after all, or are dropped.
    pub fn release(&self, block: &CachedBlock, chunks: impl IntoIterator<Item = u32>) {
        let units = units_of_chunks(chunks, block.length());
        let mut residents = self.table.lock();
        let cache = &mut residents.cache;
        if let Some(slot) = cache.slab.find_as(block.id(), block.incarnation()) {
            cache.charge(slot, -i64::from(units));
        }
    }

    /// Writes a chunk, given in pieces, whose room is accounted for, and makes it visible. Where the file system takes
    /// no more, others are evicted, once. *Blocking*.
    ///
    /// # Errors
    /// [`StoreError::Full`], or the disk failed.
    pub fn write(&self, block: &CachedBlock, index: u32, pieces: &[Bytes]) -> Result<(), StoreError> {
        let written = match block.write_chunk(index, pieces) {
            Err(error) if is_out_of_space(&error) => {
                self.table.out_of_space(block.directory());
                block.write_chunk(index, pieces)
            }
            written => written,
        };
        let crc = written.map_err(|source| match is_out_of_space(&source) {
            true => StoreError::Full,
            false => self.table.disk_failed(block, "writing a block file", source),
        })?;
        self.table.disk_succeeded(block);
        let mut state = block.state();
        if let Some(slot) = state.crcs.get_mut(index as usize) {
            *slot = crc;
        }
        state.present.insert(index);
        state.verified.insert(index);
        Ok(())
    }

    /// Puts the index entry of a block as it is now, unless the block was dropped.
    ///
    /// # Errors
    /// The index cannot be written.
    pub(crate) fn record(&self, block: &CachedBlock) -> Result<(), StoreError> {
        let records = &self.table.directories[block.directory()].index;
        records.put(block.id(), || (!block.is_dead()).then(|| block.record())).map_err(|error| {
            if index::is_out_of_space(&error) {
                self.table.out_of_space(block.directory());
                return StoreError::Full;
            }
            self.table.disk_failed(block, "writing the block index", io::Error::other(error))
        })
    }

    /// Checks the chunks that are present but not yet believed; bad ones are dropped. *Blocking*.
    ///
    /// # Errors
    /// The disk failed.
    pub(crate) fn verify(&self, block: &CachedBlock, chunks: Range<u32>) -> Result<(), StoreError> {
        let doubtful: Vec<u32> = {
            let state = block.state();
            chunks.filter(|index| state.present.contains(*index) && !state.verified.contains(*index)).collect()
        };
        self.check(block, doubtful).1
    }

    /// Checks chunks that somebody found to be wrong; those that are, are dropped. *Blocking*.
    ///
    /// # Errors
    /// As [`Self::verify`].
    pub fn recheck(&self, block: &CachedBlock, chunks: &[u32]) -> Result<(), StoreError> {
        let present: Vec<u32> = {
            let mut state = block.state();
            chunks.iter().for_each(|index| state.verified.remove(*index));
            chunks.iter().copied().filter(|index| state.present.contains(*index)).collect()
        };
        self.check(block, present).1
    }

    /// Compares chunks with their checksums, up to one that cannot be read: those that are right are believed, bad ones
    /// dropped. Gives the bytes that the disk was asked for, whatever came of that. *Blocking*.
    fn check(&self, block: &CachedBlock, chunks: Vec<u32>) -> (u64, Result<(), StoreError>) {
        let (mut bad, mut bytes, mut buffer, mut outcome) = (Vec::new(), 0, Vec::new(), Ok(()));
        for index in chunks {
            bytes += chunk_range(index, block.length()).len() as u64;
            match block.check_chunk(index, &mut buffer) {
                Ok(true) => {
                    let mut state = block.state();
                    if state.present.contains(index) {
                        state.verified.insert(index);
                    }
                }
                Ok(false) => bad.push(index),
                Err(source) => {
                    outcome = Err(self.table.disk_failed(block, "reading", source));
                    break;
                }
            }
        }
        self.drop_chunks(block, &bad);
        (bytes, outcome)
    }

    /// Forgets chunks whose bytes are not what they should be; they are fetched again when asked for.
    fn drop_chunks(&self, block: &CachedBlock, chunks: &[u32]) {
        if chunks.is_empty() {
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
        self.table.metrics.corrupt_chunks.inc_by(dropped.len() as u64);
        tracing::warn!(block = %block.id(), file = %block.path().display(), chunks = ?dropped,
            "dropped chunks with a wrong checksum; they will be fetched again");
        self.release(block, dropped);
        if empty {
            self.forget(block.id(), block.incarnation());
        } else if let Err(error) = self.record(block) {
            tracing::warn!(block = %block.id(), %error, "the index still names dropped chunks; their checksums will \
                tell");
        }
    }

    /// Drops a block after a fill in vain, if nothing of it is here.
    pub(crate) fn forget_if_empty(&self, block: &CachedBlock) {
        if block.state().present.count() == 0 {
            // Units are those of other fills of the same block that still run.
            self.remove_if(block.id(), |entry| entry.incarnation == block.incarnation() && entry.units == 0);
        }
    }

    /// Drops a cached block on request; gives the bytes that it took.
    pub fn remove(&self, id: &BlockId) -> Option<u64> {
        self.remove_if(id, |_| true)
    }

    fn forget(&self, id: &BlockId, incarnation: u64) {
        self.remove_if(id, |entry| entry.incarnation == incarnation);
    }

    fn remove_if(&self, id: &BlockId, is_meant: impl FnOnce(&Entry) -> bool) -> Option<u64> {
        let mut residents = self.table.lock();
        let cache = &mut residents.cache;
        let slot = cache.slab.find(id)?;
        cache.slab.at(slot).filter(|entry| entry.cached().is_some() && is_meant(entry))?;
        let units = cache.discard(slot)?;
        Some(u64::from(units) * u64::from(UNIT_BYTES))
    }

    /// CRC32C of each part of `bytes`, which are whole parts of chunks of a cached block that have been verified.
    ///
    /// # Errors
    /// A chunk has to be read for them, and cannot be, or is not what it was.
    pub fn part_checksums(
        &self,
        block: &CachedBlock,
        bytes: &Range<u32>,
        wait: ReadWait,
    ) -> Result<Vec<u32>, ReadError> {
        self.part_checksums.of(block, bytes, wait)
    }
}
