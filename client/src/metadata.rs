//! Names and attributes: a cache that is coherent while the session's lease lives, and keeps serving when no master
//! answers; and changes, which reach the master in their order.
//!
//! [`Metadata`] joins these objects (`parts`), each with its own state:
//!
//! - `Names` (`names`): what is known, the nodes (`cache`), the listings and their ages (`directory`, `name_set`), and
//!   what was invalidated lately, which keeps answers out that an invalidation has overtaken (`recent_invalidations`).
//!   `apply_to_cache` is what a change of our own leaves there.
//! - `SessionLease` (`lease`): whether the session lives, and how far its events have been taken in.
//! - `OperationLog` (`log`): every change from when it is asked for, or answered, until the master has made it, and the
//!   directories that are held. The journal is its durable form.
//! - `OpenFiles` (`open_files`): what is open and must not be deleted (`open_inodes`), what is referred to otherwise
//!   (`removals`), and what stays open for a while (`close_grace`).
//! - `Locks` (`locks`): which owners have locks, and who waits for one.
//! - `ListingRefresh` (`listing_refresh`): listings that are asked for anew.
//! - `Outage` (`outage`): what buckets are asked while no master answers.
//! - `PendingQueries` (`parts`): questions under way, which those share who ask the same.
//!
//! What goes through them: `queries` puts questions to the master, and this file has the rule of freshness around them
//! (`freshness`). `changes` puts changes in the log, `apply_locally` answers them where nobody else can know better
//! (`predict`, `lock_locally`), `sender` carries them to the master, `replay` loads the log of a process before.
//! `watch` takes the events of the master in (`events`) and passes them on to a `sink`; `restore_watches` tells another
//! master what is cached.
//!
//! The log is locked before what is known, and what is open before the log. Nothing is awaited with either locked, and
//! nothing is dropped under the log that may close a file.

#[macro_use]
mod ask;

mod apply_locally;
mod apply_to_cache;
mod cache;
mod changes;
mod close_grace;
mod directory;
mod events;
mod freshness;
mod lease;
mod listing_budget;
mod listing_refresh;
mod lock_locally;
mod locks;
mod log;
mod name_set;
mod names;
mod node;
mod open_files;
mod open_inodes;
mod outage;
mod parts;
mod predict;
mod queries;
mod recent_invalidations;
mod removals;
mod replay;
mod restore_watches;
mod sender;
mod sink;
mod watch;

use std::sync::Arc;
use std::time::Duration;

use cavern_net::NetError;
use cavern_net::master::RetryPolicy;
use cavern_posix::check_name;
use cavern_proto::ROOT_INODE;
use futures::future::BoxFuture;
use tokio::time::Instant;

pub use directory::DirPage;
pub use locks::{AnsweredBy, LOCK_TO_END};
pub use log::Changed;
pub use node::{Node, Posix};
pub(crate) use open_files::ChangedContents;
pub use open_inodes::OpenInode;
pub use parts::Metadata;
pub(crate) use recent_invalidations::InvalidationMark;
pub use sink::{InvalidationSink, NoSink};

use crate::error::ClientError;
use crate::journal::Journal;
use crate::mounts::{MountView, Mounts};
use cache::Found;
use directory::LISTING_PAGE;
use freshness::{CacheDecision, Freshness, LeaseState};
use parts::Inner;

/// How often it is looked whether the session has begun.
const SESSION_POLL: Duration = Duration::from_millis(2);

/// What the cache knows of a name.
#[derive(Clone, Debug)]
pub enum CachedLookup {
    Hit(Arc<Node>),
    /// Known not to exist.
    Negative,
    /// Unknown, or not fresh enough: ask with `lookup`.
    Miss,
}

impl Metadata {
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

    /// Looks a name up when somebody else has found that the name leads elsewhere than is known here.
    pub async fn lookup_anew(&self, parent: u64, name: &[u8]) -> Result<Arc<Node>, ClientError> {
        check_name(name)?;
        self.ask_lookup(parent, name, RetryPolicy::UntilDeadline).await
    }

    /// An inode from the cache, without I/O. `None`: ask with `node`.
    pub fn cached_node(&self, inode: u64) -> Option<Arc<Node>> {
        if let Some(known) = self.outage_node(inode) {
            return known.ok();
        }
        let node = self.inner.names.caching.then(|| self.inner.names.complete_node(inode)).flatten()?;
        self.inner.usable(node.parent, || Some(node))
    }

    /// An inode by id. `Stale` when it has been replaced or deleted.
    pub async fn node(&self, inode: u64) -> Result<Arc<Node>, ClientError> {
        if let Some(known) = self.outage_node(inode) {
            return known;
        }
        let parent = |node: Option<&Arc<Node>>| node.map_or(0, |node| node.parent);
        let cached = || self.inner.names.complete_node(inode).map(Ok);
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
            let names = &self.inner.names;
            let known = names.directories.get(directory);
            let records = names.caching && known.as_ref().is_none_or(|known| known.records());
            let asked = if records { limit.max(LISTING_PAGE) } else { limit };
            let is_cached = known.is_some_and(|known| known.page(&names.cache, after, limit).is_some());
            let answer = tokio::select! {
                biased;
                in_bucket = self.bucket_directory_in_outage(directory) => {
                    return self.bucket_page(in_bucket, after, limit).await;
                }
                answer = self.ask_dir_page(directory, after, asked, patience_with(is_cached)) => answer,
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

    /// A page of a directory from the cache, without I/O; `None` when the listing is not there or not fresh enough.
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
        if inner.names.caching && !inner.names.cache.node(node.inode).is_some_and(is_same) {
            return Duration::ZERO;
        }
        inner.trust(node.parent)
    }

    /// How long a kernel may believe that a name below `parent` is absent; zero where that is asked each time.
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
        let known = self.inner.names.directories.get(directory);
        self.bucket_directory(directory).is_some()
            || known.is_some_and(|known| !known.keeps_absences() || known.is_strict())
    }

    /// `listener` is told of every change by others from now on, of inodes that have lost their last name, and of what
    /// is lost that was answered here. Called from the watch task: must not block. To be called once.
    pub(crate) fn on_changed_contents(&self, listener: impl Fn(ChangedContents) + Send + Sync + 'static) {
        self.inner.open.set_listener(listener);
    }

    /// `settle` is asked to end what is written to files of mounts of which views have frozen more; the masters are
    /// told when it has. To be called once.
    pub(crate) fn on_frozen(
        &self,
        settle: impl Fn(Vec<Arc<MountView>>) -> BoxFuture<'static, ()> + Send + Sync + 'static,
    ) {
        self.inner.tables.on_frozen(settle);
    }

    /// Whether an inode is known to have a name.
    pub(crate) fn has_name(&self, inode: u64) -> bool {
        self.inner.names.has_name(inode)
    }

    /// Where a process that goes on after this one finds what it must know.
    pub(crate) fn journal(&self) -> Option<&Arc<Journal>> {
        self.inner.log.journal.as_ref()
    }

    /// Whether a session with the master has begun, and its lease has not lapsed.
    pub(crate) fn has_session(&self) -> bool {
        self.inner.lease.is_live()
    }

    /// The session with the master; 0 while there is none.
    pub(crate) fn session(&self) -> u64 {
        self.inner.lease.session()
    }

    /// Waits for a session with the master, which gives the cluster's id, unless the master refuses one: that there is
    /// one to be taken up is enough, whether or not its lease has lapsed. Bounded by `client.metadata_timeout`.
    pub async fn in_session(&self) -> Result<(), ClientError> {
        self.wait_for_session(|metadata| metadata.session() != 0).await
    }

    /// Waits until a session has begun, or goes on, and its lease lives, unless the master refuses one. Bounded by
    /// `client.metadata_timeout`.
    pub(crate) async fn session_begins(&self) -> Result<(), ClientError> {
        self.wait_for_session(Self::has_session).await
    }

    async fn wait_for_session(&self, is_there: impl Fn(&Self) -> bool) -> Result<(), ClientError> {
        let patience = self.inner.master.timeout();
        let begun = async {
            while !is_there(self) && self.inner.lease.denial().is_none() {
                tokio::time::sleep(SESSION_POLL).await;
            }
        };
        let _late = tokio::time::timeout(patience, begun).await;
        if is_there(self) {
            return Ok(());
        }
        let waited_ms = patience.as_millis() as u64;
        let silent = NetError::MasterDeadline { call: "Watch", waited_ms };
        Err(ClientError::Net(self.inner.lease.denial().map_or(silent, NetError::from)))
    }

    /// Whether changes by others may have been missed, though the master can be asked.
    pub fn has_lapsed(&self) -> bool {
        self.inner.lease_state() == LeaseState::Expired
    }

    /// Now, in the order of invalidations.
    pub(crate) fn mark(&self) -> InvalidationMark {
        self.inner.names.recent.mark()
    }

    /// Whether an invalidation since then says that a name may lead elsewhere.
    pub(crate) fn has_changed(&self, since: InvalidationMark, parent: u64, name: &[u8]) -> bool {
        self.inner.names.recent.since(since).touch(parent, name, 0)
    }

    /// Forgets what belongs to mounts that are gone or were replaced.
    pub(crate) fn mounts_replaced(&self, mounts: &Mounts) {
        self.inner.names.cache.retain(|node| match &node.mount {
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
            let found = if inner.names.caching { cached() } else { None };
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
                    let found = if inner.names.caching { cached() } else { None };
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
        if !inner.names.caching {
            return None;
        }
        let known = inner.names.directories.get(directory)?;
        match inner.freshness(directory).decide() {
            CacheDecision::Ask => return None,
            CacheDecision::RefreshFirst if !any_age => return None,
            _ if !inner.may_show_listing(directory) => return None,
            how => inner.served(directory, how),
        }
        let mut page = known.page(&inner.names.cache, after, limit);
        if page.is_none() && after.is_empty() {
            known.list_known(&inner.names.cache);
            page = known.page(&inner.names.cache, after, limit);
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
        match self.names.directories.get(directory) {
            // What cannot be proven is not said.
            Some(known) if known.is_strict() => {
                let lease = if self.lease.is_live() { LeaseState::Live } else { LeaseState::Expired };
                Freshness { age: None, ttl: None, lease, slow_bucket: false }
            }
            Some(known) => Freshness {
                age: known.age(Instant::now()),
                ttl: known.ttl(),
                lease,
                slow_bucket: known.mount.as_ref().is_some_and(|mount| self.refresh.is_slow(mount.id())),
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
        match self.names.cache.lookup(parent, name) {
            Some(Found::Node(node)) => (!node.lacks_attributes() && self.may_show(&node)).then_some(Some(node)),
            Some(Found::Absent(_)) => self.may_tell_absence(parent).then_some(None),
            None => (self.names.is_without(parent, name) && self.may_tell_absence(parent)).then_some(None),
        }
    }

    /// What `cached` gives, when entries of the directory may be used as they are.
    fn usable<T>(&self, directory: u64, cached: impl FnOnce() -> Option<T>) -> Option<T> {
        if !self.names.caching {
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

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use cavern_conf::host;
    use futures::FutureExt;

    use super::parts::tests::metadata;

    #[tokio::test]
    async fn a_session_that_can_be_taken_up_is_there_before_its_lease_lives() {
        let metadata = metadata(None);
        assert!(metadata.in_session().now_or_never().is_none());
        metadata.inner.lease.begin(9);
        assert!(metadata.in_session().now_or_never().is_some_and(|waited| waited.is_ok()));
        assert!(metadata.session_begins().now_or_never().is_none());
        metadata.inner.lease.extend(host::uptime(), Duration::from_secs(60));
        assert!(metadata.session_begins().now_or_never().is_some_and(|waited| waited.is_ok()));
    }
}
