//! What is known here of names and inodes: the nodes, the listings with their ages, and what was invalidated lately.

use std::sync::Arc;

use cavern_proto::master::EntryChanged;
use prometheus_client::metrics::gauge::Gauge;

use super::cache::{Cache, Found, INSERT_BATCH};
use super::directory::Directories;
use super::node::Node;
use super::recent_invalidations::{InvalidationMark, RecentInvalidations};

/// What is known of names and inodes. Bounded by `client.metadata_cache_entries`.
pub(super) struct Names {
    /// Whether nodes and listings are kept at all.
    pub caching: bool,
    pub cache: Cache,
    pub directories: Directories,
    /// Keeps answers that an invalidation has overtaken out of the cache.
    pub recent: RecentInvalidations,
    /// Nodes in the cache.
    entries: Gauge,
}

impl Names {
    pub(super) fn new(entries_max: usize, caching: bool, entries: &Gauge) -> Self {
        let (cache, directories) = (Cache::new(entries_max), Directories::new(entries_max));
        Self { caching, cache, directories, recent: RecentInvalidations::default(), entries: entries.clone() }
    }

    /// A node of the cache, unless its attributes are to be asked for.
    pub(super) fn complete_node(&self, inode: u64) -> Option<Arc<Node>> {
        self.cache.node(inode).filter(|node| !node.lacks_attributes())
    }

    /// Whether an inode is known to have a name.
    pub(super) fn has_name(&self, inode: u64) -> bool {
        self.cache.node(inode).is_some_and(|node| !node.is_removed())
    }

    /// Whether a name is known to lead nowhere.
    pub(super) fn is_without(&self, directory: u64, name: &[u8]) -> bool {
        self.directories.get(directory).is_some_and(|directory| directory.is_without(name))
    }

    /// Whether the absence of a name in the directory may be cached.
    pub(super) fn keeps_absences(&self, directory: u64) -> bool {
        self.caching && self.directories.get(directory).is_some_and(|directory| directory.keeps_absences())
    }

    /// Whether a directory, or another inode, is known to be of a strict mount.
    pub(super) fn is_strict(&self, inode: u64) -> bool {
        let directory = self.directories.get(inode).map(|directory| directory.is_strict());
        directory.or_else(|| self.cache.node(inode).map(|node| node.is_strict())).unwrap_or(false)
    }

    /// Enters nodes in the cache.
    pub(super) fn keep(&self, nodes: &[Arc<Node>]) {
        if self.caching {
            self.cache.insert(nodes);
            self.entries.set(self.cache.len() as i64);
        }
    }

    /// Enters nodes of an answer that was asked for at a mark, but those of which something has changed since then.
    pub(super) fn keep_answer(&self, nodes: &[Arc<Node>], mark: InvalidationMark) {
        self.recent.enter_since(mark, nodes.chunks(INSERT_BATCH), |changes, batch| {
            let untouched = batch.iter().filter(|node| !changes.touch(node.parent, &node.name, node.inode));
            self.keep(&untouched.cloned().collect::<Vec<_>>());
        });
    }

    /// Enters what a name leads to, as it was asked at a mark, though the name has changed since then: by what was
    /// asked about, as far as is known. Not where the inode has changed, or is not there any more.
    pub(super) fn keep_current(&self, node: &Arc<Node>, mark: InvalidationMark) {
        self.recent.enter_since(mark, [node], |changes, node| {
            if !changes.touch_inode(node.inode) {
                self.keep(std::slice::from_ref(node));
            }
        });
    }

    /// Enters that a name leads nowhere, as was asked at a mark, unless that has changed since then.
    pub(super) fn keep_absence(&self, parent: u64, name: &[u8], mark: InvalidationMark) {
        if self.keeps_absences(parent) {
            self.recent.enter_since(mark, [name], |changes, name| {
                if !changes.touch(parent, name, 0) {
                    self.cache.insert_absent(parent, name);
                }
            });
        }
    }

    /// Forgets everything.
    pub(super) fn clear(&self) {
        self.recent.reset();
        self.cache.clear();
        self.directories.clear();
        self.entries.set(0);
    }

    /// Somebody else has had a name lead elsewhere.
    pub(super) fn entry_changed(&self, changed: &EntryChanged) {
        self.forget_node(changed.parent, &changed.name, changed.old_inode);
        if let Some(directory) = self.directories.get(changed.parent) {
            directory.foreign_change(&changed.name, changed.new_inode != 0);
        }
    }

    /// Somebody else has made the name, and the event that says so may be yet to come: whoever hears that it is there
    /// looks at it, as `mkdir -p` does.
    pub(super) fn forget_taken_name(&self, parent: u64, name: &[u8]) {
        if matches!(self.cache.lookup(parent, name), Some(Found::Node(_))) {
            return;
        }
        self.forget_node(parent, name, 0);
        if let Some(directory) = self.directories.get(parent) {
            directory.foreign_change(name, true);
        }
    }

    /// Forgets a name, the inode that it led to (0 for none), and the listing that has it.
    pub(super) fn forget_entry(&self, parent: u64, name: &[u8], old_inode: u64) {
        self.forget_node(parent, name, old_inode);
        if let Some(directory) = self.directories.get(parent) {
            directory.forget_listing();
        }
    }

    /// Forgets what is known of an inode, wherever it is.
    pub(super) fn forget_inode(&self, inode: u64) {
        self.recent.inode(inode);
        self.cache.forget_inode(inode);
    }

    fn forget_node(&self, parent: u64, name: &[u8], old_inode: u64) {
        self.recent.entry(parent, name, old_inode);
        self.cache.forget_name(parent, name);
        if old_inode != 0 {
            self.cache.forget_inode(old_inode);
            self.directories.forget(old_inode);
        }
    }
}
