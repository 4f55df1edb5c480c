//! The blocks of a file by their names, and what workers have of them.

use cavern_client::{Client, Node};
use cavern_net::NetError;
use cavern_proto::CHUNK_BYTES;
use cavern_proto::block_id::block_length;
use cavern_proto::data::BlockRef;
use cavern_proto::master::{Extent, Kind};

use crate::error::CliError;

/// Blocks of one request.
pub const BATCH: usize = 500;

/// The blocks of a file.
pub struct Layout {
    /// Bytes of the file.
    pub size: u64,
    pub blocks: Vec<Block>,
}

pub struct Block {
    pub index: u32,
    /// Bytes of the file that are in it: the last one is not full.
    pub length: u32,
    /// The worker that readers ask first.
    pub first: Option<u64>,
    /// Of fs-mode: the workers that have it. Of cache-mode any may.
    pub holders: Option<Vec<u64>>,
    name: BlockRef,
}

/// What a worker has of a block.
pub struct Cached {
    /// It knows the block.
    pub is_known: bool,
    /// Chunks that are there.
    pub chunks: u32,
    /// The file that has them, if the worker is on this host.
    pub path: String,
}

impl Layout {
    pub async fn of(client: &Client, node: &Node) -> Result<Self, CliError> {
        if node.is_fs_mode() {
            return Self::of_inode(client, node).await;
        }
        let has_blocks = node.mount.is_some() && node.size > 0 && matches!(node.kind, Kind::File | Kind::Unspecified);
        if !has_blocks {
            return Ok(Self { size: node.size, blocks: Vec::new() });
        }
        let (version, workers) = (node.object()?, client.workers());
        let block = |index| Block {
            index,
            length: version.block_length(index),
            first: workers.candidates(version.content, index, 1).first(),
            holders: None,
            name: version.block(index),
        };
        Ok(Self { size: node.size, blocks: (0..version.block_count()).map(block).collect() })
    }

    /// Of a file of an fs-mode mount the master knows where its blocks are.
    async fn of_inode(client: &Client, node: &Node) -> Result<Self, CliError> {
        let layout = client.metadata().layout(node.inode, &[], None).await?;
        let (cluster_id, mount) = (client.pool().cluster_id(), node.mount.as_ref().map_or(0, |mount| mount.id()));
        let (block_size, size) = (layout.block_size, layout.attr.unwrap_or_default().size);
        let block = |Extent { index, generation, workers, .. }: Extent| Block {
            index,
            length: block_length(size, block_size, index),
            first: workers.first().copied(),
            holders: Some(workers),
            name: BlockRef::of_inode(&cluster_id, node.inode, generation, index, block_size, mount),
        };
        Ok(Self { size, blocks: layout.extents.into_iter().map(block).collect() })
    }

    /// The first block of the file, if there is one.
    pub fn first_block(&self) -> Option<&Block> {
        self.blocks.first().filter(|block| block.index == 0)
    }

    /// The blocks that a worker has, or may have.
    pub fn at(&self, worker: u64) -> Vec<&Block> {
        let is_at = |block: &&Block| block.holders.as_ref().is_none_or(|holders| holders.contains(&worker));
        self.blocks.iter().filter(is_at).collect()
    }
}

impl Block {
    pub fn chunks(&self) -> u32 {
        self.length.div_ceil(CHUNK_BYTES)
    }

    /// What a worker has of some blocks, in their order.
    pub async fn query(client: &Client, worker: u64, blocks: &[&Self]) -> Result<Vec<Cached>, NetError> {
        let mut found = Vec::with_capacity(blocks.len());
        for batch in blocks.chunks(BATCH) {
            let reply = client.pool().query(worker, batch.iter().map(|block| block.name.clone()).collect()).await?;
            found.extend(batch.iter().zip(reply.items).map(|(block, item)| {
                // A block has room for what may be written to it yet.
                let present: u32 = item.present.iter().map(|byte| byte.count_ones()).sum();
                Cached { is_known: item.known, chunks: present.min(block.chunks()), path: item.path }
            }));
        }
        Ok(found)
    }
}
