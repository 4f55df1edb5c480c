//! The file of an image, as it is read: by event loops as far as it is in memory of the kernel, else by threads that
//! may wait for a disk.

use std::fs::File;
use std::io;

use cavern_erofs::{Error, ReadAt};

use crate::read::local_file::{PastEnd, read_now};

/// The file of an image.
pub struct ImageFile {
    pub(super) file: File,
    /// Reads are *blocking*; otherwise those of what is on the disk alone fail, as [`would_wait`] tells.
    pub(super) may_wait: bool,
}

impl ReadAt for ImageFile {
    fn size(&self) -> io::Result<u64> {
        ReadAt::size(&self.file)
    }

    fn read_exact_at(&self, bytes: &mut [u8], offset: u64) -> io::Result<()> {
        if self.may_wait {
            return ReadAt::read_exact_at(&self.file, bytes, offset);
        }
        let is_read = read_now(&self.file, offset, bytes, PastEnd::Missing);
        if is_read { Ok(()) } else { Err(io::ErrorKind::WouldBlock.into()) }
    }
}

/// Whether something was not found only because the disk would have to be waited for.
pub(super) fn would_wait(error: &Error) -> bool {
    matches!(error, Error::Read { source, .. } if source.kind() == io::ErrorKind::WouldBlock)
}
