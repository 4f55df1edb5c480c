//! What is known of one file's content: its length, its blocks, and what the master has not been told yet.
//!
//! No I/O. The master's answer is the ground; what was written here lies over it until it is committed. A block is named by
//! its generation: what the master has dropped meanwhile is not found under another generation again.

use std::collections::{BTreeMap, BTreeSet};

use cavern_proto::content::block_length;
use cavern_proto::master::{Attr, Extent, Origin};

/// One block of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Known {
    pub generation: u32,
    /// The workers that have it.
    pub workers: Vec<u64>,
    /// The master knows it.
    pub is_committed: bool,
}

/// What the master is to be told.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Uncommitted {
    /// Blocks that were made, or whose workers have changed.
    pub made: BTreeSet<u32>,
    /// Blocks that the master knows, and that were written to.
    pub touched: BTreeSet<u32>,
    /// Bytes changed.
    pub changed: bool,
    /// The file reaches at least so far.
    pub grow_to: u64,
}

impl Uncommitted {
    fn is_none(&self) -> bool {
        self.made.is_empty() && !self.changed
    }
}

/// See the module.
#[derive(Clone, Debug, Default)]
pub(super) struct Layout {
    size: u64,
    /// As the master has it.
    committed_size: u64,
    version: u64,
    /// Of the blocks that are made next.
    generation: u32,
    blocks: BTreeMap<u32, Known>,
    /// The object that has what no block has.
    origin: Option<Origin>,
    uncommitted: Uncommitted,
    /// The master is being told of something.
    is_telling: bool,
    /// When bytes were last written that are not committed; nanoseconds since the epoch.
    written_ns: i64,
    /// Blocks that may not be on the disks of their workers.
    unsynced: BTreeSet<u32>,
}

impl Layout {
    /// As the master has it.
    pub(super) fn new(attr: &Attr, extents: Vec<Extent>, origin: Option<Origin>) -> Self {
        let known = |extent: Extent| {
            let Extent { index, generation, workers } = extent;
            (index, Known { generation, workers, is_committed: true })
        };
        let blocks = extents.into_iter().map(known).collect();
        let (size, version, generation) = (attr.size, attr.version, attr.generation);
        Self { size, committed_size: size, version, generation, blocks, origin, ..Self::default() }
    }

    /// Bytes of the file, with what was written here.
    pub(super) fn size(&self) -> u64 {
        self.size
    }

    pub(super) fn version(&self) -> u64 {
        self.version
    }

    pub(super) fn generation(&self) -> u32 {
        self.generation
    }

    pub(super) fn block(&self, index: u32) -> Option<&Known> {
        self.blocks.get(&index)
    }

    pub(super) fn origin(&self) -> Option<&Origin> {
        self.origin.as_ref()
    }

    /// How many bytes a block has, from its first on, where it is not there; the rest is zeros.
    pub(super) fn origin_bytes(&self, index: u32, block_size: u64) -> u32 {
        self.origin.as_ref().map_or(0, |origin| block_length(origin.valid, block_size, index))
    }

    /// Whether the master knows blocks: these it may drop when the bucket has them.
    pub(super) fn has_committed(&self) -> bool {
        self.blocks.values().any(|known| known.is_committed)
    }

    /// When bytes were last written, should the master not know of it yet.
    pub(super) fn written_ns(&self) -> Option<i64> {
        (!self.is_committed()).then_some(self.written_ns)
    }

    /// Whether the master knows everything.
    pub(super) fn is_committed(&self) -> bool {
        self.uncommitted.is_none() && !self.is_telling
    }

    /// Bytes by which the file is longer than the master knows.
    pub(super) fn growth(&self) -> u64 {
        self.size.saturating_sub(self.committed_size)
    }

    /// A block has been made, or its workers have changed.
    pub(super) fn made(&mut self, index: u32, workers: Vec<u64>) {
        let generation = self.blocks.get(&index).map_or(self.generation, |known| known.generation);
        self.blocks.insert(index, Known { generation, workers, is_committed: false });
        self.uncommitted.made.insert(index);
    }

    /// Bytes of a block were changed; the file reaches at least to `end`.
    pub(super) fn wrote(&mut self, index: u32, end: u64, now_ns: i64) {
        self.unsynced.insert(index);
        if self.blocks.get(&index).is_some_and(|known| known.is_committed) {
            self.uncommitted.touched.insert(index);
        }
        self.grew(end, now_ns);
    }

    /// The file reaches at least to `end`.
    pub(super) fn grew(&mut self, end: u64, now_ns: i64) {
        self.size = self.size.max(end);
        self.uncommitted.grow_to = self.uncommitted.grow_to.max(end);
        self.uncommitted.changed = true;
        self.written_ns = now_ns;
    }

    /// Blocks that were synced, as far as they were not written again: the caller has taken them out before it asked.
    pub(super) fn begin_sync(&mut self) -> Vec<u32> {
        std::mem::take(&mut self.unsynced).into_iter().collect()
    }

    pub(super) fn sync_failed(&mut self, blocks: &[u32]) {
        self.unsynced.extend(blocks);
    }

    /// What the master is to be told now; `None` when it knows everything.
    pub(super) fn begin_commit(&mut self) -> Option<(Uncommitted, Vec<Extent>, Vec<Extent>)> {
        if self.uncommitted.is_none() {
            return None;
        }
        let uncommitted = std::mem::take(&mut self.uncommitted);
        let extent = |index: &u32| {
            let known = self.blocks.get(index)?;
            Some(Extent { index: *index, generation: known.generation, workers: known.workers.clone() })
        };
        let made = uncommitted.made.iter().filter_map(extent).collect();
        let touched = uncommitted.touched.iter().filter_map(extent);
        let touched = touched.map(|touched| Extent { workers: Vec::new(), ..touched }).collect();
        self.is_telling = true;
        Some((uncommitted, made, touched))
    }

    /// The master could not be told.
    pub(super) fn commit_failed(&mut self, uncommitted: Uncommitted) {
        self.is_telling = false;
        self.uncommitted.made.extend(uncommitted.made);
        self.uncommitted.touched.extend(uncommitted.touched);
        self.uncommitted.changed |= uncommitted.changed;
        self.uncommitted.grow_to = self.uncommitted.grow_to.max(uncommitted.grow_to);
    }

    /// The master was told; false when somebody else has changed the content meanwhile, so that it must be asked anew.
    pub(super) fn committed(&mut self, uncommitted: &Uncommitted, attr: &Attr) -> bool {
        self.is_telling = false;
        for index in uncommitted.made.difference(&self.uncommitted.made) {
            if let Some(known) = self.blocks.get_mut(index) {
                known.is_committed = true;
            }
        }
        let is_next = attr.version == self.version + 1;
        self.version = attr.version;
        self.size = self.size.max(attr.size);
        self.committed_size = attr.size;
        is_next
    }

    /// The file is about to be cut to this length: what the master does not know beyond it need not be told any more.
    pub(super) fn give_up_beyond(&mut self, length: u64, block_size: u64) {
        let kept = length.div_ceil(block_size.max(1));
        for index in self.uncommitted.made.iter().copied().filter(|index| u64::from(*index) >= kept) {
            if self.blocks.get(&index).is_some_and(|known| !known.is_committed) {
                self.blocks.remove(&index);
                self.unsynced.remove(&index);
            }
        }
        self.uncommitted.made.retain(|index| self.blocks.contains_key(index));
        self.uncommitted.grow_to = self.uncommitted.grow_to.min(length);
        self.size = self.size.min(length);
    }

    /// The blocks that the master does not know, for it to know them without letting the file grow.
    pub(super) fn begin_blocks(&mut self) -> (Uncommitted, Vec<Extent>, Vec<Extent>) {
        let Uncommitted { changed, grow_to, .. } = self.uncommitted;
        let begun = self.begin_commit().unwrap_or_default();
        self.uncommitted = Uncommitted { changed, grow_to, ..Uncommitted::default() };
        begun
    }

    /// The master has given the file another length: blocks from there on are gone. Nothing is uncommitted then.
    pub(super) fn cut(&mut self, attr: &Attr, block_size: u64) -> bool {
        let is_next = attr.version == self.version + 1;
        let kept = attr.size.div_ceil(block_size.max(1));
        self.blocks.retain(|index, _| u64::from(*index) < kept);
        self.unsynced.retain(|index| u64::from(*index) < kept);
        if let Some(origin) = &mut self.origin {
            origin.valid = origin.valid.min(attr.size);
        }
        (self.size, self.version, self.generation) = (attr.size, attr.version, attr.generation);
        self.committed_size = attr.size;
        is_next
    }

    /// Puts what was written here over what the master has now; gives the blocks that were made here and have no place any
    /// more, since somebody else has cut the file, or has made the same block at other workers; and those that were written to
    /// here and have been dropped, since the bucket had them.
    pub(super) fn rebase(&mut self, mut fresh: Self, block_size: u64) -> Vec<u32> {
        let mut lost = Vec::new();
        for index in std::mem::take(&mut self.uncommitted.touched) {
            let generation = |layout: &Self| layout.blocks.get(&index).map(|known| known.generation);
            if generation(&fresh) == generation(self) {
                fresh.uncommitted.touched.insert(index);
            } else if fresh.origin_bytes(index, block_size) > 0 {
                lost.push(index);
            }
        }
        for index in std::mem::take(&mut self.uncommitted.made) {
            let Some(own) = self.blocks.get(&index) else { continue };
            let is_current = match fresh.blocks.get(&index) {
                Some(known) => {
                    own.generation == known.generation
                        && own.workers.iter().all(|worker| known.workers.contains(worker))
                }
                None => own.generation == fresh.generation,
            };
            if is_current {
                fresh.blocks.insert(index, own.clone());
                fresh.uncommitted.made.insert(index);
            } else {
                lost.push(index);
            }
        }
        if self.uncommitted.changed {
            fresh.uncommitted.changed = true;
            fresh.written_ns = self.written_ns;
            if lost.is_empty() {
                fresh.uncommitted.grow_to = self.uncommitted.grow_to;
                fresh.size = fresh.size.max(self.uncommitted.grow_to);
            }
        }
        fresh.unsynced = std::mem::take(&mut self.unsynced);
        fresh.unsynced.retain(|index| fresh.blocks.contains_key(index));
        *self = fresh;
        lost
    }

    /// Gives up what the master cannot be told any more.
    pub(super) fn forget_uncommitted(&mut self) {
        for index in std::mem::take(&mut self.uncommitted).made {
            if self.blocks.get(&index).is_some_and(|known| !known.is_committed) {
                self.blocks.remove(&index);
                self.unsynced.remove(&index);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn attr(size: u64, version: u64, generation: u32) -> Attr {
        Attr { size, version, generation, ..Attr::default() }
    }

    fn extent(index: u32, generation: u32) -> Extent {
        Extent { index, generation, workers: vec![1] }
    }

    #[test]
    fn what_is_written_is_committed_once() {
        let mut layout = Layout::new(&attr(0, 4, 2), vec![], None);
        assert!(layout.begin_commit().is_none());
        layout.made(0, vec![7, 8]);
        layout.wrote(0, 100, 55);
        assert_eq!((layout.size(), layout.written_ns()), (100, Some(55)));
        let (told, made, _) = layout.begin_commit().unwrap();
        assert_eq!((told.grow_to, made), (100, vec![Extent { index: 0, generation: 2, workers: vec![7, 8] }]));
        assert!(layout.begin_commit().is_none() && layout.written_ns().is_some(), "the master has not answered yet");
        layout.commit_failed(told);
        let (told, ..) = layout.begin_commit().unwrap();
        assert!(layout.committed(&told, &attr(100, 5, 2)));
        assert!(layout.is_committed() && layout.block(0).unwrap().is_committed);
        layout.wrote(0, 50, 56);
        let (told, made, _) = layout.begin_commit().unwrap();
        assert_eq!((told.grow_to, made), (50, vec![]));
        assert!(!layout.committed(&told, &attr(300, 9, 2)), "others have committed as well");
        assert_eq!((layout.size(), layout.version()), (300, 9));
    }

    #[test]
    fn a_block_that_is_written_while_it_is_synced_is_synced_again() {
        let mut layout = Layout::new(&attr(0, 0, 1), vec![], None);
        layout.wrote(3, 10, 1);
        let syncing = layout.begin_sync();
        layout.wrote(3, 10, 2);
        assert_eq!(syncing, [3]);
        let syncing = layout.begin_sync();
        layout.sync_failed(&syncing);
        assert_eq!((syncing, layout.begin_sync(), layout.begin_sync()), (vec![3], vec![3], vec![]));
    }

    #[test]
    fn a_cut_drops_blocks_and_later_ones_have_another_generation() {
        let mut layout = Layout::new(&attr(35, 1, 1), vec![extent(0, 1), extent(3, 1)], None);
        assert!(layout.cut(&attr(15, 2, 2), 10));
        assert_eq!((layout.size(), layout.block(0).is_some(), layout.block(3)), (15, true, None));
        layout.made(3, vec![2]);
        assert_eq!(layout.block(3).unwrap().generation, 2);
        layout.made(0, vec![2]);
        assert_eq!(layout.block(0).unwrap().generation, 1, "it is the same block at another worker");
    }

    #[test]
    fn what_a_cut_takes_away_need_not_be_told() {
        let mut layout = Layout::new(&attr(15, 1, 1), vec![extent(0, 1), extent(1, 1)], None);
        layout.wrote(1, 20, 1);
        layout.made(2, vec![1]);
        layout.wrote(2, 30, 2);
        layout.made(3, vec![1]);
        layout.wrote(3, 40, 3);
        assert_eq!(layout.growth(), 25);
        layout.give_up_beyond(22, 10);
        let (told, made, ..) = layout.begin_commit().unwrap();
        assert_eq!((told.grow_to, made.len(), layout.size(), layout.block(3)), (22, 1, 22, None));
        assert_eq!(layout.begin_sync(), [1, 2]);
        assert!(layout.committed(&told, &attr(22, 2, 1)));
        assert_eq!(layout.growth(), 0);
    }

    #[test]
    fn blocks_can_be_known_though_the_file_must_not_grow() {
        let mut layout = Layout::new(&attr(5, 1, 1), vec![extent(0, 1)], None);
        layout.made(1, vec![1]);
        layout.wrote(1, 20, 1);
        let (told, ..) = layout.begin_commit().unwrap();
        layout.commit_failed(told);
        let (told, made, ..) = layout.begin_blocks();
        assert_eq!((told.made.len(), made), (1, vec![extent(1, 1)]));
        assert!(layout.committed(&told, &attr(5, 2, 1)));
        assert!(layout.block(1).unwrap().is_committed && !layout.is_committed());
        assert_eq!((layout.size(), layout.growth()), (20, 15));
        let (told, made, ..) = layout.begin_commit().unwrap();
        assert_eq!((told.grow_to, made), (20, vec![]));
    }

    #[test]
    fn what_somebody_else_cut_off_is_lost_and_the_rest_goes_on() {
        let mut layout = Layout::new(&attr(10, 1, 1), vec![extent(0, 1)], None);
        layout.wrote(0, 10, 1);
        layout.made(1, vec![1]);
        layout.wrote(1, 20, 2);
        let mut grown = layout.clone();
        assert!(grown.rebase(Layout::new(&attr(15, 2, 1), vec![extent(0, 1), extent(1, 1)], None), 10).is_empty());
        assert_eq!((grown.size(), grown.is_committed()), (20, false));
        assert_eq!(layout.rebase(Layout::new(&attr(5, 2, 2), vec![extent(0, 1)], None), 10), [1]);
        assert_eq!((layout.size(), layout.block(1)), (5, None));
        assert_eq!(layout.begin_sync(), [0]);
        layout.forget_uncommitted();
        assert!(layout.is_committed() && layout.block(0).is_some());

        // Two have made the same block, at different workers.
        layout.made(1, vec![2]);
        layout.wrote(1, 20, 3);
        assert_eq!(layout.rebase(Layout::new(&attr(15, 3, 2), vec![extent(0, 1), extent(1, 2)], None), 10), [1]);
        assert_eq!((layout.size(), layout.block(1).unwrap().workers.as_slice()), (15, &[1][..]));
    }

    #[test]
    fn what_no_block_has_is_the_origins_until_it_is_cut() {
        let origin = Origin { key: "k".into(), etag: "e".into(), length: 40, valid: 35, version: 1 };
        let mut layout = Layout::new(&attr(50, 1, 1), vec![extent(1, 0)], Some(origin));
        let bytes = |layout: &Layout| [0, 2, 3, 4].map(|index| layout.origin_bytes(index, 10));
        assert_eq!(bytes(&layout), [10, 10, 5, 0]);
        assert!(layout.cut(&attr(22, 2, 2), 10));
        assert_eq!(bytes(&layout), [10, 2, 0, 0]);
        assert!(layout.cut(&attr(40, 3, 2), 10));
        assert_eq!(bytes(&layout), [10, 2, 0, 0], "what was cut off does not come back");
    }

    #[test]
    fn what_was_written_to_blocks_that_have_been_dropped_is_lost() {
        let origin = Origin { key: "k".into(), etag: "e".into(), length: 20, valid: 20, version: 2 };
        let mut layout = Layout::new(&attr(20, 1, 1), vec![extent(0, 1), extent(1, 1)], None);
        layout.wrote(1, 20, 1);
        layout.made(2, vec![1]);
        layout.wrote(2, 30, 1);
        let (told, made, touched) = layout.begin_commit().unwrap();
        assert_eq!((made.len(), touched), (1, vec![Extent { index: 1, generation: 1, workers: vec![] }]));
        layout.commit_failed(told);
        let mut same = layout.clone();
        assert!(same.rebase(Layout::new(&attr(20, 2, 1), vec![extent(0, 1), extent(1, 1)], None), 10).is_empty());
        assert_eq!(same.begin_commit().unwrap().2.len(), 1, "it is still to be told");
        assert_eq!(layout.rebase(Layout::new(&attr(20, 2, 2), vec![], Some(origin)), 10), [1, 2]);
    }
}
