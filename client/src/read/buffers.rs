//! Chunks in memory: what came over the network or from the bucket, checked, until it is read or room is needed. Those
//! of a file that may change are there under a version of it, and leave with that.
//!
//! A chunk is in one of three states: here, being fetched by someone, or missing. Whoever finds chunks missing claims
//! them, so that nobody fetches what is on its way; a claim that is dropped without bytes makes them missing again and
//! wakes who waited.
//!
//! Chunks that came together are a *piece*: one buffer, whose memory is free when all of them have left. Pieces leave
//! in the order in which they came: what is read again is in the kernel's page cache. What was read ahead leaves when
//! all of it has been given out: the stream goes on in its memory, which the processor's caches have just then. While a
//! read waits for memory nothing is kept for later; a piece that somebody else waits for is spared until he has read
//! it. Nothing is kept of a version that has ended, however late it comes.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use cavern_proto::chunk::chunk_range;
use cavern_proto::{BlockId, CHUNK_BYTES};
use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::time::Instant;

use super::span::Span;
use crate::memory::CHARGE_MIN_BYTES;
use crate::mounts::ObjectVersion;
use crate::stages::Stages;
use crate::stats::Stats;

/// Chunks that nobody wanted for this long are dropped even when there is room.
const IDLE: Duration = Duration::from_secs(30);

/// What bytes are buffered under.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct BufferKey {
    pub block: BlockId,
    /// Of a block whose bytes may change: they are those of another version then. 0 for others.
    pub version: u64,
    /// Bytes of the block: in a file that grows it has more.
    pub length: u32,
}

impl BufferKey {
    /// A block of an object, whose bytes never change.
    pub(super) fn of_object(object: &ObjectVersion, index: u32) -> Self {
        let block = BlockId { content: object.content, index };
        Self { block, version: 0, length: object.block_length(index) }
    }
}

type ChunkKey = (BufferKey, u32);

/// Where a fetch counts what it waits for. The channel closes when it has ended.
type Fetch = Option<Arc<Stages>>;

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
    /// By number: oldest first.
    pieces: BTreeMap<u64, SharedBuffer>,
    next_piece: u64,
    /// Pieces that are kept though all of them has been given out.
    given: usize,
    /// The versions that count, each with the numbers of its pieces.
    versions: HashMap<u64, BTreeSet<u64>>,
    last_version: u64,
}

/// Chunks that share a buffer.
#[derive(Debug)]
struct SharedBuffer {
    block: BufferKey,
    chunks: Range<u32>,
    bytes: Bytes,
    since: Instant,
    /// Others than who fetched it waited for it when it came.
    awaited: bool,
    purpose: Purpose,
    /// Bytes that have been given to nobody; of those that were given twice some count for others.
    left: usize,
}

#[derive(Debug)]
enum Slot {
    Present { piece: u64, unused_readahead: bool },
    InFlight(watch::Receiver<Fetch>),
}

/// What may go to make room.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum TrimPolicy {
    /// Pieces that somebody waited for stay: he may not have read them yet.
    Awaited,
    /// Pieces stay of which not all has been given out.
    Left,
    Nothing,
}

/// What is known of a range of chunks.
#[derive(Debug)]
pub(super) enum ChunkLookup {
    /// All of them, in order; in one if they are one piece, or part of one.
    All(Vec<Bytes>),
    /// Another fetch brings the next one: wait, then look again.
    Wait(watch::Receiver<Fetch>),
    /// The first missing ones, to be fetched by the caller.
    Missing(FetchClaim),
}

/// Chunks that one caller fetches.
#[derive(Debug)]
pub(super) struct FetchClaim {
    buffers: Arc<Buffers>,
    block: BufferKey,
    chunks: Range<u32>,
    purpose: Purpose,
    fulfilled: bool,
    done: watch::Sender<Fetch>,
}

impl Buffers {
    pub(super) fn new(stats: Arc<Stats>) -> Arc<Self> {
        Arc::new(Self { state: Mutex::default(), stats })
    }

    /// A number that names a version of the bytes of blocks, and no other. It counts until it is forgotten.
    pub(super) fn new_version(&self) -> u64 {
        let mut state = self.state.lock();
        state.last_version += 1;
        let version = state.last_version;
        state.versions.insert(version, BTreeSet::new());
        version
    }

    /// A version has ended: drops what is here of it.
    pub(super) fn forget(&self, version: u64) {
        let mut dropped = Vec::new();
        let mut state = self.state.lock();
        for number in state.versions.remove(&version).unwrap_or_default() {
            state.take_out(number, &mut dropped, &self.stats);
        }
        // Memory is given back after the lock.
        drop(state);
    }

    /// Looks at `chunks` of a block, and claims the first run of missing ones.
    pub(super) fn gather(self: &Arc<Self>, block: BufferKey, chunks: Range<u32>, purpose: Purpose) -> ChunkLookup {
        let mut state = self.state.lock();
        if let Some(bytes) = state.in_one(block, chunks.clone()) {
            if purpose == Purpose::Read {
                state.note_use(block, chunks, &self.stats);
            }
            return ChunkLookup::All(vec![bytes]);
        }
        let mut here = Vec::with_capacity(chunks.len());
        for chunk in chunks.clone() {
            match state.chunks.get(&(block, chunk)) {
                Some(Slot::Present { .. }) => {
                    here.extend(state.piece(block, chunk).map(|(_, piece)| piece.slice(chunk..chunk + 1)));
                }
                Some(Slot::InFlight(done)) => return ChunkLookup::Wait(done.clone()),
                None => {
                    let missing = (chunk..chunks.end).take_while(|chunk| !state.chunks.contains_key(&(block, *chunk)));
                    let run = chunk..chunk + missing.count() as u32;
                    let (done, waiter) = watch::channel(Stages::current());
                    for chunk in run.clone() {
                        state.chunks.insert((block, chunk), Slot::InFlight(waiter.clone()));
                    }
                    let buffers = self.clone();
                    return ChunkLookup::Missing(FetchClaim {
                        buffers,
                        block,
                        chunks: run,
                        purpose,
                        fulfilled: false,
                        done,
                    });
                }
            }
        }
        if purpose == Purpose::Read {
            state.note_use(block, chunks, &self.stats);
        }
        ChunkLookup::All(here)
    }

    /// The chunks in one, when all of them are here and belong to one piece; for event loops.
    pub(super) fn in_one(&self, block: BufferKey, chunks: Range<u32>) -> Option<Bytes> {
        let mut state = self.state.lock();
        let bytes = state.in_one(block, chunks.clone())?;
        state.note_use(block, chunks, &self.stats);
        Some(bytes)
    }

    /// Whether there is nothing, and nothing is on its way.
    pub(super) fn is_empty(&self) -> bool {
        self.state.lock().chunks.is_empty()
    }

    /// Whether all of these chunks are missing, and nobody fetches any.
    pub(super) fn lack(&self, block: BufferKey, mut chunks: Range<u32>) -> bool {
        let state = self.state.lock();
        state.chunks.is_empty() || !chunks.any(|chunk| state.chunks.contains_key(&(block, chunk)))
    }

    /// The chunks, when all of them are here; for event loops.
    pub(super) fn peek(&self, block: BufferKey, chunks: Range<u32>, mut take: impl FnMut(u32, &[u8])) -> bool {
        let mut state = self.state.lock();
        if state.chunks.is_empty() {
            return false;
        }
        let is_here = |chunk| matches!(state.chunks.get(&(block, chunk)), Some(Slot::Present { .. }));
        if !chunks.clone().all(is_here) {
            return false;
        }
        for chunk in chunks.clone() {
            if let Some((_, piece)) = state.piece(block, chunk) {
                take(chunk, &piece.bytes[piece.place(chunk..chunk + 1)]);
            }
        }
        state.note_use(block, chunks, &self.stats);
        true
    }

    /// These bytes have been given to a reader: not to one who will ask for them once more.
    pub(super) fn note_given(&self, block: BufferKey, span: &Span) {
        let mut dropped = Vec::new();
        let mut state = self.state.lock();
        for chunk in span.chunks() {
            let Some(Slot::Present { piece: number, .. }) = state.chunks.get(&(block, chunk)) else { continue };
            let number = *number;
            let Some(piece) = state.pieces.get_mut(&number).filter(|piece| piece.left > 0) else { continue };
            let here = chunk_range(chunk, block.length);
            let given = here.end.min(span.bytes.end).saturating_sub(here.start.max(span.bytes.start));
            piece.left = piece.left.saturating_sub(given as usize);
            match (piece.left, piece.purpose) {
                (0, Purpose::Readahead) => state.take_out(number, &mut dropped, &self.stats),
                (0, Purpose::Read) => state.given += 1,
                _ => {}
            }
        }
        // Memory is given back after the lock.
        drop(state);
    }

    /// Drops the oldest pieces of at least `bytes` bytes in total, or all that may go.
    pub(super) fn make_room(&self, bytes: u64, spare: TrimPolicy) {
        let (mut freed, mut going, mut dropped) = (0, Vec::new(), Vec::new());
        let mut state = self.state.lock();
        if spare == TrimPolicy::Left && state.given == 0 {
            return;
        }
        let may_go = |piece: &SharedBuffer| match spare {
            TrimPolicy::Awaited => !piece.awaited,
            TrimPolicy::Left => piece.left == 0,
            TrimPolicy::Nothing => true,
        };
        for (number, piece) in state.pieces.iter().filter(|(_, piece)| may_go(piece)) {
            if freed >= bytes {
                break;
            }
            freed += (piece.bytes.len() as u64).max(CHARGE_MIN_BYTES);
            going.push(*number);
        }
        going.into_iter().for_each(|number| state.take_out(number, &mut dropped, &self.stats));
        // Memory is given back after the lock.
        drop(state);
    }

    /// Drops what is old.
    pub(super) fn sweep(&self) {
        let now = Instant::now();
        let mut dropped = Vec::new();
        let mut state = self.state.lock();
        while let Some((number, piece)) = state.pieces.first_key_value()
            && now.saturating_duration_since(piece.since) >= IDLE
        {
            let number = *number;
            state.take_out(number, &mut dropped, &self.stats);
        }
        if state.chunks.is_empty() {
            state.chunks = HashMap::new();
        }
        drop(state);
    }

    pub(super) fn clear(&self) {
        self.make_room(u64::MAX, TrimPolicy::Nothing);
    }
}

impl State {
    /// What was read ahead has been of use.
    fn note_use(&mut self, block: BufferKey, chunks: Range<u32>, stats: &Stats) {
        for chunk in chunks {
            if let Some(Slot::Present { piece, unused_readahead }) = self.chunks.get_mut(&(block, chunk))
                && std::mem::take(unused_readahead)
                && let Some(piece) = self.pieces.get(&*piece)
            {
                stats.readahead_used_bytes.inc_by(piece.place(chunk..chunk + 1).len() as u64);
            }
        }
    }

    /// The piece that has a chunk, and its number.
    fn piece(&self, block: BufferKey, chunk: u32) -> Option<(u64, &SharedBuffer)> {
        match self.chunks.get(&(block, chunk))? {
            Slot::Present { piece, .. } => Some((*piece, self.pieces.get(piece)?)),
            Slot::InFlight(_) => None,
        }
    }

    fn in_one(&self, block: BufferKey, chunks: Range<u32>) -> Option<Bytes> {
        let (number, piece) = self.piece(block, chunks.start)?;
        let is_of_it = |chunk| {
            let slot = self.chunks.get(&(block, chunk));
            matches!(slot, Some(Slot::Present { piece, .. }) if *piece == number)
        };
        chunks.clone().skip(1).all(is_of_it).then(|| piece.slice(chunks))
    }

    fn take_out(&mut self, number: u64, dropped: &mut Vec<Bytes>, stats: &Stats) {
        let Some(piece) = self.pieces.remove(&number) else { return };
        if piece.left == 0 && piece.purpose == Purpose::Read {
            self.given -= 1;
        }
        if let Some(numbers) = self.versions.get_mut(&piece.block.version) {
            numbers.remove(&number);
        }
        for chunk in piece.chunks.clone() {
            let key = (piece.block, chunk);
            if !matches!(self.chunks.get(&key), Some(Slot::Present { piece, .. }) if *piece == number) {
                continue;
            }
            if let Some(Slot::Present { unused_readahead: true, .. }) = self.chunks.remove(&key) {
                stats.readahead_wasted_bytes.inc_by(piece.place(chunk..chunk + 1).len() as u64);
            }
        }
        dropped.push(piece.bytes);
    }
}

impl SharedBuffer {
    /// Where some of its chunks are in its bytes.
    fn place(&self, chunks: Range<u32>) -> Range<usize> {
        let at = |chunk: u32| (((chunk - self.chunks.start) * CHUNK_BYTES) as usize).min(self.bytes.len());
        at(chunks.start)..at(chunks.end)
    }

    fn slice(&self, chunks: Range<u32>) -> Bytes {
        self.bytes.slice(self.place(chunks))
    }
}

impl FetchClaim {
    pub(super) fn chunks(&self) -> Range<u32> {
        self.chunks.clone()
    }

    /// The bytes of all claimed chunks have come. Those of a version that has ended are dropped.
    pub(super) fn fulfil(mut self, bytes: &Bytes) {
        let mut state = self.buffers.state.lock();
        let number = state.next_piece;
        if self.block.version != 0 {
            let Some(numbers) = state.versions.get_mut(&self.block.version) else { return };
            numbers.insert(number);
        }
        self.fulfilled = true;
        state.next_piece += 1;
        // Every slot holds one receiver; whoever waits, another.
        let awaited = self.done.receiver_count() > self.chunks.len();
        let unused_readahead = self.purpose == Purpose::Readahead;
        for chunk in self.chunks.clone() {
            state.chunks.insert((self.block, chunk), Slot::Present { piece: number, unused_readahead });
        }
        let (chunks, since, purpose) = (self.chunks.clone(), Instant::now(), self.purpose);
        // Nothing is counted of what has no bytes.
        let left = bytes.len().max(1);
        let piece = SharedBuffer { block: self.block, chunks, bytes: bytes.clone(), since, awaited, purpose, left };
        state.pieces.insert(number, piece);
    }
}

impl Drop for FetchClaim {
    fn drop(&mut self) {
        if self.fulfilled {
            // Its chunks may have left already, and be claimed by somebody else.
            return;
        }
        let mut state = self.buffers.state.lock();
        for chunk in self.chunks.clone() {
            if let Some(Slot::InFlight(_)) = state.chunks.get(&(self.block, chunk)) {
                state.chunks.remove(&(self.block, chunk));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use cavern_proto::ContentId;

    use super::*;

    fn block() -> BufferKey {
        let block = BlockId { content: ContentId::of_object("s", "k", "e", 1, 1), index: 0 };
        BufferKey { block, version: 0, length: 1 << 20 }
    }

    fn claim(buffers: &Arc<Buffers>, chunks: Range<u32>, purpose: Purpose) -> FetchClaim {
        match buffers.gather(block(), chunks, purpose) {
            ChunkLookup::Missing(claim) => claim,
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
        let ChunkLookup::Wait(mut done) = buffers.gather(block(), 2..3, Purpose::Read) else { panic!("not claimed") };
        let whole = Bytes::from(vec![1u8; CHUNK_BYTES as usize + 5]);
        first.fulfil(&whole);
        assert!(done.changed().await.is_err(), "the end of the claim wakes who waits");
        let ChunkLookup::All(parts) = buffers.gather(block(), 2..4, Purpose::Read) else { panic!("not here") };
        assert!(parts.len() == 1 && parts[0].as_ptr() == whole.as_ptr() && parts[0].len() == whole.len(), "in one");
        assert_eq!(stats.readahead_used_bytes.get(), whole.len() as u64);
        assert_eq!(buffers.in_one(block(), 3..4).unwrap(), whole.slice(CHUNK_BYTES as usize..));
        claim(&buffers, 4..5, Purpose::Read).fulfil(&whole.slice(..CHUNK_BYTES as usize));
        assert!(buffers.in_one(block(), 3..5).is_none() && buffers.in_one(block(), 4..6).is_none());
        let ChunkLookup::All(parts) = buffers.gather(block(), 2..5, Purpose::Read) else { panic!("not here") };
        assert_eq!(parts.iter().map(Bytes::len).collect::<Vec<_>>(), [CHUNK_BYTES as usize, 5, CHUNK_BYTES as usize]);
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
        buffers.make_room(1, TrimPolicy::Nothing);
        assert!(matches!(buffers.gather(block(), 1..2, Purpose::Read), ChunkLookup::All(_)));
        assert!(matches!(buffers.gather(block(), 0..1, Purpose::Read), ChunkLookup::Missing(_)));
        assert_eq!(stats.readahead_wasted_bytes.get(), bytes.len() as u64);
        assert!(!buffers.peek(block(), 0..2, |_, _| {}));
        assert!(buffers.peek(block(), 1..2, |_, _| {}));
    }

    #[tokio::test]
    async fn what_somebody_waits_for_is_spared_until_it_has_been_read() {
        let buffers = Buffers::new(Arc::default());
        let bytes = Bytes::from(vec![1u8; CHUNK_BYTES as usize * 2]);
        let awaited = claim(&buffers, 0..2, Purpose::Read);
        let ChunkLookup::Wait(mut done) = buffers.gather(block(), 1..2, Purpose::Read) else { panic!("not claimed") };
        awaited.fulfil(&bytes);
        claim(&buffers, 2..4, Purpose::Readahead).fulfil(&bytes);
        buffers.make_room(u64::MAX, TrimPolicy::Awaited);
        assert!(done.changed().await.is_err());
        assert!(matches!(buffers.gather(block(), 0..2, Purpose::Read), ChunkLookup::All(_)));
        assert!(matches!(buffers.gather(block(), 2..4, Purpose::Read), ChunkLookup::Missing(_)));
        buffers.make_room(1, TrimPolicy::Nothing);
        assert!(buffers.state.lock().chunks.is_empty(), "a piece goes as a whole: only that frees its memory");
    }

    #[test]
    fn what_was_given_out_makes_room_and_leaves_at_once_if_it_was_read_ahead() {
        let stats = Arc::new(Stats::default());
        let buffers = Buffers::new(stats.clone());
        let bytes = Bytes::from(vec![1u8; CHUNK_BYTES as usize * 2]);
        claim(&buffers, 0..2, Purpose::Readahead).fulfil(&bytes);
        claim(&buffers, 2..4, Purpose::Read).fulfil(&bytes);
        claim(&buffers, 4..6, Purpose::Read).fulfil(&bytes);
        let give = |bytes: Range<u32>| buffers.note_given(block(), &Span { index: 0, bytes });
        let is_here = |chunks: Range<u32>| buffers.in_one(block(), chunks).is_some();
        give(0..CHUNK_BYTES + 1);
        buffers.make_room(u64::MAX, TrimPolicy::Left);
        assert!(is_here(0..2) && is_here(2..4) && is_here(4..6), "of each something is left");
        give(CHUNK_BYTES + 1..3 * CHUNK_BYTES);
        assert!(buffers.lack(block(), 0..2) && is_here(2..4));
        give(3 * CHUNK_BYTES..5 * CHUNK_BYTES);
        assert!(is_here(2..4) && is_here(4..6), "what was asked for stays while there is room");
        buffers.make_room(u64::MAX, TrimPolicy::Left);
        assert!(buffers.lack(block(), 2..4) && is_here(4..6));
        give(5 * CHUNK_BYTES..6 * CHUNK_BYTES);
        give(5 * CHUNK_BYTES..6 * CHUNK_BYTES);
        assert_eq!(buffers.state.lock().given, 1);
        buffers.clear();
        let state = buffers.state.lock();
        assert!(state.given == 0 && state.chunks.is_empty() && state.pieces.is_empty());
        assert_eq!(stats.readahead_wasted_bytes.get(), 0);
    }

    #[test]
    fn what_was_buffered_of_a_version_is_found_under_no_other_and_leaves_with_it() {
        let (stats, bytes) = (Arc::new(Stats::default()), Bytes::from(vec![1u8; CHUNK_BYTES as usize]));
        let buffers = Buffers::new(stats.clone());
        let (first, second) = (buffers.new_version(), buffers.new_version());
        let of = |version| BufferKey { version, ..block() };
        for key in [block(), of(first), of(second)] {
            let ChunkLookup::Missing(claim) = buffers.gather(key, 0..1, Purpose::Readahead) else { panic!("{key:?}") };
            claim.fulfil(&bytes);
        }
        assert!(buffers.lack(BufferKey { length: 5, ..of(first) }, 0..1), "the file is longer, or shorter");
        buffers.forget(first);
        assert!(buffers.lack(of(first), 0..1) && !buffers.lack(of(second), 0..1) && !buffers.lack(block(), 0..1));
        assert_eq!((stats.readahead_wasted_bytes.get(), buffers.state.lock().pieces.len()), (bytes.len() as u64, 2));
    }

    #[test]
    fn what_comes_of_a_version_that_has_ended_is_dropped() {
        let (buffers, bytes) = (Buffers::new(Arc::default()), Bytes::from(vec![1u8; CHUNK_BYTES as usize]));
        let of = |version| BufferKey { version, ..block() };
        let claim = |key| match buffers.gather(key, 0..1, Purpose::Readahead) {
            ChunkLookup::Missing(claim) => claim,
            other => panic!("{other:?}"),
        };
        let (ended, counts) = (buffers.new_version(), buffers.new_version());
        let (late, in_time) = (claim(of(ended)), claim(of(counts)));
        buffers.forget(ended);
        late.fulfil(&bytes);
        in_time.fulfil(&bytes);
        // Whoever read before the end may ask once more.
        claim(of(ended)).fulfil(&bytes);
        assert!(buffers.lack(of(ended), 0..1) && !buffers.lack(of(counts), 0..1));
        buffers.make_room(1, TrimPolicy::Nothing);
        buffers.forget(counts);
        let state = buffers.state.lock();
        assert!(state.chunks.is_empty() && state.pieces.is_empty() && state.versions.is_empty());
    }
}
