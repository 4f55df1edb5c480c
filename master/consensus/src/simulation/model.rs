//! What the namespace is to be: directories, names and inodes, as POSIX has them, without anything of how the master
//! keeps them.

use std::collections::BTreeMap;

use cavern_proto::master::mutation::Change;
use cavern_proto::master::{CreateInode, Kind, RemoveName, RenameMode, RenameName, SetAttr};
use rustix::io::Errno;

/// An inode as it is seen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seen {
    pub inode: u64,
    pub is_directory: bool,
    pub mode: u32,
    pub ctime_ns: i64,
    pub is_named: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Inode {
    is_directory: bool,
    mode: u32,
    ctime_ns: i64,
    is_named: bool,
    parent: u64,
}

/// A namespace in memory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Model {
    pub root: u64,
    last: u64,
    inodes: BTreeMap<u64, Inode>,
    names: BTreeMap<(u64, String), u64>,
    /// What each change of each session did: the inode, or the errno.
    results: BTreeMap<(u64, u64), Result<u64, i32>>,
}

impl Model {
    /// An empty mount; `last` is the last inode that was given.
    pub fn new(root: Seen, last: u64) -> Self {
        let inode =
            Inode { is_directory: true, mode: root.mode, ctime_ns: root.ctime_ns, is_named: true, parent: root.inode };
        Self { root: root.inode, last, inodes: BTreeMap::from([(root.inode, inode)]), ..Self::default() }
    }

    pub fn inode(&self, inode: u64) -> Option<Seen> {
        let known = self.inodes.get(&inode)?;
        Some(Seen {
            inode,
            is_directory: known.is_directory,
            mode: known.mode,
            ctime_ns: known.ctime_ns,
            is_named: known.is_named,
        })
    }

    pub fn lookup(&self, parent: u64, name: &str) -> Option<Seen> {
        self.inode(*self.names.get(&(parent, name.to_owned()))?)
    }

    /// All names of a directory.
    pub fn names(&self, parent: u64) -> Vec<(String, u64)> {
        let range = self.names.range((parent, String::new())..(parent + 1, String::new()));
        range.map(|((_, name), inode)| (name.clone(), *inode)).collect()
    }

    pub fn inodes(&self) -> Vec<u64> {
        self.inodes.keys().copied().collect()
    }

    /// A change of a session. One that comes again does nothing, and has the result that it had.
    pub fn apply(&mut self, session: u64, seq: u64, change: &Change, now_ns: i64) -> Result<u64, i32> {
        if let Some(known) = self.results.get(&(session, seq)) {
            return *known;
        }
        let result = self.change(change, now_ns).map_err(Errno::raw_os_error);
        self.results.insert((session, seq), result);
        result
    }

    fn change(&mut self, change: &Change, now_ns: i64) -> Result<u64, Errno> {
        match change {
            Change::Create(create) => self.create(create, now_ns),
            Change::Remove(remove) => self.remove(remove, now_ns),
            Change::Rename(rename) => self.rename(rename, now_ns),
            Change::SetAttr(set) => self.set_attributes(set, now_ns),
            other => panic!("the model knows nothing of {other:?}"),
        }
    }

    fn directory(&self, inode: u64) -> Result<(), Errno> {
        let known = self.inodes.get(&inode).ok_or(Errno::STALE)?;
        match (known.is_directory, known.is_named) {
            (false, _) => Err(Errno::NOTDIR),
            (true, false) => Err(Errno::NOENT),
            (true, true) => Ok(()),
        }
    }

    fn name(&self, parent: u64, name: &[u8]) -> Option<u64> {
        self.names.get(&(parent, text(name))).copied()
    }

    fn is_empty(&self, inode: u64) -> bool {
        self.names(inode).is_empty()
    }

    fn touch(&mut self, inode: u64, now_ns: i64) {
        if let Some(known) = self.inodes.get_mut(&inode) {
            known.ctime_ns = now_ns;
        }
    }

    fn unlink(&mut self, inode: u64, now_ns: i64) {
        if let Some(known) = self.inodes.get_mut(&inode) {
            (known.is_named, known.ctime_ns) = (false, now_ns);
        }
    }

    fn create(&mut self, create: &CreateInode, now_ns: i64) -> Result<u64, Errno> {
        self.directory(create.parent)?;
        if self.name(create.parent, &create.name).is_some() {
            return Err(Errno::EXIST);
        }
        self.last += 1;
        let is_directory = create.kind() == Kind::Directory;
        let (mode, parent) = (create.mode & 0o7777 & !create.umask, create.parent);
        let inode = Inode { is_directory, mode, ctime_ns: now_ns, is_named: true, parent };
        self.inodes.insert(self.last, inode);
        self.names.insert((create.parent, text(&create.name)), self.last);
        self.touch(create.parent, now_ns);
        Ok(self.last)
    }

    fn remove(&mut self, remove: &RemoveName, now_ns: i64) -> Result<u64, Errno> {
        self.directory(remove.parent)?;
        let inode = self.name(remove.parent, &remove.name).ok_or(Errno::NOENT)?;
        match (remove.directory, self.inodes[&inode].is_directory) {
            (true, false) => return Err(Errno::NOTDIR),
            (false, true) => return Err(Errno::ISDIR),
            (true, true) if !self.is_empty(inode) => return Err(Errno::NOTEMPTY),
            _ => {}
        }
        self.names.remove(&(remove.parent, text(&remove.name)));
        self.unlink(inode, now_ns);
        self.touch(remove.parent, now_ns);
        Ok(inode)
    }

    /// Whether a directory is another, or lies above it.
    fn is_above(&self, directory: u64, other: u64) -> bool {
        let mut at = other;
        loop {
            if at == directory {
                return true;
            }
            let parent = self.inodes[&at].parent;
            if at == self.root || parent == at {
                return false;
            }
            at = parent;
        }
    }

    fn rename(&mut self, rename: &RenameName, now_ns: i64) -> Result<u64, Errno> {
        assert_eq!(rename.mode(), RenameMode::Replace);
        self.directory(rename.parent)?;
        self.directory(rename.new_parent)?;
        let inode = self.name(rename.parent, &rename.name).ok_or(Errno::NOENT)?;
        let target = self.name(rename.new_parent, &rename.new_name);
        let is_directory = self.inodes[&inode].is_directory;
        if is_directory && self.is_above(inode, rename.new_parent) {
            return Err(Errno::INVAL);
        }
        if let Some(target) = target {
            let is_target_directory = self.inodes[&target].is_directory;
            if is_target_directory && self.is_above(target, rename.parent) {
                return Err(Errno::NOTEMPTY);
            }
            if target == inode {
                return Ok(inode);
            }
            match (is_directory, is_target_directory) {
                (true, false) => return Err(Errno::NOTDIR),
                (false, true) => return Err(Errno::ISDIR),
                (true, true) if !self.is_empty(target) => return Err(Errno::NOTEMPTY),
                _ => self.unlink(target, now_ns),
            }
        }
        self.names.remove(&(rename.parent, text(&rename.name)));
        self.names.insert((rename.new_parent, text(&rename.new_name)), inode);
        if let Some(known) = self.inodes.get_mut(&inode) {
            known.parent = rename.new_parent;
        }
        [inode, rename.parent, rename.new_parent].into_iter().for_each(|inode| self.touch(inode, now_ns));
        Ok(inode)
    }

    fn set_attributes(&mut self, set: &SetAttr, now_ns: i64) -> Result<u64, Errno> {
        let known = self.inodes.get_mut(&set.inode).ok_or(Errno::STALE)?;
        known.mode = set.mode.unwrap_or(known.mode) & 0o7777;
        known.ctime_ns = now_ns;
        Ok(set.inode)
    }
}

fn text(name: &[u8]) -> String {
    String::from_utf8_lossy(name).into_owned()
}
