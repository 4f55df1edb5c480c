//! The contents that are open in this process, and what they share.

use std::collections::HashMap;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Weak};
use std::time::Duration;

use cavern_conf::schema;
use cavern_net::WorkerPool;
use cavern_proto::master::{Attr, User};
use futures::FutureExt as _;
use parking_lot::Mutex;
use tokio::runtime::Handle;

use super::block::block_name;
use super::block_preallocator::BlockPreallocator;
use super::file::FsFile;
use super::layout::Layout;
use super::layout_cache::LayoutCache;
use super::page_versions::PageVersions;
use super::prefetch_window::PrefetchWindows;
use super::state::{Known, State};
use crate::error::ClientError;
use crate::memory::MemoryShare;
use crate::metadata::{Metadata, Node, OpenInode};
use crate::read::Files;
use crate::stats::Stats;

/// The contents that are open in this process. Cheap to clone.
#[derive(Clone)]
pub struct OpenFileTable {
    pub(super) shared: Arc<Shared>,
}

pub(super) struct Shared {
    pub metadata: Metadata,
    pub pool: Arc<WorkerPool>,
    /// The way to objects.
    pub files: Files,
    pub stats: Arc<Stats>,
    pub runtime: Handle,
    /// What may be on its way to workers behind its writers.
    pub behind: MemoryShare,
    /// How many pieces were written behind.
    pub pieces: AtomicU64,
    /// By inode.
    pub open: Mutex<HashMap<u64, Weak<FsFile>>>,
    pub pages: PageVersions,
    pub layout_cache: Arc<LayoutCache>,
    pub prefetch_windows: PrefetchWindows,
    pub prealloc: BlockPreallocator,
}

impl Shared {
    /// One read or write, every attempt included.
    pub(super) fn timeout(&self) -> Duration {
        self.files.limits().read
    }

    /// One attempt at one worker.
    pub(super) fn worker_timeout(&self) -> Duration {
        self.files.limits().worker
    }
}

impl OpenFileTable {
    pub(crate) fn new(
        metadata: Metadata,
        files: Files,
        pool: Arc<WorkerPool>,
        stats: Arc<Stats>,
        conf: &schema::Client,
    ) -> Self {
        let behind = files.memory().share(conf.write_behind.bytes());
        let layout_cache = Arc::new(LayoutCache::new(files.descriptors().clone()));
        let known = layout_cache.clone();
        metadata.on_changed_contents(move |changed| known.changed(changed));
        let shared = Shared {
            metadata,
            pool,
            files,
            stats,
            runtime: Handle::current(),
            behind,
            pieces: AtomicU64::new(0),
            open: Mutex::default(),
            pages: PageVersions::default(),
            layout_cache,
            prefetch_windows: PrefetchWindows::default(),
            prealloc: BlockPreallocator::default(),
        };
        let shared = Arc::new(shared);
        let frozen = Arc::downgrade(&shared);
        shared.metadata.on_frozen(move |mounts| {
            let shared = frozen.upgrade();
            let settled = async move {
                if let Some(shared) = shared {
                    shared.settle(&mounts).await;
                }
            };
            settled.boxed()
        });
        Self { shared }
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

    /// Opens a file that has just been made here. Where it was made by a user by whom that was checked, the session
    /// holds it, and he may write to it.
    pub async fn open_new(&self, node: &Node, attr: &Attr, user: Option<&User>) -> Result<Arc<FsFile>, ClientError> {
        let (kept, is_as_made) = self.shared.metadata.keep_made(attr).await?;
        if user.is_some() {
            kept.note_ref();
        }
        // What others have written to it by now the master says.
        let content = self.enter(node, kept, is_as_made.then(|| Layout::without_blocks(attr)))?;
        content.is_written_by(user);
        if let Some(granted) = self.shared.prealloc.take(node.inode, content.mount.id()) {
            match &mut content.state.lock().known {
                Some(known) => known.granted = Some(granted),
                // Another has opened the file before, and asks the master for its blocks.
                None => self.shared.prealloc.unused(content.mount.id()),
            }
        }
        self.prepare_blocks(&content.mount);
        Ok(content)
    }

    /// Opens a file that has just been made here without a name: it is gone with the last who has it open, unless it
    /// gets a name.
    pub fn open_nameless(&self, node: &Node, attr: &Attr, user: Option<&User>) -> Result<Arc<FsFile>, ClientError> {
        let kept = self.shared.metadata.keep_held(node.inode);
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
        let (seen, gaps, was_there) = (kept.changes_before(), kept.gaps(), layout.is_none());
        let mut open = self.shared.open.lock();
        // Another may have been faster.
        if let Some(content) = open.get(&node.inode).and_then(Weak::upgrade) {
            drop(open);
            return Ok(content.opened_again());
        }
        let known = layout.map(|layout| Known { layout, ..Known::default() });
        let mut state = State { known, seen, gaps, was_there, ..State::default() };
        // After the changes of the inode are counted: see `content_changed`.
        if was_there && kept.is_watched() {
            let name = |index, generation| block_name(&self.shared.pool, &mount, (node.inode, generation, index));
            if let Some((known, ends_marked)) = self.shared.layout_cache.take(node.inode, name) {
                (state.known, state.ends_marked) = (Some(known), ends_marked);
            }
        }
        let content = Arc::new(FsFile::new(self.shared.clone(), kept, node.inode, mount, state));
        open.insert(node.inode, Arc::downgrade(&content));
        self.shared.layout_cache.others_open(open.len());
        Ok(content)
    }
}
