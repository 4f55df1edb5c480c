//! STATFS: what `df` shows. The capacity of the cache, since a bucket has none; below a directory that has a quota,
//! what that leaves.

use std::sync::Arc;

use cavern_proto::NAME_MAX;
use cavern_proto::master::Quota;

use super::parts::Inner;
use crate::kernel::Reply;
use crate::kernel::abi::StatfsOut;

/// Unit of the sizes.
const BLOCK: u64 = 4096;

impl Inner {
    /// Capacity and use of all workers, as they told them last. In an fs-mode mount the master is asked for quotas;
    /// while it does not answer, none is shown.
    pub(super) fn statfs(self: &Arc<Self>, kernel_node: u64, reply: Reply) {
        let this = Arc::clone(self);
        reply.defer(move |reply| async move {
            this.client.renew_workers().await;
            let mut shown = this.capacity();
            if this.client.has_posix_mounts()
                && let Ok(node) = this.node(kernel_node).await
                && node.is_fs_mode()
            {
                let directory = if node.is_directory() { node.inode } else { node.parent };
                let quotas = this.client.metadata().quotas(directory).await;
                quotas.unwrap_or_default().quotas.iter().for_each(|quota| limit(&mut shown, quota));
            }
            reply.statfs(&shown);
        });
    }

    fn capacity(&self) -> StatfsOut {
        let workers = self.client.workers();
        let capacity: u64 = workers.workers().iter().map(|worker| worker.capacity_bytes).sum();
        let used: u64 = workers.workers().iter().map(|worker| worker.used_bytes).sum();
        let free = capacity.saturating_sub(used) / BLOCK;
        StatfsOut {
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
        }
    }
}

/// Shows a file system that has as much as a quota allows, if that leaves less than what is shown.
fn limit(shown: &mut StatfsOut, quota: &Quota) {
    let free = quota.max_bytes.saturating_sub(quota.bytes) / BLOCK;
    if quota.max_bytes > 0 && free < shown.bavail {
        (shown.bfree, shown.bavail) = (free, free);
        shown.blocks = free + quota.bytes.div_ceil(BLOCK);
    }
    let free = quota.max_inodes.saturating_sub(quota.inodes);
    if quota.max_inodes > 0 && (shown.files == 0 || free < shown.ffree) {
        (shown.files, shown.ffree) = (free + quota.inodes, free);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_quota_that_leaves_least_is_shown() {
        let mut shown = StatfsOut { blocks: 1000, bfree: 900, bavail: 900, ..StatfsOut::default() };
        limit(&mut shown, &Quota { max_bytes: 10_000 * BLOCK, bytes: BLOCK, ..Quota::default() });
        assert_eq!((shown.blocks, shown.bavail, shown.files), (1000, 900, 0), "the workers have less");
        limit(
            &mut shown,
            &Quota { max_bytes: 50 * BLOCK, bytes: 10 * BLOCK, max_inodes: 7, inodes: 2, ..Quota::default() },
        );
        assert_eq!((shown.blocks, shown.bfree, shown.bavail, shown.files, shown.ffree), (50, 40, 40, 7, 5));
        limit(&mut shown, &Quota { max_inodes: 100, inodes: 99, ..Quota::default() });
        assert_eq!((shown.blocks, shown.files, shown.ffree), (50, 100, 1));
        limit(&mut shown, &Quota { max_bytes: BLOCK, bytes: 9 * BLOCK, ..Quota::default() });
        assert_eq!((shown.blocks, shown.bavail), (9, 0), "there was more before the quota");
    }
}
