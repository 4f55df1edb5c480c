//! Hedging: when an answer takes longer than 95 % of the recent ones, the next source is asked too and the first answer
//! wins. A token bucket keeps the extra requests within a share of all (Dean and Barroso, "The Tail at Scale", 2013).

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

/// Nothing is sent twice before this time.
const FLOOR: Duration = Duration::from_millis(20);
/// Second requests that may follow each other at once.
const BURST: u64 = 8;
/// After this many answers, old ones count half.
const DECAY_EVERY: u32 = 1024;
/// Answers needed before the percentile means anything.
const SAMPLES_MIN: u32 = 32;
/// What is waited before then.
const UNKNOWN: Duration = Duration::from_millis(200);
/// Two buckets per doubling, from 2^0 µs: the last begins beyond half an hour.
const BUCKETS: usize = 64;
/// Tokens are counted in percent of a request.
const REQUEST: u64 = 100;

#[derive(Debug)]
pub(super) struct Hedge {
    percent: u64,
    tokens: AtomicU64,
    latencies: [AtomicU32; BUCKETS],
    samples: AtomicU32,
}

impl Hedge {
    pub(super) fn new(percent: u32) -> Self {
        Self {
            percent: u64::from(percent.min(100)),
            tokens: AtomicU64::new(0),
            latencies: [const { AtomicU32::new(0) }; BUCKETS],
            samples: AtomicU32::new(0),
        }
    }

    /// A first request is sent: after how long a second one may follow. `None` when hedging is off.
    pub(super) fn delay(&self) -> Option<Duration> {
        if self.percent == 0 {
            return None;
        }
        let grow = |tokens: u64| Some((tokens + self.percent).min(BURST * REQUEST));
        let _always = self.tokens.fetch_update(Ordering::Relaxed, Ordering::Relaxed, grow);
        Some(self.percentile().max(FLOOR))
    }

    /// Whether the second request may be sent now; takes its tokens.
    pub(super) fn permit(&self) -> bool {
        let shrink = |tokens: u64| tokens.checked_sub(REQUEST);
        self.tokens.fetch_update(Ordering::Relaxed, Ordering::Relaxed, shrink).is_ok()
    }

    /// An answer took this long.
    pub(super) fn observe(&self, latency: Duration) {
        self.latencies[bucket(latency)].fetch_add(1, Ordering::Relaxed);
        if self.samples.fetch_add(1, Ordering::Relaxed) + 1 >= DECAY_EVERY {
            self.samples.store(DECAY_EVERY / 2, Ordering::Relaxed);
            for count in &self.latencies {
                count.store(count.load(Ordering::Relaxed) / 2, Ordering::Relaxed);
            }
        }
    }

    /// The 95th percentile of recent answers.
    fn percentile(&self) -> Duration {
        if self.samples.load(Ordering::Relaxed) < SAMPLES_MIN {
            return UNKNOWN;
        }
        let counts = self.latencies.each_ref().map(|count| u64::from(count.load(Ordering::Relaxed)));
        let rank = counts.iter().sum::<u64>() * 95 / 100;
        let mut seen = 0;
        let bucket = counts.iter().position(|count| {
            seen += count;
            seen > rank
        });
        upper_bound(bucket.unwrap_or(BUCKETS - 1))
    }
}

fn bucket(latency: Duration) -> usize {
    let micros = (latency.as_micros() as u64).max(1);
    let power = 63 - micros.leading_zeros() as usize;
    let upper_half = power > 0 && micros >> (power - 1) & 1 == 1;
    (power * 2 + usize::from(upper_half)).min(BUCKETS - 1)
}

fn upper_bound(bucket: usize) -> Duration {
    let micros = 1u64 << (bucket / 2);
    Duration::from_micros(if bucket.is_multiple_of(2) { micros + micros / 2 } else { micros * 2 })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_for_the_recent_95th_percentile_but_never_less_than_the_floor() {
        let hedge = Hedge::new(5);
        assert_eq!(hedge.delay(), Some(UNKNOWN));
        (0..1000).for_each(|_| hedge.observe(Duration::from_micros(300)));
        assert_eq!(hedge.delay(), Some(FLOOR));
        (0..200).for_each(|_| hedge.observe(Duration::from_millis(100)));
        let delay = hedge.delay().unwrap();
        assert!((Duration::from_millis(90)..Duration::from_millis(140)).contains(&delay), "{delay:?}");
        (0..20_000).for_each(|_| hedge.observe(Duration::from_micros(300)));
        assert_eq!(hedge.delay(), Some(FLOOR), "old answers are forgotten");
    }

    #[test]
    fn extra_requests_stay_within_their_share() {
        let hedge = Hedge::new(5);
        let mut second = 0;
        for _ in 0..10_000 {
            assert!(hedge.delay().is_some());
            second += u32::from(hedge.permit());
        }
        assert!((490..=500).contains(&second), "{second}");
        assert_eq!(Hedge::new(0).delay(), None);
        assert!(!Hedge::new(0).permit());
    }

    #[test]
    fn buckets_cover_every_latency() {
        for micros in [0, 1, 2, 3, 1000, 1 << 40, u64::MAX / 2] {
            let latency = Duration::from_micros(micros);
            let bucket = bucket(latency);
            assert!(bucket == BUCKETS - 1 || upper_bound(bucket) >= latency, "{micros}");
        }
    }
}
