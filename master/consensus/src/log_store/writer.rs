//! The thread that writes the log, in the order in which it is asked to: a vote and an append never overtake each
//! other. It takes whatever has queued up, writes it as one batch with one sync, and then answers all of it.
//!
//! After a write that failed nothing is written any more: what comes later must not be in the log without it.

use std::sync::Arc;

use cavern_conf::{Failpoint, host};
use cavern_state::{Database, Family};
use openraft::storage::IOFlushed;
use rocksdb::WriteBatch;
use tokio::sync::{OwnedSemaphorePermit, mpsc, oneshot};

use super::{PURGED_KEY, Shared, VOTE_KEY};
use crate::error::{ConsensusError, Result};
use crate::metrics::ConsensusMetrics;
use crate::types::Types;

/// Bytes of one write, but for the one that exceeds it.
const BATCH_BYTES: usize = 16 << 20;

/// One thing to write.
pub struct Write {
    pub change: LogChange,
    pub done: Done,
}

pub enum LogChange {
    Append(Vec<(u64, Vec<u8>)>),
    Vote(Vec<u8>),
    /// Everything from this index on.
    Truncate(u64),
    /// Everything up to this index, with the encoded log id.
    Purge(u64, Vec<u8>),
}

/// Whom to tell that it is on disk, or why it is not.
pub enum Done {
    /// The consensus, which goes on meanwhile, with the room that the entries take in memory.
    Flushed(IOFlushed<Types>, OwnedSemaphorePermit),
    /// One who waits.
    Answered(oneshot::Sender<Result<(), Arc<ConsensusError>>>),
}

impl Done {
    pub fn tell(self, result: Result<(), Arc<ConsensusError>>) {
        match self {
            Self::Flushed(callback, _room) => callback.io_completed(result.map_err(std::io::Error::other)),
            // One who no longer waits has been stopped, and does not need the answer.
            Self::Answered(answer) => drop(answer.send(result)),
        }
    }
}

pub fn write_loop(shared: &Shared, mut queue: mpsc::Receiver<Write>, metrics: &ConsensusMetrics) {
    let mut broken: Option<Arc<ConsensusError>> = None;
    while let Some(first) = queue.blocking_recv() {
        let writes = with_queued(first, &mut queue);
        let result = match &broken {
            Some(error) => Err(error.clone()),
            None => write_all(shared, &writes, metrics).map_err(Arc::new),
        };
        broken = result.clone().err();
        answer(shared, writes, &result);
    }
}

/// Writes the log in a simulation.
#[cfg(test)]
pub async fn write_on(host: Arc<crate::simulation::Host>, shared: Arc<Shared>, mut queue: mpsc::Receiver<Write>) {
    let mut broken: Option<Arc<ConsensusError>> = None;
    while let Some(first) = queue.recv().await {
        let writes = with_queued(first, &mut queue);
        let result = match &broken {
            Some(error) => Err(error.clone()),
            None => {
                let database = shared.database.get();
                host.write_synced(&database, batch_of(&shared, &database, &writes)).await.map_err(Arc::new)
            }
        };
        broken = result.clone().err();
        answer(&shared, writes, &result);
    }
}

/// A write with what else has queued up.
fn with_queued(first: Write, queue: &mut mpsc::Receiver<Write>) -> Vec<Write> {
    let mut bytes = length(&first.change);
    let mut writes = vec![first];
    while bytes < BATCH_BYTES
        && let Ok(next) = queue.try_recv()
    {
        bytes += length(&next.change);
        writes.push(next);
    }
    writes
}

fn answer(shared: &Shared, writes: Vec<Write>, result: &Result<(), Arc<ConsensusError>>) {
    match result {
        Ok(()) => shared.wrote(&writes),
        Err(error) => shared.broke(error),
    }
    for write in writes {
        write.done.tell(result.clone());
    }
}

fn length(change: &LogChange) -> usize {
    match change {
        LogChange::Append(entries) => entries.iter().map(|(_, bytes)| bytes.len()).sum(),
        LogChange::Vote(_) | LogChange::Truncate(_) | LogChange::Purge(..) => 0,
    }
}

fn batch_of(shared: &Shared, database: &Database, writes: &[Write]) -> WriteBatch {
    let mut batch = WriteBatch::default();
    let now_ns = host::wall_ns();
    for write in writes {
        add_to_batch(shared, database, &mut batch, &write.change, now_ns);
    }
    batch
}

fn write_all(shared: &Shared, writes: &[Write], metrics: &ConsensusMetrics) -> Result {
    let _same = shared.database.lock_writing()?;
    let database = shared.database.get();
    let batch = batch_of(shared, &database, writes);
    let timer = tokio::time::Instant::now();
    Failpoint::LogAppend.pass();
    #[cfg(test)]
    if let Some(reason) = *shared.disk.blocking_lock() {
        return Err(ConsensusError::Unavailable(reason.to_owned()));
    }
    database.write_synced(batch)?;
    Failpoint::LogSynced.pass();
    metrics.log_sync_seconds.observe(timer.elapsed().as_secs_f64());
    Ok(())
}

fn add_to_batch(shared: &Shared, database: &Database, batch: &mut WriteBatch, change: &LogChange, now_ns: i64) {
    let (log, meta) = (database.family(Family::RaftLog), database.family(Family::RaftMeta));
    match change {
        LogChange::Append(entries) => {
            let mut size = shared.size.lock();
            for (index, bytes) in entries {
                batch.put_cf(log, index.to_be_bytes(), bytes);
                size.appended(database, batch, (*index, bytes.len()), now_ns);
            }
        }
        LogChange::Vote(vote) => batch.put_cf(meta, VOTE_KEY, vote),
        LogChange::Truncate(from) => {
            batch.delete_range_cf(log, from.to_be_bytes(), u64::MAX.to_be_bytes());
            shared.size.lock().truncated(database, batch, *from);
        }
        LogChange::Purge(upto, log_id) => {
            batch.delete_range_cf(log, 0u64.to_be_bytes(), upto.saturating_add(1).to_be_bytes());
            batch.put_cf(meta, PURGED_KEY, log_id);
            shared.size.lock().purged(database, batch, *upto);
        }
    }
}
