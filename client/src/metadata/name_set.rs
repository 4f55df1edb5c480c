//! All names of a directory, as hashes: eight bytes each, and enough to say that a name is not among them.

use std::collections::HashSet;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;

use super::listing_budget::ListingBudget;

/// See the module. Two names of one hash (one in 2^64, under a key that nobody knows) would be taken for one.
#[derive(Debug)]
pub(super) struct NameSet {
    hasher: RandomState,
    hashes: HashSet<u64>,
    budget: Arc<ListingBudget>,
}

impl NameSet {
    pub(super) fn new(budget: Arc<ListingBudget>) -> Self {
        Self { hasher: RandomState::new(), hashes: HashSet::new(), budget }
    }

    /// False when there is no room for it: they are not all known any more.
    pub(super) fn add(&mut self, name: &[u8]) -> bool {
        !self.hashes.insert(self.hasher.hash_one(name)) || self.budget.take(1)
    }

    pub(super) fn remove(&mut self, name: &[u8]) {
        if self.hashes.remove(&self.hasher.hash_one(name)) {
            self.budget.give_back(1);
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.hashes.is_empty()
    }

    pub(super) fn may_have(&self, name: &[u8]) -> bool {
        self.hashes.contains(&self.hasher.hash_one(name))
    }
}

impl Drop for NameSet {
    fn drop(&mut self) {
        self.budget.give_back(self.hashes.len());
    }
}
