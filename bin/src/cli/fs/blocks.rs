//! `cv fs blocks` and `cv fs free`: what the workers have of a file.

use std::sync::Arc;

use cavern_client::{Client, Node, ObjectVersion};
use cavern_conf::counted;
use cavern_proto::CHUNK_BYTES;
use cavern_proto::data::BlockRef;
use cavern_proto::master::{FreeFate, FreedContent, Kind, WorkerState};
use futures::TryStreamExt as _;
use futures::stream::FuturesUnordered;
use serde::Serialize;

use super::PathArgs;
use super::walk::{walk, with_client};
use crate::console;
use crate::error::CliError;

/// Blocks of one request.
const BATCH: usize = 500;
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

/// Chunks of which a worker says that it has them.
fn present(map: &[u8]) -> u32 {
    map.iter().map(|byte| byte.count_ones()).sum()
}

/// Bytes of a file that are in one of its blocks: the last one is not full.
fn length_in_file(index: u32, block_size: u64, size: u64) -> u32 {
    let before = u64::from(index).saturating_mul(block_size);
    u32::try_from(size.saturating_sub(before).min(block_size)).unwrap_or(u32::MAX)
}

/// A file of an fs-mode mount: each block at each worker that the master names, whether that is there or not.
async fn where_data_is(client: &Client, node: &Arc<Node>) -> Result<Vec<BlockView>, CliError> {
    let Some(mount) = &node.mount else { return Ok(vec![]) };
    let (layout, placement) = (client.metadata().layout(node.inode, &[], None).await?, client.workers());
    let cluster_id = client.pool().cluster_id();
    let size = layout.attr.unwrap_or_default().size;
    let mut views = Vec::new();
    for extent in layout.extents {
        let name =
            BlockRef::of_inode(&cluster_id, node.inode, extent.generation, extent.index, layout.block_size, mount.id());
        for (position, id) in extent.workers.iter().enumerate() {
            let worker = placement.worker(*id).filter(|worker| worker.state() == WorkerState::Live);
            let item = match worker {
                Some(_) => client.pool().query(*id, vec![name.clone()]).await?.items.into_iter().next(),
                None => None,
            };
            let length = length_in_file(extent.index, layout.block_size, size);
            let item = item.filter(|item| item.known).unwrap_or_default();
            // A block has room for what may be written to it yet.
            let (chunks, present) = (length.div_ceil(CHUNK_BYTES), present(&item.present));
            views.push(BlockView {
                index: extent.index,
                length,
                worker: *id,
                data: placement.worker(*id).map_or_else(String::new, |worker| worker.data_address.clone()),
                first: position == 0,
                chunks,
                chunks_present: present.min(chunks),
                path: item.path,
            });
        }
    }
    Ok(views)
}

/// `cv fs blocks`.
pub async fn blocks(args: PathArgs) -> Result<(), CliError> {
    let views = with_client(&args.cluster, async |client| {
        let node = client.metadata().resolve(&args.path).await?;
        if node.kind == Kind::Directory {
            return Err(CliError::Usage(format!("{} is a directory: name a file", args.path)));
        }
        if node.is_fs_mode() { where_data_is(client, &node).await } else { where_blocks_are(client, &node).await }
    })
    .await?;
    if args.json {
        return console::json(&views);
    }
    if views.is_empty() {
        return console::line(format_args!("no worker has a block of {}", args.path));
    }
    let rows: Vec<_> = views
        .iter()
        .map(|view| {
            [
                view.index.to_string(),
                console::size(view.length.into()),
                format!("{}/{}", view.chunks_present, view.chunks),
                format!("{}{}", view.worker, if view.first { "*" } else { "" }),
                view.data.clone(),
                view.path.clone(),
            ]
        })
        .collect();
    console::table(["BLOCK", "LENGTH", "CHUNKS", "WORKER", "DATA", "FILE"], &rows)
}

async fn where_blocks_are(client: &Client, node: &Arc<Node>) -> Result<Vec<BlockView>, CliError> {
    let Some(version) = version(node)? else { return Ok(vec![]) };
    let placement = client.workers();
    let indexes: Vec<u32> = (0..version.block_count()).collect();
    let mut views = Vec::new();
    for worker in placement.workers().iter().filter(|worker| worker.state() == WorkerState::Live) {
        for batch in indexes.chunks(BATCH) {
            let refs = batch.iter().map(|index| version.block(*index)).collect();
            let reply = client.pool().query(worker.id, refs).await?;
            for (index, item) in batch.iter().zip(reply.items).filter(|(_, item)| item.known) {
                let length = version.block_length(*index);
                let chunks = length.div_ceil(CHUNK_BYTES);
                let present = present(&item.present);
                views.push(BlockView {
                    index: *index,
                    length,
                    worker: worker.id,
                    data: worker.data_address.clone(),
                    first: placement.candidates(version.content, *index, 1).first() == Some(worker.id),
                    chunks,
                    chunks_present: present,
                    path: item.path,
                });
            }
        }
    }
    views.sort_by_key(|view| (view.index, !view.first, view.worker));
    Ok(views)
}

/// `cv fs free`: at every live worker, since a block may be where an earlier worker table placed it. Of files of
/// fs-mode mounts the master knows where they are, and which of them the bucket has.
pub async fn free(args: PathArgs) -> Result<(), CliError> {
    let freed = with_client(&args.cluster, async |client| {
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
    if args.json {
        return console::json(&freed);
    }
    console::line(format_args!(
        "dropped {}, {}, of {}",
        counted(freed.blocks, "block"),
        console::size(freed.bytes),
        counted(freed.files, "file")
    ))?;
    freed.kept().iter().try_for_each(|line| console::line(format_args!("{line}")))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_block_of_a_file_ends_with_it() {
        let lengths = [(0, 3 << 20), (0, 64 << 20), (1, 65 << 20), (1, 1 << 20)];
        let lengths = lengths.map(|(index, size)| length_in_file(index, 64 << 20, size) >> 20);
        assert_eq!(lengths, [3, 64, 1, 0]);
    }
}
