//! The RocksDB of a master, and its options. Which one it is, [`current`](crate::current) knows.
//!
//! Log and state share one database, and so one write-ahead log. A state change is written without a sync of its own:
//! should a crash lose it, the crash loses no log entry before it, and the entry is applied again. A log purge cannot
//! outlive the state that made it possible, for the same reason.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use cavern_conf::{Budget, Budgets};
use rocksdb::{
    BlockBasedIndexType, BlockBasedOptions, Cache, ColumnFamily, ColumnFamilyDescriptor, DB, DBCompressionType,
    DBRecoveryMode, DEFAULT_COLUMN_FAMILY_NAME, Options, WriteBatch, WriteOptions,
};

use crate::data_dir::{self, Lock};
use crate::error::{Result, StateError};
use crate::schema::Family;

/// An open database. Dropping it closes it.
pub struct Database {
    db: DB,
    /// Dropped when the database is closed.
    place: Place,
    /// Held for as long as the database is open; the last to be dropped.
    _lock: Option<Arc<Lock>>,
}

/// Where a database is.
struct Place {
    directory: PathBuf,
    /// Another one has taken its place: nobody needs its files.
    is_retired: AtomicBool,
}

impl Drop for Place {
    fn drop(&mut self) {
        if self.is_retired.load(Ordering::Relaxed)
            && let Err(error) = fs::remove_dir_all(&self.directory)
        {
            // The next start removes it.
            tracing::warn!("cannot remove the earlier database in {}: {error}", self.directory.display());
        }
    }
}

/// Bytes of write-ahead log after which RocksDB flushes the oldest memtable, so that a restart replays little.
const WAL_BYTES: u64 = 256 << 20;
/// The part that a memtable may have of all together, of a large family and of a small one.
const MEMTABLE_PART: usize = 2;
const SMALL_MEMTABLE_PART: usize = 16;
const OPEN_FILES: i32 = 1024;

impl Database {
    /// Opens (or makes) the current database of a data directory without looking at it first, for tests and tools.
    pub fn open(data_dir: &Path, cache_bytes: u64) -> Result<Self> {
        let lock = Lock::take(data_dir)?;
        Self::open_in(&data_dir::directory(data_dir)?, &Resources::of_cache(cache_bytes), Some(lock))
    }

    /// Opens (or makes) the database in a directory. The master looks at it first: RocksDB itself takes a damaged
    /// database for an older one, or for none.
    pub fn open_in(directory: &Path, resources: &Resources, lock: Option<Arc<Lock>>) -> Result<Self> {
        let db = DB::open_cf_descriptors(&writing_options(resources), directory, descriptors(resources))
            .map_err(StateError::opening(directory))?;
        Ok(Self::new(db, directory, lock))
    }

    /// Makes a database of the files of a checkpoint, with all of its state and none of its log: that is of the master
    /// that has made the checkpoint.
    pub fn open_without_log(directory: &Path, resources: &Resources, lock: Option<Arc<Lock>>) -> Result<Self> {
        let options = writing_options(resources);
        let mut families = DB::list_cf(&options, directory).map_err(StateError::opening(directory))?;
        // A master of a later version may have more, which are empty as long as this one belongs to the group.
        families.retain(|name| name != DEFAULT_COLUMN_FAMILY_NAME && Family::ALL.iter().all(|own| own.name() != name));
        let unknown = families.iter().map(|name| ColumnFamilyDescriptor::new(name, Options::default()));
        let mut db = DB::open_cf_descriptors(&options, directory, descriptors(resources).chain(unknown))
            .map_err(StateError::opening(directory))?;
        for name in &families {
            db.drop_cf(name)?;
        }
        let mut database = Self::new(db, directory, lock);
        database.drop_log(resources)?;
        Ok(database)
    }

    /// Takes the log out of a checkpoint, which nobody else knows yet. *Blocking*.
    pub fn strip_checkpoint(directory: &Path) -> Result {
        // The files stay as the database has them.
        let resources = Resources::of_cache(0).without_compactions();
        Self::open_in(directory, &resources, None)?.drop_log(&resources)
    }

    /// Whole files go, and no record is touched.
    fn drop_log(&mut self, resources: &Resources) -> Result {
        for family in Family::LOG {
            self.db.drop_cf(family.name())?;
            self.db.create_cf(family.name(), &family_options(family, resources))?;
        }
        Ok(())
    }

    /// Opens a database as it lies there: nothing is changed.
    ///
    /// # Errors
    /// [`StateError::OpenDatabase`] when a file is missing, cut off or damaged.
    pub fn open_for_inspection(directory: &Path) -> Result<Self> {
        let mut options = recovery_options();
        options.set_max_open_files(OPEN_FILES);
        // A later version may have more families than there are yet; these are as old as the database.
        let names = DB::list_cf(&options, directory).map_err(StateError::opening(directory))?;
        for family in [Family::RaftLog, Family::RaftMeta, Family::Meta] {
            if !names.iter().any(|name| name == family.name()) {
                return Err(StateError::Corrupt(format!("the list of tables in {}", directory.display())));
            }
        }
        let db =
            DB::open_cf_for_read_only(&options, directory, names, false).map_err(StateError::opening(directory))?;
        Ok(Self::new(db, directory, None))
    }

    fn new(db: DB, directory: &Path, lock: Option<Arc<Lock>>) -> Self {
        cavern_conf::process::skip_destructors_at_exit();
        let place = Place { directory: directory.to_owned(), is_retired: AtomicBool::new(false) };
        Self { db, place, _lock: lock }
    }

    /// Where it is.
    pub fn directory(&self) -> &Path {
        &self.place.directory
    }

    /// Has its files removed when the last who reads it has let go.
    pub(super) fn retire(&self) {
        self.place.is_retired.store(true, Ordering::Relaxed);
    }

    /// Makes a checkpoint in `directory`, which must not exist: hard links where the file system allows them.
    pub fn checkpoint(&self, directory: &Path) -> Result {
        Ok(rocksdb::checkpoint::Checkpoint::new(&self.db)?.create_checkpoint(directory)?)
    }

    /// The handle of a column family.
    #[expect(clippy::expect_used, reason = "every family is opened, or created, by `open`, and none is ever dropped")]
    pub fn family(&self, family: Family) -> &ColumnFamily {
        self.db.cf_handle(family.name()).expect("the family was opened with the database")
    }

    /// One value.
    pub fn get(&self, family: Family, key: &[u8]) -> Result<Option<Vec<u8>>> {
        Ok(self.db.get_cf(self.family(family), key)?)
    }

    /// The library's own handle, for scans and batched reads.
    pub fn raw(&self) -> &DB {
        &self.db
    }

    /// Writes a batch without waiting for the disk.
    pub fn write(&self, batch: WriteBatch) -> Result {
        Ok(self.db.write(batch)?)
    }

    /// Writes a batch and returns when it, and everything written before it, is on disk.
    pub fn write_synced(&self, batch: WriteBatch) -> Result {
        let mut options = WriteOptions::default();
        options.set_sync(true);
        Ok(self.db.write_opt(batch, &options)?)
    }
}

/// What every opening has in common. A log is read up to the first record that is not whole: behind the last sync a
/// loss of power may leave any of the pages that were being written, and zeros for others. That nothing acknowledged is
/// behind that record is for the master to show. A log that is missing, or shorter than when it was synced and closed,
/// is not forgiven. A database that tracks its logs must be opened so for reading too: RocksDB would try to end the
/// tracking, and crash.
fn recovery_options() -> Options {
    let mut options = Options::default();
    options.set_wal_recovery_mode(DBRecoveryMode::PointInTime);
    options.set_track_and_verify_wals_in_manifest(true);
    options
}

/// What RocksDB may use, for all databases that a master has. Cheap to clone.
#[derive(Clone)]
pub struct Resources {
    /// The block cache, which all families share.
    cache: Cache,
    /// All memtables of a database together, of which some wait to be flushed; beyond it the largest is flushed early.
    write_buffers: usize,
    background_jobs: i32,
    /// Whether RocksDB merges files by itself.
    compacts: bool,
}

impl Resources {
    /// A block cache of so many bytes, and the rest as the budget of a master says.
    pub fn new(cache_bytes: u64, budget: &Budget) -> Self {
        let size = |bytes: u64| usize::try_from(bytes).unwrap_or(usize::MAX);
        Self {
            cache: Cache::new_lru_cache(size(cache_bytes)),
            write_buffers: size(budget.write_buffers),
            background_jobs: budget.background_jobs,
            compacts: true,
        }
    }

    /// A block cache of so many bytes, and the rest as a master has it that nobody has limited.
    pub fn of_cache(bytes: u64) -> Self {
        Self::new(bytes, &Budgets::default().master)
    }

    /// The same for databases whose files stay as they were written: what files there are depends on no thread.
    pub fn without_compactions(self) -> Self {
        Self { compacts: false, ..self }
    }
}

fn writing_options(resources: &Resources) -> Options {
    let mut options = recovery_options();
    options.create_if_missing(true);
    options.create_missing_column_families(true);
    options.set_max_total_wal_size(WAL_BYTES);
    options.set_db_write_buffer_size(resources.write_buffers);
    options.set_max_open_files(OPEN_FILES);
    options.set_keep_log_file_num(4);
    options.set_max_background_jobs(resources.background_jobs);
    options
}

/// All families as they are opened to be written.
fn descriptors(resources: &Resources) -> impl Iterator<Item = ColumnFamilyDescriptor> {
    let of = move |family: Family| ColumnFamilyDescriptor::new(family.name(), family_options(family, resources));
    Family::ALL.into_iter().map(of)
}

fn family_options(family: Family, resources: &Resources) -> Options {
    let mut table = BlockBasedOptions::default();
    table.set_block_cache(&resources.cache);
    table.set_cache_index_and_filter_blocks(true);
    table.set_pin_l0_filter_and_index_blocks_in_cache(true);
    let mut options = Options::default();
    options.set_compression_type(DBCompressionType::Lz4);
    options.set_disable_auto_compactions(!resources.compacts);
    match family {
        Family::Inode | Family::Dentry | Family::Extent => {
            table.set_bloom_filter(10.0, false);
            // Of 100 million records the index and the filter are larger than the cache: of both only the parts that
            // are used are in it, and what leads to them stays.
            table.set_index_type(BlockBasedIndexType::TwoLevelIndexSearch);
            table.set_partition_filters(true);
            table.set_pin_top_level_index_and_filter(true);
            options.set_write_buffer_size(resources.write_buffers / MEMTABLE_PART);
        }
        Family::RaftLog => options.set_write_buffer_size(resources.write_buffers / MEMTABLE_PART),
        _ => options.set_write_buffer_size(resources.write_buffers / SMALL_MEMTABLE_PART),
    }
    options.set_block_based_table_factory(&table);
    options
}

#[cfg(test)]
mod tests {
    use rocksdb::WaitForCompactOptions;

    use super::*;

    #[test]
    fn files_stay_as_they_were_written_where_nothing_compacts_them() {
        let dir = tempfile::tempdir().unwrap();
        let resources = Resources::of_cache(1 << 20).without_compactions();
        let database = Database::open_in(dir.path(), &resources, None).unwrap();
        let family = database.family(Family::Meta);
        for number in 0..10u8 {
            database.raw().put_cf(family, b"key", [number]).unwrap();
            database.raw().flush_cf(family).unwrap();
        }
        database.raw().wait_for_compact(&WaitForCompactOptions::default()).unwrap();
        assert_eq!(database.raw().live_files().unwrap().len(), 10);
    }
}
