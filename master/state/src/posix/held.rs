//! What sessions hold. An inode that somebody holds stays without a name, and its blocks are not dropped.
//!
//! What a session makes in a directory that it holds has a number that it has reserved. Who may change what meanwhile
//! is checked with each inode ([`MutationContext::check_holder`]): the session changes what is in its directory, and
//! has answered its own changes already; all others have the directory recalled first.
//!
//! What a session has answered for, and sends when it no longer holds what it is about, is refused, so nothing of it
//! comes behind what others have done since.

use std::collections::BTreeSet;

use cavern_posix::content_changed;
use cavern_posix::mode::{READ, WRITE};
use cavern_proto::ClientAccess;
use cavern_proto::master::{CreateInode, Kind, LetGoDirectories, Naming, OpenToWrite, SetHolds};
use cavern_proto::record::{HoldRecord, HoldRight, InodeRange, InodeRecord};
use rustix::io::Errno;

use super::context::{MutationContext, MutationError, Tried, refuse};
use crate::change::HeldDirectory;
use crate::error::Result;
use crate::index::held::{self, HELD_MAX};
use crate::index::intents::{self, Reach};
use crate::transaction::Transaction;
use crate::{records, schema};

/// Inodes of one [`SetHolds`].
const HOLDS_MAX: usize = 1000;
/// Numbers of one reservation.
const NUMBERS_MAX: u32 = 65_536;
/// Directories of one mutation that lets go of them.
const LET_GO_MAX: usize = 10_000;

impl MutationContext<'_, '_> {
    /// An inode that is only open need not be held while it has a name: all sessions that may have it open then are
    /// notified of its removal. Who writes to blocks that are known here holds it, lest they be dropped.
    pub fn hold(&mut self, inode: u64) -> Tried<u64> {
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
    pub fn set_holds(&mut self, set: &SetHolds) -> Tried<u64> {
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
    pub fn open_to_write(&mut self, open: OpenToWrite) -> Tried<u64> {
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

    /// Refuses what was answered for by a session that is over.
    pub fn check_session(&self) -> Tried {
        let session = self.caller.session;
        if self.caller.is_answered && self.is_ending()? {
            return refuse(Errno::STALE, format!("session {session} is over, and does not hold anything any more"));
        }
        Ok(())
    }

    fn is_ending(&self) -> Result<bool> {
        Ok(self.tx.before().session(self.caller.session)?.is_some_and(|record| record.is_ending))
    }

    /// Refuses what is about a whole mount as long as anybody holds a directory in it.
    pub fn check_nothing_held(&self) -> Tried {
        if self.tx.counters.held == 0 {
            return Ok(());
        }
        match self.tx.before().held_in(self.mount.id, 1)?.first() {
            Some(held) => Err(MutationError::Held { directory: held.directory }),
            None => Ok(()),
        }
    }

    /// The number that a new inode is to have; 0 for whichever is next.
    pub fn check_number(&self, number: u64) -> Tried {
        if number == 0 {
            return Ok(());
        }
        let session = self.caller.session;
        let reserved = self.tx.before().session(session)?.unwrap_or_default().reserved;
        let has = |range: &InodeRange| number >= range.first && number - range.first < u64::from(range.count);
        if !reserved.iter().any(has) {
            return refuse(Errno::INVAL, format!("{number} is no inode number that session {session} has reserved"));
        }
        if self.tx.inode(number)?.is_some() {
            return refuse(Errno::INVAL, format!("inode {number} is there already: take another number"));
        }
        Ok(())
    }

    /// Has the session hold the directory that it has made, if it wants to, and may.
    pub fn hold_made(&mut self, create: &CreateInode, inode: u64) -> Tried {
        let is_wanted = create.hold && create.kind() == Kind::Directory && create.naming() == Naming::Named;
        let session = self.caller.session;
        // What takes the permission of a user is checked before it is answered.
        if !is_wanted || session == 0 || self.limited.is_some() {
            return Ok(());
        }
        // Who holds the directory above has answered that this one is held as well.
        if self.caller.is_answered || self.may_hold(create.parent)? {
            held::hold(self.tx, HeldDirectory { mount_id: self.mount.id, directory: inode, session })?;
            self.effects.held = true;
        }
        Ok(())
    }

    fn may_hold(&self, parent: u64) -> Result<bool> {
        let tables = self.tx.before();
        // One that is ending would never let go. One that is not known yet has not changed anything; should it be over,
        // its record comes back with this change, and it is ended once more.
        if self.is_ending()? || tables.held_count(self.caller.session)? >= HELD_MAX {
            return Ok(false);
        }
        if self.tx.counters.quotas > 0 || tables.has_any(schema::Ttls, ())? {
            for directory in self.tx.now().above(parent)? {
                if tables.has(schema::Quotas, directory)? || tables.has(schema::Ttls, directory)? {
                    return Ok(false);
                }
            }
        }
        Ok(true)
    }

    /// Takes numbers from the counter of inodes; gives the first.
    pub fn reserve(&mut self, count: u32) -> Tried<u64> {
        if !(1..=NUMBERS_MAX).contains(&count) {
            let reason = format!("{count} numbers of inodes to be reserved: ask for 1 to {NUMBERS_MAX}");
            return refuse(Errno::INVAL, reason);
        }
        let first = self.tx.counters.inode + 1;
        self.tx.counters.inode += u64::from(count);
        self.effects.reserved = Some(InodeRange { first, count });
        Ok(first)
    }

    pub fn let_go_directories(&mut self, asked: &LetGoDirectories) -> Tried<u64> {
        let session = self.caller.session;
        if asked.all {
            held::release_some(self.tx, session, usize::MAX)?;
            return Ok(0);
        }
        let count = asked.directories.len();
        if count > LET_GO_MAX {
            return refuse(Errno::INVAL, format!("{count} directories to let go of: send at most {LET_GO_MAX}"));
        }
        if self.tx.counters.held == 0 {
            return Ok(0);
        }
        let mut held = Vec::new();
        // Each once.
        for directory in asked.directories.iter().copied().collect::<BTreeSet<u64>>() {
            let mount_id = self.tx.before().get(schema::SessionDirectories, (session, directory))?;
            held.extend(mount_id.map(|mount_id| HeldDirectory { mount_id, directory, session }));
        }
        held::let_go(self.tx, &held)?;
        Ok(0)
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

#[cfg(test)]
mod tests;
