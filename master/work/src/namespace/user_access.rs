//! May this user read this inode? Asked in mounts that limit the users of the client that asks.

use cavern_proto::master::{Mount, User};
use cavern_state::{Tables, may_access, may_have_layout};

use super::Lookups;
use crate::error::WorkError;

impl Lookups {
    /// Whether a user may do all of this (of 0o7) with an inode.
    pub async fn may_access(&self, inode: u64, user: Option<&User>, wanted: u32) -> Result<bool, WorkError> {
        self.permits(inode, user, move |tables, mount, user| Ok(may_access(tables, (mount, user), inode, &[wanted])?))
            .await
    }

    /// Refuses to tell a user where the bytes of a file are that he may neither read nor write.
    ///
    /// # Errors
    /// [`WorkError::Denied`].
    pub async fn check_layout(&self, inode: u64, user: Option<&User>) -> Result<(), WorkError> {
        if self.may_have_layout(inode, user).await? {
            return Ok(());
        }
        let who = user.map_or("nobody".to_owned(), |user| format!("user {}", user.uid));
        Err(WorkError::Denied(format!("inode {inode} is not there to be read by {who}")))
    }

    /// Those of some files that are there for the client, and of which a user may be told.
    pub async fn readable(&self, inodes: Vec<u64>, user: Option<&User>) -> Result<Vec<u64>, WorkError> {
        if self.client.is_none() {
            return Ok(inodes);
        }
        let hidden = self.hidden(&inodes).await?;
        let mut readable = Vec::with_capacity(inodes.len());
        for inode in inodes {
            if !hidden.contains(&inode) && self.may_have_layout(inode, user).await? {
                readable.push(inode);
            }
        }
        Ok(readable)
    }

    async fn may_have_layout(&self, inode: u64, user: Option<&User>) -> Result<bool, WorkError> {
        let session = self.asker;
        self.permits(inode, user, move |tables, mount, user| {
            Ok(may_have_layout(tables, (mount, user), inode, session)?)
        })
        .await
    }

    /// Whether `check` says so of a user as he counts in the mount of an inode; true where users are not limited.
    async fn permits(
        &self,
        inode: u64,
        user: Option<&User>,
        check: impl Fn(Tables<'_>, &Mount, &User) -> Result<bool, WorkError> + Clone + Send + 'static,
    ) -> Result<bool, WorkError> {
        let Some(client) = &self.client else { return Ok(true) };
        let mount_id = self.reader.look(move |tables| Ok(tables.inode(inode)?.map_or(0, |record| record.mount_id)));
        let mount_id = mount_id.await?;
        if mount_id == 0 {
            return Ok(true);
        }
        let mount = self.mounts.recorded(mount_id)?;
        let Some(limits) = mount.limits_of(client) else { return Ok(true) };
        let user = limits.mapped(user);
        self.reader.look(move |tables| check(tables, &mount, &user)).await
    }
}
