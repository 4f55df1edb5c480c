//! Listings that are used are renewed before they are too old.

use cavern_proto::master::refresh_listings_reply;
use cavern_state::{StateError, Tables};
use futures::{StreamExt, stream};
use tokio::time::Instant;

use super::Lookups;
use crate::error::WorkError;

/// Directories of one call that are looked after at a time.
const REFRESH_CONCURRENCY: usize = 64;

impl Lookups {
    /// Renews the listings that are past half of their time. With `wait`, waits for them as long as the configuration
    /// allows, but not for buckets that have just failed.
    pub async fn refresh_listings(
        &self,
        directories: &[u64],
        wait: bool,
    ) -> Result<Vec<refresh_listings_reply::Directory>, WorkError> {
        let hidden = self.hidden(directories).await?;
        let is_visible = |inode: &u64| !hidden.contains(inode);
        let visible: Vec<u64> = directories.iter().copied().filter(is_visible).collect();
        let renew = stream::iter(visible).map(|inode| self.refresh_listing(inode, wait));
        let mut renewed = renew.buffer_unordered(REFRESH_CONCURRENCY);
        let deadline = Instant::now() + self.refresh_wait;
        // What is not renewed in time is answered with the age that it has.
        while let Ok(Some(result)) = tokio::time::timeout_at(deadline, renewed.next()).await {
            WorkError::if_found(result)?;
        }
        let inodes = directories.to_vec();
        let reader = self.reader.clone();
        let touched = move |tables: Tables<'_>| {
            let mut touched = Vec::with_capacity(inodes.len());
            for inode in inodes {
                let directory = match tables.directory(inode) {
                    _ if hidden.contains(&inode) => None,
                    Err(StateError::NotADirectory(_)) => None,
                    directory => directory?,
                };
                let age_ms = directory.map(|directory| reader.age_ms(directory.record.listed_ns));
                let (listing_age_ms, gone) = (age_ms.unwrap_or(-1), age_ms.is_none());
                touched.push(refresh_listings_reply::Directory { inode, listing_age_ms, gone });
            }
            Ok(touched)
        };
        self.reader.read(touched).await
    }

    async fn refresh_listing(&self, inode: u64, wait: bool) -> Result<(), WorkError> {
        let directory = match self.reader.read(move |tables| Ok(tables.directory(inode)?)).await {
            // Not a directory: answered as gone.
            Err(WorkError::State(StateError::NotADirectory(_))) => return Ok(()),
            directory => directory?,
        };
        let Some(directory) = directory.filter(|directory| directory.mount_id != 0) else { return Ok(()) };
        let mount = self.mounts.get(directory.mount_id)?;
        let Some(ttl) = mount.mount.listing_ttl() else { return Ok(()) };
        let listed_ns = directory.record.listed_ns;
        if listed_ns != 0 && !self.reader.is_older(listed_ns, ttl / 2) || mount.is_failing() {
            return Ok(());
        }
        if wait {
            self.relist_within_wait(inode).await;
        } else {
            // A full queue means that there is enough to do.
            drop(self.listings.start(inode));
        }
        Ok(())
    }

    /// Joins or begins a listing and waits for its end, at most until it is `refresh_wait` old: who comes later does
    /// not wait again for a bucket that is slow.
    pub(super) async fn relist_within_wait(&self, inode: u64) {
        let flight = match self.listings.start(inode) {
            Ok(flight) => flight,
            Err(error) => {
                tracing::debug!("a listing is not renewed: {error}");
                return;
            }
        };
        let left = (flight.created + self.refresh_wait).saturating_duration_since(Instant::now());
        // A failure was noted where it happened; here it means that the old listing is served.
        let _ = tokio::time::timeout(left, flight.ended()).await;
    }
}
