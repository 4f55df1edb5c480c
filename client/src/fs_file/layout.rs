//! What is known of one file's content: its length, its blocks, and what is not committed yet.
//!
//! No I/O. The master's answer is the ground; what was written here lies over it until it is committed. A block is
//! named by its generation: what the master has dropped meanwhile is not found under another generation again.
//!
//! Every block that was written to is committed with the workers that have all of it (decision 10): the master drops
//! the others. So what is noted here of a block's workers only ever becomes less, until the master says otherwise while
//! nothing can have been missed.
//!
//! A block that a view has is not written to: another one takes its place, of a later generation, that began with its
//! bytes at the same workers ([`Layout::replaced`]). No write to that is acknowledged before the master knows it.

mod known;
mod located_block;
mod rebase;
mod record;
mod replacement;
mod uncommitted;
mod unsynced;

use std::collections::{BTreeMap, BTreeSet};

use cavern_proto::block_id::block_length;
use cavern_proto::master::{Attr, Extent, Origin};

use super::block::OpenBlock;
pub(super) use known::CompactLayout;
pub(super) use located_block::LocatedBlock;
pub(super) use rebase::EventHistory;
pub(super) use uncommitted::CommitBatch;
use uncommitted::Uncommitted;
use unsynced::Unsynced;

/// The unit in which file systems give room to files.
const PAGE_BYTES: u64 = 4096;

/// A file as the master has it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Committed {
    /// Bytes.
    size: u64,
    version: u64,
    /// No block of an earlier one is the file's.
    generation: u32,
    /// Of the blocks that are made next.
    next_generation: u32,
    /// Bytes that the file takes.
    allocated: Option<u64>,
}

impl From<&Attr> for Committed {
    fn from(attr: &Attr) -> Self {
        let Attr { size, version, generation, allocated, .. } = *attr;
        Self { size, version, generation, next_generation: attr.next_generation.max(generation), allocated }
    }
}

/// What is known of one file's content.
#[derive(Clone, Debug, Default)]
pub(super) struct Layout {
    committed: Committed,
    /// Bytes, with what was written here.
    size: u64,
    blocks: BTreeMap<u32, LocatedBlock>,
    /// The object that has what no block has.
    origin: Option<Origin>,
    uncommitted: Uncommitted,
    /// What a commit says that is under way.
    in_flight: Option<Uncommitted>,
    /// Grows whenever [`record`](Self::record) may say something else.
    revision: u64,
    /// When bytes were last written here; nanoseconds since the epoch, 0 for never.
    written_ns: i64,
    unsynced: Unsynced,
}

impl Layout {
    /// As the master has it.
    pub(super) fn new(attr: &Attr, extents: Vec<Extent>, origin: Option<Origin>) -> Self {
        let known = |extent: Extent| {
            let Extent { index, generation, workers, mut joined, joining, allocated, .. } = extent;
            joined.resize(workers.len(), 0);
            let made = LocatedBlock::new(generation, workers, joined);
            (index, LocatedBlock { is_joined: joining != 0, is_committed: true, allocated, ..made })
        };
        let blocks = extents.into_iter().map(known).collect();
        Self { committed: attr.into(), size: attr.size, blocks, origin, ..Self::default() }
    }

    /// A number that differs whenever [`record`](Self::record) may.
    pub(super) fn revision(&self) -> u64 {
        self.revision
    }

    /// Bytes of the file, with what was written here.
    pub(super) fn size(&self) -> u64 {
        self.size
    }

    pub(super) fn version(&self) -> u64 {
        self.committed.version
    }

    pub(super) fn generation(&self) -> u32 {
        self.committed.generation
    }

    /// Of the blocks that are made next.
    pub(super) fn next_generation(&self) -> u32 {
        self.committed.next_generation
    }

    /// Blocks that are made next are of this generation at least.
    pub(super) fn makes_from(&mut self, generation: u32) {
        self.committed.next_generation = self.committed.next_generation.max(generation);
    }

    /// Whether a block of this generation that the master does not know can become the file's.
    pub(super) fn takes(&self, generation: u32) -> bool {
        (self.committed.generation..=self.committed.next_generation).contains(&generation)
    }

    pub(super) fn block(&self, index: u32) -> Option<&LocatedBlock> {
        self.blocks.get(&index)
    }

    pub(super) fn blocks(&self) -> impl Iterator<Item = (u32, &LocatedBlock)> {
        self.blocks.iter().map(|(index, known)| (*index, known))
    }

    pub(super) fn origin(&self) -> Option<&Origin> {
        self.origin.as_ref()
    }

    /// How many bytes a block has, from its first on, where it is not there; the rest is zeros.
    pub(super) fn origin_bytes(&self, index: u32, block_size: u64) -> u32 {
        self.origin.as_ref().map_or(0, |origin| block_length(origin.valid, block_size, index))
    }

    /// Bytes that the file takes as the master has it, and the blocks of which that may be otherwise by now, each with
    /// what of it is in there.
    pub(super) fn allocated(&self, block_size: u64) -> Option<(u64, Vec<(u32, u64)>)> {
        let counted = |index: &u32| {
            let origin = || u64::from(self.origin_bytes(*index, block_size));
            let known = self.blocks.get(index).filter(|known| known.allocated.is_some() || known.is_committed);
            (*index, known.map_or_else(origin, |known| known.allocated.unwrap_or_default()))
        };
        let none = BTreeSet::new();
        let sent = self.in_flight.as_ref().map_or(&none, |sent| &sent.written);
        Some((self.committed.allocated?, self.uncommitted.written.union(sent).map(counted).collect()))
    }

    /// Whether the master knows blocks: these it may drop when the bucket has them.
    pub(super) fn has_committed(&self) -> bool {
        self.blocks.values().any(|known| known.is_committed)
    }

    /// When bytes were last written here of which an answer of the master does not tell that has this version of the
    /// file: they are not committed, or were when the answer was under way.
    pub(super) fn written_since(&self, version: u64) -> Option<i64> {
        let is_written = self.written_ns != 0 && self.committed.version > version;
        (!self.is_committed() || is_written).then_some(self.written_ns)
    }

    /// Bytes by which the file is longer than the master knows.
    pub(super) fn growth(&self) -> u64 {
        self.size.saturating_sub(self.committed.size)
    }

    /// A block of a generation that the file [`takes`](Self::takes) has been made at these workers.
    pub(super) fn made(&mut self, index: u32, generation: u32, workers: Vec<u64>) {
        let joined = vec![0; workers.len()];
        self.blocks.insert(index, LocatedBlock::new(generation, workers, joined));
        self.uncommitted.made.insert(index);
        self.revision += 1;
    }

    /// Writing to a block of this generation goes on without some of its workers.
    pub(super) fn gave_up(&mut self, index: u32, generation: u32, failed: &[u64]) {
        let Some(known) = self.blocks.get_mut(&index).filter(|known| known.generation == generation) else { return };
        let left: Vec<(u64, u32)> = known.replicas().filter(|(worker, _)| !failed.contains(worker)).collect();
        // The last one stays: it is all that there is.
        if left.is_empty() || left.len() == known.workers.len() {
            return;
        }
        (known.workers, known.joined) = left.into_iter().unzip();
        (known.is_committed, known.is_urgent) = (false, true);
        self.uncommitted.made.insert(index);
        self.revision += 1;
    }

    /// A block that is being copied is named in the next commit, which gives the copy up; false when there is nothing
    /// to be given up.
    pub(super) fn give_up_copy(&mut self, index: u32) -> bool {
        let is_copied = self.blocks.get(&index).is_some_and(|known| known.is_joined);
        if is_copied {
            self.uncommitted.made.insert(index);
            self.revision += 1;
        }
        is_copied
    }

    /// Whether what has been written to these workers of a block is at all that it has, so that it may be acknowledged.
    pub(super) fn accepts(&self, index: u32, generation: u32, written: &[u64]) -> bool {
        self.blocks.get(&index).is_some_and(|known| {
            known.generation == generation
                && known.is_open_to_writes()
                && known.workers.iter().all(|worker| written.contains(worker))
        })
    }

    /// Whether what was written to the workers of an open block is all that the block has.
    pub(super) fn accepts_at(&self, index: u32, open: &OpenBlock) -> bool {
        self.blocks
            .get(&index)
            .is_some_and(|known| known.is_at(open.generation, &open.replicas) && known.is_open_to_writes())
    }

    /// Whether some block must be made known to the master before a write is acknowledged.
    pub(super) fn is_urgent(&self, index: u32) -> bool {
        self.blocks.get(&index).is_some_and(|known| known.is_urgent)
    }

    /// Bytes of a block were changed; the file reaches at least to `end`.
    pub(super) fn wrote(&mut self, index: u32, end: u64, now_ns: i64) {
        let is_new = self.unsynced.blocks.insert(index) | self.uncommitted.written.insert(index);
        self.revision += u64::from(is_new);
        self.grew(end, now_ns);
    }

    /// The file reaches at least to `end`.
    pub(super) fn grew(&mut self, end: u64, now_ns: i64) {
        self.revision += u64::from(end > self.uncommitted.grow_to || !self.uncommitted.changed);
        self.size = self.size.max(end);
        self.uncommitted.grow_to = self.uncommitted.grow_to.max(end);
        self.uncommitted.changed = true;
        self.written_ns = now_ns;
    }

    /// The master has this version after a change by this client; whether by nobody else.
    fn advance(&mut self, version: u64) -> bool {
        // The same: it has become part of the commit before.
        let is_next = [self.committed.version, self.committed.version + 1].contains(&version);
        self.unsynced.is_tracked &= is_next;
        is_next
    }

    /// The master has given the file another length: blocks from there on are gone, unless no generation has begun.
    /// Nothing is uncommitted then.
    pub(super) fn cut(&mut self, attr: &Attr, block_size: u64) -> bool {
        let is_next = self.advance(attr.version);
        if attr.generation != self.committed.generation {
            self.drop_from(attr.size, block_size.max(1));
        } else if attr.size < self.committed.size {
            // It was emptied, and keeps its only block.
            self.blocks.values_mut().for_each(|only| only.allocated = Some(0));
        }
        if let Some(origin) = &mut self.origin {
            origin.valid = origin.valid.min(attr.size);
        }
        (self.size, self.committed) = (attr.size, Committed::from(attr));
        self.revision += 1;
        is_next
    }

    fn drop_from(&mut self, length: u64, block_size: u64) {
        let kept = length.div_ceil(block_size);
        self.blocks.retain(|index, _| u64::from(*index) < kept);
        self.unsynced.blocks.retain(|index| u64::from(*index) < kept);
        let within = length % block_size;
        let last = u32::try_from(kept).ok().and_then(|kept| self.blocks.get_mut(&kept.checked_sub(1)?));
        if let Some(last) = last.filter(|_| within > 0) {
            // As the master has it: what lies behind the end counts no longer.
            last.allocated = last.allocated.map(|bytes| bytes.min(within.next_multiple_of(PAGE_BYTES)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    pub(super) fn attr(size: u64, version: u64, generation: u32) -> Attr {
        Attr { size, version, generation, ..Attr::default() }
    }

    pub(super) fn extent(index: u32, generation: u32) -> Extent {
        Extent { index, generation, workers: vec![1], ..Extent::default() }
    }

    pub(super) fn parts(batch: CommitBatch) -> (u64, Vec<Extent>) {
        (batch.grow_to, batch.extents)
    }

    #[test]
    fn a_cut_drops_blocks_and_later_ones_have_another_generation() {
        let mut layout = Layout::new(&attr(35, 1, 1), vec![extent(0, 1), extent(3, 1)], None);
        assert!(layout.cut(&attr(15, 2, 2), 10));
        assert_eq!((layout.size(), layout.block(0).is_some(), layout.block(3)), (15, true, None));
        layout.made(3, layout.next_generation(), vec![2]);
        assert_eq!(layout.block(3).unwrap().generation, 2);
    }

    #[test]
    fn a_file_that_is_emptied_keeps_its_block_unless_a_generation_has_begun() {
        let only = Extent { allocated: Some(4096), ..extent(0, 1) };
        let mut layout = Layout::new(&Attr { allocated: Some(4096), ..attr(15, 1, 1) }, vec![only], None);
        let mut dropped = layout.clone();
        assert!(layout.cut(&Attr { allocated: Some(0), ..attr(0, 2, 1) }, 1 << 20));
        assert_eq!((layout.size(), layout.block(0).unwrap().generation), (0, 1));
        layout.wrote(0, 9, 3);
        assert_eq!(layout.allocated(1 << 20), Some((0, vec![(0, 0)])), "what it took before counts no longer");
        assert!(dropped.cut(&attr(0, 2, 2), 1 << 20));
        assert_eq!(dropped.block(0), None);
    }

    #[test]
    fn what_a_cut_takes_away_need_not_be_told() {
        let mut layout = Layout::new(&attr(15, 1, 1), vec![extent(0, 1), extent(1, 1)], None);
        layout.wrote(1, 20, 1);
        layout.made(2, layout.next_generation(), vec![1]);
        layout.wrote(2, 30, 2);
        layout.made(3, layout.next_generation(), vec![1]);
        layout.wrote(3, 40, 3);
        assert_eq!(layout.growth(), 25);
        layout.give_up_beyond(22, 10);
        let (sent, made) = parts(layout.begin_commit().unwrap());
        assert_eq!((sent, made, layout.size(), layout.block(3)), (22, vec![extent(1, 1), extent(2, 1)], 22, None));
        assert_eq!(layout.begin_sync(), [0, 1, 2], "and what was there before");
        assert!(layout.committed(&[], &attr(22, 2, 1)));
        assert_eq!(layout.growth(), 0);
    }

    pub(super) fn at(workers: &[u64], joined: &[u32]) -> Layout {
        let (workers, joined) = (workers.to_vec(), joined.to_vec());
        Layout::new(&attr(10, 1, 1), vec![Extent { generation: 1, workers, joined, ..Extent::default() }], None)
    }

    pub(super) fn workers(layout: &Layout) -> &[u64] {
        &layout.block(0).unwrap().workers
    }

    #[test]
    fn no_write_is_acknowledged_while_a_replica_that_was_given_up_counts() {
        let mut layout = at(&[1, 2], &[]);
        assert!(layout.accepts(0, 1, &[1, 2]) && !layout.accepts(0, 1, &[1]) && !layout.accepts(0, 2, &[1, 2]));
        layout.gave_up(0, 1, &[2]);
        assert!(!layout.accepts(0, 1, &[1]) && layout.is_urgent(0));
        let (_, made) = parts(layout.begin_commit().unwrap());
        assert_eq!(made, [Extent { generation: 1, workers: vec![1], ..Extent::default() }]);
        assert!(layout.committed(&[], &attr(10, 2, 1)));
        assert!(layout.accepts(0, 1, &[1]) && !layout.is_urgent(0));
        layout.gave_up(0, 1, &[1]);
        assert_eq!(workers(&layout), [1], "the last one is all that there is");
    }

    #[test]
    fn a_block_that_is_being_copied_is_not_written_to() {
        let held = Extent { generation: 1, workers: vec![1], joining: 2, ..Extent::default() };
        let layout = Layout::new(&attr(10, 1, 1), vec![held], None);
        assert!(!layout.accepts(0, 1, &[1, 2]) && !layout.is_urgent(0));
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
}
