//! One bucket: its index and the life of an object's versions.

use std::borrow::Borrow;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::ops::Bound;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::{Mutex, RwLock};

use super::object_file::{Draft, Tmp};
use super::record::{Attributes, BucketRecord, ObjectRecord, check_key, now_s, seal};
use super::upload::Upload;
use crate::error::DevS3Error;

/// Object files are spread over so many directories, which are made when they are first needed.
const FAN_OUT: u64 = 256;

/// A key in the index. `str` and its bytes have the same order, and bounds of ranges (the first key after a common
/// prefix) need not be UTF-8, so the index is asked with bytes.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Key(Box<str>);

impl Key {
    pub fn new(key: &str) -> Self {
        Self(key.into())
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl Borrow<[u8]> for Key {
    fn borrow(&self) -> &[u8] {
        self.0.as_bytes()
    }
}

/// Keys of a bucket and the versions they stand for.
pub(super) type Index = BTreeMap<Key, Arc<Object>>;

/// One version of an object.
#[derive(Debug, PartialEq, Eq)]
pub struct Object {
    pub size: u64,
    /// Without quotes.
    pub etag: String,
    /// Seconds since the epoch.
    pub modified_s: i64,
    /// Boxed, since most objects have none.
    attributes: Option<Box<Attributes>>,
    /// Later versions have higher numbers.
    sequence: u64,
}

impl Object {
    pub(super) fn from_record(record: ObjectRecord, sequence: u64) -> (String, Self) {
        let attributes = record.attributes.filter(|attributes| *attributes != Attributes::default()).map(Box::new);
        let object = Self { size: record.size, etag: record.etag, modified_s: record.modified_s, attributes, sequence };
        (record.key, object)
    }

    /// Content type, user metadata and the like.
    pub fn attributes(&self) -> Option<&Attributes> {
        self.attributes.as_deref()
    }
}

/// What a draft becomes.
pub struct Version {
    pub etag: String,
    pub attributes: Attributes,
}

/// Condition of a PUT on what the key stands for now.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PutCondition {
    /// `If-None-Match: *`.
    pub must_be_absent: bool,
    /// `If-Match`.
    pub must_have_etag: Option<String>,
}

impl PutCondition {
    fn check(&self, key: &str, present: Option<&Arc<Object>>) -> Result<(), DevS3Error> {
        if self.must_be_absent && present.is_some() {
            return Err(DevS3Error::Precondition("If-None-Match"));
        }
        match (&self.must_have_etag, present) {
            (None, _) => Ok(()),
            (Some(_), None) => Err(DevS3Error::NoSuchKey(key.to_owned())),
            (Some(etag), Some(object)) if etag == "*" || *etag == object.etag => Ok(()),
            (Some(_), Some(_)) => Err(DevS3Error::Precondition("If-Match")),
        }
    }
}

/// One bucket.
pub struct Bucket {
    name: String,
    pub(super) dir: PathBuf,
    created_s: i64,
    pub(super) tmp: Tmp,
    pub(super) sequence: Arc<AtomicU64>,
    pub(super) contents: RwLock<Contents>,
    pub(super) uploads: Mutex<BTreeMap<String, Upload>>,
}

#[derive(Default)]
pub(super) struct Contents {
    pub index: Index,
    /// The bucket is being deleted: nothing may be added.
    closed: bool,
}

impl Bucket {
    /// Makes the directories of a bucket under `dir`.
    pub(super) fn lay_out(dir: &Path, created_s: i64) -> Result<(), DevS3Error> {
        let make = |path: &Path| fs::create_dir_all(path).map_err(DevS3Error::io("create", path));
        make(&dir.join("objects"))?;
        make(&dir.join("uploads"))?;
        let record = dir.join("bucket");
        fs::write(&record, seal(&BucketRecord { created_s })).map_err(DevS3Error::io("write", &record))
    }

    pub(super) fn new(name: &str, dir: PathBuf, created_s: i64, tmp: Tmp, sequence: Arc<AtomicU64>) -> Self {
        Self {
            name: name.to_owned(),
            dir,
            created_s,
            tmp,
            sequence,
            contents: RwLock::default(),
            uploads: Mutex::default(),
        }
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// Creation time, in seconds since the epoch.
    pub fn created_s(&self) -> i64 {
        self.created_s
    }

    /// Number of objects.
    pub fn len(&self) -> usize {
        self.contents.read().index.len()
    }

    /// Whether there are no objects.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The current version under `key`.
    ///
    /// # Errors
    /// [`DevS3Error::NoSuchKey`].
    pub fn object(&self, key: &str) -> Result<Arc<Object>, DevS3Error> {
        let contents = self.contents.read();
        contents.index.get(key.as_bytes()).cloned().ok_or_else(|| DevS3Error::NoSuchKey(key.to_owned()))
    }

    /// Opens the current version under `key`. The file stays readable when the object is replaced or deleted.
    ///
    /// # Errors
    /// [`DevS3Error::NoSuchKey`], [`DevS3Error::Io`].
    pub fn open(&self, key: &str) -> Result<(Arc<Object>, File), DevS3Error> {
        loop {
            let object = self.object(key)?;
            let path = self.path_of(object.sequence);
            match File::open(&path) {
                Ok(file) => return Ok((object, file)),
                // Replaced or deleted since it was looked up: then the index says something else now.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {
                    let now = self.object(key)?;
                    if now.sequence == object.sequence {
                        return Err(DevS3Error::io("open", &path)(error));
                    }
                }
                Err(error) => return Err(DevS3Error::io("open", &path)(error)),
            }
        }
    }

    /// Makes `draft` the current version under `key`. Of two commits at once, the one with the higher sequence number
    /// stays, at this moment as after a restart.
    ///
    /// # Errors
    /// [`DevS3Error::InvalidKey`], [`DevS3Error::Precondition`] or [`DevS3Error::NoSuchKey`] where `condition` does not
    /// hold, [`DevS3Error::NoSuchBucket`] where the bucket was deleted meanwhile, [`DevS3Error::Io`].
    pub fn commit(
        &self,
        mut draft: Draft,
        key: &str,
        version: Version,
        condition: &PutCondition,
    ) -> Result<Arc<Object>, DevS3Error> {
        check_key(key)?;
        condition.check(key, self.object(key).ok().as_ref())?;
        let record = ObjectRecord {
            key: key.to_owned(),
            size: draft.size(),
            etag: version.etag,
            modified_s: now_s(),
            attributes: Some(version.attributes),
        };
        draft.finish(&seal(&record))?;
        let sequence = self.sequence.fetch_add(1, Ordering::Relaxed);
        let path = self.path_of(sequence);
        self.place(draft, &path)?;
        let object = Arc::new(Object::from_record(record, sequence).1);
        match self.install(key, &object, condition) {
            Ok(superseded) => {
                if let Some(sequence) = superseded {
                    self.unlink(sequence)?;
                }
                Ok(object)
            }
            Err(error) => {
                self.unlink(sequence)?;
                Err(error)
            }
        }
    }

    fn place(&self, draft: Draft, path: &Path) -> Result<(), DevS3Error> {
        if let Some(dir) = path.parent()
            && !dir.exists()
            && let Err(error) = fs::create_dir(dir)
        {
            match error.kind() {
                io::ErrorKind::AlreadyExists => {}
                io::ErrorKind::NotFound => return Err(DevS3Error::NoSuchBucket(self.name.clone())),
                _ => return Err(DevS3Error::io("create", dir)(error)),
            }
        }
        draft.place(path).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => DevS3Error::NoSuchBucket(self.name.clone()),
            _ => DevS3Error::io("rename to", path)(error),
        })
    }

    /// Puts a version into the index and returns the number of the one that lost its place.
    fn install(&self, key: &str, object: &Arc<Object>, condition: &PutCondition) -> Result<Option<u64>, DevS3Error> {
        let mut contents = self.contents.write();
        if contents.closed {
            return Err(DevS3Error::NoSuchBucket(self.name.clone()));
        }
        let present = contents.index.get(key.as_bytes());
        condition.check(key, present)?;
        if let Some(present) = present
            && present.sequence > object.sequence
        {
            return Ok(Some(object.sequence));
        }
        let old = contents.index.insert(Key::new(key), Arc::clone(object));
        Ok(old.map(|old| old.sequence))
    }

    /// Takes a version that was found on disk into the index and returns the number of the one that lost its place.
    pub(super) fn recover(&self, key: &str, object: Object) -> Option<u64> {
        // Without a condition, in a bucket that is open, this cannot fail.
        self.install(key, &Arc::new(object), &PutCondition::default()).ok().flatten()
    }

    /// Deletes the object under `key`, if there is one.
    ///
    /// # Errors
    /// [`DevS3Error::Precondition`] where its ETag is not `must_have_etag`, [`DevS3Error::Io`].
    pub fn delete(&self, key: &str, must_have_etag: Option<&str>) -> Result<(), DevS3Error> {
        let removed = {
            let mut contents = self.contents.write();
            if let (Some(etag), Some(object)) = (must_have_etag, contents.index.get(key.as_bytes()))
                && etag != "*"
                && etag != object.etag
            {
                return Err(DevS3Error::Precondition("If-Match"));
            }
            contents.index.remove(key.as_bytes())
        };
        removed.map_or(Ok(()), |object| self.unlink(object.sequence))
    }

    /// Refuses all further additions; only for an empty bucket.
    pub(super) fn close(&self) -> Result<(), DevS3Error> {
        let mut contents = self.contents.write();
        if !contents.index.is_empty() {
            return Err(DevS3Error::BucketNotEmpty(self.name.clone()));
        }
        contents.closed = true;
        Ok(())
    }

    pub(super) fn path_of(&self, sequence: u64) -> PathBuf {
        self.dir.join(format!("objects/{:02x}/{sequence:016x}", sequence % FAN_OUT))
    }

    pub(super) fn unlink(&self, sequence: u64) -> Result<(), DevS3Error> {
        let path = self.path_of(sequence);
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(DevS3Error::io("remove", &path)(error)),
            _ => Ok(()),
        }
    }
}

/// The first key at or after a bound, for the listing.
pub(super) fn first_from<'i>(
    index: &'i Index,
    from: Bound<&[u8]>,
) -> std::collections::btree_map::Range<'i, Key, Arc<Object>> {
    index.range::<[u8], _>((from, Bound::Unbounded))
}
