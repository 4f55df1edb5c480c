//! Bounds how many blocks are kept open: each costs a descriptor and its checksums in memory. A clock: the block that
//! was opened first is closed unless it was used since the hand last passed.

use std::collections::VecDeque;

use super::block::Block;
use super::slab::Slab;

/// Places that the hand passes in one go; beyond that the bound is exceeded until the next time.
const MAX_STEPS: usize = 32;

#[derive(Debug)]
pub(super) struct OpenBlocks {
    limit: usize,
    /// Slot, incarnation and time of last use when the hand was here.
    ring: VecDeque<(u32, u64, u32)>,
    /// Blocks that were closed: to be dropped after the lock is released.
    pub closed: Vec<Block>,
}

impl OpenBlocks {
    pub(super) fn new(limit: usize) -> Self {
        Self { limit: limit.max(1), ring: VecDeque::new(), closed: Vec::new() }
    }

    /// Notes that the entry at `slot` was opened; others may be closed for it.
    pub(super) fn opened(&mut self, slab: &mut Slab, slot: u32) {
        if let Some(entry) = slab.at(slot) {
            self.ring.push_back((slot, entry.incarnation, entry.last_used));
        }
        for _ in 0..MAX_STEPS {
            if self.ring.len() <= self.limit {
                break;
            }
            let Some((slot, incarnation, seen)) = self.ring.pop_front() else { break };
            let Some(entry) = slab.at_mut(slot).filter(|entry| entry.incarnation == incarnation) else { continue };
            if entry.busy() || entry.last_used > seen {
                self.ring.push_back((slot, incarnation, entry.last_used));
            } else {
                self.closed.extend(entry.close());
            }
        }
    }
}
