//! `memory://NAME`: a bucket in this process, for tests. Two handles of one name see the same objects.

use std::collections::{BTreeMap, HashMap};
use std::hash::{DefaultHasher, Hasher as _};
use std::ops::Range;
use std::sync::{Arc, LazyLock};

use bytes::Bytes;
use cavern_conf::host;
use cavern_proto::{Capabilities, Scheme};
use futures::{FutureExt, future, stream};
use parking_lot::Mutex;
use tokio::sync::{Semaphore, SemaphorePermit};

use crate::error::{Operation, Request, UfsError};
use crate::object::{ListMode, Metadata, ObjectMeta, Precondition};
use crate::store::{Answer, Body, ByteStream, Change, ChangeRequest, CopySource, ListRequest, ObjectStore, StorePage};

static BUCKETS: LazyLock<Mutex<HashMap<String, MemoryBucket>>> = LazyLock::new(Mutex::default);

/// The objects of one `memory://` bucket.
#[derive(Clone, Debug)]
pub struct MemoryBucket {
    name: Arc<str>,
    objects: Arc<Mutex<Objects>>,
}

#[derive(Debug, Default)]
struct Objects {
    by_key: BTreeMap<String, Object>,
    /// Counts up with every write, so that equal bytes written twice are two versions.
    version: u64,
    /// Objects on their way, by the id of the upload.
    uploads: BTreeMap<String, Upload>,
    /// What was replaced or deleted, by key and ETag, if that is kept.
    replaced: Option<BTreeMap<(String, String), Object>>,
    sharding: Option<Sharding>,
    /// Entries of a page at most, if that is less than is asked for.
    page_max: Option<usize>,
    /// Listings begin at the first key whatever they are to begin behind.
    ignores_start_after: bool,
    /// `None` for all that a bucket in memory can do.
    capabilities: Option<Capabilities>,
    /// Each page of the listings of this prefix takes one of these.
    turns: Option<(String, Arc<Semaphore>)>,
    /// Each part of an upload takes one of these.
    part_turns: Option<Arc<Semaphore>>,
}

/// How a bucket lists that does not in the order of keys: shard by shard, each in order.
#[derive(Clone, Copy, Debug)]
struct Sharding {
    shards: u64,
    /// Entries of a page at most.
    page: usize,
}

impl Sharding {
    fn place<'a>(&self, entry: &'a str) -> (u64, &'a str) {
        let mut hasher = DefaultHasher::new();
        hasher.write(entry.as_bytes());
        (hasher.finish() % self.shards, entry)
    }
}

#[derive(Clone, Debug)]
struct Object {
    bytes: Bytes,
    meta: ObjectMeta,
    metadata: Metadata,
}

#[derive(Debug, Default)]
struct Upload {
    metadata: Metadata,
    /// By number.
    parts: BTreeMap<u32, Bytes>,
}

impl Objects {
    fn store(&mut self, key: &str, bytes: Bytes, metadata: Metadata) -> String {
        self.version += 1;
        let etag = format!("v{}", self.version);
        let meta = ObjectMeta {
            key: key.to_owned(),
            size: bytes.len() as u64,
            etag: etag.clone(),
            mtime_ns: host::wall_ns(),
            metadata: Metadata::new(),
        };
        let old = self.by_key.insert(key.to_owned(), Object { bytes, meta, metadata });
        self.retire(old);
        etag
    }

    fn remove(&mut self, key: &str) -> bool {
        let old = self.by_key.remove(key);
        let was_there = old.is_some();
        self.retire(old);
        was_there
    }

    fn retire(&mut self, old: Option<Object>) {
        if let (Some(replaced), Some(old)) = (&mut self.replaced, old) {
            replaced.insert((old.meta.key.clone(), old.meta.etag.clone()), old);
        }
    }

    /// The name of a part; `None` where there is no such upload.
    fn store_part(&mut self, upload: &str, number: u32, bytes: Bytes) -> Option<String> {
        self.version += 1;
        self.uploads.get_mut(upload)?.parts.insert(number, bytes);
        Some(format!("p{}", self.version))
    }

    fn version_of(&self, source: &CopySource<'_>) -> Option<Object> {
        self.by_key.get(source.key).filter(|object| object.meta.etag == source.etag).cloned()
    }
}

impl MemoryBucket {
    /// The bucket of this name; made when it is first asked for, and kept until the process ends.
    pub fn named(name: &str) -> Self {
        let make = || Self { name: format!("memory://{name}").into(), objects: Arc::default() };
        BUCKETS.lock().entry(name.to_owned()).or_insert_with(make).clone()
    }

    /// Stores an object, replacing one of that key; returns its ETag.
    pub fn put(&self, key: &str, bytes: impl Into<Bytes>) -> String {
        self.objects.lock().store(key, bytes.into(), Metadata::new())
    }

    /// The bytes of an object, and what is kept with it.
    pub fn object(&self, key: &str) -> Option<(Bytes, Metadata)> {
        let objects = self.objects.lock();
        objects.by_key.get(key).map(|object| (object.bytes.clone(), object.metadata.clone()))
    }

    /// The ETag of an object.
    pub fn etag(&self, key: &str) -> Option<String> {
        self.objects.lock().by_key.get(key).map(|object| object.meta.etag.clone())
    }

    /// All keys, in order.
    pub fn keys(&self) -> Vec<String> {
        self.objects.lock().by_key.keys().cloned().collect()
    }

    /// Uploads that were begun, and neither completed nor aborted.
    pub fn uploads(&self) -> usize {
        self.objects.lock().uploads.len()
    }

    /// From now on listings are in no order: `shards` of keys (by a hash) follow each other, each in order, `page`
    /// entries at a time.
    pub fn list_in_shards(&self, shards: u64, page: usize) {
        self.objects.lock().sharding = Some(Sharding { shards, page });
    }

    /// From now on a page of a listing has so many entries at most.
    pub fn list_in_pages_of(&self, entries: usize) {
        self.objects.lock().page_max = Some(entries.max(1));
    }

    /// From now on each page of a listing of this very prefix takes one permit, and waits for it. There is none yet.
    pub fn list_by_turns(&self, prefix: &str) -> Arc<Semaphore> {
        let turns = Arc::new(Semaphore::new(0));
        self.objects.lock().turns = Some((prefix.to_owned(), turns.clone()));
        turns
    }

    /// From now on each part of an upload takes one permit, and waits for it. There is none yet.
    pub fn take_parts_by_turns(&self) -> Arc<Semaphore> {
        self.objects.lock().part_turns.insert(Arc::new(Semaphore::new(0))).clone()
    }

    /// From now on listings begin at the first key, whatever they are to begin behind.
    pub fn ignore_start_after(&self) {
        self.objects.lock().ignores_start_after = true;
    }

    /// From now on it says that it can do no more than this, though it can.
    pub fn claim_capabilities(&self, capabilities: Capabilities) {
        self.objects.lock().capabilities = Some(capabilities);
    }

    /// From now on versions that are replaced or deleted are kept.
    pub fn keep_versions(&self) {
        self.objects.lock().replaced.get_or_insert_default();
    }

    /// Removes an object; false when there was none.
    pub fn delete(&self, key: &str) -> bool {
        self.objects.lock().remove(key)
    }

    fn kept(&self, key: &str, etag: &str) -> Option<Object> {
        self.objects.lock().replaced.as_ref()?.get(&(key.to_owned(), etag.to_owned())).cloned()
    }

    fn find(&self, operation: Operation, key: &str) -> Result<Object, UfsError> {
        let found = self.objects.lock().by_key.get(key).cloned();
        found.ok_or_else(|| UfsError::NotFound { request: Request::new(operation, &self.name, key) })
    }

    fn page(&self, request: ListRequest<'_>) -> StorePage {
        let (sharding, page_max, ignores) = {
            let objects = self.objects.lock();
            (objects.sharding, objects.page_max, objects.ignores_start_after)
        };
        let limit = page_max.map_or(request.limit, |most| request.limit.min(most));
        let after = request.start_after.filter(|_| !ignores);
        let request = ListRequest { token: request.token.or(after), start_after: None, limit, ..request };
        let Some(sharding) = sharding else { return self.page_in_order(request) };
        let whole = self.page_in_order(ListRequest { token: None, limit: usize::MAX, ..request }).page;
        let objects = whole.objects.into_iter().map(|object| (object.key.clone(), Some(object)));
        let mut entries: Vec<_> = objects.chain(whole.prefixes.into_iter().map(|prefix| (prefix, None))).collect();
        entries.sort_by(|(one, _), (other, _)| sharding.place(one).cmp(&sharding.place(other)));
        entries.retain(|(entry, _)| request.token.is_none_or(|token| sharding.place(entry) > sharding.place(token)));
        let is_last = entries.len() <= request.limit.min(sharding.page);
        entries.truncate(request.limit.min(sharding.page));
        let next = entries.last().filter(|_| !is_last).map(|(entry, _)| entry.clone());
        let mut answer = StorePage { next, ..StorePage::default() };
        for (entry, object) in entries {
            match object {
                Some(object) => answer.page.objects.push(object),
                None => answer.page.prefixes.push(entry),
            }
        }
        answer
    }

    fn page_in_order(&self, request: ListRequest<'_>) -> StorePage {
        let mut answer = StorePage::default();
        let mut entries = 0;
        // Everything up to and including this key or prefix has been listed.
        let mut last_listed = request.token.map(str::to_owned);
        let objects = self.objects.lock();
        for (key, object) in objects.by_key.range(request.prefix.to_owned()..) {
            let Some(rest) = key.strip_prefix(request.prefix) else { break };
            let group = match (request.mode, rest.find('/')) {
                (ListMode::Directory, Some(at)) => Some(&key[..request.prefix.len() + at + 1]),
                _ => None,
            };
            let entry = group.unwrap_or(key);
            if last_listed.as_deref().is_some_and(|last_listed| entry <= last_listed) {
                continue;
            }
            if entries == request.limit {
                answer.next = last_listed;
                break;
            }
            entries += 1;
            last_listed = Some(entry.to_owned());
            match group {
                Some(prefix) => answer.page.prefixes.push(prefix.to_owned()),
                None => answer.page.objects.push(object.meta.clone()),
            }
        }
        answer
    }

    fn slice(&self, object: Object, etag: &str, range: Range<u64>) -> Result<Body, UfsError> {
        let key = &object.meta.key;
        let changed =
            |reason: &str| UfsError::version_changed(Request::new(Operation::Get, &self.name, key), etag, reason);
        if !etag.is_empty() && object.meta.etag != etag {
            return Err(changed("another version has replaced it"));
        }
        if range.end > object.meta.size {
            return Err(changed("it is shorter than the range"));
        }
        // Both ends are at most the length of the bytes in memory.
        let bytes = object.bytes.slice(range.start as usize..range.end as usize);
        Ok(Body { etag: object.meta.etag, stream: ByteStream::new(stream::iter([Ok(bytes)])) })
    }
}

impl MemoryBucket {
    fn apply_change(&self, request: ChangeRequest<'_>) -> Result<String, UfsError> {
        let asked = || Request::new(request.operation(), &self.name, request.key);
        let missing = || UfsError::NotFound { request: asked() };
        let objects = &mut *self.objects.lock();
        let check = |objects: &Objects, replaces: Precondition<'_>| {
            let changed = |etag: &str| Err(UfsError::version_changed(asked(), etag, "another version has replaced it"));
            match (replaces, objects.by_key.get(request.key)) {
                (Precondition::Nothing, Some(_)) => changed(""),
                (Precondition::Version(_), None) => Err(missing()),
                (Precondition::Version(etag), Some(object)) if object.meta.etag != etag => changed(etag),
                _ => Ok(()),
            }
        };
        match request.change {
            Change::Put { body, metadata, replaces } => {
                check(objects, replaces)?;
                Ok(objects.store(request.key, body.clone(), metadata.clone()))
            }
            Change::Begin { metadata } => {
                objects.version += 1;
                let id = format!("u{}", objects.version);
                objects.uploads.insert(id.clone(), Upload { metadata: metadata.clone(), parts: BTreeMap::new() });
                Ok(id)
            }
            Change::Part { upload, number, body } => {
                objects.store_part(upload, number, body.clone()).ok_or_else(missing)
            }
            Change::Complete { upload, replaces, .. } => {
                check(objects, replaces)?;
                let Upload { metadata, parts } = objects.uploads.remove(upload).ok_or_else(missing)?;
                let bytes: Vec<u8> = parts.values().flatten().copied().collect();
                Ok(objects.store(request.key, bytes.into(), metadata))
            }
            Change::Abort { upload } => {
                objects.uploads.remove(upload);
                Ok(String::new())
            }
            Change::Delete { replaces } => {
                check(objects, replaces)?;
                objects.remove(request.key);
                Ok(String::new())
            }
            Change::Copy { source, metadata } => {
                let found = objects.version_of(&source).ok_or_else(missing)?;
                Ok(objects.store(request.key, found.bytes, metadata.cloned().unwrap_or(found.metadata)))
            }
            Change::CopyPart { upload, number, source, bytes: (first, last) } => {
                let found = objects.version_of(&source).ok_or_else(missing)?;
                let part = found.bytes.slice(first as usize..=last as usize);
                objects.store_part(upload, number, part).ok_or_else(missing)
            }
        }
    }
}

impl ObjectStore for MemoryBucket {
    fn list<'a>(&'a self, request: ListRequest<'a>) -> Answer<'a, StorePage> {
        let turns = match &self.objects.lock().turns {
            Some((prefix, turns)) if prefix == request.prefix => Some(turns.clone()),
            _ => None,
        };
        let Some(turns) = turns else { return future::ready(Ok(self.page(request))).boxed() };
        async move {
            // They are never closed.
            turns.acquire().await.into_iter().for_each(SemaphorePermit::forget);
            Ok(self.page(request))
        }
        .boxed()
    }

    fn head<'a>(&'a self, key: &'a str) -> Answer<'a, ObjectMeta> {
        let found = self.find(Operation::Head, key);
        future::ready(found.map(|object| ObjectMeta { metadata: object.metadata, ..object.meta })).boxed()
    }

    fn get<'a>(&'a self, key: &'a str, etag: &'a str, range: Range<u64>) -> Answer<'a, Body> {
        let found = self.find(Operation::Get, key);
        future::ready(found.and_then(|object| self.slice(object, etag, range))).boxed()
    }

    fn version_of<'a>(&'a self, key: &'a str, etag: &'a str) -> Answer<'a, Option<String>> {
        future::ready(Ok(self.kept(key, etag).map(|object| object.meta.etag))).boxed()
    }

    fn get_version<'a>(&'a self, id: &'a str, key: &'a str, etag: &'a str, range: Range<u64>) -> Answer<'a, Body> {
        let asked = || Request::new(Operation::Get, &self.name, key);
        let found = self.kept(key, id).ok_or_else(|| UfsError::NotFound { request: asked() });
        future::ready(found.and_then(|object| self.slice(object, etag, range))).boxed()
    }

    fn change<'a>(&'a self, request: ChangeRequest<'a>) -> Answer<'a, String> {
        let is_part = matches!(request.change, Change::Part { .. });
        let turns = self.objects.lock().part_turns.clone().filter(|_| is_part);
        let Some(turns) = turns else { return future::ready(self.apply_change(request)).boxed() };
        async move {
            turns.acquire().await.into_iter().for_each(SemaphorePermit::forget);
            self.apply_change(request)
        }
        .boxed()
    }

    fn capabilities(&self) -> Capabilities {
        self.objects.lock().capabilities.unwrap_or(Scheme::Memory.capabilities())
    }
}

#[cfg(test)]
mod tests {
    use futures::executor::block_on;
    use proptest::prelude::*;

    use super::*;
    use crate::store::model;

    proptest! {
        #[test]
        fn pages_add_up_to_the_keys(
            keys in proptest::collection::btree_set("[ab/.-]{1,6}", 0..40),
            prefix in "([ab]{1,2}/)?",
            limit in 1_usize..8,
        ) {
            let bucket = MemoryBucket { name: "memory://model".into(), objects: Arc::default() };
            for key in &keys {
                bucket.put(key, "x");
            }
            for mode in [ListMode::Directory, ListMode::Recursive] {
                let listed = block_on(model::listed(&bucket, &prefix, mode, limit));
                prop_assert_eq!(listed, model::entries(&keys, &prefix, mode));
            }
        }
    }
}
