//! Faults of the tables that `cv fsck` has found, each mended if it is still as it was seen. What is counted is counted
//! right, what has lost the record that leads to it gets that, and what the bucket lacks is written there; no record
//! goes by which anything could be read.

use cavern_proto::master::{Kind, Mount, WriteType};
use cavern_proto::record::mend::Fault;
use cavern_proto::record::{BlockOf, InodeRecord, Mend, MendDirectory, MendName, MendObject, ObjectRecord};

use crate::error::Result;
use crate::index::intents::{Reach, note, put_note};
use crate::index::{extents, usage};
use crate::outcome::Outcome;
use crate::records::{count_entries, is_directory, links};
use crate::schema;
use crate::transaction::Transaction;

/// Mends a fault, or finds that it is another by now.
pub fn mend(tx: &mut Transaction<'_>, mend: Mend) -> Result<Outcome> {
    let is_mended = match mend.fault {
        Some(Fault::Directory(seen)) => directory(tx, &seen)?,
        Some(Fault::Name(seen)) => name(tx, &seen)?,
        Some(Fault::Block(seen)) => block(tx, seen)?,
        Some(Fault::Object(seen)) => object(tx, &seen, mend.now_ns)?,
        Some(Fault::Usage(_)) => count_anew(tx),
        None => false,
    };
    Ok(if is_mended { Outcome::Done } else { Outcome::OutOfDate })
}

/// What a directory counts wrong it goes on counting wrong by as much: as long as it counts the same, it has the same.
fn directory(tx: &mut Transaction<'_>, seen: &MendDirectory) -> Result<bool> {
    let is_so = |record: &InodeRecord| {
        is_directory(record) && links(record) == seen.was_links && record.entries == seen.was_entries
    };
    let Some(mut record) = tx.inode(seen.inode)?.filter(is_so) else { return Ok(false) };
    record.nlink = seen.links;
    record.entries = record.entries.map(|_| seen.entries);
    tx.update_inode(seen.inode, record);
    Ok(true)
}

/// A name that leads to nothing is kept where blocks or objects are left: it says whose they were.
fn name(tx: &mut Transaction<'_>, MendName { parent, name }: &MendName) -> Result<bool> {
    let Some(dentry) = tx.dentry(*parent, name)? else { return Ok(false) };
    let (inode, tables) = (dentry.inode, tx.before());
    let is_left = tables.has_any(schema::Extents, inode)? || tables.has_any(schema::Objects, inode)?;
    if is_left || tx.inode(inode)?.is_some() {
        return Ok(false);
    }
    tx.delete_dentry(*parent, name);
    tx.name_changed(*parent, name, inode, 0);
    if let Some(mut record) = tx.inode(*parent)? {
        count_entries(&mut record, -1);
        // Of `.` and of its own name; in cache-mode there is no more.
        if dentry.kind() == Kind::Directory && links(&record) > 2 {
            record.nlink = links(&record) - 1;
        }
        tx.update_inode(*parent, record);
    }
    Ok(true)
}

fn block(tx: &mut Transaction<'_>, BlockOf { inode, index }: BlockOf) -> Result<bool> {
    let tables = tx.before();
    let (Some(record), Some(extent)) = (tx.inode(inode)?, tables.extent(inode, index)?) else { return Ok(false) };
    let Some(mount) = tables.mount(record.mount_id)? else { return Ok(false) };
    let block = extents::Block { inode, index, mount_id: record.mount_id, replicas: mount.replicas.max(1) };
    extents::put(tx, block, None, &extent);
    Ok(true)
}

fn object(tx: &mut Transaction<'_>, MendObject { inode, key, etag }: &MendObject, now_ns: i64) -> Result<bool> {
    let tables = tx.before();
    let Some(record) = tx.inode(*inode)?.filter(|record| !record.unlinked) else { return Ok(false) };
    // The root of a mount has no object.
    let has_objects = |mount: &Mount| mount.write_type() == WriteType::FsMode && mount.root_inode != *inode;
    let mount = tables.mount(record.mount_id)?.filter(has_objects);
    if mount.is_none() || tables.intent(*inode)?.is_some() {
        return Ok(false);
    }
    if !key.is_empty() {
        let is_origin = record.origin.as_ref().is_some_and(|origin| origin.key == *key);
        // Another inode that has the name by now has noted the key for itself.
        let is_own = tables.noted(record.mount_id, key)? == Some(*inode);
        let is_so = tables.object(*inode, key)?.is_some_and(|object| !etag.is_empty() && object.etag == *etag);
        if is_origin || !is_own || !is_so {
            return Ok(false);
        }
        put_note(tx, record.mount_id, *inode, key, &ObjectRecord::default());
    }
    note(tx, *inode, record.mount_id, Reach::Itself, now_ns)?;
    Ok(true)
}

fn count_anew(tx: &mut Transaction<'_>) -> bool {
    if tx.counters.counted != usage::ALL {
        return false;
    }
    tx.counters.counted = usage::BEGUN;
    tx.delete_all(schema::Usage, ());
    true
}
