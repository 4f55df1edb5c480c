//! Where the blocks of files are, by worker and by need.

use std::collections::HashMap;

use cavern_proto::master::Extent;
use cavern_proto::record::Stray;

use crate::error::Result;
use crate::schema::{self, FileBlock};
use crate::tables::Tables;

/// What a worker may have of a block that it is no part of any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StrayReplica {
    pub worker: u64,
    pub stray: Stray,
    pub mount_id: u32,
}

impl Tables<'_> {
    /// Bytes of the blocks of each of these mounts. Of one that is gone nothing says so, but workers know its blocks by
    /// name.
    pub fn block_sizes(&self, mounts: impl IntoIterator<Item = u32>) -> Result<HashMap<u32, u64>> {
        let size = |id: u32| Ok((id, self.mount(id)?.map_or(1, |mount| mount.block_size.max(1))));
        mounts.into_iter().map(size).collect()
    }

    /// Up to `limit` files that have blocks, beyond this one, and their blocks.
    pub fn files_with_blocks(&self, after: u64, limit: usize) -> Result<Vec<(u64, Vec<Extent>)>> {
        let (mut files, mut last) = (Vec::new(), after);
        while files.len() < limit {
            let next = self.rows_after(schema::Extents, (), Some((last, u32::MAX))).next();
            let Some(row) = next.transpose()? else { break };
            (last, _) = row.key()?;
            files.push((last, self.extents(last, 0)?));
        }
        Ok(files)
    }

    /// How many blocks have a replica at a worker.
    pub fn count_replicas_at(&self, worker: u64) -> Result<u64> {
        self.rows(schema::Replicas, worker).try_fold(0, |count, row| row.map(|_| count + 1))
    }

    /// The workers that have replicas, whether the table has them or not.
    pub fn workers_with_replicas(&self) -> Result<Vec<u64>> {
        let mut workers: Vec<u64> = Vec::new();
        loop {
            let after = workers.last().map(|worker| (*worker, (u64::MAX, u32::MAX)));
            let next = self.rows_after(schema::Replicas, (), after).next();
            let Some(row) = next.transpose()? else { return Ok(workers) };
            workers.push(row.key()?.0);
        }
    }

    /// Up to `limit` blocks that lack replicas or have a copy under way, beyond this one.
    pub fn repairs(&self, after: Option<FileBlock>, limit: usize) -> Result<Vec<FileBlock>> {
        self.rows_after(schema::Repairs, (), after).page(limit, |row| row.key())
    }

    /// Up to `limit` strays beyond this one, by worker.
    pub fn strays(&self, after: Option<&(u64, Stray)>, limit: usize) -> Result<Vec<StrayReplica>> {
        self.rows_after(schema::Strays, (), after.copied()).page(limit, |row| {
            let ((worker, stray), mount_id) = row.entry()?;
            Ok(StrayReplica { worker, stray, mount_id })
        })
    }

    /// Whether a worker may have something of a block that is none of its replicas.
    pub fn is_stray(&self, worker: u64, stray: &Stray) -> Result<bool> {
        self.has(schema::Strays, (worker, *stray))
    }
}
