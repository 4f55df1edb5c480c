//! What is to be done about an inode: its names and attributes against what the bucket has of it.

use std::collections::{BTreeMap, HashSet};

use bytes::Bytes;
use cavern_proto::data::{MetadataItem, PersistRequest};
use cavern_proto::master::{Extent, Kind, Mount, Origin};
use cavern_proto::record::{InodeRecord, IntentRecord, ObjectRecord};
use cavern_state::records::is_directory;
use cavern_state::{Directory, Tables};

use super::{metadata, object_tag};
use crate::error::WorkError;

/// Longest key that S3 takes.
const KEY_BYTES_MAX: usize = 1024;

/// The next step for an inode.
#[derive(Debug)]
pub enum Step {
    /// There is nothing left to do.
    None,
    /// A directory's new path is to be handed on to what lies in it.
    Propagate,
    /// The object under a key that is to be written is another inode's origin.
    KeyOccupied {
        key: String,
        owner: u64,
    },
    Write(Box<Work>),
}

/// Objects to be written, and keys to be given up after that.
#[derive(Debug, Default)]
pub struct Work {
    pub inode: u64,
    /// The change that the bucket will have seen then.
    pub change: u64,
    pub mount_id: u32,
    pub writes: Vec<Write>,
    pub gone: Vec<String>,
    pub content: Content,
    /// Nobody waits for it, and it has not waited for long.
    pub is_background: bool,
}

/// One object to be written.
#[derive(Clone, Debug)]
pub struct Write {
    pub key: String,
    /// Nothing says yet that there may be such an object, or another inode has noted one since.
    pub is_new: bool,
    /// ETag of what is known to be there; empty for nothing.
    pub replaces: String,
}

/// Objects and keys that one command confirms.
const PORTION: usize = 256;

/// A part of the work for an inode that is done and confirmed by itself.
#[derive(Debug, Default)]
pub struct Portion {
    pub writes: Vec<Write>,
    pub gone: Vec<String>,
    /// The change that the bucket has seen with the last of them; 0 before.
    pub change: u64,
}

impl Work {
    /// Takes the work apart: what is written comes before what is given up, and nearly always they are one portion.
    pub fn portions(&mut self) -> Vec<Portion> {
        let (mut writes, mut gone) = (std::mem::take(&mut self.writes), std::mem::take(&mut self.gone));
        let mut portions = Vec::new();
        while writes.len() > PORTION {
            let rest = writes.split_off(PORTION);
            portions.push(Portion { writes, ..Portion::default() });
            writes = rest;
        }
        let mut last = Portion { writes, ..Portion::default() };
        while gone.len() > PORTION {
            let rest = gone.split_off(PORTION);
            portions.push(Portion { gone, ..last });
            (gone, last) = (rest, Portion::default());
        }
        portions.push(Portion { gone, change: self.change, ..last });
        portions
    }
}

/// What all objects of an inode hold.
#[derive(Debug, Default)]
pub struct Content {
    pub length: u64,
    pub version: u64,
    pub metadata: Vec<MetadataItem>,
    pub metadata_hash: u64,
    pub inline: Bytes,
    pub block_size: u64,
    pub extents: Vec<Extent>,
    /// What has no block, and is no hole.
    pub origin: Option<Origin>,
    /// Key and ETag of an object with the same content, under any metadata.
    pub same: Option<(String, String)>,
    /// Says whose content of which version it is; empty for what has none.
    pub tag: String,
}

/// Compares an inode with its objects. The error says why an inode cannot have one: a person has to mend that.
pub fn plan(
    tables: Tables<'_>,
    cluster_id: &str,
    inode: u64,
    mount: &Mount,
    prefix: &str,
) -> Result<Result<Step, String>, WorkError> {
    let Some(intent) = tables.intent(inode)? else { return Ok(Ok(Step::None)) };
    let Some(record) = tables.inode(inode)?.filter(|record| !record.unlinked) else {
        let gone = tables.objects_of(inode).map(|item| Ok(item?.0)).collect::<Result<_, WorkError>>()?;
        let IntentRecord { change, mount_id, .. } = intent;
        return Ok(Ok(Step::Write(Box::new(Work { inode, change, mount_id, gone, ..Work::default() }))));
    };
    if intent.propagates {
        return Ok(Ok(Step::Propagate));
    }
    let keys = match keys(tables, inode, &record, prefix)? {
        Ok(keys) => keys,
        Err(reason) => return Ok(Err(reason)),
    };
    let objects = tables.objects_of(inode).collect::<Result<BTreeMap<String, ObjectRecord>, _>>()?;
    let xattrs = if record.xattr_bytes > 0 { tables.xattrs(inode)? } else { Vec::new() };
    let metadata = metadata::of_inode(&record, &xattrs);
    let metadata_hash = metadata::hash(&metadata);
    let is_current = |object: &ObjectRecord| {
        !object.etag.is_empty() && object.version == record.version && object.metadata == metadata_hash
    };
    let mut writes = Vec::new();
    for key in &keys {
        // What another inode has noted since may have been written over.
        let is_own = tables.noted(mount.id, key)? == Some(inode);
        let known = objects.get(key).filter(|_| is_own);
        if known.is_some_and(is_current) {
            continue;
        }
        if let Some(owner) = tables.origin_of(mount.id, key)?.filter(|owner| *owner != inode) {
            return Ok(Ok(Step::KeyOccupied { key: key.clone(), owner }));
        }
        let mut replaces = known.map_or_else(String::new, |object| object.etag.clone());
        if replaces.is_empty() {
            replaces = tables.deletion(mount.id, key)?.unwrap_or_default().etag;
        }
        writes.push(Write { key: key.clone(), is_new: known.is_none(), replaces });
    }
    // The others are made of what it has: it is written over, or given up, last.
    let is_origin = |key: &String| record.origin.as_ref().is_some_and(|origin| origin.key == *key);
    writes.sort_by_key(|write| is_origin(&write.key));
    let has_all = |object: &ObjectRecord| {
        !object.etag.is_empty() && object.version == record.version && object.size == record.size
    };
    let same =
        objects.iter().find(|(_, object)| has_all(object)).map(|(key, object)| (key.clone(), object.etag.clone()));
    let keys: HashSet<&String> = keys.iter().collect();
    let mut gone: Vec<String> = objects.into_keys().filter(|key| !keys.contains(key)).collect();
    gone.sort_by_key(is_origin);
    let is_file = record.kind() == Kind::File;
    let extents = if is_file && !writes.is_empty() { extents(tables, inode, &record, mount)? } else { Vec::new() };
    let content = Content {
        length: if is_directory(&record) { 0 } else { record.size },
        version: record.version,
        metadata,
        tag: if is_file { object_tag::of(cluster_id, inode, record.version, metadata_hash) } else { String::new() },
        metadata_hash,
        inline: record.target,
        block_size: mount.block_size,
        extents,
        origin: record.origin,
        same,
    };
    let (change, mount_id) = (intent.change, mount.id);
    let work = Work { inode, change, mount_id, writes, gone, content, is_background: false };
    Ok(Ok(Step::Write(Box::new(work))))
}

/// The blocks within the file's length.
fn extents(tables: Tables<'_>, inode: u64, record: &InodeRecord, mount: &Mount) -> Result<Vec<Extent>, WorkError> {
    let mut extents = tables.extents(inode, 0)?;
    let blocks = record.size.div_ceil(mount.block_size.max(1));
    extents.retain(|extent| u64::from(extent.index) < blocks);
    Ok(extents)
}

/// The keys that an inode is to have objects under: one for each of its names; or why there can be none.
pub fn keys(
    tables: Tables<'_>,
    inode: u64,
    record: &InodeRecord,
    prefix: &str,
) -> Result<Result<Vec<String>, String>, WorkError> {
    let mut keys = Vec::new();
    // Names in one directory follow each other.
    let mut last: Option<(u64, Option<Directory>)> = None;
    for name in tables.names(inode, record) {
        let (parent, name) = name?;
        if last.as_ref().is_none_or(|(known, _)| *known != parent) {
            last = Some((parent, tables.directory(parent)?));
        }
        // Cut off from the root: a mount that is on its way out.
        let Some(directory) = last.as_ref().and_then(|(_, directory)| directory.as_ref()) else { continue };
        let shown = || {
            let above: Vec<String> = directory.path.iter().map(|name| name.escape_ascii().to_string()).collect();
            format!("{}/{}", above.join("/"), name.escape_ascii())
        };
        let (Some(mut key), Ok(name)) = (directory.key_prefix(prefix), std::str::from_utf8(&name)) else {
            return Ok(Err(format!("{}: the name is not UTF-8, so no key can be made of it: rename it", shown())));
        };
        key.push_str(name);
        if is_directory(record) {
            key.push('/');
        }
        if key.len() > KEY_BYTES_MAX {
            return Ok(Err(format!(
                "{key}: a key of {} bytes, {KEY_BYTES_MAX} are the most: shorten the path",
                key.len()
            )));
        }
        keys.push(key);
    }
    Ok(Ok(keys))
}

impl Content {
    /// The request for one object.
    pub fn request(&self, work: &Work, write: &Write) -> PersistRequest {
        let mut metadata = self.metadata.clone();
        if !self.tag.is_empty() {
            metadata.push(MetadataItem { name: object_tag::NAME.to_owned(), value: self.tag.clone() });
        }
        let origin = self.origin.clone().unwrap_or_default();
        let (same_key, same_etag) = self.same.clone().unwrap_or_default();
        PersistRequest {
            mount_id: work.mount_id,
            key: write.key.clone(),
            length: self.length,
            metadata,
            inline: self.inline.clone(),
            inode: work.inode,
            block_size: self.block_size,
            indexes: self.extents.iter().map(|extent| extent.index).collect(),
            generations: self.extents.iter().map(|extent| extent.generation).collect(),
            // At most eight: see `state/posix/content.rs`.
            copies: self.extents.iter().map(|extent| extent.workers.len() as u32).collect(),
            workers: self.extents.iter().flat_map(|extent| extent.workers.iter().copied()).collect(),
            replaces: write.replaces.clone(),
            deadline_ms: 0,
            origin_key: origin.key,
            origin_etag: origin.etag,
            origin_bytes: origin.valid,
            same_key,
            same_etag,
            background: work.is_background,
        }
    }

    /// What is noted of an object that was written.
    pub fn object(&self, etag: String) -> ObjectRecord {
        ObjectRecord { etag, size: self.length, version: self.version, metadata: self.metadata_hash }
    }
}
