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

use bytes::{Bytes, BytesMut};
use parking_lot::Mutex;
use tokio::sync::Notify;

use super::write_log::{LoggedWrite, WriteLog};
use crate::error::ClientError;
use crate::memory::{Charge, MemoryShare};

/// Bytes of a piece at most.
const PIECE_BYTES: usize = 4 << 20;
/// Bytes of a write that is taken at most. Larger ones fill a request by themselves, and would only be copied once
/// more.
pub(super) const WRITE_BYTES: usize = 128 << 10;

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
    gathered: Option<PendingWrite>,
    failure: Option<ClientError>,
    /// So many handles through which a kernel reads the file by itself: they see what is at its workers.
    kernel_reads: u32,
}

/// Bytes of one block of the file.
struct PendingWrite {
    block: u32,
    offset: u64,
    bytes: BytesMut,
    memory: Charge,
    /// What the journal has of it.
    noted: Option<LoggedWrite>,
}

/// What is sent next: where it goes, and what the journal has of it until it is there.
pub(super) type NextWrite = (u64, Bytes, Option<LoggedWrite>);

impl PendingWrite {
    fn end(&self) -> u64 {
        self.offset + self.bytes.len() as u64
    }

    /// Takes bytes in that follow on, or that lie within.
    fn take(
        &mut self,
        memory: &MemoryShare,
        block: u32,
        offset: u64,
        bytes: &[u8],
        log: Option<WriteLog<'_>>,
    ) -> WriteBehindOutcome {
        let at = offset.checked_sub(self.offset).and_then(|at| usize::try_from(at).ok());
        let Some(at) = at.filter(|at| *at <= self.bytes.len() && *at + bytes.len() <= PIECE_BYTES) else {
            return WriteBehindOutcome::Full;
        };
        if block != self.block {
            return WriteBehindOutcome::Full;
        }
        if !self.pay_for(memory, at + bytes.len()) {
            return WriteBehindOutcome::Refused;
        }
        if let (Some(log), Some(noted)) = (log, &mut self.noted)
            && log.extend(noted, at as u64, bytes).is_err()
        {
            return WriteBehindOutcome::Refused;
        }
        let within = (self.bytes.len() - at).min(bytes.len());
        self.bytes[at..at + within].copy_from_slice(&bytes[..within]);
        self.bytes.extend_from_slice(&bytes[within..]);
        WriteBehindOutcome::Taken
    }

    /// Has memory for `length` bytes; for some more than are needed now, since more will follow.
    fn pay_for(&mut self, memory: &MemoryShare, length: usize) -> bool {
        let paid = self.memory.bytes();
        if length as u64 <= paid {
            return true;
        }
        let wanted = length.next_power_of_two().min(PIECE_BYTES) as u64;
        let more = memory.try_charge(wanted - paid).or_else(|| memory.try_charge(length as u64 - paid));
        more.map(|more| self.memory.merge(more)).is_some()
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
        queue.gathered.as_ref().map(PendingWrite::end).max(queue.under_way)
    }

    /// Waits until all that was taken before is at its workers, or has failed.
    pub(super) async fn drain(&self) {
        self.wait(Self::is_empty).await;
    }

    /// Drains the queue, and returns what has failed since a failure was returned last.
    pub(super) async fn drain_checked(&self) -> Result<(), ClientError> {
        self.drain().await;
        self.queue.lock().failure.take().map_or(Ok(()), Err)
    }

    /// Waits until more can be taken, perhaps.
    pub(super) async fn moved_on(&self) {
        self.wait(|behind| behind.queue.lock().gathered.is_none()).await;
    }

    async fn wait(&self, until: impl Fn(&Self) -> bool) {
        loop {
            let changed = self.changed.notified();
            if until(self) {
                return;
            }
            changed.await;
        }
    }

    /// A kernel begins to read the file by itself: nothing is taken until that ends.
    pub(super) fn kernel_reads_begin(&self) {
        self.queue.lock().kernel_reads += 1;
    }

    pub(super) fn kernel_reads_end(&self) {
        self.queue.lock().kernel_reads -= 1;
    }

    /// Takes bytes in; the last answer says whether they want somebody to send them. The journal, if there is one, has
    /// them then.
    pub(super) fn offer(
        &self,
        memory: &MemoryShare,
        block: u32,
        offset: u64,
        bytes: &[u8],
        log: Option<WriteLog<'_>>,
    ) -> (WriteBehindOutcome, bool) {
        let mut queue = self.queue.lock();
        if queue.failure.is_some() || queue.kernel_reads > 0 {
            return (WriteBehindOutcome::Refused, false);
        }
        let outcome = match &mut queue.gathered {
            Some(piece) => piece.take(memory, block, offset, bytes, log),
            none => {
                let noted = log.map(|log| log.begin(offset, bytes)).transpose();
                *none = noted.ok().zip(memory.try_charge(bytes.len() as u64)).map(|(noted, memory)| PendingWrite {
                    block,
                    offset,
                    bytes: BytesMut::from(bytes),
                    memory,
                    noted,
                });
                if none.is_some() { WriteBehindOutcome::Taken } else { WriteBehindOutcome::Refused }
            }
        };
        let begins = outcome == WriteBehindOutcome::Taken && queue.under_way.is_none();
        if begins {
            queue.under_way = Some(0);
        }
        (outcome, begins)
    }

    /// The next piece to be sent; `None` ends the sending.
    pub(super) fn next(&self) -> Option<NextWrite> {
        let mut queue = self.queue.lock();
        let piece = queue.gathered.take();
        queue.under_way = piece.as_ref().map(PendingWrite::end);
        drop(queue);
        self.changed.notify_waiters();
        piece.map(|piece| (piece.offset, piece.memory.hold(piece.bytes), piece.noted))
    }

    pub(super) fn failed(&self, error: ClientError) {
        self.queue.lock().failure.get_or_insert(error);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::memory::MemoryBudget;
    use crate::stats::Stats;

    fn memory(bytes: u64) -> (Arc<Stats>, MemoryShare) {
        let stats = Arc::new(Stats::default());
        (stats.clone(), Arc::new(MemoryBudget::new(bytes * 4, stats)).share(bytes))
    }

    fn piece(memory: &MemoryShare, offset: u64, bytes: &[u8]) -> PendingWrite {
        let memory = memory.try_charge(bytes.len() as u64).unwrap();
        PendingWrite { block: 0, offset, bytes: BytesMut::from(bytes), memory, noted: None }
    }

    #[test]
    fn a_piece_takes_what_follows_on_or_lies_within() {
        use WriteBehindOutcome::{Full, Taken};
        let (_stats, memory) = memory(2 * PIECE_BYTES as u64);
        let mut gathered = piece(&memory, 100, b"abcd");
        for (offset, bytes) in [(104, b"ef"), (101, b"XY"), (105, b"12")] {
            assert_eq!(gathered.take(&memory, 0, offset, bytes, None), Taken);
        }
        assert_eq!((&gathered.bytes[..], gathered.end()), (&b"aXYde12"[..], 107));
        for (block, offset, why) in [(0, 108, "a gap"), (0, 99, "before it"), (1, 107, "another block")] {
            assert_eq!(gathered.take(&memory, block, offset, b"z", None), Full, "{why}");
        }
        assert_eq!(gathered.take(&memory, 0, 107, &vec![0; PIECE_BYTES - 6], None), Full, "too much");
        assert_eq!(gathered.take(&memory, 0, 107, &vec![0; PIECE_BYTES - 7], None), Taken);
        assert_eq!(gathered.bytes.len(), PIECE_BYTES);
    }

    #[test]
    fn a_piece_grows_as_far_as_there_is_memory_for_it() {
        let (stats, memory) = memory(20 << 10);
        let mut gathered = piece(&memory, 0, &[1; 4096]);
        assert_eq!(gathered.take(&memory, 0, 4096, b"a", None), WriteBehindOutcome::Taken);
        assert_eq!(stats.budget_used_bytes.get(), 8 << 10, "for what will follow, too");
        assert_eq!(gathered.take(&memory, 0, 4097, &[2; 8192], None), WriteBehindOutcome::Taken);
        assert_eq!(stats.budget_used_bytes.get(), 16 << 10);
        assert_eq!(gathered.take(&memory, 0, 12_289, &[3; 8192], None), WriteBehindOutcome::Refused);
        assert_eq!(gathered.end(), 12_289, "nothing of it");
        drop(gathered);
        assert_eq!(stats.budget_used_bytes.get(), 0);
    }

    #[test]
    fn pieces_go_one_after_the_other_and_the_budget_is_kept() {
        let (behind, (stats, memory)) = (WriteBehind::default(), memory(8 << 10));
        assert!(behind.is_drained() && behind.end().is_none());
        assert_eq!(
            behind.offer(&memory, 0, 0, b"abcd", None),
            (WriteBehindOutcome::Taken, true),
            "somebody is to send it"
        );
        let (offset, bytes, _) = behind.next().unwrap();
        let first = (offset, bytes);
        assert_eq!(first, (0, Bytes::from_static(b"abcd")));
        assert_eq!(behind.offer(&memory, 0, 4, b"ef", None), (WriteBehindOutcome::Taken, false));
        assert_eq!(
            behind.offer(&memory, 0, 4, b"gh", None),
            (WriteBehindOutcome::Taken, false),
            "the same bytes once more"
        );
        assert_eq!(
            behind.offer(&memory, 0, 0, b"ij", None),
            (WriteBehindOutcome::Full, false),
            "what is under way comes first"
        );
        assert_eq!(stats.budget_used_bytes.get(), 8 << 10);
        assert_eq!(
            behind.offer(&memory, 0, 6, &[0; 4096], None),
            (WriteBehindOutcome::Refused, false),
            "beyond the budget"
        );
        drop(first);
        assert_eq!(stats.budget_used_bytes.get(), 4 << 10, "what has been sent is not charged any more");
        assert_eq!((behind.end(), behind.is_empty()), (Some(6), false));
        behind.failed(ClientError::Shutdown);
        assert_eq!(
            behind.offer(&memory, 0, 6, b"k", None),
            (WriteBehindOutcome::Refused, false),
            "a failure comes first"
        );
        let (offset, bytes, _) = behind.next().unwrap();
        assert_eq!((offset, bytes), (4, Bytes::from_static(b"gh")));
        assert!(behind.next().is_none() && behind.is_empty() && !behind.is_drained());
    }

    #[test]
    fn nothing_is_taken_while_a_kernel_reads_the_file_by_itself() {
        let (behind, (_stats, memory)) = (WriteBehind::default(), memory(8 << 10));
        behind.kernel_reads_begin();
        assert_eq!(behind.offer(&memory, 0, 0, b"ab", None), (WriteBehindOutcome::Refused, false));
        behind.kernel_reads_end();
        assert_eq!(behind.offer(&memory, 0, 0, b"ab", None), (WriteBehindOutcome::Taken, true));
    }

    #[tokio::test]
    async fn whoever_waits_goes_on_when_all_is_there_and_one_hears_of_a_failure() {
        let (behind, (_stats, memory)) = (Arc::new(WriteBehind::default()), memory(8 << 10));
        behind.drain_checked().await.unwrap();
        assert!(behind.offer(&memory, 0, 0, b"ab", None).1);
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
