//! Versions: what was replaced or deleted in a bucket that keeps it, until the store stops.
//!
//! A version that has lost its place stays in its file and in memory, and a key that is deleted gets a file that says
//! so. A start finds the newest of each key and removes the others, as after a process that was killed.

use std::collections::BTreeMap;
use std::fs::File;
use std::ops::Bound;
use std::sync::Arc;

use super::bucket::Bucket;
use super::list::{ListQuery, page};
use super::object::{Content, Key, Object, Origin};
use crate::error::DevS3Error;

/// One row of a listing of versions.
#[derive(Debug, PartialEq, Eq)]
pub struct VersionRow {
    pub key: String,
    pub version: Arc<Object>,
    /// It is what the key stands for now.
    pub is_latest: bool,
}

impl Object {
    /// Names this version among those of its key.
    pub fn version_id(&self) -> String {
        if self.sequence == 0 { "null".to_owned() } else { format!("{:016x}", self.sequence) }
    }
}

impl Bucket {
    /// Whether what is replaced or deleted from now on is kept, until the store stops. What was kept goes when that
    /// ends.
    ///
    /// # Errors
    /// [`DevS3Error::Io`].
    pub fn keep_versions(&self, keep: bool) -> Result<(), DevS3Error> {
        let before = {
            let mut contents = self.contents.write();
            match (keep, contents.replaced.take()) {
                (true, before) => {
                    contents.replaced = Some(before.unwrap_or_default());
                    None
                }
                (false, before) => before,
            }
        };
        before
            .into_iter()
            .flatten()
            .flat_map(|(_, versions)| versions)
            .try_for_each(|version| self.unlink(version.sequence))
    }

    /// Whether it keeps versions.
    pub fn keeps_versions(&self) -> bool {
        self.contents.read().replaced.is_some()
    }

    /// What an answer says of a version: nothing where none are kept.
    pub fn shown_version(&self, object: &Object) -> Option<String> {
        self.keeps_versions().then(|| object.version_id())
    }

    /// A version of the object under `key`.
    ///
    /// # Errors
    /// [`DevS3Error::NoSuchVersion`], also for a deletion.
    pub fn version(&self, key: &str, id: &str) -> Result<Arc<Object>, DevS3Error> {
        let contents = self.contents.read();
        let replaced = contents.replaced.as_ref().and_then(|replaced| replaced.get(key.as_bytes()));
        let mut versions = contents.object(key).into_iter().chain(replaced.into_iter().flatten().cloned());
        let found = versions.find(|version| version.version_id() == id && !version.is_deleted());
        found.ok_or_else(|| DevS3Error::NoSuchVersion { key: key.to_owned(), version: id.to_owned() })
    }

    /// Opens a version of the object under `key`. Its content stays readable.
    ///
    /// # Errors
    /// Those of [`Self::version`], [`DevS3Error::Io`].
    pub fn open_version(&self, key: &str, id: &str) -> Result<(Arc<Object>, Content), DevS3Error> {
        let object = self.version(key, id)?;
        if let Origin::Generated { seed } = object.origin {
            return Ok((object, Content::Generated { seed }));
        }
        let path = self.path_of(object.sequence);
        let file = File::open(&path).map_err(DevS3Error::io("open", &path))?;
        Ok((object, Content::File(file)))
    }

    /// The versions of all keys that begin with `prefix`, in the order of keys and the newest of each first: at most so
    /// many, and whether there are more.
    pub fn list_versions(&self, prefix: &str, limit: usize) -> (Vec<VersionRow>, bool) {
        let contents = self.contents.read();
        let from: (Bound<&[u8]>, Bound<&[u8]>) = (Bound::Included(prefix.as_bytes()), Bound::Unbounded);
        let begins = |key: &Key| key.as_str().starts_with(prefix);
        let query = ListQuery { prefix, limit: limit + 1, ..ListQuery::default() };
        let current = page(&contents.index, contents.space.as_deref(), &query).objects;
        let mut versions: BTreeMap<_, _> = current.into_iter().map(|(key, object)| (key, vec![object])).collect();
        let stored = contents.index.range::<[u8], _>(from).take_while(|(key, _)| begins(key));
        for (key, marker) in stored.filter(|(_, object)| object.is_deleted()) {
            versions.insert(key.as_str().to_owned(), vec![Arc::clone(marker)]);
        }
        for (key, old) in contents.replaced.iter().flat_map(|replaced| replaced.range::<[u8], _>(from)) {
            if !begins(key) {
                break;
            }
            versions.entry(key.as_str().to_owned()).or_default().extend(old.iter().rev().cloned());
        }
        let rows = versions.into_iter().flat_map(|(key, versions)| {
            let placed = versions.into_iter().enumerate();
            placed.map(move |(place, version)| VersionRow { key: key.clone(), version, is_latest: place == 0 })
        });
        let mut rows: Vec<_> = rows.take(limit + 1).collect();
        let has_more = rows.len() > limit;
        rows.truncate(limit);
        (rows, has_more)
    }
}
