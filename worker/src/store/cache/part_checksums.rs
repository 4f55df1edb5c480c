//! Checksums of the parts of chunks: what small reads over the network carry, in place of those of whole chunks.
//!
//! They are computed from a chunk that has been read as a whole and matches the checksum of the index, and kept. So
//! damage that comes after that is noticed by whoever reads a part, as by whoever reads a chunk. What is kept is
//! bounded: a place has the checksums of one chunk, and the next chunk that belongs there takes it.

use std::cell::RefCell;
use std::ops::Range;
use std::sync::OnceLock;

use cavern_proto::CHUNK_BYTES;
use cavern_proto::chunk::{PART_BYTES, chunk_range, chunks_touching, part_count};
use parking_lot::Mutex;

use super::block::CachedBlock;
use crate::store::block_file::{ReadError, ReadWait};

const PARTS_PER_CHUNK: usize = (CHUNK_BYTES / PART_BYTES) as usize;
/// Places are made in groups of this many, each when it is first needed.
const GROUP_PLACES: usize = 512;
/// With 128 Ki places, 16 GiB of chunks have one each; they take 20 MiB.
const GROUPS: usize = 256;

#[derive(Clone, Copy, Debug)]
struct Place {
    /// Of the block's file; 0 while nothing is kept.
    incarnation: u64,
    chunk: u32,
    crcs: [u32; PARTS_PER_CHUNK],
}

const EMPTY: Place = Place { incarnation: 0, chunk: 0, crcs: [0; PARTS_PER_CHUNK] };

#[derive(Debug)]
pub(super) struct PartChecksums {
    groups: Vec<OnceLock<Box<[Mutex<Place>]>>>,
}

thread_local! {
    /// A chunk while its parts are computed.
    static CHUNK: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

impl PartChecksums {
    pub(super) fn new() -> Self {
        Self { groups: (0..GROUPS).map(|_| OnceLock::new()).collect() }
    }

    pub(super) fn of(&self, block: &CachedBlock, bytes: &Range<u32>, wait: ReadWait) -> Result<Vec<u32>, ReadError> {
        let mut crcs = Vec::with_capacity(part_count(bytes));
        for chunk in chunks_touching(bytes.start, bytes.len() as u32) {
            let bounds = chunk_range(chunk, block.length());
            let within = bytes.start.max(bounds.start) - bounds.start..bytes.end.min(bounds.end) - bounds.start;
            let all = self.of_chunk(block, chunk, wait)?;
            let first = (within.start / PART_BYTES) as usize;
            crcs.extend_from_slice(&all[first..first + part_count(&within)]);
        }
        Ok(crcs)
    }

    fn of_chunk(&self, block: &CachedBlock, chunk: u32, wait: ReadWait) -> Result<[u32; PARTS_PER_CHUNK], ReadError> {
        let place = self.place(block.incarnation(), chunk);
        let kept = *place.lock();
        if (kept.incarnation, kept.chunk) == (block.incarnation(), chunk) {
            return Ok(kept.crcs);
        }
        let crcs = CHUNK.with_borrow_mut(|bytes| compute(block, chunk, wait, bytes))?;
        *place.lock() = Place { incarnation: block.incarnation(), chunk, crcs };
        Ok(crcs)
    }

    fn place(&self, incarnation: u64, chunk: u32) -> &Mutex<Place> {
        // Fibonacci hashing; the chunks of a block are side by side.
        let hash = incarnation.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
        let number = (hash as usize).wrapping_add(chunk as usize) % (GROUPS * GROUP_PLACES);
        let group =
            self.groups[number / GROUP_PLACES].get_or_init(|| (0..GROUP_PLACES).map(|_| Mutex::new(EMPTY)).collect());
        &group[number % GROUP_PLACES]
    }
}

fn compute(
    block: &CachedBlock,
    chunk: u32,
    wait: ReadWait,
    bytes: &mut Vec<u8>,
) -> Result<[u32; PARTS_PER_CHUNK], ReadError> {
    let bounds = chunk_range(chunk, block.length());
    bytes.resize(bounds.len(), 0);
    block.read_by(wait, bounds.start, bytes)?;
    if block.state().crcs.get(chunk as usize).copied() != Some(crc32c::crc32c(bytes)) {
        return Err(ReadError::Damaged(chunk));
    }
    let mut crcs = [0; PARTS_PER_CHUNK];
    for (crc, part) in crcs.iter_mut().zip(bytes.chunks(PART_BYTES as usize)) {
        *crc = crc32c::crc32c(part);
    }
    Ok(crcs)
}
