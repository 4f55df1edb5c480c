//! The memory that is kept for listings.

use std::sync::atomic::{AtomicUsize, Ordering};

/// Entries in recorded listings and sets of names, of all directories.
#[derive(Debug)]
pub(super) struct ListingBudget {
    used: AtomicUsize,
    limit: usize,
}

impl ListingBudget {
    pub(super) fn new(limit: usize) -> Self {
        Self { used: AtomicUsize::new(0), limit }
    }

    /// Counts entries in; false when they are too many, and the caller must give them back.
    pub(super) fn take(&self, entries: usize) -> bool {
        self.used.fetch_add(entries, Ordering::Relaxed) + entries <= self.limit
    }

    #[cfg(test)]
    pub(super) fn used(&self) -> usize {
        self.used.load(Ordering::Relaxed)
    }

    pub(super) fn give_back(&self, entries: usize) {
        self.used.fetch_sub(entries, Ordering::Relaxed);
    }
}
