//! Chunks: the unit of presence and of checksums inside a block.

use std::ops::Range;
use std::time::Duration;

/// Bytes of a chunk. A random 128 KiB read of a cold object fetches one or two of them; FUSE reads are at most 1 MiB.
pub const CHUNK_BYTES: u32 = 128 * 1024;

/// Bytes of a part: what small reads over the network are made of, each part with a checksum of its own. A page of the
/// kernel's.
pub const PART_BYTES: u32 = 4 * 1024;

/// How long room counts that a worker has given in a block of an fs-mode file, from the last time on that it gave some
/// there. A client stops using it after half of that.
pub const RESERVATION: Duration = Duration::from_secs(60);

/// The chunks that a byte range of a block touches, as chunk indices.
pub fn chunks_touching(offset: u32, length: u32) -> Range<u32> {
    if length == 0 {
        return offset / CHUNK_BYTES..offset / CHUNK_BYTES;
    }
    let last = (u64::from(offset) + u64::from(length) - 1) / u64::from(CHUNK_BYTES);
    offset / CHUNK_BYTES..u32::try_from(last).unwrap_or(u32::MAX - 1) + 1
}

/// How many chunks a block of `length` bytes has.
pub fn chunk_count(length: u32) -> u32 {
    length.div_ceil(CHUNK_BYTES)
}

/// The bytes of chunk `index` in a block of `length` bytes, as offsets in the block; empty past its end.
pub fn chunk_range(index: u32, length: u32) -> Range<u32> {
    let bound = |value: u64| u32::try_from(value.min(u64::from(length))).unwrap_or(length);
    let start = u64::from(index) * u64::from(CHUNK_BYTES);
    bound(start)..bound(start + u64::from(CHUNK_BYTES))
}

/// The chunks of a block of `length` bytes that lie within a range of it, as chunk indices.
pub fn whole_chunks(bytes: &Range<u32>, length: u32) -> impl Iterator<Item = u32> + use<> {
    let bytes = bytes.clone();
    chunks_touching(bytes.start, bytes.len() as u32).filter(move |index| {
        let chunk = chunk_range(*index, length);
        bytes.start <= chunk.start && chunk.end <= bytes.end
    })
}

/// The whole parts that the bytes `bytes` of a block of `length` bytes touch, as offsets in the block. The block's last
/// part may be short.
pub fn widen_to_parts(bytes: &Range<u32>, length: u32) -> Range<u32> {
    let end = bytes.end.checked_next_multiple_of(PART_BYTES).unwrap_or(u32::MAX);
    bytes.start - bytes.start % PART_BYTES..end.min(length).max(bytes.end)
}

/// Whether `bytes` are whole parts of a block of `length` bytes, one at least.
pub fn is_whole_parts(bytes: &Range<u32>, length: u32) -> bool {
    bytes.start < bytes.end && bytes.end <= length && widen_to_parts(bytes, length) == *bytes
}

/// How many parts `bytes` are, which are whole ones.
pub fn part_count(bytes: &Range<u32>) -> usize {
    bytes.len().div_ceil(PART_BYTES as usize)
}

/// Which chunks of a block are there. The first 64 chunks (8 MiB) need no allocation.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ChunkMap {
    first: u64,
    rest: Vec<u64>,
}

impl ChunkMap {
    /// A map with no chunk set.
    pub const fn new() -> Self {
        Self { first: 0, rest: Vec::new() }
    }

    /// From bytes, bit `i` (least significant first) for chunk `i`, as messages and records carry it.
    pub fn from_bytes(bytes: &[u8]) -> Self {
        let mut map = Self::new();
        for (position, byte) in bytes.iter().enumerate().filter(|(_, byte)| **byte != 0) {
            *map.word_mut(position / 8) |= u64::from(*byte) << (position % 8 * 8);
        }
        map
    }

    /// The shortest bytes for which `from_bytes` gives this map.
    pub fn to_bytes(&self) -> Vec<u8> {
        let words = std::iter::once(&self.first).chain(&self.rest);
        let mut bytes: Vec<u8> = words.flat_map(|word| word.to_le_bytes()).collect();
        bytes.truncate(bytes.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1));
        bytes
    }

    /// Whether chunk `index` is set.
    pub fn contains(&self, index: u32) -> bool {
        self.word(index as usize / 64) >> (index % 64) & 1 == 1
    }

    /// Whether every chunk of the range is set; true for an empty range.
    pub fn contains_all(&self, mut range: Range<u32>) -> bool {
        range.all(|index| self.contains(index))
    }

    /// Sets chunk `index`; says whether it was clear before.
    pub fn insert(&mut self, index: u32) -> bool {
        let (word, bit) = (self.word_mut(index as usize / 64), 1 << (index % 64));
        let was_clear = *word & bit == 0;
        *word |= bit;
        was_clear
    }

    /// Clears chunk `index`.
    pub fn remove(&mut self, index: u32) {
        if (index as usize / 64) <= self.rest.len() {
            *self.word_mut(index as usize / 64) &= !(1 << (index % 64));
        }
    }

    /// How many chunks are set.
    pub fn count(&self) -> u32 {
        self.first.count_ones() + self.rest.iter().map(|word| word.count_ones()).sum::<u32>()
    }

    /// The indices that are set, ascending.
    pub fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        let words = std::iter::once(self.first).chain(self.rest.iter().copied());
        words.zip(0u32..).flat_map(|(word, position)| {
            (0..64).filter(move |bit| word >> bit & 1 == 1).map(move |bit| position * 64 + bit)
        })
    }

    fn word(&self, position: usize) -> u64 {
        match position {
            0 => self.first,
            _ => self.rest.get(position - 1).copied().unwrap_or(0),
        }
    }

    fn word_mut(&mut self, position: usize) -> &mut u64 {
        if position == 0 {
            return &mut self.first;
        }
        if self.rest.len() < position {
            self.rest.resize(position, 0);
        }
        &mut self.rest[position - 1]
    }
}

impl Extend<u32> for ChunkMap {
    fn extend<I: IntoIterator<Item = u32>>(&mut self, indexes: I) {
        for index in indexes {
            self.insert(index);
        }
    }
}

impl FromIterator<u32> for ChunkMap {
    fn from_iter<I: IntoIterator<Item = u32>>(indexes: I) -> Self {
        let mut map = Self::new();
        map.extend(indexes);
        map
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn ranges_map_to_the_chunks_they_touch() {
        assert_eq!(chunks_touching(0, 1), 0..1);
        assert_eq!(chunks_touching(CHUNK_BYTES - 1, 2), 0..2);
        assert_eq!(chunks_touching(CHUNK_BYTES, CHUNK_BYTES), 1..2);
        assert!(chunks_touching(5, 0).is_empty());
        assert_eq!(chunk_range(1, CHUNK_BYTES + 5), CHUNK_BYTES..CHUNK_BYTES + 5);
        assert!(chunk_range(2, CHUNK_BYTES + 5).is_empty());
        assert_eq!(chunk_count(0), 0);
        assert_eq!(chunk_count(CHUNK_BYTES + 1), 2);
    }

    #[test]
    fn the_last_part_of_a_block_may_be_short() {
        let length = 3 * PART_BYTES + 100;
        assert_eq!(widen_to_parts(&(5..PART_BYTES + 1), length), 0..2 * PART_BYTES);
        assert_eq!(widen_to_parts(&(length - 1..length), length), 3 * PART_BYTES..length);
        assert!(is_whole_parts(&(2 * PART_BYTES..length), length));
        assert!(!is_whole_parts(&(2 * PART_BYTES..length - 1), length));
        assert!(!is_whole_parts(&(100..PART_BYTES), length));
        assert!(!is_whole_parts(&(PART_BYTES..PART_BYTES), length) && !is_whole_parts(&(0..length + 1), length));
        assert!(is_whole_parts(&(0..u32::MAX), u32::MAX));
        let (start, end) = (PART_BYTES, 0);
        assert!(!is_whole_parts(&(start..end), length));
        assert_eq!(part_count(&(2 * PART_BYTES..length)), 2);
    }

    proptest! {
        #[test]
        fn widened_ranges_are_the_fewest_whole_parts(start: u32, wanted in 1u32..1 << 20, beyond in 0u32..1 << 20) {
            let end = start.saturating_add(wanted).max(start.saturating_add(1));
            prop_assume!(start < end);
            let (bytes, length) = (start..end, end.saturating_add(beyond));
            let parts = widen_to_parts(&bytes, length);
            prop_assert!(parts.start <= start && end <= parts.end && parts.end <= length);
            prop_assert!(is_whole_parts(&parts, length));
            prop_assert!(start - parts.start < PART_BYTES && parts.end - end < PART_BYTES);
            prop_assert_eq!(chunks_touching(start, end - start), chunks_touching(parts.start, parts.end - parts.start));
            let touched = (end - 1) / PART_BYTES - start / PART_BYTES + 1;
            prop_assert_eq!(part_count(&parts), touched as usize);
        }

        #[test]
        fn behaves_like_a_set(steps in prop::collection::vec((0u32..600, any::<bool>()), 0..200)) {
            let (mut map, mut model) = (ChunkMap::new(), BTreeSet::new());
            for (index, insert) in steps {
                if insert {
                    prop_assert_eq!(map.insert(index), model.insert(index));
                } else {
                    map.remove(index);
                    model.remove(&index);
                }
            }
            prop_assert_eq!(map.count() as usize, model.len());
            prop_assert_eq!(map.iter().collect::<Vec<_>>(), model.iter().copied().collect::<Vec<_>>());
            let back = ChunkMap::from_bytes(&map.to_bytes());
            prop_assert_eq!(back.iter().collect::<Vec<_>>(), map.iter().collect::<Vec<_>>());
            for index in 0..600 {
                prop_assert_eq!(map.contains(index), model.contains(&index));
            }
        }
    }
}
