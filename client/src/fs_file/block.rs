//! One block of an fs-mode file as it is open here: at each of its workers, by descriptor where that is on this host.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use cavern_conf::FileUsage;
use cavern_net::WorkerPool;
use cavern_proto::ChunkMap;
use cavern_proto::chunk::{RESERVATION, chunks_touching};
use cavern_proto::data::{BlockRef, ReserveRequest};
use parking_lot::Mutex;
use rustix::fs::SeekFrom;
use rustix::io::Errno;
use tokio::time::Instant;

use super::write_back::Streamed;
use crate::error::ClientError;
use crate::mounts::MountView;
use crate::read::fetch::wire_range;
use crate::read::local_file::{PastEnd, read_now};

/// A block as it is open at each of its workers. Immutable but for the room: other replicas are another open block.
#[derive(Debug)]
pub(super) struct OpenBlock {
    pub name: BlockRef,
    pub generation: u32,
    pub replicas: Vec<Replica>,
    /// It may be written: room is reserved at every replica.
    pub is_writable: bool,
    /// Chunks for which every replica has made room.
    pub reserved: Mutex<ChunkMap>,
    /// When it was made last.
    pub since: Instant,
    /// Bytes that it takes at a worker, as one of them reported last.
    pub reported: ReportedAllocation,
    /// It has been synced by its workers, so its name is on their disks.
    pub is_named: AtomicBool,
    pub streamed: Streamed,
}

/// How many bytes a block takes, as far as a worker has reported that.
#[derive(Debug)]
pub(super) struct ReportedAllocation(AtomicU64);

impl Default for ReportedAllocation {
    fn default() -> Self {
        Self(AtomicU64::new(Self::NOTHING))
    }
}

impl ReportedAllocation {
    const NOTHING: u64 = u64::MAX;

    pub(super) fn set(&self, bytes: Option<u64>) {
        if let Some(bytes) = bytes {
            self.0.store(bytes, Relaxed);
        }
    }

    pub(super) fn get(&self) -> Option<u64> {
        Some(self.0.load(Relaxed)).filter(|bytes| *bytes != Self::NOTHING)
    }
}

/// A block at one worker.
#[derive(Clone, Debug)]
pub(super) struct Replica {
    pub worker: u64,
    /// Which of the replicas that the block ever had there; see `Extent`.
    pub joined: u32,
    /// Names the block's file there.
    pub incarnation: u64,
    /// Where the worker is on this host.
    pub file: Option<Arc<File>>,
    /// Bytes that it took when room was reserved there.
    pub allocated: Option<u64>,
}

impl OpenBlock {
    /// One that may be read and not written.
    pub(super) fn to_read(name: BlockRef, generation: u32, replicas: Vec<Replica>) -> Self {
        let (reserved, since) = (Mutex::new(ChunkMap::new()), Instant::now());
        let (reported, is_named) = (ReportedAllocation::default(), AtomicBool::new(false));
        let streamed = Streamed::default();
        Self { name, generation, replicas, is_writable: false, reserved, since, reported, is_named, streamed }
    }

    /// One that has room for these bytes.
    pub(super) fn to_write(name: BlockRef, generation: u32, replicas: Vec<Replica>, bytes: &Range<u32>) -> Self {
        let mut reserved = ChunkMap::new();
        for chunk in chunks_touching(bytes.start, bytes.len() as u32) {
            reserved.insert(chunk);
        }
        let open = Self::to_read(name, generation, replicas);
        open.reported.set(open.replicas.iter().find_map(|replica| replica.allocated));
        Self { is_writable: true, reserved: Mutex::new(reserved), ..open }
    }

    /// This block at some of its replicas only.
    pub(super) fn with_replicas(&self, replicas: Vec<Replica>) -> Self {
        let open = Self::to_read(self.name.clone(), self.generation, replicas);
        open.reported.set(self.reported.get());
        open.is_named.store(self.is_named.load(Relaxed), Relaxed);
        let reserved = Mutex::new(self.reserved.lock().clone());
        Self { is_writable: self.is_writable, reserved, since: self.since, ..open }
    }

    /// Whether room that was made counts still, which it does longer for the workers.
    pub(super) fn is_reserved(&self) -> bool {
        self.is_writable && self.since.elapsed() < RESERVATION / 2
    }

    /// Whether bytes may be written through descriptors.
    pub(super) fn has_room(&self, bytes: &Range<u32>) -> bool {
        self.is_reserved() && self.reserved.lock().contains_all(chunks_touching(bytes.start, bytes.len() as u32))
    }

    /// Whether all replicas are on this host.
    pub(super) fn is_local(&self) -> bool {
        self.replicas.iter().all(|replica| replica.file.is_some())
    }

    pub(super) fn workers(&self) -> Vec<u64> {
        self.replicas.iter().map(|replica| replica.worker).collect()
    }

    /// Descriptors, at its workers of this host.
    pub(super) fn files(&self) -> impl Iterator<Item = &Arc<File>> {
        self.replicas.iter().filter_map(|replica| replica.file.as_ref())
    }

    /// A descriptor to read through.
    pub(super) fn file(&self) -> Option<&Arc<File>> {
        self.files().next()
    }

    /// Bytes that it takes at one of its workers, where that is known here. A look at a file of this host waits for no
    /// disk.
    pub(super) fn allocated(&self) -> Option<u64> {
        let of_file = |file: &Arc<File>| FileUsage::of(file).ok().map(|used| used.allocated);
        self.file().map_or_else(|| self.reported.get(), of_file)
    }

    /// Fills `buffer` without waiting for a disk; false when that cannot be done.
    pub(super) fn read_now(&self, offset: u32, buffer: &mut [u8]) -> bool {
        self.file().is_some_and(|file| read_now(file, u64::from(offset), buffer, PastEnd::Zeros))
    }
}

/// How workers call a block of an inode, of this generation, with this index.
pub(super) fn block_name(
    pool: &WorkerPool,
    mount: &MountView,
    (inode, generation, index): (u64, u32, u32),
) -> BlockRef {
    BlockRef::of_inode(&pool.cluster_id(), inode, generation, index, mount.block_size(), mount.id())
}

pub(super) fn reservation(name: &BlockRef, bytes: &Range<u32>) -> ReserveRequest {
    ReserveRequest { block: Some(name.clone()), ranges: vec![wire_range(bytes)], ..ReserveRequest::default() }
}

/// Makes room in a block at a worker.
pub(super) async fn reserve(
    pool: &WorkerPool,
    worker: u64,
    request: ReserveRequest,
    wait: Duration,
) -> Result<Replica, ClientError> {
    let reserved = pool.reserve(worker, request, wait).await?;
    let file = reserved.descriptor.map(|descriptor| Arc::new(File::from(descriptor)));
    Ok(Replica { worker, joined: 0, incarnation: reserved.incarnation, file, allocated: reserved.allocated })
}

/// Where bytes that are not zeros by nature begin or end in a block's file, from an offset on; `None` when there are
/// none.
pub(super) fn seek_data(file: &File, from: u32) -> io::Result<Option<u32>> {
    seek(file, SeekFrom::Data(u64::from(from)))
}

/// What lies behind the end of the file is a hole.
pub(super) fn seek_hole(file: &File, from: u32) -> io::Result<u32> {
    Ok(seek(file, SeekFrom::Hole(u64::from(from)))?.unwrap_or(from))
}

fn seek(file: &File, to: SeekFrom) -> io::Result<Option<u32>> {
    match rustix::fs::seek(file, to) {
        Ok(at) => Ok(u32::try_from(at).ok()),
        Err(Errno::NXIO) => Ok(None),
        Err(error) => Err(error.into()),
    }
}
