//! The handle on one mount's store.

use std::collections::HashMap;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use cavern_conf::backoff::{Jitter, Profile};
use cavern_conf::schema;
use cavern_proto::{Capabilities, Scheme, StoreUri};
use futures::{StreamExt, stream};

use crate::allowed::FileRoots;
use crate::attempt::{Attempts, body_limit};
use crate::azblob;
use crate::error::{Operation, Request, UfsError};
use crate::fault::{Faults, Injected};
use crate::file::FileStore;
use crate::gs;
use crate::lister::Lister;
use crate::memory::MemoryBucket;
use crate::metrics::UfsStats;
use crate::object::{ListMode, ObjectMeta};
use crate::options::check_names;
use crate::retry::Retrying;
use crate::s3::{self, KeyProvider};
use crate::shared_store::SharedStore;
use crate::store::{ByteStream, ListRequest, ObjectStore, StorePage};
use crate::versions::VersionScope;

/// A handle on one mount's bucket and prefix. Cheap to clone; its clones, and all handles of the same store in this
/// process, share one limit of requests in flight and one set of counters.
#[derive(Clone)]
pub struct Ufs(Arc<Inner>);

#[derive(Clone)]
struct Inner {
    requests: Retrying,
    prefix: String,
    conf: schema::Ufs,
}

impl fmt::Debug for Ufs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Nothing of the options: they hold the credentials.
        f.debug_struct("Ufs").field("store_id", &self.store_id()).field("prefix", &self.prefix()).finish()
    }
}

/// What is under the prefix.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Contents {
    Nothing,
    Objects,
}

/// What one LIST of one key tells.
#[derive(Clone, Debug)]
pub struct Probe {
    pub contents: Contents,
    /// The first object, if there is one.
    pub first: Option<ObjectMeta>,
    /// Seconds by which this host's clock is behind the store's, negative where it is ahead; `None` where the answer
    /// does not tell the time.
    pub behind_s: Option<i64>,
}

impl Ufs {
    /// A handle on what `uri` names. Nothing is sent: [`Ufs::check`] does that. One on what `conf` allows nobody to
    /// reach answers each request with [`UfsError::NotAllowed`].
    ///
    /// # Errors
    /// [`UfsError::Invalid`] for a URI or an option that is wrong.
    pub fn open(uri: &str, options: &HashMap<String, String>, conf: &schema::Ufs) -> Result<Self, UfsError> {
        Self::open_with(uri, options, conf, None)
    }

    /// Opens a mount whose keys are vended for a process that has no credentials of its own: it gets them of `lender`,
    /// and renews them there. Other mounts are opened as they are.
    ///
    /// # Errors
    /// Those of [`Self::open`].
    pub fn open_vended(
        uri: &str,
        options: &HashMap<String, String>,
        conf: &schema::Ufs,
        lender: &KeyProvider,
    ) -> Result<Self, UfsError> {
        Self::open_with(uri, options, conf, Some(lender))
    }

    fn open_with(
        uri: &str,
        options: &HashMap<String, String>,
        conf: &schema::Ufs,
        lender: Option<&KeyProvider>,
    ) -> Result<Self, UfsError> {
        let parsed = StoreUri::parse(uri)?;
        let local = |name: &str| -> Result<Arc<SharedStore>, UfsError> {
            check_names(parsed.scheme(), options)?;
            let id = format!("{}://{name}", parsed.scheme().name());
            Ok(SharedStore::of(&id, &id, conf.concurrency))
        };
        let (store, shared, prefix): (Arc<dyn ObjectStore>, Arc<SharedStore>, String) = match &parsed {
            StoreUri::Bucket { scheme: Scheme::S3, name, prefix } => {
                let (store, shared) = s3::open(name, options, conf, lender)?;
                (Arc::new(store), shared, prefix.clone())
            }
            StoreUri::Bucket { scheme: Scheme::Gs, name, prefix } => {
                let (store, shared) = gs::open(name, options, conf)?;
                (Arc::new(store), shared, prefix.clone())
            }
            StoreUri::Bucket { scheme: Scheme::Azblob, name, prefix } => {
                let (store, shared) = azblob::open(name, prefix, options, conf)?;
                (Arc::new(store), shared, prefix.clone())
            }
            StoreUri::File { directory } => {
                let shared = local(directory)?;
                let store = FileStore::new(directory, &shared.label, FileRoots::new(conf));
                (Arc::new(store), shared, String::new())
            }
            StoreUri::Bucket { name, prefix, .. } => {
                (Arc::new(MemoryBucket::named(name)), local(name)?, prefix.clone())
            }
        };
        let attempts = Attempts {
            store,
            shared,
            request_timeout: conf.request_timeout.get(),
            io_timeout: conf.io_timeout.get(),
            faults: None,
        };
        let requests = Retrying {
            attempts: Arc::new(attempts),
            retries: u32::try_from(conf.retries).unwrap_or(u32::MAX),
            pauses: Profile::new(conf.retry_backoff.get(), conf.retry_backoff_max.get(), Jitter::Half),
            patience: Duration::ZERO,
        };
        Ok(Self(Arc::new(Inner { requests, prefix, conf: conf.clone() })))
    }

    /// This store for a caller who waits: while it cannot be reached, or does not answer, a call is tried again for so
    /// long, beyond `ufs.retries`. A call takes no longer than that and [`Ufs::deadline`] together.
    #[must_use]
    pub fn patient(&self, patience: Duration) -> Self {
        let requests = Retrying { patience, ..self.0.requests.clone() };
        Self(Arc::new(Inner { requests, ..(*self.0).clone() }))
    }

    /// This store, failing on purpose: for tests.
    #[must_use]
    pub fn with_faults(&self, faults: Faults) -> Self {
        let faults = Some(Arc::new(Injected { faults, ..Injected::default() }));
        let attempts = Arc::new(Attempts { faults, ..(*self.0.requests.attempts).clone() });
        let requests = Retrying { attempts, ..self.0.requests.clone() };
        Self(Arc::new(Inner { requests, ..(*self.0).clone() }))
    }

    /// Names endpoint and bucket (or directory) globally, the same in every process and for every prefix and
    /// credential; `ContentId::of_object` takes it.
    pub fn store_id(&self) -> &str {
        &self.shared().store_id
    }

    /// Prefix of every key of the mount: empty, or ending in `/`.
    pub fn prefix(&self) -> &str {
        &self.0.prefix
    }

    /// What the store can do: no more than [`Scheme::capabilities`](cavern_proto::Scheme::capabilities) of its kind.
    pub fn capabilities(&self) -> Capabilities {
        self.0.requests.attempts.store.capabilities()
    }

    /// Whether the bucket is there and the credentials are good: one LIST of one key. An empty prefix is fine.
    pub async fn check(&self) -> Result<Probe, UfsError> {
        let request =
            ListRequest { prefix: &self.0.prefix, mode: ListMode::Recursive, start_after: None, token: None, limit: 1 };
        let StorePage { page, behind_s, .. } = self.0.requests.list(request).await?;
        let is_empty = page.objects.is_empty() && page.prefixes.is_empty() && page.hidden == 0;
        let contents = if is_empty { Contents::Nothing } else { Contents::Objects };
        Ok(Probe { contents, first: page.objects.into_iter().next(), behind_s })
    }

    /// A listing of everything under `prefix`, a full key prefix that is empty or ends in `/`, in the order of keys.
    /// Each page is one LIST.
    pub fn list(&self, prefix: &str, mode: ListMode) -> Lister {
        Lister::new(self.clone(), prefix, mode)
    }

    /// What is said of a listing of the whole prefix that has more entries than it may have.
    pub fn too_many(&self, most: u64, remedy: &'static str) -> UfsError {
        let request = Request::new(Operation::List, &self.shared().label, self.prefix());
        UfsError::Oversized { request, reason: format!("the store lists more than {most} entries there"), remedy }
    }

    /// Size, version and time of one object; one HEAD.
    pub async fn head(&self, key: &str) -> Result<ObjectMeta, UfsError> {
        self.0.requests.head(key).await
    }

    /// The bytes of `range` of the version `etag` (of any version when that is empty), as a stream; one GET, no HEAD.
    /// An empty range sends nothing.
    ///
    /// # Errors
    /// [`UfsError::VersionChanged`] when another version is there now, or the object ends before the range does.
    pub async fn get(&self, key: &str, etag: &str, range: Range<u64>) -> Result<ByteStream, UfsError> {
        self.get_of(key, etag, range, VersionScope::Current).await
    }

    /// As [`Ufs::get`], of a version that need not be the current one: where the bucket has another object under the
    /// key by now, or none, and keeps versions, that with this ETag is looked for among them. Whoever may not list
    /// versions, or not read them, finds the current one only.
    pub async fn get_pinned(&self, key: &str, etag: &str, range: Range<u64>) -> Result<ByteStream, UfsError> {
        self.get_of(key, etag, range, VersionScope::Kept).await
    }

    async fn get_of(
        &self,
        key: &str,
        etag: &str,
        range: Range<u64>,
        scope: VersionScope,
    ) -> Result<ByteStream, UfsError> {
        if range.is_empty() {
            return Ok(ByteStream::new(stream::empty()));
        }
        Ok(self.0.requests.get(key, etag, range, scope).await?.stream)
    }

    /// As [`Ufs::get`], collected: exactly the range, or an error.
    pub async fn get_bytes(&self, key: &str, etag: &str, range: Range<u64>) -> Result<Bytes, UfsError> {
        self.get_bytes_of(key, etag, range, VersionScope::Current).await
    }

    /// As [`Ufs::get_pinned`], collected: exactly the range, or an error.
    pub async fn get_bytes_pinned(&self, key: &str, etag: &str, range: Range<u64>) -> Result<Bytes, UfsError> {
        self.get_bytes_of(key, etag, range, VersionScope::Kept).await
    }

    async fn get_bytes_of(
        &self,
        key: &str,
        etag: &str,
        range: Range<u64>,
        scope: VersionScope,
    ) -> Result<Bytes, UfsError> {
        let length = range.end.saturating_sub(range.start);
        let Ok(capacity) = usize::try_from(length) else {
            let request = Request::new(Operation::Get, &self.shared().label, key);
            let reason = format!("a range of {length} bytes does not fit into memory");
            return Err(UfsError::Oversized { request, reason, remedy: "read it in parts" });
        };
        let mut stream = self.get_of(key, etag, range, scope).await?;
        // A piece may be a small part of a large receive buffer, which it would keep: it is copied even if it is all.
        let mut bytes = BytesMut::with_capacity(capacity);
        while let Some(piece) = stream.next().await {
            bytes.extend_from_slice(&piece?);
        }
        Ok(bytes.freeze())
    }

    /// Longest time that a call for this many bytes (0 for LIST and HEAD) can take before it ends in an error, retries
    /// and pauses included; the time that the caller itself takes between pieces of a stream is not counted. One
    /// attempt waits at most `request_timeout` for its turn, `request_timeout` for the answer (connecting included),
    /// and `io_timeout` for each MiB begun of the body.
    pub fn deadline(&self, bytes: u64) -> Duration {
        let conf = &self.0.conf;
        let Retrying { retries, pauses, .. } = &self.0.requests;
        let attempt = conf.request_timeout.get() * 2 + body_limit(bytes, conf.io_timeout.get());
        let pauses = (0..*retries).map(|retry| pauses.ceiling(retry));
        pauses.fold(attempt.saturating_mul(retries.saturating_add(1)), Duration::saturating_add)
    }

    pub(crate) fn requests(&self) -> &Retrying {
        &self.0.requests
    }

    pub(crate) fn shared(&self) -> &SharedStore {
        &self.0.requests.attempts.shared
    }

    /// What this process has sent to the store so far, over all handles.
    pub fn stats(&self) -> UfsStats {
        self.shared().metrics.stats()
    }
}

#[cfg(test)]
mod tests {
    use cavern_conf::Interval;

    use super::*;

    #[test]
    fn a_deadline_adds_up_everything_that_can_be_waited_for() {
        let conf = schema::Ufs {
            request_timeout: Interval::millis(100),
            io_timeout: Interval::millis(1000),
            retries: 3,
            retry_backoff: Interval::millis(10),
            retry_backoff_max: Interval::millis(25),
            ..schema::Ufs::default()
        };
        let ufs = Ufs::open("memory://deadline", &HashMap::new(), &conf).unwrap();
        let pauses = 10 + 20 + 25;
        assert_eq!(ufs.deadline(0), Duration::from_millis(4 * (200 + 1000) + pauses));
        assert_eq!(ufs.deadline(5 << 20), Duration::from_millis(4 * (200 + 6000) + pauses));
        assert!(ufs.deadline(u64::MAX) > Duration::from_secs(1 << 31));
    }

    #[tokio::test]
    async fn a_range_that_no_memory_holds_or_that_is_empty_sends_nothing() {
        let ufs = Ufs::open("memory://ranges", &HashMap::new(), &schema::Ufs::default()).unwrap();
        assert_eq!(ufs.get_bytes("none", "", 5..5).await.unwrap().len(), 0);
        #[expect(clippy::reversed_empty_ranges, reason = "what a careless caller may write")]
        let reversed = 6..5;
        assert_eq!(ufs.get_bytes("none", "", reversed).await.unwrap().len(), 0);
        assert_eq!(ufs.stats().gets, 0);
    }
}
