//! Blocks that all of their workers have lost, as a host that loses its power loses what it had not synced.
//!
//! Nobody can bring such a file to its bucket. Somebody has to say that it is given up ([`drop_lost`]): the file goes
//! back to the version that its bucket has, as a whole, since its other blocks are of a later version. Where the bucket
//! has none, the other blocks are all that is left of the file: they stay, and the lost ones become zeros.

use cavern_proto::Scheme;
use cavern_proto::master::{Kind, Origin};
use cavern_proto::record::{DropLost, InodeRecord, ObjectRecord};

use super::origin::LOOKED_AT;
use super::transaction::Change;
use super::{Outcome, Tables, Transaction, extent, intent, origin};
use crate::error::StateError;

/// What the bucket has of a file: an object of the file's own, or the origin of the file, which may be kept under
/// another key.
fn in_bucket(tables: Tables<'_>, inode: u64, record: &InodeRecord) -> Result<Option<Origin>, StateError> {
    if let Some(origin) = &record.origin {
        return Ok(Some(Origin { valid: origin.length, ..origin.clone() }));
    }
    let mut latest: Option<(String, ObjectRecord)> = None;
    for item in tables.objects_of(inode).take(LOOKED_AT) {
        let (key, object) = item?;
        // What another inode has noted under the key may have been written over.
        let is_own = tables.noted(record.mount_id, &key)? == Some(inode);
        let is_free = tables.origin_of(record.mount_id, &key)?.is_none_or(|owner| owner == inode);
        let is_later = latest.as_ref().is_none_or(|(_, known)| known.version < object.version);
        if origin::is_written(&object) && is_own && is_free && is_later {
            latest = Some((key, object));
        }
    }
    Ok(latest.map(|(key, object)| origin::at(key, &object, object.size)))
}

/// Gives up lost blocks of a file.
pub(super) fn drop_lost(transaction: &mut Transaction<'_>, lost: DropLost) -> Result<Outcome, StateError> {
    let refused = |reason: &str| Ok(Outcome::Refused(reason.to_owned()));
    let DropLost { inode, blocks, now_ns } = lost;
    let is_file = |record: &InodeRecord| record.kind() == Kind::File && !record.unlinked;
    let Some(mut record) = transaction.inode(inode)?.filter(is_file) else { return refused("the file is gone") };
    let tables = transaction.before();
    let mut bytes = 0_u64;
    for block in &blocks {
        let known = tables.extent(inode, block.index)?;
        let Some(known) = known.filter(|known| known.joining == 0 && extent::is_as(known, block)) else {
            return refused("the file has been changed meanwhile");
        };
        bytes = bytes.saturating_add(known.allocated.unwrap_or_default());
    }
    if blocks.is_empty() {
        return refused("no block is named");
    }
    if let Some(directory) = tables.held_around(inode, &record, |_| true)? {
        return Ok(Outcome::Held(directory));
    }
    let Some(mount) = tables.mount(record.mount_id)? else { return refused("the mount is gone") };
    // What is written in their place has other names.
    let Some(generation) = extent::generation_after(&transaction.counters, inode, &record) else {
        return refused("the file has been cut as often as a file can be: remove it");
    };
    let there = in_bucket(tables, inode, &record)?;
    let reverts = there.is_some();
    record.version += 1;
    (record.mtime_ns, record.ctime_ns) = (now_ns, now_ns);
    match there {
        Some(_) if mount.scheme() == Some(Scheme::File) => {
            return refused("a file of a file:// tree cannot go back to what is there: remove it, or write it anew");
        }
        Some(there) => revert(transaction, inode, &mut record, there, generation)?,
        None => {
            record.allocated = record.allocated.map(|sum| sum.saturating_sub(bytes));
            record.generation = generation;
            extent::retire_extents(transaction, inode, record.mount_id, blocks);
        }
    }
    let mount_id = record.mount_id;
    transaction.put_inode(inode, record);
    intent::note(transaction, inode, mount_id, intent::Reach::Itself, now_ns)?;
    transaction.changes.push(Change::Inode(inode));
    Ok(Outcome::LostDropped { reverted: reverts })
}

/// Gives a file the content that its bucket has, in place of all of its blocks.
fn revert(
    transaction: &mut Transaction<'_>,
    inode: u64,
    record: &mut InodeRecord,
    there: Origin,
    generation: u32,
) -> Result<(), StateError> {
    extent::cut(transaction, inode, record, 0, generation)?;
    (record.size, record.allocated) = (there.length, Some(there.length));
    let there = Origin { version: record.version, ..there };
    let noted = transaction.before().object(inode, &there.key)?.filter(|object| object.etag == there.etag);
    if let Some(object) = noted {
        let object = ObjectRecord { version: record.version, ..object };
        intent::put_note(transaction, record.mount_id, inode, &there.key, &object);
    }
    origin::set(transaction, inode, record, (there.length > 0).then_some(there))
}
