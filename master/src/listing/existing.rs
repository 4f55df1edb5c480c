//! The index of an fs-mode mount whose bucket had objects: every directory that is known and was never listed is
//! listed, many at a time, until there is none.
//!
//! What is left to do is in the state (`unlisted`), so a master that is restarted goes on where it was: at most the
//! directories that were under way are listed anew. A directory that fails is tried again for ever, with a pause that
//! grows while nothing succeeds.

use std::collections::{HashSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use cavern_proto::record::command::Command;
use cavern_proto::record::{IndexRecord, PutIndex};
use futures::StreamExt;
use futures::stream::FuturesUnordered;

use super::Listings;
use crate::MasterError;
use crate::mounts::OpenMount;

const RETRY_FIRST: Duration = Duration::from_millis(500);
const RETRY_MOST: Duration = Duration::from_secs(30);
/// Unlisted directories that are read at a time.
const PAGE: usize = 256;

/// Unlisted directories, in the order of their paths, over and over.
#[derive(Default)]
struct Queue {
    waiting: VecDeque<(Vec<u8>, u64)>,
    after: Option<Vec<u8>>,
}

impl Listings {
    /// Indexes an fs-mode mount in the background, as far as that was not done before.
    pub fn start_existing(&self, mount: Arc<OpenMount>) {
        let listings = self.clone();
        self.0.tasks.spawn(async move {
            let stop = listings.0.stop.clone();
            tokio::select! {
                result = listings.index_existing(&mount) => if let Err(error) = result {
                    tracing::warn!(mount = mount.mount.path, "the index was given up: {error}");
                },
                () = stop.cancelled() => {}
            }
        });
    }

    async fn index_existing(&self, mount: &OpenMount) -> Result<(), MasterError> {
        let mut pause = RETRY_FIRST;
        // Half of the requests are left to those who wait.
        let width = self.0.concurrency.div_ceil(2);
        let mut queue = Queue::default();
        let (mut running, mut busy) = (FuturesUnordered::new(), HashSet::new());
        while self.publish_index(mount).await?.is_some_and(|index| index.finished_ns == 0) {
            while running.len() < width
                && let Some(inode) = self.next_unlisted(mount, &mut queue).await?
            {
                if busy.insert(inode) {
                    running.push(async move {
                        let listed = async { self.start(inode, None)?.flight().ended().await };
                        (inode, listed.await)
                    });
                }
            }
            match running.next().await {
                Some((inode, Ok(_))) => {
                    busy.remove(&inode);
                    pause = RETRY_FIRST;
                }
                Some((inode, Err(error))) => {
                    tracing::debug!(inode, mount = mount.mount.path, "not listed: {error}");
                    tokio::time::sleep(pause).await;
                    pause = (pause * 2).min(RETRY_MOST);
                    busy.remove(&inode);
                }
                None => self.finish_index(mount).await?,
            }
        }
        Ok(())
    }

    /// Shows how far the index is; `None` when the mount is gone, or never needed one.
    async fn publish_index(&self, mount: &OpenMount) -> Result<Option<IndexRecord>, MasterError> {
        let id = mount.id();
        let index = self.0.reader.read(move |tables| tables.index(id)).await?;
        let shown = index.unwrap_or_default();
        mount.set_index(shown.unlisted > 0, shown.entries, shown.hidden_keys, shown.unlisted);
        mount.set_incomplete(shown.incomplete);
        Ok(index)
    }

    /// The next directory to be listed; `None` at the end of a round.
    async fn next_unlisted(&self, mount: &OpenMount, queue: &mut Queue) -> Result<Option<u64>, MasterError> {
        if queue.waiting.is_empty() {
            let (id, after) = (mount.id(), queue.after.take());
            queue.waiting = self.0.reader.read(move |tables| tables.unlisted(id, after.as_deref(), PAGE)).await?.into();
        }
        let Some((path, inode)) = queue.waiting.pop_front() else { return Ok(None) };
        queue.after = Some(path);
        Ok(Some(inode))
    }

    /// Ends the index, if nothing is left.
    async fn finish_index(&self, mount: &OpenMount) -> Result<(), MasterError> {
        let id = mount.id();
        let read = self.0.reader.read(move |tables| Ok((tables.index(id)?, tables.has_unlisted(id, &[])?)));
        let (Some(index), false) = read.await? else { return Ok(()) };
        let index = IndexRecord { finished_ns: self.0.reader.clock().now_ns().max(1), ..index };
        self.0.proposer.propose(Command::PutIndex(PutIndex { mount_id: id, index: Some(index) })).await?;
        let (entries, hidden) = (index.entries, index.hidden_keys);
        tracing::info!(mount = mount.mount.path, entries, hidden, "the index is complete");
        Ok(())
    }
}
