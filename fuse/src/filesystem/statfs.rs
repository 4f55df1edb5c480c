//! STATFS: what `df` shows: the capacity of the cache, since a bucket has none.

use cavern_proto::NAME_MAX;

use super::Inner;
use crate::kernel::Reply;
use crate::kernel::abi::StatfsOut;

/// Unit of the sizes.
const BLOCK: u64 = 4096;

impl Inner {
    /// Capacity and use of all workers, as of their last table: never waits.
    pub(super) fn statfs(&self, reply: Reply) {
        let workers = self.client.workers();
        let capacity: u64 = workers.workers().iter().map(|worker| worker.capacity_bytes).sum();
        let used: u64 = workers.workers().iter().map(|worker| worker.used_bytes).sum();
        let free = capacity.saturating_sub(used) / BLOCK;
        reply.statfs(&StatfsOut {
            blocks: capacity / BLOCK,
            bfree: free,
            bavail: free,
            // Inodes are not bounded: 0 makes `df -i` print a dash.
            files: 0,
            ffree: 0,
            bsize: BLOCK as u32,
            namelen: NAME_MAX as u32,
            frsize: BLOCK as u32,
            ..StatfsOut::default()
        });
    }
}
