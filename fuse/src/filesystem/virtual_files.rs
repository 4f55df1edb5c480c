//! What a mount has of its own: the directory `.cv` in its root, which no listing shows, and in it the file `trace`,
//! which tells what slow requests waited for.
//!
//! A name of the namespace goes first: `.cv` is found where a lookup finds nothing else, and the kernel keeps neither
//! name. The text is made when the file is opened. Where the kernel opens files by itself (`fuse.no_open`) there is no
//! such moment, and no `.cv`.

use std::sync::Arc;

use cavern_client::Node;
use cavern_conf::host;

use super::attr_defaults::time;
use super::directory::ReaddirKind;
use super::export::Handle;
use super::parts::Inner;
use crate::kernel::abi::{Attr, AttrOut, EntryOut, ROOT_NODE, fopen};
use crate::kernel::directory::{Added, DirectoryEntry};
use crate::kernel::{Delivery, DirectoryPage, Operation, READ_MAX, Reply};
use crate::trace::Target;

const DIRECTORY_NAME: &[u8] = b".cv";
const TRACE_NAME: &[u8] = b"trace";

/// Node ids that no inode has: those of files that are being written begin far below and never come so far.
const FIRST_NODE: u64 = u64::MAX - 15;
const DIRECTORY: u64 = FIRST_NODE;
const TRACE: u64 = FIRST_NODE + 1;

/// Directories above one another that are named at most.
const DEPTH_MAX: usize = 4096;

/// Whether a node is one of these.
pub(super) fn is_virtual(kernel_node: u64) -> bool {
    kernel_node >= FIRST_NODE
}

impl Inner {
    /// Whether a name that the namespace does not have is that of the directory.
    pub(super) fn is_virtual_directory(&self, parent: u64, name: &[u8]) -> bool {
        name == DIRECTORY_NAME && parent == self.root.to_namespace(ROOT_NODE) && !self.files.has_no_open()
    }

    /// Answers a lookup with the directory.
    pub(super) fn show_virtual_directory(&self, reply: Reply) {
        reply.entry(&self.virtual_entry(DIRECTORY));
    }

    /// Answers whatever is asked of one of these nodes. Nothing is answered with `ENOSYS`, after which the kernel would
    /// not ask for other files either.
    pub(super) fn serve_virtual(self: &Arc<Self>, node: u64, operation: Operation<'_>, reply: Reply) {
        match operation {
            Operation::Lookup { name } if node == DIRECTORY => match (name, Handle::of_name(name)) {
                (TRACE_NAME, _) => reply.entry(&self.virtual_entry(TRACE)),
                (_, Some(Handle::Itself)) => reply.entry(&self.virtual_entry(DIRECTORY)),
                _ => reply.error(libc::ENOENT),
            },
            Operation::Lookup { .. } => reply.error(libc::ENOTDIR),
            Operation::Getattr => reply.attr(&self.virtual_attributes(node)),
            Operation::Statx => reply.statx(&self.virtual_attributes(node), None),
            Operation::Access { mask } if mask & libc::W_OK as u32 != 0 => reply.error(libc::EROFS),
            Operation::Access { mask } if mask & libc::X_OK as u32 != 0 && node != DIRECTORY => {
                reply.error(libc::EACCES);
            }
            Operation::Access { .. } | Operation::Releasedir { .. } => reply.done(),
            Operation::Flush { .. } | Operation::Fsync { .. } | Operation::Fsyncdir => reply.done(),
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
            Operation::Readdir { offset, size, .. } => list(offset, size, ReaddirKind::Names, reply),
            Operation::Readdirplus { offset, size, .. } => list(offset, size, ReaddirKind::Entries, reply),
            Operation::Statfs => self.statfs(ROOT_NODE, reply),
            Operation::Getxattr { .. } => reply.error(libc::ENODATA),
            Operation::Listxattr { size } => reply.xattr(&[], size),
            Operation::Readlink | Operation::Lseek { .. } => reply.error(libc::EINVAL),
            Operation::Getlk(_) | Operation::Setlk { .. } => reply.error(libc::ENOLCK),
            // The kernel copies by reading and writing then.
            Operation::CopyFileRange(_) => reply.error(libc::EXDEV),
            _ => reply.error(libc::EROFS),
        }
    }

    fn virtual_attr(&self, node: u64) -> Attr {
        let (seconds, nanoseconds) = time(host::wall_ns());
        let owner = &self.attr_defaults.bucket;
        Attr {
            ino: node,
            atime: seconds,
            mtime: seconds,
            ctime: seconds,
            atimensec: nanoseconds,
            mtimensec: nanoseconds,
            ctimensec: nanoseconds,
            mode: if node == DIRECTORY { libc::S_IFDIR | 0o555 } else { libc::S_IFREG | 0o444 },
            nlink: if node == DIRECTORY { 2 } else { 1 },
            uid: owner.uid,
            gid: owner.gid,
            blksize: 4096,
            ..Attr::default()
        }
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

/// Answers with the entries of the directory from `offset` on.
fn list(offset: u64, size: u32, kind: ReaddirKind, reply: Reply) {
    let entries =
        [(&b"."[..], DIRECTORY, libc::S_IFDIR), (b"..", ROOT_NODE, libc::S_IFDIR), (TRACE_NAME, TRACE, libc::S_IFREG)];
    let mut page = DirectoryPage::new(READ_MAX.min(size as usize));
    for (place, (name, ino, mode)) in (1..).zip(entries).skip(usize::try_from(offset).unwrap_or(usize::MAX)) {
        let entry = DirectoryEntry { ino, next_offset: place, mode, name };
        let added = match kind {
            ReaddirKind::Names => page.add(entry),
            // Without a node id: the kernel takes no reference.
            ReaddirKind::Entries => page.add_plus(&EntryOut::default(), entry),
        };
        if added == Added::Full {
            break;
        }
    }
    reply.bytes(page.as_bytes());
}
