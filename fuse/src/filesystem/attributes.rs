//! How nodes look: owner, permissions, times, and for how long the kernel may believe them. In cache-mode mounts the
//! configuration decides about owners and permissions, unless the bucket keeps them; in fs-mode mounts the namespace.

use std::sync::Arc;
use std::time::Duration;

use cavern_client::{BucketDefaults, ClientError, Node, Posix};
use cavern_conf::schema;
use cavern_posix::mode::{MODE_BITS, type_bits};
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
    pub(super) bucket: BucketDefaults,
    entry_timeout: Duration,
    attr_timeout: Duration,
    negative_timeout: Duration,
    /// `fuse.kernel_metadata_cache`.
    pub kernel_cache: bool,
}

impl AttrDefaults {
    pub fn new(conf: &schema::Fuse) -> Self {
        let timeout = |timeout: Duration| if conf.kernel_metadata_cache { timeout } else { Duration::ZERO };
        let bucket = BucketDefaults {
            uid: u32::try_from(conf.uid).unwrap_or_else(|_| rustix::process::geteuid().as_raw()),
            gid: u32::try_from(conf.gid).unwrap_or_else(|_| rustix::process::getegid().as_raw()),
            file_mode: conf.file_mode & MODE_BITS,
            dir_mode: conf.dir_mode & MODE_BITS,
        };
        Self {
            bucket,
            entry_timeout: timeout(conf.entry_timeout.get()),
            attr_timeout: timeout(conf.attr_timeout.get()),
            negative_timeout: timeout(conf.negative_timeout.get()),
            kernel_cache: conf.kernel_metadata_cache,
        }
    }

    pub(super) fn attr(&self, node: &Node, ino: u64) -> Attr {
        if let Some(posix) = node.posix() {
            return self.posix_attr(node, posix, ino);
        }
        let (mtime, mtimensec) = time(node.mtime_ns);
        let (ctime, ctimensec) = time(node.ctime_ns);
        let (mode, uid, gid) = self.bucket.of(node);
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
            mode: type_bits(node.kind) | mode,
            nlink: if node.is_directory() { 2 } else { 1 },
            uid,
            gid,
            rdev: 0,
            // What programs take as their buffer size; a larger one costs every small file an allocation.
            blksize: CHUNK_BYTES,
            flags: 0,
        }
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
            mode: type_bits(node.kind) | node.mode & MODE_BITS,
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
        let trust = self.client.trust(node);
        let mut entry = looks.entry_timeout.min(trust);
        if self.is_checked_by_lookup(node) {
            entry = Duration::ZERO;
        } else if !self.root.remembers(node.parent, &node.name) {
            entry = entry.min(FORGOTTEN_SOON);
        }
        let attr = looks.attr_timeout.min(trust);
        EntryOut {
            nodeid: self.root.to_kernel(node.inode),
            generation: self.generation(node.inode),
            entry_valid: entry.as_secs(),
            entry_valid_nsec: entry.subsec_nanos(),
            attr_valid: attr.as_secs(),
            attr_valid_nsec: attr.subsec_nanos(),
            attr: self.attr_of(node),
        }
    }

    /// With what was written here that the master does not know yet.
    fn attr_of(&self, node: &Node) -> Attr {
        let mut attr = self.attr_defaults.attr(node, self.root.shown_number(node.inode));
        if let Some(uncommitted) = self.client.uncommitted(node) {
            attr.size = uncommitted.size;
            attr.blocks = blocks(uncommitted.allocated, uncommitted.size);
            (attr.mtime, attr.mtimensec) = time(uncommitted.written_ns);
            (attr.ctime, attr.ctimensec) = (attr.mtime, attr.mtimensec);
        }
        attr
    }

    pub(super) fn attributes_of(&self, node: &Node) -> AttrOut {
        let valid = self.attr_defaults.attr_timeout.min(self.client.trust(node));
        AttrOut {
            attr_valid: valid.as_secs(),
            attr_valid_nsec: valid.subsec_nanos(),
            dummy: 0,
            attr: self.attr_of(node),
        }
    }

    /// Attributes for one of the kernel's nodes. What is changed by way of others of the same inode, the kernel does
    /// not know of a node that has been superseded: it believes nothing for any time.
    pub(super) fn attributes_at(&self, kernel_node: u64, node: &Node) -> AttrOut {
        let attributes = self.attributes_of(node);
        if self.root.aliases().is_superseded(kernel_node) {
            return AttrOut { attr_valid: 0, attr_valid_nsec: 0, ..attributes };
        }
        attributes
    }

    pub(super) fn getattr(self: &Arc<Self>, kernel_node: u64, reply: Reply) {
        self.stat(kernel_node, reply, |attributes, _, reply| reply.attr(attributes));
    }

    pub(super) fn statx(self: &Arc<Self>, kernel_node: u64, reply: Reply) {
        self.stat(kernel_node, reply, |attributes, node, reply| {
            reply.statx(attributes, node.posix().and_then(|posix| posix.btime_ns));
        });
    }

    /// Answers with the attributes of an inode. If it is gone, they are those of what its name leads to now, for this
    /// once: the kernel asks before it opens, and `ESTALE` would use up the one retry that the open may need.
    fn stat(
        self: &Arc<Self>,
        kernel_node: u64,
        reply: Reply,
        answer: impl FnOnce(&AttrOut, &Node, Reply) + Send + 'static,
    ) {
        if let Some(node) = self.known_node(kernel_node) {
            return answer(&self.attributes_at(kernel_node, &node), &node, reply);
        }
        let this = Arc::clone(self);
        reply.defer(move |reply| async move {
            let error = match this.node(kernel_node).await {
                Ok(node) => return answer(&this.attributes_at(kernel_node, &node), &node, reply),
                Err(error) => error,
            };
            let successor = this.successor(kernel_node, &error).await;
            // Somebody may have opened what was kept for him meanwhile.
            if let Some(node) = this.open_version(kernel_node) {
                return answer(&this.attributes_of(&node), &node, reply);
            }
            match successor {
                Some(node) => {
                    let attributes = AttrOut { attr_valid: 0, attr_valid_nsec: 0, ..this.attributes_of(&node) };
                    answer(&attributes, &node, reply);
                }
                None => this.failures.answer(reply, "stat", &error),
            }
        });
    }

    /// What the name of a file that is gone leads to now. Nobody has it open, or it would not be gone: who has must not
    /// see another size. Where the kernel opens by itself, that is not known.
    async fn successor(&self, kernel_node: u64, error: &ClientError) -> Option<Arc<Node>> {
        if !error.is_version_gone() || self.unopened.is_some() {
            return None;
        }
        let (parent, name) = self.open_retries.name_of(self.root.to_namespace(kernel_node))?;
        let node = match self.client.shown_here(parent, &name) {
            Some(node) => node,
            None => self.client.metadata().lookup(parent, &name).await.ok()?,
        };
        node.moves_when_written().then_some(node)
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
        assert_eq!((looks.bucket.uid, looks.bucket.gid), (12, rustix::process::getegid().as_raw()));
        assert_eq!(looks.bucket.permissions(Kind::File), 0o600);
        assert_eq!(looks.bucket.permissions(Kind::Directory), 0o755);
        assert_eq!(looks.negative_timeout(Duration::MAX), conf.negative_timeout.get());
        let without = AttrDefaults::new(&schema::Fuse { kernel_metadata_cache: false, ..conf });
        assert_eq!(without.negative_timeout(Duration::MAX), Duration::ZERO);
        assert_eq!((without.entry_timeout, without.attr_timeout), (Duration::ZERO, Duration::ZERO));
    }
}
