//! Mounts that come, change and go.

use std::sync::Arc;

use cavern_consensus::Proposer;
use cavern_proto::master::Mount;
use cavern_ufs::Ufs;

use super::attach::{normalized, not_mounted};
use super::claim::{Claims, TakeOver};
use crate::background::TaskGroup;
use crate::error::WorkError;
use crate::namespace::Lookups;
use crate::persist::Persistence;

/// What changes of mounts work with. Cheap to clone.
#[derive(Clone)]
pub struct MountChanges {
    pub lookups: Lookups,
    pub persistence: Arc<Persistence>,
    pub proposer: Proposer,
    pub claims: Claims,
    /// What the log has of a change is done here as well, though whoever has asked for it may be gone by then.
    pub tasks: Arc<TaskGroup>,
}

impl MountChanges {
    /// Has all of a mount compared with its bucket in the background, unless it is being indexed.
    ///
    /// # Errors
    /// [`WorkError::NotFound`] where nothing is mounted, [`WorkError::Refused`] for an fs-mode mount that is indexed.
    pub async fn index(&self, path: &str) -> Result<Mount, WorkError> {
        let path = normalized(path)?;
        let (_, mounts) = self.lookups.mounts.table()?;
        let mount = mounts.iter().find(|mount| mount.path == path).ok_or_else(|| not_mounted(&path))?;
        let open = self.lookups.mounts.get(mount.id)?;
        self.lookups.listings.restart_index(open.clone()).await?;
        Ok(open.mount.clone())
    }

    /// Gives up the claim of a mount that is gone, or was not made, also while this master ceases to lead: the next
    /// leader does not know of it.
    pub(super) async fn give_up_claim(&self, ufs: &Ufs, mount: &Mount) {
        let (claims, ufs, mount) = (self.claims.clone(), ufs.clone(), mount.clone());
        self.tasks.finish(async move { claims.release(&ufs, &mount).await }).await;
    }
}

/// What is to be done about a mount request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MountPolicy {
    /// It is verified only.
    Check(TakeOver),
    Record(TakeOver),
}

/// What becomes of changes that the bucket of an fs-mode mount lacks when it is detached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DetachPolicy {
    /// They are written, or the mount stays.
    Keep,
    Discard,
}
