//! What a mount has of its own, in its root and in no listing: the directory `.views` (see [`ViewNode`]), and `.cv`,
//! with the file `trace`, which tells what slow requests waited for.
//!
//! A name of the namespace goes first: these are found where a lookup finds nothing else. The kernel keeps neither name
//! of `.cv`. The text is made when the file is opened. Where the kernel opens files by itself (`fuse.no_open`) there is
//! no such moment, and no `.cv`.

use std::sync::Arc;

use cavern_client::Node;
use cavern_proto::master::mutation::Change;
use cavern_proto::master::{RemoveName, RenameName};

use super::directory::ReaddirKind;
use super::export::Handle;
use super::parts::Inner;
use super::views::{DIRECTORY_NAME as VIEWS_NAME, ViewNode};
use super::virtual_entries::{VirtualEntry, list};
use crate::kernel::abi::{Attr, AttrOut, EntryOut, FileLock, ROOT_NODE, fopen};
use crate::kernel::{Delivery, LockRequest, Operation, READ_MAX, Reply};
use crate::trace::Target;

const DIRECTORY_NAME: &[u8] = b".cv";
const TRACE_NAME: &[u8] = b"trace";

/// Node ids that no inode has: those of files that are being written begin far below and never come so far.
const FIRST_NODE: u64 = 1 << 63;
/// Behind all that views have.
const DIRECTORY: u64 = u64::MAX - 15;
const TRACE: u64 = DIRECTORY + 1;

/// Directories above one another that are named at most.
const DEPTH_MAX: usize = 4096;

/// Whether a node is one of these.
pub(super) fn is_virtual(kernel_node: u64) -> bool {
    kernel_node >= FIRST_NODE
}

impl Inner {
    /// What a name that the namespace does not have leads to, if it is one of these.
    pub(super) fn virtual_child(&self, parent: u64, name: &[u8]) -> Option<EntryOut> {
        match name {
            _ if parent != self.root.to_namespace(ROOT_NODE) => None,
            DIRECTORY_NAME if !self.files.has_no_open() => Some(self.virtual_entry(DIRECTORY)),
            VIEWS_NAME => Some(self.views_entry()),
            _ => None,
        }
    }

    /// Whether a change takes away one of these names, or moves it, unless the namespace has such a name.
    pub(super) fn takes_virtual(&self, change: &Change) -> bool {
        let (parent, name) = match change {
            Change::Remove(RemoveName { parent, name, .. }) => (*parent, name),
            Change::Rename(RenameName { parent, name, .. })
            | Change::RenameWhiteout(RenameName { parent, name, .. }) => (*parent, name),
            _ => return false,
        };
        self.virtual_child(parent, name).is_some()
    }

    /// Answers whatever is asked of one of these nodes. Nothing is answered with `ENOSYS`, after which the kernel would
    /// not ask for other files either.
    pub(super) fn serve_virtual(
        self: &Arc<Self>,
        node: u64,
        operation: Operation<'_>,
        reply: Reply,
        payload: &mut [u8],
    ) {
        if node < DIRECTORY {
            return self.serve_view(ViewNode::of(node), operation, reply, payload);
        }
        match operation {
            Operation::Lookup { name } if node == DIRECTORY => match (name, Handle::of_name(name)) {
                (TRACE_NAME, _) => reply.entry(&self.virtual_entry(TRACE)),
                (_, Some(Handle::Itself)) => reply.entry(&self.virtual_entry(DIRECTORY)),
                _ => reply.error(libc::ENOENT),
            },
            Operation::Lookup { .. } => reply.error(libc::ENOTDIR),
            Operation::Getattr => reply.attr(&self.virtual_attributes(node)),
            Operation::Statx => reply.statx(&self.virtual_attributes(node), None),
            Operation::Access { mask } if mask & libc::X_OK as u32 != 0 && node != DIRECTORY => {
                reply.error(libc::EACCES);
            }
            Operation::Open { flags } if node == TRACE => self.open_trace(flags.cast_signed(), reply),
            Operation::Open { .. } => reply.error(libc::EISDIR),
            Operation::Read { fh, offset, size, .. } => self.read_trace(fh, offset, size, reply),
            Operation::Release { fh } => {
                self.trace.open.remove(fh);
                reply.done();
            }
            Operation::Opendir if node == DIRECTORY => {
                // There is nothing to be closed.
                let _ = reply.opened(0, 0);
            }
            Operation::Opendir => reply.error(libc::ENOTDIR),
            Operation::Readdir { offset, size, .. } => list(own_entries(), offset, size, ReaddirKind::Names, reply),
            Operation::Readdirplus { offset, size, .. } => {
                list(own_entries(), offset, size, ReaddirKind::Entries, reply);
            }
            operation => self.serve_unchangeable(operation, reply),
        }
    }

    /// Answers what is the same for all of these.
    pub(super) fn serve_unchangeable(self: &Arc<Self>, operation: Operation<'_>, reply: Reply) {
        match operation {
            Operation::Access { mask } if mask & libc::W_OK as u32 != 0 => reply.error(libc::EROFS),
            Operation::Access { .. } | Operation::Release { .. } | Operation::Releasedir { .. } => reply.done(),
            Operation::Flush { .. } | Operation::Fsync { .. } | Operation::Fsyncdir => reply.done(),
            Operation::Statfs => self.statfs(ROOT_NODE, reply),
            Operation::Getxattr { .. } => reply.error(libc::ENODATA),
            Operation::Listxattr { size } => reply.xattr(&[], size),
            Operation::Readlink | Operation::Lseek { .. } => reply.error(libc::EINVAL),
            // Shared locks are in nobody's way.
            Operation::Getlk(LockRequest { lock, .. }) => {
                reply.lock(FileLock { kind: libc::F_UNLCK.cast_unsigned(), ..lock });
            }
            Operation::Setlk { request, .. } if request.lock.kind.cast_signed() != libc::F_WRLCK => reply.done(),
            Operation::Setlk { .. } => reply.error(libc::ENOLCK),
            // The kernel copies by reading and writing then.
            Operation::CopyFileRange(_) => reply.error(libc::EXDEV),
            _ => reply.error(libc::EROFS),
        }
    }

    fn virtual_attr(&self, node: u64) -> Attr {
        let (mode, nlink) = if node == DIRECTORY { (libc::S_IFDIR | 0o555, 2) } else { (libc::S_IFREG | 0o444, 1) };
        Attr { blksize: 4096, ..self.own_attr(node, mode, nlink) }
    }

    fn virtual_attributes(&self, node: u64) -> AttrOut {
        AttrOut { attr: self.virtual_attr(node), ..AttrOut::default() }
    }

    fn virtual_entry(&self, node: u64) -> EntryOut {
        EntryOut { nodeid: node, attr: self.virtual_attr(node), ..EntryOut::default() }
    }

    fn open_trace(&self, flags: i32, reply: Reply) {
        if flags & libc::O_ACCMODE != libc::O_RDONLY {
            return reply.error(libc::EROFS);
        }
        // After those of processes before, whose handles may still be closed.
        let number = self.files.handles.reserve();
        self.trace.open.insert(number, Arc::new(self.trace_text()));
        // Whatever the attributes say of its size, all of it is read.
        if reply.opened(number, fopen::DIRECT_IO | fopen::NOFLUSH) == Delivery::Refused {
            self.trace.open.remove(number);
        }
    }

    fn read_trace(&self, fh: u64, offset: u64, size: u32, reply: Reply) {
        let text = self.trace.open.get(fh).or_else(|| {
            // Opened in a process before this one.
            let text = (offset == 0).then(|| Arc::new(self.trace_text()))?;
            self.trace.open.insert(fh, Arc::clone(&text));
            Some(text)
        });
        let text = text.as_deref().map_or(&[][..], String::as_bytes);
        let start = text.len().min(usize::try_from(offset).unwrap_or(usize::MAX));
        let end = text.len().min(start.saturating_add(READ_MAX.min(size as usize)));
        reply.bytes(&text[start..end]);
    }

    fn trace_text(&self) -> String {
        self.trace.requests.text(|target| self.path_of(target))
    }

    /// Where in the namespace it is, as far as that is known here.
    fn path_of(&self, target: &Target) -> String {
        let mut names: Vec<String> = Vec::new();
        let text = |name: &[u8]| String::from_utf8_lossy(name).into_owned();
        if !target.name.is_empty() {
            names.push(text(&target.name));
        }
        let known = |inode| self.client.cached_node(inode);
        let (root, mut inode) = (self.root.to_namespace(ROOT_NODE), target.inode);
        let mut node: Option<Arc<Node>> = target.node.clone().or_else(|| known(inode));
        while inode != root {
            let above = node.as_ref().filter(|node| !node.name.is_empty() && names.len() < DEPTH_MAX);
            let Some(above) = above else {
                names.push(format!("(inode {inode})"));
                names.reverse();
                return names.join("/");
            };
            names.push(text(&above.name));
            inode = above.parent;
            node = known(inode);
        }
        names.reverse();
        format!("{}/{}", self.root.path().trim_end_matches('/'), names.join("/"))
    }
}

/// Those of `.cv`.
fn own_entries() -> impl Iterator<Item = VirtualEntry<'static>> {
    let entries = [
        (1, &b"."[..], DIRECTORY, libc::S_IFDIR),
        (2, b"..", ROOT_NODE, libc::S_IFDIR),
        (3, TRACE_NAME, TRACE, libc::S_IFREG),
    ];
    entries.into_iter()
}
