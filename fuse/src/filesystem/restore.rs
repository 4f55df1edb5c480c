//! The handles that a process before this one gave the kernel, open again.
//!
//! What cannot be had again is lost: its handle gives `EIO` from now on, and the log says why. That is what was written
//! to a file of a cache-mode mount and was no object yet, and an object that is gone from its bucket.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use cavern_client::journal::Slot;
use cavern_client::{ClientError, InvalidationSink as _, Journal, is_of_this_process};
use futures::stream::{self, StreamExt as _};
use parking_lot::Mutex;
use prost::Message;
use tokio::task::spawn_blocking;
use tracing::warn;

use super::open::OpenHandle;
use super::open_nodes::IoMode;
use super::{Inner, Namespace};
use crate::aliases::node_of;
use crate::kernel::Connection;
use crate::mount_journal::{AppendRecord, HandleRecord, LockRecord, PositionRecord};

/// Handles that are opened at a time.
const AT_A_TIME: usize = 64;

/// Handles that could not be had again, and which of the kernel's nodes they are of, if of files of fs-mode mounts.
#[derive(Debug, Default)]
pub struct LostHandles {
    any: AtomicBool,
    numbers: Mutex<HashMap<u64, Option<u64>>>,
}

impl LostHandles {
    fn add(&self, number: u64, node: Option<u64>) {
        self.numbers.lock().insert(number, node);
        self.any.store(true, Relaxed);
    }

    pub fn contains(&self, number: u64) -> bool {
        self.any.load(Relaxed) && self.numbers.lock().contains_key(&number)
    }

    /// What a request is answered whose handle is not there.
    pub fn errno(&self, number: u64) -> i32 {
        if self.contains(number) { libc::EIO } else { libc::EBADF }
    }

    /// One is released; gives its node.
    pub fn released(&self, number: u64) -> Option<u64> {
        if self.any.load(Relaxed) { self.numbers.lock().remove(&number).flatten() } else { None }
    }
}

/// What the process before has left of its handles.
pub struct EarlierHandles {
    handles: Vec<(Slot, HandleRecord)>,
    positions: HashMap<u64, (Slot, PositionRecord)>,
    locks: Vec<(Slot, LockRecord)>,
    backings: Vec<(Slot, u32)>,
    appends: Vec<(Slot, AppendRecord)>,
    /// Whose locks they are.
    session: u64,
}

impl EarlierHandles {
    pub fn of(journal: &Journal) -> Self {
        let positions = records::<PositionRecord>(journal.positions.take_all());
        let backings = journal.backings.take_all().into_iter();
        let number = |record: Vec<u8>| Some(u32::from_le_bytes(record.try_into().ok()?));
        Self {
            handles: records(journal.handles.take_all()),
            positions: positions.into_iter().map(|(slot, record)| (record.number, (slot, record))).collect(),
            locks: records(journal.locks.take_all()),
            appends: records(journal.appends.take_all()),
            backings: backings.filter_map(|(slot, record)| Some((slot, number(record)?))).collect(),
            session: journal.session().0,
        }
    }

    /// Inodes of fs-mode mounts that are open.
    pub fn kept(&self) -> Vec<u64> {
        self.handles.iter().filter(|(_, record)| record.is_kept).map(|(_, record)| record.inode).collect()
    }
}

fn records<R: Message + Default>(found: Vec<(Slot, Vec<u8>)>) -> Vec<(Slot, R)> {
    found.into_iter().filter_map(|(slot, record)| Some((slot, R::decode(&record[..]).ok()?))).collect()
}

impl Namespace {
    /// Opens what was open.
    pub async fn restore(&self, earlier: EarlierHandles, connection: &Connection) {
        let inner = &self.inner;
        let EarlierHandles { handles, mut positions, locks, backings, appends, session } = earlier;
        let of_handles = handles.iter().filter_map(|(_, record)| record.backing);
        inner.passthrough.inherit(backings, of_handles, connection);
        for (slot, record) in appends {
            inner.mount_journal.note_earlier_append(slot, record);
        }
        let (all, began) = (handles.len(), tokio::time::Instant::now());
        let opening = handles.into_iter().map(|(slot, record)| {
            let position = positions.remove(&record.number);
            async move {
                inner.mount_journal.note_earlier(record);
                // The kernel has what it reads by itself, whatever becomes of the handle here.
                let node = inner.restore_node(&record);
                if let Err(error) = inner.restore_handle(&record, node, slot, position).await {
                    warn!(inode = record.inode, "what was open gives EIO from now on: {error}");
                    inner.lost.add(record.number, node);
                }
            }
        });
        stream::iter(opening).buffer_unordered(AT_A_TIME).collect::<()>().await;
        for (slot, record) in locks {
            let has_cluster_locks = inner.client.node(record.inode).await.map_or(true, |node| node.has_cluster_locks());
            inner.restore_lock(&record, session, has_cluster_locks);
            inner.mount_journal.keep_lock(record, Some(slot));
        }
        if inner.passthrough.for_fs_mode {
            // Names may lead to nodes that are known to the kernel alone.
            inner.invalidations.reset();
        }
        if all > 0 {
            tracing::info!(handles = all, took_ms = began.elapsed().as_millis() as u64, "what was open is open again");
        }
    }

    /// Gives back what the process before had registered with the kernel and no handle has. Once the journal
    /// is thawed: what is let go of before stays noted.
    pub fn give_back(&self) {
        let inner = Arc::clone(&self.inner);
        drop(spawn_blocking(move || inner.passthrough.give_back()));
    }

    /// The kernel has asked again for whatever it had no answer to.
    pub fn forget_earlier(&self) {
        self.inner.mount_journal.forget_earlier();
        self.inner.client.metadata().forget_replayed();
    }
}

impl Inner {
    /// Enters the kernel's node of a handle, if that is of a file of an fs-mode mount.
    fn restore_node(&self, record: &HandleRecord) -> Option<u64> {
        (record.is_kept && !record.is_directory).then(|| {
            let node = node_of(record.inode, record.alias);
            self.root.aliases().inherit(node);
            let backing = record.backing.and_then(|number| self.passthrough.inherited(number));
            self.open_nodes.inherited(node, backing, record.block);
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
            self.open_inodes.opened(node, || self.passthrough.inherited(record.backing?));
        }
        let block = record.block.and_then(|block| Some((block, file.begin_kernel_reads()?)));
        let how = IoMode { node: kernel_node, block, ..IoMode::default() };
        self.files.insert(record.number, Arc::new(OpenHandle::noted(file, how, record.appends, Some(slot))));
        Ok(())
    }
}
