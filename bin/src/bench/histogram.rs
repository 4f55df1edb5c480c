//! How long operations took: counts in buckets whose width grows with the value (as in HdrHistogram, by Gil Tene).
//!
//! Below 128 ns each nanosecond has a bucket. Above, each power of two is divided into 64, so that a value is known to
//! 1/64 of itself. Recording is an addition, merging one for each bucket.

use std::time::Duration;

/// Buckets for each power of two, as a power of two.
const SUB_BITS: u32 = 6;
const SUB: u64 = 1 << SUB_BITS;
/// Enough for every `u64`.
const BUCKETS: usize = ((64 - SUB_BITS as usize) + 1) << SUB_BITS;

/// Durations in nanoseconds.
#[derive(Clone)]
pub struct Histogram {
    buckets: Vec<u64>,
    count: u64,
    max: u64,
}

impl Default for Histogram {
    fn default() -> Self {
        Self { buckets: vec![0; BUCKETS], count: 0, max: 0 }
    }
}

fn bucket_of(value: u64) -> usize {
    let shift = (value | SUB).ilog2() - SUB_BITS;
    ((u64::from(shift) << SUB_BITS) + (value >> shift)) as usize
}

/// The largest value of a bucket.
fn last_of(bucket: usize) -> u64 {
    let bucket = bucket as u64;
    let shift = (bucket >> SUB_BITS).saturating_sub(1);
    let first = (bucket - (shift << SUB_BITS)) << shift;
    first + ((1 << shift) - 1)
}

impl Histogram {
    pub fn record(&mut self, took: Duration) {
        let value = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        self.buckets[bucket_of(value)] += 1;
        self.count += 1;
        self.max = self.max.max(value);
    }

    pub fn merge(&mut self, other: &Self) {
        for (bucket, more) in self.buckets.iter_mut().zip(&other.buckets) {
            *bucket += more;
        }
        self.count += other.count;
        self.max = self.max.max(other.max);
    }

    /// How many have been recorded.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// The longest one, exactly.
    pub fn max(&self) -> Duration {
        Duration::from_nanos(self.max)
    }

    /// What this share (0 to 1) of all did not exceed: no less than the exact value, and at most 1/64 more. Zero of
    /// nothing.
    pub fn quantile(&self, share: f64) -> Duration {
        let rank = ((share * self.count as f64).ceil() as u64).clamp(1, self.count.max(1));
        let mut below = 0;
        for (bucket, count) in self.buckets.iter().enumerate() {
            below += count;
            if below >= rank {
                return Duration::from_nanos(last_of(bucket).min(self.max));
            }
        }
        self.max()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn of(values: &[u64]) -> Histogram {
        let mut histogram = Histogram::default();
        values.iter().for_each(|value| histogram.record(Duration::from_nanos(*value)));
        histogram
    }

    /// Of all magnitudes alike.
    fn values() -> impl Strategy<Value = Vec<u64>> {
        prop::collection::vec((any::<u64>(), 0u32..64).prop_map(|(value, shift)| value >> shift), 1..400)
    }

    proptest! {
        #[test]
        fn quantiles_are_those_of_the_sorted_values(mut values in values(), share in 0.0..=1.0f64) {
            let histogram = of(&values);
            values.sort_unstable();
            let rank = ((share * values.len() as f64).ceil() as usize).max(1);
            let (exact, found) = (values[rank - 1], histogram.quantile(share).as_nanos() as u64);
            prop_assert!(found >= exact && found - exact <= exact / SUB, "{found} for {exact}");
            prop_assert_eq!(histogram.count(), values.len() as u64);
            prop_assert_eq!(histogram.max().as_nanos() as u64, values[values.len() - 1]);
            prop_assert_eq!(histogram.quantile(1.0), histogram.max());
        }

        #[test]
        fn what_is_merged_is_as_if_recorded_in_one(one in values(), other in values()) {
            let mut merged = of(&one);
            merged.merge(&of(&other));
            let whole = of(&[one, other].concat());
            prop_assert_eq!(&merged.buckets, &whole.buckets);
            prop_assert_eq!((merged.count, merged.max), (whole.count, whole.max));
        }
    }

    #[test]
    fn buckets_follow_each_other_without_a_gap() {
        for bucket in 0..BUCKETS - 1 {
            let last = last_of(bucket);
            assert_eq!((bucket_of(last), bucket_of(last + 1)), (bucket, bucket + 1), "{bucket}");
        }
        assert_eq!((bucket_of(0), bucket_of(u64::MAX), last_of(BUCKETS - 1)), (0, BUCKETS - 1, u64::MAX));
    }

    #[test]
    fn nothing_takes_no_time() {
        let empty = Histogram::default();
        assert_eq!((empty.count(), empty.max(), empty.quantile(0.5)), (0, Duration::ZERO, Duration::ZERO));
    }
}
