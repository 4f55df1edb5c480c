//! GETATTR and STATX, and what the kernel gets to know of a node: its attributes, and for how long it may believe them.

use std::sync::Arc;
use std::time::Duration;

use cavern_client::{ClientError, Node};

use super::attr_defaults::{blocks, time};
use super::parts::Inner;
use crate::kernel::Reply;
use crate::kernel::abi::{Attr, AttrOut, EntryOut};

/// For names that could not be invalidated when everything must be.
pub(super) const FORGOTTEN_SOON: Duration = Duration::from_secs(1);

impl Inner {
    /// What the kernel gets to know of a node by LOOKUP and READDIRPLUS.
    pub(super) fn entry_of(&self, node: &Node) -> EntryOut {
        let looks = &self.attr_defaults;
        let trust = self.client.trust(node);
        let mut entry = looks.entry_timeout.min(trust);
        if self.is_checked_by_lookup(node) {
            entry = Duration::ZERO;
        } else if !self.root.remembers(node.parent, &node.name) {
            entry = entry.min(FORGOTTEN_SOON);
        }
        let attr = looks.attr_timeout.min(trust);
        EntryOut {
            nodeid: self.root.to_kernel(node.inode),
            generation: self.generation(node.inode),
            entry_valid: entry.as_secs(),
            entry_valid_nsec: entry.subsec_nanos(),
            attr_valid: attr.as_secs(),
            attr_valid_nsec: attr.subsec_nanos(),
            attr: self.attr_of(node),
        }
    }

    /// With what was written here that the master does not know yet.
    fn attr_of(&self, node: &Node) -> Attr {
        let mut attr = self.attr_defaults.attr(node, self.root.shown_number(node.inode));
        if let Some(uncommitted) = self.client.uncommitted(node) {
            attr.size = uncommitted.size;
            attr.blocks = blocks(uncommitted.allocated, uncommitted.size);
            (attr.mtime, attr.mtimensec) = time(uncommitted.written_ns);
            (attr.ctime, attr.ctimensec) = (attr.mtime, attr.mtimensec);
        }
        attr
    }

    pub(super) fn attributes_of(&self, node: &Node) -> AttrOut {
        let valid = self.attr_defaults.attr_timeout.min(self.client.trust(node));
        AttrOut {
            attr_valid: valid.as_secs(),
            attr_valid_nsec: valid.subsec_nanos(),
            dummy: 0,
            attr: self.attr_of(node),
        }
    }

    /// Attributes for one of the kernel's nodes. What is changed by way of others of the same inode, the kernel does
    /// not know of a node that has been superseded: it believes nothing for any time.
    pub(super) fn attributes_at(&self, kernel_node: u64, node: &Node) -> AttrOut {
        let attributes = self.attributes_of(node);
        if self.root.aliases().is_superseded(kernel_node) {
            return AttrOut { attr_valid: 0, attr_valid_nsec: 0, ..attributes };
        }
        attributes
    }

    pub(super) fn getattr(self: &Arc<Self>, kernel_node: u64, reply: Reply) {
        self.stat(kernel_node, reply, |attributes, _, reply| reply.attr(attributes));
    }

    pub(super) fn statx(self: &Arc<Self>, kernel_node: u64, reply: Reply) {
        self.stat(kernel_node, reply, |attributes, node, reply| {
            reply.statx(attributes, node.posix().and_then(|posix| posix.btime_ns));
        });
    }

    /// Answers with the attributes of an inode. If it is gone, they are those of what its name leads to now, for this
    /// once: the kernel asks before it opens, and `ESTALE` would use up the one retry that the open may need.
    fn stat(
        self: &Arc<Self>,
        kernel_node: u64,
        reply: Reply,
        answer: impl FnOnce(&AttrOut, &Node, Reply) + Send + 'static,
    ) {
        if let Some(node) = self.known_node(kernel_node) {
            return answer(&self.attributes_at(kernel_node, &node), &node, reply);
        }
        let this = Arc::clone(self);
        reply.defer(move |reply| async move {
            let error = match this.node(kernel_node).await {
                Ok(node) => return answer(&this.attributes_at(kernel_node, &node), &node, reply),
                Err(error) => error,
            };
            let successor = this.successor(kernel_node, &error).await;
            // Somebody may have opened what was kept for him meanwhile.
            if let Some(node) = this.open_version(kernel_node) {
                return answer(&this.attributes_of(&node), &node, reply);
            }
            match successor {
                Some(node) => {
                    let attributes = AttrOut { attr_valid: 0, attr_valid_nsec: 0, ..this.attributes_of(&node) };
                    answer(&attributes, &node, reply);
                }
                None => this.failures.answer(reply, "stat", &error),
            }
        });
    }

    /// What the name of a file that is gone leads to now. Nobody has it open, or it would not be gone: who has must not
    /// see another size. Where the kernel opens by itself, that is not known.
    async fn successor(&self, kernel_node: u64, error: &ClientError) -> Option<Arc<Node>> {
        if !error.is_version_gone() || self.files.has_no_open() {
            return None;
        }
        let (parent, name) = self.files.retries.name_of(self.root.to_namespace(kernel_node))?;
        let node = match self.client.shown_here(parent, &name) {
            Some(node) => node,
            None => self.client.metadata().lookup(parent, &name).await.ok()?,
        };
        node.moves_when_written().then_some(node)
    }
}
