//! Hard links, and names for files that were made without one.
//!
//! An inode's record says one of its names: enough to find its path and to notify the clients that cache it. The names
//! of an inode that has several are all in the family `link` as well, so that another takes its place when that one
//! goes.

use bytes::Bytes;
use cavern_posix::{check_name, name_added, name_dropped};
use cavern_proto::master::LinkInode;
use cavern_proto::record::{DentryRecord, InodeRecord};
use rustix::io::Errno;

use super::{EntriesChange, MutationContext, MutationError, refuse};
use crate::error::StateError;
use crate::records::{self, dentry_key, inode_key, is_directory, links};
use crate::usage::UsageDelta;
use crate::{Family, Transaction};

/// As ext4 has it.
const LINKS_MAX: u32 = 65_000;

impl MutationContext<'_, '_> {
    pub(super) fn link(&mut self, link: &LinkInode) -> Result<u64, MutationError> {
        check_name(&link.name)?;
        let directory = self.whole_directory(link.parent)?;
        self.check_names(link.parent, &directory)?;
        let mut record = self.inode(link.inode)?;
        self.check_link(link.inode, &record)?;
        if self.transaction.dentry(link.parent, &link.name)?.is_some() {
            return refuse(Errno::EXIST, format!("{} exists", String::from_utf8_lossy(&link.name)));
        }
        if record.mount_id != directory.mount_id {
            return refuse(Errno::XDEV, "a link cannot lead from one mount into another");
        }
        if is_directory(&record) {
            return refuse(Errno::PERM, "a directory has one name only");
        }
        if record.linkable {
            self.give_first_name(link, &mut record)?;
        } else if record.unlinked {
            return refuse(Errno::NOENT, format!("{} has been removed", self.shown(link.inode)?));
        } else {
            self.give_another_name(link, &record)?;
        }
        self.transaction.put_dentry(link.parent, &link.name, DentryRecord { inode: link.inode, kind: record.kind });
        records::change(&mut record, |attr| name_added(attr, self.made_ns));
        self.put(link.inode, record);
        self.name_changed(link.parent, &link.name, 0, link.inode);
        self.directory_changed(link.parent, directory, EntriesChange { names: 1, directories: 0 });
        Ok(link.inode)
    }

    /// A file that was made without a name gets one. It counts from now on.
    fn give_first_name(&mut self, link: &LinkInode, record: &mut InodeRecord) -> Result<(), MutationError> {
        let bytes = i64::try_from(record.size).unwrap_or(i64::MAX);
        self.check_quotas(link.parent, UsageDelta { bytes, inodes: 1 })?;
        self.transaction.delete(Family::Unlinked, &inode_key(link.inode));
        record.linkable = false;
        (record.parent, record.name) = (link.parent, link.name.clone());
        Ok(())
    }

    fn give_another_name(&mut self, link: &LinkInode, record: &InodeRecord) -> Result<(), MutationError> {
        let count = links(record);
        if count >= LINKS_MAX {
            return refuse(Errno::MLINK, format!("{} has {count} names", self.shown(link.inode)?));
        }
        if count == 1 {
            put_link(self.transaction, link.inode, record.parent, &record.name);
        }
        put_link(self.transaction, link.inode, link.parent, &link.name);
        Ok(())
    }

    /// Takes one name off an inode that is no directory; the last one leaves it unlinked.
    pub(super) fn drop_name(
        &mut self,
        inode: u64,
        mut record: InodeRecord,
        parent: u64,
        name: &[u8],
    ) -> Result<(), MutationError> {
        let count = links(&record);
        if count <= 1 {
            return Ok(self.unlink(inode, record)?);
        }
        let is_shown = record.parent == parent && record.name == name;
        let own_name = || Some((record.parent, record.name.clone()));
        let other = if is_shown { other_name(self.transaction, inode, parent, name)? } else { own_name() };
        let Some((other_parent, other_name)) = other else {
            return Err(StateError::Corrupt(format!("inode {inode}, which lacks names,")).into());
        };
        delete_link(self.transaction, inode, parent, name);
        if count == 2 {
            delete_link(self.transaction, inode, other_parent, &other_name);
        }
        (record.parent, record.name) = (other_parent, other_name);
        records::change(&mut record, |attr| name_dropped(attr, self.made_ns));
        self.put(inode, record);
        Ok(())
    }

    /// Lets an inode have another name in the place of one. The caller stores the record.
    pub(super) fn exchange_name(
        &mut self,
        inode: u64,
        record: &mut InodeRecord,
        old: (u64, &Bytes),
        new: (u64, &Bytes),
    ) {
        if !is_directory(record) && links(record) > 1 {
            delete_link(self.transaction, inode, old.0, old.1);
            put_link(self.transaction, inode, new.0, new.1);
            if (record.parent, &record.name) != old {
                return;
            }
        }
        (record.parent, record.name) = (new.0, new.1.clone());
    }
}

fn link_key(inode: u64, parent: u64, name: &[u8]) -> Vec<u8> {
    [inode_key(inode).as_slice(), &dentry_key(parent, name)].concat()
}

pub fn put_link(transaction: &mut Transaction<'_>, inode: u64, parent: u64, name: &[u8]) {
    transaction.put_bytes(Family::Link, &link_key(inode, parent, name), &[]);
}

pub fn delete_link(transaction: &mut Transaction<'_>, inode: u64, parent: u64, name: &[u8]) {
    transaction.delete(Family::Link, &link_key(inode, parent, name));
}

/// A name of an inode beside one of them: the next one, or else the first. Names mostly go in their order, and those
/// that are gone cost a scan as much as others, for a time.
fn other_name(
    transaction: &Transaction<'_>,
    inode: u64,
    parent: u64,
    name: &[u8],
) -> Result<Option<(u64, Bytes)>, StateError> {
    let this = link_key(inode, parent, name);
    let tables = transaction.before();
    let after = tables.keys_between(Family::Link, &this, &inode_key(inode.saturating_add(1)));
    let before = tables.keys_between(Family::Link, &inode_key(inode), &this);
    for key in after.chain(before) {
        let key = key?;
        let other = key.get(8..).filter(|_| *key != this[..]).and_then(<[u8]>::split_first_chunk::<8>);
        if let Some((parent, name)) = other {
            return Ok(Some((u64::from_be_bytes(*parent), Bytes::copy_from_slice(name))));
        }
    }
    Ok(None)
}
