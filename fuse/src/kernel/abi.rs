//! The kernel's side of the wire: numbers and structures of `include/uapi/linux/fuse.h`, protocol 7.x, as far as this
//! file system meets them. Everything is in the host's byte order; structures are padded to 64 bits, so
//! `zerocopy` can prove that no padding byte is ever sent. Names follow the header without its prefixes.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Major version of the protocol; there has been no other since 2006.
pub const MAJOR: u32 = 7;
/// Newest minor version whose structures this module knows (7.40 brought `max_stack_depth`).
pub const MINOR: u32 = 40;
/// Oldest minor version that is served (7.31: Linux 5.4 and later).
pub const MINOR_OLDEST: u32 = 31;
/// Node id of the mount's root.
pub const ROOT_NODE: u64 = 1;

/// Numbers of the requests.
pub mod opcode {
    pub const LOOKUP: u32 = 1;
    pub const FORGET: u32 = 2;
    pub const GETATTR: u32 = 3;
    pub const SETATTR: u32 = 4;
    pub const READLINK: u32 = 5;
    pub const SYMLINK: u32 = 6;
    pub const MKNOD: u32 = 8;
    pub const MKDIR: u32 = 9;
    pub const UNLINK: u32 = 10;
    pub const RMDIR: u32 = 11;
    pub const RENAME: u32 = 12;
    pub const LINK: u32 = 13;
    pub const OPEN: u32 = 14;
    pub const READ: u32 = 15;
    pub const WRITE: u32 = 16;
    pub const STATFS: u32 = 17;
    pub const RELEASE: u32 = 18;
    pub const SETXATTR: u32 = 21;
    pub const FSYNC: u32 = 20;
    pub const GETXATTR: u32 = 22;
    pub const LISTXATTR: u32 = 23;
    pub const REMOVEXATTR: u32 = 24;
    pub const FLUSH: u32 = 25;
    pub const INIT: u32 = 26;
    pub const OPENDIR: u32 = 27;
    pub const READDIR: u32 = 28;
    pub const RELEASEDIR: u32 = 29;
    pub const FSYNCDIR: u32 = 30;
    pub const GETLK: u32 = 31;
    pub const SETLK: u32 = 32;
    pub const SETLKW: u32 = 33;
    pub const ACCESS: u32 = 34;
    pub const CREATE: u32 = 35;
    pub const INTERRUPT: u32 = 36;
    pub const DESTROY: u32 = 38;
    pub const BATCH_FORGET: u32 = 42;
    pub const FALLOCATE: u32 = 43;
    pub const READDIRPLUS: u32 = 44;
    pub const RENAME2: u32 = 45;
    pub const LSEEK: u32 = 46;
    pub const COPY_FILE_RANGE: u32 = 47;
    pub const TMPFILE: u32 = 51;
    /// As GETATTR, with the time of birth (Linux 6.6 and later).
    pub const STATX: u32 = 52;
    /// As COPY_FILE_RANGE, with a count of 64 bits (Linux 6.18 and later). `ENOSYS` to it has the kernel use the other.
    pub const COPY_FILE_RANGE_64: u32 = 53;
}

/// Flags of INIT; bits 32 and up travel in `flags2`.
pub mod init {
    pub const ASYNC_READ: u64 = 1 << 0;
    pub const POSIX_LOCKS: u64 = 1 << 1;
    /// LOOKUP of `.` and `..` is answered for every inode that exists, so that file handles outlive what the kernel
    /// knows.
    pub const EXPORT_SUPPORT: u64 = 1 << 4;
    pub const BIG_WRITES: u64 = 1 << 5;
    /// The umask is ours to apply: a default access list goes before it.
    pub const DONT_MASK: u64 = 1 << 6;
    pub const FLOCK_LOCKS: u64 = 1 << 10;
    pub const DO_READDIRPLUS: u64 = 1 << 13;
    pub const ASYNC_DIO: u64 = 1 << 15;
    pub const PARALLEL_DIROPS: u64 = 1 << 18;
    pub const POSIX_ACL: u64 = 1 << 20;
    pub const MAX_PAGES: u64 = 1 << 22;
    pub const CACHE_SYMLINKS: u64 = 1 << 23;
    pub const HANDLE_KILLPRIV_V2: u64 = 1 << 28;
    pub const SETXATTR_EXT: u64 = 1 << 29;
    pub const INIT_EXT: u64 = 1 << 30;
    pub const DIRECT_IO_ALLOW_MMAP: u64 = 1 << 36;
    pub const PASSTHROUGH: u64 = 1 << 37;
    /// What a process that died had read can be sent once more.
    pub const HAS_RESEND: u64 = 1 << 39;
}

/// In the number of a request that is sent once more.
pub const UNIQUE_RESEND: u64 = 1 << 63;

/// Flags of the answer to OPEN and OPENDIR.
pub mod fopen {
    pub const DIRECT_IO: u32 = 1 << 0;
    pub const KEEP_CACHE: u32 = 1 << 1;
    pub const CACHE_DIR: u32 = 1 << 3;
    pub const NOFLUSH: u32 = 1 << 5;
    pub const PARALLEL_DIRECT_WRITES: u32 = 1 << 6;
    pub const PASSTHROUGH: u32 = 1 << 7;
}

/// Flags of SETXATTR that are not those of setxattr(2).
pub mod setxattr {
    pub const ACL_KILL_SGID: u32 = 1 << 0;
}

/// Flags of GETLK, SETLK and SETLKW.
pub mod lk {
    pub const FLOCK: u32 = 1 << 0;
}

/// Flags of READ.
pub mod read {
    /// Of a read that is answered to a process, not into pages.
    pub const LOCKOWNER: u32 = 1 << 1;
}

/// Flags of WRITE.
pub mod write {
    pub const LOCKOWNER: u32 = 1 << 1;
    pub const KILL_SUIDGID: u32 = 1 << 2;
}

/// What a SETATTR sets.
pub mod fattr {
    pub const MODE: u32 = 1 << 0;
    pub const UID: u32 = 1 << 1;
    pub const GID: u32 = 1 << 2;
    pub const SIZE: u32 = 1 << 3;
    pub const ATIME: u32 = 1 << 4;
    pub const MTIME: u32 = 1 << 5;
    pub const ATIME_NOW: u32 = 1 << 7;
    pub const MTIME_NOW: u32 = 1 << 8;
    pub const LOCKOWNER: u32 = 1 << 9;
    pub const KILL_SUIDGID: u32 = 1 << 11;
}

/// What the answer to STATX contains.
pub mod statx {
    pub const BASIC_STATS: u32 = 0x07ff;
    pub const BTIME: u32 = 0x0800;
}

/// Codes of the messages that the file system sends unasked.
pub mod notify {
    pub const INVAL_INODE: i32 = 2;
    pub const INVAL_ENTRY: i32 = 3;
    /// What was read and not answered is sent once more (Linux 6.9 and later).
    pub const RESEND: i32 = 7;
    /// Every name that the kernel knows is looked up again (Linux 6.16 and later).
    pub const INC_EPOCH: i32 = 8;
}

macro_rules! wire {
    ($($(#[$doc:meta])* struct $name:ident { $($field:ident: $kind:ty),* $(,)? })*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
        #[repr(C)]
        pub struct $name { $(pub $field: $kind),* }
    )*};
}

wire! {
    /// Head of every request.
    struct InHeader {
        len: u32,
        opcode: u32,
        unique: u64,
        node: u64,
        uid: u32,
        gid: u32,
        pid: u32,
        // Length of the extensions behind the body, in units of eight bytes; none has been asked for.
        total_extlen: u16,
        padding: u16,
    }
    /// Head of every answer; `error` is a negative errno, or a notification's code when `unique` is 0.
    struct OutHeader { len: u32, error: i32, unique: u64 }

    /// Attributes of one inode.
    struct Attr {
        ino: u64,
        size: u64,
        // In units of 512 bytes.
        blocks: u64,
        atime: u64,
        mtime: u64,
        ctime: u64,
        atimensec: u32,
        mtimensec: u32,
        ctimensec: u32,
        mode: u32,
        nlink: u32,
        uid: u32,
        gid: u32,
        rdev: u32,
        blksize: u32,
        flags: u32,
    }
    /// Answer to LOOKUP; `nodeid` 0 says that there is no such name for as long as `entry_valid`.
    struct EntryOut {
        nodeid: u64,
        generation: u64,
        entry_valid: u64,
        attr_valid: u64,
        entry_valid_nsec: u32,
        attr_valid_nsec: u32,
        attr: Attr,
    }
    struct AttrOut { attr_valid: u64, attr_valid_nsec: u32, dummy: u32, attr: Attr }
    struct GetattrIn { getattr_flags: u32, dummy: u32, fh: u64 }
    struct StatxIn { getattr_flags: u32, reserved: u32, fh: u64, sx_flags: u32, sx_mask: u32 }
    struct StatxTime { seconds: i64, nanoseconds: u32, reserved: i32 }
    /// Attributes of one inode as statx(2) returns them.
    struct Statx {
        mask: u32,
        blksize: u32,
        attributes: u64,
        nlink: u32,
        uid: u32,
        gid: u32,
        mode: u16,
        spare0: u16,
        ino: u64,
        size: u64,
        // In units of 512 bytes.
        blocks: u64,
        attributes_mask: u64,
        atime: StatxTime,
        btime: StatxTime,
        ctime: StatxTime,
        mtime: StatxTime,
        rdev_major: u32,
        rdev_minor: u32,
        dev_major: u32,
        dev_minor: u32,
        spare2: [u64; 14],
    }
    struct StatxOut { attr_valid: u64, attr_valid_nsec: u32, flags: u32, spare: [u64; 2], stat: Statx }
    struct ForgetIn { nlookup: u64 }
    struct ForgetOne { node: u64, nlookup: u64 }
    struct BatchForgetIn { count: u32, dummy: u32 }
    struct SetattrIn {
        valid: u32,
        padding: u32,
        fh: u64,
        size: u64,
        lock_owner: u64,
        atime: u64,
        mtime: u64,
        ctime: u64,
        atimensec: u32,
        mtimensec: u32,
        ctimensec: u32,
        mode: u32,
        unused4: u32,
        uid: u32,
        gid: u32,
        unused5: u32,
    }
    struct MknodIn { mode: u32, rdev: u32, umask: u32, padding: u32 }
    struct MkdirIn { mode: u32, umask: u32 }
    struct RenameIn { newdir: u64 }
    struct Rename2In { newdir: u64, flags: u32, padding: u32 }
    struct LinkIn { oldnode: u64 }
    struct CreateIn { flags: u32, mode: u32, umask: u32, open_flags: u32 }
    struct SetxattrIn { size: u32, flags: u32 }
    /// What follows `SetxattrIn` where `SETXATTR_EXT` has been agreed on.
    struct SetxattrInExtension { setxattr_flags: u32, padding: u32 }
    struct OpenIn { flags: u32, open_flags: u32 }
    struct OpenOut { fh: u64, open_flags: u32, backing_id: i32 }
    struct ReleaseIn { fh: u64, flags: u32, release_flags: u32, lock_owner: u64 }
    struct FlushIn { fh: u64, unused: u32, padding: u32, lock_owner: u64 }
    /// A lock, or what stands in its way; `end` is the last byte.
    struct FileLock { start: u64, end: u64, kind: u32, pid: u32 }
    struct LkIn { fh: u64, owner: u64, lock: FileLock, lk_flags: u32, padding: u32 }
    struct LkOut { lock: FileLock }
    struct ReadIn { fh: u64, offset: u64, size: u32, read_flags: u32, lock_owner: u64, flags: u32, padding: u32 }
    /// The bytes follow.
    struct WriteIn { fh: u64, offset: u64, size: u32, write_flags: u32, lock_owner: u64, flags: u32, padding: u32 }
    struct WriteOut { size: u32, padding: u32 }
    struct FsyncIn { fh: u64, fsync_flags: u32, padding: u32 }
    struct FallocateIn { fh: u64, offset: u64, length: u64, mode: u32, padding: u32 }
    struct LseekIn { fh: u64, offset: u64, whence: u32, padding: u32 }
    struct LseekOut { offset: u64 }
    /// What COPY_FILE_RANGE is answered with is a `WriteOut`.
    struct CopyFileRangeIn {
        fh_in: u64,
        off_in: u64,
        nodeid_out: u64,
        fh_out: u64,
        off_out: u64,
        len: u64,
        flags: u64,
    }
    struct CopyFileRangeOut { bytes_copied: u64 }
    struct StatfsOut {
        blocks: u64,
        bfree: u64,
        bavail: u64,
        files: u64,
        ffree: u64,
        bsize: u32,
        namelen: u32,
        frsize: u32,
        padding: u32,
        spare: [u32; 6],
    }
    struct GetxattrIn { size: u32, padding: u32 }
    struct GetxattrOut { size: u32, padding: u32 }
    struct AccessIn { mask: u32, padding: u32 }
    struct InterruptIn { unique: u64 }
    struct InitIn { major: u32, minor: u32, max_readahead: u32, flags: u32 }
    /// What follows `InitIn` when its flags have `INIT_EXT`.
    struct InitInExtension { flags2: u32, unused: [u32; 11] }
    struct InitOut {
        major: u32,
        minor: u32,
        max_readahead: u32,
        flags: u32,
        max_background: u16,
        congestion_threshold: u16,
        max_write: u32,
        // Nanoseconds.
        time_gran: u32,
        max_pages: u16,
        map_alignment: u16,
        flags2: u32,
        max_stack_depth: u32,
        unused: [u32; 6],
    }
    /// Argument of the ioctl that registers a backing file.
    struct BackingMap { fd: i32, flags: u32, padding: u64 }
    /// Head of one directory entry; the name follows, padded to eight bytes.
    struct Dirent { ino: u64, off: u64, namelen: u32, kind: u32 }
    struct NotifyInvalInodeOut { node: u64, off: i64, len: i64 }
    struct NotifyInvalEntryOut { parent: u64, namelen: u32, flags: u32 }
}

#[cfg(test)]
mod tests {
    use std::mem::size_of;

    use super::*;

    #[test]
    fn sizes_are_those_of_the_kernel_header() {
        assert_eq!(size_of::<InHeader>(), 40);
        assert_eq!(size_of::<OutHeader>(), 16);
        assert_eq!(size_of::<Attr>(), 88);
        assert_eq!(size_of::<EntryOut>(), 128);
        assert_eq!(size_of::<AttrOut>(), 104);
        assert_eq!((size_of::<StatxIn>(), size_of::<StatxOut>()), (24, 288));
        assert_eq!(size_of::<ReadIn>(), 40);
        assert_eq!((size_of::<LkIn>(), size_of::<LkOut>()), (48, 24));
        assert_eq!(size_of::<WriteIn>(), 40);
        assert_eq!(size_of::<FlushIn>(), 24);
        assert_eq!(size_of::<FallocateIn>(), 32);
        assert_eq!(size_of::<LseekIn>(), 24);
        assert_eq!((size_of::<CopyFileRangeIn>(), size_of::<CopyFileRangeOut>()), (56, 8));
        assert_eq!(size_of::<SetattrIn>(), 88);
        assert_eq!(size_of::<MknodIn>(), 16);
        assert_eq!(size_of::<CreateIn>(), 16);
        assert_eq!(size_of::<Rename2In>(), 16);
        assert_eq!(size_of::<StatfsOut>(), 80);
        assert_eq!(size_of::<InitIn>() + size_of::<InitInExtension>(), 64);
        assert_eq!(size_of::<InitOut>(), 64);
        assert_eq!(size_of::<Dirent>(), 24);
        assert_eq!(size_of::<NotifyInvalEntryOut>(), 16);
    }
}
