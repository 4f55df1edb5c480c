//! The circuit breaker of the master channel.
//!
//! ```text
//!  healthy ── no answer ──▶ suspect ── probes failed, too ──▶ silent ── a caller's whole time passed ──▶ open
//!     ▲                        │                                │                                         │
//!     └──────────── any answer of a leader, to a caller or to the probe ───────────────────────────────────┘
//! ```
//!
//! It is one for the whole group: as long as any master leads, it is healthy. A master that says that it does not lead
//! has given no answer.
//!
//! Suspect: nothing is known yet; a process that was stopped finds all its deadlines past when it goes on, and must not
//! take its own silence for the master's. Silent: callers still try; those with something cached use that. Open: calls
//! fail at once, and whoever has nothing cached waits for it to close, until his own deadline. A caller who tried for
//! his whole time and reached nobody opens it from any.

use std::sync::atomic::{AtomicU8, Ordering};

use parking_lot::Mutex;
use tokio::sync::Notify;

#[derive(Debug, Default)]
pub(super) struct Breaker {
    /// Wakes those that wait for it to be as bad as that, or good again.
    changed: Notify,
    /// Mirrors the level of `state`, so that the healthy path takes no lock.
    level: AtomicU8,
    state: Mutex<State>,
}

/// How much is known to be wrong with the master.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub(super) enum Level {
    #[default]
    Healthy,
    Suspect,
    Silent,
    Open,
}

#[derive(Debug, Default)]
struct State {
    level: Level,
    /// Some caller has waited his whole time.
    exhausted: Option<String>,
    /// Why the last that was tried failed; of a master that is silent or worse.
    cause: String,
}

impl Breaker {
    /// Why calls must fail at once; `None` while they may be tried.
    pub(super) fn open_cause(&self) -> Option<String> {
        self.cause_at(Level::Open)
    }

    /// Why, if it is as bad as that.
    pub(super) fn cause_at(&self, level: Level) -> Option<String> {
        if self.level.load(Ordering::Relaxed) < level as u8 {
            return None;
        }
        let state = self.state.lock();
        (state.level >= level).then(|| state.cause.clone())
    }

    /// Nothing is known to be wrong.
    pub(super) fn is_healthy(&self) -> bool {
        self.level.load(Ordering::Relaxed) == Level::Healthy as u8
    }

    /// No probe is answered.
    pub(super) fn is_silent(&self) -> bool {
        self.level.load(Ordering::Relaxed) >= Level::Silent as u8
    }

    /// An answer came.
    pub(super) fn close(&self) {
        if self.level.load(Ordering::Relaxed) != Level::Healthy as u8 {
            let mut state = self.state.lock();
            *state = State::default();
            self.level.store(Level::Healthy as u8, Ordering::Relaxed);
            drop(state);
            self.changed.notify_waiters();
        }
    }

    /// Completes when nothing is known to be wrong any more.
    pub(super) async fn healed(&self) {
        self.until(|| self.is_healthy().then_some(())).await;
    }

    /// Completes when calls may be tried.
    pub(super) async fn closing(&self) {
        self.until(|| self.open_cause().is_none().then_some(())).await;
    }

    /// No answer came. True when a probe is to be started: it runs until `close`.
    pub(super) fn suspect(&self) -> bool {
        let mut state = self.state.lock();
        let first = state.level == Level::Healthy;
        if first {
            self.raise(&mut state, Level::Suspect, "");
        }
        first
    }

    /// A caller waited its whole time for an answer to a request that was perhaps delivered.
    pub(super) fn exhausted(&self, cause: String) {
        let mut state = self.state.lock();
        if state.level != Level::Healthy {
            state.exhausted.get_or_insert(cause);
        }
    }

    /// A caller tried for its whole time and reached nobody.
    pub(super) fn open(&self, cause: &str) {
        let mut state = self.state.lock();
        if state.level != Level::Healthy {
            self.raise(&mut state, Level::Open, cause);
        }
    }

    /// Completes with the cause when it is as bad as that.
    pub(super) async fn reaching(&self, level: Level) -> String {
        self.until(|| self.cause_at(level)).await
    }

    /// What is to be seen as soon as it is.
    async fn until<T>(&self, look: impl Fn() -> Option<T>) -> T {
        loop {
            let changed = self.changed.notified();
            if let Some(seen) = look() {
                return seen;
            }
            changed.await;
        }
    }

    /// A probe was not answered; when `is_known`, no master leads that could be asked.
    pub(super) fn probe_failed(&self, cause: &str, is_known: bool) {
        let mut state = self.state.lock();
        match (state.level, &state.exhausted) {
            // Another master may answer yet.
            _ if !is_known => {}
            (Level::Suspect | Level::Silent, Some(exhausted)) => {
                tracing::warn!("the master is left alone until it answers again: {exhausted}; asked again: {cause}");
                self.raise(&mut state, Level::Open, cause);
            }
            (Level::Suspect, None) => self.raise(&mut state, Level::Silent, cause),
            _ => {}
        }
    }

    fn raise(&self, state: &mut State, level: Level, cause: &str) {
        state.level = level;
        cause.clone_into(&mut state.cause);
        self.level.store(level as u8, Ordering::Relaxed);
        self.changed.notify_waiters();
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
        breaker.exhausted("slow".into());
        assert_eq!(breaker.open_cause(), None);
        breaker.close();
        breaker.probe_failed("late", true);
        assert!(!breaker.is_silent() && breaker.suspect());
        breaker.probe_failed("slow", false);
        assert_eq!(breaker.open_cause(), None, "who was slow before does not count");
    }

    #[tokio::test]
    async fn what_is_silent_is_what_probes_found_so() {
        let breaker = Breaker::default();
        breaker.probe_failed("refused", true);
        assert!(!breaker.is_silent(), "it answered since");
        breaker.suspect();
        assert!(!breaker.is_silent());
        breaker.probe_failed("refused", false);
        assert!(!breaker.is_silent());
        let (cause, ()) =
            futures::join!(breaker.reaching(Level::Silent), async { breaker.probe_failed("refused", true) });
        assert_eq!(cause, "refused");
        assert!(breaker.is_silent() && breaker.open_cause().is_none());
        breaker.close();
        assert!(!breaker.is_silent());
    }

    #[tokio::test]
    async fn silence_opens_and_an_answer_closes() {
        let breaker = Breaker::default();
        breaker.suspect();
        breaker.probe_failed("refused", true);
        assert_eq!(breaker.open_cause(), None, "nobody has waited yet");
        breaker.exhausted("no answer".into());
        breaker.probe_failed("refused", false);
        assert_eq!(breaker.open_cause(), None, "another master may answer");
        let (cause, ()) =
            futures::join!(breaker.reaching(Level::Open), async { breaker.probe_failed("refused", true) });
        assert_eq!(cause, "refused");
        assert_eq!(breaker.open_cause().as_deref(), Some("refused"));
        let ((), (), ()) = futures::join!(breaker.closing(), breaker.healed(), async { breaker.close() });
        breaker.closing().await;
        assert_eq!(breaker.open_cause(), None);
        assert!(breaker.suspect(), "a new probe");
        breaker.open("refused");
        assert!(breaker.open_cause().is_some() && breaker.is_silent());
    }
}
