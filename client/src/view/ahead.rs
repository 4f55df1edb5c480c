//! When to bring the runs that follow on those that are read: a pure state machine, without I/O.
//!
//! Whoever reads the files of a view in their order reads its devices in order. Several readers may do so at a time, in
//! different places, or in turns in one. A reader of a single file has the read-ahead of that file.

use std::ops::Range;

use parking_lot::Mutex;

/// Runs that are brought together.
pub(super) const BATCH_RUNS: usize = 8;
/// Bytes of a run that is brought, at most.
pub(super) const RUN_BYTES: u64 = 1 << 20;
/// Of all that are on their way.
pub(super) const UNDER_WAY_BYTES: u64 = 8 << 20;
/// Readers that are told from each other.
const STREAMS: usize = 16;
/// Runs that follow on each other before something is brought.
const CONSECUTIVE: u32 = 3;
/// Blocks between runs of one reader, or of several that take turns.
const NEAR: u32 = 256;

#[derive(Default)]
pub(super) struct Ahead(Mutex<State>);

#[derive(Default)]
struct State {
    streams: Vec<RunStream>,
    clock: u64,
}

/// Runs that are read one after the other.
struct RunStream {
    id: u64,
    device: u32,
    /// Where the last run begins, and the end of the furthest.
    last: u32,
    end: u32,
    runs: u32,
    /// Whatever is before this block has been brought, or is being.
    brought: u32,
    /// More is brought when a run from this block on is read.
    trigger: u32,
    used: u64,
}

/// Runs to be brought: the next ones from a block on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct RunBatch {
    stream: u64,
    pub device: u32,
    pub from: u32,
}

impl Ahead {
    /// A run is read, which has these blocks: what to bring now. Whoever gets something tells what became of it.
    pub(super) fn on_run(&self, device: u32, run: Range<u32>) -> Option<RunBatch> {
        // Nobody waits for others here: the next run will do.
        let mut state = self.0.try_lock()?;
        state.clock += 1;
        let clock = state.clock;
        let follows = |stream: &&mut RunStream| {
            stream.device == device && (stream.last == run.start || run.start.abs_diff(stream.end) <= NEAR)
        };
        let Some(stream) = state.streams.iter_mut().find(follows) else {
            state.begin(device, run);
            return None;
        };
        stream.used = clock;
        if stream.last == run.start {
            return None;
        }
        stream.last = run.start;
        stream.end = stream.end.max(run.end);
        stream.runs += 1;
        if stream.runs < CONSECUTIVE || run.start < stream.trigger {
            return None;
        }
        stream.trigger = u32::MAX;
        Some(RunBatch { stream: stream.id, device, from: stream.brought.max(stream.end) })
    }

    /// The runs of a batch are being brought: they end with a block, and another one is that from which on more is to
    /// be brought.
    pub(super) fn begun(&self, batch: &RunBatch, end: u32, trigger: u32) {
        let mut state = self.0.lock();
        if let Some(stream) = state.streams.iter_mut().find(|stream| stream.id == batch.stream) {
            (stream.brought, stream.trigger) = (end, trigger);
        }
    }
}

impl State {
    /// In the place of the stream that was used longest ago, if there are as many as there may be.
    fn begin(&mut self, device: u32, run: Range<u32>) {
        if self.streams.len() == STREAMS {
            let oldest = self.streams.iter().enumerate().min_by_key(|(_, stream)| stream.used);
            if let Some((oldest, _)) = oldest {
                self.streams.swap_remove(oldest);
            }
        }
        let Range { start: last, end } = run;
        let (id, used) = (self.clock, self.clock);
        self.streams.push(RunStream { id, device, last, end, runs: 1, brought: 0, trigger: 0, used });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Files of 13 blocks each, as 50,000 bytes take.
    fn file(number: u32) -> Range<u32> {
        13 * number..13 * (number + 1)
    }

    /// Brings a batch of eight files, and says which is the first of them.
    fn bring(ahead: &Ahead, batch: RunBatch) -> u32 {
        let first = batch.from / 13;
        ahead.begun(&batch, file(first + 7).end, file(first + 4).start);
        first
    }

    #[test]
    fn runs_in_order_have_the_next_ones_brought_each_once() {
        let ahead = Ahead::default();
        let mut brought = Vec::new();
        for number in 0..100 {
            // Several reads of one file are one.
            let batch = ahead.on_run(0, file(number));
            assert!(ahead.on_run(0, file(number)).is_none());
            if let Some(batch) = batch {
                let first = bring(&ahead, batch);
                assert!(first > number, "{first} when {number} is read");
                brought.extend(first..first + 8);
            }
        }
        assert_eq!(brought[..90], (3..93).collect::<Vec<_>>(), "without gaps");
        assert!(*brought.last().unwrap() <= 99 + 16);
    }

    #[test]
    fn readers_in_several_places_and_in_turns_are_followed() {
        let ahead = Ahead::default();
        let mut batches = 0;
        for number in 0..40 {
            for reader in 0..10 {
                let batch = ahead.on_run(0, file(1000 * reader + number));
                batches += u32::from(batch.map(|batch| bring(&ahead, batch)).is_some());
            }
        }
        assert_eq!(batches, 10 * 6);
        let ahead = Ahead::default();
        let turns = [1, 0, 3, 2, 5, 4, 7, 6].map(|number| ahead.on_run(0, file(number)).is_some());
        assert!(turns.contains(&true));
        assert!(ahead.on_run(1, file(8)).is_none(), "that is on another device");
    }

    #[test]
    fn reads_at_random_and_of_one_large_file_bring_nothing() {
        let ahead = Ahead::default();
        for number in 0..1000_u32 {
            let far = number.wrapping_mul(2_654_435_761) % 300_000;
            assert!(ahead.on_run(0, file(far)).is_none(), "{number}");
        }
        for _ in 0..100 {
            assert!(ahead.on_run(0, 10_000_000..20_000_000).is_none());
        }
    }
}
