//! How often a block has been used: a count-min sketch with ageing, after Einziger, Friedman and Manes, "TinyLFU: A
//! Highly Efficient Cache Admission Policy" (2017).
//!
//! The sketch counts blocks that are cached and blocks that are not alike, because admission compares the one with the
//! other. Counters are bytes that stop at [`MAX_COUNT`]; an increment raises only the smallest of a block's four
//! counters (conservative update, which halves the error). After a sample of ten uses per cached block all counters are
//! halved, so that what was hot last week does not keep out what is hot today.

/// No counter grows above this: enough to distinguish hot from warm, small enough to be forgotten after four agings.
const MAX_COUNT: u8 = 15;
/// Counters per block that is expected. At sixteen, a data set ten times the cache still collides rarely.
const COUNTERS_PER_BLOCK: usize = 16;
/// Uses per cached block between two agings.
const SAMPLE_PER_BLOCK: u64 = 10;
/// The sketch never is smaller than for this many blocks.
const MIN_BLOCKS: usize = 1024;
/// It starts with at most this many blocks in mind: 16 MiB.
const MAX_FIRST_BLOCKS: usize = 1 << 20;
/// Odd multipliers that make four hash functions of one hash.
const SEEDS: [u64; 4] = [0xc3a5_c85c_97cb_3127, 0xb492_b66f_be98_f273, 0x9ae1_6a3b_2f90_404f, 0xcbf2_9ce4_8422_2325];

/// Estimates of use counts, never too low by more than ageing, rarely too high.
#[derive(Debug)]
pub(super) struct FrequencySketch {
    counters: Vec<u8>,
    /// Length of `counters` (a power of two) minus one.
    mask: usize,
    uses: u64,
    sample: u64,
}

impl FrequencySketch {
    /// For about `blocks` cached blocks. Starting too small costs accuracy, since the errors of a small sketch are
    /// carried along when it grows; starting too large costs memory, so that beyond a million blocks it grows on
    /// demand.
    pub(super) fn new(blocks: usize) -> Self {
        let length = (blocks.clamp(MIN_BLOCKS, MAX_FIRST_BLOCKS) * COUNTERS_PER_BLOCK).next_power_of_two();
        Self { counters: vec![0; length], mask: length - 1, uses: 0, sample: MIN_BLOCKS as u64 * SAMPLE_PER_BLOCK }
    }

    /// Grows for `blocks` cached blocks. Doubling copies every counter to the two places that its blocks may now be
    /// found at, so no estimate changes.
    pub(super) fn grow_to(&mut self, blocks: usize) {
        while self.counters.len() < blocks.saturating_mul(COUNTERS_PER_BLOCK) {
            self.counters.extend_from_within(..);
            self.mask = self.counters.len() - 1;
        }
        self.sample = self.sample.max(blocks as u64 * SAMPLE_PER_BLOCK);
    }

    /// Counts one use.
    pub(super) fn increment(&mut self, hash: u64) {
        let places = self.places(hash);
        let lowest = self.lowest(places);
        if lowest < MAX_COUNT {
            for place in places {
                self.counters[place] = self.counters[place].max(lowest + 1);
            }
        }
        self.uses += 1;
        if self.uses >= self.sample {
            self.age();
        }
    }

    /// How often the block was used lately.
    pub(super) fn estimate(&self, hash: u64) -> u8 {
        self.lowest(self.places(hash))
    }

    fn lowest(&self, places: [usize; 4]) -> u8 {
        places.into_iter().map(|place| self.counters[place]).min().unwrap_or(0)
    }

    fn places(&self, hash: u64) -> [usize; 4] {
        // The high half of a product is the well-mixed one; the low bits of it select the counter.
        SEEDS.map(|seed| ((hash ^ seed.rotate_left(17)).wrapping_mul(seed) >> 32) as usize & self.mask)
    }

    fn age(&mut self) {
        for counter in &mut self.counters {
            *counter /= 2;
        }
        self.uses = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hash(value: u64) -> u64 {
        (value + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(23).wrapping_mul(0xd6e8_feb8_6659_fd93)
    }

    #[test]
    fn counts_and_saturates() {
        let mut sketch = FrequencySketch::new(0);
        assert_eq!(sketch.estimate(hash(1)), 0);
        for expected in 1..=40u8 {
            sketch.increment(hash(1));
            assert_eq!(sketch.estimate(hash(1)), expected.min(MAX_COUNT));
        }
        assert_eq!(sketch.estimate(hash(2)), 0);
    }

    #[test]
    fn ageing_halves() {
        let mut sketch = FrequencySketch::new(0);
        (0..8).for_each(|_| sketch.increment(hash(1)));
        sketch.age();
        assert_eq!(sketch.estimate(hash(1)), 4);
    }

    #[test]
    fn growing_keeps_the_estimates() {
        let mut sketch = FrequencySketch::new(0);
        for value in 0..500 {
            (0..value % 7).for_each(|_| sketch.increment(hash(value)));
        }
        let before: Vec<u8> = (0..500).map(|value| sketch.estimate(hash(value))).collect();
        sketch.grow_to(100_000);
        let after: Vec<u8> = (0..500).map(|value| sketch.estimate(hash(value))).collect();
        assert_eq!(before, after);
    }

    #[test]
    fn a_data_set_ten_times_the_cache_is_rarely_overestimated() {
        let mut sketch = FrequencySketch::new(0);
        let blocks = 4000;
        sketch.grow_to(blocks);
        for value in 0..(blocks as u64 * 9) {
            sketch.increment(hash(value));
        }
        let over = (0..blocks as u64 * 9).filter(|value| sketch.estimate(hash(*value)) > 2).count();
        assert!(over < blocks * 9 / 50, "{over} of {} overestimated", blocks * 9);
    }
}
