//! From buckets into the namespace.
//!
//! - A **directory** is listed when somebody needs it and it never was, or when its listing is too old.
//!   [`Listings::start`] makes sure that one directory is listed once at a time; [`directory`] runs the listing:
//!   [`window`] brings the bucket's order into the namespace's, [`diff`] finds what differs, and only that is proposed,
//!   page by page.
//! - A **single name** is checked ([`check`]) where waiting for a listing would be too long, or where the caller wants
//!   to know now.
//! - A whole mount is **indexed** ([`index`]) from flat listings, many at a time, after it was made, and when somebody
//!   wants all of it compared.
//! - What the bucket of an **fs-mode** mount had before ([`existing`], [`adopt`]) comes in by the same listings of
//!   directories, and of such a mount each directory is listed once: from then on the namespace is the truth.
//! - What the bucket **keeps** ([`stored_attributes`]) of the attributes of a file, in mounts that have it keep them,
//!   is asked file by file.
//! - Trees are **walked** ([`walk`]) for refreshes, usage and loads.
//!
//! Several of these may learn about the same name at the same time. The rule is: what was asked later wins. A listing
//! that runs leaves alone what was checked after it began ([`Flight::record_check`]), and an index what was checked
//! after its page was asked for ([`index::IndexRun`]); a check whose question is older than the running listing, or
//! index, is asked again; an index leaves a directory to its listing; and neither checks nor indexes reach the log
//! after a listing that began later has begun ([`crate::mounts::OpenMount::gate`]) or ended (`observed_ns`). Checks of
//! the same name take turns ([`name_checks`]).

pub mod adopt;
mod check;
mod default_attributes;
pub mod diff;
mod directory;
mod existing;
mod external;
mod index;
mod listing_task;
mod name_checks;
mod recover;
mod stored_attributes;
pub mod walk;

use std::collections::HashMap;
use std::sync::Arc;

use cavern_conf::Config;
use cavern_consensus::Proposer;
use cavern_proto::record::{ApplyListing, ListingGroup};
use cavern_state::TypedCommand;
use cavern_state::namespace::ListingCounts;
use cavern_ufs::{ListMode, ListPage, Lister, ObjectMeta, UfsError};
use parking_lot::Mutex;
use tokio::sync::Semaphore;
use tokio::time::Instant;

pub use default_attributes::DefaultAttributes;
pub use listing_task::{Flight, Progress};
pub use name_checks::CheckReason;

use index::IndexRun;
use name_checks::NameChecks;

use crate::background::{TaskGroup, TaskList};
use crate::error::WorkError;
use crate::metrics::ListingMetrics;
use crate::mounts::{Mounts, OpenMount};
use crate::reader::StateReader;

/// Entries of one command, and directories that are to be found for them.
const PORTION: usize = 500;
/// Directories that are being listed or wait for it, at most.
const FLIGHTS_MAX: usize = 16_384;
/// What to do about a directory, or a mount, that the bucket has too much in.
const ENTRIES_REMEDY: &str = "split the directory, or raise master.listing_entries if there are so many objects";
const INDEX_REMEDY: &str = "mount a part of it, or raise master.index_entries if there are so many objects";

/// Everything that lists. Cheap to clone.
#[derive(Clone)]
pub struct Listings(Arc<Inner>);

struct Inner {
    reader: StateReader,
    mounts: Arc<Mounts>,
    proposer: Proposer,
    metrics: ListingMetrics,
    /// LIST and HEAD requests in flight.
    requests: Semaphore,
    concurrency: usize,
    /// Of one directory, and of the index of a mount, at most.
    entries: u64,
    index_entries: u64,
    /// LIST requests of the index of a mount, and bytes that it may have in memory.
    index_streams: usize,
    index_memory: u64,
    /// Mounts that are being indexed, with what checks have to know of it once that has begun.
    indexes: Mutex<HashMap<u32, Option<Arc<IndexRun>>>>,
    default_attributes: DefaultAttributes,
    cluster_id: Arc<str>,
    flights: Mutex<HashMap<u64, Arc<Flight>>>,
    checks: NameChecks,
    background: TaskList,
    tasks: TaskGroup,
}

impl Listings {
    pub fn new(
        reader: StateReader,
        mounts: Arc<Mounts>,
        proposer: Proposer,
        metrics: ListingMetrics,
        background: TaskList,
        config: &Config,
        cluster_id: Arc<str>,
    ) -> Self {
        let concurrency = config.master.list_concurrency.max(1);
        Self(Arc::new(Inner {
            reader,
            mounts,
            proposer,
            metrics,
            requests: Semaphore::new(concurrency),
            concurrency,
            entries: config.master.listing_entries,
            index_entries: config.master.index_entries,
            index_streams: config.master.index_streams,
            index_memory: config.master.index_memory.bytes(),
            indexes: Mutex::default(),
            default_attributes: DefaultAttributes::new(&config.fuse),
            cluster_id,
            flights: Mutex::default(),
            checks: NameChecks::default(),
            background,
            tasks: TaskGroup::default(),
        }))
    }

    /// Stops what runs and waits for it.
    pub async fn shutdown(&self) {
        self.0.tasks.shutdown().await;
    }

    /// The listing of `directory` that runs, or a new one.
    ///
    /// # Errors
    /// [`WorkError::Overloaded`] when too many directories wait already.
    pub fn start(&self, directory: u64) -> Result<Arc<Flight>, WorkError> {
        let mut flights = self.0.flights.lock();
        if let Some(running) = flights.get(&directory) {
            return Ok(running.clone());
        }
        if flights.len() >= FLIGHTS_MAX || self.0.tasks.stop.is_cancelled() {
            return Err(WorkError::Overloaded(format!("{FLIGHTS_MAX} directories wait to be listed: try again later")));
        }
        let flight = Arc::new(Flight::new());
        flights.insert(directory, flight.clone());
        self.0.metrics.running.set(flights.len() as i64);
        drop(flights);
        let (listings, running) = (self.clone(), flight.clone());
        self.0.tasks.tracker.spawn(async move {
            let result = tokio::select! {
                result = listings.list_directory(directory, &running) => result,
                () = listings.0.tasks.stop.cancelled() => Err(WorkError::stopping()),
            };
            if result.is_err() && running.has_applied() {
                let now_ns = listings.0.reader.clock().now_ns();
                let indexes = listings.0.indexes.lock();
                indexes.values().flatten().for_each(|index| index.listing_failed(directory, now_ns));
            }
            {
                let mut flights = listings.0.flights.lock();
                flights.remove(&directory);
                listings.0.metrics.running.set(flights.len() as i64);
            }
            running.end(result);
        });
        Ok(flight)
    }

    /// A listing of `directory` that began after this call, from its beginning to its end.
    pub async fn relist(&self, directory: u64) -> Result<ListingCounts, WorkError> {
        let asked = self.0.reader.clock().now_ns();
        loop {
            let flight = self.start(directory)?;
            let is_new = flight.begins_after(asked);
            let ended = flight.ended().await;
            if is_new {
                return ended;
            }
        }
    }

    /// The listing of this directory that runs at the moment.
    fn flight(&self, directory: u64) -> Option<Arc<Flight>> {
        self.0.flights.lock().get(&directory).cloned()
    }

    pub fn default_attributes(&self) -> DefaultAttributes {
        self.0.default_attributes
    }

    async fn propose_listing(&self, mount_id: u32, groups: Vec<ListingGroup>) -> Result<ListingCounts, WorkError> {
        let now_ns = self.0.reader.clock().now_ns();
        let portions = portions(groups);
        let of = |groups| ApplyListing { mount_id, groups, now_ns, ..ApplyListing::default() };
        self.propose_portions(portions.into_iter().map(of)).await
    }

    /// Proposes the parts of a listing, in their order, and counts what they changed together.
    async fn propose_portions<C: TypedCommand<Outcome = ListingCounts>>(
        &self,
        portions: impl IntoIterator<Item = C>,
    ) -> Result<ListingCounts, WorkError> {
        let mut counts = ListingCounts::default();
        for more in self.0.proposer.propose_all(portions).await? {
            counts += more;
        }
        Ok(counts)
    }

    /// A listing of a directory of a mount, as far as `master.listing_entries` goes.
    fn list(&self, mount: &OpenMount, prefix: &str) -> Lister {
        mount.ufs.list(prefix, ListMode::Directory).at_most(self.0.entries, ENTRIES_REMEDY)
    }

    /// The index of this mount that runs at the moment.
    fn index_run(&self, mount_id: u32) -> Option<Arc<IndexRun>> {
        self.0.indexes.lock().get(&mount_id).cloned().flatten()
    }

    /// One of all that is in a mount, as far as `master.index_entries` goes.
    fn list_all(&self, mount: &OpenMount) -> Lister {
        mount.ufs.list(mount.ufs.prefix(), ListMode::Recursive).at_most(self.0.index_entries, INDEX_REMEDY)
    }

    /// The next page of a listing, when its turn has come. At once `None` after the last.
    async fn next_page(&self, mount: &OpenMount, lister: &mut Lister) -> Result<Option<ListPage>, WorkError> {
        let timer = Instant::now();
        let page = self.request(mount, lister.next_page()).await?;
        if page.is_some() {
            self.0.metrics.pages.inc();
            self.0.metrics.page_seconds.observe(timer.elapsed().as_secs_f64());
        }
        Ok(page)
    }

    /// The object of a key, if there is one.
    async fn head(&self, mount: &OpenMount, key: &str) -> Result<Option<ObjectMeta>, WorkError> {
        match self.request(mount, mount.ufs.head(key)).await {
            Err(WorkError::Ufs(UfsError::NotFound { .. })) => Ok(None),
            found => found.map(Some),
        }
    }

    /// Sends one request to a mount's bucket when its turn has come, and notes how it went.
    async fn request<T>(
        &self,
        mount: &OpenMount,
        send: impl Future<Output = Result<T, UfsError>>,
    ) -> Result<T, WorkError> {
        let turn = self.0.requests.acquire().await;
        let _turn = turn.map_err(|_closed| WorkError::stopping())?;
        self.sent(mount, send).await
    }

    /// Sends one request to a mount's bucket at once, and notes how it went.
    async fn sent<T>(
        &self,
        mount: &OpenMount,
        send: impl Future<Output = Result<T, UfsError>>,
    ) -> Result<T, WorkError> {
        let answered = tokio::select! {
            answered = send => answered,
            () = mount.detached() => {
                return Err(WorkError::NotFound(format!("{} is unmounted", mount.mount.path)));
            }
        };
        match answered {
            Err(error) if !matches!(error, UfsError::NotFound { .. }) => {
                self.0.metrics.failures.inc();
                let error = WorkError::Ufs(error);
                mount.failed(&error);
                Err(error)
            }
            Err(error) => Err(WorkError::Ufs(error)),
            Ok(answer) => {
                mount.succeeded();
                Ok(answer)
            }
        }
    }
}

/// Takes a difference apart, so that no command is long. A directory is complete with its last part.
pub fn portions(groups: Vec<ListingGroup>) -> Vec<Vec<ListingGroup>> {
    let (mut portions, mut portion, mut size) = (Vec::new(), Vec::new(), 0);
    for mut group in groups {
        loop {
            // Finding the directory is work, too.
            size += 1 + group.directory.len();
            let mut part = ListingGroup {
                directory: group.directory.clone(),
                expect_inode: group.expect_inode,
                observed_ns: group.observed_ns,
                ..ListingGroup::default()
            };
            let room = PORTION.saturating_sub(size).max(1);
            part.remove = group.remove.drain(..group.remove.len().min(room)).collect();
            part.upsert = group.upsert.drain(..group.upsert.len().min(room - part.remove.len())).collect();
            size += part.remove.len() + part.upsert.len();
            let is_last = group.remove.is_empty() && group.upsert.is_empty();
            if is_last {
                part.listed_ns = group.listed_ns;
            }
            portion.push(part);
            if size >= PORTION {
                portions.push(std::mem::take(&mut portion));
                size = 0;
            }
            if is_last {
                break;
            }
        }
    }
    if !portion.is_empty() {
        portions.push(portion);
    }
    portions
}
