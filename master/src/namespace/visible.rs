//! What is there for the client that asks: mounts that are not, are answered for as if there were none.

use std::collections::HashSet;
use std::sync::Arc;

use super::{Lookups, components};
use crate::MasterError;
use crate::mounts::OpenMount;

impl Lookups {
    /// Whether a mount is there for the client, by what is recorded of it: it need not be one that can be opened. What
    /// is above mounts (0) is there for all.
    pub(super) fn can_see(&self, mount_id: u32) -> bool {
        let is_there = |client: &Arc<str>| {
            let recorded = self.mounts.recorded(mount_id);
            recorded.is_ok_and(|mount| mount.access_of(client).can_see())
        };
        self.client.as_ref().is_none_or(|client| mount_id == 0 || is_there(client))
    }

    /// The mount of an inode, if it is there for the client.
    ///
    /// # Errors
    /// [`MasterError::NotFound`].
    pub(super) fn mount_of(&self, mount_id: u32, inode: u64) -> Result<Arc<OpenMount>, MasterError> {
        if self.can_see(mount_id) { self.mounts.get(mount_id) } else { Err(MasterError::gone(inode)) }
    }

    /// Refuses an inode of a mount that is not there for the client. What does not exist at all is somebody else's to
    /// refuse.
    ///
    /// # Errors
    /// [`MasterError::NotFound`].
    pub async fn check_visible(&self, inode: u64) -> Result<(), MasterError> {
        match self.hidden(&[inode]).await?.is_empty() {
            true => Ok(()),
            false => Err(MasterError::gone(inode)),
        }
    }

    /// Those of some inodes that are in mounts which are not there for the client.
    pub async fn hidden(&self, inodes: &[u64]) -> Result<HashSet<u64>, MasterError> {
        if self.client.is_none() || inodes.is_empty() {
            return Ok(HashSet::new());
        }
        let asked = inodes.to_vec();
        let mounts = self.reader.look(move |tables| {
            let mount = |inode: &u64| Ok(tables.inode(*inode)?.map_or(0, |record| record.mount_id));
            asked.iter().map(mount).collect::<Result<Vec<_>, MasterError>>()
        });
        let mut hidden = HashSet::new();
        for (inode, mount_id) in inodes.iter().zip(mounts.await?) {
            if !self.can_see(mount_id) {
                hidden.insert(*inode);
            }
        }
        Ok(hidden)
    }

    /// Refuses a path that is not within a mount which is there for the client: what is above mounts has a part in all
    /// of them.
    ///
    /// # Errors
    /// [`MasterError::NotFound`] and [`MasterError::Denied`].
    pub fn check_path(&self, path: &str) -> Result<(), MasterError> {
        let Some(client) = &self.client else { return Ok(()) };
        let names = components(path)?;
        for mount in self.mounts.all_recorded()? {
            if names.starts_with(&components(&mount.path)?) {
                return match mount.access_of(client).can_see() {
                    true => Ok(()),
                    false => Err(MasterError::NotFound(format!("{path} is not there"))),
                };
            }
        }
        Err(MasterError::Denied(format!(
            "{path} is in no mount: where mounts are not there for all clients, only an admin is told of what is above \
             them"
        )))
    }
}
