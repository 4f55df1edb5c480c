//! What was written stays in the workers' cache, so that a file that has just been closed is read without asking the
//! bucket.
//!
//! Blocks are placed and named by the object's version, which is known when the bucket has it: then the staged bytes go
//! to the workers that would hold them, before the close is answered. It is a cache: what cannot be kept is fetched
//! when it is read.

use std::ops::Range;

use cavern_proto::CHUNK_BYTES;
use cavern_proto::data::WriteRequest;
use cavern_proto::frame::MAX_WRITE_BYTES;
use futures::stream::{self, StreamExt, TryStreamExt};

use super::file::StagedFile;
use crate::error::ClientError;
use crate::mounts::ObjectVersion;

/// Of objects up to this size what was not written is kept, too.
const SMALL_BYTES: u64 = 8 << 20;
/// Pieces on their way at a time.
const PIECES_AT_A_TIME: usize = 4;

impl StagedFile {
    /// Hands the staged bytes of a version to the workers, within `client.read_timeout`. Nobody writes to the file
    /// meanwhile.
    pub(super) async fn cache_written(&self, object: &ObjectVersion) {
        let pieces = (0..object.block_count()).flat_map(|index| pieces_of(index, object.block_length(index)));
        let kept = stream::iter(pieces).map(|(index, bytes)| self.cache_piece(object, index, bytes));
        let kept = kept.buffer_unordered(PIECES_AT_A_TIME).try_collect::<()>();
        match tokio::time::timeout(self.shared.timeout(), kept).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::debug!(key = %object.key, "not kept in the cache: {error}"),
            Err(_elapsed) => tracing::debug!(key = %object.key, "not all of it was kept in the cache in time"),
        }
    }

    async fn cache_piece(&self, object: &ObjectVersion, index: u32, bytes: Range<u32>) -> Result<(), ClientError> {
        let start = u64::from(index) * object.mount.block_size();
        let range = start + u64::from(bytes.start)..start + u64::from(bytes.end);
        // Of a small object all is here, even if the rest must be asked of the cache.
        if object.length > SMALL_BYTES && !self.state.lock().layout.staged.contains(&range) {
            return Ok(());
        }
        let (pool, wait) = (&self.shared.pool, self.shared.files.limits().worker);
        let workers = pool.placement().candidates(object.content, index, object.mount.replicas());
        let mut supervisors = Vec::new();
        for worker in workers.iter() {
            if pool.keeps_objects(worker).await {
                supervisors.push(worker);
            }
        }
        if supervisors.is_empty() {
            return Ok(());
        }
        let memory = self.memory(range.end - range.start).await?;
        let payload = memory.hold(self.collect(range).await?);
        for worker in supervisors {
            let request =
                WriteRequest { block: Some(object.block(index)), offset: bytes.start, ..WriteRequest::default() };
            pool.write(worker, request, payload.clone(), wait).await?;
        }
        Ok(())
    }
}

/// A block in pieces that a request can carry.
fn pieces_of(index: u32, length: u32) -> impl Iterator<Item = (u32, Range<u32>)> {
    const PIECE: u32 = MAX_WRITE_BYTES / CHUNK_BYTES * CHUNK_BYTES;
    (0..length).step_by(PIECE as usize).map(move |start| (index, start..length.min(start.saturating_add(PIECE))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_whole_chunks_up_to_the_end_of_the_block() {
        let all: Vec<_> = pieces_of(3, 20 << 20).collect();
        assert_eq!(all.first(), Some(&(3, 0..MAX_WRITE_BYTES)));
        assert!(all.iter().all(|(_, piece)| piece.start % CHUNK_BYTES == 0 && piece.len() <= MAX_WRITE_BYTES as usize));
        assert_eq!(all.iter().map(|(_, piece)| piece.len()).sum::<usize>(), 20 << 20);
        assert_eq!(pieces_of(0, 5).collect::<Vec<_>>(), [(0, 0..5)]);
        assert_eq!(pieces_of(0, 0).count(), 0);
    }
}
