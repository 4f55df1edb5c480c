//! One ranged GET from its turn to its last chunk.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use bytes::Bytes;
use cavern_proto::chunk::chunk_range;
use cavern_proto::data::Status;
use cavern_ufs::{Ufs, UfsError};
use futures::StreamExt;
use parking_lot::RwLock;
use tokio::time::Instant;
use tracing::debug;

use super::{Fills, ObjectBlock, Run, bytes_of};
use crate::request_error::{Refusal, blocking};
use crate::store::{CacheStore, CachedBlock};

/// Memory that a run is charged for at most: pieces of the body are written as they come.
const MAX_BUFFER_BYTES: u64 = 1 << 20;
/// More chunks are not written at a time on a thread that others wait for.
const CHUNKS_AT_ONCE: usize = 8;
/// A write of so few chunks that takes longer has waited for the disk.
const SLOW_WRITE: Duration = Duration::from_millis(10);
/// For how long no write is made then where others would wait for it.
const WARY: Duration = Duration::from_secs(1);
/// On top of what the store may take for the GET, for waiting and writing.
const GRACE: Duration = Duration::from_secs(10);

impl Fills {
    /// Carries out a run and notifies the requests that wait.
    pub(super) async fn fetch_run(
        self: Arc<Self>,
        run: Arc<Run>,
        block: Arc<CachedBlock>,
        source: Arc<ObjectBlock>,
        ufs: Ufs,
    ) {
        self.parts.metrics.fills_running.inc();
        let limit = ufs.deadline(bytes_of(&run.chunks, source.length)) + GRACE;
        let fetched = Box::pin(self.fetch(&run, &block, &source, &ufs));
        let result = match tokio::time::timeout(limit, fetched).await {
            Ok(result) => result,
            Err(_) => {
                Err(Refusal::new(Status::UfsUnavailable, format!("a GET of {} took longer than {limit:?}", source.key)))
            }
        };
        self.conclude(&run, &block, &source, result);
        self.parts.metrics.fills_running.dec();
    }

    /// Records what a run has brought, and notifies the requests that wait that it is over.
    pub(super) fn conclude(
        &self,
        run: &Arc<Run>,
        block: &Arc<CachedBlock>,
        source: &ObjectBlock,
        result: Result<(), Refusal>,
    ) {
        block.close_writer();
        // What was fetched can be read in this run all the same.
        if (result.is_ok() || run.progress.borrow().ready > run.chunks.start)
            && let Err(error) = self.parts.stores.cache.record(block)
        {
            debug!(block = %block.id(), %error, "cannot record what was fetched");
        }
        if let Err(refusal) = &result {
            self.parts.stores.cache.forget_if_empty(block);
            self.parts.metrics.ufs_errors.inc();
            debug!(block = %block.id(), key = source.key, %refusal, "a fill failed");
        }
        self.retire(block.id(), run, false);
        run.progress.send_modify(|progress| progress.end = Some(result));
    }

    /// Room in the store for the chunks of a run.
    pub(super) fn room(&self, run: &Run, block: &Arc<CachedBlock>) -> Result<Arc<FillReservation>, Refusal> {
        self.parts.stores.cache.reserve(block, run.chunks.clone())?;
        Ok(Arc::new(FillReservation {
            cache: self.parts.stores.cache.clone(),
            block: block.clone(),
            chunks: run.chunks.clone(),
            written: AtomicU32::new(0),
        }))
    }

    async fn fetch(
        &self,
        run: &Arc<Run>,
        block: &Arc<CachedBlock>,
        source: &ObjectBlock,
        ufs: &Ufs,
    ) -> Result<(), Refusal> {
        let bytes = bytes_of(&run.chunks, source.length);
        let _turn = self.gets.acquire().await?;
        // No more than the constant.
        let _memory = self.parts.memory.clone().take(bytes.min(MAX_BUFFER_BYTES) as usize).await?;
        self.go_on(run, block)?;

        let room = self.room(run, block)?;

        self.parts.metrics.ufs_requests.inc();
        let start = source.start() + u64::from(chunk_range(run.chunks.start, source.length).start);
        let noted = |error| self.noted(source, error);
        let (key, etag, range) = (&source.key, &source.etag, start..start + bytes);
        let opened =
            if source.is_pinned { ufs.get_pinned(key, etag, range).await } else { ufs.get(key, etag, range).await };
        let mut body = opened.map_err(noted)?;
        let mut gathered = Gathered::default();
        let mut next = run.chunks.start;
        while let Some(piece) = body.next().await {
            let piece = piece.map_err(noted)?;
            self.parts.metrics.ufs_bytes.inc_by(piece.len() as u64);
            gathered.push(piece);
            let mut chunks = Vec::new();
            while next < run.chunks.end {
                let Some(pieces) = gathered.take(chunk_range(next, source.length).len()) else { break };
                chunks.push((next, pieces));
                next += 1;
            }
            if !chunks.is_empty() {
                self.write(run, &room, chunks).await?;
                if next < run.chunks.end {
                    self.go_on(run, block)?;
                }
            }
        }
        if next < run.chunks.end {
            return Err(Refusal::new(Status::UfsUnavailable, format!("the body of {} ended early", source.key)));
        }
        self.parts.mounts.failures.succeeded(source.mount_id, &source.key);
        Ok(())
    }

    /// What a failure of the bucket is answered with, after it was noted.
    pub(super) fn noted(&self, source: &ObjectBlock, error: UfsError) -> Refusal {
        self.parts.mounts.fetch_failed(source.mount_id, &source.key, &error);
        error.into()
    }

    /// Whether anybody still wants the run, and its bytes can still be kept.
    fn go_on(&self, run: &Arc<Run>, block: &CachedBlock) -> Result<(), Refusal> {
        if run.needs.lock().is_empty() && self.retire(block.id(), run, true) {
            return Err(Refusal::new(Status::Deadline, "nobody waits for it any more"));
        }
        if block.is_dead() { Err(Refusal::new(Status::Overloaded, "the block was dropped meanwhile")) } else { Ok(()) }
    }

    /// Writes whole chunks and makes them visible. That is done here while the disk keeps up: a chunk goes to the page
    /// cache in some ten microseconds, less than the way to another thread and back takes.
    pub(super) async fn write(
        &self,
        run: &Arc<Run>,
        room: &Arc<FillReservation>,
        chunks: Vec<(u32, Vec<Bytes>)>,
    ) -> Result<(), Refusal> {
        let last = chunks.last().map_or(run.chunks.start, |(index, _)| index + 1);
        let few = chunks.len() <= CHUNKS_AT_ONCE;
        if few && !self.disk.is_slow() {
            self.disk.watch(|| room.write(&chunks))?;
        } else {
            let room = room.clone();
            blocking("writing the block", move || room.write(&chunks)).await?;
        }
        run.reached(last);
        Ok(())
    }
}

/// Whether writes wait for the disk, as they do when the kernel holds up those who dirty pages faster than it can write
/// them. Then they are made on threads that may wait, for a while.
#[derive(Debug, Default)]
pub(super) struct DiskPace {
    slow_until: RwLock<Option<Instant>>,
}

impl DiskPace {
    fn is_slow(&self) -> bool {
        self.slow_until.read().is_some_and(|until| Instant::now() < until)
    }

    /// Makes a write, and notices when it takes long.
    fn watch<T>(&self, write: impl FnOnce() -> T) -> T {
        let began = Instant::now();
        let written = write();
        if began.elapsed() > SLOW_WRITE {
            *self.slow_until.write() = Some(Instant::now() + WARY);
        }
        written
    }
}

/// What was not written is given back when the run has ended and the last write with it.
pub(super) struct FillReservation {
    cache: Arc<CacheStore>,
    block: Arc<CachedBlock>,
    chunks: Range<u32>,
    /// Chunks written, from the first one on.
    written: AtomicU32,
}

impl FillReservation {
    fn write(&self, chunks: &[(u32, Vec<Bytes>)]) -> Result<(), Refusal> {
        for (index, pieces) in chunks {
            self.cache.write(&self.block, *index, pieces)?;
            self.written.fetch_add(1, Ordering::Relaxed);
        }
        Ok(())
    }
}

impl Drop for FillReservation {
    fn drop(&mut self) {
        let unused = self.chunks.start + self.written.load(Ordering::Relaxed)..self.chunks.end;
        self.cache.release(&self.block, unused);
    }
}

/// Pieces of a body, until they make a chunk.
#[derive(Default)]
struct Gathered {
    pieces: std::collections::VecDeque<Bytes>,
    bytes: usize,
}

impl Gathered {
    fn push(&mut self, piece: Bytes) {
        if !piece.is_empty() {
            self.bytes += piece.len();
            self.pieces.push_back(piece);
        }
    }

    /// The first `bytes` bytes, once that many are here; nothing is copied.
    fn take(&mut self, mut bytes: usize) -> Option<Vec<Bytes>> {
        if self.bytes < bytes {
            return None;
        }
        self.bytes -= bytes;
        let mut taken = Vec::new();
        while bytes > 0 {
            let mut first = self.pieces.pop_front()?;
            if first.len() > bytes {
                self.pieces.push_front(first.split_off(bytes));
            }
            bytes -= first.len();
            taken.push(first);
        }
        Some(taken)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_cut_into_chunks_without_loss() {
        let all: Vec<u8> = (0..=255).collect();
        let mut gathered = Gathered::default();
        let mut out = Vec::new();
        for piece in all.chunks(7) {
            gathered.push(Bytes::copy_from_slice(piece));
            gathered.push(Bytes::new());
            while let Some(pieces) = gathered.take(10) {
                out.extend(pieces.concat());
            }
        }
        out.extend(gathered.take(6).unwrap().concat());
        assert_eq!(out, all);
        assert!(gathered.take(1).is_none());
    }
}
