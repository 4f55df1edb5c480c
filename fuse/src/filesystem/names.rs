//! MKNOD, MKDIR and LINK: new names.

use std::sync::Arc;

use bytes::Bytes;
use cavern_proto::master::mutation::Change;
use cavern_proto::master::{CreateInode, Kind, LinkInode};

use super::changes::ChangeRequest;
use super::parts::Inner;
use crate::kernel::Reply;

/// The kind of an inode with this mode.
fn kind_of(mode: u32) -> Option<Kind> {
    Some(match mode & libc::S_IFMT {
        // mknod(2) without a type makes a file.
        libc::S_IFREG | 0 => Kind::File,
        libc::S_IFIFO => Kind::Fifo,
        libc::S_IFSOCK => Kind::Socket,
        libc::S_IFCHR => Kind::CharacterDevice,
        libc::S_IFBLK => Kind::BlockDevice,
        _ => return None,
    })
}

impl Inner {
    pub(super) fn mknod(
        self: &Arc<Self>,
        kernel_parent: u64,
        name: &[u8],
        (mode, umask): (u32, u32),
        rdev: u32,
        reply: Reply,
    ) {
        let Some(kind) = kind_of(mode) else { return reply.error(libc::EINVAL) };
        let create = CreateInode { mode: mode & 0o7777, umask, rdev, ..self.new_inode(kernel_parent, name, kind) };
        self.make_inode("mknod", kernel_parent, create, reply);
    }

    pub(super) fn mkdir(self: &Arc<Self>, kernel_parent: u64, name: &[u8], (mode, umask): (u32, u32), reply: Reply) {
        let create = CreateInode { mode: mode & 0o7777, umask, ..self.new_inode(kernel_parent, name, Kind::Directory) };
        self.make_inode("mkdir", kernel_parent, create, reply);
    }

    pub(super) fn new_inode(&self, kernel_parent: u64, name: &[u8], kind: Kind) -> CreateInode {
        let (parent, name) = (self.root.to_namespace(kernel_parent), Bytes::copy_from_slice(name));
        CreateInode { parent, name, kind: kind.into(), ..CreateInode::default() }
    }

    pub(super) fn make_inode(self: &Arc<Self>, operation: &'static str, on: u64, create: CreateInode, reply: Reply) {
        let attempt = ChangeRequest { operation, on, with: None, change: Change::Create(create) };
        self.attempt(attempt, reply, |this, directory, changed, reply| this.answer_entry(directory, changed, reply));
    }

    /// A further name, in another directory perhaps, for an inode.
    pub(super) fn link(self: &Arc<Self>, kernel_node: u64, (kernel_parent, name): (u64, &[u8]), reply: Reply) {
        let link = LinkInode {
            inode: self.root.to_namespace(kernel_node),
            parent: self.root.to_namespace(kernel_parent),
            name: Bytes::copy_from_slice(name),
        };
        let change = Change::Link(link);
        let attempt = ChangeRequest { operation: "link", on: kernel_parent, with: Some(kernel_node), change };
        self.attempt(attempt, reply, |this, directory, changed, reply| this.answer_entry(directory, changed, reply));
    }
}
