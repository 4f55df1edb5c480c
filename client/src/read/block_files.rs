//! Files of blocks on this host that somebody else has opened, and may want again: kept within the bounds of all
//! descriptors, and closed when nobody has wanted them for a while.

use std::any::Any;
use std::fs::File;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::Arc;

use cavern_proto::BlockId;
#[cfg(test)]
use tokio_util::task::TaskTracker;

use super::close_queue::CloseQueue;
use super::descriptor_cache::{Descriptor, DescriptorCache};
use super::kept_files::KeptFile;
#[cfg(test)]
use super::kept_files::KeptFiles;

/// The file of a block that all bytes of an fs-mode file are in.
pub(crate) struct WholeFile<'f> {
    pub block: BlockId,
    /// Of that file's content.
    pub version: u64,
    /// Of that file, in bytes: those of the block's file, unless something was not done, or is being done.
    pub size: u64,
    /// As it is open here, if it is; with its worker, and its incarnation.
    pub local: Option<(&'f File, u64, u64)>,
}

/// See the module. Cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct BlockFiles {
    descriptors: Arc<DescriptorCache>,
    closing: Arc<CloseQueue>,
}

impl BlockFiles {
    pub(super) fn new(descriptors: Arc<DescriptorCache>, closing: Arc<CloseQueue>) -> Self {
        Self { descriptors, closing }
    }

    #[cfg(test)]
    pub(crate) fn for_tests(capacity: usize) -> (Self, TaskTracker) {
        let kept = KeptFiles::new(0, Arc::default());
        let (descriptors, tasks) = (Arc::new(DescriptorCache::new(capacity, kept, Arc::default())), TaskTracker::new());
        let closing = CloseQueue::new(descriptors.clone(), tasks.clone(), tokio::runtime::Handle::current());
        (Self::new(descriptors, closing), tasks)
    }

    /// Keeps that incarnation of a block of a worker open.
    pub(crate) fn keep(&self, block: BlockId, file: OwnedFd, worker: u64, incarnation: u64) {
        self.descriptors.insert(block, Arc::new(Descriptor::complete(file, worker, incarnation)));
    }

    /// Takes it out, if it is open still.
    pub(crate) fn take(&self, block: &BlockId, incarnation: u64) -> Option<OwnedFd> {
        self.descriptors.take(block, incarnation)
    }

    /// What is kept of a file that ends where it should, with its worker and incarnation; `make` makes it where there
    /// is nothing yet.
    pub(crate) fn kept_of<T: Any + Send + Sync>(
        &self,
        whole: &WholeFile<'_>,
        make: impl FnOnce(BorrowedFd<'_>) -> Option<T>,
    ) -> Option<(Arc<T>, u64, u64)> {
        let kept = self.descriptors.kept();
        let WholeFile { block, version, size, local } = *whole;
        let Some((file, worker, incarnation)) = local else {
            let known = kept.get(&block).filter(|known| known.has(version))?;
            let what = Arc::clone(&known.what).downcast().ok()?;
            return Some((what, known.worker, known.incarnation));
        };
        if file.metadata().ok()?.len() != size {
            return None;
        }
        if let Some(known) = kept.get(&block).filter(|known| known.incarnation == incarnation) {
            known.found_with(version);
            return Some((Arc::clone(&known.what).downcast().ok()?, worker, incarnation));
        }
        let made = Arc::new(make(file.as_fd())?);
        let fresh = KeptFile::new(Arc::clone(&made) as _, worker, incarnation);
        fresh.found_with(version);
        kept.insert(block, fresh);
        Some((made, worker, incarnation))
    }

    /// Whether something is kept of a block that had all of a file of this version.
    pub(crate) fn has_kept(&self, block: &BlockId, version: u64) -> bool {
        self.descriptors.kept().get(block).is_some_and(|known| known.has(version))
    }

    /// Closes those that are open, on a thread that may wait.
    pub(crate) fn let_go(&self, blocks: impl Iterator<Item = (BlockId, u64)>) {
        self.closing.evicted(blocks);
    }

    /// Files that are open have about so many descriptors besides: there is less room for those that are not.
    pub(crate) fn others_have(&self, descriptors: usize) {
        self.descriptors.leave_room(descriptors);
    }
}
