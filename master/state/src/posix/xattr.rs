//! Extended attributes.

use cavern_posix::acl::{self, is_acl};
use cavern_posix::xattr::{CAPABILITY, has_kept_prefix, has_length, is_bare_prefix};
use cavern_posix::{XattrChange, inode_changed};
use cavern_proto::master::{RemoveXattr, SetXattr, XattrMode};
use cavern_proto::record::InodeRecord;
use rustix::io::Errno;

use super::{MutationContext, MutationError, refuse};
use crate::Family;
use crate::error::StateError;
use crate::records::{self, xattr_key};

/// As the kernel has them: bytes of a value, and of all names of an inode with their NULs.
const VALUE_BYTES_MAX: usize = 65_536;
const NAMES_BYTES_MAX: usize = 65_536;
/// Bytes of all names and values of an inode: they are one scan.
const TOTAL_BYTES_MAX: usize = 1 << 20;

impl MutationContext<'_, '_> {
    pub(super) fn set_xattr(&mut self, set: &SetXattr) -> Result<u64, MutationError> {
        if !has_length(&set.name) {
            return refuse(Errno::RANGE, format!("an attribute's name of {} bytes", set.name.len()));
        }
        if set.value.len() > VALUE_BYTES_MAX {
            return refuse(Errno::TOOBIG, format!("an attribute of {} bytes", set.value.len()));
        }
        if !is_kept(&set.name) {
            let name = String::from_utf8_lossy(&set.name);
            return refuse(Errno::OPNOTSUPP, format!("{name} is no attribute that is kept: use user.{name}, say"));
        }
        if is_bare_prefix(&set.name) {
            let prefix = String::from_utf8_lossy(&set.name);
            return refuse(Errno::INVAL, format!("{prefix} is no whole name of an attribute: {prefix}NAME is"));
        }
        let mut record = self.inode(set.inode)?;
        self.check_xattr(set.inode, &record, &set.name, XattrChange::Set)?;
        let known = self.transaction.before().xattr(set.inode, &set.name)?;
        match (set.mode(), known.is_some()) {
            (XattrMode::Create, true) => return refuse(Errno::EXIST, "the attribute is there"),
            (XattrMode::Replace, false) => return refuse(Errno::NODATA, "the attribute is not there"),
            _ => {}
        }
        if is_acl(&set.name) {
            let value = records::change(&mut record, |attr| acl::set(attr, set, self.limited_user()))?;
            return self.keep_xattr(set.inode, record, &set.name, value.as_deref());
        }
        if record.has_xattrs {
            let (mut names, mut total) = (set.name.len() + 1, set.name.len() + set.value.len());
            for (name, value) in self.transaction.before().xattrs(set.inode)? {
                if name != set.name {
                    names += name.len() + 1;
                    total += name.len() + value.len();
                }
            }
            if names > NAMES_BYTES_MAX || total > TOTAL_BYTES_MAX {
                return refuse(
                    Errno::NOSPC,
                    format!("the attributes of {} take too much room", self.shown(set.inode)?),
                );
            }
        }
        self.keep_xattr(set.inode, record, &set.name, Some(&set.value))
    }

    pub(super) fn remove_xattr(&mut self, remove: &RemoveXattr) -> Result<u64, MutationError> {
        let record = self.inode(remove.inode)?;
        self.check_xattr(remove.inode, &record, &remove.name, XattrChange::Remove)?;
        if self.transaction.before().xattr(remove.inode, &remove.name)?.is_none() {
            // As Linux has it: an access list that is not there need not be removed.
            if is_acl(&remove.name) {
                return Ok(remove.inode);
            }
            return refuse(Errno::NODATA, "the attribute is not there");
        }
        self.keep_xattr(remove.inode, record, &remove.name, None)
    }

    /// Stores an attribute, or removes it, and the record with it.
    fn keep_xattr(
        &mut self,
        inode: u64,
        mut record: InodeRecord,
        name: &[u8],
        value: Option<&[u8]>,
    ) -> Result<u64, MutationError> {
        let key = xattr_key(inode, name);
        match value {
            Some(value) => self.transaction.put_bytes(Family::Xattr, &key, value),
            None => self.transaction.delete(Family::Xattr, &key),
        }
        record.has_xattrs =
            value.is_some() || self.transaction.before().xattrs(inode)?.iter().any(|(known, _)| known != name);
        if name == CAPABILITY {
            record.has_capability = value.is_some();
        }
        records::change(&mut record, |attr| inode_changed(attr, self.made_ns));
        self.put(inode, record);
        Ok(inode)
    }

    /// Takes an attribute away; false when there is none of that name. The caller stores the record.
    pub(super) fn delete_xattr(
        &mut self,
        inode: u64,
        record: &mut InodeRecord,
        name: &[u8],
    ) -> Result<bool, StateError> {
        let names = if record.has_xattrs { self.transaction.before().xattrs(inode)? } else { Vec::new() };
        let is_there = names.iter().any(|(known, _)| *known == name);
        if is_there {
            self.transaction.delete(Family::Xattr, &xattr_key(inode, name));
            record.has_xattrs = names.len() > 1;
            record.has_capability &= name != CAPABILITY;
        }
        Ok(is_there)
    }
}

/// Names that are kept: those of `system.` are the kernel's, and only access lists among them are ours.
fn is_kept(name: &[u8]) -> bool {
    is_acl(name) || has_kept_prefix(name)
}
