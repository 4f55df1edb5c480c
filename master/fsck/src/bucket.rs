//! Buckets of fs-mode mounts: their listings against what is recorded of their objects. Both come in the order of keys,
//! and so they are merged.
//!
//! An object whose inode is to be written, or that is to be deleted, may be anything. What a listing has said may be
//! out of date: the object itself is asked for at the second look.

use std::collections::BTreeMap;
use std::sync::Arc;

use cavern_proto::master::{Finding, FindingKind, Kind};
use cavern_proto::reserved::is_reserved;
use cavern_state::records::is_directory;
use cavern_state::{Tables, schema};
use cavern_ufs::{ListMode, is_name};
use cavern_work::mounts::OpenMount;
use cavern_work::persist::plan;
use cavern_work::{WorkError, if_there};
use tokio::time::Instant;

use super::namespace::will_be_written;
use super::{PAGE, Run, of_inode};

/// Version and size of an object.
pub(super) type Version = (String, u64);

/// Which keys of a mount are looked at.
enum Keys {
    Below(String),
    These(Vec<String>),
}

/// What knows of objects.
#[derive(Clone, Copy)]
enum List {
    Noted,
    Origins,
}

/// Up to a page of the keys that are known and begin so, behind one and up to another, and whether these are the last.
fn known_keys(
    tables: Tables<'_>,
    list: List,
    (mount_id, prefix): (u32, &str),
    (after, until): (Option<&str>, Option<&str>),
) -> Result<(Vec<String>, bool), WorkError> {
    let (within, after) = ((mount_id, prefix), after.map(|key| (mount_id, key)));
    let mut keys: Vec<String> = match list {
        List::Noted => tables.rows_after(schema::Noted, within, after).page(PAGE, |row| {
            let (_, key) = row.key()?;
            Ok(key.to_owned())
        })?,
        List::Origins => tables.rows_after(schema::Origins, within, after).page(PAGE, |row| {
            let (_, key) = row.key()?;
            Ok(key.to_owned())
        })?,
    };
    let all = keys.len();
    keys.retain(|key| until.is_none_or(|until| key.as_str() <= until));
    let is_last = all < PAGE || keys.len() < all;
    Ok((keys, is_last))
}

/// What is wrong with what is under a key.
fn judge_object(
    tables: Tables<'_>,
    open: &OpenMount,
    key: &str,
    there: Option<&Version>,
) -> Result<Option<Finding>, WorkError> {
    let mount_id = open.mount.id;
    // Of one that is unmounted meanwhile, records go step by step.
    if tables.mount(mount_id)?.is_none() || tables.deletion(mount_id, key)?.is_some() {
        return Ok(None);
    }
    let noted = tables.noted(mount_id, key)?;
    let Some(inode) = noted.map_or_else(|| tables.origin_of(mount_id, key), |inode| Ok(Some(inode)))? else {
        let Some((etag, size)) = there else { return Ok(None) };
        if has_place(tables, open, key)? {
            return Ok(None);
        }
        let detail = format!("the bucket has {size} bytes, version {etag}, and the namespace has no such name");
        let path = format!("object \"{key}\"");
        let (kind, key) = (FindingKind::UnknownObject as i32, key.to_owned());
        return Ok(Some(Finding { kind, path, mount_id, key, detail, ..Finding::default() }));
    };
    let found = |kind: FindingKind, detail: String| -> Result<Option<Finding>, WorkError> {
        Ok(Some(Finding { mount_id, key: key.to_owned(), ..of_inode(tables, kind, inode, detail)? }))
    };
    let Some(record) = tables.inode(inode)? else {
        return found(FindingKind::ObjectIndex, format!("\"{key}\" is recorded to be of inode {inode}, which is gone"));
    };
    if record.unlinked || will_be_written(tables, inode, &record)? {
        return Ok(None);
    }
    let recorded = match noted {
        Some(_) => tables.object(inode, key)?.map(|object| (object.etag, object.size)),
        None => record.origin.as_ref().filter(|it| it.key == key).map(|it| (it.etag.clone(), it.length)),
    };
    let Some((etag, size)) = recorded else {
        return found(FindingKind::ObjectIndex, format!("it has no record of \"{key}\", which is recorded to be its"));
    };
    match there {
        // Files without a write that was confirmed are found otherwise.
        _ if etag.is_empty() && !is_directory(&record) => Ok(None),
        _ if etag.is_empty() => {
            let detail = format!("\"{key}\" was begun, was not confirmed, and is not to be written again");
            found(FindingKind::ObjectIndex, detail)
        }
        None => found(FindingKind::MissingObject, format!("\"{key}\", version {etag}, is not in the bucket")),
        Some((now, bytes)) if *now != etag || record.kind() == Kind::File && *bytes != size => {
            let detail = format!("\"{key}\" is version {etag} of {size} bytes, and the bucket has {now} of {bytes}");
            found(FindingKind::ChangedObject, detail)
        }
        Some(_) => Ok(None),
    }
}

/// Whether the namespace has something under a key, or in its way; or the key can be no name, or is in a directory that
/// the bucket has not been asked about. Such objects are told of by the mount.
fn has_place(tables: Tables<'_>, open: &OpenMount, key: &str) -> Result<bool, WorkError> {
    let Some(path) = key.strip_prefix(open.ufs.prefix()) else { return Ok(true) };
    let is_own = is_reserved(path.as_bytes());
    let path = path.strip_suffix('/').unwrap_or(path);
    if is_own || !path.split('/').all(|name| is_name(name.as_bytes())) {
        return Ok(true);
    }
    let mut at = open.mount.root_inode;
    for name in path.split('/') {
        match tables.dentry(at, name.as_bytes())? {
            Some(dentry) if dentry.kind() == Kind::Directory => at = dentry.inode,
            Some(_) => return Ok(true),
            None => return Ok(tables.inode(at)?.is_none_or(|directory| directory.listed_ns == 0)),
        }
    }
    Ok(true)
}

/// What the bucket has under a key.
pub(super) async fn ask(open: &OpenMount, key: &str) -> Result<Option<Version>, WorkError> {
    let object = if_there(Box::pin(open.ufs.head(key)).await)?;
    Ok(object.map(|object| (object.etag, object.size)))
}

impl Run<'_> {
    pub(super) async fn check_buckets(&mut self) -> Result<(), WorkError> {
        self.step("objects");
        let mut mounts: Vec<Arc<OpenMount>> = self.mounts.values().cloned().collect();
        mounts.sort_by_key(|open| open.mount.id);
        for open in mounts {
            let Some(keys) = self.keys_within(&open).await? else { continue };
            match self.check_bucket(&open, keys).await {
                Err(WorkError::Ufs(error)) => {
                    self.miss(format!("the bucket of {} cannot be looked at: {error}", open.mount.path));
                }
                done => done?,
            }
        }
        Ok(())
    }

    /// The keys of a mount that are within the scope, if any are.
    async fn keys_within(&self, open: &Arc<OpenMount>) -> Result<Option<Keys>, WorkError> {
        let (open, scope) = (open.clone(), self.scope.clone());
        self.read(move |tables| {
            let prefix = open.ufs.prefix();
            if tables.is_below(open.mount.root_inode, scope.inode)? {
                return Ok(Some(Keys::Below(prefix.to_owned())));
            }
            let record = tables.inode(scope.inode)?.filter(|record| record.mount_id == open.mount.id);
            let Some(record) = record else { return Ok(None) };
            if is_directory(&record) {
                let directory = tables.directory(scope.inode)?;
                return Ok(directory.and_then(|directory| directory.key_prefix(prefix)).map(Keys::Below));
            }
            Ok(plan::keys(tables, scope.inode, &record, prefix)?.ok().map(Keys::These))
        })
        .await
    }

    async fn check_bucket(&mut self, open: &Arc<OpenMount>, keys: Keys) -> Result<(), WorkError> {
        let prefix = match keys {
            Keys::Below(prefix) => prefix,
            Keys::These(keys) => {
                let (began, mut there) = (Instant::now(), Vec::new());
                for key in keys {
                    let object = ask(open, &key).await?;
                    there.push((key, object));
                }
                return self.judge_objects(open, there, began).await;
            }
        };
        let mut listing = open.ufs.list(&prefix, ListMode::Recursive);
        let mut after: Option<String> = None;
        while let Some(page) = Box::pin(listing.next_page()).await? {
            if page.restarts {
                after = None;
                continue;
            }
            let objects = page.objects.into_iter().map(|object| (object.key, (object.etag, object.size)));
            let objects: BTreeMap<String, Version> = objects.collect();
            let Some(last) = objects.keys().next_back().cloned() else { continue };
            self.merge(open, &prefix, (after.as_deref(), Some(last.as_str())), objects).await?;
            after = Some(last);
        }
        self.merge(open, &prefix, (after.as_deref(), None), BTreeMap::new()).await
    }

    /// Compares what a listing has between two keys with what is known there.
    async fn merge(
        &mut self,
        open: &Arc<OpenMount>,
        prefix: &str,
        (after, until): (Option<&str>, Option<&str>),
        mut objects: BTreeMap<String, Version>,
    ) -> Result<(), WorkError> {
        for list in [List::Noted, List::Origins] {
            let mut from = after.map(str::to_owned);
            loop {
                let (began, mount_id) = (Instant::now(), open.mount.id);
                let (prefix, start, until) = (prefix.to_owned(), from.clone(), until.map(str::to_owned));
                let read = self.read(move |tables| {
                    known_keys(tables, list, (mount_id, prefix.as_str()), (start.as_deref(), until.as_deref()))
                });
                let (keys, is_last) = read.await?;
                from = keys.last().cloned().or(from);
                let mut there: Vec<(String, Option<Version>)> = Vec::with_capacity(keys.len());
                for key in keys {
                    let object = objects.remove(&key);
                    there.push((key, object));
                }
                // An origin that is noted as well has been looked at.
                if matches!(list, List::Origins) {
                    there = self.not_noted(mount_id, there).await?;
                }
                self.judge_objects(open, there, began).await?;
                if is_last {
                    break;
                }
            }
        }
        let there = objects.into_iter().map(|(key, object)| (key, Some(object))).collect();
        self.judge_objects(open, there, Instant::now()).await
    }

    async fn not_noted(
        &self,
        mount_id: u32,
        mut keys: Vec<(String, Option<Version>)>,
    ) -> Result<Vec<(String, Option<Version>)>, WorkError> {
        self.read(move |tables| {
            let mut noted = Vec::with_capacity(keys.len());
            for (key, _) in &keys {
                noted.push(tables.noted(mount_id, key)?.is_some());
            }
            let mut noted = noted.into_iter();
            keys.retain(|_| !noted.next().unwrap_or_default());
            Ok(keys)
        })
        .await
    }

    async fn judge_objects(
        &mut self,
        open: &Arc<OpenMount>,
        there: Vec<(String, Option<Version>)>,
        began: Instant,
    ) -> Result<(), WorkError> {
        let (open, count) = (open.clone(), there.len());
        let read = self.read(move |tables| {
            let mut found = Vec::new();
            for (key, object) in &there {
                found.extend(judge_object(tables, &open, key, object.as_ref())?);
            }
            Ok(found)
        });
        let found = read.await?;
        self.looked_at(count, found, began).await
    }

    /// Asks for each object, and compares it with what is recorded of it after that: twice, since the two are not of
    /// one moment.
    pub(super) async fn objects_again(&mut self, before: &[Finding]) -> Result<Vec<Finding>, WorkError> {
        let mut found = Vec::new();
        for finding in before {
            let Some(open) = self.mounts.get(&finding.mount_id).cloned() else { continue };
            match self.object_again(&open, &finding.key).await {
                Err(WorkError::Ufs(error)) => {
                    self.miss(format!("the bucket of {} cannot be looked at: {error}", open.mount.path));
                }
                judged => found.extend(judged?),
            }
        }
        Ok(found)
    }

    async fn object_again(&self, open: &Arc<OpenMount>, key: &str) -> Result<Option<Finding>, WorkError> {
        let Some(first) = self.object_now(open, key).await? else { return Ok(None) };
        Ok(self.object_now(open, key).await?.filter(|second| *second == first))
    }

    async fn object_now(&self, open: &Arc<OpenMount>, key: &str) -> Result<Option<Finding>, WorkError> {
        let (object, open, key) = (ask(open, key).await?, open.clone(), key.to_owned());
        self.read(move |tables| judge_object(tables, &open, &key, object.as_ref())).await
    }
}
