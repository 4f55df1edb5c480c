//! Bytes of an object that a client has just written to the bucket: they are kept as if they had been fetched.
//!
//! Keeping is a run like any other: whoever asks for these chunks meanwhile waits for it, and what is here or on its
//! way already is left alone.

use std::sync::Arc;

use bytes::Bytes;
use cavern_proto::chunk::{CHUNK_BYTES, chunk_range};
use cavern_proto::data::Status;
use tokio::time::Instant;

use super::{Fills, ObjectBlock, Run};
use crate::request_error::Refusal;
use crate::store::{CachedBlock, Touch};

impl Fills {
    /// Keeps whole chunks of a block, beginning with chunk `first`.
    ///
    /// # Errors
    /// The content id is not that of the object named; no room; or the disk failed.
    pub async fn populate(
        self: &Arc<Self>,
        source: &Arc<ObjectBlock>,
        first: u32,
        bytes: Bytes,
    ) -> Result<(), Refusal> {
        self.bucket_of(source).await?;
        let block = self.open(source, Touch::Refresh, (None, Instant::now())).await?;
        let count = u32::try_from(bytes.len().div_ceil(CHUNK_BYTES as usize)).unwrap_or(u32::MAX);
        let start = chunk_range(first, source.length).start;
        let chunks = first..first + count;
        let (own, _) = self.plan(&block, std::slice::from_ref(&chunks));
        let mut kept = Ok(());
        for asker in &own {
            let (fills, run, block, source) = (self.clone(), asker.run.clone(), block.clone(), source.clone());
            let begin = (chunk_range(run.chunks.start, source.length).start - start) as usize;
            let bytes = bytes.slice(begin..);
            // Once it is known to others a run comes to its end, whatever becomes of the request.
            let keeping = self.tasks.spawn(async move {
                let result = fills.populate_run(&run, &block, &source, &bytes).await;
                fills.conclude(&run, &block, &source, result.clone());
                result
            });
            let failed = |_| Err(Refusal::new(Status::IoError, "keeping the block failed"));
            kept = kept.and(keeping.await.unwrap_or_else(failed));
        }
        kept
    }

    /// Writes the chunks of a run, whose bytes are the first ones given.
    async fn populate_run(
        &self,
        run: &Arc<Run>,
        block: &Arc<CachedBlock>,
        source: &ObjectBlock,
        bytes: &Bytes,
    ) -> Result<(), Refusal> {
        let room = self.room(run, block)?;
        let start = chunk_range(run.chunks.start, source.length).start;
        let chunk = |index: u32| {
            let range = chunk_range(index, source.length);
            (index, vec![bytes.slice((range.start - start) as usize..(range.end - start) as usize)])
        };
        let chunks = run.chunks.clone().map(chunk).collect();
        self.write(run, &room, chunks).await
    }
}
