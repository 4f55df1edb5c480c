//! How fast a client goes on in a mount whose rules say so.

use std::collections::HashMap;
use std::time::Duration;

use cavern_proto::master::mutation::Change;
use cavern_proto::master::{Mount, Mutation};
use cavern_security::Tenant;

use super::Lookups;
use crate::error::WorkError;

impl Lookups {
    /// The call is an operation in a mount, if it has been in none before.
    pub(super) fn is_in(&self, mount: &Mount) {
        if let (Some(charge), Some(client)) = (&self.charge, &self.client) {
            charge.is_in(mount.id, mount.rates_of(client).0);
        }
    }

    /// How many operations in a second the client may have in a mount; 0 for any number.
    pub fn operations_in(&self, mount_id: u32) -> u64 {
        match &self.client {
            Some(client) if mount_id != 0 && self.mounts.have_rates() => {
                self.mounts.recorded(mount_id).map_or(0, |mount| mount.rates_of(client).0)
            }
            _ => 0,
        }
    }

    /// Counts each of some changes as an operation in its mount, and says how long they have to wait for what the
    /// client has done there before. What is about something that is not there yet counts with what comes before it.
    ///
    /// # Errors
    /// Those of reading the state.
    pub async fn pace(&self, tenant: &Tenant, changes: &[Mutation]) -> Result<Duration, WorkError> {
        if self.client.is_none() || !self.mounts.have_rates() {
            return Ok(Duration::ZERO);
        }
        let inodes = changes.iter().filter_map(|change| subject(change.change.as_ref()?)).collect();
        let (mut operations, mut last) = (HashMap::<u32, u64>::new(), 0);
        for mount_id in self.mounts_of(inodes).await? {
            last = if mount_id == 0 { last } else { mount_id };
            *operations.entry(last).or_default() += 1;
        }
        let wait = |(mount_id, operations): (u32, u64)| {
            let rate = tenant.mount_rates.of(mount_id, self.operations_in(mount_id));
            rate.map_or(Duration::ZERO, |rate| rate.take(operations))
        };
        Ok(operations.into_iter().map(wait).max().unwrap_or_default())
    }
}

/// An inode that shows in which mount a change is; `None` for what programs wait for nowhere.
fn subject(change: &Change) -> Option<u64> {
    match change {
        Change::Create(create) => Some(create.parent),
        Change::Link(link) => Some(link.parent),
        Change::Remove(remove) => Some(remove.parent),
        Change::Rename(rename) | Change::RenameWhiteout(rename) => Some(rename.parent),
        Change::SetAttr(set) => Some(set.inode),
        Change::SetXattr(set) => Some(set.inode),
        Change::RemoveXattr(remove) => Some(remove.inode),
        Change::Commit(commit) => Some(commit.inode),
        Change::SetLock(set) => Some(set.inode),
        Change::SetQuota(set) => Some(set.inode),
        Change::SetTtl(set) => Some(set.inode),
        Change::OpenToWrite(open) => Some(open.inode),
        Change::AcquireDelegation(asked) => Some(asked.inode),
        Change::AddOpenRef(_)
        | Change::DropOpenRef(_)
        | Change::SetOpenRefs(_)
        | Change::ReserveInodes(_)
        | Change::ReturnDelegations(_) => None,
    }
}
