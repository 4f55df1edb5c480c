//! Content that only the bucket has.
//!
//! A block of a file is its extent; without one it is what the file's *origin*, an object, has in that place, as far as
//! that is valid; beyond, it is a hole. An origin comes to be when the blocks of a file are dropped, which is done only
//! with content that the bucket has in its newest version, and while nobody holds the file; files of an existing
//! prefix, and those whose workers are lost, have one as well. From then on
//!
//! - a block that is written has an extent, and keeps it until the file is cut or its blocks are dropped again;
//! - a cut lowers the valid length, which never grows;
//! - an object of a later version, made of the file's blocks and of the origin, can take the origin's place: what has
//!   no extent is the same in both ([`successor`]).
//!
//! Which object is whose origin is in a family of its own, by key: nobody else writes to such a key, or deletes it.

use std::collections::HashSet;

use cavern_proto::master::Origin;
use cavern_proto::record::{InodeRecord, ObjectRecord, PersistedObject};

use crate::error::Result;
use crate::schema;
use crate::tables::Tables;
use crate::transaction::Transaction;

/// Objects of a file that are looked at in search of one that is whole, or that can take the place of another. Where a
/// file has so many, nearly all are.
pub const LOOKED_AT: usize = 256;

/// Gives a file another origin, or none; the caller stores the record.
pub fn set(tx: &mut Transaction<'_>, inode: u64, record: &mut InodeRecord, origin: Option<Origin>) -> Result {
    let (mount_id, old) = (record.mount_id, std::mem::replace(&mut record.origin, origin));
    let (old, new) = (old.as_ref().map(|origin| &origin.key), record.origin.as_ref().map(|origin| &origin.key));
    if old == new {
        return Ok(());
    }
    if let Some(key) = old
        // Another's by now, where somebody else has put another object.
        && tx.before().origin_of(mount_id, key)? == Some(inode)
    {
        tx.delete(schema::Origins, (mount_id, key.as_str()));
    }
    if let Some(key) = new {
        tx.put(schema::Origins, (mount_id, key.as_str()), &inode);
    }
    Ok(())
}

/// Somebody else has deleted the origin of a file without a name: the key is free for others.
pub fn lose(tx: &mut Transaction<'_>, record: &InodeRecord) {
    if let Some(origin) = &record.origin {
        tx.delete(schema::Origins, (record.mount_id, origin.key.as_str()));
    }
}

/// A file has been cut: what lay beyond never comes back. The caller stores the record.
pub fn cut(tx: &mut Transaction<'_>, inode: u64, record: &mut InodeRecord, length: u64) -> Result {
    let Some(mut origin) = record.origin.clone() else { return Ok(()) };
    origin.valid = origin.valid.min(length);
    let rest = (origin.valid > 0).then_some(origin);
    set(tx, inode, record, rest)
}

/// An object that has all of a file's content in its newest version, if the bucket lacks no change of the file.
pub fn whole_object(tables: Tables<'_>, inode: u64, record: &InodeRecord) -> Result<Option<(String, ObjectRecord)>> {
    if tables.intent(inode)?.is_some() {
        return Ok(None);
    }
    let is_whole =
        |object: &ObjectRecord| is_written(object) && object.version == record.version && object.size == record.size;
    let mut objects = tables.objects_of(inode).take(LOOKED_AT);
    objects.find(|item| item.as_ref().map_or(true, |(_, object)| is_whole(object))).transpose()
}

/// The object that can take the place of an origin, if `written` are in their newest state and `gone` are to go: the
/// one under the same key before all others.
fn successor(
    tables: Tables<'_>,
    inode: u64,
    record: &InodeRecord,
    origin: &Origin,
    written: &[PersistedObject],
    gone: &HashSet<&str>,
) -> Result<Option<Origin>> {
    let is_fit = |key: &str, object: &ObjectRecord| {
        is_written(object) && object.version >= origin.version && !gone.contains(key)
    };
    let same = match written.iter().find(|written| written.key == origin.key) {
        Some(same) => same.object.clone(),
        None => tables.object(inode, &origin.key)?,
    };
    let of_written = written.iter().rev().filter_map(|written| Some((&written.key, written.object.clone()?)));
    let mut first = same.map(|same| (&origin.key, same)).into_iter().chain(of_written);
    if let Some((key, object)) = first.find(|(key, object)| is_fit(key, object)) {
        return Ok(Some(at(key.clone(), &object, origin.valid)));
    }
    // The others of a file without a name are to go as well.
    let others = tables.objects_of(inode).take(if record.unlinked { 0 } else { LOOKED_AT });
    for item in others {
        let (key, object) = item?;
        if is_fit(&key, &object) && written.iter().all(|written| written.key != key) {
            return Ok(Some(at(key, &object, origin.valid)));
        }
    }
    Ok(None)
}

pub fn is_written(object: &ObjectRecord) -> bool {
    !object.etag.is_empty()
}

/// An object as an origin, valid so far.
pub fn at(key: String, object: &ObjectRecord, valid: u64) -> Origin {
    let ObjectRecord { etag, size: length, version, .. } = object.clone();
    Origin { key, etag, length, valid: valid.min(length), version }
}

/// Objects of a file have been written, and others are to be given up: its origin goes along. False when the origin is
/// among `gone` and there is nothing in its place, so that it has to stay.
pub fn follow(
    tx: &mut Transaction<'_>,
    inode: u64,
    record: &InodeRecord,
    written: &[PersistedObject],
    gone: &HashSet<&str>,
) -> Result<bool> {
    let Some(origin) = &record.origin else { return Ok(true) };
    let is_gone = gone.contains(origin.key.as_str());
    let Some(next) = successor(tx.before(), inode, record, origin, written, gone)? else { return Ok(!is_gone) };
    if next != *origin {
        let mut record = record.clone();
        set(tx, inode, &mut record, Some(next))?;
        tx.update_inode(inode, record);
    }
    Ok(true)
}
