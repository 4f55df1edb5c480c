//! Silence of others counts only for as long as this master has been listening.
//!
//! A master that stands still (a host without processors to spare, a virtual machine that is paused, a debugger) hears
//! nobody, and what others said meanwhile it finds when it goes on. To take them for dead then would cost clients what
//! they hold, and workers their place, for a fault of its own.

use std::time::Duration;

use tokio::time::Instant;

/// When this master has looked last. To be asked before silence is measured, and regularly.
#[derive(Debug)]
pub struct PauseDetector(Instant);

impl PauseDetector {
    /// It looks now.
    pub fn now() -> Self {
        Self(Instant::now())
    }

    /// It looks again. What has passed since the last look in excess of `most` is no silence of anybody: how long that
    /// was. Some of any pause counts, so that a master which is always late finds out who is dead, if later.
    pub fn missed(&mut self, most: Duration) -> Duration {
        let now = Instant::now();
        let passed = now.duration_since(self.0);
        self.0 = now;
        passed.saturating_sub(most)
    }
}

/// What was heard before a pause counts as heard that much later.
pub fn excuse<'a>(times: impl IntoIterator<Item = &'a mut Instant>, missed: Duration) {
    let now = Instant::now();
    for time in times {
        *time = (*time + missed).min(now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[tokio::test(start_paused = true)]
    async fn a_pause_is_no_silence_and_looks_that_are_late_count_in_part() {
        let (mut look, mut heard) = (PauseDetector::now(), Instant::now());
        for _ in 0..5 {
            tokio::time::advance(SECOND).await;
            assert_eq!(look.missed(2 * SECOND), Duration::ZERO);
        }
        assert_eq!(heard.elapsed(), 5 * SECOND);
        tokio::time::advance(60 * SECOND).await;
        let missed = look.missed(2 * SECOND);
        assert_eq!(missed, 58 * SECOND);
        excuse([&mut heard], missed);
        assert_eq!(heard.elapsed(), 7 * SECOND);
        // Nothing is heard in the future.
        heard = Instant::now();
        excuse([&mut heard], missed);
        assert_eq!(heard.elapsed(), Duration::ZERO);
    }
}
