//! Frees what workers have of blocks that they are no part of any more.

use std::collections::BTreeSet;
use std::time::Duration;

use cavern_proto::data::BlockRef;
use cavern_proto::record::command::Command;
use cavern_proto::record::{Stray, StraysFreed};
use cavern_state::StrayReplica;

use super::availability::Availability;
use super::{PAGE, Repair};
use crate::background::Next;
use crate::error::WorkError;

/// Between two looks at all strays.
pub(super) const PAUSE: Duration = Duration::from_secs(1);

/// The last stray that a worker can have.
const LAST: Stray = Stray { inode: u64::MAX, generation: u32::MAX, index: u32::MAX };

impl Repair {
    pub(super) async fn free_strays(&self) -> Result<Next, WorkError> {
        let availability = self.availability()?;
        let mut after: Option<(u64, Stray)> = None;
        loop {
            let from = after.take();
            let page = self.reader.read(move |tables| Ok(tables.strays(from.as_ref(), PAGE)?)).await?;
            let Some(worker) = page.first().map(|first| first.worker) else { return Ok(Next::Rest) };
            let of_worker: Vec<StrayReplica> = page.into_iter().filter(|stray| stray.worker == worker).collect();
            let is_gone = availability.placement.worker(worker).is_none();
            let freed = match availability.of(worker) {
                Availability::Live | Availability::Draining => self.free_at(worker, &of_worker).await,
                // It has taken its blocks with it.
                _ if is_gone => Ok(()),
                _ => Err("it is lost".to_owned()),
            };
            match freed {
                Ok(()) => {
                    let strays: Vec<Stray> = of_worker.into_iter().map(|replica| replica.stray).collect();
                    after = strays.last().map(|last| (worker, *last));
                    self.proposer.propose(Command::StraysFreed(StraysFreed { worker, strays })).await?;
                }
                Err(error) => {
                    tracing::debug!(worker, "replicas that no block has any more are not freed: {error}");
                    after = Some((worker, LAST));
                }
            }
        }
    }

    async fn free_at(&self, worker: u64, strays: &[StrayReplica]) -> Result<(), String> {
        let mounts: BTreeSet<u32> = strays.iter().map(|replica| replica.mount_id).collect();
        let sizes = self.reader.read(move |tables| Ok(tables.block_sizes(mounts)?)).await;
        let sizes = sizes.map_err(|error| error.to_string())?;
        let block = |StrayReplica { stray, mount_id, .. }: &StrayReplica| {
            BlockRef::of_inode(&self.cluster_id, stray.inode, stray.generation, stray.index, sizes[mount_id], *mount_id)
        };
        let blocks = strays.iter().map(block).collect();
        self.writer.free(worker, blocks).await
    }
}
