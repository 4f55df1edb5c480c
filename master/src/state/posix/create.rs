//! mkdir, mknod, open with `O_CREAT` or `O_TMPFILE`, symlink.

use bytes::Bytes;
use cavern_proto::master::{CreateInode, Kind, Naming};
use cavern_proto::record::{DentryRecord, InodeRecord};
use rustix::io::Errno;

use super::attributes::check_owner_ids;
use super::{EntriesChange, MutationContext, MutationError, check_name, refuse};
use crate::state::Family;
use crate::state::records::{MODE_CHOSEN, inode_key, mode};
use crate::state::usage::UsageDelta;

/// Longest target of a symlink, as Linux has it (`PATH_MAX` without its NUL).
const TARGET_MAX: usize = 4095;

const SET_GROUP_ID: u32 = 0o2000;

impl MutationContext<'_, '_> {
    pub(super) fn create(&mut self, create: CreateInode, session: u64) -> Result<u64, MutationError> {
        self.create_judged(create, session, Self::judge_kind)
    }

    /// A character device with the number 0, which hides a name of a lower layer of overlayfs. It takes no more rights
    /// than a name does.
    pub(super) fn create_whiteout(&mut self, parent: u64, name: Bytes) -> Result<u64, MutationError> {
        let kind = Kind::CharacterDevice as i32;
        self.create_judged(CreateInode { parent, name, kind, ..CreateInode::default() }, 0, |_, _| Ok(()))
    }

    fn create_judged(
        &mut self,
        create: CreateInode,
        session: u64,
        judge_kind: impl FnOnce(&mut Self, Kind) -> Result<(), MutationError>,
    ) -> Result<u64, MutationError> {
        check(&create)?;
        let (kind, is_named) = (create.kind(), create.naming() == Naming::Named);
        let directory = if is_named { self.whole_directory(create.parent)? } else { self.directory(create.parent)? };
        self.judge_names(create.parent, &directory)?;
        judge_kind(self, kind)?;
        if is_named && self.transaction.dentry(create.parent, &create.name)?.is_some() {
            return refuse(Errno::EXIST, format!("{} exists", String::from_utf8_lossy(&create.name)));
        }
        let number = self.check_number(create.inode)?;
        self.check_quotas(create.parent, UsageDelta { bytes: 0, inodes: 1 })?;
        let (mut permissions, lists) = match kind {
            Kind::Symlink => (0o777, Vec::new()),
            _ => {
                let asked = (create.mode & 0o7777, create.umask);
                self.inherited((create.parent, &directory), asked, kind == Kind::Directory)?
            }
        };
        check_owner_ids(&[self.uid, self.gid])?;
        let mut gid = self.gid;
        if mode(&directory) & SET_GROUP_ID != 0 {
            gid = directory.gid;
            permissions |= if kind == Kind::Directory { SET_GROUP_ID } else { 0 };
        }
        if kind != Kind::Directory {
            permissions = self.without_foreign_set_group_id(permissions, gid);
        }
        let record = InodeRecord {
            kind: create.kind,
            mode: permissions | MODE_CHOSEN,
            uid: self.uid,
            gid,
            size: create.target.len() as u64,
            atime_ns: Some(self.made_ns),
            mtime_ns: self.made_ns,
            ctime_ns: self.made_ns,
            btime_ns: Some(self.made_ns),
            allocated: (kind == Kind::File).then_some(0),
            parent: create.parent,
            name: create.name.clone(),
            mount_id: directory.mount_id,
            // The namespace is the truth of what is in it, from its first moment on.
            listed_ns: if kind == Kind::Directory { self.now_ns.max(1) } else { 0 },
            rdev: if matches!(kind, Kind::CharacterDevice | Kind::BlockDevice) { create.rdev } else { 0 },
            target: create.target.clone(),
            has_xattrs: !lists.is_empty(),
            unlinked: !is_named,
            entries: (kind == Kind::Directory).then_some(0),
            linkable: create.naming() == Naming::Nameless,
            ..InodeRecord::default()
        };
        let inode = match number {
            0 => self.transaction.create_inode(record.clone()),
            number => {
                self.transaction.create_inode_as(number, record.clone());
                number
            }
        };
        self.put_acls(inode, &lists);
        self.touch(inode, record);
        self.hold_made(&create, inode, directory.mount_id)?;
        if is_named {
            self.transaction.put_dentry(create.parent, &create.name, DentryRecord { inode, kind: create.kind });
            self.name_changed(create.parent, &create.name, 0, inode);
            let change = EntriesChange { names: 1, directories: i32::from(kind == Kind::Directory) };
            self.directory_changed(create.parent, directory, change);
            if kind == Kind::File && self.judged.is_some() {
                // Whoever makes a file has it open to be written, whatever its mode says.
                self.put_hold_to_write(inode, session);
            }
        } else {
            self.transaction.put_bytes(Family::Unlinked, &inode_key(inode), &[]);
            self.put_hold_to_write(inode, session);
        }
        Ok(inode)
    }
}

/// What can be refused without a look at the state.
fn check(create: &CreateInode) -> Result<(), MutationError> {
    let kind = create.kind();
    match create.naming() {
        Naming::Named => check_name(&create.name)?,
        _ if kind == Kind::File && create.name.is_empty() => {}
        _ => return refuse(Errno::INVAL, "only a file can be without a name"),
    }
    match (kind, create.target.len()) {
        (Kind::Unspecified, _) => refuse(Errno::INVAL, "an inode of no kind"),
        (Kind::Symlink, 0) => refuse(Errno::NOENT, "a symlink that leads nowhere"),
        (Kind::Symlink, length) if length > TARGET_MAX => {
            refuse(Errno::NAMETOOLONG, format!("a symlink's target of {length} bytes"))
        }
        (Kind::Symlink, _) | (_, 0) => Ok(()),
        _ => refuse(Errno::INVAL, "only a symlink has a target"),
    }
}
