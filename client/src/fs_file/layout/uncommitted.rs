//! What the master does not know of a file's content, and the commits that tell it.

use std::collections::BTreeSet;

use cavern_proto::master::{Attr, Extent};

use super::{Committed, Layout};

/// Blocks of one commit. The master takes some more, but serves nobody else meanwhile.
const COMMIT_BLOCKS: usize = 250;

/// What is to be committed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Uncommitted {
    /// Blocks that were made, or whose workers have become fewer.
    pub made: BTreeSet<u32>,
    /// Blocks that were written to.
    pub written: BTreeSet<u32>,
    /// Bytes changed.
    pub changed: bool,
    /// The file reaches at least so far.
    pub grow_to: u64,
}

/// What one commit says.
#[derive(Debug, Default)]
pub(in crate::fs_file) struct CommitBatch {
    pub grow_to: u64,
    pub changed: bool,
    pub extents: Vec<Extent>,
    /// Nothing is left for another.
    pub is_last: bool,
}

impl Uncommitted {
    pub(super) fn is_none(&self) -> bool {
        self.made.is_empty() && !self.changed
    }
}

impl Layout {
    /// Whether the master knows everything.
    pub(in crate::fs_file) fn is_committed(&self) -> bool {
        self.uncommitted.is_none() && self.in_flight.is_none()
    }

    /// Whether the master knows all blocks, and that the file has this length, if not what was written to them.
    pub(in crate::fs_file) fn is_overwritten(&self) -> bool {
        let is_known = self.in_flight.as_ref().is_none_or(|sent| sent.made.is_empty());
        self.growth() == 0 && self.uncommitted.made.is_empty() && is_known
    }

    /// What is to be sent now, in one commit; `None` when the master knows everything. Of very many blocks the first
    /// come first, and the length with the last.
    pub(in crate::fs_file) fn begin_commit(&mut self) -> Option<CommitBatch> {
        if self.uncommitted.is_none() {
            return None;
        }
        let mut uncommitted = std::mem::take(&mut self.uncommitted);
        let indexes: BTreeSet<u32> = uncommitted.made.union(&uncommitted.written).copied().collect();
        if let Some(rest) = indexes.iter().nth(COMMIT_BLOCKS).copied() {
            self.uncommitted = Uncommitted {
                made: uncommitted.made.split_off(&rest),
                written: uncommitted.written.split_off(&rest),
                changed: uncommitted.changed,
                grow_to: std::mem::take(&mut uncommitted.grow_to),
            };
        }
        let extent = |index: &u32| {
            let known = self.blocks.get(index)?;
            let joined = if known.joined.iter().all(|joined| *joined == 0) { Vec::new() } else { known.joined.clone() };
            let (generation, workers) = (known.generation, known.workers.clone());
            let replaces = known.replaces.as_ref().map(|before| before.generation);
            Some(Extent { index: *index, generation, workers, joined, replaces, ..Extent::default() })
        };
        let extents = indexes.iter().take(COMMIT_BLOCKS).filter_map(extent).collect();
        let Uncommitted { grow_to, changed, .. } = uncommitted;
        self.in_flight = Some(uncommitted);
        Some(CommitBatch { grow_to, changed, extents, is_last: indexes.len() <= COMMIT_BLOCKS })
    }

    /// The blocks that the master does not know, for it to know them without letting the file grow.
    pub(in crate::fs_file) fn begin_blocks(&mut self) -> CommitBatch {
        let Uncommitted { changed, grow_to, .. } = self.uncommitted;
        let batch = self.begin_commit().unwrap_or_default();
        (self.uncommitted.changed, self.uncommitted.grow_to) = (changed, grow_to);
        CommitBatch { grow_to: 0, changed: true, ..batch }
    }

    /// The commit has failed: what it says is to be committed still.
    pub(in crate::fs_file) fn commit_failed(&mut self) {
        self.revision += 1;
        let Uncommitted { made, written, changed, grow_to } = self.in_flight.take().unwrap_or_default();
        self.uncommitted.made.extend(made);
        self.uncommitted.written.extend(written);
        self.uncommitted.changed |= changed;
        self.uncommitted.grow_to = self.uncommitted.grow_to.max(grow_to);
    }

    /// The master has the commit, with these extents; false when the content was changed by others meanwhile, so that
    /// the master must be asked anew.
    pub(in crate::fs_file) fn committed(&mut self, sent: &[Extent], attr: &Attr) -> bool {
        self.revision += 1;
        let Uncommitted { made, written, .. } = self.in_flight.take().unwrap_or_default();
        for extent in sent {
            let known = self.blocks.get_mut(&extent.index).filter(|known| known.generation == extent.generation);
            if let Some(known) = known {
                known.allocated = extent.allocated.or(known.allocated);
                known.replaces = None;
            }
        }
        for index in made.difference(&self.uncommitted.made) {
            if let Some(known) = self.blocks.get_mut(index) {
                (known.is_committed, known.is_urgent) = (true, false);
            }
        }
        // A commit aborts the copy of each block that it names, and the client that commits is not notified of that. It
        // is notified of what the master has begun since then, so the master is asked before the next look.
        for index in made.union(&written) {
            if let Some(known) = self.blocks.get_mut(index) {
                known.is_joined = false;
            }
        }
        let Attr { size, version, allocated, .. } = *attr;
        let is_next = self.advance(version);
        self.committed = Committed { size, version, allocated, ..self.committed };
        self.size = self.size.max(size);
        is_next
    }

    /// The file is about to be cut to this length: what the master does not know beyond it need not be committed any
    /// more.
    pub(in crate::fs_file) fn give_up_beyond(&mut self, length: u64, block_size: u64) {
        let kept = length.div_ceil(block_size.max(1));
        for index in self.uncommitted.made.iter().copied().filter(|index| u64::from(*index) >= kept) {
            if self.blocks.get(&index).is_some_and(|known| !known.is_committed) {
                self.blocks.remove(&index);
                self.unsynced.blocks.remove(&index);
            }
        }
        self.uncommitted.made.retain(|index| self.blocks.contains_key(index));
        self.revision += 1;
        self.uncommitted.grow_to = self.uncommitted.grow_to.min(length);
        self.size = self.size.min(length);
    }

    /// Drops what cannot be committed any more.
    pub(in crate::fs_file) fn forget_uncommitted(&mut self) {
        self.revision += 1;
        for index in std::mem::take(&mut self.uncommitted).made {
            let Some(known) = self.blocks.get_mut(&index).filter(|known| !known.is_committed) else { continue };
            if !known.give_way() {
                self.blocks.remove(&index);
                self.unsynced.blocks.remove(&index);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::EventHistory;
    use super::super::tests::{attr, extent, parts};
    use super::*;

    #[test]
    fn what_is_written_is_committed_once() {
        let mut layout = Layout::new(&attr(0, 4, 2), vec![], None);
        assert!(layout.begin_commit().is_none());
        layout.made(0, layout.next_generation(), vec![7, 8]);
        layout.wrote(0, 100, 55);
        assert_eq!((layout.size(), layout.written_since(4)), (100, Some(55)));
        let (sent, made) = parts(layout.begin_commit().unwrap());
        assert_eq!((sent, made), (100, vec![Extent { generation: 2, workers: vec![7, 8], ..Extent::default() }]));
        assert!(
            layout.begin_commit().is_none() && layout.written_since(4).is_some(),
            "the master has not answered yet"
        );
        layout.commit_failed();
        assert!(layout.begin_commit().is_some());
        assert!(layout.committed(&[], &attr(100, 5, 2)));
        assert!(layout.is_committed() && layout.block(0).unwrap().is_committed);
        assert_eq!((layout.written_since(4), layout.written_since(5)), (Some(55), None), "an answer from before");
        layout.wrote(0, 50, 56);
        let (sent, made) = parts(layout.begin_commit().unwrap());
        assert_eq!((sent, made[0].workers.as_slice()), (50, &[7, 8][..]), "and who has what was written");
        assert!(!layout.committed(&[], &attr(300, 9, 2)), "others have committed as well");
        assert_eq!((layout.size(), layout.version()), (300, 9));
    }

    #[test]
    fn blocks_can_be_known_though_the_file_must_not_grow() {
        let mut layout = Layout::new(&attr(5, 1, 1), vec![extent(0, 1)], None);
        layout.made(1, layout.next_generation(), vec![1]);
        layout.wrote(1, 20, 1);
        assert!(layout.begin_commit().is_some());
        layout.commit_failed();
        let (_, made) = parts(layout.begin_blocks());
        assert_eq!(made, [extent(1, 1)]);
        assert!(layout.committed(&[], &attr(5, 2, 1)));
        assert!(layout.block(1).unwrap().is_committed && !layout.is_committed());
        assert_eq!((layout.size(), layout.growth()), (20, 15));
        let (sent, made) = parts(layout.begin_commit().unwrap());
        assert_eq!((sent, made), (20, vec![]), "the blocks are known");
    }

    #[test]
    fn a_commit_that_names_a_block_gives_its_copy_up() {
        let held = |index: u32| Extent { index, generation: 1, workers: vec![1], joining: 2, ..Extent::default() };
        let mut layout = Layout::new(&attr(20, 1, 1), vec![extent(0, 1), extent(1, 1)], None);
        layout.wrote(0, 10, 1);
        let copied = Layout::new(&attr(20, 1, 1), vec![held(0), held(1)], None);
        assert!(layout.rebase(copied, EventHistory::Complete).is_empty());
        assert!(!layout.accepts(0, 1, &[1]) && !layout.accepts(1, 1, &[1]));
        let (_, made) = parts(layout.begin_commit().unwrap());
        assert_eq!(made, [extent(0, 1)], "what was written before");
        assert!(layout.committed(&[], &attr(20, 2, 1)));
        assert!(layout.accepts(0, 1, &[1]) && !layout.accepts(1, 1, &[1]));
        // And a writer that cannot wait any longer names one to which nothing was written.
        assert!(layout.give_up_copy(1) && !layout.give_up_copy(0) && !layout.give_up_copy(7));
        let (_, made) = parts(layout.begin_commit().unwrap());
        assert_eq!(made, [extent(1, 1)]);
        assert!(layout.committed(&[], &attr(20, 3, 1)));
        assert!(layout.accepts(1, 1, &[1]) && layout.is_committed());
    }

    #[test]
    fn very_many_blocks_are_told_in_several_commits_the_length_with_the_last() {
        let mut layout = Layout::new(&attr(0, 0, 0), vec![], None);
        let half = COMMIT_BLOCKS / 2;
        for index in 0..(COMMIT_BLOCKS + half) as u32 {
            layout.made(index, layout.next_generation(), vec![1]);
            layout.wrote(index, (u64::from(index) + 1) * 10, 1);
        }
        let (first, made) = parts(layout.begin_commit().unwrap());
        assert_eq!((made.len(), first), (COMMIT_BLOCKS, 0));
        layout.committed(&[], &attr(0, 1, 0));
        let (last, made) = parts(layout.begin_commit().unwrap());
        let length = (COMMIT_BLOCKS + half) as u64 * 10;
        assert_eq!((made.len(), made[0].index as usize, last), (half, COMMIT_BLOCKS, length));
        layout.committed(&[], &attr(length, 2, 0));
        assert!(layout.is_committed());
    }
}
