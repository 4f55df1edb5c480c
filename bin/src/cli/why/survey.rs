//! Where the blocks of a file are, and how much of them.

use cavern_client::{Client, Node};
use cavern_net::Route;
use cavern_proto::CHUNK_BYTES;
use cavern_proto::data::BlockRef;
use cavern_proto::master::{Worker, WorkerState};
use serde::Serialize;
use tokio::time::Instant;

use crate::error::CliError;

/// Blocks of one request.
const BATCH: usize = 500;

/// The blocks of a file by their names.
pub struct Blocks {
    pub size: u64,
    blocks: Vec<Block>,
    /// Of cache-mode: the worker that readers ask first for the first block.
    first: Option<u64>,
}

struct Block {
    index: u32,
    name: BlockRef,
    chunks: u32,
    /// Of fs-mode: the workers that have it. Of cache-mode any may.
    holders: Option<Vec<u64>>,
}

/// One worker and what it has of a file.
#[derive(Debug, Serialize)]
pub struct WorkerView {
    pub worker: u64,
    pub data: String,
    /// `local`: it hands out descriptors. `remote`: it sends bytes.
    pub route: &'static str,
    /// Milliseconds until it was known how it is reached.
    pub connect_ms: f64,
    /// Readers ask it first for the first block.
    pub first: bool,
    pub blocks: usize,
    pub chunks: u32,
    pub chunks_present: u32,
    pub first_block_chunks: u32,
    pub first_block_chunks_present: u32,
    /// Why it said nothing, if it did not.
    pub error: Option<String>,
}

impl Blocks {
    pub async fn of(client: &Client, node: &Node) -> Result<Self, CliError> {
        if node.is_fs_mode() {
            return Self::of_layout(client, node).await;
        }
        if node.size == 0 {
            return Ok(Self { size: 0, blocks: Vec::new(), first: None });
        }
        let version = node.object()?;
        let block = |index| Block {
            index,
            name: version.block(index),
            chunks: version.block_length(index).div_ceil(CHUNK_BYTES),
            holders: None,
        };
        let first = client.workers().candidates(version.content, 0, 1).first();
        Ok(Self { size: node.size, blocks: (0..version.block_count()).map(block).collect(), first })
    }

    /// Of a file of an fs-mode mount the master knows where its blocks are.
    async fn of_layout(client: &Client, node: &Node) -> Result<Self, CliError> {
        let layout = client.metadata().layout(node.inode, &[], None).await?;
        let (cluster_id, mount) = (client.pool().cluster_id(), node.mount.as_ref().map_or(0, |mount| mount.id()));
        let (block_size, size) = (layout.block_size, layout.attr.unwrap_or_default().size);
        let block = |extent: cavern_proto::master::Extent| {
            let before = u64::from(extent.index).saturating_mul(block_size);
            let length = size.saturating_sub(before).min(block_size);
            Block {
                index: extent.index,
                name: BlockRef::of_inode(&cluster_id, node.inode, extent.generation, extent.index, block_size, mount),
                chunks: u32::try_from(length.div_ceil(u64::from(CHUNK_BYTES))).unwrap_or(u32::MAX),
                holders: Some(extent.workers),
            }
        };
        let blocks: Vec<Block> = layout.extents.into_iter().map(block).collect();
        let first = blocks.first().filter(|block| block.index == 0);
        let first = first.and_then(|block| block.holders.as_ref()?.first().copied());
        Ok(Self { size, blocks, first })
    }

    pub fn count(&self) -> usize {
        self.blocks.len()
    }

    /// What each live worker has, and workers that should have something. One that does not answer is shown with the
    /// reason.
    pub async fn survey(&self, client: &Client) -> Vec<WorkerView> {
        let mut views = Vec::new();
        for worker in client.workers().workers() {
            let of_worker = |block: &&Block| block.holders.as_ref().is_none_or(|ids| ids.contains(&worker.id));
            let blocks: Vec<&Block> = self.blocks.iter().filter(of_worker).collect();
            let is_live = worker.state() == WorkerState::Live;
            if !blocks.is_empty() && (is_live || blocks.iter().any(|block| block.holders.is_some())) {
                views.push(self.ask(client, worker, &blocks, is_live).await);
            }
        }
        views.sort_by_key(|view| (!view.first, view.worker));
        views
    }

    async fn ask(&self, client: &Client, worker: &Worker, blocks: &[&Block], is_live: bool) -> WorkerView {
        let began = Instant::now();
        let route = match client.pool().route(worker.id).await {
            Ok(Route::Local) => "local",
            Ok(Route::Remote) | Err(_) => "remote",
        };
        let mut view = WorkerView {
            worker: worker.id,
            data: worker.data_address.clone(),
            route,
            connect_ms: (began.elapsed().as_secs_f64() * 1e6).round() / 1e3,
            first: self.first == Some(worker.id),
            blocks: 0,
            chunks: blocks.iter().map(|block| block.chunks).sum(),
            chunks_present: 0,
            first_block_chunks: self.blocks.first().map_or(0, |block| block.chunks),
            first_block_chunks_present: 0,
            error: (!is_live).then(|| "not live: see `cv node list`".to_owned()),
        };
        for batch in blocks.chunks(BATCH).take_while(|_| is_live) {
            match client.pool().query(worker.id, batch.iter().map(|block| block.name.clone()).collect()).await {
                Ok(reply) => {
                    for (block, item) in batch.iter().zip(reply.items).filter(|(_, item)| item.known) {
                        // A block has room for what may be written to it yet.
                        let present: u32 = item.present.iter().map(|byte| byte.count_ones()).sum();
                        let present = present.min(block.chunks);
                        view.blocks += usize::from(present > 0);
                        view.chunks_present += present;
                        if block.index == 0 {
                            view.first_block_chunks_present = present;
                        }
                    }
                }
                Err(error) => {
                    view.error = Some(error.to_string());
                    break;
                }
            }
        }
        view
    }
}

impl WorkerView {
    /// In a table; `blocks` are those of the file.
    pub fn row(&self, blocks: usize) -> [String; 7] {
        [
            format!("{}{}", self.worker, if self.first { "*" } else { "" }),
            self.data.clone(),
            self.route.to_owned(),
            format!("{}/{blocks}", self.blocks),
            format!("{}/{}", self.chunks_present, self.chunks),
            format!("{}/{}", self.first_block_chunks_present, self.first_block_chunks),
            self.error.clone().unwrap_or_else(|| if self.first { "asked first".to_owned() } else { String::new() }),
        ]
    }
}
