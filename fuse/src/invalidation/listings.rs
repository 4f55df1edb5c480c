//! Which directories' listings the kernel may answer from its own cache.
//!
//! The kernel keeps what READDIR answered when the handle was opened with `FOPEN_CACHE_DIR`, and uses it for the next
//! handle if that is opened with `FOPEN_KEEP_CACHE`. So each OPENDIR decides anew, and a listing is kept exactly when
//! it was read from beginning to end and nothing in the namespace has changed since it was begun. Changes anywhere end
//! a reading, not only those of the directory itself: that is simple, never wrong, and costs at most one more reading.

use std::collections::HashSet;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

/// Directories remembered at most; when more are read, all are forgotten.
const DIRECTORIES_MAX: usize = 65_536;

/// The directories, by inode of the namespace.
#[derive(Debug, Default)]
pub struct KernelListings {
    /// Changes that the kernel is notified of, and those that it made itself. Written only under the lock of `kept`.
    changes: AtomicU64,
    own: AtomicU64,
    kept: Mutex<HashSet<u64>>,
}

/// Says how things stood when a reading was begun.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ListingStart {
    changes: u64,
    own: u64,
}

/// What the kernel has of a directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Listing {
    /// The whole listing, and nothing has changed.
    Current,
    /// Nothing that may be used.
    Unknown,
}

impl KernelListings {
    /// At OPENDIR.
    pub fn begin(&self, directory: u64) -> (ListingStart, Listing) {
        let kept = self.kept.lock();
        let listing = if kept.contains(&directory) { Listing::Current } else { Listing::Unknown };
        (self.now(), listing)
    }

    /// The listing has been read to its end.
    pub fn complete(&self, directory: u64, begun: ListingStart) {
        let mut kept = self.kept.lock();
        if self.now() != begun {
            return;
        }
        if kept.len() >= DIRECTORIES_MAX {
            kept.clear();
        }
        kept.insert(directory);
    }

    /// A name in the directory, or the directory itself, has changed.
    pub fn changed(&self, directory: u64) {
        let mut kept = self.kept.lock();
        self.changes.fetch_add(1, Ordering::SeqCst);
        kept.remove(&directory);
    }

    /// A name in the directory has changed, by this kernel: no answer to it can have been overtaken.
    pub fn changed_here(&self, directory: u64) {
        let mut kept = self.kept.lock();
        self.own.fetch_add(1, Ordering::SeqCst);
        kept.remove(&directory);
    }

    /// What the kernel has of the directory may not be used, though nothing has changed.
    pub fn forget(&self, directory: u64) {
        self.kept.lock().remove(&directory);
    }

    /// Anything may have changed.
    pub fn reset(&self) {
        let mut kept = self.kept.lock();
        self.changes.fetch_add(1, Ordering::SeqCst);
        kept.clear();
    }

    fn now(&self) -> ListingStart {
        ListingStart { changes: self.changes(), own: self.own.load(Ordering::SeqCst) }
    }

    /// How many changes of the namespace by others there have been.
    pub fn changes(&self) -> u64 {
        self.changes.load(Ordering::SeqCst)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_listing_is_kept_until_it_changes() {
        let listings = KernelListings::default();
        let (begun, listing) = listings.begin(5);
        assert_eq!(listing, Listing::Unknown);
        listings.complete(5, begun);
        assert_eq!(listings.begin(5).1, Listing::Current);
        listings.changed(6);
        assert_eq!(listings.begin(5).1, Listing::Current);
        listings.forget(5);
        assert_eq!(listings.begin(5).1, Listing::Unknown);
        listings.complete(5, listings.begin(5).0);
        assert_eq!(listings.begin(5).1, Listing::Current);
        listings.changed(5);
        assert_eq!(listings.begin(5).1, Listing::Unknown);
    }

    #[test]
    fn a_change_during_the_reading_voids_it() {
        let listings = KernelListings::default();
        let (begun, _) = listings.begin(5);
        listings.changed(5);
        listings.complete(5, begun);
        assert_eq!(listings.begin(5).1, Listing::Unknown);
        let (begun, _) = listings.begin(5);
        listings.reset();
        listings.complete(5, begun);
        assert_eq!(listings.begin(5).1, Listing::Unknown);
    }

    #[test]
    fn a_change_of_our_own_voids_a_listing_but_no_answer() {
        let listings = KernelListings::default();
        for during in [false, true] {
            let (begun, _) = listings.begin(5);
            if during {
                listings.changed_here(5);
            }
            listings.complete(5, begun);
            assert_eq!(listings.begin(5).1 == Listing::Current, !during);
            listings.changed_here(5);
            assert_eq!(listings.begin(5).1, Listing::Unknown);
        }
        assert_eq!(listings.changes(), 0);
    }

    #[test]
    fn the_memory_is_bounded() {
        let listings = KernelListings::default();
        for directory in 0..3 * DIRECTORIES_MAX as u64 {
            let (begun, _) = listings.begin(directory);
            listings.complete(directory, begun);
        }
        assert!(listings.kept.lock().len() <= DIRECTORIES_MAX);
    }
}
