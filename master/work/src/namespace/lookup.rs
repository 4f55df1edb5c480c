//! Reading the namespace for clients: names, inodes, pages of directories, each after whatever listing it needs.
//!
//! Nothing here sends a HEAD for a name that a listing knows, except in mounts whose buckets keep attributes, for each
//! name that is looked at for the first time. A directory that was never listed is listed first; a name in a huge one
//! is checked alone. Loads send no HEAD at all ([`Lookups::listings_only`]). What is known goes on being served while a
//! bucket does not answer.

mod find;

use bytes::Bytes;
use cavern_posix::check_name;
use cavern_proto::ROOT_INODE;
use cavern_proto::master::{Entry, Kind, MakeListedReply};
use cavern_proto::record::InodeRecord;
use cavern_state::{InodeLocation, Tables};

use super::read_after_recall::places_of;
use super::{Lookups, components};
use crate::error::WorkError;
use crate::listing::CheckReason;
use crate::listing::walk::{ListPolicy, Walk};
use find::Lookup;

impl Lookups {
    /// The entry that a path leads to.
    ///
    /// # Errors
    /// [`WorkError::Invalid`] for a path that is not absolute or has `.`, `..`, a NUL, or a name that is too long;
    /// [`WorkError::NotFound`] naming the first component that is missing.
    pub async fn resolve(&self, path: &str) -> Result<Entry, WorkError> {
        let names = components(path)?;
        let mut entry = self.get_inode(ROOT_INODE).await?;
        for (depth, name) in names.iter().enumerate() {
            let attr = entry.attr.unwrap_or_default();
            let so_far = || format!("/{}", names[..depth].join("/"));
            if attr.kind() != Kind::Directory {
                return Err(WorkError::NotFound(format!("{} is not a directory, so {path} is not there", so_far())));
            }
            let name = Bytes::copy_from_slice(name.as_bytes());
            entry = match self.lookup(attr.inode, &name).await {
                Err(error) if error.is_not_found() => {
                    let missing = names[..=depth].join("/");
                    return Err(WorkError::NotFound(format!("/{missing} is not there")));
                }
                found => found?,
            };
        }
        Ok(entry)
    }

    /// Has a directory of an fs-mode mount listed, and perhaps all below it, as far as they never were. When that takes
    /// longer than the configuration allows, the answer says so, and it goes on.
    pub async fn make_listed(&self, inode: u64, recursive: bool) -> Result<MakeListedReply, WorkError> {
        let listed = async {
            let mut walk = Walk::new(self.listings.clone(), inode, ListPolicy::Known, recursive);
            while let Some(visited) = walk.next().await {
                visited.map_err(|(_, error)| error)?;
            }
            Ok::<_, WorkError>(())
        };
        let done = match tokio::time::timeout(self.refresh_wait, listed).await {
            Ok(listed) => {
                listed?;
                true
            }
            Err(_) => false,
        };
        let entries = self.reader.read(move |tables| {
            let mount_id = tables.inode(inode)?.map_or(0, |record| record.mount_id);
            Ok(tables.index(mount_id)?.unwrap_or_default().entries)
        });
        Ok(MakeListedReply { done, entries: entries.await? })
    }

    /// The current entry of an inode.
    ///
    /// # Errors
    /// [`WorkError::NotFound`] when it was replaced or deleted.
    pub async fn get_inode(&self, inode: u64) -> Result<Entry, WorkError> {
        let read = || async { self.with_attributes(self.known_inode(inode).await?, None).await };
        let (entry, _) = self.read_after_recall(inode, read, places_of).await?;
        Ok(entry)
    }

    /// The entry of a name in a directory.
    ///
    /// # Errors
    /// [`WorkError::NotFound`] when it leads nowhere, [`WorkError::Deadline`] when a session does not let go, and
    /// those of the bucket.
    pub async fn lookup(&self, parent: u64, name: &Bytes) -> Result<Entry, WorkError> {
        Lookup { lookups: self, parent, name, why: None }.run().await
    }

    /// Asks the bucket about a name now, and answers its entry then.
    pub async fn revalidate(&self, parent: u64, name: &Bytes, why: CheckReason) -> Result<Entry, WorkError> {
        check_name(name)?;
        Lookup { lookups: self, parent, name, why: Some(why) }.run().await
    }

    async fn known_inode(&self, inode: u64) -> Result<Entry, WorkError> {
        let found = self.read_watched_inode(inode, move |tables, record| {
            Ok(tables.directory(if record.kind() == Kind::Directory { inode } else { record.parent })?)
        });
        let (record, directory) = found.await?.ok_or(WorkError::Gone(inode))?;
        let directory = directory.ok_or(WorkError::Gone(inode))?;
        match record.kind() {
            Kind::Directory => self.directory_entry(&directory),
            _ => self.entry(&directory, record.name.clone(), inode, &record),
        }
    }

    /// Has the session notified of what changes about an inode from now on; gives the inode as it is, if it is there,
    /// and what `more` reads of it at the same moment. Its mount is there for the client
    /// ([`Self::check_mount_access`], [`Self::hidden`]).
    pub async fn read_watched_inode<T: Send + 'static>(
        &self,
        inode: u64,
        more: impl Fn(Tables<'_>, &InodeRecord) -> Result<T, WorkError> + Clone + Send + 'static,
    ) -> Result<Option<(InodeRecord, T)>, WorkError> {
        let read = || {
            let more = more.clone();
            self.reader.look(move |tables| {
                let Some(record) = tables.inode(inode)? else { return Ok(None) };
                let more = more(tables, &record)?;
                Ok(Some((record, more)))
            })
        };
        if self.asker == 0 {
            return read().await;
        }
        let known = self.reader.look(move |tables| Ok(tables.inode(inode)?.as_ref().map(InodeLocation::of))).await?;
        let Some(before) = known else { return Ok(None) };
        match &before {
            InodeLocation::Named { parent, name, .. } => self.watch.watch_name(self.asker, *parent, name),
            _ => self.watch.watch_inodes(self.asker, [inode]),
        }
        // Again, now that the session would be notified of a change.
        let now = read().await?;
        if now.as_ref().is_none_or(|(now, _)| InodeLocation::of(now) == before) {
            return Ok(now);
        }
        // It has another name meanwhile, and may have more of them.
        self.watch.watch_inodes(self.asker, [inode]);
        read().await
    }
}
