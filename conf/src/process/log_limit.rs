//! One log line for each event, but no flood: beyond a few per second and kind, they are only counted.

use std::collections::HashMap;
use std::hash::Hash;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

/// Lines of a kind in one period.
const LINES: u32 = 10;
const PERIOD: Duration = Duration::from_secs(1);

/// Kinds are few: each that there ever was is kept.
#[derive(Debug)]
pub struct LogLimit<K>(Mutex<HashMap<K, Period>>);

#[derive(Debug)]
struct Period {
    since: Instant,
    lines: u32,
    suppressed: u64,
}

impl<K> Default for LogLimit<K> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<K: Eq + Hash> LogLimit<K> {
    /// How many lines of the kind were left out before the one that is to be written now; `None` when that is to be
    /// left out as well.
    pub fn admit(&self, kind: K) -> Option<u64> {
        self.admit_at(kind, Instant::now())
    }

    fn admit_at(&self, kind: K, now: Instant) -> Option<u64> {
        let mut periods = self.0.lock();
        let period = periods.entry(kind).or_insert(Period { since: now, lines: 0, suppressed: 0 });
        if now.saturating_duration_since(period.since) >= PERIOD {
            (period.since, period.lines) = (now, 0);
        }
        if period.lines == LINES {
            period.suppressed += 1;
            return None;
        }
        period.lines += 1;
        Some(std::mem::take(&mut period.suppressed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_is_counted_instead_of_written() {
        let (limit, now) = (LogLimit::default(), Instant::now());
        assert!((0..LINES).all(|_| limit.admit_at(5, now) == Some(0)));
        assert_eq!((limit.admit_at(5, now), limit.admit_at(5, now)), (None, None));
        assert_eq!(limit.admit_at(13, now), Some(0));
        assert_eq!(limit.admit_at(5, now + PERIOD), Some(2));
    }
}
