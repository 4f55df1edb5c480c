//! Parts of a file that lie in one block.

use std::ops::Range;

use bytes::Bytes;
use cavern_proto::CHUNK_BYTES;
use cavern_proto::chunk::{chunk_range, chunks_touching};

/// A byte range within one block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Span {
    /// The block.
    pub index: u32,
    /// Bytes, as offsets in the block.
    pub bytes: Range<u32>,
}

impl Span {
    /// The chunks that it touches.
    pub(super) fn chunks(&self) -> Range<u32> {
        chunks_touching(self.bytes.start, self.bytes.end - self.bytes.start)
    }

    pub(crate) fn length(&self) -> usize {
        (self.bytes.end - self.bytes.start) as usize
    }

    /// Its bytes out of those of its chunks.
    pub(super) fn of_chunks(&self, bytes: &Bytes) -> Bytes {
        self.of(bytes, self.bytes.start - self.bytes.start % CHUNK_BYTES)
    }

    /// Its bytes out of some that begin at `start` in the block.
    pub(super) fn of(&self, bytes: &Bytes, start: u32) -> Bytes {
        let start = (self.bytes.start - start) as usize;
        bytes.slice(start..start + self.length())
    }
}

/// The bytes of a run of chunks in a block of `length` bytes, as offsets in the block.
pub(super) fn bytes_of_chunks(chunks: &Range<u32>, length: u32) -> Range<u32> {
    let last = chunks.end.saturating_sub(1).max(chunks.start);
    chunk_range(chunks.start, length).start..chunk_range(last, length).end
}

/// Cuts a byte range of a file at the boundaries of its blocks, and at multiples of `piece` bytes.
pub(crate) fn spans(range: Range<u64>, block_size: u64, piece: u64) -> impl Iterator<Item = Span> {
    let mut at = range.start;
    std::iter::from_fn(move || {
        if at >= range.end {
            return None;
        }
        let index = at / block_size;
        let start = at - index * block_size;
        let next_piece = (start / piece + 1) * piece;
        let end = next_piece.min(block_size).min(start + (range.end - at));
        at += end - start;
        // Blocks are at most 1 GiB, and a file has at most 2^32 of them.
        let fit = |value: u64| u32::try_from(value).unwrap_or(u32::MAX);
        Some(Span { index: fit(index), bytes: fit(start)..fit(end) })
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn runs_of_chunks_end_with_the_block() {
        let chunk = cavern_proto::CHUNK_BYTES;
        assert_eq!(bytes_of_chunks(&(1..3), chunk * 2 + 5), chunk..chunk * 2 + 5);
        assert_eq!(bytes_of_chunks(&(0..1), 7), 0..7);
    }

    proptest! {
        #[test]
        fn spans_cover_the_range_exactly(
            start in 0u64..10_000,
            length in 0u64..10_000,
            block in 1u64..700,
            piece in 1u64..300,
        ) {
            let mut at = start;
            for span in spans(start..start + length, block, piece) {
                prop_assert_eq!(u64::from(span.index) * block + u64::from(span.bytes.start), at);
                prop_assert!(u64::from(span.bytes.end) <= block);
                prop_assert!(span.length() > 0 && span.length() as u64 <= piece);
                at += span.length() as u64;
            }
            prop_assert_eq!(at, start + length);
        }
    }
}
