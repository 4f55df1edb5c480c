//! How many bytes the log has, from where to where, and since when.
//!
//! Every now and then the log is *marked*: so many bytes were written up to this entry, at this time. Marks are kept in
//! `raft_meta`, written with the entries that they are about, so that a start knows the whole log and reads only the
//! end of it. Between two marks, bytes are taken to be evenly spread.

use std::collections::VecDeque;

use cavern_state::{Database, Family};
use rocksdb::{Direction, IteratorMode, WriteBatch};

use crate::error::{ConsensusError, Result};

/// Key of a mark: this, and the index (u64, big-endian).
const MARK_PREFIX: &[u8] = b"mark";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct SizeSample {
    /// Of the last entry that is counted.
    index: u64,
    /// Of all entries up to it, those that are purged included.
    bytes: u64,
    /// When it was written.
    at_ns: i64,
}

impl SizeSample {
    fn key(self) -> Vec<u8> {
        [MARK_PREFIX, &self.index.to_be_bytes()].concat()
    }

    fn value(self) -> Vec<u8> {
        [self.bytes.to_be_bytes(), self.at_ns.to_be_bytes()].concat()
    }

    /// `None` for the end of the marks, or for what is none.
    fn read(key: &[u8], value: &[u8]) -> Option<Self> {
        let index = u64::from_be_bytes(key.strip_prefix(MARK_PREFIX)?.try_into().ok()?);
        let (bytes, at) = value.split_at_checked(8)?;
        let bytes = u64::from_be_bytes(bytes.try_into().ok()?);
        Some(Self { index, bytes, at_ns: i64::from_be_bytes(at.try_into().ok()?) })
    }
}

/// The bytes of the log, by sampled entries.
#[derive(Debug)]
pub struct LogSize {
    /// Bytes between two marks.
    step: u64,
    /// In the order of the log; the first may stand for what is purged.
    marks: VecDeque<SizeSample>,
    /// Index of the last entry, and the bytes up to it.
    end: (u64, u64),
    /// Bytes up to the last entry that is purged.
    purged_bytes: u64,
}

impl LogSize {
    /// That of the log in a database, of which everything up to `purged` is gone. `step` is the number of bytes between
    /// two marks. *Blocking*.
    pub fn load(database: &Database, purged: Option<u64>, step: u64, now_ns: i64) -> Result<Self> {
        let log = database.family(Family::RaftLog);
        let mut marks = VecDeque::new();
        let from = IteratorMode::From(MARK_PREFIX, Direction::Forward);
        for item in database.raw().iterator_cf(database.family(Family::RaftMeta), from) {
            let (key, value) = item?;
            let Some(mark) = SizeSample::read(&key, &value) else { break };
            marks.push_back(mark);
        }
        let end = marks.back().map_or((purged.unwrap_or(0), 0), |mark| (mark.index, mark.bytes));
        let mut size = Self { step: step.max(1), marks, end, purged_bytes: 0 };
        if let Some(index) = purged {
            size.purged_bytes = size.bytes_at(index);
            while size.marks.pop_front_if(|mark| mark.index <= index).is_some() {}
            size.marks.push_front(SizeSample { index, bytes: size.purged_bytes, at_ns: i64::MIN });
        }
        let unmarked = size.marks.back().map_or(0, |mark| mark.index.saturating_add(1)).to_be_bytes();
        for item in database.raw().iterator_cf(log, IteratorMode::From(&unmarked, Direction::Forward)) {
            let (key, value) = item?;
            size.count(index_of(&key)?, value.len(), now_ns);
        }
        Ok(size)
    }

    /// Counts an entry; returns the mark that is due after it.
    fn count(&mut self, index: u64, bytes: usize, now_ns: i64) -> Option<SizeSample> {
        self.end = (index, self.end.1.saturating_add(bytes as u64));
        let marked = self.marks.back().map_or(0, |mark| mark.bytes);
        if self.end.1 - marked < self.step {
            return None;
        }
        let mark = SizeSample { index, bytes: self.end.1, at_ns: now_ns };
        self.marks.push_back(mark);
        Some(mark)
    }

    /// An entry is appended by this batch.
    pub fn appended(&mut self, database: &Database, batch: &mut WriteBatch, entry: (u64, usize), now_ns: i64) {
        if let Some(mark) = self.count(entry.0, entry.1, now_ns) {
            batch.put_cf(database.family(Family::RaftMeta), mark.key(), mark.value());
        }
    }

    /// Everything from this index on is deleted by this batch.
    pub fn truncated(&mut self, database: &Database, batch: &mut WriteBatch, from: u64) {
        if from > self.end.0 {
            return;
        }
        self.end = from.checked_sub(1).map_or((0, 0), |last| (last, self.bytes_at(last)));
        while let Some(mark) = self.marks.pop_back_if(|mark| mark.index >= from) {
            batch.delete_cf(database.family(Family::RaftMeta), mark.key());
        }
    }

    /// Everything up to this index is deleted by this batch.
    pub fn purged(&mut self, database: &Database, batch: &mut WriteBatch, upto: u64) {
        let meta = database.family(Family::RaftMeta);
        self.purged_bytes = self.bytes_at(upto);
        let mut at_ns = None;
        while let Some(mark) = self.marks.pop_front_if(|mark| mark.index <= upto) {
            batch.delete_cf(meta, mark.key());
            at_ns = Some(mark.at_ns);
        }
        let begin = SizeSample { index: upto, bytes: self.purged_bytes, at_ns: at_ns.unwrap_or(i64::MIN) };
        batch.put_cf(meta, begin.key(), begin.value());
        self.marks.push_front(begin);
        if self.end.0 < upto {
            self.end = (upto, self.purged_bytes);
        }
    }

    /// Bytes of all entries up to this one, as far as marks tell.
    fn bytes_at(&self, index: u64) -> u64 {
        let (end_index, end_bytes) = self.end;
        if index >= end_index {
            return end_bytes;
        }
        let next = self.marks.partition_point(|mark| mark.index <= index);
        let (from, before) = match next.checked_sub(1).and_then(|previous| self.marks.get(previous)) {
            Some(mark) => (mark.index, mark.bytes),
            None => (0, 0),
        };
        let (to, after) = self.marks.get(next).map_or(self.end, |mark| (mark.index, mark.bytes));
        let share = u128::from(after.saturating_sub(before)) * u128::from(index.saturating_sub(from));
        let share = share / u128::from(to.saturating_sub(from).max(1));
        before.saturating_add(u64::try_from(share).unwrap_or(u64::MAX))
    }

    /// Bytes of the entries behind this one; for none: of all.
    pub fn bytes_after(&self, index: Option<u64>) -> u64 {
        self.end.1 - index.map_or(self.purged_bytes, |index| self.bytes_at(index)).min(self.end.1)
    }

    /// Bytes that would go if everything up to this entry were purged.
    pub fn bytes_upto(&self, index: u64) -> u64 {
        self.bytes_at(index).saturating_sub(self.purged_bytes)
    }

    /// Everything up to this entry was written before `before_ns`, or is more than `bytes_max` away from the end.
    pub fn old(&self, before_ns: i64, bytes_max: u64) -> Option<u64> {
        let is_old = |mark: &&SizeSample| mark.at_ns <= before_ns;
        let old = self.marks.iter().take_while(is_old).last().map(|mark| mark.index);
        let is_far = |mark: &&SizeSample| self.end.1 - mark.bytes.min(self.end.1) > bytes_max;
        // What is between it and the next is too much, too, at least in part.
        let far = self.marks.iter().take_while(is_far).count();
        let begin = self.bytes_after(None);
        let far = if begin > bytes_max { self.marks.get(far).map(|mark| mark.index) } else { None };
        old.max(far)
    }
}

pub fn index_of(key: &[u8]) -> Result<u64> {
    let index = key.try_into().map(u64::from_be_bytes);
    index.map_err(|_| ConsensusError::corrupt("the key of a log entry".to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn database() -> (tempfile::TempDir, Database) {
        let dir = tempfile::tempdir().unwrap();
        let database = Database::open(dir.path(), 1 << 20).unwrap();
        (dir, database)
    }

    /// Entries of 100 bytes; each is written at the time that is its index.
    fn append(size: &mut LogSize, database: &Database, indices: std::ops::Range<u64>) {
        for index in indices {
            let mut batch = WriteBatch::default();
            batch.put_cf(database.family(Family::RaftLog), index.to_be_bytes(), [7; 100]);
            size.appended(database, &mut batch, (index, 100), i64::try_from(index).unwrap());
            database.write(batch).unwrap();
        }
    }

    fn delete(size: &mut LogSize, database: &Database, indices: std::ops::Range<u64>, is_purge: bool) {
        let mut batch = WriteBatch::default();
        let log = database.family(Family::RaftLog);
        batch.delete_range_cf(log, indices.start.to_be_bytes(), indices.end.to_be_bytes());
        if is_purge {
            size.purged(database, &mut batch, indices.end - 1);
        } else {
            size.truncated(database, &mut batch, indices.start);
        }
        database.write(batch).unwrap();
    }

    #[test]
    fn bytes_are_known_between_marks_and_after_a_start() {
        let (_dir, database) = database();
        let mut size = LogSize::load(&database, None, 1000, 0).unwrap();
        assert_eq!((size.bytes_after(None), size.old(i64::MAX, 0)), (0, None));
        append(&mut size, &database, 1..101);
        let check = |size: &LogSize| {
            assert_eq!(size.bytes_after(None), 10_000);
            assert_eq!((size.bytes_after(Some(45)), size.bytes_upto(45)), (5500, 4500));
            assert_eq!((size.bytes_after(Some(100)), size.bytes_after(Some(500))), (0, 0));
            assert_eq!(size.old(35, u64::MAX), Some(30), "by their age");
            assert_eq!(size.old(5, u64::MAX), None);
            assert_eq!(size.old(5, 3500), Some(70), "by their number");
            assert_eq!((size.old(85, 3500), size.old(5, 10_000)), (Some(80), None));
        };
        check(&size);
        check(&LogSize::load(&database, None, 1000, 999).unwrap());

        // A start counts what is not marked; its time is that of the start.
        append(&mut size, &database, 101..106);
        let again = LogSize::load(&database, None, 100, 999).unwrap();
        assert_eq!((again.bytes_after(None), again.bytes_after(Some(101))), (10_500, 400));
        assert_eq!((again.old(998, u64::MAX), again.old(999, u64::MAX)), (Some(100), Some(105)));
    }

    #[test]
    fn marks_go_with_the_entries() {
        let (_dir, database) = database();
        let mut size = LogSize::load(&database, None, 1000, 0).unwrap();
        append(&mut size, &database, 1..101);
        delete(&mut size, &database, 0..46, true);
        delete(&mut size, &database, 81..101, false);
        let check = |size: &LogSize| {
            assert_eq!((size.bytes_after(None), size.bytes_after(Some(45))), (3500, 3500));
            assert_eq!((size.bytes_after(Some(70)), size.bytes_upto(60)), (1000, 1500));
            assert_eq!((size.old(65, u64::MAX), size.old(1000, u64::MAX)), (Some(60), Some(80)));
            assert_eq!(size.old(0, 2500), Some(60));
        };
        check(&size);
        check(&LogSize::load(&database, Some(45), 1000, 999).unwrap());
        append(&mut size, &database, 81..91);
        assert_eq!(size.bytes_after(Some(45)), 4500);

        // A snapshot that ends behind the log.
        delete(&mut size, &database, 0..201, true);
        assert_eq!((size.bytes_after(None), size.old(i64::MAX - 1, 0)), (0, Some(200)));
        append(&mut size, &database, 201..211);
        let again = LogSize::load(&database, Some(200), 1000, 999).unwrap();
        for size in [size, again] {
            assert_eq!((size.bytes_after(Some(200)), size.bytes_upto(205)), (1000, 500));
        }
    }
}
