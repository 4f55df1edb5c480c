//! What is too much for memory: sequences of bytes that are appended to, and read from the beginning by cursors while
//! they grow. What a sequence has above its buffer is in a file without a name.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::error::Error;

/// Of a sequence, and of each of its cursors, in bytes.
const BUFFER: usize = 64 << 10;

static FILES: AtomicU64 = AtomicU64::new(0);

pub(crate) struct Sequence {
    directory: PathBuf,
    file: Option<File>,
    /// Bytes in the file; those of `buffer` follow.
    written: u64,
    buffer: Vec<u8>,
}

/// A place in a sequence, and what was read ahead of it.
#[derive(Default)]
pub(crate) struct Cursor {
    buffer: Vec<u8>,
    taken: usize,
    /// Of the sequence, behind what `buffer` has.
    next: u64,
}

impl Sequence {
    /// The file, where one is needed, is in `directory`.
    pub(crate) fn new(directory: &Path) -> Self {
        Self { directory: directory.to_owned(), file: None, written: 0, buffer: Vec::new() }
    }

    pub(crate) fn append(&mut self, bytes: &[u8]) -> Result<(), Error> {
        self.buffer.extend_from_slice(bytes);
        if self.buffer.len() < BUFFER { Ok(()) } else { self.flush().map_err(|source| self.failed(source)) }
    }

    fn flush(&mut self) -> io::Result<()> {
        let file = match self.file.take() {
            Some(file) => file,
            None => unnamed_file(&self.directory)?,
        };
        file.write_all_at(&self.buffer, self.written)?;
        self.file = Some(file);
        self.written += self.buffer.len() as u64;
        self.buffer.clear();
        Ok(())
    }

    /// Appends up to `most` bytes from `start` on to `bytes`, and says how many.
    fn read(&self, start: u64, most: usize, bytes: &mut Vec<u8>) -> io::Result<usize> {
        if let Some(behind) = start.checked_sub(self.written) {
            let rest = self.buffer.get(behind as usize..).unwrap_or_default();
            let count = rest.len().min(most);
            bytes.extend_from_slice(&rest[..count]);
            return Ok(count);
        }
        let count = (self.written - start).min(most as u64) as usize;
        let before = bytes.len();
        bytes.resize(before + count, 0);
        let file = self.file.as_ref().ok_or(io::ErrorKind::NotFound)?;
        file.read_exact_at(&mut bytes[before..], start)?;
        Ok(count)
    }

    fn failed(&self, source: io::Error) -> Error {
        Error::Spill { directory: self.directory.clone(), source }
    }
}

impl Cursor {
    /// The next `length` bytes, which must have been appended.
    pub(crate) fn read(&mut self, sequence: &Sequence, length: usize) -> Result<&[u8], Error> {
        if self.buffer.len() - self.taken < length {
            self.buffer.drain(..self.taken);
            self.taken = 0;
            while self.buffer.len() < length {
                let most = length.max(BUFFER) - self.buffer.len();
                let read = sequence.read(self.next, most, &mut self.buffer);
                match read.map_err(|source| sequence.failed(source))? {
                    0 => return Err(sequence.failed(io::ErrorKind::UnexpectedEof.into())),
                    count => self.next += count as u64,
                }
            }
        }
        let start = self.taken;
        self.taken += length;
        Ok(&self.buffer[start..self.taken])
    }
}

fn unnamed_file(directory: &Path) -> io::Result<File> {
    loop {
        let number = FILES.fetch_add(1, Ordering::Relaxed);
        let path = directory.join(format!(".erofs-{}-{number}", process::id()));
        match OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(&path) {
            Ok(file) => {
                fs::remove_file(&path)?;
                return Ok(file);
            }
            // Of a process of this number that was killed in between.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => (),
            Err(error) => return Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cursor_reads_what_is_appended_meanwhile() {
        let directory = tempfile::tempdir().unwrap();
        let mut sequence = Sequence::new(directory.path());
        let (mut near, mut far) = (Cursor::default(), Cursor::default());
        for number in 0..100_000_u64 {
            sequence.append(&number.to_le_bytes()).unwrap();
            if number % 3 == 0 {
                assert_eq!(near.read(&sequence, 8).unwrap(), (number / 3).to_le_bytes());
            }
        }
        for number in 0..100_000_u64 {
            assert_eq!(far.read(&sequence, 8).unwrap(), number.to_le_bytes());
        }
        assert!(far.read(&sequence, 1).is_err());
        assert!(far.buffer.capacity() <= 2 * BUFFER);
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_record_above_the_buffer_is_read_whole() {
        let directory = tempfile::tempdir().unwrap();
        let mut sequence = Sequence::new(directory.path());
        let record: Vec<u8> = (0..3 * BUFFER).map(|index| index as u8).collect();
        sequence.append(b"head").unwrap();
        sequence.append(&record).unwrap();
        sequence.append(b"tail").unwrap();
        let mut cursor = Cursor::default();
        assert_eq!(cursor.read(&sequence, 4).unwrap(), b"head");
        assert_eq!(cursor.read(&sequence, record.len()).unwrap(), record);
        assert_eq!(cursor.read(&sequence, 4).unwrap(), b"tail");
    }

    #[test]
    fn an_error_names_the_directory() {
        let mut sequence = Sequence::new(Path::new("/nonexistent"));
        let error = sequence.append(&vec![0; BUFFER]).unwrap_err();
        assert!(error.to_string().contains("/nonexistent"), "{error}");
    }
}
