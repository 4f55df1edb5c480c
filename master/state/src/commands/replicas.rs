//! Copies of blocks: workers that are given one, or are no part of a block any more; and records of blocks that were
//! cut off, which go in steps.

use cavern_proto::record::{
    BlockOf, Cut, DropBlocks, ExtentRecord, GiveUpReplicas, JoinReplica, SettleReplica, Stray, StraysFreed,
};

use crate::change::Change;
use crate::error::Result;
use crate::index::extents::{Block, is_as, put, replicas, retire, with_replicas};
use crate::outcome::{Outcome, StepProgress};
use crate::records::is_truncated;
use crate::schema;
use crate::transaction::Transaction;

/// A block as it is now; `None` when it, or its file, is gone.
fn find(tx: &Transaction<'_>, inode: u64, index: u32) -> Result<Option<(Block, ExtentRecord)>> {
    let Some(record) = tx.inode(inode)? else { return Ok(None) };
    let Some(known) = tx.before().extent(inode, index)? else { return Ok(None) };
    let replicas = tx.before().mount(record.mount_id)?.map_or(1, |mount| mount.replicas.max(1));
    Ok(Some((Block { inode, index, mount_id: record.mount_id, replicas }, known)))
}

/// Notes that a worker is about to be given a copy of a block.
pub fn join(tx: &mut Transaction<'_>, join: &JoinReplica) -> Result<Outcome> {
    let Some(extent) = &join.extent else { return Outcome::refused("no block is named") };
    let Some((block, known)) = find(tx, join.inode, extent.index)? else {
        return Outcome::refused("the block is gone");
    };
    if !is_as(&known, extent) || known.joining != 0 || known.workers.contains(&extent.joining) {
        return Outcome::refused("the block has other replicas by now");
    }
    let stray = Stray { inode: join.inode, generation: known.generation, index: extent.index };
    if tx.before().has(schema::Strays, (extent.joining, stray))? {
        return Outcome::refused("the worker has not freed what it had of the block");
    }
    let after = ExtentRecord { joining: extent.joining, ..known.clone() };
    put(tx, block, Some(&known), &after);
    tx.notify(Change::Layout(join.inode));
    Ok(Outcome::Done)
}

/// Takes a copy in as a replica, or gives it up.
pub fn settle(tx: &mut Transaction<'_>, settle: &SettleReplica) -> Result<Outcome> {
    let Some(extent) = &settle.extent else { return Outcome::refused("no block is named") };
    let found = find(tx, settle.inode, extent.index)?;
    let Some((block, known)) = found.filter(|(_, known)| known.joining != 0 && known.joining == extent.joining) else {
        return Outcome::refused("the copy has been given up");
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
    put(tx, block, Some(&known), &after);
    tx.notify(Change::Layout(settle.inode));
    match joins.is_some() || !settle.joined {
        true => Ok(Outcome::Done),
        false if is_good => Outcome::refused("the block has been copied as often as a block can be"),
        false => Outcome::refused("the block was written to meanwhile"),
    }
}

/// Takes a worker off blocks that one of the others has, too.
pub fn give_up(tx: &mut Transaction<'_>, given_up: &GiveUpReplicas) -> Result<Outcome> {
    let GiveUpReplicas { worker_id, blocks, others } = given_up;
    for BlockOf { inode, index } in blocks {
        let Some((block, known)) = find(tx, *inode, *index)? else { continue };
        let is_elsewhere = known.workers.iter().any(|worker| worker != worker_id && others.contains(worker));
        if !is_elsewhere || !known.workers.contains(worker_id) {
            continue;
        }
        let kept = replicas(&known.workers, &known.joined).filter(|(worker, _)| worker != worker_id);
        let kept: Vec<(u64, u32)> = kept.collect();
        // A copy that is under way finds other replicas than it began with, and is given up.
        let after = ExtentRecord { joining: known.joining, ..with_replicas(&known, &kept) };
        put(tx, block, Some(&known), &after);
        tx.notify(Change::Layout(*inode));
    }
    Ok(Outcome::Done)
}

/// Strikes off what a worker has freed.
pub fn strays_freed(tx: &mut Transaction<'_>, freed: &StraysFreed) -> Outcome {
    for stray in &freed.strays {
        tx.delete(schema::Strays, (freed.worker, *stray));
    }
    Outcome::Done
}

/// Goes on with what a cut of a file has begun. Whether there is more to be done.
pub fn drop_truncated_step(tx: &mut Transaction<'_>, step: &DropBlocks) -> Result<StepProgress> {
    let done = StepProgress::default();
    let garbage = tx.before().get(schema::Garbage, step.number)?;
    let Some(garbage) = garbage.filter(|garbage| garbage.is_cut) else { return Ok(done) };
    let inode = garbage.inode;
    let record = tx.inode(inode)?;
    let first = record.as_ref().and_then(|record| record.cuts.first()).map(|cut| cut.from);
    let (Some(mut record), Some(first)) = (record, first) else {
        // The inode is gone with all of its blocks, or another step has done this.
        tx.delete(schema::Garbage, step.number);
        return Ok(done);
    };
    let (looked_at, next) = tx.before().some_recorded_extents(inode, first, step.limit.max(1) as usize)?;
    let cut_off = looked_at.into_iter().filter(|extent| is_truncated(&record.cuts, extent.index, extent.generation));
    let cut_off = cut_off.collect();
    retire(tx, inode, record.mount_id, cut_off)?;
    match next {
        None => {
            record.cuts.clear();
            tx.delete(schema::Garbage, step.number);
        }
        Some(next) => {
            let later = record.cuts.split_off(record.cuts.partition_point(|cut| cut.from <= next));
            // Of those that begin before, the last is of the latest generation.
            let here = record.cuts.last().map(|cut| Cut { from: next, ..*cut });
            record.cuts = here.into_iter().chain(later).collect();
        }
    }
    tx.put_inode(inode, record);
    Ok(StepProgress { more: next.is_some(), ..done })
}
