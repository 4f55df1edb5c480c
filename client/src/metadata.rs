//! Names and attributes.

mod node;

use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;

pub use node::Node;

use crate::error::ClientError;

/// Where invalidations go after the client's own cache has taken them in, in the order in which the master applied
/// them. Called from the watch task: must not block; may be called at any rate.
pub trait InvalidationSink: Send + Sync + 'static {
    /// A name now leads to another inode (`new`), or nowhere (0), or for the first time somewhere (`old` 0).
    fn entry(&self, parent: u64, name: &[u8], old: u64, new: u64);
    /// An inode's attributes are out of date.
    fn inode(&self, inode: u64);
    /// Everything is out of date.
    fn reset(&self);
    /// Completes when everything told before has been passed on (to the kernel). The client acknowledges afterwards.
    fn barrier(&self) -> BoxFuture<'static, ()>;
}

/// For processes with no cache of their own.
#[derive(Debug)]
pub struct NoSink;

impl InvalidationSink for NoSink {
    fn entry(&self, _parent: u64, _name: &[u8], _old: u64, _new: u64) {}
    fn inode(&self, _inode: u64) {}
    fn reset(&self) {}
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
    inner: Arc<()>,
}

impl Metadata {
    /// A name from the cache, without I/O; for event loops.
    pub fn cached_lookup(&self, parent: u64, name: &[u8]) -> CachedLookup {
        let _ = (parent, name, &self.inner);
        CachedLookup::Miss
    }

    /// One component. `NotFound` when there is none; bounded by `client.metadata_timeout`.
    pub async fn lookup(&self, parent: u64, name: &[u8]) -> Result<Arc<Node>, ClientError> {
        let _ = (parent, name);
        Err(ClientError::Shutdown)
    }

    /// An inode from the cache, without I/O. `None`: ask with `node`.
    pub fn cached_node(&self, inode: u64) -> Option<Arc<Node>> {
        let _ = inode;
        None
    }

    /// An inode by id. `Stale` when it has been replaced or deleted.
    pub async fn node(&self, inode: u64) -> Result<Arc<Node>, ClientError> {
        let _ = inode;
        Err(ClientError::Shutdown)
    }

    /// An absolute path of the namespace, in one round trip.
    pub async fn resolve(&self, path: &str) -> Result<Arc<Node>, ClientError> {
        let _ = path;
        Err(ClientError::Shutdown)
    }

    /// Asks the bucket about one file now; `Stale` when the name leads to another inode than `node` by now, and
    /// `NotFound` when it leads nowhere. For `consistency = always`, and after a read that found the version gone.
    pub async fn revalidate(&self, node: &Node) -> Result<Arc<Node>, ClientError> {
        let _ = node;
        Err(ClientError::Shutdown)
    }

    /// Up to `limit` entries after the name `after` (exclusive; empty for the beginning). The entries are in the
    /// cache afterwards.
    pub async fn read_dir(&self, directory: u64, after: &[u8], limit: usize) -> Result<DirPage, ClientError> {
        let _ = (directory, after, limit);
        Err(ClientError::Shutdown)
    }

    /// The same from the cache, without I/O; `None` when the listing is not there or not fresh enough.
    pub fn cached_dir_page(&self, directory: u64, after: &[u8], limit: usize) -> Option<DirPage> {
        let _ = (directory, after, limit);
        None
    }

    /// How long a kernel may keep the node's name and attributes without asking: at most half of the mount's
    /// `metadata_ttl`, at most a second without a live lease, zero when the entry is already out of date.
    /// `Duration::MAX` for "until invalidated". The caller shortens it to its own limits.
    pub fn trust(&self, node: &Node) -> Duration {
        let _ = node;
        Duration::ZERO
    }

    /// The same for the absence of a name below `parent`.
    pub fn trust_absence(&self, parent: u64) -> Duration {
        let _ = parent;
        Duration::ZERO
    }
}
