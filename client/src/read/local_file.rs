//! Reads from files of blocks of this host, whatever file they belong to and whoever has them open.

use std::io::{self, IoSliceMut};
use std::os::fd::AsFd;

use rustix::io::{Errno, ReadWriteFlags};
use tokio::time::Instant;

use crate::error::ClientError;
use crate::stages::Stage;

/// Bytes read at once at most: bounds how long a system call can last.
const PREAD_MAX: usize = 8 << 20;

/// What a block has behind the end of its file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum PastEnd {
    /// Nothing can be said of that: somebody has cut the file off.
    Missing,
    /// Of a block of an fs-mode file, which was never written there.
    Zeros,
}

/// Fills `buffer` from `offset` without waiting for the disk; false when not all of it is in the page cache.
pub(crate) fn read_now(file: impl AsFd, mut offset: u64, mut buffer: &mut [u8], past_end: PastEnd) -> bool {
    while !buffer.is_empty() {
        let read = rustix::io::preadv2(&file, &mut [IoSliceMut::new(buffer)], offset, ReadWriteFlags::NOWAIT);
        match (read, past_end) {
            (Ok(count), _) if count == buffer.len() => return true,
            (Ok(0), PastEnd::Zeros) => {
                buffer.fill(0);
                return true;
            }
            // The end is next, or what is on the disk alone.
            (Ok(count), PastEnd::Zeros) => {
                buffer = &mut buffer[count..];
                offset += count as u64;
            }
            // A file system that knows no such flag. Where that is memory, reading never waits.
            (Err(Errno::OPNOTSUPP), _) if is_in_memory(&file) => {
                return read_blocking(&file, offset, buffer, past_end).is_ok();
            }
            (Ok(_), PastEnd::Missing) | (Err(_), _) => return false,
        }
    }
    true
}

/// Fills `buffer` from `offset`, waiting for the disk where needed.
///
/// # Errors
/// Those of the disk, and `UnexpectedEof` of a file that is shorter and should not be.
fn read_blocking(file: impl AsFd, mut offset: u64, mut buffer: &mut [u8], past_end: PastEnd) -> io::Result<()> {
    while !buffer.is_empty() {
        let part = buffer.len().min(PREAD_MAX);
        match rustix::io::pread(&file, &mut buffer[..part], offset) {
            Ok(0) if past_end == PastEnd::Zeros => {
                buffer.fill(0);
                return Ok(());
            }
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
    past_end: PastEnd,
    deadline: Instant,
    name: impl FnOnce() -> String + Send,
) -> Result<Vec<u8>, ClientError> {
    let mut buffer = vec![0; length];
    if read_now(&file, offset, &mut buffer, past_end) {
        return Ok(buffer);
    }
    let read = tokio::task::spawn_blocking(move || {
        read_blocking(&file, offset, &mut buffer, past_end)?;
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
        assert!(read_now(&file, 3, &mut buffer, PastEnd::Missing));
        assert_eq!(&buffer, b"3456");
        assert!(!read_now(&file, 8, &mut buffer, PastEnd::Missing));
        let cut_off = read_blocking(&file, 8, &mut buffer, PastEnd::Missing).unwrap_err();
        assert_eq!(cut_off.kind(), io::ErrorKind::UnexpectedEof);

        for offset in [8, 10, 1000] {
            let known: &[u8] = if offset == 8 { b"89\0\0" } else { b"\0\0\0\0" };
            buffer.fill(b'x');
            assert!(read_now(&file, offset, &mut buffer, PastEnd::Zeros) && buffer == known, "at {offset}");
            buffer.fill(b'x');
            read_blocking(&file, offset, &mut buffer, PastEnd::Zeros).unwrap();
            assert_eq!(buffer, known, "at {offset}");
        }
    }
}
