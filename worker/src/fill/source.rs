//! Where the bytes of a block come from, as a request names it, checked.

use std::sync::Arc;

use cavern_proto::block_id::block_length;
use cavern_proto::data::BlockRef;
use cavern_proto::{BlockId, ContentId};

use crate::request_error::Refusal;
use crate::store::DataTarget;

/// Largest block. Its checksums and bitmap must stay small beside it.
const MAX_BLOCK_BYTES: u64 = 1 << 30;
/// Longest key that S3 allows is 1,024 bytes; others allow somewhat more.
const MAX_KEY_BYTES: usize = 4096;
/// ETags are 32 to 40 bytes; anything spelled by a server that is still one.
const MAX_ETAG_BYTES: usize = 1024;

/// A block reference that makes sense. It says in which of the two stores the block is.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum BlockSource {
    Object(Arc<ObjectBlock>),
    /// Of an fs-mode file, as the store names it.
    Data(DataTarget),
}

/// A block of an object of a bucket.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ObjectBlock {
    pub id: BlockId,
    /// Bytes of the block.
    pub length: u32,
    pub mount_id: u32,
    /// Full object key.
    pub key: String,
    /// Version, without quotes.
    pub etag: String,
    object_length: u64,
    block_size: u64,
    /// A version that the bucket only keeps will do as well: it is read for a view.
    pub is_pinned: bool,
}

impl BlockSource {
    /// Checks all bounds.
    ///
    /// # Errors
    /// What makes no sense.
    pub fn parse(block: BlockRef) -> Result<Self, Refusal> {
        let Some(id) = BlockId::of(&block) else {
            return Err(Refusal::bad_request(format!("a content id has 16 bytes, not {}", block.content_id.len())));
        };
        if block.block_size == 0 || block.block_size > MAX_BLOCK_BYTES {
            return Err(Refusal::bad_request(format!("block size {} is not between 1 and 2^30", block.block_size)));
        }
        if block.key.len() > MAX_KEY_BYTES || block.etag.len() > MAX_ETAG_BYTES {
            return Err(Refusal::bad_request("the key or the etag is too long"));
        }
        let BlockRef { mount_id, key, etag, object_length, block_size, index, pinned: is_pinned, .. } = block;
        if block.data {
            if !(key.is_empty() && etag.is_empty()) {
                return Err(Refusal::bad_request("a block of an fs-mode file has neither key nor etag"));
            }
            // At most MAX_BLOCK_BYTES.
            return Ok(Self::Data(DataTarget { id, length: block_size as u32, mount_id }));
        }
        let length = block_length(object_length, block_size, index);
        if length == 0 {
            let message = format!("block {index} lies past the end of an object of {object_length} bytes");
            return Err(Refusal::bad_request(message));
        }
        let object = ObjectBlock { id, length, mount_id, key, etag, object_length, block_size, is_pinned };
        Ok(Self::Object(Arc::new(object)))
    }

    /// Checks a reference to a block of an fs-mode file.
    ///
    /// # Errors
    /// What makes no sense, or that it is none.
    pub fn parse_data(block: BlockRef) -> Result<DataTarget, Refusal> {
        match Self::parse(block)? {
            Self::Data(target) => Ok(target),
            Self::Object(_) => Err(Refusal::bad_request("only blocks of fs-mode files are written: set data")),
        }
    }

    /// The mount that the block is of, as the request has it.
    pub fn mount_id(&self) -> u32 {
        match self {
            Self::Object(object) => object.mount_id,
            Self::Data(target) => target.mount_id,
        }
    }

    /// Bytes of the block.
    pub fn length(&self) -> u32 {
        match self {
            Self::Object(object) => object.length,
            Self::Data(target) => target.length,
        }
    }
}

impl ObjectBlock {
    /// Where the block begins in its object.
    pub fn start(&self) -> u64 {
        u64::from(self.id.index) * self.block_size
    }

    /// Whether the content id is really that of this key and version in `store`. Checked before anything is fetched, so
    /// that a confused client cannot put bytes under a name that is not theirs.
    pub fn is_of(&self, store: &str) -> bool {
        let content = ContentId::of_object(store, &self.key, &self.etag, self.object_length, self.block_size);
        content == self.id.content
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reference() -> BlockRef {
        let content = ContentId::of_object("s", "k", "e", 100, 64);
        BlockRef {
            content_id: content.as_bytes().to_vec().into(),
            index: 1,
            block_size: 64,
            mount_id: 1,
            key: "k".into(),
            etag: "e".into(),
            object_length: 100,
            ..BlockRef::default()
        }
    }

    #[test]
    fn sense_is_told_from_nonsense() {
        let BlockSource::Object(source) = BlockSource::parse(reference()).unwrap() else { panic!("an object") };
        assert_eq!((source.length, source.start()), (36, 64));
        assert!(source.is_of("s") && !source.is_of("t") && !source.is_pinned);
        let pinned = BlockSource::parse(BlockRef { pinned: true, ..reference() }).unwrap();
        assert!(matches!(pinned, BlockSource::Object(pinned) if pinned.is_pinned && pinned.id == source.id));
        for wrong in [
            BlockRef { content_id: vec![0; 15].into(), ..reference() },
            BlockRef { block_size: 0, ..reference() },
            BlockRef { block_size: u64::MAX, ..reference() },
            BlockRef { index: 2, ..reference() },
            BlockRef { object_length: 0, ..reference() },
            BlockRef { key: "x".repeat(5000), ..reference() },
        ] {
            assert!(BlockSource::parse(wrong).is_err());
        }
        assert!(BlockSource::parse_data(reference()).is_err());
        let data = BlockRef { data: true, key: String::new(), etag: String::new(), object_length: 0, ..reference() };
        let target = BlockSource::parse_data(BlockRef { index: u32::MAX, ..data.clone() }).unwrap();
        assert_eq!((target.id.index, target.length, target.mount_id), (u32::MAX, 64, 1));
        assert_eq!(DataTarget { id: BlockId { index: 3, ..target.id }, ..target }.start(), 192);
        for wrong in [
            BlockRef { key: "k".into(), ..data.clone() },
            BlockRef { etag: "e".into(), ..data.clone() },
            BlockRef { block_size: 0, ..data.clone() },
            BlockRef { block_size: (1 << 30) + 1, ..data.clone() },
            BlockRef { content_id: vec![0; 17].into(), ..data.clone() },
        ] {
            assert!(BlockSource::parse_data(wrong).is_err());
        }
    }
}
