//! An open block of either kind, for those who read it and do not care which.

use std::ops::{Deref, Range};
use std::sync::Arc;

use super::block_file::BlockFile;
use super::cache::block::CachedBlock;
use super::data::block::DataBlock;

/// An open block.
#[derive(Clone, Debug)]
pub enum Block {
    /// Of an object.
    Cached(Arc<CachedBlock>),
    /// Of an fs-mode file.
    Data(Arc<DataBlock>),
}

impl Deref for Block {
    type Target = BlockFile;

    fn deref(&self) -> &BlockFile {
        match self {
            Self::Cached(block) => block,
            Self::Data(block) => block,
        }
    }
}

impl Block {
    /// Whether all these chunks may be read.
    pub fn has(&self, chunks: Range<u32>) -> bool {
        match self {
            Self::Cached(block) => block.has(chunks),
            Self::Data(_) => true,
        }
    }

    /// The chunks that may be read, as messages carry them.
    pub fn verified_bytes(&self) -> Vec<u8> {
        match self {
            Self::Cached(block) => block.state().verified.to_bytes(),
            Self::Data(block) => block.all_chunks().to_bytes(),
        }
    }

    /// The chunks that are there, believed or not, as messages carry them.
    pub fn present_bytes(&self) -> Vec<u8> {
        match self {
            Self::Cached(block) => block.state().present.to_bytes(),
            Self::Data(block) => block.all_chunks().to_bytes(),
        }
    }
}
