//! What no block of a file has: the file's origin, an object of the bucket, read like any object.
//!
//! The master may drop the blocks of a file that the bucket has, and the object may move: when the file is renamed, or
//! written anew. Who meets with either asks the master where the content is now, and tries again.
//!
//! The master does not drop blocks of a file that is *held*. So a file of which it knows blocks is held before anything
//! is written to it, until it is closed here for the last time; and one that is being written to, before it knows any.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use bytes::Bytes;
use cavern_conf::backoff;
use cavern_net::NetError;
use cavern_proto::data::{BlockRef, Status};
use cavern_proto::master::{Attr, FreeFate, Origin};
use cavern_ufs::UfsError;
use tokio::time::Instant;

use super::FsFile;
use crate::error::ClientError;
use crate::metadata::Node;
use crate::mounts::ObjectVersion;
use crate::read::OpenFile;

/// An origin that is open here.
#[derive(Clone)]
pub(super) struct OpenOrigin {
    origin: Origin,
    file: Arc<OpenFile>,
}

impl OpenOrigin {
    /// Whether it is still this one, cut or not.
    pub(super) fn is(&self, origin: &Origin) -> bool {
        (&self.origin.key, &self.origin.etag, self.origin.length) == (&origin.key, &origin.etag, origin.length)
    }
}

/// The bucket has another object, or none, where the origin was.
fn has_moved(error: &ClientError) -> bool {
    match error {
        ClientError::Net(NetError::WorkerStatus { status, .. }) => {
            matches!(status, Status::NotFound | Status::VersionChanged)
        }
        ClientError::Ufs(error) => matches!(**error, UfsError::NotFound { .. } | UfsError::VersionChanged { .. }),
        _ => false,
    }
}

impl FsFile {
    /// The object behind the file, as an object.
    fn object(&self, origin: &Origin) -> Result<ObjectVersion, ClientError> {
        ObjectVersion::new(self.mount.clone(), &origin.key, &origin.etag, origin.length)
    }

    /// The block of the origin in the place of a block of the file, and how many of its bytes are the file's.
    pub(super) async fn origin_of(&self, index: u32) -> Result<Option<(BlockRef, u32)>, ClientError> {
        let block_size = self.block_size();
        let look = |layout: &mut super::Layout, _: &mut _| {
            let bytes = layout.origin_bytes(index, block_size);
            layout.origin().filter(|_| bytes > 0).map(|origin| (origin.clone(), bytes))
        };
        let Some((origin, bytes)) = self.use_layout(look).await? else { return Ok(None) };
        Ok(Some((self.object(&origin)?.block(index), bytes)))
    }

    /// Reads a range of the file of which there are no blocks, as far as the origin has it.
    pub(super) async fn read_origin(&self, range: Range<u64>) -> Result<Bytes, ClientError> {
        let Some(origin) = self.use_layout(|layout, _| layout.origin().cloned()).await? else {
            return Ok(Bytes::new());
        };
        let end = range.end.min(origin.valid);
        if range.start >= end {
            return Ok(Bytes::new());
        }
        let open = self.open_origin(&origin)?;
        open.file.read_object(range.start, (end - range.start) as usize).await
    }

    fn open_origin(&self, origin: &Origin) -> Result<OpenOrigin, ClientError> {
        let mut state = self.state.lock();
        if let Some(open) = state.origin.as_ref().filter(|open| open.is(origin)) {
            return Ok(open.clone());
        }
        let attr = Attr { inode: self.inode, ..Attr::default() };
        let node = Arc::new(Node::nameless(&attr, Some(self.mount.clone())));
        let file = self.shared.files.open_object(node, self.object(origin)?);
        let open = OpenOrigin { origin: origin.clone(), file };
        state.origin = Some(open.clone());
        Ok(open)
    }

    /// An origin as an object that can be read.
    ///
    /// # Errors
    /// It cannot be one.
    pub(super) fn origin_file(&self, origin: &Origin) -> Result<Arc<OpenFile>, ClientError> {
        Ok(self.open_origin(origin)?.file)
    }

    /// The origin, if it is open.
    pub(super) fn known_origin(&self) -> Option<Arc<OpenFile>> {
        self.state.lock().origin.as_ref().map(|open| open.file.clone())
    }

    /// After a failure: whether the content may be elsewhere by now, so that another attempt makes sense. The error is
    /// the one to be answered.
    pub(super) async fn refresh_after_move(&self, error: ClientError, deadline: Instant) -> Result<(), ClientError> {
        let is_dropped = matches!(&error, ClientError::Net(NetError::WorkerStatus { status: Status::NoSuchBlock, .. }));
        if !is_dropped && !has_moved(&error) {
            return Err(error);
        }
        let Some(pause) = backoff::BLOCK.begin().next_pause_before(deadline) else {
            // What the bucket says of an object is no answer to a program that reads a file.
            let causes = format!("the bucket has not got what no worker has: {error}");
            return Err(ClientError::Read { key: format!("inode {}", self.inode), causes });
        };
        let before = self.use_layout(|layout, _| layout.generation()).await?;
        self.forget_layout();
        let now = self.use_layout(|layout, _| layout.generation()).await?;
        if is_dropped && before == now {
            return Err(error);
        }
        if !is_dropped {
            tokio::time::sleep(pause).await;
        }
        Ok(())
    }

    /// After a failure: when no worker that is there has a block, what the bucket has as well is read there from now
    /// on, and written to blocks that are made anew. The error is the one to be answered.
    pub(super) async fn fall_back_to_origin(&self, error: ClientError, deadline: Instant) -> Result<(), ClientError> {
        let _alone = self.gate.write().await;
        self.fall_back_to_origin_exclusive(error, deadline).await
    }

    /// The same for a caller that keeps all others from writing.
    pub(super) async fn fall_back_to_origin_exclusive(
        &self,
        error: ClientError,
        deadline: Instant,
    ) -> Result<(), ClientError> {
        // What the master does not know the bucket has not got.
        let is_committed = self.state.lock().layout.as_ref().is_none_or(super::Layout::is_committed);
        let is_lost = matches!(error, ClientError::Unavailable { .. });
        let pause = backoff::BLOCK.begin().next_pause_before(deadline).filter(|_| is_lost && is_committed);
        let Some(pause) = pause else { return Err(error) };
        match self.shared.metadata.free_own_content(self.inode).await {
            Ok(FreeFate::Freed) => {}
            // Somebody else may have been faster.
            Ok(FreeFate::Nothing) => tokio::time::sleep(pause).await,
            _ => return Err(error),
        }
        self.forget_layout();
        Ok(())
    }

    /// The master is asked anew.
    fn forget_layout(&self) {
        self.state.lock().seen = u64::MAX;
    }

    /// Holds the file before something is written to it for the first time, and lets go of blocks that are at lost
    /// workers only: the bucket has not got all of the file any more once another block has been written to.
    pub(super) async fn prepare_to_write(&self, deadline: Instant) -> Result<(), ClientError> {
        if self.is_held() {
            return Ok(());
        }
        self.pin_blocks().await?;
        if !self.is_held() {
            return Ok(());
        }
        let lost = |layout: &mut super::Layout, _: &mut _| {
            let lost = layout.blocks().find(|(_, known)| self.is_lost(known))?;
            Some((lost.0, lost.1.workers.clone()))
        };
        if let Some((index, workers)) = self.use_layout(lost).await? {
            let unavailable = ClientError::Unavailable { inode: self.inode, index, workers };
            // The other blocks can be written to all the same.
            if let Err(error) = self.fall_back_to_origin(unavailable, deadline).await {
                tracing::debug!(inode = self.inode, "the bucket cannot stand in for lost blocks: {error}");
            }
        }
        Ok(())
    }

    /// Keeps the master from dropping blocks that it knows, and from taking in what others make of the origin.
    pub(super) async fn pin_blocks(&self) -> Result<(), ClientError> {
        let is_exposed = |layout: &mut super::Layout, _: &mut _| self.is_exposed(layout) || layout.origin().is_some();
        if self.is_held() || !self.use_layout(is_exposed).await? {
            return Ok(());
        }
        self.hold().await
    }

    /// The same of blocks that it is about to know.
    pub(super) async fn hold(&self) -> Result<(), ClientError> {
        if !self.is_held() {
            self.kept.hold().await?;
            self.held.store(true, Ordering::Release);
            // What it has dropped before is not to be written to.
            self.forget_layout();
        }
        Ok(())
    }

    /// Whether the master may drop blocks: it knows some, or is about to, and they are not held.
    pub(super) fn is_exposed(&self, layout: &super::Layout) -> bool {
        !self.is_held() && (self.committed_unheld.load(Ordering::Acquire) || layout.has_committed())
    }

    pub(super) fn is_held(&self) -> bool {
        self.held.load(Ordering::Acquire)
    }
}
