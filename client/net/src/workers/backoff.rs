//! Leaves a worker alone after it failed: for a time that doubles with every further failure, with jitter so that
//! clients do not come back in step, and with one request at a time as a probe until one succeeds.

use std::sync::Arc;
use std::time::Duration;

use cavern_conf::host;
use parking_lot::Mutex;
use tokio::time::Instant;

/// How long a failed worker is left alone: at first, and at most.
#[derive(Clone, Copy, Debug)]
pub(super) struct BackoffLimits {
    pub first: Duration,
    pub most: Duration,
}

#[derive(Debug)]
pub(super) struct Backoff {
    limits: BackoffLimits,
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
    backoff: Arc<Backoff>,
    probe: bool,
}

impl Backoff {
    pub(super) fn new(limits: BackoffLimits) -> Self {
        Self { limits, state: Mutex::default() }
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
        Some(Attempt { backoff: self.clone(), probe })
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
            state.failures = state.failures.saturating_add(1);
            let doubled = self.limits.first.saturating_mul(1 << (state.failures - 1).min(20));
            state.until = Some(now + doubled.min(self.limits.most).mul_f64(host::jitter(0.75..1.25)));
        }
    }
}

impl Attempt {
    /// The worker answered, whatever it said.
    pub fn answered(self) {
        if self.probe || self.backoff.state.lock().failures > 0 {
            *self.backoff.state.lock() = State::default();
        }
    }

    /// The worker could not be reached or did not answer.
    pub fn failed(self) {
        self.backoff.failed(Instant::now(), self.probe);
    }
}

impl Drop for Attempt {
    fn drop(&mut self) {
        if self.probe {
            self.backoff.state.lock().probing = false;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn backoff() -> Arc<Backoff> {
        let limits = BackoffLimits { first: Duration::from_secs(100), most: Duration::from_secs(1000) };
        Arc::new(Backoff::new(limits))
    }

    #[test]
    fn a_failed_worker_rests_then_one_probe_decides() {
        let (backoff, now) = (backoff(), Instant::now());
        backoff.admit(now).unwrap().failed();
        assert!(backoff.admit(now + Duration::from_secs(70)).is_none());
        let later = now + Duration::from_secs(130);
        let probe = backoff.admit(later).unwrap();
        assert!(backoff.admit(later).is_none(), "one probe at a time");
        drop(probe);
        backoff.admit(later).unwrap().answered();
        let (first, second) = (backoff.admit(now).unwrap(), backoff.admit(now).unwrap());
        first.answered();
        second.answered();
    }

    #[test]
    fn rests_double_up_to_the_limit_and_simultaneous_failures_count_once() {
        let (backoff, now) = (backoff(), Instant::now());
        let (first, second) = (backoff.admit(now).unwrap(), backoff.admit(now).unwrap());
        first.failed();
        second.failed();
        assert_eq!(backoff.state.lock().failures, 1);
        for _ in 0..30 {
            let until = backoff.state.lock().until.unwrap();
            backoff.admit(until + Duration::from_secs(1)).unwrap().failed();
        }
        let rest = backoff.state.lock().until.unwrap() - Instant::now();
        assert!((Duration::from_secs(700)..Duration::from_secs(1251)).contains(&rest), "{rest:?}");
    }
}
