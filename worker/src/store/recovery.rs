//! What happens to a data directory at start: lock, identity, index, the walk over its records, and afterwards, in the
//! background, the deletion of files that no record names.
//!
//! No file of a cached block is touched before the worker serves. A record is believed to exist, its bytes are not:
//! they are checked when they are first asked for (see `block`).

use std::path::{Path, PathBuf};
use std::sync::Arc;

use cavern_conf::process::{MissingDir, ensure_dir};
use cavern_conf::{ByteSize, DirSpec, Tier};
use cavern_proto::ChunkMap;
use cavern_proto::chunk::{chunk_count, chunk_range};
use cavern_proto::record::BlockRecord;
use cavern_security::KeyWrapping;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::directory::{self, Directory, INCARNATION_BITS, Identity};
use super::index::{Index, IndexError, set_aside};
use super::sealing::Cipher;
use super::slab::Entry;
use super::table::BlockTable;
use super::units::{UNIT_BYTES, units_of};
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
pub(super) fn open(
    spec: DirSpec,
    position: u8,
    missing: MissingDir,
    index_cache: ByteSize,
    keys: &KeyWrapping,
) -> Result<Opened, WorkerError> {
    let path = spec.path.clone();
    let failed = |action| {
        let path = path.clone();
        move |source| WorkerError::Directory { action, path, source }
    };
    let missing = if spec.tier == Tier::Mem { MissingDir::Create } else { missing };
    ensure_dir(&path, "worker.dirs", missing)?;
    let lock = directory::lock(&path)?;
    let identity = Identity::read(&path)?;
    let mut cipher = Cipher::read(&path, keys)?;
    if cipher.is_none() && identity.as_ref().is_some_and(Identity::is_encrypted) {
        return Err(WorkerError::DirectoryKeyLost(path));
    }

    let cache_bytes = usize::try_from(index_cache.bytes()).unwrap_or(usize::MAX);
    let (index, entries) = match open_index(&path, position, cache_bytes) {
        Ok(opened) => opened,
        Err(IndexError::Damaged(reason)) => {
            let kept = set_aside(&path).map_err(failed("set the damaged index aside in"))?;
            orphan_blocks(&path).map_err(failed("set blocks aside in"))?;
            warn!(directory = %path.display(), kept = %kept.display(), reason,
                "the block index is damaged: set aside, the directory starts empty and its blocks are fetched again");
            match open_index(&path, position, cache_bytes) {
                Ok(opened) => opened,
                Err(IndexError::Damaged(reason)) => {
                    let source = std::io::Error::other(reason);
                    return Err(failed("make a new index in")(source));
                }
                Err(IndexError::Unusable(source)) => {
                    return Err(WorkerError::Index { path: path.join("index"), source });
                }
            }
        }
        Err(IndexError::Unusable(source)) => return Err(WorkerError::Index { path: path.join("index"), source }),
    };
    directory::make_folders(&path)?;
    let data = super::data::recovery::scan(&path, position, cipher.as_ref());
    let data = data.map_err(failed("read the data blocks of"))?;

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
    let directory = Directory::new(spec, capacity_bytes, index, cipher.map(Arc::new), lock);
    Ok(Opened { directory, identity, entries, data, orphaned, starts_seen })
}

fn open_index(path: &Path, position: u8, cache_bytes: usize) -> Result<(Index, Vec<Entry>), IndexError> {
    let index = Index::open(&path.join("index"), cache_bytes)?;
    let mut entries = Vec::new();
    let skipped = index.scan(|id, record| {
        let mut entry = Entry::new(id, record.incarnation, record.length, record.mount_id, position);
        entry.units = units_present(&record);
        entries.push(entry);
    })?;
    if skipped > 0 {
        warn!(directory = %path.display(), records = skipped, "skipped records of the block index that make no sense");
    }
    Ok((index, entries))
}

/// Units of the chunks that a record has.
fn units_present(record: &BlockRecord) -> u32 {
    let present = ChunkMap::from_bytes(&record.present);
    let chunks = chunk_count(record.length);
    let full = units_of(&chunk_range(0, u32::MAX));
    match chunks.checked_sub(1) {
        None => 0,
        Some(last) => {
            let last_there = present.contains(last);
            let others = present.iter().take_while(|index| *index < last).count() as u32;
            others * full + if last_there { units_of(&chunk_range(last, record.length)) } else { 0 }
        }
    }
}

/// Moves `blocks` out of the way, for deletion in the background.
fn orphan_blocks(path: &Path) -> std::io::Result<()> {
    let blocks = path.join("blocks");
    if !blocks.exists() {
        return Ok(());
    }
    let free_name = (1u32..).map(|attempt| path.join(format!("blocks.orphaned-{attempt}"))).find(|name| !name.exists());
    free_name.map_or(Ok(()), |name| std::fs::rename(blocks, name))
}

fn orphaned_folders(path: &Path) -> std::io::Result<Vec<PathBuf>> {
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
        let root = path.join("blocks");
        let mut deleted = 0u64;
        for folder in (0..=255u8).map(|folder| root.join(format!("{folder:02x}"))) {
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
