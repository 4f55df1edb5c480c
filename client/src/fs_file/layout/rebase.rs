//! What was written here is laid over what the master has meanwhile.

use super::{Layout, Uncommitted};

/// Whether all events that the master has sent about a file since the layout was asked for have arrived here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::fs_file) enum EventHistory {
    Complete,
    MayHaveGaps,
}

impl Layout {
    /// Puts what was written here over what the master has now; gives the blocks that were written to here and have no
    /// place any more, since somebody else has cut the file, or has made the same block at other workers; or since they
    /// have been dropped, for the bucket had them.
    pub(in crate::fs_file) fn rebase(&mut self, mut fresh: Self, history: EventHistory) -> Vec<u32> {
        let mut lost = Vec::new();
        // The master may have answered before it was told what is frozen.
        fresh.makes_from(self.next_generation());
        let is_cut = fresh.generation() != self.generation();
        // One of a record is of a process whose session goes on, as far as anybody knows.
        let has_heard_all = history == EventHistory::Complete || self.version() == 0;
        let Uncommitted { made, written, changed, grow_to } = std::mem::take(&mut self.uncommitted);
        for index in made.union(&written).copied() {
            let Some(own) = self.blocks.get(&index) else { continue };
            let is_made = made.contains(&index);
            let is_taken = is_made && fresh.takes(own.generation);
            match fresh.blocks.get_mut(&index) {
                // A worker that has joined has all that was written before: see the decision.
                Some(known) if known.generation == own.generation && !is_made && history == EventHistory::Complete => {}
                Some(known) if known.generation == own.generation => {
                    let before = known.workers.len();
                    if !known.intersect(own) {
                        lost.push(index);
                        continue;
                    }
                    if is_made || known.workers.len() < before {
                        known.is_committed = false;
                        known.is_urgent = own.is_urgent || known.workers.len() < before;
                        fresh.uncommitted.made.insert(index);
                    }
                }
                Some(known) if is_taken && own.began_as(known.generation) => {
                    let mut own = own.clone();
                    if !own.intersect(known) {
                        lost.push(index);
                        continue;
                    }
                    own.replaces = Some(Box::new(known.clone()));
                    *known = own;
                    fresh.uncommitted.made.insert(index);
                }
                // Another client's has taken the place of one that a view has, and began with what was written to that,
                // unless this one was cut off, and has not heard of the view in time.
                Some(known) if !is_made && !is_cut && has_heard_all && known.generation > own.generation => continue,
                None if is_taken && own.replaces.is_none() => {
                    fresh.blocks.insert(index, own.clone());
                    fresh.uncommitted.made.insert(index);
                }
                _ => {
                    lost.push(index);
                    continue;
                }
            }
            if written.contains(&index) {
                fresh.uncommitted.written.insert(index);
            }
        }
        if changed {
            fresh.uncommitted.changed = true;
            fresh.written_ns = self.written_ns;
            if lost.is_empty() {
                fresh.uncommitted.grow_to = grow_to;
                fresh.size = fresh.size.max(grow_to);
            }
        }
        fresh.unsynced = std::mem::take(&mut self.unsynced);
        fresh.unsynced.blocks.retain(|index| fresh.blocks.contains_key(index));
        fresh.unsynced.is_tracked &= fresh.version() == self.version();
        fresh.revision = self.revision + 1;
        *self = fresh;
        lost
    }

    /// Whether what has no place any more was cut off since the file had this generation. Where the bucket has the
    /// file, a new one begins also when its blocks are dropped.
    pub(in crate::fs_file) fn is_cut_since(&self, generation: u32) -> bool {
        self.generation() != generation && self.origin.is_none()
    }
}

#[cfg(test)]
mod tests {
    use cavern_proto::master::{Extent, Origin};

    use super::super::tests::{at, attr, extent, parts, workers};
    use super::*;

    #[test]
    fn what_somebody_else_cut_off_is_lost_and_the_rest_goes_on() {
        let mut layout = Layout::new(&attr(10, 1, 1), vec![extent(0, 1)], None);
        layout.wrote(0, 10, 1);
        layout.made(1, layout.next_generation(), vec![1]);
        layout.wrote(1, 20, 2);
        let mut grown = layout.clone();
        assert!(
            grown
                .rebase(Layout::new(&attr(15, 2, 1), vec![extent(0, 1), extent(1, 1)], None), EventHistory::Complete)
                .is_empty()
        );
        assert_eq!((grown.size(), grown.is_committed()), (20, false));
        assert_eq!(layout.rebase(Layout::new(&attr(5, 2, 2), vec![extent(0, 1)], None), EventHistory::Complete), [1]);
        assert_eq!((layout.size(), layout.block(1)), (5, None));
        assert_eq!(layout.begin_sync(), [0]);
        layout.forget_uncommitted();
        assert!(layout.is_committed() && layout.block(0).is_some());

        // Two have made the same block, at different workers.
        layout.made(1, layout.next_generation(), vec![2]);
        layout.wrote(1, 20, 3);
        let theirs = Layout::new(&attr(15, 3, 2), vec![extent(0, 1), extent(1, 2)], None);
        assert_eq!(layout.rebase(theirs, EventHistory::Complete), [1]);
        assert_eq!((layout.size(), layout.block(1).unwrap().workers.as_slice()), (15, &[1][..]));
    }

    #[test]
    fn a_replica_that_came_while_something_may_have_been_missed_is_given_up() {
        let mut layout = at(&[1], &[]);
        layout.wrote(0, 10, 1);
        let mut sure = layout.clone();
        assert!(sure.rebase(at(&[1, 3], &[0, 1]), EventHistory::Complete).is_empty());
        assert!(sure.accepts(0, 1, &[1, 3]));
        assert!(layout.rebase(at(&[1, 3], &[0, 1]), EventHistory::MayHaveGaps).is_empty());
        assert_eq!((workers(&layout), layout.is_urgent(0)), (&[1][..], true));
        assert_eq!(layout.begin_commit().unwrap().extents[0].workers, [1]);

        // The worker has another file by now.
        let mut layout = at(&[1, 2], &[]);
        layout.wrote(0, 10, 1);
        assert!(layout.rebase(at(&[1, 2], &[0, 1]), EventHistory::MayHaveGaps).is_empty());
        assert_eq!(workers(&layout), [1]);

        // What was given up here stays so, whatever the master has.
        let mut layout = at(&[1, 2], &[]);
        layout.gave_up(0, 1, &[2]);
        assert!(layout.rebase(at(&[1, 2], &[]), EventHistory::Complete).is_empty());
        assert_eq!((workers(&layout), layout.is_urgent(0)), (&[1][..], true));
    }

    #[test]
    fn what_was_written_to_blocks_that_have_been_dropped_is_lost() {
        let origin = Origin { key: "k".into(), etag: "e".into(), length: 20, valid: 20, version: 2 };
        let mut layout = Layout::new(&attr(20, 1, 1), vec![extent(0, 1), extent(1, 1)], None);
        layout.wrote(1, 20, 1);
        layout.made(2, layout.next_generation(), vec![1]);
        layout.wrote(2, 30, 1);
        let (_, made) = parts(layout.begin_commit().unwrap());
        assert_eq!(made, [extent(1, 1), extent(2, 1)]);
        layout.commit_failed();
        let mut same = layout.clone();
        let as_before = Layout::new(&attr(20, 2, 1), vec![extent(0, 1), extent(1, 1)], None);
        assert!(same.rebase(as_before, EventHistory::Complete).is_empty());
        assert_eq!(same.begin_commit().unwrap().extents, [extent(1, 1), extent(2, 1)], "it is still to be committed");
        let (mut cut, mut elsewhere) = (layout.clone(), layout.clone());
        assert_eq!(layout.rebase(Layout::new(&attr(20, 2, 2), vec![], Some(origin)), EventHistory::Complete), [1, 2]);
        assert!(!layout.is_cut_since(1), "the bucket has what was there before it was written to");
        assert_eq!(cut.rebase(Layout::new(&attr(0, 2, 2), vec![], None), EventHistory::Complete), [1, 2]);
        assert!(cut.is_cut_since(1));
        let others = Extent { workers: vec![9], ..extent(2, 1) };
        let others = Layout::new(&attr(30, 2, 1), vec![extent(0, 1), extent(1, 1), others], None);
        assert_eq!(elsewhere.rebase(others, EventHistory::Complete), [2]);
        assert!(!elsewhere.is_cut_since(1), "another client has made the block at other workers");
    }
}
