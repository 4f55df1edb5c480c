//! The block store: files and an index per data directory, and in memory what placement and eviction need.
//!
//! A block becomes visible to this process chunk by chunk as its bytes are written, and to the next start when its
//! index entry is put (blocks of fs-mode files are kept otherwise: see `data`). Eviction removes the index entry first
//! and the file after it, and never touches the bytes of a file: whoever holds a descriptor goes on reading what it
//! promised.
//!
//! All methods may be called from any thread. Those marked *blocking* wait for a disk; the others take short locks and
//! make at most one unlink or page-cache write.

mod block;
mod data;
mod directory;
mod eviction;
mod file_system;
mod frequency;
mod index;
mod open_blocks;
mod part_checksums;
mod placement;
mod recovery;
mod residence;
mod scrub;
mod sealing;
mod shares;
mod table;

use std::io;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tokio::time::Instant;

pub use block::Block;
use cavern_conf::process::{LogLimit, MissingDir};
use cavern_conf::{ByteSize, DirSpec, Tier};
use cavern_proto::BlockId;
use cavern_proto::chunk::chunk_range;
use cavern_security::KeyWrapping;
pub use data::{DataTarget, Draft, ReferencedBlocks};
pub(crate) use file_system::is_out_of_space;
use parking_lot::Mutex;
pub use part_checksums::{PartError, ReadWait};
pub(crate) use scrub::scrub;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tracing::{error, warn};

use self::directory::{Directory, Identity};
use self::eviction::{Cache, Space};
use self::open_blocks::OpenBlocks;
use self::part_checksums::PartChecksums;
use self::recovery::INCARNATION_BITS;
use self::shares::Shares;
use self::table::{Entry, UNIT_BYTES};
use crate::error::WorkerError;
use crate::metrics::WorkerMetrics;

/// Locks that keep the making and the freeing of one data block apart.
const STRIPES: usize = 64;

/// How a store is set up.
#[derive(Clone, Debug)]
pub struct StoreOptions {
    pub directories: Vec<DirSpec>,
    /// What becomes of those that are not there, or have lost what was in them; those in memory are made anew always.
    pub missing: MissingDir,
    /// Fractions of a directory's capacity: 0 < low ≤ high ≤ 1.
    pub high_watermark: f64,
    pub low_watermark: f64,
    /// What the cached blocks of one mount may take of each directory, in percent: 1 to 100.
    pub mount_cache_share: u32,
    /// What these may take in any case, however little that share is: as much as is reserved at a time, at least.
    pub mount_cache_min: ByteSize,
    /// Block cache of each index.
    pub index_cache: ByteSize,
    /// Blocks kept open at most.
    pub max_open_blocks: usize,
    /// What the keys of the directories are encrypted with; with one, their blocks are encrypted.
    pub keys: Arc<KeyWrapping>,
}

/// Why the store could not keep something. Reading goes on in every case.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// What could be evicted is held by requests, the block exceeds the capacity, or the file system takes no more
    /// bytes.
    #[error("no room: everything that could be evicted is in use, or the file system is full")]
    Full,
    /// No directory works any more.
    #[error("all data directories have failed")]
    NoDirectory,
    /// The block was evicted or dropped meanwhile.
    #[error("the block was dropped meanwhile")]
    Dropped,
    /// A block of an fs-mode file cannot grow: what remains is data like it, or in use.
    #[error("no space: nothing is left that could be evicted for it")]
    NoSpace,
    /// A block of an fs-mode file is asked for that is not here.
    #[error("the block is not here")]
    NoSuchBlock,
    /// The block is not what the request takes it for.
    #[error("{0}")]
    Mismatch(String),
    #[error("{action} failed: {source}")]
    Io { action: &'static str, source: io::Error },
}

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

/// Where a block is.
#[derive(Debug)]
pub enum Lookup {
    Open(Arc<Block>),
    /// Here, but not in memory: [`Store::load`] it.
    Closed,
    Absent,
}

/// A block that went, of which clients may hold descriptors.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Eviction {
    pub id: BlockId,
    pub incarnation: u64,
}

/// One data directory, for reports.
#[derive(Clone, Debug)]
pub struct DirectoryUsage {
    pub path: String,
    pub tier: Tier,
    pub capacity_bytes: u64,
    pub used_bytes: u64,
    /// Of these, what blocks of fs-mode files take.
    pub data_bytes: u64,
    pub blocks: u64,
    pub healthy: bool,
    pub error: String,
}

/// What the lock guards.
#[derive(Debug)]
struct Residents {
    cache: Cache,
    open: OpenBlocks,
}

/// The blocks of a worker.
#[derive(Debug)]
pub struct Store {
    directories: Vec<Directory>,
    residents: Mutex<Residents>,
    /// See `data`.
    stripes: Vec<Mutex<()>>,
    unsettled: data::OpenReservations,
    part_checksums: PartChecksums,
    identity: Mutex<Identity>,
    high_watermark: f64,
    low_watermark: f64,
    /// First incarnation of this run: what is older may be an orphan.
    first_incarnation: u64,
    next_incarnation: AtomicU64,
    started: Instant,
    metrics: WorkerMetrics,
    /// Blocks that clients say they could not sync.
    unsynced: LogLimit<()>,
    evictions: mpsc::Sender<Eviction>,
}

/// Opens the directories, then gives the store and the work that remains for the background. *Blocking*, in proportion
/// to the number of blocks.
///
/// Evicted blocks of which descriptors were handed out are sent to `evictions`; what does not fit there is dropped,
/// because clients close idle descriptors by themselves.
///
/// # Errors
/// A directory that cannot be used, is in use, or belongs to another cluster or format. A damaged index is no error: it
/// is set aside.
pub fn open(
    options: StoreOptions,
    metrics: WorkerMetrics,
    evictions: mpsc::Sender<Eviction>,
) -> Result<(Arc<Store>, Cleanup), WorkerError> {
    let keys = &*options.keys;
    if options.missing != MissingDir::Create {
        directory::check_kept(&options.directories)?;
    }
    let mut opened: Vec<recovery::Opened> = std::thread::scope(|scope| {
        let threads: Vec<_> = (options.directories.iter().cloned().zip(0u8..))
            .map(|(spec, position)| {
                scope.spawn(move || recovery::open(spec, position, options.missing, options.index_cache, keys))
            })
            .collect();
        // A panic in a scan is passed on, as if the scan had run here.
        let join = |thread: std::thread::ScopedJoinHandle<'_, _>| match thread.join() {
            Ok(result) => result,
            Err(panic) => std::panic::resume_unwind(panic),
        };
        threads.into_iter().map(join).collect::<Result<_, WorkerError>>()
    })?;

    let mut identity = common_identity(&opened)?;
    identity.set_encrypted(keys.is_there());
    identity.directories = options.directories.iter().map(|spec| spec.path.clone()).collect();
    for directory in &opened {
        identity.write(&directory.spec.path)?;
    }
    let spaces = opened
        .iter()
        .map(|directory| Space::new(directory.capacity_bytes, options.high_watermark, options.low_watermark))
        .collect();
    let shares = Shares::new(options.mount_cache_share, options.mount_cache_min.bytes());
    let mut cache = Cache::new(spaces, shares);
    insert_data(&mut cache, &mut opened);
    let (mut directories, mut orphaned) = (Vec::new(), Vec::new());
    for mut directory in opened {
        for entry in std::mem::take(&mut directory.entries) {
            if cache.table.find(&entry.id).is_some() {
                // The same block in two directories, after one was taken out of the configuration for a while.
                forget_record(&directory.index, &entry);
                continue;
            }
            cache.insert(entry);
        }
        orphaned.append(&mut directory.orphaned);
        directories.push(Directory::new(directory));
    }
    let first_incarnation = identity.starts << INCARNATION_BITS;
    let store = Arc::new(Store {
        directories,
        residents: Mutex::new(Residents { cache, open: OpenBlocks::new(options.max_open_blocks) }),
        stripes: (0..STRIPES).map(|_| Mutex::new(())).collect(),
        unsettled: data::OpenReservations::default(),
        part_checksums: PartChecksums::new(),
        identity: Mutex::new(identity),
        high_watermark: options.high_watermark,
        low_watermark: options.low_watermark,
        first_incarnation,
        next_incarnation: AtomicU64::new(first_incarnation),
        started: Instant::now(),
        metrics,
        unsynced: LogLimit::default(),
        evictions,
    });
    store.fit_capacity();
    Ok((store.clone(), Cleanup { store, orphaned }))
}

/// Takes in the data blocks of all directories. Of a block that is there twice (its directory was taken out of the
/// configuration for a while, or a power failure undid a deletion) the later file counts; the other is not for us to
/// delete.
fn insert_data(cache: &mut Cache, opened: &mut [recovery::Opened]) {
    let mut data: Vec<Entry> = opened.iter_mut().flat_map(|directory| std::mem::take(&mut directory.data)).collect();
    data.sort_unstable_by_key(|entry| std::cmp::Reverse(entry.incarnation));
    for entry in data {
        if cache.table.find(&entry.id).is_none() {
            cache.insert(entry);
            continue;
        }
        let directory = &opened[usize::from(entry.directory)].spec.path;
        let file = directory::data_path(directory, &entry.id, entry.incarnation, entry.mount_id);
        warn!(block = %entry.id, file = %file.display(),
            "a block of an fs-mode file is there twice: the later file is served, this one is left alone; delete it if \
             nothing of it is missing");
    }
}

/// The identity that all directories get: the first one found, counted up.
fn common_identity(opened: &[recovery::Opened]) -> Result<Identity, WorkerError> {
    let mut identity = opened.iter().find_map(|directory| directory.identity.clone()).unwrap_or_else(Identity::fresh);
    for directory in opened {
        let Some(own) = &directory.identity else { continue };
        if identity.cluster_id.is_empty() {
            identity.cluster_id.clone_from(&own.cluster_id);
        } else if !own.cluster_id.is_empty() && own.cluster_id != identity.cluster_id {
            return Err(WorkerError::ForeignCluster {
                path: directory.spec.path.join("worker.json"),
                found: own.cluster_id.clone(),
                expected: identity.cluster_id,
            });
        }
        identity.starts = identity.starts.max(own.starts);
    }
    let seen = opened.iter().map(|directory| directory.starts_seen).max().unwrap_or(0);
    identity.starts = identity.starts.max(seen) + 1;
    Ok(identity)
}

fn forget_record(index: &index::Index, entry: &Entry) {
    if let Err(error) = index.remove(&entry.id, entry.incarnation) {
        if index::is_out_of_space(&error) {
            // Many of these come together; a record without a file is noticed when the block is asked for.
            tracing::debug!(block = %entry.id, %error, "cannot remove an index entry");
            return;
        }
        warn!(block = %entry.id, %error, "cannot remove an index entry");
    }
}

/// The deletion of what a crash left behind; to be run once, beside serving.
#[derive(Debug)]
pub struct Cleanup {
    store: Arc<Store>,
    orphaned: Vec<std::path::PathBuf>,
}

impl Cleanup {
    /// *Blocking*, possibly for long; ends early when `stop` is cancelled.
    pub fn run(self, stop: &CancellationToken) {
        recovery::delete_orphans(&self.store, self.orphaned, stop);
    }
}

/// Accounting units of a byte range of a file.
fn units_of(range: Range<u32>) -> u32 {
    (range.end - range.start).div_ceil(UNIT_BYTES)
}

/// Accounting units of chunk `index` of a block of `length` bytes.
fn chunk_units(index: u32, length: u32) -> u32 {
    units_of(chunk_range(index, length))
}

impl Store {
    /// Seconds since a moment before the start; 0 is for blocks not used in this run.
    fn now(&self) -> u32 {
        u32::try_from(self.started.elapsed().as_secs()).unwrap_or(u32::MAX).saturating_add(10)
    }

    /// The worker's uuid and the cluster it belongs to (empty while unknown).
    pub fn identity(&self) -> ([u8; 16], String) {
        let identity = self.identity.lock();
        (identity.uuid_bytes().unwrap_or_default(), identity.cluster_id.clone())
    }

    /// Binds the directories to a cluster. *Blocking*.
    ///
    /// # Errors
    /// They belong to another one, or `worker.json` cannot be written.
    pub fn join_cluster(&self, cluster_id: &str) -> Result<(), WorkerError> {
        let mut identity = self.identity.lock();
        if identity.cluster_id == cluster_id {
            return Ok(());
        }
        if !identity.cluster_id.is_empty() {
            let path = self.directories.first().map(|directory| directory.spec.path.join("worker.json"));
            return Err(WorkerError::ForeignCluster {
                path: path.unwrap_or_default(),
                found: identity.cluster_id.clone(),
                expected: cluster_id.to_owned(),
            });
        }
        cluster_id.clone_into(&mut identity.cluster_id);
        self.directories.iter().try_for_each(|directory| identity.write(&directory.spec.path))
    }

    /// The state of each directory.
    pub fn usage(&self) -> Vec<DirectoryUsage> {
        let residents = self.residents.lock();
        let spaces = residents.cache.spaces.iter();
        spaces
            .zip(&self.directories)
            .map(|(space, directory)| DirectoryUsage {
                path: directory.spec.path.display().to_string(),
                tier: directory.tier(),
                capacity_bytes: space.capacity() * u64::from(UNIT_BYTES),
                used_bytes: space.used() * u64::from(UNIT_BYTES),
                data_bytes: space.data() * u64::from(UNIT_BYTES),
                blocks: space.blocks(),
                healthy: directory.is_healthy(),
                error: directory.last_error(),
            })
            .collect()
    }

    /// What blocks of fs-mode files take of the healthy directories, and what these have, in one unit.
    pub fn data_share(&self) -> (u64, u64) {
        let residents = self.residents.lock();
        let spaces = residents.cache.spaces.iter().zip(&self.directories);
        let healthy = spaces.filter(|(_, directory)| directory.is_healthy());
        healthy.fold((0, 0), |(data, capacity), (space, _)| (data + space.data(), capacity + space.capacity()))
    }

    /// Bytes that the healthy directories may take.
    pub fn capacity_bytes(&self) -> u64 {
        self.data_share().1 * u64::from(UNIT_BYTES)
    }

    fn directory_count(&self) -> usize {
        self.directories.len()
    }

    fn directory_path(&self, position: usize) -> &Path {
        &self.directories[position].spec.path
    }

    /// Whether the file of this incarnation is, or may be about to become, that of a known block.
    fn may_own(&self, id: &BlockId, incarnation: u64) -> bool {
        if incarnation >= self.first_incarnation {
            return true;
        }
        let residents = self.residents.lock();
        let entry = residents.cache.table.find(id).and_then(|slot| residents.cache.table.at(slot));
        entry.is_some_and(|entry| entry.incarnation == incarnation)
    }

    /// A disk failed. After several failures in a row its directory is given up: its blocks are forgotten, and
    /// fetched again into others.
    pub(crate) fn disk_failed(&self, block: &Block, action: &'static str, source: io::Error) -> StoreError {
        self.directory_failed(block.directory(), action, &source);
        StoreError::Io { action, source }
    }

    fn directory_failed(&self, position: usize, action: &'static str, cause: &dyn std::fmt::Display) {
        let directory = &self.directories[position];
        warn!(directory = %directory.spec.path.display(), action, cause = %cause, "a data directory failed");
        if directory.failed(cause) {
            let forgotten = self.forget_directory(position);
            error!(directory = %directory.spec.path.display(), blocks = forgotten, cause = %cause,
                "a data directory is given up after repeated errors; its blocks will be fetched again: replace the \
                 disk and restart the worker");
        }
    }

    pub(crate) fn disk_succeeded(&self, block: &Block) {
        self.directories[block.directory()].succeeded();
    }

    /// Writes the indexes to their files. *Blocking*; for an orderly end.
    pub fn flush(&self) {
        for directory in self.directories.iter().filter(|directory| directory.is_healthy()) {
            if let Err(error) = directory.index.flush() {
                warn!(directory = %directory.spec.path.display(), %error, "cannot flush the block index");
            }
        }
    }

    fn new_incarnation(&self) -> u64 {
        self.next_incarnation.fetch_add(1, Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests;
