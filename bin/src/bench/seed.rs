//! Seeds of orders, offsets and contents.

/// A seed for one purpose out of the seed of the run: neighbours have nothing in common.
pub fn derived_seed(seed: u64, round: u32, worker: usize) -> u64 {
    // The finalizer of SplitMix64.
    let purpose = (u64::from(round) << 32) | worker as u64;
    let mixed = seed ^ purpose.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}
