//! Names of inodes that have several.
//!
//! An inode's record says one of its names: enough to find its path and to notify the clients that cache it. The names
//! of an inode that has several are all in the table of links as well, so that another takes its place when that one
//! goes.

use bytes::Bytes;

use crate::error::Result;
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
