//! May this user change this? Asked in mounts that limit the users of a client: a client is believed who asks only as
//! far as its rule lets that user be himself (`UserLimits::mapped`), and each change takes the permission that Linux
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

use cavern_posix::mode::{EXECUTE, WRITE};
use cavern_posix::xattr::CAPABILITY;
use cavern_posix::{Right, XattrChange, check_sticky, not_the_one, right_to_set, right_to_xattr};
use cavern_proto::master::{Kind, Mount, RenameName, SetAttr, User};
use cavern_proto::record::{InodeRecord, OpenRight};
use rustix::io::Errno;

use super::context::{Checked, LimitedUser, MutationContext, refuse};
use crate::error::Result;
use crate::records::{attributes, has_one_name, is_directory};
use crate::tables::DEPTH_MAX;

impl MutationContext<'_, '_> {
    /// The user whose permission it takes; `None` for whoever may do everything.
    pub fn limited_user(&self) -> Option<&User> {
        self.limited.as_ref().map(|limited| &limited.user).filter(|user| !user.is_root())
    }

    /// Whether mode or access list of an inode allow all of this.
    fn allows(&self, inode: u64, record: &InodeRecord, wanted: u32) -> Result<bool> {
        self.limited_user().map_or(Ok(true), |user| self.tx.before().permits(user, inode, record, wanted))
    }

    fn refuse_access(&self, inode: u64, what: &str) -> Checked {
        let (uid, shown) = (self.caller.owner.0, self.shown(inode)?);
        refuse(Errno::ACCESS, format!("user {uid} may not {what} {shown}"))
    }

    /// The user gets to an inode, and may do all of this with it.
    pub fn check_access(&self, inode: u64, record: &InodeRecord, wanted: u32, what: &str) -> Checked {
        self.check_reach(inode, record)?;
        if self.allows(inode, record, wanted)? { Ok(()) } else { self.refuse_access(inode, what) }
    }

    /// A directory and those above it let the user through.
    fn check_search(&self, directory: u64) -> Checked {
        let mut depth = 0;
        for item in self.tx.now().ancestors(directory) {
            let (at, record) = item?;
            if record.mount_id != self.mount.id {
                return Ok(());
            }
            // Whoever holds it may have answered that it has another mode.
            self.check_holder(at, &record)?;
            // Of a directory, to execute it is to search it.
            if !self.allows(at, &record, EXECUTE)? {
                return self.refuse_access(at, "look for anything in");
            }
            if at == self.mount.root_inode {
                return Ok(());
            }
            depth += 1;
        }
        if depth == DEPTH_MAX {
            return refuse(Errno::LOOP, "the directory is nested too deeply");
        }
        Ok(())
    }

    /// The user gets to an inode. By which of several names he has come nobody knows, and what has none was opened.
    fn check_reach(&self, inode: u64, record: &InodeRecord) -> Checked {
        if self.limited_user().is_none() || inode == self.mount.root_inode || !has_one_name(record) {
            return Ok(());
        }
        self.check_search(record.parent)
    }

    /// Names in a directory may change.
    pub fn check_names(&self, inode: u64, record: &InodeRecord) -> Checked {
        if self.limited_user().is_none() {
            return Ok(());
        }
        self.check_search(inode)?;
        if self.allows(inode, record, WRITE)? { Ok(()) } else { self.refuse_access(inode, "change names in") }
    }

    /// A name may be taken away from an inode in a directory.
    pub fn check_sticky(&self, directory: &InodeRecord, record: &InodeRecord) -> Checked {
        let Some(user) = self.limited_user() else { return Ok(()) };
        Ok(check_sticky(user, &attributes(0, directory), &attributes(0, record))?)
    }

    /// One of the inodes of a rename may leave its directory; a directory has a name for the one above it, which
    /// changes.
    pub fn check_rename(
        &self,
        rename: &RenameName,
        inode: u64,
        (directory, record): (&InodeRecord, &InodeRecord),
    ) -> Checked {
        self.check_sticky(directory, record)?;
        let leads_elsewhere = is_directory(record) && rename.parent != rename.new_parent;
        if leads_elsewhere && !self.allows(inode, record, WRITE)? {
            return self.refuse_access(inode, "move");
        }
        Ok(())
    }

    /// An inode may get another name. One without any was opened by whoever names it.
    pub fn check_link(&self, inode: u64, record: &InodeRecord) -> Checked {
        let is_owner = self.limited_user().is_none_or(|user| user.uid == record.uid);
        if record.unlinked && !is_owner && !self.may_commit(inode)? {
            return self.refuse_access(inode, "give a name to");
        }
        self.check_reach(inode, record)
    }

    /// What is of this kind may be made.
    pub fn check_kind(&self, kind: Kind) -> Checked {
        match kind {
            Kind::CharacterDevice | Kind::BlockDevice => self.check_root("makes devices"),
            _ => Ok(()),
        }
    }

    pub fn check_root(&self, what: &str) -> Checked {
        self.limited_user().map_or(Ok(()), |user| Err(not_the_one(user, what).into()))
    }

    /// A client may set what holds for others in the mount that was found, as `is_granted` by its rule: whose space is
    /// bounded does not say by how much. Of whoever has no name nothing is known (no `[security]`).
    pub fn check_setting(&self, is_granted: fn(&Mount, &str) -> bool, what: &str, option: &str) -> Checked {
        match self.caller.client.as_deref() {
            Some(client) if !client.is_empty() && !is_granted(&self.mount, client) => refuse(
                Errno::PERM,
                format!(
                    "the client \"{client}\" may not {what}: it takes a certificate of the role admin, or the option \
                     {option} in the rule of the mount that fits the client (cv mount update --client)"
                ),
            ),
            _ => Ok(()),
        }
    }

    /// Whether the session holds a file, and its user was allowed to write when it was opened.
    fn may_commit(&self, inode: u64) -> Result<bool> {
        Ok(self.tx.before().open_ref(inode, self.caller.session)? == Some(OpenRight::Commit))
    }

    /// What was written to a file may become a part of it.
    pub fn check_commit(&self, inode: u64, record: &InodeRecord) -> Checked {
        let Some(user) = self.limited_user() else { return Ok(()) };
        let right = if user.uid == record.uid { Right::Reach } else { Right::Write };
        if self.may_commit(inode)? { Ok(()) } else { self.check_permission(inode, record, right) }
    }

    /// The user has a right to an inode.
    fn check_permission(&self, inode: u64, record: &InodeRecord, right: Right) -> Checked {
        match right {
            Right::Commit => self.check_commit(inode, record),
            Right::Reach => self.check_reach(inode, record),
            Right::Write => self.check_access(inode, record, WRITE, "write to"),
        }
    }

    pub fn check_set_attributes(&self, set: &SetAttr, record: &InodeRecord) -> Checked {
        let Some(LimitedUser { user, limits }) = &self.limited else { return Ok(()) };
        let right = right_to_set(set, &attributes(set.inode, record), (user, limits))?;
        self.check_permission(set.inode, record, right)
    }

    /// An extended attribute may be set, or taken away.
    pub fn check_xattr(&self, inode: u64, record: &InodeRecord, name: &[u8], change: XattrChange) -> Checked {
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

#[cfg(test)]
mod tests;
