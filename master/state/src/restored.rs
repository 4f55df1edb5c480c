//! What objects were before their cluster was lost, given back to the inodes that are made of them.

use cavern_posix::mode::MODE_BITS;
use cavern_posix::xattr::CAPABILITY;
use cavern_proto::master::Kind;
use cavern_proto::record::{AdoptListing, InodeRecord, ListedEntry, ObjectRecord, Restored};

use super::intent::{self, Reach};
use super::records::{MODE_CHOSEN, deletion_key, links, xattr_key};
use super::transaction::Change;
use super::{Family, Transaction, posix};
use crate::error::StateError;

/// Gives a record what is known of it. What cannot be read from a listing is as it was.
pub(super) fn restore(record: &mut InodeRecord, restored: &Restored) {
    record.kind = restored.kind;
    record.mode = restored.mode & MODE_BITS | MODE_CHOSEN;
    (record.uid, record.gid) = (restored.uid, restored.gid);
    (record.mtime_ns, record.atime_ns) = (restored.mtime_ns, Some(restored.atime_ns));
    if matches!(record.kind(), Kind::CharacterDevice | Kind::BlockDevice) {
        record.rdev = restored.rdev;
    }
    match record.kind() {
        Kind::File => {}
        Kind::Symlink => (record.size, record.target) = (restored.target.len() as u64, restored.target.clone()),
        _ => record.size = 0,
    }
    record.has_xattrs = !restored.xattrs.is_empty();
    record.has_capability = restored.xattrs.iter().any(|xattr| *xattr.name == *CAPABILITY);
}

/// The extended attributes of a new inode, and its identity, by which further names of it are known.
pub(super) fn complete(transaction: &mut Transaction<'_>, mount_id: u32, inode: u64, restored: &Restored) {
    for xattr in &restored.xattrs {
        transaction.put_bytes(Family::Xattr, &xattr_key(inode, &xattr.name), &xattr.value);
    }
    if !restored.identity.is_empty() {
        let key = deletion_key(mount_id, &restored.identity);
        transaction.put_bytes(Family::Recovered, &key, &inode.to_be_bytes());
    }
}

/// Gives an inode that is there another name, if the object has its identity; false when there is none.
pub(super) fn link(
    transaction: &mut Transaction<'_>,
    listing: &AdoptListing,
    entry: &ListedEntry,
    key: &str,
    known: Option<u64>,
) -> Result<Option<u64>, StateError> {
    let Some(restored) = entry.restored.as_ref().filter(|restored| !restored.identity.is_empty()) else {
        return Ok(None);
    };
    let inode = match known {
        Some(inode) => inode,
        None => match transaction.before().recovered(listing.mount_id, &restored.identity)? {
            Some(inode) => inode,
            None => return Ok(None),
        },
    };
    let is_fit = |record: &InodeRecord| record.kind() == Kind::File && !record.unlinked;
    let Some(mut record) = transaction.inode(inode)?.filter(is_fit) else { return Ok(None) };
    let count = links(&record);
    if count == 1 {
        posix::put_link(transaction, inode, record.parent, &record.name);
    }
    posix::put_link(transaction, inode, listing.directory, &entry.name);
    record.nlink = count + 1;
    let is_changed = record.version != 0 || transaction.before().intent(inode)?.is_some();
    transaction.put_inode(inode, record);
    let note = ObjectRecord { etag: entry.etag.clone(), size: entry.size, version: 0, metadata: restored.metadata };
    intent::put_note(transaction, listing.mount_id, inode, key, &note);
    if is_changed {
        // Since it came by its first name: the object of this one has to follow.
        intent::note(transaction, inode, listing.mount_id, Reach::Itself, listing.now_ns)?;
    }
    transaction.changes.push(Change::Inode(inode));
    Ok(Some(inode))
}

/// Forgets which inodes were made of which: a mount has been recovered, or is gone.
pub(super) fn forget_identities(transaction: &mut Transaction<'_>, mount_id: u32) {
    let [from, to] = [mount_id, mount_id.saturating_add(1)].map(u32::to_be_bytes);
    transaction.delete_range(Family::Recovered, &from, &to);
}
