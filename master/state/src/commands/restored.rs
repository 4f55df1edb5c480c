//! What objects were before their cluster was lost, given back to the inodes that are made of them.

use cavern_posix::mode::MODE_BITS;
use cavern_posix::xattr::CAPABILITY;
use cavern_proto::master::Kind;
use cavern_proto::record::{AdoptListing, InodeRecord, ListedEntry, ObjectRecord, Restored};

use crate::error::Result;
use crate::index::intents::{self, Reach};
use crate::index::links::put_link;
use crate::records::{MODE_CHOSEN, links};
use crate::schema;
use crate::transaction::Transaction;

/// Gives a record what is known of it. What cannot be read from a listing is as it was.
pub fn restore(record: &mut InodeRecord, restored: &Restored) {
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
pub fn complete(tx: &mut Transaction<'_>, mount_id: u32, inode: u64, restored: &Restored) {
    for xattr in &restored.xattrs {
        tx.put(schema::Xattrs, (inode, &xattr.name[..]), &xattr.value);
    }
    if !restored.identity.is_empty() {
        tx.put(schema::Recovered, (mount_id, restored.identity.as_str()), &inode);
    }
}

/// Gives an inode that is there another name, if the object has its identity; false when there is none.
pub fn link(
    tx: &mut Transaction<'_>,
    listing: &AdoptListing,
    entry: &ListedEntry,
    key: &str,
    known: Option<u64>,
) -> Result<Option<u64>> {
    let Some(restored) = entry.restored.as_ref().filter(|restored| !restored.identity.is_empty()) else {
        return Ok(None);
    };
    let known = match known {
        None => tx.before().get(schema::Recovered, (listing.mount_id, restored.identity.as_str()))?,
        known => known,
    };
    let Some(inode) = known else { return Ok(None) };
    let is_fit = |record: &InodeRecord| record.kind() == Kind::File && !record.unlinked;
    let Some(mut record) = tx.inode(inode)?.filter(is_fit) else { return Ok(None) };
    let count = links(&record);
    if count == 1 {
        put_link(tx, inode, record.parent, &record.name);
    }
    put_link(tx, inode, listing.directory, &entry.name);
    record.nlink = count + 1;
    let is_changed = record.version != 0 || tx.before().intent(inode)?.is_some();
    tx.update_inode(inode, record);
    let note = ObjectRecord { etag: entry.etag.clone(), size: entry.size, version: 0, metadata: restored.metadata };
    intents::put_note(tx, listing.mount_id, inode, key, &note);
    if is_changed {
        // Since it came by its first name: the object of this one has to follow.
        intents::note(tx, inode, listing.mount_id, Reach::Itself, listing.now_ns)?;
    }
    Ok(Some(inode))
}

/// Forgets which inodes were made of which: a mount has been recovered, or is gone.
pub fn forget_identities(tx: &mut Transaction<'_>, mount_id: u32) {
    tx.delete_all(schema::Recovered, mount_id);
}
