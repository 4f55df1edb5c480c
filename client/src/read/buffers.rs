//! Chunks in memory: what came over the network or from the bucket, checked, until it is read or room is needed.
//!
//! A chunk is in one of three states: here, being fetched by someone, or missing. Whoever finds chunks missing claims
//! them, so that nobody fetches what is on its way; a claim that is dropped without bytes makes them missing again and
//! wakes who waited. Chunks leave in the order in which they came: what is read again is in the kernel's page cache.

use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use cavern_proto::{BlockId, CHUNK_BYTES};
use parking_lot::Mutex;
use tokio::sync::watch;

use crate::stats::Stats;

/// Chunks that nobody wanted for this long are dropped even when there is room.
const IDLE: Duration = Duration::from_secs(30);

type ChunkKey = (BlockId, u32);

/// Who caused a fetch.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Purpose {
    Read,
    Readahead,
}

#[derive(Debug)]
pub(super) struct Buffers {
    state: Mutex<State>,
    stats: Arc<Stats>,
}

#[derive(Debug, Default)]
struct State {
    chunks: HashMap<ChunkKey, Slot>,
    /// Chunks that are here, oldest first; may name chunks that left already.
    order: VecDeque<(ChunkKey, Instant)>,
}

#[derive(Debug)]
enum Slot {
    Here { bytes: Bytes, unused_readahead: bool, since: Instant },
    Coming(watch::Receiver<()>),
}

/// What is known of a range of chunks.
#[derive(Debug)]
pub(super) enum Gathered {
    /// All of them, in order.
    All(Vec<Bytes>),
    /// Another fetch brings the next one: wait, then look again.
    Wait(watch::Receiver<()>),
    /// The first missing ones, to be fetched by the caller.
    Missing(Claim),
}

/// Chunks that one caller fetches.
#[derive(Debug)]
pub(super) struct Claim {
    buffers: Arc<Buffers>,
    block: BlockId,
    chunks: Range<u32>,
    purpose: Purpose,
    _done: watch::Sender<()>,
}

impl Buffers {
    pub(super) fn new(stats: Arc<Stats>) -> Arc<Self> {
        Arc::new(Self { state: Mutex::default(), stats })
    }

    /// Looks at `chunks` of a block, and claims the first run of missing ones.
    pub(super) fn gather(self: &Arc<Self>, block: BlockId, chunks: Range<u32>, purpose: Purpose) -> Gathered {
        let mut state = self.state.lock();
        let mut here = Vec::with_capacity(chunks.len());
        for chunk in chunks.clone() {
            match state.chunks.get_mut(&(block, chunk)) {
                Some(Slot::Here { bytes, .. }) => here.push(bytes.clone()),
                Some(Slot::Coming(done)) => return Gathered::Wait(done.clone()),
                None => {
                    let missing = (chunk..chunks.end).take_while(|chunk| !state.chunks.contains_key(&(block, *chunk)));
                    let run = chunk..chunk + missing.count() as u32;
                    let (done, waiter) = watch::channel(());
                    for chunk in run.clone() {
                        state.chunks.insert((block, chunk), Slot::Coming(waiter.clone()));
                    }
                    return Gathered::Missing(Claim {
                        buffers: self.clone(),
                        block,
                        chunks: run,
                        purpose,
                        _done: done,
                    });
                }
            }
        }
        if purpose == Purpose::Read {
            for chunk in chunks {
                if let Some(Slot::Here { bytes, unused_readahead, .. }) = state.chunks.get_mut(&(block, chunk))
                    && std::mem::take(unused_readahead)
                {
                    self.stats.readahead_used_bytes.inc_by(bytes.len() as u64);
                }
            }
        }
        Gathered::All(here)
    }

    /// The chunks, when all of them are here; for event loops.
    pub(super) fn peek(&self, block: BlockId, chunks: Range<u32>, mut take: impl FnMut(u32, &Bytes)) -> bool {
        let mut state = self.state.lock();
        if state.chunks.is_empty() {
            return false;
        }
        let is_here = |chunk| matches!(state.chunks.get(&(block, chunk)), Some(Slot::Here { .. }));
        if !chunks.clone().all(is_here) {
            return false;
        }
        for chunk in chunks {
            if let Some(Slot::Here { bytes, unused_readahead, .. }) = state.chunks.get_mut(&(block, chunk)) {
                take(chunk, bytes);
                if std::mem::take(unused_readahead) {
                    self.stats.readahead_used_bytes.inc_by(bytes.len() as u64);
                }
            }
        }
        true
    }

    /// Drops the oldest chunks of at least `bytes` bytes in total, or all.
    pub(super) fn make_room(&self, bytes: u64) {
        let (mut freed, mut dropped) = (0, Vec::new());
        let mut state = self.state.lock();
        while freed < bytes {
            let Some((key, since)) = state.order.pop_front() else { break };
            if let Some(chunk) = state.take_here(&key, since, &self.stats) {
                freed += chunk.len() as u64;
                dropped.push(chunk);
            }
        }
    }

    /// Drops what nobody wanted for a while.
    pub(super) fn sweep(&self) {
        let now = Instant::now();
        let mut dropped = Vec::new();
        let mut state = self.state.lock();
        while let Some((key, since)) = state.order.front().copied() {
            if now.saturating_duration_since(since) < IDLE {
                break;
            }
            state.order.pop_front();
            dropped.extend(state.take_here(&key, since, &self.stats));
        }
        if state.chunks.is_empty() {
            *state = State::default();
        }
    }

    pub(super) fn clear(&self) {
        self.make_room(u64::MAX);
    }
}

impl State {
    fn take_here(&mut self, key: &ChunkKey, since: Instant, stats: &Stats) -> Option<Bytes> {
        match self.chunks.get(key) {
            Some(Slot::Here { since: current, .. }) if *current == since => {}
            _ => return None,
        }
        match self.chunks.remove(key) {
            Some(Slot::Here { bytes, unused_readahead, .. }) => {
                if unused_readahead {
                    stats.readahead_wasted_bytes.inc_by(bytes.len() as u64);
                }
                Some(bytes)
            }
            _ => None,
        }
    }
}

impl Claim {
    pub(super) fn chunks(&self) -> Range<u32> {
        self.chunks.clone()
    }

    /// The bytes of all claimed chunks have come.
    pub(super) fn fulfil(self, bytes: &Bytes) {
        let now = Instant::now();
        let mut state = self.buffers.state.lock();
        for chunk in self.chunks.clone() {
            let start = ((chunk - self.chunks.start) * CHUNK_BYTES) as usize;
            let end = (start + CHUNK_BYTES as usize).min(bytes.len());
            let slot = Slot::Here {
                bytes: bytes.slice(start.min(end)..end),
                unused_readahead: self.purpose == Purpose::Readahead,
                since: now,
            };
            state.chunks.insert((self.block, chunk), slot);
            state.order.push_back(((self.block, chunk), now));
        }
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        let mut state = self.buffers.state.lock();
        for chunk in self.chunks.clone() {
            if let Some(Slot::Coming(_)) = state.chunks.get(&(self.block, chunk)) {
                state.chunks.remove(&(self.block, chunk));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use cavern_proto::ContentId;

    use super::*;

    fn block() -> BlockId {
        BlockId { content: ContentId::of_object("s", "k", "e", 1, 1), index: 0 }
    }

    fn claim(buffers: &Arc<Buffers>, chunks: Range<u32>, purpose: Purpose) -> Claim {
        match buffers.gather(block(), chunks, purpose) {
            Gathered::Missing(claim) => claim,
            other => panic!("{other:?}"),
        }
    }

    #[tokio::test]
    async fn chunks_are_claimed_once_and_then_here_for_all() {
        let stats = Arc::new(Stats::default());
        let buffers = Buffers::new(stats.clone());
        let first = claim(&buffers, 2..4, Purpose::Readahead);
        assert_eq!(first.chunks(), 2..4);
        assert_eq!(claim(&buffers, 0..6, Purpose::Read).chunks(), 0..2);
        let Gathered::Wait(mut done) = buffers.gather(block(), 2..3, Purpose::Read) else { panic!("not claimed") };
        let whole = Bytes::from(vec![1u8; CHUNK_BYTES as usize + 5]);
        first.fulfil(&whole);
        assert!(done.changed().await.is_err(), "the end of the claim wakes who waits");
        let Gathered::All(parts) = buffers.gather(block(), 2..4, Purpose::Read) else { panic!("not here") };
        assert_eq!(parts.iter().map(Bytes::len).collect::<Vec<_>>(), [CHUNK_BYTES as usize, 5]);
        assert_eq!(stats.readahead_used_bytes.get(), whole.len() as u64);
    }

    #[test]
    fn a_dropped_claim_leaves_the_chunks_missing() {
        let buffers = Buffers::new(Arc::default());
        drop(claim(&buffers, 0..2, Purpose::Read));
        assert_eq!(claim(&buffers, 0..2, Purpose::Read).chunks(), 0..2);
        assert!(buffers.state.lock().chunks.is_empty());
    }

    #[test]
    fn the_oldest_chunks_make_room_and_unused_readahead_counts_as_wasted() {
        let stats = Arc::new(Stats::default());
        let buffers = Buffers::new(stats.clone());
        let bytes = Bytes::from(vec![1u8; CHUNK_BYTES as usize]);
        claim(&buffers, 0..1, Purpose::Readahead).fulfil(&bytes);
        claim(&buffers, 1..2, Purpose::Read).fulfil(&bytes);
        buffers.make_room(1);
        assert!(matches!(buffers.gather(block(), 1..2, Purpose::Read), Gathered::All(_)));
        assert!(matches!(buffers.gather(block(), 0..1, Purpose::Read), Gathered::Missing(_)));
        assert_eq!(stats.readahead_wasted_bytes.get(), bytes.len() as u64);
        assert!(!buffers.peek(block(), 0..2, |_, _| {}));
        assert!(buffers.peek(block(), 1..2, |_, _| {}));
    }
}
