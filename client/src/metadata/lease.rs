//! The session with the master as the rest of the cache needs it: is the lease alive, and how far has the stream of
//! invalidations been taken in.
//!
//! The master counts a lease from the last message that it received from us, and says with every event how many
//! messages of the stream it had received by then. Here the lease runs from when the last of those was sent, so it is
//! never shorter there: not if this process is stopped, and goes on to find events of long ago, nor if the host sleeps.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use cavern_conf::host;
use parking_lot::Mutex;
use tokio::sync::{Notify, watch};
use tonic::Status;

/// Longest wait for an invalidation that the master says is on its way.
const CATCH_UP_WAIT: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub(super) struct SessionLease {
    /// Milliseconds of the host's uptime at which the lease ends; 0 before the first event.
    until_ms: AtomicU64,
    /// Milliseconds that it is extended by.
    length_ms: AtomicU64,
    applied: watch::Sender<u64>,
    /// Of the last stream; 0 before the first.
    session: AtomicU64,
    abandoned: Notify,
    /// The session that was given up last: a stream that was being opened meanwhile may still take it up.
    given_up: AtomicU64,
    /// The last session in which changes were asked for.
    changed_in: AtomicU64,
    /// What the master said when it let this client have no session, until it does.
    denial: Mutex<Option<Status>>,
}

impl SessionLease {
    pub(super) fn new() -> Self {
        Self {
            until_ms: AtomicU64::new(0),
            length_ms: AtomicU64::new(0),
            applied: watch::Sender::new(0),
            session: AtomicU64::new(0),
            abandoned: Notify::new(),
            given_up: AtomicU64::new(0),
            changed_in: AtomicU64::new(0),
            denial: Mutex::new(None),
        }
    }

    /// The lease runs anew, from a moment past of the host's uptime.
    pub(super) fn extend(&self, from: Duration, lease: Duration) {
        self.until_ms.store((from + lease).as_millis() as u64, Ordering::Relaxed);
        self.length_ms.store(lease.as_millis() as u64, Ordering::Relaxed);
    }

    /// How long a lease is, as the master said last.
    pub(super) fn length(&self) -> Duration {
        Duration::from_millis(self.length_ms.load(Ordering::Relaxed))
    }

    pub(super) fn is_live(&self) -> bool {
        !self.rest().is_zero()
    }

    /// How long the lease lasts if no event extends it.
    pub(super) fn rest(&self) -> Duration {
        Duration::from_millis(self.until_ms.load(Ordering::Relaxed)).saturating_sub(host::uptime())
    }

    /// The session of the last stream, for the next to take up.
    pub(super) fn session(&self) -> u64 {
        self.session.load(Ordering::Relaxed)
    }

    /// The session is not to be taken up again, nor its stream followed any longer: the next session must be notified
    /// of what this one may still change.
    pub(super) fn abandon(&self) {
        self.give_up();
        self.abandoned.notify_one();
    }

    /// Abandons a session that has no stream.
    pub(super) fn give_up(&self) {
        let session = self.session.swap(0, Ordering::Relaxed);
        if session != 0 {
            self.given_up.store(session, Ordering::Relaxed);
        }
    }

    /// Completes when the session has been given up.
    pub(super) async fn abandoned(&self) {
        self.abandoned.notified().await;
    }

    /// The master lets this client have no session; false if it has said so before.
    pub(super) fn deny(&self, status: &Status) -> bool {
        let mut denial = self.denial.lock();
        let is_new = denial.as_ref().is_none_or(|before| before.message() != status.message());
        *denial = Some(status.clone());
        is_new
    }

    /// Why the master lets this client have no session, if that is so.
    pub(super) fn denial(&self) -> Option<Status> {
        self.denial.lock().clone()
    }

    /// A stream begins, in this session. To be called before what is cached is forgotten: whatever is asked for
    /// afterwards is asked for in this session, which is notified when it changes. One that was given up has changes
    /// under numbers that must not be used again, and does not begin.
    pub(super) fn begin(&self, session: u64) {
        *self.denial.lock() = None;
        if session != self.given_up.load(Ordering::Relaxed) {
            self.session.store(session, Ordering::Relaxed);
        }
    }

    /// What was cached before the stream began is forgotten. Its numbers have nothing to do with the ones before.
    pub(super) fn restart(&self, session: u64, seq: u64) {
        if session == self.given_up.load(Ordering::Relaxed) {
            return self.abandon();
        }
        self.applied.send_replace(seq);
    }

    /// The last event that has been taken in.
    pub(super) fn last_applied(&self) -> u64 {
        *self.applied.borrow()
    }

    /// The stream goes on in this session; false when that was given up meanwhile, and is to end.
    pub(super) fn resume(&self, session: u64) -> bool {
        if session == self.given_up.load(Ordering::Relaxed) {
            self.abandon();
            return false;
        }
        true
    }

    /// What a master must know to let the stream go on: the last event, and whether changes were asked for.
    pub(super) fn to_go_on(&self) -> (u64, bool) {
        let session = self.session();
        let has_changed = session != 0 && self.changed_in.load(Ordering::Relaxed) == session;
        (self.last_applied(), has_changed)
    }

    /// Changes are asked for in the session.
    pub(super) fn changes_in(&self, session: u64) {
        self.changed_in.store(session, Ordering::Relaxed);
    }

    /// Whether there was a session before, in which something may have been learnt.
    pub(super) fn had_session(&self) -> bool {
        self.session() != 0 || self.given_up.load(Ordering::Relaxed) != 0
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
        *self.applied.borrow() >= seq || tokio::time::timeout(CATCH_UP_WAIT, self.wait_applied(seq)).await.is_ok()
    }

    /// Waits until the event `seq` has been applied, for as long as it takes.
    pub(super) async fn wait_applied(&self, seq: u64) {
        let mut applied = self.applied.subscribe();
        // Its sender is here.
        let _never_gone = applied.wait_for(|applied| *applied >= seq).await;
    }
}

/// When the messages of one stream were sent that the master is not known to have, and the last that it is known to
/// have: by the host's uptime.
#[derive(Debug)]
pub(super) struct SentMessages {
    sent_at: Duration,
    received: u64,
    waiting: VecDeque<Duration>,
}

impl SentMessages {
    /// The first is being sent.
    pub(super) fn new() -> Self {
        let now = host::uptime();
        Self { sent_at: now, received: 0, waiting: VecDeque::from([now]) }
    }

    /// Another is about to be sent.
    pub(super) fn push(&mut self) {
        self.waiting.push_back(host::uptime());
    }

    /// The last one was not sent.
    pub(super) fn pop(&mut self) {
        self.waiting.pop_back();
    }

    /// The master has received so many of them: when the last of those was sent.
    pub(super) fn received(&mut self, received: u64) -> Duration {
        while self.received < received
            && let Some(sent) = self.waiting.pop_front()
        {
            (self.sent_at, self.received) = (sent, self.received + 1);
        }
        self.sent_at
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lease_runs_from_what_the_master_has_heard() {
        let (mut sent, lease) = (SentMessages::new(), SessionLease::new());
        let pause = || std::thread::sleep(Duration::from_millis(20));
        let first = sent.received(1);
        pause();
        lease.extend(first, Duration::from_millis(10));
        assert!(!lease.is_live() && lease.rest().is_zero(), "stopped since, as it may be");
        sent.push();
        assert_eq!(sent.received(1), first, "an event of before");
        let second = sent.received(2);
        assert!(second > first);
        pause();
        sent.push();
        sent.pop();
        sent.push();
        let third = sent.received(3);
        assert!(third > second);
        assert_eq!([sent.received(2), sent.received(u64::MAX)], [third; 2]);
    }

    #[tokio::test]
    async fn waits_for_the_event_that_an_answer_reflects() {
        let lease = SessionLease::new();
        assert!(!lease.is_live());
        lease.extend(host::uptime(), Duration::from_secs(60));
        assert!(lease.is_live() && lease.rest() > Duration::from_secs(30));
        lease.applied(3);
        assert!(lease.catch_up(3).await);
        let (caught_up, ()) = futures::join!(lease.catch_up(5), async {
            lease.applied(4);
            lease.applied(5);
        });
        assert!(caught_up);
        lease.begin(9);
        lease.restart(9, 1);
        assert_eq!(lease.session(), 9);
        lease.abandon();
        lease.abandoned().await;
        assert_eq!(lease.session(), 0);
        lease.begin(9);
        assert_eq!(lease.session(), 0, "nothing is asked for in a session that was given up");
        assert!(!lease.catch_up(2).await);
    }
}
