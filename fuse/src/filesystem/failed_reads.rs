//! Reads that failed just now, for the kernel that asks twice.
//!
//! A process that reads a file waits for the kernel's read-ahead. When that fails, the kernel says nothing yet: it asks
//! for the one page that the process is waiting for once more, and only this second answer reaches the process. If both
//! waited for the deadline of a read, the process would wait for two. So the first question about a part of what has
//! just failed gets the same answer at once. Whoever tries again after that is served in earnest.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

/// The kernel's second question comes within milliseconds.
const REMEMBERED: Duration = Duration::from_secs(1);
/// Failures remembered: as many as one read-ahead has requests.
const FAILURES_MAX: usize = 32;

/// Failed reads of one handle.
#[derive(Debug, Default)]
pub struct FailedReads {
    /// Spares the lock on every read of a handle that is well.
    any: AtomicBool,
    failures: Mutex<Vec<Failure>>,
}

#[derive(Debug)]
struct Failure {
    bytes: Range<u64>,
    errno: i32,
    when: Instant,
}

impl FailedReads {
    /// Remembers a failure.
    pub fn add(&self, bytes: Range<u64>, errno: i32, now: Instant) {
        let mut failures = self.failures.lock();
        failures.retain(|failure| failure.is_recent(now));
        if failures.len() == FAILURES_MAX {
            failures.remove(0);
        }
        failures.push(Failure { bytes, errno, when: now });
        self.any.store(true, Relaxed);
    }

    /// The answer to a read that asks for a part of a recent failure: once.
    pub fn take(&self, bytes: &Range<u64>, now: Instant) -> Option<i32> {
        if !self.any.load(Relaxed) {
            return None;
        }
        let mut failures = self.failures.lock();
        failures.retain(|failure| failure.is_recent(now));
        let found = failures
            .iter()
            .position(|failure| failure.bytes.start <= bytes.start && bytes.end <= failure.bytes.end)
            .map(|place| failures.remove(place).errno);
        self.any.store(!failures.is_empty(), Relaxed);
        found
    }
}

impl Failure {
    fn is_recent(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.when) < REMEMBERED
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_second_question_is_answered_once() {
        let (failed, now) = (FailedReads::default(), Instant::now());
        assert_eq!(failed.take(&(0..4096), now), None);
        failed.add(0..131_072, libc::EIO, now);
        assert_eq!(failed.take(&(131_072..135_168), now), None, "another part");
        assert_eq!(failed.take(&(126_976..135_168), now), None, "more than what failed");
        assert_eq!(failed.take(&(4096..8192), now), Some(libc::EIO));
        assert_eq!(failed.take(&(4096..8192), now), None, "a new attempt");
    }

    #[test]
    fn old_failures_are_forgotten_and_their_number_is_bounded() {
        let (failed, now) = (FailedReads::default(), Instant::now());
        failed.add(0..10, libc::EIO, now);
        assert_eq!(failed.take(&(0..10), now + REMEMBERED), None);
        for number in 0..100 {
            failed.add(number..number + 1, libc::ESTALE, now);
        }
        assert!(failed.failures.lock().len() <= FAILURES_MAX);
        assert_eq!(failed.take(&(99..100), now), Some(libc::ESTALE));
    }
}
