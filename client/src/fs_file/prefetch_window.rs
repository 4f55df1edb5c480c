//! Directories whose files are read: how many of the files that come next are asked for with one that is wanted.
//!
//! The more of them the more were wanted. How many may be known and not opened is bounded by directory: who reads a few
//! out of millions soon asks for them alone.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use quick_cache::sync::Cache;

/// Directories that are remembered.
const DIRECTORIES_MAX: usize = 256;
/// Files that are asked for with the second one that is wanted in a directory; with each that follows twice as many,
const FIRST: usize = 8;
/// but no more than this. Some of them are known.
const MOST: usize = 128;
/// Files of a directory that are known and were not opened.
const UNOPENED_MAX: usize = 16_384;

/// The prefetch window of each directory whose files are read.
#[derive(Debug)]
pub(super) struct PrefetchWindows(Cache<u64, Arc<PrefetchWindow>>);

/// One directory.
#[derive(Debug, Default)]
pub(super) struct PrefetchWindow {
    /// Files to be asked for with the next one.
    next: AtomicUsize,
    unopened: AtomicUsize,
}

impl Default for PrefetchWindows {
    fn default() -> Self {
        Self(Cache::new(DIRECTORIES_MAX))
    }
}

impl PrefetchWindows {
    pub(super) fn of(&self, directory: u64) -> Arc<PrefetchWindow> {
        self.0.get(&directory).unwrap_or_else(|| {
            let window = Arc::<PrefetchWindow>::default();
            self.0.insert(directory, window.clone());
            window
        })
    }
}

impl PrefetchWindow {
    /// One more file is wanted: how many are to be asked for with it.
    pub(super) fn wanted(&self) -> usize {
        let next = self.next.load(Relaxed);
        self.next.store((next * 2).clamp(FIRST, MOST), Relaxed);
        next.min(UNOPENED_MAX.saturating_sub(self.unopened.load(Relaxed)))
    }

    pub(super) fn known(&self) {
        self.unopened.fetch_add(1, Relaxed);
    }

    pub(super) fn opened(&self) {
        self.unopened.fetch_sub(1, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_and_more_files_are_asked_for_until_many_of_them_are_not_opened() {
        let prefetch_windows = PrefetchWindows::default();
        let wanted = || prefetch_windows.of(5).wanted();
        assert_eq!([wanted(), wanted(), wanted(), wanted()], [0, 8, 16, 32]);
        assert_eq!((prefetch_windows.of(6).wanted(), wanted(), wanted(), wanted()), (0, 64, 128, 128));
        let window = prefetch_windows.of(5);
        (0..UNOPENED_MAX - 10).for_each(|_| window.known());
        assert_eq!(wanted(), 10);
        (0..10).for_each(|_| window.known());
        assert_eq!(wanted(), 0);
        window.opened();
        assert_eq!(wanted(), 1);
    }
}
