//! Where inodes go: one behind the other, but that some must lie within a block.

use std::ops::Range;

use crate::format::SLOT;
use crate::tree::BLOCK_BYTES;

/// A gap farther back than this from the end, in bytes, is not filled: the second pass has written it by then.
pub(super) const REACH: u64 = 64 << 10;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fit {
    /// In one block.
    Whole,
    Anywhere,
}

/// Positions are bytes behind the first inode, which is at the beginning of a block.
pub(super) struct Slots {
    pub(super) end: u64,
    /// Within a block before the end.
    gap: Range<u64>,
}

impl Slots {
    pub(super) fn new(start: u64) -> Self {
        Self { end: start, gap: start..start }
    }

    /// A place for an inode of `bytes` with what follows it; `Fit::Whole` takes a block at most.
    pub(super) fn place(&mut self, bytes: usize, fit: Fit) -> u64 {
        let bytes = (bytes as u64).next_multiple_of(SLOT);
        if self.end - self.gap.start > REACH {
            self.gap = self.end..self.end;
        }
        if self.gap.end - self.gap.start >= bytes {
            let place = self.gap.start;
            self.gap.start += bytes;
            return place;
        }
        if fit == Fit::Whole && self.end % BLOCK_BYTES + bytes > BLOCK_BYTES {
            let gap = self.end..self.end.next_multiple_of(BLOCK_BYTES);
            self.end = gap.end;
            if gap.end - gap.start > self.gap.end - self.gap.start {
                self.gap = gap;
            }
        }
        let place = self.end;
        self.end += bytes;
        place
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn places_do_not_overlap_and_keep_within_reach(
            sizes in prop::collection::vec((1_usize..5000, any::<bool>()), 1..400),
        ) {
            let mut slots = Slots::new(BLOCK_BYTES);
            let mut taken: Vec<Range<u64>> = Vec::new();
            for (bytes, whole) in sizes {
                let fit = if whole && bytes <= 4096 { Fit::Whole } else { Fit::Anywhere };
                let end = slots.end;
                let place = slots.place(bytes, fit);
                prop_assert!(place.is_multiple_of(SLOT) && place + REACH >= end);
                if fit == Fit::Whole {
                    prop_assert_eq!(place / BLOCK_BYTES, (place + bytes as u64 - 1) / BLOCK_BYTES);
                }
                let range = place..place + bytes as u64;
                prop_assert!(range.end <= slots.end);
                prop_assert!(taken.iter().all(|other| range.end <= other.start || other.end <= range.start));
                taken.push(range);
            }
        }
    }

    #[test]
    fn a_gap_is_filled() {
        let mut slots = Slots::new(0);
        assert_eq!(slots.place(3000, Fit::Whole), 0);
        assert_eq!(slots.place(2000, Fit::Whole), 4096);
        assert_eq!(slots.place(64, Fit::Anywhere), 3008);
        assert_eq!(slots.place(1100, Fit::Anywhere), 4096 + 2016);
    }
}
