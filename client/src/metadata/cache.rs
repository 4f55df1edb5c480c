//! The bounded cache of nodes: by inode, and by parent and name, absent names included.
//!
//! One table of slots with two hash indices over it, so that a node costs its own memory and some 40 bytes. When the
//! table is full, a clock hand takes out what was not used since it last came by. Reads share the lock and set a flag;
//! they never move anything.

use std::collections::HashSet;
use std::hash::BuildHasher;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use hashbrown::{DefaultHashBuilder, HashTable};
use parking_lot::RwLock;

use super::node::Node;

/// Nodes inserted under one lock, so that readers of other entries wait for microseconds only.
pub(super) const INSERT_BATCH: usize = 64;

#[derive(Debug)]
pub(super) struct Cache {
    hasher: DefaultHashBuilder,
    capacity: usize,
    table: RwLock<Table>,
}

#[derive(Debug, Default)]
struct Table {
    slots: Vec<Option<Slot>>,
    free: Vec<u32>,
    /// Slots by parent and name.
    names: HashTable<u32>,
    /// Slots of nodes by inode.
    inodes: HashTable<u32>,
    hand: usize,
}

#[derive(Debug)]
struct Slot {
    entry: Found,
    used: AtomicBool,
}

/// What the cache holds for a name.
#[derive(Clone, Debug)]
pub(super) enum Found {
    Node(Arc<Node>),
    Absent(Arc<NegativeEntry>),
}

/// A name that does not exist.
#[derive(Debug)]
pub(super) struct NegativeEntry {
    pub parent: u64,
    pub name: Box<[u8]>,
}

impl Found {
    fn parent(&self) -> u64 {
        match self {
            Self::Node(node) => node.parent,
            Self::Absent(absent) => absent.parent,
        }
    }

    fn name(&self) -> &[u8] {
        match self {
            Self::Node(node) => &node.name,
            Self::Absent(absent) => &absent.name,
        }
    }

    fn inode(&self) -> Option<u64> {
        match self {
            Self::Node(node) => Some(node.inode),
            Self::Absent(_) => None,
        }
    }
}

impl Cache {
    pub(super) fn new(capacity: usize) -> Self {
        Self { hasher: DefaultHashBuilder::default(), capacity: capacity.max(16), table: RwLock::default() }
    }

    pub(super) fn lookup(&self, parent: u64, name: &[u8]) -> Option<Found> {
        let hash = self.hash_name(parent, name);
        let table = self.table.read();
        let slot = table.names.find(hash, |slot| table.is_name(*slot, parent, name))?;
        table.used(*slot)
    }

    pub(super) fn node(&self, inode: u64) -> Option<Arc<Node>> {
        let hash = self.hasher.hash_one(inode);
        let table = self.table.read();
        let slot = table.inodes.find(hash, |slot| table.is_inode(*slot, inode))?;
        match table.used(*slot)? {
            Found::Node(node) => Some(node),
            Found::Absent(_) => None,
        }
    }

    /// The nodes of consecutive entries of a directory's listing, given as inodes in name order: up to `limit` after
    /// the name `after`, and whether they reach the listing's end. `None` when one of the nodes is not here any more,
    /// or here under a name in another directory.
    pub(super) fn page(
        &self,
        directory: u64,
        listing: &[u64],
        after: &[u8],
        limit: usize,
    ) -> Option<(Vec<Arc<Node>>, bool)> {
        let table = self.table.read();
        let find = |inode: u64| {
            let slot = *table.inodes.find(self.hasher.hash_one(inode), |slot| table.is_inode(*slot, inode))?;
            match table.used(slot)? {
                Found::Node(node) => (node.parent == directory).then_some(node),
                Found::Absent(_) => None,
            }
        };
        let (mut low, mut high) = (0, if after.is_empty() { 0 } else { listing.len() });
        while low < high {
            let middle = low + (high - low) / 2;
            if *find(listing[middle])?.name <= *after {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        let page = &listing[low..listing.len().min(low.saturating_add(limit))];
        let nodes = page.iter().map(|inode| find(*inode)).collect::<Option<Vec<_>>>()?;
        Some((nodes, low + page.len() == listing.len()))
    }

    pub(super) fn insert(&self, nodes: &[Arc<Node>]) {
        for batch in nodes.chunks(INSERT_BATCH) {
            let mut table = self.table.write();
            for node in batch {
                self.remove_inode(&mut table, node.inode);
                self.put(&mut table, Found::Node(node.clone()));
            }
        }
    }

    pub(super) fn insert_absent(&self, parent: u64, name: &[u8]) {
        let absent = NegativeEntry { parent, name: name.into() };
        self.put(&mut self.table.write(), Found::Absent(Arc::new(absent)));
    }

    pub(super) fn forget_name(&self, parent: u64, name: &[u8]) {
        self.remove_name(&mut self.table.write(), parent, name);
    }

    pub(super) fn forget_inode(&self, inode: u64) {
        self.remove_inode(&mut self.table.write(), inode);
    }

    /// Forgets the nodes that do not pass.
    pub(super) fn retain(&self, keep: impl Fn(&Node) -> bool) {
        let gone: Vec<u64> = {
            let table = self.table.read();
            let entries = table.slots.iter().flatten();
            let nodes = entries.filter_map(|slot| if let Found::Node(node) = &slot.entry { Some(node) } else { None });
            nodes.filter(|node| !keep(node)).map(|node| node.inode).collect()
        };
        for batch in gone.chunks(INSERT_BATCH) {
            let mut table = self.table.write();
            batch.iter().for_each(|inode| self.remove_inode(&mut table, *inode));
        }
    }

    /// Every directory of which a name is here, or the absence of one.
    pub(super) fn directories(&self) -> HashSet<u64> {
        self.table.read().slots.iter().flatten().map(|slot| slot.entry.parent()).collect()
    }

    pub(super) fn clear(&self) {
        // Freed after the lock is released.
        let _old = std::mem::take(&mut *self.table.write());
    }

    pub(super) fn len(&self) -> usize {
        self.table.read().names.len()
    }

    fn hash_name(&self, parent: u64, name: &[u8]) -> u64 {
        self.hasher.hash_one((parent, name))
    }

    fn put(&self, table: &mut Table, entry: Found) {
        self.remove_name(table, entry.parent(), entry.name());
        while table.names.len() >= self.capacity {
            self.evict_one(table);
        }
        let (name_hash, inode) = (self.hash_name(entry.parent(), entry.name()), entry.inode());
        let slot = Some(Slot { entry, used: AtomicBool::new(false) });
        let index = match table.free.pop() {
            Some(index) => {
                table.slots[index as usize] = slot;
                index
            }
            None => {
                table.slots.push(slot);
                (table.slots.len() - 1) as u32
            }
        };
        let Table { slots, names, inodes, .. } = table;
        let rehash = |index: &u32| slots[*index as usize].as_ref().map_or(0, |slot| self.hash_entry(&slot.entry));
        names.insert_unique(name_hash, index, rehash);
        if let Some(inode) = inode {
            let rehash = |index: &u32| {
                let entry = slots[*index as usize].as_ref().and_then(|slot| slot.entry.inode());
                entry.map_or(0, |inode| self.hasher.hash_one(inode))
            };
            inodes.insert_unique(self.hasher.hash_one(inode), index, rehash);
        }
    }

    fn hash_entry(&self, entry: &Found) -> u64 {
        self.hash_name(entry.parent(), entry.name())
    }

    fn remove_name(&self, table: &mut Table, parent: u64, name: &[u8]) {
        let hash = self.hash_name(parent, name);
        if let Some(slot) = table.names.find(hash, |slot| table.is_name(*slot, parent, name)).copied() {
            self.remove_slot(table, slot);
        }
    }

    fn remove_inode(&self, table: &mut Table, inode: u64) {
        let hash = self.hasher.hash_one(inode);
        if let Some(slot) = table.inodes.find(hash, |slot| table.is_inode(*slot, inode)).copied() {
            self.remove_slot(table, slot);
        }
    }

    fn remove_slot(&self, table: &mut Table, index: u32) {
        let Some(slot) = table.slots[index as usize].take() else { return };
        if let Ok(found) = table.names.find_entry(self.hash_entry(&slot.entry), |other| *other == index) {
            found.remove();
        }
        if let Some(inode) = slot.entry.inode()
            && let Ok(found) = table.inodes.find_entry(self.hasher.hash_one(inode), |other| *other == index)
        {
            found.remove();
        }
        table.free.push(index);
    }

    fn evict_one(&self, table: &mut Table) {
        loop {
            table.hand = (table.hand + 1) % table.slots.len().max(1);
            let Some(slot) = table.slots.get(table.hand).and_then(Option::as_ref) else { continue };
            if !slot.used.swap(false, Ordering::Relaxed) {
                let index = table.hand as u32;
                return self.remove_slot(table, index);
            }
        }
    }
}

impl Table {
    fn is_name(&self, slot: u32, parent: u64, name: &[u8]) -> bool {
        let slot = self.slots[slot as usize].as_ref();
        slot.is_some_and(|slot| slot.entry.parent() == parent && slot.entry.name() == name)
    }

    fn is_inode(&self, slot: u32, inode: u64) -> bool {
        self.slots[slot as usize].as_ref().is_some_and(|slot| slot.entry.inode() == Some(inode))
    }

    fn used(&self, slot: u32) -> Option<Found> {
        let slot = self.slots[slot as usize].as_ref()?;
        if !slot.used.load(Ordering::Relaxed) {
            slot.used.store(true, Ordering::Relaxed);
        }
        Some(slot.entry.clone())
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::collections::HashMap;

    use cavern_proto::master::{Attr, Entry};
    use proptest::prelude::*;

    use super::*;

    pub(crate) fn node(inode: u64, parent: u64, name: &str) -> Arc<Node> {
        let attr = Attr { inode, ..Attr::default() };
        let entry = Entry { name: name.to_owned().into(), parent, ..Entry::default() };
        Arc::new(Node::new(&entry, &attr, None, "".into()))
    }

    #[test]
    fn a_full_cache_keeps_what_is_used() {
        let cache = Cache::new(100);
        for inode in 10..110 {
            cache.insert(&[node(inode, 1, &inode.to_string())]);
        }
        for inode in 110..5000 {
            assert!(cache.node(50).is_some());
            cache.insert(&[node(inode, 1, &inode.to_string())]);
            assert!(cache.len() <= 100);
        }
        assert!(cache.lookup(1, b"50").is_some());
        assert!(cache.node(51).is_none());
    }

    #[test]
    fn pages_follow_name_order_and_fail_when_a_node_is_missing() {
        let cache = Cache::new(100);
        let nodes: Vec<_> = ["a", "b", "c", "d"].iter().zip(10..).map(|(name, inode)| node(inode, 1, name)).collect();
        cache.insert(&nodes);
        let names = |after: &str, limit| {
            let (nodes, end) = cache.page(1, &[10, 11, 12, 13], after.as_bytes(), limit)?;
            let names: Vec<_> = nodes.iter().map(|node| String::from_utf8_lossy(&node.name).into_owned()).collect();
            Some((names.concat(), end))
        };
        assert_eq!(names("", 2), Some(("ab".into(), false)));
        assert_eq!(names("b", 2), Some(("cd".into(), true)));
        assert_eq!(names("bb", 1), Some(("c".into(), false)));
        assert_eq!(names("d", 5), Some((String::new(), true)));
        assert!(cache.page(2, &[10], b"", 1).is_none(), "a name of another directory");
        cache.forget_inode(12);
        assert_eq!(names("", 4), None);
    }

    #[derive(Clone, Debug)]
    enum Step {
        Insert { inode: u64, name: u8 },
        Absent { name: u8 },
        ForgetName { name: u8 },
        ForgetInode { inode: u64 },
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            (2u64..12, 0u8..8).prop_map(|(inode, name)| Step::Insert { inode, name }),
            (0u8..8).prop_map(|name| Step::Absent { name }),
            (0u8..8).prop_map(|name| Step::ForgetName { name }),
            (2u64..12).prop_map(|inode| Step::ForgetInode { inode }),
        ]
    }

    proptest! {
        #[test]
        fn behaves_like_a_map_of_names(steps in prop::collection::vec(step(), 0..100)) {
            let cache = Cache::new(1000);
            let mut model = HashMap::<u8, u64>::new();
            for step in steps {
                match step {
                    Step::Insert { inode, name } => {
                        model.retain(|_, other| *other != inode);
                        model.insert(name, inode);
                        cache.insert(&[node(inode, 1, &name.to_string())]);
                    }
                    Step::Absent { name } => {
                        model.insert(name, 0);
                        cache.insert_absent(1, name.to_string().as_bytes());
                    }
                    Step::ForgetName { name } => {
                        model.remove(&name);
                        cache.forget_name(1, name.to_string().as_bytes());
                    }
                    Step::ForgetInode { inode } => {
                        model.retain(|_, other| *other != inode);
                        cache.forget_inode(inode);
                    }
                }
                prop_assert_eq!(cache.len(), model.len());
                for name in 0..8 {
                    let found = cache.lookup(1, name.to_string().as_bytes()).map(|found| found.inode().unwrap_or(0));
                    prop_assert_eq!(found, model.get(&name).copied());
                }
                for inode in 2..12 {
                    prop_assert_eq!(cache.node(inode).is_some(), model.values().any(|other| *other == inode));
                }
            }
        }
    }
}
