//! Sessions, and what they have of the state: inodes and directories delegated to them, and locks.

use cavern_proto::master::LockKind;
use cavern_proto::record::{InodeRecord, LockRecord, OpenRight};

use super::{Row, Tables};
use crate::change::DirectoryDelegation;
use crate::error::Result;
use crate::records::is_directory;
use crate::schema;

impl Tables<'_> {
    /// Whether a session holds an inode that has no name.
    pub fn is_open(&self, inode: u64) -> Result<bool> {
        self.has_any(schema::OpenRefs, inode)
    }

    /// What a session may do with an inode that it holds, if it does.
    pub fn open_ref(&self, inode: u64, session: u64) -> Result<Option<OpenRight>> {
        Ok(self.get(schema::OpenRefs, (inode, session))?.map(|open_ref| open_ref.right()))
    }

    /// Whether another session than this one holds it, and may write to it: those who only read are notified of what
    /// changes.
    pub fn is_written_by_others(&self, inode: u64, session: u64) -> Result<bool> {
        for row in self.rows(schema::OpenRefs, inode) {
            let row = row?;
            let ((_, holder), open_ref) = row.entry()?;
            if holder != session && open_ref.right() != OpenRight::Read {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Up to `limit` of the inodes that a session holds, in their order.
    pub fn refs_of(&self, session: u64, limit: usize) -> Result<Vec<u64>> {
        self.rows(schema::SessionOpenRefs, session).page(limit, |row| Ok(row.key()?.1))
    }

    /// The locks of one kind of a file.
    pub fn locks(&self, inode: u64, kind: LockKind) -> Result<LockRecord> {
        Ok(self.get(schema::Locks, (inode, kind))?.unwrap_or_default())
    }

    /// Where a session has locks or waits for them, at most so many places: kind, inode, and whether it waits.
    pub fn locks_of(&self, session: u64, limit: usize) -> Result<Vec<(LockKind, u64, bool)>> {
        self.rows(schema::SessionLocks, session).page(limit, |row| {
            let ((_, (kind, inode)), waits) = row.entry()?;
            Ok((kind, inode, waits))
        })
    }

    /// The directory that counts for an inode and that such a session holds: the one that the inode is in, or the inode
    /// itself.
    pub fn delegation_around(
        &self,
        inode: u64,
        record: &InodeRecord,
        is_sought: impl Fn(u64) -> bool,
    ) -> Result<Option<u64>> {
        for directory in [Some(record.parent), is_directory(record).then_some(inode)].into_iter().flatten() {
            if self.holder(record.mount_id, directory)?.is_some_and(&is_sought) {
                return Ok(Some(directory));
            }
        }
        Ok(None)
    }

    /// Up to `limit` of the directories of a mount that sessions hold, in their order.
    pub fn delegations_in(&self, mount_id: u32, limit: usize) -> Result<Vec<DirectoryDelegation>> {
        self.rows(schema::DirectoryDelegations, mount_id).page(limit, delegation)
    }

    /// Every directory delegated to a session.
    pub fn all_delegations(&self) -> Result<Vec<DirectoryDelegation>> {
        self.rows(schema::DirectoryDelegations, ()).page(usize::MAX, delegation)
    }

    /// How many directories a session holds.
    pub fn delegation_count(&self, session: u64) -> Result<u64> {
        Ok(self.get(schema::DelegationCounts, session)?.unwrap_or_default())
    }

    /// Up to `limit` of the directories delegated to a session, in their order.
    pub fn directories_of(&self, session: u64, limit: usize) -> Result<Vec<DirectoryDelegation>> {
        self.rows(schema::SessionDelegations, session).page(limit, |row| {
            let ((session, directory), mount_id) = row.entry()?;
            Ok(DirectoryDelegation { mount_id, directory, session })
        })
    }
}

fn delegation(row: &Row<schema::DirectoryDelegations>) -> Result<DirectoryDelegation> {
    let ((mount_id, directory), session) = row.entry()?;
    Ok(DirectoryDelegation { mount_id, directory, session })
}
