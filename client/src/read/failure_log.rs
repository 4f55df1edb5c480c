//! One log line per failed read, but no flood: beyond a few per second and errno, they are only counted.

use std::collections::HashMap;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

use crate::error::ClientError;
use crate::metadata::Node;

/// Lines per errno in one period.
const LINES: u32 = 10;
const PERIOD: Duration = Duration::from_secs(1);

#[derive(Debug, Default)]
pub(super) struct FailureLog(Mutex<HashMap<i32, Period>>);

#[derive(Debug)]
struct Period {
    since: Instant,
    lines: u32,
    suppressed: u64,
}

impl FailureLog {
    pub(super) fn report(&self, node: &Node, error: &ClientError) {
        if let Some(suppressed) = self.admit(error.errno(), Instant::now()) {
            tracing::warn!(file = %node, suppressed, "read failed: {error}");
        }
    }

    /// How many lines were left out before this one; `None` when this one is to be left out too.
    fn admit(&self, errno: i32, now: Instant) -> Option<u64> {
        let mut periods = self.0.lock();
        let period = periods.entry(errno).or_insert(Period { since: now, lines: 0, suppressed: 0 });
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
        let (log, now) = (FailureLog::default(), Instant::now());
        assert!((0..LINES).all(|_| log.admit(5, now) == Some(0)));
        assert_eq!((log.admit(5, now), log.admit(5, now)), (None, None));
        assert_eq!(log.admit(13, now), Some(0));
        assert_eq!(log.admit(5, now + PERIOD), Some(2));
    }
}
