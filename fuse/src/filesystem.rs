//! The operations of the mount: each takes what the client has in its cache on the event loop's own thread, and hands
//! the request to a task of the runtime for whatever must be waited for.
//!
//! A FUSE node id is the namespace's inode id, but for the root of the mount, which the kernel calls 1 whatever part of
//! the namespace is shown. Since one inode of a cache-mode mount is one version of one object, attributes of its files
//! never change and their pages never expire: a replaced object is another inode under the old name. Changes of names
//! go by way of [`changes`], those of files by way of the client's [`File`](cavern_client::File), which knows what kind
//! of file it is. Nothing is remembered per inode that the kernel knows, but for those that it knows by more than one
//! node ([`aliases`](crate::aliases)); what the client's cache has dropped is asked of the master again, by id.

mod attributes;
mod changes;
mod close;
mod copy;
mod create;
mod directory;
mod error_reply;
mod estale_retry;
mod export;
mod failed_reads;
mod fallocate;
mod handles;
mod limited_users;
mod locks;
mod lookup;
mod lseek;
mod names;
mod no_open;
mod open;
mod open_nodes;
mod passthrough;
mod privileges;
mod read;
mod remove;
mod rename;
mod restore;
mod setattr;
mod statfs;
mod symlink;
mod virtual_files;
mod write;
mod xattr;

use std::sync::Arc;
use std::time::Duration;

use cavern_client::{Client, Journal, Node};
use cavern_conf::schema::{self, Choice};
use tokio_util::sync::CancellationToken;

pub use attributes::AttrDefaults;
pub use passthrough::is_asked as asks_for_passthrough;
pub use restore::EarlierHandles;

use crate::invalidation::Invalidations;
use crate::kernel::{Caller, Filesystem, Operation, Reply};
use crate::mount_journal::MountJournal;
use crate::root::Root;
use crate::trace::Trace;
use directory::DirectoryHandle;
use error_reply::Failures;
use estale_retry::EstaleRetries;
use export::Generations;
use handles::{Handles, OpenInodes};
use locks::HandleLocks;
use no_open::NoOpenHandles;
use open::OpenHandle;
use open_nodes::OpenNodes;
use passthrough::Passthrough;
use read::ReadArgs;
use restore::LostHandles;
use write::WriteArgs;

/// The mount of one namespace path.
pub struct Namespace {
    inner: Arc<Inner>,
}

struct Inner {
    client: Arc<Client>,
    root: Arc<Root>,
    attr_defaults: AttrDefaults,
    invalidations: Arc<Invalidations>,
    files: Handles<OpenHandle>,
    directories: Handles<DirectoryHandle>,
    cookies: directory::CookieTable,
    open_inodes: OpenInodes,
    open_nodes: OpenNodes,
    locks: HandleLocks,
    /// `fuse.no_open`: files are read by inode.
    unopened: Option<NoOpenHandles>,
    open_retries: EstaleRetries,
    failures: Failures,
    generations: Generations,
    /// What a process after this one must know.
    mount_journal: MountJournal,
    lost: LostHandles,
    /// `fuse.xattrs`.
    xattrs: bool,
    /// `fuse.posix_acl`: access lists can be set, and the kernel heeds them.
    posix_acl: bool,
    /// `fuse.direct`: no pages are kept.
    direct: bool,
    passthrough: Passthrough,
    trace: Arc<Trace>,
    /// Texts of it that are open.
    traces: Handles<String>,
}

/// How often what nobody uses any more is looked for.
const SWEEP_EVERY: Duration = Duration::from_secs(10);

/// What is open now, and how it was opened.
#[derive(Clone, Copy, Debug)]
pub struct Usage {
    pub files: usize,
    pub directories: usize,
    /// Opens so far whose reads the kernel serves by itself.
    pub passthrough_opens: u64,
    /// Files that were registered for them.
    pub registered_files: u64,
}

impl Namespace {
    /// Shows what `root` names.
    pub fn new(client: Arc<Client>, root: Arc<Root>, invalidations: Arc<Invalidations>, conf: &schema::Fuse) -> Self {
        Self::with_journal(client, root, invalidations, conf, None)
    }

    /// Shows what `root` names, with a journal for the process that goes on after this one.
    pub fn with_journal(
        client: Arc<Client>,
        root: Arc<Root>,
        invalidations: Arc<Invalidations>,
        conf: &schema::Fuse,
        journal: Option<Arc<Journal>>,
    ) -> Self {
        let (files, directories) = (Handles::default(), Handles::default());
        if let Some(journal) = &journal {
            files.begin_epoch(journal.epoch());
            directories.begin_epoch(journal.epoch());
        }
        let generations = Generations::new(&client.pool().cluster_id());
        let inner = Inner {
            client,
            root,
            attr_defaults: AttrDefaults::new(conf),
            invalidations,
            files,
            directories,
            cookies: directory::CookieTable::default(),
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
        };
        Self { inner: Arc::new(inner) }
    }

    /// Lets go of what nobody reads any more, until `stop`.
    pub fn sweep(&self, stop: CancellationToken) -> impl Future<Output = ()> + Send + 'static {
        let inner = Arc::clone(&self.inner);
        async move {
            while stop.run_until_cancelled(tokio::time::sleep(SWEEP_EVERY)).await.is_some() {
                inner.open_retries.sweep();
                if let Some(unopened) = &inner.unopened {
                    unopened.sweep();
                }
            }
        }
    }

    /// Commits what is written to files that stay open, until `stop`.
    pub fn commit(&self, stop: CancellationToken) -> impl Future<Output = ()> + Send + 'static {
        let client = Arc::clone(&self.inner.client);
        async move { client.run_committer(stop).await }
    }

    /// What is open, for the metrics.
    pub fn usage(&self) -> impl Fn() -> Usage + Send + Sync + 'static {
        let inner = Arc::clone(&self.inner);
        move || Usage {
            files: inner.files.len() + inner.unopened.as_ref().map_or(0, NoOpenHandles::len),
            directories: inner.directories.len(),
            passthrough_opens: inner.passthrough.opens(),
            registered_files: inner.passthrough.registered(),
        }
    }
}

impl Filesystem for Namespace {
    fn dispatch(&self, node: u64, caller: Caller, operation: Operation<'_>, reply: Reply, payload: &mut [u8]) {
        let inner = &self.inner;
        if virtual_files::is_virtual(node) {
            return inner.serve_virtual(node, operation, reply);
        }
        match operation {
            Operation::Lookup { name } => inner.lookup(node, caller, name, reply),
            Operation::Getattr => inner.getattr(node, reply),
            Operation::Statx => inner.statx(node, reply),
            Operation::Open { flags } => inner.open(node, caller, flags, reply),
            Operation::Read { fh, offset, size, is_kept } => {
                let read = ReadArgs { offset, size, is_kept };
                inner.read(node, fh, read, reply, payload);
            }
            Operation::Release { fh } => inner.release(node, fh, reply),
            Operation::Opendir => inner.opendir(node, caller, reply),
            Operation::Readdir { fh, offset, size } => {
                inner.readdir(fh, offset, size, directory::ReaddirKind::Names, reply)
            }
            Operation::Readdirplus { fh, offset, size } => {
                inner.readdir(fh, offset, size, directory::ReaddirKind::Entries, reply);
            }
            Operation::Releasedir { fh } => inner.releasedir(fh, reply),
            Operation::Statfs => inner.statfs(node, reply),
            Operation::Access { mask } => inner.access(node, mask, reply),
            Operation::Readlink => inner.readlink(node, reply),
            Operation::Getxattr { .. }
            | Operation::Listxattr { .. }
            | Operation::Setxattr { .. }
            | Operation::Removexattr { .. }
                if !inner.xattrs =>
            {
                // The kernel asks for none any more.
                reply.error(libc::ENOSYS);
            }
            Operation::Getxattr { name, size } => inner.getxattr(node, name, size, reply),
            Operation::Listxattr { size } => inner.listxattr(node, caller, size, reply),
            Operation::Mknod { name, mode, umask, rdev } => {
                inner.mknod(node, caller, name, (mode, umask), rdev, reply);
            }
            Operation::Mkdir { name, mode, umask } => inner.mkdir(node, caller, name, (mode, umask), reply),
            Operation::Symlink { name, target } => inner.symlink(node, caller, name, target, reply),
            Operation::Link { inode: other, .. } | Operation::Rename { new_parent: other, .. }
                if virtual_files::is_virtual(other) =>
            {
                reply.error(libc::EROFS);
            }
            Operation::Link { inode, name } => inner.link(inode, caller, (node, name), reply),
            Operation::Unlink { name } => inner.unlink(node, caller, name, reply),
            Operation::Rmdir { name } => inner.rmdir(node, caller, name, reply),
            Operation::Rename { name, new_parent, new_name, flags } => {
                inner.rename(caller, (node, name), (new_parent, new_name), flags, reply);
            }
            Operation::Setattr(set) => inner.setattr(node, caller, set, reply),
            Operation::Setxattr { name, value, flags, clears_set_group_id } => {
                inner.setxattr(node, caller, (name, value), (flags, clears_set_group_id), reply);
            }
            Operation::Removexattr { name } => inner.removexattr(node, caller, name, reply),
            Operation::Create { name, mode, umask, flags } => {
                inner.create(node, caller, name, (mode, umask), flags, reply);
            }
            Operation::Tmpfile { mode, umask, flags } => inner.tmpfile(node, caller, (mode, umask), flags, reply),
            Operation::Write { fh, offset, data, flags, kill_privileges, writer } => {
                let is_sync = flags.cast_signed() & libc::O_DSYNC != 0;
                let appends = open::appends(flags.cast_signed());
                let how = WriteArgs { is_sync, appends, kills_privileges: kill_privileges, caller, writer };
                inner.write(fh, offset, data, how, reply);
            }
            Operation::Flush { fh, lock_owner } => inner.flush(node, fh, lock_owner, reply),
            Operation::Getlk(request) => inner.getlk(node, request, reply),
            Operation::Setlk { request, wait } => inner.setlk(node, request, wait, reply),
            Operation::Fsync { fh } => inner.fsync(node, fh, reply),
            Operation::Fsyncdir => inner.settle(node, reply),
            Operation::Fallocate { fh, offset, length, mode } => inner.fallocate(fh, offset, length, mode, reply),
            Operation::Lseek { fh, offset, whence } => inner.lseek(fh, offset, whence, reply),
            Operation::CopyFileRange(range) => inner.copy_file_range(range, reply),
            // The event loop answers the others.
            _ => reply.error(libc::ENOSYS),
        }
    }

    fn forget(&self, node: u64, _nlookup: u64) {
        let (inode, root) = (self.inner.root.to_namespace(node), &self.inner.root);
        if self.inner.client.metadata().is_referenced(inode) || root.aliases().has_others(inode) {
            self.inner.invalidations.given_up(inode);
        }
    }
}

impl Inner {
    /// A node that the kernel knows, from the cache or from an open handle of it.
    fn known_node(&self, kernel_node: u64) -> Option<Arc<Node>> {
        self.client.cached_node(self.root.to_namespace(kernel_node))
    }

    /// A node that the kernel knows, asking the master where needed. An inode that is gone is `Stale`, unless a file of
    /// it is still open here, or it is the root of the mount, whose path may have come to lead elsewhere.
    async fn node(&self, kernel_node: u64) -> Result<Arc<Node>, cavern_client::ClientError> {
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
    fn open_version(&self, kernel_node: u64) -> Option<Arc<Node>> {
        let inode = self.root.to_namespace(kernel_node);
        self.open_inodes.get(inode).or_else(|| self.open_retries.file(inode).map(|(node, _)| node))
    }
}
