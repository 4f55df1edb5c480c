//! Inodes that somebody holds: without a name they stay, and their blocks are not dropped.

use cavern_posix::content_changed;
use cavern_proto::ClientAccess;
use cavern_proto::master::{Kind, SetHolds};
use cavern_proto::record::InodeRecord;
use rustix::io::Errno;

use super::quota::drop_quota;
use super::ttl::drop_ttl;
use super::{MutationContext, MutationError, Outcome, refuse};
use crate::error::StateError;
use crate::extent::{self, DropProgress};
use crate::intent::Reach;
use crate::orphans::StepProgress;
use crate::records::{self, hold_key, hold_session_key, inode_key, xattr_key};
use crate::transaction::Change;
use crate::{Family, Transaction, held, intent, origin, usage};

/// Inodes of one [`SetHolds`].
const HOLDS_MAX: usize = 1000;
/// What a hold has beside its key where users are limited, and the session may write to the file.
pub(super) const MAY_WRITE: &[u8] = b"w";
/// What it has where the session may not write to the file: it keeps what has no name, and changes nothing.
pub const ONLY_READS: &[u8] = b"r";

impl MutationContext<'_, '_> {
    /// An inode that is only open need not be held while it has a name: all sessions that may have it open then are
    /// notified of its removal. Who writes to blocks that are known here holds it, lest they be dropped.
    pub(super) fn hold(&mut self, inode: u64, session: u64) -> Result<u64, MutationError> {
        let record = self.known_inode(inode)?;
        // Whoever holds its directory: nothing is changed by this.
        self.check_own(inode, &record)?;
        self.put_hold(inode, session)?;
        Ok(inode)
    }

    /// Many at once. What is no longer there is left out.
    pub(super) fn set_holds(&mut self, set: &SetHolds, session: u64) -> Result<u64, MutationError> {
        let inodes = set.hold.len() + set.let_go.len();
        if inodes > HOLDS_MAX {
            return refuse(Errno::INVAL, format!("{inodes} inodes to be held: send at most {HOLDS_MAX}"));
        }
        for inode in &set.let_go {
            self.release(*inode, session);
        }
        for inode in &set.hold {
            match self.hold(*inode, session) {
                Ok(_) => {}
                Err(MutationError::Refused(_)) => self.gone.push(*inode),
                Err(stop) => return Err(stop),
            }
        }
        Ok(0)
    }

    /// What a session that holds it may write stays so.
    pub(super) fn put_hold(&mut self, inode: u64, session: u64) -> Result<(), StateError> {
        let known = self.transaction.before().hold(inode, session)?;
        // Where users are limited, nothing tells who writes: a session that follows on another opens no file again.
        let only_reads = self.access == ClientAccess::ReadOnly;
        let right = match known.as_deref() {
            Some(MAY_WRITE) if self.limited.is_some() => MAY_WRITE,
            None | Some(ONLY_READS) if only_reads => ONLY_READS,
            _ => &[],
        };
        self.put_hold_with(inode, session, right);
        Ok(())
    }

    /// The same, and what the session commits to the file while it holds it takes no permission any more.
    pub(super) fn put_hold_to_write(&mut self, inode: u64, session: u64) {
        let right = if self.limited.is_some() { MAY_WRITE } else { &[] };
        self.put_hold_with(inode, session, right);
    }

    /// Whether the session holds a file, and its user was allowed to write when it was opened.
    pub(super) fn may_commit(&self, inode: u64) -> Result<bool, StateError> {
        let right = self.transaction.before().hold(inode, self.session)?;
        Ok(right.is_some_and(|right| *right == *MAY_WRITE))
    }

    fn put_hold_with(&mut self, inode: u64, session: u64, right: &[u8]) {
        if right != ONLY_READS {
            intent::count_change(self.transaction, self.mount);
        }
        self.transaction.put_bytes(Family::Hold, &hold_key(inode, session), right);
        self.transaction.put_bytes(Family::HoldSession, &hold_session_key(session, inode), &[]);
    }

    pub(super) fn release(&mut self, inode: u64, session: u64) -> u64 {
        release(self.transaction, inode, session);
        inode
    }
}

fn release(transaction: &mut Transaction<'_>, inode: u64, session: u64) {
    transaction.delete(Family::Hold, &hold_key(inode, session));
    transaction.delete(Family::HoldSession, &hold_session_key(session, inode));
}

/// Deletes an inode, if it has no name and nobody holds it.
pub fn reap(transaction: &mut Transaction<'_>, inode: u64) -> Result<Outcome, StateError> {
    let tables = transaction.before();
    let Some(record) = tables.inode(inode)?.filter(|record| record.unlinked) else {
        return Ok(Outcome::StepProgress(StepProgress::default()));
    };
    // Objects of it are still to be given up while it has an intent.
    if tables.is_held(inode)? || tables.intent(inode)?.is_some() {
        return Ok(Outcome::StepProgress(StepProgress::default()));
    }
    if forget_content(transaction, inode, record.mount_id)? == DropProgress::Some {
        return Ok(Outcome::StepProgress(StepProgress { more: true, ..StepProgress::default() }));
    }
    transaction.delete(Family::Unlinked, &inode_key(inode));
    transaction.delete_inode(inode);
    Ok(Outcome::StepProgress(StepProgress { inodes: 1, ..StepProgress::default() }))
}

/// Deletes what belongs to an inode beside its record: blocks, which are to be freed, extended attributes, its quota,
/// and its right to an object of the bucket. Of a file with very many blocks only some of these go, and nothing else.
pub fn forget_content(
    transaction: &mut Transaction<'_>,
    inode: u64,
    mount_id: u32,
) -> Result<DropProgress, StateError> {
    if extent::drop_blocks_step(transaction, inode, mount_id)? == DropProgress::Some {
        return Ok(DropProgress::Some);
    }
    held::forget(transaction, mount_id, inode)?;
    if let Some(mut record) = transaction.inode(inode)? {
        origin::set(transaction, inode, &mut record, None)?;
        drop_ttl(transaction, inode, &record);
    }
    drop_quota(transaction, inode)?;
    usage::forget(transaction, inode);
    for (name, _) in transaction.before().xattrs(inode)? {
        transaction.delete(Family::Xattr, &xattr_key(inode, &name));
    }
    Ok(DropProgress::All)
}

/// Lets go of what a session holds that is over, of so many inodes at most; of how many there were. From `now_ns` on
/// its files count as changed, but for those that it might only read.
pub(super) fn release_some(
    transaction: &mut Transaction<'_>,
    session: u64,
    limit: usize,
    now_ns: i64,
) -> Result<usize, StateError> {
    let held = transaction.before().held_by(session, limit)?;
    for inode in &held {
        let has_read = transaction.before().hold(*inode, session)?.is_some_and(|right| *right == *ONLY_READS);
        release(transaction, *inode, session);
        if !has_read {
            mark_changed(transaction, *inode, now_ns)?;
        }
    }
    Ok(held.len())
}

/// A file counts as changed, though nobody says what was written to it, nor when: caches have no bytes of it any more,
/// and the bucket gets it once more.
fn mark_changed(transaction: &mut Transaction<'_>, inode: u64, now_ns: i64) -> Result<(), StateError> {
    let is_content = |record: &InodeRecord| record.kind() == Kind::File && !record.unlinked && record.size > 0;
    let Some(mut record) = transaction.inode(inode)?.filter(is_content) else { return Ok(()) };
    let size = record.size;
    records::change(&mut record, |attr| content_changed(attr, size, now_ns));
    intent::note(transaction, inode, record.mount_id, Reach::Itself, now_ns)?;
    transaction.put_inode(inode, record);
    transaction.changes.push(Change::Inode(inode));
    Ok(())
}
