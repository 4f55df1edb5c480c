//! Pauses after failures.

use std::time::Duration;

/// How long to wait after failures in a row: twice as long after each further one, up to a bound.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Backoff {
    /// After one failure.
    pub first: Duration,
    /// At most.
    pub most: Duration,
}

impl Backoff {
    pub const fn new(first: Duration, most: Duration) -> Self {
        Self { first, most }
    }

    /// The pause after so many failures in a row, from 1.
    pub fn pause(&self, failures: u32) -> Duration {
        let factor = 1u32.checked_shl(failures.saturating_sub(1)).unwrap_or(u32::MAX);
        self.first.saturating_mul(factor).min(self.most)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_a_bound() {
        let backoff = Backoff::new(Duration::from_millis(500), Duration::from_secs(30));
        let pauses = [0, 1, 2, 3, 7, 40, u32::MAX].map(|failures| backoff.pause(failures).as_millis());
        assert_eq!(pauses, [500, 500, 1000, 2000, 30_000, 30_000, 30_000]);
        let steady = Backoff::new(Duration::MAX, Duration::MAX);
        assert_eq!(steady.pause(5), Duration::MAX);
    }
}
