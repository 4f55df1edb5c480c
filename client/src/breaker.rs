//! The circuit breaker of the master channel.
//!
//! ```text
//!  healthy ── no answer ──▶ suspect ── a caller's whole time passed, or it did and a probe failed too ──▶ open
//!     ▲                        │                                                                          │
//!     └────────────────── any answer, to a caller or to the probe ────────────────────────────────────────┘
//! ```
//!
//! Suspect: callers still try; those with something cached use that. Open: calls fail at once, and whoever has nothing cached waits for it to
//! close, until his own deadline.

use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use tokio::sync::Notify;

#[derive(Debug, Default)]
pub(crate) struct Breaker {
    /// Wakes the callers that wait for an answer when it opens, and those that wait for a master when one answers.
    opened: Notify,
    closed: Notify,
    /// Mirrors `state != Healthy`, so that the healthy path takes no lock.
    silent: AtomicBool,
    state: Mutex<State>,
}

#[derive(Debug, Default, PartialEq, Eq)]
enum State {
    #[default]
    Healthy,
    /// With the cause when some caller has waited its whole time.
    Suspect(Option<String>),
    Open(String),
}

impl Breaker {
    /// Why calls must fail at once; `None` while they may be tried.
    pub(crate) fn open_cause(&self) -> Option<String> {
        if !self.is_silent() {
            return None;
        }
        match &*self.state.lock() {
            State::Open(cause) => Some(cause.clone()),
            State::Healthy | State::Suspect(_) => None,
        }
    }

    pub(crate) fn is_silent(&self) -> bool {
        self.silent.load(Ordering::Relaxed)
    }

    /// An answer came.
    pub(crate) fn close(&self) {
        if self.is_silent() {
            *self.state.lock() = State::Healthy;
            self.silent.store(false, Ordering::Relaxed);
            self.closed.notify_waiters();
        }
    }

    /// Completes with the next answer after a silence.
    pub(crate) async fn next_close(&self) {
        self.closed.notified().await;
    }

    /// Completes when calls may be tried.
    pub(crate) async fn closing(&self) {
        loop {
            let closed = self.closed.notified();
            if self.open_cause().is_none() {
                return;
            }
            closed.await;
        }
    }

    /// No answer came. True when a probe is to be started: it runs until `close`.
    pub(crate) fn suspect(&self) -> bool {
        let mut state = self.state.lock();
        let first = *state == State::Healthy;
        if first {
            *state = State::Suspect(None);
            self.silent.store(true, Ordering::Relaxed);
        }
        first
    }

    /// A caller waited its whole time for an answer to a request that was perhaps delivered.
    pub(crate) fn exhausted(&self, cause: String) {
        let mut state = self.state.lock();
        if let State::Suspect(None) = *state {
            *state = State::Suspect(Some(cause));
        }
    }

    /// A caller tried for its whole time and reached nobody.
    pub(crate) fn open(&self, cause: String) {
        let mut state = self.state.lock();
        if *state != State::Healthy {
            *state = State::Open(cause);
            self.opened.notify_waiters();
        }
    }

    /// Completes with the cause when the breaker opens.
    pub(crate) async fn opening(&self) -> String {
        loop {
            let opened = self.opened.notified();
            if let Some(cause) = self.open_cause() {
                return cause;
            }
            opened.await;
        }
    }

    pub(crate) fn probe_failed(&self, cause: &str) {
        let mut state = self.state.lock();
        if let State::Suspect(Some(exhausted)) = &*state {
            tracing::warn!("the master is left alone until it answers again: {exhausted}; asked again: {cause}");
            *state = State::Open(cause.to_owned());
            self.opened.notify_waiters();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slow_answer_alone_does_not_open() {
        let breaker = Breaker::default();
        assert!(breaker.suspect());
        assert!(!breaker.suspect(), "one probe");
        assert!(breaker.is_silent());
        breaker.exhausted("slow".into());
        assert_eq!(breaker.open_cause(), None);
        breaker.close();
        breaker.probe_failed("late");
        assert!(!breaker.is_silent());
    }

    #[tokio::test]
    async fn silence_opens_and_an_answer_closes() {
        let breaker = Breaker::default();
        breaker.suspect();
        breaker.probe_failed("refused");
        assert_eq!(breaker.open_cause(), None, "nobody has waited yet");
        breaker.exhausted("no answer".into());
        let (cause, ()) = futures::join!(breaker.opening(), async { breaker.probe_failed("refused") });
        assert_eq!(cause, "refused");
        assert_eq!(breaker.open_cause().as_deref(), Some("refused"));
        let ((), (), ()) = futures::join!(breaker.closing(), breaker.next_close(), async { breaker.close() });
        breaker.closing().await;
        assert_eq!(breaker.open_cause(), None);
        assert!(breaker.suspect(), "a new probe");
        breaker.open("refused".into());
        assert!(breaker.open_cause().is_some());
    }
}
