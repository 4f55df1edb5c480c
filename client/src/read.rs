//! Reading files.

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use bytes::Bytes;

use crate::error::ClientError;
use crate::metadata::Node;

/// Opens files. Cheap to clone.
#[derive(Clone)]
pub struct Files {
    inner: Arc<()>,
}

impl Files {
    /// Opens a file for reading. A small file (up to 1 MiB) is made present at once, so that a version that is gone
    /// shows here as `Stale`; a larger one needs no I/O. Bounded by `client.read_timeout`.
    pub async fn open(&self, node: &Arc<Node>) -> Result<Arc<OpenFile>, ClientError> {
        let _ = (node, &self.inner);
        Err(ClientError::Shutdown)
    }

    /// Opens without I/O where nothing has to be asked: an empty file, a small one whose descriptor is cached, a
    /// large one. `None`: use `open`.
    pub fn open_cached(&self, node: &Arc<Node>) -> Option<Arc<OpenFile>> {
        let _ = node;
        None
    }
}

/// One open file: an immutable version of an object. Reads of one handle run concurrently. Dropping it closes it.
pub struct OpenFile {
    node: Arc<Node>,
}

impl OpenFile {
    /// The node it was opened from; stays readable when the inode is gone.
    pub fn node(&self) -> &Arc<Node> {
        &self.node
    }

    /// Reads without waiting, for event loops: only bytes of a local block in the page cache, or in a buffer. `None`
    /// when that is not possible for the whole range (use `read`); else the bytes read, fewer than asked only at the
    /// end of the file.
    pub fn read_now(&self, offset: u64, buffer: &mut [u8]) -> Option<usize> {
        let _ = (offset, buffer);
        None
    }

    /// Reads `length` bytes at `offset`, fewer only at the end of the file. Bounded by `client.read_timeout`. The
    /// bytes stay charged to the memory budget until dropped. `Stale` when the version is gone.
    pub async fn read(&self, offset: u64, length: usize) -> Result<Bytes, ClientError> {
        let _ = (offset, length);
        Err(ClientError::Shutdown)
    }

    /// The descriptor of the whole file, when it is one complete local block; for passthrough.
    pub fn local_descriptor(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}
