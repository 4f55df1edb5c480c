//! Names and inodes of cache-mode mounts: applying the difference between a bucket's listing and the namespace.
//!
//! One inode id is one content version of one object. An object that was replaced gets a new inode under its old name,
//! as a rename over the old file would do it; so nobody can mix bytes of two versions under one inode.

use bytes::Bytes;
use cavern_proto::master::Kind;
use cavern_proto::record::{
    ApplyListing, DentryRecord, InodeRecord, ListedEntry, ListingGroup, PutIndex, StoreAttributes,
};

use super::{existing, orphans};
use crate::change::Change;
use crate::error::{Result, StateError};
use crate::index::probed_xattrs;
pub use crate::outcome::ListingCounts;
use crate::outcome::Outcome;
use crate::records::{directory_record, file_record, is_directory, is_version};
use crate::schema;
use crate::transaction::Transaction;

/// Applies the groups in order. A mount that is gone, a directory that is no longer the expected inode, and a directory
/// that has been listed since the bucket was asked, are skipped: what they say is out of date.
pub fn apply_listing(tx: &mut Transaction<'_>, listing: &ApplyListing) -> Result<ListingCounts> {
    let mut counts = ListingCounts::default();
    let Some(mount) = tx.before().mount(listing.mount_id)? else { return Ok(counts) };
    for group in &listing.groups {
        let Some(directory) = find_directory(tx, mount.root_inode, group, listing)? else { continue };
        for name in &group.remove {
            if tx.dentry(directory, name)?.is_some() {
                replace(tx, directory, name, None)?;
                counts.removed += 1;
            }
        }
        for entry in &group.upsert {
            upsert(tx, directory, entry, listing, &mut counts)?;
        }
        if group.listed_ns != 0
            && let Some(mut record) = tx.inode(directory)?
        {
            // What was observed while others listed the directory makes it no older than their listing has.
            let at_least = if group.observed_ns == 0 { i64::MIN } else { record.listed_ns };
            record.listed_ns = group.listed_ns.max(at_least);
            tx.put_inode(directory, record);
        }
    }
    put_ranges(tx, listing)?;
    Ok(counts)
}

/// Takes down how far ranges of an index are, if it still runs.
fn put_ranges(tx: &mut Transaction<'_>, listing: &ApplyListing) -> Result {
    let ApplyListing { mount_id, ranges, index_began_ns, .. } = listing;
    if ranges.is_empty() || *index_began_ns == 0 {
        return Ok(());
    }
    if tx.before().index(*mount_id)?.is_some_and(|index| index.began_ns == *index_began_ns) {
        for range in ranges {
            tx.put(schema::IndexRanges, (*mount_id, range.number), range);
        }
    }
    Ok(())
}

/// The directory of a group, made if it may be.
fn find_directory(
    tx: &mut Transaction<'_>,
    root: u64,
    group: &ListingGroup,
    listing: &ApplyListing,
) -> Result<Option<u64>> {
    let mut directory = root;
    for name in &group.directory {
        let known = tx.dentry(directory, name)?;
        directory = match known {
            Some(dentry) if dentry.kind() == Kind::Directory => dentry.inode,
            _ if group.expect_inode != 0 => return Ok(None),
            _ => {
                let new = directory_record(directory, name.clone(), listing.mount_id, listing.now_ns);
                replace(tx, directory, name, Some(new))?
            }
        };
    }
    if group.expect_inode != 0 && group.expect_inode != directory {
        return Ok(None);
    }
    let listed_ns = tx.inode(directory)?.map_or(0, |record| record.listed_ns);
    let is_outdated = group.observed_ns != 0 && listed_ns > group.observed_ns;
    Ok((!is_outdated).then_some(directory))
}

fn upsert(
    tx: &mut Transaction<'_>,
    directory: u64,
    entry: &ListedEntry,
    listing: &ApplyListing,
    counts: &mut ListingCounts,
) -> Result {
    let known = tx.dentry(directory, &entry.name)?;
    let is_file = entry.kind() != Kind::Directory;
    match known {
        None => counts.added += 1,
        Some(known) if known.kind() == Kind::Directory && !is_file => return Ok(()),
        Some(known) => {
            if known.kind() == Kind::File
                && entry.kind() == Kind::File
                && let Some(mut record) = tx.inode(known.inode)?
                && is_version(&record, &entry.etag, entry.size)
            {
                if record.mtime_ns != entry.mtime_ns {
                    // The same bytes written again: the content, and so the inode, stays; what is kept with them may be
                    // something else.
                    record.mtime_ns = entry.mtime_ns;
                    record.stored = None;
                    tx.update_inode(known.inode, record);
                    counts.changed += 1;
                }
                return Ok(());
            }
            counts.changed += 1;
        }
    }
    let new = match is_file {
        true => file_record(directory, listing.mount_id, entry),
        false => directory_record(directory, entry.name.clone(), listing.mount_id, listing.now_ns),
    };
    replace(tx, directory, &entry.name, Some(new))?;
    Ok(())
}

/// Lets `name` lead to a new inode, or to nothing, whatever it led to before; returns the new inode id (0 for nothing).
fn replace(tx: &mut Transaction<'_>, directory: u64, name: &Bytes, new: Option<InodeRecord>) -> Result<u64> {
    let old = tx.dentry(directory, name)?;
    if let Some(old) = old {
        detach(tx, directory, name, old)?;
    }
    let mut new_inode = 0;
    if let Some(record) = new {
        let kind = record.kind;
        new_inode = tx.create_inode(record);
        tx.put_dentry(directory, name, DentryRecord { inode: new_inode, kind });
    }
    let first_fill = old.is_none() && tx.inode(directory)?.is_none_or(|record| record.listed_ns == 0);
    let (old_inode, name) = (old.map_or(0, |old| old.inode), name.clone());
    tx.notify(Change::Entry { parent: directory, name, old_inode, new_inode, first_fill, mount_id: 0 });
    Ok(new_inode)
}

/// Takes a name out of its directory. A file's inode goes at once; a directory is left to the reaper.
pub fn detach(tx: &mut Transaction<'_>, directory: u64, name: &[u8], old: DentryRecord) -> Result {
    tx.delete_dentry(directory, name);
    if old.kind() == Kind::Directory {
        return orphans::add(tx, old.inode);
    }
    tx.delete_inode(old.inode);
    Ok(())
}

/// Makes the first directory of a namespace.
pub fn create_root(tx: &mut Transaction<'_>, now_ns: i64) -> Result {
    let root = tx.create_inode(directory_record(0, Bytes::new(), 0, now_ns));
    if root == cavern_proto::ROOT_INODE {
        return Ok(());
    }
    Err(StateError::Corrupt(format!("the namespace, whose root would be inode {root} and not 1,")))
}

/// Notes what the bucket keeps with an object, unless its inode stands for another version by now.
pub fn store_attributes(tx: &mut Transaction<'_>, keep: StoreAttributes) -> Result<Outcome> {
    let StoreAttributes { inode, etag, size, stored: kept } = keep;
    let Some(mut record) = tx.inode(inode)? else { return Ok(Outcome::Done) };
    let is_current = is_directory(&record) || is_version(&record, &etag, size);
    if !is_current || record.stored == kept {
        return Ok(Outcome::Done);
    }
    // What nobody knew, nobody needs to forget.
    if record.stored.is_some() {
        tx.notify(Change::Inode(inode));
    }
    record.stored = kept;
    tx.put_inode(inode, record);
    Ok(Outcome::Done)
}

/// Takes down how far the index of a mount is.
pub fn put_index(tx: &mut Transaction<'_>, put: &PutIndex) -> Result<Outcome> {
    // An index that is at its end may have got more to do meanwhile.
    if let Some(index) = &put.index
        && tx.before().mount(put.mount_id)?.is_some()
        && !tx.before().has_unlisted(put.mount_id, &[])?
    {
        tx.put(schema::Indexes, put.mount_id, index);
        // An index begins, or ends.
        tx.delete_all(schema::IndexRanges, put.mount_id);
        if index.finished_ns != 0 {
            existing::forget_identities(tx, put.mount_id);
            probed_xattrs::all_listed(tx, put.mount_id)?;
        }
    }
    Ok(Outcome::Done)
}
