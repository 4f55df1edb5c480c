//! What the configuration says of the looks of files: owner, permissions, and for how long the kernel may believe them.
//! In cache-mode mounts it decides about owners and permissions, unless the bucket keeps them; in fs-mode mounts the
//! namespace does.

use std::time::Duration;

use cavern_client::{BucketDefaults, Node};
use cavern_conf::schema;
use cavern_posix::mode::{MODE_BITS, type_bits};
use cavern_proto::CHUNK_BYTES;
use cavern_proto::master::Kind;

use crate::kernel::abi::Attr;

const SECOND_NS: i64 = 1_000_000_000;

/// What the configuration says of the looks of files.
#[derive(Clone, Debug)]
pub struct AttrDefaults {
    pub(super) bucket: BucketDefaults,
    pub(super) entry_timeout: Duration,
    pub(super) attr_timeout: Duration,
    pub(super) negative_timeout: Duration,
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

    /// Inodes of fs-mode mounts look as the namespace says.
    pub(super) fn attr(&self, node: &Node, ino: u64) -> Attr {
        let posix = node.posix();
        let (atime, atimensec) = time(posix.map_or(node.mtime_ns, |posix| posix.atime_ns));
        let (mtime, mtimensec) = time(node.mtime_ns);
        let (ctime, ctimensec) = time(node.ctime_ns);
        let (mode, uid, gid) = match posix {
            Some(_) => (node.mode & MODE_BITS, node.uid, node.gid),
            None => self.bucket.of(node),
        };
        let blocks = match posix {
            Some(_) if node.kind != Kind::File => 0,
            posix => blocks(posix.and_then(|posix| posix.allocated), node.size),
        };
        let nlink_in_bucket = if node.is_directory() { 2 } else { 1 };
        Attr {
            ino,
            size: node.size,
            blocks,
            atime,
            mtime,
            ctime,
            atimensec,
            mtimensec,
            ctimensec,
            mode: type_bits(node.kind) | mode,
            nlink: posix.map_or(nlink_in_bucket, |_| node.nlink),
            uid,
            gid,
            rdev: posix.map_or(0, |posix| posix.rdev),
            // What programs take as their buffer size; a larger one costs every small file an allocation.
            blksize: CHUNK_BYTES,
            flags: 0,
        }
    }
}

/// Units of 512 bytes of what is taken for the content of a file; where nobody knows, that is as much as it has.
pub(super) fn blocks(allocated: Option<u64>, size: u64) -> u64 {
    allocated.unwrap_or(size).div_ceil(512)
}

/// Seconds (in two's complement, as the kernel reads them) and nanoseconds.
pub(super) fn time(ns: i64) -> (u64, u32) {
    let seconds = ns.div_euclid(SECOND_NS) as u64;
    // Between 0 and a second.
    let rest = ns.rem_euclid(SECOND_NS) as u32;
    (seconds, rest)
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
        assert_eq!(looks.negative_timeout, conf.negative_timeout.get());
        let without = AttrDefaults::new(&schema::Fuse { kernel_metadata_cache: false, ..conf });
        assert_eq!(without.negative_timeout, Duration::ZERO);
        assert_eq!((without.entry_timeout, without.attr_timeout), (Duration::ZERO, Duration::ZERO));
    }
}
