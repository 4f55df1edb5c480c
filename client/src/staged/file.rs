//! One file that is being written: what is known of it, and what it looks like. `layout` says where its bytes are,
//! `write` changes them, `read` reads them, and `disk` has those that are staged.
//!
//! Writes share the gate, and what must find the bytes at rest has it alone: an upload, or giving staged bytes back to
//! the file system.

use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use bytes::Bytes;
use cavern_conf::host;
use cavern_posix::mode::MODE_BITS;
use cavern_proto::master::{Attr, Entry, Kind, OwnAttributes};
use cavern_ufs::ObjectAttributes;
use parking_lot::Mutex;
use tokio::sync::RwLock;

use super::Shared;
use super::attributes::attributes_of;
use super::layout::{Base, StagedLayout};
use super::upload::PartUpload;
use super::writers::Writers;
use crate::metadata::Node;
use crate::mounts::{MountView, ObjectVersion};
use crate::page_cache_hint::PageCacheHint;
use crate::read::BlockReader;
use crate::stats::InFlightGauge;

/// A file of a cache-mode mount that is being written. Its inode is this process's own: the namespace has none for it
/// until the bucket has its bytes, and then another.
pub struct StagedFile {
    pub(super) shared: Arc<Shared>,
    pub(super) inode: u64,
    pub(super) mount: Arc<MountView>,
    pub(super) state: Mutex<State>,
    /// Writes share it.
    pub(super) gate: RwLock<()>,
    /// Held for reading by whoever sends a part ahead.
    pub(super) sending: Arc<RwLock<()>>,
    /// Made for the first byte.
    pub(super) file: Mutex<Option<Arc<File>>>,
    pub(super) handles: AtomicU32,
    pub(super) reader: BlockReader,
    page_cache_hint: PageCacheHint,
    _counted: InFlightGauge,
}

pub(super) struct State {
    pub place: StagedLocation,
    pub layout: StagedLayout,
    /// When it was written last, in nanoseconds since the epoch.
    pub written_ns: i64,
    /// What the object will keep beside its bytes, in mounts that have it keep something. An mtime that was set goes
    /// with the next write.
    pub attributes: Option<ObjectAttributes>,
    /// Nothing may be under the key: it was made so (`O_EXCL`).
    pub is_exclusive: bool,
    pub changes: u64,
    /// So many changes the bucket has, and the master knows of.
    pub committed: u64,
    /// The namespace's inode of what was committed last, and those of later versions are larger. 0 when others have
    /// written it since, the largest when it is not known.
    pub known_as: u64,
    /// The bucket did not take it as it is after so many changes.
    pub failed: Option<u64>,
    pub writers: Writers,
    /// Its name was removed: nothing of it reaches the bucket any more.
    pub is_removed: bool,
    pub upload: PartUpload,
}

/// Where it will be.
#[derive(Clone, Debug)]
pub(super) struct StagedLocation {
    pub parent: u64,
    pub name: Box<[u8]>,
    /// Key prefix of the directory.
    pub location: Arc<str>,
}

impl StagedLocation {
    pub fn key(&self) -> String {
        format!("{}{}", self.location, String::from_utf8_lossy(&self.name))
    }
}

impl StagedFile {
    pub(super) fn new(
        shared: Arc<Shared>,
        inode: u64,
        mount: Arc<MountView>,
        place: StagedLocation,
        base: Option<Base>,
    ) -> Self {
        let attributes = base.as_ref().and_then(|base| attributes_of(base.file.node()));
        let written_ns = base.as_ref().map_or_else(host::wall_ns, |base| base.file.node().mtime_ns);
        let known_as = base.as_ref().map_or(0, |base| base.file.node().inode);
        // A new file is one to be written, even without a byte.
        let changes = u64::from(base.is_none());
        let state = State {
            place,
            layout: StagedLayout::new(base),
            written_ns,
            attributes,
            is_exclusive: false,
            changes,
            committed: 0,
            known_as,
            failed: None,
            writers: Writers::default(),
            is_removed: false,
            upload: PartUpload::default(),
        };
        Self {
            reader: shared.files.reader(),
            page_cache_hint: PageCacheHint::default(),
            _counted: InFlightGauge::new(&shared.stats.staged_files),
            shared,
            inode,
            mount,
            state: Mutex::new(state),
            gate: RwLock::new(()),
            sending: Arc::default(),
            file: Mutex::new(None),
            handles: AtomicU32::new(0),
        }
    }

    pub fn inode(&self) -> u64 {
        self.inode
    }

    pub fn mount(&self) -> &MountView {
        &self.mount
    }

    /// Who keeps what was read.
    pub fn page_cache_hint(&self) -> &PageCacheHint {
        &self.page_cache_hint
    }

    /// Whether the bucket lacks something of it.
    pub fn is_dirty(&self) -> bool {
        let state = self.state.lock();
        !state.is_removed && state.changes != state.committed
    }

    /// Whether a close by somebody is to have the bucket take it.
    pub fn is_flushed_by(&self, closer: u64) -> bool {
        self.is_dirty() && self.state.lock().writers.may_be(closer)
    }

    /// Whether the bucket was asked to take it as it is, and did not.
    pub fn has_failed(&self) -> bool {
        let state = self.state.lock();
        state.failed == Some(state.changes)
    }

    /// Whether a node of the namespace is a later version than what was committed here.
    pub(super) fn is_older_than(&self, node: &Node) -> bool {
        self.state.lock().known_as < node.inode
    }

    /// Whether anybody here has it open.
    pub fn is_open(&self) -> bool {
        self.handles.load(Ordering::Acquire) > 0
    }

    /// It as programs see it now.
    pub fn node(&self) -> Arc<Node> {
        let state = self.state.lock();
        let own = state.attributes.map_or_else(Attr::default, |own| Attr {
            mode: own.mode & MODE_BITS,
            uid: own.uid,
            gid: own.gid,
            own: OwnAttributes::Stored.into(),
            ..Attr::default()
        });
        let set_ns = state.attributes.and_then(|own| own.mtime_ns);
        let attr = Attr {
            inode: self.inode,
            kind: Kind::File.into(),
            size: state.layout.size,
            mtime_ns: set_ns.unwrap_or(state.written_ns),
            ctime_ns: state.written_ns,
            atime_ns: state.written_ns,
            nlink: 1,
            ..own
        };
        let StagedLocation { parent, name, location } = &state.place;
        let entry = Entry { name: Bytes::copy_from_slice(name), parent: *parent, ..Entry::default() };
        Arc::new(Node::new(&entry, &attr, Some(self.mount.clone()), location.clone()))
    }

    /// The key that it has, or will have.
    pub(super) fn key(&self) -> String {
        self.state.lock().place.key()
    }

    /// Its name is gone.
    pub(super) fn remove(&self) {
        self.state.lock().is_removed = true;
    }

    /// It has another name, under which the bucket has what it had under the old one.
    pub(super) fn move_to(&self, place: StagedLocation, object: ObjectVersion) {
        let mut state = self.state.lock();
        state.place = place;
        self.is_now(&mut state, object);
    }

    /// Its object has been written anew, with the same bytes and these attributes.
    pub(super) fn described(&self, object: ObjectVersion, attributes: ObjectAttributes) {
        let mut state = self.state.lock();
        state.attributes = Some(ObjectAttributes { mtime_ns: None, ..attributes });
        self.is_now(&mut state, object);
    }

    fn is_now(&self, state: &mut State, object: ObjectVersion) {
        // Parts that were sent ahead are on their way to what it was.
        state.upload.forget();
        state.known_as = u64::MAX;
        if let Some(base) = &mut state.layout.base {
            base.etag = object.etag.to_string();
            base.file = self.shared.files.open_object(base.file.node().clone(), object);
        }
    }

    /// Nothing may come to be under its key before it.
    pub(super) fn set_exclusive(&self) {
        self.state.lock().is_exclusive = true;
    }
}

impl Drop for StagedFile {
    fn drop(&mut self) {
        self.shared.room.give(self.state.get_mut().layout.staged.remove(0..u64::MAX));
    }
}

impl State {
    pub(super) fn changed(&mut self) {
        self.changes += 1;
        self.written_ns = host::wall_ns();
        if let Some(attributes) = &mut self.attributes {
            attributes.mtime_ns = None;
        }
    }
}
