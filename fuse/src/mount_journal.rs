//! What a process that serves a mount leaves to the one after it, in the client's [`Journal`]: how the mount was made,
//! which handles the kernel has, where readers of directories are, and what was locked through which handle.
//!
//! Node ids are the inodes of the namespace, or say which one they stand for, so nothing is to be kept of what the
//! kernel merely knows.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use cavern_client::journal::Slot;
use cavern_client::{Journal, KernelBlock};
use cavern_conf::schema::{self, Choice};
use parking_lot::Mutex;
use prost::Message;

use crate::kernel::abi::ROOT_NODE;
use crate::kernel::{Agreement, Mount, Reply};
use crate::root::Root;

/// How the mount was made. The kernel has it so for as long as the mount is there.
#[derive(Clone, PartialEq, Message)]
pub struct MountRecord {
    #[prost(uint32, tag = "1")]
    pub minor: u32,
    #[prost(uint64, tag = "2")]
    pub flags: u64,
    #[prost(string, tag = "3")]
    pub mount_point: String,
    #[prost(bool, tag = "4")]
    pub is_by_root: bool,
    #[prost(string, tag = "5")]
    pub path: String,
    #[prost(uint64, tag = "6")]
    pub root: u64,
    #[prost(bool, tag = "7")]
    pub no_open: bool,
    #[prost(bool, tag = "8")]
    pub posix_acl: bool,
    #[prost(bool, tag = "9")]
    pub direct: bool,
    #[prost(bool, tag = "10")]
    pub no_xattrs: bool,
    /// See [`Root::is_inside`].
    #[prost(bool, tag = "11")]
    pub is_inside: bool,
    /// `major:minor`.
    #[prost(string, optional, tag = "12")]
    pub device: Option<String>,
}

impl MountRecord {
    /// The mount as the process that makes it has it.
    pub fn new(fuse: &schema::Fuse, agreement: Agreement, mount: &Mount, root: &Root) -> Self {
        Self {
            minor: agreement.minor,
            flags: agreement.flags,
            mount_point: mount.path().display().to_string(),
            is_by_root: mount.is_by_root(),
            path: fuse.path.clone(),
            root: root.to_namespace(ROOT_NODE),
            no_open: fuse.no_open == Choice::On,
            posix_acl: fuse.posix_acl,
            direct: fuse.direct,
            no_xattrs: fuse.xattrs == Choice::Off,
            is_inside: root.is_inside(),
            device: mount.device().map(str::to_owned),
        }
    }

    /// Reads what the process before has left; `None` when it had not mounted yet.
    pub fn of(journal: &Journal) -> Option<Self> {
        let (slot, record) = journal.mount.take_all().pop()?;
        std::mem::forget(slot);
        Self::decode(&record[..]).ok()
    }

    pub fn agreement(&self) -> Agreement {
        Agreement { minor: self.minor, flags: self.flags }
    }

    /// What a configuration that has changed since says otherwise is as it was when the mount was made.
    pub fn apply(&self, fuse: &mut schema::Fuse) {
        let (no_open, xattrs) = (self.no_open, !self.no_xattrs);
        let is_as_asked = (&fuse.path, fuse.posix_acl, fuse.direct) == (&self.path, self.posix_acl, self.direct)
            && fuse.no_open.or(no_open) == no_open
            && fuse.xattrs.or(xattrs) == xattrs;
        fuse.mount_point = PathBuf::from(&self.mount_point);
        fuse.path.clone_from(&self.path);
        (fuse.posix_acl, fuse.direct) = (self.posix_acl, self.direct);
        (fuse.no_open, fuse.xattrs) = (no_open.into(), xattrs.into());
        if !is_as_asked {
            tracing::warn!(
                "fuse.path, no_open, xattrs, posix_acl or direct have changed in the configuration: they are what \
                 they were until the mount is made anew"
            );
        }
    }
}

/// An open file or directory.
#[derive(Clone, Copy, PartialEq, Message)]
pub struct HandleRecord {
    #[prost(uint64, tag = "1")]
    pub number: u64,
    #[prost(uint64, tag = "2")]
    pub inode: u64,
    /// The request that opened it.
    #[prost(uint64, tag = "3")]
    pub unique: u64,
    #[prost(bool, tag = "4")]
    pub is_directory: bool,
    /// It is of an fs-mode mount: the inode stays while it is open.
    #[prost(bool, tag = "5")]
    pub is_kept: bool,
    /// Of a directory.
    #[prost(uint64, tag = "6")]
    pub parent: u64,
    /// What is registered with the kernel for it.
    #[prost(uint32, optional, tag = "7")]
    pub backing: Option<u32>,
    /// What is written through it goes to the end of the file, if the kernel appends.
    #[prost(bool, tag = "8")]
    pub appends: bool,
    /// Of a file of an fs-mode mount: which of the kernel's nodes of the inode it is a handle of.
    #[prost(uint32, tag = "9")]
    pub alias: u32,
    /// Of a file of an fs-mode mount that the kernel reads by itself: what it reads.
    #[prost(message, optional, tag = "10")]
    pub block: Option<KernelBlock>,
}

/// Names that a reader of a directory was given last.
#[derive(Clone, PartialEq, Message)]
pub struct PositionRecord {
    /// Of the directory.
    #[prost(uint64, tag = "1")]
    pub number: u64,
    /// How many entries a program that counts them has before the first of the names. Older ones have no cookies.
    #[prost(uint64, tag = "2")]
    first: u64,
    #[prost(bytes = "vec", repeated, tag = "3")]
    names: Vec<Vec<u8>>,
    /// What each was given with.
    #[prost(uint64, repeated, tag = "4")]
    cookies: Vec<u64>,
}

/// Cookie of the first entry where entries are counted: `.` and `..` come before.
const FIRST_COUNTED: u64 = 3;

impl PositionRecord {
    pub fn new(number: u64, cookies: Vec<u64>, names: Vec<Vec<u8>>) -> Self {
        let first = cookies.first().map_or(0, |first| first.saturating_sub(FIRST_COUNTED));
        Self { number, first, names, cookies }
    }

    /// The names with their cookies.
    pub fn given(&self) -> impl Iterator<Item = (u64, &[u8])> {
        let counted = FIRST_COUNTED.saturating_add(self.first)..;
        let counted = counted.take(if self.cookies.is_empty() { self.names.len() } else { 0 });
        self.cookies.iter().copied().chain(counted).zip(self.names.iter().map(Vec::as_slice))
    }
}

/// A lock that somebody may have.
#[derive(Clone, Copy, PartialEq, Message)]
pub struct LockRecord {
    #[prost(uint64, tag = "1")]
    pub inode: u64,
    #[prost(uint64, tag = "2")]
    pub handle: u64,
    #[prost(uint64, tag = "3")]
    pub owner: u64,
    #[prost(bool, tag = "4")]
    pub is_flock: bool,
    /// A `LockType`.
    #[prost(int32, tag = "5")]
    pub kind: i32,
}

/// Where a write goes that appends.
#[derive(Clone, Copy, PartialEq, Message)]
pub struct AppendRecord {
    /// The request.
    #[prost(uint64, tag = "1")]
    pub unique: u64,
    #[prost(uint64, tag = "2")]
    pub offset: u64,
}

/// The journal has no room for a record of this kind.
#[derive(Clone, Copy, Debug)]
pub struct JournalFull;

/// Locks that were asked for through a handle.
type NotedLocks = Vec<(LockRecord, Option<Slot>)>;

/// The journal as the operations of the mount use it. Without one nothing is kept.
#[derive(Debug, Default)]
pub struct MountJournal {
    journal: Option<Arc<Journal>>,
    /// Handles that the process before opened, by the request: one that is sent again opens another.
    opened: Mutex<HashMap<u64, HandleRecord>>,
    /// Where it appended, by the request.
    appended: Mutex<HashMap<u64, (Slot, u64)>>,
    locks: Mutex<HashMap<u64, NotedLocks>>,
    has_locks: AtomicBool,
}

impl MountJournal {
    pub fn new(journal: Option<Arc<Journal>>) -> Self {
        Self { journal, ..Self::default() }
    }

    pub fn journal(&self) -> Option<&Arc<Journal>> {
        self.journal.as_ref()
    }

    /// Enters a handle before the kernel knows it.
    pub fn note_handle(&self, record: &HandleRecord) -> Option<Slot> {
        self.journal.as_ref()?.handles.put(&record.encode_to_vec())
    }

    /// Enters a file that is registered with the kernel.
    ///
    /// # Errors
    /// There is no room for it: whoever comes after this process could not give it back.
    pub fn note_backing(&self, number: u32) -> Result<Option<Slot>, JournalFull> {
        let Some(journal) = &self.journal else { return Ok(None) };
        journal.backings.put(&number.to_le_bytes()).map(Some).ok_or(JournalFull)
    }

    /// Enters names that a reader is about to be given.
    pub fn note_position(&self, slot: &mut Option<Slot>, record: impl FnOnce() -> PositionRecord) {
        let Some(journal) = &self.journal else { return };
        let record = record().encode_to_vec();
        match slot {
            Some(slot) => _ = slot.set(&record),
            none => *none = journal.positions.put(&record),
        }
    }

    /// Enters a lock that somebody asks for.
    pub fn note_lock(&self, record: LockRecord) {
        let Some(journal) = &self.journal else { return };
        let slot = journal.locks.put(&record.encode_to_vec());
        self.keep_lock(record, slot);
    }

    pub(crate) fn keep_lock(&self, record: LockRecord, slot: Option<Slot>) {
        self.has_locks.store(true, Relaxed);
        let mut locks = self.locks.lock();
        let noted = locks.entry(record.handle).or_default();
        noted.retain(|(known, _)| (known.owner, known.is_flock) != (record.owner, record.is_flock));
        noted.push((record, slot));
    }

    /// An owner has no locks of an inode any more.
    pub fn forget_locks_of(&self, inode: u64, owner: u64) {
        if self.has_locks.load(Relaxed) {
            let is_other = |(known, _): &(LockRecord, Option<Slot>)| {
                (known.inode, known.owner, known.is_flock) != (inode, owner, false)
            };
            self.locks.lock().values_mut().for_each(|noted| noted.retain(is_other));
        }
    }

    /// A handle is gone, and its locks are.
    pub fn forget_locks_through(&self, handle: u64) {
        if self.has_locks.load(Relaxed) {
            self.locks.lock().remove(&handle);
        }
    }

    /// A handle of the process before, which was opened by this request.
    pub fn note_earlier(&self, record: HandleRecord) {
        self.opened.lock().insert(record.unique, record);
    }

    /// A handle that the process before opened for the same request: nobody got it.
    pub fn superseded(&self, reply: &Reply) -> Option<HandleRecord> {
        if reply.is_resent() { self.opened.lock().remove(&reply.unique()) } else { None }
    }

    /// Enters where a write goes that appends, before its bytes are written: sent again, it goes there once more.
    pub fn note_append(&self, reply: &Reply, offset: u64) -> Option<Slot> {
        let record = AppendRecord { unique: reply.unique(), offset };
        self.journal.as_ref()?.appends.put(&record.encode_to_vec())
    }

    /// A write of the process before.
    pub fn note_earlier_append(&self, slot: Slot, record: AppendRecord) {
        self.appended.lock().insert(record.unique, (slot, record.offset));
    }

    /// Where the process before has begun the same write, or was about to.
    pub fn begun_append(&self, reply: &Reply) -> Option<(Slot, u64)> {
        if reply.is_resent() { self.appended.lock().remove(&reply.unique()) } else { None }
    }

    /// The kernel has asked again for whatever it had no answer to.
    pub fn forget_earlier(&self) {
        self.opened.lock().clear();
        self.appended.lock().clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn positions_have_cookies_and_those_of_older_processes_are_counted() {
        let record = PositionRecord::new(7, vec![9, 4], vec![b"a".into(), b"b".into()]);
        assert_eq!(record.given().collect::<Vec<_>>(), [(9, &b"a"[..]), (4, b"b")]);
        let older = PositionRecord { cookies: vec![], ..record };
        assert_eq!(older.given().collect::<Vec<_>>(), [(9, &b"a"[..]), (10, b"b")]);
    }
}
