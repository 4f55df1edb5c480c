//! Typed reads of the state: one record by its key, or the rows of a table in the order of their keys. None waits for
//! anything but the disk, so async callers run them on the blocking pool where they read more than a handful of
//! records.
//!
//! The same reads show the database as it is now, as it was when a snapshot was made, with what commands have changed
//! that is not written yet, and with what a command is changing ([`WriteBatchOverlay`]).

mod content;
pub(crate) mod namespace;
mod sessions;

use std::marker::PhantomData;

use bytes::Bytes;
use cavern_proto::master::{Job, Mount, View};
use cavern_proto::record::{
    Counters, DeletionRecord, DentryRecord, ExtentRecord, IndexRecord, InodeRecord, IntentRecord, ObjectRecord,
    RequestRecord, SecretsRecord, SessionRecord, WorkerRecord,
};
use rocksdb::{Direction, ErrorKind, IteratorMode, ReadOptions, ReadTier, Snapshot};

use crate::database::Database;
use crate::error::{Result, StateError};
use crate::records::leading_id;
use crate::schema::{self, Family, Table, TableKey, decode_key, decode_record, encode_key, end_of};
use crate::write_batch_overlay::{Scan, WriteBatchOverlay};

/// Key of the counters in `meta`.
pub const COUNTERS_KEY: &[u8] = schema::Counters::PREFIX;

/// Deepest nesting that a walk to the root follows. There are no loops; this ends walks should there be one.
pub const DEPTH_MAX: usize = 1 << 16;

/// Names or blocks that have been removed, passed over in search of one that is there.
const REMOVED: u64 = 1000;

/// An entry of a directory: its name, its inode id and record.
pub type Listed = (Bytes, u64, InodeRecord);

/// A view of the tables. Copying it costs nothing.
#[derive(Clone, Copy)]
pub struct Tables<'a> {
    database: &'a Database,
    /// All that is read is as it was then.
    snapshot: Option<&'a Snapshot<'a>>,
    /// The disk is not asked: a read that would have to fails.
    in_memory: bool,
    /// What is read before the database.
    unwritten: Option<&'a WriteBatchOverlay>,
    /// What a command is changing: read before that where a single record is asked for, and not by scans.
    changing: Option<&'a WriteBatchOverlay>,
}

/// A row of a table, as it is stored.
pub struct Row<T> {
    key: Box<[u8]>,
    value: Box<[u8]>,
    table: PhantomData<T>,
}

impl<T: Table> Row<T> {
    pub fn key(&self) -> Result<T::Key<'_>> {
        decode_key::<T>(&self.key)
    }

    pub fn value(&self) -> Result<T::Value> {
        decode_record::<T>(&self.value)
    }

    /// Both.
    pub fn entry(&self) -> Result<(T::Key<'_>, T::Value)> {
        Ok((self.key()?, self.value()?))
    }
}

/// Rows of a table, in the order of their keys.
pub struct Rows<'a, T> {
    scan: Scan<'a>,
    table: PhantomData<T>,
}

impl<T: Table> Iterator for Rows<'_, T> {
    type Item = Result<Row<T>>;

    fn next(&mut self) -> Option<Self::Item> {
        let item = self.scan.next()?;
        Some(item.map(|(key, value)| Row { key, value, table: PhantomData }).map_err(StateError::from))
    }
}

impl<T: Table> Rows<'_, T> {
    /// Up to `limit` of them, as `make` has them.
    pub fn page<R>(self, limit: usize, mut make: impl FnMut(&Row<T>) -> Result<R>) -> Result<Vec<R>> {
        self.take(limit).map(|row| make(&row?)).collect()
    }
}

impl<'a> Tables<'a> {
    /// What is there at each read: for whoever writes, alone, or reads one record.
    pub fn new(database: &'a Database) -> Self {
        Self { database, snapshot: None, in_memory: false, unwritten: None, changing: None }
    }

    /// All reads see the same state, so that what one finds is there for the next: a name, and the inode that it leads
    /// to.
    pub fn at(database: &'a Database, snapshot: &'a Snapshot<'a>) -> Self {
        Self { snapshot: Some(snapshot), ..Self::new(database) }
    }

    /// These tables, as far as they are in memory: a read that would have to wait for the disk fails with an error that
    /// [`StateError::needs_disk`] tells from others. Not for what bounds its scans by what they pass over.
    pub fn in_memory(self) -> Self {
        Self { in_memory: true, ..self }
    }

    /// What is there, and what is to be written: for whoever writes, alone.
    pub fn with(database: &'a Database, unwritten: &'a WriteBatchOverlay) -> Self {
        Self { unwritten: Some(unwritten), ..Self::new(database) }
    }

    /// With single records as a command has left them.
    pub(crate) fn changed_by(self, changing: &'a WriteBatchOverlay) -> Self {
        Self { changing: Some(changing), ..self }
    }

    pub fn database(&self) -> &'a Database {
        self.database
    }

    /// The record of a key.
    pub fn get<T: Table>(&self, _: T, key: T::Key<'_>) -> Result<Option<T::Value>> {
        self.read(T::FAMILY, &encode_key::<T>(&key), decode_record::<T>)
    }

    /// Whether there is a record of a key.
    pub fn has<T: Table>(&self, _: T, key: T::Key<'_>) -> Result<bool> {
        Ok(self.read(T::FAMILY, &encode_key::<T>(&key), |_| Ok(()))?.is_some())
    }

    /// The rows of a table whose keys begin so; with `()` all of them.
    pub fn rows<'k, T: Table>(&self, _: T, within: impl TableKey<'k>) -> Rows<'a, T> {
        let start = encode_key::<T>(&within);
        self.rows_between(&start, end_of(&start), self.options())
    }

    /// Those of them that come behind a key, if one is given.
    pub fn rows_after<'k, T: Table>(
        &self,
        table: T,
        within: impl TableKey<'k>,
        after: Option<T::Key<'_>>,
    ) -> Rows<'a, T> {
        let Some(after) = after else { return self.rows(table, within) };
        let mut start = encode_key::<T>(&after);
        start.push(0);
        self.rows_between(&start, end_of(&encode_key::<T>(&within)), self.options())
    }

    /// Whether there is a row whose key begins so.
    pub fn has_any<'k, T: Table>(&self, table: T, within: impl TableKey<'k>) -> Result<bool> {
        Ok(self.rows(table, within).next().transpose()?.is_some())
    }

    /// The first row from one key on and before another; nothing but the end of the look where too many have been
    /// removed, which cost as much as others, for a time.
    fn first_unless_removed<T: Table>(&self, from: &[u8], until: Option<Vec<u8>>) -> Result<Found<T>> {
        let mut options = self.options();
        options.set_max_skippable_internal_keys(REMOVED);
        match self.rows_between(from, until, options).next() {
            None => Ok(Found::Nothing),
            Some(Ok(row)) => Ok(Found::Row(row)),
            Some(Err(StateError::Database(error))) if error.kind() == ErrorKind::Incomplete => Ok(Found::Removed),
            Some(Err(error)) => Err(error),
        }
    }

    fn rows_between<T: Table>(&self, from: &[u8], until: Option<Vec<u8>>, mut options: ReadOptions) -> Rows<'a, T> {
        let end = until.clone();
        if let Some(until) = until {
            options.set_iterate_upper_bound(until);
        }
        let mode = IteratorMode::From(from, Direction::Forward);
        let written = self.database.raw().iterator_cf_opt(self.database.family(T::FAMILY), options, mode);
        Rows { scan: Scan::new(written, self.unwritten, T::FAMILY, from, end.as_deref()), table: PhantomData }
    }

    /// Every key of a family, in order.
    pub fn keys(&self, family: Family) -> impl Iterator<Item = Result<Box<[u8]>>> + use<'a> {
        let handle = self.database.family(family);
        let written = self.database.raw().iterator_cf_opt(handle, self.options(), IteratorMode::Start);
        Scan::new(written, self.unwritten, family, &[], None).map(|item| Ok(item?.0))
    }

    fn read<R>(&self, family: Family, key: &[u8], read: impl FnOnce(&[u8]) -> Result<R>) -> Result<Option<R>> {
        let known =
            |unwritten: Option<&'a WriteBatchOverlay>| unwritten.and_then(|unwritten| unwritten.get(family, key));
        if let Some(known) = known(self.changing).or_else(|| known(self.unwritten)) {
            return known.map(read).transpose();
        }
        let (database, handle) = (self.database.raw(), self.database.family(family));
        let value = match self.snapshot {
            None => database.get_pinned_cf(handle, key)?,
            Some(_) => database.get_pinned_cf_opt(handle, key, &self.options())?,
        };
        value.map(|bytes| read(&bytes)).transpose()
    }

    fn options(&self) -> ReadOptions {
        let mut options = ReadOptions::default();
        if let Some(snapshot) = self.snapshot {
            options.set_snapshot(snapshot);
        }
        if self.in_memory {
            options.set_read_tier(ReadTier::BlockCache);
        }
        options
    }

    pub fn counters(&self) -> Result<Counters> {
        Ok(self.get(schema::Counters, ())?.unwrap_or_default())
    }

    /// Which key the credentials are sealed with.
    pub fn secrets(&self) -> Result<SecretsRecord> {
        Ok(self.get(schema::Secrets, ())?.unwrap_or_default())
    }

    pub fn mounts(&self) -> Result<Vec<Mount>> {
        self.rows(schema::Mounts, ()).page(usize::MAX, |row| row.value())
    }

    pub fn workers(&self) -> Result<Vec<WorkerRecord>> {
        self.rows(schema::Workers, ()).page(usize::MAX, |row| row.value())
    }

    pub fn jobs(&self) -> Result<Vec<Job>> {
        self.rows(schema::Jobs, ()).page(usize::MAX, |row| row.value())
    }

    /// All views, those that are being made included, by id.
    pub fn views(&self) -> Result<Vec<View>> {
        self.rows(schema::Views, ()).page(usize::MAX, |row| row.value())
    }

    /// Views that are no more and have something in a bucket, which is to be deleted.
    pub fn gone_views(&self) -> Result<Vec<View>> {
        self.rows(schema::GoneViews, ()).page(usize::MAX, |row| row.value())
    }
}

/// Reads of one record, by its key.
macro_rules! lookups {
    ($($(#[$doc:meta])* $name:ident($($part:ident: $type:ty),*) = $table:ident[$key:expr] -> $value:ty;)+) => {
        impl Tables<'_> {$(
            $(#[$doc])*
            pub fn $name(&self, $($part: $type),*) -> Result<Option<$value>> {
                self.get(schema::$table, $key)
            }
        )+}
    };
}

lookups! {
    inode(inode: u64) = Inodes[inode] -> InodeRecord;
    dentry(parent: u64, name: &[u8]) = Dentries[(parent, name)] -> DentryRecord;
    /// The record of a block, though it may have been cut off.
    recorded_extent(inode: u64, index: u32) = Extents[(inode, index)] -> ExtentRecord;
    intent(inode: u64) = Intents[inode] -> IntentRecord;
    object(inode: u64, key: &str) = Objects[(inode, key)] -> ObjectRecord;
    deletion(mount_id: u32, key: &str) = Deletions[(mount_id, key)] -> DeletionRecord;
    /// The inode whose origin the object of a key is.
    origin_of(mount_id: u32, key: &str) = Origins[(mount_id, key)] -> u64;
    /// The inode that has a note of the object of a key.
    noted(mount_id: u32, key: &str) = Noted[(mount_id, key)] -> u64;
    session(id: u64) = Sessions[id] -> SessionRecord;
    /// The session that holds a directory of a mount.
    holder(mount_id: u32, directory: u64) = DirectoryDelegations[(mount_id, directory)] -> u64;
    mount(id: u32) = Mounts[id] -> Mount;
    worker(id: u64) = Workers[id] -> WorkerRecord;
    job(id: u64) = Jobs[id] -> Job;
    view(id: u32) = Views[id] -> View;
    index(mount_id: u32) = Indexes[mount_id] -> IndexRecord;
    /// What became of the request under this id.
    request(id: &[u8]) = Requests[id] -> RequestRecord;
    /// The cluster's id; `None` before the first command of a new cluster.
    cluster_id() = ClusterId[()] -> String;
}

/// What a look finds that passes over a bounded number of what has been removed.
enum Found<T> {
    Row(Row<T>),
    Nothing,
    /// Nobody knows: it has passed over as many as it may.
    Removed,
}

/// The first id of `orphan` and the like.
pub fn first_id(database: &Database, family: Family) -> Result<Option<u64>> {
    Ok(Tables::new(database).keys(family).next().transpose()?.and_then(|key| leading_id(&key)))
}
