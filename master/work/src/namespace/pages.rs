//! A directory as a stream of pages.
//!
//! One that is listed for the first time is given as far as the listing is: names before one that may still come. Who
//! goes on after the last of them waits for more. The session is notified of what appears among them later.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use cavern_proto::master::{ReadDirPage, ReadDirRequest};
use cavern_security::{Rate, Tenant};
use cavern_state::Directory;
use cavern_state::tables::Listed;
use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, mpsc};

use super::{Lookups, PAGE_ENTRIES};
use crate::error::WorkError;
use crate::listing::{Flight, Progress};

/// While a directory's first listing runs, an empty page is sent so often: the asker knows that it goes on.
const KEEP_ALIVE: Duration = Duration::from_secs(2);

/// So many names cost what looking one up does.
const NAMES_PER_OPERATION: usize = 50;

/// Somebody's listing. Where he is a tenant it has a place among his, from its first page until the last one has been
/// taken, which is when all copies of this are gone. It has none as long as it waits for the bucket and has nothing to
/// give.
#[derive(Clone, Default)]
pub struct Listing {
    tenant: Option<Arc<Tenant>>,
    /// That of the mount.
    rate: Option<Arc<Rate>>,
    place: Arc<Mutex<Option<OwnedSemaphorePermit>>>,
}

impl Listing {
    /// In a directory of a mount in which there are so many operations in a second; 0 for any number.
    pub fn of(tenant: Option<Arc<Tenant>>, per_second: u64, mount_id: u32) -> Self {
        let rate = tenant.as_ref().and_then(|tenant| tenant.mount_rates.of(mount_id, per_second));
        Self { tenant, rate, ..Self::default() }
    }

    /// Takes a place, if it has none.
    async fn begin(&self) {
        let has_one = self.place.lock().is_some();
        if let Some(tenant) = self.tenant.as_ref().filter(|_| !has_one)
            // It is never closed.
            && let Ok(place) = tenant.streams.clone().acquire_owned().await
        {
            *self.place.lock() = Some(place);
        }
    }

    /// Leaves its place to others.
    fn pause(&self) {
        *self.place.lock() = None;
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

/// What of a directory can be read.
struct Readable {
    directory: Directory,
    /// All names before this one; `None` for all that there are.
    before: Option<Bytes>,
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
        let mut after = (!request.after_name.is_empty()).then_some(request.after_name);
        let is_listed = directory.mount_id == 0 || directory.record.listed_ns != 0;
        let flight = if is_listed { None } else { Some(self.listings.start(inode)?) };
        let mut readable = match &flight {
            Some(flight) => {
                let past = after.clone().unwrap_or_default();
                self.wait_listed(&directory, flight, after.is_some(), &past, answers).await?
            }
            None => Readable { directory: directory.clone(), before: None },
        };
        let mut first = Some(self.directory_entry(&readable.directory)?);
        let most = if request.limit == 0 { usize::MAX } else { usize::try_from(request.limit).unwrap_or(usize::MAX) };
        let mut left = most;
        loop {
            listing.begin().await;
            // Before the read: what changes after it has a greater number.
            let event_seq = self.watch.last_queued_seq(request.session);
            if let Some(before) = &readable.before {
                self.watch.watch_names_before(request.session, inode, before);
            }
            let (from, count) = (&after, left.min(PAGE_ENTRIES));
            let read = || {
                let from = from.clone();
                listing.page(self.reader.read(move |tables| Ok(tables.page(inode, from.as_deref(), count)?)))
            };
            let places = |(page, _): &(Vec<Listed>, bool)| {
                page.iter().flat_map(|(_, inode, record)| [*inode, record.parent]).collect()
            };
            let (mut page, mut end) = self.read_after_recall(inode, read, places).await?;
            // The name that ends what can be read, if nothing is left of that.
            let mut reached = None;
            if let Some(before) = &readable.before {
                let within = page.partition_point(|(name, _, _)| name < before);
                reached = (end || within < page.len()).then(|| before.clone());
                page.truncate(within);
                end = false;
            }
            listing.count(page.len());
            after = page.last().map(|(name, _, _)| name.clone()).or(after);
            left -= page.len();
            // Who asks in parts goes on by himself.
            let is_cut = reached.is_some() && request.limit != 0 && left < most;
            if reached.is_none() || !page.is_empty() {
                let of = &readable.directory;
                let entries = page.into_iter();
                let entries = entries.filter_map(|(name, inode, record)| self.page_entry(of, name, inode, &record));
                let page = ReadDirPage { directory: first.take(), entries: entries.collect(), end, event_seq };
                if answers.send(Ok(page)).await.is_err() {
                    return Ok(());
                }
            }
            if end || left == 0 || is_cut {
                return Ok(());
            }
            if let (Some(past), Some(flight)) = (reached, &flight) {
                if left == most {
                    listing.pause();
                }
                readable = self.wait_listed(&directory, flight, after.is_some(), &past, answers).await?;
            }
        }
    }

    /// Waits until the first listing of a directory is past a name, which has been read up to, or is at its end. An old
    /// listing is served as it is: the client knows its age. With `has_read` some of the directory has been given.
    async fn wait_listed(
        &self,
        directory: &Directory,
        flight: &Flight,
        has_read: bool,
        past: &Bytes,
        answers: &mpsc::Sender<Result<ReadDirPage, WorkError>>,
    ) -> Result<Readable, WorkError> {
        let inode = directory.inode;
        let is_enough = |progress: &Progress| match progress {
            Progress::Running { known_before } => known_before.as_ref().is_some_and(|before| before > past),
            Progress::Disordered => has_read,
            Progress::Ended(_) => true,
        };
        loop {
            match tokio::time::timeout(KEEP_ALIVE, flight.wait(is_enough)).await {
                Ok(Progress::Running { known_before }) => {
                    let mut directory = directory.clone();
                    // What there is of it is as old as it will be as a whole.
                    directory.record.listed_ns = flight.began_ns();
                    return Ok(Readable { directory, before: known_before });
                }
                Ok(Progress::Disordered) => {
                    return Err(WorkError::Refused(format!(
                        "the store lists in no order, so names may have been missing in what was read of directory \
                         inode {inode}: read it from its beginning"
                    )));
                }
                Ok(Progress::Ended(listed)) => {
                    listed?;
                    return Ok(Readable { directory: self.reader.directory(inode).await?, before: None });
                }
                Err(_) => {
                    let waiting =
                        ReadDirPage { directory: Some(self.directory_entry(directory)?), ..ReadDirPage::default() };
                    if answers.send(Ok(waiting)).await.is_err() {
                        return Err(WorkError::stopping());
                    }
                }
            }
        }
    }
}
