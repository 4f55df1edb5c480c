//! Files of cache-mode mounts that are being written: CREATE, OPEN, READ, WRITE, FLUSH, FSYNC, SETATTR, RELEASE.
//!
//! An inode of the namespace is one version of an object, for ever, and whoever reads it must not see what is written
//! now. So an open for writing is answered with `ESTALE`: the kernel looks the name up once more by itself, finds the
//! inode that the client has made for the new version, and opens that. When the bucket has the file, its name leads to
//! an inode of the namespace again.
//!
//! What CLOSE and FSYNC are answered is what the bucket has said.

use std::sync::Arc;

use bytes::Bytes;
use cavern_client::{ClientError, Creation, Node, StagedFile};
use cavern_proto::master::{SetAttr, Time};

use super::Inner;
use super::open::{OpenHandle, ReadArgs};
use crate::kernel::abi::fopen;
use crate::kernel::{Caller, Delivery, Reply};

impl Inner {
    /// An object is opened for writing, by an inode that is only read.
    pub(super) fn begin_to_write(&self, node: &Arc<Node>, caller: Caller, reply: Reply) {
        if !node.is_in_writable_bucket() {
            return reply.error(libc::EROFS);
        }
        match self.client.staged().begin(node, Some(caller.thread)) {
            Ok(_) => reply.error(libc::ESTALE),
            Err(error) => self.failures.answer(reply, "open", &error),
        }
    }

    pub(super) fn open_staged(&self, inode: u64, caller: Caller, flags: i32, reply: Reply) {
        let Some(file) = self.client.staged().get(inode) else {
            if flags & libc::O_ACCMODE != libc::O_RDONLY {
                self.second_opens.expect_writer(caller.thread);
            }
            return reply.error(libc::ESTALE);
        };
        let open_flags = self.staged_flags(flags);
        self.client.staged().opened(&file, caller.thread);
        let number = self.files.insert(Arc::new(OpenHandle::Staged(file.clone())));
        if reply.opened(number, open_flags) == Delivery::Refused {
            self.files.remove(number);
            self.client.staged().closed(&file);
        }
    }

    /// The pages of a file that is only written gain nobody anything, and who only reads has nothing to flush.
    fn staged_flags(&self, flags: i32) -> u32 {
        let access = flags & libc::O_ACCMODE;
        let only_writes = access == libc::O_WRONLY;
        let direct = self.direct || only_writes || flags & libc::O_DIRECT != 0;
        let how = if direct { fopen::DIRECT_IO | fopen::PARALLEL_DIRECT_WRITES } else { 0 };
        let flushes = if access == libc::O_RDONLY { fopen::NOFLUSH } else { 0 };
        fopen::KEEP_CACHE | how | flushes
    }

    /// A file with these permissions, where buckets keep them.
    pub(super) async fn create_staged(
        &self,
        directory: &Node,
        name: &[u8],
        (mode, caller): (u32, Caller),
        flags: i32,
        reply: Reply,
    ) {
        let is_exclusive = flags & libc::O_EXCL != 0;
        let creation = if is_exclusive { Creation::Exclusive } else { Creation::Replacing };
        match self.client.staged().create(directory, name, creation, caller.thread).await {
            Ok(file) => {
                file.set_new_attributes(mode, (caller.uid, caller.gid));
                let entry = self.entry_of(&file.node());
                let open_flags = self.staged_flags(flags);
                let number = self.files.insert(Arc::new(OpenHandle::Staged(file.clone())));
                if reply.created(&entry, number, open_flags) == Delivery::Refused {
                    self.files.remove(number);
                    self.client.staged().closed(&file);
                }
            }
            // Somebody else was faster: the kernel looks again, once, and opens what it finds, which can be written.
            Err(error) if error.errno() == libc::EEXIST && !is_exclusive => {
                reply.error(libc::ESTALE);
            }
            Err(error) => self.failures.answer(reply, "create", &error),
        }
    }

    /// The file that is being written under a number.
    pub(super) fn staged_of(&self, fh: u64) -> Option<Arc<StagedFile>> {
        match &*self.files.get(fh)? {
            OpenHandle::Staged(file) => Some(Arc::clone(file)),
            OpenHandle::Object(_) | OpenHandle::FsFile(_) => None,
        }
    }

    pub(super) fn read_staged(self: &Arc<Self>, file: &Arc<StagedFile>, read: ReadArgs, reply: Reply) {
        let ReadArgs { offset, size, is_kept } = read;
        if is_kept {
            file.copies().keep();
        }
        let (this, file) = (Arc::clone(self), Arc::clone(file));
        reply.defer(move |reply| async move {
            match file.read(offset, size as usize).await {
                Ok(bytes) => reply.bytes(&bytes),
                Err(error) => this.failures.answer(reply, "read", &error),
            }
        });
    }

    pub(super) fn write_staged(
        self: &Arc<Self>,
        file: &Arc<StagedFile>,
        offset: u64,
        data: &[u8],
        writer: Option<u64>,
        reply: Reply,
    ) {
        // At most what one request holds.
        let size = data.len() as u32;
        let copies = move |file: &StagedFile| writer.is_some() && file.copies().may_be_kept();
        if file.write_now(offset, data, writer).is_some() {
            return self.written(file.inode(), (offset, size), copies(file), reply);
        }
        let (this, file, data) = (Arc::clone(self), Arc::clone(file), Bytes::copy_from_slice(data));
        reply.run_uninterruptible(move |reply| async move {
            match file.write(offset, data, writer).await {
                Ok(()) => this.written(file.inode(), (offset, size), copies(&file), reply),
                Err(error) => this.failures.answer(reply, "write", &error),
            }
        });
    }

    /// Has the bucket take the file, and the kernel forget what it knows of the directory.
    pub(super) async fn commit_staged(&self, file: &Arc<StagedFile>) -> Result<(), ClientError> {
        file.commit().await?;
        self.invalidations.listings().changed_here(file.node().parent);
        Ok(())
    }

    pub(super) fn fsync_staged(self: &Arc<Self>, file: Arc<StagedFile>, reply: Reply) {
        let this = Arc::clone(self);
        reply.run_uninterruptible(move |reply| async move {
            match this.commit_staged(&file).await {
                Ok(()) => reply.done(),
                Err(error) => this.failures.answer(reply, "fsync", &error),
            }
        });
    }

    /// A descriptor's last copy is closed. What a mapping wrote after the last flush is written now; what the bucket
    /// did not take when it was flushed is given up.
    pub(super) fn release_staged(self: &Arc<Self>, file: &Arc<StagedFile>, reply: Reply) {
        if !file.is_dirty() || file.has_failed() {
            self.client.staged().closed(file);
            return reply.done();
        }
        let (this, file) = (Arc::clone(self), Arc::clone(file));
        reply.run_uninterruptible(move |reply| async move {
            if let Err(error) = this.commit_staged(&file).await {
                tracing::warn!("what was written last is lost: {error}");
            }
            this.client.staged().closed(&file);
            reply.done();
        });
    }

    pub(super) fn set_staged_attributes(
        self: &Arc<Self>,
        caller: Caller,
        set: SetAttr,
        writer: Option<u64>,
        reply: Reply,
    ) {
        let Some(file) = self.client.staged().get(set.inode) else { return reply.error(libc::ESTALE) };
        let this = Arc::clone(self);
        reply.run_uninterruptible(move |reply| async move {
            let done = this.set_staged(&file, &set, writer).await;
            this.client.staged().thread_arrived(&file, caller.thread);
            match done {
                Ok(()) => reply.attr(&this.attributes_of(&file.node())),
                Err(error) => this.failures.answer(reply, "setattr", &error),
            }
        });
    }

    async fn set_staged(&self, file: &Arc<StagedFile>, set: &SetAttr, writer: Option<u64>) -> Result<(), ClientError> {
        if let Some(size) = set.size {
            file.set_size(size, writer).await?;
            // With nobody who has it open, no close would come.
            return if file.is_open() { Ok(()) } else { self.commit_staged(file).await };
        }
        if self.is_unchanged(&file.node(), set) {
            return Ok(());
        }
        if file.keeps_attributes() {
            file.set_attributes(set, self.attr_defaults.looks(&file.node()))?;
            return if file.is_open() { Ok(()) } else { self.commit_staged(file).await };
        }
        let is_now = |time: &Option<Time>| time.is_none_or(|time| time.now);
        let times_are_now = (set.atime.is_some() || set.mtime.is_some()) && is_now(&set.atime) && is_now(&set.mtime);
        let node = file.node();
        let others = if times_are_now { SetAttr { atime: None, mtime: None, ..*set } } else { *set };
        if !self.is_unchanged(&node, &others) {
            let reason = format!(
                "{node}: an object has neither permissions nor an owner, and the time when it was written; mount the \
                 bucket with --attributes keep to have them kept"
            );
            return Err(ClientError::Refused { errno: libc::EOPNOTSUPP, reason });
        }
        if times_are_now && !file.is_dirty() {
            file.touch();
            if !file.is_open() {
                return self.commit_staged(file).await;
            }
        }
        Ok(())
    }

    /// Whether a file or a directory of a bucket looks as it is to look.
    pub(super) fn is_unchanged(&self, node: &Node, set: &SetAttr) -> bool {
        let looks = self.attr_defaults.attr(node, node.inode);
        let is_time = |time: Option<Time>| time.is_none_or(|time| !time.now && time.ns == node.mtime_ns);
        node.is_in_writable_bucket()
            && set.size.is_none()
            && set.mode.is_none_or(|mode| mode == looks.mode & 0o7777)
            && set.uid.is_none_or(|uid| uid == looks.uid)
            && set.gid.is_none_or(|gid| gid == looks.gid)
            && (node.keeps_attributes() || is_time(set.atime))
            && is_time(set.mtime)
            && !(set.kill_privileges && node.has_own_attributes())
    }
}
