//! unlink and rmdir.

use cavern_posix::check_name;
use cavern_proto::master::RemoveName;
use rustix::io::Errno;

use super::context::{Attempt, EntriesChange, MutationContext, refuse};
use crate::records::is_directory;

impl MutationContext<'_, '_> {
    pub fn remove(&mut self, remove: &RemoveName) -> Attempt<u64> {
        check_name(&remove.name)?;
        let directory = self.whole_directory(remove.parent)?;
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
}
