//! The Raft log in RocksDB: entries in `raft_log` under their index, the vote and the purge position in `raft_meta`.
//!
//! All writing is done by one thread, in the order in which it was asked for ([`writer`]). An append does not wait for
//! it: the entries are in memory ([`tail`]) before they are on disk, and go to the other masters meanwhile; the
//! consensus is told when they are, and counts this master's copy from then on. A vote, a truncation and a purge are on
//! disk when they return. The log knows its own [`size`].
//!
//! Entries are applied only once they are on disk here, too, whoever else has them: the state is never ahead of the log
//! that it came from.
//!
//! A database that is made of a snapshot of another master gets what this one is to [`carry_over`] of its log.

mod carry_over;
mod size;
mod tail;
#[cfg(test)]
mod tests;
mod writer;

use std::fmt::Debug;
use std::io;
use std::ops::{Bound, RangeBounds};
use std::sync::Arc;
use std::thread::JoinHandle;

use cavern_conf::host;
use cavern_state::{CurrentDatabase, Database, Family};
use openraft::storage::{IOFlushed, LogState, RaftLogStorage};
use openraft::{OptionalSend, RaftLogReader};
use parking_lot::Mutex;
use rocksdb::{Direction, IteratorMode};
use tokio::sync::{Notify, Semaphore, mpsc, oneshot, watch};

pub use self::carry_over::carry_over;
pub use self::size::{LogSize, index_of};
use self::tail::Tail;
use self::writer::{Done, LogChange, Write, write_loop};
use super::position::read_position;
use super::types::{Entry, LogId, Types, Vote, decode_entry, encode_entry, from_json, to_json};
use crate::error::{ConsensusError, Result};
use crate::metrics::ConsensusMetrics;

const VOTE_KEY: &[u8] = b"vote";
const PURGED_KEY: &[u8] = b"purged";

/// Writes that wait for the thread at most.
const QUEUE: usize = 256;
/// KiB of entries that are in memory and not on disk at most; who appends more waits.
const OVERLAY_KIB: u32 = 64 << 10;
/// Bytes of entries that one message carries to another master, but for a single entry that has more: a heartbeat must
/// not wait behind it for long.
const MESSAGE_BYTES: usize = 1 << 20;

/// The log of one node. Clones share the thread.
#[derive(Clone)]
pub struct LogStore {
    shared: Arc<Shared>,
    writes: mpsc::Sender<Write>,
    /// Of [`OVERLAY_KIB`].
    room: Arc<Semaphore>,
}

/// What the thread shares with everybody else.
struct Shared {
    database: Arc<CurrentDatabase>,
    tail: Mutex<Tail>,
    size: Arc<Mutex<LogSize>>,
    /// Index of the first entry that is not on disk, or why none will be any more.
    on_disk: watch::Sender<Result<u64, Arc<ConsensusError>>>,
    /// The log has another size.
    written: Notify,
    /// Held by a test while nothing is to reach the disk; or why nothing will.
    #[cfg(test)]
    disk: Arc<tokio::sync::Mutex<Option<&'static str>>>,
}

impl Shared {
    /// These writes are on disk.
    fn wrote(&self, writes: &[Write]) {
        let mut tail = self.tail.lock();
        let mut next = tail.on_disk();
        for write in writes {
            match &write.change {
                LogChange::Append(entries) => next = entries.last().map_or(next, |(index, _)| index.saturating_add(1)),
                // Nothing is appended before it is answered.
                LogChange::Truncate(from) => next = next.min(*from),
                LogChange::Purge(upto, _) => next = next.max(upto.saturating_add(1)),
                LogChange::Vote(_) => {}
            }
        }
        tail.set_on_disk(next);
        drop(tail);
        self.on_disk.send_modify(|state| *state = Ok(next));
        self.written.notify_one();
    }

    /// What was applied was agreed on, and no other master may have anything else in its place.
    fn check_truncate(&self, from: u64) -> Result {
        let (applied, _) = read_position(&self.database.get())?;
        let Some(applied) = applied.filter(|applied| applied.index >= from) else { return Ok(()) };
        let error = ConsensusError::Unavailable(format!(
            "this master has applied its log up to entry {}, and the others have something else from entry {from} on: \
             one of the directories is a copy, or that of a master that was removed. This master stops; to begin anew, \
             move its master.data_dir away, take it out with `cv raft remove`, and in with `cv raft add`",
            applied.index
        ));
        tracing::error!("{error}");
        Err(error)
    }

    /// No write will be on disk any more.
    fn broke(&self, error: &Arc<ConsensusError>) {
        self.on_disk.send_modify(|state| *state = Err(error.clone()));
    }
}

impl LogStore {
    /// Starts the writing thread, which ends when the last clone is dropped. `mark_bytes`: see [`size`]. *Blocking*.
    pub fn start(
        database: Arc<CurrentDatabase>,
        mark_bytes: u64,
        metrics: ConsensusMetrics,
    ) -> Result<(Self, JoinHandle<()>)> {
        let (store, queue) = Self::open(database, mark_bytes)?;
        let own = store.shared.clone();
        let thread =
            std::thread::Builder::new().name("raft-log".into()).spawn(move || write_loop(&own, queue, &metrics));
        Ok((store, thread.map_err(ConsensusError::io("the thread raft-log"))?))
    }

    /// Starts to write in a simulation: a task of the host writes, and waits for the disk that the host has.
    #[cfg(test)]
    pub fn start_on(
        host: &Arc<super::simulation::Host>,
        database: Arc<CurrentDatabase>,
        mark_bytes: u64,
    ) -> Result<Self> {
        let (store, queue) = Self::open(database, mark_bytes)?;
        host.spawn(writer::write_on(host.clone(), store.shared.clone(), queue));
        Ok(store)
    }

    /// The log, and what is to be written to it.
    fn open(database: Arc<CurrentDatabase>, mark_bytes: u64) -> Result<(Self, mpsc::Receiver<Write>)> {
        let current = database.get();
        let size = LogSize::load(&current, purged(&current)?, mark_bytes, host::wall_ns())?;
        let last = log_state(&current)?.last_log_id;
        let next = last.map_or(0, |last| last.index.saturating_add(1));
        let shared = Arc::new(Shared {
            database,
            tail: Mutex::new(Tail::new(next)),
            size: Arc::new(Mutex::new(size)),
            on_disk: watch::Sender::new(Ok(next)),
            written: Notify::new(),
            #[cfg(test)]
            disk: Arc::default(),
        });
        let (writes, queue) = mpsc::channel(QUEUE);
        Ok((Self { shared, writes, room: Arc::new(Semaphore::new(OVERLAY_KIB as usize)) }, queue))
    }

    async fn write(&self, change: LogChange) -> Result<(), io::Error> {
        let (done, answer) = oneshot::channel();
        self.writes.send(Write { change, done: Done::Answered(done) }).await.map_err(|_| stopped())?;
        answer.await.map_err(|_| stopped())?.map_err(io::Error::other)
    }

    /// Returns when there is more to say about the size of the log than at the last call.
    pub async fn written(&self) {
        self.shared.written.notified().await;
    }

    /// Its size, for whoever is not to keep the log open.
    pub fn size(&self) -> Arc<Mutex<LogSize>> {
        self.shared.size.clone()
    }

    /// Entries from `start` up to `end`, which is not included, as long as they have no more than `bytes` together; the
    /// first in any case.
    fn read_disk(&self, start: u64, end: u64, bytes: usize) -> Result<Vec<Entry>> {
        let (mut entries, mut left) = (Vec::new(), bytes);
        if start >= end {
            return Ok(entries);
        }
        let database = self.shared.database.get();
        let mode = IteratorMode::From(&start.to_be_bytes(), Direction::Forward);
        for item in database.raw().iterator_cf(database.family(Family::RaftLog), mode) {
            let (_, value) = item?;
            let entry = decode_entry(&value)?;
            if entry.log_id.index >= end || (!entries.is_empty() && value.len() > left) {
                break;
            }
            left = left.saturating_sub(value.len());
            entries.push(entry);
        }
        Ok(entries)
    }

    /// Returns when no entry of a range waits for the disk.
    async fn until_on_disk(&self, end: u64) -> io::Result<()> {
        let end = self.shared.tail.lock().last().map_or(0, |last| end.min(last.saturating_add(1)));
        let mut on_disk = self.shared.on_disk.subscribe();
        let reached = on_disk.wait_for(|state| state.as_ref().map_or(true, |next| *next >= end)).await;
        match reached.map_err(|_| stopped())?.as_ref() {
            Ok(_) => Ok(()),
            Err(error) => Err(io::Error::other(error.clone())),
        }
    }
}

fn stopped() -> io::Error {
    io::Error::other("the log has stopped")
}

fn meta<T: for<'a> serde::Deserialize<'a>>(database: &Database, key: &[u8]) -> Result<Option<T>> {
    let value = database.get(Family::RaftMeta, key)?;
    value.map(|bytes| from_json(&bytes, "a record of the consensus")).transpose()
}

/// What is on disk.
pub fn log_state(database: &Database) -> Result<LogState<Types>> {
    let last_purged_log_id: Option<LogId> = meta(database, PURGED_KEY)?;
    let mut items = database.raw().iterator_cf(database.family(Family::RaftLog), IteratorMode::End);
    let last = items.next().transpose()?;
    let last = last.map(|(_, value)| Ok::<_, ConsensusError>(decode_entry(&value)?.log_id)).transpose()?;
    Ok(LogState { last_purged_log_id, last_log_id: last.or(last_purged_log_id) })
}

/// Whether anything was ever written to the log: an entry or a vote.
pub fn has_log(database: &Database) -> Result<bool> {
    let log = database.family(Family::RaftLog);
    let has_entries = database.raw().iterator_cf(log, IteratorMode::Start).next().transpose()?.is_some();
    Ok(has_entries || database.get(Family::RaftMeta, VOTE_KEY)?.is_some())
}

/// Index of the last entry that was purged from the log.
pub fn purged(database: &Database) -> Result<Option<u64>> {
    let purged: Option<LogId> = meta(database, PURGED_KEY)?;
    Ok(purged.map(|id| id.index))
}

impl RaftLogReader<Types> for LogStore {
    /// For the one that applies them, and for a start.
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
            Bound::Included(end) => end.saturating_add(1),
            Bound::Excluded(end) => *end,
            Bound::Unbounded => u64::MAX,
        };
        self.until_on_disk(end).await?;
        let (from, newest) = {
            let mut tail = self.shared.tail.lock();
            if let Some(entries) = tail.take(start, end) {
                return Ok(entries);
            }
            tail.read(start, end, usize::MAX)
        };
        let mut entries = self.read_disk(start, from, usize::MAX)?;
        entries.extend(newest);
        Ok(entries)
    }

    /// For another master.
    async fn limited_get_log_entries(&mut self, start: u64, end: u64) -> io::Result<Vec<Entry>> {
        let (from, newest) = self.shared.tail.lock().read(start, end, MESSAGE_BYTES);
        if from <= start {
            return Ok(newest);
        }
        // The rest is for the next message.
        Ok(self.read_disk(start, from, MESSAGE_BYTES)?)
    }

    async fn read_vote(&mut self) -> io::Result<Option<Vote>> {
        Ok(meta(&self.shared.database.get(), VOTE_KEY)?)
    }
}

impl RaftLogStorage<Types> for LogStore {
    type LogReader = Self;

    async fn get_log_state(&mut self) -> io::Result<LogState<Types>> {
        self.until_on_disk(u64::MAX).await?;
        Ok(log_state(&self.shared.database.get())?)
    }

    async fn get_log_reader(&mut self) -> Self {
        self.clone()
    }

    async fn save_vote(&mut self, vote: &Vote) -> io::Result<()> {
        let bytes = to_json(vote, "a vote")?;
        self.write(LogChange::Vote(bytes)).await
    }

    /// Returns when the entries can be read; `callback` is called when they are on disk.
    async fn append<I>(&mut self, entries: I, callback: IOFlushed<Types>) -> io::Result<()>
    where
        I: IntoIterator<Item = Entry> + OptionalSend,
        I::IntoIter: OptionalSend,
    {
        let (mut encoded, mut appended, mut kib) = (Vec::new(), Vec::new(), 0);
        for entry in entries {
            let (bytes, entry) = encode_entry(entry)?;
            kib += bytes.len() >> 10;
            let index = entry.log_id.index;
            appended.push((bytes.len(), entry));
            encoded.push((index, bytes));
        }
        let kib = u32::try_from(kib).unwrap_or(u32::MAX).clamp(1, OVERLAY_KIB);
        let room = self.room.clone().acquire_many_owned(kib).await.map_err(|_| stopped())?;
        {
            let mut tail = self.shared.tail.lock();
            for (bytes, entry) in appended {
                let index = entry.log_id.index;
                if let Some(last) = tail.last().filter(|last| last.saturating_add(1) != index) {
                    return Err(io::Error::other(format!(
                        "the log ends with entry {last}, and is given entry {index}"
                    )));
                }
                tail.push(bytes, entry);
            }
        }
        let write = Write { change: LogChange::Append(encoded), done: Done::Flushed(callback, room) };
        if let Err(unsent) = self.writes.send(write).await {
            unsent.0.done.tell(Err(Arc::new(ConsensusError::Unavailable("the log has stopped".into()))));
        }
        Ok(())
    }

    async fn truncate_after(&mut self, last: Option<LogId>) -> io::Result<()> {
        let from = last.map_or(0, |last| last.index.saturating_add(1));
        self.shared.check_truncate(from)?;
        self.shared.tail.lock().truncate(from);
        self.write(LogChange::Truncate(from)).await
    }

    async fn purge(&mut self, log_id: LogId) -> io::Result<()> {
        self.shared.tail.lock().purge(log_id.index);
        let bytes = to_json(&log_id, "a log id")?;
        self.write(LogChange::Purge(log_id.index, bytes)).await
    }
}
