//! The content of files of fs-mode mounts: read and written at the workers, and made known to the master.
//!
//! A file that is open here has one [`FsFile`], whoever has it open. What is written goes to every worker of its block
//! at once, through a descriptor where the worker is on this host, else behind the writer (`write_behind`); new blocks,
//! and a new length, are committed to the master when a file is flushed, synced, or given other attributes, and every
//! few seconds while it stays open ([`commit`](FsFile::commit)). `layout` knows the file without I/O, `block` one block
//! at its workers, `blocks` opens them, `closed` is what stays known when nobody has the file open, `origin` is about
//! what no block has, `kernel_reads` about what a kernel reads by itself,
//! `read`, `write`, `append`, `copy` and `set_attributes` do what their names say.
//!
//! A write that overlaps another client's cut of the same file either comes before it or after it.

mod append;
mod beside;
mod block;
mod blocks;
mod closed;
mod commit;
mod copy;
mod grants;
mod group_commit;
mod kernel_reads;
mod layout;
mod origin;
mod page_versions;
mod read;
mod recovery;
mod set_attributes;
mod sync;
mod write;
mod write_back;
mod write_behind;

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use cavern_conf::{host, schema};
use cavern_net::WorkerPool;
use cavern_proto::master::{Attr, User};
use parking_lot::Mutex;
use quick_cache::sync::Cache;
use tokio::runtime::Handle;
use tokio::sync::RwLock;

use crate::cached_copies::Copies;
use crate::error::ClientError;
use crate::memory::MemoryShare;
use crate::metadata::{Metadata, Node, OpenInode};
use crate::mounts::MountView;
use crate::read::{BlockReader, Files};
use crate::stages::Stage;
use crate::stats::Stats;
pub use append::FileEnd;
use beside::Readings;
use block::OpenBlock;
use blocks::block_name;
use closed::{ClosedFiles, Reopened};
use grants::BlockGrants;
use group_commit::Rounds;
pub use kernel_reads::{KernelBlock, KernelReads};
use layout::{EventHistory, Layout};
use origin::OpenOrigin;
use page_versions::PageVersions;
pub use read::{ReadAtHand, Seek};
use recovery::Noted;
pub use sync::LocalSync;
use write_behind::WriteBehind;
pub(crate) use write_behind::WriteBehindOutcome;

/// Closed files of which is remembered that they are on disks.
const ON_DISKS_OF: usize = 100_000;

/// Why something that was written is lost.
const DROPPED: &str = "its blocks were dropped when the session had ended, or others had made them elsewhere before";

/// As much as ext4 has it.
pub const FILE_BYTES_MAX: u64 = 1 << 44;

/// The contents that are open in this process. Cheap to clone.
#[derive(Clone)]
pub struct Contents {
    shared: Arc<Shared>,
}

struct Shared {
    metadata: Metadata,
    pool: Arc<WorkerPool>,
    /// The way to objects.
    files: Files,
    stats: Arc<Stats>,
    runtime: Handle,
    /// What may be on its way to workers behind its writers.
    behind: MemoryShare,
    /// One read or write, every attempt included.
    timeout: Duration,
    /// One attempt at one worker.
    worker_timeout: Duration,
    /// By inode.
    open: Mutex<HashMap<u64, Weak<FsFile>>>,
    pages: PageVersions,
    /// Of closed files, by inode: the version of the content that is on disks.
    on_disks: Cache<u64, u64>,
    closed: Arc<ClosedFiles>,
    readings: Readings,
    grants: BlockGrants,
    /// How many pieces were written behind.
    pieces: AtomicU64,
}

/// The content of one open file, shared by all who have it open here. What is not committed when the last of them drops
/// it is lost: commit first.
pub struct FsFile {
    shared: Arc<Shared>,
    kept: OpenInode,
    inode: u64,
    /// It was there when it was opened: by the first who has it open, or by another one since.
    was_there: AtomicBool,
    mount: Arc<MountView>,
    state: Mutex<State>,
    noted: Mutex<Noted>,
    /// Who was the last to open it, and to open it to be written, where the mount limits users.
    opener: Mutex<Option<User>>,
    writer: Mutex<Option<User>>,
    /// The master drops none of its blocks.
    held: AtomicBool,
    /// A commit without a hold has begun: the master may know blocks. Set while nobody writes.
    committed_unheld: AtomicBool,
    /// Writes share it; a cut has it alone.
    gate: RwLock<()>,
    behind: WriteBehind,
    /// Reads over the network, and what was read ahead.
    reader: BlockReader,
    copies: Copies,
    /// Handles through which a kernel reads it by itself.
    kernel_reads: AtomicU32,
    /// Its first block, as long as it does not need one.
    granted: Mutex<Option<OpenBlock>>,
    appending: Arc<tokio::sync::Mutex<()>>,
    opening: tokio::sync::Mutex<()>,
    committing: tokio::sync::Mutex<()>,
    syncs: Rounds,
}

#[derive(Default)]
struct State {
    /// `None` until it is needed.
    layout: Option<Layout>,
    /// How often somebody else had changed the inode when the layout was asked for.
    seen: u64,
    /// The gaps in the events of the inode by then.
    gaps: Option<u64>,
    /// See `Layout.ends_marked` of the master.
    ends_marked: bool,
    blocks: HashMap<u32, Arc<OpenBlock>>,
    origin: Option<OpenOrigin>,
    /// Why something that was written is lost; returned once.
    lost: Option<String>,
}

/// What of a file's attributes an answer of the master does not tell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UncommittedAttr {
    /// Bytes.
    pub size: u64,
    /// When it was written last, in nanoseconds since the epoch.
    pub written_ns: i64,
    /// Bytes that it takes; `None` where nobody noted that of all its blocks.
    pub allocated: Option<u64>,
}

impl Contents {
    pub(crate) fn new(
        metadata: Metadata,
        files: Files,
        pool: Arc<WorkerPool>,
        stats: Arc<Stats>,
        conf: &schema::Client,
    ) -> Self {
        let behind = files.memory().share(conf.write_behind.bytes());
        let closed = Arc::new(ClosedFiles::new(files.block_files()));
        let known = closed.clone();
        metadata.on_changed_contents(move |changed| known.changed(changed));
        let shared = Shared {
            metadata,
            pool,
            files,
            stats,
            runtime: Handle::current(),
            behind,
            timeout: conf.read_timeout.get(),
            worker_timeout: conf.worker_timeout.get(),
            open: Mutex::default(),
            pages: PageVersions::default(),
            on_disks: Cache::new(ON_DISKS_OF),
            closed,
            readings: Readings::default(),
            grants: BlockGrants::default(),
            pieces: AtomicU64::new(0),
        };
        Self { shared: Arc::new(shared) }
    }

    /// The content of a file that is open here.
    pub fn get(&self, inode: u64) -> Option<Arc<FsFile>> {
        self.shared.open.lock().get(&inode).and_then(Weak::upgrade)
    }

    /// Those of which something was written that the master does not know.
    pub fn uncommitted(&self) -> Vec<Arc<FsFile>> {
        let open: Vec<_> = self.shared.open.lock().values().filter_map(Weak::upgrade).collect();
        open.into_iter().filter(|content| !content.is_committed()).collect()
    }

    /// Opens a file without I/O; `None` when the master must be asked whether it is still there: use `open`.
    pub fn open_cached(&self, node: &Node) -> Option<Arc<FsFile>> {
        if let Some(content) = self.get(node.inode) {
            return Some(content.opened_again());
        }
        let kept = self.shared.metadata.keep_open_cached(node)?;
        self.enter(node, kept, None).ok()
    }

    /// Opens a file, which stays until the content is dropped, whatever becomes of its names. `Stale` when it is gone.
    pub async fn open(&self, node: &Node) -> Result<Arc<FsFile>, ClientError> {
        if let Some(content) = self.open_cached(node) {
            return Ok(content);
        }
        let kept = self.shared.metadata.keep_open(node).await?;
        self.enter(node, kept, None)
    }

    /// Opens a file that has just been made here, of which nobody has written anything. Where it was made by a user by
    /// whom that was judged, the session holds it, and he may write to it.
    pub async fn open_new(&self, node: &Node, attr: &Attr, user: Option<&User>) -> Result<Arc<FsFile>, ClientError> {
        let kept = match self.shared.metadata.keep_open_cached(node) {
            Some(kept) => kept,
            None => self.shared.metadata.keep_open(node).await?,
        };
        if user.is_some() {
            kept.note_held();
        }
        let content = self.enter(node, kept, Some(Layout::without_blocks(attr)))?;
        content.is_written_by(user);
        if let Some(granted) = self.shared.grants.take(node.inode, content.mount.id()) {
            *content.granted.lock() = Some(granted);
        }
        self.prepare_blocks(&content.mount);
        Ok(content)
    }

    /// The same of a file that was made without a name: it is gone with the last who has it open, unless it gets a
    /// name.
    pub fn open_nameless(&self, node: &Node, attr: &Attr, user: Option<&User>) -> Result<Arc<FsFile>, ClientError> {
        let kept = self.shared.metadata.keep_nameless(node.inode);
        let content = self.enter(node, kept, Some(Layout::without_blocks(attr)))?;
        content.is_written_by(user);
        Ok(content)
    }

    fn enter(&self, node: &Node, kept: OpenInode, layout: Option<Layout>) -> Result<Arc<FsFile>, ClientError> {
        if node.is_directory() {
            return Err(ClientError::IsADirectory(node.to_string()));
        }
        let mount = node.mount.clone().filter(|mount| mount.is_fs_mode());
        let mount = mount.ok_or_else(|| ClientError::Invalid(format!("{node} is no file of an fs-mode mount")))?;
        let (seen, gaps, was_there) = (kept.changes(), kept.gaps(), layout.is_none());
        let mut open = self.shared.open.lock();
        // Another may have been faster.
        if let Some(content) = open.get(&node.inode).and_then(Weak::upgrade) {
            return Ok(content.opened_again());
        }
        let mut state = State { layout, seen, gaps, ..State::default() };
        // After the changes of the inode are counted: see `content_changed`.
        if was_there && kept.is_watched() {
            let name = |index, generation| block_name(&self.shared.pool, &mount, (node.inode, generation, index));
            if let Some(Reopened { layout, ends_marked, blocks }) = self.shared.closed.take(node.inode, name) {
                (state.layout, state.ends_marked) = (Some(layout), ends_marked);
                state.blocks = blocks.into_iter().map(|(index, block)| (index, Arc::new(block))).collect();
            }
        }
        let content = Arc::new(FsFile {
            shared: self.shared.clone(),
            kept,
            inode: node.inode,
            was_there: AtomicBool::new(was_there),
            mount,
            state: Mutex::new(state),
            noted: Mutex::default(),
            opener: Mutex::default(),
            writer: Mutex::default(),
            held: AtomicBool::new(false),
            committed_unheld: AtomicBool::new(false),
            gate: RwLock::new(()),
            behind: WriteBehind::default(),
            reader: self.shared.files.reader(),
            copies: Copies::default(),
            kernel_reads: AtomicU32::new(0),
            granted: Mutex::default(),
            appending: Arc::default(),
            opening: tokio::sync::Mutex::new(()),
            committing: tokio::sync::Mutex::new(()),
            syncs: Rounds::default(),
        });
        open.insert(node.inode, Arc::downgrade(&content));
        self.shared.closed.others_open(open.len());
        Ok(content)
    }
}

impl Drop for FsFile {
    fn drop(&mut self) {
        if self.granted.get_mut().is_some() {
            self.shared.grants.unused(self.mount.id());
        }
        match self.state.get_mut().layout.as_ref().map(Layout::version_on_disks) {
            Some(Some(version)) => self.shared.on_disks.insert(self.inode, version),
            Some(None) => drop(self.shared.on_disks.remove(&self.inode)),
            None => {}
        }
        self.leave();
    }
}

impl FsFile {
    pub fn inode(&self) -> u64 {
        self.inode
    }

    /// The kernel tells of a close some time after it: who made the file may seem to have it open still.
    fn opened_again(self: Arc<Self>) -> Arc<Self> {
        self.was_there.store(true, Ordering::Release);
        self
    }

    /// By whom the master judges questions about it from now on, where the mount limits users.
    pub fn is_opened_by(&self, user: &User) {
        *self.opener.lock() = Some(user.clone());
    }

    fn is_written_by(&self, user: Option<&User>) {
        if let Some(user) = user {
            self.is_opened_by(user);
            *self.writer.lock() = Some(user.clone());
        }
    }

    /// Who keeps what was read.
    pub fn copies(&self) -> &Copies {
        &self.copies
    }

    /// What an answer of the master does not tell of the file's attributes, that has this version of it.
    pub fn unsettled(&self, version: u64) -> Option<UncommittedAttr> {
        let (size, written_ns, allocated, blocks) = {
            let state = self.state.lock();
            let layout = state.layout.as_ref()?;
            let behind = self.behind.end();
            let written_ns = behind.map(|_| host::wall_ns()).or_else(|| layout.written_since(version))?;
            let (allocated, counted) = layout.allocated(self.block_size()).unzip();
            let open = |(index, counted)| Some((counted, state.blocks.get(&index)?.clone()));
            let blocks: Vec<_> = counted.unwrap_or_default().into_iter().filter_map(open).collect();
            (layout.size().max(behind.unwrap_or(0)), written_ns, allocated, blocks)
        };
        let allocated = allocated.map(|sum| {
            blocks.iter().fold(sum, |sum, (counted, open)| {
                let now = open.allocated().map_or(*counted, |bytes| bytes.min(self.block_size()));
                sum.saturating_sub(*counted) + now
            })
        });
        Some(UncommittedAttr { size, written_ns, allocated })
    }

    /// Where the file ends, with what is on its way to workers.
    fn end_in(&self, layout: &Layout) -> u64 {
        layout.size().max(self.behind.end().unwrap_or(0))
    }

    /// Whether the master knows all that was written here.
    pub fn is_committed(&self) -> bool {
        let state = self.state.lock();
        let is_settled = state.lost.is_none() && state.layout.as_ref().is_none_or(Layout::is_committed);
        is_settled && self.behind.is_drained()
    }

    /// Whether something that was answered about the file is lost, and nobody was told.
    pub fn has_loss(&self) -> bool {
        self.shared.metadata.has_loss(self.inode)
    }

    /// As [`commit`](Self::commit), for a close: that is told what is lost, too.
    ///
    /// # Errors
    /// Those of [`commit`](Self::commit), and [`Metadata::take_loss`].
    pub async fn flush(self: &Arc<Self>) -> Result<(), ClientError> {
        self.commit().await?;
        self.stay_open();
        self.shared.metadata.take_loss(self.inode)
    }

    /// What was written through an open like any other stays open for a while; if the process after this one finds it,
    /// that is, and lets go of it.
    fn stay_open(self: &Arc<Self>) {
        let is_noted = || self.state.lock().layout.as_ref().is_some_and(|layout| !layout.is_settled());
        if self.was_there.load(Ordering::Acquire)
            && self.is_held()
            && self.shared.metadata.journal().is_some()
            && is_noted()
        {
            self.shared.metadata.stay_open(self.inode, self.clone());
        }
    }

    /// Whether a kernel may keep the pages that it has when it opens the file, known by this node.
    pub fn keeps_pages(&self, node: &Node) -> bool {
        let committed = self.with_layout(|layout, _| layout.version());
        // Either may arrive first. They grow.
        let version = committed.max(node.posix().map(|posix| posix.version));
        let keeps = version.is_some_and(|version| self.shared.pages.opened(self.inode, version));
        if !keeps {
            self.reader.invalidate();
        }
        keeps
    }

    fn block_size(&self) -> u64 {
        self.mount.block_size()
    }

    /// Looks at the layout, if it is known and nobody else has changed the file since.
    fn with_layout<T>(&self, look: impl FnOnce(&mut Layout, &mut HashMap<u32, Arc<OpenBlock>>) -> T) -> Option<T> {
        let mut state = self.state.lock();
        let State { layout, seen, blocks, .. } = &mut *state;
        let layout = layout.as_mut().filter(|_| *seen == self.kept.changes())?;
        Some(look(layout, blocks))
    }

    /// The same, asking the master where needed. While no master answers, what was known goes on being used.
    async fn use_layout<T>(
        &self,
        look: impl FnOnce(&mut Layout, &mut HashMap<u32, Arc<OpenBlock>>) -> T,
    ) -> Result<T, ClientError> {
        if !self.is_current() {
            self.load().await?;
        }
        let mut state = self.state.lock();
        let State { layout, blocks, .. } = &mut *state;
        let layout = layout.as_mut().ok_or_else(|| ClientError::Stale(format!("inode {}", self.inode)))?;
        Ok(look(layout, blocks))
    }

    fn is_current(&self) -> bool {
        let state = self.state.lock();
        state.layout.is_some() && state.seen == self.kept.changes()
    }

    /// Asks the master which blocks the file has, after the commit in flight, if there is one.
    async fn load(&self) -> Result<(), ClientError> {
        let _asked = Stage::Metadata.begin();
        let _one = self.committing.lock().await;
        if self.is_current() { Ok(()) } else { self.load_now().await }
    }

    async fn load_now(&self) -> Result<(), ClientError> {
        let loaded = self.load_layout().await;
        self.note();
        loaded
    }

    async fn load_layout(&self) -> Result<(), ClientError> {
        // What changes while the master answers is asked again.
        let (seen, gaps) = (self.kept.changes(), self.kept.gaps());
        self.shared.stats.layout_misses.inc();
        let is_first = self.was_there.load(Ordering::Acquire) && self.state.lock().layout.is_none();
        let beside = if is_first { self.beside() } else { None };
        let inodes = beside.as_ref().map_or(&[][..], |beside| &beside.inodes);
        let opener = self.opener.lock().clone();
        let answer = self.shared.metadata.layout(self.inode, inodes, opener.as_ref()).await;
        let mut state = self.state.lock();
        let mut answer = match answer {
            Err(error) if error.is_master_silent() && state.layout.is_some() => return Ok(()),
            answer => answer?,
        };
        if let Some(beside) = beside {
            self.found_beside(beside, std::mem::take(&mut answer.beside));
        }
        if answer.block_size != self.block_size() {
            let reason = format!("{}: the master has blocks of another size", self.inode);
            return Err(ClientError::Invalid(reason));
        }
        let fresh = Layout::new(&answer.attr.unwrap_or_default(), answer.extents, answer.origin);
        let history =
            if gaps.is_some() && gaps == state.gaps { EventHistory::Complete } else { EventHistory::MayHaveGaps };
        let State { layout, blocks, origin, lost: loss, ends_marked, .. } = &mut *state;
        *ends_marked = answer.ends_marked;
        let is_first = layout.is_none();
        let layout = layout.get_or_insert_with(Layout::default);
        let before = layout.generation();
        let lost = layout.rebase(fresh, history);
        if is_first && self.shared.on_disks.get(&self.inode) == Some(layout.version()) {
            layout.is_on_disks();
        }
        if !layout.origin().zip(origin.as_ref()).is_some_and(|(now, open)| open.is(now)) {
            *origin = None;
        }
        if !lost.is_empty() {
            let blocks = lost.len();
            // Who cuts a file wants nothing of what was written to it before.
            if layout.is_cut_since(before) {
                tracing::info!(inode = self.inode, blocks, "another client has cut the file that is written here");
            } else {
                tracing::warn!(inode = self.inode, blocks, "{DROPPED}: what was written here is gone");
                *loss = Some(DROPPED.to_owned());
            }
        }
        blocks.retain(|index, open| {
            layout.block(*index).is_some_and(|known| known.is_at(open.generation, &open.replicas))
        });
        // Before anybody takes the layout for current: what was asked for before the change is not of it.
        let ended = self.reader.end_version();
        (state.seen, state.gaps) = (seen, gaps);
        drop(state);
        drop(ended);
        Ok(())
    }
}
