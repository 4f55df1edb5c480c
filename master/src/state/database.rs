//! The RocksDB of a master: its column families, its options, and the lock that keeps a second process out.
//!
//! Log and state share one database, and so one write-ahead log. A state change is written without a sync of its own:
//! should a crash lose it, the crash loses no log entry before it, and the entry is applied again. A log purge cannot
//! outlive the state that made it possible, for the same reason.

use std::fs::File;
use std::path::Path;

use rocksdb::{
    BlockBasedIndexType, BlockBasedOptions, Cache, ColumnFamily, ColumnFamilyDescriptor, DB, DBCompressionType,
    DBRecoveryMode, Options, WriteBatch, WriteOptions,
};
use rustix::fs::{FlockOperation, flock};
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::MasterError;

/// Column families. `record.proto` says what is in each; `Orphan` holds the inode ids (u64, big-endian) of directories
/// that are out of the namespace and wait to be deleted, with the last name in each that is gone already as value,
/// `Unlinked` those of inodes of fs-mode mounts that have no name any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    RaftLog,
    RaftMeta,
    Inode,
    Dentry,
    Orphan,
    Mount,
    Worker,
    Job,
    Meta,
    Link,
    Xattr,
    Unlinked,
    Session,
    Result,
    Hold,
    HoldSession,
    Extent,
    Garbage,
    Intent,
    Object,
    Deletion,
    Lock,
    LockSession,
    Replica,
    Repair,
    Stray,
    Origin,
    Quota,
    Usage,
    Ttl,
    Unlisted,
    Noted,
    Recovered,
}

impl Family {
    pub const ALL: [Self; 33] = [
        Self::RaftLog,
        Self::RaftMeta,
        Self::Inode,
        Self::Dentry,
        Self::Orphan,
        Self::Mount,
        Self::Worker,
        Self::Job,
        Self::Meta,
        Self::Link,
        Self::Xattr,
        Self::Unlinked,
        Self::Session,
        Self::Result,
        Self::Hold,
        Self::HoldSession,
        Self::Extent,
        Self::Garbage,
        Self::Intent,
        Self::Object,
        Self::Deletion,
        Self::Lock,
        Self::LockSession,
        Self::Replica,
        Self::Repair,
        Self::Stray,
        Self::Origin,
        Self::Quota,
        Self::Usage,
        Self::Ttl,
        Self::Unlisted,
        Self::Noted,
        Self::Recovered,
    ];

    /// The families that a snapshot carries: all but the log's own, which come first.
    pub const STATE: &[Self] = Self::ALL.split_at(2).1;

    fn name(self) -> &'static str {
        match self {
            Self::RaftLog => "raft_log",
            Self::RaftMeta => "raft_meta",
            Self::Inode => "inode",
            Self::Dentry => "dentry",
            Self::Orphan => "orphan",
            Self::Mount => "mount",
            Self::Worker => "worker",
            Self::Job => "job",
            Self::Meta => "meta",
            Self::Link => "link",
            Self::Xattr => "xattr",
            Self::Unlinked => "unlinked",
            Self::Session => "session",
            Self::Result => "result",
            Self::Hold => "hold",
            Self::HoldSession => "hold_session",
            Self::Extent => "extent",
            Self::Garbage => "garbage",
            Self::Intent => "intent",
            Self::Object => "object",
            Self::Deletion => "deletion",
            Self::Lock => "lock",
            Self::LockSession => "lock_session",
            Self::Replica => "replica",
            Self::Repair => "repair",
            Self::Stray => "stray",
            Self::Origin => "origin",
            Self::Quota => "quota",
            Self::Usage => "usage",
            Self::Ttl => "ttl",
            Self::Unlisted => "unlisted",
            Self::Noted => "noted",
            Self::Recovered => "recovered",
        }
    }
}

/// The open database. Dropping it closes it.
pub struct Database {
    db: DB,
    /// Held for as long as the database is open.
    _lock: Option<File>,
    closed: CancellationToken,
    /// The last field, and so the last to be dropped.
    _close: DropGuard,
}

/// Bytes of write-ahead log after which RocksDB flushes the oldest memtable, so that a restart replays little.
const WAL_BYTES: u64 = 256 << 20;
const MEMTABLE_BYTES: usize = 32 << 20;
const SMALL_MEMTABLE_BYTES: usize = 4 << 20;
/// All memtables together, of which some wait to be flushed; beyond it the largest is flushed early.
const MEMTABLES_BYTES: usize = 64 << 20;
const OPEN_FILES: i32 = 1024;

impl Database {
    /// Takes the lock of a data directory, for as long as the file is kept.
    ///
    /// # Errors
    /// [`MasterError::DataDirInUse`] while another process has it.
    pub fn lock(data_dir: &Path) -> Result<File, MasterError> {
        let path = data_dir.join("lock");
        let lock = File::create(&path).map_err(MasterError::io(&path))?;
        match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(lock),
            Err(_) => Err(MasterError::DataDirInUse(data_dir.to_owned())),
        }
    }

    /// Opens (or makes) a database without looking at it first.
    #[cfg(test)]
    pub fn open(data_dir: &Path, cache_bytes: u64) -> Result<Self, MasterError> {
        Self::open_locked(data_dir, cache_bytes, Self::lock(data_dir)?)
    }

    /// Opens (or makes) the database in `data_dir/db`; `cache_bytes` bounds RocksDB's block cache. `crate::recovery` is
    /// the way to it: RocksDB itself takes a damaged database for an older one, or for none.
    pub fn open_locked(data_dir: &Path, cache_bytes: u64, lock: File) -> Result<Self, MasterError> {
        let directory = data_dir.join("db");
        let mut options = recovery_options();
        options.create_if_missing(true);
        options.create_missing_column_families(true);
        options.set_max_total_wal_size(WAL_BYTES);
        options.set_db_write_buffer_size(MEMTABLES_BYTES);
        options.set_max_open_files(OPEN_FILES);
        options.set_keep_log_file_num(4);
        options.set_max_background_jobs(2);
        let cache = Cache::new_lru_cache(usize::try_from(cache_bytes).unwrap_or(usize::MAX));
        let families = Family::ALL.map(|family| descriptor(family, &cache));
        let db = DB::open_cf_descriptors(&options, &directory, families)
            .map_err(|source| MasterError::OpenDatabase { path: directory, source })?;
        Ok(Self::new(db, Some(lock)))
    }

    /// Opens a database as it lies there: nothing is changed.
    ///
    /// # Errors
    /// [`MasterError::OpenDatabase`] when a file is missing, cut off or damaged.
    pub fn open_for_inspection(directory: &Path) -> Result<Self, MasterError> {
        let failed = |source| MasterError::OpenDatabase { path: directory.to_owned(), source };
        let mut options = recovery_options();
        options.set_max_open_files(OPEN_FILES);
        // A later version may have more families than there are yet; these are as old as the database.
        let names = DB::list_cf(&options, directory).map_err(failed)?;
        for family in [Family::RaftLog, Family::RaftMeta, Family::Meta] {
            if !names.iter().any(|name| name == family.name()) {
                return Err(MasterError::Corrupt(format!("the list of tables in {}", directory.display())));
            }
        }
        let db = DB::open_cf_for_read_only(&options, directory, names, false).map_err(failed)?;
        Ok(Self::new(db, None))
    }

    /// Opens a checkpoint, for reading only.
    pub fn open_checkpoint(directory: &Path) -> Result<Self, MasterError> {
        let names = Family::ALL.map(Family::name);
        let db = DB::open_cf_for_read_only(&recovery_options(), directory, names, false)
            .map_err(|source| MasterError::OpenDatabase { path: directory.to_owned(), source })?;
        Ok(Self::new(db, None))
    }

    fn new(db: DB, lock: Option<File>) -> Self {
        let closed = CancellationToken::new();
        Self { db, _lock: lock, _close: closed.clone().drop_guard(), closed }
    }

    /// Cancelled when the database is closed and its lock is free.
    pub fn closed(&self) -> CancellationToken {
        self.closed.clone()
    }

    /// Makes a checkpoint in `directory`, which must not exist: hard links where the file system allows them.
    pub fn checkpoint(&self, directory: &Path) -> Result<(), MasterError> {
        Ok(rocksdb::checkpoint::Checkpoint::new(&self.db)?.create_checkpoint(directory)?)
    }

    /// The handle of a column family.
    #[expect(clippy::expect_used, reason = "every family is opened, or created, by `open`, and none is ever dropped")]
    pub fn family(&self, family: Family) -> &ColumnFamily {
        self.db.cf_handle(family.name()).expect("the family was opened with the database")
    }

    /// One value.
    pub fn get(&self, family: Family, key: &[u8]) -> Result<Option<Vec<u8>>, MasterError> {
        Ok(self.db.get_cf(self.family(family), key)?)
    }

    /// The library's own handle, for scans and batched reads.
    pub fn raw(&self) -> &DB {
        &self.db
    }

    /// Writes a batch without waiting for the disk.
    pub fn write(&self, batch: WriteBatch) -> Result<(), MasterError> {
        Ok(self.db.write(batch)?)
    }

    /// Writes a batch and returns when it, and everything written before it, is on disk.
    pub fn write_synced(&self, batch: WriteBatch) -> Result<(), MasterError> {
        let mut options = WriteOptions::default();
        options.set_sync(true);
        Ok(self.db.write_opt(batch, &options)?)
    }
}

/// What every opening has in common. An acknowledged write must not be rolled back: only the torn end of a log is
/// forgiven, and a log that is missing or shorter than when it was closed is not. A database that tracks its logs must
/// be opened so for reading too: RocksDB would try to end the tracking, and crash.
fn recovery_options() -> Options {
    let mut options = Options::default();
    options.set_wal_recovery_mode(DBRecoveryMode::TolerateCorruptedTailRecords);
    options.set_track_and_verify_wals_in_manifest(true);
    options
}

fn descriptor(family: Family, cache: &Cache) -> ColumnFamilyDescriptor {
    let mut table = BlockBasedOptions::default();
    table.set_block_cache(cache);
    table.set_cache_index_and_filter_blocks(true);
    table.set_pin_l0_filter_and_index_blocks_in_cache(true);
    let mut options = Options::default();
    options.set_compression_type(DBCompressionType::Lz4);
    match family {
        Family::Inode | Family::Dentry | Family::Extent => {
            table.set_bloom_filter(10.0, false);
            // Of 100 million records the index and the filter are larger than the cache: of both only the parts that
            // are used are in it, and what leads to them stays.
            table.set_index_type(BlockBasedIndexType::TwoLevelIndexSearch);
            table.set_partition_filters(true);
            table.set_pin_top_level_index_and_filter(true);
            options.set_write_buffer_size(MEMTABLE_BYTES);
        }
        Family::RaftLog => options.set_write_buffer_size(MEMTABLE_BYTES),
        _ => options.set_write_buffer_size(SMALL_MEMTABLE_BYTES),
    }
    options.set_block_based_table_factory(&table);
    ColumnFamilyDescriptor::new(family.name(), options)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(number: u64) -> ([u8; 8], [u8; 100]) {
        (number.to_be_bytes(), [number as u8; 100])
    }

    #[test]
    fn tables_of_an_earlier_version_are_read_and_go_on() {
        let dir = tempfile::tempdir().unwrap();
        let (inode, names) = (Family::Inode.name(), Family::ALL.map(Family::name));
        let mut options = recovery_options();
        options.create_if_missing(true);
        options.create_missing_column_families(true);
        // One index and one filter for each table.
        let earlier = names.map(|name| {
            let mut table = BlockBasedOptions::default();
            table.set_bloom_filter(10.0, false);
            let mut options = Options::default();
            options.set_block_based_table_factory(&table);
            ColumnFamilyDescriptor::new(name, options)
        });
        let db = DB::open_cf_descriptors(&options, dir.path().join("db"), earlier).unwrap();
        for (key, value) in (0..20_000).map(record) {
            db.put_cf(db.cf_handle(inode).unwrap(), key, value).unwrap();
        }
        db.flush_cf(db.cf_handle(inode).unwrap()).unwrap();
        drop(db);

        for upto in [30_000, 40_000] {
            let database = Database::open(dir.path(), 1 << 20).unwrap();
            let mut batch = WriteBatch::default();
            for (key, value) in (upto - 10_000..upto).map(record) {
                batch.put_cf(database.family(Family::Inode), key, value);
            }
            database.write(batch).unwrap();
            database.raw().flush_cf(database.family(Family::Inode)).unwrap();
            for (key, value) in (0..upto).step_by(97).map(record) {
                assert_eq!(database.get(Family::Inode, &key).unwrap().as_deref(), Some(value.as_slice()));
            }
            assert_eq!(database.get(Family::Inode, &upto.to_be_bytes()).unwrap(), None);
            let read = database.raw().iterator_cf(database.family(Family::Inode), rocksdb::IteratorMode::Start);
            assert_eq!(read.count() as u64, upto);
        }
    }
}
