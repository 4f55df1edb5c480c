//! Who may change what while sessions hold directories: a session that holds one changes what is in it, and has
//! answered its own changes already; all others have it recalled first.
//!
//! What a session has answered for, and sends when it no longer holds what it is about, is refused, so nothing of it
//! comes behind what others have done since.

use cavern_proto::master::{CreateInode, Kind, LetGoDirectories, Naming};
use cavern_proto::record::{InodeRange, InodeRecord};
use rustix::io::Errno;

use super::{MutationContext, MutationError, refuse};
use crate::Family;
use crate::error::StateError;
use crate::held::{self, HELD_MAX, HeldDirectory};

/// Numbers of one reservation, and reservations of a session: a new one takes the place of the oldest.
const NUMBERS_MAX: u32 = 65_536;
const RANGES_MAX: usize = 4;
/// Directories of one mutation that lets go of them.
const LET_GO_MAX: usize = 10_000;

impl MutationContext<'_, '_> {
    /// Refuses what was answered for by a session that is over.
    pub(super) fn check_session(&self) -> Result<(), MutationError> {
        let session = self.session;
        if self.is_answered && self.transaction.before().session(session)?.is_some_and(|record| record.is_ending) {
            return refuse(Errno::STALE, format!("session {session} is over, and does not hold anything any more"));
        }
        Ok(())
    }

    /// Refuses a change of an inode which another session may have answered for otherwise.
    pub(super) fn check_holder(&mut self, inode: u64, record: &InodeRecord) -> Result<(), MutationError> {
        if self.is_answered {
            return self.check_own(inode, record);
        }
        if self.transaction.counters.held == 0 {
            return Ok(());
        }
        let session = self.session;
        let is_other = |holder| session == 0 || holder != session;
        match self.transaction.before().held_around(inode, record, is_other)? {
            Some(directory) => Err(MutationError::Held { directory }),
            None => Ok(()),
        }
    }

    /// Refuses what the session has answered for, though it does not hold the directory of an inode, nor the inode.
    pub(super) fn check_own(&mut self, inode: u64, record: &InodeRecord) -> Result<(), MutationError> {
        let is_own = |holder| holder == self.session;
        if !self.is_answered || self.transaction.before().held_around(inode, record, is_own)?.is_some() {
            return Ok(());
        }
        self.not_held(inode)
    }

    /// The same for a directory in which names are to change.
    pub(super) fn check_own_directory(&mut self, inode: u64, record: &InodeRecord) -> Result<(), MutationError> {
        if !self.is_answered || self.transaction.before().holder(record.mount_id, inode)? == Some(self.session) {
            return Ok(());
        }
        self.not_held(inode)
    }

    fn not_held<T>(&mut self, inode: u64) -> Result<T, MutationError> {
        let (session, shown) = (self.session, self.shown(inode)?);
        refuse(Errno::STALE, format!("session {session} does not hold {shown}, or its directory, any more"))
    }

    /// Refuses what is about a whole mount as long as anybody holds a directory in it.
    pub(super) fn check_nothing_held(&mut self) -> Result<(), MutationError> {
        if self.transaction.counters.held == 0 {
            return Ok(());
        }
        match self.transaction.before().held_in(self.mount, 1)?.first() {
            Some(held) => Err(MutationError::Held { directory: held.directory }),
            None => Ok(()),
        }
    }

    /// The number that a new inode is to have; 0 for whichever is next.
    pub(super) fn check_number(&mut self, number: u64) -> Result<u64, MutationError> {
        if number == 0 {
            return Ok(0);
        }
        let session = self.session;
        let reserved = self.transaction.before().session(session)?.unwrap_or_default().reserved;
        let has = |range: &InodeRange| number >= range.first && number - range.first < u64::from(range.count);
        if !reserved.iter().any(has) {
            return refuse(Errno::INVAL, format!("{number} is no inode number that session {session} has reserved"));
        }
        if self.transaction.inode(number)?.is_some() {
            return refuse(Errno::INVAL, format!("inode {number} is there already: take another number"));
        }
        Ok(number)
    }

    /// Has the session hold the directory that it has made, if it wants to, and may.
    pub(super) fn hold_made(&mut self, create: &CreateInode, inode: u64, mount_id: u32) -> Result<(), MutationError> {
        let is_wanted = create.hold && create.kind() == Kind::Directory && create.naming() == Naming::Named;
        // What takes the permission of a user is checked before it is answered.
        if !is_wanted || self.session == 0 || self.limited.is_some() {
            return Ok(());
        }
        // Who holds the directory above has answered that this one is held as well.
        if self.is_answered || self.may_hold(create.parent)? {
            held::hold(self.transaction, HeldDirectory { mount_id, directory: inode, session: self.session })?;
            self.held = true;
        }
        Ok(())
    }

    fn may_hold(&mut self, parent: u64) -> Result<bool, StateError> {
        let tables = self.transaction.before();
        // One that is ending would never let go. One that is not known yet has not changed anything; should it be over,
        // its record comes back with this change, and it is ended once more.
        if tables.session(self.session)?.is_some_and(|record| record.is_ending) {
            return Ok(false);
        }
        if tables.held_count(self.session)? >= HELD_MAX {
            return Ok(false);
        }
        let has_quotas = self.transaction.counters.quotas > 0;
        let has_rules = tables.keys(Family::Ttl).next().transpose()?.is_some();
        if has_quotas || has_rules {
            for directory in self.above(parent)? {
                if tables.quota(directory)?.is_some() || tables.ttl(directory)?.is_some() {
                    return Ok(false);
                }
            }
        }
        Ok(true)
    }

    /// Takes numbers from the counter of inodes; gives the first.
    pub(super) fn reserve(&mut self, count: u32) -> Result<u64, MutationError> {
        if !(1..=NUMBERS_MAX).contains(&count) {
            let reason = format!("{count} numbers of inodes to be reserved: ask for 1 to {NUMBERS_MAX}");
            return refuse(Errno::INVAL, reason);
        }
        let first = self.transaction.counters.inode + 1;
        self.transaction.counters.inode += u64::from(count);
        self.reserved = Some(InodeRange { first, count });
        Ok(first)
    }

    pub(super) fn let_go_directories(&mut self, asked: &LetGoDirectories) -> Result<u64, MutationError> {
        if asked.all {
            held::release_some(self.transaction, self.session, usize::MAX)?;
            return Ok(0);
        }
        let count = asked.directories.len();
        if count > LET_GO_MAX {
            return refuse(Errno::INVAL, format!("{count} directories to let go of: send at most {LET_GO_MAX}"));
        }
        if self.transaction.counters.held == 0 {
            return Ok(0);
        }
        // Each once.
        let directories: std::collections::BTreeSet<u64> = asked.directories.iter().copied().collect();
        let mut held = Vec::new();
        for directory in directories {
            held.extend(self.transaction.before().held_by_session(self.session, directory)?);
        }
        held::let_go(self.transaction, &held)?;
        Ok(0)
    }
}

/// A session's reservations with a new one, which takes the place of the oldest.
pub(super) fn with_range(mut reserved: Vec<InodeRange>, range: InodeRange) -> Vec<InodeRange> {
    reserved.push(range);
    let surplus = reserved.len().saturating_sub(RANGES_MAX);
    reserved.drain(..surplus);
    reserved
}

#[cfg(test)]
mod tests;
