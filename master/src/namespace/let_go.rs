//! Reads of what other sessions hold: they wait until it has been let go of, so they find everything that was answered
//! before they began.
//!
//! A directory that is looked into is recalled before the read. What is found is known only then: if another session
//! holds its directory, or itself, that is recalled and the read made once more. So it is when anything was let go of
//! during the read, which may have come too early for what its holder had answered.

use cavern_proto::master::{Entry, Kind};

use super::Lookups;
use crate::error::MasterError;

/// Reads of one question. What is found is recalled once each; no more than some follow each other.
const READS_MAX: usize = 100;

/// A directory that somebody may hold; 0 for none.
type Place = u64;

impl Lookups {
    /// Reads what nobody but the asker holds: neither the directory that is looked into, nor what `places` says of the
    /// answer.
    ///
    /// # Errors
    /// Those of `read`; [`MasterError::NotFound`] where the directory is not there for the client;
    /// [`MasterError::Deadline`] when a session does not let go.
    pub async fn when_let_go<T, R>(
        &self,
        directory: Place,
        read: impl Fn() -> R,
        places: impl Fn(&T) -> Vec<Place>,
    ) -> Result<T, MasterError>
    where
        R: Future<Output = Result<T, MasterError>>,
    {
        // Nobody lets go of anything for whoever may not look there.
        self.check_visible(directory).await?;
        let held = self.recalls.held();
        for _ in 0..READS_MAX {
            self.recalls.recall(directory, self.asker).await?;
            let moment = held.moment();
            let answer = read().await;
            let is_held = |place: &Place| held.other_holder(*place, self.asker).is_some();
            let others = match &answer {
                Ok(found) if !held.is_empty() => places(found).into_iter().filter(is_held).collect(),
                _ => Vec::new(),
            };
            if !others.is_empty() {
                self.recalls.recall_all(&others, self.asker).await?;
            } else if held.moment() == moment {
                return answer;
            }
        }
        Err(MasterError::Overloaded("other clients make and let go of directories all the time: try again".into()))
    }

    /// Has everything let go of in the mount that an inode is in; in all mounts, for a directory above them.
    ///
    /// # Errors
    /// [`MasterError::Deadline`] when a session does not let go.
    pub async fn recall_mount_of(&self, inode: u64) -> Result<(), MasterError> {
        if self.recalls.held().is_empty() {
            return Ok(());
        }
        let mounts = self.reader.read(move |tables| match tables.inode(inode)?.map_or(0, |record| record.mount_id) {
            0 => Ok(tables.mounts()?.into_iter().map(|mount| mount.id).collect()),
            mount_id => Ok(vec![mount_id]),
        });
        for mount_id in mounts.await? {
            self.recalls.recall_mount(mount_id).await?;
        }
        Ok(())
    }

    /// [`Self::when_let_go`] for an entry.
    pub(super) async fn entry_let_go<R>(&self, directory: Place, read: impl Fn() -> R) -> Result<Entry, MasterError>
    where
        R: Future<Output = Result<Entry, MasterError>>,
    {
        let read = || async {
            let entry = read().await?;
            let shown_in = self.directory_of(&entry).await?;
            Ok((entry, shown_in))
        };
        let places =
            |(entry, shown_in): &(Entry, Place)| vec![entry.parent, *shown_in, entry.attr.map_or(0, |attr| attr.inode)];
        Ok(self.when_let_go(directory, read, places).await?.0)
    }

    /// The directory that counts for a file of several names, which may be another than the one that it was found in.
    async fn directory_of(&self, entry: &Entry) -> Result<Place, MasterError> {
        let attr = entry.attr.unwrap_or_default();
        if self.recalls.held().is_empty() || attr.kind() == Kind::Directory || attr.nlink < 2 {
            return Ok(entry.parent);
        }
        let parent = self.reader.look(move |tables| Ok(tables.inode(attr.inode)?.map(|record| record.parent)));
        Ok(parent.await?.unwrap_or(entry.parent))
    }
}
