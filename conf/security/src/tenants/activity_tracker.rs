//! Whether somebody has others beside him, who wait for what he is doing.

use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

/// Others are there for so long after they were heard of last.
const ACTIVE_FOR: Duration = Duration::from_secs(1);

/// Those who do the same thing. Remembers the two that it has heard of last.
#[derive(Debug, Default)]
pub(super) struct ActivityTracker(Mutex<[Option<(u64, Instant)>; 2]>);

impl ActivityTracker {
    /// This one does it now; whether another has lately.
    pub(super) fn record(&self, own: u64) -> bool {
        let now = Instant::now();
        let mut seen = self.0.lock();
        if seen[0].is_none_or(|(last, _)| last != own) {
            seen.swap(0, 1);
        }
        seen[0] = Some((own, now));
        seen[1].is_some_and(|(other, at)| other != own && now - at < ACTIVE_FOR)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn others_are_there_until_they_have_been_silent_for_a_while() {
        let activity = ActivityTracker::default();
        assert!(!activity.record(1), "the first");
        assert!(!activity.record(1), "the same again");
        assert!(activity.record(2));
        assert!(activity.record(1));
        tokio::time::advance(ACTIVE_FOR / 2).await;
        assert!(activity.record(1) && activity.record(3), "1 was here");
        assert!(activity.record(1));
        tokio::time::advance(ACTIVE_FOR).await;
        assert!(!activity.record(1), "2 and 3 have gone");
        assert!(activity.record(2) && activity.record(1));
    }
}
