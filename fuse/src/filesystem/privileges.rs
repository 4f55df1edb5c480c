//! What lets a file run with more rights than its caller has, set-user-ID and set-group-ID bits and capabilities, goes
//! when somebody changes the file, as on a local file system (`FUSE_HANDLE_KILLPRIV_V2`).
//!
//! The kernel tells of a caller who may not leave such bits in three ways. A WRITE and a SETATTR of the length or the
//! owner carry a flag. Before a write to pages, an allocation or a copy it sends a SETATTR that sets nothing, to
//! whoever it is for: that is meant by it alone, though also sent when it was only a capability that had to go, which
//! it removes by itself. And a WRITE past the pages carries no flag for the privileged, whose writes end capabilities,
//! too.
//!
//! A set-group-ID bit of a file that the group may not execute goes unless the caller is in the group; that the kernel
//! leaves to us. The answer to a WRITE carries no attributes, so the kernel is told to forget those that it has.

use cavern_client::{ClientError, FsFile, Node};
use cavern_proto::master::SetAttr;

use super::Inner;
use crate::kernel::{Caller, Credentials};

/// Whether the file has a set-group-ID bit that only members of the group leave.
fn is_for_members(node: &Node) -> bool {
    node.mode & (libc::S_ISGID | libc::S_IXGRP) == libc::S_ISGID
}

fn has_capability(node: &Node) -> bool {
    node.posix().is_some_and(|posix| posix.has_capability)
}

/// What goes with a write of somebody who may leave no privileges (`kills`), or may.
fn lost(node: &Node, credentials: &Credentials, kills: bool) -> Option<SetAttr> {
    let set = SetAttr { inode: node.inode, ..SetAttr::default() };
    if !kills {
        return has_capability(node).then_some(SetAttr { kill_capability: true, ..set });
    }
    let kill_set_group_id = is_for_members(node) && !credentials.is_in(node.gid);
    let has_bits = node.mode & libc::S_ISUID != 0 || node.mode & libc::S_ISGID != 0 && !is_for_members(node);
    let has_xattrs = node.posix().is_some_and(|posix| posix.has_xattrs);
    let loses = has_bits || has_xattrs || kill_set_group_id;
    loses.then_some(SetAttr { kill_privileges: true, kill_set_group_id, ..set })
}

impl Inner {
    /// Whether a write takes something away from a file, or may do so as far as is known here.
    pub(super) fn may_lose(&self, inode: u64, kills: bool) -> bool {
        match self.client.metadata().cached_node(inode) {
            Some(node) if kills => {
                let has_xattrs = node.posix().is_some_and(|posix| posix.has_xattrs);
                has_xattrs || node.mode & (libc::S_ISUID | libc::S_ISGID) != 0
            }
            Some(node) => has_capability(&node),
            None => kills,
        }
    }

    /// Takes away what a write past the pages takes, before it is made.
    pub(super) async fn lose_by_write(&self, content: &FsFile, caller: Caller, kills: bool) -> Result<(), ClientError> {
        let kernel_node = self.root.to_kernel(content.inode());
        let node = self.node(kernel_node).await?;
        let credentials = if is_for_members(&node) { Credentials::of(caller).await } else { Credentials::default() };
        if let Some(set) = lost(&node, &credentials, kills) {
            self.set_by_content(content, set, caller).await?;
            self.invalidations.forget_attributes(kernel_node);
        }
        Ok(())
    }

    /// A SETATTR with what goes besides, be it flagged, or one that sets nothing.
    pub(super) async fn with_losses(&self, kernel_node: u64, caller: Caller, set: SetAttr) -> SetAttr {
        // Whatever it is shows when the attributes are set.
        let Ok(node) = self.node(kernel_node).await else { return set };
        if !node.is_fs_mode() || node.is_directory() {
            return set;
        }
        let credentials = Credentials::of(caller).await;
        if credentials.keeps_privileges() {
            return set;
        }
        let kill_set_group_id = is_for_members(&node) && !credentials.is_in(node.gid);
        SetAttr { kill_privileges: true, kill_set_group_id, ..set }
    }
}
