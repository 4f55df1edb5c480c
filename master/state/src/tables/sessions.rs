//! Sessions, and what they have of the state: inodes and directories that they hold, and locks.

use cavern_proto::master::LockKind;
use cavern_proto::record::{HoldRight, InodeRecord, LockRecord};

use super::{Row, Tables};
use crate::change::HeldDirectory;
use crate::error::Result;
use crate::records::is_directory;
use crate::schema;

impl Tables<'_> {
    /// Whether a session holds an inode that has no name.
    pub fn is_held(&self, inode: u64) -> Result<bool> {
        self.has_any(schema::Holds, inode)
    }

    /// What a session may do with an inode that it holds, if it does.
    pub fn hold(&self, inode: u64, session: u64) -> Result<Option<HoldRight>> {
        Ok(self.get(schema::Holds, (inode, session))?.map(|hold| hold.right()))
    }

    /// Whether another session than this one holds it, and may write to it: those who only read are notified of what
    /// changes.
    pub fn is_written_by_others(&self, inode: u64, session: u64) -> Result<bool> {
        for row in self.rows(schema::Holds, inode) {
            let row = row?;
            let ((_, holder), hold) = row.entry()?;
            if holder != session && hold.right() != HoldRight::Read {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Up to `limit` of the inodes that a session holds, in their order.
    pub fn held_by(&self, session: u64, limit: usize) -> Result<Vec<u64>> {
        self.rows(schema::SessionHolds, session).page(limit, |row| Ok(row.key()?.1))
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
    pub fn held_around(
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
    pub fn held_in(&self, mount_id: u32, limit: usize) -> Result<Vec<HeldDirectory>> {
        self.rows(schema::HeldDirectories, mount_id).page(limit, held)
    }

    /// Every directory that a session holds.
    pub fn all_held(&self) -> Result<Vec<HeldDirectory>> {
        self.rows(schema::HeldDirectories, ()).page(usize::MAX, held)
    }

    /// How many directories a session holds.
    pub fn held_count(&self, session: u64) -> Result<u64> {
        Ok(self.get(schema::HeldCounts, session)?.unwrap_or_default())
    }

    /// Up to `limit` of the directories that a session holds, in their order.
    pub fn directories_of(&self, session: u64, limit: usize) -> Result<Vec<HeldDirectory>> {
        self.rows(schema::SessionDirectories, session).page(limit, |row| {
            let ((session, directory), mount_id) = row.entry()?;
            Ok(HeldDirectory { mount_id, directory, session })
        })
    }
}

fn held(row: &Row<schema::HeldDirectories>) -> Result<HeldDirectory> {
    let ((mount_id, directory), session) = row.entry()?;
    Ok(HeldDirectory { mount_id, directory, session })
}
