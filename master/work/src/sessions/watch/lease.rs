//! How long a session lives: while its client is heard within a lease, and without a stream for a lease, or longer as a
//! courtesy ([`CourtesySessions`](super::CourtesySessions)); no longer when it ends, or another comes to its place.

use std::time::Duration;

use tokio::time::Instant;

use super::{PendingInvalidations, State, WatchHub, WatchRegistry};

/// How long the stream of a client that has died may take to break.
const STREAM_BREAKS: Duration = Duration::from_millis(500);

impl State {
    /// Whether a session without a stream may get one.
    pub(super) fn may_return(&self, session: u64, is_recorded: bool, lease: Duration) -> bool {
        !self.has_lapsed(session, is_recorded, lease) || is_recorded && self.is_courtesy(session)
    }

    /// Whether the lease of a session without a stream is over.
    fn has_lapsed(&self, session: u64, is_recorded: bool, lease: Duration) -> bool {
        match self.broken.get(&session) {
            Some(since) => since.elapsed() >= lease,
            None => !is_recorded || self.started.elapsed() >= lease,
        }
    }

    /// Whether a session outlives its lease. Those of before this master's start have lapsed then, if they are not
    /// back.
    fn is_courtesy(&self, session: u64) -> bool {
        self.courtesy.is_courtesy(session, self.started) && self.delegations.holds_any(session)
    }

    /// Whether no session that counts is on its way to another stream.
    pub(super) fn has_settled(&self, lease: Duration, counts: impl Fn(u64) -> bool) -> bool {
        let is_away = |(session, since): (&u64, &Instant)| since.elapsed() < lease && counts(*session);
        self.started.elapsed() >= lease && !self.broken.iter().any(is_away)
    }

    /// The lease of a session is over.
    fn lapse(&mut self, session: u64) {
        *self.lapses.entry(self.owners.get(session).cloned()).or_default() += 1;
        self.watches.end(session);
        self.invalidations.gone(session);
        self.delegations.stop_waiting(session);
        match self.is_courtesy(session) {
            true => self.courtesy.add(session),
            false => self.owners.remove(session),
        }
    }

    /// Sessions without a stream do not outlive their lease where the certificate is revoked that they were opened
    /// with: nobody comes back for what they hold. Whoever has another one has a lease to come back with it.
    fn end_revoked(&mut self) {
        for session in self.owners.revoked() {
            if !self.sessions.contains_key(&session) && self.delegations.holds_any(session) {
                self.courtesy.end(session);
            }
        }
    }

    /// A session is over, and cannot come back.
    fn over(&mut self, session: u64) {
        self.watches.end(session);
        self.invalidations.gone(session);
        self.delegations.stop_waiting(session);
        self.owners.remove(session);
    }
}

impl WatchHub {
    /// A session has begun at a place that has room for one. Gives the one that was there before, which is over now:
    /// its client is dead, as its broken stream shows. One whose stream is not broken within a moment is somebody else.
    pub async fn supersede_client(&self, place: &str, session: u64) -> Option<u64> {
        let deadline = tokio::time::Instant::now() + STREAM_BREAKS;
        loop {
            let mut changed = std::pin::pin!(self.progress.notified());
            changed.as_mut().enable();
            {
                let mut state = self.state.lock();
                let before = state.places.get(place).copied().filter(|before| *before != session);
                // Of one that is over nobody is the owner.
                let owner = before.and_then(|before| state.owners.get(before));
                if owner.is_some() && owner != state.owners.get(session) {
                    // It is somebody else's place.
                    return None;
                }
                let has_stream = before.is_some_and(|before| state.sessions.contains_key(&before));
                if !has_stream || tokio::time::Instant::now() >= deadline {
                    // It is at one place at a time, or a client could have any number of them remembered.
                    state.places.retain(|_, at| *at != session);
                    state.places.insert(place.to_owned(), session);
                    let over = before.filter(|_| !has_stream)?;
                    let was_broken = state.broken.remove(&over).is_some();
                    if !was_broken && !state.courtesy.contains(over) {
                        return None;
                    }
                    state.courtesy.end(over);
                    state.over(over);
                    return Some(over);
                }
            }
            let _late = tokio::time::timeout_at(deadline, changed).await;
        }
    }

    /// Whether the master has received a message of a session within its lease.
    pub fn is_live(&self, session: u64) -> bool {
        self.looked().sessions.get(&session).is_some_and(|session| session.received_at.elapsed() < self.lease)
    }

    /// Whether no session is on its way to another stream whose client may see a mount.
    pub fn has_settled(&self, mount_id: u32) -> bool {
        let state = self.looked();
        state.has_settled(self.lease, |session| self.may_see(&state, mount_id, session))
    }

    /// Whether a recorded session is over: it has no stream, and gets none from now on. None is as long as this master
    /// does not know that it leads.
    pub fn is_over(&self, session: u64) -> bool {
        let mut state = self.looked();
        let is_over =
            self.lead.holds() && !state.sessions.contains_key(&session) && !state.may_return(session, true, self.lease);
        if is_over {
            state.courtesy.end(session);
        }
        is_over
    }

    /// Whether the lease of a recorded session is over, and it may have another stream nevertheless.
    pub fn outlives_lease(&self, session: u64) -> bool {
        let state = self.looked();
        let is_kept = state.has_lapsed(session, true, self.lease) && state.is_courtesy(session);
        is_kept && !state.sessions.contains_key(&session)
    }

    /// Somebody else wants what a session has, that has no stream: it does not outlive its lease.
    pub fn end_with_lease(&self, session: u64) {
        self.state.lock().courtesy.end(session);
    }

    /// Nothing is left of a session.
    pub fn forget(&self, session: u64) {
        let mut state = self.state.lock();
        state.courtesy.forget(session);
        state.owners.remove(session);
    }

    /// The client of a session says that it ends: it will not come back.
    pub fn end(&self, session: u64) {
        let mut state = self.state.lock();
        if let Some(ended) = state.sessions.remove(&session) {
            if state.delegations.holds_any(session) {
                state.courtesy.end(session);
            }
            self.log.life(state.owners.get(session), session, &ended.client, "a client's session ends");
            state.over(session);
            ended.wake.notify_one();
        }
        drop(state);
        self.progress.notify_waiters();
    }

    /// Puts a tick in the queue of every session that waits for events, and ends those that have sent no message for a
    /// lease. To be called about once a second. While this master does not know that it leads, it does neither: its
    /// clients would believe what another one has changed.
    pub fn tick(&self) {
        if !self.lead.holds() {
            return;
        }
        let mut state = self.looked();
        let (lease, mut courtesy) = (self.lease, Vec::new());
        let State { sessions, owners, .. } = &mut *state;
        sessions.retain(|id, session| {
            let is_alive = session.received_at.elapsed() < lease;
            if !is_alive {
                self.log.life(owners.get(*id), *id, &session.client, "a client's session has lapsed");
                courtesy.push(*id);
                session.wake.notify_one();
            }
            is_alive
        });
        state.push_ticks();
        state.broken.retain(|id, since| {
            let may_return = since.elapsed() < lease;
            courtesy.extend((!may_return).then_some(*id));
            may_return
        });
        state.end_revoked();
        courtesy.into_iter().for_each(|session| state.lapse(session));
        let State { courtesy, delegations, .. } = &mut *state;
        let over = courtesy.take_over(|session| delegations.holds_any(session));
        over.into_iter().for_each(|session| state.over(session));
        let State { sessions, broken, courtesy, places, watches, .. } = &mut *state;
        for (id, session) in sessions.iter_mut() {
            if session.settles_at.take_if(|at| *at <= Instant::now()).is_some() {
                watches.settle(*id);
            }
        }
        let may_return = |session| broken.contains_key(&session) || courtesy.contains(session);
        places.retain(|_, session| sessions.contains_key(session) || may_return(*session));
        self.metrics.gauges.sessions.set(state.sessions.len() as i64);
        drop(state);
        // Whether a session may come back is a question of time, too.
        self.progress.notify_waiters();
    }

    /// Ends every session, and refuses new ones.
    pub fn close(&self) {
        let mut state = self.state.lock();
        state.closed = true;
        (state.watches, state.invalidations) = (WatchRegistry::default(), PendingInvalidations::default());
        state.owners.clear();
        for (_, session) in state.sessions.drain() {
            session.wake.notify_one();
        }
        drop(state);
        self.progress.notify_waiters();
    }
}
