//! What commands have changed and the database does not have yet. The commands of a log entry share one write batch,
//! and each of them reads what those before it have written.
//!
//! A record that many of them change, as the counters, the directory in which all of them work, and its intent, is
//! written once, as the last of them left it.

use std::collections::BTreeMap;
use std::collections::btree_map::Range;
use std::iter::Peekable;
use std::ops::Bound;

use rocksdb::{DBIterator, WriteBatch};

use crate::database::Database;
use crate::schema::Family;

/// Records and bytes that are gathered at most, and those of one command more.
const RECORDS: usize = 4096;
const BYTES: usize = 1 << 20;

type Key = Vec<u8>;
type Pair = (Box<[u8]>, Box<[u8]>);
/// The records of one family by their keys; `None` for one that was deleted.
pub(crate) type Records = BTreeMap<Key, Option<Vec<u8>>>;

/// What one command writes, or those that were gathered.
#[derive(Debug)]
pub struct WriteBatchOverlay {
    /// Of which all records go, from one key up to another, before any is written. They are shown still: no later
    /// command can be before they are gone from the database.
    ranges: Vec<(Family, Key, Key)>,
    families: [Records; Family::ALL.len()],
    records: usize,
    bytes: usize,
}

impl Default for WriteBatchOverlay {
    fn default() -> Self {
        let families = std::array::from_fn(|_| Records::new());
        Self { ranges: Vec::new(), families, records: 0, bytes: 0 }
    }
}

impl WriteBatchOverlay {
    /// Adds what one more command writes.
    pub fn add(&mut self, command: Self) {
        for (family, from, until) in command.ranges {
            self.delete_range(family, from, until);
        }
        for (family, records) in Family::ALL.into_iter().zip(command.families) {
            for (key, value) in records {
                self.insert(family, key, value);
            }
        }
    }

    /// Has a record written, or deleted.
    pub(crate) fn insert(&mut self, family: Family, key: Key, value: Option<Vec<u8>>) {
        self.records += 1;
        self.bytes += key.len() + value.as_ref().map_or(0, Vec::len);
        self.families[family as usize].insert(key, value);
    }

    /// Has every record deleted from one key on, up to another.
    pub(crate) fn delete_range(&mut self, family: Family, from: Key, until: Key) {
        self.families[family as usize].retain(|key, _| *key < from || *key >= until);
        self.ranges.push((family, from, until));
        self.records += 1;
    }

    /// Records written and deleted; a range counts as one.
    pub(crate) fn len(&self) -> usize {
        self.records
    }

    /// Whether it has to be written before the next command is applied.
    pub fn is_due(&self) -> bool {
        self.records >= RECORDS || self.bytes >= BYTES || !self.ranges.is_empty()
    }

    /// The batch to write.
    pub fn into_batch(self, database: &Database) -> WriteBatch {
        let mut batch = WriteBatch::default();
        for (family, from, until) in self.ranges {
            batch.delete_range_cf(database.family(family), from, until);
        }
        for (family, records) in Family::ALL.into_iter().zip(self.families) {
            let handle = database.family(family);
            for (key, value) in records {
                match value {
                    Some(value) => batch.put_cf(handle, key, value),
                    None => batch.delete_cf(handle, key),
                }
            }
        }
        batch
    }

    /// The records of a family that are written, or deleted.
    pub(crate) fn records(&self, family: Family) -> &Records {
        &self.families[family as usize]
    }

    /// What is known of a record: its value, or that it is gone.
    pub(crate) fn get(&self, family: Family, key: &[u8]) -> Option<Option<&[u8]>> {
        self.families[family as usize].get(key).map(Option::as_deref)
    }

    /// The records from one key on, up to another if there is one.
    fn range(&self, family: Family, from: &[u8], until: Option<&[u8]>) -> Option<Range<'_, Key, Option<Vec<u8>>>> {
        let records = &self.families[family as usize];
        if records.is_empty() || until.is_some_and(|until| until <= from) {
            return None;
        }
        let until = until.map_or(Bound::Unbounded, Bound::Excluded);
        Some(records.range::<[u8], _>((Bound::Included(from), until)))
    }
}

/// The records of a family in the order of their keys: those of the database, and over them what is not written yet.
pub(crate) enum Scan<'a> {
    Written(DBIterator<'a>),
    Merged { written: Peekable<DBIterator<'a>>, unwritten: Peekable<Range<'a, Key, Option<Vec<u8>>>> },
}

impl<'a> Scan<'a> {
    /// `written` goes over the same keys.
    pub fn new(
        written: DBIterator<'a>,
        unwritten: Option<&'a WriteBatchOverlay>,
        family: Family,
        from: &[u8],
        until: Option<&[u8]>,
    ) -> Self {
        match unwritten.and_then(|unwritten| unwritten.range(family, from, until)) {
            None => Self::Written(written),
            Some(range) => Self::Merged { written: written.peekable(), unwritten: range.peekable() },
        }
    }
}

impl Iterator for Scan<'_> {
    type Item = Result<Pair, rocksdb::Error>;

    fn next(&mut self) -> Option<Self::Item> {
        let (written, unwritten) = match self {
            Self::Written(written) => return written.next(),
            Self::Merged { written, unwritten } => (written, unwritten),
        };
        loop {
            let Some((key, _)) = unwritten.peek() else { return written.next() };
            match written.peek() {
                Some(Err(_)) => return written.next(),
                Some(Ok((other, _))) if other[..] < key[..] => return written.next(),
                Some(Ok((other, _))) if other[..] == key[..] => drop(written.next()),
                Some(Ok(_)) | None => {}
            }
            if let Some((key, Some(value))) = unwritten.next() {
                return Some(Ok((key.as_slice().into(), value.as_slice().into())));
            }
        }
    }
}
