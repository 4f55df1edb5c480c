//! Files of blocks on this host that somebody else has opened, and may want again: kept within the bounds of all
//! descriptors, and closed when nobody has wanted them for a while.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use cavern_proto::BlockId;
#[cfg(test)]
use tokio_util::task::TaskTracker;

use super::close_queue::CloseQueue;
use super::descriptor_cache::{Descriptor, DescriptorCache};
#[cfg(test)]
use super::kept_files::KeptFiles;

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

    /// Closes those that are open, on a thread that may wait.
    pub(crate) fn let_go(&self, blocks: impl Iterator<Item = (BlockId, u64)>) {
        self.closing.evicted(blocks);
    }

    /// Files that are open have about so many descriptors besides: there is less room for those that are not.
    pub(crate) fn others_have(&self, descriptors: usize) {
        self.descriptors.leave_room(descriptors);
    }
}
