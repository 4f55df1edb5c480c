//! chmod (with the access list), chown, truncate, utimensat.

use cavern_posix::acl::ACCESS;
use cavern_posix::xattr::CAPABILITY;
use cavern_posix::{attributes_set, loses_privileges};
use cavern_proto::master::SetAttr;
use rustix::io::Errno;

use super::context::{Attempt, MutationContext, refuse};
use crate::records;

impl MutationContext<'_, '_> {
    pub fn set_attributes(&mut self, set: &SetAttr) -> Attempt<u64> {
        let mut record = self.inode(set.inode)?;
        self.check_set_attributes(set, &record)?;
        check_owner_ids(set.uid.unwrap_or_default(), set.gid.unwrap_or_default())?;
        if let Some(length) = set.size {
            self.set_length(set.inode, &mut record, length)?;
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
}

/// Refuses a user or group of all ones: it is none in a kernel, which changes no file of it.
pub fn check_owner_ids(uid: u32, gid: u32) -> Attempt {
    if [uid, gid].contains(&u32::MAX) {
        return refuse(Errno::INVAL, format!("{} is no id of a user or group", u32::MAX));
    }
    Ok(())
}
