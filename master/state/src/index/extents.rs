//! The blocks of files and where they are: `extent` records, and what finds them by worker and by need.
//!
//! Every worker of an extent has all that was committed to the block. So whoever commits names the workers that have
//! what it wrote, and the others are given up ([`commit`]); and a worker joins only with a copy that was made while
//! nobody wrote (decision 10). What a worker may have of a block that it is no longer part of is a *stray*, until it
//! has freed that: it is given no other copy before, which the freeing could destroy.
//!
//! A file can lose a quarter of a million blocks at once ([`cut`]). The first of them go with the command; of the rest
//! the inode's record says that they are none of the file's any more ([`is_truncated`]), and the leader has their
//! records taken away in steps.
//!
//! A block that a view has is not freed when its file loses it, but kept ([`views`]). Who changes one makes another in
//! its place, of a later generation, which begins with the same bytes ([`after_replacement`]).

use cavern_proto::master::Extent;
use cavern_proto::record::{Counters, Cut, ExtentRecord, GarbageRecord, InodeRecord, Stray};

use super::views;
use crate::error::Result;
use crate::records::{is_truncated, next_generation};
use crate::schema;
use crate::transaction::Transaction;

/// Blocks whose records one command takes away.
pub const AT_ONCE: usize = 400;

/// A block, and what it takes to store where it is.
#[derive(Clone, Copy, Debug)]
pub struct Block {
    pub inode: u64,
    pub index: u32,
    pub mount_id: u32,
    /// Replicas that the mount asks for.
    pub replicas: u32,
}

/// How many of the blocks that were to be dropped are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DropProgress {
    All,
    Some,
}

/// The replicas of an extent: each worker, and which of its replicas of the block it is.
pub fn replicas<'e>(workers: &'e [u64], joined: &'e [u32]) -> impl Iterator<Item = (u64, u32)> + 'e {
    let joined = |position: usize| joined.get(position).copied().unwrap_or_default();
    workers.iter().enumerate().map(move |(position, worker)| (*worker, joined(position)))
}

/// The record with other replicas, and no copy under way.
pub fn with_replicas(record: &ExtentRecord, kept: &[(u64, u32)]) -> ExtentRecord {
    let mut joined: Vec<u32> = kept.iter().map(|(_, joined)| *joined).collect();
    if joined.iter().all(|joined| *joined == 0) {
        joined.clear();
    }
    ExtentRecord { workers: kept.iter().map(|(worker, _)| *worker).collect(), joined, joining: 0, ..record.clone() }
}

/// What becomes of a known block when somebody has written to it at these workers; `None` when none of its replicas has
/// that.
pub fn after_commit(known: &ExtentRecord, written: &Extent) -> Option<ExtentRecord> {
    let has_all: Vec<(u64, u32)> = replicas(&written.workers, &written.joined).collect();
    let kept = replicas(&known.workers, &known.joined).filter(|replica| has_all.contains(replica));
    let kept: Vec<(u64, u32)> = kept.collect();
    (!kept.is_empty() && known.generation == written.generation).then(|| with_replicas(known, &kept))
}

/// What becomes of a known block in whose place somebody has made another one, that began with what this one had, at
/// these workers; `None` when it was another one that had its place, or none of the replicas has begun so. Blocks of
/// earlier generations than `below` are replaced, by others ([`views::replaceable_below`]): it may have been written to
/// since, if it is none of them.
pub fn after_replacement(known: &ExtentRecord, made: &Extent, below: u32) -> Option<ExtentRecord> {
    let is_fit = made.replaces == Some(known.generation) && (known.generation + 1..=made.generation).contains(&below);
    let copied = Extent { generation: known.generation, ..made.clone() };
    let after = after_commit(known, &copied).filter(|_| is_fit)?;
    Some(ExtentRecord { generation: made.generation, ..after })
}

/// Whether a block is still as somebody has seen it.
pub fn is_as(known: &ExtentRecord, extent: &Extent) -> bool {
    known.generation == extent.generation && known.workers == extent.workers && known.joined == extent.joined
}

/// Stores what a commit makes of a block: `known` before, at `named` by the one who wrote.
pub fn commit(
    tx: &mut Transaction<'_>,
    block: Block,
    known: Option<&ExtentRecord>,
    after: &ExtentRecord,
    named: &[u64],
) {
    if known == Some(after) && named.iter().all(|worker| after.workers.contains(worker)) {
        return;
    }
    put(tx, block, known, after);
    for worker in named.iter().filter(|worker| !after.workers.contains(worker)) {
        put_stray(tx, block, after.generation, *worker);
    }
}

/// Stores an extent; replicas that it has no more become strays.
pub fn put(tx: &mut Transaction<'_>, block: Block, before: Option<&ExtentRecord>, after: &ExtentRecord) {
    let key = (block.inode, block.index);
    tx.put(schema::Extents, key, after);
    for worker in &after.workers {
        if before.is_none_or(|before| !before.workers.contains(worker)) {
            tx.put(schema::Replicas, (*worker, key), &());
        }
    }
    if let Some(before) = before {
        for worker in before.workers.iter().filter(|worker| !after.workers.contains(worker)) {
            tx.delete(schema::Replicas, (*worker, key));
            put_stray(tx, block, before.generation, *worker);
        }
        let copy = before.joining;
        if copy != 0 && copy != after.joining && !after.workers.contains(&copy) {
            put_stray(tx, block, before.generation, copy);
        }
    }
    if after.joining != 0 || (after.workers.len() as u32) < block.replicas {
        tx.put(schema::Repairs, key, &());
    } else if before.is_some() {
        tx.delete(schema::Repairs, key);
    }
}

fn put_stray(tx: &mut Transaction<'_>, block: Block, generation: u32, worker: u64) {
    let stray = Stray { inode: block.inode, generation, index: block.index };
    tx.put(schema::Strays, (worker, stray), &block.mount_id);
}

/// The generation that begins when blocks of a file are dropped; `None` when there are no numbers left. The largest is
/// for inodes that are deleted ([`drop_blocks_step`]).
pub fn generation_after(counters: &Counters, inode: u64, record: &InodeRecord) -> Option<u32> {
    next_generation(counters, inode, record).checked_add(1).filter(|next| *next < u32::MAX)
}

/// Begins a generation of a file, that of [`generation_after`]; the caller stores the record.
pub fn begin_generation(tx: &mut Transaction<'_>, record: &mut InodeRecord, generation: u32) {
    record.generation = generation;
    tx.counters.latest_generation = tx.counters.latest_generation.max(generation);
}

/// Takes the blocks from an index on off a file, and begins a generation, that of [`generation_after`]; the caller
/// stores the record. Gives the index of each that was dropped at once, and the bytes that it took, and whether these
/// are all.
pub fn cut(
    tx: &mut Transaction<'_>,
    inode: u64,
    record: &mut InodeRecord,
    from: u32,
    generation: u32,
) -> Result<(Vec<(u32, u64)>, DropProgress)> {
    let (extents, next) = tx.before().some_recorded_extents(inode, from, AT_ONCE)?;
    let was_there = |extent: &&Extent| !is_truncated(&record.cuts, extent.index, extent.generation);
    let there = extents.iter().filter(was_there);
    let dropped = there.map(|extent| (extent.index, extent.allocated.unwrap_or_default())).collect();
    retire(tx, inode, record.mount_id, extents)?;
    begin_generation(tx, record, generation);
    // What they were for is done, or to be done by this one.
    record.cuts.retain(|known| known.from < from);
    let Some(from) = next else { return Ok((dropped, DropProgress::All)) };
    record.cuts.push(Cut { from, generation });
    put_garbage(tx, &GarbageRecord { inode, mount_id: record.mount_id, extents: Vec::new(), is_cut: true });
    Ok((dropped, DropProgress::Some))
}

/// Takes the records of blocks of an inode that is to be deleted away, and notes that the blocks are to be freed. While
/// there are more, the inode's record says how far that has come.
pub fn drop_blocks_step(tx: &mut Transaction<'_>, inode: u64, mount_id: u32) -> Result<DropProgress> {
    let Some(mut record) = tx.inode(inode)? else { return Ok(DropProgress::All) };
    let begun = record.cuts.first().filter(|cut| cut.generation == u32::MAX);
    let from = begun.map_or(0, |cut| cut.from);
    let (extents, next) = tx.before().some_recorded_extents(inode, from, AT_ONCE)?;
    retire(tx, inode, mount_id, extents)?;
    let Some(from) = next else { return Ok(DropProgress::All) };
    record.cuts = vec![Cut { from, generation: u32::MAX }];
    tx.put_inode(inode, record);
    Ok(DropProgress::Some)
}

/// Takes records of blocks away, and has the blocks freed that no view has.
pub fn retire(tx: &mut Transaction<'_>, inode: u64, mount_id: u32, extents: Vec<Extent>) -> Result {
    let frozen_below = views::frozen_below(tx, inode, mount_id)?;
    let mut freed = Vec::with_capacity(extents.len());
    for mut extent in extents {
        let key = (inode, extent.index);
        tx.delete(schema::Extents, key);
        tx.delete(schema::Repairs, key);
        for worker in &extent.workers {
            tx.delete(schema::Replicas, (*worker, key));
        }
        if extent.generation < frozen_below {
            views::keep(tx, inode, mount_id, extent)?;
            continue;
        }
        if extent.joining != 0 {
            extent.workers.push(extent.joining);
        }
        let Extent { index, generation, workers, .. } = extent;
        freed.push(Extent { index, generation, workers, ..Extent::default() });
    }
    if !freed.is_empty() {
        put_garbage(tx, &GarbageRecord { inode, mount_id, extents: freed, is_cut: false });
    }
    Ok(())
}

/// Notes blocks that are to be freed, or a file that was cut.
pub fn put_garbage(tx: &mut Transaction<'_>, garbage: &GarbageRecord) {
    tx.counters.garbage += 1;
    tx.put(schema::Garbage, tx.counters.garbage, garbage);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn known(replicas: &[(u64, u32)]) -> ExtentRecord {
        with_replicas(&ExtentRecord { generation: 3, joins: 9, ..ExtentRecord::default() }, replicas)
    }

    fn written(replicas: &[(u64, u32)]) -> Extent {
        let ExtentRecord { generation, workers, joined, .. } = known(replicas);
        Extent { generation, workers, joined, ..Extent::default() }
    }

    #[test]
    fn a_commit_leaves_the_replicas_that_have_what_was_written() {
        let after = |before: &[(u64, u32)], at: &[(u64, u32)]| after_commit(&known(before), &written(at));
        assert_eq!(after(&[(1, 0), (2, 0)], &[(1, 0), (2, 0)]), Some(known(&[(1, 0), (2, 0)])));
        assert_eq!(after(&[(1, 0), (2, 0)], &[(2, 0)]), Some(known(&[(2, 0)])));
        assert_eq!(after(&[(1, 0), (3, 1)], &[(1, 0), (2, 0)]), Some(known(&[(1, 0)])), "3 came while it was writing");
        assert_eq!(after(&[(1, 0), (2, 1)], &[(1, 0), (2, 0)]), Some(known(&[(1, 0)])), "2 has another copy by now");
        assert_eq!(after(&[(1, 0)], &[(2, 0)]), None);
        assert_eq!(after_commit(&known(&[(1, 0)]), &Extent { generation: 2, ..written(&[(1, 0)]) }), None);
        let joining = ExtentRecord { joining: 5, ..known(&[(1, 0)]) };
        assert_eq!(after_commit(&joining, &written(&[(1, 0)])), Some(known(&[(1, 0)])), "the copy lacks it");
    }

    #[test]
    fn a_block_takes_the_place_of_the_one_that_it_began_as_and_of_no_other() {
        let copy = |generation, replaces, at: &[(u64, u32)]| Extent { generation, replaces, ..written(at) };
        let after = |made: &Extent| after_replacement(&known(&[(1, 0), (2, 1)]), made, 5);
        let expected = |at: &[(u64, u32)]| Some(ExtentRecord { generation: 7, ..known(at) });
        assert_eq!(after(&copy(7, Some(3), &[(1, 0), (2, 1)])), expected(&[(1, 0), (2, 1)]));
        assert_eq!(after(&copy(7, Some(3), &[(2, 1)])), expected(&[(2, 1)]));
        assert_eq!(after(&copy(7, Some(3), &[(1, 0), (2, 0)])), expected(&[(1, 0)]), "2 has another copy by now");
        for (generation, replaces, why) in [
            (7, Some(2), "another had its place"),
            (7, None, "it began otherwise"),
            (3, Some(3), "it is this one"),
            (4, Some(3), "a view has it as well"),
        ] {
            assert_eq!(after(&copy(generation, replaces, &[(1, 0)])), None, "{why}");
        }
        for below in [0, 3] {
            let written = after_replacement(&known(&[(1, 0)]), &copy(7, Some(3), &[(1, 0)]), below);
            assert_eq!(written, None, "no view has it any more");
        }
        assert_eq!(after(&copy(7, Some(3), &[(5, 0)])), None, "no replica has begun so");
    }
}
