//! What a process that serves a mount leaves to the one after it, in the client's [`Journal`]: how the mount was made,
//! which handles the kernel has, where readers of directories are, and what was locked through which handle.
//!
//! Node ids are the inodes of the namespace, or say which one they stand for, so nothing is to be kept of what the
//! kernel merely knows.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use cavern_client::Journal;
use cavern_client::journal::Slot;
use cavern_conf::schema::{self, Choice};
use cavern_proto::journal::{AppendRecord, HandleRecord, LockRecord, MountRecord, PositionRecord};
use parking_lot::Mutex;
use prost::Message as _;

use crate::kernel::abi::ROOT_NODE;
use crate::kernel::{Agreement, Mount, Reply};
use crate::root::Root;

/// How the mount was made.
pub fn record_of_mount(fuse: &schema::Fuse, agreement: Agreement, mount: &Mount, root: &Root) -> MountRecord {
    MountRecord {
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

/// Reads what the process before has left of its mount; `None` when it had not mounted yet.
pub fn recorded_mount(journal: &Journal) -> Option<MountRecord> {
    let (slot, record) = journal.mount.take_all().pop()?;
    std::mem::forget(slot);
    MountRecord::decode(&record[..]).ok()
}

/// What a configuration that has changed since says otherwise is as it was when the mount was made.
pub fn apply_mount(mount: &MountRecord, fuse: &mut schema::Fuse) {
    let (no_open, xattrs) = (mount.no_open, !mount.no_xattrs);
    let is_as_asked = (&fuse.path, fuse.posix_acl, fuse.direct) == (&mount.path, mount.posix_acl, mount.direct)
        && fuse.no_open.or(no_open) == no_open
        && fuse.xattrs.or(xattrs) == xattrs;
    fuse.mount_point = PathBuf::from(&mount.mount_point);
    fuse.path.clone_from(&mount.path);
    (fuse.posix_acl, fuse.direct) = (mount.posix_acl, mount.direct);
    (fuse.no_open, fuse.xattrs) = (no_open.into(), xattrs.into());
    if !is_as_asked {
        tracing::warn!(
            "fuse.path, no_open, xattrs, posix_acl or direct have changed in the configuration: they are what \
             they were until the mount is made anew"
        );
    }
}

/// What a reader of a directory was given, as the journal has it.
pub fn position_record(number: u64, cookies: Vec<u64>, names: Vec<Vec<u8>>) -> PositionRecord {
    PositionRecord { number, names: names.into_iter().map(Into::into).collect(), cookies }
}

/// The names of a position with their cookies.
pub fn given(position: &PositionRecord) -> impl Iterator<Item = (u64, &[u8])> {
    position.cookies.iter().copied().zip(position.names.iter().map(|name| &name[..]))
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
    fn positions_have_names_with_their_cookies() {
        let record = position_record(7, vec![9, 4], vec![b"a".into(), b"b".into()]);
        assert_eq!(given(&record).collect::<Vec<_>>(), [(9, &b"a"[..]), (4, b"b")]);
    }
}
