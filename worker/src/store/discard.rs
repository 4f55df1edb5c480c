//! What is left of blocks that have gone from the table: their index entries and files.

use std::io;

use super::block_file::BlockPlace;
use super::eviction::Cache;
use super::slab::Entry;
use super::table::{BlockTable, Eviction};

impl BlockTable {
    /// A block has gone: nothing more is kept in its file, and clients that have descriptors of it are told.
    pub(super) fn announce(&self, removed: &Entry) {
        if let Some(block) = removed.block() {
            block.kill();
        }
        if removed.shared {
            // What does not fit is dropped: clients close idle descriptors by themselves.
            let _ = self.evictions.try_send(Eviction { id: removed.id, incarnation: removed.incarnation });
        }
    }

    /// Removes the file of a block. *Blocking*.
    ///
    /// # Errors
    /// It is still there.
    pub(super) fn delete_file(&self, place: &BlockPlace, action: &'static str) -> Result<(), io::Error> {
        match std::fs::remove_file(&place.path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                // Somebody else's directory in the place of a file is no fault of the disk, and not ours to delete.
                if error.kind() != io::ErrorKind::IsADirectory {
                    self.directory_failed(place.directory, action, &error);
                }
                Err(error)
            }
            _ => Ok(()),
        }
    }

    /// Removes what is left of a cached block that has gone.
    pub(super) fn delete(&self, entry: &Entry) {
        self.announce(entry);
        let place = self.place(entry);
        let directory = &self.directories[place.directory];
        if directory.is_healthy() {
            directory.index.forget(&entry.id, entry.incarnation);
            let _ = self.delete_file(&place, "deleting a block file");
        }
    }

    /// Evicts what exceeds the capacity after a start with a smaller one. What exceeds the share of a mount is for
    /// `CacheStore::relieve`.
    pub(super) fn fit_capacity(&self) {
        for position in 0..self.directories.len() {
            let _ = self.lock().cache.make_room(position, 0);
        }
    }

    /// Forgets all cached blocks of a directory that failed; gives how many. Data blocks stay known: what can still be
    /// read of them is, and nobody must take them for blocks that never were.
    pub(super) fn forget_directory(&self, position: usize) -> u64 {
        let mut forgotten = 0;
        let forget = |cache: &mut Cache, slot: u32| {
            let entry = cache.slab.at(slot).filter(|entry| entry.cached().is_some())?;
            if usize::from(entry.directory) == position { cache.discard(slot) } else { None }
        };
        self.walk(forget, |_| forgotten += 1);
        forgotten
    }
}
