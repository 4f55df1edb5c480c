//! Where the bytes of a block are, whatever file it belongs to.

use std::sync::Arc;

use cavern_proto::BlockId;
use cavern_proto::data::BlockRef;

use super::buffers::BufferKey;
use crate::mounts::ObjectVersion;

/// Where a block is read.
#[derive(Clone, Debug)]
pub(super) enum BlockLocation {
    /// A block of an object: at the workers that placement names, else in the bucket.
    Object { object: ObjectVersion, index: u32 },
    /// A block of an fs-mode file: at its replicas alone.
    Replicas(Arc<ReplicatedBlock>),
}

/// A block of an fs-mode file, read over the network.
#[derive(Debug)]
pub(crate) struct ReplicatedBlock {
    pub id: BlockId,
    pub name: BlockRef,
    /// The workers that have it.
    pub workers: Vec<u64>,
    /// Bytes of it, from the first on, that are the file's.
    pub length: u32,
    /// Under which its bytes are buffered; 0 where they are read anew.
    pub version: u64,
}

impl ReplicatedBlock {
    /// What its bytes are buffered under.
    pub(super) fn key(&self) -> BufferKey {
        BufferKey { block: self.id, version: self.version, length: self.length }
    }
}

impl BlockLocation {
    pub(super) fn of_object(object: &ObjectVersion, index: u32) -> Self {
        Self::Object { object: object.clone(), index }
    }

    pub(super) fn is_of_object(&self) -> bool {
        matches!(self, Self::Object { .. })
    }

    /// Whether it is read for a view, which has this version and no other.
    pub(super) fn is_pinned(&self) -> bool {
        matches!(self, Self::Object { object, .. } if object.is_pinned)
    }

    pub(super) fn id(&self) -> BlockId {
        match self {
            Self::Object { object, index } => BlockId { content: object.content, index: *index },
            Self::Replicas(block) => block.id,
        }
    }

    pub(super) fn key(&self) -> BufferKey {
        match self {
            Self::Object { object, index } => BufferKey::of_object(object, *index),
            Self::Replicas(block) => block.key(),
        }
    }

    /// As the data plane names the block.
    pub(super) fn name(&self) -> BlockRef {
        match self {
            Self::Object { object, index } => object.block(*index),
            Self::Replicas(block) => block.name.clone(),
        }
    }

    /// Bytes of the block.
    pub(super) fn length(&self) -> u32 {
        match self {
            Self::Object { object, index } => object.block_length(*index),
            Self::Replicas(block) => block.length,
        }
    }

    /// What an error names.
    pub(super) fn file(&self) -> String {
        match self {
            Self::Object { object, .. } => object.key.to_string(),
            Self::Replicas(block) => format!("inode {}", block.name.inode),
        }
    }
}
