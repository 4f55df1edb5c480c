//! Event loops that may wait for a disk of this host: all but one at a time, so that a disk that takes long keeps
//! nobody waiting who does not need it.

use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::{Acquire, Release};

/// See the module.
#[derive(Debug)]
pub(super) struct BlockingTurns(AtomicUsize);

/// An event loop may wait until this is dropped.
#[derive(Debug)]
pub(super) struct Turn<'t>(&'t BlockingTurns);

impl BlockingTurns {
    /// Of so many event loops.
    pub(super) fn new(loops: usize) -> Self {
        Self(AtomicUsize::new(loops.saturating_sub(1)))
    }

    /// `None` when one more would be the last.
    pub(super) fn take(&self) -> Option<Turn<'_>> {
        let taken = self.0.fetch_update(Acquire, Acquire, |left| left.checked_sub(1));
        taken.is_ok().then_some(Turn(self))
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.0.0.fetch_add(1, Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_event_loop_never_waits() {
        let turns = BlockingTurns::new(3);
        let (one, two) = (turns.take(), turns.take());
        assert!(one.is_some() && two.is_some() && turns.take().is_none());
        drop(one);
        assert!(turns.take().is_some());
        assert!(BlockingTurns::new(1).take().is_none());
    }
}
