//! When to read ahead of a handle, and how far: a pure state machine, without I/O.
//!
//! A handle may carry several interleaved sequential streams (two threads, or a file with an index at its end). A
//! stream begins with two reads that follow each other; the kernel may deliver them in either order. From then on the
//! window doubles whenever the reader has used half of what was asked for, and reads that come a little early or late
//! still belong to it. A read that fits no stream begins a new one in the place of the stream that was used longest
//! ago, so that random access soon leaves nothing to read ahead.

use std::ops::Range;

/// Streams of one handle.
const STREAMS: usize = 3;
/// Streams of a file, of all who have it open.
const STREAMS_OF_MANY: usize = 16;
/// First window.
const WINDOW_FIRST: u64 = 512 * 1024;
/// How far the kernel may reorder the reads of one stream.
const REORDER: u64 = 2 << 20;

#[derive(Debug)]
pub(super) struct Readahead {
    streams: Vec<Stream>,
    streams_max: usize,
    window_max: u64,
    clock: u64,
    pattern: Pattern,
}

/// What the reads of a handle look like.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Pattern {
    /// The last read belongs to a stream, or may begin one.
    Streams,
    /// It belongs to none of those that there were last, as many as there can be.
    Random,
}

#[derive(Debug)]
struct Stream {
    /// Where its first read began.
    start: u64,
    /// The end of its furthest read.
    next: u64,
    /// Everything before this has been read or asked for.
    ahead: u64,
    /// Bytes to keep asked for beyond `next`; 0 until the stream is established.
    window: u64,
    used: u64,
}

impl Readahead {
    /// Of a handle. `window_max` in bytes; 0 switches it off.
    pub(super) fn new(window_max: u64) -> Self {
        Self { streams: Vec::new(), streams_max: STREAMS, window_max, clock: 0, pattern: Pattern::Streams }
    }

    /// Of all handles of a file.
    pub(super) fn of_many(window_max: u64) -> Self {
        Self { streams_max: STREAMS_OF_MANY, ..Self::new(window_max) }
    }

    /// Nothing that was asked for counts any more.
    pub(super) fn reset(&mut self) {
        self.streams.clear();
    }

    /// A read happens: what to ask for now, beyond it, in a file of `length` bytes.
    pub(super) fn on_read(&mut self, read: Range<u64>, length: u64) -> Option<Range<u64>> {
        if self.window_max == 0 || read.is_empty() {
            return None;
        }
        self.clock += 1;
        let clock = self.clock;
        let Some(stream) = self.streams.iter_mut().find(|stream| stream.takes(&read)) else {
            self.pattern = if self.streams.len() == self.streams_max { Pattern::Random } else { Pattern::Streams };
            self.begin(read);
            return None;
        };
        self.pattern = Pattern::Streams;
        stream.used = clock;
        stream.start = stream.start.min(read.start);
        stream.next = stream.next.max(read.end);
        stream.ahead = stream.ahead.max(stream.next);
        let size = read.end - read.start;
        if stream.window == 0 {
            stream.window = WINDOW_FIRST.max(size * 2).min(self.window_max);
        } else if stream.ahead - stream.next >= stream.window / 2 {
            return None;
        } else {
            stream.window = (stream.window * 2).min(self.window_max);
        }
        let wanted = stream.ahead..(stream.next + stream.window).min(length);
        if wanted.start >= wanted.end {
            return None;
        }
        stream.ahead = wanted.end;
        Some(wanted)
    }

    /// How the last read went with those before it.
    pub(super) fn pattern(&self) -> Pattern {
        self.pattern
    }

    fn begin(&mut self, read: Range<u64>) {
        if self.streams.len() == self.streams_max {
            let oldest = self.streams.iter().enumerate().min_by_key(|(_, stream)| stream.used);
            if let Some((oldest, _)) = oldest {
                self.streams.swap_remove(oldest);
            }
        }
        let Range { start, end } = read;
        self.streams.push(Stream { start, next: end, ahead: end, window: 0, used: self.clock });
    }
}

impl Stream {
    fn takes(&self, read: &Range<u64>) -> bool {
        if self.window == 0 {
            // Strict: a random read must not look like the beginning of a stream.
            return read.start == self.next || read.end == self.start;
        }
        let early = self.next.saturating_sub(REORDER.max(self.window));
        (early..=self.ahead.max(self.next + REORDER)).contains(&read.start)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const KIB: u64 = 1024;
    const MIB: u64 = 1024 * KIB;
    const GIB: u64 = 1024 * MIB;

    fn reads(readahead: &mut Readahead, reads: impl IntoIterator<Item = Range<u64>>) -> Vec<Option<Range<u64>>> {
        reads.into_iter().map(|read| readahead.on_read(read, GIB)).collect()
    }

    fn step(number: u64, size: u64) -> Range<u64> {
        number * size..(number + 1) * size
    }

    #[test]
    fn a_stream_starts_small_doubles_and_stays_within_its_limit() {
        let mut readahead = Readahead::new(8 * MIB);
        let wanted = reads(&mut readahead, (0..400).map(|number| step(number, 128 * KIB)));
        assert_eq!(wanted[0], None);
        assert_eq!(wanted[1], Some(256 * KIB..768 * KIB));
        let asked: Vec<_> = wanted.into_iter().flatten().collect();
        assert!(asked.windows(2).all(|pair| pair[0].end == pair[1].start), "without gaps or overlaps: {asked:?}");
        assert!(asked.iter().all(|range| range.end - range.start <= 8 * MIB));
        assert!(asked.last().unwrap().end >= 400 * 128 * KIB + 4 * MIB);
    }

    #[test]
    fn reordered_reads_are_one_stream() {
        let mut readahead = Readahead::new(8 * MIB);
        let order = [1, 0, 3, 2, 5, 4, 7, 6];
        let wanted = reads(&mut readahead, order.map(|number| step(number, 128 * KIB)));
        assert!(wanted[1].is_some());
        assert_eq!(readahead.streams.len(), 1);
    }

    #[test]
    fn two_interleaved_streams_are_both_read_ahead() {
        let mut readahead = Readahead::new(4 * MIB);
        let far = 512 * MIB;
        let both = (0..50).flat_map(|number| {
            let near = step(number, 128 * KIB);
            [near.clone(), near.start + far..near.end + far]
        });
        let asked: Vec<_> = reads(&mut readahead, both).into_iter().flatten().collect();
        assert!(asked.iter().any(|range| range.end > far + 6 * MIB));
        assert!(asked.iter().any(|range| (6 * MIB..far).contains(&range.end)));
    }

    #[test]
    fn aligned_random_reads_ask_for_almost_nothing_more() {
        // Deterministic numbers, well mixed.
        let mut state = 42u64;
        let mut random = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % (GIB / (128 * KIB))
        };
        let mut readahead = Readahead::new(32 * MIB);
        let wanted = reads(&mut readahead, (0..2000).map(|_| step(random(), 128 * KIB)));
        let extra: u64 = wanted.into_iter().flatten().map(|range| range.end - range.start).sum();
        assert!(extra <= 2000 * 128 * KIB / 20, "{extra}");
    }

    #[test]
    fn nothing_is_asked_beyond_the_end_or_when_switched_off() {
        let mut readahead = Readahead::new(8 * MIB);
        readahead.on_read(0..10, 25);
        assert_eq!(readahead.on_read(10..20, 25), Some(20..25));
        assert_eq!(readahead.on_read(20..25, 25), None);
        let mut off = Readahead::new(0);
        assert!(reads(&mut off, (0..10).map(|number| step(number, MIB))).iter().all(Option::is_none));
    }

    #[test]
    fn reads_at_random_are_told_from_streams_beside_them() {
        let mut readahead = Readahead::new(8 * MIB);
        reads(&mut readahead, [5, 90, 33].map(|number| step(number, MIB)));
        assert_eq!(readahead.pattern(), Pattern::Streams, "each may begin a stream");
        reads(&mut readahead, [step(700, MIB)]);
        assert_eq!(readahead.pattern(), Pattern::Random);
        for number in 0..100 {
            reads(&mut readahead, [step(number, 128 * KIB)]);
            assert_eq!(readahead.pattern() == Pattern::Random, number == 0, "read {number} of a stream");
            reads(&mut readahead, [step(400 + number * 7 % 100 * 5, MIB)]);
            assert_eq!(readahead.pattern(), Pattern::Random, "beside read {number}");
        }
        let mut off = Readahead::new(0);
        reads(&mut off, [5, 90, 33, 700].map(|number| step(number, MIB)));
        assert_eq!(off.pattern(), Pattern::Streams);
    }

    #[test]
    fn streams_of_many_handles_are_kept_apart_and_begin_anew_after_a_change() {
        let mut readahead = Readahead::of_many(4 * MIB);
        let all = (0..3).flat_map(|number| {
            (0..10).map(move |handle| {
                let read = step(number, 128 * KIB);
                read.start + handle * 64 * MIB..read.end + handle * 64 * MIB
            })
        });
        let asked = reads(&mut readahead, all).into_iter().flatten().count();
        assert!(asked >= 10, "{asked} of ten streams");
        readahead.reset();
        assert_eq!(readahead.on_read(step(3, 128 * KIB), GIB), None, "a first read");
        assert!(readahead.on_read(step(4, 128 * KIB), GIB).is_some());
    }

    proptest! {
        #[test]
        fn whatever_is_read_the_request_lies_beyond_it_and_within_the_file(
            steps in prop::collection::vec((0u64..64, 1u64..5), 1..200),
            window in 0u64..64,
        ) {
            let (mut readahead, length) = (Readahead::new(window * 256 * KIB), 60 * MIB);
            for (start, size) in steps {
                let read = start * MIB..(start * MIB + size * 512 * KIB).min(length);
                if let Some(wanted) = readahead.on_read(read.clone(), length) {
                    prop_assert!(wanted.start < wanted.end && wanted.end <= length);
                    prop_assert!(wanted.start >= read.end);
                    prop_assert!(wanted.end - wanted.start <= window * 256 * KIB);
                }
                prop_assert!(readahead.streams.len() <= STREAMS);
            }
        }
    }
}
