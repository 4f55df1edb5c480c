//! Reads from files of blocks of this host, whatever file they belong to and whoever has them open.

use std::io::{self, IoSliceMut};
use std::os::fd::AsFd;

use rustix::io::{Errno, ReadWriteFlags};
use tokio::time::Instant;

use crate::error::ClientError;
use crate::stages::Stage;

/// Bytes read at once at most: bounds how long a system call can last.
const PREAD_MAX: usize = 8 << 20;

/// Fills `buffer` from `offset` without waiting for the disk; false when not all of it is in the page cache.
pub(crate) fn read_now(file: impl AsFd, offset: u64, buffer: &mut [u8]) -> bool {
    let length = buffer.len();
    let read = rustix::io::preadv2(&file, &mut [IoSliceMut::new(buffer)], offset, ReadWriteFlags::NOWAIT);
    match read {
        Ok(count) => count == length,
        // A file system that knows no such flag. Where that is memory, reading never waits.
        Err(Errno::OPNOTSUPP) if is_in_memory(&file) => read_blocking(&file, offset, buffer).is_ok(),
        Err(_) => false,
    }
}

/// Fills `buffer` from `offset`, waiting for the disk where needed.
///
/// # Errors
/// Those of the disk, and `UnexpectedEof` of a file that is shorter.
fn read_blocking(file: impl AsFd, mut offset: u64, mut buffer: &mut [u8]) -> io::Result<()> {
    while !buffer.is_empty() {
        let part = buffer.len().min(PREAD_MAX);
        match rustix::io::pread(&file, &mut buffer[..part], offset) {
            Ok(0) => return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the block file is too short")),
            Ok(count) => {
                buffer = &mut buffer[count..];
                offset += count as u64;
            }
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

fn is_in_memory(file: impl AsFd) -> bool {
    const TMPFS_MAGIC: u64 = 0x0102_1994;
    rustix::fs::fstatfs(file).is_ok_and(|status| status.f_type as u64 == TMPFS_MAGIC)
}

/// Bytes of a file of this host: at once what is in the page cache, else when the disk gives it. `name` is that of what
/// is read.
///
/// # Errors
/// [`ClientError::Io`] when the file cannot be read.
pub(super) async fn read_file(
    file: impl AsFd + Send + 'static,
    offset: u64,
    length: usize,
    deadline: Instant,
    name: impl FnOnce() -> String + Send,
) -> Result<Vec<u8>, ClientError> {
    let mut buffer = vec![0; length];
    if read_now(&file, offset, &mut buffer) {
        return Ok(buffer);
    }
    let read = tokio::task::spawn_blocking(move || {
        read_blocking(&file, offset, &mut buffer)?;
        Ok::<_, io::Error>(buffer)
    });
    let _disk = Stage::Disk.begin();
    // The disk decides how long this takes; the reader goes on at its deadline.
    match tokio::time::timeout_at(deadline, read).await {
        Ok(Ok(read)) => Ok(read?),
        Ok(Err(_cancelled)) => Err(ClientError::Shutdown),
        Err(_elapsed) => {
            let causes = "the local disk did not answer before the deadline".to_owned();
            Err(ClientError::Read { key: name(), causes })
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn reads_what_is_there_and_says_when_the_file_is_short() {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(b"0123456789").unwrap();
        let mut buffer = [0; 4];
        assert!(read_now(&file, 3, &mut buffer));
        assert_eq!(&buffer, b"3456");
        assert!(!read_now(&file, 8, &mut buffer));
        assert_eq!(read_blocking(&file, 8, &mut buffer).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    }
}
