//! What the bucket of an fs-mode mount is to have, and what it has.

use cavern_proto::record::{DeletionRecord, IntentRecord, ObjectRecord};

use super::Tables;
use crate::error::Result;
use crate::schema;

impl<'a> Tables<'a> {
    pub fn intent(&self, inode: u64) -> Result<Option<IntentRecord>> {
        self.get(schema::Intents, inode)
    }

    pub fn object(&self, inode: u64, key: &str) -> Result<Option<ObjectRecord>> {
        self.get(schema::Objects, (inode, key))
    }

    pub fn deletion(&self, mount_id: u32, key: &str) -> Result<Option<DeletionRecord>> {
        self.get(schema::Deletions, (mount_id, key))
    }

    /// The inode whose origin the object of a key is.
    pub fn origin_of(&self, mount_id: u32, key: &str) -> Result<Option<u64>> {
        self.get(schema::Origins, (mount_id, key))
    }

    /// The inode that has a note of the object of a key.
    pub fn noted(&self, mount_id: u32, key: &str) -> Result<Option<u64>> {
        self.get(schema::Noted, (mount_id, key))
    }

    /// What the bucket has, or may have, of an inode: keys and objects, in the order of the keys. There may be as many
    /// as the inode ever had names.
    pub fn objects_of(&self, inode: u64) -> impl Iterator<Item = Result<(String, ObjectRecord)>> + use<'a> {
        self.rows(schema::Objects, inode).map(|row| {
            let row = row?;
            let ((_, key), object) = row.entry()?;
            Ok((key.to_owned(), object))
        })
    }
}
