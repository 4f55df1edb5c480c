//! Which directories the session would like to hold that were there before: those in which the master has made several
//! of its changes, one soon after the other.

use std::collections::HashMap;
use std::time::Duration;

use tokio::time::Instant;

/// Changes after which a directory is asked for,
const WANTED_AFTER: u32 = 3;
/// none of them later than so long after the one before.
const WITHIN: Duration = Duration::from_secs(10);
/// Between two wishes for a directory. Twice as long after each that was refused,
const AGAIN: Duration = Duration::from_secs(1);
/// so often at most.
const DOUBLED_MAX: u32 = 6;
/// Directories that are counted.
const COUNTED_MAX: usize = 4096;

#[derive(Debug, Default)]
pub(super) struct Wishes {
    counted: HashMap<u64, Streak>,
}

#[derive(Debug)]
struct Streak {
    changes: u32,
    last: Instant,
    /// Not asked for before.
    again: Instant,
    refused: u32,
}

impl Wishes {
    /// The master has made a change in a directory; whether that is to be asked for now. Says so once.
    pub(super) fn changed(&mut self, directory: u64) -> bool {
        let now = Instant::now();
        if self.counted.len() >= COUNTED_MAX && !self.counted.contains_key(&directory) {
            self.counted.retain(|_, counted| counted.again > now || counted.is_recent(now));
            if self.counted.len() >= COUNTED_MAX {
                return false;
            }
        }
        let new = Streak { changes: 0, last: now, again: now, refused: 0 };
        let counted = self.counted.entry(directory).or_insert(new);
        counted.changes = if counted.is_recent(now) { counted.changes + 1 } else { 1 };
        counted.last = now;
        let is_wanted = counted.changes >= WANTED_AFTER && counted.again <= now;
        if is_wanted {
            (counted.changes, counted.again) = (0, now + AGAIN);
        }
        is_wanted
    }

    /// The session does not come to hold a directory.
    pub(super) fn refused(&mut self, directory: u64) {
        if let Some(counted) = self.counted.get_mut(&directory) {
            counted.refused = (counted.refused + 1).min(DOUBLED_MAX);
            counted.again = Instant::now() + AGAIN * (1 << counted.refused);
        }
    }

    /// The session holds a directory.
    pub(super) fn granted(&mut self, directory: u64) {
        self.counted.remove(&directory);
    }
}

impl Streak {
    fn is_recent(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.last) < WITHIN
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_directory_is_asked_for_after_some_changes_and_more_rarely_when_it_is_refused() {
        let mut wishes = Wishes::default();
        let changed = |wishes: &mut Wishes| [(); 3].map(|()| wishes.changed(7));
        assert_eq!(changed(&mut wishes), [false, false, true]);
        assert_eq!(changed(&mut wishes), [false; 3], "it is being asked for");
        wishes.refused(7);
        tokio::time::advance(AGAIN).await;
        assert!(!wishes.changed(7));
        tokio::time::advance(AGAIN).await;
        assert!(wishes.changed(7));
        wishes.refused(7);
        tokio::time::advance(3 * AGAIN).await;
        assert_eq!(changed(&mut wishes), [false; 3]);
        tokio::time::advance(AGAIN).await;
        assert!(wishes.changed(7));
        wishes.granted(7);
        assert_eq!(changed(&mut wishes), [false, false, true], "nobody has refused it since");
        for _ in 0..2 * WANTED_AFTER {
            tokio::time::advance(WITHIN).await;
            assert!(!wishes.changed(8), "they are far apart");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn only_so_many_directories_are_counted_at_a_time() {
        let mut wishes = Wishes::default();
        for directory in 0..2 * COUNTED_MAX as u64 {
            wishes.changed(directory);
        }
        assert_eq!(wishes.counted.len(), COUNTED_MAX);
        tokio::time::advance(WITHIN).await;
        wishes.changed(u64::MAX);
        assert_eq!(wishes.counted.len(), 1);
    }
}
