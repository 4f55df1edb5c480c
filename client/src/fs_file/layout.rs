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
mod record;
mod replacement;
mod unsynced;

use std::collections::{BTreeMap, BTreeSet};

use cavern_proto::block_id::block_length;
use cavern_proto::master::{Attr, Extent, Origin};

use super::block::{OpenBlock, Replica};
pub(super) use known::CompactLayout;
use unsynced::Unsynced;

/// One block of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct LocatedBlock {
    pub generation: u32,
    /// The workers that have it.
    pub workers: Vec<u64>,
    /// Which replica of each of these it is; see `Extent`.
    pub joined: Vec<u32>,
    /// A worker is being given a copy: nobody writes meanwhile, unless a commit gives the copy up.
    pub is_joined: bool,
    /// The master knows it.
    pub is_committed: bool,
    /// A replica was given up, or it has taken the place of another: no write may be acknowledged before the master
    /// knows.
    pub is_urgent: bool,
    /// The block that has its place as far as the master knows, and that it began as.
    pub replaces: Option<Box<Self>>,
    /// Bytes that it took when it was committed last.
    pub allocated: Option<u64>,
}

impl LocatedBlock {
    /// One that the master does not know.
    fn new(generation: u32, workers: Vec<u64>, joined: Vec<u32>) -> Self {
        let (is_joined, is_committed, is_urgent) = (false, false, false);
        Self { generation, workers, joined, is_joined, is_committed, is_urgent, replaces: None, allocated: None }
    }

    /// Whether these are the block's replicas.
    pub(super) fn is_at(&self, generation: u32, replicas: &[Replica]) -> bool {
        let has = |(worker, joined)| replicas.iter().any(|known| (known.worker, known.joined) == (worker, joined));
        self.generation == generation && self.workers.len() == replicas.len() && self.replicas().all(has)
    }

    fn is_open_to_writes(&self) -> bool {
        !self.is_joined && !self.is_urgent
    }

    pub(super) fn replicas(&self) -> impl Iterator<Item = (u64, u32)> + '_ {
        self.workers.iter().copied().zip(self.joined.iter().copied())
    }

    /// Goes on with those replicas only that another knowledge of the block has too; false, and unchanged, when there
    /// are none.
    fn intersect(&mut self, other: &Self) -> bool {
        let common: Vec<(u64, u32)> =
            self.replicas().filter(|own| other.replicas().any(|replica| replica == *own)).collect();
        if common.is_empty() {
            return false;
        }
        (self.workers, self.joined) = common.into_iter().unzip();
        true
    }
}

/// Whether all events that the master has sent about a file since the layout was asked for have arrived here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum EventHistory {
    Complete,
    MayHaveGaps,
}

/// The unit in which file systems give room to files.
const PAGE_BYTES: u64 = 4096;

/// Blocks of one commit. The master takes some more, but serves nobody else meanwhile.
pub(super) const COMMIT_BLOCKS: usize = 250;

/// What is to be committed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Uncommitted {
    /// Blocks that were made, or whose workers have become fewer.
    made: BTreeSet<u32>,
    /// Blocks that were written to.
    written: BTreeSet<u32>,
    /// Bytes changed.
    changed: bool,
    /// The file reaches at least so far.
    grow_to: u64,
}

/// What one commit says.
#[derive(Debug, Default)]
pub(super) struct CommitBatch {
    pub grow_to: u64,
    pub changed: bool,
    pub extents: Vec<Extent>,
    /// Nothing is left for another.
    pub is_last: bool,
}

impl Uncommitted {
    fn is_none(&self) -> bool {
        self.made.is_empty() && !self.changed
    }
}

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

    /// Whether the master knows everything.
    pub(super) fn is_committed(&self) -> bool {
        self.uncommitted.is_none() && self.in_flight.is_none()
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

    /// Whether the master knows all blocks, and that the file has this length, if not what was written to them.
    pub(super) fn is_overwritten(&self) -> bool {
        let is_known = self.in_flight.as_ref().is_none_or(|sent| sent.made.is_empty());
        self.growth() == 0 && self.uncommitted.made.is_empty() && is_known
    }

    /// What is to be sent now, in one commit; `None` when the master knows everything. Of very many blocks the first
    /// come first, and the length with the last.
    pub(super) fn begin_commit(&mut self) -> Option<CommitBatch> {
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

    /// The commit has failed: what it says is to be committed still.
    pub(super) fn commit_failed(&mut self) {
        self.revision += 1;
        let Uncommitted { made, written, changed, grow_to } = self.in_flight.take().unwrap_or_default();
        self.uncommitted.made.extend(made);
        self.uncommitted.written.extend(written);
        self.uncommitted.changed |= changed;
        self.uncommitted.grow_to = self.uncommitted.grow_to.max(grow_to);
    }

    /// The master has the commit, with these extents; false when the content was changed by others meanwhile, so that
    /// the master must be asked anew.
    pub(super) fn committed(&mut self, sent: &[Extent], attr: &Attr) -> bool {
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

    /// The master has this version after a change by this client; whether by nobody else.
    fn advance(&mut self, version: u64) -> bool {
        // The same: it has become part of the commit before.
        let is_next = [self.committed.version, self.committed.version + 1].contains(&version);
        self.unsynced.is_tracked &= is_next;
        is_next
    }

    /// The file is about to be cut to this length: what the master does not know beyond it need not be committed any
    /// more.
    pub(super) fn give_up_beyond(&mut self, length: u64, block_size: u64) {
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

    /// The blocks that the master does not know, for it to know them without letting the file grow.
    pub(super) fn begin_blocks(&mut self) -> CommitBatch {
        let Uncommitted { changed, grow_to, .. } = self.uncommitted;
        let batch = self.begin_commit().unwrap_or_default();
        (self.uncommitted.changed, self.uncommitted.grow_to) = (changed, grow_to);
        CommitBatch { grow_to: 0, changed: true, ..batch }
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

    /// Puts what was written here over what the master has now; gives the blocks that were written to here and have no
    /// place any more, since somebody else has cut the file, or has made the same block at other workers; or since they
    /// have been dropped, for the bucket had them.
    pub(super) fn rebase(&mut self, mut fresh: Self, history: EventHistory) -> Vec<u32> {
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
    pub(super) fn is_cut_since(&self, generation: u32) -> bool {
        self.generation() != generation && self.origin.is_none()
    }

    /// Drops what cannot be committed any more.
    pub(super) fn forget_uncommitted(&mut self) {
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

    pub(super) fn at(workers: &[u64], joined: &[u32]) -> Layout {
        let (workers, joined) = (workers.to_vec(), joined.to_vec());
        Layout::new(&attr(10, 1, 1), vec![Extent { generation: 1, workers, joined, ..Extent::default() }], None)
    }

    fn workers(layout: &Layout) -> &[u64] {
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
