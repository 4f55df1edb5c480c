//! Blocks that take the place of those that a view has, until the master knows them.

use super::{Layout, LocatedBlock, OpenBlock};

impl LocatedBlock {
    /// Whether it has begun as the block of this generation.
    pub(super) fn began_as(&self, generation: u32) -> bool {
        self.replaces.as_ref().is_some_and(|before| before.generation == generation)
    }

    /// Gives its place back to the one that it began as; false where that was none.
    pub(super) fn give_way(&mut self) -> bool {
        let Some(before) = self.replaces.take() else { return false };
        *self = *before;
        true
    }
}

impl Layout {
    /// An open block has begun with what one of this generation has, and takes its place; false when another has that
    /// by now, or the master does not know it as it is.
    pub(in crate::fs_file) fn replaced(&mut self, index: u32, before: u32, made: &OpenBlock, now_ns: i64) -> bool {
        let takes = self.takes(made.generation) && made.generation > before;
        let is_it = |known: &&mut LocatedBlock| takes && known.is_committed && known.generation == before;
        let Some(known) = self.blocks.get_mut(&index).filter(is_it) else { return false };
        let (workers, joined) = made.replicas.iter().map(|replica| (replica.worker, replica.joined)).unzip();
        let (is_urgent, replaces, allocated) = (true, Some(Box::new(known.clone())), known.allocated);
        *known = LocatedBlock { is_urgent, replaces, allocated, ..LocatedBlock::new(made.generation, workers, joined) };
        self.uncommitted.made.insert(index);
        (self.uncommitted.changed, self.written_ns) = (true, now_ns);
        self.revision += 1;
        true
    }

    /// What has begun as another block, and the master does not know, gives that one its place back. Whether there was
    /// any.
    pub(in crate::fs_file) fn give_up_replacements(&mut self) -> bool {
        let Self { blocks, uncommitted, .. } = self;
        let before = uncommitted.made.len();
        uncommitted.made.retain(|index| !blocks.get_mut(index).is_some_and(LocatedBlock::give_way));
        self.revision += 1;
        self.uncommitted.made.len() < before
    }
}

#[cfg(test)]
mod tests {
    use cavern_proto::data::BlockRef;
    use cavern_proto::master::Extent;

    use super::super::EventHistory;
    use super::super::tests::{at, attr};
    use super::*;
    use crate::fs_file::block::Replica;

    fn open(generation: u32, replicas: &[(u64, u32)]) -> OpenBlock {
        let replica = |(worker, joined): &(u64, u32)| Replica {
            worker: *worker,
            joined: *joined,
            incarnation: 1,
            file: None,
            allocated: None,
        };
        OpenBlock::to_read(BlockRef::default(), generation, replicas.iter().map(replica).collect())
    }

    /// A file whose block a view has that began with generation 5, and the block that takes its place.
    fn frozen() -> (Layout, Extent) {
        let mut layout = at(&[1, 2], &[0, 3]);
        layout.wrote(0, 10, 1);
        layout.makes_from(5);
        assert!(layout.replaced(0, 1, &open(5, &[(1, 0), (2, 3)]), 2));
        let (workers, joined, replaces) = (vec![1, 2], vec![0, 3], Some(1));
        (layout, Extent { generation: 5, workers, joined, replaces, ..Extent::default() })
    }

    #[tokio::test]
    async fn a_frozen_block_is_replaced_before_a_write_is_acknowledged() {
        let (mut layout, made) = frozen();
        assert!(layout.is_urgent(0) && !layout.accepts(0, 5, &[1, 2]) && !layout.accepts(0, 1, &[1, 2]));
        for (generation, before, why) in [(5, 1, "it is another by now"), (9, 5, "no such generation has begun")] {
            assert!(!layout.replaced(0, before, &open(generation, &[(1, 0)]), 3), "{why}");
        }
        let batch = layout.begin_commit().unwrap();
        assert!(batch.changed);
        assert_eq!(batch.extents, std::slice::from_ref(&made));
        layout.commit_failed();
        let batch = layout.begin_commit().unwrap();
        assert_eq!(batch.extents, [made], "as long as the master does not know it");
        assert!(layout.committed(&batch.extents, &attr(10, 2, 1)));
        assert!(layout.accepts(0, 5, &[1, 2]) && !layout.is_urgent(0));
        layout.wrote(0, 10, 4);
        assert_eq!(layout.begin_commit().unwrap().extents[0].replaces, None);
        assert!(layout.committed(&[], &attr(10, 3, 1)));
        // And once more, for another view.
        layout.makes_from(7);
        assert!(layout.replaced(0, 5, &open(7, &[(2, 3)]), 5));
        let again = layout.begin_commit().unwrap().extents;
        assert_eq!((again[0].generation, again[0].replaces, &again[0].workers[..]), (7, Some(5), &[2][..]));
    }

    #[tokio::test]
    async fn what_takes_the_place_of_a_frozen_block_is_laid_over_what_the_master_has() {
        let known = |generation, workers: &[u64], joined: &[u32]| {
            let (workers, joined) = (workers.to_vec(), joined.to_vec());
            Layout::new(&attr(10, 2, 1), vec![Extent { generation, workers, joined, ..Extent::default() }], None)
        };
        // Its next generation is that of before.
        let (mut layout, made) = frozen();
        assert!(layout.rebase(known(1, &[1, 2], &[0, 3]), EventHistory::Complete).is_empty());
        assert_eq!(layout.begin_commit().unwrap().extents, std::slice::from_ref(&made));
        // A replica of the frozen one was given up meanwhile.
        let (mut layout, _) = frozen();
        assert!(layout.rebase(known(1, &[1], &[0]), EventHistory::Complete).is_empty());
        assert_eq!(layout.begin_commit().unwrap().extents, [Extent { workers: vec![1], joined: vec![], ..made }]);
        // Another client has made the same.
        let (mut layout, _) = frozen();
        assert!(layout.rebase(known(5, &[1, 2], &[0, 3]), EventHistory::Complete).is_empty());
        assert_eq!(layout.begin_commit().unwrap().extents[0].replaces, None);
        // The frozen one is another, or gone.
        let (layout, _) = frozen();
        let none = Layout::new(&attr(10, 2, 1), vec![], None);
        for other in [known(3, &[1, 2], &[0, 3]), known(1, &[8], &[0]), none] {
            assert_eq!(layout.clone().rebase(other, EventHistory::Complete), [0]);
        }

        // What was written to a frozen block is in the one that another client has made of it.
        let mut written = at(&[1, 2], &[]);
        written.wrote(0, 15, 1);
        let (mut cut, mut cut_off) = (written.clone(), written.clone());
        assert!(written.rebase(known(5, &[1, 2], &[]), EventHistory::Complete).is_empty());
        assert_eq!((written.size(), written.begin_commit().unwrap().grow_to), (15, 15));
        let others = Extent { generation: 5, workers: vec![1], ..Extent::default() };
        let others = Layout::new(&attr(10, 3, 4), vec![others], None);
        assert_eq!(cut.rebase(others, EventHistory::Complete), [0], "the file was cut before");
        let others = known(5, &[1, 2], &[]);
        assert_eq!(cut_off.rebase(others, EventHistory::MayHaveGaps), [0], "it may have been written to later");
    }

    #[tokio::test]
    async fn what_does_not_take_the_place_of_a_frozen_block_gives_it_back() {
        let (mut layout, _) = frozen();
        layout.made(1, 5, vec![1]);
        assert_eq!(layout.begin_commit().unwrap().extents.len(), 2);
        layout.commit_failed();
        assert!(layout.give_up_replacements() && !layout.give_up_replacements());
        assert!(layout.accepts(0, 1, &[1, 2]) && !layout.is_urgent(0));
        let extents = layout.begin_commit().unwrap().extents;
        let said: Vec<_> = extents.iter().map(|extent| (extent.index, extent.generation, extent.replaces)).collect();
        assert_eq!(said, [(0, 1, None), (1, 5, None)], "what is answered for is committed still");
        let (mut layout, _) = frozen();
        layout.forget_uncommitted();
        assert_eq!(layout.block(0).map(|known| known.generation), Some(1));
    }
}
