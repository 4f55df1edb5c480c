//! Handles that a process before this one gave the kernel, and that could not be had again.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use parking_lot::Mutex;

/// Handles that could not be had again, and which of the kernel's nodes they are of, if of files of fs-mode mounts.
#[derive(Debug, Default)]
pub struct LostHandles {
    any: AtomicBool,
    numbers: Mutex<HashMap<u64, Option<u64>>>,
}

impl LostHandles {
    /// From now on it gives `EIO`.
    pub fn add(&self, number: u64, node: Option<u64>) {
        self.numbers.lock().insert(number, node);
        self.any.store(true, Relaxed);
    }

    pub fn contains(&self, number: u64) -> bool {
        self.any.load(Relaxed) && self.numbers.lock().contains_key(&number)
    }

    /// What a request is answered whose handle is not there.
    pub fn errno(&self, number: u64) -> i32 {
        if self.contains(number) { libc::EIO } else { libc::EBADF }
    }

    /// One is released; gives its node.
    pub fn released(&self, number: u64) -> Option<u64> {
        if self.any.load(Relaxed) { self.numbers.lock().remove(&number).flatten() } else { None }
    }
}
