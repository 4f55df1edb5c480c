//! When what is cached may be used, and for how long a kernel may trust it.
//!
//! Under a live lease the master tells of every change that it knows of, so what is cached is as good as the master's
//! own knowledge. What the master knows of the bucket ages with the listing: young, it is used; past half of
//! `metadata_ttl` it is used, and a new listing is asked for in the background; past `metadata_ttl` the new listing
//! is waited for. While no master answers, everything is used.

use std::time::Duration;

/// Longest trust in anything that cannot be proven right now.
const UNPROVEN: Duration = Duration::from_secs(1);

/// What is known about the state of an entry's directory.
#[derive(Clone, Copy, Debug)]
pub(super) struct Proof {
    /// Age of the directory's listing; `None` when unknown.
    pub age: Option<Duration>,
    /// How long a listing is fresh; `None` for as long as the lease lives (no mount, or `consistency = never`).
    pub ttl: Option<Duration>,
    pub lease: Lease,
    /// The bucket is slow: waiting for a listing did not help lately.
    pub slow_bucket: bool,
}

/// The state of the session with the master.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Lease {
    Live,
    /// Nothing was heard for too long, but calls may still be answered.
    Lapsed,
    /// Calls are not answered.
    Silent,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Use {
    /// As it is.
    Serve,
    /// As it is, because nobody can be asked.
    ServeUnproven,
    /// As it is, and ask for a new listing in the background.
    ServeAndTouch,
    /// Ask for a new listing first.
    TouchFirst,
    /// Ask the master for the entry itself.
    Ask,
}

impl Proof {
    pub(super) fn decide(&self) -> Use {
        match self.lease {
            Lease::Silent => return Use::ServeUnproven,
            Lease::Lapsed => return Use::Ask,
            Lease::Live => {}
        }
        let Some(ttl) = self.ttl else { return Use::Serve };
        match self.age {
            None => Use::Ask,
            Some(age) if age < ttl / 2 => Use::Serve,
            Some(age) if age < ttl || self.slow_bucket => Use::ServeAndTouch,
            Some(_) => Use::TouchFirst,
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
            Lease::Live => proven,
            Lease::Lapsed | Lease::Silent => proven.min(UNPROVEN),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn proof(age_s: Option<u64>, ttl_s: Option<u64>, lease: Lease) -> Proof {
        let seconds = |seconds: Option<u64>| seconds.map(Duration::from_secs);
        Proof { age: seconds(age_s), ttl: seconds(ttl_s), lease, slow_bucket: false }
    }

    #[test]
    fn decisions_follow_age_and_lease() {
        for (age, ttl, lease, expected) in [
            (Some(4), Some(10), Lease::Live, Use::Serve),
            (Some(5), Some(10), Lease::Live, Use::ServeAndTouch),
            (Some(10), Some(10), Lease::Live, Use::TouchFirst),
            (Some(0), Some(0), Lease::Live, Use::TouchFirst),
            (None, Some(10), Lease::Live, Use::Ask),
            (None, None, Lease::Live, Use::Serve),
            (Some(1), Some(10), Lease::Lapsed, Use::Ask),
            (Some(100), Some(10), Lease::Silent, Use::ServeUnproven),
            (None, Some(10), Lease::Silent, Use::ServeUnproven),
        ] {
            assert_eq!(proof(age, ttl, lease).decide(), expected, "{age:?} {ttl:?} {lease:?}");
        }
        let slow = Proof { slow_bucket: true, ..proof(Some(100), Some(10), Lease::Live) };
        assert_eq!(slow.decide(), Use::ServeAndTouch);
    }

    #[test]
    fn kernel_trust_ends_before_the_listing_does() {
        let seconds = Duration::from_secs;
        for (age, ttl, lease, expected) in [
            (Some(0), Some(10), Lease::Live, seconds(5)),
            (Some(7), Some(10), Lease::Live, seconds(3)),
            (Some(12), Some(10), Lease::Live, seconds(1)),
            (None, Some(10), Lease::Live, seconds(1)),
            (None, None, Lease::Live, Duration::MAX),
            (None, None, Lease::Lapsed, seconds(1)),
            (Some(0), Some(10), Lease::Silent, seconds(1)),
        ] {
            assert_eq!(proof(age, ttl, lease).trust(), expected, "{age:?} {ttl:?} {lease:?}");
        }
    }
}
