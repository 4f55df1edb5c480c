//! Which workers hold a block: weighted rendezvous hashing over the live workers of one epoch.
//!
//! Every worker draws a number for the block from a hash of (worker, content, index); the block belongs to the workers
//! with the best draws. With `u` uniform in (0, 1) and weight `w` (capacity), the draw `-w / ln(u)` makes a worker win
//! in proportion to its weight (Schindelhauer and Schomaker, "Weighted distributed hash tables", 2005), and a worker
//! that comes or goes moves only the blocks that it wins or held. Nobody is asked: clients, workers and the master
//! compute the same answer from the same table. A worker that is being emptied holds what it holds, and draws no more.

use cavern_proto::ContentId;
use cavern_proto::master::{Worker, WorkerState, WorkerTable};

/// The live workers of one epoch, ready for placement.
#[derive(Clone, Debug, Default)]
pub struct Placement {
    epoch: u64,
    workers: Vec<Worker>,
    live: Vec<WeightedWorker>,
}

/// What the draw needs of a worker.
#[derive(Clone, Copy, Debug)]
struct WeightedWorker {
    id: u64,
    /// Capacity in bytes; a worker that reports none still takes part, with the least weight.
    weight: f64,
}

impl Placement {
    /// Takes the live workers of a table that are not being emptied.
    pub fn new(table: &WorkerTable) -> Self {
        let live = table.workers.iter().filter(|worker| worker.state() == WorkerState::Live && !worker.draining);
        let live =
            live.map(|worker| WeightedWorker { id: worker.id, weight: worker.capacity_bytes.max(1) as f64 }).collect();
        Self { epoch: table.epoch, workers: table.workers.clone(), live }
    }

    /// Epoch of the table.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Every worker of the table, live or lost, in the table's order.
    pub fn workers(&self) -> &[Worker] {
        &self.workers
    }

    /// A worker of the table by its id.
    pub fn worker(&self, id: u64) -> Option<&Worker> {
        self.workers.iter().find(|worker| worker.id == id)
    }

    /// Ids of the best `count` live workers for a block, best first; fewer when fewer are live.
    pub fn candidates(&self, content: ContentId, index: u32, count: usize) -> Candidates {
        let mut best = Candidates::default();
        let seed = content.hash64() ^ mix(u64::from(index).wrapping_add(0x9e37_79b9_7f4a_7c15));
        for seat in &self.live {
            best.offer(count, seat.id, draw(seed, *seat));
        }
        best
    }
}

impl Placement {
    /// Ids of all live workers that take blocks, the best for a block first: for a block that must find room somewhere.
    pub fn ranked(&self, content: ContentId, index: u32) -> Vec<u64> {
        let seed = content.hash64() ^ mix(u64::from(index).wrapping_add(0x9e37_79b9_7f4a_7c15));
        let mut drawn: Vec<(u64, f64)> = self.live.iter().map(|seat| (seat.id, draw(seed, *seat))).collect();
        drawn.sort_by(|one, other| other.1.total_cmp(&one.1).then(one.0.cmp(&other.0)));
        drawn.into_iter().map(|(id, _)| id).collect()
    }

    /// Whether a worker of the table is live.
    pub fn is_live(&self, id: u64) -> bool {
        self.worker(id).is_some_and(|worker| worker.state() == WorkerState::Live)
    }
}

/// At most four workers, best first.
#[derive(Clone, Copy, Debug, Default)]
pub struct Candidates {
    seats: [(u64, f64); MAX_CANDIDATES],
    length: usize,
}

/// More replicas of clean cache than this would only waste room.
pub const MAX_CANDIDATES: usize = 4;

impl Candidates {
    /// Worker ids, best first.
    pub fn iter(&self) -> impl Iterator<Item = u64> + '_ {
        self.seats[..self.length].iter().map(|(id, _)| *id)
    }

    /// The best worker; `None` when none is live.
    pub fn first(&self) -> Option<u64> {
        self.iter().next()
    }

    fn offer(&mut self, count: usize, id: u64, draw: f64) {
        let count = count.min(MAX_CANDIDATES);
        // The id breaks ties, so that the order of the table does not matter.
        let better = |other: &(u64, f64)| draw > other.1 || (draw == other.1 && id < other.0);
        let at = self.seats[..self.length].iter().position(better).unwrap_or(self.length);
        if at < count {
            self.length = (self.length + 1).min(count);
            self.seats[at..self.length].rotate_right(1);
            self.seats[at] = (id, draw);
        }
    }
}

fn draw(seed: u64, seat: WeightedWorker) -> f64 {
    // 53 bits, moved off both ends: neither ln(0) nor ln(1) can occur.
    let bits = mix(seed ^ mix(seat.id)) >> 11;
    let uniform = (bits as f64 + 0.5) / (1u64 << 53) as f64;
    -seat.weight / uniform.ln()
}

/// The finalizer of SplitMix64: every input bit changes about half of the output bits.
fn mix(value: u64) -> u64 {
    let value = (value ^ value >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ value >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ value >> 31
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn table(workers: &[(u64, u64)]) -> Placement {
        let worker = |(id, capacity): &(u64, u64)| Worker {
            id: *id,
            capacity_bytes: *capacity,
            state: WorkerState::Live.into(),
            ..Worker::default()
        };
        Placement::new(&WorkerTable { epoch: 1, workers: workers.iter().map(worker).collect() })
    }

    fn content(number: u64) -> ContentId {
        ContentId::of_object("s", &number.to_string(), "e", 1, 1)
    }

    #[test]
    fn load_follows_capacity() {
        let placement = table(&[(1, 100), (2, 200), (3, 300)]);
        let mut wins = [0u32; 4];
        for number in 0..6000 {
            wins[placement.candidates(content(number), 0, 1).first().unwrap() as usize] += 1;
        }
        for (worker, expected) in [(1, 1000), (2, 2000), (3, 3000)] {
            assert!(wins[worker].abs_diff(expected) < 200, "{wins:?}");
        }
    }

    #[test]
    fn blocks_of_one_content_are_spread() {
        let placement = table(&[(1, 1), (2, 1), (3, 1), (4, 1)]);
        let owners = (0..400).map(|index| placement.candidates(content(7), index, 1).first().unwrap());
        let mut wins = [0u32; 5];
        owners.for_each(|owner| wins[owner as usize] += 1);
        assert!(wins[1..].iter().all(|wins| (60..140).contains(wins)), "{wins:?}");
    }

    #[test]
    fn lost_workers_own_nothing() {
        let worker =
            |id, state: WorkerState| Worker { id, capacity_bytes: 1, state: state.into(), ..Worker::default() };
        let workers = vec![worker(1, WorkerState::Lost), worker(2, WorkerState::Live)];
        let placement = Placement::new(&WorkerTable { epoch: 3, workers });
        assert_eq!(placement.candidates(content(1), 0, 4).iter().collect::<Vec<_>>(), [2]);
        assert!(placement.worker(1).is_some());
        let draining = Worker { draining: true, ..worker(1, WorkerState::Live) };
        let placement =
            Placement::new(&WorkerTable { epoch: 4, workers: vec![draining, worker(2, WorkerState::Live)] });
        assert_eq!((placement.ranked(content(1), 0), placement.is_live(1)), (vec![2], true));
        assert_eq!(Placement::default().candidates(content(1), 0, 4).first(), None);
    }

    proptest! {
        #[test]
        fn a_worker_that_leaves_moves_only_its_own_blocks(
            capacities in prop::collection::vec(1u64..1000, 2..12),
            gone in 0usize..12,
            number: u64,
            index: u32,
        ) {
            let before: Vec<(u64, u64)> = capacities.iter().zip(1..).map(|(capacity, id)| (id, *capacity)).collect();
            let gone = before[gone % before.len()].0;
            let after: Vec<(u64, u64)> = before.iter().copied().filter(|(id, _)| *id != gone).collect();
            let ranked = |workers: &[(u64, u64)]| {
                table(workers).candidates(content(number), index, MAX_CANDIDATES).iter().collect::<Vec<_>>()
            };
            let (old, new) = (ranked(&before), ranked(&after));
            let kept: Vec<u64> = old.into_iter().filter(|id| *id != gone).collect();
            prop_assert_eq!(&new[..kept.len()], &kept[..]);
        }

        #[test]
        fn the_order_of_the_table_does_not_matter(
            mut workers in prop::collection::vec((1u64..1000, 1u64..4), 1..12),
            number: u64,
        ) {
            workers.sort_by_key(|worker| worker.0);
            workers.dedup_by_key(|worker| worker.0);
            let ranked = |workers: &[(u64, u64)]| {
                table(workers).candidates(content(number), 0, 3).iter().collect::<Vec<_>>()
            };
            let forward = ranked(&workers);
            workers.reverse();
            prop_assert_eq!(forward, ranked(&workers));
        }
    }
}
