//! The requests of a rename of a directory, in their order: so that it can be made again, whatever ends it.
//!
//! The marker of the old directory (the object whose key is that of the directory) is the last to move. Until then that
//! of the new one has a note, see `leftover`.

use std::collections::HashSet;
use std::collections::hash_map::RandomState;
use std::hash::BuildHasher as _;
use std::time::Duration;

use cavern_ufs::{ListMode, ObjectMeta, Precondition, Ufs, UfsError};
use futures::stream::{self, StreamExt, TryStreamExt};
use rustix::io::Errno;
use tokio::time::Instant;

use super::super::KEY_BYTES_MAX;
use super::super::names::refuse;
use super::leftover::{Leftover, write_note};
use crate::error::ClientError;
use crate::stats::Stats;

/// Objects of a directory that are copied or deleted at a time.
const OBJECTS_AT_A_TIME: usize = 16;
/// A rename that takes longer is logged this often.
const LOG_EVERY: Duration = Duration::from_secs(10);

/// A rename of all that is below one key prefix to another.
pub(super) struct DirectoryRename<'a> {
    ufs: &'a Ufs,
    stats: &'a Stats,
    from: &'a str,
    to: &'a str,
    /// Of an earlier attempt.
    left: Option<Leftover>,
    is_noted: bool,
    /// The object of the old directory itself.
    marker: Option<ObjectMeta>,
    hasher: RandomState,
    /// What was copied, by hashes of key and version: so many objects as one likes take little memory.
    copied: HashSet<u64>,
    progress: Progress,
}

impl<'a> DirectoryRename<'a> {
    /// One that goes on with what an earlier attempt has left, or else has nothing under the new name.
    pub(super) fn new(ufs: &'a Ufs, stats: &'a Stats, from: &'a str, to: &'a str, left: Option<Leftover>) -> Self {
        Self {
            ufs,
            stats,
            from,
            to,
            is_noted: left.is_some(),
            left,
            marker: None,
            hasher: RandomState::new(),
            copied: HashSet::new(),
            progress: Progress::new(format!("{from} → {to}")),
        }
    }

    /// Copies every object but the marker.
    pub(super) async fn copy(&mut self) -> Result<(), ClientError> {
        let mut lister = self.ufs.list(self.from, ListMode::Recursive);
        while let Some(page) = lister.next_page().await? {
            if page.hidden > 0 {
                let from = self.from;
                return refuse(Errno::IO, format!("{from} has keys that are not UTF-8, which cannot be copied"));
            }
            let missing = self.missing(page.objects)?;
            if !missing.is_empty() && !self.is_noted {
                write_note(self.ufs, self.from, self.to).await?;
                self.is_noted = true;
            }
            let (ufs, hasher, prefix_bytes, to) = (self.ufs, &self.hasher, self.from.len(), self.to);
            let copies = missing.into_iter().map(|object| {
                let hash = version_hash(hasher, &object);
                let copied = copy_below(ufs.clone(), object, prefix_bytes, to.to_owned());
                async move { copied.await.map(|()| hash) }
            });
            let mut copies = stream::iter(copies).buffer_unordered(OBJECTS_AT_A_TIME);
            while let Some(hash) = copies.try_next().await? {
                self.copied.insert(hash);
                self.stats.renamed_copies.inc();
                self.progress.step("objects are copied");
            }
        }
        Ok(())
    }

    /// Those objects of a page that are still to be copied.
    fn missing(&mut self, page: Vec<ObjectMeta>) -> Result<Vec<ObjectMeta>, ClientError> {
        let mut missing = Vec::new();
        for object in page {
            let name = &object.key[self.from.len()..];
            if self.to.len() + name.len() > KEY_BYTES_MAX {
                let to = self.to;
                return refuse(Errno::NAMETOOLONG, format!("a key of more than {KEY_BYTES_MAX} bytes: {to}{name}"));
            }
            let is_copied = match &self.left {
                Some(left) if !name.is_empty() => left.has(&object, name, self.to)?,
                _ => false,
            };
            if name.is_empty() {
                self.marker = Some(object);
            } else if is_copied {
                self.copied.insert(version_hash(&self.hasher, &object));
            } else {
                missing.push(object);
            }
        }
        Ok(missing)
    }

    /// Deletes what was copied. What somebody else has written there meanwhile stays.
    pub(super) async fn delete_copied(&mut self) -> Result<(), ClientError> {
        let mut lister = self.ufs.list(self.from, ListMode::Recursive);
        while let Some(page) = lister.next_page().await? {
            let (ufs, hasher, copied) = (self.ufs, &self.hasher, &self.copied);
            let known = page.objects.into_iter().filter(|object| copied.contains(&version_hash(hasher, object)));
            let deletions = known.map(|object| delete_version(ufs.clone(), object));
            let mut deletions = stream::iter(deletions).buffer_unordered(OBJECTS_AT_A_TIME);
            while deletions.try_next().await?.is_some() {
                self.stats.renamed_deletions.inc();
                self.progress.step("copied objects are deleted");
            }
        }
        Ok(())
    }

    /// Moves the marker into the place of the note. Where there is none, the note goes.
    ///
    /// # Errors
    /// Of the marker, which is still there: the rename can be made again. A note that stays is no error, since all is
    /// moved.
    pub(super) async fn end(mut self) -> Result<(), ClientError> {
        let is_replaced = match self.marker.take() {
            Some(marker) => self.move_marker(marker).await?,
            None => false,
        };
        if self.is_noted
            && !is_replaced
            && let Err(error) = self.ufs.delete(self.to, Precondition::Anything).await
        {
            tracing::warn!(directory = self.to, "renamed, but it keeps an object that says from where: {error}");
        }
        self.progress.end();
        Ok(())
    }

    /// False if somebody has removed the old directory, which has nothing else by now.
    async fn move_marker(&self, marker: ObjectMeta) -> Result<bool, ClientError> {
        match self.ufs.copy(&marker, self.to).await {
            Ok(_) => {}
            Err(UfsError::NotFound { .. }) => return Ok(false),
            Err(error) => return Err(error.into()),
        }
        self.stats.renamed_copies.inc();
        delete_version(self.ufs.clone(), marker).await?;
        self.stats.renamed_deletions.inc();
        Ok(true)
    }
}

fn version_hash(hasher: &RandomState, object: &ObjectMeta) -> u64 {
    hasher.hash_one((&object.key, &object.etag))
}

/// Copies an object to the same place below another prefix: that of its own has so many bytes.
async fn copy_below(ufs: Ufs, object: ObjectMeta, prefix_bytes: usize, to: String) -> Result<(), ClientError> {
    let key = format!("{to}{}", &object.key[prefix_bytes..]);
    ufs.copy(&object, &key).await?;
    Ok(())
}

/// Deletes an object, unless it is another by now.
async fn delete_version(ufs: Ufs, object: ObjectMeta) -> Result<(), ClientError> {
    match ufs.delete(&object.key, Precondition::Version(&object.etag)).await {
        Ok(()) | Err(UfsError::VersionChanged { .. }) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// How far a rename is, for the log.
struct Progress {
    what: String,
    steps: u64,
    began: Instant,
    logged: Instant,
}

impl Progress {
    fn new(what: String) -> Self {
        let now = Instant::now();
        Self { what, steps: 0, began: now, logged: now }
    }

    fn step(&mut self, what: &str) {
        self.steps += 1;
        if self.logged.elapsed() >= LOG_EVERY {
            self.logged = Instant::now();
            tracing::info!(rename = self.what, requests = self.steps, "a directory is being renamed: {what}");
        }
    }

    fn end(&self) {
        if self.began.elapsed() >= LOG_EVERY {
            tracing::info!(rename = self.what, requests = self.steps, "a directory was renamed");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;
    use std::num::NonZeroU64;

    use bytes::Bytes;
    use cavern_conf::schema;
    use cavern_ufs::{Faults, MemoryBucket, Metadata, named};

    use super::super::super::names::is_empty;
    use super::*;

    const FILES: usize = 20;

    /// A directory `a/` with files, and what its marker has, if it has one.
    async fn filled(name: &str, has_marker: bool) -> (MemoryBucket, Ufs, Option<Metadata>) {
        let conf = schema::Ufs { retries: 0, ..schema::Ufs::default() };
        let ufs = Ufs::open(&format!("memory://{name}"), &HashMap::new(), &conf).unwrap();
        let bucket = MemoryBucket::named(name);
        (0..FILES).for_each(|number| drop(bucket.put(&format!("a/{number}"), number.to_string())));
        let metadata = named(Metadata::from([("mode".to_owned(), "16832".to_owned())]));
        if has_marker {
            ufs.put("a/", &Bytes::new(), &metadata, Precondition::Anything).await.unwrap();
        }
        (bucket, ufs, has_marker.then_some(metadata))
    }

    /// Renames `a/` to `b/`, where nothing is but what an earlier attempt has left.
    async fn rename(ufs: &Ufs) -> Result<(), ClientError> {
        let mut left = None;
        if is_empty(ufs, "b/").await? {
            ufs.delete("b/", Precondition::Anything).await?;
        } else {
            left = Leftover::find(ufs, "a/", "b/").await?;
            assert!(left.is_some(), "an earlier attempt has left it");
        }
        let stats = Stats::default();
        let mut rename = DirectoryRename::new(ufs, &stats, "a/", "b/", left);
        rename.copy().await?;
        rename.delete_copied().await?;
        rename.end().await
    }

    /// Everything is under the new name and nothing under the old.
    fn assert_renamed(bucket: &MemoryBucket, marker: Option<Metadata>, when: &str) {
        let mut expected: Vec<String> = (0..FILES).map(|number| format!("b/{number}")).collect();
        expected.extend(marker.is_some().then(|| "b/".to_owned()));
        expected.sort();
        assert_eq!(bucket.keys(), expected, "{when}");
        for number in 0..FILES {
            assert_eq!(bucket.object(&format!("b/{number}")).unwrap().0, number.to_string(), "{when}");
        }
        assert_eq!(bucket.object("b/").map(|(_, metadata)| metadata), marker, "{when}");
    }

    #[tokio::test]
    async fn whichever_request_is_the_last_the_rename_can_be_made_again() {
        for has_marker in [true, false] {
            for last in 1.. {
                let when = format!("marker {has_marker}, interrupted at request {last}");
                let (bucket, ufs, marker) = filled(&format!("rename-{has_marker}-{last}"), has_marker).await;
                let faults = Faults { fail_every: NonZeroU64::new(last), ..Faults::default() };
                let is_made = rename(&ufs.with_faults(faults)).await.is_ok();
                if !is_made {
                    rename(&ufs).await.unwrap();
                } else if marker.is_none() {
                    // The note stays if it is its deletion that fails.
                    bucket.delete("b/");
                }
                assert_renamed(&bucket, marker, &when);
                if is_made && last > 2 * FILES as u64 {
                    break;
                }
            }
        }
    }

    #[tokio::test]
    async fn what_was_changed_under_the_new_name_is_not_replaced() {
        let (bucket, ufs, _) = filled("rename-changed", true).await;
        write_note(&ufs, "a/", "b/").await.unwrap();
        bucket.put("b/7", "changed by somebody");
        let before = bucket.object("a/7");
        let error = rename(&ufs).await.unwrap_err();
        assert_eq!(error.errno(), Errno::NOTEMPTY.raw_os_error());
        assert!(error.to_string().contains("b/7"), "{error}");
        assert_eq!((bucket.object("b/7").unwrap().0, bucket.object("a/7")), ("changed by somebody".into(), before));
        assert_eq!(bucket.keys().iter().filter(|key| key.starts_with("a/")).count(), FILES + 1);
    }

    #[tokio::test]
    async fn what_others_write_under_the_old_name_meanwhile_stays() {
        let (bucket, ufs, marker) = filled("rename-meanwhile", true).await;
        let stats = Stats::default();
        let mut rename = DirectoryRename::new(&ufs, &stats, "a/", "b/", None);
        rename.copy().await.unwrap();
        bucket.put("a/7", "written meanwhile");
        rename.delete_copied().await.unwrap();
        rename.end().await.unwrap();
        assert_eq!(bucket.object("a/7").unwrap().0, "written meanwhile");
        bucket.delete("a/7");
        assert_renamed(&bucket, marker, "after that");
    }
}
