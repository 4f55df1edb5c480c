//! Reads of the directories of which a bucket has names that the namespace lacks.

use super::Tables;
use crate::Family;
use crate::error::StateError;
use crate::records::{leading_id, unlisted_key};

impl Tables<'_> {
    /// Up to `limit` of a mount's unlisted directories: paths below its root, and inodes, beginning after a path.
    pub fn unlisted(
        &self,
        mount_id: u32,
        after: Option<&[u8]>,
        limit: usize,
    ) -> Result<Vec<(Vec<u8>, u64)>, StateError> {
        let start = unlisted_key(mount_id, after.unwrap_or_default());
        let mut found = Vec::new();
        for item in self.records_from(Family::Unlisted, &start) {
            let (key, inode) = item?;
            let Some(path) = key.strip_prefix(&mount_id.to_be_bytes()).filter(|_| found.len() < limit) else { break };
            if after != Some(path) {
                let inode = leading_id(&inode).ok_or_else(|| StateError::Corrupt("an unlisted directory".into()))?;
                found.push((path.to_vec(), inode));
            }
        }
        Ok(found)
    }

    /// Whether a directory of a mount, or any below it, is unlisted; by its path below the mount's root.
    pub fn has_unlisted(&self, mount_id: u32, path: &[u8]) -> Result<bool, StateError> {
        let start = unlisted_key(mount_id, path);
        let mut items = self.records_from(Family::Unlisted, &start);
        Ok(items.next().transpose()?.is_some_and(|(key, _)| key.starts_with(&start)))
    }
}
