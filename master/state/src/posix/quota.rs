//! Rules of directories: how many bytes and inodes there may be below one (quotas), and how long files live there.
//!
//! A change that would make a quota exceeded is refused; what is there already stays, and may become less. `usage`
//! keeps the figures that are compared.

use std::collections::HashSet;

use bytes::Bytes;
use cavern_proto::master::{Mount, RenameMode, RenameName, SetQuota, SetTtl, TtlAction};
use cavern_proto::record::{InodeRecord, QuotaRecord, TtlRecord};
use rustix::io::Errno;

use super::context::{Checked, MutationContext, refuse};
use crate::error::Result;
use crate::index::usage::{self, UsageDelta, signed};
use crate::records::{is_directory, links};
use crate::schema;

impl MutationContext<'_, '_> {
    /// Sets a quota, changes it, or ends it. With the first one counting begins.
    pub fn set_quota(&mut self, set: &SetQuota) -> Checked<u64> {
        self.directory(set.inode)?;
        self.check_root("sets how much may be in a directory")?;
        self.check_setting(Mount::may_set_quotas, "set quotas", "quotas")?;
        self.check_no_delegations()?;
        let known = self.tx.before().get(schema::Quotas, set.inode)?;
        let mut quota = known.unwrap_or_default();
        quota.max_bytes = set.max_bytes.unwrap_or(quota.max_bytes);
        quota.max_inodes = set.max_inodes.unwrap_or(quota.max_inodes);
        if quota == QuotaRecord::default() {
            usage::drop_quota(self.tx, set.inode)?;
            return Ok(set.inode);
        }
        let counters = &mut self.tx.counters;
        counters.quotas += u64::from(known.is_none());
        if counters.counted == usage::NOTHING {
            counters.counted = usage::BEGUN;
        }
        self.tx.put(schema::Quotas, set.inode, &quota);
        Ok(set.inode)
    }

    /// Sets the rule of a directory, or ends it.
    pub fn set_ttl(&mut self, set: &SetTtl) -> Checked<u64> {
        self.directory(set.inode)?;
        self.check_root("sets how long files live")?;
        self.check_setting(Mount::may_set_ttls, "set how long files live", "ttl")?;
        self.check_no_delegations()?;
        let Ok(action) = TtlAction::try_from(set.action) else {
            return refuse(Errno::INVAL, "an action that this master does not know");
        };
        if set.seconds == 0 {
            self.tx.delete(schema::Ttls, set.inode);
        } else {
            let rule = TtlRecord { seconds: set.seconds, action: action as i32 };
            self.tx.put(schema::Ttls, set.inode, &rule);
        }
        Ok(set.inode)
    }

    /// Refuses what would exceed the quota of a directory, or of one above it, if this much more were in it.
    pub fn check_quotas(&self, directory: u64, growth: UsageDelta) -> Checked {
        self.check_quotas_below(directory, growth, &HashSet::new())
    }

    /// Checks the quotas up to the first directory of a set, in which nothing becomes more.
    fn check_quotas_below(&self, directory: u64, growth: UsageDelta, end: &HashSet<u64>) -> Checked {
        if self.tx.counters.quotas == 0 || growth.bytes <= 0 && growth.inodes <= 0 {
            return Ok(());
        }
        // It has been answered: where a directory was held, there was no quota when it was made.
        if self.caller.is_write_back {
            return Ok(());
        }
        for at in self.tx.now().above(directory)?.into_iter().take_while(|at| !end.contains(at)) {
            let Some(quota) = self.tx.before().get(schema::Quotas, at)? else { continue };
            let usage = self.tx.before().usage(at)?;
            let bytes = ("bytes", quota.max_bytes, usage.bytes, growth.bytes);
            let inodes = ("inodes", quota.max_inodes, usage.inodes, growth.inodes);
            for (what, max, used, more) in [bytes, inodes] {
                if max > 0 && more > 0 && used.saturating_add_signed(more) > max {
                    let reason = format!("{used} of {max} {what} are used that a directory above may have");
                    return refuse(Errno::DQUOT, reason);
                }
            }
        }
        Ok(())
    }

    /// A file becomes longer.
    pub fn check_growth(&self, record: &InodeRecord, length: u64) -> Checked {
        self.check_more_bytes(record, length.saturating_sub(record.size))
    }

    /// The length of an inode, or its extended attributes, take so many bytes more.
    pub fn check_more_bytes(&self, record: &InodeRecord, bytes: u64) -> Checked {
        // What has no name is in no directory.
        if record.unlinked || bytes == 0 {
            return Ok(());
        }
        self.check_quotas(record.parent, UsageDelta { bytes: signed(bytes), inodes: 0 })
    }

    /// An inode gets another name, and another one loses that name, or gets the old one in exchange.
    pub fn check_move(
        &self,
        rename: &RenameName,
        moved: (u64, &InodeRecord),
        replaced: Option<(u64, &InodeRecord)>,
    ) -> Checked {
        let (from, to) = (rename.parent, rename.new_parent);
        if self.tx.counters.quotas == 0 || from == to {
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
        let [above_from, above_to] = [from, to].map(|directory| self.tx.now().above(directory));
        self.check_quotas_below(to, comes - goes, &above_from?.into_iter().collect())?;
        if is_exchange {
            self.check_quotas_below(from, goes - comes, &above_to?.into_iter().collect())?;
        }
        Ok(())
    }

    /// What an inode weighs by a name of it: nothing where it counts by another one.
    fn weight_at(&self, name: (u64, &Bytes), (inode, record): (u64, &InodeRecord)) -> Result<UsageDelta> {
        if (record.parent, &record.name) == name {
            return usage::weight(self.tx, inode, record);
        }
        Ok(UsageDelta::default())
    }
}

#[cfg(test)]
mod tests;
