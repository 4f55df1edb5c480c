//! The content of one open file: what is known of it, and when the master is asked.
//!
//! What is known is one [`State`] under one lock, which is held across no I/O. It is *unknown* until it is needed;
//! *current* while nobody else has changed the inode since it was asked for; else *outdated*, and the master is asked
//! before the next look ([`FsFile::use_known`]), but goes on being used while no master answers. What was written here
//! lies over it until it is committed ([`Layout`]). Beside it, in the order in which they are taken:
//!
//! | | who has it alone | who shares it |
//! |---|---|---|
//! | `turns.syncs`, `turns.appending` | one sync, one append | |
//! | `gate` | a cut, other attributes, the fall back to the bucket | writes |
//! | `turns.opening` | who makes room in blocks | |
//! | `turns.committing` | a commit, and who asks the master for the layout | |
//! | `turns.in_place` | who waits for what was begun before a view froze blocks | what changes a block where it is |
//! | `noted` | who brings the journal up to date | |
//! | `state` | a look, a note of what was done | |
//!
//! Three have their own, and take none of these: what is written behind, what is buffered of a version, and whether the
//! master [holds](OpenRef) the file, which a write looks at first.

use std::sync::{Arc, Weak};

use cavern_conf::host;
use cavern_proto::master::User;
use parking_lot::Mutex;
use tokio::sync::RwLock;

use super::group_commit::GroupCommit;
use super::journaled_content::JournaledContent;
use super::layout::{EventHistory, Layout};
use super::open_file_table::Shared;
use super::state::{Known, OpenRef, State};
use super::write_behind::WriteBehind;
use crate::error::ClientError;
use crate::metadata::{ChangedContents, Node, OpenInode};
use crate::mounts::MountView;
use crate::page_cache_hint::PageCacheHint;
use crate::read::BlockReader;
use crate::stages::Stage;

/// Why something that was written is lost.
const DROPPED: &str = "its blocks were dropped when the session had ended, or others had made them elsewhere before";

/// The content of one open file, shared by all who have it open here. What is not committed when the last of them drops
/// it is lost: commit first.
pub struct FsFile {
    pub(super) shared: Arc<Shared>,
    pub(super) kept: OpenInode,
    pub(super) inode: u64,
    pub(super) mount: Arc<MountView>,
    pub(super) state: Mutex<State>,
    pub(super) open_ref: OpenRef,
    /// What the journal has of it. Locked before the state.
    pub(super) noted: Mutex<JournaledContent>,
    /// Writes share it; a cut has it alone.
    pub(super) gate: RwLock<()>,
    pub(super) turns: OperationLocks,
    pub(super) behind: WriteBehind,
    /// Reads over the network, and what was read ahead.
    pub(super) reader: BlockReader,
    page_cache_hint: PageCacheHint,
}

/// What is done by one at a time.
#[derive(Default)]
pub(super) struct OperationLocks {
    pub appending: Arc<tokio::sync::Mutex<()>>,
    pub opening: tokio::sync::Mutex<()>,
    pub committing: tokio::sync::Mutex<()>,
    /// Whoever changes a block where it is shares it.
    pub in_place: RwLock<()>,
    pub syncs: GroupCommit,
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

impl FsFile {
    pub(super) fn new(shared: Arc<Shared>, kept: OpenInode, inode: u64, mount: Arc<MountView>, state: State) -> Self {
        Self {
            reader: shared.files.reader(),
            shared,
            kept,
            inode,
            mount,
            state: Mutex::new(state),
            open_ref: OpenRef::default(),
            noted: Mutex::default(),
            gate: RwLock::new(()),
            turns: OperationLocks::default(),
            behind: WriteBehind::default(),
            page_cache_hint: PageCacheHint::default(),
        }
    }

    pub fn inode(&self) -> u64 {
        self.inode
    }

    pub fn mount(&self) -> &MountView {
        &self.mount
    }

    /// The kernel tells of a close some time after it: who made the file may seem to have it open still.
    pub(super) fn opened_again(self: Arc<Self>) -> Arc<Self> {
        self.state.lock().was_there = true;
        self
    }

    /// By whom the master judges questions about it from now on, where the mount limits users.
    pub fn is_opened_by(&self, user: &User) {
        self.state.lock().opener = Some(user.clone());
    }

    pub(super) fn is_written_by(&self, user: Option<&User>) {
        if let Some(user) = user {
            let mut state = self.state.lock();
            (state.opener, state.writer) = (Some(user.clone()), Some(user.clone()));
        }
    }

    /// Who keeps what was read.
    pub fn page_cache_hint(&self) -> &PageCacheHint {
        &self.page_cache_hint
    }

    /// What an answer of the master does not tell of the file's attributes, that has this version of it.
    pub fn unsettled(&self, version: u64) -> Option<UncommittedAttr> {
        let (size, written_ns, allocated, blocks) = {
            let state = self.state.lock();
            let Known { layout, blocks, .. } = state.known.as_ref()?;
            let behind = self.behind.end();
            let written_ns = behind.map(|_| host::wall_ns()).or_else(|| layout.written_since(version))?;
            let (allocated, counted) = layout.allocated(self.block_size()).unzip();
            let open = |(index, counted)| Some((counted, blocks.get(&index)?.clone()));
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
    pub(super) fn end_in(&self, layout: &Layout) -> u64 {
        layout.size().max(self.behind.end().unwrap_or(0))
    }

    /// Whether the master knows all that was written here.
    pub fn is_committed(&self) -> bool {
        let state = self.state.lock();
        let is_settled = state.lost.is_none() && state.layout().is_none_or(Layout::is_committed);
        is_settled && self.behind.is_drained()
    }

    /// Whether something that was answered about the file is lost, and nobody was told.
    pub fn has_loss(&self) -> bool {
        self.shared.metadata.has_loss(self.inode)
    }

    /// As [`commit`](Self::commit), for a close: that is told what is lost, too.
    ///
    /// # Errors
    /// Those of [`commit`](Self::commit), and [`Metadata::take_loss`](crate::Metadata::take_loss).
    pub async fn flush(self: &Arc<Self>) -> Result<(), ClientError> {
        self.commit().await?;
        self.add_to_close_grace();
        self.shared.metadata.take_loss(self.inode)
    }

    /// What was written through an open like any other stays open for a while; if the process after this one finds it,
    /// that is, and lets go of it.
    fn add_to_close_grace(self: &Arc<Self>) {
        let is_noted = || {
            let state = self.state.lock();
            state.was_there && state.layout().is_some_and(|layout| !layout.is_settled())
        };
        if self.open_ref.is_taken() && self.shared.metadata.journal().is_some() && is_noted() {
            self.shared.metadata.add_to_close_grace(self.inode, self.clone());
        }
    }

    /// Whether a kernel may keep the pages that it has when it opens the file, known by this node.
    pub fn keeps_pages(&self, node: &Node) -> bool {
        let committed = self.with_known(|known| known.layout.version());
        // Either may arrive first. They grow.
        let version = committed.max(node.posix().map(|posix| posix.version));
        let keeps = version.is_some_and(|version| self.shared.pages.opened(self.inode, version));
        if !keeps {
            self.reader.invalidate();
        }
        keeps
    }

    pub(super) fn block_size(&self) -> u64 {
        self.mount.block_size()
    }

    /// Whether a view has the file's blocks of this generation: they are not written to.
    pub(super) fn is_frozen(&self, generation: u32) -> bool {
        self.mount.is_frozen(self.inode, generation)
    }

    /// Whether a view may have frozen blocks of the file, and others may be writing to these still, or making some:
    /// none are made here until that is over.
    pub(super) fn awaits_others(&self) -> bool {
        self.is_frozen(0) && !self.mount.is_settled()
    }

    /// Looks at what is known, if it is and nobody else has changed the file since.
    pub(super) fn with_known<T>(&self, look: impl FnOnce(&mut Known) -> T) -> Option<T> {
        let mut state = self.state.lock();
        let State { known, seen, .. } = &mut *state;
        let known = known.as_mut().filter(|_| *seen == self.kept.changes())?;
        Some(look(known))
    }

    /// Looks at what is known, after asking the master where that is needed. While no master answers, what was known
    /// goes on being used.
    pub(super) async fn use_known<T>(&self, look: impl FnOnce(&mut Known) -> T) -> Result<T, ClientError> {
        if !self.is_current() {
            self.load().await?;
        }
        let mut state = self.state.lock();
        let known = state.known.as_mut().ok_or_else(|| ClientError::Stale(format!("inode {}", self.inode)))?;
        Ok(look(known))
    }

    fn is_current(&self) -> bool {
        let state = self.state.lock();
        state.known.is_some() && state.seen == self.kept.changes()
    }

    /// The master is asked anew.
    pub(super) fn forget_layout(&self) {
        self.state.lock().outdate();
    }

    /// Asks the master which blocks the file has, after the commit in flight, if there is one.
    async fn load(&self) -> Result<(), ClientError> {
        let _asked = Stage::Metadata.begin();
        let _one = self.turns.committing.lock().await;
        if self.is_current() { Ok(()) } else { self.load_now().await }
    }

    pub(super) async fn load_now(&self) -> Result<(), ClientError> {
        let loaded = self.load_layout().await;
        self.note();
        loaded
    }

    async fn load_layout(&self) -> Result<(), ClientError> {
        // What changes while the master answers is asked again.
        let (seen, gaps) = (self.kept.changes(), self.kept.gaps());
        self.shared.stats.layout_misses.inc();
        let (opener, is_first) = {
            let state = self.state.lock();
            (state.opener.clone(), state.was_there && state.known.is_none())
        };
        let prefetch = if is_first { self.plan_prefetch() } else { None };
        let inodes = prefetch.as_ref().map_or(&[][..], |prefetch| &prefetch.inodes);
        let answer = self.shared.metadata.layout(self.inode, inodes, opener.as_ref()).await;
        let mut state = self.state.lock();
        let mut answer = match answer {
            Err(error) if error.is_master_silent() && state.known.is_some() => return Ok(()),
            answer => answer?,
        };
        if let Some(prefetch) = prefetch {
            self.finish_prefetch(prefetch, std::mem::take(&mut answer.prefetch));
        }
        if answer.block_size != self.block_size() {
            let reason = format!("{}: the master has blocks of another size", self.inode);
            return Err(ClientError::Invalid(reason));
        }
        let fresh = Layout::new(&answer.attr.unwrap_or_default(), answer.extents, answer.origin);
        let history =
            if gaps.is_some() && gaps == state.gaps { EventHistory::Complete } else { EventHistory::MayHaveGaps };
        let State { known, lost: loss, ends_marked, .. } = &mut *state;
        *ends_marked = answer.ends_marked;
        let is_first = known.is_none();
        let Known { layout, blocks, origin, .. } = known.get_or_insert_with(Known::default);
        let before = layout.generation();
        let lost = layout.rebase(fresh, history);
        if is_first && self.shared.layout_cache.is_on_disks(self.inode, layout.version()) {
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

    /// Whether the file has a name, and nobody else has changed it.
    fn is_as_known(&self) -> bool {
        self.kept.is_watched() && self.is_current() && self.shared.metadata.has_name(self.inode)
    }
}

impl Drop for FsFile {
    /// What stays known when its last owner has dropped it is nothing that the master does not know as well, or that
    /// somebody else has changed.
    fn drop(&mut self) {
        let is_settled = self.behind.is_drained() && self.is_as_known();
        let (shared, state) = (Arc::clone(&self.shared), self.state.get_mut());
        let mut stays = None;
        if let Some(known) = &mut state.known {
            if known.granted.is_some() {
                shared.prealloc.unused(self.mount.id());
            }
            shared.layout_cache.note_on_disks(self.inode, known.layout.version_on_disks());
            if is_settled && state.lost.is_none() {
                stays = shared.layout_cache.of(known, state.ends_marked);
            }
        }
        let mut open = shared.open.lock();
        // Another may have taken its place since its last owner let go of it, and knows better.
        if open.get(&self.inode).is_none_or(|entry| !std::ptr::eq(Weak::as_ptr(entry), self)) {
            return;
        }
        open.remove(&self.inode);
        shared.layout_cache.others_open(open.len());
        // What was changed before it was there did not end it.
        if shared.layout_cache.leave(self.inode, stays) && !self.is_as_known() {
            shared.layout_cache.changed(ChangedContents::Of(self.inode));
        }
    }
}
