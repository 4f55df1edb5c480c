//! The sessions that there are, and their streams of events.
//!
//! A session is a client's `Watch` stream, and those that follow it when it breaks; it is also the client's lease.
//! Changes come from the applying task, in applied order, with numbers that come from the log, and are appended to the
//! queues of the sessions. The queue is bounded: a session that falls too far behind loses it and is sent an event to
//! forget everything (`Reset`), which is always right. A tick each second carries the current number, so a client that
//! receives ticks knows that it has missed nothing.
//!
//! A client that a mount is not there for any more forgets everything, too: until the mount is there again, it is told
//! of no name in there.
//!
//! A stream that breaks may go on where it was, here or at another master, if all changes since are remembered
//! ([`RecentChanges`](super::recent::RecentChanges)): the client keeps what it has cached. Otherwise it begins with a
//! `Reset`.
//!
//! Who is notified of what: [`notify`]. How long a session lives: [`lease`]. Who waits for what its client says:
//! [`acknowledged`], [`settled`], [`group`].

mod acknowledged;
mod clients;
mod courtesy;
mod group;
mod known;
mod lease;
mod notify;
pub(super) mod open;
mod settled;
pub(super) mod stream;

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use cavern_consensus::LeaderLease;
use cavern_proto::master::{ClientActivity, WatchEvent};
use cavern_security::Identity;
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::Notify;
use tokio::time::Instant;

use super::current::CurrentSessions;
use super::delegations::DirectoryDelegations;
use super::owners::Owners;
use super::pending_invalidations::PendingInvalidations;
use super::session_log::SessionLog;
use super::watch_registry::WatchRegistry;
use crate::metrics::MasterMetrics;
use crate::pause_detector::{PauseDetector, excuse};
use courtesy::CourtesySessions;

/// Events that a session may be behind; about 100 bytes each, which all sessions share.
const QUEUE_EVENTS: usize = 16_384;
/// Sessions at a time.
const SESSIONS_MAX: usize = 10_000;

/// All sessions.
pub struct WatchHub {
    state: Mutex<State>,
    /// Some session acknowledged something, or ended.
    progress: Notify,
    lease: Duration,
    /// Sessions that one client may have.
    client_sessions: usize,
    lead: LeaderLease,
    cluster_id: Arc<str>,
    metrics: MasterMetrics,
    log: SessionLog,
    /// Who remembers the last changes. Locked before `state`.
    changes: Arc<CurrentSessions>,
}

struct State {
    seq: u64,
    sessions: HashMap<u64, Session>,
    /// Sessions whose stream broke, and when: for a lease they may be taken up again, and their clients believe what
    /// they have cached.
    broken: HashMap<u64, Instant>,
    /// Sessions whose lease is over, and that are kept nevertheless.
    courtesy: CourtesySessions,
    /// Who has opened a session, as long as it may come back: where connections are secured it is nobody else's.
    owners: Owners,
    /// The last session that began at a place that has room for one.
    places: HashMap<String, u64>,
    /// How many leases are over of clients that have not said that they end, by whose sessions they were.
    lapses: HashMap<Option<Identity>, u64>,
    /// Sessions of before this master's start may be taken up for a lease, too.
    started: Instant,
    watches: WatchRegistry,
    delegations: Arc<DirectoryDelegations>,
    invalidations: PendingInvalidations,
    /// When it changed last whom a mount is there for.
    rules_changed: HashMap<u32, Instant>,
    pause_detector: PauseDetector,
    closed: bool,
    /// Streams opened so far.
    streams: u64,
}

struct Session {
    client: String,
    /// Which of its streams this is.
    stream: u64,
    /// Events that came together, shared with the other sessions.
    queue: VecDeque<Arc<[WatchEvent]>>,
    /// Events in the queue.
    waiting: usize,
    /// Number of the last event that was put in the queue, ever.
    last_queued: u64,
    wake: Arc<Notify>,
    acknowledged: u64,
    received_at: Instant,
    /// Its client may refer to inodes that it knows from an earlier stream, and has not asked about in this one.
    knows_earlier: bool,
    epochs: KnownEpochs,
    /// When it is known here what its client knows, since it has said so, and its kernel trusts nothing else any more.
    settles_at: Option<Instant>,
    /// What its client has said last of what it does.
    activity: ClientActivity,
}

/// What the client of a session goes by, as it was told, and has said.
#[derive(Default)]
struct KnownEpochs {
    /// The event by which a client that knew something was told to forget everything; 0 for none. Before it has
    /// acknowledged that, not all that it has open is entered here.
    reset_seq: u64,
    /// Of the group of masters.
    group: u64,
    /// Of the mount table, whatever it writes.
    mounts: u64,
    /// The last event of which it has let go.
    let_go: u64,
}

impl WatchHub {
    /// A hub without sessions; where connections are secured no client may have more than so many.
    pub fn new(
        (lease, client_sessions): (Duration, usize),
        lead: LeaderLease,
        metrics: MasterMetrics,
        changes: Arc<CurrentSessions>,
        cluster_id: Arc<str>,
    ) -> Self {
        let state = State {
            seq: 0,
            sessions: HashMap::new(),
            broken: HashMap::new(),
            courtesy: CourtesySessions::default(),
            owners: Owners::default(),
            places: HashMap::new(),
            lapses: HashMap::new(),
            started: Instant::now(),
            watches: WatchRegistry::default(),
            delegations: changes.delegations(),
            invalidations: PendingInvalidations::default(),
            rules_changed: HashMap::new(),
            pause_detector: PauseDetector::now(),
            closed: false,
            streams: 0,
        };
        Self {
            state: Mutex::new(state),
            progress: Notify::new(),
            lease,
            client_sessions,
            lead,
            cluster_id,
            metrics,
            log: SessionLog::default(),
            changes,
        }
    }

    /// Events up to this one came before the hub.
    pub(super) fn begin_after(&self, seq: u64) {
        self.state.lock().seq = seq;
    }

    /// After which a session that has sent no message is over.
    pub fn lease(&self) -> Duration {
        self.lease
    }

    /// The directories delegated to sessions.
    pub fn delegations(&self) -> Arc<DirectoryDelegations> {
        self.changes.delegations()
    }

    /// For a question of silence, out of which is left what this master has not listened for. While it does not know
    /// that it leads it does not listen.
    fn looked(&self) -> MutexGuard<'_, State> {
        let mut state = self.state.lock();
        if self.lead.holds() {
            let State { sessions, broken, started, pause_detector, .. } = &mut *state;
            let missed = pause_detector.missed(self.lease / 2);
            if !missed.is_zero() {
                let heard = sessions.values_mut().map(|session| &mut session.received_at);
                excuse(heard.chain(broken.values_mut()).chain([started]), missed);
            }
        }
        state
    }

    /// Number of the last event.
    pub fn seq(&self) -> u64 {
        self.state.lock().seq
    }

    /// Number of the last event that a session is sent: those of its own changes it would wait for in vain. Of any
    /// event, for a session that is not there.
    pub fn last_queued_seq(&self, session: u64) -> u64 {
        let state = self.state.lock();
        state.sessions.get(&session).map_or(state.seq, |session| session.last_queued)
    }

    pub fn sessions(&self) -> u64 {
        self.state.lock().sessions.len() as u64
    }

    /// Returns when the sessions are as they should be, at the latest after one lease; whether they are.
    async fn wait_until(&self, is_so: impl Fn(&State) -> bool) -> bool {
        self.wait_for(self.lease, |state| is_so(state).then_some(())).await.is_some()
    }

    /// Returns when a look finds something, at the latest after so long.
    async fn wait_for<T>(&self, patience: Duration, look: impl Fn(&State) -> Option<T>) -> Option<T> {
        let deadline = tokio::time::Instant::now() + patience;
        loop {
            let mut changed = std::pin::pin!(self.progress.notified());
            // Registered before looking, so that no acknowledgement in between is missed.
            changed.as_mut().enable();
            let found = look(&self.looked());
            if found.is_some() {
                return found;
            }
            if tokio::time::timeout_at(deadline, changed).await.is_err() {
                return None;
            }
        }
    }
}

#[cfg(test)]
mod tests;
