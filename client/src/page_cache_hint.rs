//! Whether somebody keeps copies of what was read of a file: a kernel, in its pages.

use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

/// Of a file that is open. A reader that keeps a copy says so before it reads, and a writer looks after it has written:
/// so either the writer finds that there is a copy, or the copy has what was written.
#[derive(Debug, Default)]
pub struct PageCacheHint(AtomicBool);

impl PageCacheHint {
    /// What is read from now on is kept.
    pub fn set(&self) {
        if !self.0.load(SeqCst) {
            self.0.store(true, SeqCst);
        }
    }

    /// Whether there may be a copy.
    pub fn may_be_cached(&self) -> bool {
        self.0.load(SeqCst)
    }
}
