//! When what is cached may be used, and for how long a kernel may trust it.
//!
//! Under a live lease the master notifies the client of every change that it knows of, so what is cached is as good as
//! the master's own knowledge. What the master knows of the bucket ages with the listing: young, it is used; past half
//! of `metadata_ttl` it is used, and a new listing is asked for in the background; past `metadata_ttl` the new listing
//! is waited for. While no master answers, everything is used.

use std::time::Duration;

/// Longest trust in anything that cannot be proven right now.
const UNPROVEN: Duration = Duration::from_secs(1);

/// What is known about the state of an entry's directory.
#[derive(Clone, Copy, Debug)]
pub(super) struct Freshness {
    /// Age of the directory's listing; `None` when unknown.
    pub age: Option<Duration>,
    /// How long a listing is fresh; `None` for as long as the lease lives (no mount, or `consistency = never`).
    pub ttl: Option<Duration>,
    pub lease: LeaseState,
    /// The bucket is slow: waiting for a listing did not help lately.
    pub slow_bucket: bool,
}

/// The state of the session with the master.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum LeaseState {
    Live,
    /// No event has extended the lease for too long, but calls may still be answered.
    Expired,
    /// Calls are not answered.
    Unreachable,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum CacheDecision {
    /// As it is.
    Serve,
    /// As it is, because nobody can be asked.
    ServeStale,
    /// As it is, and ask for a new listing in the background.
    ServeAndRefresh,
    /// Ask for a new listing first.
    RefreshFirst,
    /// Ask the master for the entry itself.
    Ask,
}

impl Freshness {
    pub(super) fn decide(&self) -> CacheDecision {
        match self.lease {
            LeaseState::Unreachable => return CacheDecision::ServeStale,
            LeaseState::Expired => return CacheDecision::Ask,
            LeaseState::Live => {}
        }
        let Some(ttl) = self.ttl else { return CacheDecision::Serve };
        match self.age {
            None => CacheDecision::Ask,
            Some(age) if age < ttl / 2 => CacheDecision::Serve,
            Some(age) if age < ttl || self.slow_bucket => CacheDecision::ServeAndRefresh,
            Some(_) => CacheDecision::RefreshFirst,
        }
    }

    /// How long the kernel may keep the entry without asking, while the lease lasts; `Duration::MAX` for until it is
    /// invalidated.
    pub(super) fn trust(&self) -> Duration {
        let proven = match (self.ttl, self.age) {
            (None, _) => Duration::MAX,
            (Some(ttl), Some(age)) if age < ttl => (ttl / 2).min(ttl - age),
            (Some(ttl), _) => (ttl / 2).min(UNPROVEN),
        };
        match self.lease {
            LeaseState::Live => proven,
            LeaseState::Expired | LeaseState::Unreachable => proven.min(UNPROVEN),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn freshness(age_s: Option<u64>, ttl_s: Option<u64>, lease: LeaseState) -> Freshness {
        let seconds = |seconds: Option<u64>| seconds.map(Duration::from_secs);
        Freshness { age: seconds(age_s), ttl: seconds(ttl_s), lease, slow_bucket: false }
    }

    #[test]
    fn decisions_follow_age_and_lease() {
        for (age, ttl, lease, expected) in [
            (Some(4), Some(10), LeaseState::Live, CacheDecision::Serve),
            (Some(5), Some(10), LeaseState::Live, CacheDecision::ServeAndRefresh),
            (Some(10), Some(10), LeaseState::Live, CacheDecision::RefreshFirst),
            (Some(0), Some(0), LeaseState::Live, CacheDecision::RefreshFirst),
            (None, Some(10), LeaseState::Live, CacheDecision::Ask),
            (None, None, LeaseState::Live, CacheDecision::Serve),
            (Some(1), Some(10), LeaseState::Expired, CacheDecision::Ask),
            (Some(100), Some(10), LeaseState::Unreachable, CacheDecision::ServeStale),
            (None, Some(10), LeaseState::Unreachable, CacheDecision::ServeStale),
        ] {
            assert_eq!(freshness(age, ttl, lease).decide(), expected, "{age:?} {ttl:?} {lease:?}");
        }
        let slow = Freshness { slow_bucket: true, ..freshness(Some(100), Some(10), LeaseState::Live) };
        assert_eq!(slow.decide(), CacheDecision::ServeAndRefresh);
    }

    #[test]
    fn kernel_trust_ends_before_the_listing_does() {
        let seconds = Duration::from_secs;
        for (age, ttl, lease, expected) in [
            (Some(0), Some(10), LeaseState::Live, seconds(5)),
            (Some(7), Some(10), LeaseState::Live, seconds(3)),
            (Some(12), Some(10), LeaseState::Live, seconds(1)),
            (None, Some(10), LeaseState::Live, seconds(1)),
            (None, None, LeaseState::Live, Duration::MAX),
            (None, None, LeaseState::Expired, seconds(1)),
            (Some(0), Some(10), LeaseState::Unreachable, seconds(1)),
        ] {
            assert_eq!(freshness(age, ttl, lease).trust(), expected, "{age:?} {ttl:?} {lease:?}");
        }
    }
}
