//! mkdir, mknod, open with `O_CREAT` or `O_TMPFILE`, symlink.

use bytes::Bytes;
use cavern_posix::acl::DEFAULT;
use cavern_posix::{check_create, created};
use cavern_proto::master::{CreateInode, Kind, Naming};
use cavern_proto::record::{DentryRecord, InodeRecord};
use rustix::io::Errno;

use super::attributes::check_owner_ids;
use super::{EntriesChange, MutationContext, MutationError, acl, refuse};
use crate::Family;
use crate::records::{self, attributes, inode_key};
use crate::usage::UsageDelta;

impl MutationContext<'_, '_> {
    pub(super) fn create(&mut self, create: CreateInode, session: u64) -> Result<u64, MutationError> {
        self.create_checked(create, session, Self::check_kind)
    }

    /// A character device with the number 0, which hides a name of a lower layer of overlayfs. It takes no more rights
    /// than a name does.
    pub(super) fn create_whiteout(&mut self, parent: u64, name: Bytes) -> Result<u64, MutationError> {
        let kind = Kind::CharacterDevice as i32;
        self.create_checked(CreateInode { parent, name, kind, ..CreateInode::default() }, 0, |_, _| Ok(()))
    }

    fn create_checked(
        &mut self,
        create: CreateInode,
        session: u64,
        check_kind: impl FnOnce(&Self, Kind) -> Result<(), MutationError>,
    ) -> Result<u64, MutationError> {
        check_create(&create)?;
        let (kind, is_named) = (create.kind(), create.naming() == Naming::Named);
        let directory = if is_named { self.whole_directory(create.parent)? } else { self.directory(create.parent)? };
        self.check_names(create.parent, &directory)?;
        check_kind(&*self, kind)?;
        if is_named && self.transaction.dentry(create.parent, &create.name)?.is_some() {
            return refuse(Errno::EXIST, format!("{} exists", String::from_utf8_lossy(&create.name)));
        }
        let number = self.check_number(create.inode)?;
        self.check_quotas(create.parent, UsageDelta { bytes: 0, inodes: 1 })?;
        let default = acl::of(self.transaction.before(), (create.parent, &directory), DEFAULT)?;
        let above = (&attributes(create.parent, &directory), default.as_ref());
        let (attr, lists) = created(&create, above, (self.uid, self.gid), self.limited_user(), self.made_ns);
        check_owner_ids(&[self.uid, self.gid])?;
        let mut record = InodeRecord {
            kind: create.kind,
            btime_ns: attr.btime_ns,
            allocated: attr.allocated,
            parent: create.parent,
            name: create.name.clone(),
            mount_id: directory.mount_id,
            // The namespace is the truth of what is in it, from its first moment on.
            listed_ns: if kind == Kind::Directory { self.now_ns.max(1) } else { 0 },
            rdev: attr.rdev,
            target: create.target.clone(),
            has_xattrs: attr.has_xattrs,
            entries: (kind == Kind::Directory).then_some(0),
            linkable: create.naming() == Naming::Nameless,
            ..InodeRecord::default()
        };
        records::change(&mut record, |made| *made = attr);
        let inode = match number {
            0 => self.transaction.create_inode(record.clone()),
            number => {
                self.transaction.create_inode_as(number, record.clone());
                number
            }
        };
        lists.iter().for_each(|(name, acl)| self.put_acl(inode, name, acl));
        self.touch(inode, record);
        self.hold_made(&create, inode, directory.mount_id)?;
        if is_named {
            self.transaction.put_dentry(create.parent, &create.name, DentryRecord { inode, kind: create.kind });
            self.name_changed(create.parent, &create.name, 0, inode);
            let change = EntriesChange { names: 1, directories: i32::from(kind == Kind::Directory) };
            self.directory_changed(create.parent, directory, change);
            if kind == Kind::File && self.limited.is_some() {
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
