//! Is this mount there for this client, and may it change it? What the rules of the mount say ([`Mount::access_of`])
//! becomes the answer of a read here: mounts that are not there are answered for as if there were none, and inodes in
//! them as those that nobody has made.

use std::collections::HashSet;
use std::sync::Arc;

use cavern_proto::ClientAccess;
use cavern_proto::master::{Mount, View, WriteType};

use super::{Lookups, components};
use crate::error::WorkError;
use crate::mounts::OpenMount;

/// A mount is not there for a client.
struct Hidden;

impl Lookups {
    /// Whether a mount is there for the client, by what is recorded of it: it need not be one that can be opened. What
    /// is above mounts (0) is there for all.
    pub(super) fn can_see(&self, mount_id: u32) -> bool {
        self.visible(mount_id).is_ok()
    }

    /// Whether the mount that a call is about is there for the client: it is an operation in that mount.
    fn enters(&self, mount_id: u32) -> bool {
        match self.visible(mount_id) {
            Ok(Some(mount)) => {
                self.is_in(&mount);
                true
            }
            Ok(None) => true,
            Err(Hidden) => false,
        }
    }

    /// A mount that was looked at for the client; `None` where that was not needed.
    fn visible(&self, mount_id: u32) -> Result<Option<Mount>, Hidden> {
        let Some(client) = self.client.as_ref().filter(|_| mount_id != 0) else { return Ok(None) };
        let mount = self.mounts.recorded(mount_id).map_err(|_| Hidden)?;
        if mount.access_of(client).can_see() { Ok(Some(mount)) } else { Err(Hidden) }
    }

    /// The mount of an inode, if it is there for the client.
    ///
    /// # Errors
    /// [`WorkError::NotFound`].
    pub(super) fn mount_of(&self, mount_id: u32, inode: u64) -> Result<Arc<OpenMount>, WorkError> {
        if self.enters(mount_id) { self.mounts.get(mount_id) } else { Err(WorkError::Gone(inode)) }
    }

    /// Refuses an inode of a mount that is not there for the client, and one that is nowhere.
    ///
    /// # Errors
    /// [`WorkError::NotFound`].
    pub async fn check_mount_access(&self, inode: u64) -> Result<(), WorkError> {
        match self.hidden(&[inode]).await?.is_empty() {
            true => Ok(()),
            false => Err(WorkError::Gone(inode)),
        }
    }

    /// Those of some inodes that are in mounts which are not there for the client, and those that are nowhere: who may
    /// not see a mount does not tell the two apart. 0 is no inode, and never one of them.
    pub async fn hidden(&self, inodes: &[u64]) -> Result<HashSet<u64>, WorkError> {
        if self.client.is_none() || inodes.is_empty() {
            return Ok(HashSet::new());
        }
        let mut hidden = HashSet::new();
        for (inode, mount_id) in inodes.iter().zip(self.places_of(inodes.to_vec()).await?) {
            if *inode != 0 && !mount_id.is_some_and(|mount_id| self.enters(mount_id)) {
                hidden.insert(*inode);
            }
        }
        Ok(hidden)
    }

    /// Whether a view is there for the client: both its mount and the one that has its object are, and limit none of
    /// its users, whom a frozen image does not know.
    pub fn can_see_view(&self, view: &View) -> bool {
        let limits = |mount: &Mount| self.client.as_ref().is_some_and(|client| mount.limits_of(client).is_some());
        [view.mount_id, view.store_mount_id].into_iter().all(|mount_id| match self.visible(mount_id) {
            Ok(mount) => !mount.as_ref().is_some_and(limits),
            Err(Hidden) => false,
        })
    }

    /// Whether a view that a call is about is there for the client: it is an operation in the view's mount.
    pub fn enters_view(&self, view: &View) -> bool {
        self.can_see_view(view) && self.enters(view.mount_id)
    }

    /// The mounts of some inodes, in their order; 0 for those that are in none, and that are not there.
    pub(super) async fn mounts_of(&self, inodes: Vec<u64>) -> Result<Vec<u32>, WorkError> {
        Ok(self.places_of(inodes).await?.into_iter().map(Option::unwrap_or_default).collect())
    }

    /// The mounts of some inodes, with `None` for those that are not there.
    async fn places_of(&self, inodes: Vec<u64>) -> Result<Vec<Option<u32>>, WorkError> {
        let mounts = self.reader.look(move |tables| {
            let mount = |inode: &u64| Ok(tables.inode(*inode)?.map(|record| record.mount_id));
            inodes.iter().map(mount).collect::<Result<Vec<_>, WorkError>>()
        });
        mounts.await
    }

    /// Refuses what a refresh may change in the mount around its path ([`Self::check_path_access`]), if the client may
    /// only read it: of fs-mode mounts it takes in what others have put into the bucket, and takes out what they have
    /// deleted there.
    ///
    /// # Errors
    /// [`WorkError::Denied`].
    pub fn check_refresh(&self, mount: Option<&Mount>) -> Result<(), WorkError> {
        match mount {
            Some(mount) if mount.write_type() == WriteType::FsMode => self.check_change(mount),
            _ => Ok(()),
        }
    }

    /// Refuses what would drop, recall or change something of these inodes, if the client may only read their mounts.
    ///
    /// # Errors
    /// [`WorkError::Denied`].
    pub async fn check_mount_change(&self, inodes: &[u64]) -> Result<(), WorkError> {
        if self.client.is_none() {
            return Ok(());
        }
        let mounts: HashSet<u32> = self.mounts_of(inodes.to_vec()).await?.into_iter().collect();
        mounts.into_iter().try_for_each(|mount_id| match self.visible(mount_id) {
            Ok(Some(mount)) => self.check_change(&mount),
            _ => Ok(()),
        })
    }

    /// Refuses the wish to hold a directory where the client comes to hold none: others would wait while it is judged.
    ///
    /// # Errors
    /// [`WorkError::NotFound`] where it is in no mount that is there for the client, [`WorkError::Denied`] where the
    /// client may only read, [`WorkError::Refused`] where its users are limited, or the mount is not in fs-mode.
    pub async fn check_wish(&self, directory: u64) -> Result<(), WorkError> {
        let mount_id = self.places_of(vec![directory]).await?.into_iter().flatten().find(|id| self.can_see(*id));
        let mount = self.mounts.recorded(mount_id.ok_or(WorkError::Gone(directory))?)?;
        self.check_change(&mount)?;
        let is_limited = self.client.as_ref().is_some_and(|client| mount.limits_of(client).is_some());
        if is_limited || mount.write_type() != WriteType::FsMode {
            return Err(WorkError::Refused(format!("no directory of {} is delegated to this client", mount.path)));
        }
        Ok(())
    }

    /// Refuses to have all of a mount recalled for a client that may set neither quotas nor times to live there: for
    /// whatever else is looked at or changed directories are recalled by themselves. `client`: by its certificate,
    /// also where all mounts are there for all; `None` for whoever no rule binds.
    ///
    /// # Errors
    /// [`WorkError::Denied`].
    pub(super) fn check_mount_recall(&self, mount_id: u32, client: Option<&str>) -> Result<(), WorkError> {
        let Some(client) = client.filter(|_| mount_id != 0) else { return Ok(()) };
        let mount = self.mounts.recorded(mount_id)?;
        if mount.may_set_quotas(client) || mount.may_set_ttls(client) {
            return Ok(());
        }
        Err(WorkError::Denied(format!(
            "the client \"{client}\" has not all of {} recalled, since it may set neither quotas nor times to live \
             there: that takes a certificate of the role admin, or the option quotas or ttl in the rule of the mount \
             that fits the client (cv mount update --client)",
            mount.path
        )))
    }

    fn check_change(&self, mount: &Mount) -> Result<(), WorkError> {
        match self.client.as_ref().map(|client| (client, mount.access_of(client))) {
            None | Some((_, ClientAccess::Full)) => Ok(()),
            Some((client, _)) => {
                Err(WorkError::Denied(format!("{} is there for the client \"{client}\" to be read", mount.path)))
            }
        }
    }

    /// Refuses a path that is not within a mount which is there for the client: what is above mounts has a part in all
    /// of them. A path in a mount that is not there is refused as one that leads nowhere. Gives the mount around, if
    /// rules are to be looked at.
    ///
    /// # Errors
    /// [`WorkError::NotFound`] and [`WorkError::Denied`].
    pub fn check_path_access(&self, path: &str) -> Result<Option<Mount>, WorkError> {
        let Some(client) = &self.client else { return Ok(None) };
        let names = components(path)?;
        let mut is_above = names.is_empty();
        for mount in self.mounts.all_recorded()?.into_iter().filter(|mount| mount.access_of(client).can_see()) {
            let (is_around, is_below) = {
                let at = components(&mount.path)?;
                (names.starts_with(&at), at.starts_with(&names))
            };
            if is_around {
                return Ok(Some(mount));
            }
            is_above |= is_below;
        }
        if !is_above {
            return Err(WorkError::NotFound(format!("{path} is not there")));
        }
        Err(WorkError::Denied(format!(
            "{path} is in no mount: where mounts are not there for all clients, only an admin is told of what is above \
             them"
        )))
    }
}
