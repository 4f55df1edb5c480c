//! What clients have taken in of the events, and let go of for them, and who waits for that: `cv refresh` and its like
//! until every session has acknowledged a number, changes of strict mounts until nobody believes the contrary
//! ([`PendingInvalidations`](super::PendingInvalidations)); for a lease at most.

use cavern_state::ALL_BEFORE;
use tokio::time::Instant;

use super::stream::StreamId;
use super::{Session, State, WatchHub};

impl WatchHub {
    /// The client of a session has taken in everything up to `seq`, and has let go of what the events up to
    /// `invalidated` made untrue; false when the session is over, or has a later stream. That may have begun with an
    /// event of the same number to forget everything, and what was said before is no answer to it.
    pub fn acknowledge(&self, stream: StreamId, seq: u64, invalidated: u64) -> bool {
        let mut state = self.state.lock();
        let known = state.sessions.get_mut(&stream.session).filter(|known| known.stream == stream.number);
        let Some(known) = known else { return false };
        known.acknowledged = known.acknowledged.max(seq);
        known.received_at = Instant::now();
        known.epochs.let_go = known.epochs.let_go.max(invalidated);
        state.invalidations.acknowledge(stream.session, invalidated);
        drop(state);
        self.progress.notify_waiters();
        true
    }

    /// Returns when every session that is live has acknowledged `seq`, at the latest after one lease; whether all have.
    pub async fn wait_acknowledged(&self, seq: u64) -> bool {
        self.wait_until(|state| have_acknowledged(state, seq, |_| true)).await
    }

    /// Returns when every session whose client may see a mount has acknowledged `seq`, those that are on their way to
    /// another stream too, at the latest after one lease; whether all have. Others have nothing of it, and could keep
    /// whoever waits for as long as they like.
    pub async fn wait_all_acknowledged(&self, mount_id: u32, seq: u64) -> bool {
        let have_all = |state: &State| {
            let counts = |session| self.may_see(state, mount_id, session);
            state.has_settled(self.lease, counts) && have_acknowledged(state, seq, counts)
        };
        self.wait_until(have_all).await
    }

    /// Returns when nobody has anything cached that these changes of strict mounts made untrue, or any earlier one for
    /// [`ALL_BEFORE`]: at the latest after one lease, since whoever is cut off believes nothing then. Who is there and
    /// does not let go, a kernel that is stuck, say, is not waited for any longer.
    pub async fn wait_invalidated(&self, changes: &[u64]) {
        if changes.is_empty() {
            return;
        }
        // What clients of an earlier term have cached is not known before they are back, or their leases are over.
        let unknown_until = self.state.lock().started + self.lease;
        tokio::time::sleep_until(unknown_until).await;
        let deadline = Instant::now() + self.lease;
        let changes = match changes.contains(&ALL_BEFORE) {
            true => &self.state.lock().invalidations.pending(),
            false => changes,
        };
        for change in changes {
            let pending = self.state.lock().invalidations.ask(*change);
            let Some(pending) = pending else { continue };
            if tokio::time::timeout_at(deadline, pending).await.is_err() {
                self.log.stuck();
            }
        }
    }
}

/// Whether every session that counts has acknowledged what it was sent of the events up to `seq`: its own changes it
/// was not sent.
fn have_acknowledged(state: &State, seq: u64, counts: impl Fn(u64) -> bool) -> bool {
    let has_not = |session: &Session| session.acknowledged < seq.min(session.last_queued);
    !state.sessions.iter().any(|(id, session)| has_not(session) && counts(*id))
}
