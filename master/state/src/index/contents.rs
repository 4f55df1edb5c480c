//! What belongs to an inode beside its record, when the inode goes.

use cavern_proto::record::InodeRecord;

use super::extents::{self, DropProgress};
use super::{held, origins, usage};
use crate::error::Result;
use crate::records::is_directory;
use crate::schema;
use crate::transaction::Transaction;

/// Deletes what belongs to an inode beside its record: blocks, which are to be freed, extended attributes, its quota,
/// and its right to an object of the bucket. Of a file with very many blocks only some of these go, and nothing else.
pub fn forget(tx: &mut Transaction<'_>, inode: u64, mount_id: u32) -> Result<DropProgress> {
    if extents::drop_blocks_step(tx, inode, mount_id)? == DropProgress::Some {
        return Ok(DropProgress::Some);
    }
    held::forget(tx, mount_id, inode)?;
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
