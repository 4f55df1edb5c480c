//! SETATTR: permissions, owner, times, length; and ACCESS.
//!
//! Of objects nothing but the length can be set; to set what is so already is no change, though: programs that copy do
//! that.
//!
//! Who may do so, the kernel has decided (`default_permissions`). Set-user-ID and set-group-ID bits and capabilities of
//! a file that is cut or given away are the master's to remove: see [`privileges`](super::privileges).

use std::sync::Arc;

use cavern_client::{Changed, Node, StagedFiles};
use cavern_proto::master::mutation::Change;
use cavern_proto::master::{SetAttr, Time};

use super::Inner;
use super::changes::{ChangeRequest, refusal};
use crate::kernel::{Caller, NewAttributes, NewTime, Reply};

fn time(time: NewTime) -> Time {
    match time {
        NewTime::Now => Time { now: true, ns: 0 },
        NewTime::At(ns) => Time { now: false, ns },
    }
}

impl Inner {
    pub(super) fn setattr(self: &Arc<Self>, kernel_node: u64, caller: Caller, set: NewAttributes, reply: Reply) {
        let writer = set.writer;
        let set = SetAttr {
            inode: self.root.to_namespace(kernel_node),
            mode: set.mode,
            uid: set.uid,
            gid: set.gid,
            atime: set.atime.map(time),
            mtime: set.mtime.map(time),
            size: set.size,
            kill_privileges: set.kill_privileges,
            ..SetAttr::default()
        };
        if StagedFiles::is_staged(set.inode) {
            return self.set_staged_attributes(caller, set, writer, reply);
        }
        let sets_nothing = set == SetAttr { inode: set.inode, ..SetAttr::default() };
        if (sets_nothing || set.kill_privileges) && self.has_fs_mode() {
            let this = Arc::clone(self);
            return reply.run_uninterruptible(move |reply| async move {
                let set = this.with_losses(kernel_node, caller, set).await;
                this.set_attributes(kernel_node, caller, set, reply);
            });
        }
        self.set_attributes(kernel_node, caller, set, reply);
    }

    fn set_attributes(self: &Arc<Self>, kernel_node: u64, caller: Caller, set: SetAttr, reply: Reply) {
        if let Some(node) = self.known_node(kernel_node).filter(|node| self.is_unchanged(node, &set)) {
            return reply.attr(&self.attributes_of(&node));
        }
        if self.is_about_content(&set) {
            return self.set_content_attributes(kernel_node, caller, set, reply);
        }
        let change = Change::SetAttr(set);
        let attempt = ChangeRequest { operation: "setattr", on: kernel_node, with: None, caller, change };
        self.attempt(attempt, reply, |this, node, changed, reply| this.answer_attributes(node, changed, reply));
    }

    pub(super) fn answer_attributes(&self, node: &Node, changed: &Changed, reply: Reply) {
        match changed.result.attributes.iter().find(|attr| attr.inode == node.inode) {
            Some(attr) => reply.attr(&self.attributes_of(&node.with_attributes(attr))),
            None => reply.error(libc::EIO),
        }
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
