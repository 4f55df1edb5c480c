//! Notifications that a kernel does not take.

use std::time::Duration;

use cavern_client::InvalidationSink as _;
use cavern_fuse::invalidation::Invalidations;

/// Queues notifications of an inode until one of them is stuck, for a kernel that takes none: when no more of them go.
pub fn stick(notifications: &Invalidations, inode: u64) {
    let mut before = usize::MAX;
    while notifications.queued() != before {
        while notifications.queued() < 1000 {
            notifications.inode(inode);
        }
        before = notifications.queued();
        std::thread::sleep(Duration::from_millis(100));
    }
}
