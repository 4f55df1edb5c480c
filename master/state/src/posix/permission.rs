//! May this user change this? Asked in mounts that limit the users of a client: a client is believed who asks only as
//! far as its rule lets that user be himself ([`UserLimits::mapped`]), and each change takes the permission that Linux
//! would ask for on a local file system ([`cavern_posix`]).
//!
//! What differs from that, because there is no open file to go by:
//! - The directories above must let the user through at each change, not only when they were opened.
//! - The owner of a file may always write to it and cut it, as servers of NFS have it: his own mode may forbid it to
//!   him since he has opened it. Of others, what they have opened to be written is the session's to commit until it
//!   lets go ([`MutationContext::open_to_write`]).
//!
//! Nobody but the client's own kernel checks locks. Changes that were answered for in a directory which the session has
//! held since before users were limited are not checked: they were answered by what held then, and must not get lost.

use cavern_posix::acl::ACCESS;
use cavern_posix::mode::{EXECUTE, READ, WRITE};
use cavern_posix::xattr::CAPABILITY;
use cavern_posix::{PosixError, Right, XattrChange, check_sticky, right_to_set, right_to_xattr};
use cavern_proto::master::{Kind, Mount, RenameName, SetAttr, User, UserLimits};
use cavern_proto::record::InodeRecord;
use rustix::io::Errno;

use super::hold::MAY_WRITE;
use super::{MutationContext, MutationError, acl, refuse};
use crate::error::StateError;
use crate::records::{attributes, is_directory, links};
use crate::tables::{DEPTH_MAX, Tables};

/// Of a directory.
const SEARCH: u32 = EXECUTE;

/// A user whose permission a change takes.
#[derive(Clone, Debug)]
pub(super) struct LimitedUser {
    /// As he counts here.
    user: User,
    limits: UserLimits,
}

impl MutationContext<'_, '_> {
    /// Finds out whose permission a change in a mount takes, and whose is what is new.
    pub(super) fn find_limited_user(&mut self, mount: &Mount) {
        let limits = self.client.as_ref().and_then(|client| mount.limits_of(client)).filter(|_| !self.is_answered);
        self.limited =
            limits.map(|limits| LimitedUser { user: limits.mapped(self.user.as_ref()), limits: limits.clone() });
        if let Some(limited) = &self.limited {
            (self.uid, self.gid) = (limited.user.uid, limited.user.gid);
        }
    }

    /// The user whose permission it takes; `None` for whoever may do everything.
    pub(super) fn limited_user(&self) -> Option<&User> {
        self.limited.as_ref().map(|limited| &limited.user).filter(|user| !user.is_root())
    }

    /// Whether mode or access list of an inode allow all of this.
    fn allows(&self, inode: u64, record: &InodeRecord, wanted: u32) -> Result<bool, StateError> {
        match self.limited_user() {
            None => Ok(true),
            Some(user) => permits(self.transaction.before(), user, (inode, record), wanted),
        }
    }

    fn refuse_access<T>(&mut self, inode: u64, what: &str) -> Result<T, MutationError> {
        let (uid, shown) = (self.uid, self.shown(inode)?);
        refuse(Errno::ACCESS, format!("user {uid} may not {what} {shown}"))
    }

    /// A directory and those above it let the user through.
    fn check_search(&mut self, directory: u64) -> Result<(), MutationError> {
        let mut at = directory;
        for _ in 0..DEPTH_MAX {
            let Some(record) = self.transaction.inode(at)?.filter(|record| record.mount_id == self.mount) else {
                return Ok(());
            };
            // Whoever holds it may have answered that it has another mode.
            self.check_holder(at, &record)?;
            if !self.allows(at, &record, SEARCH)? {
                return self.refuse_access(at, "look for anything in");
            }
            if at == self.mount_root {
                return Ok(());
            }
            at = record.parent;
        }
        refuse(Errno::LOOP, "the directory is nested too deeply")
    }

    /// The user gets to an inode. By which of several names he has come nobody knows, and what has none was opened.
    fn check_reach(&mut self, inode: u64, record: &InodeRecord) -> Result<(), MutationError> {
        if self.limited_user().is_none() || inode == self.mount_root || !has_one_name(record) {
            return Ok(());
        }
        self.check_search(record.parent)
    }

    /// Names in a directory may change.
    pub(super) fn check_names(&mut self, inode: u64, record: &InodeRecord) -> Result<(), MutationError> {
        if self.limited_user().is_none() {
            return Ok(());
        }
        self.check_search(inode)?;
        if self.allows(inode, record, WRITE)? { Ok(()) } else { self.refuse_access(inode, "change names in") }
    }

    /// A name may be taken away from an inode in a directory.
    pub(super) fn check_sticky(&self, directory: &InodeRecord, record: &InodeRecord) -> Result<(), MutationError> {
        let Some(user) = self.limited_user() else { return Ok(()) };
        Ok(check_sticky(user, &attributes(0, directory), &attributes(0, record))?)
    }

    /// One of the inodes of a rename may leave its directory; a directory has a name for the one above it, which
    /// changes.
    pub(super) fn check_rename(
        &mut self,
        rename: &RenameName,
        inode: u64,
        (directory, record): (&InodeRecord, &InodeRecord),
    ) -> Result<(), MutationError> {
        self.check_sticky(directory, record)?;
        let leads_elsewhere = is_directory(record) && rename.parent != rename.new_parent;
        if leads_elsewhere && !self.allows(inode, record, WRITE)? {
            return self.refuse_access(inode, "move");
        }
        Ok(())
    }

    /// An inode may get another name. One without any was opened by whoever names it.
    pub(super) fn check_link(&mut self, inode: u64, record: &InodeRecord) -> Result<(), MutationError> {
        let is_owner = self.limited_user().is_none_or(|user| user.uid == record.uid);
        if record.unlinked && !is_owner && !self.may_commit(inode)? {
            return self.refuse_access(inode, "give a name to");
        }
        self.check_reach(inode, record)
    }

    /// What is of this kind may be made.
    pub(super) fn check_kind(&self, kind: Kind) -> Result<(), MutationError> {
        match kind {
            Kind::CharacterDevice | Kind::BlockDevice => self.check_root("makes devices"),
            _ => Ok(()),
        }
    }

    pub(super) fn check_root(&self, what: &'static str) -> Result<(), MutationError> {
        match self.limited_user() {
            None => Ok(()),
            Some(user) => Err(PosixError::NotTheOne { uid: user.uid, what }.into()),
        }
    }

    /// A client may set what holds for others in the mount that was found, as `is_granted` by its rule: whose space is
    /// bounded does not say by how much. Of whoever has no name nothing is known (no `[security]`).
    pub(super) fn check_setting(
        &self,
        is_granted: fn(&Mount, &str) -> bool,
        what: &str,
        option: &str,
    ) -> Result<(), MutationError> {
        let Some(client) = self.client.clone().filter(|client| !client.is_empty()) else { return Ok(()) };
        match self.transaction.before().mount(self.mount)? {
            Some(mount) if is_granted(&mount, &client) => Ok(()),
            _ => refuse(
                Errno::PERM,
                format!(
                    "the client \"{client}\" may not {what}: it takes a certificate of the role admin, or the option \
                     {option} in the rule of the mount that fits the client (cv mount update --client)"
                ),
            ),
        }
    }

    /// A file may be opened to be written.
    pub(super) fn check_open(&mut self, inode: u64, record: &InodeRecord, wanted: u32) -> Result<(), MutationError> {
        self.check_reach(inode, record)?;
        if self.allows(inode, record, wanted)? { Ok(()) } else { self.refuse_access(inode, "open") }
    }

    /// What was written to a file may become a part of it.
    pub(super) fn check_commit(&mut self, inode: u64, record: &InodeRecord) -> Result<(), MutationError> {
        let Some(user) = self.limited_user() else { return Ok(()) };
        let right = if user.uid == record.uid { Right::Reach } else { Right::Write };
        if self.may_commit(inode)? { Ok(()) } else { self.check_permission(inode, record, right) }
    }

    /// The user has a right to an inode.
    fn check_permission(&mut self, inode: u64, record: &InodeRecord, right: Right) -> Result<(), MutationError> {
        if right == Right::Commit {
            return self.check_commit(inode, record);
        }
        self.check_reach(inode, record)?;
        if right == Right::Reach || self.allows(inode, record, WRITE)? {
            return Ok(());
        }
        self.refuse_access(inode, "write to")
    }

    pub(super) fn check_set_attributes(&mut self, set: &SetAttr, record: &InodeRecord) -> Result<(), MutationError> {
        let Some(LimitedUser { user, limits }) = &self.limited else { return Ok(()) };
        let right = right_to_set(set, &attributes(set.inode, record), (user, limits))?;
        self.check_permission(set.inode, record, right)
    }

    /// An extended attribute may be set, or taken away.
    pub(super) fn check_xattr(
        &mut self,
        inode: u64,
        record: &InodeRecord,
        name: &[u8],
        change: XattrChange,
    ) -> Result<(), MutationError> {
        // Linux resolves the path before it looks at the attribute. What a write takes away was opened then.
        if name != CAPABILITY || change != XattrChange::Remove {
            self.check_reach(inode, record)?;
        }
        let Some(user) = self.limited_user() else { return Ok(()) };
        match right_to_xattr(user, &attributes(inode, record), name, change)? {
            Right::Commit => self.check_commit(inode, record),
            Right::Write if !self.allows(inode, record, WRITE)? => self.refuse_access(inode, "write attributes of"),
            Right::Write | Right::Reach => Ok(()),
        }
    }
}

fn has_one_name(record: &InodeRecord) -> bool {
    !record.unlinked && (is_directory(record) || links(record) == 1)
}

/// Whether mode or access list of an inode allow a user all of this.
fn permits(
    tables: Tables<'_>,
    user: &User,
    (inode, record): (u64, &InodeRecord),
    wanted: u32,
) -> Result<bool, StateError> {
    let list = acl::of(tables, (inode, record), ACCESS)?;
    Ok(cavern_posix::permits(user, &attributes(inode, record), list.as_ref(), wanted))
}

/// Whether a user, as he counts in a mount, may do all of this with an inode of it, or any of several. What is no
/// longer there is for others to refuse.
pub fn may_access(
    tables: Tables<'_>,
    (mount, user): (&Mount, &User),
    inode: u64,
    any_of: &[u32],
) -> Result<bool, StateError> {
    let Some(record) = tables.inode(inode)?.filter(|_| !user.is_root()) else { return Ok(true) };
    let mut at = if inode == mount.root_inode || !has_one_name(&record) { 0 } else { record.parent };
    for _ in 0..DEPTH_MAX {
        let Some(above) = tables.inode(at)?.filter(|above| at != 0 && above.mount_id == mount.id) else { break };
        if !permits(tables, user, (at, &above), SEARCH)? {
            return Ok(false);
        }
        at = if at == mount.root_inode { 0 } else { above.parent };
    }
    for wanted in any_of {
        if permits(tables, user, (inode, &record), *wanted)? {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Whether a user, as he counts in a mount, may be told where the bytes of a file are: whoever may read, run or write
/// it, its owner, and those whose session writes to it.
pub fn may_have_layout(
    tables: Tables<'_>,
    (mount, user): (&Mount, &User),
    inode: u64,
    session: u64,
) -> Result<bool, StateError> {
    if tables.hold(inode, session)?.is_some_and(|right| *right == *MAY_WRITE) {
        return Ok(true);
    }
    if tables.inode(inode)?.is_some_and(|record| record.uid == user.uid) {
        return may_access(tables, (mount, user), inode, &[0]);
    }
    may_access(tables, (mount, user), inode, &[READ, EXECUTE, WRITE])
}

#[cfg(test)]
mod tests;
