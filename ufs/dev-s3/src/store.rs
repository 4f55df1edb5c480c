//! Buckets and objects as files.
//!
//! ```text
//! ROOT/lock                                   held by the running store
//! ROOT/admin-token                            token of the second port, if there is one
//! ROOT/tmp/                                   drafts; emptied at start
//! ROOT/buckets/NAME/bucket                    record: creation time, rule of the key space
//! ROOT/buckets/NAME/objects/XX/SEQUENCE       one version of one object: data from byte 0, then its record
//! ROOT/buckets/NAME/uploads/ID/upload         record: key and attributes of a multipart upload
//! ROOT/buckets/NAME/uploads/ID/NNNNN-MD5-SEQ  one part
//! ```
//!
//! Keys appear only inside records, so every legal key can be stored. A file gets its final name by `rename` after it
//! is complete, and its name is a number that is never used again: a reader that has opened a version keeps it, and a
//! process killed at any instant leaves behind either the old version, or the new one, or both, in which case the
//! higher number wins at the next start. Nothing is synced: the store survives `kill -9`, not the loss of power.
//!
//! The index of a bucket (key → version) lives in memory, ordered by key; it is rebuilt from the records at start. What
//! has lost its place in it is kept only by a bucket that is told to (`versions`), and until the store stops. A bucket
//! may have a key space by rule (`key_space`) below it, of which nothing is on disk but the rule, in the
//! bucket's record, and what was put over it or deleted since, which has a file like any version.

mod bucket;
mod key_space;
mod list;
mod list_profile;
mod multipart;
mod object;
mod object_file;
mod record;
mod recovery;
mod upload;
mod versions;

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use cavern_conf::host;
use parking_lot::RwLock;
use rustix::fs::{FlockOperation, flock};

use crate::error::DevS3Error;

pub use bucket::{Bucket, PutCondition, Version};
use key_space::KeySpace;
pub use key_space::{KEYS_MAX, KeySpaceChanges, KeySpaceRule};
pub use list::{ListPage, ListQuery};
pub use list_profile::{ListProfile, RateScope};
pub use multipart::{PartInfo, UploadInfo, UploadPage};
pub use object::{Content, Object};
pub use object_file::Draft;
use object_file::Tmp;
pub use record::{Attributes, KEY_MAX_BYTES};
pub(crate) use record::{hex, now_s};
pub use versions::VersionRow;

/// All buckets under one root directory. Its methods make file-system calls: call them off the async threads.
pub struct Store {
    buckets_dir: PathBuf,
    tmp: Tmp,
    buckets: RwLock<BTreeMap<String, Arc<Bucket>>>,
    sequence: Arc<AtomicU64>,
    _lock: File,
}

impl Store {
    /// Opens the store under `root`, which is created if need be, and reads the records of all objects.
    ///
    /// # Errors
    /// [`DevS3Error::RootInUse`] where another process has it open, [`DevS3Error::Io`].
    pub fn open(root: &Path) -> Result<Self, DevS3Error> {
        fs::create_dir_all(root).map_err(DevS3Error::io("create", root))?;
        let lock_path = root.join("lock");
        let lock = File::create(&lock_path).map_err(DevS3Error::io("create", &lock_path))?;
        flock(&lock, FlockOperation::NonBlockingLockExclusive)
            .map_err(|_| DevS3Error::RootInUse { root: root.to_path_buf() })?;
        let tmp_dir = root.join("tmp");
        if tmp_dir.exists() {
            fs::remove_dir_all(&tmp_dir).map_err(DevS3Error::io("empty", &tmp_dir))?;
        }
        let buckets_dir = root.join("buckets");
        for dir in [&tmp_dir, &buckets_dir] {
            fs::create_dir_all(dir).map_err(DevS3Error::io("create", dir))?;
        }
        let tmp = Tmp::new(&tmp_dir);
        let sequence = Arc::new(AtomicU64::new(1));
        let mut buckets = BTreeMap::new();
        for entry in fs::read_dir(&buckets_dir).map_err(DevS3Error::io("read", &buckets_dir))? {
            let entry = entry.map_err(DevS3Error::io("read", &buckets_dir))?;
            let Ok(name) = entry.file_name().into_string() else { continue };
            let bucket = recovery::read_bucket(&name, &entry.path(), &tmp, &sequence)?;
            buckets.insert(name, Arc::new(bucket));
        }
        Ok(Self { buckets_dir, tmp, buckets: RwLock::new(buckets), sequence, _lock: lock })
    }

    /// Makes an empty bucket.
    ///
    /// # Errors
    /// [`DevS3Error::InvalidBucketName`], [`DevS3Error::BucketExists`], [`DevS3Error::Io`].
    pub fn create_bucket(&self, name: &str) -> Result<(), DevS3Error> {
        if !s3s::path::check_bucket_name(name) {
            return Err(DevS3Error::InvalidBucketName(name.to_owned()));
        }
        if self.buckets.read().contains_key(name) {
            return Err(DevS3Error::BucketExists(name.to_owned()));
        }
        let draft = self.tmp.path();
        let created_s = now_s();
        Bucket::lay_out(&draft, created_s)?;
        let dir = self.buckets_dir.join(name);
        // `rename` onto a directory that is not empty fails, so of two that race one wins.
        if fs::rename(&draft, &dir).is_err() {
            let _ = fs::remove_dir_all(&draft);
            return Err(DevS3Error::BucketExists(name.to_owned()));
        }
        let bucket = Bucket::new(name, dir, created_s, self.tmp.clone(), Arc::clone(&self.sequence));
        self.buckets.write().insert(name.to_owned(), Arc::new(bucket));
        Ok(())
    }

    /// Removes a bucket and its unfinished uploads.
    ///
    /// # Errors
    /// [`DevS3Error::NoSuchBucket`], [`DevS3Error::BucketNotEmpty`], [`DevS3Error::Io`].
    pub fn delete_bucket(&self, name: &str) -> Result<(), DevS3Error> {
        self.bucket(name)?.close()?;
        let dir = self.buckets_dir.join(name);
        let gone = self.tmp.path();
        fs::rename(&dir, &gone).map_err(DevS3Error::io("remove", &dir))?;
        self.buckets.write().remove(name);
        fs::remove_dir_all(&gone).map_err(DevS3Error::io("remove", &gone))
    }

    /// Finds a bucket.
    ///
    /// # Errors
    /// [`DevS3Error::NoSuchBucket`].
    pub fn bucket(&self, name: &str) -> Result<Arc<Bucket>, DevS3Error> {
        self.buckets.read().get(name).cloned().ok_or_else(|| DevS3Error::NoSuchBucket(name.to_owned()))
    }

    /// All buckets, by name.
    pub fn buckets(&self) -> Vec<Arc<Bucket>> {
        self.buckets.read().values().cloned().collect()
    }

    /// An empty draft of an object or part.
    ///
    /// # Errors
    /// [`DevS3Error::Io`].
    pub fn draft(&self) -> Result<Draft, DevS3Error> {
        Draft::create(self.tmp.path())
    }

    /// Stores `data` under `key`, as a PUT would: for tests and for making demo data.
    ///
    /// # Errors
    /// [`DevS3Error::NoSuchBucket`], [`DevS3Error::InvalidKey`], [`DevS3Error::Io`].
    pub fn put(&self, bucket: &str, key: &str, data: &[u8]) -> Result<Arc<Object>, DevS3Error> {
        use md5::Digest;
        let bucket = self.bucket(bucket)?;
        let mut draft = self.draft()?;
        draft.write(data)?;
        let version = Version { etag: hex(&md5::Md5::digest(data)), attributes: Attributes::default() };
        bucket.commit(draft, key, version, &PutCondition::default())
    }

    /// Gives a bucket objects by rule, in place of those of an earlier rule, or takes them away with `None`. With a
    /// rule the bucket is made if need be. Objects that were put, and deletions, stay.
    ///
    /// # Errors
    /// [`DevS3Error::InvalidKeySpace`], [`DevS3Error::NoSuchBucket`], [`DevS3Error::InvalidBucketName`],
    /// [`DevS3Error::Io`].
    pub fn set_key_space(&self, bucket: &str, rule: Option<KeySpaceRule>) -> Result<(), DevS3Error> {
        let space = rule.map(KeySpace::new).transpose()?;
        if space.is_some() {
            match self.create_bucket(bucket) {
                Ok(()) | Err(DevS3Error::BucketExists(_)) => {}
                Err(error) => return Err(error),
            }
        }
        self.bucket(bucket)?.set_key_space(space)
    }

    /// Stores an object of `size` zero bytes that takes no room on disk. Its ETag has the form of a multipart upload's,
    /// is not the MD5 of the content, and differs each time.
    ///
    /// # Errors
    /// [`DevS3Error::NoSuchBucket`], [`DevS3Error::InvalidKey`], [`DevS3Error::Io`].
    pub fn put_sparse(&self, bucket: &str, key: &str, size: u64) -> Result<Arc<Object>, DevS3Error> {
        use md5::Digest;
        let bucket = self.bucket(bucket)?;
        let mut draft = self.draft()?;
        draft.extend_with_hole(size)?;
        let unique = format!("{key} {size} {} {}", host::wall_ns(), self.sequence.load(Ordering::Relaxed));
        let version =
            Version { etag: format!("{}-1", hex(&md5::Md5::digest(unique))), attributes: Attributes::default() };
        bucket.commit(draft, key, version, &PutCondition::default())
    }
}

#[cfg(test)]
mod tests;
