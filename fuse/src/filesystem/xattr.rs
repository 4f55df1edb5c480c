//! Extended attributes.
//!
//! Those of an fs-mode mount are what was set; most inodes have none, and their attributes say so. In a cache-mode
//! mount they say where a file comes from: `user.cavern.mount` (namespace path of the mount), `user.cavern.key` (object
//! key; of a directory the prefix), `user.cavern.etag` and `user.cavern.content_id` (files only).
//!
//! The kernel remembers of no file that it has no label. So while no inode of any mount has one, it is answered that
//! there is no such thing here (`EOPNOTSUPP`), and `ls -l` asks for no other on the device. Masters say in the mount
//! table what may be there ([`Client::may_have_probed`](cavern_client::Client::may_have_probed)). Of access lists it is
//! `ENODATA`, which the kernel remembers for each inode: another answer would be that of `open`, which it checks by
//! them, and `cp -a` fails without a default list of a directory. And names are listed always: to `tar` and `getfattr`
//! a refused list is a failure.

use std::sync::Arc;

use bytes::Bytes;
use cavern_client::Node;
use cavern_posix::acl::is_acl;
use cavern_posix::xattr::{has_kept_prefix, is_bare_prefix, probed};
use cavern_proto::master::mutation::Change;
use cavern_proto::master::{RemoveXattr, SetXattr, Xattr, XattrMode};

use super::changes::{ChangeRequest, refusal};
use super::parts::Inner;
use crate::kernel::{Caller, Reply};

const PREFIX: &[u8] = b"user.cavern.";

/// One of ours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Attribute {
    Mount,
    Key,
    Etag,
    ContentId,
}

impl Attribute {
    const ALL: [Self; 4] = [Self::Mount, Self::Key, Self::Etag, Self::ContentId];

    fn suffix(self) -> &'static str {
        match self {
            Self::Mount => "mount",
            Self::Key => "key",
            Self::Etag => "etag",
            Self::ContentId => "content_id",
        }
    }

    fn named(name: &[u8]) -> Option<Self> {
        let suffix = name.strip_prefix(PREFIX)?;
        Self::ALL.into_iter().find(|attribute| attribute.suffix().as_bytes() == suffix)
    }

    /// The value; `None` where the node has no such attribute.
    fn of(self, node: &Node) -> Option<String> {
        let mount = node.mount.as_ref()?;
        match self {
            Self::Mount => Some(mount.path().to_owned()),
            Self::Key => Some(node.key()),
            Self::Etag => (!node.is_directory()).then(|| node.etag()),
            Self::ContentId if node.is_directory() => None,
            Self::ContentId => node.object().ok().map(|object| object.content.to_string()),
        }
    }
}

/// Names of the attributes that a node has, each with a zero behind it.
fn names(node: &Node) -> Vec<u8> {
    let mut names = Vec::new();
    for attribute in Attribute::ALL.into_iter().filter(|attribute| attribute.of(node).is_some()) {
        names.extend_from_slice(PREFIX);
        names.extend_from_slice(attribute.suffix().as_bytes());
        names.push(0);
    }
    names
}

/// Whether attributes of this name are kept: those of `system.` are the kernel's, and of them only access lists are
/// ours, where it heeds them.
pub(super) fn is_kept(name: &[u8], posix_acl: bool) -> bool {
    if is_acl(name) { posix_acl } else { has_kept_prefix(name) && !is_bare_prefix(name) }
}

/// Whether somebody finds a name in a list: as on other file systems, `trusted.` is for the privileged.
pub(super) fn is_listed(name: &[u8], caller: Caller, posix_acl: bool) -> bool {
    is_kept(name, posix_acl) && (caller.uid == 0 || !name.starts_with(b"trusted."))
}

/// What the flags of setxattr(2) ask for.
fn mode_of(flags: u32) -> Option<XattrMode> {
    match flags.cast_signed() {
        0 => Some(XattrMode::Any),
        libc::XATTR_CREATE => Some(XattrMode::Create),
        libc::XATTR_REPLACE => Some(XattrMode::Replace),
        _ => None,
    }
}

impl Inner {
    pub(super) fn getxattr(self: &Arc<Self>, kernel_node: u64, name: &[u8], size: u32, reply: Reply) {
        if is_bare_prefix(name) {
            return reply.error(libc::EINVAL);
        }
        // Programs ask for labels and access lists all the time: of objects those need no node to be answered.
        if Attribute::named(name).is_none() && !self.client.has_posix_mounts() {
            return reply.error(self.absence_of(name));
        }
        let name = name.to_vec();
        self.with_node(kernel_node, "getxattr", reply, move |this, node, reply| {
            let Some(posix) = node.posix() else {
                return match Attribute::named(&name).and_then(|attribute| attribute.of(node)) {
                    Some(value) => reply.xattr(value.as_bytes(), size),
                    None => reply.error(this.absence_of(&name)),
                };
            };
            if !is_kept(&name, this.features.posix_acl) {
                return reply.error(libc::EOPNOTSUPP);
            }
            if !posix.has_xattrs {
                return reply.error(this.absence_of(&name));
            }
            this.with_xattrs(node.inode, "getxattr", reply, move |xattrs, reply| {
                match xattrs.iter().find(|xattr| *xattr.name == *name) {
                    Some(xattr) => reply.xattr(&xattr.value, size),
                    None => reply.error(libc::ENODATA),
                }
            });
        });
    }

    /// What whoever asks for an attribute that an inode has not is told.
    fn absence_of(&self, name: &[u8]) -> i32 {
        if !is_kept(name, self.features.posix_acl) {
            return libc::EOPNOTSUPP;
        }
        let probed = probed(name);
        match probed == 0 || self.client.may_have_probed(probed) {
            true => libc::ENODATA,
            false => libc::EOPNOTSUPP,
        }
    }

    pub(super) fn listxattr(self: &Arc<Self>, kernel_node: u64, size: u32, reply: Reply) {
        self.with_node(kernel_node, "listxattr", reply, move |this, node, reply| match node.posix() {
            None => reply.xattr(&names(node), size),
            Some(posix) if !posix.has_xattrs => reply.xattr(&[], size),
            Some(_) => {
                let posix_acl = this.features.posix_acl;
                this.with_xattrs(node.inode, "listxattr", reply, move |xattrs, reply| {
                    let is_shown = |xattr: &&Xattr| is_listed(&xattr.name, reply.caller(), posix_acl);
                    let names: Vec<u8> = xattrs
                        .iter()
                        .filter(is_shown)
                        .flat_map(|xattr| [&xattr.name[..], b"\0"])
                        .flatten()
                        .copied()
                        .collect();
                    reply.xattr(&names, size);
                });
            }
        });
    }

    pub(super) fn setxattr(
        self: &Arc<Self>,
        kernel_node: u64,
        (name, value): (&[u8], &[u8]),
        (flags, clear_set_group_id): (u32, bool),
        reply: Reply,
    ) {
        let Some(mode) = mode_of(flags).filter(|_| !is_bare_prefix(name)) else { return reply.error(libc::EINVAL) };
        let set = SetXattr {
            inode: self.root.to_namespace(kernel_node),
            name: Bytes::copy_from_slice(name),
            value: Bytes::copy_from_slice(value),
            mode: mode.into(),
            clear_set_group_id,
        };
        let kept = is_kept(name, self.features.posix_acl);
        self.change_xattr("setxattr", kernel_node, Change::SetXattr(set), kept, reply);
    }

    pub(super) fn removexattr(self: &Arc<Self>, kernel_node: u64, name: &[u8], reply: Reply) {
        if is_bare_prefix(name) {
            return reply.error(libc::EINVAL);
        }
        let remove = RemoveXattr { inode: self.root.to_namespace(kernel_node), name: Bytes::copy_from_slice(name) };
        let kept = is_kept(name, self.features.posix_acl);
        self.change_xattr("removexattr", kernel_node, Change::RemoveXattr(remove), kept, reply);
    }

    fn change_xattr(self: &Arc<Self>, operation: &'static str, on: u64, change: Change, kept: bool, reply: Reply) {
        if !kept {
            return self.with_node(on, operation, reply, |_, node, reply| {
                reply.error(refusal(node).unwrap_or(libc::EOPNOTSUPP));
            });
        }
        let set = if let Change::SetXattr(set) = &change { probed(&set.name) } else { 0 };
        let attempt = ChangeRequest { operation, on, with: None, change };
        self.attempt(attempt, reply, move |this, _, changed, reply| {
            // A list that says no more than the permissions is not kept.
            if changed.result.attributes.iter().any(|attr| attr.has_xattrs) {
                this.client.note_probed(set);
            }
            reply.done();
        });
    }

    /// Answers with the attributes that were set, which must be asked of the master.
    fn with_xattrs(
        self: &Arc<Self>,
        inode: u64,
        operation: &'static str,
        reply: Reply,
        answer: impl FnOnce(&[Xattr], Reply) + Send + 'static,
    ) {
        let this = Arc::clone(self);
        reply.defer(move |reply| async move {
            let xattrs = this.client.metadata().xattrs(inode).await;
            this.answer_with(operation, xattrs, reply, |xattrs, reply| answer(&xattrs, reply));
        });
    }

    /// Answers with a node, at once if it is known.
    pub(super) fn with_node(
        self: &Arc<Self>,
        kernel_node: u64,
        operation: &'static str,
        reply: Reply,
        answer: impl FnOnce(&Arc<Self>, &Node, Reply) + Send + 'static,
    ) {
        if let Some(node) = self.known_node(kernel_node) {
            return answer(self, &node, reply);
        }
        let this = Arc::clone(self);
        reply.defer(move |reply| async move {
            this.answer_with(operation, this.node(kernel_node).await, reply, |node, reply| answer(&this, &node, reply));
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_kept_and_how_it_is_set() {
        let kept = |name: &str| is_kept(name.as_bytes(), true);
        assert!(kept("user.a") && kept("trusted.overlay") && kept("security.capability"));
        assert!(kept("system.posix_acl_access") && kept("system.posix_acl_default"));
        assert!(!is_kept(b"system.posix_acl_access", false) && is_kept(b"user.a", false));
        assert!(!kept("system.other") && !kept("users.a") && !kept(""));
        assert!(!kept("user.") && !kept("trusted.") && !kept("security.") && !kept("system.") && !kept("user"));
        assert_eq!(
            (mode_of(0), mode_of(1), mode_of(2)),
            (Some(XattrMode::Any), Some(XattrMode::Create), Some(XattrMode::Replace))
        );
        assert_eq!((mode_of(3), mode_of(1 << 31)), (None, None));
    }

    #[test]
    fn names_are_recognized() {
        assert_eq!(Attribute::named(b"user.cavern.etag"), Some(Attribute::Etag));
        assert_eq!(Attribute::named(b"user.cavern.content_id"), Some(Attribute::ContentId));
        for other in [&b"user.cavern."[..], b"user.cavern.etagx", b"security.selinux", b""] {
            assert_eq!(Attribute::named(other), None);
        }
    }
}
