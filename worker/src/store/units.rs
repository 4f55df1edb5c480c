//! What blocks count with: units of 4 KiB, which is what a file system allocates at least.

use std::ops::Range;

use cavern_proto::chunk::chunk_range;

/// Bytes of one unit.
pub(super) const UNIT_BYTES: u32 = 4096;

/// Units of a byte range of a file.
pub(super) fn units_of(range: &Range<u32>) -> u32 {
    (range.end - range.start).div_ceil(UNIT_BYTES)
}

/// Units of chunks of a block of `length` bytes.
pub(super) fn units_of_chunks(chunks: impl IntoIterator<Item = u32>, length: u32) -> u32 {
    chunks.into_iter().map(|index| units_of(&chunk_range(index, length))).sum()
}
