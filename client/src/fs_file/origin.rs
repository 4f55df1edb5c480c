//! What no block of a file has: the file's origin, an object of the bucket, read like any object.
//!
//! The master may drop the blocks of a file that the bucket has, and the object may move: when the file is renamed, or
//! written anew. Who meets with either asks the master where the content is now, and tries again.
//!
//! The master does not drop blocks of a file that is *held*. So a file of which it knows blocks is held before anything
//! is written to it, until it is closed here for the last time; and one that is being written to, before it knows any.

use std::sync::Arc;

use cavern_conf::backoff;
use cavern_net::NetError;
use cavern_proto::data::{BlockRef, Status};
use cavern_proto::master::{Attr, FreeFate, Origin};
use cavern_ufs::UfsError;
use tokio::time::Instant;

use super::file::FsFile;
use super::layout::Layout;
use super::state::{Known, OpenOrigin};
use crate::error::ClientError;
use crate::metadata::Node;
use crate::mounts::ObjectVersion;
use crate::read::span::Span;
use crate::read::{OpenFile, PartLocation};

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
        let look = |known: &mut Known| {
            let bytes = known.layout.origin_bytes(index, block_size);
            known.layout.origin().filter(|_| bytes > 0).map(|origin| (origin.clone(), bytes))
        };
        let Some((origin, bytes)) = self.use_known(look).await? else { return Ok(None) };
        Ok(Some((self.object(&origin)?.block(index), bytes)))
    }

    /// Where a part of the file is that has no block: in the origin, as far as that has it, else nowhere.
    pub(super) async fn locate_unwritten(&self, span: &Span) -> Result<PartLocation, ClientError> {
        let start = u64::from(span.index) * self.block_size() + u64::from(span.bytes.start);
        let end = start + span.length() as u64;
        let origin = self.use_known(|known| known.layout.origin().cloned()).await?;
        let Some(origin) = origin.filter(|origin| start < origin.valid) else { return Ok(PartLocation::Hole) };
        let within = start..end.min(origin.valid);
        Ok(PartLocation::Object(self.origin_file(&origin)?, within))
    }

    /// An origin as an object that can be read.
    ///
    /// # Errors
    /// It cannot be one.
    fn origin_file(&self, origin: &Origin) -> Result<Arc<OpenFile>, ClientError> {
        let mut state = self.state.lock();
        let open = state.known.as_ref().and_then(|known| known.origin.as_ref());
        if let Some(open) = open.filter(|open| open.is(origin)) {
            return Ok(open.file.clone());
        }
        let attr = Attr { inode: self.inode, ..Attr::default() };
        let node = Arc::new(Node::nameless(&attr, Some(self.mount.clone())));
        let file = self.shared.files.open_object(node, self.object(origin)?);
        if let Some(known) = &mut state.known {
            known.origin = Some(OpenOrigin { origin: origin.clone(), file: file.clone() });
        }
        Ok(file)
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
        let before = self.use_known(|known| known.layout.generation()).await?;
        self.forget_layout();
        let now = self.use_known(|known| known.layout.generation()).await?;
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

    /// Falls back to the origin for a caller that keeps all others from writing.
    pub(super) async fn fall_back_to_origin_exclusive(
        &self,
        error: ClientError,
        deadline: Instant,
    ) -> Result<(), ClientError> {
        // What the master does not know the bucket has not got.
        let is_committed = self.state.lock().layout().is_none_or(Layout::is_committed);
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

    /// Holds the file before something is written to it for the first time, and lets go of blocks that are at lost
    /// workers only: the bucket has not got all of the file any more once another block has been written to.
    pub(super) async fn prepare_to_write(&self, deadline: Instant) -> Result<(), ClientError> {
        if self.open_ref.is_taken() {
            return Ok(());
        }
        self.pin_blocks().await?;
        if !self.open_ref.is_taken() {
            return Ok(());
        }
        let lost = |known: &mut Known| {
            let (index, lost) = known.layout.blocks().find(|(_, known)| self.is_lost(known))?;
            Some((index, lost.workers.clone()))
        };
        if let Some((index, workers)) = self.use_known(lost).await? {
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
        let is_exposed = |known: &mut Known| self.open_ref.exposes(&known.layout) || known.layout.origin().is_some();
        if self.open_ref.is_taken() || !self.use_known(is_exposed).await? { Ok(()) } else { self.take_ref().await }
    }

    /// Keeps the master from dropping blocks that it is about to know.
    pub(super) async fn take_ref(&self) -> Result<(), ClientError> {
        if !self.open_ref.is_taken() {
            self.kept.add_ref().await?;
            self.open_ref.taken();
            // What it has dropped before is not to be written to.
            self.forget_layout();
        }
        Ok(())
    }

    /// A handle is closed, of several perhaps: what nobody writes to need not be held, so that others who cut the file
    /// are alone with it. Whoever writes holds it again.
    pub fn end_writing(&self) {
        let Ok(_nobody_writes) = self.gate.try_write() else { return };
        // Where users are limited, what a hold gives a user is asked for once for each open.
        let is_of_user = self.state.lock().writer.is_some();
        if self.open_ref.is_taken() && !is_of_user && self.is_committed() && self.kept.drop_ref() {
            self.open_ref.dropped();
        }
    }
}
