//! Time as the master writes it down.

use std::sync::atomic::{AtomicI64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

/// Nanoseconds since the Unix epoch that never run backwards while the process lives, so that "listed later" can be told
/// from two numbers even when the host's clock is set.
#[derive(Debug, Default)]
pub struct Clock {
    last: AtomicI64,
}

impl Clock {
    /// Later than every number given out before.
    pub fn now_ns(&self) -> i64 {
        let wall = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let wall = i64::try_from(wall.as_nanos()).unwrap_or(i64::MAX);
        let last = self.last.fetch_max(wall, Ordering::AcqRel);
        if wall > last { wall } else { self.last.fetch_add(1, Ordering::AcqRel) + 1 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_grow() {
        let clock = Clock::default();
        clock.last.store(i64::MAX - 10, Ordering::Release);
        assert!(clock.now_ns() < clock.now_ns());
    }
}
