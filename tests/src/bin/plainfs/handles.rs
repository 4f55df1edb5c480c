//! What the kernel has open.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, PoisonError, RwLock};

use fuser::FileHandle;

/// Open files, or directories, by the handle that the kernel was given.
pub struct Handles<T> {
    opened: RwLock<HashMap<FileHandle, Arc<T>>>,
    next: AtomicU64,
}

impl<T> Handles<T> {
    pub fn add(&self, opened: T) -> FileHandle {
        let handle = FileHandle(self.next.fetch_add(1, Relaxed));
        self.opened.write().unwrap_or_else(PoisonError::into_inner).insert(handle, Arc::new(opened));
        handle
    }

    pub fn get(&self, handle: FileHandle) -> Option<Arc<T>> {
        self.opened.read().unwrap_or_else(PoisonError::into_inner).get(&handle).cloned()
    }

    pub fn remove(&self, handle: FileHandle) {
        // What it holds is closed when the lock is free again.
        let _closed = self.opened.write().unwrap_or_else(PoisonError::into_inner).remove(&handle);
    }
}

impl<T> Default for Handles<T> {
    fn default() -> Self {
        Self { opened: RwLock::default(), next: AtomicU64::new(1) }
    }
}
