//! File handles: name_to_handle_at(2), open_by_handle_at(2), and servers of network file systems that show a mount to
//! others.
//!
//! The kernel makes a handle of an inode's number and generation, and finds its way back by looking up `.`, and of a
//! directory `..`, in what it has a number of. Numbers of the namespace are never given twice in a cluster, so the
//! generation stands for the cluster: a handle is good for as long as the inode exists, whichever `cv fuse` serves the
//! mount, and `ESTALE` after that. Files that are being written to a bucket have numbers of this process alone; their
//! handles end with it.

use std::sync::Arc;

use cavern_client::{ClientError, Node};
use cavern_proto::ROOT_INODE;

use super::parts::Inner;
use crate::kernel::Reply;
use crate::kernel::abi::ROOT_NODE;

/// Directories above one another at most: as many components as a path may have, and more.
const DEPTH_MAX: usize = 4096;

/// What is looked up of an inode without a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Handle {
    Itself,
    Parent,
}

impl Handle {
    /// `.` and `..` are no names that a program can look up.
    pub(super) fn of_name(name: &[u8]) -> Option<Self> {
        match name {
            b"." => Some(Self::Itself),
            b".." => Some(Self::Parent),
            _ => None,
        }
    }
}

fn gone(node: &Node) -> ClientError {
    ClientError::Stale(node.to_string())
}

impl Inner {
    /// Of the mount's root, whatever that is, it is 0.
    pub(super) fn generation(&self, inode: u64) -> u64 {
        if self.root.is_root(self.root.to_kernel(inode)) { 0 } else { self.generations.of(inode) }
    }

    pub(super) fn lookup_handle(self: &Arc<Self>, kernel_node: u64, handle: Handle, reply: Reply) {
        let this = Arc::clone(self);
        reply.defer(move |reply| async move {
            match this.found_by_handle(kernel_node, handle).await {
                Ok(node) => {
                    let mut entry = this.entry_of(&node);
                    if handle == Handle::Itself && !this.root.is_root(kernel_node) {
                        // By whatever node the handle was made of.
                        entry.nodeid = kernel_node;
                        if this.root.aliases().is_superseded(kernel_node) {
                            (entry.attr_valid, entry.attr_valid_nsec) = (0, 0);
                        }
                    }
                    reply.entry(&entry);
                }
                Err(error) => this.failures.answer(reply, "lookup", &error),
            }
        });
    }

    async fn found_by_handle(&self, kernel_node: u64, handle: Handle) -> Result<Arc<Node>, ClientError> {
        let node = self.node(kernel_node).await?;
        if node.is_removed() || !self.is_shown(&node).await? {
            return Err(gone(&node));
        }
        match handle {
            Handle::Parent if !self.root.is_root(kernel_node) => self.node(self.root.to_kernel(node.parent)).await,
            _ => Ok(node),
        }
    }

    /// Whether a node lies in the part of the namespace that is mounted here.
    async fn is_shown(&self, node: &Arc<Node>) -> Result<bool, ClientError> {
        let root = self.root.to_namespace(ROOT_NODE);
        let mut at = Arc::clone(node);
        for _ in 0..DEPTH_MAX {
            match at.inode {
                _ if root == ROOT_INODE => return Ok(true),
                inode if inode == root => return Ok(true),
                ROOT_INODE => return Ok(false),
                _ => at = self.client.metadata().node(at.parent).await?,
            }
        }
        Ok(false)
    }
}
