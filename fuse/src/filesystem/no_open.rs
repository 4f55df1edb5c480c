//! Handles of files that the kernel reads without ever opening them (`fuse.no_open`).
//!
//! The kernel then sends nothing when a file is opened or closed: every READ names an inode. The handle of an inode,
//! with its read-ahead and its descriptors, is made at its first read, shared by all who read it, and dropped when
//! nobody has read for a while.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use quick_cache::sync::Cache;
use tokio::time::Instant;

use super::open_handle::OpenHandle;

/// Inodes that are being read at a time; beyond that the ones read least lose their read-ahead. Each may hold a
/// descriptor or two.
const HANDLES_MAX: usize = 512;
/// A handle that nobody used for this long is dropped: it may hold the space of evicted blocks.
const IDLE: Duration = Duration::from_secs(30);

#[derive(Clone)]
struct Recent {
    handle: Arc<OpenHandle>,
    /// Milliseconds since `epoch`.
    used: Arc<AtomicU64>,
}

/// By inode of the namespace.
pub struct NoOpenHandles {
    handles: Cache<u64, Recent>,
    epoch: Instant,
}

impl Default for NoOpenHandles {
    fn default() -> Self {
        Self { handles: Cache::new(HANDLES_MAX), epoch: Instant::now() }
    }
}

impl NoOpenHandles {
    /// The handle of an inode; made by `make` where there is none.
    pub fn get(&self, inode: u64, make: impl FnOnce() -> Option<OpenHandle>) -> Option<Arc<OpenHandle>> {
        let now = self.epoch.elapsed().as_millis() as u64;
        if let Some(recent) = self.handles.get(&inode) {
            recent.used.store(now, Relaxed);
            return Some(recent.handle);
        }
        // Another reader may make one at the same time: either serves both, and one is dropped.
        let recent = Recent { handle: Arc::new(make()?), used: Arc::new(AtomicU64::new(now)) };
        self.handles.insert(inode, recent.clone());
        Some(recent.handle)
    }

    pub fn len(&self) -> usize {
        self.handles.len()
    }

    /// Drops idle handles.
    pub fn sweep(&self) {
        self.drop_idle(IDLE);
    }

    fn drop_idle(&self, idle: Duration) {
        let now = self.epoch.elapsed().as_millis() as u64;
        self.handles.retain(|_, recent| now.saturating_sub(recent.used.load(Relaxed)) < idle.as_millis() as u64);
    }
}
