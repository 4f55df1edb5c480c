//! What is open: handles by the number that the kernel gives back with every request, and the nodes behind them.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use cavern_client::Node;
use parking_lot::{Mutex, RwLock};

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
    /// Enters a handle and returns its number.
    pub fn insert(&self, handle: Arc<T>) -> u64 {
        let number = self.next.fetch_add(1, Relaxed);
        self.shard(number).write().insert(number, handle);
        number
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

/// Nodes of open files with the number of their handles, so that `fstat` works on a file whose object is gone.
#[derive(Debug, Default)]
pub struct OpenNodes {
    nodes: Mutex<HashMap<u64, (Arc<Node>, u32)>>,
}

impl OpenNodes {
    pub fn opened(&self, node: &Arc<Node>) {
        let mut nodes = self.nodes.lock();
        nodes.entry(node.inode).or_insert_with(|| (Arc::clone(node), 0)).1 += 1;
    }

    pub fn closed(&self, inode: u64) {
        let mut nodes = self.nodes.lock();
        if let Some((_, handles)) = nodes.get_mut(&inode) {
            *handles -= 1;
            if *handles == 0 {
                nodes.remove(&inode);
            }
        }
    }

    pub fn get(&self, inode: u64) -> Option<Arc<Node>> {
        self.nodes.lock().get(&inode).map(|(node, _)| Arc::clone(node))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_never_used_twice() {
        let handles = Handles::default();
        let first = handles.insert(Arc::new("a"));
        let second = handles.insert(Arc::new("b"));
        assert_ne!(first, second);
        assert_eq!(handles.remove(first).as_deref(), Some(&"a"));
        assert_eq!(handles.get(first), None);
        assert_ne!(handles.insert(Arc::new("c")), first);
        assert_eq!(handles.get(second).as_deref(), Some(&"b"));
        assert_eq!(handles.len(), 2);
        assert_eq!(handles.remove(0), None);
    }
}
