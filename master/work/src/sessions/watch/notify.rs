//! Whom a change concerns, and what these sessions are told.
//!
//! Each session is notified only of what it can have seen ([`WatchRegistry`](super::WatchRegistry)), and not of what it
//! changed itself, whose result it has; but for the loss of an inode's last name, which it may have open.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use cavern_consensus::ChangeListener;
use cavern_proto::master::watch_event::Event;
use cavern_proto::master::{EntryChanged, WatchEvent};
use cavern_security::Identity;
use cavern_state::{Change, Changes, InodeLocation, RulesChange};
use tokio::time::Instant;

use super::stream::event;
use super::{QUEUE_EVENTS, State, WatchHub};

/// Changes that are looked at together; a bit each says whom they concern.
const CHANGES_AT_ONCE: usize = u64::BITS as usize;

impl ChangeListener for WatchHub {
    fn changed(&self, changes: Changes) -> u64 {
        let mut guard = self.state.lock();
        let state = &mut *guard;
        state.seq = state.seq.max(changes.position);
        for RulesChange { mount_id, before, .. } in &changes.rules {
            if before.is_some() {
                state.rules_changed.insert(*mount_id, Instant::now());
            }
            self.reset_those(state, |owner| self.changes.visible.is_hidden_from(*mount_id, owner));
        }
        if changes.list.is_empty() && changes.inodes.is_empty() && changes.seen.is_empty() {
            return 0;
        }
        state.follow_moved(&changes);
        let mut concerned = Vec::new();
        let mut numbered = changes.numbered().peekable();
        while numbered.peek().is_some() {
            let together: Vec<_> = numbered.by_ref().take(CHANGES_AT_ONCE).collect();
            concerned.extend(self.notify_concerned(state, &changes, &together));
        }
        drop(numbered);
        let number = self.wait_for_concerned(state, &changes, concerned);
        state.watch_own_changes(&changes);
        // Whoever looks before that has claimed before, and whoever looks later finds who knows of the changes.
        for (session, directory) in state.delegations.changed(&changes) {
            self.recall(state, session, directory);
        }
        for (inode, location) in &changes.inodes {
            if *location == InodeLocation::Gone {
                state.watches.inode_gone(*inode);
            }
        }
        number
    }

    fn replaced(&self) {
        self.reset_those(&mut self.state.lock(), |_| true);
    }
}

impl State {
    /// Whether whom a mount is there for changed within a lease. Clients that it was there for before may still show
    /// what they had cached of it: they forget that a moment later, or when they are back.
    pub(super) fn has_new_rules(&self, mount_id: u32, lease: Duration) -> bool {
        self.rules_changed.get(&mount_id).is_some_and(|at| at.elapsed() < lease)
    }

    /// Whoever knew an inode by a name that it has lost keeps an eye on the inode, unless the name that it has now is
    /// known as well.
    fn follow_moved(&mut self, changes: &Changes) {
        for change in &changes.list {
            let Change::Entry { parent, name, old_inode, .. } = change else { continue };
            let location = changes.inodes.get(old_inode);
            let Some(location) = location.filter(|location| **location != InodeLocation::Gone) else {
                continue;
            };
            let mut knew = Vec::new();
            self.watches.of_name(*parent, name, false, |session| knew.push(session));
            if let InodeLocation::Named { parent, name, .. } = location
                && !knew.is_empty()
            {
                let mut know_still = HashSet::new();
                self.watches.of_name(*parent, name, false, |session| {
                    know_still.insert(session);
                });
                knew.retain(|session| !know_still.contains(session));
            }
            knew.into_iter().for_each(|session| self.watches.watch_inode(session, *old_inode));
        }
    }

    /// Whoever asked for changes knows from their results what is there now.
    fn watch_own_changes(&mut self, changes: &Changes) {
        // Also one whose stream is broken has the results when it is back.
        if !self.watches.has(changes.origin) {
            return;
        }
        for (parent, name) in &changes.seen {
            self.watches.watch_name(changes.origin, *parent, name);
        }
        for change in &changes.list {
            let inode = match change {
                Change::Entry { parent, name, new_inode, .. } => {
                    self.watches.watch_name(changes.origin, *parent, name);
                    // That a directory is empty which was made.
                    if let Some(InodeLocation::Named { is_directory: true, .. }) = changes.inodes.get(new_inode) {
                        self.watches.watch_directory(changes.origin, *new_inode);
                    }
                    continue;
                }
                Change::Inode(inode) | Change::Layout(inode) => inode,
                Change::Unlinked(_) | Change::LockGranted { .. } | Change::Workers(_) | Change::Mounts(_) => continue,
            };
            match changes.inodes.get(inode) {
                Some(InodeLocation::Named { parent, name, .. }) => {
                    self.watches.watch_name(changes.origin, *parent, name);
                }
                Some(InodeLocation::Nameless) => self.watches.watch_inode(changes.origin, *inode),
                // Of one with several names everybody is notified.
                Some(InodeLocation::Several | InodeLocation::Gone) | None => {}
            }
        }
    }
}

impl WatchHub {
    /// Has the clients forget everything whose sessions are of such owners.
    fn reset_those(&self, state: &mut State, is_one: impl Fn(Option<&Identity>) -> bool) {
        let ids: Vec<u64> = state.sessions.keys().copied().filter(|id| is_one(state.owners.get(*id))).collect();
        self.reset(state.seq, state, &ids);
    }

    /// Has the answer to changes of a strict mount wait for the sessions that they concern, and for those that have yet
    /// to forget everything. Whose client may not see the mount, and could not a lease ago, keeps nobody waiting,
    /// whatever it says that it knows. Gives their number; 0 where nobody is waited for.
    fn wait_for_concerned(&self, state: &mut State, changes: &Changes, mut concerned: Vec<(u64, u64)>) -> u64 {
        let Some(mount_id) = changes.strict_mount else { return 0 };
        let resets = state.invalidations.resets(self.lease);
        concerned.extend(resets.filter(|(session, _)| *session != changes.origin));
        if !state.has_new_rules(mount_id, self.lease) {
            concerned.retain(|(session, _)| self.may_see(state, mount_id, *session));
        }
        // Who was a client of an earlier term, and is not back, may have cached what nobody knows here.
        let is_unknown = state.started.elapsed() < self.lease;
        let number = if is_unknown || !concerned.is_empty() { state.seq } else { 0 };
        for (session, event) in concerned {
            state.invalidations.add(number, session, event);
        }
        number
    }

    /// Puts each of the changes in the queues of the sessions that it concerns, and gives these with the last event of
    /// each, those among them whose stream is broken too.
    fn notify_concerned(&self, state: &mut State, changes: &Changes, list: &[(u64, &Change)]) -> Vec<(u64, u64)> {
        let (mut events, mut concerned) = (Vec::with_capacity(list.len()), HashMap::<u64, u64>::new());
        // Of everybody, and of whoever may refer to an inode that it has not asked about lately.
        let (mut everybody, mut earlier, mut own) = (0u64, 0u64, 0u64);
        let watches = &state.watches;
        for (seq, change) in list {
            let bit = 1 << events.len();
            let mut found = |session: u64| *concerned.entry(session).or_default() |= bit;
            match change {
                Change::Entry { parent, name, first_fill, .. } => {
                    watches.of_name(*parent, name, *first_fill, |session| {
                        if self.may_know(state, change, session) {
                            found(session);
                        }
                    });
                }
                Change::Inode(inode) | Change::Layout(inode) => {
                    let location = changes.inodes.get(inode).unwrap_or(&InodeLocation::Several);
                    if !watches.of_inode(*inode, location, found) {
                        everybody |= bit;
                    }
                }
                Change::Unlinked(inode) => {
                    watches.of_inode(*inode, &InodeLocation::Nameless, &mut found);
                    // Whoever changed something knows it, but that it must hold what it has open.
                    if changes.origin != 0 {
                        own |= bit;
                        found(changes.origin);
                    }
                    earlier |= bit;
                }
                // Whoever freed the lock may have waited itself.
                Change::LockGranted { session, .. } => {
                    if *session == changes.origin {
                        own |= bit;
                    }
                    found(*session);
                }
                Change::Workers(_) => everybody |= bit,
                // Nor does whoever changed something know from its result what that made of a mount.
                Change::Mounts(_) => {
                    everybody |= bit;
                    own |= bit;
                }
            }
            state.seq = state.seq.max(*seq);
            events.push(event(*seq, payload(change)));
        }
        if everybody | earlier != 0 {
            for (id, session) in &state.sessions {
                let all = if session.knows_earlier { everybody | earlier } else { everybody };
                if all != 0 {
                    *concerned.entry(*id).or_default() |= all;
                }
            }
            for id in state.broken.keys() {
                *concerned.entry(*id).or_default() |= everybody | earlier;
            }
        }
        self.metrics.events.inc_by(events.len() as u64);
        // Most are concerned by the same ones.
        let mut shared = HashMap::<u64, Arc<[WatchEvent]>>::new();
        let mut others = Vec::with_capacity(concerned.len());
        for (id, bits) in concerned {
            let bits = if id == changes.origin { bits & own } else { bits };
            if bits == 0 {
                continue;
            }
            let events = shared.entry(bits).or_insert_with(|| {
                let chosen = events.iter().enumerate().filter(|(number, _)| bits & (1 << number) != 0);
                chosen.map(|(_, event)| event.clone()).collect()
            });
            if let Some(last) = events.last().filter(|_| id != changes.origin) {
                others.push((id, last.seq));
            }
            self.push(state, id, events);
        }
        others
    }

    /// Whether a session may be told of a change, whatever it says that it has seen.
    pub(super) fn may_know(&self, state: &State, change: &Change, session: u64) -> bool {
        let Change::Entry { mount_id, .. } = change else { return true };
        self.may_see(state, *mount_id, session)
    }

    /// Asks a session to return a directory, or of all (0), with an event that has the number of the last one, as a
    /// tick has, and is sent after all that wait to be. Whether it has a stream on which to be asked: one that has none
    /// ends with its lease.
    pub fn send_recall(&self, session: u64, directory: u64) -> bool {
        self.recall(&mut self.state.lock(), session, directory)
    }

    fn recall(&self, state: &mut State, session: u64, directory: u64) -> bool {
        if !state.sessions.contains_key(&session) {
            state.courtesy.end(session);
            return false;
        }
        let recall: Arc<[WatchEvent]> = Arc::new([event(state.seq, Event::Recall(directory))]);
        self.push(state, session, &recall);
        true
    }

    /// Puts events in the queue of a session. One that is too far behind is to forget everything instead.
    fn push(&self, state: &mut State, id: u64, events: &Arc<[WatchEvent]>) {
        let Some(session) = state.sessions.get_mut(&id) else { return };
        if session.waiting + events.len() <= QUEUE_EVENTS {
            return session.push(events);
        }
        self.log.behind(id, &session.client);
        let seq = events.last().map_or(session.last_queued, |event| event.seq);
        self.reset(seq, state, &[id]);
    }
}

/// What sessions are told of a change.
pub(super) fn payload(change: &Change) -> Event {
    match change {
        Change::Entry { parent, name, old_inode, new_inode, .. } => {
            let (parent, old_inode, new_inode) = (*parent, *old_inode, *new_inode);
            Event::Entry(EntryChanged { parent, name: name.clone(), old_inode, new_inode })
        }
        Change::Inode(inode) => Event::InodeChanged(*inode),
        Change::Layout(inode) => Event::LayoutChanged(*inode),
        Change::Unlinked(inode) => Event::Unlinked(*inode),
        Change::LockGranted { waiter, .. } => Event::LockGranted(*waiter),
        Change::Workers(epoch) => Event::WorkersEpoch(*epoch),
        Change::Mounts(epoch) => Event::MountsEpoch(*epoch),
    }
}
