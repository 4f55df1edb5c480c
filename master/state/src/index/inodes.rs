//! What belongs to an inode beside its record: further names, and all that goes with it.
//!
//! An inode's record says one of its names: enough to find its path and to notify the clients that cache it. The names
//! of an inode that has several are all in the table of links as well, so that another takes its place when that one
//! goes.

use bytes::Bytes;
use cavern_proto::record::InodeRecord;

use super::extents::{self, DropProgress};
use super::{delegations, origins, usage};
use crate::error::Result;
use crate::records::is_directory;
use crate::schema;
use crate::transaction::Transaction;

pub fn put_link(tx: &mut Transaction<'_>, inode: u64, parent: u64, name: &[u8]) {
    tx.put(schema::Links, (inode, (parent, name)), &());
}

pub fn delete_link(tx: &mut Transaction<'_>, inode: u64, parent: u64, name: &[u8]) {
    tx.delete(schema::Links, (inode, (parent, name)));
}

/// A name of an inode beside one of them: the next one, or else the first. Names mostly go in their order, and those
/// that are gone cost a scan as much as others, for a time.
pub fn other_name(tx: &Transaction<'_>, inode: u64, parent: u64, name: &[u8]) -> Result<Option<(u64, Bytes)>> {
    let (tables, this) = (tx.before(), (inode, (parent, name)));
    let next = tables.rows_after(schema::Links, inode, Some(this)).next();
    let other = next.or_else(|| tables.rows(schema::Links, inode).next()).transpose()?;
    let Some(row) = other else { return Ok(None) };
    let key = row.key()?;
    let (_, (parent, name)) = key;
    Ok((key != this).then(|| (parent, Bytes::copy_from_slice(name))))
}

/// Deletes what belongs to an inode beside its record: blocks, which are to be freed, extended attributes, its quota,
/// and its right to an object of the bucket. Of a file with very many blocks only some of these go, and nothing else.
pub fn forget(tx: &mut Transaction<'_>, inode: u64, mount_id: u32) -> Result<DropProgress> {
    if extents::drop_blocks_step(tx, inode, mount_id)? == DropProgress::Some {
        return Ok(DropProgress::Some);
    }
    delegations::forget(tx, mount_id, inode)?;
    if let Some(mut record) = tx.inode(inode)? {
        origins::set(tx, inode, &mut record, None)?;
        drop_ttl(tx, inode, &record);
    }
    usage::drop_quota(tx, inode)?;
    usage::forget(tx, inode);
    for (name, _) in tx.before().xattrs(inode)? {
        tx.delete(schema::Xattrs, (inode, &name[..]));
    }
    Ok(DropProgress::All)
}

/// Ends the rule of a directory that goes: how long files in it live.
pub fn drop_ttl(tx: &mut Transaction<'_>, inode: u64, record: &InodeRecord) {
    if is_directory(record) {
        tx.delete(schema::Ttls, inode);
    }
}
