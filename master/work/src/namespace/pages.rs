//! A directory as a stream of pages.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use cavern_proto::master::{ReadDirPage, ReadDirRequest};
use cavern_security::{Rate, Tenant};
use cavern_state::Directory;
use cavern_state::tables::Listed;
use tokio::sync::{OwnedSemaphorePermit, mpsc};

use super::{Lookups, PAGE_ENTRIES};
use crate::error::WorkError;

/// While a directory's first listing runs, an empty page is sent so often: the asker knows that it goes on.
const KEEP_ALIVE: Duration = Duration::from_secs(2);

/// So many names cost what looking one up does.
const NAMES_PER_OPERATION: usize = 50;

/// Somebody's listing. Where he is a tenant it has a place among his, from its first page until the last one has been
/// taken, which is when all copies of this are gone.
#[derive(Clone, Default)]
pub struct Listing {
    tenant: Option<Arc<Tenant>>,
    /// That of the mount.
    rate: Option<Arc<Rate>>,
    place: Arc<OnceLock<OwnedSemaphorePermit>>,
}

impl Listing {
    /// In a directory of a mount in which there are so many operations in a second; 0 for any number.
    pub fn of(tenant: Option<Arc<Tenant>>, per_second: u64, mount_id: u32) -> Self {
        let rate = tenant.as_ref().and_then(|tenant| tenant.mount_rates.of(mount_id, per_second));
        Self { tenant, rate, ..Self::default() }
    }

    async fn begin(&self) {
        if let Some(tenant) = &self.tenant
            // It is never closed.
            && let Ok(place) = tenant.streams.clone().acquire_owned().await
        {
            let _first = self.place.set(place);
        }
    }

    /// Reads a page when it is his turn, and what was done in the mount before is paid for.
    async fn page<T>(&self, read: impl Future<Output = T>) -> T {
        if let (Some(rate), Some(tenant)) = (&self.rate, &self.tenant) {
            tenant.counts.wait(rate.wait()).await;
        }
        let _turn = match &self.tenant {
            Some(tenant) => tenant.parts.acquire().await.ok(),
            None => None,
        };
        read.await
    }

    /// A page has so many names: later pages and calls wait for them.
    fn count(&self, names: usize) {
        if let Some(rate) = &self.rate {
            rate.take((names / NAMES_PER_OPERATION) as u64);
        }
        if let Some(tenant) = &self.tenant {
            tenant.charge(names / NAMES_PER_OPERATION);
        }
    }
}

impl Lookups {
    /// Sends what a directory has, page by page.
    pub async fn send_pages(
        &self,
        request: ReadDirRequest,
        directory: Directory,
        listing: &Listing,
        answers: &mpsc::Sender<Result<ReadDirPage, WorkError>>,
    ) -> Result<(), WorkError> {
        let inode = request.inode;
        let directory = self.wait_listed(directory, answers).await?;
        listing.begin().await;
        let mut first = Some(self.directory_entry(&directory)?);
        let mut left =
            if request.limit == 0 { usize::MAX } else { usize::try_from(request.limit).unwrap_or(usize::MAX) };
        let mut after = (!request.after_name.is_empty()).then_some(request.after_name);
        loop {
            // Before the read: what changes after it has a greater number.
            let event_seq = self.watch.last_queued_seq(request.session);
            let (from, count) = (&after, left.min(PAGE_ENTRIES));
            let read = || {
                let from = from.clone();
                listing.page(self.reader.read(move |tables| Ok(tables.page(inode, from.as_deref(), count)?)))
            };
            let places = |(page, _): &(Vec<Listed>, bool)| {
                page.iter().flat_map(|(_, inode, record)| [*inode, record.parent]).collect()
            };
            let (page, end) = self.read_after_recall(inode, read, places).await?;
            listing.count(page.len());
            after = page.last().map(|(name, _, _)| name.clone()).or(after);
            left -= page.len();
            let entries = page.into_iter();
            let entries = entries.filter_map(|(name, inode, record)| self.page_entry(&directory, name, inode, &record));
            let page = ReadDirPage { directory: first.take(), entries: entries.collect(), end, event_seq };
            let is_last = end || left == 0;
            if answers.send(Ok(page)).await.is_err() || is_last {
                return Ok(());
            }
        }
    }

    /// Waits for the first listing of a directory that has none. An old listing is served as it is: the client knows
    /// its age.
    async fn wait_listed(
        &self,
        directory: Directory,
        answers: &mpsc::Sender<Result<ReadDirPage, WorkError>>,
    ) -> Result<Directory, WorkError> {
        if directory.mount_id == 0 || directory.record.listed_ns != 0 {
            return Ok(directory);
        }
        let inode = directory.inode;
        let flight = self.listings.start(inode)?;
        while tokio::time::timeout(KEEP_ALIVE, flight.ended()).await.is_err() {
            let waiting = ReadDirPage {
                directory: Some(self.directory_entry(&directory)?),
                event_seq: self.watch.seq(),
                ..ReadDirPage::default()
            };
            if answers.send(Ok(waiting)).await.is_err() {
                break;
            }
        }
        flight.ended().await?;
        let listed = self.reader.read(move |tables| Ok(tables.directory(inode)?)).await?;
        listed.ok_or(WorkError::Gone(inode))
    }
}
