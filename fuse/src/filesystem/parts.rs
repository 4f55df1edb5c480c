//! What the operations of a mount share.
//!
//! Each operation is a file that adds to [`Inner`] what it does; what lasts from one request to the next is a part of
//! it. Parts know nothing of operations, nor of each other.

use std::sync::Arc;

use cavern_client::{Client, ClientError, Journal, Node};
use cavern_conf::schema::{self, Choice};

use super::attr_defaults::AttrDefaults;
use super::directory::table::DirectoryTable;
use super::error_reply::Failures;
use super::estale_retry::EstaleRetries;
use super::generations::Generations;
use super::handles::{Handles, OpenInodes};
use super::locks::handle_locks::HandleLocks;
use super::lost_handles::LostHandles;
use super::no_open::NoOpenHandles;
use super::open_handle::OpenHandle;
use super::open_nodes::OpenNodes;
use super::passthrough::Passthrough;
use crate::invalidation::Invalidations;
use crate::mount_journal::MountJournal;
use crate::root::Root;
use crate::trace::Trace;

/// The parts of a mount.
pub(super) struct Inner {
    pub(super) client: Arc<Client>,
    pub(super) root: Arc<Root>,
    pub(super) attr_defaults: AttrDefaults,
    pub(super) invalidations: Arc<Invalidations>,
    pub(super) files: Handles<OpenHandle>,
    pub(super) directories: DirectoryTable,
    pub(super) open_inodes: OpenInodes,
    pub(super) open_nodes: OpenNodes,
    pub(super) locks: HandleLocks,
    /// `fuse.no_open`: files are read by inode.
    pub(super) unopened: Option<NoOpenHandles>,
    pub(super) open_retries: EstaleRetries,
    pub(super) failures: Failures,
    pub(super) generations: Generations,
    /// What a process after this one must know.
    pub(super) mount_journal: MountJournal,
    pub(super) lost: LostHandles,
    /// `fuse.xattrs`.
    pub(super) xattrs: bool,
    /// `fuse.posix_acl`: access lists can be set, and the kernel heeds them.
    pub(super) posix_acl: bool,
    /// `fuse.direct`: no pages are kept.
    pub(super) direct: bool,
    pub(super) passthrough: Passthrough,
    pub(super) trace: Arc<Trace>,
    /// Texts of it that are open.
    pub(super) traces: Handles<String>,
}

impl Inner {
    pub(super) fn new(
        client: Arc<Client>,
        root: Arc<Root>,
        invalidations: Arc<Invalidations>,
        conf: &schema::Fuse,
        journal: Option<Arc<Journal>>,
    ) -> Self {
        let (files, directories) = (Handles::default(), DirectoryTable::default());
        if let Some(journal) = &journal {
            files.begin_epoch(journal.epoch());
            directories.begin_epoch(journal.epoch());
        }
        let generations = Generations::new(&client.pool().cluster_id());
        Self {
            client,
            root,
            attr_defaults: AttrDefaults::new(conf),
            invalidations,
            files,
            directories,
            open_inodes: OpenInodes::default(),
            open_nodes: OpenNodes::default(),
            locks: HandleLocks::default(),
            unopened: (conf.no_open == Choice::On).then(NoOpenHandles::default),
            xattrs: conf.xattrs != Choice::Off,
            open_retries: EstaleRetries::default(),
            failures: Failures::default(),
            generations,
            mount_journal: MountJournal::new(journal),
            lost: LostHandles::default(),
            posix_acl: conf.posix_acl,
            direct: conf.direct,
            passthrough: Passthrough::new(conf),
            trace: Arc::new(Trace::new(conf.trace_above.get())),
            traces: Handles::default(),
        }
    }

    /// Closes what nobody reads any more.
    pub(super) fn sweep(&self) {
        self.open_retries.sweep();
        if let Some(unopened) = &self.unopened {
            unopened.sweep();
        }
    }

    /// A node that the kernel knows, from the cache or from an open handle of it.
    pub(super) fn known_node(&self, kernel_node: u64) -> Option<Arc<Node>> {
        self.client.cached_node(self.root.to_namespace(kernel_node))
    }

    /// A node that the kernel knows, asking the master where needed. An inode that is gone is `Stale`, unless a file of
    /// it is still open here, or it is the root of the mount, whose path may have come to lead elsewhere.
    pub(super) async fn node(&self, kernel_node: u64) -> Result<Arc<Node>, ClientError> {
        let inode = self.root.to_namespace(kernel_node);
        let error = match self.client.node(inode).await {
            Ok(node) => return Ok(node),
            Err(error) => error,
        };
        if let Some(node) = self.open_version(kernel_node) {
            return Ok(node);
        }
        if self.root.is_root(kernel_node) && error.is_version_gone() {
            let node = self.client.metadata().resolve(self.root.path()).await?;
            self.root.moved_to(node.inode);
            return Ok(node);
        }
        Err(error)
    }

    /// The version of an object that is open here, or what is kept for one who is about to open it.
    pub(super) fn open_version(&self, kernel_node: u64) -> Option<Arc<Node>> {
        let inode = self.root.to_namespace(kernel_node);
        self.open_inodes.get(inode).or_else(|| self.open_retries.file(inode).map(|(node, _)| node))
    }
}
