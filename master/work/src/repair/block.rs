//! One copy, from the announcement to the replica.
//!
//! That a worker is to join a block is in the log first, so that no crash leaves a copy that nobody knows of. Every
//! client is notified of it, and writes to the block no more once it has acknowledged that; what it wrote before is at
//! the source by then. A client that cannot be reached says of everything it writes which workers have it, with the
//! commit, and a replica that lacks it is given up then. So the copy is begun only when all that may see the mount have
//! acknowledged, none of them being on its way to another stream.

use std::time::Duration;

use cavern_proto::data::{BlockRef, CopyRequest};
use cavern_proto::master::{Extent, FreeFate};
use cavern_proto::record::{BlockOf, GiveUpReplicas, JoinReplica, SettleReplica};
use cavern_state::TypedCommand;
use cavern_state::outcome::{FreeContent, Verdict};

use super::Repair;
use super::plan::{Copy, Step};
use crate::error::WorkError;

/// For a copy. Writers wait so long, and have `client.read_timeout`.
const COPY_TIMEOUT: Duration = Duration::from_secs(10);

impl Repair {
    pub(super) async fn execute_step(&self, step: &Step) -> Result<(), String> {
        match step {
            Step::Copy(copy) => self.copy(copy).await,
            Step::GiveUp { inode, extent } => self.settle(*inode, extent, None).await,
            Step::FromBucket { inode, .. } => self.drop_lost(*inode).await,
            Step::Shed { inode, index, worker, others } => {
                let blocks = vec![BlockOf { inode: *inode, index: *index }];
                let given_up = GiveUpReplicas { worker_id: *worker, blocks, others: others.clone() };
                self.propose(given_up).await.map_err(|error| error.to_string())
            }
        }
    }

    async fn copy(&self, copy: &Copy) -> Result<(), String> {
        let watch = &self.watch;
        if !watch.has_settled(copy.mount_id) {
            return Err("a client is on its way to another stream, or may still come after the master's start".into());
        }
        let Copy { inode, extent, .. } = copy;
        let join = JoinReplica { inode: *inode, extent: Some(extent.clone()) };
        match self.propose(join).await {
            Ok(()) => {}
            // Things have changed since they were looked at: they are looked at again.
            Err(WorkError::Refused(_)) => return Ok(()),
            Err(error) => return Err(error.to_string()),
        }
        let acknowledged = watch.wait_all_acknowledged(copy.mount_id, watch.seq()).await;
        let copied =
            if acknowledged { self.have_copied(copy).await } else { Err("a client has not heard of it".into()) };
        let keep = copied.is_ok().then_some(&copy.keep[..]);
        let settled = self.settle(*inode, extent, keep).await;
        copied.and(settled)?;
        self.metrics.repaired_blocks.inc();
        Ok(())
    }

    async fn have_copied(&self, copy: &Copy) -> Result<(), String> {
        let Copy { inode, mount_id, block_size, extent, sources, .. } = copy;
        let (generation, index) = (extent.generation, extent.index);
        let block = BlockRef::of_inode(&self.cluster_id, *inode, generation, index, *block_size, *mount_id);
        let request = CopyRequest { block: Some(block), workers: sources.clone(), deadline_ms: 0 };
        self.writer.copy(extent.joining, request, COPY_TIMEOUT).await
    }

    /// Takes a copy in, with the workers that stay beside it; or gives it up.
    async fn settle(&self, inode: u64, extent: &Extent, keep: Option<&[u64]>) -> Result<(), String> {
        let (joined, keep) = (keep.is_some(), keep.unwrap_or_default().to_vec());
        let settle = SettleReplica { inode, extent: Some(extent.clone()), joined, keep };
        match self.propose(settle).await {
            // It has been given up already.
            Err(WorkError::Refused(_)) if !joined => Ok(()),
            settled => settled.map_err(|error| error.to_string()),
        }
    }

    /// The blocks of a file make way for what the bucket has.
    pub(super) async fn drop_lost(&self, inode: u64) -> Result<(), String> {
        let freed =
            self.proposer.propose(FreeContent { inode, session: 0 }).await.map_err(|error| error.to_string())?;
        match freed.fate() {
            FreeFate::Freed | FreeFate::Nothing => Ok(()),
            other => Err(format!("the bucket cannot stand in for it: {other:?}")),
        }
    }

    /// [`WorkError::Refused`] is what the state does not allow.
    pub(super) async fn propose(&self, command: impl TypedCommand<Outcome = Verdict>) -> Result<(), WorkError> {
        self.proposer.propose(command).await?.map_err(WorkError::Refused)
    }
}
