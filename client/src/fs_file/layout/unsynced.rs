//! Which blocks of a file may not be on the disks of their workers.
//!
//! What is written while a file is open here is known. What was written before, or by somebody else, is not: whoever
//! syncs the file wants that on disk as well, so the first sync is one of all blocks. A worker finds out quickly that
//! it has nothing to do.

use cavern_proto::master::Attr;

use super::Layout;

impl Layout {
    /// Of a file without blocks: all that is written is written from now on.
    pub(in crate::fs_file) fn without_blocks(attr: &Attr) -> Self {
        Self { is_tracked: true, ..Self::new(attr, Vec::new(), None) }
    }

    /// Takes out the blocks that are to be synced: what is written from now on is for the next sync.
    pub(in crate::fs_file) fn begin_sync(&mut self) -> Vec<u32> {
        let mut blocks = std::mem::take(&mut self.unsynced);
        if !self.is_tracked {
            blocks.extend(self.blocks.keys());
            // Should it fail, all of them are noted.
            self.is_tracked = true;
        }
        self.syncing.clone_from(&blocks);
        blocks.into_iter().collect()
    }

    /// Those blocks, as long as they are known.
    pub(in crate::fs_file) fn to_be_synced(&self) -> Option<impl Iterator<Item = u32>> {
        self.is_tracked.then(|| self.unsynced.union(&self.syncing).copied())
    }

    /// They could not be synced by whoever had not begun a sync of the file.
    pub(in crate::fs_file) fn must_be_synced(&mut self, blocks: &[u32]) {
        self.unsynced.extend(blocks);
        self.revision += 1;
    }

    pub(in crate::fs_file) fn sync_failed(&mut self, blocks: &[u32]) {
        self.unsynced.extend(blocks);
        self.syncing.clear();
        self.revision += 1;
    }

    /// They are on disks.
    pub(in crate::fs_file) fn synced(&mut self) {
        self.syncing.clear();
        self.revision += 1;
    }

    /// The version of the content, when all of it is on disks.
    pub(in crate::fs_file) fn version_on_disks(&self) -> Option<u64> {
        let is_on_disks = self.is_tracked && self.unsynced.is_empty() && self.syncing.is_empty();
        (is_on_disks && self.is_committed()).then_some(self.version)
    }

    /// All that the master knows is on disks, as it was when the file was closed here.
    pub(in crate::fs_file) fn is_on_disks(&mut self) {
        self.is_tracked = true;
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::super::EventHistory;
    use super::super::tests::{attr, extent, parts};
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
        let (sent, _) = parts(layout.begin_commit().unwrap());
        assert!(layout.committed(&sent, &[], &attr(10, 5, 2)));
        layout.rebase(opened(5), EventHistory::Complete);
        assert_eq!((layout.begin_sync(), layout.version_on_disks()), (vec![1], None));
        layout.synced();
        assert_eq!(layout.version_on_disks(), Some(5));
        layout.rebase(opened(6), EventHistory::Complete);
        assert_eq!((layout.begin_sync(), layout.begin_sync()), (vec![0, 1], vec![]));
        layout.wrote(0, 10, 3);
        let (sent, _) = parts(layout.begin_commit().unwrap());
        assert!(!layout.committed(&sent, &[], &attr(10, 8, 2)), "somebody else has written as well");
        let syncing: BTreeSet<u32> = layout.begin_sync().into_iter().collect();
        assert_eq!(syncing, BTreeSet::from([0, 1]));
    }
}
