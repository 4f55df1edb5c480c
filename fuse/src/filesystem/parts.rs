//! What the operations of a mount share.
//!
//! Each operation is a file that adds to [`Inner`] what it does. What lasts from one request to the next is in a part
//! of it. Parts know nothing of operations, and the tables nothing of each other:
//!
//! | part | owns | locks |
//! |---|---|---|
//! | [`FileTable`] | open files: handles, how the kernel reads them, what an open to come is given | one a part |
//! | [`DirectoryTable`] | open directories, and the cookies of their entries | its own, and one for each handle |
//! | [`HandleLocks`] | `flock`s of objects; which descriptions may have locks | one each |
//! | [`AttrDefaults`], [`Features`], [`Generations`] | what stays as it is for as long as the mount | none |
//! | [`MountJournal`] | what the next process finds of all this | its own |
//! | [`Failures`], [`TraceFile`] | what was logged last; slow requests | one each |

use std::sync::Arc;

use cavern_client::{Client, ClientError, Journal, Node};
use cavern_conf::schema::{self, Choice};

use super::attr_defaults::AttrDefaults;
use super::directory::table::DirectoryTable;
use super::error_reply::Failures;
use super::file_table::FileTable;
use super::generations::Generations;
use super::locks::handle_locks::HandleLocks;
use super::trace_file::TraceFile;
use crate::invalidation::Invalidations;
use crate::kernel::Reply;
use crate::mount_journal::MountJournal;
use crate::root::Root;

/// The parts of a mount.
pub(super) struct Inner {
    pub(super) client: Arc<Client>,
    pub(super) root: Arc<Root>,
    pub(super) features: Features,
    pub(super) attr_defaults: AttrDefaults,
    pub(super) generations: Generations,
    /// What the kernel is to forget.
    pub(super) invalidations: Arc<Invalidations>,
    pub(super) files: FileTable,
    pub(super) directories: DirectoryTable,
    pub(super) locks: HandleLocks,
    /// What a process after this one must know.
    pub(super) mount_journal: MountJournal,
    pub(super) failures: Failures,
    pub(super) trace: TraceFile,
}

/// What the configuration has the mount do.
#[derive(Clone, Copy, Debug)]
pub(super) struct Features {
    /// `fuse.xattrs`.
    pub(super) xattrs: bool,
    /// `fuse.posix_acl`: access lists can be set, and the kernel heeds them.
    pub(super) posix_acl: bool,
    /// `fuse.direct`: no pages are kept.
    pub(super) direct: bool,
}

impl Inner {
    pub(super) fn new(
        client: Arc<Client>,
        root: Arc<Root>,
        invalidations: Arc<Invalidations>,
        conf: &schema::Fuse,
        journal: Option<Arc<Journal>>,
    ) -> Self {
        let (files, directories) = (FileTable::new(conf), DirectoryTable::default());
        if let Some(journal) = &journal {
            files.handles.begin_epoch(journal.epoch());
            directories.handles.begin_epoch(journal.epoch());
        }
        let features = Features { xattrs: conf.xattrs != Choice::Off, posix_acl: conf.posix_acl, direct: conf.direct };
        let generations = Generations::new(&client.pool().cluster_id());
        Self {
            client,
            root,
            features,
            attr_defaults: AttrDefaults::new(conf),
            generations,
            invalidations,
            files,
            directories,
            locks: HandleLocks::default(),
            mount_journal: MountJournal::new(journal),
            failures: Failures::default(),
            trace: TraceFile::new(conf.trace_above.get()),
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
        self.files.node(self.root.to_namespace(kernel_node))
    }

    /// Answers with what was done, or with the error.
    pub(super) fn answer_with<T>(
        &self,
        operation: &str,
        result: Result<T, ClientError>,
        reply: Reply,
        answer: impl FnOnce(T, Reply),
    ) {
        match result {
            Ok(done) => answer(done, reply),
            Err(error) => self.failures.answer(reply, operation, &error),
        }
    }

    /// Answers that it is done, or with the error.
    pub(super) fn answer_done(&self, operation: &str, result: Result<(), ClientError>, reply: Reply) {
        self.answer_with(operation, result, reply, |(), reply| reply.done());
    }
}
