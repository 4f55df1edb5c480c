//! Reads of what the bucket of an fs-mode mount is to have, and of what it has.

use bytes::Bytes;
use cavern_proto::ROOT_INODE;
use cavern_proto::master::Extent;
use cavern_proto::record::{DeletionRecord, GarbageRecord, InodeRecord, IntentRecord, ObjectRecord};
use prost::Message;

use super::{DEPTH_MAX, Tables};
use crate::Family;
use crate::error::StateError;
use crate::records::{decode, deletion_key, inode_key, is_directory, leading_id, links, object_key};

/// A deletion, and which key it is for.
#[derive(Clone, Debug, PartialEq)]
pub struct PendingDeletion {
    pub mount_id: u32,
    pub key: String,
    pub record: DeletionRecord,
}

impl<'a> Tables<'a> {
    pub fn intent(&self, inode: u64) -> Result<Option<IntentRecord>, StateError> {
        self.record(Family::Intent, &inode_key(inode))
    }

    pub fn object(&self, inode: u64, key: &str) -> Result<Option<ObjectRecord>, StateError> {
        self.record(Family::Object, &object_key(inode, key))
    }

    pub fn deletion(&self, mount_id: u32, key: &str) -> Result<Option<DeletionRecord>, StateError> {
        self.record(Family::Deletion, &deletion_key(mount_id, key))
    }

    /// The inode whose origin the object of a key is.
    pub fn origin_of(&self, mount_id: u32, key: &str) -> Result<Option<u64>, StateError> {
        let inode = self.get(Family::Origin, &deletion_key(mount_id, key))?;
        Ok(inode.and_then(|inode| leading_id(&inode)))
    }

    /// Up to `limit` files that have blocks, beyond this one, and their blocks.
    pub fn files_with_blocks(&self, after: u64, limit: usize) -> Result<Vec<(u64, Vec<Extent>)>, StateError> {
        let mut files = Vec::new();
        let mut after = after;
        while files.len() < limit {
            let start = inode_key(after.saturating_add(1));
            let next = self.records_from(Family::Extent, &start).next();
            let Some((key, _)) = next.transpose()? else { break };
            after = leading_id(&key).ok_or_else(|| StateError::Corrupt("a block of a file".into()))?;
            files.push((after, self.extents(after, 0)?));
        }
        Ok(files)
    }

    /// The inode that has a note of the object of a key.
    pub fn noted(&self, mount_id: u32, key: &str) -> Result<Option<u64>, StateError> {
        let inode = self.get(Family::Noted, &deletion_key(mount_id, key))?;
        Ok(inode.and_then(|inode| leading_id(&inode)))
    }

    /// Up to `limit` keys that begin so and of whose objects an inode has a note, each with the inode.
    pub fn noted_below(&self, mount_id: u32, prefix: &str, limit: usize) -> Result<Vec<(String, u64)>, StateError> {
        let start = deletion_key(mount_id, prefix);
        let mut noted = Vec::new();
        for item in self.records_from(Family::Noted, &start).take(limit) {
            let (key, inode) = item?;
            if !key.starts_with(&start) {
                break;
            }
            noted.push((text(key.get(4..).unwrap_or_default())?, leading_id(&inode).unwrap_or_default()));
        }
        Ok(noted)
    }

    /// Keys and versions of up to `limit` objects that the bucket of a mount has of it.
    pub fn noted_objects(&self, mount_id: u32, limit: usize) -> Result<Vec<(String, String)>, StateError> {
        let start = mount_id.to_be_bytes();
        let mut objects = Vec::new();
        for item in self.records_from(Family::Noted, &start) {
            let (key, inode) = item?;
            let Some(key) = key.strip_prefix(&start).filter(|_| objects.len() < limit) else { break };
            let (key, inode) = (text(key)?, leading_id(&inode).unwrap_or_default());
            if let Some(object) = self.object(inode, &key)?.filter(|object| !object.etag.is_empty()) {
                objects.push((key, object.etag));
            }
        }
        Ok(objects)
    }

    /// The inode that was made of an object of this identity.
    pub fn recovered(&self, mount_id: u32, identity: &str) -> Result<Option<u64>, StateError> {
        let inode = self.get(Family::Recovered, &deletion_key(mount_id, identity))?;
        Ok(inode.and_then(|inode| leading_id(&inode)))
    }

    /// Whether the bucket has, may have, or is to lose an object of ours whose key begins so.
    pub fn is_used_below(&self, mount_id: u32, prefix: &str) -> Result<bool, StateError> {
        let start = deletion_key(mount_id, prefix);
        for family in [Family::Noted, Family::Deletion, Family::Origin] {
            let first = self.records_from(family, &start).next().transpose()?;
            if first.is_some_and(|(key, _)| key.starts_with(&start)) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    pub fn garbage_record(&self, number: u64) -> Result<Option<GarbageRecord>, StateError> {
        self.record(Family::Garbage, &number.to_be_bytes())
    }

    /// All that the bucket has, or may have, of an inode.
    pub fn objects(&self, inode: u64) -> Result<Vec<(String, ObjectRecord)>, StateError> {
        self.objects_of(inode).collect()
    }

    /// The same of all inodes.
    pub fn all_objects(&self) -> Result<Vec<(String, ObjectRecord)>, StateError> {
        self.page_of(Family::Object, &[], usize::MAX, |key, record| {
            Ok((text(key.get(8..).unwrap_or_default())?, record))
        })
    }

    /// What the bucket has, or may have, of an inode: keys and objects, in the order of the keys. There may be as many
    /// as the inode ever had names.
    pub fn objects_of(&self, inode: u64) -> impl Iterator<Item = Result<(String, ObjectRecord), StateError>> + use<'a> {
        let object = move |item: Result<super::Pair, StateError>| {
            let (key, value) = item?;
            let record = decode(&value, || format!("an object of inode {inode}"))?;
            Ok((text(key.get(8..).unwrap_or_default())?, record))
        };
        self.under(Family::Object, &inode_key(inode)).map(object)
    }

    /// Up to `limit` intents of inodes beyond this one.
    pub fn intents(&self, after: u64, limit: usize) -> Result<Vec<(u64, IntentRecord)>, StateError> {
        self.page_of(Family::Intent, &inode_key(after.saturating_add(1)), limit, |key, record| {
            Ok((leading_id(key).unwrap_or_default(), record))
        })
    }

    /// Up to `limit` garbage records beyond this number.
    pub fn garbage(&self, after: u64, limit: usize) -> Result<Vec<(u64, GarbageRecord)>, StateError> {
        self.page_of(Family::Garbage, &inode_key(after.saturating_add(1)), limit, |key, record| {
            Ok((leading_id(key).unwrap_or_default(), record))
        })
    }

    /// Up to `limit` deletions beyond this one (of all mounts, in the order of mounts and keys).
    pub fn deletions(&self, after: Option<(u32, &str)>, limit: usize) -> Result<Vec<PendingDeletion>, StateError> {
        let start = after.map_or_else(Vec::new, |(mount_id, key)| {
            let mut start = deletion_key(mount_id, key);
            start.push(0);
            start
        });
        self.page_of(Family::Deletion, &start, limit, |key, record| {
            let (mount, key) = key.split_first_chunk().ok_or_else(|| StateError::Corrupt("a deletion".into()))?;
            Ok(PendingDeletion { mount_id: u32::from_be_bytes(*mount), key: text(key)?, record })
        })
    }

    pub(super) fn page_of<M: Message + Default, T>(
        &self,
        family: Family,
        start: &[u8],
        limit: usize,
        make: impl Fn(&[u8], M) -> Result<T, StateError>,
    ) -> Result<Vec<T>, StateError> {
        let items = self.records_from(family, start).take(limit);
        let items = items.map(|item| {
            let (key, value) = item?;
            make(&key, decode(&value, || format!("a record of {family:?}"))?)
        });
        items.collect()
    }

    /// Every name of an inode, one by one: its parent, and the name there.
    pub fn names(
        &self,
        inode: u64,
        record: &InodeRecord,
    ) -> impl Iterator<Item = Result<(u64, Bytes), StateError>> + use<'a> {
        let has_several = !is_directory(record) && links(record) > 1;
        let only = (!record.unlinked && !has_several).then(|| Ok((record.parent, record.name.clone())));
        let name = move |key: Result<Box<[u8]>, StateError>| {
            let key = key?;
            let (parent, name) = key
                .get(8..)
                .and_then(<[u8]>::split_first_chunk::<8>)
                .ok_or_else(|| StateError::Corrupt(format!("a name of inode {inode}")))?;
            Ok((u64::from_be_bytes(*parent), Bytes::copy_from_slice(name)))
        };
        let several =
            (!record.unlinked && has_several).then(|| self.keys_under(Family::Link, &inode_key(inode)).map(name));
        only.into_iter().chain(several.into_iter().flatten())
    }

    /// Whether an inode is another, or lies somewhere below it.
    pub fn is_below(&self, inode: u64, top: u64) -> Result<bool, StateError> {
        let mut at = inode;
        for _ in 0..DEPTH_MAX {
            if at == top {
                return Ok(true);
            }
            if at <= ROOT_INODE {
                return Ok(false);
            }
            at = self.inode(at)?.map_or(0, |record| record.parent);
        }
        Ok(false)
    }
}

/// A key as text: none was written that is not.
fn text(key: &[u8]) -> Result<String, StateError> {
    String::from_utf8(key.to_vec()).map_err(|_| StateError::Corrupt("the key of an object".into()))
}
