//! chmod (with the access list), chown, truncate, utimensat.

use cavern_proto::master::{Kind, SetAttr, Time};
use cavern_proto::record::InodeRecord;
use rustix::io::Errno;

use super::xattr::CAPABILITY;
use super::{MutationContext, MutationError, refuse};
use crate::MasterError;
use crate::state::records::MODE_CHOSEN;

const SET_USER_ID: u32 = 0o4000;
const SET_GROUP_ID: u32 = 0o2000;
const GROUP_EXECUTES: u32 = 0o0010;

impl MutationContext<'_, '_> {
    pub(super) fn set_attributes(&mut self, set: &SetAttr) -> Result<u64, MutationError> {
        let mut record = self.inode(set.inode)?;
        self.judge_set_attributes(set, &record)?;
        check_owner_ids(&[set.uid.unwrap_or_default(), set.gid.unwrap_or_default()])?;
        let now_ns = self.made_ns;
        let time = |time: Time| if time.now { now_ns } else { time.ns };
        // Another owner keeps none, whoever gives the file away.
        let is_given_away = set.uid.is_some() || set.gid.is_some();
        if (set.kill_privileges || is_given_away) && record.kind() != Kind::Directory {
            self.kill_privileges(set, &mut record)?;
        } else if set.kill_capability {
            self.kill_capability(set.inode, &mut record)?;
        }
        if let Some(mode) = set.mode {
            let group = set.gid.unwrap_or(record.gid);
            record.mode = self.without_foreign_set_group_id(mode & 0o7777, group) | MODE_CHOSEN;
        }
        if let Some(length) = set.size {
            self.set_length(set.inode, &mut record, length)?;
        }
        record.uid = set.uid.unwrap_or(record.uid);
        record.gid = set.gid.unwrap_or(record.gid);
        record.atime_ns = set.atime.map(time).or(record.atime_ns);
        record.mtime_ns = set.mtime.map_or(record.mtime_ns, time);
        record.ctime_ns = now_ns;
        if set.mode.is_some() {
            self.chmod_acl(set.inode, &record)?;
        }
        self.put(set.inode, record);
        Ok(set.inode)
    }

    fn kill_privileges(&mut self, set: &SetAttr, record: &mut InodeRecord) -> Result<(), MasterError> {
        record.mode &= !SET_USER_ID;
        if record.mode & GROUP_EXECUTES != 0 || set.kill_set_group_id {
            record.mode &= !SET_GROUP_ID;
        }
        self.kill_capability(set.inode, record)
    }

    fn kill_capability(&mut self, inode: u64, record: &mut InodeRecord) -> Result<(), MasterError> {
        if record.has_xattrs {
            self.delete_xattr(inode, record, CAPABILITY)?;
        }
        Ok(())
    }
}

/// Refuses a user or group of all ones: it is none in a kernel, which changes no file of it.
pub(super) fn check_owner_ids(ids: &[u32]) -> Result<(), MutationError> {
    if ids.contains(&u32::MAX) {
        return refuse(Errno::INVAL, format!("{} is no id of a user or group", u32::MAX));
    }
    Ok(())
}
