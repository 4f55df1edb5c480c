//! Copies of blocks of other workers: new replicas.
//!
//! The master sees to it that clients do not write to a block while it is copied (decision 10). What a client does that
//! has not been notified of that, shows in the time of the source's file: a copy is good only if the source has not
//! been touched since before its first byte was read. Chunks of zeros stay holes.
//!
//! A copy is a draft until it is whole. A client that is cut off from the masters may believe that the block is here,
//! from an earlier time, and ask for it: it is told that there is none.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;
use std::time::Duration;

use cavern_proto::BlockId;
use cavern_proto::data::{CopyReply, CopyRequest, Status};
use parking_lot::Mutex;

use super::Uploads;
use super::peers::READ_BYTES;
use super::plan::PlannedBlock;
use super::source::Source;
use crate::fill::BlockSource;
use crate::request_error::{Refusal, blocking};
use crate::store::{DataStore, DataTarget, Draft};

/// Workers named in one request at most.
const WORKERS_MAX: usize = 16;

/// The blocks that are being copied here, each with whether it was freed meanwhile.
#[derive(Clone, Debug, Default)]
pub(super) struct BlockCopies(Arc<Mutex<HashMap<BlockId, bool>>>);

/// A copy under way. It is shared with whatever still writes for it, so that no second one begins before.
struct BlockCopy {
    copies: BlockCopies,
    id: BlockId,
}

impl BlockCopies {
    fn begin(&self, id: BlockId) -> Option<Arc<BlockCopy>> {
        match self.0.lock().entry(id) {
            Entry::Occupied(_) => None,
            Entry::Vacant(none) => {
                none.insert(false);
                Some(Arc::new(BlockCopy { copies: self.clone(), id }))
            }
        }
    }
}

impl BlockCopy {
    fn is_wanted(&self) -> bool {
        self.copies.0.lock().get(&self.id) == Some(&false)
    }
}

impl Drop for BlockCopy {
    fn drop(&mut self) {
        self.copies.0.lock().remove(&self.id);
    }
}

impl Uploads {
    /// A block is freed: a copy of it that is not whole yet does not become the block.
    pub fn give_up_copy(&self, id: &BlockId) {
        if let Some(is_freed) = self.copies.0.lock().get_mut(id) {
            *is_freed = true;
        }
    }

    /// Makes a copy, within the request's deadline.
    ///
    /// # Errors
    /// There is none.
    pub async fn copy(&self, request: CopyRequest) -> Result<CopyReply, Refusal> {
        let deadline = Duration::from_millis(u64::from(request.deadline_ms));
        let made = tokio::time::timeout(deadline, Box::pin(self.try_copy(request))).await;
        made.unwrap_or_else(|_| Err(Refusal::deadline()))?;
        self.parts.metrics.copied_blocks.inc();
        Ok(CopyReply { status: Status::Ok.into(), message: String::new() })
    }

    async fn try_copy(&self, request: CopyRequest) -> Result<(), Refusal> {
        let block = request.block.unwrap_or_default();
        let target = BlockSource::parse_data(block.clone())?;
        let own = self.parts.membership.worker_id();
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
                    self.alone(&copying, move |store| Ok(store.free(&target.id))).await?;
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
        copying: &Arc<BlockCopy>,
    ) -> Result<(), Refusal> {
        let draft = Arc::new(self.alone(copying, move |store| begin_anew(store, &target)).await?);
        let source = Source::open_elsewhere(self, u64::from(target.length), planned).await?;
        let first = u64::from(target.id.index) * u64::from(target.length);
        // All behind that are zeros, there as here.
        let end = source.ends().max().unwrap_or(0).min(target.length);
        let mut at = 0;
        while at < end {
            let length = (end - at).min(READ_BYTES);
            let (bytes, memory) = self.read(&source, first + u64::from(at), u64::from(length)).await?;
            let draft = draft.clone();
            let write = move |store: &DataStore| {
                let _memory = memory;
                store.write_draft_with_holes(&draft, at, &bytes).map_err(Refusal::from)
            };
            self.alone(copying, write).await?;
            at += length;
        }
        source.check_untouched().await?;
        let whole = draft.clone();
        let finish = move |store: &DataStore| {
            store.lengthen_draft(&whole, end)?;
            Ok(store.sync_draft(&whole)?)
        };
        self.alone(copying, finish).await?;
        // What nobody waits for any more does not become the block.
        let wanted = copying.clone();
        let publish = move |store: &DataStore| {
            if !store.publish_draft_if(&draft, || wanted.is_wanted())? {
                return Err(Refusal::new(Status::Changed, "the block was made or freed while it was copied"));
            }
            Ok(store.sync(&[target])?)
        };
        self.alone(copying, publish).await
    }

    /// Has something done for a copy, on a thread that may wait for the disk. The copy is under way until that has
    /// ended, whoever still waits for it.
    async fn alone<T: Send + 'static>(
        &self,
        copying: &Arc<BlockCopy>,
        work: impl FnOnce(&DataStore) -> Result<T, Refusal> + Send + 'static,
    ) -> Result<T, Refusal> {
        let (store, alone) = (self.parts.stores.data.clone(), copying.clone());
        let work = move || {
            let _alone = alone;
            work(&store)
        };
        blocking("copying the block", work).await
    }
}

/// A draft of the block, instead of whatever is here under its name.
fn begin_anew(store: &DataStore, target: &DataTarget) -> Result<Draft, Refusal> {
    store.free(&target.id);
    let is_here = || Refusal::new(Status::IoError, "an old replica of the block cannot be deleted");
    store.begin_draft(target, 0)?.ok_or_else(is_here)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_is_copied_once_at_a_time() {
        let copies = BlockCopies::default();
        let id = BlockId { content: cavern_proto::ContentId::of_inode("c", 1, 1, 0), index: 0 };
        let first = copies.begin(id);
        let writing = first.clone();
        assert!(first.is_some() && copies.begin(id).is_none());
        drop(first);
        assert!(copies.begin(id).is_none(), "something is still written for it");
        drop(writing);
        let again = copies.begin(id).unwrap();
        assert!(again.is_wanted());
        copies.0.lock().insert(id, true);
        assert!(!again.is_wanted(), "it was freed");
    }
}
