//! Slots of one kind.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed};
use std::sync::atomic::{AtomicBool, AtomicU64};

use parking_lot::Mutex;
use rustix::fs::{FallocateFlags, fallocate};

use super::{Shape, set_word, word};

const PAGE: u64 = 4096;
/// Bytes before the two versions of a record.
const HEAD: u64 = 64;
/// In the head: the second version counts.
const SECOND: u64 = 1 << 63;

/// Slots up to this one keep what memory they were given. Others keep it only if it is no more than [`LITTLE`].
const KEPT: u32 = 16;
const LITTLE: u64 = 32 << 10;
/// And from this one on nothing.
const FEW: u32 = 1024;

/// The slots of one kind.
#[derive(Debug)]
pub struct Table {
    file: Arc<File>,
    base: u64,
    /// With the record's two versions.
    record_bytes: u64,
    slot_bytes: u64,
    slots: u32,
    used_at: u64,
    frozen: Arc<AtomicBool>,
    /// Nothing could be written: said once.
    failed: AtomicBool,
    places: Mutex<Places>,
}

#[derive(Debug)]
struct Places {
    /// The first of them is taken, so that few are ever touched.
    free: BinaryHeap<Reverse<u32>>,
    /// Slots that were ever used.
    used: u32,
}

/// One record; see the module above.
#[derive(Debug)]
pub struct Slot {
    table: Arc<Table>,
    number: u32,
    /// The second version counts.
    second: AtomicBool,
    /// Bytes of a version, and of what lies behind, at the most.
    longest: AtomicU64,
    is_cleared: bool,
}

impl Table {
    pub(super) fn open(
        file: &Arc<File>,
        base: u64,
        (record_bytes, bytes_behind, slots): Shape,
        used_at: u64,
        frozen: &Arc<AtomicBool>,
    ) -> io::Result<Arc<Self>> {
        let slot_bytes = record_bytes + bytes_behind;
        let used = u32::try_from(word(file, used_at)?).unwrap_or(slots).min(slots);
        let (file, frozen) = (Arc::clone(file), Arc::clone(frozen));
        let mut free = BinaryHeap::new();
        for number in 0..used {
            if word(&file, base + slot_bytes * u64::from(number))? == 0 {
                free.push(Reverse(number));
            }
        }
        let places = Mutex::new(Places { free, used });
        let failed = AtomicBool::new(false);
        Ok(Arc::new(Self { file, base, record_bytes, slot_bytes, slots, used_at, frozen, failed, places }))
    }

    /// Enters a record; `None` when there is no room for it.
    pub fn put(self: &Arc<Self>, record: &[u8]) -> Option<Slot> {
        let number = self.place()?;
        let slot = self.slot(number, true);
        slot.set(record).then_some(slot)
    }

    fn slot(self: &Arc<Self>, number: u32, second: bool) -> Slot {
        let (second, longest) = (AtomicBool::new(second), AtomicU64::new(0));
        Slot { table: Arc::clone(self), number, second, longest, is_cleared: false }
    }

    fn place(&self) -> Option<u32> {
        let mut places = self.places.lock();
        if let Some(Reverse(number)) = places.free.pop() {
            return Some(number);
        }
        let number = (places.used < self.slots).then_some(places.used)?;
        set_word(&self.file, self.used_at, u64::from(number) + 1).ok()?;
        places.used = number + 1;
        Some(number)
    }

    /// All records that there are. To be called once, before any is entered.
    pub fn take_all(self: &Arc<Self>) -> Vec<(Slot, Vec<u8>)> {
        let used = self.places.lock().used;
        (0..used).filter_map(|number| self.read(number)).collect()
    }

    fn read(self: &Arc<Self>, number: u32) -> Option<(Slot, Vec<u8>)> {
        let head = word(&self.file, self.base + self.slot_bytes * u64::from(number)).ok().filter(|head| *head != 0)?;
        let second = head & SECOND != 0;
        let slot = self.slot(number, second);
        // What the process before had there is not known.
        slot.touched(u64::MAX);
        // One more than its length, so that an empty record is none.
        let length = usize::try_from((head & !SECOND).saturating_sub(1)).ok()?;
        let mut record = vec![0; length.min(self.version_bytes() as usize)];
        self.file.read_exact_at(&mut record, slot.version(second)).ok()?;
        Some((slot, record))
    }

    fn version_bytes(&self) -> u64 {
        (self.record_bytes - HEAD) / 2
    }

    fn fail(&self, cause: &io::Error) {
        if !self.failed.swap(true, Relaxed) {
            tracing::warn!("what a successor of this process must know cannot be kept: {cause}");
        }
    }
}

impl Slot {
    fn offset(&self) -> u64 {
        self.table.base + self.table.slot_bytes * u64::from(self.number)
    }

    /// Where what lies behind the record begins.
    pub(super) fn behind(&self) -> u64 {
        self.offset() + self.table.record_bytes
    }

    /// So many bytes of a version, or of what lies behind, have been used.
    pub(super) fn touched(&self, bytes: u64) {
        self.longest.fetch_max(bytes, Relaxed);
    }

    fn version(&self, second: bool) -> u64 {
        self.offset() + HEAD + if second { self.table.version_bytes() } else { 0 }
    }

    /// Replaces the record; false, and it is as it was, when the new one has no room. Not to be called by two at a
    /// time.
    pub fn set(&self, record: &[u8]) -> bool {
        let length = record.len() as u64;
        if length > self.table.version_bytes() {
            return false;
        }
        self.touched(length);
        let written = if HEAD + length <= PAGE - self.offset() % PAGE {
            self.set_at_once(record).map(|()| false)
        } else {
            let second = !self.second.load(Relaxed);
            self.set_beside(record, second).map(|()| second)
        };
        match written {
            Ok(second) => self.second.store(second, Relaxed),
            Err(ref cause) => self.table.fail(cause),
        }
        written.is_ok()
    }

    /// Head and record within one page are written at once, since no signal ends that half-way.
    fn set_at_once(&self, record: &[u8]) -> io::Result<()> {
        let mut bytes = [0; PAGE as usize];
        let end = HEAD as usize + record.len();
        bytes[..8].copy_from_slice(&(record.len() as u64 + 1).to_le_bytes());
        bytes[HEAD as usize..end].copy_from_slice(record);
        self.table.file.write_all_at(&bytes[..end], self.offset())
    }

    /// Others are written in the place of the version that does not count, which then does.
    fn set_beside(&self, record: &[u8], second: bool) -> io::Result<()> {
        let head = (record.len() as u64 + 1) | if second { SECOND } else { 0 };
        self.table.file.write_all_at(record, self.version(second))?;
        set_word(&self.table.file, self.offset(), head)
    }

    /// Forgets the record, in a journal that is frozen, too.
    pub fn forget(mut self) {
        self.erase();
        self.is_cleared = true;
    }

    /// The slot has no record any more, and stays taken.
    pub fn erase(&self) {
        let _ = set_word(&self.table.file, self.offset(), 0);
    }
}

impl Slot {
    /// Gives the memory back that was used for much.
    fn give_back(&self) {
        let table = &self.table;
        let (is_much, is_one_of_many) = (self.longest.load(Relaxed) > LITTLE, self.number >= FEW);
        if table.slot_bytes < 2 * PAGE || self.number < KEPT || !(is_much || is_one_of_many) {
            return;
        }
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        // What cannot be given back stays.
        let _ = fallocate(&table.file, flags, self.offset(), table.slot_bytes);
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        if !self.is_cleared {
            if self.table.frozen.load(Acquire) {
                return;
            }
            self.erase();
        }
        self.give_back();
        self.table.places.lock().free.push(Reverse(self.number));
    }
}
