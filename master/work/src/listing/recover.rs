//! What objects of a mount that is recovered say of themselves: a HEAD for each, many at a time, and the content of
//! symbolic links.

use cavern_proto::master::Kind;
use cavern_proto::record::{ListedEntry, Restored};
use cavern_ufs::ObjectMeta;
use futures::{StreamExt, TryStreamExt, stream};

use super::Listings;
use crate::error::WorkError;
use crate::mounts::OpenMount;
use crate::persist::metadata;

/// HEAD requests of one directory at a time.
const HEADS: usize = 16;
/// Longest target of a symbolic link.
const TARGET_MAX: u64 = 4095;

impl Listings {
    /// The entries of a directory with what their metadata say of them. An object that is gone by now is left out.
    pub(super) async fn recover(
        &self,
        mount: &OpenMount,
        key_prefix: &str,
        entries: Vec<ListedEntry>,
    ) -> Result<Vec<ListedEntry>, WorkError> {
        let asked = stream::iter(entries).map(|entry| self.recover_one(mount, key_prefix, entry));
        let recovered: Vec<Option<ListedEntry>> = asked.buffered(HEADS).try_collect().await?;
        Ok(recovered.into_iter().flatten().collect())
    }

    async fn recover_one(
        &self,
        mount: &OpenMount,
        key_prefix: &str,
        entry: ListedEntry,
    ) -> Result<Option<ListedEntry>, WorkError> {
        let Ok(name) = std::str::from_utf8(&entry.name) else { return Ok(None) };
        let is_directory = entry.kind() == Kind::Directory;
        let key = format!("{key_prefix}{name}{}", if is_directory { "/" } else { "" });
        // A directory need not have an object of its own.
        let Some(object) = self.head(mount, &key).await? else { return Ok(is_directory.then_some(entry)) };
        let restored = match metadata::read(&object) {
            Some(restored) if (restored.kind() == Kind::Directory) == is_directory => {
                Some(self.with_target(mount, &object, restored).await?)
            }
            // Somebody else's object, or one that does not know what it is.
            _ => None,
        };
        if restored.as_ref().is_some_and(|restored| restored.incomplete) {
            tracing::warn!(
                mount = mount.mount.path,
                key,
                "not all attributes are in the bucket: the rest is not recovered"
            );
        }
        let ObjectMeta { size, mtime_ns, etag, .. } = object;
        let size = if is_directory { 0 } else { size };
        Ok(Some(ListedEntry { size, mtime_ns, etag, restored, ..entry }))
    }

    /// An entry with its target, if it is a symbolic link; without a sound one it is none.
    async fn with_target(
        &self,
        mount: &OpenMount,
        object: &ObjectMeta,
        mut restored: Restored,
    ) -> Result<Restored, WorkError> {
        if restored.kind() != Kind::Symlink {
            return Ok(restored);
        }
        if (1..=TARGET_MAX).contains(&object.size) {
            let content = mount.ufs.get_bytes(&object.key, &object.etag, 0..object.size);
            restored.target = self.request(mount, content).await?;
        }
        if restored.target.is_empty() || restored.target.contains(&0) {
            (restored.kind, restored.incomplete) = (Kind::File as i32, true);
            restored.target.clear();
        }
        Ok(restored)
    }
}
