//! OPEN, and the answer to whatever opens a file.
//!
//! A handle is a [`File`]; this is about how the kernel is to use it. Where the client says that a version is gone, the
//! answer is `ESTALE`: the kernel then looks the path up once more by itself and opens what it leads to. The client has
//! brought its metadata up to date before it reports such an error, so that this second look finds the new version.
//! What is opened for writing, and is an object, is answered so as well: the name leads to another inode by then.
//!
//! With `fuse.no_open` there is no OPEN to answer: the first one is answered with `ENOSYS`, and the kernel opens and
//! closes by itself from then on. A version that is gone then shows at the first read.
//!
//! A file of an fs-mode mount that cannot be read as the other handles of its node are is answered with `ESTALE`, too,
//! and its name leads to another node from then on: see [`open_nodes`](super::open_nodes).

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use cavern_client::{Access, ClientError, File, Node, Opened, is_of_this_process};
use cavern_conf::host;
use cavern_proto::journal::{HandleRecord, KernelBlock};

use super::open_handle::OpenHandle;
use super::open_nodes::{Conflict, IoMode, OpenIntent};
use super::parts::Inner;
use super::passthrough::BackingFile;
use crate::aliases::number_of;
use crate::kernel::abi::fopen;
use crate::kernel::{Caller, Delivery, Reply};
use crate::trace::Target;

/// For how long the file of a block is waited for, so that the kernel may read it by itself. Less than anybody notices;
/// what takes longer is waited for when the file is read.
const PATIENCE: Duration = Duration::from_millis(100);
/// A file whose attributes or bytes have changed since this long ago, in nanoseconds, may be about to be changed again.
const AT_REST_NS: i64 = 2_000_000_000;

/// What the flags of open(2) ask for.
pub(super) fn access(flags: i32) -> Access {
    let is_to_write = flags & libc::O_ACCMODE != libc::O_RDONLY || flags & libc::O_TRUNC != 0;
    if is_to_write { Access::Write } else { Access::Read }
}

/// What a handle of a file of an fs-mode mount is for.
fn intent(flags: i32) -> OpenIntent {
    match (flags & libc::O_ACCMODE, access(flags)) {
        (_, Access::Read) => OpenIntent::Read,
        (libc::O_WRONLY, Access::Write) => OpenIntent::Write,
        (_, Access::Write) => OpenIntent::Both,
    }
}

/// Whether what a handle writes goes to the end of its file. With `O_DIRECT` the kernel may send the parts of one write
/// side by side, and where each goes is what it says.
pub(super) fn appends(flags: i32) -> bool {
    access(flags) == Access::Write && flags & libc::O_APPEND != 0 && flags & libc::O_DIRECT == 0
}

impl Inner {
    pub(super) fn open(self: &Arc<Self>, kernel_node: u64, flags: u32, reply: Reply) {
        let flags = flags.cast_signed();
        let access = access(flags);
        if access == Access::Write && !self.client.has_writable() {
            return reply.error(libc::EROFS);
        }
        if self.files.has_no_open() {
            return reply.error(libc::ENOSYS);
        }
        let inode = self.root.to_namespace(kernel_node);
        let mut node = self.known_node(kernel_node);
        match self.files.retries.file(inode) {
            // While it is kept, it is found open.
            Some((kept, _)) if kept.is_fs_mode() => node = node.or(Some(kept)),
            Some((kept, file)) if access == Access::Read => {
                return self.answer_open(kernel_node, Some(kept), Ok(Opened::File(file)), flags, reply);
            }
            _ => {}
        }
        if let Some(known) = &node
            && !known.limits_users()
            && let Some(opened) = self.client.open_cached(known, access, reply.caller().thread)
        {
            let Some(file) = self.awaits_block(kernel_node, known, &opened, flags) else {
                return self.answer_open(kernel_node, node, opened, flags, reply);
            };
            let this = Arc::clone(self);
            let reply = reply.traced(&self.trace.requests, Target { inode, node: node.clone(), ..Target::default() });
            return reply.begin(move |reply| async move {
                let _late = tokio::time::timeout(PATIENCE, file.find_block()).await;
                this.answer_open(kernel_node, node, opened, flags, reply);
            });
        }
        let this = Arc::clone(self);
        let reply = reply.traced(&self.trace.requests, Target { inode, node: node.clone(), ..Target::default() });
        let is_read = access == Access::Read && node.is_some();
        let task = move |reply: Reply| async move {
            let node = match node {
                Some(node) => Ok(node),
                None => this.node(kernel_node).await,
            };
            let (node, opened) = match node {
                Ok(node) => {
                    let opened = this.open_by(&node, reply.caller(), flags).await;
                    if let Some(file) = this.awaits_block(kernel_node, &node, &opened, flags) {
                        let _late = tokio::time::timeout(PATIENCE, file.find_block()).await;
                    }
                    (Some(node), opened)
                }
                Err(_) if is_of_this_process(inode) && access == Access::Read => return reply.error(libc::ESTALE),
                Err(error) => {
                    // By its name, if that is known. What prevents it shows when the kernel tries again.
                    if error.is_version_gone()
                        && access == Access::Write
                        && let Some((parent, name)) = this.files.retries.name_of(inode)
                    {
                        this.redirect_name(parent, &name, reply.caller().thread).await;
                    }
                    (None, Err(error))
                }
            };
            this.answer_open(kernel_node, node, opened, flags, reply);
        };
        // The bytes of a small file have been asked for before another thread has woken up.
        if is_read { reply.begin(task) } else { reply.defer(task) }
    }

    /// The file, if it is read by the kernel itself once its block has been found.
    fn awaits_block(
        &self,
        kernel_node: u64,
        node: &Node,
        opened: &Result<Opened, ClientError>,
        flags: i32,
    ) -> Option<File> {
        let Ok(Opened::File(file)) = opened else { return None };
        if !node.is_fs_mode() || !self.files.passthrough.may_have(node.inode) || intent(flags) != OpenIntent::Read {
            return None;
        }
        let is_wanted = self.files.nodes.is_read_by_kernel(kernel_node) || self.may_begin_to_pass_through(node);
        let is_by_requests = flags & libc::O_DIRECT != 0 || self.root.aliases().is_superseded(kernel_node);
        (is_wanted && !is_by_requests && file.awaits_block()).then(|| file.clone())
    }

    /// Whether the kernel may begin to read a file of an fs-mode mount by itself: one that nobody writes to, as far as
    /// that can be seen.
    fn may_begin_to_pass_through(&self, node: &Node) -> bool {
        node.size > 0
            && host::wall_ns().saturating_sub(node.ctime_ns) >= AT_REST_NS
            && self.root.aliases().allows_passthrough(node.inode)
    }

    async fn open_by(&self, node: &Arc<Node>, caller: Caller, flags: i32) -> Result<Opened, ClientError> {
        match (access(flags), self.limited_user(node, caller).await) {
            (Access::Write, Some(user)) => {
                let read = flags & libc::O_ACCMODE != libc::O_WRONLY;
                self.client.open_to_write(node, read, user).await
            }
            (Access::Read, Some(user)) => self.client.open_to_read_by(node, &user, caller.thread).await,
            (access, None) => self.client.open(node, access, caller.thread).await,
        }
    }

    /// Answers an OPEN of `node`, if that was known.
    fn answer_open(
        &self,
        kernel_node: u64,
        node: Option<Arc<Node>>,
        opened: Result<Opened, ClientError>,
        flags: i32,
        reply: Reply,
    ) {
        self.close_earlier(&reply);
        match (opened, node) {
            (Ok(Opened::File(file)), Some(node)) => {
                self.opened(kernel_node, &node, file, flags, reply);
            }
            (Ok(_), _) => reply.error(libc::ESTALE),
            (Err(error), node) if error.is_version_gone() => {
                match (access(flags), node) {
                    (Access::Write, node) if node.as_ref().is_none_or(|node| node.moves_when_written()) => {
                        self.files.retries.expect_writer(reply.caller().thread);
                    }
                    (_, node) => self.files.retries.expect(node.as_deref()),
                }
                reply.error(libc::ESTALE);
            }
            (Err(error), Some(node)) if access(flags) == Access::Read && self.client.logs_failed_open(&node) => {
                reply.error(error.errno());
            }
            (Err(error), _) => self.failures.answer(reply, "open", &error),
        }
    }

    fn opened(&self, kernel_node: u64, node: &Arc<Node>, file: File, flags: i32, reply: Reply) {
        let how = if node.is_fs_mode() {
            let register =
                |descriptor: BorrowedFd<'_>| self.files.passthrough.register(descriptor, &reply, &self.mount_journal);
            let find = |others: Option<&KernelBlock>| {
                let may_begin = || others.is_some() || self.may_begin_to_pass_through(node);
                let may = self.files.passthrough.may_have(node.inode) && may_begin();
                let (block, backing, reads) = if may { file.kernel_block(others, register) } else { None }?;
                Some(IoMode { backing: Some(backing), block: Some((block, reads)), ..IoMode::default() })
            };
            match self.files.nodes.opened(kernel_node, intent(flags), self.root.aliases(), find) {
                Ok(how) => how,
                Err(Conflict) => {
                    self.supersede(kernel_node, node);
                    return reply.error(libc::ESTALE);
                }
            }
        } else {
            let backing = file.version_node().and_then(|node| {
                let register = || self.files.passthrough.backing_of(&file, &reply, &self.mount_journal);
                self.files.inodes.opened(node, register)
            });
            IoMode { backing, ..IoMode::default() }
        };
        let open_flags = self.open_flags(node, &file, flags) | how.open_flags;
        let appends = appends(flags) && file.opened_to_append();
        let (backing, is_by_requests) = (how.backing.clone(), how.open_flags != 0);
        let number = self.enter(file, how, appends, &reply);
        let delivery = match backing {
            Some(backing) => {
                if !is_by_requests {
                    self.files.passthrough.opens.fetch_add(1, Relaxed);
                }
                // Without KEEP_CACHE the kernel drops pages that it had of it before.
                reply.opened_passthrough(number, open_flags & !fopen::KEEP_CACHE, backing.backing())
            }
            None => reply.opened(number, open_flags),
        };
        if delivery == Delivery::Refused {
            self.files.closed(number);
        }
    }

    /// A handle that cannot be read as the others of its node are: the name leads to another node from now on.
    pub(super) fn supersede(&self, kernel_node: u64, node: &Node) {
        self.files.nodes.supersede(kernel_node, self.root.aliases());
        self.invalidations.forget_attributes(kernel_node);
        self.invalidations.repeat_entry(self.root.to_kernel(node.parent), &node.name);
    }

    /// What was changed by way of one node of an inode, the kernel forgets of the others: attributes before this
    /// returns, pages soon after.
    pub(super) fn changed_by(&self, kernel_node: Option<u64>) {
        let has_others = |node: &u64| self.root.aliases().has_others(self.root.to_namespace(*node));
        if let Some(node) = kernel_node.filter(has_others) {
            self.invalidations.changed_by(node);
        }
    }

    /// How the kernel is to use a file that is being opened.
    pub(super) fn open_flags(&self, node: &Node, file: &File, flags: i32) -> u32 {
        let access = flags & libc::O_ACCMODE;
        // Who only writes gains nothing by pages: they cost a copy, and a question about the file's capabilities. With
        // O_DIRECT, reads as those of a direct file can be interrupted; through the pages' own way not even SIGKILL
        // could. The pages of a write that appends would be those of where the kernel believes the end to be.
        let is_direct = self.features.direct
            || access == libc::O_WRONLY
            || flags & libc::O_DIRECT != 0
            || appends(flags) && node.is_fs_mode();
        let mut open_flags = 0;
        // What is known of pages is not known by node.
        if !self.root.aliases().has_others(node.inode) && file.keeps_pages(node) {
            open_flags |= fopen::KEEP_CACHE;
        }
        if is_direct {
            open_flags |= fopen::DIRECT_IO | fopen::PARALLEL_DIRECT_WRITES;
        }
        if access == libc::O_RDONLY && !file.locks_end_with_close() {
            open_flags |= fopen::NOFLUSH;
        }
        open_flags
    }

    /// Enters an open file; its number is for the kernel.
    pub(super) fn enter(&self, file: File, how: IoMode, appends: bool, reply: &Reply) -> u64 {
        self.close_earlier(reply);
        let number = self.files.handles.reserve();
        let record = HandleRecord {
            number,
            inode: file.inode(),
            unique: reply.unique(),
            is_kept: file.locks_end_with_close(),
            backing: how.backing.as_deref().map(BackingFile::number),
            appends,
            alias: how.node.map_or(0, number_of),
            block: how.block.as_ref().map(|(block, _)| *block),
            ..HandleRecord::default()
        };
        let noted = self.mount_journal.note_handle(&record);
        self.files.insert(number, OpenHandle::noted(file, how, appends, noted));
        number
    }

    /// A process before this one has opened a handle for the same request: nobody got it.
    fn close_earlier(&self, reply: &Reply) {
        if let Some(earlier) = self.mount_journal.superseded(reply) {
            drop(self.files.closed(earlier.number));
        }
    }
}
