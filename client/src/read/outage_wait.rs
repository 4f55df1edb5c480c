//! Reads that wait for a bucket that cannot be reached, or does not answer in time.
//!
//! Each tries all its sources again after a pause. The first that succeeds wakes the others, so that none sleeps on
//! when the outage is over. The log tells when the first read of a mount begins to wait, and when one has got through.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;

use cavern_conf::backoff::{self, Backoff};
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::{Instant, timeout};

use crate::error::ClientError;
use crate::mounts::MountView;

/// Who waits for the bucket of a mount.
#[derive(Debug, Default)]
pub(super) struct OutageWaiters(Mutex<HashMap<u32, Arc<Outage>>>);

/// As long as a read of the mount waits.
#[derive(Debug)]
struct Outage {
    /// In the namespace.
    path: String,
    since: Instant,
    over: Notify,
    /// The log has told that it has begun, and that it is over.
    is_told: AtomicBool,
    is_over: AtomicBool,
}

/// One read in an outage. Dropped when it ends, however it ends.
pub(super) struct OutageWaiter<'o> {
    outages: &'o OutageWaiters,
    mount: u32,
    outage: Arc<Outage>,
    backoff: Backoff,
}

impl OutageWaiters {
    /// A read of a mount has failed because its bucket cannot be reached.
    pub(super) fn enter(&self, mount: &MountView) -> OutageWaiter<'_> {
        self.enter_of(mount.id(), mount.path())
    }

    fn enter_of(&self, mount: u32, path: &str) -> OutageWaiter<'_> {
        let begin = || {
            let (is_told, is_over) = (AtomicBool::new(false), AtomicBool::new(false));
            Arc::new(Outage { path: path.to_owned(), since: Instant::now(), over: Notify::new(), is_told, is_over })
        };
        let outage = self.0.lock().entry(mount).or_insert_with(begin).clone();
        OutageWaiter { outages: self, mount, outage, backoff: backoff::BUCKET_READ.begin() }
    }
}

impl OutageWaiter<'_> {
    /// Waits until another attempt may go better; gives the failure back when the deadline comes first.
    pub(super) async fn wait(&mut self, failure: ClientError, deadline: Instant) -> Result<(), ClientError> {
        let Some(pause) = self.backoff.next_pause_before(deadline) else { return Err(failure) };
        let Outage { path, is_told, .. } = &*self.outage;
        if !is_told.swap(true, Relaxed) {
            tracing::warn!(mount = path, "reads wait for the bucket, for client.bucket_timeout at most: {failure}");
        }
        let _woken = timeout(pause, self.outage.over.notified()).await;
        Ok(())
    }

    /// The bucket has answered.
    pub(super) fn end(self) {
        let Outage { path, since, over, is_told, is_over } = &*self.outage;
        over.notify_waiters();
        if is_told.load(Relaxed) && !is_over.swap(true, Relaxed) {
            tracing::info!(mount = path, waited_ms = since.elapsed().as_millis() as u64, "the bucket answers again");
        }
    }
}

impl Drop for OutageWaiter<'_> {
    fn drop(&mut self) {
        let mut outages = self.outages.0.lock();
        // In the table and here: nobody else waits.
        if Arc::strong_count(&self.outage) <= 2 {
            outages.remove(&self.mount);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use cavern_conf::backoff::{Jitter, Profile};
    use futures::poll;

    use super::*;

    fn failure() -> ClientError {
        ClientError::NoWorkers
    }

    #[tokio::test]
    async fn who_gets_through_wakes_the_others_of_the_same_mount() {
        let outages = OutageWaiters::default();
        let deadline = Instant::now() + Duration::from_secs(3600);
        let (first, mut second, mut other) =
            (outages.enter_of(1, "/a"), outages.enter_of(1, "/a"), outages.enter_of(2, "/b"));
        let long = Profile::steady(Duration::from_secs(600), Jitter::None).begin();
        (second.backoff, other.backoff) = (long, long);
        let mut woken = Box::pin(second.wait(failure(), deadline));
        let mut asleep = Box::pin(other.wait(failure(), deadline));
        assert!(poll!(&mut woken).is_pending() && poll!(&mut asleep).is_pending());
        first.end();
        assert!(poll!(&mut woken).is_ready(), "the outage is over");
        assert!(poll!(&mut asleep).is_pending(), "of another bucket that says nothing");
        drop((woken, asleep));
        drop((second, other));
        assert!(outages.0.lock().is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn waiting_ends_before_the_deadline_with_the_failure() {
        let outages = OutageWaiters::default();
        let deadline = Instant::now() + Duration::from_millis(500);
        let mut waiting = outages.enter_of(1, "/a");
        let mut attempts = 0;
        while waiting.wait(failure(), deadline).await.is_ok() {
            attempts += 1;
        }
        assert!((1..10).contains(&attempts), "{attempts}");
    }
}
