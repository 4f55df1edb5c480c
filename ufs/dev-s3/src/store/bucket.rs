//! One bucket: its index and the life of an object's versions.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::{Mutex, RwLock};
use tokio::time::Instant;

use super::key_space::{KeySpace, KeySpaceRule};
use super::list_profile::{ListPacer, ListProfile};
use super::object::{Content, Index, Key, Object, Origin, Replaced};
use super::object_file::{Draft, Tmp};
use super::record::{Attributes, BucketRecord, ObjectRecord, check_key, now_s, seal};
use super::upload::Upload;
use crate::error::DevS3Error;

/// Object files are spread over so many directories, which are made when they are first needed.
const FAN_OUT: u64 = 256;

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
    pacer: RwLock<Arc<ListPacer>>,
}

#[derive(Default)]
pub(super) struct Contents {
    pub index: Index,
    /// Objects by rule, below those of the index.
    pub space: Option<Arc<KeySpace>>,
    /// Versions that are kept; `None` where none are.
    pub replaced: Option<Replaced>,
    /// The bucket is being deleted: nothing may be added.
    closed: bool,
}

impl Contents {
    pub fn object(&self, key: &str) -> Option<Arc<Object>> {
        match self.index.get(key.as_bytes()) {
            Some(object) => (!object.is_deleted()).then(|| Arc::clone(object)),
            None => self.space.as_ref()?.object(key).map(Arc::new),
        }
    }

    /// Puts a version in the place of another, whose number is returned unless it is kept.
    fn replace(&mut self, key: &str, object: &Arc<Object>) -> Option<u64> {
        let generated = self.replaced.as_ref().and_then(|_| self.object(key));
        let old = self.index.insert(Key::new(key), Arc::clone(object));
        let Some(replaced) = &mut self.replaced else { return old.map(|old| old.sequence) };
        replaced.entry(Key::new(key)).or_default().extend(old.or(generated));
        None
    }
}

impl Bucket {
    /// Makes the directories of a bucket under `dir`.
    pub(super) fn lay_out(dir: &Path, created_s: i64) -> Result<(), DevS3Error> {
        let make = |path: &Path| fs::create_dir_all(path).map_err(DevS3Error::io("create", path));
        make(&dir.join("objects"))?;
        make(&dir.join("uploads"))?;
        let record = dir.join("bucket");
        fs::write(&record, seal(&BucketRecord { created_s, key_space: None })).map_err(DevS3Error::io("write", &record))
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
            pacer: RwLock::default(),
        }
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// Creation time, in seconds since the epoch.
    pub fn created_s(&self) -> i64 {
        self.created_s
    }

    /// Number of objects that are stored; those of a key space by rule do not count.
    pub fn len(&self) -> usize {
        self.contents.read().index.values().filter(|object| !object.is_deleted()).count()
    }

    /// Whether no objects are stored.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The current version under `key`.
    ///
    /// # Errors
    /// [`DevS3Error::NoSuchKey`].
    pub fn object(&self, key: &str) -> Result<Arc<Object>, DevS3Error> {
        self.contents.read().object(key).ok_or_else(|| DevS3Error::NoSuchKey(key.to_owned()))
    }

    /// Opens the current version under `key`. Its content stays readable when the object is replaced or deleted.
    ///
    /// # Errors
    /// [`DevS3Error::NoSuchKey`], [`DevS3Error::Io`].
    pub fn open(&self, key: &str) -> Result<(Arc<Object>, Content), DevS3Error> {
        loop {
            let object = self.object(key)?;
            if let Origin::Generated { seed } = object.origin {
                return Ok((object, Content::Generated { seed }));
            }
            let path = self.path_of(object.sequence);
            match File::open(&path) {
                Ok(file) => return Ok((object, Content::File(file))),
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
        draft: Draft,
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
            deleted: false,
        };
        self.add_version(draft, record, condition)
    }

    fn add_version(
        &self,
        mut draft: Draft,
        record: ObjectRecord,
        condition: &PutCondition,
    ) -> Result<Arc<Object>, DevS3Error> {
        draft.finish(&seal(&record))?;
        let sequence = self.sequence.fetch_add(1, Ordering::Relaxed);
        let path = self.path_of(sequence);
        self.place(draft, &path)?;
        let (key, object) = Object::from_record(record, sequence);
        let object = Arc::new(object);
        match self.install(&key, &object, condition) {
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
        condition.check(key, contents.object(key).as_ref())?;
        if let Some(present) = contents.index.get(key.as_bytes())
            && present.sequence > object.sequence
        {
            return Ok(Some(object.sequence));
        }
        Ok(contents.replace(key, object))
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
        let (space, keeps_versions) = {
            let contents = self.contents.read();
            (contents.space.clone(), contents.replaced.is_some())
        };
        if keeps_versions || space.is_some_and(|space| space.contains(key)) {
            return self.hide(key, must_have_etag);
        }
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

    /// Deletes the object under a key of the key space, or a version that is kept: a file says so from then on.
    fn hide(&self, key: &str, must_have_etag: Option<&str>) -> Result<(), DevS3Error> {
        if self.object(key).is_err() {
            return Ok(());
        }
        let condition = PutCondition { must_be_absent: false, must_have_etag: must_have_etag.map(str::to_owned) };
        let record =
            ObjectRecord { key: key.to_owned(), modified_s: now_s(), deleted: true, ..ObjectRecord::default() };
        match self.add_version(Draft::create(self.tmp.path())?, record, &condition) {
            // Deleted by another request meanwhile.
            Ok(_) | Err(DevS3Error::NoSuchKey(_)) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// The rule of the bucket's key space, if it has one.
    pub fn key_space(&self) -> Option<KeySpaceRule> {
        self.contents.read().space.as_ref().map(|space| space.rule().clone())
    }

    /// Puts objects by rule below those that are stored, in place of those of an earlier rule. What was stored and
    /// deleted stays so.
    pub(super) fn set_key_space(&self, space: Option<KeySpace>) -> Result<(), DevS3Error> {
        let key_space = space.as_ref().map(KeySpace::to_json).transpose()?;
        let (draft, path) = (self.tmp.path(), self.dir.join("bucket"));
        let record = seal(&BucketRecord { created_s: self.created_s, key_space });
        fs::write(&draft, record).map_err(DevS3Error::io("write", &draft))?;
        fs::rename(&draft, &path).map_err(DevS3Error::io("rename to", &path))?;
        self.contents.write().space = space.map(Arc::new);
        Ok(())
    }

    /// How listings are served.
    pub fn list_profile(&self) -> ListProfile {
        self.pacer.read().profile().clone()
    }

    /// Has listings served so until the store stops.
    pub fn set_list_profile(&self, profile: ListProfile) {
        *self.pacer.write() = Arc::new(ListPacer::new(profile));
    }

    /// How long a page of a listing below `prefix` is to wait, as the profile says.
    ///
    /// # Errors
    /// [`DevS3Error::SlowDown`] where there are more than the profile allows.
    pub fn admit_page(&self, prefix: &str) -> Result<Duration, DevS3Error> {
        let pacer = self.pacer.read().clone();
        pacer.admit(prefix, Instant::now()).ok_or_else(|| DevS3Error::SlowDown(self.name.clone()))
    }

    /// Refuses all further additions; only for an empty bucket.
    pub(super) fn close(&self) -> Result<(), DevS3Error> {
        let mut contents = self.contents.write();
        if contents.space.is_some() || contents.index.values().any(|object| !object.is_deleted()) {
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
