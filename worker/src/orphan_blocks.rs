//! Frees blocks of fs-mode files that no file has: they were made for clients that died before they said so to the
//! master.
//!
//! The master is asked which blocks are to be here. One that is not among them, twice, and was not written to all the
//! while is nobody's: a client that lives commits every few seconds what it has made, and renews the room that it
//! writes to.
//!
//! Masters that were restored from a copy do not know all files. Then what no file has is kept, and counted, until this
//! worker is started again.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use cavern_net::NetError;
use cavern_net::master::Stubs;
use cavern_proto::master::{Claim, ClaimList, ListClaimsRequest};
use cavern_proto::{BlockId, ChunkMap, ContentId};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{debug, info};

use crate::journals::Journals;
use crate::parts::WorkerParts;

/// What the search works with.
#[derive(Debug)]
pub struct OrphanCollector {
    pub parts: WorkerParts,
    pub journals: Arc<Journals>,
    /// For how long nobody has written to a block that is freed.
    pub rest: Duration,
    /// When looking began.
    pub since: Instant,
}

/// Why a look came to nothing.
pub type LookError = Box<dyn std::error::Error + Send + Sync>;

/// A block, and which of those that ever had its name.
pub type OrphanCandidate = (BlockId, u64);

/// Asks for a page of the blocks that files have at this worker.
///
/// # Errors
/// No master answers.
pub async fn list_claims(parts: &WorkerParts, request: ListClaimsRequest) -> Result<ClaimList, NetError> {
    let ask = |mut stubs: Stubs| {
        let request = request.clone();
        async move { stubs.cluster.list_claims(request).await }
    };
    parts.master.try_call("ListClaims", ask).await
}

/// Where a claim comes in the list of all: those of files first, then those that views keep.
pub fn order(claim: &Claim) -> (bool, u64, u64, u32, u32) {
    let Claim { worker_id, inode, generation, index, kept, .. } = *claim;
    if kept { (true, 0, inode, generation, index) } else { (false, worker_id, inode, 0, index) }
}

/// Frees those that nobody has written to for `rest` and that are still the same; gives which these were.
pub async fn free_orphans(parts: &WorkerParts, due: Vec<OrphanCandidate>, rest: Duration) -> Vec<BlockId> {
    let data = parts.stores.data.clone();
    let free = move |suspect: OrphanCandidate| Some((suspect.0, data.free_orphans(suspect, rest)?));
    let free = move || -> Vec<(BlockId, u64)> { due.into_iter().filter_map(free).collect() };
    let freed = tokio::task::spawn_blocking(free).await.unwrap_or_default();
    if !freed.is_empty() {
        parts.metrics.orphan_blocks.inc_by(freed.len() as u64);
        let bytes = freed.iter().map(|(_, bytes)| bytes).sum::<u64>();
        info!(blocks = freed.len(), bytes, "freed blocks that no file has");
    }
    freed.into_iter().map(|(id, _)| id).collect()
}

impl OrphanCollector {
    /// Looks now and then, until `stop`.
    pub async fn run(&self, stop: CancellationToken) {
        let mut suspects = HashSet::new();
        while stop.run_until_cancelled(tokio::time::sleep(self.rest / 2)).await.is_some() {
            match stop.run_until_cancelled(self.look(&suspects)).await {
                Some(Ok(now)) => suspects = now,
                Some(Err(error)) => debug!(%error, "cannot look for blocks that no file has"),
                None => return,
            }
        }
    }

    /// What no file has, and nobody has written to for `rest`, with the bytes that it takes; `None` where nobody can
    /// tell now, or there is nothing to look at.
    ///
    /// # Errors
    /// No master answers, or its list does not go on.
    pub async fn find(&self, rest: Duration) -> Result<Option<Vec<(OrphanCandidate, u64)>>, LookError> {
        let WorkerParts { stores, membership, .. } = &self.parts;
        let Some((worker_id, cluster_id)) = membership.confirmed() else { return Ok(None) };
        // What a dead mount has written is about to be some file's.
        if self.journals.are_replayed() {
            return Ok(None);
        }
        if stores.table.usage().iter().all(|disk| disk.data_bytes == 0) {
            return Ok(None);
        }
        let claims = self.claims(worker_id, &cluster_id).await?;
        let data = stores.data.clone();
        Ok(Some(tokio::task::spawn_blocking(move || data.orphans(&claims, rest)).await?))
    }

    /// Frees suspects that still no file has; gives those of now.
    async fn look(&self, suspects: &HashSet<OrphanCandidate>) -> Result<HashSet<OrphanCandidate>, LookError> {
        let (membership, rest) = (&self.parts.membership, self.rest);
        let Some(found) = self.find(rest).await? else { return Ok(HashSet::new()) };
        if membership.past().is_lost {
            let kept = (found.len() as u64, found.iter().map(|(_, bytes)| bytes).sum());
            if kept != membership.past().kept {
                info!(blocks = kept.0, bytes = kept.1, "blocks that no file has are kept: the masters were restored");
                membership.keeps(kept.0, kept.1);
            }
            return Ok(HashSet::new());
        }
        let found: HashSet<OrphanCandidate> = found.into_iter().map(|(suspect, _)| suspect).collect();
        let due: Vec<OrphanCandidate> = found.intersection(suspects).copied().collect();
        if !due.is_empty() {
            free_orphans(&self.parts, due, rest).await;
        }
        Ok(found)
    }

    async fn claims(&self, worker_id: u64, cluster_id: &str) -> Result<ChunkMap, LookError> {
        let mut claims = ChunkMap::new();
        let mut after: Option<Claim> = None;
        loop {
            let request = ListClaimsRequest { worker_id, cluster_id: cluster_id.to_owned(), after };
            let list = list_claims(&self.parts, request).await?;
            let blocks = list.claims.iter().map(|claim| BlockId {
                content: ContentId::of_inode(cluster_id, claim.mount_id, claim.inode, claim.generation),
                index: claim.index,
            });
            self.parts.stores.data.claim(&mut claims, blocks);
            if list.is_last {
                return Ok(claims);
            }
            let last = list.claims.last().filter(|last| after.is_none_or(|after| order(&after) < order(last)));
            after = Some(*last.ok_or("the master's list of blocks does not go on")?);
        }
    }
}
