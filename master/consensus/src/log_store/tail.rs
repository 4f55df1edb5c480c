//! The end of the log in memory: entries that are not on disk yet, and such as their next reader is about to ask for,
//! who is as a rule the one that applies them.

use std::collections::VecDeque;

use crate::types::Entry;

/// Bytes of entries that stay here although they are on disk.
const KEPT_BYTES: usize = 4 << 20;

/// The last entries of the log, with their lengths in it: consecutive, up to the very last one.
#[derive(Default)]
pub struct Tail {
    entries: VecDeque<(usize, Entry)>,
    bytes: usize,
    /// Index of the first entry that is not on disk. All before it are, unless they were purged.
    on_disk: u64,
}

impl Tail {
    /// That of a log whose last entry is the one before `next`.
    pub fn new(next: u64) -> Self {
        Self { on_disk: next, ..Self::default() }
    }

    /// Index of the last entry that is here.
    pub fn last(&self) -> Option<u64> {
        self.entries.back().map(|(_, entry)| entry.log_id.index)
    }

    fn first(&self) -> Option<u64> {
        self.entries.front().map(|(_, entry)| entry.log_id.index)
    }

    /// Index of the first entry that is not on disk.
    pub fn on_disk(&self) -> u64 {
        self.on_disk
    }

    /// Adds an entry, which follows [`Self::last`].
    pub fn push(&mut self, bytes: usize, entry: Entry) {
        self.bytes += bytes;
        self.entries.push_back((bytes, entry));
    }

    /// Entries before this index are on disk, and none from it on.
    pub fn set_on_disk(&mut self, next: u64) {
        self.on_disk = next;
        while self.bytes > KEPT_BYTES && self.first().is_some_and(|first| first < next) {
            self.pop_front();
        }
    }

    /// Forgets entries from this index on: they are no longer part of the log.
    pub fn truncate(&mut self, from: u64) {
        while self.last().is_some_and(|last| last >= from) {
            let removed = self.entries.pop_back();
            self.bytes -= removed.map_or(0, |(bytes, _)| bytes);
        }
    }

    /// Forgets entries up to this index.
    pub fn purge(&mut self, upto: u64) {
        while self.first().is_some_and(|first| first <= upto) {
            self.pop_front();
        }
    }

    fn pop_front(&mut self) -> Option<Entry> {
        let (bytes, entry) = self.entries.pop_front()?;
        self.bytes -= bytes;
        Some(entry)
    }

    /// Gives all entries of a range away, to the one that applies them, if all are here and on disk.
    pub fn take(&mut self, start: u64, end: u64) -> Option<Vec<Entry>> {
        let is_here = self.first()? <= start && start < end && end <= self.last()?.saturating_add(1);
        if !is_here || end > self.on_disk {
            return None;
        }
        // Those before it are applied.
        while self.first().is_some_and(|first| first < start) {
            self.pop_front();
        }
        (start..end).map(|_| self.pop_front()).collect()
    }

    /// The part of a range that is here, and where it begins: what is before that is on disk. It has no more than
    /// `limit` bytes, but for a single entry that has more.
    pub fn read(&self, start: u64, end: u64, limit: usize) -> (u64, Vec<Entry>) {
        let Some(first) = self.first().filter(|first| *first < end) else { return (end, Vec::new()) };
        let from = first.max(start);
        let mut left = limit;
        let fits = |(number, (bytes, _)): &(usize, &(usize, Entry))| {
            let fits = *number == 0 || *bytes <= left;
            left = left.saturating_sub(*bytes);
            fits
        };
        let skipped = usize::try_from(from - first).unwrap_or(usize::MAX);
        let count = usize::try_from(end.saturating_sub(from)).unwrap_or(usize::MAX);
        let entries = self.entries.iter().skip(skipped).take(count).enumerate().take_while(fits);
        (from, entries.map(|(_, (_, entry))| entry.clone()).collect())
    }
}

#[cfg(test)]
mod tests {
    use openraft::EntryPayload;

    use super::*;
    use crate::types::log_id;

    fn tail(first: u64, lengths: &[usize]) -> Tail {
        let mut tail = Tail::new(first);
        for (index, bytes) in (first..).zip(lengths) {
            tail.push(*bytes, Entry { log_id: log_id(1, 1, index), payload: EntryPayload::Blank });
        }
        tail
    }

    fn indices(entries: Vec<Entry>) -> Vec<u64> {
        entries.iter().map(|entry| entry.log_id.index).collect()
    }

    #[test]
    fn entries_are_given_to_the_one_that_applies_them_if_all_are_here_and_on_disk() {
        assert!(Tail::new(0).take(0, 1).is_none());
        let mut tail = tail(5, &[10; 4]);
        assert!(tail.take(5, 6).is_none(), "it is not on disk");
        tail.set_on_disk(8);
        for (start, end) in [(4, 6), (5, 9), (5, 10), (8, 10), (6, 6), (7, 6)] {
            assert!(tail.take(start, end).is_none(), "{start}..{end}");
        }
        assert_eq!(tail.take(6, 8).map(indices), Some(vec![6, 7]));
        assert!(tail.take(5, 6).is_none(), "what is before a range has been applied");
        assert_eq!((tail.first(), tail.last(), tail.bytes), (Some(8), Some(8), 10));
        tail.set_on_disk(9);
        assert_eq!(tail.take(8, 9).map(indices), Some(vec![8]));
        assert_eq!((tail.last(), tail.bytes), (None, 0));
    }

    #[test]
    fn a_range_is_read_from_where_it_is_here_as_far_as_it_fits() {
        let tail = tail(1, &[200, 50, 50, 1]);
        let read = |start, end, limit| {
            let (from, entries) = tail.read(start, end, limit);
            (from, indices(entries))
        };
        assert_eq!(read(1, 5, 100), (1, vec![1]));
        assert_eq!(read(2, 5, 100), (2, vec![2, 3]));
        assert_eq!(read(3, 5, 100), (3, vec![3, 4]));
        assert_eq!(read(0, 3, usize::MAX), (1, vec![1, 2]));
        assert_eq!(read(0, 1, usize::MAX), (1, vec![]));
        assert_eq!(read(4, u64::MAX, usize::MAX), (4, vec![4]));
        assert_eq!(read(6, 9, usize::MAX), (6, vec![]));
        assert_eq!((Tail::new(9).read(3, 7, 1).0, Tail::new(9).read(3, 7, 1).1.len()), (7, 0));
    }

    #[test]
    fn what_is_on_disk_goes_when_there_is_too_much_and_what_is_not_stays() {
        let mut tail = tail(0, &[KEPT_BYTES / 2; 5]);
        tail.set_on_disk(2);
        assert_eq!((tail.first(), tail.last()), (Some(2), Some(4)));
        tail.set_on_disk(5);
        assert_eq!((tail.first(), tail.bytes), (Some(3), KEPT_BYTES));
        tail.truncate(4);
        assert_eq!((tail.first(), tail.last()), (Some(3), Some(3)));
        tail.purge(9);
        assert_eq!((tail.first(), tail.bytes), (None, 0));
    }
}
