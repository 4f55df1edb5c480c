//! Inodes that somebody holds: without a name they stay, and their blocks are not dropped.

use cavern_posix::content_changed;
use cavern_posix::mode::{READ, WRITE};
use cavern_proto::ClientAccess;
use cavern_proto::master::{Kind, OpenToWrite, SetHolds};
use cavern_proto::record::{HoldRecord, HoldRight, InodeRecord};
use rustix::io::Errno;

use super::context::{Attempt, MutationContext, MutationError, refuse};
use crate::error::Result;
use crate::index::intents::{self, Reach};
use crate::records;
use crate::schema;
use crate::transaction::Transaction;

/// Inodes of one [`SetHolds`].
const HOLDS_MAX: usize = 1000;

impl MutationContext<'_, '_> {
    /// An inode that is only open need not be held while it has a name: all sessions that may have it open then are
    /// notified of its removal. Who writes to blocks that are known here holds it, lest they be dropped.
    pub fn hold(&mut self, inode: u64) -> Attempt<u64> {
        let record = self.known_inode(inode)?;
        // Whoever holds its directory: nothing is changed by this.
        self.check_own(inode, &record)?;
        // What a session that holds it may write stays so.
        let known = self.tx.before().hold(inode, self.caller.session)?;
        // Where users are limited, nothing tells who writes: a session that follows on another opens no file again.
        let only_reads = self.access == ClientAccess::ReadOnly;
        let right = match known {
            Some(HoldRight::Commit) if self.limited.is_some() => HoldRight::Commit,
            None | Some(HoldRight::Read) if only_reads => HoldRight::Read,
            _ => HoldRight::Any,
        };
        self.put_hold(inode, right);
        Ok(inode)
    }

    /// Many at once. What is no longer there is left out.
    pub fn set_holds(&mut self, set: &SetHolds) -> Attempt<u64> {
        let inodes = set.hold.len() + set.let_go.len();
        if inodes > HOLDS_MAX {
            return refuse(Errno::INVAL, format!("{inodes} inodes to be held: send at most {HOLDS_MAX}"));
        }
        for inode in &set.let_go {
            self.release(*inode);
        }
        for inode in &set.hold {
            match self.hold(*inode) {
                Ok(_) => {}
                Err(MutationError::Refused(_)) => self.effects.gone.push(*inode),
                Err(stop) => return Err(stop),
            }
        }
        Ok(0)
    }

    /// Opens a file to be written, where users are limited. The session holds the file, and what it commits to it takes
    /// no permission any more: as with an open file of a local file system, whose mode may change afterwards.
    pub fn open_to_write(&mut self, open: OpenToWrite) -> Attempt<u64> {
        let record = self.inode(open.inode)?;
        match record.kind() {
            Kind::File => {}
            Kind::Directory => return refuse(Errno::ISDIR, "a directory is not opened to be written"),
            _ => return refuse(Errno::INVAL, "only a file is opened to be written"),
        }
        let wanted = if open.read { READ | WRITE } else { WRITE };
        self.check_access(open.inode, &record, wanted, "open")?;
        self.put_hold_to_write(open.inode);
        Ok(open.inode)
    }

    /// The session holds a file, and what it commits to the file meanwhile takes no permission any more.
    pub fn put_hold_to_write(&mut self, inode: u64) {
        self.put_hold(inode, if self.limited.is_some() { HoldRight::Commit } else { HoldRight::Any });
    }

    fn put_hold(&mut self, inode: u64, right: HoldRight) {
        if right != HoldRight::Read {
            intents::count_change(self.tx, self.mount.id);
        }
        let session = self.caller.session;
        self.tx.put(schema::Holds, (inode, session), &HoldRecord { right: right.into() });
        self.tx.put(schema::SessionHolds, (session, inode), &());
    }

    pub fn release(&mut self, inode: u64) -> u64 {
        release(self.tx, inode, self.caller.session);
        inode
    }
}

fn release(tx: &mut Transaction<'_>, inode: u64, session: u64) {
    tx.delete(schema::Holds, (inode, session));
    tx.delete(schema::SessionHolds, (session, inode));
}

/// Lets go of what a session holds that is over, of so many inodes at most; of how many there were. From `now_ns` on
/// its files count as changed, but for those that it might only read.
pub fn release_some(tx: &mut Transaction<'_>, session: u64, limit: usize, now_ns: i64) -> Result<usize> {
    let held = tx.before().held_by(session, limit)?;
    for inode in &held {
        let has_read = tx.before().hold(*inode, session)? == Some(HoldRight::Read);
        release(tx, *inode, session);
        if !has_read {
            mark_changed(tx, *inode, now_ns)?;
        }
    }
    Ok(held.len())
}

/// A file counts as changed, though nobody says what was written to it, nor when: caches have no bytes of it any more,
/// and the bucket gets it once more.
fn mark_changed(tx: &mut Transaction<'_>, inode: u64, now_ns: i64) -> Result {
    let is_content = |record: &InodeRecord| record.kind() == Kind::File && !record.unlinked && record.size > 0;
    let Some(mut record) = tx.inode(inode)?.filter(is_content) else { return Ok(()) };
    let size = record.size;
    records::change(&mut record, |attr| content_changed(attr, size, now_ns));
    intents::note(tx, inode, record.mount_id, Reach::Itself, now_ns)?;
    tx.update_inode(inode, record);
    Ok(())
}
