//! Names of content: 128 bits that stand for one version of one object, so that a changed object can never meet
//! an old block, and so that a client can name a block without asking anybody.

use std::fmt;

use crate::data::BlockRef;

/// 128 bits that name one content: one version of one object, cut into blocks of one size.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ContentId([u8; 16]);

impl ContentId {
    /// The content id of an object of a bucket. `store` names the bucket globally (endpoint and bucket, as
    /// `cavern_ufs::Ufs::store_id` spells them); `etag` is without quotes; `length` in bytes. The block size is part
    /// of the name because it decides what block `i` holds.
    pub fn of_object(store: &str, key: &str, etag: &str, length: u64, block_size: u64) -> Self {
        let mut hasher = blake3::Hasher::new();
        for part in [store, key, etag] {
            hasher.update(&(part.len() as u64).to_le_bytes());
            hasher.update(part.as_bytes());
        }
        hasher.update(&length.to_le_bytes());
        hasher.update(&block_size.to_le_bytes());
        let mut id = [0; 16];
        id.copy_from_slice(&hasher.finalize().as_bytes()[..16]);
        Self(id)
    }

    /// The content id of one generation of a file of an fs-mode mount: another one begins when blocks are dropped, or
    /// take the place of what a view has. The mount is part of the name: whoever may use the blocks of one mount can
    /// name none of another.
    pub fn of_inode(cluster_id: &str, mount_id: u32, inode: u64, generation: u32) -> Self {
        let mut hasher = blake3::Hasher::new();
        hasher.update(b"fs-mode");
        hasher.update(&(cluster_id.len() as u64).to_le_bytes());
        hasher.update(cluster_id.as_bytes());
        hasher.update(&mount_id.to_le_bytes());
        hasher.update(&inode.to_le_bytes());
        hasher.update(&generation.to_le_bytes());
        let mut id = [0; 16];
        id.copy_from_slice(&hasher.finalize().as_bytes()[..16]);
        Self(id)
    }

    /// From the 16 bytes of a message; `None` for any other length.
    pub fn from_slice(bytes: &[u8]) -> Option<Self> {
        bytes.try_into().ok().map(Self)
    }

    /// The raw bytes, as they travel and as they are stored.
    pub fn as_bytes(&self) -> &[u8; 16] {
        &self.0
    }

    /// 64 well-mixed bits of the name, for hash tables and frequency sketches.
    pub fn hash64(&self) -> u64 {
        let (low, high) = self.0.split_at(8);
        let word = |half: &[u8]| half.iter().fold(0u64, |value, byte| value << 8 | u64::from(*byte));
        word(low) ^ word(high).rotate_left(32)
    }
}

impl BlockRef {
    /// Names a block of a file of an fs-mode mount at the workers.
    pub fn of_inode(cluster_id: &str, inode: u64, generation: u32, index: u32, block_size: u64, mount_id: u32) -> Self {
        let content = ContentId::of_inode(cluster_id, mount_id, inode, generation);
        Self {
            content_id: bytes::Bytes::copy_from_slice(content.as_bytes()),
            index,
            block_size,
            mount_id,
            data: true,
            inode,
            generation,
            ..Self::default()
        }
    }

    /// Whether the content id is that of the file, generation and mount that the reference names beside it.
    pub fn is_of_inode(&self, cluster_id: &str) -> bool {
        let content = ContentId::of_inode(cluster_id, self.mount_id, self.inode, self.generation);
        content.as_bytes()[..] == self.content_id[..]
    }
}

impl fmt::Display for ContentId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for ContentId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// One block: block `index` of a content.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct BlockId {
    pub content: ContentId,
    pub index: u32,
}

impl BlockId {
    /// The block that a message names; `None` when its content id is not 16 bytes long.
    pub fn of(block: &BlockRef) -> Option<Self> {
        Some(Self { content: ContentId::from_slice(&block.content_id)?, index: block.index })
    }

    /// Key in the worker's index: content id ‖ index, big-endian, so that the blocks of a content are neighbours.
    pub fn to_key(self) -> [u8; 20] {
        let mut key = [0; 20];
        key[..16].copy_from_slice(self.content.as_bytes());
        key[16..].copy_from_slice(&self.index.to_be_bytes());
        key
    }

    /// The block of an index key; `None` when it is not 20 bytes long.
    pub fn from_key(key: &[u8]) -> Option<Self> {
        let (content, index) = key.split_at_checked(16)?;
        Some(Self { content: ContentId::from_slice(content)?, index: u32::from_be_bytes(index.try_into().ok()?) })
    }
}

impl fmt::Display for BlockId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.content, self.index)
    }
}

/// Bytes of block `index` of an object of `object_length` bytes; 0 past its end.
pub fn block_length(object_length: u64, block_size: u64, index: u32) -> u32 {
    let start = u64::from(index).saturating_mul(block_size);
    let length = object_length.saturating_sub(start).min(block_size);
    u32::try_from(length).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_part_of_the_identity_changes_the_name() {
        let base = ContentId::of_object("http://h/b", "k", "e", 1, 64);
        for other in [
            ContentId::of_object("http://h/c", "k", "e", 1, 64),
            ContentId::of_object("http://h/b", "l", "e", 1, 64),
            ContentId::of_object("http://h/b", "k", "f", 1, 64),
            ContentId::of_object("http://h/b", "k", "e", 2, 64),
            ContentId::of_object("http://h/b", "k", "e", 1, 128),
            ContentId::of_object("http://h/bk", "", "e", 1, 64),
        ] {
            assert_ne!(base, other);
        }
        assert_eq!(base, ContentId::of_object("http://h/b", "k", "e", 1, 64));
    }

    #[test]
    fn a_block_of_a_file_is_of_one_mount_only() {
        let block = BlockRef::of_inode("c", 5, 1, 0, 64, 7);
        assert!(block.is_of_inode("c") && !block.is_of_inode("d"));
        let others: [fn(&mut BlockRef); 4] = [
            |block| block.mount_id = 8,
            |block| block.inode = 6,
            |block| block.generation = 2,
            |block| block.content_id = vec![0; 16].into(),
        ];
        for change in others {
            let mut other = block.clone();
            change(&mut other);
            assert!(!other.is_of_inode("c"), "{other:?}");
        }
    }

    #[test]
    fn block_keys_survive_the_round_trip_and_sort_by_index() {
        let content = ContentId::of_object("s", "k", "e", 1, 1);
        let id = |index| BlockId { content, index };
        assert_eq!(BlockId::from_key(&id(7).to_key()), Some(id(7)));
        assert!(id(255).to_key() < id(256).to_key());
        assert_eq!(BlockId::from_key(&[0; 19]), None);
        assert_eq!(BlockId::from_key(&[]), None);
    }

    #[test]
    fn the_last_block_is_short_and_none_follows() {
        assert_eq!(block_length(130, 64, 0), 64);
        assert_eq!(block_length(130, 64, 2), 2);
        assert_eq!(block_length(130, 64, 3), 0);
        assert_eq!(block_length(0, 64, 0), 0);
        assert_eq!(block_length(u64::MAX, 64, u32::MAX), 64);
    }
}
