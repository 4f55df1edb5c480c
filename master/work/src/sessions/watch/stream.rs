//! The events of a session, which wait in its queue until its stream takes them. One that has its client forget
//! everything takes the place of all that wait.

use std::sync::Arc;

use cavern_proto::master::watch_event::Event;
use cavern_proto::master::{Reset, Resumed, WatchEvent};
use tokio::sync::Notify;
use tokio::time::Instant;

use super::{Session, State, WatchHub};

/// One of the streams of a session, as its client speaks in it.
#[derive(Clone, Copy, Debug)]
pub struct StreamId {
    pub session: u64,
    /// Which of the streams that the hub has opened.
    pub(super) number: u64,
}

/// The events of one session. After it is dropped the session may be taken up again for a lease, and for longer as long
/// as it holds directories that nobody else wants.
pub struct SessionStream {
    pub(super) hub: Arc<WatchHub>,
    pub(super) id: StreamId,
    pub(super) wake: Arc<Notify>,
}

impl SessionStream {
    pub fn id(&self) -> u64 {
        self.id.session
    }

    /// For what the client says in this stream.
    pub fn stream_id(&self) -> StreamId {
        self.id
    }

    /// The next events, in order; `None` when the session has ended.
    pub async fn next(&mut self) -> Option<Vec<Arc<[WatchEvent]>>> {
        loop {
            {
                let mut state = self.hub.state.lock();
                let State { sessions, invalidations, .. } = &mut *state;
                let session = sessions.get_mut(&self.id.session).filter(|session| session.stream == self.id.number)?;
                if !session.queue.is_empty() {
                    invalidations.sent(self.id.session);
                    session.waiting = 0;
                    return Some(session.queue.drain(..).collect());
                }
            }
            self.wake.notified().await;
        }
    }
}

impl Drop for SessionStream {
    fn drop(&mut self) {
        let (mut state, StreamId { session: id, number }) = (self.hub.state.lock(), self.id);
        let own = state.sessions.get(&id).filter(|session| session.stream == number);
        if let Some(session) = own {
            let (owner, what) = (state.owners.get(id), "the stream of a client's session ends");
            self.hub.log.life(owner, id, &session.client, what);
            let has_forgotten = session.has_forgotten();
            state.sessions.remove(&id);
            state.broken.insert(id, Instant::now());
            if !has_forgotten {
                // It may come back with all that it knew before, of which nothing is entered any more.
                state.watches.begin_unsettled(id);
            }
        }
        self.hub.metrics.gauges.sessions.set(state.sessions.len() as i64);
        drop(state);
        self.hub.progress.notify_waiters();
    }
}

impl Session {
    pub(super) fn push(&mut self, events: &Arc<[WatchEvent]>) {
        self.waiting += events.len();
        self.last_queued = events.last().map_or(self.last_queued, |event| event.seq);
        self.queue.push_back(events.clone());
        self.wake.notify_one();
    }

    /// Whether its client has forgotten what it was told to, if it was.
    pub(super) fn has_forgotten(&self) -> bool {
        self.acknowledged >= self.epochs.reset_seq
    }
}

impl State {
    /// Puts a tick in the queue of every session that waits for events.
    pub(super) fn push_ticks(&mut self) {
        let tick: Arc<[WatchEvent]> = Arc::new([event(self.seq, Event::Tick(true))]);
        for session in self.sessions.values_mut().filter(|session| session.queue.is_empty()) {
            session.push(&tick);
        }
    }
}

impl WatchHub {
    fn lease_ms(&self) -> u32 {
        u32::try_from(self.lease.as_millis()).unwrap_or(u32::MAX)
    }

    pub(super) fn resumed_event(&self, session: u64, seq: u64, missed_up_to: u64) -> Arc<[WatchEvent]> {
        let lease_ms = self.lease_ms();
        Arc::new([event(seq, Event::Resumed(Resumed { session, lease_ms, missed_up_to }))])
    }

    pub(super) fn reset_event(&self, session: u64, seq: u64) -> Arc<[WatchEvent]> {
        let (lease_ms, cluster_id) = (self.lease_ms(), self.cluster_id.to_string());
        Arc::new([event(seq, Event::Reset(Reset { session, lease_ms, cluster_id }))])
    }

    /// Has the clients of these sessions forget everything, by an event of this number, in the place of what they have
    /// yet to be sent.
    pub(super) fn reset(&self, seq: u64, state: &mut State, ids: &[u64]) {
        for id in ids {
            let Some(session) = state.sessions.get_mut(id) else { continue };
            state.watches.begin(*id);
            state.invalidations.reset(*id, seq);
            (session.waiting, session.knows_earlier, session.epochs.reset_seq) = (0, true, seq);
            session.queue.clear();
            session.push(&self.reset_event(*id, seq));
            self.metrics.resets.inc();
        }
    }
}

/// As it waits to be sent. How many messages the master has received by then, and which masters there are, is filled in
/// when it is.
pub(super) fn event(seq: u64, event: Event) -> WatchEvent {
    WatchEvent { seq, event: Some(event), ..WatchEvent::default() }
}
