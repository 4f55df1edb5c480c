//! The Raft log in RocksDB: entries in `raft_log` under their index, the vote and the purge position in `raft_meta`.
//!
//! All writing is done by one thread, in the order in which it was asked for, so that a vote and an append can never
//! overtake each other. The thread takes whatever has queued up, writes it as one batch with one sync, and then answers
//! all of it.
//!
//! What has been appended is kept for the next reader, who is as a rule the one that applies it.

use std::collections::VecDeque;
use std::fmt::Debug;
use std::io;
use std::ops::{Bound, RangeBounds};
use std::sync::Arc;
use std::thread::JoinHandle;

use cavern_conf::Failpoint;
use openraft::storage::{IOFlushed, LogState, RaftLogStorage};
use openraft::{OptionalSend, RaftLogReader};
use parking_lot::Mutex;
use rocksdb::{Direction, IteratorMode, WriteBatch};
use tokio::sync::{mpsc, oneshot};

use super::types::{Entry, LogId, Types, Vote, decode_entry, encode_entry, from_json, to_json};
use crate::MasterError;
use crate::metrics::RaftMetrics;
use crate::state::{Database, Family};

const VOTE_KEY: &[u8] = b"vote";
const PURGED_KEY: &[u8] = b"purged";

/// Writes that wait for the thread at most; openraft itself has one in flight.
const QUEUE: usize = 64;
/// Entries kept for their next reader.
const KEPT: usize = 16;
/// Bytes of entries that one message carries to another master, but for a single entry that has more: a heartbeat must
/// not wait behind it for long.
const MESSAGE_BYTES: usize = 1 << 20;

/// The log of one node. Clones share the thread.
#[derive(Clone)]
pub struct LogStore {
    database: Arc<Database>,
    writes: mpsc::Sender<Write>,
    appended: Arc<Mutex<Appended>>,
}

/// The last entries that were appended and not applied yet, with their lengths in the log: consecutive, in memory only.
#[derive(Default)]
struct Appended(VecDeque<(usize, Entry)>);

impl Appended {
    fn push(&mut self, bytes: usize, entry: Entry) {
        if self.0.back().is_some_and(|(_, last)| last.log_id.index + 1 != entry.log_id.index) {
            self.0.clear();
        }
        if self.0.len() == KEPT {
            self.0.pop_front();
        }
        self.0.push_back((bytes, entry));
    }

    /// Where a range begins and how long it is, if all of its entries are here.
    fn find(&self, start: u64, end: u64) -> Option<(usize, usize)> {
        let first = self.0.front()?.1.log_id.index;
        let from = usize::try_from(start.checked_sub(first)?).ok()?;
        let count = usize::try_from(end.checked_sub(start)?).ok()?;
        (count > 0 && from + count <= self.0.len()).then_some((from, count))
    }

    /// Gives all entries of a range away, to the one that applies them.
    fn take(&mut self, start: u64, end: u64) -> Option<Vec<Entry>> {
        let (from, count) = self.find(start, end)?;
        // Those before it are applied.
        Some(self.0.drain(..from + count).skip(from).map(|(_, entry)| entry).collect())
    }

    /// The first entries of a range, as many as fit into a message.
    fn copy(&self, start: u64, end: u64) -> Option<Vec<Entry>> {
        let (from, count) = self.find(start, end)?;
        let mut left = MESSAGE_BYTES;
        let fits = |(number, (bytes, _)): &(usize, &(usize, Entry))| {
            let fits = *number == 0 || *bytes <= left;
            left = left.saturating_sub(*bytes);
            fits
        };
        Some(
            self.0
                .iter()
                .skip(from)
                .take(count)
                .enumerate()
                .take_while(fits)
                .map(|(_, (_, entry))| entry.clone())
                .collect(),
        )
    }
}

struct Write {
    change: LogChange,
    done: oneshot::Sender<Result<(), Arc<MasterError>>>,
}

enum LogChange {
    Append(Vec<(u64, Vec<u8>)>),
    Vote(Vec<u8>),
    /// Everything from this index on.
    Truncate(u64),
    /// Everything up to this index, with the encoded log id.
    Purge(u64, Vec<u8>),
}

impl LogStore {
    /// Starts the writing thread, which ends when the last clone is dropped.
    pub fn start(database: Arc<Database>, metrics: RaftMetrics) -> Result<(Self, JoinHandle<()>), MasterError> {
        let (writes, queue) = mpsc::channel(QUEUE);
        let own = database.clone();
        let thread =
            std::thread::Builder::new().name("raft-log".into()).spawn(move || write_loop(&own, queue, &metrics));
        let thread = thread.map_err(MasterError::io("the thread raft-log"))?;
        Ok((Self { database, writes, appended: Arc::default() }, thread))
    }

    async fn write(&self, change: LogChange) -> Result<(), io::Error> {
        let (done, answer) = oneshot::channel();
        let stopped = || io::Error::other("the log has stopped");
        self.writes.send(Write { change, done }).await.map_err(|_| stopped())?;
        answer.await.map_err(|_| stopped())?.map_err(io::Error::other)
    }

    /// Entries from `start` up to `end`, which is not included, as long as they have no more than `bytes` together; the
    /// first in any case.
    fn read_range(&self, start: u64, end: Option<u64>, bytes: usize) -> Result<Vec<Entry>, MasterError> {
        let (mut entries, mut left) = (Vec::new(), bytes);
        let start = start.to_be_bytes();
        let mode = IteratorMode::From(&start, Direction::Forward);
        for item in self.database.raw().iterator_cf(self.database.family(Family::RaftLog), mode) {
            let (_, value) = item?;
            let entry = decode_entry(&value)?;
            if end.is_some_and(|end| entry.log_id.index >= end) || (!entries.is_empty() && value.len() > left) {
                break;
            }
            left = left.saturating_sub(value.len());
            entries.push(entry);
        }
        Ok(entries)
    }

    fn last_entry(&self) -> Result<Option<LogId>, MasterError> {
        let mut items = self.database.raw().iterator_cf(self.database.family(Family::RaftLog), IteratorMode::End);
        let last = items.next().transpose()?;
        last.map(|(_, value)| Ok(decode_entry(&value)?.log_id)).transpose()
    }

    fn meta<T: for<'a> serde::Deserialize<'a>>(&self, key: &[u8]) -> Result<Option<T>, MasterError> {
        meta(&self.database, key)
    }
}

fn meta<T: for<'a> serde::Deserialize<'a>>(database: &Database, key: &[u8]) -> Result<Option<T>, MasterError> {
    let value = database.get(Family::RaftMeta, key)?;
    value.map(|bytes| from_json(&bytes, "a record of the consensus")).transpose()
}

/// Whether anything was ever written to the log: an entry or a vote.
pub fn has_log(database: &Database) -> Result<bool, MasterError> {
    let log = database.family(Family::RaftLog);
    let has_entries = database.raw().iterator_cf(log, IteratorMode::Start).next().transpose()?.is_some();
    Ok(has_entries || database.get(Family::RaftMeta, VOTE_KEY)?.is_some())
}

/// Index of the last entry that was purged from the log.
pub fn purged(database: &Database) -> Result<Option<u64>, MasterError> {
    let purged: Option<LogId> = meta(database, PURGED_KEY)?;
    Ok(purged.map(|id| id.index))
}

fn write_loop(database: &Database, mut queue: mpsc::Receiver<Write>, metrics: &RaftMetrics) {
    while let Some(first) = queue.blocking_recv() {
        let mut writes = vec![first];
        while let Ok(next) = queue.try_recv() {
            writes.push(next);
        }
        let mut batch = WriteBatch::default();
        for write in &writes {
            add_to_batch(database, &mut batch, &write.change);
        }
        let timer = tokio::time::Instant::now();
        Failpoint::LogAppend.pass();
        let result = database.write_synced(batch).map_err(Arc::new);
        Failpoint::LogSynced.pass();
        metrics.log_synced(timer.elapsed());
        for write in writes {
            // One who no longer waits has been stopped, and does not need the answer.
            let _ = write.done.send(result.clone());
        }
    }
}

fn add_to_batch(database: &Database, batch: &mut WriteBatch, change: &LogChange) {
    let (log, meta) = (database.family(Family::RaftLog), database.family(Family::RaftMeta));
    match change {
        LogChange::Append(entries) => {
            for (index, bytes) in entries {
                batch.put_cf(log, index.to_be_bytes(), bytes);
            }
        }
        LogChange::Vote(vote) => batch.put_cf(meta, VOTE_KEY, vote),
        LogChange::Truncate(from) => batch.delete_range_cf(log, from.to_be_bytes(), u64::MAX.to_be_bytes()),
        LogChange::Purge(upto, log_id) => {
            batch.delete_range_cf(log, 0u64.to_be_bytes(), upto.saturating_add(1).to_be_bytes());
            batch.put_cf(meta, PURGED_KEY, log_id);
        }
    }
}

impl RaftLogReader<Types> for LogStore {
    async fn try_get_log_entries<R: RangeBounds<u64> + Clone + Debug + OptionalSend>(
        &mut self,
        range: R,
    ) -> io::Result<Vec<Entry>> {
        let start = match range.start_bound() {
            Bound::Included(start) => *start,
            Bound::Excluded(start) => start.saturating_add(1),
            Bound::Unbounded => 0,
        };
        let end = match range.end_bound() {
            Bound::Included(end) => Some(end.saturating_add(1)),
            Bound::Excluded(end) => Some(*end),
            Bound::Unbounded => None,
        };
        if let Some(entries) = end.and_then(|end| self.appended.lock().take(start, end)) {
            return Ok(entries);
        }
        self.read_range(start, end, usize::MAX).map_err(io::Error::other)
    }

    /// For another master.
    async fn limited_get_log_entries(&mut self, start: u64, end: u64) -> io::Result<Vec<Entry>> {
        if let Some(entries) = self.appended.lock().copy(start, end) {
            return Ok(entries);
        }
        self.read_range(start, Some(end), MESSAGE_BYTES).map_err(io::Error::other)
    }

    async fn read_vote(&mut self) -> io::Result<Option<Vote>> {
        self.meta(VOTE_KEY).map_err(io::Error::other)
    }
}

impl RaftLogStorage<Types> for LogStore {
    type LogReader = Self;

    async fn get_log_state(&mut self) -> io::Result<LogState<Types>> {
        let last_purged_log_id: Option<LogId> = self.meta(PURGED_KEY).map_err(io::Error::other)?;
        let last_log_id = self.last_entry().map_err(io::Error::other)?.or(last_purged_log_id);
        Ok(LogState { last_purged_log_id, last_log_id })
    }

    async fn get_log_reader(&mut self) -> Self {
        self.clone()
    }

    async fn save_vote(&mut self, vote: &Vote) -> io::Result<()> {
        let bytes = to_json(vote, "a vote").map_err(io::Error::other)?;
        self.write(LogChange::Vote(bytes)).await
    }

    /// Returns when the entries are on disk: whoever reads them next finds them, and they were synced with what else
    /// had queued up.
    async fn append<I>(&mut self, entries: I, callback: IOFlushed<Types>) -> io::Result<()>
    where
        I: IntoIterator<Item = Entry> + OptionalSend,
        I::IntoIter: OptionalSend,
    {
        let (mut encoded, mut appended) = (Vec::new(), Vec::new());
        for entry in entries {
            let (bytes, entry) = encode_entry(entry).map_err(io::Error::other)?;
            let index = entry.log_id.index;
            appended.push((bytes.len(), entry));
            encoded.push((index, bytes));
        }
        let written = self.write(LogChange::Append(encoded)).await;
        if written.is_ok() {
            let mut kept = self.appended.lock();
            appended.into_iter().for_each(|(bytes, entry)| kept.push(bytes, entry));
        }
        callback.io_completed(written);
        Ok(())
    }

    async fn truncate_after(&mut self, last: Option<LogId>) -> io::Result<()> {
        self.appended.lock().0.clear();
        self.write(LogChange::Truncate(last.map_or(0, |last| last.index.saturating_add(1)))).await
    }

    async fn purge(&mut self, log_id: LogId) -> io::Result<()> {
        self.appended.lock().0.retain(|(_, entry)| entry.log_id.index > log_id.index);
        let bytes = to_json(&log_id, "a log id").map_err(io::Error::other)?;
        self.write(LogChange::Purge(log_id.index, bytes)).await
    }
}

#[cfg(test)]
mod tests {
    use openraft::EntryPayload;

    use super::*;
    use crate::raft::types::log_id;

    fn entry(term: u64, index: u64) -> Entry {
        Entry { log_id: log_id(term, 1, index), payload: EntryPayload::Blank }
    }

    #[test]
    fn entries_are_given_to_their_first_reader_if_all_of_them_are_here() {
        let mut appended = Appended::default();
        assert!(appended.take(1, 2).is_none());
        (5..9).for_each(|index| appended.push(10, entry(1, index)));
        for (start, end) in [(4, 6), (5, 10), (8, 10), (6, 6), (7, 6)] {
            assert!(appended.take(start, end).is_none(), "{start}..{end}");
        }
        let indices =
            |entries: Option<Vec<Entry>>| entries.unwrap().iter().map(|entry| entry.log_id.index).collect::<Vec<_>>();
        assert_eq!(indices(appended.take(6, 8)), [6, 7]);
        assert!(appended.take(5, 6).is_none(), "the range before it has been read by somebody else");
        assert_eq!(indices(appended.take(8, 9)), [8]);
        // Another leader's entries begin elsewhere.
        appended.push(10, entry(1, 9));
        appended.push(10, entry(2, 7));
        assert!(appended.take(9, 10).is_none());
        assert_eq!(appended.take(7, 8).unwrap()[0].log_id, log_id(2, 1, 7));
        (0..2 * KEPT as u64).for_each(|index| appended.push(10, entry(3, index)));
        assert_eq!(appended.0.len(), KEPT);
    }

    #[test]
    fn another_master_is_given_what_fits_into_a_message() {
        let mut appended = Appended::default();
        for (index, bytes) in [(1, 2 * MESSAGE_BYTES), (2, MESSAGE_BYTES / 2), (3, MESSAGE_BYTES / 2), (4, 1)] {
            appended.push(bytes, entry(1, index));
        }
        let count = |start, end| appended.copy(start, end).map(|entries| entries.len());
        assert_eq!((count(1, 5), count(2, 5), count(3, 5)), (Some(1), Some(2), Some(2)));
        assert_eq!((count(2, 6), count(5, 5)), (None, None));
        assert_eq!(appended.take(1, 5).map(|entries| entries.len()), Some(4), "they are still there to be applied");
    }
}
