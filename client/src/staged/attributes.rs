//! Modes, owners and times in mounts whose buckets keep them: as metadata of the objects, and of those of directories
//! (keys that end in `/`).
//!
//! What is set before a file is closed goes with its bytes; later the object is copied onto itself, in the version that
//! was looked at. The master is asked to look then, as after a write.

use std::sync::Arc;

use bytes::Bytes;
use cavern_conf::host;
use cavern_proto::master::{Attr, CreateInode, Kind, OwnAttributes, SetAttr, Time};
use cavern_ufs::{Metadata as ObjectMetadata, ObjectAttributes, ObjectMeta, Precondition, Ufs, UfsError, named};
use rustix::io::Errno;

use super::StagedFiles;
use super::file::StagedFile;
use super::names::{changed, refuse};
use crate::error::ClientError;
use crate::metadata::{Changed, Node};
use crate::mounts::ObjectVersion;

const FILE: u32 = 0o100_000;
const DIRECTORY: u32 = 0o040_000;
/// Which of the permission bits let a program run as its owner, or its group.
const SET_USER_ID: u32 = 0o4000;
const SET_GROUP_ID: u32 = 0o2010;

/// What the bucket keeps with the object of a node, and goes on keeping with the next version of it.
pub(super) fn attributes_of(node: &Node) -> Option<ObjectAttributes> {
    let type_bits = if node.is_directory() { DIRECTORY } else { FILE };
    node.has_own_attributes().then_some(ObjectAttributes {
        mode: type_bits | node.mode,
        uid: node.uid,
        gid: node.gid,
        mtime_ns: None,
    })
}

/// What the object of something that is made is to keep: only where it keeps anything.
pub(super) fn attributes_of_new(on: &Node, create: &CreateInode, owner: (u32, u32)) -> ObjectMetadata {
    let mut metadata = ObjectMetadata::new();
    if on.keeps_attributes() {
        let type_bits = if create.kind() == Kind::Directory { DIRECTORY } else { FILE };
        let mode = type_bits | create.mode & !create.umask & 0o7777;
        ObjectAttributes { mode, uid: owner.0, gid: owner.1, mtime_ns: None }.write(&mut metadata);
    }
    metadata
}

/// What a change makes of the attributes of something that looks as the node does. Times of access are not kept.
fn changed_attributes(known: ObjectAttributes, set: &SetAttr) -> ObjectAttributes {
    let time = |time: &Time| if time.now { host::wall_ns() } else { time.ns };
    let has_new_owner = known.mode & FILE == FILE && (set.uid.is_some() || set.gid.is_some());
    let kept = if has_new_owner { without_privileges(known.mode) } else { known.mode };
    ObjectAttributes {
        mode: set.mode.map_or(kept, |mode| known.mode & !0o7777 | mode & 0o7777),
        uid: set.uid.unwrap_or(known.uid),
        gid: set.gid.unwrap_or(known.gid),
        mtime_ns: set.mtime.as_ref().map(time).or(known.mtime_ns),
    }
}

impl StagedFile {
    /// A file that is made gets a mode and an owner, if the bucket is to keep them.
    pub fn set_new_attributes(&self, mode: u32, owner: (u32, u32)) {
        if self.mount.keeps_attributes() {
            let mode = FILE | mode & 0o7777;
            self.state.lock().attributes = Some(ObjectAttributes { mode, uid: owner.0, gid: owner.1, mtime_ns: None });
        }
    }

    /// Other attributes go to the bucket with the next flush. What has not been set so far is as in `looks`:
    /// permissions, user and group.
    ///
    /// # Errors
    /// `EOPNOTSUPP` in mounts that keep none.
    pub fn set_attributes(&self, set: &SetAttr, looks: (u32, u32, u32)) -> Result<(), ClientError> {
        if !self.mount.keeps_attributes() {
            return refuse(Errno::OPNOTSUPP, format!("{}: its bucket is not to keep attributes", self.node()));
        }
        let mut state = self.state.lock();
        let (mode, uid, gid) = looks;
        let known =
            state.attributes.unwrap_or(ObjectAttributes { mode: FILE | mode & 0o7777, uid, gid, mtime_ns: None });
        state.attributes = Some(changed_attributes(known, set));
        state.changes += 1;
        state.writers.add(None);
        Ok(())
    }

    /// Whether the bucket keeps what is set of its attributes.
    pub fn keeps_attributes(&self) -> bool {
        self.mount.keeps_attributes()
    }

    /// It was written by somebody who may not keep bits that let it run with the rights of others.
    pub fn kill_privileges(&self) {
        if let Some(attributes) = &mut self.state.lock().attributes {
            attributes.mode = without_privileges(attributes.mode);
        }
    }
}

fn without_privileges(mode: u32) -> u32 {
    let runs_as_group = mode & SET_GROUP_ID == SET_GROUP_ID;
    mode & !SET_USER_ID & !(if runs_as_group { 0o2000 } else { 0 })
}

impl StagedFiles {
    /// Sets attributes of what nobody is writing here.
    pub(super) async fn set_attributes(
        &self,
        ufs: &Ufs,
        on: &Arc<Node>,
        set: &SetAttr,
    ) -> Result<Changed, ClientError> {
        let key = on.key();
        let staged = self.of_name(on.parent, &on.name);
        if let Some(file) = &staged {
            file.commit().await?;
        }
        let is_root = on.mount.as_ref().is_some_and(|mount| mount.root_inode() == on.inode);
        if is_root || set.size.is_some() {
            return refuse(Errno::OPNOTSUPP, format!("{on}: there is no object that could keep this"));
        }
        let there = match ufs.head(&key).await {
            Ok(there) => Some(there),
            Err(UfsError::NotFound { .. }) => None,
            Err(error) => return Err(error.into()),
        };
        let is_current = |there: &ObjectMeta| there.etag == on.etag();
        if !on.is_directory() && !there.as_ref().is_some_and(is_current) {
            // Who asks again finds what is there by now.
            self.shared.metadata.written(on.parent, &on.name).await?;
            return Err(ClientError::Stale(key));
        }
        let mut metadata = there.as_ref().map_or_else(ObjectMetadata::new, |there| there.metadata.clone());
        let type_bits = if on.is_directory() { DIRECTORY } else { FILE };
        let looks = ObjectAttributes { mode: type_bits | on.mode, uid: on.uid, gid: on.gid, mtime_ns: None };
        let known = ObjectAttributes::read(&metadata, type_bits).unwrap_or(looks);
        let mut attributes = changed_attributes(known, set);
        // That the object is written anew does not make the file another.
        attributes.mtime_ns = attributes.mtime_ns.or(Some(on.mtime_ns));
        if set.kill_privileges {
            attributes.mode = without_privileges(attributes.mode);
        }
        attributes.write(&mut metadata);
        let etag = match &there {
            Some(there) => ufs.describe(there, &metadata).await?,
            None => ufs.put(&key, &Bytes::new(), &named(metadata), Precondition::Nothing).await?,
        };
        if let Some(file) = staged {
            let object = ObjectVersion::new(on.object()?.mount, &key, &etag, on.size)?;
            file.described(object, attributes);
        }
        self.shared.metadata.written(on.parent, &on.name).await?;
        let attr = Attr {
            inode: on.inode,
            kind: on.kind.into(),
            size: on.size,
            mode: attributes.mode & 0o7777,
            uid: attributes.uid,
            gid: attributes.gid,
            mtime_ns: attributes.mtime_ns.unwrap_or(on.mtime_ns),
            ctime_ns: host::wall_ns(),
            nlink: on.nlink,
            own: OwnAttributes::Kept.into(),
            ..Attr::default()
        };
        let mut set = changed(None);
        set.result.attributes.push(attr);
        Ok(set)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_set_changes() {
        let known = ObjectAttributes { mode: FILE | 0o6755, uid: 1, gid: 2, mtime_ns: Some(5) };
        let set = SetAttr { mode: Some(0o600), atime: Some(Time { now: false, ns: 9 }), ..SetAttr::default() };
        assert_eq!(changed_attributes(known, &set), ObjectAttributes { mode: FILE | 0o600, ..known });
        let set = SetAttr { uid: Some(7), mtime: Some(Time { now: false, ns: 9 }), ..SetAttr::default() };
        assert_eq!(
            changed_attributes(known, &set),
            ObjectAttributes { mode: FILE | 0o755, uid: 7, mtime_ns: Some(9), ..known }
        );
        assert_eq!([0o6755, 0o6744, 0o1644].map(without_privileges), [0o755, 0o2744, 0o1644]);
    }
}
