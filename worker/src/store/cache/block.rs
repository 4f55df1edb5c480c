//! A cached block that is in use: its open file, which chunks are there, and their checksums.
//!
//! Two bitmaps: *present* is what the index says, *verified* what may be believed. After a start nothing is believed: a
//! crash may have left the index ahead of the data (nothing is synced while filling, which costs a refetch at worst).
//! A chunk is verified when this run wrote it, or read it once and found its checksum right.

use std::io::{self, IoSlice};
use std::ops::{Deref, Range};

use bytes::Bytes;
use cavern_proto::ChunkMap;
use cavern_proto::chunk::{chunk_count, chunk_range};
use cavern_proto::record::BlockRecord;
use parking_lot::{Mutex, MutexGuard};
use rustix::io::Errno;

use crate::store::block_file::{BlockFile, BlockPlace};

/// What changes about a block while it is in use.
#[derive(Debug)]
pub(crate) struct BlockState {
    pub present: ChunkMap,
    /// Always a part of `present`.
    pub verified: ChunkMap,
    /// One per chunk; meaningful where present.
    pub crcs: Vec<u32>,
}

/// A cached block of which somebody holds this handle. A chunk is absent, then present and verified when it was
/// written; present alone after a start, until its checksum was compared; absent again when that is wrong. The lock of
/// that state is held for a moment, never during I/O, and no other is taken under it.
#[derive(Debug)]
pub struct CachedBlock {
    file: BlockFile,
    state: Mutex<BlockState>,
}

impl Deref for CachedBlock {
    type Target = BlockFile;

    fn deref(&self) -> &BlockFile {
        &self.file
    }
}

impl CachedBlock {
    /// Makes the empty file of a new block.
    pub(in crate::store) fn create(place: BlockPlace) -> io::Result<Self> {
        let state = BlockState {
            present: ChunkMap::new(),
            verified: ChunkMap::new(),
            crcs: vec![0; chunk_count(place.length) as usize],
        };
        Ok(Self { file: BlockFile::create(place, None, 0)?, state: Mutex::new(state) })
    }

    /// Opens the file of a block that the index knows. With `verified` all its chunks have been verified earlier in
    /// this run.
    pub(in crate::store) fn open(place: BlockPlace, record: &BlockRecord, verified: bool) -> io::Result<Self> {
        let file = BlockFile::open(place)?;
        let count = chunk_count(file.length());
        let mut crcs = record.chunk_crcs.clone();
        crcs.resize(count as usize, 0);
        if let Some(sealed) = file.sealed() {
            sealed.mask_checksums(&mut crcs);
        }
        let mut present = ChunkMap::from_bytes(&record.present);
        // A record that names chunks beyond the block's end is damaged there; the rest is still checked by CRC.
        for beyond in present.iter().filter(|index| *index >= count).collect::<Vec<_>>() {
            present.remove(beyond);
        }
        let state = BlockState { verified: if verified { present.clone() } else { ChunkMap::new() }, present, crcs };
        Ok(Self { file, state: Mutex::new(state) })
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, BlockState> {
        self.state.lock()
    }

    /// Whether all these chunks may be read.
    pub fn has(&self, chunks: Range<u32>) -> bool {
        self.state.lock().verified.contains_all(chunks)
    }

    /// Whether the whole block may be read.
    #[cfg(test)]
    pub fn is_complete(&self) -> bool {
        self.has(0..chunk_count(self.length()))
    }

    /// Reads a whole chunk and says whether its checksum is the recorded one; a file that is too short counts as not.
    ///
    /// # Errors
    /// Those of the disk.
    pub(in crate::store) fn check_chunk(&self, index: u32, buffer: &mut Vec<u8>) -> io::Result<bool> {
        let range = chunk_range(index, self.length());
        let expected = self.state.lock().crcs.get(index as usize).copied();
        buffer.resize(range.len(), 0);
        match self.read(range.start, buffer) {
            Ok(()) => Ok(expected == Some(crc32c::crc32c(buffer))),
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Writes one whole chunk, given in pieces, and returns its CRC32C. It is not present by that:
    /// `CacheStore::write` makes it so.
    ///
    /// # Errors
    /// Those of the disk.
    pub(in crate::store) fn write_chunk(&self, index: u32, pieces: &[Bytes]) -> io::Result<u32> {
        let writer = self.writer()?;
        let start = chunk_range(index, self.length()).start;
        let crc = pieces.iter().fold(0, |crc, piece| crc32c::crc32c_append(crc, piece));
        if let Some(sealed) = self.sealed() {
            // Nobody reads what is not present.
            sealed.write(&writer, start, &pieces.concat()).map_err(|(_, error)| error)?;
            return Ok(crc);
        }
        let mut offset = u64::from(start);
        let mut slices: Vec<IoSlice<'_>> = pieces.iter().map(|piece| IoSlice::new(piece)).collect();
        let mut rest = slices.as_mut_slice();
        // The kernel takes at most 1,024 pieces at a time.
        while !rest.is_empty() {
            let batch = rest.len().min(1024);
            match rustix::io::pwritev(&writer, &rest[..batch], offset) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(written) => {
                    offset += written as u64;
                    IoSlice::advance_slices(&mut rest, written);
                }
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(crc)
    }

    /// The index entry of the block as it is now.
    pub(in crate::store) fn record(&self) -> BlockRecord {
        let state = self.state.lock();
        let mut chunk_crcs = state.crcs.clone();
        if let Some(sealed) = self.sealed() {
            sealed.mask_checksums(&mut chunk_crcs);
        }
        BlockRecord {
            incarnation: self.incarnation(),
            length: self.length(),
            present: state.present.to_bytes().into(),
            chunk_crcs,
            mount_id: self.mount_id(),
        }
    }
}
