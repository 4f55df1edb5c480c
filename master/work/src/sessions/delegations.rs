//! The directories delegated to sessions, as the state has them, in memory on every master: as long as there are none,
//! nothing costs more than a look at a counter.
//!
//! A directory is here before it is in the tables, and until they say that it was returned. So whoever reads the
//! tables and finds a directory that is held finds it here as well.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use cavern_conf::Failpoint;
use cavern_state::{DelegationChange, DirectoryDelegation};
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::sync::futures::Notified;

/// All directory delegations, by directory.
#[derive(Default)]
pub struct DirectoryDelegations {
    holders: Mutex<HashMap<u64, DirectoryDelegation>>,
    /// How many there are.
    count: AtomicUsize,
    /// Grows whenever some have been returned.
    moment: AtomicU64,
    give_back: Notify,
}

impl DirectoryDelegations {
    /// The delegations are these, and no others.
    pub(super) fn replace(&self, held: Vec<DirectoryDelegation>) {
        let mut holders = self.holders.lock();
        *holders = held.into_iter().map(|held| (held.directory, held)).collect();
        self.count.store(holders.len(), Ordering::Release);
        drop(holders);
        self.notify_returned();
    }

    /// Before the tables show what these changes make.
    pub(super) fn grant(&self, changes: &[DelegationChange]) {
        let held = changes.iter().filter_map(|change| match change {
            DelegationChange::Granted(held) => Some((held.directory, *held)),
            DelegationChange::Returned(_) => None,
        });
        let mut holders = self.holders.lock();
        holders.extend(held);
        self.count.store(holders.len(), Ordering::Release);
    }

    /// When the tables show it.
    pub(super) fn give_back(&self, changes: &[DelegationChange]) {
        let mut holders = self.holders.lock();
        let mut some = false;
        for change in changes {
            if let DelegationChange::Returned(held) = change {
                some |= holders.remove(&held.directory).is_some();
            }
        }
        self.count.store(holders.len(), Ordering::Release);
        drop(holders);
        if some {
            Failpoint::DelegationReturned.pass();
            self.notify_returned();
        }
    }

    fn notify_returned(&self) {
        self.moment.fetch_add(1, Ordering::AcqRel);
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
        if self.is_empty() {
            return None;
        }
        self.holders.lock().get(&directory).map(|held| held.session)
    }

    /// Whoever holds one, if it is not this session; all are others for session 0.
    pub fn other_holder(&self, directory: u64, session: u64) -> Option<u64> {
        self.holder(directory).filter(|holder| session == 0 || *holder != session)
    }

    /// Whether a session holds any.
    pub fn holds_any(&self, session: u64) -> bool {
        !self.is_empty() && self.holders.lock().values().any(|held| held.session == session)
    }

    /// The directories of a mount that are held, after their sessions.
    pub(super) fn delegations_in(&self, mount_id: u32) -> Vec<(u64, u64)> {
        if self.is_empty() {
            return Vec::new();
        }
        let holders = self.holders.lock();
        holders.values().filter(|held| held.mount_id == mount_id).map(|held| (held.session, held.directory)).collect()
    }

    /// Is notified when some have been returned; to be enabled before one looks.
    pub(super) fn next_return(&self) -> Notified<'_> {
        self.give_back.notified()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
}
