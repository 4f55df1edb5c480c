//! The directories delegated to sessions, as the state has them, in memory on every master: as long as there are none,
//! nothing costs more than a look at a counter.
//!
//! A directory is here before it is in the tables, and until they say that it was returned. So whoever reads the
//! tables and finds a directory that is held finds it here as well.
//!
//! A directory that was there before is claimed first, here, on the master that leads: a claim comes before the look at
//! what other sessions know, and they are noted before they look for claims. So either they are seen, or they wait.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use cavern_conf::Failpoint;
use cavern_state::{Change, Changes, DelegationChange, DirectoryDelegation};
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::sync::futures::Notified;

/// Claims that may wait for others to forget something.
const CLAIMS_MAX: usize = 4096;

/// All directory delegations, and the claims of sessions that want some.
#[derive(Default)]
pub struct DirectoryDelegations {
    held: Mutex<Held>,
    /// How many there are.
    count: AtomicUsize,
    /// Grows whenever some have been returned. Not with claims: nothing was answered for under one.
    moment: AtomicU64,
    give_back: Notify,
}

/// By directory.
#[derive(Default)]
struct Held {
    holders: HashMap<u64, DirectoryDelegation>,
    claims: HashMap<u64, Claim>,
}

impl Held {
    fn len(&self) -> usize {
        self.holders.len() + self.claims.len()
    }

    /// The session that waits for the most directories waits for none of them any more.
    fn make_room(&mut self) {
        let mut waiting = HashMap::<u64, usize>::new();
        for claim in self.claims.values().filter(|claim| claim.waits()) {
            *waiting.entry(claim.session).or_default() += 1;
        }
        let most = waiting.into_iter().max_by_key(|(_, count)| *count).map(|(session, _)| session);
        self.claims.retain(|_, claim| !claim.waits() || Some(claim.session) != most);
    }
}

/// A session that wants a directory which was there before.
#[derive(Clone, Copy)]
struct Claim {
    session: u64,
    stage: ClaimStage,
    /// Another session has changed the directory since.
    is_changed: bool,
}

impl Claim {
    /// Whether others have yet to let go.
    fn waits(&self) -> bool {
        matches!(self.stage, ClaimStage::Announced(_))
    }
}

#[derive(Clone, Copy)]
enum ClaimStage {
    /// Others are told to forget the attributes of the directory, by the event of this number, and have yet to let go.
    /// There is none before the state says so, nor where it refuses that.
    Announced(Option<u64>),
    /// It is on its way to the log, or is being judged whether it may be: whoever wants to know what is in there waits
    /// until the state has decided.
    Proposed,
}

/// What has become of a claim so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ClaimBegin {
    /// Somebody has the directory, or is about to.
    Taken,
    /// It is a new one,
    New,
    /// or others were told to forget the directory, by the event of this number.
    Announced(u64),
}

impl DirectoryDelegations {
    /// Changes what is held, and with it how much that is.
    fn change<T>(&self, change: impl FnOnce(&mut Held) -> T) -> T {
        let mut held = self.held.lock();
        let changed = change(&mut held);
        self.count.store(held.len(), Ordering::Release);
        changed
    }

    /// The delegations are these, and no others.
    pub(super) fn replace(&self, delegations: Vec<DirectoryDelegation>) {
        self.change(|held| {
            held.holders = delegations.into_iter().map(|held| (held.directory, held)).collect();
            self.moment.fetch_add(1, Ordering::AcqRel);
        });
        self.give_back.notify_waiters();
    }

    /// Nothing of what was claimed is under way: another term has begun.
    pub(super) fn forget_claims(&self) {
        self.change(|held| held.claims.clear());
        self.give_back.notify_waiters();
    }

    /// A session is over, and waits for nothing any more. On what is on its way to the log the state decides.
    pub(super) fn stop_waiting(&self, session: u64) {
        if !self.is_empty() {
            self.change(|held| held.claims.retain(|_, claim| claim.session != session || !claim.waits()));
        }
    }

    /// Before the tables show what these changes make.
    pub(super) fn grant(&self, changes: &[DelegationChange]) {
        let granted = changes.iter().filter_map(|change| match change {
            DelegationChange::Granted(held) => Some((held.directory, *held)),
            DelegationChange::Returned(_) | DelegationChange::Decided(_) | DelegationChange::Announced(_) => None,
        });
        self.change(|held| held.holders.extend(granted));
    }

    /// When the tables show it.
    pub(super) fn give_back(&self, changes: &[DelegationChange]) {
        let (mut some, mut decided) = (false, false);
        self.change(|held| {
            for change in changes {
                match change {
                    DelegationChange::Returned(returned) => some |= held.holders.remove(&returned.directory).is_some(),
                    DelegationChange::Decided(directory) => decided |= held.claims.remove(directory).is_some(),
                    DelegationChange::Granted(_) | DelegationChange::Announced(_) => {}
                }
            }
            if some {
                // Before anybody finds that nobody holds them: what he has read may have come too early.
                self.moment.fetch_add(1, Ordering::AcqRel);
            }
        });
        if some {
            Failpoint::DelegationReturned.pass();
        }
        if some || decided {
            self.give_back.notify_waiters();
        }
    }

    /// A session wants a directory: from now on whoever looks waits, until the state has decided, or the claim is given
    /// up ([`Self::postpone`], [`Self::give_up`]).
    pub(super) fn claim(&self, directory: u64, session: u64) -> ClaimBegin {
        self.change(|held| {
            if held.holders.get(&directory).is_some_and(|holder| holder.session != session) {
                return ClaimBegin::Taken;
            }
            let begin = match held.claims.get(&directory) {
                Some(Claim { stage: ClaimStage::Proposed, .. }) => return ClaimBegin::Taken,
                Some(Claim { session: known, stage: ClaimStage::Announced(Some(seq)), .. }) if *known == session => {
                    ClaimBegin::Announced(*seq)
                }
                _ => ClaimBegin::New,
            };
            if held.claims.len() >= CLAIMS_MAX {
                held.make_room();
            }
            held.claims.insert(directory, Claim { session, stage: ClaimStage::Proposed, is_changed: false });
            begin
        })
    }

    /// A claim waits until others have forgotten the directory, of which they were told by an event, or are about to be
    /// by the next announcement of its session; unless that is in vain by now.
    pub(super) fn postpone(&self, directory: u64, announced: Option<u64>) {
        self.change(|held| {
            if held.claims.get(&directory).is_some_and(|claim| claim.is_changed) {
                held.claims.remove(&directory);
            } else if let Some(claim) = held.claims.get_mut(&directory) {
                claim.stage = ClaimStage::Announced(announced);
            }
        });
        self.give_back.notify_waiters();
    }

    /// A session has made changes, or learnt of some, and knows by their results the directories that they are about:
    /// to be called when that is noted. Where another one waits for that to be forgotten, it does so in vain; gives the
    /// sessions with their directories of which the state is about to decide: these are to be recalled. Of what others
    /// are told to forget by these changes the claim waits for the event: whoever lets go of that has forgotten what it
    /// knew before.
    pub(super) fn changed(&self, changes: &Changes) -> Vec<(u64, u64)> {
        if changes.origin == 0 || self.is_empty() {
            return Vec::new();
        }
        self.change(|held| {
            let mut decided = Vec::new();
            if held.claims.is_empty() {
                return decided;
            }
            let seen = changes.seen.iter().map(|(parent, _)| *parent);
            for directory in changes.list.iter().flat_map(Change::inodes).chain(seen) {
                let claim = held.claims.get_mut(&directory);
                let Some(claim) = claim.filter(|claim| claim.session != changes.origin) else { continue };
                if matches!(claim.stage, ClaimStage::Proposed) {
                    claim.is_changed = true;
                    decided.push((claim.session, directory));
                } else {
                    held.claims.remove(&directory);
                }
            }
            let event = changes.numbered().last().map(|(seq, _)| seq);
            for change in &changes.delegations {
                if let DelegationChange::Announced(directory) = change
                    && let Some(claim) = held.claims.get_mut(directory).filter(|claim| claim.session == changes.origin)
                    && claim.waits()
                {
                    claim.stage = ClaimStage::Announced(event);
                }
            }
            decided
        })
    }

    /// Whether the state is about to decide on a claim of another session than this one.
    pub(super) fn others_claim(&self, session: u64) -> bool {
        let is_deciding = |claim: &Claim| claim.session != session && matches!(claim.stage, ClaimStage::Proposed);
        !self.is_empty() && self.held.lock().claims.values().any(is_deciding)
    }

    /// The claim of a session comes to nothing.
    pub fn give_up(&self, directory: u64, session: u64) {
        self.change(|held| {
            if held.claims.get(&directory).is_some_and(|claim| claim.session == session) {
                held.claims.remove(&directory);
            }
        });
        self.give_back.notify_waiters();
    }

    pub fn is_empty(&self) -> bool {
        self.count.load(Ordering::Acquire) == 0
    }

    /// Is another one when some have been returned.
    pub fn moment(&self) -> u64 {
        self.moment.load(Ordering::Acquire)
    }

    /// Whoever holds the delegation of a directory.
    pub fn holder(&self, directory: u64) -> Option<u64> {
        if self.is_empty() { None } else { self.held.lock().holders.get(&directory).map(|held| held.session) }
    }

    /// Whoever holds one or is about to, if it is not this session; all are others for session 0. Who only waits for
    /// others to forget it has lost it to the one who asks.
    pub fn other_holder(&self, directory: u64, session: u64) -> Option<u64> {
        if self.is_empty() {
            return None;
        }
        self.change(|held| {
            let is_other = |holder: &u64| session == 0 || *holder != session;
            let holder = held.holders.get(&directory).map(|held| held.session).filter(is_other);
            let claim = held.claims.get(&directory).copied().filter(|claim| is_other(&claim.session));
            match claim {
                Some(Claim { session, stage: ClaimStage::Proposed, .. }) => holder.or(Some(session)),
                Some(_) => {
                    held.claims.remove(&directory);
                    holder
                }
                None => holder,
            }
        })
    }

    /// Whether a session holds any.
    pub fn holds_any(&self, session: u64) -> bool {
        !self.is_empty() && self.held.lock().holders.values().any(|held| held.session == session)
    }

    /// The directories of a mount that are held, after their sessions.
    pub(crate) fn delegations_in(&self, mount_id: u32) -> Vec<(u64, u64)> {
        if self.is_empty() {
            return Vec::new();
        }
        let held = self.held.lock();
        let holders = held.holders.values();
        holders.filter(|held| held.mount_id == mount_id).map(|held| (held.session, held.directory)).collect()
    }

    /// Is notified when some have been returned; to be enabled before one looks.
    pub(super) fn next_return(&self) -> Notified<'_> {
        self.give_back.notified()
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

    use super::*;

    /// Others are told to forget a directory that a session wants.
    fn announcement(directory: u64, origin: u64) -> Changes {
        Changes {
            position: 40,
            origin,
            list: vec![Change::Inode(directory)],
            delegations: vec![DelegationChange::Announced(directory)],
            ..Changes::default()
        }
    }

    #[test]
    fn what_is_held_is_known_until_it_is_let_go_of() {
        let held = DirectoryDelegations::default();
        let of = |directory, session| DirectoryDelegation { mount_id: 3, directory, session };
        assert!(held.is_empty() && held.holder(7).is_none());
        let moment = held.moment();
        let changes = [DelegationChange::Granted(of(7, 1)), DelegationChange::Granted(of(8, 2))];
        held.grant(&changes);
        held.give_back(&changes);
        assert_eq!((held.holder(7), held.holder(8), held.holder(9)), (Some(1), Some(2), None));
        assert_eq!(
            (held.other_holder(7, 1), held.other_holder(7, 2), held.other_holder(7, 0)),
            (None, Some(1), Some(1))
        );
        assert_eq!((held.delegations_in(3).len(), held.delegations_in(4).len()), (2, 0));
        assert!(held.holds_any(1) && held.holds_any(2) && !held.holds_any(3));
        assert_eq!(held.moment(), moment, "nothing was returned");
        held.give_back(&[DelegationChange::Returned(of(7, 1))]);
        assert_ne!(held.moment(), moment);
        assert!(!held.holds_any(1));
        assert_eq!((held.holder(7), held.delegations_in(3)), (None, vec![(2, 8)]));
        held.replace(vec![of(9, 5)]);
        assert_eq!((held.holder(8), held.holder(9)), (None, Some(5)));
        held.replace(Vec::new());
        assert!(held.is_empty());
    }

    #[test]
    fn whoever_looks_ends_a_claim_that_waits_and_waits_for_one_that_does_not() {
        let held = DirectoryDelegations::default();
        assert_eq!(
            (held.claim(7, 1), held.claim(7, 1), held.claim(7, 2)),
            (ClaimBegin::New, ClaimBegin::Taken, ClaimBegin::Taken)
        );
        assert_eq!((held.other_holder(7, 2), held.other_holder(7, 1), held.holder(7)), (Some(1), None, None));
        assert!(held.others_claim(2) && !held.others_claim(1));
        held.postpone(7, None);
        assert_eq!(held.claim(7, 1), ClaimBegin::New, "nobody knows by which event");
        held.changed(&announcement(7, 1));
        held.postpone(7, None);
        assert_eq!(held.claim(7, 1), ClaimBegin::New, "others may have looked since");
        held.postpone(7, None);
        held.changed(&announcement(7, 2));
        assert_eq!(held.claim(7, 1), ClaimBegin::New, "that was another's");
        held.postpone(7, None);
        let told = announcement(7, 1);
        held.changed(&told);
        let seq = told.position + 1;
        assert_eq!(held.claim(7, 1), ClaimBegin::Announced(seq));
        held.postpone(7, Some(seq));
        assert!(!held.others_claim(2));
        assert!(held.other_holder(7, 1).is_none() && !held.is_empty(), "whoever wants it looks himself");
        assert!(held.other_holder(7, 2).is_none() && held.is_empty(), "somebody else uses it");

        assert_eq!(held.claim(7, 1), ClaimBegin::New);
        let moment = held.moment();
        let woken = held.next_return();
        tokio::pin!(woken);
        woken.as_mut().enable();
        let granted = DelegationChange::Granted(DirectoryDelegation { mount_id: 3, directory: 7, session: 1 });
        let changes = [DelegationChange::Decided(7), granted];
        held.grant(&changes);
        held.give_back(&changes);
        assert_eq!((held.holder(7), held.other_holder(7, 2)), (Some(1), Some(1)));
        assert!(woken.now_or_never().is_some(), "whoever waits looks again");
        assert_eq!(held.moment(), moment, "nothing was answered for that one could have missed");
        assert_eq!(held.claim(7, 2), ClaimBegin::Taken);
        assert_eq!(held.claim(8, 2), ClaimBegin::New);
        held.give_back(&[DelegationChange::Decided(8)]);
        assert!(held.other_holder(8, 1).is_none(), "it was refused");
        assert_eq!(held.claim(8, 2), ClaimBegin::New);
        held.forget_claims();
        assert!(held.other_holder(8, 1).is_none());
        assert_eq!(held.holder(7), Some(1));
    }

    #[test]
    fn whoever_changes_a_directory_knows_it_and_a_claim_of_another_waits_in_vain() {
        let held = DirectoryDelegations::default();
        let by = |origin| Changes { origin, list: vec![Change::Mounts(1), Change::Inode(7)], ..Changes::default() };
        assert!(held.changed(&by(2)).is_empty());
        held.claim(7, 1);
        assert!(held.changed(&by(0)).is_empty() && held.changed(&by(1)).is_empty());
        assert_eq!(held.changed(&by(2)), [(1, 7)], "it may be delegated already");
        held.postpone(7, None);
        assert!(held.is_empty(), "others know it again");
        held.claim(7, 1);
        held.postpone(7, Some(40));
        assert!(held.changed(&by(1)).is_empty() && !held.is_empty(), "of that others are only notified");
        assert!(held.changed(&by(2)).is_empty() && held.is_empty());
        held.claim(7, 1);
        let seen = vec![(7, "n".into())];
        assert_eq!(held.changed(&Changes { origin: 2, seen, ..Changes::default() }), [(1, 7)], "it has learnt of that");
        held.give_up(7, 1);
        assert_eq!(held.claim(7, 1), ClaimBegin::New);
        held.give_up(7, 2);
        assert!(!held.is_empty(), "it is another's");
        held.give_up(7, 1);
        assert!(held.is_empty());
    }
    #[test]
    fn claims_that_wait_are_bounded_at_the_cost_of_who_has_most_and_end_with_their_session() {
        let held = DirectoryDelegations::default();
        let waits = |directory, session| {
            held.claim(directory, session);
            held.postpone(directory, Some(1));
        };
        (0..5).for_each(|directory| waits(directory, 1));
        (5..CLAIMS_MAX as u64).for_each(|directory| waits(directory, 2));
        assert_eq!(held.claim(1 << 40, 2), ClaimBegin::New);
        assert_eq!(held.held.lock().claims.len(), 6, "those of the session with the most have gone");
        assert_eq!(held.claim(4, 1), ClaimBegin::Announced(1));
        [1, 2].into_iter().for_each(|session| held.stop_waiting(session));
        assert!(held.other_holder(4, 3) == Some(1) && held.other_holder(1 << 40, 3) == Some(2));
        assert_eq!(held.held.lock().claims.len(), 2, "the state has yet to decide on these");
        held.give_up(4, 1);
        held.give_up(1 << 40, 2);
        assert!(held.is_empty() && held.moment() == 0, "nobody has to read anything once more for that");
    }
}
