//! What happens to a data directory at start: lock, identity, index, the walk over its records, and afterwards, in the
//! background, the deletion of files that no record names.
//!
//! No file of a cached block is touched before the worker serves. A record is believed to exist, its bytes are not:
//! they are checked when they are first asked for (see `block`).

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use cavern_conf::process::{MissingDir, ensure_dir};
use cavern_conf::{DirSpec, Tier};
use cavern_proto::ChunkMap;
use cavern_proto::chunk::chunk_count;
use parking_lot::Mutex;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::StoreOptions;
use super::data::draft;
use super::directory::{self, DataName, Directory, DiskHealth, INCARNATION_BITS, Identity, parse_data_name};
use super::index::{Index, IndexError, IndexOptions};
use super::sealing::Cipher;
use super::slab::Entry;
use super::space::{UNIT_BYTES, units_of_chunks, units_on_disk};
use super::table::BlockTable;
use crate::error::WorkerError;

/// A directory after its index was read.
pub(super) struct Opened {
    pub directory: Directory,
    pub identity: Option<Identity>,
    pub entries: Vec<Entry>,
    /// Blocks of fs-mode files, which no index can lose.
    pub data: Vec<Entry>,
    /// Folder of block files that no index knows, to be deleted.
    pub orphaned: Vec<PathBuf>,
    /// Highest start whose incarnations were seen.
    pub starts_seen: u64,
}

/// Opens one directory. `position` is its place in the configuration.
pub(super) fn open(spec: DirSpec, position: u8, by: &StoreOptions) -> Result<Opened, WorkerError> {
    let (path, keys) = (spec.path.clone(), &*by.keys);
    let failed = |action| WorkerError::directory(action, &path);
    // Those in memory are made anew always.
    let missing = MissingDir::of("worker.create_dirs", by.conf.create_dirs || spec.tier == Tier::Mem);
    ensure_dir(&path, "worker.dirs", missing)?;
    let lock = directory::lock(&path)?;
    let identity = Identity::read(&path)?;
    let mut cipher = Cipher::read(&path, keys)?;
    if cipher.is_none() && identity.as_ref().is_some_and(Identity::is_encrypted) {
        return Err(WorkerError::DirectoryKeyLost(path));
    }

    let size = |bytes: u64| usize::try_from(bytes).unwrap_or(usize::MAX);
    let options = IndexOptions {
        cache_bytes: size(by.conf.index_cache.bytes()),
        write_buffer_bytes: size(by.budget.index_write_buffer(by.directories.len())),
        background_jobs: by.budget.background_jobs,
    };
    let mut opened = open_index(&path, position, options);
    if let Err(IndexError::Damaged(reason)) = &opened {
        let kept = set_aside(&path, "index", "damaged").map_err(failed("set the damaged index aside in"))?;
        set_aside(&path, "blocks", "orphaned").map_err(failed("set blocks aside in"))?;
        warn!(directory = %path.display(), kept = %kept.display(), reason,
            "the block index is damaged: set aside, the directory starts empty and its blocks are fetched again");
        opened = open_index(&path, position, options);
    }
    let (index, entries) = opened.map_err(|error| match error {
        IndexError::Damaged(reason) => failed("make a new index in")(io::Error::other(reason)),
        IndexError::Unusable(source) => WorkerError::Index { path: path.join("index"), source },
    })?;
    directory::make_folders(&path)?;
    let data = scan_data(&path, position, cipher.as_ref()).map_err(failed("read the data blocks of"))?;

    if cipher.is_none() && keys.is_there() {
        if !entries.is_empty() || !data.is_empty() {
            return Err(WorkerError::DirectoryInClear { path, blocks: entries.len() + data.len() });
        }
        cipher = Some(Cipher::make(&path, keys)?);
    }

    let used: u64 = entries.iter().chain(&data).map(|entry| u64::from(entry.units) * u64::from(UNIT_BYTES)).sum();
    let capacity_bytes = match spec.capacity {
        Some(capacity) => capacity.bytes(),
        // What is free and what our own blocks take, less five percent for the index and the file system itself.
        None => (directory::file_system_bytes(&path)?.1 + used) / 100 * 95,
    };
    let starts_seen = entries.iter().chain(&data).map(|entry| entry.incarnation >> INCARNATION_BITS).max().unwrap_or(0);
    let orphaned = orphaned_folders(&path).map_err(failed("read"))?;
    let (blocks, data_blocks, encrypted) = (entries.len(), data.len(), cipher.is_some());
    info!(directory = %path.display(), blocks, data_blocks, used_bytes = used, capacity_bytes, encrypted,
        "opened a data directory");
    let directory = Directory {
        spec,
        capacity_bytes,
        fitted: Mutex::default(),
        index,
        cipher: cipher.map(Arc::new),
        health: DiskHealth::default(),
        _lock: lock,
    };
    Ok(Opened { directory, identity, entries, data, orphaned, starts_seen })
}

fn open_index(path: &Path, position: u8, options: IndexOptions) -> Result<(Index, Vec<Entry>), IndexError> {
    let index = Index::open(&path.join("index"), options)?;
    let mut entries = Vec::new();
    let skipped = index.scan(|id, record| {
        let mut entry = Entry::new(id, record.incarnation, record.length, record.mount_id, position);
        let present = ChunkMap::from_bytes(&record.present);
        let chunks = present.iter().take_while(|index| *index < chunk_count(record.length));
        entry.units = units_of_chunks(chunks, record.length);
        entries.push(entry);
    })?;
    if skipped > 0 {
        warn!(directory = %path.display(), records = skipped, "skipped records of the block index that make no sense");
    }
    Ok((index, entries))
}

/// Every data block of the directory at `position`, found by its file, with what it takes of the disk. Files that are
/// not ours are left alone.
fn scan_data(directory: &Path, position: u8, cipher: Option<&Cipher>) -> io::Result<Vec<Entry>> {
    let is_draft = |name: &str| name.strip_suffix(draft::SUFFIX).is_some_and(|name| parse_data_name(name).is_some());
    let (mut entries, mut strange, mut first) = (Vec::new(), 0u64, None);
    for folder in directory::folders(&directory.join("data")) {
        for item in std::fs::read_dir(folder)? {
            let item = item?;
            let stat = item.metadata()?;
            let name = item.file_name();
            let ours = name.to_str().and_then(parse_data_name).filter(|_| stat.is_file());
            match ours {
                // The worker died before the file had its length, and so before anything was answered.
                Some(_) if cipher.is_some() && stat.len() == 0 => std::fs::remove_file(item.path())?,
                // However much of the block the file has: nothing at all, if what was answered last was that there is
                // room, or that the block ends where it begins.
                Some(DataName { id, incarnation, mount_id, length }) => {
                    let mut entry = Entry::of_data(id, incarnation, length, mount_id, position);
                    entry.units = units_on_disk(&stat);
                    entries.push(entry);
                }
                // A block that was being made when the worker died.
                None if name.to_str().is_some_and(is_draft) => std::fs::remove_file(item.path())?,
                None => {
                    strange += 1;
                    first.get_or_insert_with(|| item.path());
                }
            }
        }
    }
    if let Some(first) = first {
        warn!(files = strange, first = %first.display(), "files among the data blocks that are none: left alone");
    }
    Ok(entries)
}

/// Renames what a directory has under `name`, if anything, to the first free name that says what has become of it.
fn set_aside(directory: &Path, name: &str, what: &str) -> io::Result<PathBuf> {
    let mut names = (1u32..).map(|attempt| directory.join(format!("{name}.{what}-{attempt}")));
    let free = names.find(|name| !name.exists()).unwrap_or_default();
    match std::fs::rename(directory.join(name), &free) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(free),
    }
}

fn orphaned_folders(path: &Path) -> io::Result<Vec<PathBuf>> {
    let mut folders = Vec::new();
    for item in std::fs::read_dir(path)? {
        let item = item?;
        if item.file_name().to_str().is_some_and(|name| name.starts_with("blocks.orphaned-")) {
            folders.push(item.path());
        }
    }
    Ok(folders)
}

/// Deletes block files that no entry names, left by a crash. Blocking; ends early when `stop` is cancelled.
/// Files made by this run are left alone: they may be about to be recorded.
pub(super) fn delete_orphans(table: &BlockTable, orphaned: Vec<PathBuf>, stop: &CancellationToken) {
    for folder in orphaned {
        if stop.is_cancelled() {
            return;
        }
        if let Err(error) = std::fs::remove_dir_all(&folder) {
            warn!(folder = %folder.display(), %error, "cannot delete blocks that were set aside");
        }
    }
    for path in table.directories.iter().map(|directory| &directory.spec.path) {
        let mut deleted = 0u64;
        for folder in directory::folders(&path.join("blocks")) {
            let Ok(files) = std::fs::read_dir(&folder) else { continue };
            for file in files.flatten() {
                if stop.is_cancelled() {
                    return;
                }
                let name = file.file_name();
                let known = match name.to_str().and_then(directory::parse_block_name) {
                    Some((id, incarnation)) => table.may_own(&id, incarnation),
                    None => false,
                };
                if !known && std::fs::remove_file(file.path()).is_ok() {
                    deleted += 1;
                }
            }
        }
        if deleted > 0 {
            info!(directory = %path.display(), files = deleted, "deleted block files without a record");
        }
    }
}
