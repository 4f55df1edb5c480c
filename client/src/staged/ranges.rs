//! A set of bytes of a file, kept as ranges that neither touch nor overlap.

use std::collections::BTreeMap;
use std::ops::Range;

#[derive(Debug, Default)]
pub(super) struct RangeSet {
    /// Ends by beginnings.
    ranges: BTreeMap<u64, u64>,
}

impl RangeSet {
    /// Adds a range; how many of its bytes are new.
    pub fn insert(&mut self, range: Range<u64>) -> u64 {
        if range.is_empty() {
            return 0;
        }
        let (mut joined, mut known) = (range.clone(), 0);
        // All that touches it.
        while let Some((&start, &end)) =
            self.ranges.range(..=joined.end).next_back().filter(|(_, end)| **end >= joined.start)
        {
            self.ranges.remove(&start);
            known += end.min(range.end).saturating_sub(start.max(range.start));
            joined = joined.start.min(start)..joined.end.max(end);
        }
        self.ranges.insert(joined.start, joined.end);
        range.end - range.start - known
    }

    /// Takes a range out; how many bytes of it there were.
    pub fn remove(&mut self, range: Range<u64>) -> u64 {
        let mut removed = 0;
        while let Some((&start, &end)) =
            self.ranges.range(..range.end).next_back().filter(|(_, end)| **end > range.start)
        {
            self.ranges.remove(&start);
            if start < range.start {
                self.ranges.insert(start, range.start);
            }
            if end > range.end {
                self.ranges.insert(range.end, end);
            }
            removed += end.min(range.end) - start.max(range.start);
        }
        removed
    }

    /// Whether every byte of a range is in it.
    pub fn contains(&self, range: &Range<u64>) -> bool {
        range.is_empty() || self.around(range.start).is_some_and(|(_, end)| end >= range.end)
    }

    /// Whether any byte of a range is in it.
    pub fn touches(&self, range: &Range<u64>) -> bool {
        self.ranges.range(..range.end).next_back().is_some_and(|(_, end)| *end > range.start)
    }

    /// The beginning of a range that lies wholly in the set or wholly outside it, and which of both.
    pub fn first_piece(&self, range: Range<u64>) -> (Range<u64>, bool) {
        let (end, is_in) = match self.around(range.start) {
            Some((_, end)) => (end, true),
            None => (self.ranges.range(range.start..).next().map_or(range.end, |(start, _)| *start), false),
        };
        (range.start..end.min(range.end), is_in)
    }

    /// A range in such pieces, in order.
    pub fn pieces(&self, range: Range<u64>) -> Vec<(Range<u64>, bool)> {
        let (mut pieces, mut at) = (Vec::new(), range.start);
        while at < range.end {
            let (piece, is_in) = self.first_piece(at..range.end);
            at = piece.end;
            pieces.push((piece, is_in));
        }
        pieces
    }

    /// How many ranges it takes to say what is in it.
    pub fn count(&self) -> usize {
        self.ranges.len()
    }

    /// The range that a byte is in.
    fn around(&self, at: u64) -> Option<(u64, u64)> {
        self.ranges.range(..=at).next_back().filter(|(_, end)| **end > at).map(|(start, end)| (*start, *end))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn ranges_that_touch_become_one() {
        let mut set = RangeSet::default();
        assert_eq!((set.insert(10..20), set.insert(30..40), set.count()), (10, 10, 2));
        assert_eq!((set.insert(20..30), set.count()), (10, 1));
        assert_eq!((set.insert(15..45), set.insert(5..5)), (5, 0));
        assert!(set.contains(&(10..45)) && !set.contains(&(9..11)) && set.touches(&(9..11)) && !set.touches(&(0..10)));
        assert_eq!(set.pieces(0..50), [(0..10, false), (10..45, true), (45..50, false)]);
        assert_eq!((set.remove(20..30), set.count()), (10, 2));
        assert_eq!(set.pieces(15..35), [(15..20, true), (20..30, false), (30..35, true)]);
        assert_eq!((set.remove(0..100), set.count()), (25, 0));
    }

    proptest! {
        #[test]
        fn it_is_the_set_that_was_put_into_it(
            steps in prop::collection::vec((any::<bool>(), 0u64..64, 0u64..16), 0..60),
        ) {
            let (mut set, mut model) = (RangeSet::default(), [false; 96]);
            for (add, start, length) in steps {
                let range = start..start + length;
                let bytes = &mut model[start as usize..(start + length) as usize];
                let other = bytes.iter().filter(|known| **known != add).count() as u64;
                bytes.fill(add);
                prop_assert_eq!(if add { set.insert(range) } else { set.remove(range) }, other);
            }
            for (range, is_in) in set.pieces(0..96) {
                prop_assert!(!range.is_empty());
                prop_assert!(range.clone().all(|byte| model[byte as usize] == is_in));
                prop_assert_eq!(set.contains(&range), is_in);
                prop_assert_eq!(set.touches(&range), is_in);
            }
        }
    }
}
