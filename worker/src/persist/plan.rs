//! A request to write an object, checked.

use bytes::Bytes;
use cavern_proto::block_id::block_length;
use cavern_proto::data::{BlockRef, MetadataItem, PersistRequest};
use cavern_ufs::{Metadata, ObjectMeta};

use crate::mounts::check_key;
use crate::request_error::Refusal;

/// Longest key that S3 allows.
const MAX_KEY_BYTES: usize = 1024;
/// What S3 takes of metadata is 2 KiB; another store may take more.
const MAX_METADATA_BYTES: usize = 16 << 10;
/// The bytes of an object without blocks: the target of a symlink is the longest.
const MAX_INLINE_BYTES: usize = 64 << 10;
/// What S3 allows.
const MAX_OBJECT_BYTES: u64 = 50 << 40;
const MAX_BLOCK_BYTES: u64 = 1 << 30;

/// An object to be written.
#[derive(Debug)]
pub(super) struct Plan {
    pub mount_id: u32,
    pub key: String,
    pub length: u64,
    pub metadata: Metadata,
    pub content: Content,
    pub block_size: u64,
    /// The version that is under the key; empty for none.
    pub replaces: String,
    /// What has no block, and is no hole.
    pub origin: Option<Origin>,
    /// An object with the same content.
    pub same: Option<ObjectMeta>,
    /// Nobody waits for it.
    pub is_background: bool,
}

/// The first bytes of an object of the same bucket, in one version.
#[derive(Debug)]
pub(super) struct Origin {
    pub key: String,
    pub etag: String,
    pub bytes: u64,
}

#[derive(Debug)]
pub(super) enum Content {
    Inline(Bytes),
    /// In the order of their indexes.
    Blocks(Vec<PlannedBlock>),
}

/// A block, and the workers that have it.
#[derive(Debug)]
pub(super) struct PlannedBlock {
    pub block: BlockRef,
    pub workers: Vec<u64>,
}

impl Plan {
    /// Checks a request.
    ///
    /// # Errors
    /// What makes no sense.
    pub fn parse(request: PersistRequest, cluster_id: &str) -> Result<Self, Refusal> {
        let bad = |reason: String| Err(Refusal::bad_request(reason));
        if request.key.is_empty() || request.key.len() > MAX_KEY_BYTES {
            return bad(format!("a key of {} bytes", request.key.len()));
        }
        if request.length > MAX_OBJECT_BYTES {
            return bad(format!("an object of {} bytes: {MAX_OBJECT_BYTES} are the most", request.length));
        }
        let metadata = metadata(&request.metadata)?;
        let content = if request.indexes.is_empty() && request.inline.len() as u64 == request.length {
            if request.inline.len() > MAX_INLINE_BYTES {
                return bad(format!("{} bytes in a request: {MAX_INLINE_BYTES} are the most", request.inline.len()));
            }
            Content::Inline(request.inline)
        } else if request.inline.is_empty() {
            Content::Blocks(blocks(&request, cluster_id)?)
        } else {
            return bad("an object with blocks and with bytes of its own, or of another length than these".to_owned());
        };
        let PersistRequest { mount_id, key, length, block_size, replaces, background: is_background, .. } = request;
        let origin =
            Origin { key: request.origin_key, etag: request.origin_etag, bytes: request.origin_bytes.min(length) };
        if origin.key.len() > MAX_KEY_BYTES || origin.key.is_empty() && origin.bytes > 0 {
            return bad(format!("an origin with a key of {} bytes", origin.key.len()));
        }
        let origin = Some(origin).filter(|origin| origin.bytes > 0);
        if request.same_key.len() > MAX_KEY_BYTES || request.same_key.is_empty() != request.same_etag.is_empty() {
            return bad(format!("the same content under a key of {} bytes, or of no version", request.same_key.len()));
        }
        let same = ObjectMeta { key: request.same_key, size: length, etag: request.same_etag, ..ObjectMeta::default() };
        let same = Some(same).filter(|same| !same.key.is_empty());
        Ok(Self { mount_id, key, length, metadata, content, block_size, replaces, origin, same, is_background })
    }

    /// Whether all that it writes and copies lies under the prefix of its mount.
    ///
    /// # Errors
    /// [`Status::PermissionDenied`]: a key of the bucket that is somebody else's.
    pub fn check_keys(&self, prefix: &str) -> Result<(), Refusal> {
        let origin = self.origin.as_ref().map(|origin| &origin.key);
        let mut keys = [Some(&self.key), origin, self.same.as_ref().map(|same| &same.key)].into_iter().flatten();
        keys.try_for_each(|key| check_key(self.mount_id, prefix, key))
    }
}

fn metadata(items: &[MetadataItem]) -> Result<Metadata, Refusal> {
    let is_name =
        |name: &str| !name.is_empty() && name.bytes().all(|byte| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'-'));
    let is_value = |value: &str| value.bytes().all(|byte| (0x20..0x7f).contains(&byte));
    if let Some(wrong) = items.iter().find(|item| !is_name(&item.name) || !is_value(&item.value)) {
        return Err(Refusal::bad_request(format!("metadata that no header carries: {:?}", wrong.name)));
    }
    let bytes: usize = items.iter().map(|item| item.name.len() + item.value.len()).sum();
    if bytes > MAX_METADATA_BYTES {
        return Err(Refusal::bad_request(format!("{bytes} bytes of metadata, {MAX_METADATA_BYTES} are the most")));
    }
    Ok(items.iter().map(|item| (item.name.clone(), item.value.clone())).collect())
}

fn blocks(request: &PersistRequest, cluster_id: &str) -> Result<Vec<PlannedBlock>, Refusal> {
    let count = request.indexes.len();
    let copies: u64 = request.copies.iter().map(|copies| u64::from(*copies)).sum();
    let is_sound = request.generations.len() == count
        && request.copies.len() == count
        && copies == request.workers.len() as u64
        && (1..=MAX_BLOCK_BYTES).contains(&request.block_size)
        && request.indexes.is_sorted_by(|one, next| one < next)
        && request.indexes.iter().all(|index| block_length(request.length, request.block_size, *index) > 0);
    if !is_sound {
        return Err(Refusal::bad_request("blocks that make no file: their lists do not fit together, or its length"));
    }
    let mut workers = request.workers.iter().copied();
    let lists = request.indexes.iter().zip(&request.generations).zip(&request.copies);
    let block = |((index, generation), copies): ((&u32, &u32), &u32)| {
        let PersistRequest { inode, block_size, mount_id, .. } = *request;
        let block = BlockRef::of_inode(cluster_id, inode, *generation, *index, block_size, mount_id);
        PlannedBlock { block, workers: workers.by_ref().take(*copies as usize).collect() }
    };
    Ok(lists.map(block).collect())
}

#[cfg(test)]
mod tests {
    use cavern_proto::ContentId;

    use super::*;

    fn request() -> PersistRequest {
        PersistRequest {
            mount_id: 1,
            key: "k".into(),
            length: 100,
            block_size: 64,
            inode: 5,
            indexes: vec![0, 1],
            generations: vec![0, 3],
            copies: vec![1, 2],
            workers: vec![7, 8, 9],
            metadata: vec![MetadataItem { name: "mode".into(), value: "33188".into() }],
            ..PersistRequest::default()
        }
    }

    #[test]
    fn lists_become_blocks() {
        let plan = Plan::parse(request(), "c").unwrap();
        let Content::Blocks(blocks) = plan.content else { panic!("{:?}", plan.content) };
        assert_eq!(blocks.iter().map(|block| &block.workers[..]).collect::<Vec<_>>(), [&[7][..], &[8, 9]]);
        assert_eq!(blocks[1].block.content_id, ContentId::of_inode("c", 1, 5, 3).as_bytes()[..]);
        assert_eq!(plan.metadata["mode"], "33188");
        let hole =
            PersistRequest { indexes: vec![], generations: vec![], copies: vec![], workers: vec![], ..request() };
        assert!(matches!(Plan::parse(hole, "c").unwrap().content, Content::Blocks(blocks) if blocks.is_empty()));
        assert!(Plan::parse(request(), "c").unwrap().origin.is_none());
        let large = PersistRequest { origin_key: "o".into(), origin_bytes: u64::MAX, ..request() };
        assert_eq!(Plan::parse(large, "c").unwrap().origin.unwrap().bytes, 100, "as many as the file has");
    }

    #[test]
    fn keys_are_those_of_the_mount() {
        let with = |key: &str, origin: &str, same: &str| {
            let (key, origin_key, same_key) = (key.into(), origin.into(), same.into());
            let (origin_bytes, same_etag) = (u64::from(!origin.is_empty()), same.to_owned());
            let request = PersistRequest { key, origin_key, origin_bytes, same_key, same_etag, ..request() };
            Plan::parse(request, "c").unwrap().check_keys("a/").is_ok()
        };
        assert!(with("a/k", "", "") && with("a/k", "a/o", "a/s"));
        assert!(!with("k", "", "") && !with("ab/k", "", "") && !with("a", "", ""));
        assert!(!with("a/k", "b/o", "a/s") && !with("a/k", "a/o", "b/s"));
    }

    #[test]
    fn nonsense_is_refused() {
        let changes: [fn(&mut PersistRequest); 15] = [
            |request| request.same_key = "k".into(),
            |request| (request.same_key, request.same_etag) = ("k".repeat(1025), "e".into()),
            |request| request.origin_bytes = 5,
            |request| (request.origin_key, request.origin_bytes) = ("k".repeat(1025), 5),
            |request| request.key.clear(),
            |request| request.key = "k".repeat(1025),
            |request| request.length = u64::MAX,
            |request| request.block_size = 0,
            |request| request.indexes = vec![1, 1],
            |request| request.indexes = vec![0, 2],
            |request| request.generations = vec![0],
            |request| request.copies = vec![1, u32::MAX],
            |request| request.inline = "x".into(),
            |request| request.metadata[0].name = "Mode".into(),
            |request| request.metadata[0].value = "a\r\nb: c".into(),
        ];
        for (number, change) in changes.into_iter().enumerate() {
            let mut request = request();
            change(&mut request);
            assert!(Plan::parse(request, "c").is_err(), "case {number}");
        }
    }
}
