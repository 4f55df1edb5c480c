//! Room that was given, and not used, comes back.
//!
//! Room is given by the chunk, and ahead of writers, so that they ask rarely. What they do not write in time they have
//! to ask for once more (`RESERVATION`), and the block counts with what its file takes of the disk from then on. A
//! small file takes less than a chunk, too.

use std::fs::File;
use std::ops::Range;
use std::sync::Arc;

use cavern_proto::BlockId;
use cavern_proto::chunk::{RESERVATION, chunk_range, chunks_touching};
use rustix::fs::FallocateFlags;
use tokio::time::Instant;

use super::DataStore;
use super::block::{DataBlock, DataState, chunks_with_data, fallocate};
use crate::store::error::{StoreError, is_out_of_space};
use crate::store::slab::Entry;
use crate::store::space::units_on_disk;

impl DataStore {
    /// Room was given in a block. The caller holds the residents' lock, under which that was done.
    pub(super) fn note_reservation(&self, id: &BlockId, data: &DataState) {
        let now = Instant::now();
        if data.given.lock().replace(now).is_none() {
            self.reservations.lock().push_back((now, *id));
        }
    }

    /// Takes back what was given long enough ago and was not used. *Blocking*.
    pub fn settle(&self) {
        self.settle_until(Instant::now().checked_sub(RESERVATION));
    }

    /// Takes back what was given until then and was not used.
    pub(super) fn settle_until(&self, until: Option<Instant>) {
        let Some(until) = until else { return };
        let due = || {
            let mut unsettled = self.reservations.lock();
            let (_, id) = unsettled.pop_front_if(|(given, _)| *given <= until)?;
            Some(id)
        };
        while let Some(id) = due() {
            if let Some(again) = self.settle_block(&id, until) {
                self.reservations.lock().push_back((again, id));
            }
        }
    }

    /// When room was given in it once more, and it has not been settled therefore.
    fn settle_block(&self, id: &BlockId, until: Instant) -> Option<Instant> {
        let (data, path, incarnation) = {
            let residents = self.table.lock();
            let entry = residents.cache.slab.get(id)?;
            (entry.data()?.state.clone()?, self.table.place(entry).path, entry.incarnation)
        };
        let looked = Instant::now();
        let used = File::open(path).and_then(|file| {
            let stat = file.metadata()?;
            Ok((chunks_with_data(&file, u32::try_from(stat.len()).unwrap_or(u32::MAX))?, units_on_disk(&stat)))
        });
        let mut residents = self.table.lock();
        let cache = &mut residents.cache;
        let slot = cache.slab.find_as(id, incarnation)?;
        let known =
            |entry: &&Entry| entry.data().and_then(|of| of.state.as_ref()).is_some_and(|of| Arc::ptr_eq(of, &data));
        let before = cache.slab.at(slot).filter(known)?.units;
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
        chunks.extend(data.allocated.lock().iter());
        *data.charged.lock() = chunks;
        cache.charge(slot, i64::from(units) - i64::from(before));
        None
    }

    /// Has the file system set aside what was reserved of a block, so that it stays until it is written, zeroed or
    /// freed. Where that cannot be done (no such file system) it is reserved like any other room. *Blocking*.
    ///
    /// # Errors
    /// [`StoreError::NoSpace`], or the disk failed.
    pub fn allocate(&self, block: &DataBlock, ranges: &[Range<u32>]) -> Result<(), StoreError> {
        let failed = |error| self.table.disk_failed(block, "allocating in a data block", error);
        let writer = block.writer().map_err(failed)?;
        for range in ranges.iter().filter(|range| !range.is_empty()) {
            let chunks = chunks_touching(range.start, range.len() as u32);
            let whole =
                chunk_range(chunks.start, block.length()).start..chunk_range(chunks.end - 1, block.length()).end;
            match fallocate(&writer, FallocateFlags::KEEP_SIZE, &whole) {
                Ok(true) => block.state().allocated.lock().extend(chunks),
                Ok(false) => return Ok(()),
                Err(error) if is_out_of_space(&error) => {
                    self.table.out_of_space(block.directory());
                    return Err(StoreError::NoSpace);
                }
                Err(error) => return Err(failed(error)),
            }
        }
        Ok(())
    }
}
