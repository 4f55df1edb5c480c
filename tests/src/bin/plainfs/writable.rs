//! The operations of a directory that is written, too. An inode is a descriptor (`O_PATH`), as in libfuse's example
//! `passthrough_hp`: it follows renames, and its number cannot become another file's before the kernel forgets it. So
//! the kernel may know as many inodes as this process may have descriptors.
//!
//! Each request is answered on the thread that read it, by the calls of the directory beneath, in which nobody else
//! changes anything. What is not here (FLUSH, extended attributes, locks) is answered `ENOSYS`: the kernel asks for it
//! once, and then does without.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ffi::{OsStr, OsString};
use std::fs::{File, OpenOptions, Permissions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirEntryExt, FileExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{SystemTime, UNIX_EPOCH};

use fuser::{
    BsdFileFlags, CopyFileRangeFlags, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo,
    InitFlags, KernelConfig, LockOwner, OpenFlags, RenameFlags, ReplyAttr, ReplyCreate, ReplyData, ReplyDirectory,
    ReplyDirectoryPlus, ReplyEmpty, ReplyEntry, ReplyOpen, ReplyStatfs, ReplyWrite, Request, TimeOrNow, WriteFlags,
};
use rustix::fs::{AtFlags, Gid, Mode, OFlags, Timespec, Timestamps, UTIME_NOW, UTIME_OMIT, Uid};

use crate::answer::{TIMEOUT, answer_read, attributes, greet};
use crate::handles::Handles;

type Listing = Vec<(OsString, INodeNo, FileType)>;

/// A directory of this host, of one file system.
pub struct Writable {
    inodes: RwLock<HashMap<INodeNo, Inode>>,
    files: Handles<File>,
    listings: Handles<Listing>,
    device: u64,
    drop_pages: bool,
}

struct Inode {
    descriptor: Arc<File>,
    /// How often the kernel was told of it.
    lookups: u64,
}

impl Writable {
    /// Shows `source`; `drop_pages`: the kernel forgets a file's pages at each open. The mask of the process must be
    /// empty: the kernel has applied that of the caller.
    pub fn new(source: PathBuf, drop_pages: bool) -> io::Result<Self> {
        let root = File::from(rustix::fs::open(source, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?);
        let device = root.metadata()?.dev();
        let root = Inode { descriptor: Arc::new(root), lookups: 1 };
        Ok(Self {
            inodes: RwLock::new(HashMap::from([(INodeNo::ROOT, root)])),
            files: Handles::default(),
            listings: Handles::default(),
            device,
            drop_pages,
        })
    }

    fn inode(&self, ino: INodeNo) -> io::Result<Arc<File>> {
        let inodes = self.inodes.read().unwrap_or_else(PoisonError::into_inner);
        inodes.get(&ino).map(|inode| Arc::clone(&inode.descriptor)).ok_or(rustix::io::Errno::STALE.into())
    }

    fn file(&self, fh: FileHandle) -> io::Result<Arc<File>> {
        self.files.get(fh).ok_or(rustix::io::Errno::BADF.into())
    }

    /// What stands behind a name; the kernel is told of it, and will forget it once more.
    fn enter(&self, parent: &File, name: &OsStr) -> io::Result<FileAttr> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let descriptor = File::from(rustix::fs::openat(parent, name, flags, Mode::empty())?);
        let metadata = descriptor.metadata()?;
        if metadata.dev() != self.device {
            return Err(rustix::io::Errno::XDEV.into());
        }
        let attr = attributes(&metadata);
        match self.inodes.write().unwrap_or_else(PoisonError::into_inner).entry(attr.ino) {
            Entry::Occupied(mut known) => known.get_mut().lookups += 1,
            Entry::Vacant(new) => {
                new.insert(Inode { descriptor: Arc::new(descriptor), lookups: 1 });
            }
        }
        Ok(attr)
    }

    fn leave(&self, ino: INodeNo, lookups: u64) {
        let mut inodes = self.inodes.write().unwrap_or_else(PoisonError::into_inner);
        let Some(inode) = inodes.get_mut(&ino) else { return };
        inode.lookups = inode.lookups.saturating_sub(lookups);
        if inode.lookups == 0 && ino != INodeNo::ROOT {
            let closed = inodes.remove(&ino);
            // The last descriptor of a file that has no name: the disk frees it now.
            drop(inodes);
            drop(closed);
        }
    }

    /// Makes a name for the caller, who owns what it leads to.
    fn make<T>(
        &self,
        req: &Request,
        parent: INodeNo,
        name: &OsStr,
        create: impl FnOnce(&File) -> rustix::io::Result<T>,
    ) -> io::Result<(FileAttr, T)> {
        let parent = self.inode(parent)?;
        let made = create(&parent)?;
        let mut attr = self.enter(&parent, name)?;
        let (uid, gid) = (rustix::process::getuid().as_raw(), rustix::process::getgid().as_raw());
        // Another group than ours is that of the directory, which has the set-group-ID bit.
        let wanted = (req.uid(), if attr.gid == gid { req.gid() } else { attr.gid });
        if attr.uid == uid && wanted != (attr.uid, attr.gid) {
            let (uid, gid) = (Uid::from_raw(wanted.0), Gid::from_raw(wanted.1));
            rustix::fs::chownat(&parent, name, Some(uid), Some(gid), AtFlags::SYMLINK_NOFOLLOW)
                .inspect_err(|_| self.leave(attr.ino, 1))?;
            (attr.uid, attr.gid) = wanted;
        }
        Ok((attr, made))
    }

    fn opened(&self) -> FopenFlags {
        if self.drop_pages { FopenFlags::empty() } else { FopenFlags::FOPEN_KEEP_CACHE }
    }
}

/// The inode's own path, whatever its names are.
fn path_of(inode: &File) -> PathBuf {
    format!("/proc/self/fd/{}", inode.as_raw_fd()).into()
}

/// Of the caller's flags, those that concern the file beneath: appends are placed by the kernel.
fn file_flags(flags: i32) -> OFlags {
    let wanted = OFlags::RWMODE | OFlags::TRUNC | OFlags::SYNC | OFlags::DSYNC;
    OFlags::from_bits_retain(flags.cast_unsigned()) & wanted | OFlags::CLOEXEC
}

fn open_file(inode: &File, flags: i32) -> io::Result<File> {
    Ok(File::from(rustix::fs::open(path_of(inode), file_flags(flags), Mode::empty())?))
}

fn names_in(directory: &File) -> io::Result<Listing> {
    path_of(directory)
        .read_dir()?
        .map(|entry| {
            let entry = entry?;
            let kind = FileType::from_std(entry.file_type()?).unwrap_or(FileType::RegularFile);
            Ok((entry.file_name(), INodeNo(entry.ino()), kind))
        })
        .collect()
}

fn timespec(time: Option<TimeOrNow>) -> Timespec {
    let (tv_sec, tv_nsec) = match time {
        None => (0, UTIME_OMIT),
        Some(TimeOrNow::Now) => (0, UTIME_NOW),
        Some(TimeOrNow::SpecificTime(time)) => since_epoch(time),
    };
    Timespec { tv_sec, tv_nsec }
}

/// Seconds, which may be negative, and the nanoseconds after them. Of a time before 1970, fuser 0.18 has taken the
/// nanoseconds off instead of adding them.
fn since_epoch(time: SystemTime) -> (i64, i64) {
    match time.duration_since(UNIX_EPOCH) {
        Ok(after) => (after.as_secs().cast_signed(), after.subsec_nanos().into()),
        Err(error) => {
            let before = error.duration();
            (-before.as_secs().cast_signed(), before.subsec_nanos().into())
        }
    }
}

fn answer_entry(reply: ReplyEntry, entry: io::Result<FileAttr>) {
    match entry {
        Ok(attr) => reply.entry(&TIMEOUT, &attr, Generation(0)),
        Err(error) => reply.error(error.into()),
    }
}

fn answer_attr(reply: ReplyAttr, ino: INodeNo, attr: io::Result<FileAttr>) {
    match attr {
        // The root has a number of its own.
        Ok(attr) => reply.attr(&TIMEOUT, &FileAttr { ino, ..attr }),
        Err(error) => reply.error(error.into()),
    }
}

fn answer_empty(reply: ReplyEmpty, done: io::Result<()>) {
    match done {
        Ok(()) => reply.ok(),
        Err(error) => reply.error(error.into()),
    }
}

fn answer_written(reply: ReplyWrite, written: io::Result<usize>) {
    match written {
        // No request has 4 GiB.
        Ok(written) => reply.written(u32::try_from(written).unwrap_or(u32::MAX)),
        Err(error) => reply.error(error.into()),
    }
}

impl Filesystem for Writable {
    fn init(&mut self, _req: &Request, config: &mut KernelConfig) -> io::Result<()> {
        greet(config);
        let _ = config.add_capabilities(InitFlags::FUSE_ATOMIC_O_TRUNC);
        Ok(())
    }

    fn lookup(&self, _req: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        answer_entry(reply, self.inode(parent).and_then(|parent| self.enter(&parent, name)));
    }

    fn forget(&self, _req: &Request, ino: INodeNo, lookups: u64) {
        self.leave(ino, lookups);
    }

    fn getattr(&self, _req: &Request, ino: INodeNo, _fh: Option<FileHandle>, reply: ReplyAttr) {
        answer_attr(reply, ino, self.inode(ino).and_then(|inode| Ok(attributes(&inode.metadata()?))));
    }

    fn setattr(
        &self,
        _req: &Request,
        ino: INodeNo,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
        size: Option<u64>,
        atime: Option<TimeOrNow>,
        mtime: Option<TimeOrNow>,
        _ctime: Option<SystemTime>,
        fh: Option<FileHandle>,
        _crtime: Option<SystemTime>,
        _chgtime: Option<SystemTime>,
        _bkuptime: Option<SystemTime>,
        _flags: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let set = || {
            let inode = self.inode(ino)?;
            if let Some(size) = size {
                match fh.and_then(|fh| self.files.get(fh)) {
                    Some(file) => file.set_len(size)?,
                    None => OpenOptions::new().write(true).open(path_of(&inode))?.set_len(size)?,
                }
            }
            if uid.is_some() || gid.is_some() {
                let (uid, gid) = (uid.map(Uid::from_raw), gid.map(Gid::from_raw));
                rustix::fs::chownat(&inode, "", uid, gid, AtFlags::EMPTY_PATH)?;
            }
            // After the owner, a change of which takes set-user-ID bits away.
            if let Some(mode) = mode {
                std::fs::set_permissions(path_of(&inode), Permissions::from_mode(mode & 0o7777))?;
            }
            if atime.is_some() || mtime.is_some() {
                let times = Timestamps { last_access: timespec(atime), last_modification: timespec(mtime) };
                rustix::fs::utimensat(&inode, "", &times, AtFlags::EMPTY_PATH)?;
            }
            Ok(attributes(&inode.metadata()?))
        };
        answer_attr(reply, ino, set());
    }

    fn readlink(&self, _req: &Request, ino: INodeNo, reply: ReplyData) {
        match self.inode(ino).and_then(|inode| Ok(rustix::fs::readlinkat(&inode, "", Vec::new())?)) {
            Ok(target) => reply.data(target.as_bytes()),
            Err(error) => reply.error(error.into()),
        }
    }

    fn mkdir(&self, req: &Request, parent: INodeNo, name: &OsStr, mode: u32, _umask: u32, reply: ReplyEntry) {
        let mode = Mode::from_raw_mode(mode);
        let made = self.make(req, parent, name, |parent| rustix::fs::mkdirat(parent, name, mode));
        answer_entry(reply, made.map(|(attr, ())| attr));
    }

    fn symlink(&self, req: &Request, parent: INodeNo, name: &OsStr, target: &Path, reply: ReplyEntry) {
        let made = self.make(req, parent, name, |parent| rustix::fs::symlinkat(target, parent, name));
        answer_entry(reply, made.map(|(attr, ())| attr));
    }

    fn link(&self, _req: &Request, ino: INodeNo, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let link = || {
            let (inode, parent) = (self.inode(ino)?, self.inode(parent)?);
            rustix::fs::linkat(&inode, "", &parent, name, AtFlags::EMPTY_PATH)?;
            self.enter(&parent, name)
        };
        answer_entry(reply, link());
    }

    fn unlink(&self, _req: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let unlink = |parent| Ok(rustix::fs::unlinkat::<_, Arc<File>>(parent, name, AtFlags::empty())?);
        answer_empty(reply, self.inode(parent).and_then(unlink));
    }

    fn rmdir(&self, _req: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let remove = |parent| Ok(rustix::fs::unlinkat::<_, Arc<File>>(parent, name, AtFlags::REMOVEDIR)?);
        answer_empty(reply, self.inode(parent).and_then(remove));
    }

    fn rename(
        &self,
        _req: &Request,
        parent: INodeNo,
        name: &OsStr,
        new_parent: INodeNo,
        new_name: &OsStr,
        flags: RenameFlags,
        reply: ReplyEmpty,
    ) {
        let flags = rustix::fs::RenameFlags::from_bits_retain(flags.bits());
        let rename = || {
            let (parent, new_parent) = (self.inode(parent)?, self.inode(new_parent)?);
            Ok(rustix::fs::renameat_with(&parent, name, &new_parent, new_name, flags)?)
        };
        answer_empty(reply, rename());
    }

    fn create(
        &self,
        req: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        _umask: u32,
        flags: i32,
        reply: ReplyCreate,
    ) {
        let exclusive = OFlags::from_bits_retain(flags.cast_unsigned()) & OFlags::EXCL;
        let create = |parent: &File| {
            let flags = file_flags(flags) | OFlags::CREATE | OFlags::NOFOLLOW | exclusive;
            rustix::fs::openat(parent, name, flags, Mode::from_raw_mode(mode))
        };
        match self.make(req, parent, name, create) {
            Ok((attr, file)) => {
                reply.created(&TIMEOUT, &attr, Generation(0), self.files.add(file.into()), self.opened());
            }
            Err(error) => reply.error(error.into()),
        }
    }

    fn open(&self, _req: &Request, ino: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        match self.inode(ino).and_then(|inode| open_file(&inode, flags.0)) {
            Ok(file) => reply.opened(self.files.add(file), self.opened()),
            Err(error) => reply.error(error.into()),
        }
    }

    fn read(
        &self,
        _req: &Request,
        _ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        size: u32,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        answer_read(reply, size, |buffer| Ok(self.file(fh)?.read_at(buffer, offset)?));
    }

    fn write(
        &self,
        _req: &Request,
        _ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        data: &[u8],
        _write_flags: WriteFlags,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        answer_written(reply, self.file(fh).and_then(|file| file.write_at(data, offset)));
    }

    fn copy_file_range(
        &self,
        _req: &Request,
        _from: INodeNo,
        from_fh: FileHandle,
        mut from_offset: u64,
        _to: INodeNo,
        to_fh: FileHandle,
        mut to_offset: u64,
        length: u64,
        _flags: CopyFileRangeFlags,
        reply: ReplyWrite,
    ) {
        let mut copy = || {
            let (from, to) = (self.file(from_fh)?, self.file(to_fh)?);
            // The answer has 32 bits.
            let length = usize::try_from(length).unwrap_or(usize::MAX).min(1 << 30);
            Ok(rustix::fs::copy_file_range(&from, Some(&mut from_offset), &to, Some(&mut to_offset), length)?)
        };
        answer_written(reply, copy());
    }

    fn fsync(&self, _req: &Request, _ino: INodeNo, fh: FileHandle, datasync: bool, reply: ReplyEmpty) {
        let sync = |file: Arc<File>| if datasync { file.sync_data() } else { file.sync_all() };
        answer_empty(reply, self.file(fh).and_then(sync));
    }

    fn release(
        &self,
        _req: &Request,
        _ino: INodeNo,
        fh: FileHandle,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        _flush: bool,
        reply: ReplyEmpty,
    ) {
        self.files.remove(fh);
        reply.ok();
    }

    fn opendir(&self, _req: &Request, ino: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        match self.inode(ino).and_then(|directory| names_in(&directory)) {
            Ok(names) => {
                reply.opened(self.listings.add(names), FopenFlags::FOPEN_CACHE_DIR | FopenFlags::FOPEN_KEEP_CACHE);
            }
            Err(error) => reply.error(error.into()),
        }
    }

    fn readdir(&self, _req: &Request, _ino: INodeNo, fh: FileHandle, offset: u64, mut reply: ReplyDirectory) {
        let listing = self.listings.get(fh).unwrap_or_default();
        let start = usize::try_from(offset).unwrap_or(usize::MAX);
        for (place, (name, ino, kind)) in (1..).zip(listing.iter()).skip(start) {
            if reply.add(*ino, place, *kind, name) {
                break;
            }
        }
        reply.ok();
    }

    fn readdirplus(&self, _req: &Request, ino: INodeNo, fh: FileHandle, offset: u64, mut reply: ReplyDirectoryPlus) {
        let directory = match self.inode(ino) {
            Ok(directory) => directory,
            Err(error) => return reply.error(error.into()),
        };
        let listing = self.listings.get(fh).unwrap_or_default();
        let start = usize::try_from(offset).unwrap_or(usize::MAX);
        for (place, (name, _, _)) in (1..).zip(listing.iter()).skip(start) {
            // It may have been removed since the directory was opened.
            let Ok(attr) = self.enter(&directory, name) else { continue };
            if reply.add(attr.ino, place, name, &TIMEOUT, &attr, Generation(0)) {
                self.leave(attr.ino, 1);
                break;
            }
        }
        reply.ok();
    }

    fn releasedir(&self, _req: &Request, _ino: INodeNo, fh: FileHandle, _flags: OpenFlags, reply: ReplyEmpty) {
        self.listings.remove(fh);
        reply.ok();
    }

    fn fsyncdir(&self, _req: &Request, ino: INodeNo, _fh: FileHandle, _datasync: bool, reply: ReplyEmpty) {
        let sync = |directory: Arc<File>| File::open(path_of(&directory))?.sync_all();
        answer_empty(reply, self.inode(ino).and_then(sync));
    }

    fn statfs(&self, _req: &Request, ino: INodeNo, reply: ReplyStatfs) {
        match self.inode(ino).and_then(|inode| Ok(rustix::fs::fstatvfs(&inode)?)) {
            Ok(disk) => reply.statfs(
                disk.f_blocks,
                disk.f_bfree,
                disk.f_bavail,
                disk.f_files,
                disk.f_ffree,
                // As the kernel's answer has them; larger ones there are none.
                u32::try_from(disk.f_bsize).unwrap_or(u32::MAX),
                u32::try_from(disk.f_namemax).unwrap_or(u32::MAX),
                u32::try_from(disk.f_frsize).unwrap_or(u32::MAX),
            ),
            Err(error) => reply.error(error.into()),
        }
    }
}
