//! How the stream of a session begins: with a new session, or with the one that the client had before.

use std::collections::VecDeque;
use std::sync::Arc;

use cavern_proto::master::ClientActivity;
use cavern_security::{Identity, PeerCertificate, Role, random_bytes};
use cavern_state::Change;
use tokio::sync::Notify;
use tokio::time::Instant;

use super::notify::payload;
use super::stream::{SessionStream, StreamId, event};
use super::{KnownEpochs, QUEUE_EVENTS, SESSIONS_MAX, Session, State, WatchHub};
use crate::error::WorkError;
use crate::sessions::recent::{Recent, RecentChanges};

/// What a client had before it opens a stream.
#[derive(Clone, Copy, Debug, Default)]
pub struct Before<'a> {
    /// Its session, to be taken up; 0 for none.
    pub session: u64,
    /// The state knows of that session.
    pub is_recorded: bool,
    /// Whose it is in the state, where it may be ending, too; empty for nobody's.
    pub recorded_owner: &'a str,
    /// It may refer to inodes that it has learnt of in earlier streams.
    pub knows_inodes: bool,
    /// The last event that it has taken in; 0 for none.
    pub applied_seq: u64,
    /// It has asked for changes in that session.
    pub has_changed: bool,
    /// Who it is, where connections are secured.
    pub owner: Option<&'a Identity>,
    /// What it has shown for that.
    pub certificate: Option<&'a PeerCertificate>,
}

#[cfg(test)]
impl Before<'_> {
    pub fn of(session: u64, is_recorded: bool) -> Self {
        Self { session, is_recorded, ..Self::default() }
    }
}

impl WatchHub {
    /// Opens a session, or takes up the one that the client had before, if its lease is not over. The first event is
    /// `Resumed` when all that happened since follows, else `Reset`.
    ///
    /// # Errors
    /// [`WorkError::Denied`] for a session that somebody else has opened, [`WorkError::Overloaded`] when there are
    /// too many, or too many of this client.
    pub fn open(self: &Arc<Self>, client: &str, before: Before<'_>) -> Result<SessionStream, WorkError> {
        let remembered = self.changes.remembered();
        let mut state = self.looked();
        let goes_on = self.admit(&state, &before)?;
        let (id, seq) = (if goes_on { before.session } else { new_id()? }, state.seq);
        state.broken.remove(&id);
        state.courtesy.forget(id);
        // An admin who takes up what a client has left is not its owner, even if nobody is known to be.
        if let Some(owner) = before.owner.filter(|owner| !goes_on || owner.role != Role::Admin) {
            state.owners.set(id, owner);
        }
        if let Some(certificate) = before.certificate {
            state.owners.show(id, certificate);
        }
        let has_forgotten = state.sessions.get(&id).is_none_or(Session::has_forgotten);
        let is_known = goes_on && has_forgotten && state.watches.is_settled(id);
        // What it has in a cache was not asked about when others came to hold directories, or are about to.
        let is_overtaken = !is_known
            && (state.delegations.others_claim(id) || remembered.others_acquired_since(before.applied_seq, id));
        let missed = if is_overtaken { None } else { self.missed(&state, (id, goes_on), &before, &remembered) };
        match &missed {
            Some(_) if is_known => {}
            Some(_) => state.watches.begin_unsettled(id),
            None => state.watches.begin(id),
        }
        // Nobody knew that they concern this session when they were made.
        for recent in missed.iter().flatten().filter(|_| !is_known) {
            if let Some((change, mount_id)) = recent.strict
                && self.may_see(&state, mount_id, id)
            {
                state.invalidations.add(change, id, recent.seq);
            }
        }
        let knows_earlier = before.knows_inodes || goes_on;
        let reset_seq = if knows_earlier && missed.is_none() { seq } else { 0 };
        if goes_on && missed.is_none() {
            // For as long as it has not heard of that, its client believes what it has cached.
            state.invalidations.reset(id, seq);
        }
        let mut queue = VecDeque::from([match &missed {
            Some(missed) => self.resumed_event(id, before.applied_seq, missed.last().map_or(0, |last| last.seq)),
            None => self.reset_event(id, seq),
        }]);
        let missed: Vec<_> = missed.iter().flatten().map(|recent| event(recent.seq, payload(&recent.change))).collect();
        if !missed.is_empty() {
            queue.push_back(Arc::from(missed));
        }
        state.streams += 1;
        let (stream, wake) = (state.streams, Arc::new(Notify::new()));
        let session = Session {
            client: client.chars().take(128).collect(),
            stream,
            waiting: queue.iter().map(|events| events.len()).sum(),
            last_queued: queue.back().and_then(|events| events.last()).map_or(seq, |event| event.seq),
            queue,
            wake: wake.clone(),
            acknowledged: 0,
            received_at: Instant::now(),
            knows_earlier,
            epochs: KnownEpochs { reset_seq, ..KnownEpochs::default() },
            settles_at: None,
            activity: ClientActivity::default(),
        };
        let what = if goes_on { "a client's session goes on" } else { "a client's session begins" };
        self.log.life(before.owner, id, &session.client, what);
        if let Some(older) = state.sessions.insert(id, session) {
            older.wake.notify_one();
        }
        self.metrics.gauges.sessions.set(state.sessions.len() as i64);
        Ok(SessionStream { hub: self.clone(), id: StreamId { session: id, number: stream }, wake })
    }

    /// Whether a client goes on with the session that it had before.
    ///
    /// # Errors
    /// As [`Self::open`].
    fn admit(&self, state: &State, before: &Before<'_>) -> Result<bool, WorkError> {
        let Before { session: earlier, is_recorded, recorded_owner, owner, .. } = *before;
        if state.closed {
            return Err(WorkError::stopping());
        }
        if state.sessions.len() >= SESSIONS_MAX {
            return Err(WorkError::Overloaded(format!("there are {SESSIONS_MAX} sessions already: stop some clients")));
        }
        state.owners.check(earlier, recorded_owner, owner)?;
        // A stream that is broken may not have been noticed here yet: the newer one takes its place.
        let goes_on = state.sessions.contains_key(&earlier) || state.may_return(earlier, is_recorded, self.lease);
        if let Some(client) = owner.filter(|owner| !goes_on && owner.client_name().is_some())
            && state.owners.count(client) >= self.client_sessions
        {
            return Err(WorkError::Overloaded(format!(
                "{client} has {} sessions already, as many as master.client_sessions allows: end some of its mounts, \
                 or raise master.client_sessions",
                self.client_sessions
            )));
        }
        Ok(goes_on)
    }

    /// What a session has missed since the last event that its client took in; `None` where not all of it is known.
    fn missed(
        &self,
        state: &State,
        (id, goes_on): (u64, bool),
        before: &Before<'_>,
        remembered: &RecentChanges,
    ) -> Option<Vec<Recent>> {
        // Of changes that had no answer when a session ended nobody can be sure.
        if before.applied_seq == 0 || !goes_on && before.has_changed {
            return None;
        }
        let missed = remembered.since(before.applied_seq).filter(|missed| missed.len() < QUEUE_EVENTS)?;
        let theirs = |recent: &&Recent| match recent.change {
            Change::LockGranted { session, .. } => session == id,
            Change::Unlinked(_) => true,
            _ => recent.origin != before.session,
        };
        let known = missed.filter(|recent| self.may_know(state, &recent.change, id));
        Some(known.filter(theirs).cloned().collect())
    }
}

/// An id that nobody guesses: who knows that of a session can take it up when its master is not there any more. Those
/// of other masters and other times are different ones.
fn new_id() -> Result<u64, WorkError> {
    let bytes = random_bytes().map_err(WorkError::unavailable)?;
    // Positive as a signed number, too; 0 is no session.
    Ok((u64::from_be_bytes(bytes) >> 1).max(1))
}
