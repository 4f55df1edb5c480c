//! Reading blocks of files of an fs-mode mount that a view has: at the workers that have them, through a descriptor
//! where one is on this host, else over the network.
//!
//! They are named by inode, generation and index, and never change. Where they are, masters tell by file. A worker that
//! does not have a block, or cannot be reached, has them asked once more; then the object is read, if it has all of the
//! file as it was frozen.
//!
//! What is known here of a block counts while the mount table says that the block is frozen: the view may be gone
//! otherwise, and the block be written to, so masters are asked each time. And a descriptor counts if it was opened for
//! this view: one that somebody had before may be that of a replica which had missed a write, and was given up for
//! that. What is read through one counts if the block is still frozen then. A worker says by itself whether views have
//! what is asked of it (`BlockRef.pinned`), and takes writes over connections only when it has heard that none does.

use std::sync::Arc;

use cavern_conf::backoff;
use cavern_net::master::{RetryPolicy, Stubs};
use cavern_net::{NetError, Route};
use cavern_proto::block_id::block_length;
use cavern_proto::data::{BlockRef, open_request};
use cavern_proto::master::{Extent, LocateBlocksRequest};
use cavern_proto::{BlockId, ContentId};
use tokio::time::Instant;

use super::devices::Devices;
use super::part::cause_of;
use super::table::TableRun;
use crate::error::ClientError;
use crate::read::fetch::{bad_answer, check_status, only_item};
use crate::read::span::Span;
use crate::read::{BlockFile, BufferKey, ReplicatedBlock};

impl Devices {
    /// What the bytes of a block of a file are buffered under.
    pub(super) fn block_key(&self, run: &TableRun<'_>, generation: u32, index: u32) -> BufferKey {
        let content = ContentId::of_inode(&self.cluster_id, self.mount.id(), run.file.inode, generation);
        let length = block_length(run.file.whole_size(), self.mount.block_size(), index);
        BufferKey { block: BlockId { content, index }, version: self.version, length }
    }

    /// A block of a file, at these workers.
    pub(super) fn replicated(
        &self,
        run: &TableRun<'_>,
        generation: u32,
        index: u32,
        workers: Vec<u64>,
    ) -> ReplicatedBlock {
        let BufferKey { block: id, version, length } = self.block_key(run, generation, index);
        let (inode, block_size) = (run.file.inode, self.mount.block_size());
        let name = BlockRef::of_inode(&self.cluster_id, inode, generation, index, block_size, self.mount.id());
        let name = BlockRef { pinned: true, ..name };
        ReplicatedBlock { id, name, workers, length, version }
    }

    /// Fills a buffer with a span of a block.
    pub(super) async fn read_block(
        &self,
        device: u32,
        run: &TableRun<'_>,
        generation: u32,
        span: &Span,
        buffer: &mut [u8],
        deadline: Instant,
    ) -> Result<(), ClientError> {
        let block = self.replicated(run, generation, span.index, Vec::new());
        let is_frozen = self.is_frozen(run, generation);
        if is_frozen
            && let Some(file) = self.opened(&block.id)
            && let Some(bytes) = self.reader.read_known(&block, &file, span, deadline).await?
            && self.is_frozen(run, generation)
        {
            return self.copy(&bytes, buffer);
        }
        let is_frozen = self.is_frozen(run, generation);
        // Who has another source waits for no master.
        let patience = if run.file.is_whole { RetryPolicy::OneAttempt } else { RetryPolicy::UntilDeadline };
        let place = (self.view.id, run.file.inode);
        let mut known = self.parts.located.get(&place).filter(|_| is_frozen);
        // Where a block is may be another place by the time that it is read.
        let mut questions = if run.file.is_whole { 1 } else { 2 };
        loop {
            let was_known = known.is_some();
            let located = match known.take() {
                Some(located) => Ok(located),
                None => self.locate(run.file.inode, Vec::new(), patience, deadline).await,
            };
            let read = async {
                let workers = self.workers_of(&located?, generation, span.index)?;
                let block = self.replicated(run, generation, span.index, workers);
                if let Some(file) = self.open_here(&block).await
                    && let Some(bytes) = self.reader.read_known(&block, &file, span, deadline).await?
                {
                    return Ok(bytes);
                }
                self.reader.read(&Arc::new(block), span, deadline).await
            };
            let failure = match read.await {
                Ok(bytes) => return self.copy(&bytes, buffer),
                Err(failure) => failure,
            };
            // Whoever reads next asks as well.
            self.parts.located.remove(&place);
            let is_transient = failure.is_transient_at_worker();
            // While there is an object, a worker that does not answer is not waited for twice.
            if was_known && !(run.file.is_whole && is_transient) {
                continue;
            }
            questions -= 1;
            if run.file.is_whole {
                let start = u64::from(span.index) * self.mount.block_size() + u64::from(span.bytes.start);
                let read = self.read_object(device, run, start, buffer).await;
                return read.map_err(|error| self.failed(format!("{}; {}", cause_of(failure), cause_of(error))));
            }
            let may_have_moved = !is_transient && questions > 0 && is_of_worker(&failure);
            if !may_have_moved && !is_transient || !backoff::BLOCK.begin().wait_before(deadline).await {
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

    /// Whether nobody may write to a block of this generation of a file, as far as the mount table says.
    pub(super) fn is_frozen(&self, run: &TableRun<'_>, generation: u32) -> bool {
        self.mount.is_frozen(run.file.inode, generation)
    }

    /// The file of a block on this host, if it was opened for this view.
    pub(super) fn opened(&self, block: &BlockId) -> Option<BlockFile> {
        self.parts.opened.get(&(self.view.id, *block)).filter(|file| self.parts.files.has_file(file))
    }

    /// Has a worker on this host hand out the file of a block; `None` where none does.
    pub(super) async fn open_here(&self, block: &ReplicatedBlock) -> Option<BlockFile> {
        for worker in &block.workers {
            if !matches!(self.parts.pool.route(*worker).await, Ok(Route::Local)) {
                continue;
            }
            match self.open_at(*worker, block).await {
                Ok(file) => return Some(file),
                Err(error) => tracing::debug!(block = %block.id, "a local block cannot be opened: {error}"),
            }
        }
        None
    }

    async fn open_at(&self, worker: u64, block: &ReplicatedBlock) -> Result<BlockFile, ClientError> {
        let files = &self.parts.files;
        self.parts.stats.local_opens.inc();
        let item = open_request::Item { block: Some(block.name.clone()), want: Vec::new() };
        let (reply, opened) = self.parts.pool.open(worker, vec![item], files.limits().worker).await?;
        let item = only_item(reply.items, worker)?;
        check_status(worker, item.status(), &item.message)?;
        let descriptor = opened.into_iter().next();
        let descriptor = descriptor.ok_or_else(|| bad_answer(worker, "the answer has no descriptor"))?;
        let file = BlockFile { block: block.id, worker, incarnation: item.incarnation };
        files.descriptors().keep(block.id, descriptor, worker, item.incarnation);
        self.parts.opened.insert((self.view.id, block.id), file);
        Ok(file)
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

/// Whether a worker has answered that it does not have, or cannot give, a block.
fn is_of_worker(failure: &ClientError) -> bool {
    matches!(failure, ClientError::Net(NetError::WorkerStatus { .. } | NetError::UnknownWorker(_)))
}
