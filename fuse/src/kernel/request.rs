//! One request of the kernel, decoded. Decoding borrows from the event loop's buffer, copies nothing but small
//! fixed structures, and refuses whatever is too short: what a malformed request gets is `EIO`, never a panic.

use zerocopy::FromBytes;

use super::abi::{self, InHeader, fattr, opcode};

const SECOND_NS: i64 = 1_000_000_000;

/// Who asks: user and group as file systems see them (`fsuid`, `fsgid`), in the mount's user namespace.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Caller {
    pub uid: u32,
    pub gid: u32,
    /// As the mount's process namespace numbers it; 0 for one that is not in there.
    pub thread: u32,
}

/// A request with what every request carries.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    /// Names this request towards the kernel until it is answered.
    pub unique: u64,
    /// The inode that it is about; 0 where it is about none.
    pub node: u64,
    pub caller: Caller,
    pub operation: Operation<'a>,
}

/// What is asked for. Names are without their terminating zero; `fh` is what OPEN or OPENDIR answered.
///
/// - `Statx`: GETATTR with the time of birth.
/// - `Read`: with `is_kept` the kernel keeps what it gets, in pages.
/// - `Mknod`, and what else makes something: `mode` with the file's type; the caller's umask may have been applied.
/// - `Link`: another name for `inode`, in the directory that the request is about.
/// - `Rename`, `Setxattr`, `Fallocate`, `Lseek`: `flags`, `mode` and `whence` as of renameat2(2), setxattr(2),
///   fallocate(2) and, for SEEK_DATA and SEEK_HOLE, lseek(2).
/// - `Setxattr`: with `clears_set_group_id` it is an access list, and the caller is not in the file's group.
/// - `Create`, `Tmpfile`: make a regular file and open it, the latter without a name in a directory (O_TMPFILE).
/// - `Setlk`: with `wait`, for as long as somebody else has it locked.
/// - `Write`: `flags` as of open(2), as the file has them now. With `kill_privileges` set-user-ID and the like are to
///   go: the writer may not keep them. `writer` is as FLUSH names whoever closes; there is none where pages are
///   written: with it, the kernel's pages are not.
/// - `Flush`: a descriptor is closed, one of several, perhaps; locks of fcntl(2) of `lock_owner` end with that.
/// - `CopyFileRange`: bytes of one open file to another, or to elsewhere in the same.
/// - `Unsupported`: what this file system leaves to the kernel, or that is newer than it.
#[derive(Clone, Copy, Debug)]
pub enum Operation<'a> {
    Init { major: u32, minor: u32, max_readahead: u32, flags: u64 },
    Destroy,
    Interrupt { unique: u64 },
    Forget { nlookup: u64 },
    BatchForget(Forgets<'a>),
    Lookup { name: &'a [u8] },
    Getattr,
    Statx,
    Readlink,
    Open { flags: u32 },
    Read { fh: u64, offset: u64, size: u32, is_kept: bool },
    Release { fh: u64 },
    Opendir,
    Readdir { fh: u64, offset: u64, size: u32 },
    Readdirplus { fh: u64, offset: u64, size: u32 },
    Releasedir { fh: u64 },
    Statfs,
    Access { mask: u32 },
    Getxattr { name: &'a [u8], size: u32 },
    Listxattr { size: u32 },
    Mknod { name: &'a [u8], mode: u32, umask: u32, rdev: u32 },
    Mkdir { name: &'a [u8], mode: u32, umask: u32 },
    Symlink { name: &'a [u8], target: &'a [u8] },
    Link { inode: u64, name: &'a [u8] },
    Unlink { name: &'a [u8] },
    Rmdir { name: &'a [u8] },
    Rename { name: &'a [u8], new_parent: u64, new_name: &'a [u8], flags: u32 },
    Setattr(NewAttributes),
    Setxattr { name: &'a [u8], value: &'a [u8], flags: u32, clears_set_group_id: bool },
    Removexattr { name: &'a [u8] },
    Create { name: &'a [u8], mode: u32, umask: u32, flags: u32 },
    Tmpfile { mode: u32, umask: u32, flags: u32 },
    Getlk(LockRequest),
    Setlk { request: LockRequest, wait: bool },
    Write { fh: u64, offset: u64, data: &'a [u8], flags: u32, kill_privileges: bool, writer: Option<u64> },
    Flush { fh: u64, lock_owner: u64 },
    Fsync { fh: u64 },
    Fsyncdir,
    Fallocate { fh: u64, offset: u64, length: u64, mode: u32 },
    Lseek { fh: u64, offset: u64, whence: u32 },
    CopyFileRange(CopyRange),
    Unsupported { opcode: u32 },
}

/// What a COPY_FILE_RANGE copies: from the file that the request is about. The kernel has cut it at that file's end,
/// and has seen to it that the two ranges do not overlap in one file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyRange {
    pub from_fh: u64,
    pub from: u64,
    pub to_fh: u64,
    pub to: u64,
    /// Bytes, of which fewer may be copied; never more than the answer can count.
    pub length: u64,
    pub count: CopyCount,
}

/// How the answer to a COPY_FILE_RANGE says how much was copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopyCount {
    Bits32,
    Bits64,
}

impl CopyRange {
    fn decode(body: &[u8], count: CopyCount) -> Option<Self> {
        let (copy, _) = take::<abi::CopyFileRangeIn>(body)?;
        let most = match count {
            CopyCount::Bits32 => u64::from(u32::MAX),
            CopyCount::Bits64 => u64::MAX,
        };
        let abi::CopyFileRangeIn { fh_in, off_in, fh_out, off_out, len, .. } = copy;
        Some(Self { from_fh: fh_in, from: off_in, to_fh: fh_out, to: off_out, length: len.min(most), count })
    }
}

/// A lock that is asked for, or about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LockRequest {
    pub fh: u64,
    /// A process; of flock(2) an open file description.
    pub owner: u64,
    pub lock: abi::FileLock,
    /// By flock(2) rather than fcntl(2).
    pub is_flock: bool,
}

impl LockRequest {
    fn decode(body: &[u8]) -> Option<Self> {
        let (ask, _) = take::<abi::LkIn>(body)?;
        Some(Self { fh: ask.fh, owner: ask.owner, lock: ask.lock, is_flock: ask.lk_flags & abi::lk::FLOCK != 0 })
    }
}

/// What a SETATTR sets; the rest stays.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NewAttributes {
    /// Permission bits (07777).
    pub mode: Option<u32>,
    pub uid: Option<u32>,
    pub gid: Option<u32>,
    pub size: Option<u64>,
    pub atime: Option<NewTime>,
    pub mtime: Option<NewTime>,
    /// Set-user-ID and the like are to go: the file is cut by somebody who may not keep them.
    pub kill_privileges: bool,
    /// Who cuts a file, as FLUSH names whoever closes it; not always sent.
    pub writer: Option<u64>,
}

/// A time to be set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NewTime {
    Now,
    /// Nanoseconds since the epoch.
    At(i64),
    /// Before 1678 or after 2262: more nanoseconds than are kept.
    OutOfRange,
}

impl NewAttributes {
    fn new(set: &abi::SetattrIn) -> Self {
        let has = |flag| set.valid & flag != 0;
        let time = |flag, now, seconds: u64, nanoseconds: u32| {
            let at = || seconds.cast_signed().checked_mul(SECOND_NS)?.checked_add(i64::from(nanoseconds));
            has(flag).then(|| if has(now) { NewTime::Now } else { at().map_or(NewTime::OutOfRange, NewTime::At) })
        };
        Self {
            mode: has(fattr::MODE).then_some(set.mode & 0o7777),
            uid: has(fattr::UID).then_some(set.uid),
            gid: has(fattr::GID).then_some(set.gid),
            size: has(fattr::SIZE).then_some(set.size),
            atime: time(fattr::ATIME, fattr::ATIME_NOW, set.atime, set.atimensec),
            mtime: time(fattr::MTIME, fattr::MTIME_NOW, set.mtime, set.mtimensec),
            kill_privileges: has(fattr::KILL_SUIDGID),
            writer: has(fattr::LOCKOWNER).then_some(set.lock_owner),
        }
    }
}

/// A request that is shorter than its kind demands, or whose name has no end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Malformed {
    /// To answer it with; `None` when not even the header is there.
    pub unique: Option<u64>,
    pub opcode: u32,
}

/// The inodes of one BATCH_FORGET.
#[derive(Clone, Copy, Debug)]
pub struct Forgets<'a>(&'a [u8]);

impl Forgets<'_> {
    /// Each inode with the number of lookups to forget.
    pub fn iter(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.0.chunks_exact(size_of::<abi::ForgetOne>()).filter_map(|bytes| {
            let one = abi::ForgetOne::read_from_bytes(bytes).ok()?;
            Some((one.node, one.nlookup))
        })
    }
}

impl<'a> Request<'a> {
    /// Decodes what one read of the device returned.
    pub fn decode(bytes: &'a [u8]) -> Result<Self, Malformed> {
        let (header, rest) = InHeader::read_from_prefix(bytes).map_err(|_| Malformed { unique: None, opcode: 0 })?;
        let malformed = Malformed { unique: Some(header.unique), opcode: header.opcode };
        let body = (header.len as usize)
            .checked_sub(size_of::<InHeader>())
            .and_then(|length| length.checked_sub(usize::from(header.total_extlen) * 8))
            .and_then(|length| rest.get(..length))
            .ok_or(malformed)?;
        let operation = Operation::decode(header.opcode, body).ok_or(malformed)?;
        let caller = Caller { uid: header.uid, gid: header.gid, thread: header.pid };
        Ok(Self { unique: header.unique, node: header.node, caller, operation })
    }
}

impl<'a> Operation<'a> {
    fn decode(number: u32, body: &'a [u8]) -> Option<Self> {
        Some(match number {
            opcode::INIT => Self::init(body)?,
            opcode::DESTROY => Self::Destroy,
            opcode::INTERRUPT => Self::Interrupt { unique: take::<abi::InterruptIn>(body)?.0.unique },
            opcode::FORGET => Self::Forget { nlookup: take::<abi::ForgetIn>(body)?.0.nlookup },
            opcode::BATCH_FORGET => {
                let (head, rest) = take::<abi::BatchForgetIn>(body)?;
                let length = (head.count as usize).checked_mul(size_of::<abi::ForgetOne>())?;
                Self::BatchForget(Forgets(rest.get(..length)?))
            }
            opcode::LOOKUP => Self::Lookup { name: name(body)? },
            opcode::GETATTR => take::<abi::GetattrIn>(body).map(|_| Self::Getattr)?,
            opcode::STATX => take::<abi::StatxIn>(body).map(|_| Self::Statx)?,
            opcode::READLINK => Self::Readlink,
            opcode::OPEN => Self::Open { flags: take::<abi::OpenIn>(body)?.0.flags },
            opcode::READ => {
                let read = take::<abi::ReadIn>(body)?.0;
                let is_kept = read.read_flags & abi::read::LOCKOWNER == 0;
                Self::Read { fh: read.fh, offset: read.offset, size: read.size, is_kept }
            }
            opcode::RELEASE => Self::Release { fh: take::<abi::ReleaseIn>(body)?.0.fh },
            opcode::OPENDIR => take::<abi::OpenIn>(body).map(|_| Self::Opendir)?,
            opcode::READDIR => {
                let read = take::<abi::ReadIn>(body)?.0;
                Self::Readdir { fh: read.fh, offset: read.offset, size: read.size }
            }
            opcode::READDIRPLUS => {
                let read = take::<abi::ReadIn>(body)?.0;
                Self::Readdirplus { fh: read.fh, offset: read.offset, size: read.size }
            }
            opcode::RELEASEDIR => Self::Releasedir { fh: take::<abi::ReleaseIn>(body)?.0.fh },
            opcode::STATFS => Self::Statfs,
            opcode::ACCESS => Self::Access { mask: take::<abi::AccessIn>(body)?.0.mask },
            opcode::GETXATTR => {
                let (head, rest) = take::<abi::GetxattrIn>(body)?;
                Self::Getxattr { name: name(rest)?, size: head.size }
            }
            opcode::LISTXATTR => Self::Listxattr { size: take::<abi::GetxattrIn>(body)?.0.size },
            opcode::SETATTR => Self::Setattr(NewAttributes::new(&take::<abi::SetattrIn>(body)?.0)),
            opcode::SYMLINK => {
                let (link, rest) = split_name(body)?;
                Self::Symlink { name: link, target: name(rest)? }
            }
            opcode::MKNOD => {
                let (head, rest) = take::<abi::MknodIn>(body)?;
                Self::Mknod { name: name(rest)?, mode: head.mode, umask: head.umask, rdev: head.rdev }
            }
            opcode::MKDIR => {
                let (head, rest) = take::<abi::MkdirIn>(body)?;
                Self::Mkdir { name: name(rest)?, mode: head.mode, umask: head.umask }
            }
            opcode::UNLINK => Self::Unlink { name: name(body)? },
            opcode::RMDIR => Self::Rmdir { name: name(body)? },
            opcode::RENAME => {
                let (head, rest) = take::<abi::RenameIn>(body)?;
                Self::rename(head.newdir, 0, rest)?
            }
            opcode::RENAME2 => {
                let (head, rest) = take::<abi::Rename2In>(body)?;
                Self::rename(head.newdir, head.flags, rest)?
            }
            opcode::LINK => {
                let (head, rest) = take::<abi::LinkIn>(body)?;
                Self::Link { inode: head.oldnode, name: name(rest)? }
            }
            opcode::SETXATTR => {
                let (head, rest) = take::<abi::SetxattrIn>(body)?;
                // Older kernels have the name here. No name begins with such a byte: it would be in no name space.
                let (more, rest) = match rest.first() {
                    Some(..b' ') => take::<abi::SetxattrInExtension>(rest)?,
                    _ => (abi::SetxattrInExtension::default(), rest),
                };
                let (attribute, rest) = split_name(rest)?;
                let clears_set_group_id = more.setxattr_flags & abi::setxattr::ACL_KILL_SGID != 0;
                let value = rest.get(..head.size as usize)?;
                Self::Setxattr { name: attribute, value, flags: head.flags, clears_set_group_id }
            }
            opcode::REMOVEXATTR => Self::Removexattr { name: name(body)? },
            opcode::CREATE => {
                let (head, rest) = take::<abi::CreateIn>(body)?;
                Self::Create { name: name(rest)?, mode: head.mode, umask: head.umask, flags: head.flags }
            }
            opcode::TMPFILE => {
                // What stands in the place of a name says nothing.
                let head = take::<abi::CreateIn>(body)?.0;
                Self::Tmpfile { mode: head.mode, umask: head.umask, flags: head.flags }
            }
            opcode::WRITE => {
                let (head, rest) = take::<abi::WriteIn>(body)?;
                let data = rest.get(..head.size as usize)?;
                let kill_privileges = head.write_flags & abi::write::KILL_SUIDGID != 0;
                let writer = (head.write_flags & abi::write::LOCKOWNER != 0).then_some(head.lock_owner);
                Self::Write { fh: head.fh, offset: head.offset, data, flags: head.flags, kill_privileges, writer }
            }
            opcode::FLUSH => {
                let flush = take::<abi::FlushIn>(body)?.0;
                Self::Flush { fh: flush.fh, lock_owner: flush.lock_owner }
            }
            opcode::GETLK => Self::Getlk(LockRequest::decode(body)?),
            opcode::SETLK | opcode::SETLKW => {
                Self::Setlk { request: LockRequest::decode(body)?, wait: number == opcode::SETLKW }
            }
            opcode::FSYNC => Self::Fsync { fh: take::<abi::FsyncIn>(body)?.0.fh },
            opcode::FSYNCDIR => Self::Fsyncdir,
            opcode::FALLOCATE => {
                let allocate = take::<abi::FallocateIn>(body)?.0;
                let (fh, offset) = (allocate.fh, allocate.offset);
                Self::Fallocate { fh, offset, length: allocate.length, mode: allocate.mode }
            }
            opcode::LSEEK => {
                let seek = take::<abi::LseekIn>(body)?.0;
                Self::Lseek { fh: seek.fh, offset: seek.offset, whence: seek.whence }
            }
            opcode::COPY_FILE_RANGE => Self::CopyFileRange(CopyRange::decode(body, CopyCount::Bits32)?),
            opcode::COPY_FILE_RANGE_64 => Self::CopyFileRange(CopyRange::decode(body, CopyCount::Bits64)?),
            _ => Self::Unsupported { opcode: number },
        })
    }

    fn rename(new_parent: u64, flags: u32, names: &'a [u8]) -> Option<Self> {
        let (old, rest) = split_name(names)?;
        Some(Self::Rename { name: old, new_parent, new_name: name(rest)?, flags })
    }

    fn init(body: &'a [u8]) -> Option<Self> {
        let (head, rest) = take::<abi::InitIn>(body)?;
        let mut flags = u64::from(head.flags);
        if flags & abi::init::INIT_EXT != 0 {
            flags |= u64::from(take::<abi::InitInExtension>(rest)?.0.flags2) << 32;
        }
        Some(Self::Init { major: head.major, minor: head.minor, max_readahead: head.max_readahead, flags })
    }
}

fn take<T: FromBytes>(body: &[u8]) -> Option<(T, &[u8])> {
    T::read_from_prefix(body).ok()
}

fn name(body: &[u8]) -> Option<&[u8]> {
    Some(split_name(body)?.0)
}

/// A name, and what follows its terminating zero.
fn split_name(body: &[u8]) -> Option<(&[u8], &[u8])> {
    let end = body.iter().position(|byte| *byte == 0)?;
    Some((&body[..end], &body[end + 1..]))
}

#[cfg(test)]
mod tests;
