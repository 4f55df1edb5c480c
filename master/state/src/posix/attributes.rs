//! chmod (with the access list), chown, truncate, utimensat; extended attributes, and the access lists among them.

use bytes::Bytes;
use cavern_posix::acl::{self, ACCESS, Acl, is_acl};
use cavern_posix::xattr::{CAPABILITY, has_kept_prefix, has_length, is_bare_prefix, probed};
use cavern_posix::{XattrChange, attributes_set, check_owner, inode_changed, loses_privileges};
use cavern_proto::master::{RemoveXattr, SetAttr, SetXattr, XattrMode};
use cavern_proto::record::InodeRecord;
use rustix::io::Errno;

use super::context::{Checked, MutationContext, refuse};
use crate::error::Result;
use crate::index::probed_xattrs;
use crate::records::xattr_size;
use crate::{records, schema};

/// As the kernel has them: bytes of a value, and of all names of an inode with their NULs.
const VALUE_BYTES_MAX: usize = 65_536;
const NAMES_BYTES_MAX: usize = 65_536;
/// Bytes of all names and values of an inode: they are one scan.
const TOTAL_BYTES_MAX: u32 = 1 << 20;

impl MutationContext<'_, '_> {
    pub fn set_attributes(&mut self, set: &SetAttr) -> Checked<u64> {
        let mut record = self.inode(set.inode)?;
        self.check_set_attributes(set, &record)?;
        check_owner(set.uid.unwrap_or_default(), set.gid.unwrap_or_default())?;
        if let Some(length) = set.size {
            self.set_length(set, &mut record, length)?;
        }
        if loses_privileges(record.kind(), set) || set.kill_capability {
            self.delete_xattr(set.inode, &mut record, CAPABILITY)?;
        }
        records::change(&mut record, |attr| attributes_set(attr, set, self.limited_user(), self.caller.made_ns));
        // The access list follows the new permissions.
        if set.mode.is_some()
            && let Some(mut acl) = self.tx.before().acl(set.inode, &record, ACCESS)?
        {
            acl.set_mode(records::mode(&record));
            self.put_acl(set.inode, ACCESS, &acl);
        }
        self.put(set.inode, record);
        Ok(set.inode)
    }

    pub fn set_xattr(&mut self, set: &SetXattr) -> Checked<u64> {
        if !has_length(&set.name) {
            return refuse(Errno::RANGE, format!("an attribute's name of {} bytes", set.name.len()));
        }
        if set.value.len() > VALUE_BYTES_MAX {
            return refuse(Errno::TOOBIG, format!("an attribute of {} bytes", set.value.len()));
        }
        let shown = String::from_utf8_lossy(&set.name);
        // Those of `system.` are the kernel's, and only access lists among them are ours.
        if !is_acl(&set.name) && !has_kept_prefix(&set.name) {
            return refuse(Errno::OPNOTSUPP, format!("{shown} is no attribute that is kept: use user.{shown}, say"));
        }
        if is_bare_prefix(&set.name) {
            return refuse(Errno::INVAL, format!("{shown} is no whole name of an attribute: {shown}NAME is"));
        }
        let mut record = self.inode(set.inode)?;
        self.check_xattr(set.inode, &record, &set.name, XattrChange::Set)?;
        let is_there = self.tx.before().has(schema::Xattrs, (set.inode, &set.name[..]))?;
        match (set.mode(), is_there) {
            (XattrMode::Create, true) => return refuse(Errno::EXIST, "the attribute is there"),
            (XattrMode::Replace, false) => return refuse(Errno::NODATA, "the attribute is not there"),
            _ => {}
        }
        if is_acl(&set.name) {
            let value = records::change(&mut record, |attr| acl::set(attr, set, self.limited_user()))?;
            return self.keep_xattr(set.inode, record, &set.name, value.as_deref());
        }
        if record.xattr_bytes > 0 {
            let known = self.tx.before().xattrs(set.inode)?;
            let others = known.iter().filter(|(name, _)| *name != set.name).map(|(name, _)| name.len() + 1);
            if set.name.len() + 1 + others.sum::<usize>() > NAMES_BYTES_MAX {
                return self.refuse_xattr(set.inode);
            }
        }
        self.keep_xattr(set.inode, record, &set.name, Some(&set.value))
    }

    pub fn remove_xattr(&mut self, remove: &RemoveXattr) -> Checked<u64> {
        let record = self.inode(remove.inode)?;
        self.check_xattr(remove.inode, &record, &remove.name, XattrChange::Remove)?;
        if !self.tx.before().has(schema::Xattrs, (remove.inode, &remove.name[..]))? {
            // As Linux has it: an access list that is not there need not be removed.
            if is_acl(&remove.name) {
                return Ok(remove.inode);
            }
            return refuse(Errno::NODATA, "the attribute is not there");
        }
        self.keep_xattr(remove.inode, record, &remove.name, None)
    }

    /// Stores an attribute, or removes it, and the record with it. Quotas hold for what that takes more.
    fn keep_xattr(&mut self, inode: u64, mut record: InodeRecord, name: &[u8], value: Option<&[u8]>) -> Checked<u64> {
        let known = if record.xattr_bytes > 0 { self.tx.before().get(schema::Xattrs, (inode, name))? } else { None };
        let [was, is] = [known.as_deref(), value].map(|value| value.map_or(0, |value| xattr_size(name, value)));
        record.xattr_bytes = record.xattr_bytes.saturating_sub(was).saturating_add(is);
        if is > was && record.xattr_bytes > TOTAL_BYTES_MAX {
            return self.refuse_xattr(inode);
        }
        self.check_more_bytes(&record, is.saturating_sub(was).into())?;
        match value {
            Some(value) => {
                self.put_xattr(inode, name, value);
                let probed = probed(name);
                if self.mount.probed_xattrs & probed != probed {
                    probed_xattrs::note(self.tx, self.mount.id, probed)?;
                    self.mount.probed_xattrs |= probed;
                }
            }
            None => self.tx.delete(schema::Xattrs, (inode, name)),
        }
        if name == CAPABILITY {
            record.has_capability = value.is_some();
        }
        records::change(&mut record, |attr| inode_changed(attr, self.caller.made_ns));
        self.put(inode, record);
        Ok(inode)
    }

    fn refuse_xattr(&self, inode: u64) -> Checked<u64> {
        refuse(Errno::NOSPC, format!("the attributes of {} take too much room", self.shown(inode)?))
    }

    fn put_xattr(&mut self, inode: u64, name: &[u8], value: &[u8]) {
        self.tx.put(schema::Xattrs, (inode, name), &Bytes::copy_from_slice(value));
    }

    pub fn put_acl(&mut self, inode: u64, name: &[u8], acl: &Acl) {
        self.put_xattr(inode, name, &acl.encode());
    }

    /// Takes an attribute away, if there is one of that name. The caller stores the record.
    pub fn delete_xattr(&mut self, inode: u64, record: &mut InodeRecord, name: &[u8]) -> Result {
        let known = if record.xattr_bytes > 0 { self.tx.before().get(schema::Xattrs, (inode, name))? } else { None };
        if let Some(known) = known {
            self.tx.delete(schema::Xattrs, (inode, name));
            record.xattr_bytes = record.xattr_bytes.saturating_sub(xattr_size(name, &known));
            record.has_capability &= name != CAPABILITY;
        }
        Ok(())
    }
}
