//! The entries of all blocks: a slab of small ones, a hash table of slots over it, and the intrusive lists in which
//! eviction keeps them.
//!
//! Ten million blocks must fit, so an entry is 80 bytes and holds what placement and eviction need and nothing else;
//! checksums and bitmaps are in the index on disk, and in memory only for blocks in use.

use std::sync::Arc;

use cavern_proto::BlockId;
use hashbrown::HashTable;

use super::block::Block;
use super::cache::block::CachedBlock;
use super::data::block::{DataBlock, DataState};

/// No slot: the end of a list.
pub(super) const NIL: u32 = u32::MAX;

/// Which list of its directory a cached block is in.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Segment {
    /// Newcomers.
    Window,
    /// What has proved itself, or came while there was room.
    Main,
}

/// What is found under the name of a block of one kind.
#[derive(Debug)]
pub enum Lookup<B> {
    Open(Arc<B>),
    /// Here, but not in memory: the store can load it.
    Closed,
    /// A block of the other kind has the name.
    Other,
    Absent,
}

impl<B> Lookup<B> {
    fn of(open: Option<&Arc<B>>) -> Self {
        open.map_or(Self::Closed, |block| Self::Open(block.clone()))
    }

    /// The block, if it is in memory.
    pub fn open(self) -> Option<Arc<B>> {
        if let Self::Open(block) = self { Some(block) } else { None }
    }

    /// Whether there is such a block of this kind.
    pub fn is_here(&self) -> bool {
        matches!(self, Self::Open(_) | Self::Closed)
    }

    /// Whether no block of either kind has the name.
    pub fn is_absent(&self) -> bool {
        matches!(self, Self::Absent)
    }
}

/// One block: what placement, accounting and lookup need of it, whichever kind it is of.
///
/// An entry is there from when its file was made until the block is evicted, dropped or freed, and guarded by the lock
/// of the table's residents. Its `kind` never changes; the block in it is opened on demand, and closed when it has not
/// been used for a while (see `open_blocks`).
#[derive(Debug)]
pub(super) struct Entry {
    pub id: BlockId,
    pub incarnation: u64,
    /// Bytes of the block when complete.
    pub length: u32,
    /// Bytes on disk, present or reserved for what is about to be written, in units of 4 KiB.
    pub units: u32,
    pub mount_id: u32,
    /// Seconds of the worker's clock.
    pub last_used: u32,
    pub directory: u8,
    /// A descriptor of it has been handed out in this run.
    pub shared: bool,
    pub kind: Kind,
    links: Links,
}

/// What an entry has as one of its kind.
#[derive(Debug)]
pub(super) enum Kind {
    Cached(CachedEntry),
    Data(DataEntry),
}

/// What eviction knows of a cached block. It begins in the window, and moves to main when it has proved itself, there
/// is room, or it has expired.
#[derive(Debug)]
pub(super) struct CachedEntry {
    /// In memory with its file open.
    pub open: Option<Arc<CachedBlock>>,
    /// Bytes read since the last use was counted.
    pub credit: u32,
    pub segment: Segment,
    /// Unused for longer than its mount's ttl: goes first.
    pub expired: bool,
    /// All chunks of the index entry have been verified in this run.
    pub verified: bool,
}

/// A block of an fs-mode file: never evicted.
#[derive(Debug, Default)]
pub(super) struct DataEntry {
    /// In memory with its file open.
    pub open: Option<Arc<DataBlock>>,
    /// Of those that were open once in this run.
    pub state: Option<Arc<DataState>>,
}

/// Which lists an entry is in, and what it adds to them.
#[derive(Clone, Copy, Debug)]
pub(super) struct EvictionState {
    pub directory: usize,
    /// `None` for data.
    pub segment: Option<Segment>,
    pub mount_id: u32,
    pub units: u32,
}

impl Entry {
    /// That of a cached block which is closed.
    pub(super) fn new(id: BlockId, incarnation: u64, length: u32, mount_id: u32, directory: u8) -> Self {
        let cached = CachedEntry { open: None, credit: 0, segment: Segment::Window, expired: false, verified: false };
        Self {
            id,
            incarnation,
            length,
            units: 0,
            mount_id,
            last_used: 0,
            directory,
            shared: false,
            kind: Kind::Cached(cached),
            links: Links::NONE,
        }
    }

    /// That of a data block which is closed.
    pub(super) fn of_data(id: BlockId, incarnation: u64, length: u32, mount_id: u32, directory: u8) -> Self {
        Self { kind: Kind::Data(DataEntry::default()), ..Self::new(id, incarnation, length, mount_id, directory) }
    }

    /// Notes the block that was opened, or made, for a closed entry of its kind.
    pub(super) fn open(&mut self, block: Block) {
        match (&mut self.kind, block) {
            (Kind::Cached(cached), Block::Cached(block)) => cached.open = Some(block),
            (Kind::Data(data), Block::Data(block)) => {
                data.state = Some(block.state().clone());
                data.open = Some(block);
            }
            _ => {}
        }
    }

    /// Takes out the open block; `None` when it is closed.
    pub(super) fn close(&mut self) -> Option<Block> {
        match &mut self.kind {
            Kind::Cached(cached) => {
                let block = cached.open.take()?;
                let state = block.state();
                cached.verified = state.verified == state.present;
                drop(state);
                Some(Block::Cached(block))
            }
            Kind::Data(data) => data.open.take().map(Block::Data),
        }
    }

    /// The open block.
    pub(super) fn block(&self) -> Option<Block> {
        match &self.kind {
            Kind::Cached(cached) => cached.open.clone().map(Block::Cached),
            Kind::Data(data) => data.open.clone().map(Block::Data),
        }
    }

    pub(super) fn cached(&self) -> Option<&CachedEntry> {
        if let Kind::Cached(cached) = &self.kind { Some(cached) } else { None }
    }

    pub(super) fn cached_mut(&mut self) -> Option<&mut CachedEntry> {
        if let Kind::Cached(cached) = &mut self.kind { Some(cached) } else { None }
    }

    pub(super) fn data(&self) -> Option<&DataEntry> {
        if let Kind::Data(data) = &self.kind { Some(data) } else { None }
    }

    /// What is here for whoever means a cached block.
    pub(super) fn look_up_cached(&self) -> Lookup<CachedBlock> {
        self.cached().map_or(Lookup::Other, |cached| Lookup::of(cached.open.as_ref()))
    }

    /// What is here for whoever means a data block.
    pub(super) fn look_up_data(&self) -> Lookup<DataBlock> {
        self.data().map_or(Lookup::Other, |data| Lookup::of(data.open.as_ref()))
    }

    /// Whether it has been unused beyond its time.
    pub(super) fn is_expired(&self) -> bool {
        self.cached().is_some_and(|cached| cached.expired)
    }

    pub(super) fn standing(&self) -> EvictionState {
        let (directory, mount_id, units) = (usize::from(self.directory), self.mount_id, self.units);
        EvictionState { directory, segment: self.cached().map(|cached| cached.segment), mount_id, units }
    }

    /// Whether a request or a fill holds the block at this moment.
    pub(super) fn busy(&self) -> bool {
        match &self.kind {
            Kind::Cached(cached) => cached.open.as_ref().is_some_and(|block| Arc::strong_count(block) > 1),
            Kind::Data(data) => data.open.as_ref().is_some_and(|block| Arc::strong_count(block) > 1),
        }
    }
}

/// The neighbours of an entry in a list.
#[derive(Clone, Copy, Debug)]
pub(super) struct Links {
    pub previous: u32,
    next: u32,
}

impl Links {
    pub(super) const NONE: Self = Self { previous: NIL, next: NIL };
}

/// Where the links of a list are, by slot.
pub(super) trait LinkTable {
    fn links_mut(&mut self, slot: u32) -> Option<&mut Links>;
}

impl LinkTable for Slab {
    fn links_mut(&mut self, slot: u32) -> Option<&mut Links> {
        self.at_mut(slot).map(|entry| &mut entry.links)
    }
}

impl LinkTable for Vec<Links> {
    fn links_mut(&mut self, slot: u32) -> Option<&mut Links> {
        self.get_mut(slot as usize)
    }
}

/// What happens to an entry in a list.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum ListUpdate {
    /// It comes, as the most recently used one.
    Head,
    /// It comes, as the first to go.
    Tail,
    Out,
}

/// A list of entries, most recently used first.
#[derive(Clone, Copy, Debug)]
pub(super) struct List {
    head: u32,
    tail: u32,
    /// Units of all its entries.
    pub units: u64,
}

impl List {
    pub(super) const EMPTY: Self = Self { head: NIL, tail: NIL, units: 0 };

    pub(super) fn tail(&self) -> u32 {
        self.tail
    }

    pub(super) fn relist(&mut self, table: &mut impl LinkTable, slot: u32, units: u32, step: ListUpdate) {
        match step {
            ListUpdate::Head => self.insert(table, slot, units, Links { previous: NIL, next: self.head }),
            ListUpdate::Tail => self.insert(table, slot, units, Links { previous: self.tail, next: NIL }),
            ListUpdate::Out => {
                let Some(links) = table.links_mut(slot) else { return };
                let Links { previous, next } = std::mem::replace(links, Links::NONE);
                self.units -= u64::from(units);
                self.join(table, Links { previous, next }, next, previous);
            }
        }
    }

    fn insert(&mut self, table: &mut impl LinkTable, slot: u32, units: u32, between: Links) {
        let Some(links) = table.links_mut(slot) else { return };
        *links = between;
        self.units += u64::from(units);
        self.join(table, between, slot, slot);
    }

    /// Lets the neighbours, or the ends of the list where there are none, say what comes after and before them.
    fn join(&mut self, table: &mut impl LinkTable, Links { previous, next }: Links, after: u32, before: u32) {
        match table.links_mut(previous) {
            Some(neighbour) => neighbour.next = after,
            None => self.head = after,
        }
        match table.links_mut(next) {
            Some(neighbour) => neighbour.previous = before,
            None => self.tail = before,
        }
    }

    /// An entry takes `after` units instead of `before`.
    pub(super) fn adjust(&mut self, before: u32, after: u32) {
        self.units = self.units + u64::from(after) - u64::from(before);
    }
}

/// The entries and how to find them.
#[derive(Debug, Default)]
pub(super) struct Slab {
    slots: Vec<Option<Entry>>,
    free: Vec<u32>,
    by_id: HashTable<u32>,
}

/// 64 well-mixed bits of a block's name.
pub(super) fn hash_of(id: &BlockId) -> u64 {
    (id.content.hash64() ^ u64::from(id.index).wrapping_mul(0x9e37_79b9_7f4a_7c15)).wrapping_mul(0xd6e8_feb8_6659_fd93)
}

impl Slab {
    pub(super) fn len(&self) -> usize {
        self.by_id.len()
    }

    /// One more than the highest slot ever used: the bound of a walk by slot.
    pub(super) fn slot_count(&self) -> u32 {
        self.slots.len() as u32
    }

    pub(super) fn find(&self, id: &BlockId) -> Option<u32> {
        self.by_id.find(hash_of(id), |slot| self.has_id(*slot, id)).copied()
    }

    /// The slot of a block, unless it was dropped, or dropped and made again.
    pub(super) fn find_as(&self, id: &BlockId, incarnation: u64) -> Option<u32> {
        self.find(id).filter(|slot| self.at(*slot).is_some_and(|entry| entry.incarnation == incarnation))
    }

    pub(super) fn get(&self, id: &BlockId) -> Option<&Entry> {
        self.at(self.find(id)?)
    }

    fn has_id(&self, slot: u32, id: &BlockId) -> bool {
        self.slots[slot as usize].as_ref().is_some_and(|entry| entry.id == *id)
    }

    pub(super) fn at(&self, slot: u32) -> Option<&Entry> {
        self.slots.get(slot as usize)?.as_ref()
    }

    pub(super) fn at_mut(&mut self, slot: u32) -> Option<&mut Entry> {
        self.slots.get_mut(slot as usize)?.as_mut()
    }

    /// Adds an entry whose id is not there yet. It is full at 2³² − 1 entries, far beyond the memory of a host.
    pub(super) fn insert(&mut self, entry: Entry) -> u32 {
        let hash = hash_of(&entry.id);
        let slot = match self.free.pop() {
            Some(slot) => {
                self.slots[slot as usize] = Some(entry);
                slot
            }
            None => {
                self.slots.push(Some(entry));
                self.slots.len() as u32 - 1
            }
        };
        let slots = &self.slots;
        self.by_id
            .insert_unique(hash, slot, |slot| slots[*slot as usize].as_ref().map_or(0, |entry| hash_of(&entry.id)));
        slot
    }

    /// Takes an entry out; it must not be in a list any more.
    pub(super) fn remove(&mut self, slot: u32) -> Option<Entry> {
        let entry = self.slots.get_mut(slot as usize)?.take()?;
        if let Ok(found) = self.by_id.find_entry(hash_of(&entry.id), |candidate| *candidate == slot) {
            found.remove();
        }
        self.free.push(slot);
        Some(entry)
    }

    /// The next entry towards the head of its list, the more recently used one.
    pub(super) fn newer(&self, slot: u32) -> u32 {
        self.at(slot).map_or(NIL, |entry| entry.links.previous)
    }
}

#[cfg(test)]
mod tests {
    use cavern_proto::ContentId;

    use super::*;

    fn id(value: u32) -> BlockId {
        BlockId { content: ContentId::of_object("s", &value.to_string(), "e", 1, 1), index: value % 3 }
    }

    fn order(table: &Slab, list: &List) -> Vec<u32> {
        let mut slots = Vec::new();
        let mut slot = list.tail();
        while slot != NIL {
            slots.push(slot);
            slot = table.newer(slot);
        }
        slots
    }

    #[test]
    fn entries_are_found_by_name_and_slots_are_reused() {
        let mut table = Slab::default();
        let slots: Vec<u32> = (0..1000).map(|value| table.insert(Entry::new(id(value), 1, 1, 0, 0))).collect();
        for value in 0..1000 {
            assert_eq!(table.find(&id(value)), Some(slots[value as usize]));
        }
        assert!(table.remove(slots[5]).is_some());
        assert!(table.remove(slots[5]).is_none());
        assert_eq!(table.find(&id(5)), None);
        assert_eq!(table.insert(Entry::new(id(2000), 1, 1, 0, 0)), slots[5]);
        assert_eq!(table.len(), 1000);
    }

    #[test]
    fn lists_keep_order_and_units() {
        let mut table = Slab::default();
        let mut list = List::EMPTY;
        let slots: Vec<u32> = (0..4)
            .map(|value| {
                let mut entry = Entry::new(id(value), 1, 1, 0, 0);
                entry.units = value + 1;
                table.insert(entry)
            })
            .collect();
        // They are given in order.
        let units = |slot: u32| slot + 1;
        slots.iter().for_each(|slot| list.relist(&mut table, *slot, units(*slot), ListUpdate::Head));
        assert_eq!(order(&table, &list), slots);
        assert_eq!(list.units, 10);
        list.relist(&mut table, slots[0], units(slots[0]), ListUpdate::Out);
        list.relist(&mut table, slots[0], units(slots[0]), ListUpdate::Head);
        list.relist(&mut table, slots[2], units(slots[2]), ListUpdate::Out);
        list.relist(&mut table, slots[2], units(slots[2]), ListUpdate::Tail);
        assert_eq!(order(&table, &list), [slots[2], slots[1], slots[3], slots[0]]);
        slots.iter().for_each(|slot| list.relist(&mut table, *slot, units(*slot), ListUpdate::Out));
        assert_eq!((list.units, list.tail(), list.head), (0, NIL, NIL));
    }

    #[test]
    fn an_entry_is_small() {
        assert!(size_of::<Option<Entry>>() <= 80, "{} bytes", size_of::<Option<Entry>>());
    }
}
