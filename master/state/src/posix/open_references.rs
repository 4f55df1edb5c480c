//! Open references and delegations of sessions. An inode with an open reference stays without a name, and its blocks
//! are not dropped.
//!
//! What a session makes in a directory delegated to it has a number that it has reserved. Who may change what meanwhile
//! is checked with each inode ([`MutationContext::check_holder`]): the session changes what is in its directory, and
//! has answered its own changes already; all others have the directory recalled first.
//!
//! What a session has answered for, and sends when it no longer holds what it is about, is refused, so nothing of it
//! comes behind what others have done since.

use std::collections::BTreeSet;

use cavern_posix::content_changed;
use cavern_posix::mode::{READ, WRITE};
use cavern_proto::ClientAccess;
use cavern_proto::master::{
    AcquireDelegation, AcquireStep, CreateInode, Kind, Naming, OpenToWrite, ReturnDelegations, SetOpenRefs,
};
use cavern_proto::record::{InodeRange, InodeRecord, OpenRefRecord, OpenRight};
use rustix::io::Errno;

use super::context::{Checked, MutationContext, MutationError, refuse};
use crate::change::{Change, DelegationChange, DirectoryDelegation};
use crate::error::Result;
use crate::index::delegations::{self, DELEGATIONS_MAX};
use crate::index::intents::{self, Reach};
use crate::transaction::Transaction;
use crate::{records, schema};

/// Inodes of one [`SetOpenRefs`].
const OPEN_REFS_MAX: usize = 1000;
/// Numbers of one reservation.
const NUMBERS_MAX: u32 = 65_536;
/// Directories of one mutation that lets go of them.
const RETURN_MAX: usize = 10_000;
/// Names of a directory that is to be held, or directories that others hold, that are looked at.
const LOOKED_AT_MAX: usize = 1000;

impl MutationContext<'_, '_> {
    /// An inode that is only open need not be held while it has a name: all sessions that may have it open then are
    /// notified of its removal. Who writes to blocks that are known here holds it, lest they be dropped.
    pub fn add_open_ref(&mut self, inode: u64) -> Checked<u64> {
        let record = self.known_inode(inode)?;
        // Whoever holds the delegation of its directory: nothing is changed by this.
        self.check_own(inode, &record)?;
        // What a session that holds it may write stays so.
        let known = self.tx.before().open_ref(inode, self.caller.session)?;
        // Where users are limited, nothing tells who writes: a session that follows on another opens no file again.
        let only_reads = self.access == ClientAccess::ReadOnly;
        let right = match known {
            Some(OpenRight::Commit) if self.limited.is_some() => OpenRight::Commit,
            None | Some(OpenRight::Read) if only_reads => OpenRight::Read,
            _ => OpenRight::Any,
        };
        self.put_open_ref(inode, right);
        Ok(inode)
    }

    /// Many at once. What is no longer there is left out.
    pub fn set_open_refs(&mut self, set: &SetOpenRefs) -> Checked<u64> {
        let inodes = set.opened.len() + set.closed.len();
        if inodes > OPEN_REFS_MAX {
            return refuse(Errno::INVAL, format!("{inodes} inodes to be held: send at most {OPEN_REFS_MAX}"));
        }
        for inode in &set.closed {
            self.release(*inode);
        }
        for inode in &set.opened {
            match self.add_open_ref(*inode) {
                Ok(_) => {}
                Err(MutationError::Refused(_)) => self.effects.gone.push(*inode),
                Err(stop) => return Err(stop),
            }
        }
        Ok(0)
    }

    /// Opens a file to be written, where users are limited. The session holds the file, and what it commits to it takes
    /// no permission any more: as with an open file of a local file system, whose mode may change afterwards.
    pub fn open_to_write(&mut self, open: OpenToWrite) -> Checked<u64> {
        let record = self.inode(open.inode)?;
        match record.kind() {
            Kind::File => {}
            Kind::Directory => return refuse(Errno::ISDIR, "a directory is not opened to be written"),
            _ => return refuse(Errno::INVAL, "only a file is opened to be written"),
        }
        let wanted = if open.read { READ | WRITE } else { WRITE };
        self.check_access(open.inode, &record, wanted, "open")?;
        self.put_write_ref(open.inode);
        Ok(open.inode)
    }

    /// The session holds a file, and what it commits to the file meanwhile takes no permission any more.
    pub fn put_write_ref(&mut self, inode: u64) {
        self.put_open_ref(inode, if self.limited.is_some() { OpenRight::Commit } else { OpenRight::Any });
    }

    fn put_open_ref(&mut self, inode: u64, right: OpenRight) {
        if right != OpenRight::Read {
            intents::count_change(self.tx, self.mount.id);
        }
        let session = self.caller.session;
        self.tx.put(schema::OpenRefs, (inode, session), &OpenRefRecord { right: right.into() });
        self.tx.put(schema::SessionOpenRefs, (session, inode), &());
    }

    pub fn release(&mut self, inode: u64) -> u64 {
        release(self.tx, inode, self.caller.session);
        inode
    }

    /// Refuses what was answered for by a session that is over.
    pub fn check_session(&self) -> Checked {
        let session = self.caller.session;
        if self.caller.is_write_back && self.is_ending()? {
            return refuse(Errno::STALE, format!("session {session} is over, and does not hold anything any more"));
        }
        Ok(())
    }

    fn is_ending(&self) -> Result<bool> {
        Ok(self.tx.before().session(self.caller.session)?.is_some_and(|record| record.is_ending))
    }

    /// Refuses what is about a whole mount as long as anybody holds the delegation of a directory in it.
    pub fn check_no_delegations(&self) -> Checked {
        if self.tx.counters.delegations == 0 {
            return Ok(());
        }
        match self.tx.before().delegations_in(self.mount.id, 1)?.first() {
            Some(held) => Err(MutationError::Delegated { directory: held.directory }),
            None => Ok(()),
        }
    }

    /// The number that a new inode is to have; 0 for whichever is next.
    pub fn check_number(&self, number: u64) -> Checked {
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

    /// Has the session hold the delegation of the directory that it has made, if it wants to, and may.
    pub fn delegate_created(&mut self, create: &CreateInode, inode: u64) -> Checked {
        let is_wanted = create.delegate && create.kind() == Kind::Directory && create.naming() == Naming::Named;
        let session = self.caller.session;
        // What takes the permission of a user is checked before it is answered.
        if !is_wanted || session == 0 || self.limited.is_some() {
            return Ok(());
        }
        // Who holds the delegation of the directory above has answered that this one is held as well.
        if self.caller.is_write_back || self.may_delegate(create.parent)? {
            delegations::grant(self.tx, DirectoryDelegation { mount_id: self.mount.id, directory: inode, session })?;
            self.effects.delegated = true;
        }
        Ok(())
    }

    /// Has the session hold the delegation of a directory that was there before, if it may. The master that leads has
    /// seen to it that no other session knows what is in there; what the state says is judged here.
    pub fn acquire_delegation(&mut self, asked: &AcquireDelegation) -> Checked<u64> {
        let (directory, session) = (asked.inode, self.caller.session);
        let record = self.directory(directory)?;
        let may_hold = session != 0 && self.limited.is_none() && record.listed_ns != 0;
        let is_let = may_hold && asked.step() != AcquireStep::Later && self.may_delegate(directory)?;
        // This reads the most.
        if !is_let || self.is_held_below(directory, &record)? {
            return Ok(directory);
        }
        match asked.step() {
            AcquireStep::Later => {}
            AcquireStep::Announce => {
                self.tx.notify(Change::Inode(directory));
                self.tx.changes.delegations.push(DelegationChange::Announced(directory));
            }
            AcquireStep::Grant => {
                let mount_id = self.mount.id;
                if self.tx.before().holder(mount_id, directory)? != Some(session) {
                    delegations::grant(self.tx, DirectoryDelegation { mount_id, directory, session })?;
                }
                self.effects.delegated = true;
            }
        }
        Ok(directory)
    }

    /// Whether another session holds a directory in this one, and so answers what changes its attributes; or may, where
    /// both the names here and the directories that others hold are too many to be looked at.
    fn is_held_below(&self, directory: u64, record: &InodeRecord) -> Result<bool> {
        let (tables, session) = (self.tx.before(), self.caller.session);
        let others = self.tx.counters.delegations.saturating_sub(tables.delegation_count(session)?);
        if others == 0 || records::links(record) <= 2 {
            return Ok(false);
        }
        if others > LOOKED_AT_MAX as u64 || record.entries.is_some_and(|names| names < others) {
            let (entries, is_last) = tables.entries(directory, None, LOOKED_AT_MAX)?;
            for (_, entry) in entries.iter().filter(|(_, entry)| entry.kind() == Kind::Directory) {
                if tables.holder(self.mount.id, entry.inode)?.is_some_and(|holder| holder != session) {
                    return Ok(true);
                }
            }
            return Ok(!is_last);
        }
        for row in tables.rows(schema::DelegationCounts, ()) {
            let holder = row?.key()?;
            let limit = if holder == session { 0 } else { LOOKED_AT_MAX };
            for held in tables.directories_of(holder, limit)? {
                if tables.inode(held.directory)?.is_some_and(|record| record.parent == directory) {
                    return Ok(true);
                }
            }
        }
        Ok(false)
    }

    /// Whether the session may come to hold a directory, or one in it.
    fn may_delegate(&self, parent: u64) -> Result<bool> {
        let tables = self.tx.before();
        // One that is ending would never let go. One that is not known yet has not changed anything; should it be over,
        // its record comes back with this change, and it is ended once more.
        if self.is_ending()? || tables.delegation_count(self.caller.session)? >= DELEGATIONS_MAX {
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
    pub fn reserve(&mut self, count: u32) -> Checked<u64> {
        if !(1..=NUMBERS_MAX).contains(&count) {
            let reason = format!("{count} numbers of inodes to be reserved: ask for 1 to {NUMBERS_MAX}");
            return refuse(Errno::INVAL, reason);
        }
        let first = self.tx.counters.inode + 1;
        self.tx.counters.inode += u64::from(count);
        self.effects.reserved = Some(InodeRange { first, count });
        Ok(first)
    }

    pub fn return_delegations(&mut self, asked: &ReturnDelegations) -> Checked<u64> {
        let session = self.caller.session;
        if asked.all {
            delegations::release_some(self.tx, session, usize::MAX)?;
            return Ok(0);
        }
        let count = asked.directories.len();
        if count > RETURN_MAX {
            return refuse(Errno::INVAL, format!("{count} directories to let go of: send at most {RETURN_MAX}"));
        }
        if self.tx.counters.delegations == 0 {
            return Ok(0);
        }
        let mut held = Vec::new();
        // Each once.
        for directory in asked.directories.iter().copied().collect::<BTreeSet<u64>>() {
            let mount_id = self.tx.before().get(schema::SessionDelegations, (session, directory))?;
            held.extend(mount_id.map(|mount_id| DirectoryDelegation { mount_id, directory, session }));
        }
        delegations::give_back(self.tx, &held)?;
        Ok(0)
    }
}

fn release(tx: &mut Transaction<'_>, inode: u64, session: u64) {
    tx.delete(schema::OpenRefs, (inode, session));
    tx.delete(schema::SessionOpenRefs, (session, inode));
}

/// Lets go of what a session holds that is over, of so many inodes at most; of how many there were. From `now_ns` on
/// its files count as changed, but for those that it might only read.
pub fn release_some(tx: &mut Transaction<'_>, session: u64, limit: usize, now_ns: i64) -> Result<usize> {
    let held = tx.before().refs_of(session, limit)?;
    for inode in &held {
        let has_read = tx.before().open_ref(*inode, session)? == Some(OpenRight::Read);
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
