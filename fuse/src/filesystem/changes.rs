//! The way of every change: the inode or directory that it is about must be of a mount that can be written to, the
//! master makes it (or the bucket, where that is the truth), and the kernel gets its answer. The client's caches know
//! of it then; the kernel's own know what the kernel asked for itself, but for the question which listings it may keep.
//!
//! A change that has been sent is not aborted by a signal: only its answer says whether it was made. It has a deadline.

use std::sync::Arc;

use cavern_client::{Changed, ClientError, Node};
use cavern_proto::master::mutation::Change;

use super::parts::Inner;
use crate::kernel::{Caller, Reply};

/// A change that the kernel asks for.
pub(super) struct ChangeRequest {
    /// The system call, for the log.
    pub operation: &'static str,
    /// Whose permission counts: the kernel's node of the directory, or of the inode, that is changed.
    pub on: u64,
    /// Another directory or inode that must be of the same mount.
    pub with: Option<u64>,
    pub change: Change,
}

/// What a change of a cache-mode mount that is only read, or above the mounts, is answered with.
pub(super) fn refusal(node: &Node) -> Option<i32> {
    (!node.can_be_changed()).then_some(libc::EROFS)
}

/// The mount of a node; 0 above the mounts.
fn mount_of(node: &Node) -> u32 {
    node.mount.as_ref().map_or(0, |mount| mount.id())
}

impl Inner {
    /// Makes a change and answers by `answer`, which gets the node that the change was made on (as it was before).
    pub(super) fn attempt<Answer>(self: &Arc<Self>, attempt: ChangeRequest, reply: Reply, answer: Answer)
    where
        Answer: FnOnce(&Self, &Node, &Changed, Reply) + Send + 'static,
    {
        if let Some(errno) = self.cached_refusal(&attempt) {
            return reply.error(errno);
        }
        let (this, is_virtual) = (Arc::clone(self), self.takes_virtual(&attempt.change));
        reply.run_uninterruptible(move |reply| async move {
            let operation = attempt.operation;
            let made = this.make(attempt, reply.caller()).await;
            if is_virtual && made.as_ref().is_err_and(|error| error.errno() == libc::ENOENT) {
                // For `ENOENT` the kernel forgets the name, and detaches whatever is mounted below.
                return reply.error(libc::EBUSY);
            }
            this.answer_with(operation, made, reply, |(node, changed), reply| answer(&this, &node, &changed, reply));
        });
    }

    /// The answer to a change that cannot be made, where that is known without a question: a mount of objects is asked
    /// this by programs that do not look first.
    fn cached_refusal(&self, attempt: &ChangeRequest) -> Option<i32> {
        let node = self.known_node(attempt.on).filter(|_| attempt.with.is_none())?;
        refusal(&node)
    }

    async fn make(&self, attempt: ChangeRequest, caller: Caller) -> Result<(Arc<Node>, Changed), ClientError> {
        let node = self.node(attempt.on).await?;
        let refused = |errno| {
            let reason = format!("{node} cannot be changed");
            Err(ClientError::Refused { errno, reason })
        };
        if let Some(with) = attempt.with {
            let other = self.node(with).await?;
            if (refusal(&node).is_none() || refusal(&other).is_none()) && mount_of(&node) != mount_of(&other) {
                return refused(libc::EXDEV);
            }
        }
        if let Some(errno) = refusal(&node) {
            return refused(errno);
        }
        let user = self.limited_user(&node, caller).await;
        let changed = self.client.change_on(&node, attempt.change, (caller.uid, caller.gid), user).await?;
        // Before the answer: the kernel may open the directory as soon as it has it.
        changed.listings.iter().for_each(|directory| self.invalidations.listings().changed_here(*directory));
        // The kernel knows of it by the node that it asked for alone.
        changed.result.attributes.iter().for_each(|attr| self.changed_by(Some(attr.inode)));
        Ok((node, changed))
    }

    /// Answers what was created or linked.
    pub(super) fn answer_entry(&self, directory: &Node, changed: &Changed, reply: Reply) {
        if let Some(node) = &changed.node {
            return reply.entry(&self.entry_of(node));
        }
        // Too little was known to make a node of it: its attributes are enough, for this moment.
        match changed.attr_of(changed.result.inode) {
            Some(attr) => reply.entry(&self.entry_of(&Node::nameless(attr, directory.mount.clone()))),
            None => reply.error(libc::EIO),
        }
    }
}
