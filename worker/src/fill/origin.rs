//! Blocks of fs-mode files that begin with what the bucket has in their place, or with what an earlier block has that
//! nobody writes to any more, since a view has it.

use std::io;
use std::sync::Arc;

use cavern_proto::chunk::CHUNK_BYTES;
use cavern_proto::data::Status;
use futures::StreamExt;

use super::source::ObjectBlock;
use super::{DiskTurns, Fills};
use crate::request_error::{Refusal, on_disk};
use crate::store::{DataStore, DataTarget, Touch};

/// Bytes of a block that are copied at a time: whole chunks.
const PIECE_BYTES: u32 = 16 * CHUNK_BYTES;

impl Fills {
    /// Makes a data block with the first `bytes` bytes of the same block of an object, if it is not here yet. It
    /// appears with all of them, or not at all, and they are on disk when this returns.
    ///
    /// # Errors
    /// Two blocks that do not fit together; another object is there by now; no room; or the bucket or the disk failed.
    pub async fn begin_with_origin(
        &self,
        target: DataTarget,
        origin: &ObjectBlock,
        bytes: u32,
        (turns, until): DiskTurns<'_>,
    ) -> Result<(), Refusal> {
        if target.id.index != origin.id.index || target.start() != origin.start() || bytes > origin.length {
            return Err(Refusal::bad_request("an origin that does not fit the block"));
        }
        let store = self.parts.stores.data.clone();
        let begun = on_disk(turns, until, move || store.begin_draft(&target, bytes)).await??;
        let Some(draft) = begun.map(Arc::new) else { return Ok(()) };
        let ufs = self.parts.mounts.ufs_for(origin.mount_id, &origin.key).await?;
        let range = origin.start()..origin.start() + u64::from(bytes);
        let noted = |error| self.noted(origin, error);
        let mut pieces = ufs.get(&origin.key, &origin.etag, range).await.map_err(noted)?;
        let mut at = 0;
        while let Some(piece) = pieces.next().await {
            let (piece, store, draft) = (piece.map_err(noted)?, self.parts.stores.data.clone(), draft.clone());
            // What was asked for is what comes: see the promises of `cavern_ufs`.
            let length = piece.len() as u32;
            on_disk(turns, until, move || store.write_draft(&draft, at, &piece)).await??;
            at += length;
        }
        self.parts.mounts.failures.succeeded(origin.mount_id, &origin.key);
        let store = self.parts.stores.data.clone();
        // Once it is written to, the bucket does not stand in for it any more.
        Ok(on_disk(turns, until, move || store.publish_draft_on_disk(&draft)).await??)
    }

    /// Makes a data block with the first `bytes` bytes of another one that is here, if it is not here itself yet. It
    /// appears with all of them, or not at all, and they are on disk when this returns: those of the other one may have
    /// been, and it is the file's no more.
    ///
    /// # Errors
    /// [`Status::NoSuchBlock`] when the other one is not here; no room; or the disk failed.
    pub async fn begin_with_block(
        &self,
        target: DataTarget,
        origin: DataTarget,
        bytes: u32,
        (turns, until): DiskTurns<'_>,
    ) -> Result<(), Refusal> {
        let store = self.parts.stores.data.clone();
        on_disk(turns, until, move || copy_block(&store, &target, &origin, bytes)).await?
    }
}

/// Copies a block under another name. Chunks of zeros stay holes. *Blocking*.
fn copy_block(store: &DataStore, target: &DataTarget, origin: &DataTarget, bytes: u32) -> Result<(), Refusal> {
    // Whoever asks once more finds it here, though the other one may be gone.
    if !store.get(&target.id, Touch::None).is_absent() {
        return Ok(());
    }
    let source = store.find(origin, Touch::None)?;
    let failed = |error: io::Error| {
        let message = format!("the block {} cannot be read, with which {} is to begin: {error}", origin.id, target.id);
        Refusal::new(Status::IoError, message)
    };
    let end = source.end().map_err(failed)?.min(bytes);
    let Some(draft) = store.begin_draft(target, end)? else { return Ok(()) };
    let mut buffer = vec![0; end.min(PIECE_BYTES) as usize];
    let mut at = 0;
    while at < end {
        let piece = &mut buffer[..(end - at).min(PIECE_BYTES) as usize];
        source.read(at, piece).map_err(failed)?;
        store.write_draft_with_holes(&draft, at, piece)?;
        at += piece.len() as u32;
    }
    store.lengthen_draft(&draft, end)?;
    Ok(store.publish_draft_on_disk(&draft)?)
}
