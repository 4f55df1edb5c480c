//! Which version of a file's content the pages are of that a kernel has kept.
//!
//! The kernel keeps pages from one open to the next while nobody else has changed the content. What this client wrote
//! it wrote by way of these pages, or had them forgotten, so they become those of the next version.

use quick_cache::sync::Cache;

/// Inodes whose pages are remembered; of any other they are read anew when it is opened.
const PAGES_OF: usize = 100_000;

/// Versions of contents by inode, of which all pages are that the kernel has.
pub(super) struct PageVersions(Cache<u64, u64>);

impl Default for PageVersions {
    fn default() -> Self {
        Self(Cache::new(PAGES_OF))
    }
}

impl PageVersions {
    /// The file is opened: whether its pages may be kept.
    pub fn opened(&self, inode: u64, version: u64) -> bool {
        let are_current = self.0.get(&inode) == Some(version);
        if !are_current {
            self.0.insert(inode, version);
        }
        are_current
    }

    /// What was written by way of these pages has become another version.
    pub fn advance(&self, inode: u64, from: u64, to: u64) {
        if self.0.get(&inode) == Some(from) {
            self.0.insert(inode, to);
        } else {
            self.forget(inode);
        }
    }

    /// Somebody else has changed it, too.
    pub fn forget(&self, inode: u64) {
        self.0.remove(&inode);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_kept_from_version_to_version_while_nobody_else_writes() {
        let pages = PageVersions::default();
        assert!(!pages.opened(7, 1), "nothing is known of them");
        assert!(pages.opened(7, 1));
        pages.advance(7, 1, 2);
        assert!(pages.opened(7, 2));
        assert!(!pages.opened(7, 4), "somebody else has written");
        pages.advance(7, 3, 5);
        assert!(!pages.opened(7, 5), "they were not those of 3");
        pages.forget(7);
        assert!(!pages.opened(7, 5));
    }
}
