//! `cv fs blocks` and `cv fs free`: what the workers have of a file.

use std::collections::BTreeSet;

use cavern_client::{Client, Node, ObjectVersion};
use cavern_conf::counted;
use cavern_proto::data::BlockRef;
use cavern_proto::master::{FreeFate, FreedContent, Kind, WorkerState};
use futures::TryStreamExt as _;
use futures::stream::FuturesUnordered;
use serde::Serialize;

use super::args::PathArgs;
use super::layout::{BATCH, Block, Layout};
use super::walk::{walk, with_client};
use crate::console;
use crate::error::CliError;

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

#[derive(Default, Serialize)]
struct Freed {
    files: u64,
    blocks: u64,
    bytes: u64,
    /// Of fs-mode mounts, what was not dropped: the bucket lacks changes of it, somebody has it open and has written to
    /// it, or the bucket is of a kind that fs-mode files are not read from.
    unpersisted_files: u64,
    unpersisted_bytes: u64,
    open_files: u64,
    open_bytes: u64,
    unsupported_files: u64,
}

impl Freed {
    fn add(&mut self, dropped: Option<(u64, u64)>) {
        let (blocks, bytes) = dropped.unwrap_or_default();
        self.blocks += blocks;
        self.bytes += bytes;
    }

    /// What became of files of fs-mode mounts.
    fn add_content(&mut self, results: &[FreedContent]) {
        for result in results {
            match result.fate() {
                FreeFate::Freed => self.add(Some((result.blocks, result.bytes))),
                FreeFate::Dirty => {
                    self.unpersisted_files += 1;
                    self.unpersisted_bytes += result.bytes;
                }
                FreeFate::Open => {
                    self.open_files += 1;
                    self.open_bytes += result.bytes;
                }
                FreeFate::Unsupported => self.unsupported_files += 1,
                FreeFate::Nothing => {}
            }
        }
    }

    /// Why files of fs-mode mounts were left alone.
    fn kept(&self) -> Vec<String> {
        let mut kept = Vec::new();
        if self.unpersisted_files > 0 {
            kept.push(format!(
                "kept {} of {}, of which the bucket lacks changes: see cv persist status",
                console::size(self.unpersisted_bytes),
                counted(self.unpersisted_files, "file")
            ));
        }
        if self.open_files > 0 {
            kept.push(format!(
                "kept {} of {} open, and written to: try again when all are closed",
                console::size(self.open_bytes),
                counted(self.open_files, "file")
            ));
        }
        if self.unsupported_files > 0 {
            kept.push(format!(
                "kept {}: what is written to file:// stays at the workers",
                counted(self.unsupported_files, "file")
            ));
        }
        kept
    }
}

/// The content of a file as the data plane names it; `None` of an empty file, which has no blocks.
fn version(node: &Node) -> Result<Option<ObjectVersion>, CliError> {
    match &node.mount {
        Some(_) if node.kind == Kind::File && node.size > 0 => Ok(Some(node.object()?)),
        _ => Ok(None),
    }
}

/// `cv fs blocks`.
pub async fn blocks(args: PathArgs) -> Result<(), CliError> {
    let views = with_client(&args.result.cluster, async |client| {
        let node = client.metadata().resolve(&args.path).await?;
        if node.kind == Kind::Directory {
            return Err(CliError::Usage(format!("{} is a directory: name a file", args.path)));
        }
        where_blocks_are(client, &Layout::of(client, &node).await?).await
    })
    .await?;
    args.result.show(&views, |views| {
        let row = |view: &BlockView| {
            let chunks = format!("{}/{}", view.chunks_present, view.chunks);
            let worker = format!("{}{}", view.worker, if view.first { "*" } else { "" });
            let (index, length) = (view.index.to_string(), console::size(view.length.into()));
            [index, length, chunks, worker, view.data.clone(), view.path.clone()]
        };
        let heading = ["BLOCK", "LENGTH", "CHUNKS", "WORKER", "DATA", "FILE"];
        console::table_or(&format!("no worker has a block of {}", args.path), heading, views.iter().map(row))
    })
}

/// Each block at each live worker that knows it. Those of a file of an fs-mode mount at each worker that the master
/// names, whether they are there or not.
async fn where_blocks_are(client: &Client, layout: &Layout) -> Result<Vec<BlockView>, CliError> {
    let table = client.workers();
    let is_live = |id: u64| table.worker(id).is_some_and(|worker| worker.state() == WorkerState::Live);
    let holders = layout.blocks.iter().filter_map(|block| block.holders.as_ref()).flatten().copied();
    let workers: BTreeSet<u64> = table.workers().iter().map(|worker| worker.id).chain(holders).collect();
    let mut views = Vec::new();
    for id in workers {
        let blocks = layout.at(id);
        let found = if is_live(id) { Block::query(client, id, &blocks).await? } else { Vec::new() };
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

/// `cv fs free`: at every live worker, since a block may be where an earlier worker table placed it. Of files of
/// fs-mode mounts the master knows where they are, and which of them the bucket has.
pub async fn free(args: PathArgs) -> Result<(), CliError> {
    let freed = with_client(&args.result.cluster, async |client| {
        let root = client.metadata().resolve(&args.path).await?;
        let mut freed = Freed::default();
        let mut batch: Vec<BlockRef> = Vec::new();
        let mut running = FuturesUnordered::new();
        let mut contents: Vec<u64> = Vec::new();
        walk(client, root, async |_, node| {
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
            let Some(version) = version(node)? else { return Ok(()) };
            freed.files += 1;
            for index in 0..version.block_count() {
                batch.push(version.block(index));
                if batch.len() == BATCH {
                    running.push(drop_blocks(client, std::mem::take(&mut batch)));
                }
                if running.len() == FREES {
                    freed.add(running.try_next().await?);
                }
            }
            Ok(())
        })
        .await?;
        freed.add_content(&client.metadata().free_content(contents).await?);
        running.push(drop_blocks(client, batch));
        while let Some(reply) = running.try_next().await? {
            freed.add(Some(reply));
        }
        Ok(freed)
    })
    .await?;
    args.result.show(&freed, |freed| {
        let (blocks, files) = (counted(freed.blocks, "block"), counted(freed.files, "file"));
        console::line(format_args!("dropped {blocks}, {}, of {files}", console::size(freed.bytes)))?;
        freed.kept().iter().try_for_each(console::line)
    })
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
