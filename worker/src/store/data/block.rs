//! A block of an fs-mode file that is in use: its open file, and what is known in this run of the room that it takes.

use std::fs::File;
use std::io;
use std::ops::{Deref, Range};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use cavern_proto::ChunkMap;
use cavern_proto::chunk::{CHUNK_BYTES, chunk_count, chunk_range, chunks_touching};
use parking_lot::Mutex;
use rustix::fs::{FallocateFlags, SeekFrom};
use rustix::io::{Errno, retry_on_intr};
use tokio::time::Instant;

use crate::store::block_file::{BlockFile, BlockPlace};
use crate::store::error::is_out_of_space;
use crate::store::files::write_at;
use crate::store::sealing::Sealed;

/// What is known of a data block in this run; it outlives the block's being open.
///
/// A chunk is charged before it is written for the first time, and discharged when it is freed: by zeroing, or when the
/// room that was given for it has not been used in time. Locks are taken in the order of the fields below, and all of
/// them below that of the table's residents; no I/O is done under them.
#[derive(Debug)]
pub(in crate::store) struct DataState {
    /// When room was given last, unless that has been settled.
    pub(super) given: Mutex<Option<Instant>>,
    /// Chunks whose room is accounted for.
    pub(super) charged: Mutex<ChunkMap>,
    /// Of these, those that the file system has set aside for good.
    pub(super) allocated: Mutex<ChunkMap>,
    /// The file's name is on disk.
    pub(super) name_synced: AtomicBool,
    /// The kernel reports once that it could not write pages, and believes them clean from then on.
    sync_failed: AtomicBool,
}

impl DataState {
    pub(super) fn new(charged: ChunkMap) -> Self {
        Self {
            given: Mutex::default(),
            charged: Mutex::new(charged),
            allocated: Mutex::default(),
            name_synced: AtomicBool::new(false),
            sync_failed: AtomicBool::new(false),
        }
    }

    /// Says whether they failed before.
    pub(super) fn fail_syncs(&self) -> bool {
        self.sync_failed.swap(true, Ordering::AcqRel)
    }

    pub(super) fn syncs_fail(&self) -> bool {
        self.sync_failed.load(Ordering::Acquire)
    }
}

/// A data block of which somebody holds this handle. All of it can be read at any time, and nothing of it has a
/// checksum.
#[derive(Debug)]
pub struct DataBlock {
    file: BlockFile,
    state: Arc<DataState>,
}

impl Deref for DataBlock {
    type Target = BlockFile;

    fn deref(&self) -> &BlockFile {
        &self.file
    }
}

/// The chunks that byte ranges of a block touch.
pub(super) fn chunks_of(ranges: impl IntoIterator<Item = Range<u32>>) -> ChunkMap {
    ranges.into_iter().flat_map(|range| chunks_touching(range.start, range.len() as u32)).collect()
}

static ZEROS: [u8; CHUNK_BYTES as usize] = [0; CHUNK_BYTES as usize];

/// Whether zeroing gave room back.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum ZeroOutcome {
    Freed,
    InPlace,
}

impl DataBlock {
    /// Makes the file of a new data block, or of its draft, all of it a hole.
    pub(super) fn create(place: BlockPlace, draft: Option<&Path>, charged: ChunkMap) -> io::Result<Self> {
        let bytes = bytes_at_first(&place);
        Ok(Self { file: BlockFile::create(place, draft, bytes)?, state: Arc::new(DataState::new(charged)) })
    }

    /// Opens the file of a data block; `state` is what is known of it in this run.
    pub(super) fn open(place: BlockPlace, state: Option<Arc<DataState>>) -> io::Result<Self> {
        let file = BlockFile::open(place)?;
        let (bytes, length) = (file.reader().metadata()?.len(), u64::from(file.length()));
        // What is encrypted has its whole length from the first moment on.
        if bytes > length || (file.sealed().is_some() && bytes < length) {
            let message = format!("the file has {bytes} bytes where the block has {length}");
            return Err(io::Error::new(io::ErrorKind::InvalidData, message));
        }
        let state = match state {
            Some(state) => state,
            None => Arc::new(DataState::new(chunks_with_data(file.reader(), file.length())?)),
        };
        Ok(Self { file, state })
    }

    pub(in crate::store) fn state(&self) -> &Arc<DataState> {
        &self.state
    }

    /// Its chunks.
    pub(in crate::store) fn all_chunks(&self) -> ChunkMap {
        (0..chunk_count(self.length())).collect()
    }

    /// Writes bytes whose chunks are charged. *Blocking*.
    ///
    /// # Errors
    /// How many bytes were written, and why no more.
    pub(super) fn write_bytes(&self, offset: u32, bytes: &[u8]) -> Result<(), (usize, io::Error)> {
        let writer = self.writer().map_err(|error| (0, error))?;
        if let Some(sealed) = self.sealed() {
            let _alone = sealed.changes.write();
            return sealed.write(&writer, offset, bytes);
        }
        write_at(&writer, offset, bytes)
    }

    /// Makes a range zeros, to which the file reaches then. *Blocking*.
    pub(super) fn zero(&self, range: &Range<u32>) -> io::Result<ZeroOutcome> {
        if self.sealed().is_none() {
            lengthen(&*self.writer()?, range.end)?;
        }
        self.punch(range)
    }

    /// Makes a range zeros, of which the file ends at the beginning, unless it goes on behind the range: then somebody
    /// has written there since. *Blocking*.
    pub(super) fn cut(&self, range: &Range<u32>) -> io::Result<ZeroOutcome> {
        let writer = self.writer()?;
        let bytes = writer.metadata()?.len();
        if self.sealed().is_some() || bytes > u64::from(range.end) {
            return self.punch(range);
        }
        if bytes > u64::from(range.start) {
            writer.set_len(u64::from(range.start))?;
        }
        Ok(ZeroOutcome::Freed)
    }

    fn punch(&self, range: &Range<u32>) -> io::Result<ZeroOutcome> {
        let writer = self.writer()?;
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let Some(sealed) = self.sealed() else {
            return if fallocate(&writer, flags, range)? { Ok(ZeroOutcome::Freed) } else { self.write_zeros(range) };
        };
        // Zeros on disk are zeros of the block where they are whole cells.
        let cells = Sealed::within(range);
        for part in [range.start..cells.start.min(range.end), cells.end.max(range.start)..range.end] {
            self.write_bytes(part.start, &ZEROS[..part.len()]).map_err(|(_, error)| error)?;
        }
        if cells.is_empty() {
            return Ok(ZeroOutcome::InPlace);
        }
        let alone = sealed.changes.write();
        if fallocate(&writer, flags, &cells)? {
            return Ok(ZeroOutcome::Freed);
        }
        drop(alone);
        self.write_zeros(&cells)
    }

    /// Writes zeros, on a file system without holes. What was never charged was never written.
    fn write_zeros(&self, range: &Range<u32>) -> io::Result<ZeroOutcome> {
        let charged = self.state.charged.lock().clone();
        for index in chunks_touching(range.start, range.len() as u32).filter(|index| charged.contains(*index)) {
            let chunk = chunk_range(index, self.length());
            let part = chunk.start.max(range.start)..chunk.end.min(range.end);
            self.write_bytes(part.start, &ZEROS[..part.len()]).map_err(|(_, error)| error)?;
        }
        Ok(ZeroOutcome::InPlace)
    }
}

/// How long the file of a new block is. It ends where the block's last byte was written, so that a file of one block
/// can be read from it by whoever has it; cells of an encrypted one are read before they are written.
fn bytes_at_first(place: &BlockPlace) -> u32 {
    if place.cipher.is_some() { place.length } else { 0 }
}

/// Has a file reach to `end` at least: other than ftruncate(2), whatever others write behind that meanwhile. Where
/// there is no space for one byte, or no such call, it stays shorter, and is read as the same.
pub(super) fn lengthen(file: &File, end: u32) -> io::Result<()> {
    if end == 0 || file.metadata()?.len() >= u64::from(end) {
        return Ok(());
    }
    match fallocate(file, FallocateFlags::empty(), &(end - 1..end)) {
        Err(error) if !is_out_of_space(&error) => Err(error),
        _ => Ok(()),
    }
}

/// Sets room of a file aside, or gives it back; false where the file system cannot do that.
pub(super) fn fallocate(file: &File, flags: FallocateFlags, range: &Range<u32>) -> io::Result<bool> {
    match retry_on_intr(|| rustix::fs::fallocate(file, flags, u64::from(range.start), range.len() as u64)) {
        Ok(()) => Ok(true),
        Err(Errno::OPNOTSUPP | Errno::NOSYS) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// The chunks of a file that are not holes through and through.
pub(super) fn chunks_with_data(file: &File, length: u32) -> io::Result<ChunkMap> {
    let mut chunks = ChunkMap::new();
    let mut at = 0;
    while at < u64::from(length) {
        let start = match rustix::fs::seek(file, SeekFrom::Data(at)) {
            Ok(start) => start,
            Err(Errno::NXIO) => break,
            Err(error) => return Err(error.into()),
        };
        let end = rustix::fs::seek(file, SeekFrom::Hole(start))?.min(u64::from(length));
        if end <= start {
            break;
        }
        // Both lie within the block, which has less than 2^32 bytes.
        chunks.extend(chunks_touching(start as u32, (end - start) as u32));
        at = end;
    }
    Ok(chunks)
}
