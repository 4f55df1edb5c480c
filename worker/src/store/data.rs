//! Blocks of fs-mode files: data, not cache.
//!
//! Until the bucket has it, such a block may be the only copy of what somebody wrote. Nothing drops one but a request
//! that names it: no eviction, no watermark, no scrubber, no damaged index, no disk that fails now and then.
//!
//! **The file system is their index.** The name of the file says which block it is and how long, and what was never
//! written in it is a hole. There is no record beside it that could be lost, or could say something else: a start walks
//! over these files. What is written survives the death of the process without further ado, and a sync needs the disk
//! for the file and its folder alone.
//!
//! **The end of a block's file** is where the block was written, or zeroed, last; all behind it is zeros. Where a file
//! of one block was written as programs write, it ends where its block's file ends, and whoever has a descriptor reads
//! it with no other look at its length. A cut of the file cuts the block's file, too ([`DataStore::cut`]). That it has
//! not been done, or that somebody died between his writing and his telling the master of it, shows in a longer one.
//! Encrypted blocks have files of the whole length.
//!
//! **Room** is accounted for by chunk, before a chunk is written for the first time, and cached blocks are evicted for
//! it. Which chunks are charged is kept in memory while the process lives, also for blocks that are closed, because
//! clients may hold descriptors and write what they reserved a while later; after that, and after a start, it is what
//! the file holds (`reservations`).
//!
//! Locks are taken in this order: the stripe that a block is made and freed under (held during the I/O of just that, on
//! threads that may wait), then that of the table's residents, then those of the block's state (for a moment).

mod allocation;
pub(super) mod block;
pub(super) mod draft;
mod orphans;
mod reservations;
mod sync;

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::sync::Arc;

use cavern_conf::Failpoint;
use cavern_conf::process::LogLimit;
use cavern_proto::BlockId;
use parking_lot::Mutex;
use tokio::time::Instant;

use self::block::DataBlock;
use super::block::Block;
use super::block_file::BlockPlace;
use super::error::StoreError;
use super::slab::{Entry, Lookup, hash_of};
use super::space::UNIT_BYTES;
use super::table::{BlockTable, Touch};

/// Locks that keep the making and the freeing of one block apart.
const STRIPES: usize = 64;
/// A request whose block is freed under its hands begins anew this often.
const MAX_ROUNDS: usize = 3;

/// Which block of an fs-mode file a request means.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct DataTarget {
    pub id: BlockId,
    /// Bytes of the block, written or not.
    pub length: u32,
    pub mount_id: u32,
}

impl DataTarget {
    /// Where the block begins in its file.
    pub fn start(&self) -> u64 {
        u64::from(self.id.index) * u64::from(self.length)
    }
}

/// The blocks of fs-mode files of a worker.
///
/// A block is absent; made, by a reservation, a write or a draft; then written, zeroed and synced as often as somebody
/// wants; and freed, by name. Whoever makes or frees it holds its stripe.
#[derive(Debug)]
pub struct DataStore {
    table: Arc<BlockTable>,
    stripes: Vec<Mutex<()>>,
    /// Blocks in which room was given, each once, nearly in the order of the time when it was.
    reservations: Mutex<VecDeque<(Instant, BlockId)>>,
    /// Blocks that clients say they could not sync.
    unsynced: LogLimit<()>,
}

/// A name that is meant for a block of an fs-mode file.
fn of_an_object() -> StoreError {
    StoreError::Mismatch("the content id stands for a block of an object".to_owned())
}

impl DataStore {
    pub(super) fn new(table: Arc<BlockTable>) -> Self {
        let stripes = (0..STRIPES).map(|_| Mutex::new(())).collect();
        Self { table, stripes, reservations: Mutex::default(), unsynced: LogLimit::default() }
    }

    /// Keeps apart those who make and free one block.
    fn stripe(&self, id: &BlockId) -> &Mutex<()> {
        &self.stripes[hash_of(id) as usize % self.stripes.len()]
    }

    /// Finds a block, and counts the use.
    pub fn get(&self, id: &BlockId, touch: Touch) -> Lookup<DataBlock> {
        self.table.get(id, touch, Entry::look_up_data)
    }

    /// The block, if it is here. *Blocking* when it is closed.
    ///
    /// # Errors
    /// It is not here, has another length or is one of another mount, or its file cannot be opened.
    pub fn find(&self, target: &DataTarget, touch: Touch) -> Result<Arc<DataBlock>, StoreError> {
        let block = match self.get(&target.id, touch) {
            Lookup::Open(block) => block,
            Lookup::Closed => self.load(&target.id)?.ok_or(StoreError::NoSuchBlock)?,
            Lookup::Other => return Err(of_an_object()),
            Lookup::Absent => return Err(StoreError::NoSuchBlock),
        };
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

    /// Opens a block that is here but closed; `None` when it has gone. *Blocking*.
    fn load(&self, id: &BlockId) -> Result<Option<Arc<DataBlock>>, StoreError> {
        for _ in 0..MAX_ROUNDS {
            let (place, state) = {
                let residents = self.table.lock();
                let Some(entry) = residents.cache.slab.get(id) else { return Ok(None) };
                let data = entry.data().ok_or_else(of_an_object)?;
                if let Some(block) = &data.open {
                    return Ok(Some(block.clone()));
                }
                (self.table.place(entry), data.state.clone())
            };
            let (directory, path, incarnation) = (place.directory, place.path.clone(), place.incarnation);
            match DataBlock::open(place, state) {
                Ok(block) => {
                    if let Some(block) = self.keep_open(Arc::new(block)) {
                        return Ok(Some(block));
                    }
                }
                Err(source) => {
                    if source.kind() == io::ErrorKind::NotFound {
                        // It may be about to be freed: then its name goes as well.
                        let _freed = self.stripe(id).lock();
                        if !self.table.is_resident(id, incarnation) {
                            continue;
                        }
                    }
                    tracing::error!(block = %id, file = %path.display(), error = %source,
                        "the file of a block of an fs-mode file cannot be opened: what it holds is missing until it is \
                         back");
                    if !matches!(source.kind(), io::ErrorKind::NotFound | io::ErrorKind::InvalidData) {
                        self.table.directory_failed(directory, "opening a data block", &source);
                    }
                    return Err(StoreError::Io { action: "opening a data block", source });
                }
            }
        }
        Err(StoreError::Dropped)
    }

    /// Registers a block that was opened, or gives the one that was there first; `None` when it was freed, or opened
    /// and closed again, meanwhile.
    fn keep_open(&self, block: Arc<DataBlock>) -> Option<Arc<DataBlock>> {
        let mut residents = self.table.lock();
        let slab = &residents.cache.slab;
        let slot = slab.find_as(block.id(), block.incarnation())?;
        let data = slab.at(slot)?.data()?;
        if let Some(first) = &data.open {
            return Some(first.clone());
        }
        if data.state.as_ref().is_some_and(|known| !Arc::ptr_eq(known, block.state())) {
            return None;
        }
        residents.open(slot, Block::Data(block.clone()));
        Some(block)
    }

    /// Which of those that ever had its name a block is, and the bytes that it takes; `None` when it is not here.
    pub fn usage(&self, id: &BlockId) -> Option<(u64, u64)> {
        let residents = self.table.lock();
        let entry = residents.cache.slab.get(id).filter(|entry| entry.data().is_some())?;
        Some((entry.incarnation, u64::from(entry.units) * u64::from(UNIT_BYTES)))
    }

    /// Reads bytes of a block. *Blocking*.
    ///
    /// # Errors
    /// Those of [`Self::find`], or the disk failed.
    pub fn read(&self, target: &DataTarget, offset: u32, into: &mut [u8]) -> Result<(), StoreError> {
        let block = self.find(target, Touch::None)?;
        block.read(offset, into).map_err(|source| self.table.disk_failed(&block, "reading a data block", source))
    }

    /// Which file a block is, by its incarnation, when it was last written to, nanoseconds since the Unix epoch, and
    /// where it ends. *Blocking*.
    ///
    /// # Errors
    /// Those of [`Self::find`], or the disk failed.
    pub fn last_write(&self, target: &DataTarget) -> Result<(u64, i64, u32), StoreError> {
        let block = self.find(target, Touch::None)?;
        let looked = block.modified_ns().and_then(|modified_ns| Ok((modified_ns, block.end()?)));
        let (modified_ns, end) =
            looked.map_err(|source| self.table.disk_failed(&block, "looking at a data block", source))?;
        Ok((block.incarnation(), modified_ns, end))
    }

    /// The descriptor of a block for a client, which is told when the block goes from now on. *Blocking*.
    ///
    /// # Errors
    /// The file cannot be opened.
    pub fn share(&self, block: &DataBlock) -> Result<Arc<File>, StoreError> {
        self.get(block.id(), Touch::Open);
        block.writer().map_err(|source| self.table.disk_failed(block, "opening a data block", source))
    }

    /// Removes a block for good, whichever mount it is of; gives the bytes that it took, or `None` when it is not here
    /// or its file cannot be deleted. Descriptors of it go on working. *Blocking*.
    pub fn free(&self, id: &BlockId) -> Option<u64> {
        self.free_if(id, |_| true)
    }

    /// As [`Self::free`]; a block of another mount stays.
    pub fn free_of(&self, target: &DataTarget) -> Option<u64> {
        self.free_if(&target.id, |place| place.mount_id == target.mount_id)
    }

    /// As [`Self::free`], unless `is_free` says otherwise when nobody can make the block.
    fn free_if(&self, id: &BlockId, is_free: impl FnOnce(&BlockPlace) -> bool) -> Option<u64> {
        let _alone = self.stripe(id).lock();
        let place = {
            let residents = self.table.lock();
            let entry = residents.cache.slab.get(id).filter(|entry| entry.data().is_some())?;
            self.table.place(entry)
        };
        if !is_free(&place) {
            return None;
        }
        // Not synced: should a power failure bring the file back, it is freed once more.
        self.table.delete_file(&place, "deleting a data block").ok()?;
        Failpoint::BlockFreed.pass();
        let removed = {
            let mut residents = self.table.lock();
            let slot = residents.cache.slab.find(id)?;
            residents.cache.remove(slot)?
        };
        self.table.announce(&removed);
        Some(u64::from(removed.units) * u64::from(UNIT_BYTES))
    }
}

#[cfg(test)]
mod tests;
