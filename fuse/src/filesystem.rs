//! The operations of the mount: each takes what the client has in its cache on the event loop's own thread, and hands
//! the request to a task of the runtime for whatever must be waited for.
//!
//! A FUSE node id is the namespace's inode id, but for the root of the mount, which the kernel calls 1 whatever part of
//! the namespace is shown. Since one inode of a cache-mode mount is one version of one object, attributes of its files
//! never change and their pages never expire: a replaced object is another inode under the old name. Changes of names
//! go by way of [`changes`], those of files by way of the client's [`File`](cavern_client::File), which knows what kind
//! of file it is. Nothing is remembered per inode that the kernel knows, but for those that it knows by more than one
//! node ([`aliases`](crate::aliases)); what the client's cache has dropped is asked of the master again, by id.

mod attr_defaults;
mod attributes;
mod changes;
mod close;
mod copy;
mod create;
mod directory;
mod earlier_handles;
mod error_reply;
mod estale_retry;
mod export;
mod failed_reads;
mod fallocate;
mod file_table;
mod generations;
mod handles;
mod limited_users;
mod locks;
mod lookup;
mod lost_handles;
mod lseek;
mod names;
mod no_open;
mod open;
mod open_handle;
mod open_nodes;
mod parts;
mod passthrough;
mod privileges;
mod read;
mod remove;
mod rename;
mod restore;
mod setattr;
mod statfs;
mod symlink;
mod trace_file;
mod views;
mod virtual_entries;
mod virtual_files;
mod write;
mod xattr;

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use cavern_client::{Client, Journal};
use cavern_conf::schema;
use tokio_util::sync::CancellationToken;

pub use earlier_handles::EarlierHandles;
pub use passthrough::is_asked as asks_for_passthrough;

use crate::invalidation::Invalidations;
use crate::kernel::{Connection, Filesystem, Operation, Reply};
use crate::root::Root;
use parts::Inner;
use read::ReadArgs;
use write::WriteArgs;

/// The mount of one namespace path.
pub struct Namespace {
    inner: Arc<Inner>,
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
    /// Shows what `root` names; with a journal for the process that goes on after this one, if any is to.
    pub fn new(
        client: Arc<Client>,
        root: Arc<Root>,
        invalidations: Arc<Invalidations>,
        conf: &schema::Fuse,
        journal: Option<Arc<Journal>>,
    ) -> Self {
        Self { inner: Arc::new(Inner::new(client, root, invalidations, conf, journal)) }
    }

    /// Lets go of what nobody reads any more, until `stop`.
    pub fn sweep(&self, stop: CancellationToken) -> impl Future<Output = ()> + Send + 'static {
        let inner = Arc::clone(&self.inner);
        async move {
            while stop.run_until_cancelled(tokio::time::sleep(SWEEP_EVERY)).await.is_some() {
                inner.files.sweep();
            }
        }
    }

    /// Commits what is written to files that stay open, until `stop`.
    pub fn commit(&self, stop: CancellationToken) -> impl Future<Output = ()> + Send + 'static {
        let client = Arc::clone(&self.inner.client);
        async move { client.run_committer(stop).await }
    }

    /// Opens what was open in the process before.
    pub async fn restore(&self, earlier: EarlierHandles, connection: &Connection) {
        self.inner.restore(earlier, connection).await;
    }

    /// Gives back what the process before had registered with the kernel and no handle has. Once the journal
    /// is thawed: what is let go of before stays noted.
    pub fn give_back(&self) {
        self.inner.give_back();
    }

    /// The kernel has asked again for whatever it had no answer to.
    pub fn forget_earlier(&self) {
        self.inner.mount_journal.forget_earlier();
        self.inner.client.metadata().forget_replayed();
    }

    /// What is open, for the metrics.
    pub fn usage(&self) -> impl Fn() -> Usage + Send + Sync + 'static {
        let inner = Arc::clone(&self.inner);
        move || Usage {
            files: inner.files.len(),
            directories: inner.directories.handles.len(),
            passthrough_opens: inner.files.passthrough.opens.load(Relaxed),
            registered_files: inner.files.passthrough.registered.load(Relaxed),
        }
    }
}

impl Filesystem for Namespace {
    fn dispatch(&self, node: u64, operation: Operation<'_>, reply: Reply, payload: &mut [u8]) {
        let inner = &self.inner;
        if virtual_files::is_virtual(node) {
            return inner.serve_virtual(node, operation, reply, payload);
        }
        match operation {
            Operation::Lookup { name } => inner.lookup(node, name, reply),
            Operation::Getattr => inner.getattr(node, reply),
            Operation::Statx => inner.statx(node, reply),
            Operation::Open { flags } => inner.open(node, flags, reply),
            Operation::Read { fh, offset, size, is_kept } => {
                let read = ReadArgs { offset, size, is_kept };
                inner.read(node, fh, read, reply, payload);
            }
            Operation::Release { fh } => inner.release(node, fh, reply),
            Operation::Opendir => inner.opendir(node, reply),
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
                if !inner.features.xattrs =>
            {
                // The kernel asks for none any more.
                reply.error(libc::ENOSYS);
            }
            Operation::Getxattr { name, size } => inner.getxattr(node, name, size, reply),
            Operation::Listxattr { size } => inner.listxattr(node, size, reply),
            Operation::Mknod { name, mode, umask, rdev } => inner.mknod(node, name, (mode, umask), rdev, reply),
            Operation::Mkdir { name, mode, umask } => inner.mkdir(node, name, (mode, umask), reply),
            Operation::Symlink { name, target } => inner.symlink(node, name, target, reply),
            Operation::Link { inode: other, .. } | Operation::Rename { new_parent: other, .. }
                if virtual_files::is_virtual(other) =>
            {
                reply.error(libc::EROFS);
            }
            Operation::Link { inode, name } => inner.link(inode, (node, name), reply),
            Operation::Unlink { name } => inner.remove(node, (name, false), reply),
            Operation::Rmdir { name } => inner.remove(node, (name, true), reply),
            Operation::Rename { name, new_parent, new_name, flags } => {
                inner.rename((node, name), (new_parent, new_name), flags, reply);
            }
            Operation::Setattr(set) => inner.setattr(node, set, reply),
            Operation::Setxattr { name, value, flags, clears_set_group_id } => {
                inner.setxattr(node, (name, value), (flags, clears_set_group_id), reply);
            }
            Operation::Removexattr { name } => inner.removexattr(node, name, reply),
            Operation::Create { name, mode, umask, flags } => inner.create(node, name, (mode, umask), flags, reply),
            Operation::Tmpfile { mode, umask, flags } => inner.tmpfile(node, (mode, umask), flags, reply),
            Operation::Write { fh, offset, data, flags, kill_privileges, writer } => {
                let is_sync = flags.cast_signed() & libc::O_DSYNC != 0;
                let appends = open::appends(flags.cast_signed());
                let how =
                    WriteArgs { is_sync, appends, kills_privileges: kill_privileges, caller: reply.caller(), writer };
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
        if virtual_files::is_virtual(node) {
            return;
        }
        let (inode, root) = (self.inner.root.to_namespace(node), &self.inner.root);
        if self.inner.client.metadata().is_referenced(inode) || root.aliases().has_others(inode) {
            self.inner.invalidations.given_up(inode);
        }
    }
}
