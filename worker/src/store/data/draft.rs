//! Data blocks that begin with bytes from elsewhere: they appear with all of them, or not at all.
//!
//! A draft is a file beside the others, under a name that no block has. It takes the block's name when it is whole. A
//! start deletes those that a crash has left.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::{FileExt, OpenOptionsExt as _};
use std::path::PathBuf;
use std::sync::Arc;

use super::{DataState, DataTarget, chunks_of, units_of_chunks};
use crate::store::block::{Block, BlockPlace, FILE_MODE, open_to_read};
use crate::store::sealing::Sealed;
use crate::store::{Lookup, Store, StoreError, Touch, is_out_of_space};

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

impl Store {
    /// A draft of a data block that will begin with so many bytes; `None` when the block is here. *Blocking*.
    ///
    /// # Errors
    /// [`StoreError::NoSpace`], or no directory works.
    pub fn begin_draft(&self, target: &DataTarget, bytes: u32) -> Result<Option<Draft>, StoreError> {
        if !matches!(self.get(&target.id, Touch::None), Lookup::Absent) {
            return Ok(None);
        }
        let bytes = 0..bytes.min(target.length);
        let units = units_of_chunks(&chunks_of([bytes.clone()]), target.length);
        let directory = self.choose_for_data(target, units)?;
        let incarnation = self.new_incarnation();
        let DataTarget { id, length, mount_id } = *target;
        let place = BlockPlace {
            id,
            incarnation,
            length,
            mount_id,
            directory,
            path: self.directories[directory].data_path(&id, incarnation, mount_id),
            cipher: self.directories[directory].cipher.clone(),
        };
        let mut path = place.path.clone().into_os_string();
        path.push(SUFFIX);
        let path = PathBuf::from(path);
        let made = File::options().read(true).write(true).create_new(true).mode(FILE_MODE).open(&path);
        match made.and_then(|file| file.set_len(u64::from(length)).map(|()| file)) {
            Ok(file) => Ok(Some(Draft { sealed: place.sealed(), place, file: Arc::new(file), path, bytes })),
            Err(error) => Err(self.draft_failed(directory, error)),
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
        if !matches!(self.get(&place.id, Touch::None), Lookup::Absent) {
            return Ok(());
        }
        let chunks = chunks_of([bytes.clone()]);
        let units = units_of_chunks(&chunks, place.length);
        let named = std::fs::rename(path, &place.path).and_then(|()| open_to_read(&place.path));
        let reader = named.map_err(|error| self.draft_failed(place.directory, error))?;
        let state = Arc::new(DataState::new(chunks));
        let block = Arc::new(Block::of_data(place.clone(), reader, Some(file.clone()), state));
        if self.enter_data(&block, units) {
            return Ok(());
        }
        let _ = std::fs::remove_file(&place.path);
        Err(StoreError::NoSpace)
    }

    /// The same; its bytes and its name are on disk when this returns. *Blocking*.
    ///
    /// # Errors
    /// As [`Self::publish_draft`].
    pub fn publish_draft_on_disk(&self, draft: &Draft) -> Result<(), StoreError> {
        // Before it can be found by anybody.
        draft.file.sync_data().map_err(|error| self.draft_failed(draft.place.directory, error))?;
        self.publish_draft(draft)?;
        let BlockPlace { id, length, mount_id, .. } = draft.place;
        self.sync_data(&[DataTarget { id, length, mount_id }])
    }

    fn draft_failed(&self, directory: usize, source: io::Error) -> StoreError {
        if is_out_of_space(&source) {
            self.directory_out_of_space(directory);
            return StoreError::NoSpace;
        }
        self.directory_failed(directory, "making a data block", &source);
        StoreError::Io { action: "making a data block", source }
    }
}
