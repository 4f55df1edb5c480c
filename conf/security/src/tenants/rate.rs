//! How fast somebody may go on: a token bucket without a lock.
//!
//! What is taken is paid for by the time that passes. [`Rate`] keeps the moment at which all of it is paid for (the
//! theoretical arrival time of the generic cell rate algorithm, ITU-T I.371): whoever comes long before that has to
//! wait. What is taken counts for those who come later, so that something large is not held up by its own size.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::time::Instant;

/// So much may be taken before it is paid for.
const BURST: Duration = Duration::from_millis(200);

/// A token bucket without a lock.
#[derive(Debug)]
pub struct Rate {
    /// 0 for any number.
    per_second: u64,
    began: Instant,
    /// In nanoseconds after the beginning.
    paid_at: AtomicU64,
}

impl Rate {
    /// So many units in a second; 0 for any number.
    pub fn new(per_second: u64) -> Self {
        Self { per_second, began: Instant::now(), paid_at: AtomicU64::new(0) }
    }

    pub fn per_second(&self) -> u64 {
        self.per_second
    }

    pub fn is_unlimited(&self) -> bool {
        self.per_second == 0
    }

    /// Takes some, and says how long to wait before they are used, for what others have taken before.
    pub fn take(&self, units: u64) -> Duration {
        if self.is_unlimited() {
            return Duration::ZERO;
        }
        let (now, cost) = (self.now(), self.cost(units));
        let paid = |paid_at: u64| Some(paid_at.max(now).saturating_add(cost));
        let (Ok(before) | Err(before)) = self.paid_at.fetch_update(Ordering::Relaxed, Ordering::Relaxed, paid);
        wait(before, now)
    }

    /// What was taken has not been used.
    pub fn give_back(&self, units: u64) {
        if !self.is_unlimited() {
            let cost = self.cost(units);
            let less = |paid_at: u64| Some(paid_at.saturating_sub(cost));
            let _always = self.paid_at.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
        }
    }

    /// How long to wait before anything is taken.
    pub fn wait(&self) -> Duration {
        if self.is_unlimited() { Duration::ZERO } else { wait(self.paid_at.load(Ordering::Relaxed), self.now()) }
    }

    fn now(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    fn cost(&self, units: u64) -> u64 {
        let cost = u128::from(units) * 1_000_000_000 / u128::from(self.per_second);
        u64::try_from(cost).unwrap_or(u64::MAX)
    }
}

fn wait(paid_at: u64, now: u64) -> Duration {
    Duration::from_nanos(paid_at.saturating_sub(now)).saturating_sub(BURST)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn over_time_it_is_the_rate_and_at_first_a_little_more() {
        let rate = Rate::new(1000);
        let started = Instant::now();
        for _ in 0..3000 {
            tokio::time::sleep(rate.take(1)).await;
        }
        let (took, least) = (started.elapsed(), Duration::from_secs(3) - BURST);
        assert!(took >= least - Duration::from_millis(2) && took < least + Duration::from_millis(20), "{took:?}");
        tokio::time::sleep(Duration::from_secs(3600)).await;
        let at_once = (0..1000).take_while(|_| rate.take(1).is_zero()).count();
        assert!((200..=202).contains(&at_once), "{at_once}: what was not used is not saved up");
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_large_is_waited_for_by_who_comes_next() {
        let rate = Rate::new(1000);
        assert_eq!((rate.wait(), rate.take(5000)), (Duration::ZERO, Duration::ZERO));
        assert_eq!(rate.wait(), Duration::from_secs(5) - BURST);
        assert_eq!(rate.take(1), Duration::from_secs(5) - BURST);
        rate.give_back(5001);
        assert_eq!(rate.wait(), Duration::ZERO);
    }

    #[tokio::test(start_paused = true)]
    async fn without_a_limit_nobody_waits() {
        let rate = Rate::new(0);
        assert_eq!((rate.take(u64::MAX), rate.take(1), rate.wait()), Default::default());
        rate.give_back(1);
    }
}
