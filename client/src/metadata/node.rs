//! A node: one inode as the client knows it. Immutable, shared, small: the cache holds a million of them.

use std::sync::Arc;

use bytes::Bytes;
use cavern_proto::ROOT_INODE;
use cavern_proto::master::{Attr, Consistency, Entry, Kind, OwnAttributes, User};
use rustix::io::Errno;

use crate::error::ClientError;
use crate::mounts::{MountView, ObjectVersion};

/// One inode: its attributes, and where the bucket has it. A node never changes; it can only be replaced: in a
/// cache-mode mount an inode is one version of one object, and in an fs-mode mount a node is what its inode was at one
/// time.
#[derive(Debug)]
pub struct Node {
    pub inode: u64,
    /// The directory that holds it; the root is its own parent.
    pub parent: u64,
    /// Bytes of a file; 0 for a directory.
    pub size: u64,
    /// Nanoseconds since the epoch.
    pub mtime_ns: i64,
    pub ctime_ns: i64,
    /// Component below `parent`; empty for the root.
    pub name: Box<[u8]>,
    /// `None` for directories above any mount.
    pub mount: Option<Arc<MountView>>,
    /// Key prefix of the directory that holds it: "" or ends in '/'. For a mount's root: of the root itself.
    location: Arc<str>,
    etag: Etag,
    /// Permission bits (07777) as the master has them.
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
    pub nlink: u32,
    pub kind: Kind,
    own: OwnAttributes,
    /// In fs-mode mounts.
    posix: Option<Box<Posix>>,
}

/// What only inodes of fs-mode mounts have.
#[derive(Clone, Debug)]
pub struct Posix {
    /// Nanoseconds since the epoch.
    pub atime_ns: i64,
    /// Of files: grows with every change of the content.
    pub version: u64,
    /// Of files: no block of an earlier one is the file's.
    pub generation: u32,
    /// Of devices, as the kernel encodes it.
    pub rdev: u32,
    pub has_xattrs: bool,
    /// It has `security.capability`.
    pub has_capability: bool,
    /// Of files: bytes that are taken for the content; `None` for as many as it has.
    pub allocated: Option<u64>,
    /// When it was made, in nanoseconds since the epoch, where that is known.
    pub btime_ns: Option<i64>,
    /// Of symlinks: where it leads.
    pub target: Box<[u8]>,
}

impl Posix {
    fn new(attr: &Attr, target: &[u8]) -> Self {
        Self {
            atime_ns: attr.atime_ns,
            version: attr.version,
            generation: attr.generation,
            rdev: attr.rdev,
            has_xattrs: attr.has_xattrs,
            has_capability: attr.has_capability,
            allocated: attr.allocated,
            btime_ns: attr.btime_ns,
            target: target.into(),
        }
    }
}

/// An ETag, in 24 bytes where it is an MD5 as usual.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Etag {
    Md5([u8; 16]),
    Text(Box<str>),
}

impl Etag {
    fn new(text: &str) -> Self {
        let digits = text.as_bytes();
        let digit = |byte: u8| match byte {
            b'0'..=b'9' => Some(byte - b'0'),
            b'a'..=b'f' => Some(byte - b'a' + 10),
            _ => None,
        };
        let mut md5 = [0; 16];
        if digits.len() == 32 {
            let mut pairs = digits.chunks_exact(2).map(|pair| Some(digit(pair[0])? << 4 | digit(pair[1])?));
            if md5.iter_mut().all(|byte| pairs.next().flatten().map(|value| *byte = value).is_some()) {
                return Self::Md5(md5);
            }
        }
        Self::Text(text.into())
    }
}

impl Node {
    /// From an entry of the master. `location` is the key prefix of the directory that holds it (of the mount's root
    /// itself, for that root).
    pub(crate) fn new(entry: &Entry, attr: &Attr, mount: Option<Arc<MountView>>, location: Arc<str>) -> Self {
        let is_fs_mode = mount.as_ref().is_some_and(|mount| mount.is_fs_mode());
        Self {
            posix: is_fs_mode.then(|| Box::new(Posix::new(attr, &entry.target))),
            inode: attr.inode,
            parent: if attr.inode == ROOT_INODE { ROOT_INODE } else { entry.parent },
            size: attr.size,
            mtime_ns: attr.mtime_ns,
            ctime_ns: attr.ctime_ns,
            name: entry.name.to_vec().into_boxed_slice(),
            mount,
            location,
            etag: Etag::new(&entry.etag),
            mode: attr.mode,
            uid: attr.uid,
            gid: attr.gid,
            nlink: attr.nlink,
            kind: attr.kind(),
            own: attr.own(),
        }
    }

    /// An inode of a mount of which only the attributes are known: nothing to be found by a name.
    pub fn nameless(attr: &Attr, mount: Option<Arc<MountView>>) -> Self {
        Self::new(&Entry::default(), attr, mount, "".into())
    }

    /// This inode with the attributes that it has now.
    pub fn with_attributes(&self, attr: &Attr) -> Self {
        let posix = self.posix.as_ref().map(|posix| Box::new(Posix::new(attr, &posix.target)));
        Self {
            inode: self.inode,
            parent: self.parent,
            size: attr.size,
            mtime_ns: attr.mtime_ns,
            ctime_ns: attr.ctime_ns,
            name: self.name.clone(),
            mount: self.mount.clone(),
            location: self.location.clone(),
            etag: self.etag.clone(),
            mode: attr.mode,
            uid: attr.uid,
            gid: attr.gid,
            nlink: attr.nlink,
            kind: self.kind,
            own: attr.own(),
            posix,
        }
    }

    /// Its attributes, as the master says them.
    pub(crate) fn attr(&self) -> Attr {
        let posix = self.posix.as_deref();
        Attr {
            inode: self.inode,
            kind: self.kind.into(),
            mode: self.mode,
            uid: self.uid,
            gid: self.gid,
            size: self.size,
            mtime_ns: self.mtime_ns,
            ctime_ns: self.ctime_ns,
            nlink: self.nlink,
            atime_ns: posix.map_or(self.mtime_ns, |posix| posix.atime_ns),
            rdev: posix.map_or(0, |posix| posix.rdev),
            version: posix.map_or(0, |posix| posix.version),
            generation: posix.map_or(0, |posix| posix.generation),
            has_xattrs: posix.is_some_and(|posix| posix.has_xattrs),
            own: self.own.into(),
            has_capability: posix.is_some_and(|posix| posix.has_capability),
            allocated: posix.and_then(|posix| posix.allocated),
            btime_ns: posix.and_then(|posix| posix.btime_ns),
            next_generation: 0,
        }
    }

    /// What it has as an inode of an fs-mode mount; `None` for any other.
    pub fn posix(&self) -> Option<&Posix> {
        self.posix.as_deref()
    }

    /// Whether it is of an fs-mode mount: its attributes are its own, and may change.
    pub fn is_fs_mode(&self) -> bool {
        self.posix.is_some()
    }

    /// Whether the master has its locks, so that they hold on all hosts.
    pub fn has_cluster_locks(&self) -> bool {
        self.is_fs_mode()
    }

    /// Whether it is of a cache-mode mount that is written to: changes of it are changes of the bucket.
    pub fn is_in_writable_bucket(&self) -> bool {
        self.mount.as_ref().is_some_and(|mount| mount.has_writable_bucket())
    }

    /// Whether its name leads to another inode as soon as somebody writes to it.
    pub fn moves_when_written(&self) -> bool {
        self.is_in_writable_bucket() && !self.is_directory()
    }

    /// Whether it is in a mount that can be written to.
    pub fn can_be_changed(&self) -> bool {
        self.mount.as_ref().is_some_and(|mount| mount.is_changeable())
    }

    /// Whether it is in a mount where masters judge by the user who asks.
    pub fn limits_users(&self) -> bool {
        self.mount.as_ref().is_some_and(|mount| mount.limits_users())
    }

    /// Who owns it, in no group but its own.
    pub fn owner(&self) -> User {
        User { uid: self.uid, gid: self.gid, groups: Vec::new() }
    }

    /// See [`MountView::squashes`].
    pub fn squashes(&self, user: &User) -> bool {
        self.mount.as_ref().is_some_and(|mount| mount.squashes(user))
    }

    /// Whether mode, owner and mtime are those that the bucket keeps with the object.
    pub fn has_own_attributes(&self) -> bool {
        self.own == OwnAttributes::Stored
    }

    /// Whether the bucket may keep such attributes, and has not been asked: this is good for its name alone.
    pub fn lacks_attributes(&self) -> bool {
        self.own == OwnAttributes::Unknown
    }

    /// Whether what programs set of its attributes is kept by the bucket.
    pub fn keeps_attributes(&self) -> bool {
        self.mount.as_ref().is_some_and(|mount| mount.keeps_attributes())
    }

    /// Whether no name leads to it any more: it is there only for those who have it open.
    pub fn is_removed(&self) -> bool {
        self.is_fs_mode() && self.nlink == 0
    }

    /// Whether it is in a mount of which nobody may miss a change for a moment: kernels keep neither its name nor its
    /// attributes.
    pub fn is_strict(&self) -> bool {
        self.mount.as_ref().is_some_and(|mount| mount.is_strict())
    }

    /// Whether every open asks the bucket for the current version: `consistency = always` of its mount.
    pub fn is_always_checked(&self) -> bool {
        self.mount.as_ref().is_some_and(|mount| mount.consistency() == Consistency::Always)
    }

    pub fn is_directory(&self) -> bool {
        self.kind == Kind::Directory
    }

    /// ETag without quotes; empty for directories.
    pub fn etag(&self) -> String {
        match &self.etag {
            Etag::Md5(md5) => md5.iter().fold(String::with_capacity(32), |mut text, byte| {
                for nibble in [byte >> 4, byte & 15] {
                    text.push(char::from(b"0123456789abcdef"[usize::from(nibble)]));
                }
                text
            }),
            Etag::Text(text) => text.to_string(),
        }
    }

    /// Files: the full object key. Directories of a mount: the full key prefix with its trailing '/' (empty for a
    /// mount of a whole bucket). Directories above any mount: empty.
    pub fn key(&self) -> String {
        let Some(mount) = &self.mount else { return String::new() };
        if self.inode == mount.root_inode() {
            return self.location.to_string();
        }
        // Names come from keys, which are UTF-8.
        let mut key = format!("{}{}", self.location, String::from_utf8_lossy(&self.name));
        if self.is_directory() {
            key.push('/');
        }
        key
    }

    /// The object version behind a file of a cache-mode mount.
    pub fn object(&self) -> Result<ObjectVersion, ClientError> {
        let mount = self.mount.clone().ok_or_else(|| ClientError::Invalid(format!("{self} is in no mount")))?;
        if self.is_fs_mode() {
            let reason = format!("{self} is a file of an fs-mode mount, not an object of a bucket");
            return Err(ClientError::Refused { errno: Errno::OPNOTSUPP.raw_os_error(), reason });
        }
        ObjectVersion::new(mount, &self.key(), &self.etag(), self.size)
    }

    /// The name as messages carry it.
    pub fn name_bytes(&self) -> Bytes {
        Bytes::copy_from_slice(&self.name)
    }
}

impl std::fmt::Display for Node {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.mount {
            Some(mount) if self.is_fs_mode() => {
                write!(f, "{}: inode {} ({})", mount.path(), self.inode, String::from_utf8_lossy(&self.name))
            }
            Some(mount) => write!(f, "{}:{}", mount.path(), self.key()),
            None => write!(f, "inode {} ({})", self.inode, String::from_utf8_lossy(&self.name)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn etags_survive_whatever_their_spelling() {
        for text in ["d41d8cd98f00b204e9800998ecf8427e", "D41D8CD98F00B204E9800998ECF8427E", "abc-12", "", "é"] {
            let attr = Attr { inode: 9, ..Attr::default() };
            let entry = Entry { etag: text.into(), attr: Some(attr), ..Entry::default() };
            assert_eq!(Node::new(&entry, &attr, None, "".into()).etag(), text);
        }
        assert!(matches!(Etag::new("d41d8cd98f00b204e9800998ecf8427e"), Etag::Md5(_)));
    }

    #[test]
    fn a_node_is_small() {
        assert!(std::mem::size_of::<Node>() <= 160, "{}", std::mem::size_of::<Node>());
    }
}
