//! Asks the master for new listings: in the background for directories that are in use and past half of their time,
//! and first of all for those past their time.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use cavern_net::master::{RetryPolicy, Stubs};
use cavern_proto::master::TouchRequest;
use parking_lot::Mutex;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::{Inner, Metadata};

/// Directories touched in one call at most.
const BATCH: usize = 256;
/// A directory is touched in the background once in this time at most, or in a quarter of its `metadata_ttl`.
const TOUCH_PAUSE: Duration = Duration::from_secs(1);
/// Nobody waits for listings of a bucket that was slow, for this long.
const SLOW_FOR: Duration = Duration::from_secs(5);

/// Mounts whose bucket did not give a new listing in time lately.
#[derive(Debug, Default)]
pub(super) struct SlowBuckets(Mutex<HashMap<u32, Instant>>);

impl SlowBuckets {
    pub(super) fn is_slow(&self, mount: u32) -> bool {
        self.0.lock().get(&mount).is_some_and(|until| Instant::now() < *until)
    }

    fn mark(&self, mount: u32, slow: bool) {
        let mut mounts = self.0.lock();
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
        let Some(directory) = self.directories.get(inode) else { return };
        let Some(ttl) = directory.ttl() else { return };
        if directory.may_touch(Instant::now(), TOUCH_PAUSE.min(ttl / 4)) {
            // A full queue: it will be in use again.
            let _full = self.touch_queue.try_send(inode);
        }
    }

    /// Has the master renew the listings, waits for the invalidations that this brings, and notes the new ages.
    async fn touch(&self, directories: Vec<u64>) {
        let deadline = tokio::time::Instant::now() + self.touch_wait;
        let asked = self.master.call_as("Touch", RetryPolicy::OneAttempt, deadline, |mut stubs: Stubs| {
            let request = TouchRequest { directories: directories.clone(), wait: true, session: self.lease.session() };
            async move { stubs.namespace.touch(request).await }
        });
        let reply = match asked.await {
            Ok(reply) => reply,
            Err(error) => {
                tracing::debug!("listings could not be renewed: {error}");
                // Unless nobody answers at all, it is the bucket behind the master that keeps it waiting.
                for inode in directories {
                    if let Some(mount) = self.directories.get(inode).and_then(|known| known.mount.clone()) {
                        self.slow.mark(mount.id(), true);
                    }
                }
                return;
            }
        };
        let now = Instant::now();
        let caught_up = self.lease.catch_up(reply.event_seq).await;
        for touched in reply.directories {
            if touched.gone {
                self.directories.forget(touched.inode);
                self.cache.forget_inode(touched.inode);
                continue;
            }
            let (Some(known), Ok(age)) = (self.directories.get(touched.inode), u64::try_from(touched.listing_age_ms))
            else {
                continue;
            };
            let age = Duration::from_millis(age);
            if caught_up {
                known.set_age(now, age);
            }
            if let (Some(mount), Some(ttl)) = (&known.mount, known.ttl()) {
                self.slow.mark(mount.id(), !ttl.is_zero() && age >= ttl);
            }
        }
    }
}

impl Metadata {
    /// Renews a listing that is past its time, together with everyone else who waits for it.
    pub(super) async fn refresh_first(&self, directory: u64) {
        let inner = self.inner.clone();
        self.inner.touches.join(directory, async move { inner.touch(vec![directory]).await }).await;
    }
}

/// Touches what is in the queue until `stop`.
pub(super) async fn run(metadata: Metadata, stop: CancellationToken) {
    let inner: Arc<Inner> = metadata.inner;
    let Some(mut queue) = inner.touch_waiting.lock().take() else { return };
    loop {
        let mut batch = Vec::new();
        tokio::select! {
            _count = queue.recv_many(&mut batch, BATCH) => {}
            () = stop.cancelled() => return,
        }
        batch.sort_unstable();
        batch.dedup();
        tokio::select! {
            () = inner.touch(batch) => {}
            () = stop.cancelled() => return,
        }
    }
}
