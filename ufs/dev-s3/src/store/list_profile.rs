//! How the listings of a bucket are served: as late as those of a store far away, and as often as one allows.

use std::collections::HashMap;
use std::num::NonZeroU32;
use std::time::Duration;

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

/// Prefixes that are kept account of before those are forgotten that may be asked at once.
const PREFIXES: usize = 10_000;

/// What pages of a listing are counted together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RateScope {
    /// All pages of the bucket.
    #[default]
    Bucket,
    /// Those that ask for the same prefix.
    Prefix,
}

/// How pages are served. In JSON every key may be left out.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ListProfile {
    /// Added to the time of each page. Timers have steps of 1 ms, so it may be one more.
    pub latency_ms: u64,
    /// Pages in a second; as many may come at once. Others are answered 503 `SlowDown`. Absent for no limit.
    pub pages_per_second: Option<NonZeroU32>,
    pub rate_of: RateScope,
}

/// A profile in force.
#[derive(Default)]
pub(super) struct ListPacer {
    profile: ListProfile,
    /// When the account of a prefix is even.
    even: Mutex<HashMap<String, Instant>>,
}

impl ListPacer {
    pub fn new(profile: ListProfile) -> Self {
        Self { profile, even: Mutex::default() }
    }

    pub fn profile(&self) -> &ListProfile {
        &self.profile
    }

    /// How long a page waits that is asked for now; `None` where it is refused.
    pub fn admit(&self, prefix: &str, now: Instant) -> Option<Duration> {
        let latency = Duration::from_millis(self.profile.latency_ms);
        let Some(rate) = self.profile.pages_per_second else { return Some(latency) };
        let second = Duration::from_secs(1);
        let interval = second / rate.get();
        let prefix = if self.profile.rate_of == RateScope::Prefix { prefix } else { "" };
        let mut even = self.even.lock();
        if even.len() >= PREFIXES {
            even.retain(|_, due| *due > now);
        }
        let due = even.entry(prefix.to_owned()).or_insert(now);
        let begins = (*due).max(now);
        if begins > now + (second - interval) {
            return None;
        }
        *due = begins + interval;
        Some(latency)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn admitted(pacer: &ListPacer, prefix: &str, now: Instant) -> usize {
        (0..100).filter(|_| pacer.admit(prefix, now).is_some()).count()
    }

    #[test]
    fn a_rate_is_kept_for_the_bucket_or_for_each_prefix() {
        let now = Instant::now();
        for rate in [1, 3, 7, 50] {
            let profile = ListProfile { pages_per_second: NonZeroU32::new(rate), ..ListProfile::default() };
            let pacer = ListPacer::new(profile.clone());
            let at_once = (admitted(&pacer, "a/", now), admitted(&pacer, "b/", now));
            assert_eq!(at_once, (rate as usize, 0), "{rate}");
            let later = now + Duration::from_secs(10);
            assert_eq!(admitted(&pacer, "", later), rate as usize);
            assert_eq!(admitted(&pacer, "", later + Duration::from_secs(1) / rate), 1);
            let pacer = ListPacer::new(ListProfile { rate_of: RateScope::Prefix, ..profile });
            let at_once = (admitted(&pacer, "a/", now), admitted(&pacer, "b/", now));
            assert_eq!(at_once, (rate as usize, rate as usize), "{rate}");
        }
    }

    #[test]
    fn without_a_rate_pages_wait_for_their_latency() {
        let pacer = ListPacer::new(ListProfile { latency_ms: 20, ..ListProfile::default() });
        let now = Instant::now();
        assert!((0..1000).all(|_| pacer.admit("", now) == Some(Duration::from_millis(20))));
    }
}
