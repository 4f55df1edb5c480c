//! SYMLINK and READLINK.

use std::sync::Arc;

use bytes::Bytes;
use cavern_proto::master::{CreateInode, Kind};

use super::parts::Inner;
use crate::kernel::Reply;

impl Inner {
    pub(super) fn symlink(self: &Arc<Self>, kernel_parent: u64, name: &[u8], target: &[u8], reply: Reply) {
        let target = Bytes::copy_from_slice(target);
        let create = CreateInode { target, ..self.new_inode(kernel_parent, name, Kind::Symlink) };
        self.make_inode("symlink", kernel_parent, create, reply);
    }

    pub(super) fn readlink(self: &Arc<Self>, kernel_node: u64, reply: Reply) {
        self.with_node(kernel_node, "readlink", reply, |_, node, reply| match node.posix() {
            Some(posix) if node.kind == Kind::Symlink => reply.bytes(&posix.target),
            // Buckets have no symlinks.
            _ => reply.error(libc::EINVAL),
        });
    }
}
