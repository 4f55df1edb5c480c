//! What is being written when a view freezes blocks.
//!
//! Whoever writes asks first what is frozen ([`FsFile::is_frozen`]), and does what it has begun. So when another mount
//! table is in force, what was begun before it may still be on its way to frozen blocks. The masters are told that the
//! table is gone by only when that has ended, and when they know which blocks were made. From when all clients have
//! said so, whoever changes a frozen block makes another in its place ([`FsFile::awaits_others`]): a copy that is made
//! earlier could lack what somebody is writing.

use std::sync::{Arc, Weak};
use std::time::Duration;

use futures::stream::{self, StreamExt as _};

use super::file::FsFile;
use super::open_file_table::Shared;
use crate::mounts::MountView;

/// Files at a time.
const AT_ONCE: usize = 64;
/// Between two looks whether a file is closed that goes by a mount which was gone meanwhile.
const PAUSE: Duration = Duration::from_millis(500);

impl Shared {
    /// Returns when nothing that was begun before is written any more to open files of these mounts.
    pub(super) async fn settle(&self, mounts: &[Arc<MountView>]) {
        let settled = self.files_of(mounts).into_iter().map(|content| async move { content.settle().await });
        stream::iter(settled).buffer_unordered(AT_ONCE).collect::<()>().await;
        // Of a mount that was not there for this client for a while, such a file does not learn what is frozen.
        let is_current = |content: &Arc<FsFile>| mounts.iter().any(|mount| Arc::ptr_eq(mount, &content.mount));
        while !self.files_of(mounts).iter().all(is_current) {
            tokio::time::sleep(PAUSE).await;
        }
    }

    fn files_of(&self, mounts: &[Arc<MountView>]) -> Vec<Arc<FsFile>> {
        let open: Vec<Arc<FsFile>> = self.open.lock().values().filter_map(Weak::upgrade).collect();
        let is_of = |content: &Arc<FsFile>| mounts.iter().any(|mount| mount.id() == content.mount.id());
        open.into_iter().filter(is_of).collect()
    }
}

impl FsFile {
    /// Returns when what was being written is written. What waits to be sent goes by the table that is in force then,
    /// and so does who waits for the others.
    async fn settle(&self) {
        drop(self.turns.in_place.write().await);
        if !self.is_committed()
            && let Err(error) = self.commit_in_background().await
        {
            tracing::debug!(inode = self.inode, "a file that is frozen is not committed for now: {error}");
        }
    }
}
