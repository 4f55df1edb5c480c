//! Counters of what the kernel asked: lock-free, since every request of every event loop passes through them.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use super::request::Operation;

macro_rules! request_kinds {
    ($($kind:ident = $name:literal: $operations:pat,)+) => {
        /// Kinds of requests as the metrics name them.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(usize)]
        pub enum RequestKind {
            $($kind,)+
        }

        impl RequestKind {
            /// All, in the order of their numbers.
            pub const ALL: [Self; [$($name),+].len()] = [$(Self::$kind),+];

            /// Label of the metrics.
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$kind => $name,)+
                }
            }

            /// The kind of a decoded operation.
            pub fn of(operation: &Operation<'_>) -> Self {
                match operation {
                    $($operations => Self::$kind,)+
                }
            }
        }
    };
}

request_kinds! {
    Lookup = "lookup": Operation::Lookup { .. },
    Getattr = "getattr": Operation::Getattr | Operation::Statx,
    Readlink = "readlink": Operation::Readlink,
    Open = "open": Operation::Open { .. },
    Read = "read": Operation::Read { .. },
    Release = "release": Operation::Release { .. },
    Opendir = "opendir": Operation::Opendir,
    Readdir = "readdir": Operation::Readdir { .. },
    Readdirplus = "readdirplus": Operation::Readdirplus { .. },
    Releasedir = "releasedir": Operation::Releasedir { .. },
    Statfs = "statfs": Operation::Statfs,
    Access = "access": Operation::Access { .. },
    Xattr = "xattr": Operation::Getxattr { .. } | Operation::Listxattr { .. },
    Mknod = "mknod": Operation::Mknod { .. },
    Mkdir = "mkdir": Operation::Mkdir { .. },
    Symlink = "symlink": Operation::Symlink { .. },
    Link = "link": Operation::Link { .. },
    Unlink = "unlink": Operation::Unlink { .. },
    Rmdir = "rmdir": Operation::Rmdir { .. },
    Rename = "rename": Operation::Rename { .. },
    Setattr = "setattr": Operation::Setattr(_),
    Setxattr = "setxattr": Operation::Setxattr { .. },
    Removexattr = "removexattr": Operation::Removexattr { .. },
    Create = "create": Operation::Create { .. },
    Tmpfile = "tmpfile": Operation::Tmpfile { .. },
    Write = "write": Operation::Write { .. },
    Copy = "copy_file_range": Operation::CopyFileRange(_),
    Flush = "flush": Operation::Flush { .. },
    Fsync = "fsync": Operation::Fsync { .. } | Operation::Fsyncdir,
    Fallocate = "fallocate": Operation::Fallocate { .. },
    Lseek = "lseek": Operation::Lseek { .. },
    Lock = "lock": Operation::Getlk(_) | Operation::Setlk { .. },
    Other = "other": _,
}

/// How a request was answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Path {
    /// On the event loop's own thread.
    Fast,
    /// By a task, after something had to be waited for.
    Deferred,
}

/// Upper bounds of the latency classes, in microseconds; one more class takes the rest.
pub const LATENCY_BOUNDS_US: [u64; 12] =
    [10, 30, 100, 300, 1_000, 3_000, 10_000, 30_000, 100_000, 1_000_000, 5_000_000, 15_000_000];

/// Counts of one kind of request.
#[derive(Debug, Default)]
pub struct KindCounts {
    pub fast: AtomicU64,
    pub deferred: AtomicU64,
    pub errors: AtomicU64,
    pub interrupted: AtomicU64,
    /// Sum of all latencies, in nanoseconds.
    pub nanos: AtomicU64,
    pub latency: [AtomicU64; LATENCY_BOUNDS_US.len() + 1],
}

#[derive(Debug)]
struct Kinds([KindCounts; RequestKind::ALL.len()]);

impl Default for Kinds {
    fn default() -> Self {
        Self(std::array::from_fn(|_| KindCounts::default()))
    }
}

/// Counts of one connection.
#[derive(Debug, Default)]
pub struct Observation {
    kinds: Kinds,
    /// Bytes answered to READ.
    pub read_bytes: AtomicU64,
    /// Bytes of answered WRITEs.
    pub written_bytes: AtomicU64,
    /// Bytes of answered COPY_FILE_RANGEs.
    pub copied_bytes: AtomicU64,
    /// Requests that could not be decoded.
    pub malformed: AtomicU64,
}

impl Observation {
    /// The counts of a kind.
    pub fn kind(&self, kind: RequestKind) -> &KindCounts {
        &self.kinds.0[kind as usize]
    }

    /// Takes in one answered request; `errno` is 0 for success.
    pub fn answered(&self, kind: RequestKind, path: Path, errno: i32, took: Duration) {
        let counts = self.kind(kind);
        match path {
            Path::Fast => counts.fast.fetch_add(1, Relaxed),
            Path::Deferred => counts.deferred.fetch_add(1, Relaxed),
        };
        // These are answers, not failures.
        if !matches!(errno, 0 | libc::ENOENT | libc::ENODATA | libc::EOPNOTSUPP | libc::ENOSYS | libc::EROFS) {
            counts.errors.fetch_add(1, Relaxed);
        }
        let nanos = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        counts.nanos.fetch_add(nanos, Relaxed);
        let class = LATENCY_BOUNDS_US.partition_point(|bound| *bound * 1000 < nanos);
        counts.latency[class].fetch_add(1, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_has_its_own_place() {
        for (place, kind) in RequestKind::ALL.into_iter().enumerate() {
            assert_eq!(kind as usize, place);
        }
    }

    #[test]
    fn latencies_fall_into_their_class() {
        let seen = Observation::default();
        seen.answered(RequestKind::Read, Path::Fast, 0, Duration::from_micros(10));
        seen.answered(RequestKind::Read, Path::Deferred, libc::EIO, Duration::from_micros(11));
        seen.answered(RequestKind::Read, Path::Deferred, 0, Duration::from_secs(60));
        let counts = seen.kind(RequestKind::Read);
        let classes: Vec<u64> = counts.latency.iter().map(|class| class.load(Relaxed)).collect();
        assert_eq!(classes, [1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1]);
        assert_eq!((counts.fast.load(Relaxed), counts.deferred.load(Relaxed), counts.errors.load(Relaxed)), (1, 2, 1));
    }
}
