//! Where invalidations go when this client has taken them in.

use futures::future::BoxFuture;

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
    fn invalidated(&self) -> BoxFuture<'static, ()>;
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
    fn invalidated(&self) -> BoxFuture<'static, ()> {
        Box::pin(std::future::ready(()))
    }
    fn barrier(&self) -> BoxFuture<'static, ()> {
        Box::pin(std::future::ready(()))
    }
}
