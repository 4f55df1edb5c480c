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
//! nothing in the bucket. What it was before its cluster was lost, its metadata say ([`Restored`]).

use bytes::Bytes;
use cavern_posix::mode::MODE_BITS;
use cavern_posix::xattr::{CAPABILITY, probed};
use cavern_proto::master::{Kind, Mount, WriteType};
use cavern_proto::record::{AdoptListing, DentryRecord, IndexRecord, InodeRecord, ListedEntry, ObjectRecord, Restored};

use crate::change::Change;
use crate::error::Result;
use crate::index::inodes::put_link;
use crate::index::intents::{Reach, note, put_note};
use crate::index::{origins, probed_xattrs};
use crate::outcome::ListingCounts;
use crate::records::{MODE_CHOSEN, count_entries, directory_record, file_record, is_directory, links, xattr_size};
use crate::schema;
use crate::transaction::Transaction;

/// The root of a new mount whose bucket has objects.
pub fn begin(tx: &mut Transaction<'_>, mount: &Mount) {
    tx.put(schema::Unlisted, (mount.id, &b""[..]), &mount.root_inode);
    tx.put(schema::Indexes, mount.id, &IndexRecord { unlisted: 1, ..IndexRecord::default() });
}

/// Forgets what a mount that is gone had to list, and whose its objects are.
pub fn forget(tx: &mut Transaction<'_>, mount_id: u32) {
    tx.delete_all(schema::Unlisted, mount_id);
    tx.delete_all(schema::Noted, mount_id);
    forget_identities(tx, mount_id);
}

/// Takes names of the bucket into an unlisted directory, and its mark away after the last of them.
pub fn adopt(tx: &mut Transaction<'_>, listing: AdoptListing) -> Result<ListingCounts> {
    let mut counts = ListingCounts::default();
    let tables = tx.before();
    let mount = tables.mount(listing.mount_id)?.filter(|mount| mount.write_type() == WriteType::FsMode);
    let is_unlisted = |record: &InodeRecord| {
        is_directory(record) && record.mount_id == listing.mount_id && record.listed_ns == 0 && record.parent != 0
    };
    let record = tx.inode(listing.directory)?.filter(is_unlisted);
    let (Some(mount), Some(mut record)) = (mount, record) else { return Ok(counts) };
    let Some(path) = tx.now().path_below(listing.directory, mount.root_inode)? else { return Ok(counts) };
    let mut index = tables.index(mount.id)?.unwrap_or_default();
    let mut directories = 0;
    for entry in &listing.entries {
        if tx.dentry(listing.directory, &entry.name)?.is_some() {
            continue;
        }
        if entry.kind() == Kind::Directory {
            adopt_directory(tx, &listing, &path, entry, true)?;
            directories += 1;
        } else {
            adopt_object(tx, &listing, entry, true)?;
        }
        index.incomplete += u64::from(entry.restored.as_ref().is_some_and(|restored| restored.incomplete));
        counts.added += 1;
    }
    let is_root = listing.directory == mount.root_inode;
    if !listing.marker.is_empty() && !is_root && tables.object(listing.directory, &listing.key_prefix)?.is_none() {
        let note = ObjectRecord { etag: listing.marker, ..ObjectRecord::default() };
        put_note(tx, mount.id, listing.directory, &listing.key_prefix, &note);
    }
    index.entries += counts.added;
    index.unlisted += u64::from(directories);
    if listing.complete {
        record.listed_ns = listing.now_ns.max(1);
        tx.delete(schema::Unlisted, (mount.id, &path[..]));
        index.unlisted = index.unlisted.saturating_sub(1);
        index.hidden_keys += listing.hidden;
    }
    if counts.added > 0 || listing.complete {
        count_entries(&mut record, counts.added as i64);
        record.nlink = links(&record) + directories;
        tx.put_inode(listing.directory, record);
    }
    if directories > 0 {
        tx.notify(Change::Inode(listing.directory));
    }
    tx.put(schema::Indexes, mount.id, &index);
    Ok(counts)
}

/// Makes an unlisted directory of what the bucket has, in one whose path this is; `first_fill` as in [`Change::Entry`].
pub fn adopt_directory(
    tx: &mut Transaction<'_>,
    listing: &AdoptListing,
    path: &[u8],
    entry: &ListedEntry,
    first_fill: bool,
) -> Result {
    let mut record = InodeRecord {
        mode: listing.dir_mode | MODE_CHOSEN,
        uid: listing.uid,
        gid: listing.gid,
        entries: Some(0),
        ..directory_record(listing.directory, entry.name.clone(), listing.mount_id, listing.now_ns)
    };
    if let Some(known) = entry.restored.as_ref().filter(|known| known.kind() == Kind::Directory) {
        restore(&mut record, known);
    }
    let inode = tx.create_inode(record);
    if let Some(known) = &entry.restored {
        complete(tx, listing.mount_id, inode, known)?;
    }
    if let Ok(directory) = std::str::from_utf8(&entry.name)
        && !entry.etag.is_empty()
    {
        let metadata = entry.restored.as_ref().map_or(0, |known| known.metadata);
        let note = ObjectRecord { etag: entry.etag.clone(), metadata, ..ObjectRecord::default() };
        put_note(tx, listing.mount_id, inode, &format!("{}{directory}/", listing.key_prefix), &note);
    }
    name(tx, listing.directory, (entry, Kind::Directory), inode, first_fill);
    let below = [path, &*entry.name, b"/"].concat();
    tx.put(schema::Unlisted, (listing.mount_id, &below[..]), &inode);
    Ok(())
}

/// Makes a file of an object, or gives another name to one that is there.
pub fn adopt_object(tx: &mut Transaction<'_>, listing: &AdoptListing, entry: &ListedEntry, first_fill: bool) -> Result {
    let Ok(file) = std::str::from_utf8(&entry.name) else { return Ok(()) };
    let key = format!("{}{file}", listing.key_prefix);
    if let Some(inode) = link(tx, listing, entry, &key)? {
        name(tx, listing.directory, (entry, Kind::File), inode, first_fill);
        return Ok(());
    }
    let mut record = InodeRecord {
        mode: listing.file_mode | MODE_CHOSEN,
        uid: listing.uid,
        gid: listing.gid,
        // Its origin says so.
        etag_md5: Bytes::new(),
        etag_text: String::new(),
        ..file_record(listing.directory, listing.mount_id, entry)
    };
    if let Some(known) = entry.restored.as_ref().filter(|known| known.kind() != Kind::Directory) {
        restore(&mut record, known);
        // A program has set that time, and this one nobody can.
        if record.mtime_ns != entry.mtime_ns {
            record.ctime_ns = entry.mtime_ns;
        }
    }
    let kind = record.kind();
    // All of it is in the bucket.
    record.allocated = (kind == Kind::File).then_some(entry.size);
    let metadata = entry.restored.as_ref().map_or(0, |known| known.metadata);
    let note = ObjectRecord { etag: entry.etag.clone(), size: entry.size, version: 0, metadata };
    let inode = tx.create_inode(record.clone());
    tx.counters.arrivals += 1;
    if kind == Kind::File && entry.size > 0 {
        origins::set(tx, inode, &mut record, Some(origins::at(key.clone(), &note, entry.size)))?;
        tx.put_inode(inode, record);
    }
    if let Some(known) = &entry.restored {
        complete(tx, listing.mount_id, inode, known)?;
    }
    put_note(tx, listing.mount_id, inode, &key, &note);
    name(tx, listing.directory, (entry, kind), inode, first_fill);
    Ok(())
}

fn name(tx: &mut Transaction<'_>, parent: u64, (entry, kind): (&ListedEntry, Kind), inode: u64, first_fill: bool) {
    let name = entry.name.clone();
    tx.put_dentry(parent, &name, DentryRecord { inode, kind: kind as i32 });
    tx.notify(Change::Entry { parent, name, old_inode: 0, new_inode: inode, first_fill, mount_id: 0 });
}

/// Gives a record what is known of it. What cannot be read from a listing is as it was.
fn restore(record: &mut InodeRecord, restored: &Restored) {
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
    record.xattr_bytes = restored.xattrs.iter().map(|xattr| xattr_size(&xattr.name, &xattr.value)).sum();
    record.has_capability = restored.xattrs.iter().any(|xattr| *xattr.name == *CAPABILITY);
}

/// The extended attributes of a new inode, and its identity, by which further names of it are known.
fn complete(tx: &mut Transaction<'_>, mount_id: u32, inode: u64, restored: &Restored) -> Result {
    for xattr in &restored.xattrs {
        tx.put(schema::Xattrs, (inode, &xattr.name[..]), &xattr.value);
    }
    let has = restored.xattrs.iter().fold(0, |has, xattr| has | probed(&xattr.name));
    if has != 0 {
        probed_xattrs::note(tx, mount_id, has)?;
    }
    if !restored.identity.is_empty() {
        tx.put(schema::Recovered, (mount_id, restored.identity.as_str()), &inode);
    }
    Ok(())
}

/// Gives an inode that is there another name, if the object has its identity; `None` when there is none.
fn link(tx: &mut Transaction<'_>, listing: &AdoptListing, entry: &ListedEntry, key: &str) -> Result<Option<u64>> {
    let restored = entry.restored.as_ref().filter(|restored| !restored.identity.is_empty());
    let Some(restored) = restored else { return Ok(None) };
    let known = tx.now().get(schema::Recovered, (listing.mount_id, restored.identity.as_str()))?;
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
    let object = ObjectRecord { etag: entry.etag.clone(), size: entry.size, version: 0, metadata: restored.metadata };
    put_note(tx, listing.mount_id, inode, key, &object);
    if is_changed {
        // Since it came by its first name: the object of this one has to follow.
        note(tx, inode, listing.mount_id, Reach::Itself, listing.now_ns)?;
    }
    Ok(Some(inode))
}

/// Forgets which inodes were made of which: a mount has been recovered, or is gone.
pub fn forget_identities(tx: &mut Transaction<'_>, mount_id: u32) {
    tx.delete_all(schema::Recovered, mount_id);
}
