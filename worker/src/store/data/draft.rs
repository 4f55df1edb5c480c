//! Data blocks that begin with bytes from elsewhere: they appear with all of them, or not at all.
//!
//! A draft is a file beside the others, under a name that no block has. It takes the block's name when it is whole. A
//! start deletes those that a crash has left.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;

use super::block::{DataBlock, chunks_of};
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
    /// What is written to it.
    bytes: Range<u32>,
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
    /// A draft of a data block that will begin with so many bytes; `None` when the block is here. *Blocking*.
    ///
    /// # Errors
    /// [`StoreError::NoSpace`], or no directory works.
    pub fn begin_draft(&self, target: &DataTarget, bytes: u32) -> Result<Option<Draft>, StoreError> {
        if !self.get(&target.id, Touch::None).is_absent() {
            return Ok(None);
        }
        let bytes = 0..bytes.min(target.length);
        let place = self.choose_place(target, units_of_chunks(chunks_of([bytes.clone()]).iter(), target.length))?;
        let mut path = place.path.clone().into_os_string();
        path.push(SUFFIX);
        let path = PathBuf::from(path);
        match create_file(&path, target.length) {
            Ok(file) => Ok(Some(Draft { sealed: place.sealed(), place, file: Arc::new(file), path, bytes })),
            Err(error) => Err(self.draft_failed(place.directory, error)),
        }
    }

    /// Writes to a draft, within what was asked for it. *Blocking*.
    ///
    /// # Errors
    /// [`StoreError::NoSpace`], or the disk failed.
    pub fn write_draft(&self, draft: &Draft, offset: u32, bytes: &[u8]) -> Result<(), StoreError> {
        let written = match &draft.sealed {
            Some(sealed) => {
                let _alone = sealed.alone();
                sealed.write(&draft.file, offset, bytes).map_err(|(_, error)| error)
            }
            None => draft.file.write_all_at(bytes, u64::from(offset)),
        };
        written.map_err(|error| self.draft_failed(draft.place.directory, error))
    }

    /// Makes a draft the block, unless the block has come to be meanwhile. *Blocking*.
    ///
    /// # Errors
    /// [`StoreError::NoSpace`], or the disk failed.
    pub fn publish_draft(&self, draft: &Draft) -> Result<(), StoreError> {
        let Draft { place, file, path, bytes, .. } = draft;
        let _alone = self.stripe(&place.id).lock();
        if !self.get(&place.id, Touch::None).is_absent() {
            return Ok(());
        }
        let chunks = chunks_of([bytes.clone()]);
        let units = units_of_chunks(chunks.iter(), place.length);
        let named = std::fs::rename(path, &place.path).and_then(|()| open_to_read(&place.path));
        let reader = named.map_err(|error| self.draft_failed(place.directory, error))?;
        self.enter(&Arc::new(DataBlock::of_draft(place.clone(), reader, file.clone(), chunks)), units)
    }

    /// Makes a draft the block, with its bytes and its name on disk when this returns. *Blocking*.
    ///
    /// # Errors
    /// As [`Self::publish_draft`].
    pub fn publish_draft_on_disk(&self, draft: &Draft) -> Result<(), StoreError> {
        // Before it can be found by anybody.
        draft.file.sync_data().map_err(|error| self.draft_failed(draft.place.directory, error))?;
        self.publish_draft(draft)?;
        let BlockPlace { id, length, mount_id, .. } = draft.place;
        self.sync(&[DataTarget { id, length, mount_id }])
    }

    fn draft_failed(&self, directory: usize, source: io::Error) -> StoreError {
        self.table.not_made(directory, "making a data block", source, StoreError::NoSpace)
    }
}
