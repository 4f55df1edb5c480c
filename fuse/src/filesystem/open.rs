//! OPEN, READ and RELEASE of files.
//!
//! What a handle reads is one version of one object. When that version is gone at open, the answer is `ESTALE`: the
//! kernel then looks the path up once more by itself and opens what it leads to, so the metadata are brought up to date
//! before that answer is given.

use std::sync::Arc;

use cavern_client::{ClientError, Node, OpenFile};
use cavern_proto::master::Consistency;

use super::Inner;
use crate::kernel::abi::fopen;
use crate::kernel::{Delivery, Reply};

impl Inner {
    pub(super) fn open(self: &Arc<Self>, kernel_node: u64, flags: u32, reply: Reply) {
        let flags = flags.cast_signed();
        if flags & libc::O_ACCMODE != libc::O_RDONLY || flags & libc::O_TRUNC != 0 {
            return reply.error(libc::EROFS);
        }
        let node = self.known_node(kernel_node);
        if let Some(node) = &node
            && !always_checked(node)
            && let Some(file) = self.client.files().open_cached(node)
        {
            return self.opened(file, reply);
        }
        let this = Arc::clone(self);
        reply.defer(move |reply| async move {
            match this.open_checked(kernel_node, node).await {
                Ok(file) => this.opened(file, reply),
                Err(error) if error.is_version_gone() => reply.error(libc::ESTALE),
                Err(error) => this.failures.answer(reply, "open", &error),
            }
        });
    }

    async fn open_checked(&self, kernel_node: u64, node: Option<Arc<Node>>) -> Result<Arc<OpenFile>, ClientError> {
        let node = match node {
            Some(node) => node,
            None => self.node(kernel_node).await?,
        };
        if node.is_directory() {
            return Err(ClientError::IsADirectory(node.to_string()));
        }
        if always_checked(&node) {
            let current = self.client.metadata().revalidate(&node).await?;
            if current.inode != node.inode {
                return Err(ClientError::Stale(node.to_string()));
            }
        }
        let opened = self.client.files().open(&node).await;
        if let Err(error) = &opened
            && error.is_version_gone()
            && !always_checked(&node)
        {
            // The kernel looks the name up again as soon as it has our answer, and must not find the old inode.
            // Whatever comes of this, the version is gone.
            let _ = self.client.metadata().revalidate(&node).await;
        }
        opened
    }

    fn opened(&self, file: Arc<OpenFile>, reply: Reply) {
        let inode = file.node().inode;
        self.open_nodes.opened(file.node());
        let number = self.files.insert(file);
        // An inode is one version for ever: its pages stay right for as long as the kernel has room for them.
        let flags = if self.direct { fopen::DIRECT_IO } else { fopen::KEEP_CACHE };
        if reply.opened(number, flags) == Delivery::Refused {
            self.files.remove(number);
            self.open_nodes.closed(inode);
        }
    }

    pub(super) fn read(self: &Arc<Self>, fh: u64, offset: u64, size: u32, reply: Reply, payload: &mut [u8]) {
        let Some(file) = self.files.get(fh) else { return reply.error(libc::EBADF) };
        let length = payload.len().min(size as usize);
        if let Some(read) = file.read_now(offset, &mut payload[..length]) {
            return reply.bytes(&payload[..read]);
        }
        reply.defer(move |reply| async move {
            match file.read(offset, length).await {
                Ok(bytes) => reply.bytes(&bytes),
                // The client has logged what it tried.
                Err(error) => reply.error(error.errno()),
            }
        });
    }

    pub(super) fn release(&self, fh: u64, reply: Reply) {
        // Answered first: nobody waits for what dropping the file may take.
        let file = self.files.remove(fh);
        if let Some(file) = &file {
            self.open_nodes.closed(file.node().inode);
        }
        reply.done();
        drop(file);
    }
}

/// Whether each open of the file asks the bucket.
fn always_checked(node: &Node) -> bool {
    node.mount.as_ref().is_some_and(|mount| mount.consistency() == Consistency::Always)
}
