//! Tells whoever knows where the bytes of files are, without having them open, that this counts no longer.

use std::sync::OnceLock;

use super::{Inner, Metadata};

/// Which files may have other content than was known, or none any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ChangedContents {
    Of(u64),
    /// Something may have been missed.
    All,
}

/// Whoever is to be told.
#[derive(Default)]
pub(super) struct ContentListener(OnceLock<Box<dyn Fn(ChangedContents) + Send + Sync>>);

impl Metadata {
    /// `listener` is told of every change by others from now on, of inodes that have lost their last name, and of what
    /// is lost that was answered here. Called from the watch task: must not block. To be called once.
    pub(crate) fn on_changed_contents(&self, listener: impl Fn(ChangedContents) + Send + Sync + 'static) {
        let _is_set = self.inner.content_listener.0.set(Box::new(listener));
    }

    /// Whether an inode is known to have a name.
    pub(crate) fn has_name(&self, inode: u64) -> bool {
        self.inner.cache.node(inode).is_some_and(|node| !node.is_removed())
    }
}

impl Inner {
    /// What was known of these contents counts no longer.
    pub(super) fn forget_contents(&self, changed: ChangedContents) {
        if let Some(listener) = self.content_listener.0.get() {
            listener(changed);
        }
    }

    /// Somebody else has changed an inode, or where its bytes are.
    pub(super) fn content_changed(&self, inode: u64) {
        // Before, so that who opens the file from now on finds nothing of it; after, so that who closes it meanwhile
        // leaves nothing: either sees the count of changes grow, or is seen here.
        self.forget_contents(ChangedContents::Of(inode));
        self.open.changed(inode);
        self.forget_contents(ChangedContents::Of(inode));
    }

    /// A stream of events begins: that may be so of all.
    pub(super) fn all_contents_changed(&self, session: u64) {
        self.forget_contents(ChangedContents::All);
        self.open.all_changed(session);
        self.forget_contents(ChangedContents::All);
    }
}
