//! What both kinds of file system tell the kernel alike.

use std::cell::RefCell;
use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use fuser::{Errno, FileAttr, FileType, INodeNo, InitFlags, KernelConfig, ReplyData};

/// Names and attributes are good for this long in the kernel.
pub const TIMEOUT: Duration = Duration::from_secs(3600);
/// The largest read that the kernel sends.
const READ_MAX: usize = 1 << 20;

thread_local! {
    /// One buffer per event loop.
    static BUFFER: RefCell<Vec<u8>> = RefCell::new(vec![0; READ_MAX]);
}

/// Asks the kernel for what makes it faster; kernels without one of these serve without it.
pub fn greet(config: &mut KernelConfig) {
    for capability in
        [InitFlags::FUSE_PARALLEL_DIROPS, InitFlags::FUSE_DO_READDIRPLUS, InitFlags::FUSE_READDIRPLUS_AUTO]
    {
        let _ = config.add_capabilities(capability);
    }
    let _ = config.set_max_background(256);
}

/// Answers with what `read` puts into this thread's buffer.
pub fn answer_read(reply: ReplyData, size: u32, read: impl FnOnce(&mut [u8]) -> Result<usize, Errno>) {
    BUFFER.with_borrow_mut(|buffer| {
        let length = buffer.len().min(size as usize);
        match read(&mut buffer[..length]) {
            Ok(length) => reply.data(&buffer[..length]),
            Err(error) => reply.error(error),
        }
    });
}

pub fn attributes(metadata: &Metadata) -> FileAttr {
    FileAttr {
        ino: INodeNo(metadata.ino()),
        size: metadata.len(),
        blocks: metadata.blocks(),
        atime: metadata.accessed().unwrap_or(UNIX_EPOCH),
        mtime: metadata.modified().unwrap_or(UNIX_EPOCH),
        ctime: changed(metadata),
        crtime: UNIX_EPOCH,
        kind: FileType::from_std(metadata.file_type()).unwrap_or(FileType::RegularFile),
        // The permission bits only.
        perm: (metadata.mode() & 0o7777) as u16,
        nlink: u32::try_from(metadata.nlink()).unwrap_or(u32::MAX),
        uid: metadata.uid(),
        gid: metadata.gid(),
        rdev: 0,
        blksize: 128 * 1024,
        flags: 0,
    }
}

/// No clock of a host that has changed a file stands before 1970.
fn changed(metadata: &Metadata) -> SystemTime {
    let (seconds, nanoseconds) = (u64::try_from(metadata.ctime()), u32::try_from(metadata.ctime_nsec()));
    UNIX_EPOCH + Duration::new(seconds.unwrap_or_default(), nanoseconds.unwrap_or_default())
}
