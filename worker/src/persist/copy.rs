//! Copies of blocks of other workers: new replicas.
//!
//! The master sees to it that clients do not write to a block while it is copied (decision 10). What a client does that
//! has not been notified of that, shows in the time of the source's file: a copy is good only if the source has not
//! been touched since before its first byte was read. Chunks of zeros stay holes.

use std::collections::HashSet;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use cavern_proto::BlockId;
use cavern_proto::chunk::CHUNK_BYTES;
use cavern_proto::data::{CopyReply, CopyRequest, Status};
use parking_lot::Mutex;

use super::Uploads;
use super::peers::READ_BYTES;
use super::plan::PlannedBlock;
use super::source::{Source, blocking};
use crate::fill::BlockSource;
use crate::request_error::Refusal;
use crate::store::{DataStore, DataTarget, Touch};

/// Workers named in one request at most.
const WORKERS_MAX: usize = 16;

/// The blocks that are being copied here.
#[derive(Clone, Debug, Default)]
pub(super) struct Copies(Arc<Mutex<HashSet<BlockId>>>);

/// A copy under way. It is shared with whatever still writes for it, so that no second one begins before.
struct Copying {
    copies: Copies,
    id: BlockId,
}

impl Copies {
    fn begin(&self, id: BlockId) -> Option<Arc<Copying>> {
        self.0.lock().insert(id).then(|| Arc::new(Copying { copies: self.clone(), id }))
    }
}

impl Drop for Copying {
    fn drop(&mut self) {
        self.copies.0.lock().remove(&self.id);
    }
}

impl Uploads {
    /// Makes a copy, within the request's deadline.
    pub async fn copy(&self, request: CopyRequest) -> CopyReply {
        let deadline = Duration::from_millis(u64::from(request.deadline_ms));
        let made = tokio::time::timeout(deadline, Box::pin(self.try_copy(request))).await;
        match made.unwrap_or_else(|_| Err(Refusal::deadline())) {
            Ok(()) => {
                self.parts.metrics.copied_blocks.inc();
                CopyReply { status: Status::Ok.into(), message: String::new() }
            }
            Err(Refusal { status, message }) => CopyReply { status: status.into(), message },
        }
    }

    async fn try_copy(&self, request: CopyRequest) -> Result<(), Refusal> {
        let block = request.block.unwrap_or_default();
        let target = BlockSource::parse_data(block.clone())?;
        let own = self.parts.peers.own_id();
        if request.workers.is_empty() || request.workers.len() > WORKERS_MAX || request.workers.contains(&own) {
            return Err(Refusal::bad_request("a copy is made from one to 16 workers, of which this is none"));
        }
        let busy = || Refusal::new(Status::Overloaded, "an earlier copy of the block is still being made");
        let copying = self.copies.begin(target.id).ok_or_else(busy)?;
        let mut last = None;
        for worker in request.workers {
            let planned = [PlannedBlock { block: block.clone(), workers: vec![worker] }];
            match self.copy_from(&planned, target, &copying).await {
                Ok(()) => return Ok(()),
                Err(refusal) => {
                    let (store, copying) = (self.parts.data.clone(), copying.clone());
                    blocking(move || {
                        let _alone = copying;
                        store.free(&target.id);
                        Ok(())
                    })
                    .await?;
                    last = Some(refusal);
                }
            }
        }
        Err(last.unwrap_or_else(Refusal::deadline))
    }

    async fn copy_from(
        &self,
        planned: &[PlannedBlock],
        target: DataTarget,
        copying: &Arc<Copying>,
    ) -> Result<(), Refusal> {
        let (store, alone) = (self.parts.data.clone(), copying.clone());
        let incarnation = blocking(move || {
            let _alone = alone;
            make_anew(&store, &target)
        })
        .await?;
        let source = Source::open_elsewhere(&self.parts, u64::from(target.length), planned).await?;
        let first = u64::from(target.id.index) * u64::from(target.length);
        let mut at = 0;
        while at < target.length {
            let length = (target.length - at).min(READ_BYTES);
            let (bytes, memory) = self.read(&source, first + u64::from(at), u64::from(length)).await?;
            let (store, alone) = (self.parts.data.clone(), copying.clone());
            blocking(move || {
                let _alone = (alone, memory);
                write(&store, &target, incarnation, at, &bytes)
            })
            .await?;
            at += length;
        }
        source.check_untouched().await?;
        let (store, alone) = (self.parts.data.clone(), copying.clone());
        blocking(move || {
            let _alone = alone;
            Ok(store.sync(&[target])?)
        })
        .await
    }
}

/// Makes the block, all of it a hole, instead of whatever is here under its name; gives its incarnation.
fn make_anew(store: &DataStore, target: &DataTarget) -> Result<u64, Refusal> {
    store.free(&target.id);
    if !store.get(&target.id, Touch::None).is_absent() {
        return Err(Refusal::new(Status::IoError, "an old replica of the block cannot be deleted"));
    }
    Ok(store.reserve(target, &[])?.incarnation())
}

/// Writes what is not zeros.
fn write(store: &DataStore, target: &DataTarget, incarnation: u64, offset: u32, bytes: &Bytes) -> Result<(), Refusal> {
    for run in runs(bytes) {
        let at = offset + run.start as u32;
        let block = store.write(target, at, &bytes[run], &[])?;
        if block.incarnation() != incarnation {
            return Err(Refusal::new(Status::Changed, "the block was freed while it was copied"));
        }
    }
    Ok(())
}

/// The chunks that are not all zeros, neighbours together.
fn runs(bytes: &[u8]) -> Vec<Range<usize>> {
    let mut runs: Vec<Range<usize>> = Vec::new();
    for (position, chunk) in bytes.chunks(CHUNK_BYTES as usize).enumerate() {
        if chunk.iter().all(|byte| *byte == 0) {
            continue;
        }
        let start = position * CHUNK_BYTES as usize;
        match runs.last_mut() {
            Some(run) if run.end == start => run.end = start + chunk.len(),
            _ => runs.push(start..start + chunk.len()),
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zeros_stay_holes() {
        const CHUNK: usize = CHUNK_BYTES as usize;
        let mut bytes = vec![0; 4 * CHUNK + 10];
        assert!(runs(&bytes).is_empty());
        bytes[CHUNK - 1] = 1;
        bytes[CHUNK] = 1;
        bytes[4 * CHUNK + 9] = 1;
        assert_eq!(runs(&bytes), [0..2 * CHUNK, 4 * CHUNK..4 * CHUNK + 10]);
        assert!(runs(&[]).is_empty());
    }

    #[test]
    fn a_block_is_copied_once_at_a_time() {
        let copies = Copies::default();
        let id = BlockId { content: cavern_proto::ContentId::of_inode("c", 1, 1, 0), index: 0 };
        let first = copies.begin(id);
        let writing = first.clone();
        assert!(first.is_some() && copies.begin(id).is_none());
        drop(first);
        assert!(copies.begin(id).is_none(), "something is still written for it");
        drop(writing);
        assert!(copies.begin(id).is_some());
    }
}
