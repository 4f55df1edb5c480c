//! Files of fs-mode mounts, open: CREATE, READ, WRITE, FLUSH, FSYNC, FALLOCATE, LSEEK.
//!
//! What a write brings goes to the workers before it is answered, on the event loop's own thread where that takes no
//! question; what the master must know of it is told with the close, or some seconds later. The kernel keeps pages from
//! one open to the next while nobody else has changed the content: `pages` remembers which version they are of.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use cavern_client::{Changed, ClientError, FsFile, Node, Seek, WriteBehindOutcome};
use cavern_conf::Failpoint;
use cavern_proto::master::mutation::Change;
use cavern_proto::master::{Attr, CreateInode, Kind, SetAttr};
use futures::stream::{self, StreamExt};
use quick_cache::sync::Cache;

use super::Inner;
use super::changes::ChangeRequest;
use super::locks::ReleasedLocks;
use super::open::{OpenHandle, ReadArgs};
use crate::kernel::abi::fopen;
use crate::kernel::{Caller, Delivery, Reply};

/// Inodes whose pages are remembered; of any other they are read anew when it is opened.
const PAGES_OF: usize = 100_000;

/// What is written is known to the master so soon, if nobody closes or syncs it before. Sooner than
/// `master.persist_delay` usually is, so that a file which is being written does not look as if it had come to rest.
const COMMIT_EVERY: Duration = Duration::from_secs(3);
/// Files of which it is told at a time.
const COMMITS: usize = 64;

/// What a WRITE asks for besides.
#[derive(Clone, Copy)]
pub(super) struct WriteArgs {
    pub is_sync: bool,
    /// The writer may not keep the set-user-ID bit and the like.
    pub kills_privileges: bool,
    pub caller: Caller,
    /// As FLUSH names whoever closes.
    pub writer: Option<u64>,
}

/// Versions of contents by inode, of which all pages are that the kernel has.
pub(super) struct KernelPages(Cache<u64, u64>);

impl Default for KernelPages {
    fn default() -> Self {
        Self(Cache::new(PAGES_OF))
    }
}

impl KernelPages {
    /// The file is opened: whether the kernel may keep its pages.
    fn opened(&self, inode: u64, version: u64) -> bool {
        let are_current = self.0.get(&inode) == Some(version);
        if !are_current {
            self.0.insert(inode, version);
        }
        are_current
    }

    /// What was written by way of these pages has become another version; `None` when somebody else has changed it too.
    fn moved_on(&self, inode: u64, from: Option<u64>, to: Option<u64>) {
        match to {
            Some(to) if from.is_some() && self.0.get(&inode) == from => self.0.insert(inode, to),
            _ => drop(self.0.remove(&inode)),
        }
    }
}

impl Inner {
    /// Opens a file of an fs-mode mount; what it is opened for, the kernel has checked.
    pub(super) fn open_content(self: &Arc<Self>, node: Arc<Node>, flags: i32, reply: Reply) {
        if let Some(content) = self.client.contents().open_cached(&node) {
            return self.opened_content(&node, content, flags, reply);
        }
        let this = Arc::clone(self);
        reply.defer(move |reply| async move {
            match this.client.contents().open(&node).await {
                Ok(content) => this.opened_content(&node, content, flags, reply),
                Err(error) => this.failures.answer(reply, "open", &error),
            }
        });
    }

    fn opened_content(&self, node: &Node, content: Arc<FsFile>, flags: i32, reply: Reply) {
        let open_flags = self.open_flags(node, &content, flags);
        let number = self.files.insert(Arc::new(OpenHandle::FsFile(content)));
        if reply.opened(number, open_flags) == Delivery::Refused {
            self.files.remove(number);
        }
    }

    fn open_flags(&self, node: &Node, content: &FsFile, flags: i32) -> u32 {
        // Whichever is heard of first. They grow.
        let version = content.version().max(node.posix().map(|posix| posix.version));
        let keep = version.is_some_and(|version| self.pages.opened(node.inode, version));
        // Who only writes gains nothing by pages: they cost a copy, and a question about the file's capabilities.
        let only_writes = flags & libc::O_ACCMODE == libc::O_WRONLY;
        let direct = self.direct || only_writes || flags & libc::O_DIRECT != 0;
        let how = fopen::DIRECT_IO | fopen::PARALLEL_DIRECT_WRITES;
        (if keep { fopen::KEEP_CACHE } else { 0 }) | (if direct { how } else { 0 })
    }

    pub(super) fn create(
        self: &Arc<Self>,
        kernel_parent: u64,
        caller: Caller,
        name: &[u8],
        (mode, umask): (u32, u32),
        flags: u32,
        reply: Reply,
    ) {
        let flags = flags.cast_signed();
        let create = CreateInode { mode: mode & 0o7777, umask, ..self.new_inode(kernel_parent, name, Kind::File) };
        let change = Change::Create(create);
        let attempt = ChangeRequest { operation: "create", on: kernel_parent, with: None, caller, change };
        if let Some(errno) = self.cached_refusal(&attempt) {
            return reply.error(errno);
        }
        let (this, name) = (Arc::clone(self), name.to_vec());
        reply.run_uninterruptible(move |reply| async move {
            match this.node(kernel_parent).await {
                Ok(directory) if directory.is_in_writable_bucket() => {
                    return this.create_staged(&directory, &name, (mode & !umask, caller), flags, reply).await;
                }
                // Whatever it is shows below.
                _ => {}
            }
            match this.create_content(attempt).await {
                Ok((node, content)) => {
                    Failpoint::CreateAnswered.pass();
                    this.answer_created(&node, content, flags, reply);
                }
                // Somebody else was faster: the kernel looks again, and opens what it finds if the caller may do so.
                Err(error) if error.errno() == libc::EEXIST && flags & libc::O_EXCL == 0 => reply.error(libc::ESTALE),
                Err(error) => this.failures.answer(reply, "create", &error),
            }
        });
    }

    pub(super) fn answer_created(&self, node: &Node, content: Arc<FsFile>, flags: i32, reply: Reply) {
        let entry = self.entry_of(node);
        let open_flags = self.open_flags(node, &content, flags);
        let number = self.files.insert(Arc::new(OpenHandle::FsFile(content)));
        if reply.created(&entry, number, open_flags) == Delivery::Refused {
            self.files.remove(number);
        }
    }

    async fn create_content(&self, attempt: ChangeRequest) -> Result<(Arc<Node>, Arc<FsFile>), ClientError> {
        let (directory, changed) = self.make(attempt).await?;
        let attr = created(&changed)?;
        let node = match &changed.node {
            Some(node) => Arc::clone(node),
            None => Arc::new(Node::nameless(attr, directory.mount.clone())),
        };
        let content = self.client.contents().open_new(&node, attr).await?;
        Ok((node, content))
    }

    pub(super) fn read_content(
        self: &Arc<Self>,
        content: &Arc<FsFile>,
        read: ReadArgs,
        reply: Reply,
        payload: &mut [u8],
    ) {
        let ReadArgs { offset, size, is_kept } = read;
        if is_kept {
            content.copies().keep();
        }
        let length = payload.len().min(size as usize);
        if let Some(read) = content.read_now(offset, &mut payload[..length]) {
            return reply.bytes(&payload[..read]);
        }
        let (this, content) = (Arc::clone(self), Arc::clone(content));
        reply.defer(move |reply| async move {
            match content.read(offset, length).await {
                Ok(bytes) => reply.bytes(&bytes),
                Err(error) => this.failures.answer(reply, "read", &error),
            }
        });
    }

    pub(super) fn write(self: &Arc<Self>, fh: u64, offset: u64, data: &[u8], how: WriteArgs, reply: Reply) {
        let content = match self.files.get(fh).as_deref() {
            Some(OpenHandle::FsFile(content)) => Arc::clone(content),
            Some(OpenHandle::Staged(file)) => {
                if how.kills_privileges {
                    file.kill_privileges();
                }
                return self.write_staged(file, offset, data, how.writer, reply);
            }
            _ => return reply.error(libc::EBADF),
        };
        // At most what one request holds.
        let size = data.len() as u32;
        // What comes by way of pages, and says nothing else, has had its effect when these were written to; that of a
        // mapping has none.
        let takes = how.kills_privileges || how.writer.is_some();
        let loses = takes && self.may_lose(content.inode(), how.kills_privileges);
        let is_plain = !loses && !how.is_sync;
        if is_plain
            && (content.write_now(offset, data).is_some()
                || content.write_behind(offset, data) == WriteBehindOutcome::Taken)
        {
            let has_copies = how.writer.is_some() && content.copies().may_be_kept();
            return self.written(content.inode(), (offset, size), has_copies, reply);
        }
        let (this, data) = (Arc::clone(self), Bytes::copy_from_slice(data));
        reply.run_uninterruptible(move |reply| async move {
            let written = async {
                if loses {
                    this.lose_by_write(&content, how.caller, how.kills_privileges).await?;
                }
                if is_plain {
                    return content.write_soon(offset, data).await;
                }
                content.write(offset, data).await?;
                if how.is_sync { this.sync(&content).await } else { Ok(()) }
            };
            match written.await {
                Ok(()) => {
                    let has_copies = how.writer.is_some() && content.copies().may_be_kept();
                    this.written(content.inode(), (offset, size), has_copies, reply);
                }
                Err(error) => this.failures.answer(reply, "write", &error),
            }
        });
    }

    /// Answers a WRITE. What was not written by way of the kernel's pages must be out of these before: the kernel
    /// forgets them when it begins with such a write, but others may have read them anew since, and of a write that its
    /// program does not wait for the kernel forgets them no second time.
    pub(super) fn written(&self, inode: u64, (offset, size): (u64, u32), has_copies: bool, reply: Reply) {
        if has_copies {
            self.invalidations.written(self.root.to_kernel(inode), offset, size, reply);
        } else {
            reply.written(size);
        }
    }

    /// The file of an fs-mode mount that is open under a number.
    pub(super) fn content_of(&self, fh: u64) -> Option<Arc<FsFile>> {
        match &*self.files.get(fh)? {
            OpenHandle::FsFile(content) => Some(Arc::clone(content)),
            OpenHandle::Object(_) | OpenHandle::Staged(_) => None,
        }
    }

    /// A descriptor is closed: what was written is committed before the locks that guarded it end.
    pub(super) fn flush(self: &Arc<Self>, kernel_node: u64, fh: u64, lock_owner: u64, reply: Reply) {
        if self.unopened.is_some() {
            return reply.error(libc::ENOSYS);
        }
        let inode = self.root.to_namespace(kernel_node);
        let content = self.content_of(fh).filter(|content| !content.is_committed());
        let staged = self.staged_of(fh).filter(|file| file.is_flushed_by(lock_owner));
        let has_locks = self.ends_locks(inode, fh, lock_owner);
        if content.is_none() && staged.is_none() && !has_locks {
            return reply.done();
        }
        let this = Arc::clone(self);
        reply.run_uninterruptible(move |reply| async move {
            let committed = match content {
                Some(content) => this.commit(&content).await,
                None => Ok(()),
            };
            let committed = match staged {
                Some(file) => this.commit_staged(&file).await,
                None => committed,
            };
            if has_locks {
                this.unlock_closed(inode, lock_owner).await;
            }
            match committed {
                Ok(()) => reply.done(),
                Err(error) => this.failures.answer(reply, "close", &error),
            }
        });
    }

    pub(super) fn fsync(self: &Arc<Self>, fh: u64, reply: Reply) {
        if let Some(file) = self.staged_of(fh) {
            return self.fsync_staged(file, reply);
        }
        let Some(content) = self.content_of(fh) else { return reply.done() };
        let this = Arc::clone(self);
        reply.run_uninterruptible(move |reply| async move {
            match this.sync(&content).await {
                Ok(()) => reply.done(),
                Err(error) => this.failures.answer(reply, "fsync", &error),
            }
        });
    }

    /// The last descriptor is closed. What a mapping wrote after the last flush is committed now, before the locks end.
    pub(super) fn release_content(self: &Arc<Self>, content: &Arc<FsFile>, locks: ReleasedLocks, reply: Reply) {
        if content.is_committed() {
            drop(locks);
            return reply.done();
        }
        let (this, content) = (Arc::clone(self), Arc::clone(content));
        reply.run_uninterruptible(move |reply| async move {
            if let Err(error) = this.commit(&content).await {
                tracing::warn!(inode = content.inode(), "what was written last is lost: {error}");
            }
            drop(locks);
            reply.done();
        });
    }

    pub(super) async fn commit(&self, content: &FsFile) -> Result<(), ClientError> {
        let before = content.version();
        let committed = content.commit().await;
        self.moved_on(content, before);
        committed
    }

    /// Tells the master what has been written to files that stay open, every [`COMMIT_EVERY`]: others see it, the
    /// bucket gets it, and it outlives this process.
    pub(super) async fn keep_committing(&self) {
        loop {
            tokio::time::sleep(COMMIT_EVERY).await;
            let commits = self.client.contents().uncommitted().into_iter().map(async |content| {
                let before = content.version();
                if let Err(error) = content.commit_in_background().await {
                    tracing::debug!(inode = content.inode(), "not committed for now: {error}");
                }
                self.moved_on(&content, before);
            });
            stream::iter(commits).buffer_unordered(COMMITS).collect::<()>().await;
        }
    }

    async fn sync(&self, content: &FsFile) -> Result<(), ClientError> {
        let before = content.version();
        let synced = content.sync().await;
        self.moved_on(content, before);
        synced
    }

    fn moved_on(&self, content: &FsFile, before: Option<u64>) {
        let now = content.version();
        if now != before {
            self.pages.moved_on(content.inode(), before, now);
        }
    }

    pub(super) fn fallocate(self: &Arc<Self>, fh: u64, offset: u64, length: u64, mode: u32, reply: Reply) {
        const KEEP_SIZE: u32 = libc::FALLOC_FL_KEEP_SIZE.cast_unsigned();
        const PUNCH_HOLE: u32 = libc::FALLOC_FL_PUNCH_HOLE.cast_unsigned() | KEEP_SIZE;
        const ZERO_RANGE: u32 = libc::FALLOC_FL_ZERO_RANGE.cast_unsigned();
        const ZERO_RANGE_KEEP: u32 = ZERO_RANGE | KEEP_SIZE;
        if self.staged_of(fh).is_some() {
            return reply.error(libc::EOPNOTSUPP);
        }
        let Some(content) = self.content_of(fh) else { return reply.error(libc::EBADF) };
        let Some(end) = offset.checked_add(length).filter(|_| length > 0) else { return reply.error(libc::EINVAL) };
        let range = offset..end;
        let (zero, allocate, grow) = match mode {
            0 => (false, true, true),
            KEEP_SIZE => (false, true, false),
            PUNCH_HOLE => (true, false, false),
            ZERO_RANGE => (true, true, true),
            ZERO_RANGE_KEEP => (true, true, false),
            _ => return reply.error(libc::EOPNOTSUPP),
        };
        let this = Arc::clone(self);
        reply.run_uninterruptible(move |reply| async move {
            let mut done = Ok(());
            if zero {
                done = content.zero(range.clone()).await;
            }
            if allocate && done.is_ok() {
                done = content.allocate(range, grow).await;
            }
            match done {
                Ok(()) => reply.done(),
                Err(error) => this.failures.answer(reply, "fallocate", &error),
            }
        });
    }

    pub(super) fn lseek(self: &Arc<Self>, fh: u64, offset: u64, whence: u32, reply: Reply) {
        let what = match whence.cast_signed() {
            libc::SEEK_DATA => Seek::Data,
            libc::SEEK_HOLE => Seek::Hole,
            _ => return reply.error(libc::EINVAL),
        };
        let content = match self.files.get(fh).as_deref() {
            Some(OpenHandle::FsFile(content)) => Arc::clone(content),
            Some(OpenHandle::Object(handle)) => return seek_in_data(handle.file.node().size, offset, what, reply),
            Some(OpenHandle::Staged(file)) => return seek_in_data(file.node().size, offset, what, reply),
            None => return reply.error(libc::EBADF),
        };
        let this = Arc::clone(self);
        reply.defer(move |reply| async move {
            match content.seek(offset, what).await {
                Ok(Some(at)) => reply.at(at),
                Ok(None) => reply.error(libc::ENXIO),
                Err(error) => this.failures.answer(reply, "lseek", &error),
            }
        });
    }

    /// Whether attributes must be set by way of the content: its length is among them, or the master does not know all
    /// that was written yet, so that a time that is set now would not stay.
    pub(super) fn is_about_content(&self, set: &SetAttr) -> bool {
        let open = || self.client.contents().get(set.inode);
        set.size.is_some() || open().is_some_and(|content| !content.is_committed())
    }

    pub(super) fn set_content_attributes(
        self: &Arc<Self>,
        kernel_node: u64,
        caller: Caller,
        set: SetAttr,
        reply: Reply,
    ) {
        let this = Arc::clone(self);
        reply.run_uninterruptible(move |reply| async move {
            let changed = async {
                let node = this.node(kernel_node).await?;
                if node.is_in_writable_bucket() {
                    // The kernel looks the name up again, finds what can be cut, and asks for that.
                    this.client.staged().begin(&node, Some(caller.thread))?;
                    return Err(ClientError::Stale(node.to_string()));
                }
                if !node.is_fs_mode() {
                    let reason = format!("{node} cannot be changed");
                    return Err(ClientError::Refused { errno: libc::EROFS, reason });
                }
                let content = this.client.contents().open(&node).await?;
                let changed = this.set_by_content(&content, set, caller).await?;
                Ok((node, changed))
            };
            match changed.await {
                Ok((node, changed)) => this.answer_attributes(&node, &changed, reply),
                Err(error) => this.failures.answer(reply, "setattr", &error),
            }
        });
    }

    /// Sets attributes of a file after all that was written to it here.
    pub(super) async fn set_by_content(
        &self,
        content: &FsFile,
        set: SetAttr,
        caller: Caller,
    ) -> Result<Changed, ClientError> {
        let before = content.version();
        let changed = content.set_attributes(set, caller.uid, caller.gid).await;
        self.moved_on(content, before);
        changed
    }
}

/// The attributes of what a change has made.
pub(super) fn created(changed: &Changed) -> Result<&Attr, ClientError> {
    let attr = changed.result.attributes.iter().find(|attr| attr.inode == changed.result.inode);
    attr.ok_or_else(|| ClientError::Invalid("the master says nothing of what was created".into()))
}

/// LSEEK in an object, which is data from its beginning to its end.
fn seek_in_data(size: u64, offset: u64, what: Seek, reply: Reply) {
    match what {
        _ if offset >= size => reply.error(libc::ENXIO),
        Seek::Data => reply.at(offset),
        Seek::Hole => reply.at(size),
    }
}
