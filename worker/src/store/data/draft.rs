//! Data blocks that begin with bytes from elsewhere: they appear with all of them, or not at all. So does a block that
//! is copied from another worker: nobody takes what has not come yet for zeros.
//!
//! A draft is a file beside the others, under a name that no block has. It takes the block's name when it is whole. A
//! start deletes those that a crash has left.

use std::io;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use cavern_proto::ChunkMap;
use cavern_proto::chunk::{CHUNK_BYTES, chunks_touching};

use super::allocation::make_room_for_data;
use super::block::{DataBlock, lengthen};
use super::{DataStore, DataTarget};
use crate::store::error::StoreError;
use crate::store::space::units_of_chunks;
use crate::store::table::Touch;

/// End of the name of a draft's file.
pub(in crate::store) const SUFFIX: &str = ".draft";

/// A data block that is being made. Dropping it gives it up.
#[derive(Debug)]
pub struct Draft {
    /// Its chunks are those that were written to. Nothing is charged for them yet.
    block: Arc<DataBlock>,
    path: PathBuf,
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
        let (path, directory) = (PathBuf::from(path), place.directory);
        match DataBlock::create(place, Some(&path), ChunkMap::new()) {
            Ok(block) => Ok(Some(Draft { block: Arc::new(block), path })),
            Err(error) => Err(self.draft_failed(directory, error)),
        }
    }

    /// Writes to a draft. Cached blocks are evicted for it, and its room is charged when it becomes the block.
    /// *Blocking*.
    ///
    /// # Errors
    /// [`StoreError::NoSpace`], or the disk failed.
    pub fn write_draft(&self, draft: &Draft, offset: u32, bytes: &[u8]) -> Result<(), StoreError> {
        let block = &draft.block;
        let units = {
            let mut written = block.state().charged.lock();
            written.extend(chunks_touching(offset, bytes.len() as u32));
            units_of_chunks(written.iter(), block.length())
        };
        make_room_for_data(&mut self.table.lock().cache, block.directory(), units)?;
        block.write_bytes(offset, bytes).map_err(|(_, error)| self.draft_failed(block.directory(), error))
    }

    /// As [`Self::write_draft`], without chunks of zeros, which stay holes.
    ///
    /// # Errors
    /// As [`Self::write_draft`].
    pub fn write_draft_with_holes(&self, draft: &Draft, offset: u32, bytes: &[u8]) -> Result<(), StoreError> {
        let mut runs = runs(bytes).into_iter();
        runs.try_for_each(|run| self.write_draft(draft, offset + run.start as u32, &bytes[run]))
    }

    /// Has a draft reach so far at least, with zeros behind what was written to it. *Blocking*.
    ///
    /// # Errors
    /// The disk failed.
    pub fn lengthen_draft(&self, draft: &Draft, end: u32) -> Result<(), StoreError> {
        let block = &draft.block;
        let lengthened = block.writer().and_then(|writer| lengthen(&writer, end.min(block.length())));
        lengthened.map_err(|error| self.draft_failed(block.directory(), error))
    }

    /// Has on disk what was written to a draft when this returns. *Blocking*.
    ///
    /// # Errors
    /// The disk failed.
    pub fn sync_draft(&self, draft: &Draft) -> Result<(), StoreError> {
        let synced = rustix::fs::fdatasync(draft.block.descriptor());
        synced.map_err(|error| self.draft_failed(draft.block.directory(), error.into()))
    }

    /// Makes a draft the block, unless the block has come to be meanwhile, or `is_wanted` says otherwise when nobody
    /// can free it; says whether the draft has become the block. *Blocking*.
    ///
    /// # Errors
    /// [`StoreError::NoSpace`], or the disk failed.
    pub fn publish_draft_if(&self, draft: &Draft, is_wanted: impl FnOnce() -> bool) -> Result<bool, StoreError> {
        let Draft { block, path } = draft;
        let _alone = self.stripe(block.id()).lock();
        if !self.get(block.id(), Touch::None).is_absent() || !is_wanted() {
            return Ok(false);
        }
        let units = units_of_chunks(block.state().charged.lock().iter(), block.length());
        std::fs::rename(path, block.path()).map_err(|error| self.draft_failed(block.directory(), error))?;
        self.enter(block, units)?;
        Ok(true)
    }

    /// Makes a draft the block, with its bytes and its name on disk when this returns. *Blocking*.
    ///
    /// # Errors
    /// As [`Self::publish_draft_if`].
    pub fn publish_draft_on_disk(&self, draft: &Draft) -> Result<(), StoreError> {
        // Before it can be found by anybody.
        self.sync_draft(draft)?;
        self.publish_draft_if(draft, || true)?;
        let block = &draft.block;
        self.sync(&[DataTarget { id: *block.id(), length: block.length(), mount_id: block.mount_id() }])
    }

    fn draft_failed(&self, directory: usize, source: io::Error) -> StoreError {
        self.table.not_made(directory, "making a data block", source, StoreError::NoSpace)
    }
}

/// The chunks that are not all zeros, neighbours together.
fn runs(bytes: &[u8]) -> Vec<Range<usize>> {
    let mut runs: Vec<Range<usize>> = Vec::new();
    for (position, chunk) in bytes.chunks(CHUNK_BYTES as usize).enumerate() {
        if chunk.iter().all(|byte| *byte == 0) {
            continue;
        }
        let start = position * CHUNK_BYTES as usize;
        match runs.last_mut() {
            Some(run) if run.end == start => run.end = start + chunk.len(),
            _ => runs.push(start..start + chunk.len()),
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zeros_stay_holes() {
        const CHUNK: usize = CHUNK_BYTES as usize;
        let mut bytes = vec![0; 4 * CHUNK + 10];
        assert!(runs(&bytes).is_empty());
        bytes[CHUNK - 1] = 1;
        bytes[CHUNK] = 1;
        bytes[4 * CHUNK + 9] = 1;
        assert_eq!(runs(&bytes), [0..2 * CHUNK, 4 * CHUNK..4 * CHUNK + 10]);
        assert!(runs(&[]).is_empty());
    }
}
