//! `cv fs blocks` and `cv fs free`: the blocks of a file by their names, and what the workers have of them.

use std::collections::BTreeSet;

use cavern_client::{Client, Node};
use cavern_conf::counted;
use cavern_net::NetError;
use cavern_proto::CHUNK_BYTES;
use cavern_proto::block_id::block_length;
use cavern_proto::data::BlockRef;
use cavern_proto::master::{Extent, FreeFate, FreedContent, Kind, WorkerState};
use futures::TryStreamExt as _;
use futures::stream::FuturesUnordered;
use serde::Serialize;
use serde_json::{Value, json};

use super::walk::{PathArgs, walk};
use crate::cli::connect::ResultArgs;
use crate::console;
use crate::error::CliError;

/// Blocks of one request.
const BATCH: usize = 500;

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

/// Requests to drop blocks in flight: a worker serves each on a thread of its own.
const FREES: usize = 8;

/// One block at one worker.
#[derive(Serialize)]
struct BlockView {
    index: u32,
    length: u32,
    worker: u64,
    data: String,
    /// The worker that readers ask first.
    first: bool,
    chunks: u32,
    chunks_present: u32,
    path: String,
}

/// Why files of fs-mode mounts are left alone, and what scripts call them.
const KEPT: [(FreeFate, &str, &str); 3] = [
    (FreeFate::Dirty, "unpersisted", ", of which the bucket lacks changes: see cv persist status"),
    (FreeFate::Open, "open", " open, and written to: try again when all are closed"),
    (FreeFate::Unsupported, "unsupported", ": what is written to file:// stays at the workers"),
];

#[derive(Default)]
struct Freed {
    files: u64,
    blocks: u64,
    bytes: u64,
    /// Paths that lead nowhere.
    missing: u64,
    /// Workers that were not asked for blocks of objects: they may have some.
    lost_workers: u64,
    /// Files and bytes that were not dropped, by their reason in [`KEPT`].
    kept: [(u64, u64); KEPT.len()],
}

impl Freed {
    fn add(&mut self, (blocks, bytes): (u64, u64)) {
        self.blocks += blocks;
        self.bytes += bytes;
    }

    /// What became of files of fs-mode mounts.
    fn add_content(&mut self, results: &[FreedContent]) {
        for result in results {
            if let Some(reason) = KEPT.iter().position(|(fate, ..)| *fate == result.fate()) {
                self.kept[reason].0 += 1;
                self.kept[reason].1 += result.bytes;
            } else if result.fate() == FreeFate::Freed {
                self.add((result.blocks, result.bytes));
            }
        }
    }

    fn view(&self) -> Value {
        let mut view =
            json!({"files": self.files, "blocks": self.blocks, "bytes": self.bytes, "missing_paths": self.missing});
        view["lost_workers"] = self.lost_workers.into();
        for ((_, name, _), (files, bytes)) in KEPT.iter().zip(self.kept) {
            view[format!("{name}_files")] = files.into();
            view[format!("{name}_bytes")] = bytes.into();
        }
        view
    }

    fn print(&self) -> Result<(), CliError> {
        let (blocks, files) = (counted(self.blocks, "block"), counted(self.files, "file"));
        console::line(format_args!("dropped {blocks}, {}, of {files}", console::size(self.bytes)))?;
        if self.missing > 0 {
            console::line(format_args!("{} not there", counted(self.missing, "path")))?;
        }
        if self.lost_workers > 0 {
            let lost = counted(self.lost_workers, "lost worker");
            console::line(format_args!("not asked: {lost}; blocks there stay (see cv node list)"))?;
        }
        for ((_, _, why), (files, bytes)) in KEPT.iter().zip(self.kept).filter(|(_, (files, _))| *files > 0) {
            console::line(format_args!("kept {} of {}{why}", console::size(bytes), counted(files, "file")))?;
        }
        Ok(())
    }
}

/// `cv fs blocks`.
pub async fn show(client: &Client, PathArgs { path }: &PathArgs, result: &ResultArgs) -> Result<(), CliError> {
    let node = client.metadata().resolve(path).await?;
    if node.kind == Kind::Directory {
        return Err(CliError::Usage(format!("{path} is a directory: name a file")));
    }
    let views = where_blocks_are(client, &Layout::of(client, &node).await?).await?;
    result.show(&views, || {
        let row = |view: &BlockView| {
            let chunks = format!("{}/{}", view.chunks_present, view.chunks);
            let worker = format!("{}{}", view.worker, if view.first { "*" } else { "" });
            let (index, length) = (view.index.to_string(), console::size(view.length.into()));
            [index, length, chunks, worker, view.data.clone(), view.path.clone()]
        };
        let heading = ["BLOCK", "LENGTH", "CHUNKS", "WORKER", "DATA", "FILE"];
        console::table_or(&format!("no worker has a block of {path}"), heading, views.iter().map(row))
    })
}

/// Each block at each live worker that knows it. Those of a file of an fs-mode mount at each worker that the master
/// names, whether they are there or not.
async fn where_blocks_are(client: &Client, layout: &Layout) -> Result<Vec<BlockView>, CliError> {
    let table = client.workers();
    let holders = layout.blocks.iter().filter_map(|block| block.holders.as_ref()).flatten().copied();
    let workers: BTreeSet<u64> = table.workers().iter().map(|worker| worker.id).chain(holders).collect();
    let mut views = Vec::new();
    for id in workers {
        let blocks = layout.at(id);
        let found = if table.is_live(id) { Block::query(client, id, &blocks).await? } else { Vec::new() };
        let found = found.into_iter().map(|cached| Some(cached).filter(|cached| cached.is_known));
        for (block, cached) in blocks.iter().zip(found.chain(std::iter::repeat_with(|| None))) {
            if cached.is_none() && block.holders.is_none() {
                continue;
            }
            let (chunks_present, path) = cached.map(|cached| (cached.chunks, cached.path)).unwrap_or_default();
            views.push(BlockView {
                index: block.index,
                length: block.length,
                worker: id,
                data: table.worker(id).map(|worker| worker.data_address.clone()).unwrap_or_default(),
                first: block.first == Some(id),
                chunks: block.chunks(),
                chunks_present,
                path,
            });
        }
    }
    views.sort_by_key(|view| (view.index, !view.first, view.worker));
    Ok(views)
}

/// `cv fs free` and `cv load --evict`: at every live worker, since a block may be where an earlier worker table placed
/// it. Of files of fs-mode mounts the master knows where they are, and which of them the bucket has. Of several paths,
/// those that lead nowhere are counted; and so are workers that are not live, since these keep what they have.
pub async fn free(client: &Client, paths: &[String], result: &ResultArgs) -> Result<(), CliError> {
    let mut freed = Freed::default();
    let mut batch: Vec<BlockRef> = Vec::new();
    let mut running = FuturesUnordered::new();
    let mut contents: Vec<u64> = Vec::new();
    let mut has_objects = false;
    for path in paths {
        let root = match client.metadata().resolve(path).await.map_err(CliError::from) {
            Err(CliError::NotFound(_)) if paths.len() > 1 => {
                freed.missing += 1;
                continue;
            }
            root => root?,
        };
        walk(client, root, async |found| {
            let node = found.node;
            if node.is_fs_mode() {
                if node.kind == Kind::File {
                    freed.files += 1;
                    contents.push(node.inode);
                }
                if contents.len() == BATCH {
                    freed.add_content(&client.metadata().free_content(std::mem::take(&mut contents)).await?);
                }
                return Ok(());
            }
            let blocks = Layout::of(client, node).await?.blocks;
            freed.files += u64::from(!blocks.is_empty());
            has_objects |= !blocks.is_empty();
            for block in blocks {
                batch.push(block.name);
                if batch.len() == BATCH {
                    running.push(drop_blocks(client, std::mem::take(&mut batch)));
                }
                if running.len() == FREES {
                    freed.add(running.try_next().await?.unwrap_or_default());
                }
            }
            Ok(())
        })
        .await?;
    }
    freed.add_content(&client.metadata().free_content(contents).await?);
    running.push(drop_blocks(client, batch));
    while let Some(reply) = running.try_next().await? {
        freed.add(reply);
    }
    if has_objects {
        let table = client.workers();
        let lost = table.workers().iter().filter(|worker| worker.state() != WorkerState::Live);
        freed.lost_workers = lost.count() as u64;
    }
    result.show(&freed.view(), || freed.print())
}

/// Drops blocks at every worker; how many there were, and their bytes.
async fn drop_blocks(client: &Client, blocks: Vec<BlockRef>) -> Result<(u64, u64), CliError> {
    let (mut count, mut bytes) = (0, 0);
    if blocks.is_empty() {
        return Ok((count, bytes));
    }
    for worker in client.workers().workers().iter().filter(|worker| worker.state() == WorkerState::Live) {
        let reply = client.pool().free(worker.id, blocks.clone()).await?;
        count += reply.blocks;
        bytes += reply.bytes;
    }
    Ok((count, bytes))
}
