//! Blocks that all of their workers have lost, as a host that loses its power loses what it had not synced.
//!
//! Nobody can bring such a file to its bucket. Somebody has to say that it is given up ([`drop_lost`]): the file goes
//! back to the version that its bucket has, as a whole, since its other blocks are of a later version. Where the bucket
//! has none, the other blocks are all that is left of the file: they stay, and the lost ones become zeros.

use cavern_proto::Scheme;
use cavern_proto::master::{Kind, Origin};
use cavern_proto::record::{DropLost, InodeRecord, ObjectRecord};

use crate::error::Result;
use crate::index::intents::{self, Reach};
use crate::index::{extents, origins};
use crate::outcome::Outcome;
use crate::tables::Tables;
use crate::transaction::Transaction;

/// What the bucket has of a file: an object of the file's own, or the origin of the file, which may be kept under
/// another key.
fn in_bucket(tables: Tables<'_>, inode: u64, record: &InodeRecord) -> Result<Option<Origin>> {
    if let Some(origin) = &record.origin {
        return Ok(Some(Origin { valid: origin.length, ..origin.clone() }));
    }
    let mut latest: Option<(String, ObjectRecord)> = None;
    for item in tables.objects_of(inode).take(origins::LOOKED_AT) {
        let (key, object) = item?;
        // What another inode has noted under the key may have been written over.
        let is_own = tables.noted(record.mount_id, &key)? == Some(inode);
        let is_free = tables.origin_of(record.mount_id, &key)?.is_none_or(|owner| owner == inode);
        let is_later = latest.as_ref().is_none_or(|(_, known)| known.version < object.version);
        if origins::is_written(&object) && is_own && is_free && is_later {
            latest = Some((key, object));
        }
    }
    Ok(latest.map(|(key, object)| origins::at(key, &object, object.size)))
}

/// Gives up lost blocks of a file.
pub fn drop_lost(tx: &mut Transaction<'_>, lost: DropLost) -> Result<Outcome> {
    let DropLost { inode, blocks, now_ns } = lost;
    let is_file = |record: &InodeRecord| record.kind() == Kind::File && !record.unlinked;
    let Some(mut record) = tx.inode(inode)?.filter(is_file) else { return Outcome::refused("the file is gone") };
    let tables = tx.before();
    let mut bytes = 0_u64;
    for block in &blocks {
        let known = tables.extent(inode, block.index)?;
        let Some(known) = known.filter(|known| known.joining == 0 && extents::is_as(known, block)) else {
            return Outcome::refused("the file has been changed meanwhile");
        };
        bytes = bytes.saturating_add(known.allocated.unwrap_or_default());
    }
    if blocks.is_empty() {
        return Outcome::refused("no block is named");
    }
    if let Some(directory) = tables.delegation_around(inode, &record, |_| true)? {
        return Ok(Outcome::Delegated(directory));
    }
    let Some(mount) = tables.mount(record.mount_id)? else { return Outcome::refused("the mount is gone") };
    // What is written in their place has other names.
    let Some(generation) = extents::generation_after(&tx.counters, inode, &record) else {
        return Outcome::refused("the file has been cut as often as a file can be: remove it");
    };
    let there = in_bucket(tables, inode, &record)?;
    let reverted = there.is_some();
    record.version += 1;
    (record.mtime_ns, record.ctime_ns) = (now_ns, now_ns);
    match there {
        Some(_) if mount.scheme() == Some(Scheme::File) => {
            return Outcome::refused(
                "a file of a file:// tree cannot go back to what is there: remove it, or write it anew",
            );
        }
        Some(there) => revert(tx, inode, &mut record, there, generation)?,
        None => {
            record.allocated = record.allocated.map(|sum| sum.saturating_sub(bytes));
            extents::begin_generation(tx, &mut record, generation);
            extents::retire(tx, inode, record.mount_id, blocks)?;
        }
    }
    intents::note(tx, inode, record.mount_id, Reach::Itself, now_ns)?;
    tx.update_inode(inode, record);
    Ok(Outcome::LostDropped { reverted })
}

/// Gives a file the content that its bucket has, in place of all of its blocks.
fn revert(tx: &mut Transaction<'_>, inode: u64, record: &mut InodeRecord, there: Origin, generation: u32) -> Result {
    extents::cut(tx, inode, record, 0, generation)?;
    (record.size, record.allocated) = (there.length, Some(there.length));
    let there = Origin { version: record.version, ..there };
    let noted = tx.before().object(inode, &there.key)?.filter(|object| object.etag == there.etag);
    if let Some(object) = noted {
        let object = ObjectRecord { version: record.version, ..object };
        intents::put_note(tx, record.mount_id, inode, &there.key, &object);
    }
    origins::set(tx, inode, record, (there.length > 0).then_some(there))
}
