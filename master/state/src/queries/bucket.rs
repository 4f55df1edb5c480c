//! What is to be brought to the buckets, and what they have.

use cavern_proto::record::{DeletionRecord, GarbageRecord, IntentRecord, ObjectRecord};

use crate::error::Result;
use crate::schema;
use crate::tables::Tables;

/// A deletion, and which key it is for.
#[derive(Clone, Debug, PartialEq)]
pub struct PendingDeletion {
    pub mount_id: u32,
    pub key: String,
    pub record: DeletionRecord,
}

impl Tables<'_> {
    /// Up to `limit` intents of inodes beyond this one.
    pub fn intents(&self, after: u64, limit: usize) -> Result<Vec<(u64, IntentRecord)>> {
        self.rows_after(schema::Intents, (), Some(after)).page(limit, |row| row.entry())
    }

    /// Up to `limit` garbage records beyond this number.
    pub fn garbage(&self, after: u64, limit: usize) -> Result<Vec<(u64, GarbageRecord)>> {
        self.rows_after(schema::Garbage, (), Some(after)).page(limit, |row| row.entry())
    }

    /// Up to `limit` deletions beyond this one (of all mounts, in the order of mounts and keys).
    pub fn deletions(&self, after: Option<(u32, &str)>, limit: usize) -> Result<Vec<PendingDeletion>> {
        self.rows_after(schema::Deletions, (), after).page(limit, |row| {
            let ((mount_id, key), record) = row.entry()?;
            Ok(PendingDeletion { mount_id, key: key.to_owned(), record })
        })
    }

    /// All that the bucket has, or may have, of an inode.
    pub fn objects(&self, inode: u64) -> Result<Vec<(String, ObjectRecord)>> {
        self.objects_of(inode).collect()
    }

    /// The same of all inodes.
    pub fn all_objects(&self) -> Result<Vec<(String, ObjectRecord)>> {
        self.rows(schema::Objects, ()).page(usize::MAX, |row| {
            let ((_, key), object) = row.entry()?;
            Ok((key.to_owned(), object))
        })
    }

    /// Up to `limit` keys that begin so and of whose objects an inode has a note, each with the inode.
    pub fn noted_below(&self, mount_id: u32, prefix: &str, limit: usize) -> Result<Vec<(String, u64)>> {
        self.rows(schema::Noted, (mount_id, prefix)).page(limit, |row| {
            let ((_, key), inode) = row.entry()?;
            Ok((key.to_owned(), inode))
        })
    }

    /// Keys and versions of up to `limit` objects that the bucket of a mount has of it.
    pub fn noted_objects(&self, mount_id: u32, limit: usize) -> Result<Vec<(String, String)>> {
        let mut objects = Vec::new();
        for row in self.rows(schema::Noted, mount_id) {
            if objects.len() == limit {
                break;
            }
            let row = row?;
            let ((_, key), inode) = row.entry()?;
            if let Some(object) = self.object(inode, key)?.filter(|object| !object.etag.is_empty()) {
                objects.push((key.to_owned(), object.etag));
            }
        }
        Ok(objects)
    }

    /// Up to `limit` of a mount's unlisted directories: paths below its root, and inodes, beginning after a path.
    pub fn unlisted(&self, mount_id: u32, after: Option<&[u8]>, limit: usize) -> Result<Vec<(Vec<u8>, u64)>> {
        let after = after.map(|path| (mount_id, path));
        self.rows_after(schema::Unlisted, mount_id, after).page(limit, |row| {
            let ((_, path), inode) = row.entry()?;
            Ok((path.to_vec(), inode))
        })
    }
}
