//! The index of one data directory: block id → record, in RocksDB.
//!
//! Puts are not synced: they survive the death of the process (the log is in the page cache by then), and what a power
//! failure loses is fetched again. An index that RocksDB finds damaged is set aside as a whole; the blocks are cache,
//! and a clean empty directory is worth more than a half-believed one.

use std::path::Path;

use cavern_proto::BlockId;
use cavern_proto::record::BlockRecord;
use parking_lot::Mutex;
use prost::Message;
use rocksdb::{BlockBasedOptions, Cache, DB, DBCompressionType, ErrorKind, Options, ReadOptions};
use tracing::{debug, warn};

use super::slab::hash_of;

/// Locks that keep the deletion of a record and the put of its successor apart.
const STRIPES: usize = 64;

/// How an index cannot be used.
#[derive(Debug, thiserror::Error)]
pub(super) enum IndexError {
    /// Its files contradict themselves: set it aside.
    #[error("{0}")]
    Damaged(String),
    /// Anything else: permissions, no space, a lock.
    #[error(transparent)]
    Unusable(rocksdb::Error),
}

/// Whether the file system takes no more bytes. RocksDB refuses all writes then, and goes on by itself when it does
/// again.
pub(super) fn is_out_of_space(error: &rocksdb::Error) -> bool {
    let text: &str = error.as_ref();
    text.contains("No space left on device") || text.contains("Disk quota exceeded")
}

impl From<rocksdb::Error> for IndexError {
    fn from(error: rocksdb::Error) -> Self {
        let text = error.to_string();
        // A missing table file is reported as an I/O error, although it is damage too.
        let missing = text.contains("No such file");
        match error.kind() {
            ErrorKind::Corruption | ErrorKind::NotSupported | ErrorKind::InvalidArgument => Self::Damaged(text),
            _ if missing => Self::Damaged(text),
            _ => Self::Unusable(error),
        }
    }
}

/// What RocksDB may use for one index.
#[derive(Clone, Copy)]
pub(super) struct IndexOptions {
    pub cache_bytes: usize,
    /// Of each of two.
    pub write_buffer_bytes: usize,
    pub background_jobs: i32,
}

/// The open index of a directory.
pub(super) struct Index {
    db: DB,
    stripes: Vec<Mutex<()>>,
}

impl std::fmt::Debug for Index {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Index").field("path", &self.db.path()).finish()
    }
}

impl Index {
    pub(super) fn open(path: &Path, by: IndexOptions) -> Result<Self, IndexError> {
        let mut table = BlockBasedOptions::default();
        table.set_block_cache(&Cache::new_lru_cache(by.cache_bytes));
        table.set_bloom_filter(10.0, false);
        table.set_cache_index_and_filter_blocks(true);
        table.set_pin_l0_filter_and_index_blocks_in_cache(true);
        let mut options = Options::default();
        options.create_if_missing(true);
        options.set_block_based_table_factory(&table);
        // Checksums and hashes do not compress.
        options.set_compression_type(DBCompressionType::None);
        options.set_write_buffer_size(by.write_buffer_bytes);
        options.set_max_total_wal_size(64 << 20);
        options.set_max_open_files(256);
        options.set_keep_log_file_num(4);
        options.set_max_log_file_size(4 << 20);
        options.set_max_background_jobs(by.background_jobs);
        options.set_allow_mmap_reads(false);
        if path.exists() && !path.is_dir() {
            return Err(IndexError::Damaged("it is no directory".to_owned()));
        }
        let holds_files = std::fs::read_dir(path).is_ok_and(|mut files| files.next().is_some());
        if holds_files && !path.join("CURRENT").exists() {
            // RocksDB would make an empty index here, and delete what there is of the old one.
            return Err(IndexError::Damaged("it has files, but no CURRENT".to_owned()));
        }
        let db = DB::open(&options, path)?;
        cavern_conf::process::skip_destructors_at_exit();
        Ok(Self { db, stripes: (0..STRIPES).map(|_| Mutex::new(())).collect() })
    }

    /// Calls `each` for every record in key order. Records that are no records are skipped and counted in the result.
    pub(super) fn scan(&self, mut each: impl FnMut(BlockId, BlockRecord)) -> Result<u64, IndexError> {
        let mut options = ReadOptions::default();
        options.fill_cache(false);
        options.set_readahead_size(4 << 20);
        let mut records = self.db.raw_iterator_opt(options);
        records.seek_to_first();
        let mut skipped = 0;
        while let Some((key, value)) = records.item() {
            match (BlockId::from_key(key), BlockRecord::decode(value)) {
                (Some(id), Ok(record)) => each(id, record),
                _ => skipped += 1,
            }
            records.next();
        }
        records.status()?;
        Ok(skipped)
    }

    /// Up to `limit` block ids whose keys are `from` or later.
    pub(super) fn ids_from(&self, from: &[u8], limit: usize) -> Result<Vec<BlockId>, rocksdb::Error> {
        let mut options = ReadOptions::default();
        options.fill_cache(false);
        let mut records = self.db.raw_iterator_opt(options);
        records.seek(from);
        let mut ids = Vec::new();
        while let Some(key) = records.key().filter(|_| ids.len() < limit) {
            ids.extend(BlockId::from_key(key));
            records.next();
        }
        records.status()?;
        Ok(ids)
    }

    pub(super) fn get(&self, id: &BlockId) -> Result<Option<BlockRecord>, rocksdb::Error> {
        let value = self.db.get_pinned(id.to_key())?;
        // A record that does not decode is as good as none: the block is fetched again.
        Ok(value.and_then(|value| BlockRecord::decode(&*value).ok()))
    }

    /// Writes what `record` gives, unless that is nothing. `record` is called under the lock that orders this put with
    /// the removal of the block.
    pub(super) fn put(&self, id: &BlockId, record: impl FnOnce() -> Option<BlockRecord>) -> Result<(), rocksdb::Error> {
        let _ordered = self.stripe(id).lock();
        match record() {
            Some(record) => self.db.put(id.to_key(), record.encode_to_vec()),
            None => Ok(()),
        }
    }

    /// Removes the record of one incarnation; that of a later one stays.
    pub(super) fn remove(&self, id: &BlockId, incarnation: u64) -> Result<(), rocksdb::Error> {
        let _ordered = self.stripe(id).lock();
        match self.get(id)? {
            Some(record) if record.incarnation != incarnation => Ok(()),
            _ => self.db.delete(id.to_key()),
        }
    }

    /// Removes the record of one incarnation, which no block needs any more, or says in the log why not.
    pub(super) fn forget(&self, id: &BlockId, incarnation: u64) {
        if let Err(error) = self.remove(id, incarnation) {
            if is_out_of_space(&error) {
                // Many of these come together; a record without a file is noticed when the block is asked for.
                debug!(block = %id, %error, "cannot remove an index entry");
                return;
            }
            warn!(block = %id, %error, "cannot remove an index entry");
        }
    }

    fn stripe(&self, id: &BlockId) -> &Mutex<()> {
        &self.stripes[hash_of(id) as usize % STRIPES]
    }

    /// Writes what is in memory to table files, so that the next start has no log to replay.
    pub(super) fn flush(&self) -> Result<(), rocksdb::Error> {
        self.db.flush()
    }

    /// Waits until no thread of RocksDB makes or deletes files. *Blocking*.
    #[cfg(test)]
    pub(super) fn wait_for_compactions(&self) {
        self.db.wait_for_compact(&rocksdb::WaitForCompactOptions::default()).unwrap();
    }
}

#[cfg(test)]
mod tests {
    use cavern_proto::ContentId;

    use super::*;

    fn id(index: u32) -> BlockId {
        BlockId { content: ContentId::of_object("s", "k", "e", 1, 1), index }
    }

    const SMALL: IndexOptions = IndexOptions { cache_bytes: 1 << 20, write_buffer_bytes: 1 << 20, background_jobs: 2 };

    fn record(incarnation: u64) -> BlockRecord {
        BlockRecord { incarnation, length: 10, ..Default::default() }
    }

    #[test]
    fn a_late_removal_spares_the_next_incarnation() {
        let dir = tempfile::tempdir().unwrap();
        let index = Index::open(&dir.path().join("index"), SMALL).unwrap();
        index.put(&id(1), || Some(record(2))).unwrap();
        index.remove(&id(1), 1).unwrap();
        assert_eq!(index.get(&id(1)).unwrap(), Some(record(2)));
        index.remove(&id(1), 2).unwrap();
        assert_eq!(index.get(&id(1)).unwrap(), None);
        index.put(&id(1), || None).unwrap();
        assert_eq!(index.get(&id(1)).unwrap(), None);
    }

    #[test]
    fn scans_give_all_and_count_nonsense() {
        let dir = tempfile::tempdir().unwrap();
        let index = Index::open(&dir.path().join("index"), SMALL).unwrap();
        (0..100).for_each(|block| index.put(&id(block), || Some(record(7))).unwrap());
        index.db.put(b"short", b"").unwrap();
        index.db.put(id(1000).to_key(), [0xff; 5]).unwrap();
        let mut seen = Vec::new();
        assert_eq!(index.scan(|id, _| seen.push(id.index)).unwrap(), 2);
        assert_eq!(seen, (0..100).collect::<Vec<_>>());
        assert_eq!(index.ids_from(&id(95).to_key(), 3).unwrap(), [id(95), id(96), id(97)]);
    }
}
