//! Extended attributes: where a file comes from.
//!
//! `user.cavern.mount` (namespace path of the mount), `user.cavern.key` (object key; of a directory the prefix),
//! `user.cavern.etag` and `user.cavern.content_id` (files only).

use std::sync::Arc;

use cavern_client::Node;

use super::Inner;
use crate::kernel::Reply;

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

impl Inner {
    pub(super) fn getxattr(self: &Arc<Self>, kernel_node: u64, name: &[u8], size: u32, reply: Reply) {
        // Programs ask for labels and access lists all the time: those need no node to be answered.
        let Some(attribute) = Attribute::named(name) else { return reply.error(libc::ENODATA) };
        self.with_node(kernel_node, "getxattr", reply, move |node, reply| match attribute.of(node) {
            Some(value) => reply.xattr(value.as_bytes(), size),
            None => reply.error(libc::ENODATA),
        });
    }

    pub(super) fn listxattr(self: &Arc<Self>, kernel_node: u64, size: u32, reply: Reply) {
        self.with_node(kernel_node, "listxattr", reply, move |node, reply| reply.xattr(&names(node), size));
    }

    fn with_node(
        self: &Arc<Self>,
        kernel_node: u64,
        operation: &'static str,
        reply: Reply,
        answer: impl FnOnce(&Node, Reply) + Send + 'static,
    ) {
        if let Some(node) = self.known_node(kernel_node) {
            return answer(&node, reply);
        }
        let this = Arc::clone(self);
        reply.defer(move |reply| async move {
            match this.node(kernel_node).await {
                Ok(node) => answer(&node, reply),
                Err(error) => this.failures.answer(reply, operation, &error),
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_recognized() {
        assert_eq!(Attribute::named(b"user.cavern.etag"), Some(Attribute::Etag));
        assert_eq!(Attribute::named(b"user.cavern.content_id"), Some(Attribute::ContentId));
        for other in [&b"user.cavern."[..], b"user.cavern.etagx", b"security.selinux", b""] {
            assert_eq!(Attribute::named(other), None);
        }
    }
}
