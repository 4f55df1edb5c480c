//! Modes, owners and times in mounts whose buckets keep them: as metadata of the objects, and of those of directories
//! (keys that end in `/`).
//!
//! What is set before a file is closed goes with its bytes; later the object is copied onto itself, in the version that
//! was looked at. The master is asked to look then, as after a write.

use std::sync::Arc;

use bytes::Bytes;
use cavern_conf::host;
use cavern_posix::mode::{MODE_BITS, kind_of, type_bits, without_privileges};
use cavern_posix::{attributes_set, created};
use cavern_proto::master::{Attr, CreateInode, Kind, OwnAttributes, SetAttr};
use cavern_ufs::{Metadata as ObjectMetadata, ObjectAttributes, ObjectMeta, Precondition, Ufs, UfsError, named};
use rustix::io::Errno;

use super::StagedFiles;
use super::file::StagedFile;
use super::names::{changed, refuse};
use crate::error::ClientError;
use crate::metadata::{Changed, Node};
use crate::mounts::ObjectVersion;

/// What the bucket keeps with the object of a node, and goes on keeping with the next version of it.
pub(super) fn attributes_of(node: &Node) -> Option<ObjectAttributes> {
    node.has_own_attributes().then(|| shown_attributes(node.kind, (node.mode, node.uid, node.gid)))
}

/// What something is that looks so: permissions, user and group.
fn shown_attributes(kind: Kind, (mode, uid, gid): (u32, u32, u32)) -> ObjectAttributes {
    ObjectAttributes { mode: type_bits(kind) | mode & MODE_BITS, uid, gid, mtime_ns: None }
}

/// What the object of something that is made in a directory is to keep: only where it keeps anything.
pub(super) fn attributes_of_new(on: &Node, create: &CreateInode, owner: (u32, u32)) -> Option<ObjectAttributes> {
    on.keeps_attributes().then(|| made_attributes(&on.attr(), create, owner))
}

fn made_attributes(directory: &Attr, create: &CreateInode, owner: (u32, u32)) -> ObjectAttributes {
    let (made, _) = created(create, (directory, None), owner, None, host::wall_ns());
    shown_attributes(made.kind(), (made.mode, made.uid, made.gid))
}

/// What a change makes of the attributes of something that looks as the node does. Times of access are not kept.
fn changed_attributes(known: ObjectAttributes, set: &SetAttr) -> ObjectAttributes {
    let ObjectAttributes { mode, uid, gid, mtime_ns } = known;
    let kind = kind_of(mode).unwrap_or_default().into();
    let mut attr = Attr { kind, mode: mode & MODE_BITS, uid, gid, ..Attr::default() };
    attributes_set(&mut attr, set, None, host::wall_ns());
    ObjectAttributes {
        mode: mode & !MODE_BITS | attr.mode,
        uid: attr.uid,
        gid: attr.gid,
        mtime_ns: set.mtime.map(|_| attr.mtime_ns).or(mtime_ns),
    }
}

impl StagedFile {
    /// A file that is made in a directory gets a mode and an owner, if the bucket is to keep them.
    pub fn set_new_attributes(&self, directory: &Node, create: &CreateInode, owner: (u32, u32)) {
        if let Some(attributes) = attributes_of_new(directory, create, owner) {
            self.state.lock().attributes = Some(attributes);
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
        let known = state.attributes.unwrap_or_else(|| shown_attributes(Kind::File, looks));
        state.attributes = Some(changed_attributes(known, set));
        state.changes += 1;
        state.writers.add(None);
        Ok(())
    }

    /// Whether the bucket keeps what is set of its attributes.
    pub fn keeps_attributes(&self) -> bool {
        self.mount.keeps_attributes()
    }

    /// It is written or cut by somebody who may not keep bits that let it run with the rights of others.
    pub fn kill_privileges(&self) {
        let mut state = self.state.lock();
        let Some(known) = state.attributes else { return };
        let mode = without_privileges(known.mode);
        if mode != known.mode {
            state.attributes = Some(ObjectAttributes { mode, ..known });
            state.changes += 1;
        }
    }
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
        let looks = shown_attributes(on.kind, (on.mode, on.uid, on.gid));
        let known = ObjectAttributes::read(&metadata, type_bits(on.kind)).unwrap_or(looks);
        let mut attributes = changed_attributes(known, set);
        // That the object is written anew does not make the file another.
        attributes.mtime_ns = attributes.mtime_ns.or(Some(on.mtime_ns));
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
            mode: attributes.mode & MODE_BITS,
            uid: attributes.uid,
            gid: attributes.gid,
            mtime_ns: attributes.mtime_ns.unwrap_or(on.mtime_ns),
            ctime_ns: host::wall_ns(),
            nlink: on.nlink,
            own: OwnAttributes::Stored.into(),
            ..Attr::default()
        };
        let mut set = changed(None);
        set.result.attributes.push(attr);
        Ok(set)
    }
}

#[cfg(test)]
mod tests {
    use cavern_proto::master::Time;

    use super::*;

    const FILE: u32 = 0o100_000;
    const DIRECTORY: u32 = 0o040_000;

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
        let set = SetAttr { kill_privileges: true, ..SetAttr::default() };
        assert_eq!(changed_attributes(known, &set), ObjectAttributes { mode: FILE | 0o755, ..known });
        let directory = ObjectAttributes { mode: DIRECTORY | 0o2755, ..known };
        assert_eq!(changed_attributes(directory, &set), directory);
    }

    #[test]
    fn what_is_made_in_a_set_group_id_directory_gets_its_group() {
        let directory = Attr { kind: Kind::Directory.into(), mode: 0o2775, gid: 7, ..Attr::default() };
        let make = |kind: Kind, mode| {
            let create = CreateInode { kind: kind.into(), mode, umask: 0o022, ..CreateInode::default() };
            let made = made_attributes(&directory, &create, (1, 2));
            (made.mode, made.uid, made.gid, made.mtime_ns)
        };
        assert_eq!(make(Kind::File, 0o666), (FILE | 0o644, 1, 7, None));
        assert_eq!(make(Kind::Directory, 0o777), (DIRECTORY | 0o2755, 1, 7, None));
    }
}
