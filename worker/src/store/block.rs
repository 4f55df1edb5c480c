//! A block that is in use: its open file, which chunks are there, and their checksums.
//!
//! Two bitmaps: *present* is what the index says, *verified* what may be believed. After a start nothing is believed: a
//! crash may have left the index ahead of the data (nothing is synced while filling, which costs a refetch at worst).
//! A chunk is verified when this run wrote it, or read it once and found its checksum right.

use std::fs::File;
use std::io::{self, IoSlice};
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{FileExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use bytes::Bytes;
use cavern_conf::FileUsage;
use cavern_proto::chunk::{chunk_count, chunk_range};
use cavern_proto::record::BlockRecord;
use cavern_proto::{BlockId, ChunkMap};
use parking_lot::{Mutex, MutexGuard};
use rustix::fs::OFlags;
use rustix::io::Errno;

use super::data::DataState;
use super::sealing::{Cipher, Sealed};

/// Of the files of blocks: they have what files of the namespace have that only some may read.
pub(super) const FILE_MODE: u32 = 0o600;

/// What changes about a block while it is in use.
#[derive(Debug)]
pub(crate) struct BlockState {
    pub present: ChunkMap,
    /// Always a part of `present`.
    pub verified: ChunkMap,
    /// One per chunk; meaningful where present.
    pub crcs: Vec<u32>,
}

/// A block of which somebody holds this handle. Its file may be read for as long as the handle lives, evicted or not.
#[derive(Debug)]
pub struct Block {
    id: BlockId,
    incarnation: u64,
    length: u32,
    mount_id: u32,
    directory: usize,
    path: PathBuf,
    /// Read only, because it is handed to clients.
    file: File,
    /// Open while fills run; of data blocks, once somebody writes.
    writer: Mutex<Option<Arc<File>>>,
    state: Mutex<BlockState>,
    /// Of blocks of fs-mode files.
    data: Option<Arc<DataState>>,
    /// Where the directory is encrypted.
    sealed: Option<Sealed>,
    dead: AtomicBool,
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
    /// Of the directory, if it is encrypted.
    pub cipher: Option<Arc<Cipher>>,
}

impl BlockPlace {
    /// How its file is encrypted.
    pub fn sealed(&self) -> Option<Sealed> {
        self.cipher.clone().map(|cipher| Sealed::new(cipher, self.incarnation, self.length))
    }
}

/// Times of access are of no use here, and each would be a change of the inode to be written. What is no file is not
/// opened: a pipe would be waited for, and where a link leads is not ours.
pub(super) fn open_to_read(path: &Path) -> io::Result<File> {
    let open = |more: OFlags| {
        let flags = OFlags::NONBLOCK | OFlags::NOFOLLOW | more;
        File::options().read(true).custom_flags(flags.bits().cast_signed()).open(path)
    };
    let file = match open(OFlags::NOATIME) {
        // Only the owner may do without.
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => open(OFlags::empty()),
        opened => opened,
    }?;
    if file.metadata()?.is_file() {
        Ok(file)
    } else {
        Err(io::Error::new(io::ErrorKind::NotFound, "something that is no file is in its place"))
    }
}

impl Block {
    /// Makes the empty file of a new block.
    pub(super) fn create(place: BlockPlace) -> io::Result<Self> {
        let writer = File::options().read(true).write(true).create_new(true).mode(FILE_MODE).open(&place.path)?;
        let file = match open_to_read(&place.path) {
            Ok(file) => file,
            Err(error) => {
                let _ = std::fs::remove_file(&place.path);
                return Err(error);
            }
        };
        let state = BlockState {
            present: ChunkMap::new(),
            verified: ChunkMap::new(),
            crcs: vec![0; chunk_count(place.length) as usize],
        };
        Ok(Self::assemble(place, file, Some(Arc::new(writer)), state, None))
    }

    /// Opens the file of a block that the index knows. With `verified` all its chunks have been verified earlier in
    /// this run.
    pub(super) fn open(place: BlockPlace, record: &BlockRecord, verified: bool) -> io::Result<Self> {
        let file = open_to_read(&place.path)?;
        let mut crcs = record.chunk_crcs.clone();
        crcs.resize(chunk_count(place.length) as usize, 0);
        if let Some(sealed) = place.sealed() {
            sealed.mask_checksums(&mut crcs);
        }
        let mut present = ChunkMap::from_bytes(&record.present);
        // A record that names chunks beyond the block's end is damaged there; the rest is still checked by CRC.
        for beyond in present.iter().filter(|index| *index >= chunk_count(place.length)).collect::<Vec<_>>() {
            present.remove(beyond);
        }
        let state = BlockState { verified: if verified { present.clone() } else { ChunkMap::new() }, present, crcs };
        Ok(Self::assemble(place, file, None, state, None))
    }

    pub(super) fn assemble(
        place: BlockPlace,
        file: File,
        writer: Option<Arc<File>>,
        state: BlockState,
        data: Option<Arc<DataState>>,
    ) -> Self {
        Self {
            sealed: place.sealed(),
            id: place.id,
            incarnation: place.incarnation,
            length: place.length,
            mount_id: place.mount_id,
            directory: place.directory,
            path: place.path,
            file,
            writer: Mutex::new(writer),
            state: Mutex::new(state),
            data,
            dead: AtomicBool::new(false),
        }
    }

    /// The block's name.
    pub fn id(&self) -> &BlockId {
        &self.id
    }

    /// Names this file of the block: no two files of this worker ever share it.
    pub fn incarnation(&self) -> u64 {
        self.incarnation
    }

    /// The mount that it was made for.
    pub fn mount_id(&self) -> u32 {
        self.mount_id
    }

    /// Bytes of the block when it is complete.
    pub fn length(&self) -> u32 {
        self.length
    }

    /// Where its file is, or was.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether it is a block of an fs-mode file.
    pub fn is_data(&self) -> bool {
        self.data.is_some()
    }

    pub(super) fn sealed(&self) -> Option<&Sealed> {
        self.sealed.as_ref()
    }

    pub(super) fn data(&self) -> Option<&Arc<DataState>> {
        self.data.as_ref()
    }

    pub(super) fn directory(&self) -> usize {
        self.directory
    }

    /// The file, read only: byte 0 is the block's byte 0. Holes are chunks that are not present.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Whether the block has been evicted or dropped: its file may be read, but nothing more will be kept in it.
    pub fn is_dead(&self) -> bool {
        self.dead.load(Ordering::Acquire)
    }

    pub(super) fn kill(&self) {
        self.dead.store(true, Ordering::Release);
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, BlockState> {
        self.state.lock()
    }

    /// Whether all these chunks may be read.
    pub fn has(&self, chunks: Range<u32>) -> bool {
        self.state.lock().verified.contains_all(chunks)
    }

    /// Whether the whole block may be read.
    #[cfg(test)]
    pub fn is_complete(&self) -> bool {
        self.has(0..chunk_count(self.length))
    }

    /// The chunks that may be read, as messages carry them.
    pub fn verified_bytes(&self) -> Vec<u8> {
        self.state.lock().verified.to_bytes()
    }

    /// Reads `buffer.len()` bytes at `offset`, as long as they are in the page cache; `Ok(false)` when they are not,
    /// with the buffer's content undefined. Never waits for a disk.
    ///
    /// # Errors
    /// Those of the disk, and `UnexpectedEof` when the file is shorter than it should be.
    pub fn read_cached(&self, offset: u32, buffer: &mut [u8]) -> io::Result<bool> {
        let Some(sealed) = &self.sealed else { return read_pages(&self.file, offset, buffer) };
        match sealed.try_still() {
            Some(_still) => sealed.read(offset, buffer, |offset, cells| read_pages(&self.file, offset, cells)),
            None => Ok(false),
        }
    }

    /// Reads `buffer.len()` bytes at `offset`. Waits for the disk: not for async threads.
    ///
    /// # Errors
    /// As [`Self::read_cached`].
    pub fn read(&self, offset: u32, buffer: &mut [u8]) -> io::Result<()> {
        let read = |offset: u32, bytes: &mut [u8]| self.file.read_exact_at(bytes, u64::from(offset)).map(|()| true);
        let Some(sealed) = &self.sealed else { return read(offset, buffer).map(drop) };
        let _still = sealed.still();
        sealed.read(offset, buffer, read).map(drop)
    }

    /// When the file was last written to, nanoseconds since the Unix epoch.
    ///
    /// # Errors
    /// Those of the disk.
    pub fn modified_ns(&self) -> io::Result<i64> {
        let metadata = self.file.metadata()?;
        Ok(metadata.mtime().saturating_mul(1_000_000_000).saturating_add(metadata.mtime_nsec()))
    }

    /// Reads a whole chunk and says whether its checksum is the recorded one; a file that is too short counts as not.
    ///
    /// # Errors
    /// Those of the disk.
    pub(super) fn check_chunk(&self, index: u32, buffer: &mut Vec<u8>) -> io::Result<bool> {
        let range = chunk_range(index, self.length);
        let expected = self.state.lock().crcs.get(index as usize).copied();
        buffer.resize(range.len(), 0);
        match self.read(range.start, buffer) {
            Ok(()) => Ok(expected == Some(crc32c::crc32c(buffer))),
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// The descriptor that fills write through, opened when there is none. That of a data block can be read too,
    /// because it is handed to clients.
    pub(crate) fn writer(&self) -> io::Result<Arc<File>> {
        let mut writer = self.writer.lock();
        if let Some(file) = &*writer {
            return Ok(file.clone());
        }
        let file = Arc::new(File::options().read(self.is_data()).write(true).open(&self.path)?);
        *writer = Some(file.clone());
        Ok(file)
    }

    /// Bytes that the file system has given to the file.
    pub fn allocated_bytes(&self) -> io::Result<u64> {
        Ok(FileUsage::of(&self.file)?.allocated)
    }

    /// Closes the descriptor of fills; the next write opens it anew.
    pub(crate) fn close_writer(&self) {
        self.writer.lock().take();
    }

    /// Writes one whole chunk, given in pieces, and returns its CRC32C. It is not present by that:
    /// `Store::publish` makes it so.
    ///
    /// # Errors
    /// Those of the disk.
    pub(crate) fn write_chunk(&self, index: u32, pieces: &[Bytes]) -> io::Result<u32> {
        let writer = self.writer()?;
        let start = chunk_range(index, self.length).start;
        let crc = pieces.iter().fold(0, |crc, piece| crc32c::crc32c_append(crc, piece));
        if let Some(sealed) = &self.sealed {
            // Nobody reads what is not present.
            sealed.write(&writer, start, &pieces.concat()).map_err(|(_, error)| error)?;
            return Ok(crc);
        }
        let mut offset = u64::from(start);
        let mut slices: Vec<IoSlice<'_>> = pieces.iter().map(|piece| IoSlice::new(piece)).collect();
        let mut rest = slices.as_mut_slice();
        // The kernel takes at most 1,024 pieces at a time.
        while !rest.is_empty() {
            let batch = rest.len().min(1024);
            match rustix::io::pwritev(&writer, &rest[..batch], offset) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(written) => {
                    offset += written as u64;
                    IoSlice::advance_slices(&mut rest, written);
                }
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(crc)
    }

    /// The index entry of the block as it is now.
    pub(super) fn record(&self) -> BlockRecord {
        let state = self.state.lock();
        let mut chunk_crcs = state.crcs.clone();
        if let Some(sealed) = &self.sealed {
            sealed.mask_checksums(&mut chunk_crcs);
        }
        BlockRecord {
            incarnation: self.incarnation,
            length: self.length,
            present: state.present.to_bytes().into(),
            chunk_crcs,
            mount_id: self.mount_id,
        }
    }
}

/// Reads bytes of a file that are in the page cache; `Ok(false)` when some are not.
fn read_pages(file: &File, offset: u32, buffer: &mut [u8]) -> io::Result<bool> {
    let mut done = 0;
    while done < buffer.len() {
        let slice = io::IoSliceMut::new(&mut buffer[done..]);
        let flags = rustix::io::ReadWriteFlags::NOWAIT;
        match rustix::io::preadv2(file, &mut [slice], u64::from(offset) + done as u64, flags) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(read) => done += read,
            Err(Errno::INTR) => {}
            // A file system without the flag is asked on a thread that may wait.
            Err(Errno::AGAIN | Errno::OPNOTSUPP) => return Ok(false),
            Err(error) => return Err(error.into()),
        }
    }
    Ok(true)
}
