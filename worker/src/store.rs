//! The block stores of a worker: files and an index per data directory, and in memory what placement and eviction need.
//!
//! ```text
//!   CacheStore   blocks of objects: checksummed chunks, evicted by policy
//!   DataStore    blocks of fs-mode files: written in place, reserved, synced, freed by name
//!   ───────────────────────────────────────────────────────────────────────────────────────
//!   BlockTable   entries, room and eviction lists under one lock; directories, disks and their faults, encryption
//! ```
//!
//! Which of the two a block belongs to is decided where it is named: by the reference in a request, and at a start by
//! the folder that its file is in.
//!
//! All methods may be called from any thread. Those marked *blocking* wait for a disk; the others take short locks and
//! make at most one unlink or page-cache write.

mod block;
mod block_file;
mod cache;
mod collector;
mod data;
mod directory;
mod discard;
mod error;
mod eviction;
mod file_system;
mod files;
mod frequency;
mod index;
mod open_blocks;
mod page_cache;
mod placement;
mod recovery;
mod sealing;
mod slab;
mod space;
mod table;

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use cavern_conf::{Budget, DirSpec, schema};
use cavern_security::KeyWrapping;
use parking_lot::Mutex;
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::warn;

pub use self::block::Block;
pub use self::block_file::{ReadError, ReadWait};
pub use self::cache::CacheStore;
pub use self::cache::block::CachedBlock;
pub(crate) use self::cache::scrub::scrub;
pub use self::collector::StoreCollector;
pub use self::data::block::DataBlock;
pub use self::data::draft::Draft;
pub use self::data::{DataStore, DataTarget};
use self::directory::{DataName, INCARNATION_BITS, Identity};
pub use self::error::StoreError;
use self::eviction::Cache;
use self::open_blocks::OpenBlocks;
use self::slab::Entry;
pub use self::slab::Lookup;
use self::space::{Shares, Space, SpaceLimits};
use self::table::TableState;
pub use self::table::{BlockTable, Eviction, Touch};
use crate::error::WorkerError;
use crate::metrics::WorkerMetrics;

/// How a store is set up.
#[derive(Clone, Debug)]
pub struct StoreOptions {
    pub conf: schema::Worker,
    /// Those that are configured.
    pub directories: Vec<DirSpec>,
    /// Blocks kept open at most.
    pub max_open_blocks: usize,
    /// What the keys of the directories are encrypted with; with one, their blocks are encrypted.
    pub keys: Arc<KeyWrapping>,
    /// Of the memory and threads of the indexes.
    pub budget: Budget,
}

/// The stores of a worker, over one table of blocks; cloning is cheap and gives the same ones.
#[derive(Clone, Debug)]
pub struct Stores {
    pub table: Arc<BlockTable>,
    pub cache: Arc<CacheStore>,
    pub data: Arc<DataStore>,
}

/// Opens the directories, then gives the stores and the work that remains for the background. *Blocking*, in proportion
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
) -> Result<(Stores, Cleanup), WorkerError> {
    let (by, conf, keys) = (&options, &options.conf, &*options.keys);
    if !options.conf.create_dirs {
        directory::check_kept(&options.directories)?;
    }
    let mut opened: Vec<recovery::Opened> = std::thread::scope(|scope| {
        let threads: Vec<_> = (options.directories.iter().cloned().zip(0u8..))
            .map(|(spec, position)| scope.spawn(move || recovery::open(spec, position, by)))
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
    for spec in &options.directories {
        identity.write(&spec.path)?;
    }
    let space = |opened: &recovery::Opened| {
        Space::new(SpaceLimits::new(opened.directory.capacity_bytes, conf.high_watermark, conf.low_watermark))
    };
    let shares = Shares::new(conf.mount_cache_share, conf.fill_size_max.bytes());
    let mut cache = Cache::new(opened.iter().map(space).collect(), shares);
    insert_data(&mut cache, &mut opened);
    let (mut directories, mut orphaned) = (Vec::new(), Vec::new());
    for mut opened in opened {
        for entry in opened.entries {
            if cache.slab.find(&entry.id).is_some() {
                // The same block in two directories, after one was taken out of the configuration for a while.
                opened.directory.index.forget(&entry.id, entry.incarnation);
                continue;
            }
            cache.insert(entry);
        }
        orphaned.append(&mut opened.orphaned);
        directories.push(opened.directory);
    }
    let first_incarnation = identity.starts << INCARNATION_BITS;
    let table = Arc::new(BlockTable {
        directories,
        residents: Mutex::new(TableState { cache, open: OpenBlocks::new(options.max_open_blocks) }),
        identity: Mutex::new(identity),
        high_watermark: conf.high_watermark,
        low_watermark: conf.low_watermark,
        first_incarnation,
        next_incarnation: AtomicU64::new(first_incarnation),
        started: Instant::now(),
        metrics,
        evictions,
    });
    table.fit_capacity();
    let (cache, data) = (Arc::new(CacheStore::new(table.clone())), Arc::new(DataStore::new(table.clone())));
    Ok((Stores { table: table.clone(), cache, data }, Cleanup { table, orphaned }))
}

/// Takes in the data blocks of all directories. Of a block that is there twice (its directory was taken out of the
/// configuration for a while, or a power failure undid a deletion) the later file counts; the other is not for us to
/// delete.
fn insert_data(cache: &mut Cache, opened: &mut [recovery::Opened]) {
    let mut data: Vec<Entry> = opened.iter_mut().flat_map(|opened| std::mem::take(&mut opened.data)).collect();
    data.sort_unstable_by_key(|entry| std::cmp::Reverse(entry.incarnation));
    for entry in data {
        if cache.slab.find(&entry.id).is_none() {
            cache.insert(entry);
            continue;
        }
        let directory = &opened[usize::from(entry.directory)].directory.spec.path;
        let Entry { id, incarnation, mount_id, length, .. } = entry;
        let file = directory::data_path(directory, &DataName { id, incarnation, mount_id, length });
        warn!(block = %entry.id, file = %file.display(),
            "a block of an fs-mode file is there twice: the later file is served, this one is left alone; delete it if \
             nothing of it is missing");
    }
}

/// The identity that all directories get: the first one found, counted up.
fn common_identity(opened: &[recovery::Opened]) -> Result<Identity, WorkerError> {
    let mut identity = opened.iter().find_map(|opened| opened.identity.clone()).unwrap_or_else(Identity::fresh);
    for opened in opened {
        let Some(own) = &opened.identity else { continue };
        if identity.cluster_id.is_empty() {
            identity.cluster_id.clone_from(&own.cluster_id);
        } else if !own.cluster_id.is_empty() && own.cluster_id != identity.cluster_id {
            return Err(WorkerError::ForeignCluster {
                path: opened.directory.spec.path.join("worker.json"),
                found: own.cluster_id.clone(),
                expected: identity.cluster_id,
            });
        }
        identity.starts = identity.starts.max(own.starts);
    }
    let seen = opened.iter().map(|opened| opened.starts_seen).max().unwrap_or(0);
    identity.starts = identity.starts.max(seen) + 1;
    Ok(identity)
}

/// The deletion of what a crash left behind; to be run once, beside serving.
#[derive(Debug)]
pub struct Cleanup {
    table: Arc<BlockTable>,
    orphaned: Vec<std::path::PathBuf>,
}

impl Cleanup {
    /// *Blocking*, possibly for long; ends early when `stop` is cancelled.
    pub fn run(self, stop: &CancellationToken) {
        recovery::delete_orphans(&self.table, self.orphaned, stop);
    }
}

#[cfg(test)]
mod tests;
