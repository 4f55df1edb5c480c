//! Names and attributes: a cache that is coherent while the session's lease lives, and keeps serving when no master
//! answers.
//!
//! `cache` holds the nodes, `directory` the listings and their ages (with `name_set`), `freshness` decides whether what
//! is cached may be used, `recent_invalidations` keeps answers that an invalidation has overtaken out of the cache,
//! `watch` takes the invalidations in, `remember` tells another master what is cached, `listing_refresh` asks for new
//! listings, `queries` puts the questions to the master. `changes` carries changes to the master, `apply_change` what
//! they leave in the caches, `held` answers them where nobody else can know better, `open_inodes` keeps what is open
//! here from being deleted, `removals` what is referred to otherwise, and `locks` waits for locks and remembers who has
//! any. `outage` has the buckets asked while no master answers.

mod access;
mod apply_change;
mod cache;
mod changed_contents;
mod changes;
mod directory;
mod freshness;
mod held;
mod lease;
mod listing_budget;
mod listing_refresh;
mod locks;
mod name_set;
mod node;
mod open_inodes;
mod outage;
mod queries;
mod recent_invalidations;
mod remember;
mod removals;
mod replay;
mod staying;
mod watch;

use std::sync::Arc;
use std::time::Duration;

use cavern_net::NetError;
use cavern_net::master::{MasterChannel, RetryPolicy};
use cavern_posix::check_name;
use cavern_proto::ROOT_INODE;
use futures::future::BoxFuture;
use parking_lot::Mutex;
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

pub(crate) use changed_contents::ChangedContents;
pub use changes::Changed;
pub use locks::{AnsweredBy, LOCK_TO_END};
pub use node::{Node, Posix};
pub use open_inodes::OpenInode;
pub(crate) use recent_invalidations::Mark;

use crate::error::ClientError;
use crate::identity::Identity;
use crate::journal::Journal;
use crate::mounts::Mounts;
use crate::single_flight::SingleFlight;
use crate::stats::Stats;
use crate::tables::Tables;
use cache::{Cache, Found};
use changed_contents::ContentListener;
use changes::ChangeQueue;
use directory::Directories;
use freshness::{CacheDecision, Freshness, LeaseState};
use held::HeldDirectories;
use lease::SessionLease;
use listing_refresh::SlowBuckets;
use locks::Locks;
use open_inodes::OpenInodes;
use outage::Outage;
use recent_invalidations::RecentInvalidations;
use removals::ReferencedInodes;
use replay::Replayed;
use staying::StayingFiles;

/// Entries asked for at once when a listing is recorded, so that a large directory takes few round trips.
const LISTING_PAGE: usize = 4096;
/// Directories waiting to be touched in the background.
const TOUCH_QUEUE: usize = 1024;
/// How often it is looked whether the session has begun.
const SESSION_POLL: Duration = Duration::from_millis(2);

/// Where invalidations go after the client's own cache has taken them in, in the order in which the master applied
/// them. Called from the watch task: must not block; may be called at any rate.
pub trait InvalidationSink: Send + Sync + 'static {
    /// A name now leads to another inode (`new`), or nowhere (0), or for the first time somewhere (`old` 0). Kernels
    /// trust none of the names that are not `kept`, those of strict mounts.
    fn entry(&self, parent: u64, name: &[u8], old: u64, new: u64, kept: bool);
    /// An inode's attributes are out of date.
    fn inode(&self, inode: u64);
    /// Everything is out of date.
    fn reset(&self);
    /// Nothing is, but of what only the kernel has there may be no invalidations from now on.
    fn resumed(&self);
    /// Which of these inodes are referred to, by a kernel say, after all earlier invalidations have been passed on.
    fn referred(&self, inodes: Vec<u64>) -> BoxFuture<'static, Vec<u64>>;
    /// Completes when nobody trusts what earlier invalidations of strict mounts made untrue, nor attributes and bytes
    /// of others. Must not wait for names in a kernel: who is changing their directory may wait for this.
    fn let_go(&self) -> BoxFuture<'static, ()>;
    /// Completes when all earlier invalidations have been passed on (to the kernel). The client acknowledges
    /// afterwards.
    fn barrier(&self) -> BoxFuture<'static, ()>;
}

/// For processes with no cache of their own.
#[derive(Debug)]
pub struct NoSink;

impl InvalidationSink for NoSink {
    fn entry(&self, _parent: u64, _name: &[u8], _old: u64, _new: u64, _kept: bool) {}
    fn inode(&self, _inode: u64) {}
    fn reset(&self) {}
    fn resumed(&self) {}
    fn referred(&self, _inodes: Vec<u64>) -> BoxFuture<'static, Vec<u64>> {
        Box::pin(std::future::ready(Vec::new()))
    }
    fn let_go(&self) -> BoxFuture<'static, ()> {
        Box::pin(std::future::ready(()))
    }
    fn barrier(&self) -> BoxFuture<'static, ()> {
        Box::pin(std::future::ready(()))
    }
}

/// What the cache knows of a name.
#[derive(Clone, Debug)]
pub enum CachedLookup {
    Hit(Arc<Node>),
    /// Known not to exist.
    Negative,
    /// Unknown, or not fresh enough: ask with `lookup`.
    Miss,
}

/// Consecutive entries of a directory, in name order (bytes), without `.` and `..`.
#[derive(Clone, Debug)]
pub struct DirPage {
    pub entries: Vec<Arc<Node>>,
    /// The directory has no further entry. When false, `entries` is not empty: go on after its last name.
    pub end: bool,
}

/// The namespace as this client sees it: cached, coherent under the lease, served stale while no master answers.
/// Cheap to clone.
#[derive(Clone)]
pub struct Metadata {
    inner: Arc<Inner>,
}

/// A name below a directory.
type NameKey = (u64, Box<[u8]>);

struct Inner {
    master: MasterChannel,
    tables: Arc<Tables>,
    stats: Arc<Stats>,
    /// Whether nodes and listings are kept at all.
    caching: bool,
    /// `client.change_timeout`.
    change_timeout: Duration,
    /// Longest wait for a new listing.
    touch_wait: Duration,
    cache: Cache,
    directories: Directories,
    recent: RecentInvalidations,
    changes: ChangeQueue,
    held: Arc<HeldDirectories>,
    /// Whether directories that are made here are to be held.
    holds_directories: bool,
    open: OpenInodes,
    staying: StayingFiles,
    content_listener: ContentListener,
    referred: ReferencedInodes,
    locks: Locks,
    lease: SessionLease,
    /// For the process that goes on when this one has died.
    journal: Option<Arc<Journal>>,
    /// What the process before had asked for.
    replayed: Replayed,
    slow: SlowBuckets,
    outage: Outage,
    touch_queue: mpsc::Sender<u64>,
    touch_waiting: Mutex<Option<mpsc::Receiver<u64>>>,
    /// Those are shared that begin at the same mark: an answer that was read before somebody's change is none to that
    /// one.
    lookups: SingleFlight<(NameKey, Mark, RetryPolicy), Result<Arc<Node>, ClientError>>,
    nodes: SingleFlight<(u64, Mark, RetryPolicy), Result<Arc<Node>, ClientError>>,
    pages: SingleFlight<(NameKey, usize, Mark, RetryPolicy), Result<DirPage, ClientError>>,
    touches: SingleFlight<u64, ()>,
    bucket_lookups: SingleFlight<NameKey, Result<Arc<Node>, ClientError>>,
}

impl Metadata {
    pub(crate) fn new(
        master: MasterChannel,
        tables: Arc<Tables>,
        stats: Arc<Stats>,
        config: &cavern_conf::Config,
        journal: Option<Arc<Journal>>,
    ) -> Self {
        let entries = config.client.metadata_cache_entries;
        let (lease, locks) = (SessionLease::new(), Locks::default());
        if let Some(journal) = &journal {
            lease.begin(journal.session().0);
            locks.begin_epoch(journal.epoch());
        }
        let (touch_queue, touch_waiting) = mpsc::channel(TOUCH_QUEUE);
        Self {
            inner: Arc::new(Inner {
                master,
                tables,
                stats,
                caching: config.fuse.client_metadata_cache,
                touch_wait: config.master.refresh_wait.get() + Duration::from_secs(1),
                cache: Cache::new(entries),
                directories: Directories::new(entries),
                recent: RecentInvalidations::default(),
                changes: ChangeQueue::default(),
                held: Arc::default(),
                change_timeout: config.client.change_timeout.get(),
                holds_directories: config.client.hold_directories
                    && config.fuse.client_metadata_cache
                    && journal.is_some(),
                open: OpenInodes::default(),
                staying: StayingFiles::default(),
                content_listener: ContentListener::default(),
                referred: ReferencedInodes::default(),
                locks,
                lease,
                journal,
                replayed: Replayed::default(),
                slow: SlowBuckets::default(),
                outage: Outage::new(&config.client),
                touch_queue,
                touch_waiting: Mutex::new(Some(touch_waiting)),
                lookups: SingleFlight::default(),
                nodes: SingleFlight::default(),
                pages: SingleFlight::default(),
                touches: SingleFlight::default(),
                bucket_lookups: SingleFlight::default(),
            }),
        }
    }

    /// A name from the cache, without I/O; for event loops.
    pub fn cached_lookup(&self, parent: u64, name: &[u8]) -> CachedLookup {
        match self.inner.usable(parent, || self.inner.known(parent, name)) {
            Some(Some(node)) => CachedLookup::Hit(node),
            Some(None) => CachedLookup::Negative,
            None => CachedLookup::Miss,
        }
    }

    /// One component. `NotFound` when there is none, `Stale` when its directory is gone. Bounded by
    /// `client.metadata_timeout`.
    pub async fn lookup(&self, parent: u64, name: &[u8]) -> Result<Arc<Node>, ClientError> {
        check_name(name)?;
        let absent = || ClientError::NotFound(String::from_utf8_lossy(name).into_owned());
        let cached = || self.inner.known(parent, name).map(|node| node.ok_or_else(absent));
        self.cached_or_ask(|_| parent, cached, |patience| self.ask_lookup(parent, name, patience)).await
    }

    /// The same, when somebody else has found that the name leads elsewhere than is known here.
    pub async fn lookup_anew(&self, parent: u64, name: &[u8]) -> Result<Arc<Node>, ClientError> {
        check_name(name)?;
        self.ask_lookup(parent, name, RetryPolicy::UntilDeadline).await
    }

    /// An inode from the cache, without I/O. `None`: ask with `node`.
    pub fn cached_node(&self, inode: u64) -> Option<Arc<Node>> {
        if let Some(known) = self.outage_node(inode) {
            return known.ok();
        }
        let node = self.inner.caching.then(|| self.inner.complete_node(inode)).flatten()?;
        self.inner.usable(node.parent, || Some(node))
    }

    /// An inode by id. `Stale` when it has been replaced or deleted.
    pub async fn node(&self, inode: u64) -> Result<Arc<Node>, ClientError> {
        if let Some(known) = self.outage_node(inode) {
            return known;
        }
        let parent = |node: Option<&Arc<Node>>| node.map_or(0, |node| node.parent);
        let cached = || self.inner.complete_node(inode).map(Ok);
        self.cached_or_ask(parent, cached, |patience| self.ask_node(inode, patience)).await
    }

    /// An absolute path of the namespace, in one round trip.
    pub async fn resolve(&self, path: &str) -> Result<Arc<Node>, ClientError> {
        if !path.starts_with('/') {
            return Err(ClientError::Invalid(format!("\"{path}\" is no absolute path")));
        }
        for name in path.split('/').filter(|name| !name.is_empty()) {
            check_name(name.as_bytes())?;
        }
        if path.bytes().all(|byte| byte == b'/') {
            return self.node(ROOT_INODE).await;
        }
        let parent = |node: Option<&Arc<Node>>| node.map_or(0, |node| node.parent);
        self.cached_or_ask(parent, || None, |_| self.ask_path(path)).await
    }

    /// Asks the bucket about the name of one file now: the inode that it leads to, another than `node` when the object
    /// was replaced; `NotFound` when it leads nowhere. For `consistency = always`, and when a version is found to be
    /// gone.
    pub async fn current(&self, node: &Node) -> Result<Arc<Node>, ClientError> {
        self.ask_current(node).await
    }

    /// Up to `limit` entries after the name `after` (exclusive; empty for the beginning). The entries are in the
    /// cache afterwards.
    pub async fn read_dir(&self, directory: u64, after: &[u8], limit: usize) -> Result<DirPage, ClientError> {
        let limit = limit.max(1);
        let mut touched = false;
        // Twice at most: once before the listing was renewed, once after.
        loop {
            if let Some(page) = self.cached_page(directory, after, limit, touched || !after.is_empty()) {
                self.inner.stats.metadata_hits.inc();
                return Ok(page);
            }
            // In the middle of a directory nothing is waited for: the reader has seen the beginning already.
            if after.is_empty() && !touched && self.inner.freshness(directory).decide() == CacheDecision::RefreshFirst {
                touched = true;
                self.refresh_first(directory).await;
                continue;
            }
            self.inner.stats.metadata_misses.inc();
            if let Some(in_bucket) = self.bucket_directory(directory) {
                return self.bucket_page(in_bucket, after, limit).await;
            }
            let records =
                self.inner.caching && self.inner.directories.get(directory).is_none_or(|directory| directory.records());
            let asked = if records { limit.max(LISTING_PAGE) } else { limit };
            let known = self.inner.directories.get(directory);
            let is_cached = known.is_some_and(|known| known.page(&self.inner.cache, after, limit).is_some());
            let answer = tokio::select! {
                answer = self.ask_dir_page(directory, after, asked, patience_with(is_cached)) => answer,
                in_bucket = self.bucket_directory_in_outage(directory) => {
                    return self.bucket_page(in_bucket, after, limit).await;
                }
            };
            match answer {
                // The first answer says how old the listing is.
                Ok(_)
                    if after.is_empty()
                        && !touched
                        && self.inner.freshness(directory).decide() == CacheDecision::RefreshFirst =>
                {
                    touched = true;
                    self.refresh_first(directory).await;
                }
                Ok(mut page) => {
                    page.end &= page.entries.len() <= limit;
                    page.entries.truncate(limit);
                    return Ok(page);
                }
                Err(error) if error.is_transient() => {
                    return self.cached_page(directory, after, limit, true).ok_or(error);
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// The same from the cache, without I/O; `None` when the listing is not there or not fresh enough.
    pub fn cached_dir_page(&self, directory: u64, after: &[u8], limit: usize) -> Option<DirPage> {
        let page = self.cached_page(directory, after, limit.max(1), !after.is_empty())?;
        self.inner.stats.metadata_hits.inc();
        Some(page)
    }

    /// How long a kernel may keep the node's name and attributes without asking: at most half of the mount's
    /// `metadata_ttl`, at most as long as the lease lasts if no event extends it (or this process is stopped), at most
    /// a second without a live lease, zero when the entry is already out of date. The caller shortens it to its own
    /// limits. Zero in strict mounts.
    pub fn trust(&self, node: &Node) -> Duration {
        let inner = &self.inner;
        if node.mount.as_ref().is_some_and(|mount| mount.is_strict()) {
            return Duration::ZERO;
        }
        // An invalidation, or a change of our own, may have overtaken the answer that this node came from.
        let is_same = |known: Arc<Node>| std::ptr::eq(&*known, node) || known.attr() == node.attr();
        if inner.caching && !inner.cache.node(node.inode).is_some_and(is_same) {
            return Duration::ZERO;
        }
        inner.trust(node.parent)
    }

    /// The same for the absence of a name below `parent`; zero where that is asked each time.
    pub fn trust_absence(&self, parent: u64) -> Duration {
        if self.is_asked_each_time(parent) { Duration::ZERO } else { self.inner.trust(parent) }
    }

    /// Whether a kernel may go on with the listing of a directory that it has: not while the bucket is asked itself.
    /// When it is due for a new one, that is asked for in the background: nobody else may look at the directory.
    pub fn trusts_listing(&self, directory: u64) -> bool {
        if self.is_asked_each_time(directory) {
            return false;
        }
        let inner = &self.inner;
        match inner.freshness(directory).decide() {
            CacheDecision::Serve | CacheDecision::ServeStale => true,
            CacheDecision::ServeAndRefresh => {
                inner.refresh_later(directory);
                true
            }
            CacheDecision::RefreshFirst | CacheDecision::Ask => false,
        }
    }

    /// Whether kernels are to keep nothing of the names in a directory: with `consistency = always`, in strict mounts,
    /// and while it is the bucket that is asked.
    fn is_asked_each_time(&self, directory: u64) -> bool {
        let known = self.inner.directories.get(directory);
        self.bucket_directory(directory).is_some()
            || known.is_some_and(|known| !known.keeps_absences() || known.is_strict())
    }

    /// Where a process that goes on after this one finds what it must know.
    pub(crate) fn journal(&self) -> Option<&Arc<Journal>> {
        self.inner.journal.as_ref()
    }

    /// Nodes in the cache.
    pub fn cached_entries(&self) -> usize {
        self.inner.cache.len()
    }

    /// Runs the stream of invalidations until `stop`.
    pub(crate) async fn watch(&self, who: Identity, sink: Arc<dyn InvalidationSink>, stop: CancellationToken) {
        watch::run(self.inner.clone(), who, sink, stop).await;
    }

    /// Asks for new listings in the background until `stop`.
    pub(crate) async fn keep_fresh(&self, stop: CancellationToken) {
        listing_refresh::run(self.clone(), stop).await;
    }

    /// Whether a session with the master has begun, and its lease has not lapsed.
    pub(crate) fn has_session(&self) -> bool {
        self.inner.lease.is_live()
    }

    /// The session with the master; 0 while there is none.
    pub(crate) fn session(&self) -> u64 {
        self.inner.lease.session()
    }

    /// Waits for the session with the master, which gives the cluster's id. Bounded by `client.metadata_timeout`.
    pub async fn in_session(&self) -> Result<(), ClientError> {
        let patience = self.inner.master.timeout();
        match self.inner.lease.begins(patience).await {
            true => Ok(()),
            false => Err(self.no_session(patience)),
        }
    }

    /// Waits until a session has begun, for as long as the master may take, and not if it refuses one.
    pub(crate) async fn session_begins(&self, patience: Duration) -> Result<(), ClientError> {
        let begun = async {
            while !self.has_session() && self.inner.lease.denial().is_none() {
                tokio::time::sleep(SESSION_POLL).await;
            }
        };
        let _late = tokio::time::timeout(patience, begun).await;
        if self.has_session() { Ok(()) } else { Err(self.no_session(patience)) }
    }

    /// Why there is no session though it was waited for.
    fn no_session(&self, waited: Duration) -> ClientError {
        let waited_ms = waited.as_millis() as u64;
        let silent = NetError::MasterDeadline { call: "Watch", waited_ms };
        ClientError::Net(self.inner.lease.denial().map_or(silent, NetError::from))
    }

    /// Whether changes by others may have been missed, though the master can be asked.
    pub fn has_lapsed(&self) -> bool {
        self.inner.lease_state() == LeaseState::Expired
    }

    /// Now, in the order of invalidations.
    pub(crate) fn mark(&self) -> Mark {
        self.inner.recent.mark()
    }

    /// Whether an invalidation since then says that a name may lead elsewhere.
    pub(crate) fn has_changed(&self, since: Mark, parent: u64, name: &[u8]) -> bool {
        self.inner.recent.since(since).touch(parent, name, 0)
    }

    /// Forgets what belongs to mounts that are gone or were replaced.
    pub(crate) fn mounts_replaced(&self, mounts: &Mounts) {
        self.inner.cache.retain(|node| match &node.mount {
            Some(mount) => mounts.get(mount.id()).is_some_and(|current| Arc::ptr_eq(current, mount)),
            None => true,
        });
    }

    /// The rule of freshness around a question to the master: `cached` is used where `parent`'s listing allows it; a
    /// listing that is too old is renewed first, once; without an answer, `cached` is used whatever its age. So the
    /// master is asked twice at most: before the listing was renewed, and after.
    async fn cached_or_ask<F>(
        &self,
        parent: impl Fn(Option<&Arc<Node>>) -> u64,
        cached: impl Fn() -> Option<Result<Arc<Node>, ClientError>>,
        ask: impl Fn(RetryPolicy) -> F,
    ) -> Result<Arc<Node>, ClientError>
    where
        F: Future<Output = Result<Arc<Node>, ClientError>>,
    {
        let inner = &self.inner;
        let mut touched = false;
        loop {
            let found = if inner.caching { cached() } else { None };
            let directory = parent(found.as_ref().and_then(|found| found.as_ref().ok()));
            match inner.freshness(directory).decide() {
                CacheDecision::RefreshFirst if !touched => {
                    touched = true;
                    self.refresh_first(directory).await;
                    continue;
                }
                CacheDecision::Ask => {}
                how => {
                    if let Some(found) = found {
                        inner.served(directory, how);
                        return found;
                    }
                }
            }
            inner.stats.metadata_misses.inc();
            let answer = ask(patience_with(found.is_some())).await;
            match &answer {
                Err(error) if error.is_transient() => {
                    let found = if inner.caching { cached() } else { None };
                    inner.stats.metadata_stale_served.inc_by(u64::from(found.is_some()));
                    return found.unwrap_or(answer);
                }
                Err(ClientError::NotFound(_)) | Ok(_) if !touched => {
                    let directory = parent(answer.as_ref().ok());
                    match inner.freshness(directory).decide() {
                        // The answer says that the listing is too old, and where it is.
                        CacheDecision::RefreshFirst => {
                            touched = true;
                            self.refresh_first(directory).await;
                        }
                        // It does not say how old the listing is: find out for the next time.
                        CacheDecision::Ask if answer.is_ok() => {
                            inner.refresh_later(directory);
                            return answer;
                        }
                        _ => return answer,
                    }
                }
                _ => return answer,
            }
        }
    }

    fn cached_page(&self, directory: u64, after: &[u8], limit: usize, any_age: bool) -> Option<DirPage> {
        let inner = &self.inner;
        if !inner.caching {
            return None;
        }
        let known = inner.directories.get(directory)?;
        match inner.freshness(directory).decide() {
            CacheDecision::Ask => return None,
            CacheDecision::RefreshFirst if !any_age => return None,
            _ if !inner.may_show_listing(directory) => return None,
            how => inner.served(directory, how),
        }
        let mut page = known.page(&inner.cache, after, limit);
        if page.is_none() && after.is_empty() {
            known.list_known(&inner.cache);
            page = known.page(&inner.cache, after, limit);
        }
        let (entries, end) = page?;
        Some(DirPage { entries, end })
    }
}

impl Inner {
    fn lease_state(&self) -> LeaseState {
        match (self.master.is_silent(), self.lease.is_live()) {
            (true, _) => LeaseState::Unreachable,
            (false, true) => LeaseState::Live,
            (false, false) => LeaseState::Expired,
        }
    }

    /// What is known about the freshness of the entries of a directory.
    fn freshness(&self, directory: u64) -> Freshness {
        let lease = self.lease_state();
        match self.directories.get(directory) {
            // What cannot be proven is not said.
            Some(known) if known.is_strict() => {
                let lease = if self.lease.is_live() { LeaseState::Live } else { LeaseState::Expired };
                Freshness { age: None, ttl: None, lease, slow_bucket: false }
            }
            Some(known) => Freshness {
                age: known.age(Instant::now()),
                ttl: known.ttl(),
                lease,
                slow_bucket: known.mount.as_ref().is_some_and(|mount| self.slow.is_slow(mount.id())),
            },
            None => Freshness { age: None, ttl: Some(Duration::ZERO), lease, slow_bucket: false },
        }
    }

    /// How long a kernel may trust an answer about an entry of the directory.
    fn trust(&self, directory: u64) -> Duration {
        let (rest, freshness) = (self.lease.rest(), self.freshness(directory));
        match freshness.lease {
            LeaseState::Live => freshness.trust().min(rest),
            LeaseState::Expired | LeaseState::Unreachable => freshness.trust(),
        }
    }

    /// What a name leads to: `Some(None)` for nowhere, `None` when it is not known here.
    fn known(&self, parent: u64, name: &[u8]) -> Option<Option<Arc<Node>>> {
        match self.cache.lookup(parent, name) {
            Some(Found::Node(node)) => (!node.lacks_attributes() && self.may_show(&node)).then_some(Some(node)),
            Some(Found::Absent(_)) => self.may_tell_absence(parent).then_some(None),
            None => {
                let is_without = self.directories.get(parent).is_some_and(|directory| directory.is_without(name));
                (is_without && self.may_tell_absence(parent)).then_some(None)
            }
        }
    }

    /// A node of the cache, unless its attributes are to be asked for.
    fn complete_node(&self, inode: u64) -> Option<Arc<Node>> {
        self.cache.node(inode).filter(|node| !node.lacks_attributes())
    }

    /// Whether the absence of a name in the directory may be cached.
    fn keeps_absences(&self, directory: u64) -> bool {
        self.caching && self.directories.get(directory).is_some_and(|directory| directory.keeps_absences())
    }

    /// What `cached` gives, when entries of the directory may be used as they are.
    fn usable<T>(&self, directory: u64, cached: impl FnOnce() -> Option<T>) -> Option<T> {
        if !self.caching {
            return None;
        }
        let how = match self.freshness(directory).decide() {
            CacheDecision::Ask | CacheDecision::RefreshFirst => return None,
            how => how,
        };
        let found = cached()?;
        self.served(directory, how);
        Some(found)
    }

    /// Counts, and asks for a new listing where that is due.
    fn served(&self, directory: u64, how: CacheDecision) {
        self.stats.metadata_hits.inc();
        match how {
            CacheDecision::ServeAndRefresh => self.refresh_later(directory),
            CacheDecision::ServeStale => drop(self.stats.metadata_stale_served.inc()),
            CacheDecision::Serve | CacheDecision::RefreshFirst | CacheDecision::Ask => {}
        }
    }
}

/// How long a question waits for a master, by whether something cached can be used in place of an answer.
fn patience_with(is_cached: bool) -> RetryPolicy {
    if is_cached { RetryPolicy::OneAttempt } else { RetryPolicy::UntilDeadline }
}
