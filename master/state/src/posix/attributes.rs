//! chmod (with the access list), chown, truncate, utimensat.

use cavern_posix::xattr::CAPABILITY;
use cavern_posix::{attributes_set, loses_privileges};
use cavern_proto::master::SetAttr;
use rustix::io::Errno;

use super::{MutationContext, MutationError, refuse};
use crate::records;

impl MutationContext<'_, '_> {
    pub(super) fn set_attributes(&mut self, set: &SetAttr) -> Result<u64, MutationError> {
        let mut record = self.inode(set.inode)?;
        self.check_set_attributes(set, &record)?;
        check_owner_ids(&[set.uid.unwrap_or_default(), set.gid.unwrap_or_default()])?;
        if let Some(length) = set.size {
            self.set_length(set.inode, &mut record, length)?;
        }
        if loses_privileges(record.kind(), set) || set.kill_capability {
            self.delete_xattr(set.inode, &mut record, CAPABILITY)?;
        }
        records::change(&mut record, |attr| attributes_set(attr, set, self.limited_user(), self.made_ns));
        if set.mode.is_some() {
            self.chmod_acl(set.inode, &record)?;
        }
        self.put(set.inode, record);
        Ok(set.inode)
    }
}

/// Refuses a user or group of all ones: it is none in a kernel, which changes no file of it.
pub(super) fn check_owner_ids(ids: &[u32]) -> Result<(), MutationError> {
    if ids.contains(&u32::MAX) {
        return refuse(Errno::INVAL, format!("{} is no id of a user or group", u32::MAX));
    }
    Ok(())
}
