//! The handles that a process before this one gave the kernel, open again.
//!
//! What cannot be had again is lost: its handle gives `EIO` from now on, and the log says why. That is what was written
//! to a file of a cache-mode mount and was no object yet, and an object that is gone from its bucket.

use std::sync::Arc;

use cavern_client::journal::Slot;
use cavern_client::{ClientError, InvalidationSink as _, is_of_this_process};
use cavern_proto::journal::{HandleRecord, PositionRecord};
use futures::stream::{self, StreamExt as _};
use tokio::task::spawn_blocking;
use tracing::warn;

use super::earlier_handles::EarlierHandles;
use super::open_handle::OpenHandle;
use super::open_nodes::IoMode;
use super::parts::Inner;
use crate::aliases::node_of;
use crate::kernel::Connection;

/// Handles that are opened at a time.
const AT_A_TIME: usize = 64;

impl Inner {
    /// Opens what was open.
    pub(super) async fn restore(self: &Arc<Self>, earlier: EarlierHandles, connection: &Connection) {
        let EarlierHandles { handles, mut positions, locks, backings, appends, session } = earlier;
        let of_handles = handles.iter().filter_map(|(_, record)| record.backing);
        self.files.passthrough.inherit(backings, of_handles, connection);
        for (slot, record) in appends {
            self.mount_journal.note_earlier_append(slot, record);
        }
        let (all, began) = (handles.len(), tokio::time::Instant::now());
        let opening = handles.into_iter().map(|(slot, record)| {
            let position = positions.remove(&record.number);
            async move {
                self.mount_journal.note_earlier(record);
                // The kernel has what it reads by itself, whatever becomes of the handle here.
                let node = self.restore_node(&record);
                if let Err(error) = self.restore_handle(&record, node, slot, position).await {
                    warn!(inode = record.inode, "what was open gives EIO from now on: {error}");
                    self.files.lost.add(record.number, node);
                }
            }
        });
        stream::iter(opening).buffer_unordered(AT_A_TIME).collect::<()>().await;
        for (slot, record) in locks {
            let has_cluster_locks = self.client.node(record.inode).await.map_or(true, |node| node.has_cluster_locks());
            self.restore_lock(&record, session, has_cluster_locks);
            self.mount_journal.keep_lock(record, Some(slot));
        }
        if self.files.passthrough.for_fs_mode {
            // Names may lead to nodes that are known to the kernel alone.
            self.invalidations.reset();
        }
        if all > 0 {
            tracing::info!(handles = all, took_ms = began.elapsed().as_millis() as u64, "what was open is open again");
        }
    }

    /// Gives back what the process before had registered with the kernel and no handle has.
    pub(super) fn give_back(self: &Arc<Self>) {
        let this = Arc::clone(self);
        drop(spawn_blocking(move || this.files.passthrough.give_back()));
    }

    /// Enters the kernel's node of a handle, if that is of a file of an fs-mode mount.
    fn restore_node(&self, record: &HandleRecord) -> Option<u64> {
        (record.is_kept && !record.is_directory).then(|| {
            let node = node_of(record.inode, record.alias);
            self.root.aliases().inherit(node);
            let backing = record.backing.and_then(|number| self.files.passthrough.inherited(number));
            self.files.nodes.inherited(node, backing, record.block);
            node
        })
    }

    async fn restore_handle(
        self: &Arc<Self>,
        record: &HandleRecord,
        kernel_node: Option<u64>,
        slot: Slot,
        position: Option<(Slot, PositionRecord)>,
    ) -> Result<(), ClientError> {
        if is_of_this_process(record.inode) {
            let reason = format!("what was written of inode {} was not in the bucket yet, and is lost", record.inode);
            return Err(ClientError::Stale(reason));
        }
        let node = self.client.node(record.inode).await?;
        if record.is_directory {
            let kept = self.client.metadata().keep_directory(&node).await?;
            self.restore_directory(record, &node, kept, (slot, position));
            return Ok(());
        }
        let file = match self.client.open_unchecked(&node) {
            Some(file) => file,
            None => self.client.open_again(&node).await?,
        };
        if let Some(copies) = file.page_cache_hint() {
            // The kernel has pages of what was read.
            copies.set();
        }
        if let Some(node) = file.version_node() {
            self.files.inodes.opened(node, || self.files.passthrough.inherited(record.backing?));
        }
        let block = record.block.and_then(|block| Some((block, file.begin_kernel_reads()?)));
        let how = IoMode { node: kernel_node, block, ..IoMode::default() };
        self.files.insert(record.number, OpenHandle::noted(file, how, record.appends, Some(slot)));
        Ok(())
    }
}
