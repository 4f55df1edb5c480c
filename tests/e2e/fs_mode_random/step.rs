//! One thing that a program does.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use rand::rngs::StdRng;
use rand::{Rng, RngCore};
use rustix::fs::{
    AtFlags, CWD, FallocateFlags, FileType, Gid, Mode, OFlags, RenameFlags, SeekFrom, Timespec, Timestamps, Uid,
    XattrFlags,
};
use rustix::io::Errno;

use super::tree::{hash, kind_of};

const HANDLES: usize = 4;
/// Of files and directories: few, so that most operations meet something.
pub const NAMES: [&str; 4] = ["a", "b", "c", "d"];
const MIB: u64 = 1 << 20;

/// What is open, whatever has become of its names since.
pub type Handles = [Option<File>; HANDLES];

/// What an operation answered: 0 or an errno, and what else it returned.
pub type Answer = (i32, String);

/// Files are identified by a path or by a handle.
#[derive(Debug)]
pub enum Step {
    Open(usize, PathBuf, OFlags, u32),
    Close(usize),
    /// At an offset, or where the handle is.
    Write(usize, Option<u64>, Vec<u8>),
    Read(usize, u64, usize),
    Truncate(usize, u64),
    TruncatePath(PathBuf, u64),
    Allocate(usize, u64, u64, FallocateFlags),
    Copy(usize, u64, usize, u64, usize),
    Seek(usize, u64),
    Sync(usize, bool),
    MapWrite(usize, u64, Vec<u8>),
    MapRead(usize, u64, usize),
    StatHandle(usize),
    ChmodHandle(usize, u32),
    UtimesHandle(usize, i64),
    SetXattrHandle(usize, u8, usize),
    Mkdir(PathBuf, u32),
    Mknod(PathBuf, u32, FileType),
    Symlink(PathBuf, PathBuf),
    Link(PathBuf, PathBuf),
    Unlink(PathBuf),
    Rmdir(PathBuf),
    Rename(PathBuf, PathBuf, RenameFlags),
    Chmod(PathBuf, u32),
    Chown(PathBuf, u32, u32),
    Utimes(PathBuf, i64, i64),
    SetXattr(PathBuf, u8, usize, XattrFlags),
    GetXattr(PathBuf, u8),
    RemoveXattr(PathBuf, u8),
    Readlink(PathBuf),
    Stat(PathBuf),
    List(PathBuf),
}

fn path(random: &mut StdRng) -> PathBuf {
    let depth = [1, 1, 1, 1, 2, 2, 2, 3][random.random_range(0..8)];
    (0..depth).map(|_| NAMES[random.random_range(0..NAMES.len())]).collect()
}

/// Borders of blocks and of pages matter most.
fn offset(random: &mut StdRng) -> u64 {
    match random.random_range(0..5) {
        0 => random.random_range(0..4) * MIB,
        1 => (random.random_range(1..4) * MIB).saturating_sub(random.random_range(0..10_000)),
        2 => random.random_range(0..20) * 4096,
        3 => random.random_range(0..50_000),
        _ => random.random_range(0..3 * MIB),
    }
}

fn length(random: &mut StdRng) -> usize {
    match random.random_range(0..8) {
        0 => random.random_range(0..10),
        1 => random.random_range(0..300_000),
        _ => random.random_range(0..20_000),
    }
}

fn noise(random: &mut StdRng) -> Vec<u8> {
    let mut bytes = vec![0; length(random)];
    random.fill_bytes(&mut bytes);
    bytes
}

impl Step {
    pub fn random(random: &mut StdRng) -> Self {
        let handle = random.random_range(0..HANDLES);
        match random.random_range(0..70) {
            0..=9 | 64 | 65 => {
                // No opening waits for the other end of a FIFO.
                let mut flags = OFlags::NONBLOCK | OFlags::CLOEXEC;
                flags |= [OFlags::RDONLY, OFlags::WRONLY, OFlags::RDWR, OFlags::RDWR][random.random_range(0..4)];
                if random.random_range(0..4) > 0 {
                    flags |= OFlags::CREATE;
                }
                for (flag, one_in) in [
                    (OFlags::EXCL, 8),
                    (OFlags::TRUNC, 8),
                    (OFlags::APPEND, 5),
                    (OFlags::NOFOLLOW, 8),
                    (OFlags::DIRECTORY, 20),
                    (OFlags::SYNC, 12),
                ] {
                    if random.random_range(0..one_in) == 0 {
                        flags |= flag;
                    }
                }
                // Both at once were refused by later kernels only; without CREATE, EXCL says nothing.
                if flags.contains(OFlags::CREATE) {
                    flags -= OFlags::DIRECTORY;
                } else {
                    flags -= OFlags::EXCL;
                }
                Self::Open(handle, path(random), flags, random.random_range(0..0o1000) | 0o600)
            }
            10 => Self::Close(handle),
            11..=17 => Self::Write(handle, random.random_bool(0.8).then(|| offset(random)), noise(random)),
            18..=22 => Self::Read(handle, offset(random), length(random)),
            23 | 24 => Self::Truncate(handle, offset(random)),
            25 => Self::TruncatePath(path(random), offset(random)),
            26 | 27 => {
                let modes = [
                    FallocateFlags::empty(),
                    FallocateFlags::KEEP_SIZE,
                    FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE,
                    FallocateFlags::ZERO_RANGE,
                    FallocateFlags::ZERO_RANGE | FallocateFlags::KEEP_SIZE,
                ];
                let mode = modes[random.random_range(0..modes.len())];
                Self::Allocate(handle, offset(random), length(random) as u64, mode)
            }
            28 | 66..=69 => {
                let to = random.random_range(0..HANDLES);
                Self::Copy(handle, offset(random), to, offset(random), length(random))
            }
            29 => Self::Seek(handle, offset(random)),
            30 => Self::Sync(handle, random.random()),
            31 | 32 => Self::MapWrite(handle, offset(random), noise(random)),
            33 => Self::MapRead(handle, offset(random), length(random)),
            34 => Self::StatHandle(handle),
            35 => Self::ChmodHandle(handle, random.random_range(0..0o1000) | 0o700),
            36 => Self::UtimesHandle(handle, random.random_range(0..1_000_000)),
            37 => Self::SetXattrHandle(handle, random.random_range(0..3), random.random_range(0..200)),
            38..=41 => Self::Mkdir(path(random), random.random_range(0..0o1000) | 0o700),
            42 => {
                let kind = if random.random() { FileType::Fifo } else { FileType::RegularFile };
                Self::Mknod(path(random), random.random_range(0..0o1000) | 0o600, kind)
            }
            43 => {
                // Never above the top, where the two sides differ.
                Self::Symlink(path(random), path(random))
            }
            44 | 45 => Self::Link(path(random), path(random)),
            46 | 47 => Self::Unlink(path(random)),
            48 => Self::Rmdir(path(random)),
            49..=52 => {
                let modes = [RenameFlags::empty(), RenameFlags::empty(), RenameFlags::NOREPLACE, RenameFlags::EXCHANGE];
                Self::Rename(path(random), path(random), modes[random.random_range(0..4)])
            }
            53 => Self::Chmod(path(random), random.random_range(0..0o10000) | 0o700),
            54 => Self::Chown(path(random), random.random_range(0..3), random.random_range(0..3)),
            55 => {
                Self::Utimes(path(random), random.random_range(-1000..1_000_000), random.random_range(0..1_000_000_000))
            }
            56 => {
                let modes = [XattrFlags::empty(), XattrFlags::CREATE, XattrFlags::REPLACE];
                let mode = modes[random.random_range(0..3)];
                Self::SetXattr(path(random), random.random_range(0..3), random.random_range(0..200), mode)
            }
            57 => Self::GetXattr(path(random), random.random_range(0..3)),
            58 => Self::RemoveXattr(path(random), random.random_range(0..3)),
            59 => Self::Readlink(path(random)),
            60 | 61 => Self::Stat(path(random)),
            _ => Self::List(path(random)),
        }
    }

    pub fn run(&self, top: &Path, handles: &mut Handles) -> Answer {
        match self.result(top, handles) {
            Ok(returned) => (0, returned),
            Err(error) => (error.raw_os_error().unwrap_or(-1), String::new()),
        }
    }

    fn result(&self, top: &Path, handles: &mut Handles) -> io::Result<String> {
        let at = |path: &Path| top.join(path);
        let open =
            |handle: &usize| handles[*handle].as_ref().ok_or(io::Error::from_raw_os_error(Errno::BADF.raw_os_error()));
        let nothing = |()| String::new();
        match self {
            Self::Open(handle, path, flags, mode) => {
                handles[*handle] = None;
                let opened = rustix::fs::openat(CWD, at(path), *flags, Mode::from_raw_mode(*mode))?;
                handles[*handle] = Some(File::from(opened));
                Ok(String::new())
            }
            Self::Close(handle) => {
                handles[*handle] = None;
                Ok(String::new())
            }
            Self::Write(handle, Some(offset), bytes) => Ok(open(handle)?.write_at(bytes, *offset)?.to_string()),
            Self::Write(handle, None, bytes) => Ok(open(handle)?.write(bytes)?.to_string()),
            Self::Read(handle, offset, length) => {
                let mut bytes = vec![0; *length];
                let read = open(handle)?.read_at(&mut bytes, *offset)?;
                Ok(format!("{read} {:x}", hash(&bytes[..read])))
            }
            Self::Truncate(handle, length) => Ok(nothing(rustix::fs::ftruncate(open(handle)?, *length)?)),
            Self::TruncatePath(path, length) => {
                // truncate(2), which a FIFO refuses without being opened.
                let file = rustix::fs::openat(CWD, at(path), OFlags::WRONLY | OFlags::NONBLOCK, Mode::empty())?;
                Ok(nothing(rustix::fs::ftruncate(file, *length)?))
            }
            Self::Allocate(handle, offset, length, mode) => {
                Ok(nothing(rustix::fs::fallocate(open(handle)?, *mode, *offset, *length)?))
            }
            Self::Copy(from, from_offset, to, to_offset, length) => {
                copy(open(from)?, *from_offset, open(to)?, *to_offset, *length).map(|copied| copied.to_string())
            }
            Self::Seek(handle, offset) => seek(open(handle)?, *offset).map(nothing),
            Self::Sync(handle, true) => open(handle)?.sync_data().map(nothing),
            Self::Sync(handle, false) => open(handle)?.sync_all().map(nothing),
            Self::MapWrite(handle, offset, bytes) => {
                map(open(handle)?, *offset, bytes.len(), Some(bytes)).map(|mapped| mapped.len().to_string())
            }
            Self::MapRead(handle, offset, length) => {
                map(open(handle)?, *offset, *length, None).map(|mapped| format!("{:x}", hash(&mapped)))
            }
            Self::StatHandle(handle) => open(handle)?.metadata().map(|data| shown(&data)),
            Self::ChmodHandle(handle, mode) => {
                Ok(nothing(rustix::fs::fchmod(open(handle)?, Mode::from_raw_mode(*mode))?))
            }
            Self::UtimesHandle(handle, seconds) => {
                let file = open(handle)?;
                rustix::fs::futimens(file, &times(*seconds, 7))?;
                file.metadata().map(|data| format!("{} {}", data.mtime(), data.mtime_nsec()))
            }
            Self::SetXattrHandle(handle, name, length) => {
                let value = vec![b'h'; *length];
                Ok(nothing(rustix::fs::fsetxattr(open(handle)?, format!("user.{name}"), &value, XattrFlags::empty())?))
            }
            Self::Mkdir(path, mode) => Ok(nothing(rustix::fs::mkdirat(CWD, at(path), Mode::from_raw_mode(*mode))?)),
            Self::Mknod(path, mode, kind) => {
                Ok(nothing(rustix::fs::mknodat(CWD, at(path), *kind, Mode::from_raw_mode(*mode), 0)?))
            }
            Self::Symlink(target, path) => Ok(nothing(rustix::fs::symlinkat(target, CWD, at(path))?)),
            Self::Link(from, to) => Ok(nothing(rustix::fs::linkat(CWD, at(from), CWD, at(to), AtFlags::empty())?)),
            Self::Unlink(path) => Ok(nothing(rustix::fs::unlinkat(CWD, at(path), AtFlags::empty())?)),
            Self::Rmdir(path) => Ok(nothing(rustix::fs::unlinkat(CWD, at(path), AtFlags::REMOVEDIR)?)),
            Self::Rename(from, to, mode) => Ok(nothing(rustix::fs::renameat_with(CWD, at(from), CWD, at(to), *mode)?)),
            Self::Chmod(path, mode) => {
                Ok(nothing(rustix::fs::chmodat(CWD, at(path), Mode::from_raw_mode(*mode), AtFlags::empty())?))
            }
            Self::Chown(path, uid, gid) => {
                let (uid, gid) = (Some(Uid::from_raw(*uid)), Some(Gid::from_raw(*gid)));
                Ok(nothing(rustix::fs::chownat(CWD, at(path), uid, gid, AtFlags::SYMLINK_NOFOLLOW)?))
            }
            Self::Utimes(path, seconds, nanoseconds) => {
                rustix::fs::utimensat(CWD, at(path), &times(*seconds, *nanoseconds), AtFlags::SYMLINK_NOFOLLOW)?;
                let data = at(path).symlink_metadata()?;
                Ok(format!("{:?}", (data.mtime(), data.mtime_nsec(), data.atime(), data.atime_nsec())))
            }
            Self::SetXattr(path, name, length, mode) => {
                let value = vec![b'v'; *length];
                Ok(nothing(rustix::fs::lsetxattr(at(path), format!("user.{name}"), &value, *mode)?))
            }
            Self::GetXattr(path, name) => {
                let mut value = [0u8; 150];
                let length = rustix::fs::lgetxattr(at(path), format!("user.{name}"), &mut value[..])?;
                Ok(format!("{:?}", &value[..length]))
            }
            Self::RemoveXattr(path, name) => Ok(nothing(rustix::fs::lremovexattr(at(path), format!("user.{name}"))?)),
            Self::Readlink(path) => Ok(format!("{:?}", fs::read_link(at(path))?)),
            Self::Stat(path) => at(path).symlink_metadata().map(|data| shown(&data)),
            Self::List(path) => {
                let mut names: Vec<_> = fs::read_dir(at(path))?.map(|entry| entry.unwrap().file_name()).collect();
                names.sort();
                Ok(format!("{names:?}"))
            }
        }
    }
}

fn times(seconds: i64, nanoseconds: i64) -> Timestamps {
    let time = Timespec { tv_sec: seconds, tv_nsec: nanoseconds };
    Timestamps { last_access: time, last_modification: time }
}

fn shown(data: &fs::Metadata) -> String {
    let size = if data.is_dir() { 0 } else { data.len() };
    format!(
        "{} {:o} {} {} {} {size}",
        kind_of(data.file_type()),
        data.mode() & 0o7777,
        data.uid(),
        data.gid(),
        data.nlink()
    )
}

/// copy_file_range(2) until nothing is left.
fn copy(from: &File, mut from_offset: u64, to: &File, mut to_offset: u64, length: usize) -> io::Result<usize> {
    let mut copied = 0;
    while copied < length {
        let more =
            rustix::fs::copy_file_range(from, Some(&mut from_offset), to, Some(&mut to_offset), length - copied)?;
        if more == 0 {
            break;
        }
        copied += more;
    }
    Ok(copied)
}

/// Where data and holes are is for the file system to say, but a hole is zeros, and the end is one.
fn seek(file: &File, offset: u64) -> io::Result<()> {
    let size = file.metadata()?.len();
    if !file.metadata()?.is_file() {
        return Ok(());
    }
    let data = match rustix::fs::seek(file, SeekFrom::Data(offset)) {
        Err(Errno::NXIO) if offset < size => size,
        data => data?,
    };
    assert!((offset..=size).contains(&data), "data at {data} of {size}, from {offset}");
    let mut hole = vec![1; (data - offset) as usize];
    // A handle that may not read cannot look.
    if file.read_exact_at(&mut hole, offset).is_ok() {
        assert!(hole.iter().all(|byte| *byte == 0), "what is said to be a hole is none: {offset} to {data}");
    }
    let hole = rustix::fs::seek(file, SeekFrom::Hole(offset))?;
    assert!((offset..=size).contains(&hole), "a hole at {hole} of {size}, from {offset}");
    // Where the handle is decides where the next write goes.
    rustix::fs::seek(file, SeekFrom::Start(0))?;
    Ok(())
}

/// Reads what lies within a file through a shared mapping, and writes there before if asked to.
fn map(file: &File, offset: u64, length: usize, write: Option<&Vec<u8>>) -> io::Result<Vec<u8>> {
    use rustix::mm::{MapFlags, MsyncFlags, ProtFlags};

    let data = file.metadata()?;
    let length = (data.len().saturating_sub(offset) as usize).min(length);
    if !data.is_file() || length == 0 {
        return Ok(Vec::new());
    }
    let start = offset / 4096 * 4096;
    let skipped = (offset - start) as usize;
    let protection = if write.is_some() { ProtFlags::READ | ProtFlags::WRITE } else { ProtFlags::READ };
    // SAFETY: the file is not cut while it is mapped, and nobody else looks at this memory.
    #[expect(unsafe_code, reason = "a mapping is what is tested")]
    unsafe {
        let size = skipped + length;
        let mapped = rustix::mm::mmap(std::ptr::null_mut(), size, protection, MapFlags::SHARED, file, start)?;
        let bytes = mapped.cast::<u8>().add(skipped);
        if let Some(written) = write {
            std::ptr::copy_nonoverlapping(written.as_ptr(), bytes, length);
            rustix::mm::msync(mapped, size, MsyncFlags::SYNC)?;
        }
        let seen = std::slice::from_raw_parts(bytes, length).to_vec();
        rustix::mm::munmap(mapped, size)?;
        Ok(seen)
    }
}
