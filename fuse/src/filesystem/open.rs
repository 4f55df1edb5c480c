//! OPEN, and the answer to whatever opens a file.
//!
//! A handle is a [`File`]; this is about how the kernel is to use it. Where the client says that a version is gone, the
//! answer is `ESTALE`: the kernel then looks the path up once more by itself and opens what it leads to. The client has
//! brought its metadata up to date before it reports such an error, so that this second look finds the new version.
//! What is opened for writing, and is an object, is answered so as well: the name leads to another inode by then.
//!
//! With `fuse.no_open` there is no OPEN to answer: the first one is answered with `ENOSYS`, and the kernel opens and
//! closes by itself from then on. A version that is gone then shows at the first read.

use std::sync::Arc;

use cavern_client::journal::Slot;
use cavern_client::{Access, ClientError, File, Node, Opened, is_of_this_process};

use super::Inner;
use super::failed_reads::FailedReads;
use super::passthrough::KeptBacking;
use crate::inheritance::HandleRecord;
use crate::kernel::abi::fopen;
use crate::kernel::{Caller, Delivery, Reply};
use crate::trace::Subject;

/// An open file as the kernel has it.
pub struct OpenHandle {
    pub(super) file: File,
    pub(super) failed: FailedReads,
    /// What is written through it goes to the end of the file, if the kernel appends.
    pub(super) appends: bool,
    /// What a process after this one finds of it.
    _noted: Option<Slot>,
}

impl OpenHandle {
    pub(super) fn new(file: File) -> Self {
        Self::noted(file, false, None)
    }

    pub(super) fn noted(file: File, appends: bool, noted: Option<Slot>) -> Self {
        Self { file, failed: FailedReads::default(), appends, _noted: noted }
    }
}

/// What the flags of open(2) ask for.
pub(super) fn access(flags: i32) -> Access {
    let is_to_write = flags & libc::O_ACCMODE != libc::O_RDONLY || flags & libc::O_TRUNC != 0;
    if is_to_write { Access::Write } else { Access::Read }
}

/// Whether what a handle writes goes to the end of its file. With `O_DIRECT` the kernel may send the parts of one write
/// side by side, and where each goes is what it says.
pub(super) fn appends(flags: i32) -> bool {
    access(flags) == Access::Write && flags & libc::O_APPEND != 0 && flags & libc::O_DIRECT == 0
}

impl Inner {
    pub(super) fn open(self: &Arc<Self>, kernel_node: u64, caller: Caller, flags: u32, reply: Reply) {
        let flags = flags.cast_signed();
        let access = access(flags);
        if access == Access::Write && !self.client.has_writable() {
            return reply.error(libc::EROFS);
        }
        if self.unopened.is_some() {
            return reply.error(libc::ENOSYS);
        }
        let inode = self.root.to_namespace(kernel_node);
        let mut node = self.known_node(kernel_node);
        match self.second_opens.file(inode) {
            // While it is kept, it is found open.
            Some((kept, _)) if kept.is_fs_mode() => node = node.or(Some(kept)),
            Some((kept, file)) if access == Access::Read => {
                return self.answer_open(Some(kept), Ok(Opened::File(file)), caller, flags, reply);
            }
            _ => {}
        }
        if let Some(known) = &node
            && !known.limits_users()
            && let Some(opened) = self.client.open_cached(known, access, caller.thread)
        {
            return self.answer_open(node, opened, caller, flags, reply);
        }
        let this = Arc::clone(self);
        let reply = reply.traced(&self.trace, Subject { inode, node: node.clone(), ..Subject::default() });
        reply.defer(move |reply| async move {
            let node = match node {
                Some(node) => Ok(node),
                None => this.node(kernel_node).await,
            };
            let (node, opened) = match node {
                Ok(node) => {
                    let opened = this.open_by(&node, caller, flags).await;
                    (Some(node), opened)
                }
                Err(_) if is_of_this_process(inode) && access == Access::Read => return reply.error(libc::ESTALE),
                Err(error) => {
                    // By its name, if that is known. What prevents it shows when the kernel tries again.
                    if error.is_version_gone()
                        && access == Access::Write
                        && let Some((parent, name)) = this.second_opens.name_of(inode)
                    {
                        this.redirect_name(parent, &name, caller.thread).await;
                    }
                    (None, Err(error))
                }
            };
            this.answer_open(node, opened, caller, flags, reply);
        });
    }

    async fn open_by(&self, node: &Arc<Node>, caller: Caller, flags: i32) -> Result<Opened, ClientError> {
        match (access(flags), self.judged_user(node, caller).await) {
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
        node: Option<Arc<Node>>,
        opened: Result<Opened, ClientError>,
        caller: Caller,
        flags: i32,
        reply: Reply,
    ) {
        match (opened, node) {
            (Ok(Opened::File(file)), Some(node)) => self.opened(&node, file, flags, reply),
            (Ok(_), _) => reply.error(libc::ESTALE),
            (Err(error), node) if error.is_version_gone() => {
                match (access(flags), node) {
                    (Access::Write, node) if node.as_ref().is_none_or(|node| node.moves_when_written()) => {
                        self.second_opens.expect_writer(caller.thread);
                    }
                    (_, node) => self.second_opens.expect(node.as_deref()),
                }
                reply.error(libc::ESTALE);
            }
            (Err(error), Some(node)) if access(flags) == Access::Read && self.client.logs_failed_open(&node) => {
                reply.error(error.errno());
            }
            (Err(error), _) => self.failures.answer(reply, "open", &error),
        }
    }

    fn opened(&self, node: &Arc<Node>, file: File, flags: i32, reply: Reply) {
        let backing = file.version_node().and_then(|node| {
            let register = || self.passthrough.backing_of(&file, &reply, &self.inheritance);
            self.open_inodes.opened(node, register)
        });
        let open_flags = self.open_flags(node, &file, flags);
        let appends = appends(flags) && file.opened_to_append();
        let number = self.enter(file, appends, backing.as_deref(), &reply);
        let delivery = match backing {
            Some(backing) => {
                self.passthrough.opened();
                // Without KEEP_CACHE the kernel drops pages that it had of it before.
                reply.opened_passthrough(number, open_flags & !fopen::KEEP_CACHE, backing.backing())
            }
            None => reply.opened(number, open_flags),
        };
        if delivery == Delivery::Refused {
            self.closed(number);
        }
    }

    /// How the kernel is to use a file that is being opened.
    pub(super) fn open_flags(&self, node: &Node, file: &File, flags: i32) -> u32 {
        let access = flags & libc::O_ACCMODE;
        // Who only writes gains nothing by pages: they cost a copy, and a question about the file's capabilities. With
        // O_DIRECT, reads as those of a direct file can be interrupted; through the pages' own way not even SIGKILL
        // could. The pages of a write that appends would be those of where the kernel believes the end to be.
        let is_direct = self.direct
            || access == libc::O_WRONLY
            || flags & libc::O_DIRECT != 0
            || appends(flags) && node.is_fs_mode();
        let mut open_flags = 0;
        if file.keeps_pages(node) {
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
    pub(super) fn enter(&self, file: File, appends: bool, backing: Option<&KeptBacking>, reply: &Reply) -> u64 {
        if let Some(earlier) = self.inheritance.superseded(reply) {
            drop(self.closed(earlier.number));
        }
        let number = self.files.reserve();
        let noted = self.inheritance.note_handle(&HandleRecord {
            number,
            inode: file.inode(),
            unique: reply.unique(),
            is_directory: false,
            is_kept: file.locks_end_with_close(),
            parent: 0,
            backing: backing.map(KeptBacking::number),
            appends,
        });
        self.files.insert(number, Arc::new(OpenHandle::noted(file, appends, noted)));
        number
    }

    /// Takes a handle off the table; what is in it is closed when it is dropped.
    pub(super) fn closed(&self, number: u64) -> Option<Arc<OpenHandle>> {
        let handle = self.files.remove(number)?;
        if let Some(node) = handle.file.version_node() {
            self.open_inodes.closed(node.inode);
        }
        Some(handle)
    }
}
