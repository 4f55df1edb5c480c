//! The last changes of the state, on every master: whoever comes to lead can tell a session what it has missed.

use std::collections::VecDeque;

use cavern_state::{Change, Changes};

/// Changes remembered; some 100 bytes each.
const REMEMBERED: usize = 65_536;

/// A change, and the session that asked for it; 0 for none.
#[derive(Clone, Debug)]
pub(super) struct Recent {
    pub seq: u64,
    pub origin: u64,
    /// Of a strict mount: the number of the change that its answer waits for; else 0.
    pub strict: u64,
    pub change: Change,
}

/// The last changes of the state. Numbers come from the log, so they are the same on all masters.
#[derive(Debug, Default)]
pub(super) struct RecentChanges {
    /// Whatever came after this number is here.
    floor: Option<u64>,
    last: u64,
    changes: VecDeque<Recent>,
}

impl RecentChanges {
    pub(super) fn add(&mut self, changes: &Changes) {
        // What was applied before this process began is unknown.
        let mut floor = *self.floor.get_or_insert(changes.position);
        self.last = self.last.max(changes.position);
        let strict = if changes.are_strict { changes.numbered().last().map_or(0, |(last, _)| last) } else { 0 };
        for (seq, change) in changes.numbered() {
            if self.changes.len() == REMEMBERED
                && let Some(oldest) = self.changes.pop_front()
            {
                floor = oldest.seq;
            }
            self.changes.push_back(Recent { seq, origin: changes.origin, strict, change: change.clone() });
            self.last = seq;
        }
        self.floor = Some(floor);
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
}
