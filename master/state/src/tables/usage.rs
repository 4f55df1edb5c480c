//! Reads of quotas, and of how much there is below directories.

use bytes::Bytes;
use cavern_proto::master::{Quota, Quotas};
use cavern_proto::record::{InodeRecord, QuotaRecord, UsageRecord};

use super::{DEPTH_MAX, Tables};
use crate::error::StateError;
use crate::records::{decode, inode_key, leading_id};
use crate::{Family, usage};

impl Tables<'_> {
    pub fn quota(&self, inode: u64) -> Result<Option<QuotaRecord>, StateError> {
        self.record(Family::Quota, &inode_key(inode))
    }

    /// How much has been counted below a directory.
    pub fn usage(&self, inode: u64) -> Result<UsageRecord, StateError> {
        Ok(self.record(Family::Usage, &inode_key(inode))?.unwrap_or_default())
    }

    /// Up to `limit` inodes beyond this one, of all mounts, in the order of their ids.
    pub fn inodes_after(&self, after: u64, limit: usize) -> Result<Vec<(u64, InodeRecord)>, StateError> {
        let start = inode_key(after.saturating_add(1));
        let items = self.records_from(Family::Inode, &start).take(limit);
        let inode = |item: Result<super::Pair, rocksdb::Error>| {
            let (key, value) = item?;
            Ok((leading_id(&key).unwrap_or_default(), decode(&value, || "an inode".to_owned())?))
        };
        items.map(inode).collect()
    }

    /// The quotas that bound what is in a directory, nearest first; for inode 0, all of them.
    pub fn quotas(&self, directory: u64) -> Result<Quotas, StateError> {
        let counters = self.counters()?;
        let counted = counters.counted == usage::ALL;
        let mut quotas = Vec::new();
        if counters.quotas == 0 {
            return Ok(Quotas { quotas, counted });
        }
        if directory == 0 {
            for key in self.keys(Family::Quota) {
                quotas.extend(self.quota_of(leading_id(&key?).unwrap_or_default())?);
            }
            return Ok(Quotas { quotas, counted });
        }
        for at in self.above(directory)? {
            quotas.extend(self.quota_of(at)?);
        }
        Ok(Quotas { quotas, counted })
    }

    /// A directory and those above it in its mount, nearest first.
    pub fn above(&self, directory: u64) -> Result<Vec<u64>, StateError> {
        let (mut above, mut at) = (Vec::new(), directory);
        for _ in 0..DEPTH_MAX {
            let Some(record) = self.inode(at)?.filter(|record| record.mount_id != 0) else { break };
            above.push(at);
            at = record.parent;
        }
        Ok(above)
    }

    fn quota_of(&self, inode: u64) -> Result<Option<Quota>, StateError> {
        let Some(QuotaRecord { max_bytes, max_inodes }) = self.quota(inode)? else { return Ok(None) };
        let UsageRecord { bytes, inodes } = self.usage(inode)?;
        Ok(Some(Quota { inode, path: self.path(inode)?, max_bytes, max_inodes, bytes, inodes }))
    }

    /// The path of a directory in the namespace, as readable as it can be.
    pub(super) fn path(&self, directory: u64) -> Result<String, StateError> {
        let (mut names, mut at): (Vec<Bytes>, u64) = (Vec::new(), directory);
        for _ in 0..DEPTH_MAX {
            match self.inode(at)? {
                Some(record) if record.parent != 0 => {
                    names.push(record.name);
                    at = record.parent;
                }
                _ => break,
            }
        }
        Ok(names.iter().rev().map(|name| format!("/{}", String::from_utf8_lossy(name))).collect())
    }
}
