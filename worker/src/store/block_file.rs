//! The file of a block, of whichever kind: opened to be read, and to be written while somebody writes.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use cavern_conf::FileUsage;
use cavern_proto::BlockId;
use cavern_proto::chunk::{chunk_range, chunks_touching};
use parking_lot::Mutex;
use rustix::io::Errno;

use super::files::{create_file, open_to_read};
use super::page_cache;
use super::sealing::{Cipher, Sealed};

/// Whether a read may wait for the disk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ReadWait {
    /// Only what is in the page cache is read.
    Never,
    /// *Blocking*.
    Disk,
}

/// Why bytes of a block, or their checksums, cannot be had.
#[derive(Debug)]
pub enum ReadError {
    /// They are not in the page cache, and the disk is not to be waited for.
    NotCached,
    /// This chunk does not match its own checksum any more.
    Damaged(u32),
    /// Those of the disk, and `UnexpectedEof` when the file of a cached block is shorter than it should be.
    Io(io::Error),
}

/// What a block has behind the end of its file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum BehindEnd {
    /// What should be there: somebody has cut the file off.
    Missing,
    Zeros,
}

/// Names a block and where its file is.
#[derive(Clone, Debug)]
pub(super) struct BlockPlace {
    pub id: BlockId,
    pub incarnation: u64,
    pub length: u32,
    pub mount_id: u32,
    pub directory: usize,
    pub path: PathBuf,
    pub behind_end: BehindEnd,
    /// Of the directory, if it is encrypted.
    pub cipher: Option<Arc<Cipher>>,
}

/// The open file of a block. It may be read for as long as this lives, whether or not the block is still in the store.
///
/// Two descriptors: one to read, which is handed to clients, and one to write, which is opened when somebody writes and
/// closed when nobody does. Its lock is held while the file is opened, and for no other I/O.
#[derive(Debug)]
pub struct BlockFile {
    place: BlockPlace,
    reader: File,
    writer: Mutex<Option<Arc<File>>>,
    /// Where the directory is encrypted.
    sealed: Option<Sealed>,
    dead: AtomicBool,
}

impl BlockFile {
    /// Makes the file of a new block, with so many bytes that are a hole; as a `draft` it has that name until it gets
    /// its own.
    pub(super) fn create(place: BlockPlace, draft: Option<&Path>, bytes: u32) -> io::Result<Self> {
        let path = draft.unwrap_or(&place.path);
        let writer = create_file(path, bytes)?;
        match open_to_read(path) {
            Ok(reader) => Ok(Self::of(place, reader, Some(Arc::new(writer)))),
            Err(error) => {
                let _ = std::fs::remove_file(path);
                Err(error)
            }
        }
    }

    /// Opens the file of a block that is there.
    pub(super) fn open(place: BlockPlace) -> io::Result<Self> {
        let reader = open_to_read(&place.path)?;
        Ok(Self::of(place, reader, None))
    }

    fn of(place: BlockPlace, reader: File, writer: Option<Arc<File>>) -> Self {
        let sealed = place.cipher.clone().map(|cipher| Sealed::new(cipher, place.incarnation, place.length));
        Self { place, reader, writer: Mutex::new(writer), sealed, dead: AtomicBool::new(false) }
    }

    /// The block's name.
    pub fn id(&self) -> &BlockId {
        &self.place.id
    }

    /// Names this file of the block: no two files of this worker ever share it.
    pub fn incarnation(&self) -> u64 {
        self.place.incarnation
    }

    /// The mount that it was made for.
    pub fn mount_id(&self) -> u32 {
        self.place.mount_id
    }

    /// Bytes of the block when it is complete.
    pub fn length(&self) -> u32 {
        self.place.length
    }

    /// Where it is, or was.
    pub fn path(&self) -> &Path {
        &self.place.path
    }

    pub(super) fn directory(&self) -> usize {
        self.place.directory
    }

    pub(super) fn sealed(&self) -> Option<&Sealed> {
        self.sealed.as_ref()
    }

    pub(super) fn reader(&self) -> &File {
        &self.reader
    }

    /// The file, read only: byte 0 is the block's byte 0. Holes are chunks that are not present.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.reader.as_fd()
    }

    /// Whether the block has been evicted or dropped: its file may be read, but nothing more will be kept in it.
    pub fn is_dead(&self) -> bool {
        self.dead.load(Ordering::Acquire)
    }

    pub(super) fn kill(&self) {
        self.dead.store(true, Ordering::Release);
    }

    /// Reads `buffer.len()` bytes at `offset`, as long as they are in the page cache; `Ok(false)` when they are not,
    /// with the buffer's content undefined. Never waits for a disk.
    ///
    /// # Errors
    /// Those of the disk, and `UnexpectedEof` when the file of a cached block is shorter than it should be.
    pub fn read_cached(&self, offset: u32, buffer: &mut [u8]) -> io::Result<bool> {
        let read = |offset, bytes: &mut [u8]| read_pages(&self.reader, offset, bytes, self.place.behind_end);
        let Some(sealed) = &self.sealed else { return read(offset, buffer) };
        match sealed.changes.try_read() {
            Some(_still) => sealed.read(offset, buffer, read),
            None => Ok(false),
        }
    }

    /// Reads `buffer.len()` bytes at `offset`. Waits for the disk: not for async threads.
    ///
    /// # Errors
    /// As [`Self::read_cached`].
    pub fn read(&self, offset: u32, buffer: &mut [u8]) -> io::Result<()> {
        let read = |offset, bytes: &mut [u8]| self.read_disk(offset, bytes).map(|()| true);
        let Some(sealed) = &self.sealed else { return self.read_disk(offset, buffer) };
        let _still = sealed.changes.read();
        sealed.read(offset, buffer, read).map(drop)
    }

    fn read_disk(&self, offset: u32, buffer: &mut [u8]) -> io::Result<()> {
        let mut done = 0;
        while done < buffer.len() {
            match self.reader.read_at(&mut buffer[done..], u64::from(offset) + done as u64) {
                Ok(0) => {
                    fill_behind_end(&mut buffer[done..], self.place.behind_end)?;
                    done = buffer.len();
                }
                Ok(read) => done += read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Reads `buffer.len()` bytes at `offset` in either way.
    ///
    /// # Errors
    /// All but [`ReadError::Damaged`].
    pub fn read_by(&self, wait: ReadWait, offset: u32, buffer: &mut [u8]) -> Result<(), ReadError> {
        let read = match wait {
            ReadWait::Never => self.read_cached(offset, buffer),
            ReadWait::Disk => self.read(offset, buffer).map(|()| true),
        };
        if read.map_err(ReadError::Io)? { Ok(()) } else { Err(ReadError::NotCached) }
    }

    /// Whether these bytes can be sent right out of the file without waiting for a disk: the file has them as they are,
    /// and they are in the page cache. Should the kernel need their memory just then, they are read from the disk once
    /// more. Never waits for a disk itself.
    pub fn can_be_sent(&self, bytes: &Range<u32>) -> bool {
        // A page that is there may still be on its way. So are those that the disk was asked for together with it: the
        // last one of each chunk tells.
        let is_read = |chunk: u32| {
            let end = chunk_range(chunk, self.place.length).end.min(bytes.end);
            matches!(read_pages(&self.reader, end.saturating_sub(1), &mut [0u8], BehindEnd::Missing), Ok(true))
        };
        self.sealed.is_none()
            && page_cache::has_pages(&self.reader, bytes)
            && chunks_touching(bytes.start, bytes.len() as u32).all(is_read)
    }

    /// When the file was last written to, nanoseconds since the Unix epoch.
    ///
    /// # Errors
    /// Those of the disk.
    pub fn modified_ns(&self) -> io::Result<i64> {
        let metadata = self.reader.metadata()?;
        Ok(metadata.mtime().saturating_mul(1_000_000_000).saturating_add(metadata.mtime_nsec()))
    }

    /// Where the file ends, in bytes.
    ///
    /// # Errors
    /// Those of the disk.
    pub fn end(&self) -> io::Result<u32> {
        Ok(u32::try_from(self.reader.metadata()?.len()).unwrap_or(u32::MAX))
    }

    /// The descriptor that is written through, opened when there is none. It can be read too.
    pub(crate) fn writer(&self) -> io::Result<Arc<File>> {
        let mut writer = self.writer.lock();
        if let Some(file) = &*writer {
            return Ok(file.clone());
        }
        let file = Arc::new(File::options().read(true).write(true).open(&self.place.path)?);
        *writer = Some(file.clone());
        Ok(file)
    }

    /// Closes the descriptor that is written through; the next write opens it anew.
    pub(crate) fn close_writer(&self) {
        self.writer.lock().take();
    }

    /// Bytes that the file system has given to the file.
    pub fn allocated_bytes(&self) -> io::Result<u64> {
        Ok(FileUsage::of(&self.reader)?.allocated)
    }
}

/// What is read of a block where its file has ended.
fn fill_behind_end(buffer: &mut [u8], behind_end: BehindEnd) -> io::Result<()> {
    match behind_end {
        BehindEnd::Missing => Err(io::ErrorKind::UnexpectedEof.into()),
        BehindEnd::Zeros => {
            buffer.fill(0);
            Ok(())
        }
    }
}

/// Reads bytes of a file that are in the page cache; `Ok(false)` when some are not.
fn read_pages(file: &File, offset: u32, buffer: &mut [u8], behind_end: BehindEnd) -> io::Result<bool> {
    let mut done = 0;
    while done < buffer.len() {
        let slice = io::IoSliceMut::new(&mut buffer[done..]);
        let flags = rustix::io::ReadWriteFlags::NOWAIT;
        match rustix::io::preadv2(file, &mut [slice], u64::from(offset) + done as u64, flags) {
            Ok(0) => {
                fill_behind_end(&mut buffer[done..], behind_end)?;
                done = buffer.len();
            }
            Ok(read) => done += read,
            Err(Errno::INTR) => {}
            // A file system without the flag is asked on a thread that may wait.
            Err(Errno::AGAIN | Errno::OPNOTSUPP) => return Ok(false),
            Err(error) => return Err(error.into()),
        }
    }
    Ok(true)
}
