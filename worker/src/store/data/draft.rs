//! Data blocks that begin with bytes from elsewhere: they appear with all of them, or not at all. So does a block that
//! is copied from another worker: nobody takes what has not come yet for zeros.
//!
//! A draft is a file beside the others, under a name that no block has. It takes the block's name when it is whole. A
//! start deletes those that a crash has left.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;

use cavern_proto::ChunkMap;
use cavern_proto::chunk::chunks_touching;
use parking_lot::Mutex;

use super::block::{DataBlock, bytes_at_first, lengthen};
use super::{DataStore, DataTarget};
use crate::store::block_file::BlockPlace;
use crate::store::error::StoreError;
use crate::store::files::{create_file, open_to_read};
use crate::store::sealing::Sealed;
use crate::store::table::Touch;
use crate::store::units::units_of_chunks;

/// End of the name of a draft's file.
pub(super) const SUFFIX: &str = ".draft";

/// A data block that is being made. Dropping it gives it up.
#[derive(Debug)]
pub struct Draft {
    place: BlockPlace,
    file: Arc<File>,
    path: PathBuf,
    /// Chunks that were written to.
    written: Mutex<ChunkMap>,
    /// Where the directory is encrypted.
    sealed: Option<Sealed>,
}

impl Drop for Draft {
    fn drop(&mut self) {
        // It has another name by now if it became a block.
        let _ = std::fs::remove_file(&self.path);
    }
}

impl DataStore {
    /// A draft of a data block that will begin with so many bytes, as far as that is known; `None` when the block is
    /// here. *Blocking*.
    ///
    /// # Errors
    /// [`StoreError::NoSpace`], or no directory works.
    pub fn begin_draft(&self, target: &DataTarget, bytes: u32) -> Result<Option<Draft>, StoreError> {
        if !self.get(&target.id, Touch::None).is_absent() {
            return Ok(None);
        }
        let chunks = chunks_touching(0, bytes.min(target.length));
        let place = self.choose_place(target, units_of_chunks(chunks, target.length))?;
        let mut path = place.path.clone().into_os_string();
        path.push(SUFFIX);
        let path = PathBuf::from(path);
        match create_file(&path, bytes_at_first(&place)) {
            Ok(file) => {
                let (sealed, written) = (place.sealed(), Mutex::default());
                Ok(Some(Draft { place, file: Arc::new(file), path, written, sealed }))
            }
            Err(error) => Err(self.draft_failed(place.directory, error)),
        }
    }

    /// Writes to a draft. Cached blocks are evicted for it, and its room is charged when it becomes the block.
    /// *Blocking*.
    ///
    /// # Errors
    /// [`StoreError::NoSpace`], or the disk failed.
    pub fn write_draft(&self, draft: &Draft, offset: u32, bytes: &[u8]) -> Result<(), StoreError> {
        let units = {
            let mut written = draft.written.lock();
            chunks_touching(offset, bytes.len() as u32).for_each(|index| {
                written.insert(index);
            });
            units_of_chunks(written.iter(), draft.place.length)
        };
        self.make_room(draft.place.directory, units)?;
        let written = match &draft.sealed {
            Some(sealed) => {
                let _alone = sealed.alone();
                sealed.write(&draft.file, offset, bytes).map_err(|(_, error)| error)
            }
            None => draft.file.write_all_at(bytes, u64::from(offset)),
        };
        written.map_err(|error| self.draft_failed(draft.place.directory, error))
    }

    /// Has a draft reach so far at least, with zeros behind what was written to it. *Blocking*.
    ///
    /// # Errors
    /// The disk failed.
    pub fn lengthen_draft(&self, draft: &Draft, end: u32) -> Result<(), StoreError> {
        lengthen(&draft.file, end.min(draft.place.length))
            .map_err(|error| self.draft_failed(draft.place.directory, error))
    }

    /// Has on disk what was written to a draft when this returns. *Blocking*.
    ///
    /// # Errors
    /// The disk failed.
    pub fn sync_draft(&self, draft: &Draft) -> Result<(), StoreError> {
        draft.file.sync_data().map_err(|error| self.draft_failed(draft.place.directory, error))
    }

    /// Makes a draft the block, unless the block has come to be meanwhile. *Blocking*.
    ///
    /// # Errors
    /// [`StoreError::NoSpace`], or the disk failed.
    pub fn publish_draft(&self, draft: &Draft) -> Result<(), StoreError> {
        self.publish_draft_if(draft, || true)?;
        Ok(())
    }

    /// As [`Self::publish_draft`], unless `is_wanted` says otherwise when nobody can free the block; says whether the
    /// draft has become the block.
    ///
    /// # Errors
    /// As [`Self::publish_draft`].
    pub fn publish_draft_if(&self, draft: &Draft, is_wanted: impl FnOnce() -> bool) -> Result<bool, StoreError> {
        let Draft { place, file, path, written, .. } = draft;
        let _alone = self.stripe(&place.id).lock();
        if !self.get(&place.id, Touch::None).is_absent() || !is_wanted() {
            return Ok(false);
        }
        let chunks = written.lock().clone();
        let units = units_of_chunks(chunks.iter(), place.length);
        let named = std::fs::rename(path, &place.path).and_then(|()| open_to_read(&place.path));
        let reader = named.map_err(|error| self.draft_failed(place.directory, error))?;
        self.enter(&Arc::new(DataBlock::of_draft(place.clone(), reader, file.clone(), chunks)), units)?;
        Ok(true)
    }

    /// Makes a draft the block, with its bytes and its name on disk when this returns. *Blocking*.
    ///
    /// # Errors
    /// As [`Self::publish_draft`].
    pub fn publish_draft_on_disk(&self, draft: &Draft) -> Result<(), StoreError> {
        // Before it can be found by anybody.
        self.sync_draft(draft)?;
        self.publish_draft(draft)?;
        let BlockPlace { id, length, mount_id, .. } = draft.place;
        self.sync(&[DataTarget { id, length, mount_id }])
    }

    fn draft_failed(&self, directory: usize, source: io::Error) -> StoreError {
        self.table.not_made(directory, "making a data block", source, StoreError::NoSpace)
    }
}
