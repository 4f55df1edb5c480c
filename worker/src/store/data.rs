//! Blocks of fs-mode files: data, not cache.
//!
//! Until the bucket has it, such a block may be the only copy of what somebody wrote. Nothing drops one but a request
//! that names it: no eviction, no watermark, no scrubber, no damaged index, no disk that fails now and then.
//!
//! **The file system is their index.** The name of the file says which block it is, the file's length is the block's
//! length, and what was never written in it is a hole. There is no record beside it that could be lost, or could say
//! something else: a start walks over these files. What is written survives the death of the process without further
//! ado, and a sync needs the disk for the file and its folder alone.
//!
//! **Room** is accounted for by chunk, before a chunk is written for the first time, and cached blocks are evicted for
//! it. Which chunks are charged is kept in memory while the process lives, also for blocks that are closed, because
//! clients may hold descriptors and write what they reserved a while later; after that, and after a start, it is what
//! the file holds (`reservations`).
//!
//! Locks are taken in this order: the stripe that a block is made and freed under (held during the I/O of just that, on
//! threads that may wait), then that of the residents, then that of the charged chunks (both for a moment).

mod draft;
mod orphans;
mod recovery;
mod reservations;
mod room;
mod sync;

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use cavern_proto::chunk::{CHUNK_BYTES, chunk_count, chunk_range, chunks_touching};
use cavern_proto::{BlockId, ChunkMap};
pub use draft::Draft;
pub use orphans::ReferencedBlocks;
use parking_lot::Mutex;
pub(super) use recovery::scan;
pub(super) use reservations::OpenReservations;
use rustix::fs::{FallocateFlags, SeekFrom};
use rustix::io::Errno;
use tokio::time::Instant;

use super::block::{Block, BlockPlace, BlockState, open_to_read};
use super::chunk_units;
use super::sealing::Sealed;

/// Which block of an fs-mode file a request means.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct DataTarget {
    pub id: BlockId,
    /// Bytes of the block, written or not.
    pub length: u32,
    pub mount_id: u32,
}

/// What only data blocks have; it outlives the block's being open.
#[derive(Debug)]
pub(super) struct DataState {
    /// Chunks whose room is accounted for.
    charged: Mutex<ChunkMap>,
    /// Of these, those that the file system has set aside for good.
    allocated: Mutex<ChunkMap>,
    /// When room was given last, unless that has been settled. Taken after the residents' lock, and before the two
    /// above.
    given: Mutex<Option<Instant>>,
    /// The file's name is on disk.
    name_synced: AtomicBool,
    /// The kernel reports once that it could not write pages, and believes them clean from then on.
    sync_failed: AtomicBool,
}

impl DataState {
    fn new(charged: ChunkMap) -> Self {
        Self {
            charged: Mutex::new(charged),
            allocated: Mutex::default(),
            given: Mutex::default(),
            name_synced: AtomicBool::new(false),
            sync_failed: AtomicBool::new(false),
        }
    }
}

/// The chunks that byte ranges of a block touch.
fn chunks_of(ranges: impl IntoIterator<Item = Range<u32>>) -> ChunkMap {
    let mut chunks = ChunkMap::new();
    for range in ranges {
        chunks_touching(range.start, range.len() as u32).for_each(|index| {
            chunks.insert(index);
        });
    }
    chunks
}

/// Accounting units of chunks of a block of `length` bytes.
fn units_of_chunks(chunks: &ChunkMap, length: u32) -> u32 {
    chunks.iter().map(|index| chunk_units(index, length)).sum()
}

static ZEROS: [u8; CHUNK_BYTES as usize] = [0; CHUNK_BYTES as usize];

/// Whether zeroing gave room back.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum ZeroOutcome {
    Freed,
    InPlace,
}

impl Block {
    /// Makes the file of a new data block, all of it a hole.
    fn create_data(place: BlockPlace, charged: ChunkMap) -> io::Result<Self> {
        let writer = File::options().read(true).write(true).create_new(true).open(&place.path)?;
        let made = writer.set_len(u64::from(place.length)).and_then(|()| open_to_read(&place.path));
        match made {
            Ok(file) => Ok(Self::of_data(place, file, Some(Arc::new(writer)), Arc::new(DataState::new(charged)))),
            Err(error) => {
                let _ = std::fs::remove_file(&place.path);
                Err(error)
            }
        }
    }

    /// Opens the file of a data block; `state` is what is known of it in this run.
    fn open_data(place: BlockPlace, state: Option<Arc<DataState>>) -> io::Result<Self> {
        let file = open_to_read(&place.path)?;
        let length = file.metadata()?.len();
        if length != u64::from(place.length) {
            let message = format!("the file has {length} bytes where the block has {}", place.length);
            return Err(io::Error::new(io::ErrorKind::InvalidData, message));
        }
        let state = match state {
            Some(state) => state,
            None => Arc::new(DataState::new(chunks_with_data(&file, place.length)?)),
        };
        Ok(Self::of_data(place, file, None, state))
    }

    fn of_data(place: BlockPlace, file: File, writer: Option<Arc<File>>, data: Arc<DataState>) -> Self {
        // All of it can be read at any time, and nothing of it has a checksum.
        let mut present = ChunkMap::new();
        (0..chunk_count(place.length)).for_each(|index| {
            present.insert(index);
        });
        let state = BlockState { verified: present.clone(), present, crcs: Vec::new() };
        Self::assemble(place, file, writer, state, Some(data))
    }

    /// Writes bytes of a data block whose chunks are charged. *Blocking*.
    ///
    /// # Errors
    /// How many bytes were written, and why no more.
    fn write_bytes(&self, offset: u32, bytes: &[u8]) -> Result<(), (usize, io::Error)> {
        let writer = self.writer().map_err(|error| (0, error))?;
        if let Some(sealed) = self.sealed() {
            let _alone = sealed.alone();
            return sealed.write(&writer, offset, bytes);
        }
        let mut done = 0;
        while done < bytes.len() {
            match writer.write_at(&bytes[done..], u64::from(offset) + done as u64) {
                Ok(0) => return Err((done, io::ErrorKind::WriteZero.into())),
                Ok(written) => done += written,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err((done, error)),
            }
        }
        Ok(())
    }

    /// Makes a range of a data block zeros. *Blocking*.
    fn zero(&self, range: &Range<u32>) -> io::Result<ZeroOutcome> {
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
        let alone = sealed.alone();
        if fallocate(&writer, flags, &cells)? {
            return Ok(ZeroOutcome::Freed);
        }
        drop(alone);
        self.write_zeros(&cells)
    }

    /// The same on a file system without holes. What was never charged was never written.
    fn write_zeros(&self, range: &Range<u32>) -> io::Result<ZeroOutcome> {
        let Some(data) = self.data() else { return Ok(ZeroOutcome::InPlace) };
        let charged = data.charged.lock().clone();
        for index in chunks_touching(range.start, range.len() as u32).filter(|index| charged.contains(*index)) {
            let chunk = chunk_range(index, self.length());
            let part = chunk.start.max(range.start)..chunk.end.min(range.end);
            self.write_bytes(part.start, &ZEROS[..part.len()]).map_err(|(_, error)| error)?;
        }
        Ok(ZeroOutcome::InPlace)
    }
}

/// Sets room of a file aside, or gives it back; false where the file system cannot do that.
fn fallocate(file: &File, flags: FallocateFlags, range: &Range<u32>) -> io::Result<bool> {
    loop {
        match rustix::fs::fallocate(file, flags, u64::from(range.start), range.len() as u64) {
            Ok(()) => return Ok(true),
            Err(Errno::INTR) => {}
            Err(Errno::OPNOTSUPP | Errno::NOSYS) => return Ok(false),
            Err(error) => return Err(error.into()),
        }
    }
}

/// The chunks of a file that are not holes through and through.
fn chunks_with_data(file: &File, length: u32) -> io::Result<ChunkMap> {
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
        chunks_touching(start as u32, (end - start) as u32).for_each(|index| {
            chunks.insert(index);
        });
        at = end;
    }
    Ok(chunks)
}

impl DataState {
    /// Says whether they failed before.
    fn fail_syncs(&self) -> bool {
        self.sync_failed.swap(true, Ordering::AcqRel)
    }

    fn syncs_fail(&self) -> bool {
        self.sync_failed.load(Ordering::Acquire)
    }
}

#[cfg(test)]
mod tests;
