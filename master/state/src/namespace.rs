//! Names and inodes of cache-mode mounts: applying the difference between a bucket's listing and the namespace.
//!
//! One inode id is one content version of one object. An object that was replaced gets a new inode under its old name,
//! as a rename over the old file would do it; so nobody can mix bytes of two versions under one inode.

use bytes::Bytes;
use cavern_proto::master::Kind;
use cavern_proto::record::{ApplyListing, DentryRecord, ListedEntry, ListingGroup};

use super::records::{EntryVersion, directory_record, file_record, version};
use super::transaction::{Change, Transaction};
use super::{Family, orphans};
use crate::error::StateError;

/// What an [`ApplyListing`] did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ListingCounts {
    pub added: u64,
    pub changed: u64,
    pub removed: u64,
    /// Keys that cannot be names; known to the listing, not to the log.
    pub hidden: u64,
}

impl std::ops::AddAssign for ListingCounts {
    fn add_assign(&mut self, other: Self) {
        self.added += other.added;
        self.changed += other.changed;
        self.removed += other.removed;
        self.hidden += other.hidden;
    }
}

/// Applies the groups in order. A mount that is gone, a directory that is no longer the expected inode, and a directory
/// that has been listed since the bucket was asked, are skipped: what they say is out of date.
pub fn apply_listing(transaction: &mut Transaction<'_>, listing: &ApplyListing) -> Result<ListingCounts, StateError> {
    let mut counts = ListingCounts::default();
    let Some(mount) = transaction.before().mount(listing.mount_id)? else { return Ok(counts) };
    for group in &listing.groups {
        let Some(directory) = find_directory(transaction, mount.root_inode, group, listing)? else { continue };
        counts += apply_group(transaction, directory, group, listing)?;
    }
    Ok(counts)
}

/// The directory of a group, made if it may be.
fn find_directory(
    transaction: &mut Transaction<'_>,
    root: u64,
    group: &ListingGroup,
    listing: &ApplyListing,
) -> Result<Option<u64>, StateError> {
    let mut directory = root;
    for name in &group.directory {
        let known = transaction.dentry(directory, name)?;
        directory = match known {
            Some(dentry) if dentry.kind() == Kind::Directory => dentry.inode,
            _ if group.expect_inode != 0 => return Ok(None),
            _ => replace(transaction, directory, name, Some(NewEntry::Directory), listing)?,
        };
    }
    if group.expect_inode != 0 && group.expect_inode != directory {
        return Ok(None);
    }
    let listed_ns = transaction.inode(directory)?.map_or(0, |record| record.listed_ns);
    let is_outdated = group.observed_ns != 0 && listed_ns > group.observed_ns;
    Ok((!is_outdated).then_some(directory))
}

fn apply_group(
    transaction: &mut Transaction<'_>,
    directory: u64,
    group: &ListingGroup,
    listing: &ApplyListing,
) -> Result<ListingCounts, StateError> {
    let mut counts = ListingCounts::default();
    for name in &group.remove {
        if transaction.dentry(directory, name)?.is_some() {
            replace(transaction, directory, name, None, listing)?;
            counts.removed += 1;
        }
    }
    for entry in &group.upsert {
        match upsert(transaction, directory, entry, listing)? {
            Upsert::Unchanged => {}
            Upsert::Added => counts.added += 1,
            Upsert::Changed => counts.changed += 1,
        }
    }
    if group.listed_ns != 0
        && let Some(mut record) = transaction.inode(directory)?
    {
        record.listed_ns = group.listed_ns;
        transaction.put_inode(directory, record);
    }
    Ok(counts)
}

enum Upsert {
    Unchanged,
    Added,
    Changed,
}

fn upsert(
    transaction: &mut Transaction<'_>,
    directory: u64,
    entry: &ListedEntry,
    listing: &ApplyListing,
) -> Result<Upsert, StateError> {
    let new = match entry.kind() {
        Kind::Directory => NewEntry::Directory,
        _ => NewEntry::File(entry),
    };
    let Some(known) = transaction.dentry(directory, &entry.name)? else {
        replace(transaction, directory, &entry.name, Some(new), listing)?;
        return Ok(Upsert::Added);
    };
    if known.kind() == Kind::Directory && entry.kind() == Kind::Directory {
        return Ok(Upsert::Unchanged);
    }
    if known.kind() == Kind::File
        && entry.kind() == Kind::File
        && let Some(mut record) = transaction.inode(known.inode)?
        && version(&record) == (EntryVersion { etag: entry.etag.clone(), size: entry.size })
    {
        if record.mtime_ns == entry.mtime_ns {
            return Ok(Upsert::Unchanged);
        }
        // The same bytes written again: the content, and so the inode, stays; what is kept with them may be something
        // else.
        record.mtime_ns = entry.mtime_ns;
        record.kept = None;
        transaction.put_inode(known.inode, record);
        transaction.changes.push(Change::Inode(known.inode));
        return Ok(Upsert::Changed);
    }
    replace(transaction, directory, &entry.name, Some(new), listing)?;
    Ok(Upsert::Changed)
}

/// What a name shall lead to.
enum NewEntry<'a> {
    File(&'a ListedEntry),
    Directory,
}

/// Lets `name` lead to a new inode, or to nothing, whatever it led to before; returns the new inode id (0 for nothing).
fn replace(
    transaction: &mut Transaction<'_>,
    directory: u64,
    name: &Bytes,
    new: Option<NewEntry<'_>>,
    listing: &ApplyListing,
) -> Result<u64, StateError> {
    let old = transaction.dentry(directory, name)?;
    if let Some(old) = old {
        detach(transaction, directory, name, old)?;
    }
    let new_inode = match new {
        None => 0,
        Some(new) => {
            let (kind, record) = match new {
                NewEntry::File(entry) => (Kind::File, file_record(directory, listing.mount_id, entry)),
                NewEntry::Directory => {
                    (Kind::Directory, directory_record(directory, name.clone(), listing.mount_id, listing.now_ns))
                }
            };
            let inode = transaction.create_inode(record);
            transaction.put_dentry(directory, name, DentryRecord { inode, kind: kind as i32 });
            inode
        }
    };
    let first_fill = old.is_none() && transaction.inode(directory)?.is_none_or(|record| record.listed_ns == 0);
    let old_inode = old.map_or(0, |old| old.inode);
    let name = name.clone();
    transaction.changes.push(Change::Entry { parent: directory, name, old_inode, new_inode, first_fill, mount_id: 0 });
    Ok(new_inode)
}

/// Takes a name out of its directory. A file's inode goes at once; a directory is left to the reaper.
pub fn detach(
    transaction: &mut Transaction<'_>,
    directory: u64,
    name: &[u8],
    old: DentryRecord,
) -> Result<(), StateError> {
    transaction.delete_dentry(directory, name);
    if old.kind() == Kind::Directory {
        orphans::add(transaction, old.inode)
    } else {
        transaction.delete_inode(old.inode);
        Ok(())
    }
}

/// Makes the first directory of a namespace.
pub fn create_root(transaction: &mut Transaction<'_>, now_ns: i64) -> Result<(), StateError> {
    let root = transaction.create_inode(directory_record(0, Bytes::new(), 0, now_ns));
    if root == cavern_proto::ROOT_INODE {
        return Ok(());
    }
    Err(StateError::Corrupt(format!("the namespace, whose root would be inode {root} and not 1,")))
}

/// Deletes a whole record of a mount's state outside the namespace.
pub fn forget_index(transaction: &mut Transaction<'_>, mount_id: u32) {
    transaction.delete(Family::Meta, &super::tables::index_key(mount_id));
}
