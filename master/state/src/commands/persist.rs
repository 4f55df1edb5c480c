//! What the leader reports of the buckets of fs-mode mounts: objects that it begins to write, has written or has
//! deleted, and blocks that are free, or can be dropped because the bucket has them.

use std::collections::HashSet;

use cavern_proto::Scheme;
use cavern_proto::master::{FreeFate, FreedContent, Kind, WriteType};
use cavern_proto::record::{
    BeginObjects, Deleted, FreeContent, Freed, GarbageRecord, InodeRecord, MoveOrigin, ObjectRecord, Persisted,
    PreserveObject, PropagateIntent,
};

use crate::error::Result;
use crate::index::intents::{Reach, drop_note, forget, note_since, put_deletion, put_note};
use crate::index::{extents, origins};
use crate::outcome::Outcome;
use crate::schema;
use crate::tables::Tables;
use crate::transaction::Transaction;

/// Blocks of a file that are counted one by one.
const COUNTED: usize = 1000;

/// Hands the change of a directory's path on to what lies in it.
pub fn propagate(tx: &mut Transaction<'_>, spread: &PropagateIntent) -> Result<Outcome> {
    let tables = tx.before();
    let Some(mut intent) = tables.intent(spread.inode)?.filter(|intent| intent.propagates) else {
        return Ok(Outcome::Done);
    };
    let after = (!intent.propagated_after.is_empty()).then_some(&*intent.propagated_after);
    let (entries, is_last) = tables.entries(spread.inode, after, spread.limit.max(1) as usize)?;
    intent.propagates = !is_last;
    intent.propagated_after = entries.last().filter(|_| !is_last).map(|(name, _)| name.clone()).unwrap_or_default();
    for (_, dentry) in entries {
        let reach = if dentry.kind() == Kind::Directory { Reach::Below } else { Reach::Itself };
        let first = (intent.first_change, intent.first_ns);
        note_since(tx, dentry.inode, intent.mount_id, reach, first, intent.changed_ns)?;
    }
    tx.put(schema::Intents, spread.inode, &intent);
    Ok(Outcome::Done)
}

/// Notes that objects of these keys may be there from now on. What another inode has noted under such a key may be
/// written over at any time: should that inode get the name once more before it has given the object up, it is written
/// once more. [`Outcome::OutOfDate`] when such an object has become its inode's origin since the asker looked.
pub fn begin(tx: &mut Transaction<'_>, begin: &BeginObjects) -> Result<Outcome> {
    let named = tx.inode(begin.inode)?.filter(|record| !record.unlinked);
    if let Some(record) = &named {
        let (tables, inode) = (tx.before(), begin.inode);
        for key in &begin.keys {
            if tables.origin_of(record.mount_id, key)?.is_some_and(|owner| owner != inode) {
                return Ok(Outcome::OutOfDate);
            }
        }
        for key in &begin.keys {
            let noted = tables.noted(record.mount_id, key)?;
            if let Some(other) = noted.filter(|other| *other != inode)
                && tables.object(other, key)?.is_some()
            {
                tx.put(schema::Objects, (other, key.as_str()), &ObjectRecord::default());
            }
            if noted != Some(inode) || tables.object(inode, key)?.is_none() {
                put_note(tx, record.mount_id, inode, key, &ObjectRecord::default());
            }
        }
    }
    Ok(Outcome::Began { is_named: named.is_some() })
}

/// Takes down what was written to the bucket for an inode.
pub fn persisted(tx: &mut Transaction<'_>, persisted: Persisted) -> Result<Outcome> {
    let Persisted { inode, change, objects, gone } = persisted;
    let tables = tx.before();
    let record = tx.inode(inode)?;
    let mount = record.as_ref().map_or(Ok(None), |record| tables.mount(record.mount_id))?;
    let (Some(record), Some(_)) = (record, mount) else {
        forget(tx, inode)?;
        return Ok(Outcome::Done);
    };
    let mount_id = record.mount_id;
    let intent = tables.intent(inode)?;
    let since = intent.as_ref().map_or((change, record.ctime_ns), |intent| (intent.first_change, intent.first_ns));
    // One without a name has been given up with all of its objects; an origin among them stays until nobody needs it.
    let lost = if record.unlinked { HashSet::new() } else { gone.iter().map(String::as_str).collect() };
    let kept = match &record.origin {
        Some(origin) if !origins::follow(tx, inode, &record, &objects, &lost)? => origin.key.clone(),
        _ => String::new(),
    };
    for written in objects {
        let object = written.object.unwrap_or_default();
        if record.unlinked {
            put_deletion(tx, mount_id, &written.key, object.etag, since)?;
        } else {
            put_note(tx, mount_id, inode, &written.key, &object);
            tx.delete(schema::Deletions, (mount_id, written.key.as_str()));
        }
    }
    for key in gone.into_iter().filter(|key| *key != kept) {
        if let Some(object) = tables.object(inode, &key)? {
            drop_note(tx, mount_id, inode, &key)?;
            put_deletion(tx, mount_id, &key, object.etag, since)?;
        }
    }
    match intent {
        Some(intent) if intent.change <= change => tx.delete(schema::Intents, inode),
        Some(mut intent) if intent.first_change <= change => {
            // What came after it is what the bucket lacks now.
            (intent.first_change, intent.first_ns) = (change + 1, intent.changed_ns);
            tx.put(schema::Intents, inode, &intent);
        }
        Some(_) | None => {}
    }
    Ok(Outcome::Done)
}

/// Notes an object that belongs to no inode: it is deleted as soon as it is nobody's origin.
pub fn preserve_object(tx: &mut Transaction<'_>, begin: &PreserveObject) -> Result<Outcome> {
    let since = (tx.counters.change + 1, begin.now_ns);
    put_deletion(tx, begin.mount_id, &begin.key, String::new(), since)?;
    Ok(Outcome::Done)
}

/// Ends a deletion, unless the key has been given up once more since.
pub fn deleted(tx: &mut Transaction<'_>, deleted: &Deleted) -> Result<Outcome> {
    let known = tx.before().deletion(deleted.mount_id, &deleted.key)?;
    if known.is_some_and(|known| known.change == deleted.change) {
        tx.delete(schema::Deletions, (deleted.mount_id, deleted.key.as_str()));
    }
    Ok(Outcome::Done)
}

/// Strikes workers off a garbage record; the last one ends it.
pub fn freed(tx: &mut Transaction<'_>, freed: &Freed) -> Result<Outcome> {
    let garbage = tx.before().get(schema::Garbage, freed.number)?.filter(|garbage| !garbage.is_cut);
    let Some(GarbageRecord { inode, mount_id, mut extents, .. }) = garbage else { return Ok(Outcome::Done) };
    for extent in &mut extents {
        extent.workers.retain(|worker| !freed.workers.contains(worker));
    }
    extents.retain(|extent| !extent.workers.is_empty());
    if extents.is_empty() {
        tx.delete(schema::Garbage, freed.number);
    } else {
        tx.put(schema::Garbage, freed.number, &GarbageRecord { inode, mount_id, extents, is_cut: false });
    }
    Ok(Outcome::Done)
}

/// Drops the blocks of a file, if the bucket has all of its content and nobody may be writing to them: nobody but
/// `session` holds it.
pub fn free_content(tx: &mut Transaction<'_>, free: FreeContent) -> Result<FreedContent> {
    let FreeContent { inode, session } = free;
    let tables = tx.before();
    let freed = |fate: FreeFate, blocks, bytes| Ok(FreedContent { fate: fate as i32, blocks, bytes });
    let is_file = |record: &InodeRecord| record.kind() == Kind::File;
    let Some(mut record) = tx.inode(inode)?.filter(is_file) else { return freed(FreeFate::Nothing, 0, 0) };
    let mount = tables.mount(record.mount_id)?.filter(|mount| mount.write_type() == WriteType::FsMode);
    let Some(mount) = mount else { return freed(FreeFate::Nothing, 0, 0) };
    let (blocks, bytes) = figures(tables, inode, &record, mount.block_size.max(1))?;
    if blocks == 0 {
        return freed(FreeFate::Nothing, 0, 0);
    }
    if mount.scheme() == Some(Scheme::File) {
        return freed(FreeFate::Unsupported, blocks, bytes);
    }
    let Some((key, object)) = origins::whole_object(tables, inode, &record)? else {
        return freed(FreeFate::Dirty, blocks, bytes);
    };
    if record.unlinked || tables.is_written_by_others(inode, session)? {
        return freed(FreeFate::Open, blocks, bytes);
    }
    let Some(generation) = extents::generation_after(&tx.counters, inode, &record) else {
        return freed(FreeFate::Unsupported, blocks, bytes);
    };
    let origin = (record.size > 0).then(|| origins::at(key, &object, record.size));
    extents::cut(tx, inode, &mut record, 0, generation)?;
    record.allocated = Some(origin.as_ref().map_or(0, |origin| origin.valid));
    origins::set(tx, inode, &mut record, origin)?;
    tx.update_inode(inode, record);
    freed(FreeFate::Freed, blocks, bytes)
}

/// Blocks of a file, and their bytes. A file with very many is taken for one without holes.
fn figures(tables: Tables<'_>, inode: u64, record: &InodeRecord, block_size: u64) -> Result<(u64, u64)> {
    let (mut blocks, mut bytes) = (0, 0);
    // Those that have been cut off are recorded, too.
    if record.cuts.is_empty() {
        for extent in tables.recorded_extents(inode, 0).take(COUNTED) {
            blocks += 1;
            bytes += record.size.saturating_sub(u64::from(extent?.index) * block_size).min(block_size);
        }
    }
    let is_counted = record.cuts.is_empty() && blocks < COUNTED as u64;
    Ok(if is_counted { (blocks, bytes) } else { (record.size.div_ceil(block_size), record.size) })
}

/// An origin has been copied to another key.
pub fn move_origin(tx: &mut Transaction<'_>, moved: MoveOrigin) -> Result<Outcome> {
    let Some(mut record) = tx.inode(moved.inode)? else { return Ok(Outcome::Done) };
    let (Some(from), Some(mut to)) = (record.origin.clone(), moved.to) else { return Ok(Outcome::Done) };
    // A copy that was made while less of it was valid does not do: see `lost`.
    if from.key == moved.key && from.etag == moved.etag && from.valid <= to.length {
        to.valid = from.valid.min(to.length);
        origins::set(tx, moved.inode, &mut record, Some(to))?;
        tx.update_inode(moved.inode, record);
    }
    Ok(Outcome::Done)
}
