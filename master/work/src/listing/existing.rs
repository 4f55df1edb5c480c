//! The index of an fs-mode mount whose bucket had objects: every directory that is known and was never listed is
//! listed, many at a time, until there is none.
//!
//! What is left to do is in the state (`unlisted`), so a master that is restarted goes on where it was: at most the
//! directories that were under way are listed anew. A directory that fails is tried again for ever, with a pause that
//! grows while nothing succeeds.

use std::collections::{HashSet, VecDeque};
use std::sync::Arc;

use cavern_conf::backoff;
use cavern_proto::record::IndexRecord;
use cavern_state::namespace::ListingCounts;
use futures::future::BoxFuture;
use futures::stream::FuturesUnordered;
use futures::{FutureExt as _, StreamExt as _};

use super::Listings;
use crate::background::{BackgroundTask, Next, Pace};
use crate::error::WorkError;
use crate::mounts::OpenMount;

/// Unlisted directories that are read at a time.
const PAGE: usize = 256;

/// Unlisted directories, in the order of their paths, over and over.
#[derive(Default)]
struct Queue {
    waiting: VecDeque<(Vec<u8>, u64)>,
    after: Option<Vec<u8>>,
}

/// A directory that is being listed, to the end.
type Listing = BoxFuture<'static, (u64, Result<ListingCounts, WorkError>)>;

/// The index of a mount, directory by directory.
struct IndexingExisting {
    listings: Listings,
    mount: Arc<OpenMount>,
    queue: Queue,
    running: FuturesUnordered<Listing>,
    busy: HashSet<u64>,
}

impl IndexingExisting {
    /// Begins as many listings as there may be, and waits for the next of them to end.
    async fn step(&mut self) -> Result<Next, WorkError> {
        let Self { listings, mount, queue, running, busy } = self;
        if listings.publish_index(mount).await?.is_none_or(|index| index.finished_ns != 0) {
            return Ok(Next::End);
        }
        // Half of the requests are left to those who wait.
        let width = listings.0.concurrency.div_ceil(2);
        while running.len() < width
            && let Some(inode) = listings.next_unlisted(mount, queue).await?
        {
            if busy.insert(inode) {
                let listings = listings.clone();
                let list = async move {
                    let listed = async { listings.start(inode)?.ended().await };
                    (inode, listed.await)
                };
                running.push(list.boxed());
            }
        }
        match running.next().await {
            Some((inode, listed)) => {
                busy.remove(&inode);
                listed?;
            }
            None => listings.finish_existing(mount).await?,
        }
        Ok(Next::More)
    }
}

impl Listings {
    /// Indexes an fs-mode mount in the background, as far as that was not done before.
    pub fn start_existing(&self, mount: Arc<OpenMount>) {
        let task = BackgroundTask::new(format!("index {}", mount.mount.path), Pace::after(backoff::INDEX.first));
        let (listings, queue, running, busy) =
            (self.clone(), Queue::default(), FuturesUnordered::new(), HashSet::new());
        let indexing = IndexingExisting { listings, mount, queue, running, busy };
        let task = task.with_backoff(backoff::INDEX);
        self.0.background.start(&self.0.tasks, task, indexing, |indexing| indexing.step().boxed());
    }

    /// Shows how far the index is; `None` when the mount is gone, or never needed one.
    async fn publish_index(&self, mount: &OpenMount) -> Result<Option<IndexRecord>, WorkError> {
        let id = mount.id();
        let index = self.0.reader.read(move |tables| Ok(tables.index(id)?)).await?;
        let shown = index.unwrap_or_default();
        mount.set_index(shown.unlisted > 0, shown.entries, shown.hidden_keys, shown.unlisted);
        mount.health.lock().status.incomplete_entries = shown.incomplete;
        Ok(index)
    }

    /// The next directory to be listed; `None` at the end of a round.
    async fn next_unlisted(&self, mount: &OpenMount, queue: &mut Queue) -> Result<Option<u64>, WorkError> {
        if queue.waiting.is_empty() {
            let (id, after) = (mount.id(), queue.after.take());
            queue.waiting =
                self.0.reader.read(move |tables| Ok(tables.unlisted(id, after.as_deref(), PAGE)?)).await?.into();
        }
        let Some((path, inode)) = queue.waiting.pop_front() else { return Ok(None) };
        queue.after = Some(path);
        Ok(Some(inode))
    }

    /// Ends the index, if nothing is left.
    async fn finish_existing(&self, mount: &OpenMount) -> Result<(), WorkError> {
        let id = mount.id();
        let read = self.0.reader.read(move |tables| Ok((tables.index(id)?, tables.has_unlisted(id, &[])?)));
        let (Some(index), false) = read.await? else { return Ok(()) };
        let index = IndexRecord { finished_ns: self.0.reader.clock().now_ns().max(1), ..index };
        self.put_index(id, index).await?;
        let (entries, hidden) = (index.entries, index.hidden_keys);
        tracing::info!(mount = mount.mount.path, entries, hidden, "the index is complete");
        Ok(())
    }
}
