//! Blocks of fs-mode files that begin with what the bucket has in their place.

use cavern_proto::data::Status;
use futures::StreamExt;

use super::Fills;
use super::source::ObjectBlock;
use crate::request_error::Refusal;
use crate::store::{DataStore, DataTarget, Draft, StoreError};

impl Fills {
    /// Makes a data block with the first `bytes` bytes of the same block of an object, if it is not here yet. It
    /// appears with all of them, or not at all, and they are on disk when this returns.
    ///
    /// # Errors
    /// Two blocks that do not fit together; another object is there by now; no room; or the bucket or the disk failed.
    pub async fn begin_with_origin(&self, target: DataTarget, origin: &ObjectBlock, bytes: u32) -> Result<(), Refusal> {
        if target.id.index != origin.id.index || target.start() != origin.start() || bytes > origin.length {
            return Err(Refusal::bad_request("an origin that does not fit the block"));
        }
        let store = self.stores.data.clone();
        let Some(mut draft) = blocking(move || store.begin_draft(&target, bytes)).await? else { return Ok(()) };
        let ufs = self.mounts.ufs_for(origin.mount_id, &origin.key).await?;
        let range = origin.start()..origin.start() + u64::from(bytes);
        let noted = |error| self.noted(origin, error);
        let mut pieces = ufs.get(&origin.key, &origin.etag, range).await.map_err(noted)?;
        let mut at = 0;
        while let Some(piece) = pieces.next().await {
            let (piece, store) = (piece.map_err(noted)?, self.stores.data.clone());
            // What was asked for is what comes: see the promises of `cavern_ufs`.
            let length = piece.len() as u32;
            draft = blocking(move || write(&store, draft, at, &piece)).await?;
            at += length;
        }
        self.mounts.fetch_succeeded(origin.mount_id, &origin.key);
        let store = self.stores.data.clone();
        // Once it is written to, the bucket does not stand in for it any more.
        blocking(move || store.publish_draft_on_disk(&draft)).await
    }
}

fn write(store: &DataStore, draft: Draft, at: u32, piece: &[u8]) -> Result<Draft, StoreError> {
    store.write_draft(&draft, at, piece)?;
    Ok(draft)
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, StoreError> + Send + 'static,
) -> Result<T, Refusal> {
    match tokio::task::spawn_blocking(work).await {
        Ok(done) => Ok(done?),
        Err(_) => Err(Refusal::new(Status::IoError, "making the block failed")),
    }
}
