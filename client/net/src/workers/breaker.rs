//! The circuit breaker of a worker: leaves it alone after it failed, for the pauses of a back-off profile, and sends it
//! one request at a time as a probe until one succeeds.

use std::sync::Arc;

use cavern_conf::backoff::Profile;
use parking_lot::Mutex;
use tokio::time::Instant;

#[derive(Debug)]
pub(super) struct Breaker {
    pauses: Profile,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    failures: u32,
    until: Option<Instant>,
    probing: bool,
}

/// Permission to try a worker once. Say how it ended; dropped silently, it counts as neither.
#[derive(Debug)]
#[must_use]
pub struct Attempt {
    breaker: Arc<Breaker>,
    probe: bool,
}

impl Breaker {
    pub(super) fn new(pauses: Profile) -> Self {
        Self { pauses, state: Mutex::default() }
    }

    /// `None` while the worker is to be left alone.
    pub(super) fn admit(self: &Arc<Self>, now: Instant) -> Option<Attempt> {
        let mut state = self.state.lock();
        let probe = state.failures > 0;
        if probe {
            if state.probing || state.until.is_some_and(|until| now < until) {
                return None;
            }
            state.probing = true;
        }
        drop(state);
        Some(Attempt { breaker: self.clone(), probe })
    }

    /// Whether the worker failed lately and is left alone.
    pub(super) fn rests(&self, now: Instant) -> bool {
        let state = self.state.lock();
        state.probing || state.until.is_some_and(|until| now < until)
    }

    fn failed(&self, now: Instant, probe: bool) {
        let mut state = self.state.lock();
        // Requests that were in flight together when the worker died are one failure.
        if state.failures == 0 || probe {
            state.until = Some(now + self.pauses.pause(state.failures));
            state.failures = state.failures.saturating_add(1);
        }
    }
}

impl Attempt {
    /// The worker answered, whatever it said.
    pub fn answered(self) {
        if self.probe || self.breaker.state.lock().failures > 0 {
            *self.breaker.state.lock() = State::default();
        }
    }

    /// The worker could not be reached or did not answer.
    pub fn failed(self) {
        self.breaker.failed(Instant::now(), self.probe);
    }
}

impl Drop for Attempt {
    fn drop(&mut self) {
        if self.probe {
            self.breaker.state.lock().probing = false;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use cavern_conf::backoff::Jitter;

    use super::*;

    fn breaker() -> Arc<Breaker> {
        let pauses = Profile::new(Duration::from_secs(100), Duration::from_secs(1000), Jitter::Quarter);
        Arc::new(Breaker::new(pauses))
    }

    #[test]
    fn a_failed_worker_rests_then_one_probe_decides() {
        let (breaker, now) = (breaker(), Instant::now());
        breaker.admit(now).unwrap().failed();
        assert!(breaker.admit(now + Duration::from_secs(70)).is_none());
        let later = now + Duration::from_secs(130);
        let probe = breaker.admit(later).unwrap();
        assert!(breaker.admit(later).is_none(), "one probe at a time");
        drop(probe);
        breaker.admit(later).unwrap().answered();
        let (first, second) = (breaker.admit(now).unwrap(), breaker.admit(now).unwrap());
        first.answered();
        second.answered();
    }

    #[test]
    fn rests_double_up_to_the_limit_and_simultaneous_failures_count_once() {
        let (breaker, now) = (breaker(), Instant::now());
        let (first, second) = (breaker.admit(now).unwrap(), breaker.admit(now).unwrap());
        first.failed();
        second.failed();
        assert_eq!(breaker.state.lock().failures, 1);
        for _ in 0..30 {
            let until = breaker.state.lock().until.unwrap();
            breaker.admit(until + Duration::from_secs(1)).unwrap().failed();
        }
        let rest = breaker.state.lock().until.unwrap() - Instant::now();
        assert!((Duration::from_secs(700)..Duration::from_secs(1251)).contains(&rest), "{rest:?}");
    }
}
