//! Whether somebody has others beside him, who wait for what he is doing.

use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

/// Others are there for so long after they were heard of last.
pub(super) const STAYS: Duration = Duration::from_secs(1);

/// Those who do the same thing. Remembers the two that it has heard of last.
#[derive(Debug, Default)]
pub(super) struct Company(Mutex<[Option<(u64, Instant)>; 2]>);

impl Company {
    /// This one does it now; whether another has lately.
    pub(super) fn has_others(&self, own: u64) -> bool {
        let now = Instant::now();
        let mut seen = self.0.lock();
        if seen[0].is_none_or(|(last, _)| last != own) {
            seen.swap(0, 1);
        }
        seen[0] = Some((own, now));
        seen[1].is_some_and(|(other, at)| other != own && now - at < STAYS)
    }

    /// Whether another has done it lately.
    pub(super) fn is_beside(&self, own: u64) -> bool {
        let now = Instant::now();
        self.0.lock().iter().flatten().any(|(other, at)| *other != own && now - *at < STAYS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn others_are_there_until_they_have_been_silent_for_a_while() {
        let company = Company::default();
        assert!(!company.has_others(1), "the first");
        assert!(!company.has_others(1), "the same again");
        assert!(company.has_others(2));
        assert!(company.has_others(1));
        tokio::time::advance(STAYS / 2).await;
        assert!(company.is_beside(1) && company.is_beside(2) && company.is_beside(3));
        assert!(company.has_others(1) && company.has_others(3), "1 was here");
        assert!(company.has_others(1));
        tokio::time::advance(STAYS).await;
        assert!(!company.is_beside(4) && !company.has_others(1), "2 and 3 have gone");
        assert!(!company.is_beside(1));
        assert!(company.has_others(2) && company.has_others(1));
    }
}
