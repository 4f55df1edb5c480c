//! Which names were invalidated lately.
//!
//! An answer of the master may be overtaken by an invalidation: read before the change, received after it. Whoever asks
//! takes a mark first, and what was invalidated since that mark is not cached from the answer. Changes of our own count
//! as well; only the answers to them are held against the changes of others alone.

use std::collections::{HashSet, VecDeque};

use parking_lot::Mutex;

/// Invalidations remembered. An answer that is older than all of them is not cached at all.
const REMEMBERED: usize = 4096;

#[derive(Debug, Default)]
pub(super) struct RecentInvalidations {
    ring: Mutex<Ring>,
}

#[derive(Debug, Default)]
struct Ring {
    /// Number of the next invalidation.
    next: u64,
    /// Everything before this number is unknown.
    floor: u64,
    entries: VecDeque<Invalidation>,
}

#[derive(Debug)]
struct Invalidation {
    parent: u64,
    name: Box<[u8]>,
    inode: u64,
    origin: ChangedBy,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ChangedBy {
    Own,
    Foreign,
}

/// A point in the order of invalidations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct InvalidationMark(u64);

/// What changed since a mark.
#[derive(Debug, Default)]
pub(super) struct Changes {
    everything: bool,
    names: HashSet<(u64, Box<[u8]>)>,
    inodes: HashSet<u64>,
}

impl RecentInvalidations {
    pub(super) fn mark(&self) -> InvalidationMark {
        InvalidationMark(self.ring.lock().next)
    }

    /// A name was invalidated, and with it the inode that it led to (0 for none).
    pub(super) fn entry(&self, parent: u64, name: &[u8], inode: u64) {
        self.add(Invalidation { parent, name: name.into(), inode, origin: ChangedBy::Foreign });
    }

    /// A name leads to that inode (0 for none) by a change of our own.
    pub(super) fn own_entry(&self, parent: u64, name: &[u8], inode: u64) {
        self.add(Invalidation { parent, name: name.into(), inode, origin: ChangedBy::Own });
    }

    /// A change of our own touched an inode.
    pub(super) fn own_inode(&self, inode: u64) {
        self.own_entry(0, b"", inode);
    }

    fn add(&self, changed: Invalidation) {
        let mut ring = self.ring.lock();
        ring.next += 1;
        ring.entries.push_back(changed);
        if ring.entries.len() > REMEMBERED {
            ring.entries.pop_front();
            ring.floor = ring.next - REMEMBERED as u64;
        }
    }

    /// An inode was invalidated, wherever it is.
    pub(super) fn inode(&self, inode: u64) {
        self.entry(0, b"", inode);
    }

    /// Everything was invalidated.
    pub(super) fn reset(&self) {
        let mut ring = self.ring.lock();
        ring.next += 1;
        ring.floor = ring.next;
        ring.entries.clear();
    }

    pub(super) fn since(&self, mark: InvalidationMark) -> Changes {
        self.changes(mark, |_| true)
    }

    /// Without those of our own.
    pub(super) fn foreign_since(&self, mark: InvalidationMark) -> Changes {
        self.changes(mark, |changed| changed.origin == ChangedBy::Foreign)
    }

    /// Has the parts of an answer entered in the cache, each by what was invalidated since a mark. Whoever invalidates
    /// something says so first, for which one part is waited for at most, and takes it out of the cache then: what
    /// comes after the look finds there what was entered.
    pub(super) fn enter_since<T>(
        &self,
        mark: InvalidationMark,
        parts: impl IntoIterator<Item = T>,
        mut enter: impl FnMut(&Changes, T),
    ) {
        let (mut changes, mut looked_at) = (Changes::default(), mark);
        for part in parts {
            let ring = self.ring.lock();
            ring.add_since(looked_at, |_| true, &mut changes);
            looked_at = InvalidationMark(ring.next);
            enter(&changes, part);
        }
    }

    /// What our own changes since a mark have had the names of a directory lead to (0: nowhere), in their order; `None`
    /// where others have changed something there, or not all is remembered.
    pub(super) fn own_names_since(&self, mark: InvalidationMark, directory: u64) -> Option<Vec<(Box<[u8]>, u64)>> {
        let ring = self.ring.lock();
        let count = usize::try_from(ring.next - mark.0).ok().filter(|_| mark.0 >= ring.floor)?;
        let mut names = Vec::new();
        for changed in ring.entries.iter().skip(ring.entries.len().saturating_sub(count)) {
            let is_here = changed.parent == directory;
            match changed.origin {
                ChangedBy::Foreign if is_here || changed.inode == directory => return None,
                ChangedBy::Own if is_here => names.push((changed.name.clone(), changed.inode)),
                _ => {}
            }
        }
        Some(names)
    }

    fn changes(&self, mark: InvalidationMark, counts: impl Fn(&Invalidation) -> bool) -> Changes {
        let mut changes = Changes::default();
        self.ring.lock().add_since(mark, counts, &mut changes);
        changes
    }
}

impl Ring {
    /// Adds to what has changed what was invalidated since a mark, if it counts.
    fn add_since(&self, mark: InvalidationMark, counts: impl Fn(&Invalidation) -> bool, changes: &mut Changes) {
        changes.everything |= mark.0 < self.floor;
        let since = usize::try_from(self.next - mark.0).unwrap_or(usize::MAX);
        let count = if changes.everything { 0 } else { since };
        for changed in self.entries.iter().rev().take(count).filter(|changed| counts(changed)) {
            changes.names.insert((changed.parent, changed.name.clone()));
            changes.inodes.extend(Some(changed.inode).filter(|inode| *inode != 0));
        }
    }
}

impl Changes {
    pub(super) fn none(&self) -> bool {
        !self.everything && self.names.is_empty()
    }

    /// Whether an answer about this name and inode (0 for none) may be out of date.
    pub(super) fn touch(&self, parent: u64, name: &[u8], inode: u64) -> bool {
        !self.none() && (self.touch_inode(inode) || self.names.contains(&(parent, name.into())))
    }

    /// Whether something that an inode was may be so no longer, whatever names lead to it.
    pub(super) fn touch_inode(&self, inode: u64) -> bool {
        self.everything || self.inodes.contains(&inode)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_changed_after_the_mark_counts() {
        let recent = RecentInvalidations::default();
        recent.entry(1, b"before", 5);
        let mark = recent.mark();
        assert!(recent.since(mark).none());
        recent.entry(1, b"a", 7);
        recent.inode(9);
        let changes = recent.since(mark);
        assert!(changes.touch(1, b"a", 8) && changes.touch(2, b"z", 7) && changes.touch(2, b"z", 9));
        assert!(!changes.touch(1, b"before", 5) && !changes.touch(2, b"a", 6));
    }

    #[test]
    fn an_inode_is_not_touched_by_what_became_of_others() {
        let recent = RecentInvalidations::default();
        let mark = recent.mark();
        recent.inode(9);
        recent.entry(1, b"a", 7);
        let changes = recent.since(mark);
        assert!(changes.touch_inode(9) && changes.touch_inode(7) && !changes.touch_inode(8));
        recent.reset();
        assert!(recent.since(mark).touch_inode(8));
    }

    #[test]
    fn nothing_is_invalidated_between_a_look_and_what_is_entered_by_it() {
        let recent = RecentInvalidations::default();
        let mark = recent.mark();
        recent.inode(9);
        let mut entered = Vec::new();
        // Between two parts something may be.
        let parts = [0, 10].into_iter().inspect(|inode| recent.inode(*inode));
        recent.enter_since(mark, parts, |changes, _part| {
            assert!(recent.ring.try_lock().is_none());
            entered.push([9, 10].map(|inode| changes.touch_inode(inode)));
        });
        assert_eq!(entered, [[true, false], [true, true]]);
        let parts = [0, 1].into_iter().inspect(|part| (0..*part).for_each(|_| recent.reset()));
        let mut touched = Vec::new();
        recent.enter_since(recent.mark(), parts, |changes, _part| touched.push(changes.touch(3, b"x", 3)));
        assert_eq!(touched, [false, true]);
    }

    #[test]
    fn changes_of_our_own_are_told_from_those_of_others() {
        let recent = RecentInvalidations::default();
        let mark = recent.mark();
        recent.own_entry(1, b"a", 7);
        recent.own_inode(9);
        assert!(recent.foreign_since(mark).none());
        let all = recent.since(mark);
        assert!(all.touch(1, b"a", 0) && all.touch(2, b"b", 9));
        recent.inode(9);
        let foreign = recent.foreign_since(mark);
        assert!(foreign.touch(2, b"b", 9) && !foreign.touch(1, b"a", 7));
    }

    #[test]
    fn our_own_names_are_known_unless_others_have_changed_some() {
        let recent = RecentInvalidations::default();
        recent.own_entry(1, b"before", 4);
        let mark = recent.mark();
        assert_eq!(recent.own_names_since(mark, 1), Some(vec![]));
        recent.own_entry(1, b"a", 7);
        recent.own_entry(2, b"b", 8);
        recent.own_inode(1);
        recent.own_entry(1, b"a", 0);
        let name = |text: &[u8]| -> Box<[u8]> { text.into() };
        assert_eq!(recent.own_names_since(mark, 1), Some(vec![(name(b"a"), 7), (name(b"a"), 0)]));
        recent.entry(2, b"c", 9);
        assert_eq!((recent.own_names_since(mark, 2), recent.own_names_since(mark, 1).is_some()), (None, true));
        recent.inode(1);
        assert_eq!(recent.own_names_since(mark, 1), None);
        let later = recent.mark();
        recent.reset();
        assert_eq!(recent.own_names_since(later, 1), None);
    }

    #[test]
    fn forgotten_changes_and_resets_touch_everything() {
        let recent = RecentInvalidations::default();
        let mark = recent.mark();
        (0..=REMEMBERED as u64).for_each(|number| recent.entry(1, &number.to_le_bytes(), 0));
        assert!(recent.since(mark).touch(3, b"x", 3));
        let later = recent.mark();
        assert!(recent.since(later).none());
        recent.reset();
        assert!(recent.since(later).touch(3, b"x", 3));
        assert!(recent.since(recent.mark()).none());
    }
}
