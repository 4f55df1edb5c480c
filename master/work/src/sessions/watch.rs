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
//! `cv refresh` and its like wait in [`WatchHub::wait_acknowledged`] until every session has acknowledged a number, for
//! a lease at most.
//!
//! Who is notified of what: [`notify`].

mod courtesy;
mod group;
mod known_by_others;
mod notify;
pub(super) mod open;
mod settled;

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use cavern_consensus::LeaderLease;
use cavern_proto::master::watch_event::Event;
use cavern_proto::master::{ClientActivity, ClientStatus, Reset, Resumed, WatchEvent};
use cavern_security::{Identity, random_bytes};
use cavern_state::ALL_BEFORE;
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::Notify;
use tokio::time::Instant;

use super::current::CurrentSessions;
use super::delegations::DirectoryDelegations;
use super::owners::Owners;
use super::pending_invalidations::PendingInvalidations;
use super::session_log::SessionLog;
use super::watch_registry::WatchRegistry;
use crate::error::WorkError;
use crate::metrics::MasterMetrics;
use crate::pause_detector::{PauseDetector, excuse};
use courtesy::CourtesySessions;

/// Events that a session may be behind; about 100 bytes each, which all sessions share.
const QUEUE_EVENTS: usize = 16_384;
/// Sessions at a time.
const SESSIONS_MAX: usize = 10_000;
/// Mounts that a client may say something of.
const ACTIVE_MOUNTS_MAX: usize = 256;
/// How long the stream of a client that has died may take to break.
const STREAM_BREAKS: Duration = Duration::from_millis(500);

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

impl State {
    /// Leaves out of all silence what this master has not listened for.
    fn look(&mut self, lease: Duration) {
        let missed = self.pause_detector.missed(lease / 2);
        if !missed.is_zero() {
            let heard = self.sessions.values_mut().map(|session| &mut session.received_at);
            excuse(heard.chain(self.broken.values_mut()).chain([&mut self.started]), missed);
        }
    }

    /// Whether a session without a stream may get one.
    fn may_return(&self, session: u64, is_recorded: bool, lease: Duration) -> bool {
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

    /// The lease of a session is over.
    fn lapse(&mut self, session: u64) {
        *self.lapses.entry(self.owners.get(session).cloned()).or_default() += 1;
        self.watches.end(session);
        self.invalidations.gone(session);
        self.delegations.stop_waiting(session);
        if self.is_courtesy(session) {
            self.courtesy.add(session);
        } else {
            self.owners.remove(session);
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

    /// Whether whom a mount is there for changed within a lease. Clients that it was there for before may still show
    /// what they had cached of it: they forget that a moment later, or when they are back.
    fn has_new_rules(&self, mount_id: u32, lease: Duration) -> bool {
        self.rules_changed.get(&mount_id).is_some_and(|at| at.elapsed() < lease)
    }

    /// Whether no session that counts is on its way to another stream.
    fn has_settled(&self, lease: Duration, counts: impl Fn(u64) -> bool) -> bool {
        let is_away = |(session, since): (&u64, &Instant)| since.elapsed() < lease && counts(*session);
        self.started.elapsed() >= lease && !self.broken.iter().any(is_away)
    }

    /// Whether every session that counts has acknowledged what it was sent of the events up to `seq`: its own changes
    /// it was not sent.
    fn have_acknowledged(&self, seq: u64, counts: impl Fn(u64) -> bool) -> bool {
        let has_not = |session: &Session| session.acknowledged < seq.min(session.last_queued);
        !self.sessions.iter().any(|(id, session)| has_not(session) && counts(*id))
    }

    /// Puts a tick in the queue of every session that waits for events.
    fn push_ticks(&mut self) {
        let tick: Arc<[WatchEvent]> = Arc::new([event(self.seq, Event::Tick(true))]);
        for session in self.sessions.values_mut().filter(|session| session.queue.is_empty()) {
            session.push(&tick);
        }
    }
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

impl Session {
    fn push(&mut self, events: &Arc<[WatchEvent]>) {
        self.waiting += events.len();
        self.last_queued = events.last().map_or(self.last_queued, |event| event.seq);
        self.queue.push_back(events.clone());
        self.wake.notify_one();
    }

    fn clear(&mut self) {
        self.queue.clear();
        self.waiting = 0;
    }

    /// Whether its client has forgotten what it was told to, if it was.
    fn has_forgotten(&self) -> bool {
        self.acknowledged >= self.epochs.reset_seq
    }
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

    /// For a question of silence. While this master does not know that it leads it does not listen.
    fn looked(&self) -> MutexGuard<'_, State> {
        let mut state = self.state.lock();
        if self.lead.holds() {
            state.look(self.lease);
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

    /// A session (0 for whoever keeps nothing) is about to be answered what a name leads to, or that it is not there:
    /// call it before the read that decides so. The session is notified of what changes afterwards.
    pub fn watch_name(&self, session: u64, directory: u64, name: &[u8]) {
        if session != 0 {
            self.state.lock().watches.watch_name(session, directory, name);
        }
    }

    /// Registers a watch of all that is in a directory.
    pub fn watch_directory(&self, session: u64, directory: u64) {
        if session != 0 {
            self.state.lock().watches.watch_directory(session, directory);
        }
    }

    /// Registers a watch of the names before this one, in a directory that is being listed for the first time.
    pub fn watch_names_before(&self, session: u64, directory: u64, before: &[u8]) {
        if session != 0 {
            self.state.lock().watches.watch_names_before(session, directory, before);
        }
    }

    /// Registers watches of directories of which any names may be known, and that others are not there.
    pub fn watch_directories(&self, session: u64, directories: impl IntoIterator<Item = u64>) {
        let mut state = self.state.lock();
        for directory in directories {
            state.watches.watch_directory(session, directory);
            state.watches.watch_many_names(session, directory);
        }
    }

    /// Registers watches of inodes, whatever their names are.
    pub fn watch_inodes(&self, session: u64, inodes: impl IntoIterator<Item = u64>) {
        if session != 0 {
            let mut state = self.state.lock();
            inodes.into_iter().for_each(|inode| state.watches.watch_inode(session, inode));
        }
    }

    /// A session has begun at a place that has room for one. Gives the one that was there before, which is over now:
    /// its client is dead, as its broken stream shows. One whose stream is not broken within a moment is somebody else.
    pub async fn supersede_client(&self, place: &str, session: u64) -> Option<u64> {
        let deadline = tokio::time::Instant::now() + STREAM_BREAKS;
        loop {
            let changed = self.progress.notified();
            tokio::pin!(changed);
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

    /// Sessions of before this master led, as they are recorded, and whose they are: nobody else takes them up, or
    /// speaks for them.
    pub fn know_owners(&self, owners: impl IntoIterator<Item = (u64, Identity)>) {
        let mut state = self.state.lock();
        owners.into_iter().for_each(|(session, owner)| state.owners.set(session, &owner));
    }

    /// Whose a session is, where connections are secured.
    pub fn owner_of(&self, session: u64) -> Option<Identity> {
        self.state.lock().owners.get(session).cloned()
    }

    /// Whether a session is that of whoever asks ([`Owners::check`]); 0 is nobody's.
    ///
    /// # Errors
    /// [`WorkError::Denied`] when it is somebody else's.
    pub fn check_owner(&self, session: u64, asker: Option<&Identity>) -> Result<(), WorkError> {
        match asker {
            Some(_) => self.state.lock().owners.check(session, "", asker),
            None => Ok(()),
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

    fn may_see(&self, state: &State, mount_id: u32, session: u64) -> bool {
        self.changes.visible.may_see(mount_id, state.owners.get(session))
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
        !state.sessions.contains_key(&session)
            && state.has_lapsed(session, true, self.lease)
            && state.is_courtesy(session)
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

    /// The client of a session has taken in everything up to `seq`, and has let go of what the events up to
    /// `pending_invalidations` made untrue; false when the session is over.
    pub fn acknowledge(&self, session: u64, seq: u64, invalidated: u64) -> bool {
        {
            let mut state = self.state.lock();
            let State { sessions, invalidations: pending, .. } = &mut *state;
            let Some(known) = sessions.get_mut(&session) else { return false };
            known.acknowledged = known.acknowledged.max(seq);
            known.received_at = Instant::now();
            known.epochs.let_go = known.epochs.let_go.max(invalidated);
            pending.acknowledge(session, invalidated);
        }
        self.progress.notify_waiters();
        true
    }

    /// The client of a session says what it has read and written.
    pub fn has_done(&self, session: u64, mut activity: ClientActivity) {
        let ClientActivity { mount_ids, reads, read_bytes, writes, written_bytes } = &mut activity;
        mount_ids.truncate(ACTIVE_MOUNTS_MAX);
        mount_ids.shrink_to_fit();
        for counts in [reads, read_bytes, writes, written_bytes] {
            counts.truncate(ACTIVE_MOUNTS_MAX);
            // What is kept is not as large as what was said.
            counts.shrink_to_fit();
        }
        if let Some(session) = self.state.lock().sessions.get_mut(&session) {
            session.activity = activity;
        }
    }

    /// The clients that have a stream now, and what they have said of what they do.
    pub fn clients(&self) -> Vec<ClientStatus> {
        let state = self.state.lock();
        let clients = state.sessions.iter().map(|(id, session)| ClientStatus {
            session: *id,
            client: session.client.clone(),
            identity: state.owners.get(*id).map_or_else(String::new, |owner| owner.name.clone()),
            activity: Some(session.activity.clone()),
        });
        clients.collect()
    }

    /// The client of a session says that it ends: it will not come back.
    pub fn end(&self, session: u64) {
        {
            let mut state = self.state.lock();
            if let Some(ended) = state.sessions.remove(&session) {
                if state.delegations.holds_any(session) {
                    state.courtesy.end(session);
                }
                self.log.life(state.owners.get(session), session, &ended.client, "a client's session ends");
                state.over(session);
                ended.wake.notify_one();
            }
        }
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
        let lease = self.lease;
        let mut courtesy = Vec::new();
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
        let State { sessions, watches, .. } = &mut *state;
        for (id, session) in sessions {
            if session.settles_at.take_if(|at| *at <= Instant::now()).is_some() {
                watches.settle(*id);
            }
        }
        let State { sessions, broken, courtesy, places, .. } = &mut *state;
        let may_return = |session| broken.contains_key(&session) || courtesy.contains(session);
        places.retain(|_, session| sessions.contains_key(session) || may_return(*session));
        let after = state.sessions.len();
        drop(state);
        self.metrics.gauges.sessions.set(after as i64);
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

    /// Returns when every session that is live has acknowledged `seq`, at the latest after one lease; whether all have.
    pub async fn wait_acknowledged(&self, seq: u64) -> bool {
        self.wait_until(|state| state.have_acknowledged(seq, |_| true)).await
    }

    /// Returns when every session whose client may see a mount has acknowledged `seq`, those that are on their way to
    /// another stream too, at the latest after one lease; whether all have. Others have nothing of it, and could keep
    /// whoever waits for as long as they like.
    pub async fn wait_all_acknowledged(&self, mount_id: u32, seq: u64) -> bool {
        let have_all = |state: &State| {
            let counts = |session| self.may_see(state, mount_id, session);
            state.has_settled(self.lease, counts) && state.have_acknowledged(seq, counts)
        };
        self.wait_until(have_all).await
    }

    /// Returns when the sessions are as they should be, at the latest after one lease; whether they are.
    async fn wait_until(&self, is_so: impl Fn(&State) -> bool) -> bool {
        self.wait_for(self.lease, |state| is_so(state).then_some(())).await.is_some()
    }

    /// Returns when a look finds something, at the latest after so long.
    async fn wait_for<T>(&self, patience: Duration, look: impl Fn(&State) -> Option<T>) -> Option<T> {
        let deadline = tokio::time::Instant::now() + patience;
        loop {
            let changed = self.progress.notified();
            tokio::pin!(changed);
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

    /// A session has said all that its client knows. What else its kernel believes it does not for longer than a lease.
    pub fn watches_restored(&self, session: u64) {
        if let Some(session) = self.state.lock().sessions.get_mut(&session) {
            session.settles_at = Some(Instant::now() + self.lease);
        }
    }

    fn lease_ms(&self) -> u32 {
        u32::try_from(self.lease.as_millis()).unwrap_or(u32::MAX)
    }

    fn resumed_event(&self, session: u64, seq: u64, missed_up_to: u64) -> Arc<[WatchEvent]> {
        let lease_ms = self.lease_ms();
        Arc::new([event(seq, Event::Resumed(Resumed { session, lease_ms, missed_up_to }))])
    }

    fn reset_event(&self, session: u64, seq: u64) -> Arc<[WatchEvent]> {
        let (lease_ms, cluster_id) = (self.lease_ms(), self.cluster_id.to_string());
        Arc::new([event(seq, Event::Reset(Reset { session, lease_ms, cluster_id }))])
    }

    /// Has the clients of these sessions forget everything, by an event of this number, in the place of what they have
    /// yet to be sent.
    fn reset(&self, seq: u64, state: &mut State, ids: &[u64]) {
        for id in ids {
            let Some(session) = state.sessions.get_mut(id) else { continue };
            state.watches.begin(*id);
            state.invalidations.reset(*id, seq);
            (session.knows_earlier, session.epochs.reset_seq) = (true, seq);
            session.clear();
            session.push(&self.reset_event(*id, seq));
            self.metrics.resets.inc();
        }
    }
}

impl State {
    /// A session is over, and cannot come back.
    fn over(&mut self, session: u64) {
        self.watches.end(session);
        self.invalidations.gone(session);
        self.delegations.stop_waiting(session);
        self.owners.remove(session);
    }
}

/// The events of one session. After it is dropped the session may be taken up again for a lease, and for longer as long
/// as it holds directories that nobody else wants.
pub struct SessionStream {
    hub: Arc<WatchHub>,
    id: u64,
    stream: u64,
    wake: Arc<Notify>,
}

impl SessionStream {
    pub fn id(&self) -> u64 {
        self.id
    }

    /// The next events, in order; `None` when the session has ended.
    pub async fn next(&mut self) -> Option<Vec<Arc<[WatchEvent]>>> {
        loop {
            {
                let mut state = self.hub.state.lock();
                let State { sessions, invalidations, .. } = &mut *state;
                let session = sessions.get_mut(&self.id).filter(|session| session.stream == self.stream)?;
                if !session.queue.is_empty() {
                    invalidations.sent(self.id);
                    session.waiting = 0;
                    return Some(session.queue.drain(..).collect());
                }
            }
            self.wake.notified().await;
        }
    }
}

/// An id that nobody guesses: who knows that of a session can take it up when its master is not there any more. Those
/// of other masters and other times are different ones.
fn new_id() -> Result<u64, WorkError> {
    let bytes = random_bytes().map_err(WorkError::unavailable)?;
    // Positive as a signed number, too; 0 is no session.
    Ok((u64::from_be_bytes(bytes) >> 1).max(1))
}

/// As it waits to be sent. How many messages the master has received by then, and which masters there are, is filled in
/// when it is.
fn event(seq: u64, event: Event) -> WatchEvent {
    WatchEvent { seq, event: Some(event), ..WatchEvent::default() }
}

impl Drop for SessionStream {
    fn drop(&mut self) {
        let mut state = self.hub.state.lock();
        let own = state.sessions.get(&self.id).filter(|session| session.stream == self.stream);
        if let Some(session) = own {
            self.hub.log.life(
                state.owners.get(self.id),
                self.id,
                &session.client,
                "the stream of a client's session ends",
            );
            let has_forgotten = session.has_forgotten();
            state.sessions.remove(&self.id);
            state.broken.insert(self.id, Instant::now());
            if !has_forgotten {
                // It may come back with all that it knew before, of which nothing is entered any more.
                state.watches.begin_unsettled(self.id);
            }
        }
        self.hub.metrics.gauges.sessions.set(state.sessions.len() as i64);
        drop(state);
        self.hub.progress.notify_waiters();
    }
}

#[cfg(test)]
mod tests;
