//! Files that are written to while they are uploaded. The parts that were sent by then were sent in vain, so such a
//! file is left alone for a delay after the first time, for twice as long after each further one, and never for less
//! than its last upload took. In memory, since a new leader may send some parts once more.
//!
//! A file that nobody has open to write to does not wait for that, once it is at rest: its last writer has closed it.
//! Where it changes nevertheless, as one that is opened for each line of a log does, it has to rest for twice as long
//! the next time, up to [`PATIENCE`] delays. Who begins to wait for a file does not wait for pauses of before.

use std::collections::HashMap;
use std::time::Duration;

use cavern_conf::backoff::{Jitter, Profile};
use parking_lot::Mutex;
use tokio::time::Instant;

use super::retry_tracker::Priority;
use super::{PATIENCE, REST_PART};

/// While somebody waits, a file that is being written to is looked at again after so long.
pub(super) const AWAITED_PAUSE: Duration = Duration::from_secs(1);
/// Longest pause after an upload that took less than that, where the delay is no longer.
const LONGEST_PAUSE: Duration = Duration::from_secs(600);
/// Shortest pause: without a delay, there has to be something to be doubled.
const SHORTEST_PAUSE: Duration = Duration::from_millis(10);
/// Files, of some 100 bytes each. Further ones are tried again after [`AWAITED_PAUSE`].
const REMEMBERED: usize = 10_000;

/// Remembers uploads in vain by inode.
pub(super) struct ChangingFiles {
    /// After an upload in vain.
    pauses: Profile,
    /// The same while somebody waits for the file.
    awaited_pauses: Profile,
    /// After the last change of a file that is closed.
    rests: Profile,
    files: Mutex<HashMap<u64, ChangingFile>>,
}

#[derive(Clone, Copy, Debug)]
struct ChangingFile {
    /// The last upload in vain.
    began: Instant,
    ended: Instant,
    /// How long the file is left alone after it, and how long if it is closed and at rest.
    pause: Duration,
    rest: Duration,
    /// Uploads in vain, and those of them that did not wait until the pause before was over.
    count: u32,
    early_count: u32,
}

impl ChangingFile {
    fn until(&self) -> Instant {
        self.ended + self.pause
    }

    /// Whether somebody has begun to wait for the file since.
    fn is_outdated(&self, priority: Priority) -> bool {
        matches!(priority, Priority::Expedited(since) if self.began < since)
    }
}

impl ChangingFiles {
    /// With the delay after which a file is written that is open.
    pub(super) fn new(delay: Duration) -> Self {
        let doubled =
            |first: Duration, longest: Duration| Profile::new(first.max(SHORTEST_PAUSE), longest, Jitter::None);
        let longest = LONGEST_PAUSE.max(delay);
        Self {
            pauses: doubled(delay, longest),
            awaited_pauses: doubled(delay.min(AWAITED_PAUSE), longest),
            // What rests for so long has been left by its writers.
            rests: doubled(delay / REST_PART, delay.max(AWAITED_PAUSE) * PATIENCE),
            files: Mutex::default(),
        }
    }

    /// An upload that began then has ended in vain.
    pub(super) fn add(&self, inode: u64, priority: Priority, began: Instant, now: Instant) {
        let mut files = self.files.lock();
        let before = files.get(&inode).filter(|before| !before.is_outdated(priority)).copied();
        let count = before.map_or(0, |before| before.count);
        let early_count =
            before.map_or(0, |before| before.early_count.saturating_add(u32::from(began < before.until())));
        let pauses = if priority == Priority::Normal { &self.pauses } else { &self.awaited_pauses };
        let file = ChangingFile {
            began,
            ended: now,
            pause: pauses.pause(count).max(now.saturating_duration_since(began)),
            rest: self.rests.pause(early_count),
            count: count.saturating_add(1),
            early_count,
        };
        if files.len() < REMEMBERED || files.contains_key(&inode) {
            files.insert(inode, file);
        }
    }

    /// Whether a file is to be left alone, since its last upload was in vain. `at_rest` is how long ago it was changed,
    /// and `None` while somebody may write to it.
    pub(super) fn waits(&self, inode: u64, priority: Priority, at_rest: Option<Duration>, now: Instant) -> bool {
        let Some(file) = self.files.lock().get(&inode).copied() else { return false };
        // Nobody may have told yet of the change that ended the upload.
        let at_rest = at_rest.map(|at_rest| at_rest.min(now.saturating_duration_since(file.ended)));
        now < file.until() && !file.is_outdated(priority) && at_rest.is_none_or(|at_rest| at_rest < file.rest)
    }

    /// Whether the last upload of a file was in vain.
    pub(super) fn contains(&self, inode: u64) -> bool {
        self.files.lock().contains_key(&inode)
    }

    /// All that are remembered.
    pub(super) fn inodes(&self) -> Vec<u64> {
        self.files.lock().keys().copied().collect()
    }

    /// A file has been uploaded, or has nothing to be uploaded any more.
    pub(super) fn forget(&self, inode: u64) {
        self.files.lock().remove(&inode);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DELAY: Duration = Duration::from_secs(5);
    const REST: Duration = Duration::from_millis(500);
    const MOMENT: Duration = Duration::from_millis(1);

    /// Whether an open file waits for exactly so long.
    fn waits_for(files: &ChangingFiles, priority: Priority, from: Instant, pause: Duration) -> bool {
        let waits = |now: Instant| files.waits(1, priority, None, now);
        waits(from + pause - MOMENT) && !waits(from + pause)
    }

    #[test]
    fn an_open_file_waits_twice_as_long_each_time_and_as_long_as_its_upload_took() {
        let files = ChangingFiles::new(DELAY);
        let mut now = Instant::now();
        assert!(!files.waits(1, Priority::Normal, None, now));
        for seconds in [5, 10, 20, 40, 80, 160, 320, 600, 600] {
            let pause = Duration::from_secs(seconds);
            files.add(1, Priority::Normal, now, now);
            assert!(waits_for(&files, Priority::Normal, now, pause), "{pause:?}");
            now += pause;
        }
        assert!(!files.waits(2, Priority::Normal, None, now), "others do not wait");
        let took = Duration::from_secs(3600);
        files.add(1, Priority::Normal, now, now + took);
        assert!(waits_for(&files, Priority::Normal, now + took, took));
        assert!(files.contains(1));
        files.forget(1);
        assert!(!files.contains(1) && !files.waits(1, Priority::Normal, None, now + took));
        files.add(1, Priority::Normal, now, now);
        assert!(waits_for(&files, Priority::Normal, now, DELAY), "it is as new");
    }

    #[test]
    fn a_closed_file_waits_until_it_is_at_rest_and_longer_if_it_was_not() {
        let files = ChangingFiles::new(DELAY);
        let waits = |at_rest: Duration, now: Instant| files.waits(1, Priority::Normal, Some(at_rest), now);
        let mut now = Instant::now();
        files.add(1, Priority::Normal, now, now);
        assert!(waits(REST - MOMENT, now + REST) && !waits(REST, now + REST));
        for doubled in 0..5 {
            let rest = REST * (1 << doubled);
            // The leader may know nothing of the change: the file is as at rest as it was.
            assert!(waits(DELAY * 100, now + rest - MOMENT) && !waits(DELAY * 100, now + rest), "{rest:?}");
            now += rest;
            files.add(1, Priority::Normal, now, now);
        }
        // One that waited until its pause was over does not have to rest for longer.
        now += DELAY * 100;
        files.add(1, Priority::Normal, now, now);
        let rest = REST * (1 << 5);
        assert!(waits(rest - MOMENT, now + rest) && !waits(rest, now + rest));
        // No file has to rest for longer than its changes may take to arrive.
        for _ in 0..5 {
            files.add(1, Priority::Normal, now, now);
        }
        let longest = DELAY * PATIENCE;
        assert!(waits(longest - MOMENT, now + longest) && !waits(longest, now + longest));
    }

    #[test]
    fn who_begins_to_wait_does_not_wait_for_pauses_of_before() {
        let files = ChangingFiles::new(DELAY);
        let mut now = Instant::now();
        for _ in 0..10 {
            files.add(1, Priority::Normal, now, now);
            now += DELAY;
        }
        let awaited = Priority::Expedited(now);
        assert!(files.waits(1, Priority::Normal, None, now) && !files.waits(1, awaited, None, now));
        for seconds in [1, 2, 4, 8] {
            let pause = Duration::from_secs(seconds);
            files.add(1, awaited, now, now);
            assert!(waits_for(&files, awaited, now, pause), "{pause:?}");
            now += pause;
        }
    }

    #[test]
    fn what_is_remembered_has_an_end() {
        let files = ChangingFiles::new(DELAY);
        let now = Instant::now();
        for inode in 0..2 * REMEMBERED as u64 {
            files.add(inode, Priority::Normal, now, now);
        }
        assert_eq!(files.inodes().len(), REMEMBERED);
        files.add(1, Priority::Normal, now, now);
        assert!(waits_for(&files, Priority::Normal, now, DELAY * 2), "one that is known is noted again");
        files.forget(0);
        assert_eq!(files.inodes().len(), REMEMBERED - 1);
    }

    #[test]
    fn pauses_grow_without_a_delay_and_beyond_a_long_one_not() {
        let now = Instant::now();
        let files = ChangingFiles::new(Duration::ZERO);
        files.add(1, Priority::Normal, now, now);
        files.add(1, Priority::Normal, now, now);
        assert!(waits_for(&files, Priority::Normal, now, SHORTEST_PAUSE * 2));
        let hour = Duration::from_secs(3600);
        let files = ChangingFiles::new(hour);
        files.add(1, Priority::Normal, now, now);
        files.add(1, Priority::Normal, now, now);
        assert!(waits_for(&files, Priority::Normal, now, hour));
    }
}
