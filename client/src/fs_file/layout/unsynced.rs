//! Which blocks of a file may not be on the disks of their workers.
//!
//! What is written while a file is open here is known. What was written before, or by somebody else, is not: whoever
//! syncs the file wants that on disk as well, so the first sync is one of all blocks. A worker finds out quickly that
//! it has nothing to do.

use std::collections::BTreeSet;

use cavern_proto::master::Attr;

use super::Layout;

/// The blocks of a file that may not be on the disks of their workers.
#[derive(Clone, Debug, Default)]
pub(super) struct Unsynced {
    pub blocks: BTreeSet<u32>,
    /// Those of a sync that is under way.
    pub syncing: BTreeSet<u32>,
    /// These are all: nothing that was written before the file was opened here, or by somebody else, may be on no disk.
    pub is_tracked: bool,
}

impl Unsynced {
    pub(super) fn is_empty(&self) -> bool {
        self.blocks.is_empty() && self.syncing.is_empty()
    }

    pub(super) fn all(&self) -> impl Iterator<Item = u32> {
        self.blocks.union(&self.syncing).copied()
    }
}

impl Layout {
    /// Of a file without blocks: all that is written is written from now on.
    pub(in crate::fs_file) fn without_blocks(attr: &Attr) -> Self {
        let mut layout = Self::new(attr, Vec::new(), None);
        layout.is_on_disks();
        layout
    }

    /// Takes out the blocks that are to be synced: what is written from now on is for the next sync.
    pub(in crate::fs_file) fn begin_sync(&mut self) -> Vec<u32> {
        let mut blocks = std::mem::take(&mut self.unsynced.blocks);
        // Should it fail, all of them are noted.
        if !std::mem::replace(&mut self.unsynced.is_tracked, true) {
            blocks.extend(self.blocks.keys());
        }
        self.unsynced.syncing.clone_from(&blocks);
        blocks.into_iter().collect()
    }

    /// Those blocks, as long as they are known.
    pub(in crate::fs_file) fn to_be_synced(&self) -> Option<impl Iterator<Item = u32>> {
        self.unsynced.is_tracked.then(|| self.unsynced.all())
    }

    /// They could not be synced by whoever had not begun a sync of the file.
    pub(in crate::fs_file) fn must_be_synced(&mut self, blocks: &[u32]) {
        self.unsynced.blocks.extend(blocks);
        self.revision += 1;
    }

    pub(in crate::fs_file) fn sync_failed(&mut self, blocks: &[u32]) {
        self.must_be_synced(blocks);
        self.unsynced.syncing.clear();
    }

    /// They are on disks.
    pub(in crate::fs_file) fn synced(&mut self) {
        self.unsynced.syncing.clear();
        self.revision += 1;
    }

    /// The version of the content, when all of it is on disks.
    pub(in crate::fs_file) fn version_on_disks(&self) -> Option<u64> {
        let is_on_disks = self.unsynced.is_tracked && self.unsynced.is_empty();
        (is_on_disks && self.is_committed()).then_some(self.version())
    }

    /// All that the master knows is on disks, as it was when the file was closed here.
    pub(in crate::fs_file) fn is_on_disks(&mut self) {
        self.unsynced.is_tracked = true;
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::super::EventHistory;
    use super::super::tests::{attr, extent};
    use super::*;

    #[test]
    fn a_block_that_is_written_while_it_is_synced_is_synced_again() {
        let mut layout = Layout::without_blocks(&attr(0, 0, 1));
        layout.wrote(3, 10, 1);
        let syncing = layout.begin_sync();
        layout.wrote(3, 10, 2);
        assert_eq!(syncing, [3]);
        let syncing = layout.begin_sync();
        layout.sync_failed(&syncing);
        assert_eq!((syncing, layout.begin_sync(), layout.begin_sync()), (vec![3], vec![3], vec![]));
        layout.synced();
        layout.must_be_synced(&[3]);
        assert!(layout.to_be_synced().unwrap().eq([3]) && layout.begin_sync() == [3]);
        assert!(layout.to_be_synced().unwrap().eq([3]), "as long as the sync is under way");
    }

    #[test]
    fn what_was_written_before_or_by_others_is_synced_once() {
        let mut layout = Layout::default();
        let opened = |version| Layout::new(&attr(10, version, 2), vec![extent(0, 1), extent(1, 1)], None);
        layout.rebase(opened(4), EventHistory::Complete);
        assert!(layout.version_on_disks().is_none() && layout.to_be_synced().is_none());
        layout.wrote(1, 10, 1);
        assert_eq!((layout.begin_sync(), layout.begin_sync()), (vec![0, 1], vec![]));
        layout.wrote(1, 10, 2);
        assert!(layout.begin_commit().is_some());
        assert!(layout.committed(&[], &attr(10, 5, 2)));
        layout.rebase(opened(5), EventHistory::Complete);
        assert_eq!((layout.begin_sync(), layout.version_on_disks()), (vec![1], None));
        layout.synced();
        assert_eq!(layout.version_on_disks(), Some(5));
        layout.rebase(opened(6), EventHistory::Complete);
        assert_eq!((layout.begin_sync(), layout.begin_sync()), (vec![0, 1], vec![]));
        layout.wrote(0, 10, 3);
        assert!(layout.begin_commit().is_some());
        assert!(!layout.committed(&[], &attr(10, 8, 2)), "somebody else has written as well");
        let syncing: BTreeSet<u32> = layout.begin_sync().into_iter().collect();
        assert_eq!(syncing, BTreeSet::from([0, 1]));
    }
}
