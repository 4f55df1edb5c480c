//! What an interrupted rename of a directory has left under the new name, so that the same rename can go on with it.
//!
//! Before its first copy a rename writes the new directory's marker (the empty object whose key is that of the
//! directory) with a note of where the rest comes from. The note is there until the last step. So whoever makes the
//! same rename again can tell what the first one has left from a directory that is somebody's.
//!
//! The note may be there for good, when the client died just before it was to go, or when the old directory was removed
//! by hand. A later directory of the old name is not what that note is about: all of it is younger.

use std::collections::HashMap;
use std::collections::hash_map::RandomState;
use std::hash::BuildHasher as _;

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use bytes::Bytes;
use cavern_ufs::{ListMode, Metadata, ObjectMeta, Precondition, Ufs, UfsError, WRITE_NAME, named};
use rustix::io::Errno;

use super::super::names::{is_empty, refuse};
use crate::error::ClientError;

/// Metadata of the new directory's marker: the key of the old one in base64, which leaves room in the 2 KB that S3 has
/// for metadata however long the key is.
const RENAMED_FROM: &str = "cavern-renamed-from";
/// Stores tell times by the second.
const SECOND_NS: i64 = 1_000_000_000;

/// Writes the marker of a new directory, with the note. `ENOTEMPTY` if others have made the directory meanwhile.
pub(super) async fn write_note(ufs: &Ufs, from: &str, to: &str) -> Result<(), ClientError> {
    let metadata = named(Metadata::from([(RENAMED_FROM.to_owned(), BASE64_STANDARD.encode(from))]));
    match ufs.put(to, &Bytes::new(), &metadata, Precondition::Nothing).await {
        Ok(_) => Ok(()),
        Err(UfsError::VersionChanged { .. }) => {
            refuse(Errno::NOTEMPTY, format!("{to} was made by somebody else while {from} was being renamed to it"))
        }
        Err(error) => Err(error.into()),
    }
}

/// The objects that are under the new name already, by hashes of their names below the directory: so many as one likes
/// take little memory.
#[derive(Debug, Default)]
pub(super) struct Leftover {
    hasher: RandomState,
    objects: HashMap<u64, Found>,
}

#[derive(Debug)]
struct Found {
    bytes: u64,
    /// Hash of the ETag.
    version: u64,
    mtime_ns: i64,
}

impl Leftover {
    /// What is below `to`, if a rename of `from` has left it there; `None` for any other directory.
    pub(super) async fn find(ufs: &Ufs, from: &str, to: &str) -> Result<Option<Self>, ClientError> {
        if !is_left_by_rename(ufs, from, to).await? {
            return Ok(None);
        }
        let mut left = Self::default();
        let mut lister = ufs.list(to, ListMode::Recursive);
        while let Some(page) = lister.next_page().await? {
            for object in page.objects {
                let name = left.hasher.hash_one(&object.key[to.len()..]);
                let version = left.hasher.hash_one(object.etag.as_str());
                left.objects.insert(name, Found { bytes: object.size, version, mtime_ns: object.mtime_ns });
            }
        }
        Ok(Some(left))
    }

    /// Whether an object of the old directory was copied, by its name there. `ENOTEMPTY` if the new one has something
    /// else under that name: `to` is its key.
    pub(super) fn has(&self, object: &ObjectMeta, name: &str, to: &str) -> Result<bool, ClientError> {
        let Some(found) = self.objects.get(&self.hasher.hash_one(name)) else { return Ok(false) };
        let is_same = found.version == self.hasher.hash_one(object.etag.as_str());
        // A copy may have another ETag than its source, but is not older.
        if found.bytes == object.size && (is_same || found.mtime_ns >= object.mtime_ns) {
            return Ok(true);
        }
        let key = &object.key;
        let reason = format!(
            "{to}{name} is no copy of {key}: one of them was changed since the rename was interrupted; remove the one \
             that is not wanted, and rename again"
        );
        refuse(Errno::NOTEMPTY, reason)
    }
}

async fn is_left_by_rename(ufs: &Ufs, from: &str, to: &str) -> Result<bool, ClientError> {
    let Some(marker) = marker_of(ufs, to).await? else { return Ok(false) };
    if let Some(noted) = marker.metadata.get(RENAMED_FROM) {
        return Ok(*noted == BASE64_STANDARD.encode(from) && is_as_old(ufs, from, marker.mtime_ns).await?);
    }
    // In the last step the old marker takes the place of the note, and is all that the old directory has.
    if !marker.metadata.contains_key(WRITE_NAME) || !is_empty(ufs, from).await? {
        return Ok(false);
    }
    Ok(marker_of(ufs, from).await?.is_some_and(|source| source.metadata == marker.metadata))
}

async fn marker_of(ufs: &Ufs, directory: &str) -> Result<Option<ObjectMeta>, ClientError> {
    match ufs.head(directory).await {
        Ok(marker) => Ok(Some(marker)),
        Err(UfsError::NotFound { .. }) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Whether a directory has anything that was there at a time already, or nothing at all.
async fn is_as_old(ufs: &Ufs, directory: &str, at_ns: i64) -> Result<bool, ClientError> {
    let mut lister = ufs.list(directory, ListMode::Recursive);
    let mut has_nothing = true;
    while let Some(page) = lister.next_page().await? {
        has_nothing &= page.objects.is_empty();
        if page.objects.iter().any(|object| object.mtime_ns / SECOND_NS <= at_ns / SECOND_NS) {
            return Ok(true);
        }
    }
    Ok(has_nothing)
}

#[cfg(test)]
mod tests {
    use cavern_conf::{host, schema};
    use cavern_ufs::MemoryBucket;

    use super::*;

    fn opened(name: &str) -> (MemoryBucket, Ufs) {
        let ufs = Ufs::open(&format!("memory://{name}"), &HashMap::new(), &schema::Ufs::default()).unwrap();
        (MemoryBucket::named(name), ufs)
    }

    #[tokio::test]
    async fn only_a_rename_of_the_same_directory_goes_on() {
        let (bucket, ufs) = opened("leftover-same");
        bucket.put("a/x", "x");
        bucket.put("other/x", "x");
        bucket.put("b/x", "x");
        assert!(Leftover::find(&ufs, "a/", "b/").await.unwrap().is_none(), "it has no marker");
        bucket.put("b/", "");
        assert!(Leftover::find(&ufs, "a/", "b/").await.unwrap().is_none(), "its marker says nothing");
        let refused = write_note(&ufs, "a/", "b/").await.unwrap_err();
        assert_eq!(refused.errno(), Errno::NOTEMPTY.raw_os_error(), "{refused}");
        bucket.delete("b/");
        write_note(&ufs, "a/", "b/").await.unwrap();
        assert!(Leftover::find(&ufs, "other/", "b/").await.unwrap().is_none(), "it is what another rename has left");
        let left = Leftover::find(&ufs, "a/", "b/").await.unwrap().unwrap();
        assert_eq!(left.objects.len(), 2);
    }

    #[tokio::test]
    async fn a_later_directory_of_the_old_name_is_another_one() {
        let (bucket, ufs) = opened("leftover-later");
        assert!(is_as_old(&ufs, "a/", 0).await.unwrap(), "nothing is left to be moved");
        bucket.put("a/x", "x");
        assert!(is_as_old(&ufs, "a/", host::wall_ns()).await.unwrap());
        assert!(!is_as_old(&ufs, "a/", host::wall_ns() - 3600 * SECOND_NS).await.unwrap());
    }

    #[test]
    fn a_copy_has_the_size_and_the_version_or_is_younger() {
        let mut left = Leftover::default();
        let found = Found { bytes: 3, version: left.hasher.hash_one("etag"), mtime_ns: 10 };
        left.objects.insert(left.hasher.hash_one("x"), found);
        let source = |size, etag: &str, mtime_ns| ObjectMeta {
            key: "a/x".to_owned(),
            size,
            etag: etag.to_owned(),
            mtime_ns,
            metadata: Metadata::new(),
        };
        for copied in [source(3, "etag", 11), source(3, "other", 10)] {
            assert!(left.has(&copied, "x", "b/").unwrap());
        }
        assert!(!left.has(&source(3, "etag", 10), "y", "b/").unwrap());
        for changed in [source(4, "etag", 10), source(3, "other", 11)] {
            let error = left.has(&changed, "x", "b/").unwrap_err();
            assert!(error.errno() == Errno::NOTEMPTY.raw_os_error() && error.to_string().contains("b/x"), "{error}");
        }
    }
}
