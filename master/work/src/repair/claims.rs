//! The blocks that each worker is to keep: it frees others by itself, which were made for clients that died before they
//! said so. First come those of files, then those that only views have: a block that goes from the ones to the others
//! while the pages of a list are asked for is on one of them.

use std::collections::HashSet;

use cavern_proto::master::{Claim, ClaimList, ListClaimsRequest};
use cavern_proto::record::Stray;
use cavern_security::Identity;
use cavern_state::Tables;

use super::Repair;
use crate::error::WorkError;
use crate::workers::check_worker_owner;

/// Claims of one answer.
const PAGE: usize = 10_000;
/// Blocks of views that are looked at for one answer: most may be at other workers.
const LOOKED_AT: usize = 10 * PAGE;

impl Repair {
    /// A page of what a worker is to keep.
    ///
    /// # Errors
    /// [`WorkError::Refused`] for a worker that is none of this cluster's, [`WorkError::Denied`] for one that is
    /// not for `asker` to speak for.
    pub async fn claims(&self, request: ListClaimsRequest, asker: Option<Identity>) -> Result<ClaimList, WorkError> {
        let ListClaimsRequest { worker_id, cluster_id, after } = request;
        if *cluster_id != *self.cluster_id {
            let reason =
                format!("worker {worker_id} belongs to cluster {cluster_id}, this is cluster {}", self.cluster_id);
            return Err(WorkError::Refused(reason));
        }
        let list = move |tables: Tables<'_>| {
            if let Some(record) = tables.worker(worker_id)? {
                check_worker_owner(&record, asker.as_ref())?;
            }
            page(tables, worker_id, after, PAGE)
        };
        self.reader.read(list).await
    }
}

/// Up to `limit` claims beyond this one.
pub fn page(tables: Tables<'_>, worker: u64, after: Option<Claim>, limit: usize) -> Result<ClaimList, WorkError> {
    if tables.worker(worker)?.is_none() {
        return Err(WorkError::Refused(format!("there is no worker {worker}")));
    }
    let mut owners = vec![worker];
    for other in tables.workers_with_replicas()? {
        if tables.worker(other)?.is_none() {
            owners.push(other);
        }
    }
    owners.sort_unstable();
    let mut list = ClaimList { claims: Vec::new(), is_last: true };
    // Of the last file, which has the blocks that follow as a rule.
    let mut mount: Option<(u64, u32)> = None;
    let is_next = |owner: &u64| after.is_none_or(|after| !after.kept && *owner >= after.worker_id);
    for owner in owners.into_iter().filter(is_next) {
        let from = after.filter(|after| after.worker_id == owner).map(|after| (after.inode, after.index));
        let room = limit - list.claims.len();
        let blocks = tables.replicas_at(owner, from, room)?;
        list.is_last = blocks.len() < room;
        for (inode, index) in blocks {
            // It may have been dropped since the index was read.
            if let Some(extent) = tables.extent(inode, index)? {
                if mount.is_none_or(|(of, _)| of != inode) {
                    mount = Some((inode, tables.inode(inode)?.map_or(0, |record| record.mount_id)));
                }
                let (generation, mount_id) = (extent.generation, mount.map_or(0, |(_, mount_id)| mount_id));
                list.claims.push(Claim { worker_id: owner, inode, generation, index, mount_id, kept: false });
            }
        }
        if !list.is_last {
            return Ok(list);
        }
    }
    add_kept(tables, worker, after.filter(|after| after.kept), limit, &mut list)?;
    Ok(list)
}

/// Goes on with the blocks that only views have.
fn add_kept(
    tables: Tables<'_>,
    worker: u64,
    after: Option<Claim>,
    limit: usize,
    list: &mut ClaimList,
) -> Result<(), WorkError> {
    if tables.counters()?.kept == 0 {
        return Ok(());
    }
    let others = tables.workers()?.into_iter().filter_map(|record| record.worker).map(|known| known.id);
    let others: HashSet<u64> = others.filter(|other| *other != worker).collect();
    let after = after.map(|Claim { inode, generation, index, .. }| Stray { inode, generation, index });
    for (looked_at, row) in tables.kept_after(after).enumerate() {
        let (Stray { inode, generation, index }, kept) = row?;
        // The next page goes on behind it, whoever has it.
        let ends = looked_at == LOOKED_AT;
        if !ends && kept.workers.iter().all(|has| others.contains(has)) {
            continue;
        }
        list.is_last = !ends && list.claims.len() < limit;
        if list.claims.len() < limit {
            let mount_id = kept.mount_id;
            list.claims.push(Claim { worker_id: worker, inode, generation, index, mount_id, kept: true });
        }
        if !list.is_last {
            break;
        }
    }
    Ok(())
}
