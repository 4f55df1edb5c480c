//! Inodes that have lost their last name and are referred to here without being open: a FIFO, a socket or a device that
//! a process has open, which the kernel does not report, a working directory, whatever is open with `O_PATH`.
//!
//! Most of what is removed is forgotten by the kernel the moment after. So it is asked a little later; until then the
//! removal is not acknowledged, and the master keeps the inode. What the kernel still refers to is held like an open
//! inode until it is forgotten.

use std::collections::{HashSet, VecDeque};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::{Instant, timeout};

use super::parts::{Inner, Metadata};
use super::sink::InvalidationSink;

/// For a kernel to forget what it has had removed itself. Nobody waits for that.
const FORGETS_WITHIN: Duration = Duration::from_millis(50);
/// For the kernel to answer. It is asked again later, if it is busy.
const ANSWERS_WITHIN: Duration = Duration::from_millis(500);
/// Removals that wait at most; beyond that the oldest are acknowledged without a question.
const REMOVALS_MAX: usize = 65_536;

/// Held because they are referred to. Bounded by what the kernel refers to.
#[derive(Debug, Default)]
pub(super) struct ReferencedInodes(Mutex<HashSet<u64>>);

/// Those of which the kernel has not been asked yet, in the order of their removals.
#[derive(Debug, Default)]
pub(super) struct PendingRemovals(VecDeque<Removal>);

#[derive(Debug)]
struct Removal {
    inode: u64,
    /// Of the removal's event.
    seq: u64,
    due: Instant,
}

impl PendingRemovals {
    pub(super) fn add(&mut self, inode: u64, seq: u64, now: Instant) {
        if self.0.len() == REMOVALS_MAX {
            self.0.pop_front();
        }
        self.0.push_back(Removal { inode, seq, due: now + FORGETS_WITHIN });
    }

    /// A stream begins, whose numbers have nothing to do with those before.
    pub(super) fn restart(&mut self, seq: u64) {
        self.0.iter_mut().for_each(|removal| removal.seq = seq);
    }

    /// When the kernel is to be asked next.
    pub(super) fn due(&self) -> Option<Instant> {
        self.0.front().map(|removal| removal.due)
    }

    /// What may be acknowledged of the events up to `last`.
    pub(super) fn settled(&self, last: u64) -> u64 {
        self.0.front().map_or(last, |removal| last.min(removal.seq.saturating_sub(1)))
    }

    /// Those of which it is time to ask.
    fn now_due(&self, now: Instant) -> Vec<u64> {
        self.0.iter().take_while(|removal| removal.due <= now).map(|removal| removal.inode).collect()
    }

    /// The first of them are settled.
    fn settle(&mut self, count: usize) {
        self.0.drain(..count);
    }

    fn postpone(&mut self, count: usize, now: Instant) {
        let due = now + ANSWERS_WITHIN;
        self.0.iter_mut().take(count).for_each(|removal| removal.due = due);
    }
}

impl Metadata {
    /// Whether an inode is held since it is referred to.
    pub fn is_referenced(&self, inode: u64) -> bool {
        self.inner.open.referenced.0.lock().contains(&inode)
    }

    /// The kernel has forgotten it.
    pub fn no_longer_referenced(&self, inode: u64) {
        self.inner.no_longer_referenced(inode);
    }
}

impl Inner {
    /// Those that are referred to, of those of which it is time to ask: they are to be held before anything more is
    /// acknowledged.
    pub(super) async fn find_referenced(&self, removed: &mut PendingRemovals, sink: &dyn InvalidationSink) -> Vec<u64> {
        let due = removed.now_due(Instant::now());
        if due.is_empty() {
            return due;
        }
        let count = due.len();
        let Ok(referred) = timeout(ANSWERS_WITHIN, sink.referred(due)).await else {
            removed.postpone(count, Instant::now());
            return Vec::new();
        };
        let is_new = |inode: &u64| self.open.referenced.0.lock().insert(*inode);
        let new: Vec<u64> = referred.into_iter().filter(is_new).collect();
        removed.settle(count);
        if new.is_empty() {
            return new;
        }
        // From now on they are held with all that is open.
        let to_hold = new.iter().copied().filter(|inode| self.open.inodes.refer(*inode)).collect();
        // What the kernel forgot before it was entered here has not been reported.
        if let Ok(still) = timeout(ANSWERS_WITHIN, sink.referred(new.clone())).await {
            new.into_iter().filter(|inode| !still.contains(inode)).for_each(|inode| self.no_longer_referenced(inode));
        }
        to_hold
    }

    fn no_longer_referenced(&self, inode: u64) {
        let was_referred_to = self.open.referenced.0.lock().remove(&inode);
        if was_referred_to {
            self.open.inodes.closed(inode);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_removal_is_acknowledged_when_the_kernel_was_asked() {
        let (mut removed, now) = (PendingRemovals::default(), Instant::now());
        assert_eq!((removed.settled(9), removed.due()), (9, None));
        removed.add(1, 5, now);
        removed.add(2, 7, now);
        assert_eq!((removed.settled(9), removed.settled(3)), (4, 3));
        assert!(removed.now_due(now).is_empty());
        let later = now + FORGETS_WITHIN;
        removed.add(3, 8, later);
        assert_eq!(removed.now_due(later), [1, 2]);
        removed.postpone(2, later);
        assert!(removed.now_due(later).is_empty());
        removed.settle(2);
        assert_eq!(removed.settled(9), 7);
        removed.restart(2);
        assert_eq!(removed.settled(4), 1);
    }
}
