//! How much is written to the buckets.

use std::collections::VecDeque;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

/// The rate is that of so many seconds.
const WINDOW: Duration = Duration::from_secs(10);

/// What was written lately.
#[derive(Default)]
pub(super) struct Throughput(Mutex<VecDeque<(Instant, u64, u64)>>);

impl Throughput {
    pub(super) fn add(&self, bytes: u64) {
        let now = Instant::now();
        let mut recent = self.0.lock();
        match recent.back_mut() {
            Some((began, files, sum)) if began.elapsed() < Duration::from_millis(250) => {
                *files += 1;
                *sum += bytes;
            }
            _ => recent.push_back((now, 1, bytes)),
        }
        while recent.front().is_some_and(|(began, _, _)| began.elapsed() > WINDOW) {
            recent.pop_front();
        }
    }

    /// Files and bytes per second.
    pub(super) fn rate(&self) -> (u64, u64) {
        let recent = self.0.lock();
        let recent = recent.iter().filter(|(began, _, _)| began.elapsed() <= WINDOW);
        let (files, bytes) = recent.fold((0, 0), |(files, bytes), (_, more, sum)| (files + more, bytes + sum));
        (files / WINDOW.as_secs(), bytes / WINDOW.as_secs())
    }
}
