//! Asks the master for listings in the background: new ones of directories that are in use and past half of their time
//! (first of all, for those past their time), and those of directories that the session has come to hold.

use std::collections::HashMap;
use std::time::Duration;

use cavern_net::master::RetryPolicy;
use cavern_proto::master::RefreshListingsRequest;
use parking_lot::Mutex;
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::directory::LISTING_PAGE;
use super::parts::{Inner, Metadata};
use crate::single_flight::SingleFlight;

/// Directories waiting to be touched in the background.
const QUEUE: usize = 1024;
/// Directories touched in one call at most.
const BATCH: usize = 256;
/// A directory is touched in the background once in this time at most, or in a quarter of its `metadata_ttl`.
const REFRESH_PAUSE: Duration = Duration::from_secs(1);
/// How often the names of a directory that is held are asked for: what is changed there meanwhile may be in the way.
const LISTED_MAX: usize = 3;
/// Nobody waits for listings of a bucket that was slow, for this long.
const SLOW_FOR: Duration = Duration::from_secs(5);

/// Directories that wait for a new listing.
pub(super) struct ListingRefresh {
    /// Longest wait for a new listing.
    wait: Duration,
    /// Mounts whose bucket did not give a new listing in time lately.
    slow: Mutex<HashMap<u32, Instant>>,
    queue: mpsc::Sender<u64>,
    /// Taken by whoever touches what is in the queue.
    queued: Mutex<Option<mpsc::Receiver<u64>>>,
    under_way: SingleFlight<u64, ()>,
    /// Directories that are held, and whose names may not be known.
    held: mpsc::Sender<u64>,
    newly_held: Mutex<Option<mpsc::Receiver<u64>>>,
}

impl ListingRefresh {
    /// The master waits for a new listing for `master_waits`.
    pub(super) fn new(master_waits: Duration) -> Self {
        let ((queue, queued), (held, newly_held)) = (mpsc::channel(QUEUE), mpsc::channel(QUEUE));
        Self {
            wait: master_waits + Duration::from_secs(1),
            slow: Mutex::default(),
            queue,
            queued: Mutex::new(Some(queued)),
            under_way: SingleFlight::default(),
            held,
            newly_held: Mutex::new(Some(newly_held)),
        }
    }

    /// The session has come to hold a directory that was there before: what is made there is answered here when all its
    /// names are known.
    pub(super) fn list_held(&self, directory: u64) {
        // A full queue: its names are for the master to say.
        let _full = self.held.try_send(directory);
    }

    pub(super) fn is_slow(&self, mount: u32) -> bool {
        self.slow.lock().get(&mount).is_some_and(|until| Instant::now() < *until)
    }

    fn mark(&self, mount: u32, slow: bool) {
        let mut mounts = self.slow.lock();
        if slow {
            mounts.insert(mount, Instant::now() + SLOW_FOR);
        } else {
            mounts.remove(&mount);
        }
    }
}

impl Inner {
    /// Puts a directory in the queue of the background task, where it is due.
    pub(super) fn refresh_later(&self, inode: u64) {
        let Some(directory) = self.names.directories.get(inode) else { return };
        let Some(ttl) = directory.ttl() else { return };
        if directory.may_refresh(Instant::now(), REFRESH_PAUSE.min(ttl / 4)) {
            // A full queue: it will be in use again.
            let _full = self.refresh.queue.try_send(inode);
        }
    }

    /// Has the master renew the listings, waits for the invalidations that this brings, and notes the new ages.
    async fn refresh(&self, directories: Vec<u64>) {
        let deadline = Instant::now() + self.refresh.wait;
        let request =
            || RefreshListingsRequest { directories: directories.clone(), wait: true, session: self.lease.session() };
        let reply =
            match ask!(self, "RefreshListings", refresh_listings, request(), RetryPolicy::OneAttempt, deadline).await {
                Ok(reply) => reply,
                Err(error) => {
                    tracing::debug!("listings could not be renewed: {error}");
                    // Unless nobody answers at all, it is the bucket behind the master that keeps it waiting.
                    for inode in directories {
                        if let Some(mount) = self.names.directories.get(inode).and_then(|known| known.mount.clone()) {
                            self.refresh.mark(mount.id(), true);
                        }
                    }
                    return;
                }
            };
        let now = Instant::now();
        let caught_up = self.lease.catch_up(reply.event_seq).await;
        for touched in reply.directories {
            if touched.gone {
                self.names.directories.forget(touched.inode);
                self.names.cache.forget_inode(touched.inode);
                continue;
            }
            let (known, age) = (self.names.directories.get(touched.inode), u64::try_from(touched.listing_age_ms));
            let (Some(known), Ok(age)) = (known, age) else { continue };
            let age = Duration::from_millis(age);
            if caught_up {
                known.set_age(now, age);
            }
            if let (Some(mount), Some(ttl)) = (&known.mount, known.ttl()) {
                self.refresh.mark(mount.id(), !ttl.is_zero() && age >= ttl);
            }
        }
    }
}

impl Metadata {
    /// Renews a listing that is past its time, together with everyone else who waits for it.
    pub(super) async fn refresh_first(&self, directory: u64) {
        let inner = self.inner.clone();
        self.inner.refresh.under_way.join(directory, async move { inner.refresh(vec![directory]).await }).await;
    }

    /// Asks for new listings in the background until `stop`.
    pub(crate) async fn run_refresher(&self, stop: CancellationToken) {
        let refresh = &self.inner.refresh;
        let queues = (refresh.queued.lock().take(), refresh.newly_held.lock().take());
        let (Some(mut queued), Some(mut held)) = queues else { return };
        let list = async {
            while let Some(directory) = held.recv().await {
                Box::pin(self.list_newly_held(directory)).await;
            }
        };
        let renew = async {
            let mut batch = Vec::new();
            while queued.recv_many(&mut batch, BATCH).await > 0 {
                batch.sort_unstable();
                batch.dedup();
                self.inner.refresh(std::mem::take(&mut batch)).await;
            }
        };
        let _stopped = stop.run_until_cancelled(futures::future::join(renew, list)).await;
    }

    /// Learns all names of a directory that is held, if one answer has them.
    async fn list_newly_held(&self, directory: u64) {
        for _ in 0..LISTED_MAX {
            let is_held = self.inner.log.lock().delegations.holds(directory);
            let known = self.inner.names.directories.get(directory);
            if !is_held || known.is_some_and(|known| known.has_all_names() || !known.records()) {
                return;
            }
            match self.ask_dir_page(directory, b"", LISTING_PAGE, RetryPolicy::UntilDeadline).await {
                Ok(page) if page.end => {}
                Ok(_) => return,
                Err(error) => {
                    return tracing::debug!("the names of directory inode {directory} are not known: {error}");
                }
            }
        }
    }
}
