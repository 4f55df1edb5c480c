//! Reading blocks of files of an fs-mode mount that a view has: at the workers that have them, through a descriptor
//! where one is on this host, else over the network.
//!
//! They are named by inode, generation and index, and never change. Where they are, masters tell by file. A worker that
//! does not have a block, or cannot be reached, has them asked once more; then the object is read, if it has all of the
//! file as it was frozen.

use std::sync::Arc;

use bytes::Bytes;
use cavern_conf::backoff;
use cavern_net::Route;
use cavern_net::master::{RetryPolicy, Stubs};
use cavern_proto::block_id::block_length;
use cavern_proto::data::{BlockRef, open_request};
use cavern_proto::master::{Extent, LocateBlocksRequest};
use cavern_proto::{BlockId, ContentId};
use tokio::time::Instant;

use super::devices::Devices;
use super::part::cause_of;
use super::table::FileRun;
use crate::error::ClientError;
use crate::read::fetch::{bad_answer, check_status, only_item};
use crate::read::span::Span;
use crate::read::{BufferKey, ReplicatedBlock};

impl Devices {
    /// What the bytes of a block of a file are buffered under.
    pub(super) fn block_key(&self, run: &FileRun<'_>, generation: u32, index: u32) -> BufferKey {
        let content = ContentId::of_inode(&self.cluster_id, self.mount.id(), run.file.inode, generation);
        let length = block_length(run.file.whole_size(), self.mount.block_size(), index);
        BufferKey { block: BlockId { content, index }, version: self.version, length }
    }

    /// A block of a file, at these workers.
    pub(super) fn replicated(
        &self,
        run: &FileRun<'_>,
        generation: u32,
        index: u32,
        workers: Vec<u64>,
    ) -> ReplicatedBlock {
        let BufferKey { block: id, version, length } = self.block_key(run, generation, index);
        let (inode, block_size) = (run.file.inode, self.mount.block_size());
        let name = BlockRef::of_inode(&self.cluster_id, inode, generation, index, block_size, self.mount.id());
        ReplicatedBlock { id, name, workers, length, version }
    }

    /// Fills a buffer with a span of a block.
    pub(super) async fn read_block(
        &self,
        device: u32,
        run: &FileRun<'_>,
        generation: u32,
        span: &Span,
        buffer: &mut [u8],
        deadline: Instant,
    ) -> Result<(), ClientError> {
        let block = self.replicated(run, generation, span.index, Vec::new());
        if let Some(bytes) = self.reader.read_known(&block, span, deadline).await? {
            return self.copy(&bytes, buffer);
        }
        // Who has another source waits for no master.
        let patience = if run.file.is_whole { RetryPolicy::OneAttempt } else { RetryPolicy::UntilDeadline };
        let mut known = self.parts.located.get(&(self.view.id, run.file.inode));
        loop {
            let was_known = known.is_some();
            let located = match known.take() {
                Some(located) => Ok(located),
                None => self.locate(run.file.inode, Vec::new(), patience, deadline).await,
            };
            let read = async {
                let workers = self.workers_of(&located?, generation, span.index)?;
                self.read_at_workers(self.replicated(run, generation, span.index, workers), span, deadline).await
            };
            let failure = match read.await {
                Ok(bytes) => return self.copy(&bytes, buffer),
                Err(failure) => failure,
            };
            // While there is an object, a worker that does not answer is not waited for twice.
            if was_known && !(run.file.is_whole && failure.is_transient_at_worker()) {
                continue;
            }
            if run.file.is_whole {
                let start = u64::from(span.index) * self.mount.block_size() + u64::from(span.bytes.start);
                let read = self.read_object(device, run, start, buffer).await;
                return read.map_err(|error| self.failed(format!("{}; {}", cause_of(failure), cause_of(error))));
            }
            if !failure.is_transient_at_worker() || !backoff::BLOCK.begin().wait_before(deadline).await {
                return Err(failure);
            }
        }
    }

    /// Who has a block.
    fn workers_of(&self, located: &[Extent], generation: u32, index: u32) -> Result<Vec<u64>, ClientError> {
        let found = located.iter().find(|extent| (extent.generation, extent.index) == (generation, index));
        let nobody = || self.failed(format!("no worker has block {index} of generation {generation}"));
        found.map(|extent| extent.workers.clone()).ok_or_else(nobody)
    }

    async fn read_at_workers(
        &self,
        block: ReplicatedBlock,
        span: &Span,
        deadline: Instant,
    ) -> Result<Bytes, ClientError> {
        if self.open_here(&block).await
            && let Some(bytes) = self.reader.read_known(&block, span, deadline).await?
        {
            return Ok(bytes);
        }
        self.reader.read(&Arc::new(block), span, deadline).await
    }

    /// Has a worker on this host hand out the file of a block; false where none does.
    pub(super) async fn open_here(&self, block: &ReplicatedBlock) -> bool {
        for worker in &block.workers {
            if !matches!(self.parts.pool.route(*worker).await, Ok(Route::Local)) {
                continue;
            }
            match self.open_at(*worker, block).await {
                Ok(()) => return true,
                Err(error) => tracing::debug!(block = %block.id, "a local block cannot be opened: {error}"),
            }
        }
        false
    }

    async fn open_at(&self, worker: u64, block: &ReplicatedBlock) -> Result<(), ClientError> {
        let files = &self.parts.files;
        self.parts.stats.local_opens.inc();
        let item = open_request::Item { block: Some(block.name.clone()), want: Vec::new() };
        let (reply, opened) = self.parts.pool.open(worker, vec![item], files.limits().worker).await?;
        let item = only_item(reply.items, worker)?;
        check_status(worker, item.status(), &item.message)?;
        let file = opened.into_iter().next().ok_or_else(|| bad_answer(worker, "the answer has no descriptor"))?;
        files.descriptors().keep(block.id, file, worker, item.incarnation);
        Ok(())
    }

    /// Asks where the blocks of a file are, and those of others that are about to be read.
    pub(super) async fn locate(
        &self,
        inode: u64,
        prefetch: Vec<u64>,
        patience: RetryPolicy,
        deadline: Instant,
    ) -> Result<Arc<[Extent]>, ClientError> {
        let request = LocateBlocksRequest { view: self.view.id, inode, prefetch };
        let ask = |mut stubs: Stubs| {
            let request = request.clone();
            async move { stubs.views.locate_blocks(request).await }
        };
        let reply = self.parts.master.call_as("LocateBlocks", patience, deadline, ask).await?;
        let mut found: Arc<[Extent]> = Vec::new().into();
        for file in reply.files {
            let extents: Arc<[Extent]> = file.extents.into();
            if file.inode == inode {
                found = extents;
            } else {
                self.parts.located.insert((self.view.id, file.inode), extents);
            }
        }
        // Also that nothing of it is anywhere.
        self.parts.located.insert((self.view.id, inode), found.clone());
        Ok(found)
    }
}
