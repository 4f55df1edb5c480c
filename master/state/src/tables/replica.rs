//! Reads of where the blocks of files are, by worker and by need.

use cavern_proto::record::Stray;

use super::Tables;
use crate::Family;
use crate::error::StateError;
use crate::records::{extent_key, leading_id, parse_extent_key, parse_stray_key, replica_key, stray_key};

/// A block of a file: inode and index.
pub type FileBlock = (u64, u32);

/// What a worker may have of a block that it is no part of any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StrayReplica {
    pub worker: u64,
    pub stray: Stray,
    pub mount_id: u32,
}

impl Tables<'_> {
    /// Up to `limit` blocks that have a replica at a worker, beyond this one.
    pub fn replicas_at(
        &self,
        worker: u64,
        after: Option<FileBlock>,
        limit: usize,
    ) -> Result<Vec<FileBlock>, StateError> {
        let (inode, index) = after.map_or((0, 0), next);
        let start = replica_key(worker, inode, index);
        let mut blocks = Vec::new();
        for item in self.records_from(Family::Replica, &start).take(limit) {
            let (key, _) = item?;
            match key.split_first_chunk::<8>() {
                Some((at, block)) if u64::from_be_bytes(*at) == worker => blocks.push(block_of(block)?),
                _ => break,
            }
        }
        Ok(blocks)
    }

    /// How many blocks have a replica at a worker.
    pub fn count_replicas_at(&self, worker: u64) -> Result<u64, StateError> {
        let start = worker.to_be_bytes();
        let mut count = 0;
        for item in self.records_from(Family::Replica, &start) {
            if leading_id(&item?.0) != Some(worker) {
                break;
            }
            count += 1;
        }
        Ok(count)
    }

    /// The workers that have replicas, whether the table has them or not.
    pub fn workers_with_replicas(&self) -> Result<Vec<u64>, StateError> {
        let mut workers = Vec::new();
        let mut next = Some(0u64);
        while let Some(from) = next {
            let start = from.to_be_bytes();
            let first = self.records_from(Family::Replica, &start).next();
            let Some((key, _)) = first.transpose()? else { break };
            let worker = leading_id(&key).unwrap_or_default();
            workers.push(worker);
            next = worker.checked_add(1);
        }
        Ok(workers)
    }

    /// Up to `limit` blocks that lack replicas or have a copy under way, beyond this one.
    pub fn repairs(&self, after: Option<FileBlock>, limit: usize) -> Result<Vec<FileBlock>, StateError> {
        let (inode, index) = after.map_or((0, 0), next);
        let start = extent_key(inode, index);
        let items = self.records_from(Family::Repair, &start).take(limit);
        items.map(|item| block_of(&item?.0)).collect()
    }

    /// Up to `limit` strays beyond this one, by worker.
    pub fn strays(&self, after: Option<&(u64, Stray)>, limit: usize) -> Result<Vec<StrayReplica>, StateError> {
        let start = after.map_or_else(Vec::new, |(worker, stray)| {
            let mut start = stray_key(*worker, stray).to_vec();
            start.push(0);
            start
        });
        let items = self.records_from(Family::Stray, &start).take(limit);
        let stray = |item: Result<super::Pair, rocksdb::Error>| {
            let (key, value) = item?;
            let mount_id = value.as_ref().try_into().ok().map(u32::from_be_bytes);
            let ((worker, stray), mount_id) =
                parse_stray_key(&key).zip(mount_id).ok_or_else(|| StateError::Corrupt("a stray replica".into()))?;
            Ok(StrayReplica { worker, stray, mount_id })
        };
        items.map(stray).collect()
    }

    /// Whether a worker may have something of a block that is none of its replicas.
    pub fn is_stray(&self, worker: u64, stray: &Stray) -> Result<bool, StateError> {
        Ok(self.get(Family::Stray, &stray_key(worker, stray))?.is_some())
    }
}

fn next((inode, index): FileBlock) -> FileBlock {
    match index.checked_add(1) {
        Some(index) => (inode, index),
        None => (inode.saturating_add(1), 0),
    }
}

fn block_of(key: &[u8]) -> Result<FileBlock, StateError> {
    parse_extent_key(key).ok_or_else(|| StateError::Corrupt("a block in an index of replicas".into()))
}
