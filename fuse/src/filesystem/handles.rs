//! What is open: handles by the number that the kernel gives back with every request, and the inodes behind them.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use cavern_client::Node;
use cavern_client::journal::EPOCH_BITS;
use parking_lot::{Mutex, RwLock};

use super::passthrough::BackingFile;

/// Event loops look handles up on every read: a few independent tables keep them out of each other's way.
const SHARDS: u64 = 16;

/// Handles by number. Numbers are never used twice. Bounded by the open files of the host.
#[derive(Debug)]
pub struct Handles<T> {
    shards: [RwLock<HashMap<u64, Arc<T>>>; SHARDS as usize],
    next: AtomicU64,
}

impl<T> Default for Handles<T> {
    fn default() -> Self {
        Self { shards: std::array::from_fn(|_| RwLock::default()), next: AtomicU64::new(1) }
    }
}

impl<T> Handles<T> {
    /// From now on numbers are others than those of processes before.
    pub fn begin_epoch(&self, epoch: u64) {
        self.next.store((epoch << EPOCH_BITS) + 1, Relaxed);
    }

    /// A number for a handle that is about to be entered.
    pub fn reserve(&self) -> u64 {
        self.next.fetch_add(1, Relaxed)
    }

    /// Enters a handle under a number of its own.
    pub fn insert(&self, number: u64, handle: Arc<T>) {
        self.shard(number).write().insert(number, handle);
    }

    pub fn get(&self, number: u64) -> Option<Arc<T>> {
        self.shard(number).read().get(&number).cloned()
    }

    pub fn remove(&self, number: u64) -> Option<Arc<T>> {
        self.shard(number).write().remove(&number)
    }

    pub fn len(&self) -> usize {
        self.shards.iter().map(|shard| shard.read().len()).sum()
    }

    fn shard(&self, number: u64) -> &RwLock<HashMap<u64, Arc<T>>> {
        &self.shards[(number % SHARDS) as usize]
    }
}

/// Inodes with open files, and directories of fs-mode mounts that are open: their nodes, so that `fstat` works on what
/// is gone, and how the kernel reads them, which must be the same for all handles of an inode that are open at a time.
#[derive(Debug, Default)]
pub struct OpenInodes {
    inodes: Mutex<HashMap<u64, OpenInode>>,
}

#[derive(Debug)]
struct OpenInode {
    node: Arc<Node>,
    handles: u32,
    backing: Option<Arc<BackingFile>>,
}

impl OpenInodes {
    /// Enters a handle, of this process or one before. The first one of an inode decides by `register` whether the
    /// kernel reads a backing file by itself; the others follow.
    pub fn opened(
        &self,
        node: &Arc<Node>,
        register: impl FnOnce() -> Option<Arc<BackingFile>>,
    ) -> Option<Arc<BackingFile>> {
        if let Some(inode) = self.inodes.lock().get_mut(&node.inode) {
            inode.handles += 1;
            return inode.backing.clone();
        }
        // Without the lock, since it is a system call. Another handle may be faster: then that one has decided.
        let registered = register();
        let mut inodes = self.inodes.lock();
        let fresh = || OpenInode { node: Arc::clone(node), handles: 0, backing: registered.clone() };
        let inode = inodes.entry(node.inode).or_insert_with(fresh);
        inode.handles += 1;
        inode.backing.clone()
    }

    /// A handle is closed (or was never taken by the kernel).
    pub fn closed(&self, inode: u64) {
        let last = {
            let mut inodes = self.inodes.lock();
            let Some(open) = inodes.get_mut(&inode) else { return };
            open.handles -= 1;
            if open.handles == 0 { inodes.remove(&inode) } else { None }
        };
        // Gives the backing file back, without the lock.
        drop(last);
    }

    pub fn get(&self, inode: u64) -> Option<Arc<Node>> {
        self.inodes.lock().get(&inode).map(|open| Arc::clone(&open.node))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_never_used_twice() {
        let handles = Handles::default();
        let insert = |content| {
            let number = handles.reserve();
            handles.insert(number, Arc::new(content));
            number
        };
        let first = insert("a");
        let second = insert("b");
        assert_ne!(first, second);
        assert_eq!(handles.remove(first).as_deref(), Some(&"a"));
        assert_eq!(handles.get(first), None);
        assert_ne!(insert("c"), first);
        assert_eq!(handles.get(second).as_deref(), Some(&"b"));
        assert_eq!(handles.len(), 2);
        assert_eq!(handles.remove(0), None);
        handles.begin_epoch(1);
        assert!(handles.reserve() > 1 << 32);
    }
}
