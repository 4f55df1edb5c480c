//! What outlives this process: records in a file of memory that another process keeps open.
//!
//! `cv fuse` may be killed at any time, and its successor goes on where it was. What that one must know is written here
//! before it is answered for: which handles the kernel has, which changes the master was asked for, what was written
//! and is not committed, and what was taken to be written behind. Nothing of it touches a disk; it ends with the mount.
//!
//! A record has a slot of a table. Slots have room for two versions of their record, and one word that says which of
//! them counts, so a process that dies in the middle of a write leaves the version before. A slot is free again when
//! its [`Slot`] is dropped, but not while the journal is frozen: a successor that fails must leave to the next one what
//! it found.

mod records;
mod request;
mod table;

use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;
use std::sync::atomic::Ordering::{Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicU64};

use cavern_net::journals::{ENDED_AT, MAGIC, is_ended};
use cavern_proto::journal::{ChangeRecord, ContentRecord, WriteRecord};
use cavern_proto::master::Mutation;
use parking_lot::Mutex;
use prost::Message;
use rustix::fs::{FlockOperation, Mode, OFlags, flock, open};

pub use request::RequestContext;
pub use table::{Slot, Table};

/// Numbers that the kernel, or the master, may know from an earlier process have its epoch above this many bits: no
/// process uses up so many.
pub const EPOCH_BITS: u32 = 40;

// Words of the first page, by their offsets.
const MAGIC_AT: u64 = 0;
const EPOCH_AT: u64 = 8;
const SESSION_AT: u64 = 16;
const LAST_CHANGE_AT: u64 = 24;
/// How many slots of each table were ever used: a word for each.
const USED_AT: u64 = 64;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

/// Bytes that a record has with its two versions, bytes behind it, and slots. Only what is written to takes memory.
type Shape = (u64, u64, u32);
const MOUNT: Shape = (64 * KIB, 0, 1);
const HANDLES: Shape = (512, 0, 1 << 20);
const POSITIONS: Shape = (512 * KIB, 0, 1 << 14);
const LOCKS: Shape = (512, 0, 1 << 18);
const CHANGES: Shape = (256 * KIB, 0, 1 << 13);
const CONTENTS: Shape = (256 * KIB, 0, 1 << 16);
const PIECES: Shape = (4 * KIB, 4 * MIB, 1 << 12);
const BACKINGS: Shape = (128, 0, 1 << 18);
const APPENDS: Shape = (128, 0, 1 << 16);

/// Records that outlive this process.
#[derive(Debug)]
pub struct Journal {
    file: Arc<File>,
    /// This file, opened once more, and locked: whoever serves the mount shares it, and whoever takes over from all of
    /// them has it alone. It goes to no other process.
    _lock: Option<OwnedFd>,
    /// How many processes have had this journal before.
    epoch: u64,
    frozen: Arc<AtomicBool>,
    /// How the mount was made.
    pub mount: Arc<Table>,
    /// Open files and directories.
    pub handles: Arc<Table>,
    /// Where readers of directories are.
    pub positions: Arc<Table>,
    /// What was locked through which handle.
    pub locks: Arc<Table>,
    /// Files that are registered with the kernel.
    pub backings: Arc<Table>,
    /// Where writes go that append.
    pub appends: Arc<Table>,
    pub(crate) changes: Arc<Table>,
    pub(crate) contents: Arc<Table>,
    pub(crate) pieces: Arc<Table>,
    /// Numbers of changes whose askers have no answer yet.
    unanswered: Mutex<BTreeSet<u64>>,
    /// The session, and the highest number of its changes.
    last: Mutex<(u64, u64)>,
}

impl Journal {
    /// Takes the journal over. One that was never used is begun; any other is frozen until [`Journal::thaw`].
    ///
    /// # Errors
    /// It was written by a version whose journal has another layout, or somebody takes over from all who serve.
    pub fn open(memory: OwnedFd) -> io::Result<Arc<Self>> {
        let file = File::from(memory);
        let lock = match reopen(&file) {
            Ok(lock) => Some(locked(lock, FlockOperation::NonBlockingLockShared)?),
            // Without /proc. Nobody can take over here either.
            Err(_cause) => None,
        };
        let journal = Self::open_locked(file, lock)?;
        set_word(&journal.file, ENDED_AT, 0)?;
        Ok(journal)
    }

    /// Takes the journal over from all who served the mount, frozen. One that is ended stays so.
    ///
    /// # Errors
    /// Those of [`Journal::open`]; `WouldBlock` while another process has it.
    pub fn take_over(memory: OwnedFd) -> io::Result<Arc<Self>> {
        let file = File::from(memory);
        let lock = locked(reopen(&file)?, FlockOperation::NonBlockingLockExclusive)?;
        Self::open_locked(file, Some(lock))
    }

    fn open_locked(file: File, lock: Option<OwnedFd>) -> io::Result<Arc<Self>> {
        let file = Arc::new(file);
        let epoch = if file.metadata()?.len() == 0 {
            begin(&file)?;
            0
        } else {
            if word(&file, MAGIC_AT)? != MAGIC {
                return Err(io::Error::other(
                    "it was written by another version of cv, whose layout is not known here",
                ));
            }
            word(&file, EPOCH_AT)? + 1
        };
        set_word(&file, EPOCH_AT, epoch)?;
        let frozen = Arc::new(AtomicBool::new(epoch > 0));
        let (mut base, mut used_at) = (4 * KIB, USED_AT);
        let mut table = |shape: Shape| {
            let table = Table::open(&file, base, shape, used_at, &frozen);
            (base, used_at) = (base + table_bytes(shape), used_at + 8);
            table
        };
        // In the order of `bytes`.
        let (mount, handles, positions, locks) = (table(MOUNT)?, table(HANDLES)?, table(POSITIONS)?, table(LOCKS)?);
        let (changes, contents, pieces) = (table(CHANGES)?, table(CONTENTS)?, table(PIECES)?);
        let (backings, appends) = (table(BACKINGS)?, table(APPENDS)?);
        let unanswered = Mutex::default();
        let last = Mutex::new((word(&file, SESSION_AT)?, word(&file, LAST_CHANGE_AT)?));
        Ok(Arc::new(Self {
            file,
            _lock: lock,
            epoch,
            frozen,
            mount,
            handles,
            positions,
            locks,
            backings,
            appends,
            changes,
            contents,
            pieces,
            unanswered,
            last,
        }))
    }

    /// How many processes have had this journal before this one.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// The file, for another process that keeps it.
    pub fn memory(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Says that nothing is left to be made of what is in here.
    pub fn end(&self) {
        let _ = set_word(&self.file, ENDED_AT, 1);
    }

    pub fn is_ended(&self) -> bool {
        is_ended(self.memory()).unwrap_or_default()
    }

    /// What is left to be made. To be asked of a journal that is frozen.
    pub fn left(&self) -> Unreplayed {
        let answered = self.changes.take_all().into_iter().filter(|(_, record)| {
            let record = ChangeRecord::decode(&record[..]).unwrap_or_default();
            record.session == self.session().0
                && Mutation::decode(&record.mutation[..]).is_ok_and(|mutation| mutation.is_write_back)
        });
        let changes = answered.count();
        // Of what is committed, only disks lack something.
        let contents = self.contents.take_all().into_iter().filter_map(|(_, record)| {
            let record = ContentRecord::decode(&record[..]).ok()?;
            (record.changed || record.grow_to != 0 || !record.blocks.is_empty()).then_some(record.inode)
        });
        let pieces = self
            .pieces
            .take_all()
            .into_iter()
            .filter_map(|(_, record)| WriteRecord::decode(&record[..]).ok().map(|record| record.inode));
        let files = contents.chain(pieces).collect::<BTreeSet<_>>().len();
        Unreplayed { changes, files }
    }

    /// From now on what is let go of is forgotten.
    pub fn thaw(&self) {
        self.frozen.store(false, Release);
    }

    /// From now on nothing is forgotten any more: this process ends, and another one goes on.
    pub fn freeze(&self) {
        self.frozen.store(true, Release);
    }

    /// The last session, at first that of the process before, and the highest number of its changes.
    pub fn session(&self) -> (u64, u64) {
        *self.last.lock()
    }

    /// Numbers up to this one are being used in a session: none (0) when it begins.
    pub(crate) fn note_changes(&self, session: u64, last: u64) {
        let mut known = self.last.lock();
        if known.0 == session && last <= known.1 {
            return;
        }
        *known = (session, last);
        // Both at once: the numbers of one session mean nothing in another.
        let mut words = [0; 16];
        words[..8].copy_from_slice(&session.to_le_bytes());
        words[8..].copy_from_slice(&last.to_le_bytes());
        let _ = self.file.write_all_at(&words, SESSION_AT);
    }

    /// Enters a change that is about to be sent under its number, or was answered before it has one (0): `order` is its
    /// place among those then. `unique`: of the request of the kernel that it is made for, 0 for none.
    pub(crate) fn note_change(
        self: &Arc<Self>,
        session: u64,
        unique: u64,
        order: Option<u64>,
        mutation: &Mutation,
    ) -> Option<Arc<ChangeSlot>> {
        let slot = self.changes.put(&self.change_record(session, unique, order, mutation))?;
        Some(self.change_slot(slot, unique, mutation.seq))
    }

    fn change_record(&self, session: u64, unique: u64, order: Option<u64>, mutation: &Mutation) -> Vec<u8> {
        let order = order.map_or(0, |order| (self.epoch << EPOCH_BITS) + order);
        let record = ChangeRecord { session, seq: mutation.seq, unique, order, ..ChangeRecord::default() };
        records::encode_change(&record, mutation)
    }

    /// The slot of a change that the process before has entered.
    pub(crate) fn change_slot(self: &Arc<Self>, slot: Slot, unique: u64, seq: u64) -> Arc<ChangeSlot> {
        let slot = ChangeSlot { journal: Arc::clone(self), unique, seq: AtomicU64::new(0), slot: Some(slot) };
        slot.has_number(seq);
        Arc::new(slot)
    }

    /// The first change whose asker has no answer.
    pub(crate) fn first_unanswered(&self) -> Option<u64> {
        self.unanswered.lock().first().copied()
    }

    /// Writes bytes of a piece behind its record.
    pub(crate) fn log_write(&self, slot: &Slot, at: u64, bytes: &[u8]) -> io::Result<()> {
        slot.touched(at + bytes.len() as u64);
        self.file.write_all_at(bytes, slot.behind() + at)
    }

    /// The bytes of a piece.
    pub(crate) fn read_logged(&self, slot: &Slot, length: usize) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; length];
        self.file.read_exact_at(&mut bytes, slot.behind())?;
        Ok(bytes)
    }

    #[cfg(test)]
    fn is_frozen(&self) -> bool {
        self.frozen.load(std::sync::atomic::Ordering::Acquire)
    }
}

/// What a journal has that the master lacks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Unreplayed {
    /// Changes that were answered. Of some of them the master may have told nobody that it has made them.
    pub changes: usize,
    /// Files that were written.
    pub files: usize,
}

/// A change that the kernel may ask for again, until this is dropped.
#[derive(Debug)]
pub(crate) struct ChangeSlot {
    journal: Arc<Journal>,
    unique: u64,
    /// 0 before it is sent.
    seq: AtomicU64,
    slot: Option<Slot>,
}

impl ChangeSlot {
    /// It has got a number, or has become another change before it is sent; false, and the record is as it was, when
    /// that has no room.
    pub(crate) fn write(&self, session: u64, order: Option<u64>, mutation: &Mutation) -> bool {
        let record = self.journal.change_record(session, self.unique, order, mutation);
        self.has_number(mutation.seq);
        self.slot.as_ref().is_some_and(|slot| slot.set(&record))
    }

    fn has_number(&self, seq: u64) {
        let before = self.seq.swap(seq, Relaxed);
        let mut unanswered = self.journal.unanswered.lock();
        unanswered.remove(&before);
        if seq != 0 {
            unanswered.insert(seq);
        }
    }

    /// Its answer need not be kept by the master any longer.
    pub(crate) fn answered(&self) {
        self.journal.unanswered.lock().remove(&self.seq.load(Relaxed));
    }

    /// It is undone, while it may be kept by a request that has not got its answer: no successor is to make it. Its
    /// number is another's.
    pub(crate) fn erase(&self) {
        if let Some(slot) = &self.slot {
            slot.erase();
        }
        self.has_number(0);
    }

    /// Nobody will ask for it again.
    pub(crate) fn forget(mut self) {
        if let Some(slot) = self.slot.take() {
            slot.forget();
        }
    }
}

impl Drop for ChangeSlot {
    fn drop(&mut self) {
        self.answered();
    }
}

/// Bytes of the whole file, of which hardly any take memory.
fn bytes() -> u64 {
    let tables = [MOUNT, HANDLES, POSITIONS, LOCKS, CHANGES, CONTENTS, PIECES, BACKINGS, APPENDS];
    4 * KIB + tables.into_iter().map(table_bytes).sum::<u64>()
}

fn table_bytes((record_bytes, bytes_behind, slots): Shape) -> u64 {
    (record_bytes + bytes_behind) * u64::from(slots)
}

/// Opens the file once more, since a lock belongs to whoever shares the descriptor.
fn reopen(file: &File) -> io::Result<OwnedFd> {
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    Ok(open(path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?)
}

fn locked(file: OwnedFd, how: FlockOperation) -> io::Result<OwnedFd> {
    flock(&file, how)?;
    Ok(file)
}

fn begin(file: &File) -> io::Result<()> {
    file.set_len(bytes())?;
    set_word(file, MAGIC_AT, MAGIC)
}

fn word(file: &File, at: u64) -> io::Result<u64> {
    let mut bytes = [0; 8];
    file.read_exact_at(&mut bytes, at)?;
    Ok(u64::from_le_bytes(bytes))
}

fn set_word(file: &File, at: u64, value: u64) -> io::Result<()> {
    file.write_all_at(&value.to_le_bytes(), at)
}

#[cfg(test)]
mod tests {
    use rustix::fs::{MemfdFlags, memfd_create};

    use super::*;

    fn memory() -> OwnedFd {
        memfd_create("journal", MemfdFlags::CLOEXEC).unwrap()
    }

    #[test]
    fn a_successor_finds_what_was_not_let_go_of() {
        let memory = memory();
        let first = Journal::open(memory.try_clone().unwrap()).unwrap();
        assert_eq!((first.epoch(), first.is_frozen(), first.session()), (0, false, (0, 0)));
        let kept = first.handles.put(b"kept").unwrap();
        drop(first.handles.put(b"let go of").unwrap());
        kept.set(b"and changed");
        first.note_changes(7, 0);
        first.note_changes(7, 20);
        first.note_changes(7, 12);
        // As kill -9 has it: nothing is dropped.
        std::mem::forget(kept);

        let second = Journal::open(memory.try_clone().unwrap()).unwrap();
        assert_eq!((second.epoch(), second.is_frozen(), second.session()), (1, true, (7, 20)));
        let found = second.handles.take_all();
        assert_eq!(found.iter().map(|(_, record)| &record[..]).collect::<Vec<_>>(), [b"and changed"]);
        // It fails.
        drop(found);

        let third = Journal::open(memory.try_clone().unwrap()).unwrap();
        let found = third.handles.take_all();
        assert_eq!((third.epoch(), found.len()), (2, 1));
        third.thaw();
        drop(found);
        assert!(Journal::open(memory).unwrap().handles.take_all().is_empty());
    }

    #[test]
    fn a_full_table_takes_no_more_until_something_is_let_go_of() {
        let journal = Journal::open(memory()).unwrap();
        let mount = journal.mount.put(b"the only one").unwrap();
        assert!(journal.mount.put(b"another").is_none());
        assert!(!mount.set(&vec![1; MOUNT.0 as usize / 2]), "longer than there is room for");
        drop(mount);
        assert!(journal.mount.put(&vec![1; MOUNT.0 as usize / 2]).is_none());
        let found = |(_, record): (_, Vec<u8>)| record;
        std::mem::forget(journal.mount.put(b"another").unwrap());
        assert_eq!(journal.mount.take_all().into_iter().map(found).collect::<Vec<_>>(), [b"another"]);
        let slots: Vec<_> = (0..PIECES.2).map(|_| journal.pieces.put(b"piece").unwrap()).collect();
        assert!(journal.pieces.put(b"one too many").is_none());
        drop(slots);
        assert!(journal.pieces.put(b"piece").is_some());
    }

    #[test]
    fn memory_that_was_used_for_much_is_given_back() {
        use std::os::unix::fs::MetadataExt as _;

        let journal = Journal::open(memory()).unwrap();
        let used = || journal.file.metadata().unwrap().blocks() * 512;
        for _ in 0..2 {
            let slots: Vec<_> = (0..50).map(|_| journal.pieces.put(b"piece").unwrap()).collect();
            for slot in &slots {
                journal.log_write(slot, 0, &vec![7; MIB as usize]).unwrap();
            }
            assert!(used() >= 50 * MIB, "{}", used());
            slots.into_iter().for_each(Slot::forget);
            assert!(used() < 18 * MIB, "{}", used());
            let slots: Vec<_> = (0..50).map(|_| journal.pieces.put(b"piece").unwrap()).collect();
            journal.log_write(&slots[49], MIB, b"more").unwrap();
            assert_eq!(journal.read_logged(&slots[49], MIB as usize).unwrap(), vec![0; MIB as usize]);
        }
    }

    #[test]
    fn it_is_taken_over_by_one_process_alone_and_when_nobody_serves_the_mount() {
        let memory = memory();
        let would_block = |taken: io::Result<Arc<Journal>>| taken.unwrap_err().kind() == io::ErrorKind::WouldBlock;
        let serving = [(); 2].map(|()| Journal::open(memory.try_clone().unwrap()).unwrap());
        assert!(would_block(Journal::take_over(memory.try_clone().unwrap())));
        serving[1].end();
        drop(serving);
        let taken = Journal::take_over(memory.try_clone().unwrap()).unwrap();
        assert!(taken.is_ended() && taken.is_frozen() && taken.epoch() == 2);
        assert!(would_block(Journal::take_over(memory.try_clone().unwrap())));
        assert!(would_block(Journal::open(memory.try_clone().unwrap())));
        drop(taken);
        assert!(!Journal::open(memory).unwrap().is_ended());
    }

    #[test]
    fn what_is_left_is_counted_and_stays() {
        let memory = memory();
        let first = Journal::open(memory.try_clone().unwrap()).unwrap();
        first.note_changes(7, 0);
        for (session, is_write_back) in [(7, true), (7, false), (6, true), (7, true)] {
            let mutation = Mutation { is_write_back, ..Mutation::default() };
            std::mem::forget(first.note_change(session, 0, None, &mutation));
        }
        for (inode, changed) in [(1, true), (2, false), (3, true)] {
            let record = ContentRecord { inode, changed, ..ContentRecord::default() };
            std::mem::forget(first.contents.put(&record.encode_to_vec()));
        }
        std::mem::forget(first.pieces.put(&WriteRecord { inode: 3, ..WriteRecord::default() }.encode_to_vec()));
        drop(first);
        for _ in 0..2 {
            let taken = Journal::open(memory.try_clone().unwrap()).unwrap();
            assert_eq!([taken.left(), taken.left()], [Unreplayed { changes: 2, files: 2 }; 2]);
        }
    }

    #[test]
    fn another_layout_is_refused() {
        let memory = memory();
        drop(Journal::open(memory.try_clone().unwrap()).unwrap());
        set_word(&File::from(memory.try_clone().unwrap()), MAGIC_AT, MAGIC + 1).unwrap();
        assert!(Journal::open(memory).unwrap_err().to_string().contains("another version"));
    }

    #[test]
    fn a_change_that_is_undone_is_made_by_no_successor_though_its_request_keeps_it() {
        let memory = memory();
        let first = Journal::open(memory.try_clone().unwrap()).unwrap();
        let note = |seq| first.note_change(0, 0, Some(seq), &Mutation { seq, ..Mutation::default() }).unwrap();
        let [kept, undone] = [2, 1].map(note);
        undone.erase();
        assert_eq!(first.first_unanswered(), Some(2));
        std::mem::forget((kept, undone));
        assert_eq!(Journal::open(memory).unwrap().changes.take_all().len(), 1);
    }

    #[test]
    fn a_change_is_kept_until_its_asker_has_the_answer() {
        let journal = Journal::open(memory()).unwrap();
        let note = |seq| journal.note_change(7, 0, None, &Mutation { seq, ..Mutation::default() }).unwrap();
        let slots = [5, 6].map(note);
        assert_eq!(journal.first_unanswered(), Some(5));
        slots[0].answered();
        assert_eq!(journal.first_unanswered(), Some(6));
        drop(slots);
        assert_eq!(journal.first_unanswered(), None);
        assert!(journal.changes.take_all().is_empty());
    }
}
