//! mkdir, mknod, open with `O_CREAT` or `O_TMPFILE`, symlink.

use bytes::Bytes;
use cavern_posix::acl::DEFAULT;
use cavern_posix::{check_create, check_owner, created};
use cavern_proto::master::{CreateInode, Kind, Naming};
use cavern_proto::record::{DentryRecord, InodeRecord};
use rustix::io::Errno;

use super::context::{Checked, EntriesChange, MutationContext, refuse};
use crate::index::usage::UsageDelta;
use crate::records::{self, attributes};
use crate::schema;

impl MutationContext<'_, '_> {
    pub fn create(&mut self, create: &CreateInode) -> Checked<u64> {
        self.create_checked(create, Self::check_kind)
    }

    /// A character device with the number 0, which hides a name of a lower layer of overlayfs. It takes no more rights
    /// than a name does.
    pub fn create_whiteout(&mut self, parent: u64, name: Bytes) -> Checked<u64> {
        let kind = Kind::CharacterDevice as i32;
        self.create_checked(&CreateInode { parent, name, kind, ..CreateInode::default() }, |_, _| Ok(()))
    }

    fn create_checked(
        &mut self,
        create: &CreateInode,
        check_kind: impl FnOnce(&Self, Kind) -> Checked,
    ) -> Checked<u64> {
        check_create(create)?;
        let (kind, is_named) = (create.kind(), create.naming() == Naming::Named);
        let directory =
            if is_named { self.fully_listed_directory(create.parent)? } else { self.directory(create.parent)? };
        self.check_name_is_free(create.parent, &create.name)?;
        self.check_names(create.parent, &directory)?;
        check_kind(&*self, kind)?;
        if is_named && self.tx.dentry(create.parent, &create.name)?.is_some() {
            return refuse(Errno::EXIST, format!("{} exists", String::from_utf8_lossy(&create.name)));
        }
        self.check_number(create.inode)?;
        let default = self.tx.before().acl(create.parent, &directory, DEFAULT)?;
        let above = (&attributes(create.parent, &directory), default.as_ref());
        let (owner, made_ns) = (self.caller.owner, self.caller.made_ns);
        let (attr, lists) = created(create, above, owner, self.limited_user(), made_ns);
        let xattr_bytes: u32 = lists.iter().map(|(name, acl)| records::xattr_size(name, &acl.encode())).sum();
        self.check_quotas(create.parent, UsageDelta { bytes: i64::from(xattr_bytes), inodes: 1 })?;
        check_owner(owner.0, owner.1)?;
        let mut record = InodeRecord {
            kind: create.kind,
            btime_ns: attr.btime_ns,
            allocated: attr.allocated,
            parent: create.parent,
            name: create.name.clone(),
            mount_id: directory.mount_id,
            // The namespace is the truth of what is in it, from its first moment on.
            listed_ns: if kind == Kind::Directory { self.caller.now_ns.max(1) } else { 0 },
            rdev: attr.rdev,
            target: create.target.clone(),
            xattr_bytes,
            entries: (kind == Kind::Directory).then_some(0),
            linkable: create.naming() == Naming::Nameless,
            ..InodeRecord::default()
        };
        records::change(&mut record, |made| *made = attr);
        let inode = match create.inode {
            0 => self.tx.create_inode(record.clone()),
            number => {
                self.tx.create_inode_as(number, record.clone());
                number
            }
        };
        lists.iter().for_each(|(name, acl)| self.put_acl(inode, name, acl));
        self.touch(inode, record);
        self.delegate_created(create, inode)?;
        if is_named {
            self.tx.put_dentry(create.parent, &create.name, DentryRecord { inode, kind: create.kind });
            self.tx.name_changed(create.parent, &create.name, 0, inode);
            let change = EntriesChange { names: 1, directories: i32::from(kind == Kind::Directory) };
            self.directory_changed(create.parent, directory, change);
        } else {
            self.tx.put(schema::Unlinked, inode, &());
        }
        // Whoever makes a file has it open to be written, whatever its mode says.
        if !is_named || kind == Kind::File && self.limited.is_some() {
            self.put_write_ref(inode);
        }
        Ok(inode)
    }
}
