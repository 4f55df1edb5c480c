//! Blocks of fs-mode files that begin with what the bucket has in their place.

use std::sync::Arc;

use futures::StreamExt;

use super::source::ObjectBlock;
use super::{DiskTurns, Fills};
use crate::request_error::{Refusal, on_disk};
use crate::store::DataTarget;

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
        self.parts.mounts.fetch_succeeded(origin.mount_id, &origin.key);
        let store = self.parts.stores.data.clone();
        // Once it is written to, the bucket does not stand in for it any more.
        Ok(on_disk(turns, until, move || store.publish_draft_on_disk(&draft)).await??)
    }
}
