//! Renaming in a bucket: objects are copied there, all of them, and only then deleted under the old keys. So whatever
//! ends a rename in the middle, each object is under one of its keys at least, and the rename can be made again:
//! `directory` has the order of the requests, and `leftover` finds out what an earlier attempt has done.
//!
//! The bytes do not come here. Of a directory, which may have any number of objects, the log says how far it is, and so
//! do the counters `client_renamed_copies` and `client_renamed_deletions`.

mod directory;
mod leftover;

use std::sync::Arc;
use std::time::Duration;

use cavern_proto::master::{RenameMode, RenameName};
use cavern_ufs::{Metadata, ObjectMeta, Precondition, Ufs, UfsError};
use rustix::io::Errno;
use tokio::time::Instant;

use self::directory::DirectoryRename;
use self::leftover::Leftover;
use super::file::{StagedFile, StagedLocation};
use super::names::{changed, is_empty, refuse};
use super::{StagedFiles, location_in};
use crate::error::ClientError;
use crate::metadata::{Changed, Node};
use crate::mounts::ObjectVersion;
use crate::stats::InFlightGauge;

/// For so long after its close a file may still look open, and how often it is looked.
const RELEASE_LAG: Duration = Duration::from_secs(1);
const PAUSE: Duration = Duration::from_millis(10);

impl StagedFiles {
    /// Renames a file or a directory; `to` is the directory of the new name.
    pub(super) async fn rename(
        &self,
        ufs: &Ufs,
        (from, to): (&Arc<Node>, &Arc<Node>),
        rename: &RenameName,
    ) -> Result<Changed, ClientError> {
        if rename.mode() == RenameMode::Exchange {
            return refuse(Errno::INVAL, format!("{from}: two objects cannot be exchanged in one step"));
        }
        let (old, new) = (location_in(from, &rename.name)?, location_in(to, &rename.new_name)?);
        // What is being written there goes to the bucket under its old name first.
        let staged = self.of_name(from.inode, &rename.name);
        if let Some(file) = &staged {
            file.commit().await?;
        }
        let source = self.known(from, &rename.name).await?.ok_or_else(|| ClientError::NotFound(old.key()))?;
        let target = self.there(to, &rename.new_name).await?;
        let is_written = self.shown(to.inode, &rename.new_name).is_some();
        if rename.mode() == RenameMode::NoReplace && (target.is_some() || is_written) {
            return refuse(Errno::EXIST, format!("{} is there already", new.key()));
        }
        if old.key() == new.key() {
            return Ok(changed(None));
        }
        match (source.is_directory(), target.as_ref().map(|target| target.is_directory())) {
            (true, Some(false)) => return refuse(Errno::NOTDIR, format!("{} is not a directory", new.key())),
            (false, Some(true)) => return refuse(Errno::ISDIR, format!("{} is a directory", new.key())),
            _ => {}
        }
        if source.is_directory() {
            self.rename_directory(ufs, &source, target.as_ref(), &format!("{}/", new.key())).await?;
        } else {
            let object = source.object()?;
            let etag = self.copy_file(ufs, &source, &object, &new.key()).await?;
            if let Some(replaced) = self.of_name(to.inode, &rename.new_name) {
                self.detach_name(&replaced);
            }
            if let Some(file) = &staged {
                let moved = ObjectVersion::new(object.mount.clone(), &new.key(), &etag, object.length)?;
                self.move_to(file, new, moved);
            }
            self.keep_directory(ufs, from, &rename.name).await?;
            ufs.delete(&object.key, Precondition::Version(&object.etag)).await?;
        }
        let metadata = &self.shared.metadata;
        for (directory, name) in [(to, &rename.new_name), (from, &rename.name)] {
            match source.is_directory() {
                // Who has looked into it meanwhile has seen a part of what is there.
                true => metadata.written_below(directory.inode, name).await?,
                false => metadata.written(directory.inode, name).await?,
            };
        }
        Ok(changed(None))
    }

    /// Copies the version that a node is of; gives the copy's ETag.
    async fn copy_file(
        &self,
        ufs: &Ufs,
        source: &Node,
        object: &ObjectVersion,
        to: &str,
    ) -> Result<String, ClientError> {
        let meta = ObjectMeta {
            key: object.key.to_string(),
            size: object.length,
            etag: object.etag.to_string(),
            mtime_ns: source.mtime_ns,
            metadata: Metadata::new(),
        };
        match ufs.copy(&meta, to).await {
            Ok(etag) => Ok(etag),
            Err(UfsError::VersionChanged { .. } | UfsError::NotFound { .. }) => {
                // Who asks again finds what is there by now.
                self.shared.metadata.written(source.parent, &source.name).await?;
                Err(ClientError::Stale(object.key.to_string()))
            }
            Err(error) => Err(error.into()),
        }
    }

    /// A file that somebody has open has another name, and so has the object below it.
    fn move_to(&self, file: &Arc<StagedFile>, place: StagedLocation, object: ObjectVersion) {
        let mut registry = self.shared.registry.lock();
        registry.forget_name(file);
        registry.names.insert((place.parent, place.name.clone()), file.inode());
        drop(registry);
        file.move_to(place, object);
    }

    /// Moves every object below a directory, and its own.
    async fn rename_directory(
        &self,
        ufs: &Ufs,
        source: &Arc<Node>,
        target: Option<&Arc<Node>>,
        to: &str,
    ) -> Result<(), ClientError> {
        let from = source.key();
        if to.starts_with(&from) {
            return refuse(Errno::INVAL, format!("{from} cannot be moved into itself"));
        }
        // What has just been closed may not have been released yet.
        let deadline = Instant::now() + RELEASE_LAG;
        while self.is_open_under(source, &from) {
            if Instant::now() >= deadline {
                return refuse(Errno::BUSY, format!("files below {from} are being written: close them first"));
            }
            tokio::time::sleep(PAUSE).await;
        }
        let left = match target {
            Some(target) => self.make_way(ufs, &from, target, to).await?,
            None => None,
        };
        let stats = &self.shared.stats;
        let _under_way = InFlightGauge::new(&stats.directory_renames);
        let mut rename = DirectoryRename::new(ufs, stats, &from, to, left);
        rename.copy().await?;
        self.keep_above(ufs, source).await?;
        rename.delete_copied().await?;
        rename.end().await
    }

    /// An empty directory makes way for another that gets its name. Gives what an earlier attempt of the same rename
    /// has left there; `ENOTEMPTY` for whatever else is there.
    async fn make_way(
        &self,
        ufs: &Ufs,
        from: &str,
        target: &Arc<Node>,
        to: &str,
    ) -> Result<Option<Leftover>, ClientError> {
        let not_empty = || refuse(Errno::NOTEMPTY, format!("{to} is not empty"));
        if self.is_open_under(target, to) {
            return not_empty();
        }
        if !is_empty(ufs, to).await? {
            return match Leftover::find(ufs, from, to).await? {
                None => not_empty(),
                left => Ok(left),
            };
        }
        // What is known of it is that it has nothing.
        ufs.delete(to, Precondition::Anything).await?;
        self.shared.metadata.written(target.parent, &target.name).await?;
        Ok(None)
    }

    /// Makes the directory stay that a directory is moved out of.
    async fn keep_above(&self, ufs: &Ufs, source: &Arc<Node>) -> Result<(), ClientError> {
        let above = self.shared.metadata.node(source.parent).await?;
        self.keep_directory(ufs, &above, &source.name).await.map(drop)
    }

    /// Whether any file below a directory is open for writing here.
    fn is_open_under(&self, directory: &Node, prefix: &str) -> bool {
        let registry = self.shared.registry.lock();
        let mut files =
            registry.files.values().map(|known| &known.file).filter(|file| file.is_dirty() || file.is_open());
        files.any(|file| {
            let is_of_mount = directory.mount.as_ref().is_some_and(|mount| mount.id() == file.mount.id());
            is_of_mount && file.state.lock().place.location.starts_with(prefix)
        })
    }
}
