//! Which directory a new block goes to: the fastest tier that has room, spread by free space; when all are full, a
//! choice by capacity that is the same for a block each time, so that it competes with the same blocks for its place.

use cavern_conf::Tier;

/// A directory as placement sees it; sizes in any one unit.
#[derive(Clone, Copy, Debug)]
pub(super) struct Candidate {
    pub position: usize,
    pub tier: Tier,
    pub capacity: u64,
    /// Free below the high watermark.
    pub free: u64,
    /// What blocks of fs-mode files take.
    pub data: u64,
}

/// The position of the directory for a block with this `hash` that needs `need` units at first; `None` without
/// candidates.
pub(super) fn choose(candidates: &[Candidate], hash: u64, need: u64) -> Option<usize> {
    let with_room = || candidates.iter().filter(|candidate| candidate.free > need);
    match with_room().map(|candidate| candidate.tier).min() {
        Some(fastest) => {
            let chosen = with_room().filter(|candidate| candidate.tier == fastest);
            heaviest(chosen.map(|candidate| (candidate.position, candidate.free)), hash)
        }
        None => heaviest(candidates.iter().map(|candidate| (candidate.position, candidate.capacity)), hash),
    }
}

/// Weighted rendezvous hashing: each position wins in proportion to its weight.
fn heaviest(weighted: impl Iterator<Item = (usize, u64)>, hash: u64) -> Option<usize> {
    let score = |position: usize, weight: u64| {
        let mixed =
            (hash ^ (position as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15)).wrapping_mul(0xd6e8_feb8_6659_fd93);
        // 53 bits make a number in (0, 1]; -weight / ln of it is the score of Schindelhauer and Schomaker.
        let unit = ((mixed ^ mixed >> 32).wrapping_mul(0xd6e8_feb8_6659_fd93) >> 11) as f64 + 1.0;
        -(weight as f64) / (unit / (1u64 << 53) as f64).min(1.0 - f64::EPSILON).ln()
    };
    weighted
        .map(|(position, weight)| (position, score(position, weight)))
        .max_by(|(_, one), (_, other)| one.total_cmp(other))
        .map(|(position, _)| position)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidate(position: usize, tier: Tier, capacity: u64, free: u64) -> Candidate {
        Candidate { position, tier, capacity, free, data: 0 }
    }

    fn shares(candidates: &[Candidate]) -> Vec<usize> {
        let mut counts = vec![0; candidates.len()];
        for value in 0..10_000u64 {
            counts[choose(candidates, value.wrapping_mul(0x9e37_79b9_7f4a_7c15), 1).unwrap()] += 1;
        }
        counts
    }

    #[test]
    fn the_fastest_tier_with_room_wins() {
        let all = [candidate(0, Tier::Hdd, 100, 100), candidate(1, Tier::Mem, 10, 5), candidate(2, Tier::Ssd, 50, 50)];
        assert_eq!(choose(&all, 1, 4), Some(1));
        assert_eq!(choose(&all, 1, 5), Some(2));
        assert_eq!(choose(&all, 1, 60), Some(0));
        assert_eq!(choose(&[], 1, 1), None);
    }

    #[test]
    fn a_tier_is_filled_by_free_space() {
        let counts = shares(&[candidate(0, Tier::Ssd, 400, 100), candidate(1, Tier::Ssd, 400, 300)]);
        assert!((2200..2800).contains(&counts[0]), "{counts:?}");
    }

    #[test]
    fn full_directories_share_by_capacity() {
        let counts = shares(&[candidate(0, Tier::Mem, 100, 0), candidate(1, Tier::Ssd, 900, 0)]);
        assert!((800..1200).contains(&counts[0]), "{counts:?}");
    }
}
