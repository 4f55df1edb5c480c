//! The session with the master as the rest of the cache needs it: is the lease alive, and how far has the stream of
//! invalidations been taken in.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tokio::sync::{Notify, watch};

/// Longest wait for an invalidation that the master says is on its way.
const CATCH_UP_WAIT: Duration = Duration::from_secs(1);

/// The master counts a lease from when it heard of us last: not before we sent the acknowledgement that preceded its last
/// event. So it is never shorter there than here, even if this process is stopped in between.
#[derive(Debug)]
pub(super) struct SessionLease {
    start: Instant,
    /// Milliseconds since `start` at which the master was sent something last; and at which the lease ends, 0 before the first
    /// event.
    sent_ms: AtomicU64,
    until_ms: AtomicU64,
    applied: watch::Sender<u64>,
    /// Of the last stream; 0 before the first.
    session: AtomicU64,
    abandoned: Notify,
    /// The session that was given up last: a stream that was being opened meanwhile may still take it up.
    given_up: AtomicU64,
}

impl SessionLease {
    pub(super) fn new() -> Self {
        Self {
            start: Instant::now(),
            sent_ms: AtomicU64::new(0),
            until_ms: AtomicU64::new(0),
            applied: watch::Sender::new(0),
            session: AtomicU64::new(0),
            abandoned: Notify::new(),
            given_up: AtomicU64::new(0),
        }
    }

    /// The master is being sent a sign of life.
    pub(super) fn sent(&self) {
        self.sent_ms.store(self.now_ms(), Ordering::Relaxed);
    }

    /// An event came, so the master has what it was sent before: the lease runs anew from then.
    pub(super) fn extend(&self, lease: Duration) {
        let until = self.sent_ms.load(Ordering::Relaxed).saturating_add(lease.as_millis() as u64);
        self.until_ms.store(until, Ordering::Relaxed);
    }

    pub(super) fn is_live(&self) -> bool {
        !self.rest().is_zero()
    }

    /// How long the lease lasts if nothing more is heard.
    pub(super) fn rest(&self) -> Duration {
        Duration::from_millis(self.until_ms.load(Ordering::Relaxed).saturating_sub(self.now_ms()))
    }

    fn now_ms(&self) -> u64 {
        self.start.elapsed().as_millis() as u64
    }

    /// Waits until there is a session; false when that takes too long.
    pub(super) async fn begins(&self, patience: Duration) -> bool {
        let mut applied = self.applied.subscribe();
        let begun = applied.wait_for(|_| self.session() != 0);
        matches!(tokio::time::timeout(patience, begun).await, Ok(Ok(_)))
    }

    /// The session of the last stream, for the next to take up.
    pub(super) fn session(&self) -> u64 {
        self.session.load(Ordering::Relaxed)
    }

    /// The session is not to be taken up again, nor its stream followed any longer: what it may still change must be told
    /// to the next.
    pub(super) fn abandon(&self) {
        let session = self.session.swap(0, Ordering::Relaxed);
        if session != 0 {
            self.given_up.store(session, Ordering::Relaxed);
        }
        self.abandoned.notify_one();
    }

    /// Completes when the session has been given up.
    pub(super) async fn abandoned(&self) {
        self.abandoned.notified().await;
    }

    /// A stream begins: its numbers have nothing to do with the ones before.
    pub(super) fn restart(&self, session: u64, seq: u64) {
        if session == self.given_up.load(Ordering::Relaxed) {
            return self.abandon();
        }
        self.session.store(session, Ordering::Relaxed);
        self.applied.send_replace(seq);
    }

    /// Every event up to `seq` has been taken in.
    pub(super) fn applied(&self, seq: u64) {
        self.applied.send_if_modified(|applied| {
            let newer = seq > *applied;
            *applied = (*applied).max(seq);
            newer
        });
    }

    /// Waits until the event `seq` has been taken in; false when that takes too long.
    pub(super) async fn catch_up(&self, seq: u64) -> bool {
        if *self.applied.borrow() >= seq {
            return true;
        }
        let mut applied = self.applied.subscribe();
        let caught_up = applied.wait_for(|applied| *applied >= seq);
        matches!(tokio::time::timeout(CATCH_UP_WAIT, caught_up).await, Ok(Ok(_)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lease_runs_from_what_was_sent_before_the_event() {
        let lease = SessionLease::new();
        lease.sent();
        std::thread::sleep(Duration::from_millis(20));
        lease.extend(Duration::from_millis(10));
        assert!(!lease.is_live() && lease.rest().is_zero(), "stopped since, as it may be");
    }

    #[tokio::test]
    async fn waits_for_the_event_that_an_answer_reflects() {
        let lease = SessionLease::new();
        assert!(!lease.is_live() && !lease.begins(Duration::ZERO).await);
        lease.sent();
        lease.extend(Duration::from_secs(60));
        assert!(lease.is_live() && lease.rest() > Duration::from_secs(30));
        lease.applied(3);
        assert!(lease.catch_up(3).await);
        let (caught_up, ()) = futures::join!(lease.catch_up(5), async {
            lease.applied(4);
            lease.applied(5);
        });
        assert!(caught_up);
        let (has_begun, ()) = futures::join!(lease.begins(Duration::from_secs(60)), async { lease.restart(9, 1) });
        assert!(has_begun && lease.begins(Duration::ZERO).await);
        assert_eq!(lease.session(), 9);
        lease.abandon();
        lease.abandoned().await;
        assert_eq!(lease.session(), 0);
        assert!(!lease.catch_up(2).await);
    }
}
