//! Inodes that were written to their buckets lately. One that changes again and again is left alone for a delay after
//! its first upload and for twice as long after each further one, so that it is not written as often as it changes. In
//! memory, since a new leader may write something once more.

use std::collections::HashMap;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

/// Inodes of a generation, of some 50 bytes each; beyond it those before are forgotten sooner.
const REMEMBERED: usize = 100_000;

/// Remembers uploads by inode.
pub(super) struct RecentUploads {
    /// After the first upload, and at most.
    pauses: (Duration, Duration),
    generations: Mutex<UploadGenerations>,
}

/// Two generations of what is remembered: the older one goes as a whole.
struct UploadGenerations {
    begun: Instant,
    young: HashMap<u64, RecentUpload>,
    old: HashMap<u64, RecentUpload>,
}

#[derive(Clone, Copy, Debug)]
struct RecentUpload {
    at: Instant,
    /// How long the inode is left alone.
    pause: Duration,
}

impl RecentUploads {
    /// With the pause after a first upload, and the longest one.
    pub(super) fn new(first: Duration, longest: Duration) -> Self {
        let generations = UploadGenerations { begun: Instant::now(), young: HashMap::new(), old: HashMap::new() };
        Self { pauses: (first, longest), generations: Mutex::new(generations) }
    }

    /// An inode has been written to its bucket.
    pub(super) fn add(&self, inode: u64, now: Instant) {
        let mut generations = self.generations.lock();
        let since = |upload: &RecentUpload| now.saturating_duration_since(upload.at);
        let before = generations.get(inode).filter(|upload| since(upload) < self.memory());
        let (first, longest) = self.pauses;
        let pause = before.map_or(first, |upload| (upload.pause * 2).min(longest));
        if now.saturating_duration_since(generations.begun) >= self.memory() || generations.young.len() >= REMEMBERED {
            generations.old = std::mem::take(&mut generations.young);
            generations.begun = now;
        }
        generations.young.insert(inode, RecentUpload { at: now, pause });
    }

    /// Whether an inode is to be left alone, since it has been written so short a time ago.
    pub(super) fn is_recent(&self, inode: u64, now: Instant) -> bool {
        let upload = self.generations.lock().get(inode);
        upload.is_some_and(|upload| now.saturating_duration_since(upload.at) < upload.pause)
    }

    /// An inode that is written once more after this has been at rest for long.
    fn memory(&self) -> Duration {
        self.pauses.1 * 2
    }
}

impl UploadGenerations {
    fn get(&self, inode: u64) -> Option<RecentUpload> {
        self.young.get(&inode).or_else(|| self.old.get(&inode)).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DELAY: Duration = Duration::from_secs(5);

    #[test]
    fn a_file_that_is_written_again_and_again_waits_twice_as_long_each_time() {
        let recent = RecentUploads::new(DELAY, DELAY * 10);
        let mut now = Instant::now();
        assert!(!recent.is_recent(1, now));
        for pause in [5, 10, 20, 40, 50, 50] {
            recent.add(1, now);
            assert!(recent.is_recent(1, now + Duration::from_secs(pause) - Duration::from_millis(1)), "{pause}");
            now += Duration::from_secs(pause);
            assert!(!recent.is_recent(1, now), "{pause}");
        }
        assert!(!recent.is_recent(2, now), "others do not wait");
        // At rest for long: it is as new.
        now += DELAY * 20;
        recent.add(1, now);
        assert!(recent.is_recent(1, now) && !recent.is_recent(1, now + DELAY));
    }

    #[test]
    fn what_is_remembered_has_an_end() {
        let recent = RecentUploads::new(DELAY, DELAY * 10);
        let now = Instant::now();
        for inode in 0..3 * REMEMBERED as u64 {
            recent.add(inode, now);
        }
        let generations = recent.generations.lock();
        assert!(generations.young.len() + generations.old.len() <= 2 * REMEMBERED);
        assert!(generations.get(0).is_none() && generations.get(3 * REMEMBERED as u64 - 1).is_some());
    }

    #[test]
    fn without_a_delay_nothing_waits() {
        let recent = RecentUploads::new(Duration::ZERO, Duration::ZERO);
        let now = Instant::now();
        recent.add(1, now);
        recent.add(1, now);
        assert!(!recent.is_recent(1, now));
    }
}
