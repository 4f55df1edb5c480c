//! Content that only the bucket has.
//!
//! A block of a file is its extent; without one it is what the file's *origin*, an object, has in that place, as far as
//! that is valid; beyond, it is a hole. An origin comes to be when the blocks of a file are dropped ([`free`]), which
//! is done only with content that the bucket has in its newest version, and while nobody holds the file; files of an
//! existing prefix, and those whose workers are lost, have one as well. From then on
//!
//! - a block that is written has an extent, and keeps it until the file is cut or its blocks are dropped again;
//! - a cut lowers the valid length, which never grows;
//! - an object of a later version, made of the file's blocks and of the origin, can take the origin's place: what has
//!   no extent is the same in both ([`successor`]).
//!
//! Which object is whose origin is in a family of its own, by key: nobody else writes to such a key, or deletes it.

use std::collections::HashSet;

use cavern_proto::Scheme;
use cavern_proto::master::{FreeFate, FreedContent, Kind, Origin, WriteType};
use cavern_proto::record::{InodeRecord, MoveOrigin, ObjectRecord, PersistedObject};

use super::records::deletion_key;
use super::transaction::Change;
use super::{Family, Outcome, Tables, Transaction, extent};
use crate::error::StateError;

/// Objects of a file that are looked at in search of one that is whole, or that can take the place of another. Where a
/// file has so many, nearly all are.
pub(super) const LOOKED_AT: usize = 256;
/// Blocks of a file that are counted one by one.
const COUNTED: usize = 1000;

/// Gives a file another origin, or none; the caller stores the record.
pub(super) fn set(
    transaction: &mut Transaction<'_>,
    inode: u64,
    record: &mut InodeRecord,
    origin: Option<Origin>,
) -> Result<(), StateError> {
    let key = |origin: &Origin| deletion_key(record.mount_id, &origin.key);
    let (old, new) = (record.origin.as_ref().map(key), origin.as_ref().map(key));
    if old != new {
        if let (Some(old), Some(origin)) = (old, &record.origin)
            // Another's by now, where somebody else has put another object.
            && transaction.before().origin_of(record.mount_id, &origin.key)? == Some(inode)
        {
            transaction.delete(Family::Origin, &old);
        }
        if let Some(new) = new {
            transaction.put_bytes(Family::Origin, &new, &inode.to_be_bytes());
        }
    }
    record.origin = origin;
    Ok(())
}

/// Somebody else has deleted the origin of a file without a name: the key is free for others.
pub(super) fn lose(transaction: &mut Transaction<'_>, record: &InodeRecord) {
    if let Some(origin) = &record.origin {
        transaction.delete(Family::Origin, &deletion_key(record.mount_id, &origin.key));
    }
}

/// A file has been cut: what lay beyond never comes back. The caller stores the record.
pub(super) fn cut(
    transaction: &mut Transaction<'_>,
    inode: u64,
    record: &mut InodeRecord,
    length: u64,
) -> Result<(), StateError> {
    let Some(mut origin) = record.origin.clone() else { return Ok(()) };
    origin.valid = origin.valid.min(length);
    let rest = (origin.valid > 0).then_some(origin);
    set(transaction, inode, record, rest)
}

/// Drops the blocks of a file, if the bucket has all of its content and nobody may be writing to them: nobody but
/// `session` holds it.
pub(super) fn free(transaction: &mut Transaction<'_>, inode: u64, session: u64) -> Result<Outcome, StateError> {
    let tables = transaction.before();
    let freed =
        |fate: FreeFate, blocks: u64, bytes: u64| Ok(Outcome::Freed(FreedContent { fate: fate as i32, blocks, bytes }));
    let is_file = |record: &InodeRecord| record.kind() == Kind::File;
    let Some(mut record) = transaction.inode(inode)?.filter(is_file) else { return freed(FreeFate::Nothing, 0, 0) };
    let mount = tables.mount(record.mount_id)?.filter(|mount| mount.write_type() == WriteType::FsMode);
    let Some(mount) = mount else { return freed(FreeFate::Nothing, 0, 0) };
    let (blocks, bytes) = figures(tables, inode, &record, mount.block_size.max(1))?;
    if blocks == 0 {
        return freed(FreeFate::Nothing, 0, 0);
    }
    if mount.scheme() == Some(Scheme::File) {
        return freed(FreeFate::Unsupported, blocks, bytes);
    }
    let (key, object) = match whole_object(tables, inode, &record)? {
        Some(object) => object,
        None => return freed(FreeFate::Dirty, blocks, bytes),
    };
    if record.unlinked || tables.is_written_by_others(inode, session)? {
        return freed(FreeFate::Open, blocks, bytes);
    }
    let Some(generation) = extent::generation_after(&transaction.counters, inode, &record) else {
        return freed(FreeFate::Unsupported, blocks, bytes);
    };
    let origin = (record.size > 0).then(|| at(key, &object, record.size));
    extent::cut(transaction, inode, &mut record, 0, generation)?;
    record.allocated = Some(origin.as_ref().map_or(0, |origin| origin.valid));
    set(transaction, inode, &mut record, origin)?;
    transaction.put_inode(inode, record);
    transaction.changes.push(Change::Inode(inode));
    freed(FreeFate::Freed, blocks, bytes)
}

/// Blocks of a file, and their bytes. A file with very many is taken for one without holes.
fn figures(tables: Tables<'_>, inode: u64, record: &InodeRecord, block_size: u64) -> Result<(u64, u64), StateError> {
    if !record.cuts.is_empty() {
        return Ok((record.size.div_ceil(block_size), record.size));
    }
    let (mut blocks, mut bytes) = (0, 0);
    for extent in tables.recorded_extents(inode, 0).take(COUNTED) {
        blocks += 1;
        bytes += record.size.saturating_sub(u64::from(extent?.index) * block_size).min(block_size);
    }
    if blocks == COUNTED as u64 {
        return Ok((record.size.div_ceil(block_size), record.size));
    }
    Ok((blocks, bytes))
}

/// An object that has all of a file's content in its newest version, if the bucket lacks no change of the file.
fn whole_object(
    tables: Tables<'_>,
    inode: u64,
    record: &InodeRecord,
) -> Result<Option<(String, ObjectRecord)>, StateError> {
    if tables.intent(inode)?.is_some() {
        return Ok(None);
    }
    let is_whole =
        |object: &ObjectRecord| is_written(object) && object.version == record.version && object.size == record.size;
    let found = tables
        .objects_of(inode)
        .take(LOOKED_AT)
        .find(|item| item.as_ref().map_or(true, |(_, object)| is_whole(object)));
    found.transpose()
}

/// Whether an object holds the content of a file as it is.
pub fn has_content(tables: Tables<'_>, inode: u64, record: &InodeRecord) -> Result<bool, StateError> {
    for item in tables.objects_of(inode) {
        let (_, object) = item?;
        if is_written(&object) && object.version == record.version {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Whether the blocks of a file can be dropped, as far as can be seen without trying.
pub fn is_clean(tables: Tables<'_>, inode: u64) -> Result<bool, StateError> {
    let Some(record) = tables.inode(inode)?.filter(|record| !record.unlinked) else { return Ok(false) };
    Ok(!tables.is_written_by_others(inode, 0)? && whole_object(tables, inode, &record)?.is_some())
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
) -> Result<Option<Origin>, StateError> {
    let is_fit = |key: &str, object: &ObjectRecord| {
        is_written(object) && object.version >= origin.version && !gone.contains(key)
    };
    let fit = |written: &PersistedObject| {
        let object = written.object.as_ref().filter(|object| is_fit(&written.key, object))?;
        Some(at(written.key.clone(), object, origin.valid))
    };
    if let Some(same) = written.iter().find(|written| written.key == origin.key) {
        if let Some(next) = fit(same) {
            return Ok(Some(next));
        }
    } else if let Some(same) = tables.object(inode, &origin.key)?.filter(|object| is_fit(&origin.key, object)) {
        return Ok(Some(at(origin.key.clone(), &same, origin.valid)));
    }
    if let Some(next) = written.iter().rev().find_map(fit) {
        return Ok(Some(next));
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

pub(super) fn is_written(object: &ObjectRecord) -> bool {
    !object.etag.is_empty()
}

/// An object as an origin, valid so far.
pub(super) fn at(key: String, object: &ObjectRecord, valid: u64) -> Origin {
    let ObjectRecord { etag, size: length, version, .. } = object.clone();
    Origin { key, etag, length, valid: valid.min(length), version }
}

/// Objects of a file have been written, and others are to be given up: its origin goes along. False when the origin is
/// among `gone` and there is nothing in its place, so that it has to stay.
pub(super) fn follow(
    transaction: &mut Transaction<'_>,
    inode: u64,
    record: &InodeRecord,
    written: &[PersistedObject],
    gone: &HashSet<&str>,
) -> Result<bool, StateError> {
    let Some(origin) = &record.origin else { return Ok(true) };
    let is_gone = gone.contains(origin.key.as_str());
    match successor(transaction.before(), inode, record, origin, written, gone)? {
        Some(next) if next != *origin => {
            let mut record = record.clone();
            set(transaction, inode, &mut record, Some(next))?;
            transaction.put_inode(inode, record);
            transaction.changes.push(Change::Inode(inode));
            Ok(true)
        }
        Some(_) => Ok(true),
        None => Ok(!is_gone),
    }
}

/// An origin has been copied to another key.
pub(super) fn move_to(transaction: &mut Transaction<'_>, moved: MoveOrigin) -> Result<Outcome, StateError> {
    let Some(mut record) = transaction.inode(moved.inode)? else { return Ok(Outcome::Done) };
    let (Some(from), Some(mut to)) = (record.origin.clone(), moved.to) else { return Ok(Outcome::Done) };
    // A copy that was made while less of it was valid does not do: see `lost`.
    if from.key == moved.key && from.etag == moved.etag && from.valid <= to.length {
        to.valid = from.valid.min(to.length);
        set(transaction, moved.inode, &mut record, Some(to))?;
        transaction.put_inode(moved.inode, record);
        transaction.changes.push(Change::Inode(moved.inode));
    }
    Ok(Outcome::Done)
}
