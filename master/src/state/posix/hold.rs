//! Inodes that somebody holds: without a name they stay, and their blocks are not dropped.

use super::quota::drop_quota;
use super::ttl::drop_ttl;
use super::{Mutating, Outcome, Stop};
use crate::MasterError;
use crate::state::extent;
use crate::state::orphans::Reaped;
use crate::state::records::{hold_key, inode_key, xattr_key};
use crate::state::{Family, Transaction, intent, origin, usage};

impl Mutating<'_, '_> {
    /// An inode that is only open need not be held while it has a name: its removal will be told to all who may have it open
    /// then. Who writes to blocks that are known here holds it, lest they be dropped.
    pub(super) fn hold(&mut self, inode: u64, session: u64) -> Result<u64, Stop> {
        self.inode(inode)?;
        self.put_hold(inode, session);
        Ok(inode)
    }

    pub(super) fn put_hold(&mut self, inode: u64, session: u64) {
        intent::count_change(self.transaction, self.mount);
        self.transaction.put_bytes(Family::Hold, &hold_key(inode, session), &[]);
    }

    pub(super) fn release(&mut self, inode: u64, session: u64) -> Result<u64, Stop> {
        self.transaction.delete(Family::Hold, &hold_key(inode, session));
        Ok(inode)
    }
}

/// Deletes an inode, if it has no name and nobody holds it.
pub fn reap(transaction: &mut Transaction<'_>, inode: u64) -> Result<Outcome, MasterError> {
    let tables = transaction.before();
    let Some(record) = tables.inode(inode)?.filter(|record| record.unlinked) else {
        return Ok(Outcome::Reaped(Reaped::default()));
    };
    if tables.is_held(inode)? {
        return Ok(Outcome::Reaped(Reaped::default()));
    }
    forget_content(transaction, inode, record.mount_id)?;
    transaction.delete(Family::Unlinked, &inode_key(inode));
    transaction.delete_inode(inode);
    Ok(Outcome::Reaped(Reaped { inodes: 1, more: false }))
}

/// Deletes what belongs to an inode beside its record: extended attributes, its quota, blocks, which are to be freed, and its right to an
/// object of the bucket.
pub fn forget_content(transaction: &mut Transaction<'_>, inode: u64, mount_id: u32) -> Result<(), MasterError> {
    if let Some(mut record) = transaction.inode(inode)? {
        origin::set(transaction, inode, &mut record, None)?;
        drop_ttl(transaction, inode, &record);
    }
    drop_quota(transaction, inode)?;
    usage::forget(transaction, inode);
    for (name, _) in transaction.before().xattrs(inode)? {
        transaction.delete(Family::Xattr, &xattr_key(inode, &name));
    }
    extent::drop_from(transaction, inode, mount_id, 0)
}

/// Lets go of all that a session holds. Few are held at a time, by all sessions together.
pub(super) fn release_all(transaction: &mut Transaction<'_>, session: u64) -> Result<(), MasterError> {
    for key in transaction.before().keys(Family::Hold) {
        let key = key?;
        if key.ends_with(&session.to_be_bytes()) {
            transaction.delete(Family::Hold, &key);
        }
    }
    Ok(())
}
