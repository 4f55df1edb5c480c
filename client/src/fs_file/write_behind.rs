//! Writing behind: what goes to workers over the network is acknowledged when it has been taken, and sent while its
//! writer goes on.
//!
//! Of a file one piece is under way at a time; what is written meanwhile, and follows on, is the next one. So pieces
//! grow as far as the network is slower than the writer, they arrive in the order in which they were written, and a
//! writer that pauses leaves nothing behind for longer than a round trip. Only what has room at its workers is taken,
//! so what is left to fail is what fails for all writers: workers that are gone, a quota. The failure is returned once,
//! by the next write, sync or close.
//!
//! Whoever reads, syncs, commits or cuts waits for what is behind, before it takes the file's gate; `unsettled` counts
//! it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::{Bytes, BytesMut};
use parking_lot::Mutex;
use tokio::sync::Notify;

use super::FsFile;
use super::write::{FileOp, end_of};
use crate::error::ClientError;
use crate::read::span::spans;

/// Bytes of a piece at most.
const PIECE_BYTES: usize = 4 << 20;
/// Bytes of a write that is taken at most. Larger ones fill a request by themselves, and would only be copied once
/// more.
const WRITE_BYTES: usize = 128 << 10;

/// What a file has behind.
#[derive(Default)]
pub(super) struct WriteBehind {
    queue: Mutex<Queue>,
    /// Notified whenever something of it changes.
    changed: Notify,
}

#[derive(Default)]
struct Queue {
    /// The end of the piece that is under way, in the file.
    under_way: Option<u64>,
    gathered: Option<Piece>,
    failure: Option<ClientError>,
}

/// Bytes of one block of the file.
struct Piece {
    block: u32,
    offset: u64,
    bytes: BytesMut,
}

impl Piece {
    fn end(&self) -> u64 {
        self.offset + self.bytes.len() as u64
    }

    /// Takes bytes in that follow on, or that lie within.
    fn take(&mut self, block: u32, offset: u64, bytes: &[u8]) -> bool {
        let Some(at) = offset.checked_sub(self.offset).and_then(|at| usize::try_from(at).ok()) else { return false };
        if block != self.block || at > self.bytes.len() || at + bytes.len() > PIECE_BYTES {
            return false;
        }
        let within = (self.bytes.len() - at).min(bytes.len());
        self.bytes[at..at + within].copy_from_slice(&bytes[..within]);
        self.bytes.extend_from_slice(&bytes[within..]);
        true
    }
}

/// What became of bytes that were offered.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum WriteBehindOutcome {
    Taken,
    /// They may be, when what is behind has moved on.
    Full,
    /// They are to be written at once.
    Refused,
}

/// The bytes that all files of a process may have behind.
pub(super) struct WriteBehindBudget {
    used: AtomicU64,
    limit: u64,
}

impl WriteBehindBudget {
    pub(super) fn new(limit: u64) -> Self {
        Self { used: AtomicU64::new(0), limit }
    }

    fn take(&self, bytes: usize) -> bool {
        let add = |used: u64| used.checked_add(bytes as u64).filter(|used| *used <= self.limit);
        self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add).is_ok()
    }

    fn give_back(&self, bytes: usize) {
        self.used.fetch_sub(bytes as u64, Ordering::Relaxed);
    }
}

impl WriteBehind {
    /// Whether all that was taken is at its workers.
    pub(super) fn is_empty(&self) -> bool {
        let queue = self.queue.lock();
        queue.under_way.is_none() && queue.gathered.is_none()
    }

    /// Whether there is nothing to wait for, and no failure to return.
    pub(super) fn is_drained(&self) -> bool {
        let queue = self.queue.lock();
        queue.under_way.is_none() && queue.gathered.is_none() && queue.failure.is_none()
    }

    /// The end of what is behind, in the file.
    pub(super) fn end(&self) -> Option<u64> {
        let queue = self.queue.lock();
        queue.gathered.as_ref().map(Piece::end).max(queue.under_way)
    }

    /// Waits until all that was taken before is at its workers, or has failed.
    pub(super) async fn drain(&self) {
        self.wait(Self::is_empty).await;
    }

    /// The same; what has failed since a failure was returned last is returned now.
    pub(super) async fn drain_checked(&self) -> Result<(), ClientError> {
        self.drain().await;
        self.queue.lock().failure.take().map_or(Ok(()), Err)
    }

    async fn wait(&self, until: impl Fn(&Self) -> bool) {
        loop {
            let mut changed = std::pin::pin!(self.changed.notified());
            changed.as_mut().enable();
            if until(self) {
                return;
            }
            changed.await;
        }
    }

    /// Takes bytes in; the last answer says whether they want somebody to send them.
    fn offer(&self, budget: &WriteBehindBudget, block: u32, offset: u64, bytes: &[u8]) -> (WriteBehindOutcome, bool) {
        let mut queue = self.queue.lock();
        if queue.failure.is_some() || !budget.take(bytes.len()) {
            return (WriteBehindOutcome::Refused, false);
        }
        let before = queue.gathered.as_ref().map_or(0, |piece| piece.bytes.len());
        let taken = match &mut queue.gathered {
            Some(piece) => piece.take(block, offset, bytes),
            none => {
                *none = Some(Piece { block, offset, bytes: BytesMut::from(bytes) });
                true
            }
        };
        let grown = queue.gathered.as_ref().map_or(0, |piece| piece.bytes.len()) - before;
        budget.give_back(bytes.len() - if taken { grown } else { 0 });
        let begins = taken && queue.under_way.is_none();
        if begins {
            queue.under_way = Some(0);
        }
        (if taken { WriteBehindOutcome::Taken } else { WriteBehindOutcome::Full }, begins)
    }

    /// The next piece to be sent; `None` ends the sending.
    fn next(&self) -> Option<(u64, Bytes)> {
        let mut queue = self.queue.lock();
        let piece = queue.gathered.take();
        queue.under_way = piece.as_ref().map(Piece::end);
        drop(queue);
        self.changed.notify_waiters();
        piece.map(|piece| (piece.offset, piece.bytes.freeze()))
    }

    fn failed(&self, error: ClientError) {
        self.queue.lock().failure.get_or_insert(error);
    }
}

impl FsFile {
    /// Takes bytes to be written behind, without waiting, for event loops: to one block, over the network, where room
    /// has been reserved. When `write_now` does not do.
    pub fn write_behind(self: &Arc<Self>, offset: u64, bytes: &[u8]) -> WriteBehindOutcome {
        if bytes.len() > WRITE_BYTES {
            return WriteBehindOutcome::Refused;
        }
        let Ok(_writing) = self.gate.try_read() else { return WriteBehindOutcome::Refused };
        let Ok(end) = end_of(offset, bytes.len()) else { return WriteBehindOutcome::Refused };
        let mut parts = spans(offset..end, self.block_size(), u64::MAX);
        let (Some(span), None) = (parts.next(), parts.next()) else { return WriteBehindOutcome::Refused };
        let is_fit = self.with_layout(|layout, blocks| {
            // What lies between the end and the offset may have to be zeroed.
            let size = self.behind.end().unwrap_or(0).max(layout.size());
            let has_room = blocks.get(&span.index).is_some_and(|open| {
                open.has_room(&span.bytes) && !open.is_local() && layout.accepts_at(span.index, open)
            });
            // Blocks that the master knows are held first.
            let is_held = self.is_held() || !layout.block(span.index).is_some_and(|known| known.is_committed);
            offset <= size && has_room && is_held
        });
        if is_fit != Some(true) {
            return WriteBehindOutcome::Refused;
        }
        let (offer, begins) = self.behind.offer(&self.shared.budget, span.index, offset, bytes);
        if begins {
            let content = Arc::clone(self);
            self.shared.runtime.spawn(async move { content.send_behind().await });
        }
        offer
    }

    /// Writes all of `bytes` at `offset`, behind if they can be taken.
    ///
    /// # Errors
    /// Those of [`Self::write`].
    pub async fn write_soon(self: &Arc<Self>, offset: u64, bytes: Bytes) -> Result<(), ClientError> {
        loop {
            match self.write_behind(offset, &bytes) {
                WriteBehindOutcome::Taken => return Ok(()),
                WriteBehindOutcome::Full => self.behind.wait(|behind| behind.queue.lock().gathered.is_none()).await,
                WriteBehindOutcome::Refused => return self.write(offset, bytes).await,
            }
        }
    }

    async fn send_behind(&self) {
        while let Some((offset, bytes)) = self.behind.next() {
            let length = bytes.len();
            if let Err(error) = self.run_op(FileOp::Write(offset, bytes)).await {
                tracing::debug!(inode = self.inode, offset, length, "what was written behind fails: {error}");
                self.behind.failed(error);
            }
            self.shared.stats.written_behind.inc();
            self.shared.stats.written_behind_bytes.inc_by(length as u64);
            self.shared.budget.give_back(length);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn piece(offset: u64, bytes: &[u8]) -> Piece {
        Piece { block: 0, offset, bytes: BytesMut::from(bytes) }
    }

    #[test]
    fn a_piece_takes_what_follows_on_or_lies_within() {
        let mut gathered = piece(100, b"abcd");
        assert!(gathered.take(0, 104, b"ef") && gathered.take(0, 101, b"XY") && gathered.take(0, 105, b"12"));
        assert_eq!((&gathered.bytes[..], gathered.end()), (&b"aXYde12"[..], 107));
        for (block, offset, why) in [(0, 108, "a gap"), (0, 99, "before it"), (1, 107, "another block")] {
            assert!(!gathered.take(block, offset, b"z"), "{why}");
        }
        assert!(!gathered.take(0, 107, &vec![0; PIECE_BYTES - 6]), "too much");
        assert!(gathered.take(0, 107, &vec![0; PIECE_BYTES - 7]));
        assert_eq!(gathered.bytes.len(), PIECE_BYTES);
    }

    #[test]
    fn pieces_go_one_after_the_other_and_the_budget_is_kept() {
        let (behind, budget) = (WriteBehind::default(), WriteBehindBudget::new(10));
        assert!(behind.is_drained() && behind.end().is_none());
        assert_eq!(behind.offer(&budget, 0, 0, b"abcd"), (WriteBehindOutcome::Taken, true), "somebody is to send it");
        assert_eq!(behind.next().unwrap(), (0, Bytes::from_static(b"abcd")));
        assert_eq!(behind.offer(&budget, 0, 4, b"ef"), (WriteBehindOutcome::Taken, false));
        assert_eq!(behind.offer(&budget, 0, 4, b"gh"), (WriteBehindOutcome::Taken, false), "the same bytes once more");
        assert_eq!(
            behind.offer(&budget, 0, 0, b"ij"),
            (WriteBehindOutcome::Full, false),
            "what is under way comes first"
        );
        assert_eq!(budget.used.load(Ordering::Relaxed), 6);
        assert_eq!(behind.offer(&budget, 0, 6, b"12345"), (WriteBehindOutcome::Refused, false), "beyond the budget");
        assert_eq!((behind.end(), behind.is_empty()), (Some(6), false));
        behind.failed(ClientError::Shutdown);
        assert_eq!(behind.offer(&budget, 0, 6, b"k"), (WriteBehindOutcome::Refused, false), "a failure is told first");
        assert_eq!(behind.next().unwrap(), (4, Bytes::from_static(b"gh")));
        assert!(behind.next().is_none() && behind.is_empty() && !behind.is_drained());
    }

    #[tokio::test]
    async fn whoever_waits_goes_on_when_all_is_there_and_one_hears_of_a_failure() {
        let (behind, budget) = (Arc::new(WriteBehind::default()), WriteBehindBudget::new(10));
        behind.drain_checked().await.unwrap();
        assert!(behind.offer(&budget, 0, 0, b"ab").1);
        let waiting = tokio::spawn({
            let behind = behind.clone();
            async move { behind.drain_checked().await }
        });
        tokio::task::yield_now().await;
        assert!(!waiting.is_finished());
        assert!(behind.next().is_some());
        behind.failed(ClientError::NoWorkers);
        behind.failed(ClientError::Shutdown);
        assert!(behind.next().is_none());
        assert!(matches!(waiting.await.unwrap(), Err(ClientError::NoWorkers)));
        behind.drain_checked().await.unwrap();
    }
}
