//! The last changes of the state, on every master: whoever comes to lead can tell a session what it has missed.

use std::collections::VecDeque;

use cavern_state::{Change, Changes, DelegationChange};

/// Changes remembered; some 100 bytes each.
const REMEMBERED: usize = 65_536;

/// A change, and the session that asked for it; 0 for none.
#[derive(Clone, Debug)]
pub(super) struct Recent {
    pub seq: u64,
    pub origin: u64,
    /// Of a strict mount: the number of the change that its answer waits for, and the mount.
    pub strict: Option<(u64, u32)>,
    pub change: Change,
}

/// The last changes of the state. Numbers come from the log, so they are the same on all masters.
#[derive(Debug, Default)]
pub(super) struct RecentChanges {
    /// Whatever came after this number is here.
    floor: Option<u64>,
    last: u64,
    changes: VecDeque<Recent>,
    /// Where sessions have come to hold directories that were there before: whoever may have what is in there in a
    /// cache, and was away then, does not go on with it.
    acquired: VecDeque<(u64, u64)>,
}

impl RecentChanges {
    pub(super) fn add(&mut self, changes: &Changes) {
        // What was applied before this process began is unknown.
        let mut floor = *self.floor.get_or_insert(changes.position);
        self.last = self.last.max(changes.position);
        let strict = changes.numbered().last().map(|(last, _)| last).zip(changes.strict_mount);
        for (seq, change) in changes.numbered() {
            if self.changes.len() == REMEMBERED
                && let Some(oldest) = self.changes.pop_front()
            {
                floor = floor.max(oldest.seq);
            }
            self.changes.push_back(Recent { seq, origin: changes.origin, strict, change: change.clone() });
            self.last = seq;
        }
        let has = |is_it: fn(&DelegationChange) -> bool| changes.delegations.iter().any(is_it);
        if has(|change| matches!(change, DelegationChange::Decided(_)))
            && has(|change| matches!(change, DelegationChange::Granted(_)))
        {
            if self.acquired.len() == REMEMBERED
                && let Some((oldest, _)) = self.acquired.pop_front()
            {
                floor = floor.max(oldest);
            }
            self.acquired.push_back((changes.position, changes.origin));
        }
        self.floor = Some(floor);
    }

    /// Whether another session than this one has come to hold a directory that was there before, after a number.
    pub(super) fn others_acquired_since(&self, seq: u64, session: u64) -> bool {
        let mut since = self.acquired.iter().rev().take_while(|(acquired, _)| *acquired > seq);
        since.any(|(_, holder)| *holder != session)
    }

    /// The state was replaced as a whole.
    pub(super) fn clear(&mut self) {
        *self = Self::default();
    }

    /// Number of the last change.
    pub(super) fn last(&self) -> u64 {
        self.last
    }

    /// What came after a number, in order; `None` when not all of it is here.
    pub(super) fn since(&self, seq: u64) -> Option<impl ExactSizeIterator<Item = &Recent>> {
        if self.floor.is_none_or(|floor| seq < floor) || seq > self.last {
            return None;
        }
        let from = self.changes.partition_point(|recent| recent.seq <= seq);
        Some(self.changes.range(from..))
    }
}

#[cfg(test)]
mod tests {
    use cavern_state::DirectoryDelegation;

    use super::*;

    fn changes(position: u64, inodes: &[u64]) -> Changes {
        let list = inodes.iter().copied().map(Change::Inode).collect();
        Changes { position, list, ..Changes::default() }
    }

    #[test]
    fn what_came_since_is_known_as_far_back_as_it_was_seen() {
        let mut recent = RecentChanges::default();
        assert!(recent.since(0).is_none());
        recent.add(&changes(100, &[1, 2]));
        recent.add(&changes(200, &[3]));
        recent.add(&changes(300, &[]));
        let since = |recent: &RecentChanges, seq| {
            let inodes = recent.since(seq)?.map(|recent| match recent.change {
                Change::Inode(inode) => inode,
                _ => 0,
            });
            Some(inodes.collect::<Vec<_>>())
        };
        assert_eq!(since(&recent, 99), None, "of what came before it is known nothing");
        assert_eq!(since(&recent, 100), Some(vec![1, 2, 3]));
        assert_eq!((since(&recent, 101), since(&recent, 201)), (Some(vec![2, 3]), Some(vec![])));
        assert_eq!((recent.last(), since(&recent, 300), since(&recent, 301)), (300, Some(vec![]), None));
        for position in (1000..).step_by(10).take(REMEMBERED) {
            recent.add(&changes(position, &[position]));
        }
        assert_eq!(since(&recent, 201), Some((1000..).step_by(10).take(REMEMBERED).collect()));
        recent.add(&changes(10_000_000, &[1]));
        assert_eq!((since(&recent, 201), since(&recent, 1001).unwrap().len()), (None, REMEMBERED));
        recent.clear();
        assert!(recent.since(10_000_001).is_none());
    }

    #[test]
    fn directories_that_others_have_come_to_hold_are_known_by_their_place() {
        let mut recent = RecentChanges::default();
        let granted = DelegationChange::Granted(DirectoryDelegation { mount_id: 1, directory: 9, session: 7 });
        let mut add = |position, delegations| {
            recent.add(&Changes { position, origin: 7, delegations, ..Changes::default() });
        };
        add(100, vec![granted]);
        add(200, vec![DelegationChange::Decided(9)]);
        add(300, vec![DelegationChange::Decided(9), granted]);
        assert!(recent.others_acquired_since(299, 8) && !recent.others_acquired_since(300, 8));
        assert!(!recent.others_acquired_since(99, 7), "it knows what it holds itself");
        recent.clear();
        assert!(!recent.others_acquired_since(99, 8));
    }
}
