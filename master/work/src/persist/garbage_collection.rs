//! Frees blocks that no file has any more, at the workers that have them.
//!
//! A record is struck off worker by worker. One that is away keeps its share until it is back, and keeps nobody else
//! waiting; one that is in the table no more has taken its blocks with it.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use cavern_conf::Failpoint;
use cavern_proto::data::BlockRef;
use cavern_proto::master::{Extent, WorkerState};
use cavern_proto::record::command::Command;
use cavern_proto::record::{DropBlocks, Freed, GarbageRecord};
use cavern_state::AT_ONCE;
use tokio::time::Instant;

use super::Persistence;
use crate::background::Next;
use crate::error::WorkError;

/// Records worked off together.
const RECORDS: usize = 200;
/// Blocks of one request.
const BLOCKS: usize = 1000;
/// Nobody waits for the room to the second.
pub(super) const PAUSE: Duration = Duration::from_secs(1);
/// A worker that fails is left alone for so long.
const WORKER_PAUSE: Duration = Duration::from_secs(10);

/// Workers that failed, and when to try them again.
pub(super) type Away = BTreeMap<u64, Instant>;

impl Persistence {
    pub(super) async fn free_garbage(&self, away: &mut Away) -> Result<Next, WorkError> {
        let (mut after, mut failure) = (0, None);
        loop {
            let page = self.lookups.reader.read(move |tables| Ok(tables.garbage(after, RECORDS)?)).await?;
            let Some((last, _)) = page.last() else { return failure.map_or(Ok(Next::Rest), Err) };
            after = *last;
            let dropped = self.drop_blocks(&page).await;
            self.free(page, away).await?;
            // What else there is is freed all the same.
            failure = failure.or(dropped.err());
        }
    }

    /// Goes on dropping the blocks of files that were cut, until there are none: they become records behind these.
    async fn drop_blocks(&self, records: &[(u64, GarbageRecord)]) -> Result<(), WorkError> {
        for (number, _) in records.iter().filter(|(_, record)| record.is_cut) {
            let step = || DropBlocks { number: *number, limit: AT_ONCE as u32 };
            while self.proposer.propose(step()).await?.more {}
        }
        Ok(())
    }

    async fn free(&self, records: Vec<(u64, GarbageRecord)>, away: &mut Away) -> Result<(), WorkError> {
        let placement = self.writer.placement()?;
        away.retain(|_, until| Instant::now() < *until);
        let mut blocks: BTreeMap<u64, Vec<BlockRef>> = BTreeMap::new();
        let mounts: BTreeSet<u32> = records.iter().map(|(_, record)| record.mount_id).collect();
        let sizes = self.lookups.reader.read(move |tables| Ok(tables.block_sizes(mounts)?)).await?;
        for (_, GarbageRecord { inode, mount_id, extents, .. }) in &records {
            for extent in extents {
                let Extent { generation, index, .. } = *extent;
                let block = BlockRef::of_inode(&self.cluster_id, *inode, generation, index, sizes[mount_id], *mount_id);
                for worker in &extent.workers {
                    blocks.entry(*worker).or_default().push(block.clone());
                }
            }
        }
        let mut done = Vec::new();
        for (worker, blocks) in blocks {
            match placement.worker(worker) {
                None => done.push(worker),
                Some(known) if known.state() != WorkerState::Live || away.contains_key(&worker) => {}
                Some(_) => match self.free_at(worker, &blocks).await {
                    Ok(()) => {
                        Failpoint::GarbageFreed.pass();
                        done.push(worker);
                    }
                    Err(error) => {
                        tracing::warn!(worker, "blocks that no file has any more are not freed: {error}");
                        away.insert(worker, Instant::now() + WORKER_PAUSE);
                    }
                },
            }
        }
        let touches = |record: &GarbageRecord| {
            record.extents.iter().any(|extent| extent.workers.iter().any(|worker| done.contains(worker)))
        };
        let freed = records.iter().filter(|(_, record)| touches(record));
        let freed = freed.map(|(number, _)| Command::Freed(Freed { number: *number, workers: done.clone() }));
        self.proposer.propose_all(freed.collect::<Vec<_>>()).await?;
        Ok(())
    }

    async fn free_at(&self, worker: u64, blocks: &[BlockRef]) -> Result<(), String> {
        for blocks in blocks.chunks(BLOCKS) {
            self.writer.free(worker, blocks.to_vec()).await?;
            self.metrics.freed_blocks.inc_by(blocks.len() as u64);
        }
        Ok(())
    }
}
