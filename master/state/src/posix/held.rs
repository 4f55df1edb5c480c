//! Directories that sessions hold, and the numbers of inodes that they give to what they make in there. Who may change
//! what meanwhile is checked with each inode ([`MutationContext::check_holder`]): a session that holds a directory
//! changes what is in it, and has answered its own changes already; all others have it recalled first.
//!
//! What a session has answered for, and sends when it no longer holds what it is about, is refused, so nothing of it
//! comes behind what others have done since.

use std::collections::BTreeSet;

use cavern_proto::master::{CreateInode, Kind, LetGoDirectories, Naming};
use cavern_proto::record::InodeRange;
use rustix::io::Errno;

use super::context::{Attempt, MutationContext, MutationError, refuse};
use crate::change::HeldDirectory;
use crate::error::Result;
use crate::index::held::{self, HELD_MAX};
use crate::schema;

/// Numbers of one reservation.
const NUMBERS_MAX: u32 = 65_536;
/// Directories of one mutation that lets go of them.
const LET_GO_MAX: usize = 10_000;

impl MutationContext<'_, '_> {
    /// Refuses what was answered for by a session that is over.
    pub fn check_session(&self) -> Attempt {
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
    pub fn check_nothing_held(&self) -> Attempt {
        if self.tx.counters.held == 0 {
            return Ok(());
        }
        match self.tx.before().held_in(self.mount.id, 1)?.first() {
            Some(held) => Err(MutationError::Held { directory: held.directory }),
            None => Ok(()),
        }
    }

    /// The number that a new inode is to have; 0 for whichever is next.
    pub fn check_number(&self, number: u64) -> Attempt {
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
    pub fn hold_made(&mut self, create: &CreateInode, inode: u64) -> Attempt {
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
    pub fn reserve(&mut self, count: u32) -> Attempt<u64> {
        if !(1..=NUMBERS_MAX).contains(&count) {
            let reason = format!("{count} numbers of inodes to be reserved: ask for 1 to {NUMBERS_MAX}");
            return refuse(Errno::INVAL, reason);
        }
        let first = self.tx.counters.inode + 1;
        self.tx.counters.inode += u64::from(count);
        self.effects.reserved = Some(InodeRange { first, count });
        Ok(first)
    }

    pub fn let_go_directories(&mut self, asked: &LetGoDirectories) -> Attempt<u64> {
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

#[cfg(test)]
mod tests;
