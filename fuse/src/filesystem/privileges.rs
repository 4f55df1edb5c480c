//! What lets a file run with more rights than its caller has, set-user-ID and set-group-ID bits and capabilities, goes
//! when somebody changes the file, as on a local file system (`FUSE_HANDLE_KILLPRIV_V2`).
//!
//! The kernel reports a caller who may not leave such bits in three ways. A WRITE and a SETATTR of the length or the
//! owner carry a flag. Before a write to pages, an allocation or a copy it sends a SETATTR that sets nothing, to
//! whoever it is for: that is meant by it alone, though also sent when it was only a capability that had to go, which
//! it removes by itself. And a WRITE past the pages carries no flag for the privileged, whose writes end capabilities,
//! too.
//!
//! A set-group-ID bit of a file that the group may not execute goes unless the caller is in the group; that the kernel
//! leaves to us. The answer to a WRITE carries no attributes, so the kernel gets an invalidation of those that it has.

use cavern_client::{ClientError, File, Node};
use cavern_posix::mode::{SET_GROUP_ID, SET_USER_ID, is_for_members, without_privileges};
use cavern_proto::master::SetAttr;

use super::parts::Inner;
use super::write::WriteArgs;
use crate::kernel::{Caller, Credentials};

fn has_capability(node: &Node) -> bool {
    node.posix().is_some_and(|posix| posix.has_capability)
}

/// What goes with a write of somebody who may leave no privileges (`kills`), or may.
fn lost(node: &Node, credentials: &Credentials, kills: bool) -> Option<SetAttr> {
    let set = SetAttr { inode: node.inode, ..SetAttr::default() };
    if !kills {
        return has_capability(node).then_some(SetAttr { kill_capability: true, ..set });
    }
    let kill_set_group_id = is_for_members(node.mode) && !credentials.is_in(node.gid);
    let has_bits = without_privileges(node.mode) != node.mode;
    let has_xattrs = node.posix().is_some_and(|posix| posix.has_xattrs);
    let loses = has_bits || has_xattrs || kill_set_group_id;
    loses.then_some(SetAttr { kill_privileges: true, kill_set_group_id, ..set })
}

/// Whether a file of an fs-mode mount may have such bits: those of others, a bucket's mount takes by itself.
pub(super) fn may_have_privileges(node: &Node) -> bool {
    node.posix().is_some() && !node.is_directory()
}

/// A SETATTR with what goes besides, be it flagged, or one that sets nothing.
pub(super) async fn with_losses(node: &Node, caller: Caller, set: SetAttr) -> SetAttr {
    if !may_have_privileges(node) {
        return set;
    }
    let credentials = Credentials::of(caller).await;
    if credentials.keeps_privileges() {
        return set;
    }
    let kill_set_group_id = is_for_members(node.mode) && !credentials.is_in(node.gid);
    SetAttr { kill_privileges: true, kill_set_group_id, ..set }
}

impl Inner {
    /// Whether a write takes something away from a file that the master must be asked to take, or may do so as far as
    /// is known here.
    pub(super) fn loses_by_write(&self, file: &File, how: &WriteArgs) -> bool {
        let kills = how.kills_privileges;
        if kills && file.kill_privileges() {
            return false;
        }
        // What comes by way of pages, and says nothing else, has had its effect when these were written to; that of a
        // mapping has none.
        if !kills && how.writer.is_none() {
            return false;
        }
        match self.client.cached_node(file.inode()) {
            Some(node) if kills => {
                let has_xattrs = node.posix().is_some_and(|posix| posix.has_xattrs);
                has_xattrs || node.mode & (SET_USER_ID | SET_GROUP_ID) != 0
            }
            Some(node) => has_capability(&node),
            None => kills,
        }
    }

    /// Takes away what a write past the pages takes, before it is made.
    pub(super) async fn lose_by_write(&self, inode: u64, caller: Caller, kills: bool) -> Result<(), ClientError> {
        let kernel_node = self.root.to_kernel(inode);
        let node = self.node(kernel_node).await?;
        let credentials =
            if is_for_members(node.mode) { Credentials::of(caller).await } else { Credentials::default() };
        if let Some(set) = lost(&node, &credentials, kills) {
            self.set_attributes_of(&node, caller, set, None).await?;
            self.invalidations.forget_attributes(kernel_node);
        }
        Ok(())
    }
}
