//! link (also for files that were made without a name), unlink and rmdir.

use bytes::Bytes;
use cavern_posix::{check_name, name_added, name_dropped};
use cavern_proto::master::{LinkInode, RemoveName};
use cavern_proto::record::{DentryRecord, InodeRecord};
use rustix::io::Errno;

use super::context::{Checked, EntriesChange, MutationContext, refuse};
use crate::error::{Result, StateError};
use crate::index::inodes::{delete_link, other_name, put_link};
use crate::index::usage::{self, UsageDelta, signed};
use crate::records::{self, is_directory, links};
use crate::schema;

/// As ext4 has it.
const LINKS_MAX: u32 = 65_000;

impl MutationContext<'_, '_> {
    pub fn link(&mut self, link: &LinkInode) -> Checked<u64> {
        check_name(&link.name)?;
        let directory = self.fully_listed_directory(link.parent)?;
        self.check_name_is_free(link.parent, &link.name)?;
        self.check_names(link.parent, &directory)?;
        let mut record = self.inode(link.inode)?;
        self.check_link(link.inode, &record)?;
        if self.tx.dentry(link.parent, &link.name)?.is_some() {
            return refuse(Errno::EXIST, format!("{} exists", String::from_utf8_lossy(&link.name)));
        }
        if record.mount_id != directory.mount_id {
            return refuse(Errno::XDEV, "a link cannot lead from one mount into another");
        }
        if is_directory(&record) {
            return refuse(Errno::PERM, "a directory has one name only");
        }
        if record.linkable {
            // It counts from now on.
            self.check_quotas(link.parent, UsageDelta { bytes: signed(usage::bytes_of(&record)), inodes: 1 })?;
            self.tx.delete(schema::Unlinked, link.inode);
            record.linkable = false;
            (record.parent, record.name) = (link.parent, link.name.clone());
        } else if record.unlinked {
            return refuse(Errno::NOENT, format!("{} has been removed", self.shown(link.inode)?));
        } else {
            let count = links(&record);
            if count >= LINKS_MAX {
                return refuse(Errno::MLINK, format!("{} has {count} names", self.shown(link.inode)?));
            }
            if count == 1 {
                put_link(self.tx, link.inode, record.parent, &record.name);
            }
            put_link(self.tx, link.inode, link.parent, &link.name);
        }
        self.tx.put_dentry(link.parent, &link.name, DentryRecord { inode: link.inode, kind: record.kind });
        records::change(&mut record, |attr| name_added(attr, self.caller.made_ns));
        self.put(link.inode, record);
        self.tx.name_changed(link.parent, &link.name, 0, link.inode);
        self.directory_changed(link.parent, directory, EntriesChange { names: 1, directories: 0 });
        Ok(link.inode)
    }

    pub fn remove(&mut self, remove: &RemoveName) -> Checked<u64> {
        check_name(&remove.name)?;
        let directory = self.fully_listed_directory(remove.parent)?;
        self.check_names(remove.parent, &directory)?;
        let Some(dentry) = self.tx.dentry(remove.parent, &remove.name)? else {
            return refuse(Errno::NOENT, format!("{} is not there", String::from_utf8_lossy(&remove.name)));
        };
        let record = self.inode(dentry.inode)?;
        self.check_sticky(&directory, &record)?;
        match (remove.directory, is_directory(&record)) {
            (true, false) => return refuse(Errno::NOTDIR, "rmdir is for directories"),
            (false, true) => return refuse(Errno::ISDIR, "a directory is removed by rmdir"),
            (true, true) => self.check_empty(dentry.inode, &record, "the directory is not empty")?,
            (false, false) => {}
        }
        self.tx.delete_dentry(remove.parent, &remove.name);
        self.drop_name(dentry.inode, record, remove.parent, &remove.name)?;
        self.tx.name_changed(remove.parent, &remove.name, dentry.inode, 0);
        let change = EntriesChange { names: -1, directories: -i32::from(remove.directory) };
        self.directory_changed(remove.parent, directory, change);
        Ok(dentry.inode)
    }

    /// Takes one name off an inode (an empty directory, or anything else); the last one leaves it unlinked.
    pub fn drop_name(&mut self, inode: u64, mut record: InodeRecord, parent: u64, name: &[u8]) -> Result {
        let count = links(&record);
        if is_directory(&record) || count <= 1 {
            return self.unlink(inode, record);
        }
        let is_shown = record.parent == parent && record.name == name;
        let own_name = || Some((record.parent, record.name.clone()));
        let other = if is_shown { other_name(self.tx, inode, parent, name)? } else { own_name() };
        let Some((other_parent, other_name)) = other else {
            return Err(StateError::Corrupt(format!("inode {inode}, which lacks names,")));
        };
        delete_link(self.tx, inode, parent, name);
        if count == 2 {
            delete_link(self.tx, inode, other_parent, &other_name);
        }
        (record.parent, record.name) = (other_parent, other_name);
        records::change(&mut record, |attr| name_dropped(attr, self.caller.made_ns));
        self.put(inode, record);
        Ok(())
    }

    /// Lets an inode have another name in the place of one. The caller stores the record.
    pub fn exchange_name(&mut self, inode: u64, record: &mut InodeRecord, old: (u64, &Bytes), new: (u64, &Bytes)) {
        if !is_directory(record) && links(record) > 1 {
            delete_link(self.tx, inode, old.0, old.1);
            put_link(self.tx, inode, new.0, new.1);
            if (record.parent, &record.name) != old {
                return;
            }
        }
        (record.parent, record.name) = (new.0, new.1.clone());
    }
}
