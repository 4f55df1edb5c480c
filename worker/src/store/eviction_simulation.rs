//! Eviction simulated with reads of training jobs: no disk, a clock that the test moves.

use cavern_proto::ContentId;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};

use super::*;

const HIGH: f64 = 0.98;
const LOW: f64 = 0.96;

fn id(value: u64) -> BlockId {
    let mut bytes = [0; 16];
    let mut rng = StdRng::seed_from_u64(value);
    rng.fill(&mut bytes);
    BlockId { content: ContentId::from_slice(&bytes).unwrap(), index: 0 }
}

/// A cache of one directory, in units.
struct Simulation {
    cache: Cache,
    capacity: u64,
    now: f64,
}

impl Simulation {
    fn new(capacity_units: u64) -> Self {
        Self::with_share(capacity_units, 100)
    }

    /// One of which a mount may have so many percent.
    fn with_share(capacity_units: u64, percent: u32) -> Self {
        Self::with_least_share(capacity_units, percent, 0)
    }

    /// One of which a mount may have so many percent, and `least` units in any case.
    fn with_least_share(capacity_units: u64, percent: u32, least: u64) -> Self {
        let space = Space::new(SpaceLimits::new(capacity_units * u64::from(UNIT_BYTES), HIGH, LOW));
        let shares = Shares::new(percent, least * u64::from(UNIT_BYTES));
        Self { cache: Cache::new(vec![space], shares), capacity: capacity_units, now: 0.0 }
    }

    /// Reads a block of `units`, as a worker does on an open; says whether it was there.
    fn read(&mut self, id: &BlockId, units: u32) -> bool {
        self.read_of(1, id, units)
    }

    /// Reads one of a mount.
    fn read_of(&mut self, mount_id: u32, id: &BlockId, units: u32) -> bool {
        self.cache.count_use(id);
        self.cache.now = self.now as u32;
        self.cache.departures.gone.clear();
        if let Some(slot) = self.cache.slab.find(id) {
            self.cache.touch(slot);
            return true;
        }
        let slot = self.cache.insert(Entry::new(*id, 1, units * UNIT_BYTES, mount_id, 0));
        self.cache.touch(slot);
        self.cache.keep_share(0, mount_id, u64::from(units));
        self.cache.make_room(0, u64::from(units)).unwrap();
        if let Some(slot) = self.cache.slab.find(id) {
            self.cache.charge(slot, i64::from(units));
        }
        self.cache.relieve(0, 64);
        assert!(self.cache.spaces[0].used() <= self.capacity, "more than its capacity");
        false
    }

    fn shuffled_epoch(&mut self, blocks: &[(BlockId, u32)], rng: &mut StdRng, pace: f64) -> f64 {
        let mut order: Vec<usize> = (0..blocks.len()).collect();
        order.shuffle(rng);
        let mut hits = 0;
        for position in order {
            self.now += pace;
            hits += usize::from(self.read(&blocks[position].0, blocks[position].1));
        }
        self.cache.check_sums();
        hits as f64 / blocks.len() as f64
    }
}

/// Blocks of 40 to 60 KB, in units.
fn images(count: u64, rng: &mut StdRng) -> Vec<(BlockId, u32)> {
    (0..count).map(|value| (id(value), rng.random_range(10..=15))).collect()
}

fn epochs_over_half(pace: f64) -> Vec<f64> {
    let mut rng = StdRng::seed_from_u64(42);
    let blocks = images(10_000, &mut rng);
    let total: u64 = blocks.iter().map(|(_, units)| u64::from(*units)).sum();
    let mut simulation = Simulation::new(total / 2);
    (0..6).map(|_| simulation.shuffled_epoch(&blocks, &mut rng, pace)).collect()
}

#[test]
fn a_shuffled_scan_of_twice_the_cache_hits_nearly_half() {
    // At 50 images a second, and at 100,000 a second, when everything looks recent.
    for pace in [0.02, 0.000_01] {
        let hits = epochs_over_half(pace);
        assert!(hits[0] == 0.0 && hits[1..].iter().all(|ratio| *ratio >= 0.47), "pace {pace}: {hits:?}");
    }
}

#[test]
fn a_scan_of_twice_the_share_of_its_mount_hits_nearly_half() {
    let mut rng = StdRng::seed_from_u64(42);
    let blocks = images(10_000, &mut rng);
    let total: u64 = blocks.iter().map(|(_, units)| u64::from(*units)).sum();
    let mut simulation = Simulation::with_share(total, 50);
    let hits: Vec<f64> = (0..6).map(|_| simulation.shuffled_epoch(&blocks, &mut rng, 0.02)).collect();
    assert!(hits[1..].iter().all(|ratio| *ratio >= 0.45), "{hits:?}");
    assert!(simulation.cache.spaces[0].used() <= total / 2);
}

#[test]
fn a_mount_that_reads_more_than_its_share_displaces_its_own_blocks_alone() {
    for (percent, others_stay) in [(30, true), (100, false)] {
        let mut simulation = Simulation::with_share(10_000, percent);
        (0..25).for_each(|value| assert!(!simulation.read_of(2, &id(value), 100)));
        // Again and again, so that they are worth more than what others have.
        for value in 1000..1400 {
            for _ in 0..6 {
                simulation.now += 1.0;
                simulation.read_of(1, &id(value), 100);
            }
        }
        let is_there = |value: &u64| simulation.cache.slab.find(&id(*value)).is_some();
        assert_eq!((0..25).all(|value| is_there(&value)), others_stay, "{percent} percent");
        assert!(is_there(&1399));
        let own = (1000..1400).filter(is_there).count() as u64 * 100;
        assert_eq!(own <= 3000, others_stay, "{own} units at {percent} percent");
        simulation.cache.check_sums();
    }
}

#[test]
fn large_blocks_of_a_mount_take_the_place_of_many_small_ones() {
    let mut simulation = Simulation::with_share(100_000, 30);
    (0..25).for_each(|value| assert!(!simulation.read_of(2, &id(value), 1000)));
    let small = (1000..41_000).map(|value| (value, 1));
    let large = (100_000..100_040).map(|value| (value, 2048));
    for (value, units) in small.chain(large) {
        simulation.now += 0.001;
        simulation.read_of(1, &id(value), units);
        let own = simulation.cache.space(0, Scope::Mount(1)).used();
        assert!(own <= 30_000, "{own} units of 30,000 after block {value}");
    }
    assert!(simulation.cache.space(0, Scope::Mount(1)).used() > 25_000);
    assert!((0..25).all(|value| simulation.cache.slab.find(&id(value)).is_some()), "what others have stays");
    simulation.cache.check_sums();
}

#[test]
fn a_fill_evicts_nothing_of_a_mount_that_is_relieved_in_time() {
    // 100 units are between the share of the high watermark and that of the capacity.
    let mut simulation = Simulation::with_share(10_000, 50);
    for value in 0..1000 {
        simulation.now += 0.001;
        simulation.cache.now = simulation.now as u32;
        simulation.cache.departures.gone.clear();
        let slot = simulation.cache.insert(Entry::new(id(value), 1, 20 * UNIT_BYTES, 1, 0));
        simulation.cache.keep_share(0, 1, 20);
        assert_eq!(simulation.cache.departures.gone.len(), 0, "for block {value}");
        simulation.cache.charge(slot, 20);
        simulation.cache.touch(slot);
        while simulation.cache.needs_relief(0) {
            simulation.cache.relieve(0, 64);
        }
        assert!(simulation.cache.space(0, Scope::Mount(1)).used() <= 4900);
    }
    simulation.cache.check_sums();
}

#[test]
fn a_mount_may_have_what_is_reserved_at_a_time_whatever_its_percentage_is() {
    // One percent is a single block.
    let mut simulation = Simulation::with_least_share(10_000, 1, 2048);
    let count = |simulation: &Simulation, blocks: std::ops::Range<u64>| {
        blocks.filter(|value| simulation.cache.slab.find(&id(*value)).is_some()).count()
    };
    (0..20).for_each(|value| assert!(!simulation.read(&id(value), 100)));
    assert_eq!(count(&simulation, 0..20), 20);
    (20..60).for_each(|value| assert!(!simulation.read(&id(value), 100)));
    assert_eq!(count(&simulation, 0..60), 20);
    simulation.cache.check_sums();
}

#[test]
fn a_scan_of_ten_times_the_cache_keeps_a_tenth() {
    let mut rng = StdRng::seed_from_u64(7);
    let blocks = images(40_000, &mut rng);
    let total: u64 = blocks.iter().map(|(_, units)| u64::from(*units)).sum();
    let mut simulation = Simulation::new(total / 10);
    let hits: Vec<f64> = (0..4).map(|_| simulation.shuffled_epoch(&blocks, &mut rng, 0.001)).collect();
    assert!(hits[1..].iter().all(|ratio| *ratio >= 0.085), "{hits:?}");
}

#[test]
fn a_set_that_fits_is_kept_whole() {
    let mut rng = StdRng::seed_from_u64(3);
    let blocks = images(5000, &mut rng);
    let total: u64 = blocks.iter().map(|(_, units)| u64::from(*units)).sum();
    let mut simulation = Simulation::new(total * 11 / 10);
    simulation.shuffled_epoch(&blocks, &mut rng, 0.01);
    assert_eq!(simulation.shuffled_epoch(&blocks, &mut rng, 0.01), 1.0);
}

#[test]
fn a_new_hot_set_takes_the_place_of_the_old_one() {
    let mut rng = StdRng::seed_from_u64(9);
    let blocks = images(8000, &mut rng);
    let (old, new) = blocks.split_at(4000);
    let total: u64 = old.iter().map(|(_, units)| u64::from(*units)).sum();
    let mut simulation = Simulation::new(total * 11 / 10);
    for _ in 0..20 {
        simulation.shuffled_epoch(old, &mut rng, 0.01);
    }
    let hits: Vec<f64> = (0..30).map(|_| simulation.shuffled_epoch(new, &mut rng, 0.01)).collect();
    assert!(hits[29] > 0.95, "{hits:?}");
}

#[test]
fn a_scan_does_not_wash_out_a_hot_set() {
    let mut rng = StdRng::seed_from_u64(5);
    let blocks = images(20_000, &mut rng);
    let (hot, cold) = blocks.split_at(2000);
    let total: u64 = hot.iter().map(|(_, units)| u64::from(*units)).sum();
    let mut simulation = Simulation::new(total * 3 / 2);
    for _ in 0..5 {
        simulation.shuffled_epoch(hot, &mut rng, 0.01);
    }
    simulation.shuffled_epoch(cold, &mut rng, 0.01);
    assert!(simulation.shuffled_epoch(hot, &mut rng, 0.01) > 0.95);
}

#[test]
fn a_stream_through_a_small_cache_finds_the_block_that_it_is_reading() {
    // 64 MiB blocks through 1 GiB, in pieces of 1 MiB, each piece touched when it is read a little later.
    let mut simulation = Simulation::new(1 << 18);
    let mut rng = StdRng::seed_from_u64(11);
    let small = images(20_000, &mut rng);
    for _ in 0..3 {
        simulation.shuffled_epoch(&small, &mut rng, 0.001);
    }
    let piece = (1 << 20) / UNIT_BYTES;
    for block in 0..40 {
        let block = id(1_000_000 + block);
        simulation.cache.count_use(&block);
        simulation.cache.insert(Entry::new(block, 1, 64 << 20, 1, 0));
        for _ in 0..64 {
            simulation.now += 0.001;
            simulation.cache.now = simulation.now as u32;
            simulation.cache.departures.gone.clear();
            let slot = simulation.cache.slab.find(&block).expect("evicted while it is being read");
            simulation.cache.touch(slot);
            simulation.cache.make_room(0, u64::from(piece)).unwrap();
            let slot = simulation.cache.slab.find(&block).expect("evicted for its own next piece");
            simulation.cache.charge(slot, i64::from(piece));
            simulation.cache.relieve(0, 64);
            assert!(simulation.cache.spaces[0].used() <= simulation.capacity);
        }
    }
}

#[test]
fn expired_blocks_go_before_all_others() {
    let mut simulation = Simulation::new(10_000);
    let blocks: Vec<BlockId> = (0..90).map(id).collect();
    for block in &blocks {
        simulation.read(block, 100);
    }
    let old = simulation.cache.slab.find(&blocks[70]).unwrap();
    simulation.cache.expire(old);
    simulation.now = 100.0;
    for value in 1000..1020 {
        simulation.read(&id(value), 100);
    }
    assert!(simulation.cache.slab.find(&blocks[70]).is_none());
    assert!(simulation.cache.slab.find(&blocks[71]).is_some());
    simulation.cache.check_sums();
}

#[test]
fn a_wish_beyond_the_capacity_is_refused() {
    let mut simulation = Simulation::new(100);
    assert_eq!(simulation.cache.make_room(0, 101), Err(Full));
    assert_eq!(simulation.cache.make_room(0, 100), Ok(()));
}
