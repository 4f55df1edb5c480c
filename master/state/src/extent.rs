//! The blocks of files and where they are: `extent` records, and what finds them by worker and by need.
//!
//! Every worker of an extent has all that was committed to the block. So whoever commits names the workers that have
//! what it wrote, and the others are given up ([`commit`]); and a worker joins only with a copy that was made while
//! nobody wrote ([`join`], [`settle`]; decision 10). What a worker may have of a block that it is no longer part of is
//! a *stray*, until it has freed that: it is given no other copy before, which the freeing could destroy.
//!
//! A file can lose a quarter of a million blocks at once ([`cut`]). The first of them go with the command; of the rest
//! the inode's record says that they are none of the file's any more ([`is_truncated`]), and the leader has their
//! records taken away in steps ([`drop_truncated_step`]).

use cavern_proto::master::Extent;
use cavern_proto::record::{
    BlockOf, Counters, Cut, DropBlocks, ExtentRecord, GarbageRecord, GiveUpReplicas, InodeRecord, JoinReplica,
    SettleReplica, Stray, StraysFreed,
};

use super::orphans::StepProgress;
use super::records::{extent_key, replica_key, stray_key};
use super::{Change, Family, Outcome, Transaction};
use crate::error::StateError;

/// Blocks whose records one command takes away.
pub const AT_ONCE: usize = 400;

/// Which file a block belongs to.
#[derive(Clone, Copy, Debug)]
pub(super) struct BlockOwner {
    pub inode: u64,
    pub mount_id: u32,
    /// Replicas that the mount asks for.
    pub replicas: u32,
}

/// The replicas of an extent: each worker, and which of its replicas of the block it is.
fn replicas<'e>(workers: &'e [u64], joined: &'e [u32]) -> impl Iterator<Item = (u64, u32)> + 'e {
    let joined = |position: usize| joined.get(position).copied().unwrap_or_default();
    workers.iter().enumerate().map(move |(position, worker)| (*worker, joined(position)))
}

/// The record with other replicas.
fn with_replicas(record: &ExtentRecord, kept: &[(u64, u32)]) -> ExtentRecord {
    let joined: Vec<u32> = kept.iter().map(|(_, joined)| *joined).collect();
    ExtentRecord {
        generation: record.generation,
        workers: kept.iter().map(|(worker, _)| *worker).collect(),
        joined: if joined.iter().all(|joined| *joined == 0) { Vec::new() } else { joined },
        joining: 0,
        joins: record.joins,
        allocated: record.allocated,
    }
}

/// What becomes of a known block when somebody has written to it at these workers; `None` when none of its replicas has
/// that.
pub(super) fn after_commit(known: &ExtentRecord, written: &Extent) -> Option<ExtentRecord> {
    let has_all: Vec<(u64, u32)> = replicas(&written.workers, &written.joined).collect();
    let kept: Vec<(u64, u32)> =
        replicas(&known.workers, &known.joined).filter(|replica| has_all.contains(replica)).collect();
    (!kept.is_empty() && known.generation == written.generation).then(|| with_replicas(known, &kept))
}

/// Stores what a commit makes of a block: `known` before, at `named` by the one who wrote.
pub(super) fn commit(
    transaction: &mut Transaction<'_>,
    owner: &BlockOwner,
    index: u32,
    known: Option<&ExtentRecord>,
    after: &ExtentRecord,
    named: &[u64],
) {
    if known == Some(after) && named.iter().all(|worker| after.workers.contains(worker)) {
        return;
    }
    put(transaction, owner, index, known, after);
    for worker in named.iter().filter(|worker| !after.workers.contains(worker)) {
        put_stray(transaction, owner, index, after.generation, *worker);
    }
}

/// Stores an extent; replicas that it has no more become strays.
fn put(
    transaction: &mut Transaction<'_>,
    owner: &BlockOwner,
    index: u32,
    before: Option<&ExtentRecord>,
    after: &ExtentRecord,
) {
    let BlockOwner { inode, replicas: wanted, .. } = *owner;
    transaction.put(Family::Extent, &extent_key(inode, index), after);
    for worker in &after.workers {
        if before.is_none_or(|before| !before.workers.contains(worker)) {
            transaction.put_bytes(Family::Replica, &replica_key(*worker, inode, index), &[]);
        }
    }
    if let Some(before) = before {
        let gone = before.workers.iter().filter(|worker| !after.workers.contains(worker));
        for worker in gone {
            transaction.delete(Family::Replica, &replica_key(*worker, inode, index));
            put_stray(transaction, owner, index, before.generation, *worker);
        }
        let copy = before.joining;
        if copy != 0 && copy != after.joining && !after.workers.contains(&copy) {
            put_stray(transaction, owner, index, before.generation, copy);
        }
    }
    if after.joining != 0 || (after.workers.len() as u32) < wanted {
        transaction.put_bytes(Family::Repair, &extent_key(inode, index), &[]);
    } else if before.is_some() {
        transaction.delete(Family::Repair, &extent_key(inode, index));
    }
}

fn put_stray(transaction: &mut Transaction<'_>, owner: &BlockOwner, index: u32, generation: u32, worker: u64) {
    let stray = Stray { inode: owner.inode, generation, index };
    transaction.put_bytes(Family::Stray, &stray_key(worker, &stray), &owner.mount_id.to_be_bytes());
}

/// Whether a block has been cut off its file, though its record is there.
pub fn is_truncated(cuts: &[Cut], index: u32, generation: u32) -> bool {
    // The last of those that begin before it is of the latest generation.
    let before = cuts.partition_point(|cut| cut.from <= index);
    cuts[..before].last().is_some_and(|cut| generation < cut.generation)
}

/// Of which generation the blocks are that are made next for a file: none that was there before this history has an
/// earlier one (`BeginHistory`). Those who made blocks of the file's own meanwhile are right as well.
pub fn next_generation(counters: &Counters, inode: u64, record: &InodeRecord) -> u32 {
    match inode <= counters.old_inodes {
        true => record.generation.max(counters.next_generation),
        false => record.generation,
    }
}

/// The generation that begins when blocks of a file are dropped; `None` when there are no numbers left. The largest is
/// for inodes that are deleted ([`drop_blocks_step`]).
pub(super) fn generation_after(counters: &Counters, inode: u64, record: &InodeRecord) -> Option<u32> {
    next_generation(counters, inode, record).checked_add(1).filter(|next| *next < u32::MAX)
}

/// Takes the blocks from an index on off a file, and begins a generation, that of [`generation_after`]; the caller
/// stores the record. Gives the index of each that was dropped at once, and the bytes that it took, and whether these
/// are all.
pub(super) fn cut(
    transaction: &mut Transaction<'_>,
    inode: u64,
    record: &mut InodeRecord,
    from: u32,
    generation: u32,
) -> Result<(Vec<(u32, u64)>, DropProgress), StateError> {
    let (extents, next) = transaction.before().some_recorded_extents(inode, from, AT_ONCE)?;
    let was_there = |extent: &&Extent| !is_truncated(&record.cuts, extent.index, extent.generation);
    let there = extents.iter().filter(was_there);
    let dropped = there.map(|extent| (extent.index, extent.allocated.unwrap_or_default())).collect();
    retire_extents(transaction, inode, record.mount_id, extents);
    record.generation = generation;
    // What they were for is done, or to be done by this one.
    record.cuts.retain(|known| known.from < from);
    let Some(from) = next else { return Ok((dropped, DropProgress::All)) };
    record.cuts.push(Cut { from, generation: record.generation });
    let garbage = GarbageRecord { inode, mount_id: record.mount_id, extents: Vec::new(), is_cut: true };
    put_garbage(transaction, &garbage);
    Ok((dropped, DropProgress::Some))
}

/// A block as it is sent, of its record.
pub fn at(index: u32, record: ExtentRecord) -> Extent {
    let ExtentRecord { generation, workers, joined, joining, joins: _, allocated } = record;
    Extent { index, generation, workers, joined, joining, allocated }
}

/// How many of the blocks that were to be dropped are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DropProgress {
    All,
    Some,
}

/// Takes the records of blocks of an inode that is to be deleted away, and notes that the blocks are to be freed. While
/// there are more, the inode's record says how far that has come.
pub(super) fn drop_blocks_step(
    transaction: &mut Transaction<'_>,
    inode: u64,
    mount_id: u32,
) -> Result<DropProgress, StateError> {
    let Some(mut record) = transaction.inode(inode)? else { return Ok(DropProgress::All) };
    let begun = record.cuts.first().filter(|cut| cut.generation == u32::MAX);
    let from = begun.map_or(0, |cut| cut.from);
    let (extents, next) = transaction.before().some_recorded_extents(inode, from, AT_ONCE)?;
    retire_extents(transaction, inode, mount_id, extents);
    let Some(from) = next else { return Ok(DropProgress::All) };
    record.cuts = vec![Cut { from, generation: u32::MAX }];
    transaction.put_inode(inode, record);
    Ok(DropProgress::Some)
}

/// Goes on with what [`cut`] has begun. Whether there is more to be done.
pub(super) fn drop_truncated_step(transaction: &mut Transaction<'_>, step: &DropBlocks) -> Result<Outcome, StateError> {
    let more = |more: bool| Ok(Outcome::StepProgress(StepProgress { more, ..StepProgress::default() }));
    let key = step.number.to_be_bytes();
    let garbage = transaction.before().garbage_record(step.number)?;
    let Some(GarbageRecord { inode, .. }) = garbage.filter(|garbage| garbage.is_cut) else { return more(false) };
    let record = transaction.inode(inode)?;
    let with_first = |record: InodeRecord| record.cuts.first().map(|cut| cut.from).map(|first| (record, first));
    let Some((mut record, first)) = record.and_then(with_first) else {
        // The inode is gone with all of its blocks, or another step has done this.
        transaction.delete(Family::Garbage, &key);
        return more(false);
    };
    let limit = step.limit.max(1) as usize;
    let (looked_at, next) = transaction.before().some_recorded_extents(inode, first, limit)?;
    let cut_off = looked_at.into_iter().filter(|extent| is_truncated(&record.cuts, extent.index, extent.generation));
    let cut_off = cut_off.collect();
    retire_extents(transaction, inode, record.mount_id, cut_off);
    match next {
        None => {
            record.cuts.clear();
            transaction.delete(Family::Garbage, &key);
        }
        Some(next) => {
            let later = record.cuts.split_off(record.cuts.partition_point(|cut| cut.from <= next));
            // Of those that begin before, the last is of the latest generation.
            let here = record.cuts.last().map(|cut| Cut { from: next, ..*cut });
            record.cuts = here.into_iter().chain(later).collect();
        }
    }
    transaction.put_inode(inode, record);
    more(next.is_some())
}

/// Takes records of blocks away, and has the blocks freed.
pub(super) fn retire_extents(transaction: &mut Transaction<'_>, inode: u64, mount_id: u32, mut extents: Vec<Extent>) {
    for extent in &mut extents {
        transaction.delete(Family::Extent, &extent_key(inode, extent.index));
        transaction.delete(Family::Repair, &extent_key(inode, extent.index));
        for worker in &extent.workers {
            transaction.delete(Family::Replica, &replica_key(*worker, inode, extent.index));
        }
        if extent.joining != 0 {
            extent.workers.push(extent.joining);
        }
        (extent.joined, extent.joining, extent.allocated) = (Vec::new(), 0, None);
    }
    if !extents.is_empty() {
        put_garbage(transaction, &GarbageRecord { inode, mount_id, extents, is_cut: false });
    }
}

fn put_garbage(transaction: &mut Transaction<'_>, garbage: &GarbageRecord) {
    transaction.counters.garbage += 1;
    transaction.put(Family::Garbage, &transaction.counters.garbage.to_be_bytes(), garbage);
}

/// The file of a block, and the block as it is now; `None` when either is gone.
fn find(
    transaction: &mut Transaction<'_>,
    inode: u64,
    index: u32,
) -> Result<Option<(BlockOwner, ExtentRecord)>, StateError> {
    let Some(record) = transaction.inode(inode)? else { return Ok(None) };
    let Some(known) = transaction.before().extent(inode, index)? else { return Ok(None) };
    let replicas = transaction.before().mount(record.mount_id)?.map_or(1, |mount| mount.replicas.max(1));
    Ok(Some((BlockOwner { inode, mount_id: record.mount_id, replicas }, known)))
}

pub(super) fn is_as(known: &ExtentRecord, extent: &Extent) -> bool {
    known.generation == extent.generation && known.workers == extent.workers && known.joined == extent.joined
}

/// Notes that a worker is about to be given a copy of a block.
pub(super) fn join(transaction: &mut Transaction<'_>, join: &JoinReplica) -> Result<Outcome, StateError> {
    let refused = |reason: &str| Ok(Outcome::Refused(reason.to_owned()));
    let Some(extent) = &join.extent else { return refused("no block is named") };
    let Some((owner, known)) = find(transaction, join.inode, extent.index)? else {
        return refused("the block is gone");
    };
    if !is_as(&known, extent) || known.joining != 0 || known.workers.contains(&extent.joining) {
        return refused("the block has other replicas by now");
    }
    let stray = Stray { inode: join.inode, generation: known.generation, index: extent.index };
    if transaction.before().is_stray(extent.joining, &stray)? {
        return refused("the worker has not freed what it had of the block");
    }
    let after = ExtentRecord { joining: extent.joining, ..known.clone() };
    put(transaction, &owner, extent.index, Some(&known), &after);
    transaction.changes.push(Change::Layout(join.inode));
    Ok(Outcome::Done)
}

/// Takes a copy in as a replica, or gives it up.
pub(super) fn settle(transaction: &mut Transaction<'_>, settle: &SettleReplica) -> Result<Outcome, StateError> {
    let refused = |reason: &str| Ok(Outcome::Refused(reason.to_owned()));
    let Some(extent) = &settle.extent else { return refused("no block is named") };
    let found = find(transaction, settle.inode, extent.index)?;
    let Some((owner, known)) = found.filter(|(_, known)| known.joining != 0 && known.joining == extent.joining) else {
        return refused("the copy has been given up");
    };
    let is_good = settle.joined && is_as(&known, extent);
    let joins = known.joins.checked_add(1).filter(|_| is_good);
    let after = if let Some(joins) = joins {
        let kept = replicas(&known.workers, &known.joined).filter(|(worker, _)| settle.keep.contains(worker));
        let kept: Vec<(u64, u32)> = kept.chain([(known.joining, joins)]).collect();
        ExtentRecord { joins, ..with_replicas(&known, &kept) }
    } else {
        ExtentRecord { joining: 0, ..known.clone() }
    };
    put(transaction, &owner, extent.index, Some(&known), &after);
    transaction.changes.push(Change::Layout(settle.inode));
    match joins.is_some() || !settle.joined {
        true => Ok(Outcome::Done),
        false if is_good => refused("the block has been copied as often as a block can be"),
        false => refused("the block was written to meanwhile"),
    }
}

/// Takes a worker off blocks that one of the others has, too.
pub(super) fn give_up(transaction: &mut Transaction<'_>, given_up: &GiveUpReplicas) -> Result<Outcome, StateError> {
    let GiveUpReplicas { worker_id, blocks, others } = given_up;
    for BlockOf { inode, index } in blocks {
        let Some((owner, known)) = find(transaction, *inode, *index)? else { continue };
        let is_elsewhere = known.workers.iter().any(|worker| worker != worker_id && others.contains(worker));
        if !is_elsewhere || !known.workers.contains(worker_id) {
            continue;
        }
        let kept: Vec<(u64, u32)> =
            replicas(&known.workers, &known.joined).filter(|(worker, _)| worker != worker_id).collect();
        // A copy that is under way finds other replicas than it began with, and is given up.
        let after = ExtentRecord { joining: known.joining, ..with_replicas(&known, &kept) };
        put(transaction, &owner, *index, Some(&known), &after);
        transaction.changes.push(Change::Layout(*inode));
    }
    Ok(Outcome::Done)
}

/// Strikes off what a worker has freed.
pub(super) fn strays_freed(transaction: &mut Transaction<'_>, freed: &StraysFreed) -> Outcome {
    for stray in &freed.strays {
        transaction.delete(Family::Stray, &stray_key(freed.worker, stray));
    }
    Outcome::Done
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cut_is_of_the_blocks_behind_it_that_were_made_before() {
        let cuts = [Cut { from: 10, generation: 3 }, Cut { from: 20, generation: 5 }];
        let is_truncated = |index, generation| is_truncated(&cuts, index, generation);
        assert_eq!(
            [(9, 0), (10, 2), (19, 2), (20, 2), (20, 4)].map(|(index, at)| is_truncated(index, at)),
            [false, true, true, true, true]
        );
        assert_eq!([(10, 3), (19, 4), (20, 5), (99, 6)].map(|(index, at)| is_truncated(index, at)), [false; 4]);
    }

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
}
