//! What stays known of a file's content when nobody has it open, as small as it can be.

use cavern_proto::master::Origin;

use super::unsynced::Unsynced;
use super::{Committed, Layout, LocatedBlock};

/// Of files with more blocks nothing stays known: they are read for so long that a question does not matter.
const BLOCKS_MAX: usize = 16;

/// The layout of a file that nobody has open, as small as it can be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::fs_file) struct CompactLayout {
    committed: Committed,
    origin: Option<Box<Origin>>,
    blocks: Box<[(u32, LocatedBlock)]>,
    is_on_disks: bool,
}

impl Layout {
    /// What is known, if it is all that the master knows as well.
    pub(in crate::fs_file) fn known(&self) -> Option<CompactLayout> {
        let is_settled = |known: &LocatedBlock| known.is_committed && known.is_open_to_writes();
        if !self.is_committed() || self.blocks.len() > BLOCKS_MAX || !self.blocks.values().all(is_settled) {
            return None;
        }
        Some(CompactLayout {
            committed: Committed { size: self.size, ..self.committed },
            origin: self.origin.clone().map(Box::new),
            blocks: self.blocks.iter().map(|(index, known)| (*index, known.clone())).collect(),
            is_on_disks: self.version_on_disks().is_some(),
        })
    }
}

impl CompactLayout {
    /// Index, generation and workers of the only block of a file that has nothing else.
    pub(in crate::fs_file) fn only_block(&self) -> Option<(u32, u32, &[u64])> {
        match &*self.blocks {
            [(index, known)] if self.origin.is_none() => Some((*index, known.generation, &known.workers)),
            _ => None,
        }
    }
}

impl From<CompactLayout> for Layout {
    fn from(known: CompactLayout) -> Self {
        let CompactLayout { committed, origin, blocks, is_on_disks } = known;
        Self {
            committed,
            size: committed.size,
            blocks: blocks.into_iter().collect(),
            origin: origin.map(|origin| *origin),
            unsynced: Unsynced { is_tracked: is_on_disks, ..Unsynced::default() },
            ..Self::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{attr, extent};
    use super::*;

    #[test]
    fn a_layout_that_is_known_is_the_same_when_the_file_is_opened_again() {
        let origin = Origin { key: "k".into(), etag: "e".into(), length: 20, valid: 20, version: 2 };
        let layout = Layout::new(&attr(35, 4, 1), vec![extent(0, 1), extent(3, 1)], Some(origin));
        let again = Layout::from(layout.known().unwrap());
        assert_eq!(format!("{again:?}"), format!("{layout:?}"));
        let mut synced = layout;
        synced.begin_sync();
        synced.synced();
        assert_eq!(Layout::from(synced.known().unwrap()).version_on_disks(), Some(4));
    }

    #[test]
    fn what_the_master_does_not_know_is_not_known_when_the_file_is_closed() {
        let mut layout = Layout::without_blocks(&attr(0, 1, 1));
        layout.made(0, layout.next_generation(), vec![1]);
        layout.wrote(0, 10, 1);
        assert_eq!(layout.known(), None);
        assert!(layout.begin_commit().is_some());
        assert_eq!(layout.known(), None, "it is under way");
        assert!(layout.committed(&[], &attr(10, 2, 1)));
        assert!(layout.known().is_some_and(|known| !known.is_on_disks));
        layout.gave_up(0, 1, &[]);
        let copied = Layout::new(&attr(10, 2, 1), Vec::new(), None);
        assert!(copied.known().is_some());
        let many = (0..=BLOCKS_MAX as u32).map(|index| extent(index, 1)).collect();
        assert_eq!(Layout::new(&attr(10, 2, 1), many, None).known(), None);
    }
}
