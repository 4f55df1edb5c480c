//! Files that the kernel reads by itself (`fuse.passthrough`).
//!
//! An object that is one complete block on this host is opened with a *backing*: the file of the block, registered with
//! the kernel. So is a file of an fs-mode mount with `fuse.passthrough_fs_mode`, by rules of its own: see
//! [`open_nodes`](super::open_nodes).
//! Registering costs more than a read of a small file does, so a backing stays for as long as the worker has the block
//! and somebody uses it, and all opens use it.
//!
//! The kernel holds a registered file until it is given back, whatever becomes of this process. So each is in the
//! journal, and the process that goes on gives back what no handle has.
//!
//! A file system that is stacked on another one is refused: what is mounted there is remembered, since a worker may
//! have other directories, too.

use std::collections::{HashMap, HashSet};
use std::os::fd::{AsRawFd as _, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use cavern_client::File;
use cavern_client::journal::Slot;
use cavern_conf::schema::{self, Choice};
use parking_lot::Mutex;
use quick_cache::sync::Cache;
use rustix::fs::{AtFlags, StatxFlags, statx};
use rustix::io::Errno;
use rustix::thread::{CapabilitySet, capabilities};
use tracing::{debug, warn};

use crate::kernel::{Backing, Connection, Reply};
use crate::mount_journal::MountJournal;

/// `STATX_MNT_ID_UNIQUE`: the number of a mount that no later one gets. In every kernel that has passthrough.
const MOUNT_ID: StatxFlags = StatxFlags::from_bits_retain(0x4000);
/// Mounts that are remembered as refused: more than a worker has directories.
const REFUSED_MAX: usize = 256;
/// Files that are remembered as locked.
const LOCKED_MAX: usize = 100_000;

/// Whether the kernel is to be asked for it.
pub fn is_asked(fuse: &schema::Fuse) -> bool {
    let may = || capabilities(None).is_ok_and(|sets| sets.effective.contains(CapabilitySet::SYS_ADMIN));
    let is_left_out = fuse.direct || fuse.no_open == Choice::On || fuse.passthrough == Choice::Off;
    !is_left_out && (fuse.passthrough == Choice::On || may())
}

/// A file that is registered with the kernel, until nobody has this any more.
#[derive(Debug)]
pub struct BackingFile {
    // Given back before it is forgotten.
    backing: Backing,
    /// What a process after this one finds of it.
    _noted: Option<Slot>,
}

impl BackingFile {
    fn new(backing: Backing, noted: Option<Slot>) -> Arc<Self> {
        Arc::new(Self { backing, _noted: noted })
    }

    pub fn number(&self) -> u32 {
        self.backing.number()
    }

    pub fn backing(&self) -> &Backing {
        &self.backing
    }
}

/// The files that are registered with the kernel.
#[derive(Debug)]
pub struct Passthrough {
    /// The configuration says so, rather than that nothing prevents it.
    is_demanded: bool,
    /// Until the kernel says that this process may not.
    is_on: AtomicBool,
    /// Files of fs-mode mounts are to be read so, too, by whoever can.
    pub for_fs_mode: bool,
    /// Those of these that somebody has locked, or asked for that: who has one locked counts on what he reads.
    locked: Cache<u64, ()>,
    /// Mounts whose files the kernel does not take.
    refused: Mutex<HashSet<u64>>,
    /// What the process before had registered, until its handles are open again.
    earlier: Mutex<HashMap<u32, Arc<BackingFile>>>,
    /// Files that were registered so far.
    pub registered: AtomicU64,
    /// Opens so far whose reads the kernel serves by itself.
    pub opens: AtomicU64,
}

impl Passthrough {
    pub fn new(fuse: &schema::Fuse) -> Self {
        Self {
            is_demanded: fuse.passthrough == Choice::On,
            is_on: AtomicBool::new(is_asked(fuse)),
            for_fs_mode: fuse.passthrough_fs_mode,
            locked: Cache::new(LOCKED_MAX),
            refused: Mutex::default(),
            earlier: Mutex::default(),
            registered: AtomicU64::new(0),
            opens: AtomicU64::new(0),
        }
    }

    /// Whether a file of an fs-mode mount may be read so.
    pub fn may_have(&self, inode: u64) -> bool {
        self.for_fs_mode && self.is_on.load(Relaxed) && !self.locked.contains_key(&inode)
    }

    /// Somebody locks a file.
    pub fn note_locked(&self, inode: u64) {
        if self.for_fs_mode {
            self.locked.insert(inode, ());
        }
    }

    /// The file's one complete local block, as the kernel knows it.
    pub fn backing_of(&self, file: &File, reply: &Reply, mount_journal: &MountJournal) -> Option<Arc<BackingFile>> {
        if !self.is_on.load(Relaxed) {
            return None;
        }
        file.with_local_descriptor(|descriptor| self.register(descriptor, reply, mount_journal))
    }

    /// Registers a file with the kernel, if that takes it.
    pub fn register(
        &self,
        descriptor: BorrowedFd<'_>,
        reply: &Reply,
        mount_journal: &MountJournal,
    ) -> Option<BackingFile> {
        if self.is_refused(descriptor) {
            return None;
        }
        match reply.register(descriptor) {
            Ok(backing) => {
                let noted = mount_journal.note_backing(backing.number()).ok()?;
                self.registered.fetch_add(1, Relaxed);
                Some(BackingFile { backing, _noted: noted })
            }
            // No room for one more: perhaps for the next.
            Err(Errno::NOMEM | Errno::NOSPC) => None,
            Err(Errno::LOOP | Errno::INVAL | Errno::OPNOTSUPP) => {
                self.refuse(descriptor);
                None
            }
            Err(cause) => {
                if self.is_on.swap(false, Relaxed) {
                    self.say(format_args!("the kernel refuses passthrough ({cause}): reads go through cv fuse"));
                }
                None
            }
        }
    }

    fn is_refused(&self, descriptor: BorrowedFd<'_>) -> bool {
        let refused = self.refused.lock();
        !refused.is_empty() && refused.contains(&mount_of(descriptor))
    }

    fn refuse(&self, descriptor: BorrowedFd<'_>) {
        let mut refused = self.refused.lock();
        if refused.len() < REFUSED_MAX && refused.insert(mount_of(descriptor)) {
            drop(refused);
            let path = std::fs::read_link(format!("/proc/self/fd/{}", descriptor.as_raw_fd())).unwrap_or_default();
            self.say(format_args!(
                "the kernel does not read {} by itself, nor anything on that file system, which is stacked on another \
                 one: reads go through cv fuse",
                path.display()
            ));
        }
    }

    fn say(&self, what: std::fmt::Arguments<'_>) {
        if self.is_demanded {
            warn!("{what}");
        } else {
            debug!("{what}");
        }
    }

    /// Takes over what the process before had registered: `noted`, and those of `handles` of versions that noted none.
    pub fn inherit(&self, noted: Vec<(Slot, u32)>, handles: impl Iterator<Item = u32>, connection: &Connection) {
        let mut earlier = self.earlier.lock();
        for (slot, number) in noted {
            earlier.insert(number, BackingFile::new(connection.backing(number), Some(slot)));
        }
        for number in handles {
            earlier.entry(number).or_insert_with(|| BackingFile::new(connection.backing(number), None));
        }
    }

    /// One of these.
    pub fn inherited(&self, number: u32) -> Option<Arc<BackingFile>> {
        self.earlier.lock().get(&number).cloned()
    }

    /// Gives back what no handle has. *Blocking*, as closing the last descriptor of an unlinked file is.
    pub fn give_back(&self) {
        let earlier = std::mem::take(&mut *self.earlier.lock());
        drop(earlier);
    }
}

/// Which mount a file is on; 0 where the kernel does not say.
fn mount_of(descriptor: BorrowedFd<'_>) -> u64 {
    statx(descriptor, c"", AtFlags::EMPTY_PATH, MOUNT_ID).map_or(0, |status| status.stx_mnt_id)
}
