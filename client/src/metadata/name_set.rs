//! All names of a directory, as hashes, with the inodes that they lead to: sixteen bytes each, and enough to say that a
//! name is not among them, or what the directory has in it, if the nodes are cached.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;

use super::listing_budget::ListingBudget;

/// All names of a directory, as hashes. Two names of one hash (one in 2^64, under a key that nobody knows) would be
/// taken for one.
#[derive(Debug)]
pub(super) struct NameSet {
    hasher: RandomState,
    /// The inodes by the names' hashes; 0 for one that is not known.
    inodes: HashMap<u64, u64>,
    budget: Arc<ListingBudget>,
}

impl NameSet {
    pub(super) fn new(budget: Arc<ListingBudget>) -> Self {
        Self { hasher: RandomState::new(), inodes: HashMap::new(), budget }
    }

    /// A name that leads to an inode, 0 if that is not known. False when there is no room for it: they are not all
    /// known any more.
    pub(super) fn add(&mut self, name: &[u8], inode: u64) -> bool {
        self.inodes.insert(self.hasher.hash_one(name), inode).is_some() || self.budget.take(1)
    }

    pub(super) fn remove(&mut self, name: &[u8]) {
        if self.inodes.remove(&self.hasher.hash_one(name)).is_some() {
            self.budget.give_back(1);
        }
    }

    /// A name may lead somewhere or not.
    pub(super) fn doubt(&mut self, name: &[u8]) {
        if let Some(inode) = self.inodes.get_mut(&self.hasher.hash_one(name)) {
            *inode = 0;
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.inodes.is_empty()
    }

    pub(super) fn may_have(&self, name: &[u8]) -> bool {
        self.inodes.contains_key(&self.hasher.hash_one(name))
    }

    /// Whether a name leads to this inode.
    pub(super) fn has(&self, name: &[u8], inode: u64) -> bool {
        self.inodes.get(&self.hasher.hash_one(name)) == Some(&inode)
    }

    /// The inodes that all names lead to, in no order; `None` if one of them is not known.
    pub(super) fn all(&self) -> Option<impl Iterator<Item = u64>> {
        (!self.inodes.values().any(|inode| *inode == 0)).then(|| self.inodes.values().copied())
    }
}

impl Drop for NameSet {
    fn drop(&mut self) {
        self.budget.give_back(self.inodes.len());
    }
}
