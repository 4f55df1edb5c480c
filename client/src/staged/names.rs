//! Names of cache-mode mounts that are made and removed: objects, and directories as objects whose key ends in `/`.
//!
//! A directory is there as long as a key begins with it. So that none vanishes under the programs that work in it when
//! its last file is removed, it gets an object of its own before.

use std::sync::Arc;

use bytes::Bytes;
use cavern_proto::master::mutation::Change;
use cavern_proto::master::{Attr, CreateInode, Kind, MutationResult, RemoveName, SetAttr, Time};
use cavern_ufs::{ListMode, Metadata as ObjectMetadata, Precondition, Ufs, UfsError, named};
use rustix::io::Errno;

use super::attributes::attributes_of_new;
use super::{StagedFiles, location_in};
use crate::error::ClientError;
use crate::metadata::{Changed, Node};

impl StagedFiles {
    /// Makes a change in the bucket of a cache-mode mount; `on` is the directory or the file that is changed, `owner`
    /// user and group of what is made. Returns when the bucket has it, and the caches of this client know of it. What
    /// buckets cannot keep is refused with `EOPNOTSUPP`.
    pub async fn change(&self, on: &Arc<Node>, change: &Change, owner: (u32, u32)) -> Result<Changed, ClientError> {
        let mut changed = self.change_bucket(on, change, owner).await?;
        changed.listings.extend(on.is_directory().then_some(on.inode));
        if let Change::Rename(rename) = change {
            changed.listings.push(rename.new_parent);
        }
        Ok(changed)
    }

    async fn change_bucket(&self, on: &Arc<Node>, change: &Change, owner: (u32, u32)) -> Result<Changed, ClientError> {
        let mount = on.mount.as_ref().ok_or_else(|| ClientError::Invalid(format!("{on} is in no mount")))?;
        let ufs = self.shared.ufs(mount)?;
        match change {
            Change::Create(create) => match create.kind() {
                Kind::File => self.make(&ufs, on, create, owner).await,
                Kind::Directory => self.make(&ufs, on, create, owner).await,
                kind => refuse(Errno::OPNOTSUPP, format!("{on}: a bucket has files and directories, no {kind:?}")),
            },
            Change::Remove(remove) if remove.directory => self.remove_directory(&ufs, on, remove).await,
            Change::Remove(remove) => self.remove_file(&ufs, on, remove).await,
            Change::Rename(rename) => {
                let to = self.shared.metadata.node(rename.new_parent).await?;
                self.rename(&ufs, (on, &to), rename).await
            }
            Change::RenameWhiteout(_) => refuse(Errno::INVAL, format!("{on}: a bucket has no whiteouts")),
            Change::SetAttr(set) if on.keeps_attributes() => self.set_attributes(&ufs, on, set).await,
            Change::SetAttr(set) if is_touch(set) && !on.is_directory() => self.touch(on).await,
            _ => refuse(Errno::OPNOTSUPP, format!("{on}: a bucket cannot keep this")),
        }
    }

    /// Writes an object anew as it is: its time is that of now.
    async fn touch(&self, on: &Arc<Node>) -> Result<Changed, ClientError> {
        let file = self.begin(on, None)?;
        file.touch();
        let committed = file.commit().await;
        self.shared.registry.lock().forget_if_over(file.inode());
        committed?;
        let now_ns = file.node().mtime_ns;
        let attr = Attr {
            inode: on.inode,
            size: on.size,
            mtime_ns: now_ns,
            ctime_ns: now_ns,
            mode: on.mode,
            uid: on.uid,
            gid: on.gid,
            nlink: on.nlink,
            ..Attr::default()
        };
        let mut touched = changed(None);
        touched.result.attributes.push(attr);
        Ok(touched)
    }

    /// An empty object.
    async fn make(
        &self,
        ufs: &Ufs,
        on: &Node,
        create: &CreateInode,
        owner: (u32, u32),
    ) -> Result<Changed, ClientError> {
        let place = location_in(on, &create.name)?;
        let end = if create.kind() == Kind::Directory { "/" } else { "" };
        let mut metadata = ObjectMetadata::new();
        if let Some(attributes) = attributes_of_new(on, create, owner) {
            attributes.write(&mut metadata);
        }
        let metadata = named(metadata);
        let key = format!("{}{end}", place.key());
        let exists = || refuse(Errno::EXIST, format!("{key} is there already"));
        if self.shown(on.inode, &create.name).is_some() || self.there(on, &create.name).await?.is_some() {
            return exists();
        }
        match ufs.put(&key, &Bytes::new(), &metadata, Precondition::Nothing).await {
            Ok(_) => {}
            Err(UfsError::VersionChanged { .. }) => return exists(),
            Err(error) => return Err(error.into()),
        }
        let node = self.shared.metadata.written(on.inode, &create.name).await?;
        match node {
            Some(node) => Ok(changed(Some(node))),
            None => Err(ClientError::Stale(key)),
        }
    }

    async fn remove_file(&self, ufs: &Ufs, on: &Arc<Node>, remove: &RemoveName) -> Result<Changed, ClientError> {
        let place = location_in(on, &remove.name)?;
        let known = self.known(on, &remove.name).await?;
        if known.as_ref().is_some_and(|node| node.is_directory()) {
            return refuse(Errno::ISDIR, format!("{} is a directory", place.key()));
        }
        let staged = self.of_name(on.inode, &remove.name);
        if known.is_none() && staged.is_none() {
            return Err(ClientError::NotFound(place.key()));
        }
        let mut is_kept = true;
        if known.is_some() {
            is_kept = self.keep_directory(ufs, on, &remove.name).await? == KeepReason::ByItself;
            ufs.delete(&place.key(), Precondition::Anything).await?;
        }
        if let Some(staged) = staged {
            self.detach_name(&staged);
        }
        self.shared.metadata.written(on.inode, &remove.name).await?;
        if !is_kept {
            // The others may have been removed at the same time.
            self.keep_directory(ufs, on, &remove.name).await?;
        }
        Ok(changed(None))
    }

    async fn remove_directory(&self, ufs: &Ufs, on: &Arc<Node>, remove: &RemoveName) -> Result<Changed, ClientError> {
        let place = location_in(on, &remove.name)?;
        let Some(node) = self.known(on, &remove.name).await? else { return Err(ClientError::NotFound(place.key())) };
        if !node.is_directory() {
            return refuse(Errno::NOTDIR, format!("{} is not a directory", place.key()));
        }
        let key = node.key();
        if self.is_written_below(node.inode) || !is_empty(ufs, &key).await? {
            return refuse(Errno::NOTEMPTY, format!("{key} is not empty"));
        }
        self.keep_directory(ufs, on, &remove.name).await?;
        ufs.delete(&key, Precondition::Anything).await?;
        self.shared.metadata.written(on.inode, &remove.name).await?;
        Ok(changed(None))
    }

    /// Makes a directory stay that is about to lose this name, if it has no other. The root of a mount is always there.
    pub(super) async fn keep_directory(
        &self,
        ufs: &Ufs,
        directory: &Arc<Node>,
        name: &[u8],
    ) -> Result<KeepReason, ClientError> {
        let is_root = directory.mount.as_ref().is_some_and(|mount| mount.root_inode() == directory.inode);
        if is_root {
            return Ok(KeepReason::ByItself);
        }
        if self.shared.metadata.has_others(directory.inode, name).await? {
            return Ok(KeepReason::ByOthers);
        }
        match ufs.put(&directory.key(), &Bytes::new(), &ObjectMetadata::new(), Precondition::Nothing).await {
            Ok(_) | Err(UfsError::VersionChanged { .. }) => Ok(KeepReason::ByItself),
            Err(error) => Err(error.into()),
        }
    }

    /// What is there under a name: of what the namespace does not have, the bucket is asked, since the listing may be
    /// older than an object.
    pub(super) async fn there(&self, directory: &Node, name: &[u8]) -> Result<Option<Arc<Node>>, ClientError> {
        match self.known(directory, name).await? {
            None => self.shared.metadata.written(directory.inode, name).await,
            known => Ok(known),
        }
    }

    /// What the namespace has under a name.
    pub(super) async fn known(&self, directory: &Node, name: &[u8]) -> Result<Option<Arc<Node>>, ClientError> {
        match self.shared.metadata.lookup(directory.inode, name).await {
            Ok(node) => Ok(Some(node)),
            Err(ClientError::NotFound(_)) => Ok(None),
            Err(error) => Err(error),
        }
    }
}

/// Why a directory stays when one of its names goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum KeepReason {
    /// It has an object of its own, or needs none.
    ByItself,
    ByOthers,
}

/// Whether all that is asked for is that the times become now.
fn is_touch(set: &SetAttr) -> bool {
    let is_now = |time: &Option<Time>| time.is_none_or(|time| time.now);
    let others = SetAttr { atime: None, mtime: None, ..*set };
    set.mtime.is_some()
        && is_now(&set.atime)
        && is_now(&set.mtime)
        && others == SetAttr { inode: set.inode, ..SetAttr::default() }
}

/// Whether a bucket has nothing below a directory but the directory itself.
pub(super) async fn is_empty(ufs: &Ufs, prefix: &str) -> Result<bool, ClientError> {
    let mut lister = ufs.list(prefix, ListMode::Directory);
    while let Some(page) = lister.next_page().await? {
        let is_other = page.objects.iter().any(|object| object.key != prefix);
        if is_other || !page.prefixes.is_empty() || page.hidden > 0 {
            return Ok(false);
        }
    }
    Ok(true)
}

pub(super) fn changed(node: Option<Arc<Node>>) -> Changed {
    let inode = node.as_ref().map_or(0, |node| node.inode);
    let result = MutationResult { inode, ..MutationResult::default() };
    Changed { result, node, session: 0, event_seq: 0, applied_locally: false, listings: Vec::new() }
}

pub(super) fn refuse<T>(errno: Errno, reason: String) -> Result<T, ClientError> {
    Err(ClientError::Refused { errno: errno.raw_os_error(), reason })
}
