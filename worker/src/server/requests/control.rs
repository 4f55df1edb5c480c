//! Requests about blocks, without their content: what is here, what is to go, and what was found damaged.

use std::collections::BTreeSet;

use cavern_proto::chunk::chunk_count;
use cavern_proto::data::{
    BlockRef, CorruptReply, CorruptRequest, FreeReply, FreeRequest, QueryReply, QueryRequest, query_reply,
};
use cavern_proto::{BlockId, ChunkMap, ContentId};

use super::Service;
use crate::fill::BlockSource;
use crate::store::{Block, Touch};

impl Service {
    /// Which chunks are here; and in which files, for whoever may know of them. *Blocking*.
    pub(in crate::server) fn query(&self, request: QueryRequest, with_paths: bool) -> QueryReply {
        if let Some(read) = &request.held {
            return self.confirm(&request.blocks, read);
        }
        let items = request.blocks.into_iter().map(|block| {
            let (block, modified_ns, end) = match BlockSource::parse(block).ok()? {
                BlockSource::Object(object) => {
                    (Block::Cached(self.parts.stores.cache.find(&object.id, Touch::None)?), 0, 0)
                }
                BlockSource::Data(target) => {
                    let block = self.parts.stores.data.find(&target, Touch::None).ok()?;
                    let (modified_ns, end) = (block.modified_ns().ok()?, block.end().ok()?);
                    (Block::Data(block), modified_ns, end)
                }
            };
            Some(query_reply::Item {
                known: true,
                present: block.present_bytes().into(),
                length: block.length(),
                path: if with_paths { block.path().display().to_string() } else { String::new() },
                incarnation: block.incarnation(),
                modified_ns,
                end,
            })
        });
        QueryReply { items: items.map(Option::unwrap_or_default).collect() }
    }

    /// Which of these blocks are here; those that were read count as used.
    fn confirm(&self, blocks: &[BlockRef], read: &[u8]) -> QueryReply {
        let read = ChunkMap::from_bytes(read);
        let files = (0..).zip(blocks).map(|(position, block)| {
            let is_read = read.contains(position);
            (ContentId::from_slice(&block.content_id).map(|content| BlockId { content, index: block.index }), is_read)
        });
        let files: Vec<_> = files.collect();
        let items = self.parts.stores.table.confirm(&files).into_iter().map(|incarnation| query_reply::Item {
            known: incarnation.is_some(),
            incarnation: incarnation.unwrap_or_default(),
            ..query_reply::Item::default()
        });
        QueryReply { items: items.collect() }
    }

    /// Drops blocks. *Blocking*.
    pub(in crate::server) fn free(&self, request: FreeRequest) -> FreeReply {
        let sources = request.blocks.into_iter().filter_map(|block| BlockSource::parse(block).ok());
        let free = |source: BlockSource| match source {
            BlockSource::Object(object) => self.parts.stores.cache.remove(&object.id),
            BlockSource::Data(target) => {
                self.uploads.give_up_copy(&target.id);
                self.parts.stores.data.free_of(&target)
            }
        };
        let freed: Vec<u64> = sources.filter_map(free).collect();
        FreeReply { blocks: freed.len() as u64, bytes: freed.iter().sum() }
    }

    /// Does what can be done about bytes that a client found to be wrong. *Blocking*.
    pub(in crate::server) fn corrupt(&self, request: CorruptRequest) -> CorruptReply {
        match request.block.and_then(|block| BlockSource::parse(block).ok()) {
            Some(BlockSource::Object(object)) => self.check_reported(&object.id, request.chunks),
            // Of these nothing was kept to compare with.
            Some(BlockSource::Data(target)) if self.parts.stores.data.get(&target.id, Touch::None).is_here() => {
                self.parts.metrics.corrupt_chunks.inc();
                if let Some(suppressed) = self.damaged_sends.admit(()) {
                    tracing::warn!(block = %target.id, suppressed, chunk = ?request.chunks.first(),
                        "what was sent of a block did not arrive as it was: look at memory and network of both hosts");
                }
            }
            Some(BlockSource::Data(_)) | None => {}
        }
        CorruptReply {}
    }

    /// Checks chunks of a cached block that a client found to be wrong. *Blocking*.
    fn check_reported(&self, id: &BlockId, chunks: Vec<u32>) {
        if let Some(block) = self.parts.stores.cache.find(id, Touch::None) {
            let count = chunk_count(block.length());
            // Each once, however often it is named.
            let chunks: BTreeSet<u32> = chunks.into_iter().filter(|index| *index < count).collect();
            let chunks: Vec<u32> = chunks.into_iter().collect();
            if let Err(error) = self.parts.stores.cache.recheck(&block, &chunks)
                && let Some(suppressed) = self.unchecked.admit(())
            {
                tracing::warn!(block = %block.id(), suppressed, %error,
                    "cannot check chunks that a client reported as corrupt");
            }
        }
    }
}
