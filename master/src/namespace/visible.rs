//! What is there for the client that asks: mounts that are not, are answered for as if there were none.

use std::collections::HashSet;
use std::sync::Arc;

use super::{Lookups, components};
use crate::MasterError;
use crate::mounts::OpenMount;

impl Lookups {
    /// Whether a mount is there for the client.
    pub(super) fn can_see(&self, mount: &OpenMount) -> bool {
        self.client.as_ref().is_none_or(|client| mount.mount.access_of(client).can_see())
    }

    /// The mount of an inode, if it is there for the client.
    ///
    /// # Errors
    /// [`MasterError::NotFound`].
    pub(super) fn mount_of(&self, mount_id: u32, inode: u64) -> Result<Arc<OpenMount>, MasterError> {
        let mount = self.mounts.get(mount_id)?;
        if self.can_see(&mount) { Ok(mount) } else { Err(MasterError::gone(inode)) }
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
            if mount_id != 0 && !self.can_see(&*self.mounts.get(mount_id)?) {
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
        if self.client.is_none() {
            return Ok(());
        }
        let names = components(path)?;
        for mount in self.mounts.ids()? {
            let mount = self.mounts.get(mount)?;
            if names.starts_with(&components(&mount.mount.path)?) {
                return match self.can_see(&mount) {
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
