//! Reads of what is delegated to other sessions: they wait until it is returned, so they find everything that was
//! answered before they began.
//!
//! A directory that is looked into is recalled before the read. What is found is known only then: if another session
//! holds its directory, or itself, that is recalled and the read made once more. So it is when anything was returned
//! during the read, which may have come too early for what its holder had answered.

use std::time::Duration;

use cavern_proto::master::{Entry, Kind};

use super::Lookups;
use crate::error::WorkError;

/// Reads of one question. What is found is recalled once each; no more than some follow each other.
const READS_MAX: usize = 100;
/// Of so many seconds a client has whole mounts recalled in one: the others hold what they write to in the rest.
const SECONDS_OF_RECALL: u64 = 10;
/// A client waits no longer for those before.
const RECALL_PATIENCE: Duration = Duration::from_secs(30);

/// A directory that somebody may hold; 0 for none.
pub(super) type DirectoryId = u64;

/// Where an entry is, with the directory that counts for it ([`Lookups::with_attributes`]).
pub(super) fn places_of((entry, shown_in): &(Entry, DirectoryId)) -> Vec<DirectoryId> {
    vec![entry.parent, *shown_in, entry.attr.map_or(0, |attr| attr.inode)]
}

impl Lookups {
    /// Reads what is delegated to nobody but the asker: neither the directory that is looked into, nor what `places`
    /// says of the answer.
    ///
    /// # Errors
    /// Those of `read`; [`WorkError::NotFound`] where the directory is not there for the client;
    /// [`WorkError::Deadline`] when a session returns nothing, [`WorkError::Overloaded`] after too many reads.
    pub async fn read_after_recall<T, R>(
        &self,
        directory: DirectoryId,
        read: impl Fn() -> R,
        places: impl Fn(&T) -> Vec<DirectoryId>,
    ) -> Result<T, WorkError>
    where
        R: Future<Output = Result<T, WorkError>>,
    {
        // Nothing is recalled for whoever may not look there.
        self.check_mount_access(directory).await?;
        let held = self.recalls.delegations();
        for _ in 0..READS_MAX {
            self.recalls.recall(directory, self.asker).await?;
            let moment = held.moment();
            let answer = read().await;
            // It may be held since it was looked whether it is.
            let found_in = match &answer {
                _ if held.is_empty() => Vec::new(),
                Ok(found) => places(found).into_iter().chain([directory]).collect(),
                Err(_) => vec![directory],
            };
            let is_held = |place: &DirectoryId| held.other_holder(*place, self.asker).is_some();
            let others: Vec<DirectoryId> = found_in.into_iter().filter(is_held).collect();
            if !others.is_empty() {
                self.recalls.recall_all(&others, self.asker).await?;
            } else if held.moment() == moment {
                return answer;
            }
        }
        Err(WorkError::Overloaded("other clients get and return delegations all the time: try again".into()))
    }

    /// Has everything let go of in the mount that an inode is in; in all mounts, for a directory above them.
    ///
    /// # Errors
    /// [`WorkError::Deadline`] when a session returns nothing, [`WorkError::Overloaded`] where the client has had it
    /// done very often.
    pub async fn recall_mount_of(&self, inode: u64) -> Result<(), WorkError> {
        for mount_id in self.delegating_mounts_of(inode).await? {
            self.recalls.recall_mount(mount_id).await?;
        }
        Ok(())
    }

    /// Has everything let go of in the mount that an inode is in, for whoever has to set something that is about all of
    /// it; `client` as in [`Self::check_mount_recall`].
    ///
    /// # Errors
    /// [`WorkError::NotFound`] where the inode is nowhere for the client, those of [`Self::check_mount_change`] and
    /// [`Self::check_mount_recall`], and as [`Self::recall_mount_of`].
    pub async fn recall_whole_mount(&self, inode: u64, client: Option<&str>) -> Result<(), WorkError> {
        self.check_mount_access(inode).await?;
        self.check_mount_change(&[inode]).await?;
        let mount_id = self.reader.read(move |tables| Ok(tables.inode(inode)?.map(|record| record.mount_id)));
        let mount_id = mount_id.await?.ok_or(WorkError::Gone(inode))?;
        self.check_mount_recall(mount_id, client)?;
        // As long as nothing is held there, nobody else has to hold nothing for that.
        for mount_id in self.held_of(vec![mount_id]).await? {
            self.recalls.recall_mount(mount_id).await?;
        }
        Ok(())
    }

    /// Has everything made there that sessions had answered by now.
    ///
    /// # Errors
    /// As [`Self::recall_mount_of`].
    pub async fn settle_mount_of(&self, inode: u64) -> Result<(), WorkError> {
        for mount_id in self.delegating_mounts_of(inode).await? {
            self.recalls.settle_mount(mount_id).await?;
        }
        Ok(())
    }

    /// Mounts in which something is held, when it is the client's turn to have that returned.
    async fn delegating_mounts_of(&self, inode: u64) -> Result<Vec<u32>, WorkError> {
        if self.recalls.delegations().is_empty() {
            return Ok(Vec::new());
        }
        let mounts = self.reader.read(move |tables| match tables.inode(inode)?.map_or(0, |record| record.mount_id) {
            0 => Ok(tables.mounts()?.into_iter().map(|mount| mount.id).collect()),
            mount_id => Ok(vec![mount_id]),
        });
        self.held_of(mounts.await?).await
    }

    /// Those of some mounts in which something is held, when a client may have that returned again.
    async fn held_of(&self, mut mounts: Vec<u32>) -> Result<Vec<u32>, WorkError> {
        let held = self.recalls.delegations();
        mounts.retain(|mount_id| !held.delegations_in(*mount_id).is_empty());
        let tenant = self.charge.as_ref().map(|charge| charge.tenant()).filter(|_| !mounts.is_empty());
        let Some(tenant) = tenant else { return Ok(mounts) };
        let wait = tenant.seconds.take(SECONDS_OF_RECALL);
        if wait <= RECALL_PATIENCE {
            tenant.counts.wait(wait).await;
            return Ok(mounts);
        }
        tenant.seconds.give_back(SECONDS_OF_RECALL);
        tenant.counts.add_refusal();
        Err(WorkError::Overloaded(format!(
            "{} has whole mounts let go of by all who write there, and that once in {SECONDS_OF_RECALL} seconds at \
             most: ask less often, or as an admin",
            tenant.identity()
        )))
    }

    /// The directory that counts for a file of several names, which may be another than the one that it was found in.
    pub(super) async fn directory_of(&self, entry: &Entry) -> Result<DirectoryId, WorkError> {
        let attr = entry.attr.unwrap_or_default();
        if self.recalls.delegations().is_empty() || attr.kind() == Kind::Directory || attr.nlink < 2 {
            return Ok(entry.parent);
        }
        let parent = self.reader.look(move |tables| Ok(tables.inode(attr.inode)?.map(|record| record.parent)));
        Ok(parent.await?.unwrap_or(entry.parent))
    }
}
