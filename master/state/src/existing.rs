//! What the bucket of an fs-mode mount had before it was mounted.
//!
//! It comes into the namespace directory by directory. A directory that was found in the bucket is *unlisted* until all
//! names that the bucket has directly in it are there; then the mark goes, in the command that brings the last of them,
//! and from then on the directory is the namespace's alone, as one that was made there. The mark is a `listed_ns` of 0,
//! and a record of `unlisted`.
//!
//! **Nothing comes back.** While a directory is unlisted, no name in it is made, removed or moved (`posix` refuses
//! that, and says what is to be listed first), it is not removed itself, and neither it nor a directory above it is
//! moved. So an unlisted directory has nothing but names from the bucket, its path is its key, and names that a page
//! brings too late find a directory that is listed, and are dropped. Files in it may be changed: what is there stays as
//! it is, whatever a later page says of it.
//!
//! An object that comes in so is a file with an origin, whose note is the object as it was listed, and which lacks
//! nothing in the bucket.

use std::collections::HashMap;

use bytes::Bytes;
use cavern_proto::master::{Kind, Mount, Origin, WriteType};
use cavern_proto::record::{AdoptListing, DentryRecord, IndexRecord, InodeRecord, ListedEntry, ObjectRecord};

use super::namespace::ListingCounts;
use super::records::{MODE_CHOSEN, count_entries, directory_record, is_directory, links, unlisted_key};
use super::tables::{DEPTH_MAX, index_key};
use super::transaction::Change;
use super::{Family, Transaction, intent, origin, restored};
use crate::error::StateError;

/// The root of a new mount whose bucket has objects.
pub(super) fn begin(transaction: &mut Transaction<'_>, mount: &Mount) {
    mark(transaction, mount.id, &[], mount.root_inode);
    let index = IndexRecord { unlisted: 1, ..IndexRecord::default() };
    transaction.put(Family::Meta, &index_key(mount.id), &index);
}

/// Forgets what a mount that is gone had to list, and whose its objects are.
pub(super) fn forget(transaction: &mut Transaction<'_>, mount_id: u32) {
    let [from, to] = [mount_id, mount_id.saturating_add(1)].map(u32::to_be_bytes);
    transaction.delete_range(Family::Unlisted, &from, &to);
    transaction.delete_range(Family::Noted, &from, &to);
    restored::forget_identities(transaction, mount_id);
}

pub(super) fn mark(transaction: &mut Transaction<'_>, mount_id: u32, path: &[u8], inode: u64) {
    transaction.put_bytes(Family::Unlisted, &unlisted_key(mount_id, path), &inode.to_be_bytes());
}

/// The names from a mount's root down to a directory, each followed by a `/`; `None` when it is cut off from there.
pub(super) fn path(
    transaction: &mut Transaction<'_>,
    directory: u64,
    root: u64,
) -> Result<Option<Vec<u8>>, StateError> {
    let (mut names, mut at): (Vec<Bytes>, u64) = (Vec::new(), directory);
    for _ in 0..DEPTH_MAX {
        if at == root {
            return Ok(Some(names.iter().rev().flat_map(|name| [name, &b"/"[..]].concat()).collect()));
        }
        let Some(record) = transaction.inode(at)? else { break };
        names.push(record.name);
        at = record.parent;
    }
    Ok(None)
}

/// Takes names of the bucket into an unlisted directory, and its mark away after the last of them.
pub(super) fn adopt(transaction: &mut Transaction<'_>, listing: AdoptListing) -> Result<ListingCounts, StateError> {
    let mut counts = ListingCounts::default();
    let tables = transaction.before();
    let mount = tables.mount(listing.mount_id)?.filter(|mount| mount.write_type() == WriteType::FsMode);
    let is_unlisted = |record: &InodeRecord| {
        is_directory(record) && record.mount_id == listing.mount_id && record.listed_ns == 0 && record.parent != 0
    };
    let record = transaction.inode(listing.directory)?.filter(is_unlisted);
    let (Some(mount), Some(mut record)) = (mount, record) else { return Ok(counts) };
    let Some(path) = path(transaction, listing.directory, mount.root_inode)? else { return Ok(counts) };
    let mut index = tables.index(mount.id)?.unwrap_or_default();
    let mut directories = 0;
    // Identities of what comes with this command.
    let mut identities: HashMap<String, u64> = HashMap::new();
    for entry in &listing.entries {
        if transaction.dentry(listing.directory, &entry.name)?.is_some() {
            continue;
        }
        if entry.kind() == Kind::Directory {
            let inode = adopt_directory(transaction, &listing, entry, true);
            let below = [&path, &*entry.name, b"/"].concat();
            mark(transaction, mount.id, &below, inode);
            directories += 1;
        } else {
            let identity = entry.restored.as_ref().map(|restored| restored.identity.clone()).unwrap_or_default();
            let inode = adopt_object(transaction, &listing, entry, true, identities.get(&identity).copied())?;
            if !identity.is_empty() {
                identities.insert(identity, inode);
            }
        }
        index.incomplete += u64::from(entry.restored.as_ref().is_some_and(|restored| restored.incomplete));
        counts.added += 1;
    }
    let is_root = listing.directory == mount.root_inode;
    if !listing.marker.is_empty() && !is_root && tables.object(listing.directory, &listing.key_prefix)?.is_none() {
        let note = ObjectRecord { etag: listing.marker, ..ObjectRecord::default() };
        intent::put_note(transaction, mount.id, listing.directory, &listing.key_prefix, &note);
    }
    index.entries += counts.added;
    index.unlisted += u64::from(directories);
    if listing.complete {
        record.listed_ns = listing.now_ns.max(1);
        transaction.delete(Family::Unlisted, &unlisted_key(mount.id, &path));
        index.unlisted = index.unlisted.saturating_sub(1);
        index.hidden_keys += listing.hidden;
    }
    if counts.added > 0 || listing.complete {
        count_entries(&mut record, counts.added as i64);
        record.nlink = links(&record) + directories;
        transaction.put_inode(listing.directory, record);
    }
    if directories > 0 {
        transaction.changes.push(Change::Inode(listing.directory));
    }
    transaction.put(Family::Meta, &index_key(mount.id), &index);
    Ok(counts)
}

/// Makes a directory of what the bucket has; `first_fill` as in [`Change::Entry`].
pub(super) fn adopt_directory(
    transaction: &mut Transaction<'_>,
    listing: &AdoptListing,
    entry: &ListedEntry,
    first_fill: bool,
) -> u64 {
    let mut record = InodeRecord {
        mode: listing.dir_mode | MODE_CHOSEN,
        uid: listing.uid,
        gid: listing.gid,
        entries: Some(0),
        ..directory_record(listing.directory, entry.name.clone(), listing.mount_id, listing.now_ns)
    };
    if let Some(known) = entry.restored.as_ref().filter(|known| known.kind() == Kind::Directory) {
        restored::restore(&mut record, known);
    }
    let inode = transaction.create_inode(record);
    if let Some(known) = &entry.restored {
        restored::complete(transaction, listing.mount_id, inode, known);
    }
    if let Ok(directory) = std::str::from_utf8(&entry.name)
        && !entry.etag.is_empty()
    {
        let metadata = entry.restored.as_ref().map_or(0, |known| known.metadata);
        let note = ObjectRecord { etag: entry.etag.clone(), metadata, ..ObjectRecord::default() };
        intent::put_note(transaction, listing.mount_id, inode, &format!("{}{directory}/", listing.key_prefix), &note);
    }
    name(transaction, listing.directory, (entry, Kind::Directory), inode, first_fill);
    inode
}

/// Makes a file of an object, or another name of `twin`.
pub(super) fn adopt_object(
    transaction: &mut Transaction<'_>,
    listing: &AdoptListing,
    entry: &ListedEntry,
    first_fill: bool,
    twin: Option<u64>,
) -> Result<u64, StateError> {
    let Ok(file) = std::str::from_utf8(&entry.name) else { return Ok(0) };
    let key = format!("{}{file}", listing.key_prefix);
    if let Some(inode) = restored::link(transaction, listing, entry, &key, twin)? {
        name(transaction, listing.directory, (entry, Kind::File), inode, first_fill);
        return Ok(inode);
    }
    let mut record = InodeRecord {
        kind: Kind::File as i32,
        mode: listing.file_mode | MODE_CHOSEN,
        uid: listing.uid,
        gid: listing.gid,
        size: entry.size,
        mtime_ns: entry.mtime_ns,
        parent: listing.directory,
        name: entry.name.clone(),
        mount_id: listing.mount_id,
        ..InodeRecord::default()
    };
    if let Some(known) = entry.restored.as_ref().filter(|known| known.kind() != Kind::Directory) {
        restored::restore(&mut record, known);
        // A program has set that time, and this one nobody can.
        if record.mtime_ns != entry.mtime_ns {
            record.ctime_ns = entry.mtime_ns;
        }
    }
    let kind = record.kind();
    // All of it is in the bucket.
    record.allocated = (kind == Kind::File).then_some(entry.size);
    let inode = transaction.create_inode(record.clone());
    transaction.counters.arrivals += 1;
    if kind == Kind::File && entry.size > 0 {
        let origin = Origin {
            key: key.clone(),
            etag: entry.etag.clone(),
            length: entry.size,
            valid: entry.size,
            version: record.version,
        };
        origin::set(transaction, inode, &mut record, Some(origin))?;
        transaction.put_inode(inode, record);
    }
    let mut note = ObjectRecord { etag: entry.etag.clone(), size: entry.size, ..ObjectRecord::default() };
    if let Some(known) = &entry.restored {
        restored::complete(transaction, listing.mount_id, inode, known);
        note.metadata = known.metadata;
    }
    intent::put_note(transaction, listing.mount_id, inode, &key, &note);
    name(transaction, listing.directory, (entry, kind), inode, first_fill);
    Ok(inode)
}

fn name(
    transaction: &mut Transaction<'_>,
    parent: u64,
    (entry, kind): (&ListedEntry, Kind),
    inode: u64,
    first_fill: bool,
) {
    let name = entry.name.clone();
    transaction.put_dentry(parent, &name, DentryRecord { inode, kind: kind as i32 });
    transaction.changes.push(Change::Entry { parent, name, old_inode: 0, new_inode: inode, first_fill, mount_id: 0 });
}
