//! Room that was given, and not used, comes back.
//!
//! Room is given by the chunk, and ahead of writers, so that they ask rarely. What they do not write in time they have
//! to ask for once more (`RESERVATION`), and the block counts with what its file takes of the disk from then on. A
//! small file takes less than a chunk, too.

use std::collections::VecDeque;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;

use cavern_proto::BlockId;
use cavern_proto::chunk::{RESERVATION, chunk_range, chunks_touching};
use parking_lot::Mutex;
use rustix::fs::FallocateFlags;
use tokio::time::Instant;

use super::{DataState, chunks_with_data, fallocate};
use crate::store::block::Block;
use crate::store::table::{Entry, UNIT_BYTES};
use crate::store::{Store, StoreError, is_out_of_space};

/// Bytes of what `stat` counts as one block.
const STAT_BLOCK_BYTES: u64 = 512;

/// Blocks in which room was given, each once, nearly in the order of the time when it was.
pub(in crate::store) type OpenReservations = Mutex<VecDeque<(Instant, BlockId)>>;

/// What a file takes of the disk, in accounting units.
pub(super) fn units_of(stat: &std::fs::Metadata) -> u32 {
    u32::try_from((stat.blocks() * STAT_BLOCK_BYTES).div_ceil(u64::from(UNIT_BYTES))).unwrap_or(u32::MAX)
}

impl Store {
    /// Room was given in a block. The caller holds the residents' lock, under which that was done.
    pub(super) fn note_reservation(&self, id: &BlockId, data: &DataState) {
        let now = Instant::now();
        if data.given.lock().replace(now).is_none() {
            self.unsettled.lock().push_back((now, *id));
        }
    }

    /// Takes back what was given long enough ago and was not used. *Blocking*.
    pub fn settle(&self) {
        self.settle_until(Instant::now().checked_sub(RESERVATION));
    }

    /// The same for what was given until then.
    pub(super) fn settle_until(&self, until: Option<Instant>) {
        let Some(until) = until else { return };
        let due = || {
            let mut unsettled = self.unsettled.lock();
            let (_, id) = unsettled.pop_front_if(|(given, _)| *given <= until)?;
            Some(id)
        };
        while let Some(id) = due() {
            if let Some(again) = self.settle_block(&id, until) {
                self.unsettled.lock().push_back((again, id));
            }
        }
    }

    /// When room was given in it once more, and it has not been settled therefore.
    fn settle_block(&self, id: &BlockId, until: Instant) -> Option<Instant> {
        let (data, path, incarnation) = {
            let residents = self.residents.lock();
            let table = &residents.cache.table;
            let entry = table.find(id).and_then(|slot| table.at(slot))?;
            (entry.data.clone()?, self.place(entry).path, entry.incarnation)
        };
        let looked = Instant::now();
        let used = File::open(path).and_then(|file| {
            let stat = file.metadata()?;
            Ok((chunks_with_data(&file, u32::try_from(stat.len()).unwrap_or(u32::MAX))?, units_of(&stat)))
        });
        let mut residents = self.residents.lock();
        let cache = &mut residents.cache;
        let slot = cache.table.find(id)?;
        let is_same = |entry: &Entry| {
            entry.incarnation == incarnation && entry.data.as_ref().is_some_and(|known| Arc::ptr_eq(known, &data))
        };
        let before = cache.table.at(slot).filter(|entry| is_same(entry))?.units;
        let mut given = data.given.lock();
        if let Some(again) = given.filter(|given| *given > until) {
            return Some(again);
        }
        // Its disk is troubled: nothing is known of it for now.
        let Ok((mut chunks, units)) = used else {
            *given = Some(looked);
            return Some(looked);
        };
        *given = None;
        data.allocated.lock().iter().for_each(|chunk| {
            chunks.insert(chunk);
        });
        *data.charged.lock() = chunks;
        cache.charge(slot, units.saturating_sub(before));
        cache.discharge(slot, before.saturating_sub(units));
        None
    }

    /// Has the file system set aside what was reserved of a block, so that it stays until it is written, zeroed or
    /// freed. Where that cannot be done (no such file system) it is reserved like any other room. *Blocking*.
    ///
    /// # Errors
    /// [`StoreError::NoSpace`], or the disk failed.
    pub fn allocate_data(&self, block: &Block, ranges: &[Range<u32>]) -> Result<(), StoreError> {
        let Some(data) = block.data() else { return Err(StoreError::NoSuchBlock) };
        let writer = block.writer().map_err(|error| self.disk_failed(block, "allocating in a data block", error))?;
        for range in ranges.iter().filter(|range| !range.is_empty()) {
            let chunks = chunks_touching(range.start, range.len() as u32);
            let whole =
                chunk_range(chunks.start, block.length()).start..chunk_range(chunks.end - 1, block.length()).end;
            match fallocate(&writer, FallocateFlags::KEEP_SIZE, &whole) {
                Ok(true) => {
                    let mut allocated = data.allocated.lock();
                    chunks.for_each(|chunk| {
                        allocated.insert(chunk);
                    });
                }
                Ok(false) => return Ok(()),
                Err(error) if is_out_of_space(&error) => {
                    self.out_of_space(block);
                    return Err(StoreError::NoSpace);
                }
                Err(error) => return Err(self.disk_failed(block, "allocating in a data block", error)),
            }
        }
        Ok(())
    }
}
