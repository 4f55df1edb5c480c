//! unlink and rmdir.

use bytes::Bytes;
use cavern_posix::check_name;
use cavern_proto::master::RemoveName;
use cavern_proto::record::InodeRecord;
use rustix::io::Errno;

use super::{EntriesChange, MutationContext, MutationError, refuse};
use crate::records::is_directory;

impl MutationContext<'_, '_> {
    pub(super) fn remove(&mut self, remove: &RemoveName) -> Result<u64, MutationError> {
        check_name(&remove.name)?;
        let directory = self.whole_directory(remove.parent)?;
        self.check_names(remove.parent, &directory)?;
        let Some(dentry) = self.transaction.dentry(remove.parent, &remove.name)? else {
            return refuse(Errno::NOENT, format!("{} is not there", String::from_utf8_lossy(&remove.name)));
        };
        let record = self.inode(dentry.inode)?;
        self.check_sticky(&directory, &record)?;
        match (remove.directory, is_directory(&record)) {
            (true, false) => return refuse(Errno::NOTDIR, "rmdir is for directories"),
            (false, true) => return refuse(Errno::ISDIR, "a directory is removed by rmdir"),
            (true, true) if record.listed_ns == 0 => {
                return Err(MutationError::Unlisted { directory: dentry.inode, below: false });
            }
            (true, true) if !self.transaction.before().is_empty_directory(dentry.inode, &record)? => {
                return refuse(Errno::NOTEMPTY, "the directory is not empty");
            }
            _ => {}
        }
        self.transaction.delete_dentry(remove.parent, &remove.name);
        self.after_unlink(dentry.inode, record, remove.parent, &remove.name)?;
        self.name_changed(remove.parent, &remove.name, dentry.inode, 0);
        let change = EntriesChange { names: -1, directories: -i32::from(remove.directory) };
        self.directory_changed(remove.parent, directory, change);
        Ok(dentry.inode)
    }

    /// What becomes of an inode (an empty directory, or anything else) when a name of it is gone.
    pub(super) fn after_unlink(
        &mut self,
        inode: u64,
        record: InodeRecord,
        parent: u64,
        name: &Bytes,
    ) -> Result<(), MutationError> {
        if !is_directory(&record) {
            return self.drop_name(inode, record, parent, name);
        }
        Ok(self.unlink(inode, record)?)
    }
}
