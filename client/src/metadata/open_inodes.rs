//! Inodes of fs-mode mounts that are open here.
//!
//! An inode whose last name is removed stays while somebody has it open. Opening tells the master nothing: it is when the
//! master tells of the removal that whoever has the inode open has it *held*, before the removal is acknowledged. What is
//! closed for the last time is let go of, if it was held.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use futures::future::join_all;
use parking_lot::Mutex;
use rustix::io::Errno;

use super::{Inner, Metadata, Node};
use crate::error::ClientError;

/// By inode. Bounded by the open files and directories of the host.
#[derive(Debug, Default)]
pub(super) struct OpenInodes(Mutex<HashMap<u64, Open>>);

#[derive(Debug, Default)]
struct Open {
    handles: u32,
    /// The master has been asked to keep it.
    held: bool,
    news: Arc<News>,
}

/// What has been heard of an inode since it was opened.
#[derive(Debug, Default)]
struct News {
    /// How often somebody else has changed it.
    changes: AtomicU64,
    /// How often something may have been missed.
    gaps: AtomicU64,
}

impl OpenInodes {
    fn opened(&self, inode: u64) -> Arc<News> {
        let mut inodes = self.0.lock();
        let open = inodes.entry(inode).or_default();
        open.handles += 1;
        open.news.clone()
    }

    /// Somebody else has changed the inode.
    pub(super) fn changed(&self, inode: u64) {
        if let Some(open) = self.0.lock().get(&inode) {
            open.news.changes.fetch_add(1, Ordering::Release);
        }
    }

    /// Whatever is open may have been changed.
    pub(super) fn all_changed(&self) {
        for open in self.0.lock().values() {
            open.news.gaps.fetch_add(1, Ordering::Release);
            open.news.changes.fetch_add(1, Ordering::Release);
        }
    }

    /// Something refers to an inode without having it open; whether it is not held yet.
    pub(super) fn refer(&self, inode: u64) -> bool {
        let mut inodes = self.0.lock();
        let open = inodes.entry(inode).or_default();
        open.handles += 1;
        !open.held
    }

    /// True when the inode is to be let go of.
    pub(super) fn closed(&self, inode: u64) -> bool {
        let mut inodes = self.0.lock();
        let Some(open) = inodes.get_mut(&inode) else { return false };
        open.handles -= 1;
        if open.handles > 0 {
            return false;
        }
        let held = open.held;
        inodes.remove(&inode);
        held
    }

    /// Notes that the inode will be held; false when it is not open.
    fn hold(&self, inode: u64) -> bool {
        let mut inodes = self.0.lock();
        let open = inodes.get_mut(&inode);
        open.map(|open| open.held = true).is_some()
    }

    fn all(&self) -> Vec<u64> {
        self.0.lock().keys().copied().collect()
    }
}

/// Keeps an inode of an fs-mode mount while it is open, whatever becomes of its names.
pub struct OpenInode {
    inner: Arc<Inner>,
    inode: u64,
    news: Arc<News>,
}

impl OpenInode {
    /// A number that grows whenever somebody else changes the inode: what was asked for before may be outdated then.
    pub fn changes(&self) -> u64 {
        self.news.changes.load(Ordering::Acquire)
    }

    /// A number that grows whenever changes by others may have been missed; `None` while that cannot be said.
    pub fn gaps(&self) -> Option<u64> {
        let gaps = self.news.gaps.load(Ordering::Acquire);
        self.inner.lease.is_live().then_some(gaps)
    }

    /// Has the master keep the inode's blocks where they are, until it is closed here for the last time.
    pub(crate) async fn hold(&self) -> Result<(), ClientError> {
        self.inner.hold(vec![self.inode]).await
    }
}

impl std::fmt::Debug for OpenInode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("OpenInode").field("inode", &self.inode).finish_non_exhaustive()
    }
}

impl Drop for OpenInode {
    fn drop(&mut self) {
        if self.inner.open.closed(self.inode) {
            self.inner.push_let_go(self.inode);
        }
    }
}

impl Metadata {
    /// Keeps an inode that has a name, without I/O. `None` when that is not certain: use `keep_open`.
    pub fn keep_open_cached(&self, node: &Node) -> Option<OpenInode> {
        let kept = self.register_open(node.inode);
        // After it was registered: a removal that is told from now on finds it open.
        self.inner.cache.node(node.inode).is_some_and(|known| !known.is_removed()).then_some(kept)
    }

    /// Keeps an inode. `Stale` when it is gone.
    pub async fn keep_open(&self, node: &Node) -> Result<OpenInode, ClientError> {
        let kept = self.register_open(node.inode);
        if self.ask_node(node.inode).await?.is_removed() {
            self.inner.hold(vec![node.inode]).await?;
        }
        Ok(kept)
    }

    /// Keeps an inode that this session has just made without a name, and so holds.
    pub(crate) fn keep_nameless(&self, inode: u64) -> OpenInode {
        let kept = self.register_open(inode);
        self.inner.open.hold(inode);
        kept
    }

    /// The inodes that are open here.
    pub fn open_inodes(&self) -> Vec<u64> {
        self.inner.open_inodes()
    }

    fn register_open(&self, inode: u64) -> OpenInode {
        let news = self.inner.open.opened(inode);
        OpenInode { inner: self.inner.clone(), inode, news }
    }
}

impl Inner {
    /// Has the session hold those of the inodes that are open.
    pub(super) async fn hold(&self, inodes: Vec<u64>) -> Result<(), ClientError> {
        let open = inodes.into_iter().filter(|inode| self.open.hold(*inode));
        let answers = join_all(open.map(|inode| self.push_hold(inode))).await;
        for answer in answers {
            match answer {
                // It was gone before: there is nothing to be kept.
                Err(ClientError::Refused { errno, reason }) if errno == Errno::STALE.raw_os_error() => {
                    tracing::warn!("an open inode was deleted: {reason}");
                }
                answer => answer?,
            }
        }
        Ok(())
    }

    /// The same for all that are open.
    pub(super) fn open_inodes(&self) -> Vec<u64> {
        self.open.all()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_held_is_let_go_of_with_the_last_handle() {
        let open = OpenInodes::default();
        let news = open.opened(5);
        open.opened(5);
        open.changed(5);
        open.changed(6);
        open.all_changed();
        let count = |number: &AtomicU64| number.load(Ordering::Relaxed);
        assert_eq!((count(&news.changes), count(&news.gaps)), (2, 1));
        assert!(open.hold(5) && !open.hold(6));
        assert_eq!(open.all(), [5]);
        assert!(!open.closed(5) && open.closed(5) && !open.closed(5));
        open.opened(5);
        assert!(!open.closed(5), "it has not been held since it was opened");
        assert!(open.all().is_empty());
    }
}
