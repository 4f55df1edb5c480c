//! Quotas of directories: how many bytes and inodes there may be below one.
//!
//! A change that would make one exceeded is refused; what is there already stays, and may become less. `usage` keeps
//! the figures that are compared.

use std::collections::HashSet;

use bytes::Bytes;
use cavern_proto::master::{Mount, RenameMode, RenameName, SetQuota};
use cavern_proto::record::{InodeRecord, QuotaRecord};
use rustix::io::Errno;

use super::{MutationContext, MutationError, refuse};
use crate::error::StateError;
use crate::records::{inode_key, is_directory, links};
use crate::tables::DEPTH_MAX;
use crate::usage::{self, UsageDelta};
use crate::{Family, Transaction};

impl MutationContext<'_, '_> {
    /// Sets a quota, changes it, or ends it. With the first one counting begins.
    pub(super) fn set_quota(&mut self, set: &SetQuota) -> Result<u64, MutationError> {
        self.directory(set.inode)?;
        self.check_root("sets how much may be in a directory")?;
        self.check_setting(Mount::may_set_quotas, "set quotas", "quotas")?;
        self.check_nothing_held()?;
        let known = self.transaction.before().quota(set.inode)?;
        let mut quota = known.unwrap_or_default();
        quota.max_bytes = set.max_bytes.unwrap_or(quota.max_bytes);
        quota.max_inodes = set.max_inodes.unwrap_or(quota.max_inodes);
        if quota == QuotaRecord::default() {
            drop_quota(self.transaction, set.inode)?;
            return Ok(set.inode);
        }
        let counters = &mut self.transaction.counters;
        counters.quotas += u64::from(known.is_none());
        if counters.counted == usage::NOTHING {
            counters.counted = usage::BEGUN;
        }
        self.transaction.put(Family::Quota, &inode_key(set.inode), &quota);
        Ok(set.inode)
    }

    /// Refuses what would exceed the quota of a directory, or of one above it, if this much more were in it.
    pub(super) fn check_quotas(&mut self, directory: u64, growth: UsageDelta) -> Result<(), MutationError> {
        self.check_quotas_below(directory, growth, &HashSet::new())
    }

    /// The same up to the first directory of a set, in which nothing becomes more.
    fn check_quotas_below(
        &mut self,
        directory: u64,
        growth: UsageDelta,
        end: &HashSet<u64>,
    ) -> Result<(), MutationError> {
        if self.transaction.counters.quotas == 0 || growth.bytes <= 0 && growth.inodes <= 0 {
            return Ok(());
        }
        // It has been answered: where a directory was held, there was no quota when it was made.
        if self.is_answered {
            return Ok(());
        }
        for at in self.above(directory)?.into_iter().take_while(|at| !end.contains(at)) {
            let Some(quota) = self.transaction.before().quota(at)? else { continue };
            let usage = self.transaction.before().usage(at)?;
            let exceeds =
                |max: u64, used: u64, more: i64| max > 0 && more > 0 && used.saturating_add_signed(more) > max;
            if exceeds(quota.max_bytes, usage.bytes, growth.bytes) {
                let (max, used) = (quota.max_bytes, usage.bytes);
                return refuse(Errno::DQUOT, format!("{used} of {max} bytes are used that a directory above may have"));
            }
            if exceeds(quota.max_inodes, usage.inodes, growth.inodes) {
                let (max, used) = (quota.max_inodes, usage.inodes);
                return refuse(
                    Errno::DQUOT,
                    format!("{used} of {max} inodes are used that a directory above may have"),
                );
            }
        }
        Ok(())
    }

    /// A file becomes longer.
    pub(super) fn check_growth(&mut self, record: &InodeRecord, length: u64) -> Result<(), MutationError> {
        // What has no name is in no directory.
        if record.unlinked || length <= record.size {
            return Ok(());
        }
        let bytes = i64::try_from(length - record.size).unwrap_or(i64::MAX);
        self.check_quotas(record.parent, UsageDelta { bytes, inodes: 0 })
    }

    /// An inode gets another name, and another one loses that name, or gets the old one in exchange.
    pub(super) fn check_move(
        &mut self,
        rename: &RenameName,
        moved: (u64, &InodeRecord),
        replaced: Option<(u64, &InodeRecord)>,
    ) -> Result<(), MutationError> {
        let (from, to) = (rename.parent, rename.new_parent);
        if self.transaction.counters.quotas == 0 || from == to {
            return Ok(());
        }
        let is_exchange = rename.mode() == RenameMode::Exchange;
        let comes = self.weight_at((from, &rename.name), moved)?;
        let goes = match replaced {
            // It has other names, and counts by one of those then.
            Some((_, record)) if !is_exchange && !is_directory(record) && links(record) > 1 => UsageDelta::default(),
            Some(replaced) => self.weight_at((to, &rename.new_name), replaced)?,
            None => UsageDelta::default(),
        };
        let above_from: HashSet<u64> = self.above(from)?.into_iter().collect();
        self.check_quotas_below(to, comes - goes, &above_from)?;
        if is_exchange {
            let above_to: HashSet<u64> = self.above(to)?.into_iter().collect();
            self.check_quotas_below(from, goes - comes, &above_to)?;
        }
        Ok(())
    }

    /// What an inode weighs by a name of it: nothing where it counts by another one.
    fn weight_at(&self, name: (u64, &Bytes), (inode, record): (u64, &InodeRecord)) -> Result<UsageDelta, StateError> {
        if (record.parent, &record.name) == name {
            return usage::weight(self.transaction, inode, record);
        }
        Ok(UsageDelta::default())
    }

    /// A directory and those above it in its mount, nearest first.
    pub(super) fn above(&mut self, directory: u64) -> Result<Vec<u64>, StateError> {
        let (mut above, mut at) = (Vec::new(), directory);
        for _ in 0..DEPTH_MAX {
            match self.transaction.inode(at)? {
                Some(record) if record.mount_id != 0 => {
                    above.push(at);
                    at = record.parent;
                }
                _ => break,
            }
        }
        Ok(above)
    }
}

/// Ends the quota of a directory, if it has one; with the last one the figures go.
pub(super) fn drop_quota(transaction: &mut Transaction<'_>, inode: u64) -> Result<(), StateError> {
    if transaction.counters.quotas > 0 && transaction.before().quota(inode)?.is_some() {
        transaction.delete(Family::Quota, &inode_key(inode));
        transaction.counters.quotas -= 1;
        if transaction.counters.quotas == 0 {
            usage::forget_all(transaction);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
