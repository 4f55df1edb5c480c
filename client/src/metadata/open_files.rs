//! What is open here, and what is known of the content of files: whoever knows where the bytes of a file are, without
//! having it open, is told when that counts no longer.

use std::sync::OnceLock;

use super::close_grace::CloseGraceList;
use super::open_inodes::OpenInodes;
use super::removals::ReferencedInodes;

/// Which files may have other content than was known, or none any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ChangedContents {
    Of(u64),
    /// Something may have been missed.
    All,
}

/// What is open here, and who listens for changed contents.
#[derive(Default)]
pub(super) struct OpenFiles {
    pub inodes: OpenInodes,
    /// Files that stay open for a while when they were closed.
    pub close_grace: CloseGraceList,
    /// Inodes without names that are not open.
    pub referenced: ReferencedInodes,
    listener: OnceLock<Box<dyn Fn(ChangedContents) + Send + Sync>>,
}

impl OpenFiles {
    /// Whom to tell: see [`Metadata::on_changed_contents`](super::Metadata::on_changed_contents).
    pub(super) fn set_listener(&self, listener: impl Fn(ChangedContents) + Send + Sync + 'static) {
        let _is_set = self.listener.set(Box::new(listener));
    }

    /// What was known of these contents counts no longer.
    pub(super) fn forget_contents(&self, changed: ChangedContents) {
        if let Some(listener) = self.listener.get() {
            listener(changed);
        }
    }

    /// Inodes have lost their last names.
    pub(super) fn forget_gone(&self, gone: &[u64]) {
        for inode in gone {
            self.close_grace.end(*inode);
            self.forget_contents(ChangedContents::Of(*inode));
        }
    }

    /// Somebody else has changed an inode, or where its bytes are.
    pub(super) fn content_changed(&self, inode: u64) {
        // Before, so that who opens the file from now on finds nothing of it; after, so that who closes it meanwhile
        // leaves nothing: either sees the count of changes grow, or is seen here.
        self.forget_contents(ChangedContents::Of(inode));
        self.inodes.changed(inode);
        self.forget_contents(ChangedContents::Of(inode));
    }

    /// A stream of events begins: that may be so of all.
    pub(super) fn all_contents_changed(&self) {
        self.forget_contents(ChangedContents::All);
        self.inodes.all_changed();
        self.forget_contents(ChangedContents::All);
    }
}
