//! A layout as the journal has it: what the process after this one must know of a file.

use std::collections::BTreeSet;

use cavern_proto::journal::{BlockRecord, ContentRecord};

use super::{Committed, Layout, LocatedBlock, Uncommitted};

impl Layout {
    /// Whether the master knows everything, and disks have it.
    pub(in crate::fs_file) fn is_settled(&self) -> bool {
        self.is_committed() && self.unsynced.is_empty()
    }

    /// What the master does not know, or disks may not have; `None` for nothing.
    pub(in crate::fs_file) fn record(&self, inode: u64) -> Option<ContentRecord> {
        if self.is_settled() {
            return None;
        }
        let (now, none) = (&self.uncommitted, Uncommitted::default());
        let sent = self.in_flight.as_ref().unwrap_or(&none);
        let made: BTreeSet<u32> = now.made.union(&sent.made).copied().collect();
        let written: BTreeSet<u32> = now.written.union(&sent.written).copied().collect();
        let block = |index: &u32| {
            let (known, is_written) = (self.blocks.get(index)?, written.contains(index));
            // Nothing was answered for that was written to the one that takes the place of another: to the next process
            // it was never made.
            let (known, is_other) = known.replaces.as_deref().map_or((known, false), |before| (before, true));
            (is_written || !is_other).then(|| BlockRecord {
                index: *index,
                generation: known.generation,
                workers: known.workers.clone(),
                joined: known.joined.clone(),
                is_made: made.contains(index) && !is_other,
                is_written,
                is_urgent: known.is_urgent,
                is_committed: known.is_committed,
            })
        };
        Some(ContentRecord {
            inode,
            size: self.size,
            grow_to: now.grow_to.max(sent.grow_to),
            changed: now.changed || sent.changed,
            written_ns: self.written_ns,
            generation: self.generation(),
            blocks: made.union(&written).filter_map(block).collect(),
            unsynced: self.unsynced.all().collect(),
        })
    }

    /// As another process had it; to be laid over what the master has by [`rebase`](Self::rebase).
    pub(in crate::fs_file) fn of_record(record: &ContentRecord) -> Self {
        let committed = Committed { generation: record.generation, ..Committed::default() };
        let mut layout = Self { committed, size: record.size, revision: 1, ..Self::default() };
        for block in &record.blocks {
            let BlockRecord { index, generation, is_urgent, is_committed, .. } = *block;
            let (workers, joined) = (block.workers.clone(), block.joined.clone());
            let known = LocatedBlock { is_committed, is_urgent, ..LocatedBlock::new(generation, workers, joined) };
            layout.blocks.insert(index, known);
            if block.is_made {
                layout.uncommitted.made.insert(index);
            }
            if block.is_written {
                layout.uncommitted.written.insert(index);
            }
        }
        (layout.uncommitted.changed, layout.uncommitted.grow_to) = (record.changed, record.grow_to);
        layout.written_ns = record.written_ns;
        layout.unsynced.blocks = record.unsynced.iter().copied().collect();
        layout
    }
}

#[cfg(test)]
mod tests {
    use cavern_proto::data::BlockRef;
    use cavern_proto::master::Extent;

    use super::super::EventHistory;
    use super::super::tests::{attr, extent};
    use super::*;
    use crate::fs_file::block::{OpenBlock, Replica};

    #[tokio::test]
    async fn another_process_lays_what_was_written_over_what_the_master_has() {
        let mut layout = Layout::new(&attr(10, 4, 2), vec![extent(0, 1)], None);
        assert_eq!(layout.record(9), None);
        layout.wrote(0, 10, 54);
        layout.made(1, layout.next_generation(), vec![7, 8]);
        layout.wrote(1, 20, 55);
        let before = layout.revision();
        layout.wrote(1, 20, 56);
        assert_eq!(layout.revision(), before, "it says the same");
        let record = layout.record(9).unwrap();
        // What is on its way to the master is not there yet.
        assert!(layout.begin_commit().is_some());
        assert_eq!(layout.record(9).unwrap().blocks, record.blocks);

        let mut next = Layout::of_record(&record);
        let as_before = Layout::new(&attr(10, 4, 2), vec![extent(0, 1)], None);
        assert!(next.rebase(as_before, EventHistory::MayHaveGaps).is_empty());
        assert_eq!((next.size(), next.block(1).unwrap().workers.as_slice()), (20, &[7, 8][..]));
        let commit = next.begin_commit().unwrap();
        let indexes: Vec<_> = commit.extents.iter().map(|extent| extent.index).collect();
        assert_eq!((commit.grow_to, indexes, next.begin_sync()), (20, vec![0, 1], vec![0, 1]));

        // The commit had been made.
        let mut next = Layout::of_record(&record);
        let made = Extent { index: 1, generation: 2, workers: vec![7, 8], ..Extent::default() };
        let committed = Layout::new(&attr(20, 5, 2), vec![extent(0, 1), made], None);
        assert!(next.rebase(committed, EventHistory::MayHaveGaps).is_empty());
        assert_eq!(next.size(), 20);

        // In the place of one that a view has another is being made: that was answered for by nobody.
        let mut frozen = Layout::new(&attr(10, 4, 2), vec![extent(0, 1), extent(1, 2)], None);
        frozen.wrote(0, 30, 57);
        frozen.makes_from(8);
        for (index, before) in [(0, 1), (1, 2)] {
            let replica = Replica { worker: 1, joined: 0, incarnation: 1, file: None, allocated: None };
            let open = OpenBlock::to_read(BlockRef::default(), 8, vec![replica]);
            assert!(frozen.replaced(index, before, &open, 58));
        }
        let record = frozen.record(9).unwrap();
        let blocks: Vec<_> = record.blocks.iter().map(|block| (block.index, block.generation, block.is_made)).collect();
        assert_eq!(blocks, [(0, 1, false)]);
        // Whether the master has got to know it or not.
        for generation in [1, 8] {
            let known = Layout::new(&attr(10, 5, 2), vec![extent(0, generation), extent(1, generation.max(2))], None);
            let mut next = Layout::of_record(&record);
            assert!(next.rebase(known, EventHistory::MayHaveGaps).is_empty());
            assert_eq!((next.size(), next.block(0).unwrap().generation), (30, generation));
        }

        assert!(layout.committed(&[], &attr(20, 5, 2)));
        assert_eq!(layout.record(9).unwrap().unsynced, [0, 1], "and disks may not have it");
        layout.begin_sync();
        assert_eq!(layout.record(9).unwrap().unsynced, [0, 1], "nor while it is being synced");
        layout.synced();
        assert_eq!(layout.record(9), None);
    }
}
