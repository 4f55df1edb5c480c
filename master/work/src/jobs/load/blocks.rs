//! Which blocks of a file are loaded.

use std::collections::HashSet;

use bytes::Bytes;
use cavern_proto::ContentId;
use cavern_proto::block_id::block_length;
use cavern_proto::data::{self, BlockRef, open_request};
use cavern_proto::master::Origin;
use cavern_proto::record::InodeRecord;
use cavern_state::Tables;

use crate::error::WorkError;
use crate::mounts::OpenMount;

/// A file to be loaded.
pub struct File {
    /// Of a file in an fs-mode mount; 0 for an object.
    inode: u64,
    pub bytes: u64,
    /// What is loaded of it; none of a file that has all of its content at workers.
    source: Option<Origin>,
    /// Blocks that workers have in the place of the object's.
    taken: HashSet<u32>,
}

/// A block of an object, to be filled.
#[derive(Clone)]
pub struct Wanted {
    /// The file whose content it is: see [`File`].
    pub inode: u64,
    pub content: ContentId,
    pub index: u32,
    pub item: open_request::Item,
    pub bytes: u32,
}

impl File {
    /// An object of a cache-mode mount.
    pub fn of_object(key: String, etag: String, length: u64) -> Self {
        let source = Origin { key, etag, length, valid: length, version: 0 };
        Self { inode: 0, bytes: length, source: Some(source), taken: HashSet::new() }
    }

    /// A file of an fs-mode mount.
    pub fn of_content(tables: Tables<'_>, inode: u64, record: InodeRecord) -> Result<Self, WorkError> {
        let extents = if record.origin.is_some() { tables.extents(inode, 0)? } else { Vec::new() };
        let taken = extents.into_iter().map(|extent| extent.index).collect();
        Ok(Self { inode, bytes: record.size, source: record.origin, taken })
    }

    /// Blocks that are to be filled.
    pub fn wanted<'f>(&'f self, mount: &'f OpenMount) -> impl Iterator<Item = Wanted> + 'f {
        let block_size = mount.mount.block_size.max(1);
        self.source.iter().flat_map(move |source| {
            let content =
                ContentId::of_object(mount.ufs.store_id(), &source.key, &source.etag, source.length, block_size);
            let count = u32::try_from(source.valid.div_ceil(block_size)).unwrap_or(u32::MAX);
            let indexes = (0..count).filter(|index| !self.taken.contains(index));
            indexes.map(move |index| wanted(mount, self.inode, source, content, index))
        })
    }

    /// The block of this index, if it is to be filled.
    pub fn block(&self, mount: &OpenMount, index: u32) -> Option<Wanted> {
        self.wanted(mount).find(|wanted| wanted.index == index)
    }
}

fn wanted(mount: &OpenMount, inode: u64, source: &Origin, content: ContentId, index: u32) -> Wanted {
    let block_size = mount.mount.block_size.max(1);
    let block = BlockRef {
        content_id: Bytes::copy_from_slice(content.as_bytes()),
        index,
        block_size,
        mount_id: mount.id(),
        key: source.key.clone(),
        etag: source.etag.clone(),
        object_length: source.length,
        ..BlockRef::default()
    };
    // What a file has been cut to.
    let bytes = block_length(source.valid.min(source.length), block_size, index);
    let item = open_request::Item { block: Some(block), want: vec![data::Range { offset: 0, length: bytes }] };
    Wanted { inode, content, index, item, bytes }
}
