//! SETATTR: permissions, owner, times, length; and ACCESS.
//!
//! Of objects nothing but the length can be set; to set what is so already is no change, though: programs that copy do
//! that.
//!
//! Who may do so, the kernel has decided (`default_permissions`). Set-user-ID and set-group-ID bits and capabilities of
//! a file that is cut or given away are the master's to remove: see [`privileges`](super::privileges).

use std::sync::Arc;

use cavern_client::{AttributeChange, ClientError, Node};
use cavern_proto::master::{SetAttr, Time};

use super::changes::refusal;
use super::parts::Inner;
use super::privileges::{may_have_privileges, with_losses};
use crate::kernel::{Caller, NewAttributes, NewTime, Reply};

/// The errno, as POSIX has it, of a time that cannot be kept.
fn time(time: NewTime) -> Result<Time, i32> {
    match time {
        NewTime::Now => Ok(Time { now: true, ns: 0 }),
        NewTime::At(ns) => Ok(Time { now: false, ns }),
        NewTime::OutOfRange => Err(libc::EINVAL),
    }
}

impl Inner {
    pub(super) fn setattr(self: &Arc<Self>, kernel_node: u64, set: NewAttributes, reply: Reply) {
        let writer = set.writer;
        let (atime, mtime) = match (set.atime.map(time).transpose(), set.mtime.map(time).transpose()) {
            (Ok(atime), Ok(mtime)) => (atime, mtime),
            (Err(errno), _) | (_, Err(errno)) => return reply.error(errno),
        };
        let set = SetAttr {
            inode: self.root.to_namespace(kernel_node),
            mode: set.mode,
            uid: set.uid,
            gid: set.gid,
            atime,
            mtime,
            size: set.size,
            kill_privileges: set.kill_privileges,
            ..SetAttr::default()
        };
        let sets_nothing = set == SetAttr { inode: set.inode, ..SetAttr::default() };
        let node = self.known_node(kernel_node);
        let may_lose =
            (sets_nothing || set.kill_privileges) && node.as_ref().is_none_or(|node| may_have_privileges(node));
        if let Some(node) = node.filter(|_| !may_lose) {
            if self.client.has_attributes(&node, &set, &self.attr_defaults.bucket) {
                return reply.attr(&self.attributes_at(kernel_node, &node));
            }
            if let Some(errno) = refusal(&node) {
                return reply.error(errno);
            }
        }
        let this = Arc::clone(self);
        reply.run_uninterruptible(move |reply| async move {
            let set = this.set_attributes(kernel_node, reply.caller(), set, (writer, may_lose)).await;
            this.answer_with("setattr", set, reply, |node, reply| {
                this.changed_by(Some(kernel_node));
                reply.attr(&this.attributes_at(kernel_node, &node));
            });
        });
    }

    async fn set_attributes(
        &self,
        kernel_node: u64,
        caller: Caller,
        set: SetAttr,
        (writer, may_lose): (Option<u64>, bool),
    ) -> Result<Arc<Node>, ClientError> {
        let node = self.node(kernel_node).await?;
        let set = if may_lose { with_losses(&node, caller, set).await } else { set };
        self.set_attributes_of(&node, caller, set, writer).await
    }

    /// Cuts a file to nothing, for one who may do so.
    pub(super) async fn cut(&self, node: &Arc<Node>, caller: Caller) -> Result<Arc<Node>, ClientError> {
        let kill_privileges = caller.uid != 0;
        let set = SetAttr { inode: node.inode, size: Some(0), kill_privileges, ..SetAttr::default() };
        self.set_attributes_of(node, caller, with_losses(node, caller, set).await, None).await
    }

    pub(super) async fn set_attributes_of(
        &self,
        node: &Arc<Node>,
        caller: Caller,
        set: SetAttr,
        writer: Option<u64>,
    ) -> Result<Arc<Node>, ClientError> {
        let Caller { uid, gid, thread } = caller;
        // Others may read the file of its block by themselves.
        let set = SetAttr { keeps_block: set.size == Some(0) && self.files.passthrough.for_fs_mode, ..set };
        let user = self.limited_user(node, caller).await;
        let (user, defaults) = (user.as_ref(), &self.attr_defaults.bucket);
        let new = AttributeChange { set, uid, gid, writer, thread, user, defaults };
        let (node, effects) = self.client.set_attributes(node, new).await?;
        self.apply_effects(effects);
        Ok(node)
    }

    /// The kernel checks permissions itself (`default_permissions`); what remains is what cannot be written at all.
    pub(super) fn access(self: &Arc<Self>, kernel_node: u64, mask: u32, reply: Reply) {
        if mask & libc::W_OK.unsigned_abs() == 0 {
            return reply.done();
        }
        self.with_node(kernel_node, "access", reply, |_, node, reply| match refusal(node) {
            Some(errno) => reply.error(errno),
            None => reply.done(),
        });
    }
}
