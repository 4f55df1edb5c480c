//! rename, with `RENAME_NOREPLACE`, `RENAME_EXCHANGE` and `RENAME_WHITEOUT`: one step, whatever lies below a directory.

use cavern_posix::{check_name, inode_changed};
use cavern_proto::master::{Kind, RenameMode, RenameName};
use cavern_proto::record::{DentryRecord, InodeRecord};
use rustix::io::Errno;

use super::context::{Checked, EntriesChange, MutationContext, refuse};
use crate::index::usage::UsageDelta;
use crate::records::{self, is_directory};
use crate::tables::DEPTH_MAX;

impl MutationContext<'_, '_> {
    pub fn rename(&mut self, rename: &RenameName) -> Checked<u64> {
        check_name(&rename.name)?;
        check_name(&rename.new_name)?;
        let from = self.fully_listed_directory(rename.parent)?;
        let to = self.fully_listed_directory(rename.new_parent)?;
        self.check_name_is_free(rename.new_parent, &rename.new_name)?;
        self.check_names(rename.parent, &from)?;
        self.check_names(rename.new_parent, &to)?;
        let missing = |name: &[u8]| refuse(Errno::NOENT, format!("{} is not there", String::from_utf8_lossy(name)));
        let Some(dentry) = self.tx.dentry(rename.parent, &rename.name)? else { return missing(&rename.name) };
        if from.mount_id != to.mount_id {
            return refuse(Errno::XDEV, "a name cannot move from one mount into another");
        }
        let moved = self.inode(dentry.inode)?;
        self.check_rename(rename, dentry.inode, (&from, &moved))?;
        let target = self.tx.dentry(rename.new_parent, &rename.new_name)?;
        match (rename.mode(), &target) {
            (RenameMode::NoReplace, Some(_)) => {
                return refuse(Errno::EXIST, format!("{} exists", String::from_utf8_lossy(&rename.new_name)));
            }
            (RenameMode::Exchange, None) => return missing(&rename.new_name),
            _ => {}
        }
        if is_directory(&moved) && self.is_above(dentry.inode, rename.new_parent)? {
            return refuse(Errno::INVAL, "a directory cannot move below itself");
        }
        if let Some(target) = &target
            && target.kind() == Kind::Directory
            && self.is_above(target.inode, rename.parent)?
        {
            let errno = if rename.mode() == RenameMode::Exchange { Errno::INVAL } else { Errno::NOTEMPTY };
            return refuse(errno, "what is renamed lies below the directory that it would replace");
        }
        match (rename.mode(), target) {
            // Two names of one inode: nothing happens, not even to the times.
            (_, Some(target)) if target.inode == dentry.inode => Ok(dentry.inode),
            (RenameMode::Exchange, Some(target)) => self.exchange(rename, (dentry, moved), target),
            (_, target) => self.replace(rename, (dentry, moved), target),
        }
    }

    /// A rename that leaves a whiteout under the old name.
    pub fn rename_whiteout(&mut self, rename: &RenameName) -> Checked<u64> {
        if rename.mode() == RenameMode::Exchange {
            return refuse(Errno::INVAL, "two names that are exchanged leave no whiteout");
        }
        self.directory(rename.parent)?;
        self.check_name_is_free(rename.parent, &rename.name)?;
        self.check_quotas(rename.parent, UsageDelta { bytes: 0, inodes: 1 })?;
        let inode = self.rename(rename)?;
        // Nothing has happened to two names of one inode.
        if self.tx.dentry(rename.parent, &rename.name)?.is_none() {
            self.create_whiteout(rename.parent, rename.name.clone())?;
        }
        Ok(inode)
    }

    /// Whether a directory is another, or lies above it.
    fn is_above(&self, directory: u64, other: u64) -> Checked<bool> {
        let mut depth = 0;
        for item in self.tx.now().ancestors(other) {
            if item?.0 == directory {
                return Ok(true);
            }
            depth += 1;
        }
        if depth == DEPTH_MAX {
            return refuse(Errno::LOOP, "the directory is nested too deeply");
        }
        Ok(false)
    }

    fn replace(
        &mut self,
        rename: &RenameName,
        (dentry, mut moved): (DentryRecord, InodeRecord),
        target: Option<DentryRecord>,
    ) -> Checked<u64> {
        let moves_directory = is_directory(&moved);
        if moves_directory {
            self.check_fully_listed_below(dentry.inode)?;
        }
        let mut replaced = None;
        if let Some(target) = target {
            let record = self.inode(target.inode)?;
            let to = self.directory(rename.new_parent)?;
            self.check_sticky(&to, &record)?;
            match (moves_directory, is_directory(&record)) {
                (true, false) => return refuse(Errno::NOTDIR, "a directory cannot replace what is none"),
                (false, true) => return refuse(Errno::ISDIR, "only a directory can replace a directory"),
                (true, true) => {
                    self.check_empty(target.inode, &record, "the directory to be replaced is not empty")?;
                }
                (false, false) => {}
            }
            replaced = Some((target.inode, record));
        }
        let goes = replaced.as_ref().map(|(inode, record)| (*inode, record));
        self.check_move(rename, (dentry.inode, &moved), goes)?;
        let replaced_inode = replaced.as_ref().map_or(0, |(inode, _)| *inode);
        let replaces_directory = replaced.as_ref().is_some_and(|(_, record)| is_directory(record));
        if let Some((inode, record)) = replaced {
            self.drop_name(inode, record, rename.new_parent, &rename.new_name)?;
        }
        let (here, there) = ((rename.parent, &rename.name), (rename.new_parent, &rename.new_name));
        self.tx.delete_dentry(here.0, here.1);
        self.tx.put_dentry(there.0, there.1, dentry);
        self.exchange_name(dentry.inode, &mut moved, here, there);
        self.put_moved(dentry.inode, moved);
        self.tx.name_changed(here.0, here.1, dentry.inode, 0);
        self.tx.name_changed(there.0, there.1, replaced_inode, dentry.inode);
        let goes = i32::from(moves_directory);
        let from = EntriesChange { names: -1, directories: -goes };
        let names = i64::from(replaced_inode == 0);
        let to = EntriesChange { names, directories: goes - i32::from(replaces_directory) };
        self.parents_changed(rename, from, to)?;
        Ok(dentry.inode)
    }

    fn exchange(
        &mut self,
        rename: &RenameName,
        (dentry, mut moved): (DentryRecord, InodeRecord),
        target: DentryRecord,
    ) -> Checked<u64> {
        let mut other = self.inode(target.inode)?;
        let to = self.directory(rename.new_parent)?;
        self.check_rename(rename, target.inode, (&to, &other))?;
        for (inode, record) in [(dentry.inode, &moved), (target.inode, &other)] {
            if is_directory(record) {
                self.check_fully_listed_below(inode)?;
            }
        }
        self.check_move(rename, (dentry.inode, &moved), Some((target.inode, &other)))?;
        let (here, there) = ((rename.parent, &rename.name), (rename.new_parent, &rename.new_name));
        self.tx.put_dentry(there.0, there.1, dentry);
        self.tx.put_dentry(here.0, here.1, target);
        self.exchange_name(dentry.inode, &mut moved, here, there);
        self.exchange_name(target.inode, &mut other, there, here);
        let change = i32::from(is_directory(&other)) - i32::from(is_directory(&moved));
        self.put_moved(dentry.inode, moved);
        self.put_moved(target.inode, other);
        self.tx.name_changed(here.0, here.1, dentry.inode, target.inode);
        self.tx.name_changed(there.0, there.1, target.inode, dentry.inode);
        let [from, to] = [change, -change].map(|directories| EntriesChange { names: 0, directories });
        self.parents_changed(rename, from, to)?;
        Ok(dentry.inode)
    }

    /// Stores an inode that has another name; with a directory, all that is in it lies elsewhere.
    fn put_moved(&mut self, inode: u64, mut record: InodeRecord) {
        self.effects.moved.extend(is_directory(&record).then_some(inode));
        records::change(&mut record, |attr| inode_changed(attr, self.caller.made_ns));
        self.put(inode, record);
    }

    /// Both directories of a rename, which may be one.
    fn parents_changed(&mut self, rename: &RenameName, mut from: EntriesChange, to: EntriesChange) -> Checked {
        if rename.parent == rename.new_parent {
            from = EntriesChange { names: from.names + to.names, directories: from.directories + to.directories };
        }
        let record = self.directory(rename.parent)?;
        self.directory_changed(rename.parent, record, from);
        if rename.parent != rename.new_parent {
            let record = self.directory(rename.new_parent)?;
            self.directory_changed(rename.new_parent, record, to);
        }
        Ok(())
    }
}
