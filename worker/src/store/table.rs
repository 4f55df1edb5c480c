//! The table of blocks: every block of the worker, of both kinds, with the directory that its file is in and the room
//! that it takes. Both stores work on it; what is here is the same for cached blocks and for data.
//!
//! One lock guards the entries, the eviction lists and the ring of open blocks; it is held for a few hundred
//! nanoseconds, never during I/O. What goes is taken out of the table under the lock, and its index entry and file are
//! removed when the lock is released ([`Locked`]); a block that comes back in between gets a new incarnation, hence
//! another file, and `Index::remove` spares its record.
//!
//! Locks are taken in this order: the stripe that a data block is made and freed under, that of a directory's fitted
//! capacity, that of the residents, then those of one block.

use std::fmt;
use std::io;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicU64, Ordering};

use cavern_proto::BlockId;
use cavern_proto::master::DiskReport;
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::mpsc;
use tokio::time::Instant;
use tracing::{error, warn};

use super::block::Block;
use super::block_file::{BehindEnd, BlockFile, BlockPlace};
use super::directory::{DataName, Directory, Identity, block_path, data_path};
use super::error::{StoreError, is_out_of_space};
use super::eviction::{Cache, EvictionCounts};
use super::open_blocks::OpenBlocks;
use super::placement::Candidate;
use super::slab::{Entry, Kind, Lookup};
use super::space::{Space, UNIT_BYTES};
use crate::error::WorkerError;
use crate::metrics::WorkerMetrics;

/// Blocks that are confirmed under the lock at a time.
const CONFIRM_BATCH: usize = 256;
/// Entries looked at under the lock at a time by walks over all blocks.
const WALK_BATCH: u32 = 10_000;

/// What a request does to a block's standing in eviction.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Touch {
    /// One use.
    Open,
    /// A use of this many bytes; uses are counted by the block's worth.
    Read(u32),
    /// Keeps it recent, counts as no use (read-ahead).
    Refresh,
    /// Leaves everything as it is.
    None,
}

/// A block that went, of which clients may hold descriptors.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Eviction {
    pub id: BlockId,
    pub incarnation: u64,
}

/// What the lock guards.
#[derive(Debug)]
pub(super) struct TableState {
    pub cache: Cache,
    pub open: OpenBlocks,
}

impl TableState {
    /// Adds an entry with its block. Others may be closed for it.
    pub(super) fn insert(&mut self, entry: Entry, block: Block) {
        let slot = self.cache.insert(entry);
        self.open(slot, block);
    }

    /// Notes the block that was opened for an entry. Others may be closed for it.
    pub(super) fn open(&mut self, slot: u32, block: Block) {
        if let Some(entry) = self.cache.slab.at_mut(slot) {
            entry.open(block);
        }
        self.open.opened(&mut self.cache.slab, slot);
    }
}

/// The lock of the table. When it is released, the blocks are closed that were to be, and the files of those deleted
/// that have gone meanwhile. *Blocking* then, if any have.
pub(super) struct Locked<'a> {
    residents: MutexGuard<'a, TableState>,
    left: DeferredWork<'a>,
}

/// What is left to be done after the release of the lock.
struct DeferredWork<'a> {
    table: &'a BlockTable,
    departures: EvictionCounts,
    closed: Vec<Block>,
}

impl Deref for Locked<'_> {
    type Target = TableState;

    fn deref(&self) -> &TableState {
        &self.residents
    }
}

impl DerefMut for Locked<'_> {
    fn deref_mut(&mut self) -> &mut TableState {
        &mut self.residents
    }
}

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        // The lock is released before what is left is dropped in its turn.
        self.left.departures = std::mem::take(&mut self.residents.cache.departures);
        self.left.closed = std::mem::take(&mut self.residents.open.closed);
    }
}

impl Drop for DeferredWork<'_> {
    fn drop(&mut self) {
        self.closed.clear();
        let EvictionCounts { gone, evicted, rejected } = &self.departures;
        if !gone.is_empty() {
            self.table.metrics.evicted_blocks.inc_by(*evicted);
            self.table.metrics.admissions_rejected.inc_by(*rejected);
            gone.iter().for_each(|entry| self.table.delete(entry));
        }
    }
}

/// The blocks of a worker. See the top of this file for its lock.
#[derive(Debug)]
pub struct BlockTable {
    pub(super) directories: Vec<Directory>,
    pub(super) residents: Mutex<TableState>,
    pub(super) identity: Mutex<Identity>,
    pub(super) high_watermark: f64,
    pub(super) low_watermark: f64,
    /// First incarnation of this run: what is older may be an orphan.
    pub(super) first_incarnation: u64,
    pub(super) next_incarnation: AtomicU64,
    pub(super) started: Instant,
    pub(super) metrics: WorkerMetrics,
    pub(super) evictions: mpsc::Sender<Eviction>,
}

impl BlockTable {
    /// Seconds since a moment before the start; 0 is for blocks not used in this run.
    pub(super) fn now(&self) -> u32 {
        u32::try_from(self.started.elapsed().as_secs()).unwrap_or(u32::MAX).saturating_add(10)
    }

    pub(super) fn lock(&self) -> Locked<'_> {
        let now = self.now();
        let mut residents = self.residents.lock();
        residents.cache.now = now;
        Locked {
            residents,
            left: DeferredWork { table: self, departures: EvictionCounts::default(), closed: Vec::new() },
        }
    }

    /// Calls `each` for all slots, some thousand at a time under the lock, and `then` for what it has found in between.
    pub(super) fn walk<T>(&self, mut each: impl FnMut(&mut Cache, u32) -> Option<T>, mut then: impl FnMut(T)) {
        let mut from = 0;
        loop {
            let mut residents = self.lock();
            let cache = &mut residents.cache;
            let until = cache.slab.slot_count().min(from + WALK_BATCH);
            let found: Vec<T> = (from..until).filter_map(|slot| each(cache, slot)).collect();
            let is_over = until == cache.slab.slot_count();
            drop(residents);
            found.into_iter().for_each(&mut then);
            if is_over {
                return;
            }
            from = until;
        }
    }

    pub(super) fn new_incarnation(&self) -> u64 {
        self.next_incarnation.fetch_add(1, Ordering::Relaxed)
    }

    /// The worker's uuid, the id that it had last and the cluster it belongs to: 0 and empty while unknown.
    pub fn identity(&self) -> ([u8; 16], u64, String) {
        let identity = self.identity.lock();
        (identity.uuid_bytes().unwrap_or_default(), identity.worker_id, identity.cluster_id.clone())
    }

    /// Binds the directories to a cluster, which has the worker under this id. *Blocking*.
    ///
    /// # Errors
    /// They belong to another one, or `worker.json` cannot be written.
    pub fn join_cluster(&self, worker_id: u64, cluster_id: &str) -> Result<(), WorkerError> {
        let mut identity = self.identity.lock();
        if (identity.worker_id, identity.cluster_id.as_str()) == (worker_id, cluster_id) {
            return Ok(());
        }
        if !identity.cluster_id.is_empty() && identity.cluster_id != cluster_id {
            let path = self.directories.first().map(|directory| directory.spec.path.join("worker.json"));
            return Err(WorkerError::ForeignCluster {
                path: path.unwrap_or_default(),
                found: identity.cluster_id.clone(),
                expected: cluster_id.to_owned(),
            });
        }
        cluster_id.clone_into(&mut identity.cluster_id);
        identity.worker_id = worker_id;
        self.directories.iter().try_for_each(|directory| identity.write(&directory.spec.path))
    }

    /// The state of each directory.
    pub fn usage(&self) -> Vec<DiskReport> {
        let residents = self.lock();
        let spaces = residents.cache.spaces.iter();
        spaces
            .zip(&self.directories)
            .map(|(space, directory)| DiskReport {
                path: directory.spec.path.display().to_string(),
                tier: directory.spec.tier.name().to_owned(),
                capacity_bytes: space.limits.capacity * u64::from(UNIT_BYTES),
                used_bytes: space.used() * u64::from(UNIT_BYTES),
                data_bytes: space.data.units * u64::from(UNIT_BYTES),
                blocks: space.blocks,
                healthy: directory.is_healthy(),
                error: directory.health.last_error(),
            })
            .collect()
    }

    /// What blocks of fs-mode files take of the healthy directories, and what these have, in one unit.
    pub fn data_share(&self) -> (u64, u64) {
        let candidates = self.candidates();
        candidates.iter().fold((0, 0), |(data, all), candidate| (data + candidate.data, all + candidate.capacity))
    }

    /// Bytes that the healthy directories may take.
    pub fn capacity_bytes(&self) -> u64 {
        self.data_share().1 * u64::from(UNIT_BYTES)
    }

    /// The healthy directories as placement sees them, in units.
    pub(super) fn candidates(&self) -> Vec<Candidate> {
        let residents = self.lock();
        let spaces = residents.cache.spaces.iter().zip(&self.directories).enumerate();
        let healthy = spaces.filter(|(_, (_, directory))| directory.is_healthy());
        let candidate = |(position, (space, directory)): (usize, (&Space, &Directory))| {
            let (capacity, free, data) = (space.limits.capacity, space.free(), space.data.units);
            Candidate { position, tier: directory.spec.tier, capacity, free, data }
        };
        healthy.map(candidate).collect()
    }

    /// Finds a block, as those of its kind `look` at an entry, and counts the use.
    pub(super) fn get<B>(&self, id: &BlockId, touch: Touch, look: impl FnOnce(&Entry) -> Lookup<B>) -> Lookup<B> {
        let mut residents = self.lock();
        let cache = &mut residents.cache;
        let Some(slot) = cache.slab.find(id) else {
            if matches!(touch, Touch::Open | Touch::Read(_)) {
                cache.count_use(id);
            }
            return Lookup::Absent;
        };
        let Some(entry) = cache.slab.at_mut(slot) else { return Lookup::Absent };
        let found = look(entry);
        if touch == Touch::None || matches!(found, Lookup::Other) {
            return found;
        }
        entry.shared |= touch == Touch::Open;
        let length = entry.length;
        let counts = match (touch, entry.cached_mut()) {
            (Touch::Open, Some(_)) => true,
            (Touch::Read(bytes), Some(cached)) => {
                cached.credit = cached.credit.saturating_add(bytes);
                let whole = cached.credit >= length;
                cached.credit -= if whole { length } else { 0 };
                whole
            }
            // Data is in no contest for its place.
            _ => false,
        };
        cache.touch(slot);
        if counts {
            cache.count_use(id);
        }
        found
    }

    /// The incarnations of blocks of which clients have descriptors, as far as they are here. Those with `true` were
    /// read, and count as used.
    pub fn confirm(&self, files: &[(Option<BlockId>, bool)]) -> Vec<Option<u64>> {
        let mut incarnations = Vec::with_capacity(files.len());
        for batch in files.chunks(CONFIRM_BATCH) {
            let mut residents = self.lock();
            let cache = &mut residents.cache;
            incarnations.extend(batch.iter().map(|(id, is_read)| {
                let slot = cache.slab.find(id.as_ref()?)?;
                let entry = cache.slab.at_mut(slot)?;
                // Also where it was handed out by the process before.
                entry.shared = true;
                let (id, incarnation) = (entry.id, entry.incarnation);
                if *is_read {
                    cache.touch(slot);
                    cache.count_use(&id);
                }
                Some(incarnation)
            }));
        }
        incarnations
    }

    /// Where the file of a block is, or is to be.
    pub(super) fn place(&self, entry: &Entry) -> BlockPlace {
        let Entry { id, incarnation, length, mount_id, .. } = *entry;
        let position = usize::from(entry.directory);
        let directory = &self.directories[position];
        let (path, behind_end) = match entry.kind {
            Kind::Cached(_) => (block_path(&directory.spec.path, &id, incarnation), BehindEnd::Missing),
            Kind::Data(_) => {
                let name = DataName { id, incarnation, mount_id, length };
                (data_path(&directory.spec.path, &name), BehindEnd::Zeros)
            }
        };
        let cipher = directory.cipher.clone();
        BlockPlace { id, incarnation, length, mount_id, directory: position, path, behind_end, cipher }
    }

    /// Whether the file of this incarnation is, or may be about to become, that of a known block.
    pub(super) fn may_own(&self, id: &BlockId, incarnation: u64) -> bool {
        incarnation >= self.first_incarnation || self.is_resident(id, incarnation)
    }

    /// Whether this incarnation of a block is here.
    pub(super) fn is_resident(&self, id: &BlockId, incarnation: u64) -> bool {
        self.lock().cache.slab.find_as(id, incarnation).is_some()
    }

    /// A disk failed. After several failures in a row its directory is given up: its blocks are forgotten, and
    /// fetched again into others.
    pub(crate) fn disk_failed(&self, block: &BlockFile, action: &'static str, source: io::Error) -> StoreError {
        self.directory_failed(block.directory(), action, &source);
        StoreError::Io { action, source }
    }

    pub(super) fn directory_failed(&self, position: usize, action: &'static str, cause: &dyn fmt::Display) {
        let directory = &self.directories[position];
        warn!(directory = %directory.spec.path.display(), action, cause = %cause, "a data directory failed");
        if directory.health.failed(cause) {
            let forgotten = self.forget_directory(position);
            error!(directory = %directory.spec.path.display(), blocks = forgotten, cause = %cause,
                "a data directory is given up after repeated errors; its blocks will be fetched again: replace the \
                 disk and restart the worker");
        }
    }

    /// A file cannot be made in a directory: its disk has failed, or, which is `full`, takes no more bytes.
    pub(super) fn not_made(
        &self,
        position: usize,
        action: &'static str,
        source: io::Error,
        full: StoreError,
    ) -> StoreError {
        if is_out_of_space(&source) {
            self.out_of_space(position);
            return full;
        }
        self.directory_failed(position, action, &source);
        StoreError::Io { action, source }
    }

    pub(super) fn disk_succeeded(&self, block: &BlockFile) {
        self.directories[block.directory()].health.succeeded();
    }

    /// Writes the indexes to their files. *Blocking*; for an orderly end.
    pub fn flush(&self) {
        for directory in self.directories.iter().filter(|directory| directory.is_healthy()) {
            if let Err(error) = directory.index.flush() {
                warn!(directory = %directory.spec.path.display(), %error, "cannot flush the block index");
            }
        }
    }
}
