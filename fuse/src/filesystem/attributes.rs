//! How nodes look: owner, permissions, times, and for how long the kernel may believe them. In cache-mode mounts the
//! configuration decides about owners and permissions, unless the bucket keeps them; in fs-mode mounts the namespace.

use std::sync::Arc;
use std::time::Duration;

use cavern_client::{Node, Posix, StagedFiles};
use cavern_conf::schema;
use cavern_proto::CHUNK_BYTES;
use cavern_proto::master::Kind;

use super::Inner;
use crate::kernel::Reply;
use crate::kernel::abi::{Attr, AttrOut, EntryOut};

const SECOND_NS: i64 = 1_000_000_000;

/// For names that could not be invalidated when everything must be.
pub(super) const FORGOTTEN_SOON: Duration = Duration::from_secs(1);

/// What the configuration says of the looks of files.
#[derive(Clone, Debug)]
pub struct AttrDefaults {
    uid: u32,
    gid: u32,
    file_mode: u32,
    dir_mode: u32,
    entry_timeout: Duration,
    attr_timeout: Duration,
    negative_timeout: Duration,
    /// `fuse.kernel_metadata_cache`.
    pub kernel_cache: bool,
}

impl AttrDefaults {
    pub fn new(conf: &schema::Fuse) -> Self {
        let timeout = |timeout: Duration| if conf.kernel_metadata_cache { timeout } else { Duration::ZERO };
        Self {
            uid: u32::try_from(conf.uid).unwrap_or_else(|_| rustix::process::geteuid().as_raw()),
            gid: u32::try_from(conf.gid).unwrap_or_else(|_| rustix::process::getegid().as_raw()),
            file_mode: conf.file_mode & 0o7777,
            dir_mode: conf.dir_mode & 0o7777,
            entry_timeout: timeout(conf.entry_timeout.get()),
            attr_timeout: timeout(conf.attr_timeout.get()),
            negative_timeout: timeout(conf.negative_timeout.get()),
            kernel_cache: conf.kernel_metadata_cache,
        }
    }

    /// File type and permissions.
    pub fn mode(&self, kind: Kind) -> u32 {
        match kind {
            Kind::Directory => libc::S_IFDIR | self.dir_mode,
            Kind::Symlink => libc::S_IFLNK | 0o777,
            Kind::Fifo => libc::S_IFIFO | self.file_mode,
            Kind::Socket => libc::S_IFSOCK | self.file_mode,
            Kind::CharacterDevice => libc::S_IFCHR | self.file_mode,
            Kind::BlockDevice => libc::S_IFBLK | self.file_mode,
            Kind::File | Kind::Unspecified => libc::S_IFREG | self.file_mode,
        }
    }

    pub(super) fn attr(&self, node: &Node, ino: u64) -> Attr {
        if let Some(posix) = node.posix() {
            return self.posix_attr(node, posix, ino);
        }
        let (mtime, mtimensec) = time(node.mtime_ns);
        let (ctime, ctimensec) = time(node.ctime_ns);
        let (mode, uid, gid) = self.looks(node);
        Attr {
            ino,
            size: node.size,
            blocks: node.size.div_ceil(512),
            atime: mtime,
            mtime,
            ctime,
            atimensec: mtimensec,
            mtimensec,
            ctimensec,
            mode: self.mode(node.kind) & libc::S_IFMT | mode,
            nlink: if node.is_directory() { 2 } else { 1 },
            uid,
            gid,
            rdev: 0,
            // What programs take as their buffer size; a larger one costs every small file an allocation.
            blksize: CHUNK_BYTES,
            flags: 0,
        }
    }

    /// Permissions, user and group of what is in a cache-mode mount.
    pub(super) fn looks(&self, node: &Node) -> (u32, u32, u32) {
        if node.has_own_attributes() {
            return (node.mode & 0o7777, node.uid, node.gid);
        }
        (self.mode(node.kind) & 0o7777, self.uid, self.gid)
    }

    /// Inodes of fs-mode mounts look as the namespace says.
    fn posix_attr(&self, node: &Node, posix: &Posix, ino: u64) -> Attr {
        let (atime, atimensec) = time(posix.atime_ns);
        let (mtime, mtimensec) = time(node.mtime_ns);
        let (ctime, ctimensec) = time(node.ctime_ns);
        Attr {
            ino,
            size: node.size,
            blocks: match node.kind {
                Kind::File => blocks(posix.allocated, node.size),
                _ => 0,
            },
            atime,
            mtime,
            ctime,
            atimensec,
            mtimensec,
            ctimensec,
            mode: self.mode(node.kind) & libc::S_IFMT | node.mode & 0o7777,
            nlink: node.nlink,
            uid: node.uid,
            gid: node.gid,
            rdev: posix.rdev,
            blksize: CHUNK_BYTES,
            flags: 0,
        }
    }

    /// How long the kernel may believe that a name does not exist.
    pub fn negative_timeout(&self, trust: Duration) -> Duration {
        self.negative_timeout.min(trust)
    }
}

/// Units of 512 bytes of what is taken for the content of a file; where nobody knows, that is as much as it has.
fn blocks(allocated: Option<u64>, size: u64) -> u64 {
    allocated.unwrap_or(size).div_ceil(512)
}

/// Seconds (in two's complement, as the kernel reads them) and nanoseconds.
fn time(ns: i64) -> (u64, u32) {
    let seconds = ns.div_euclid(SECOND_NS) as u64;
    // Between 0 and a second.
    let rest = ns.rem_euclid(SECOND_NS) as u32;
    (seconds, rest)
}

impl Inner {
    /// What the kernel gets to know of a node by LOOKUP and READDIRPLUS.
    pub(super) fn entry_of(&self, node: &Node) -> EntryOut {
        let looks = &self.attr_defaults;
        let trust = self.trust(node);
        let mut entry = looks.entry_timeout.min(trust);
        if self.is_checked_by_lookup(node) {
            entry = Duration::ZERO;
        } else if !self.root.remembers(node.parent, &node.name) {
            entry = entry.min(FORGOTTEN_SOON);
        }
        let attr = looks.attr_timeout.min(trust);
        let ino = self.root.to_kernel(node.inode);
        EntryOut {
            nodeid: ino,
            generation: self.generation(node.inode),
            entry_valid: entry.as_secs(),
            entry_valid_nsec: entry.subsec_nanos(),
            attr_valid: attr.as_secs(),
            attr_valid_nsec: attr.subsec_nanos(),
            attr: self.attr_of(node, ino),
        }
    }

    /// How long the kernel may believe what it is told of a node: of what is being written here, or of attributes that
    /// the bucket was not there to be asked for, not at all.
    fn trust(&self, node: &Node) -> Duration {
        let is_passing = StagedFiles::is_staged(node.inode) || node.lacks_attributes();
        if is_passing { Duration::ZERO } else { self.client.metadata().trust(node) }
    }

    /// With what was written here that the master does not know yet.
    fn attr_of(&self, node: &Node, ino: u64) -> Attr {
        let mut attr = self.attr_defaults.attr(node, ino);
        if node.is_fs_mode()
            && node.kind == Kind::File
            && let Some(unsettled) = self.client.contents().get(node.inode).and_then(|content| content.unsettled())
        {
            attr.size = unsettled.size;
            attr.blocks = blocks(unsettled.allocated, unsettled.size);
            (attr.mtime, attr.mtimensec) = time(unsettled.written_ns);
            (attr.ctime, attr.ctimensec) = (attr.mtime, attr.mtimensec);
        }
        attr
    }

    pub(super) fn attributes_of(&self, node: &Node) -> AttrOut {
        let valid = self.attr_defaults.attr_timeout.min(self.trust(node));
        AttrOut {
            attr_valid: valid.as_secs(),
            attr_valid_nsec: valid.subsec_nanos(),
            dummy: 0,
            attr: self.attr_of(node, self.root.to_kernel(node.inode)),
        }
    }

    pub(super) fn getattr(self: &Arc<Self>, kernel_node: u64, reply: Reply) {
        self.with_node(kernel_node, "stat", reply, |this, node, reply| reply.attr(&this.attributes_of(node)));
    }

    pub(super) fn statx(self: &Arc<Self>, kernel_node: u64, reply: Reply) {
        self.with_node(kernel_node, "stat", reply, |this, node, reply| {
            let born_ns = node.posix().and_then(|posix| posix.btime_ns);
            reply.statx(&this.attributes_of(node), born_ns);
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_before_the_epoch_have_positive_nanoseconds() {
        assert_eq!(time(1_500_000_000), (1, 500_000_000));
        assert_eq!(time(0), (0, 0));
        assert_eq!(time(-1), (u64::MAX, 999_999_999));
        assert_eq!(time(-SECOND_NS), (u64::MAX, 0));
    }

    #[test]
    fn the_configuration_decides_the_looks() {
        let conf = schema::Fuse { uid: 12, gid: -1, file_mode: 0o600, ..schema::Fuse::default() };
        let looks = AttrDefaults::new(&conf);
        assert_eq!((looks.uid, looks.gid), (12, rustix::process::getegid().as_raw()));
        assert_eq!(looks.mode(Kind::File), libc::S_IFREG | 0o600);
        assert_eq!(looks.mode(Kind::Directory), libc::S_IFDIR | 0o755);
        assert_eq!(looks.negative_timeout(Duration::MAX), conf.negative_timeout.get());
        let without = AttrDefaults::new(&schema::Fuse { kernel_metadata_cache: false, ..conf });
        assert_eq!(without.negative_timeout(Duration::MAX), Duration::ZERO);
        assert_eq!((without.entry_timeout, without.attr_timeout), (Duration::ZERO, Duration::ZERO));
    }
}
