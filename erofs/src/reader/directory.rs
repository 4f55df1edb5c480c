//! The blocks of a directory: found by the first name of each, and then within one.

use super::Image;
use super::inode::Inode;
use crate::error::Error;
use crate::format::{DIRENT, NAME_MAX, u16_at, u64_at};
use crate::read_at::ReadAt;
use crate::tree::{BLOCK_BYTES, Kind};

/// A name, and what it leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DirectoryEntry<'a> {
    /// Without slash and NUL.
    pub name: &'a [u8],
    pub nid: u64,
    pub kind: Kind,
    /// Where to go on behind it.
    pub next: u64,
}

/// One of them, as far as it is used.
pub(super) struct Entries {
    /// Of the directory.
    nid: u64,
    bytes: Vec<u8>,
    count: usize,
}

impl<R: ReadAt> Image<R> {
    pub(super) fn directory_blocks(&self, directory: &Inode) -> Result<u64, Error> {
        if directory.kind != Kind::Directory {
            return Err(directory.corrupt("it is no directory"));
        }
        Ok(directory.size.div_ceil(BLOCK_BYTES))
    }

    /// `block` is one of `directory_blocks`.
    pub(super) fn directory_block(&self, directory: &Inode, block: u64) -> Result<Entries, Error> {
        let start = block * BLOCK_BYTES;
        let end = directory.size.min(start + BLOCK_BYTES);
        Entries::of(self.read_flat(directory, start..end)?, directory.nid)
    }

    /// Binary search, first of the block, then in it.
    pub(super) fn find(&self, directory: &Inode, name: &[u8]) -> Result<Option<(u64, Kind)>, Error> {
        let (mut low, mut high) = (0, self.directory_blocks(directory)?);
        let mut candidate = None;
        while low < high {
            let middle = low + (high - low) / 2;
            let entries = self.directory_block(directory, middle)?;
            if entries.name(0)? <= name {
                candidate = Some(entries);
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        candidate.map_or(Ok(None), |entries| entries.find(name))
    }
}

impl Entries {
    /// Where the first name begins says how many there are.
    fn of(bytes: Vec<u8>, nid: u64) -> Result<Self, Error> {
        let first = if bytes.len() < DIRENT { 0 } else { usize::from(u16_at(&bytes, 8)) };
        if first == 0 || first % DIRENT != 0 || first >= bytes.len() {
            return Err(Error::Corrupt { nid, what: "a block of its names has no beginning" });
        }
        Ok(Self { nid, bytes, count: first / DIRENT })
    }

    pub(super) fn count(&self) -> usize {
        self.count
    }

    /// `index` is below `count`.
    pub(super) fn entry(&self, index: usize) -> Result<(&[u8], u64, Kind), Error> {
        let head = &self.bytes[index * DIRENT..(index + 1) * DIRENT];
        let kind = Kind::of_number(head[10]);
        let kind = kind.ok_or(Error::Corrupt { nid: self.nid, what: "a name in it is of no kind" })?;
        Ok((self.name(index)?, u64_at(head, 0), kind))
    }

    fn name(&self, index: usize) -> Result<&[u8], Error> {
        let is_last = index + 1 == self.count;
        let end = if is_last { self.bytes.len() } else { self.offset(index + 1) };
        let mut name = self.bytes.get(self.offset(index)..end).unwrap_or_default();
        if is_last {
            name = name.split(|&byte| byte == 0).next().unwrap_or_default();
        }
        let has_wrong_byte = name.iter().any(|&byte| byte == 0 || byte == b'/');
        if name.is_empty() || name.len() > NAME_MAX || has_wrong_byte {
            return Err(Error::Corrupt { nid: self.nid, what: "a name in it is none" });
        }
        Ok(name)
    }

    /// Where a name begins.
    fn offset(&self, index: usize) -> usize {
        usize::from(u16_at(&self.bytes, index * DIRENT + 8))
    }

    fn find(&self, name: &[u8]) -> Result<Option<(u64, Kind)>, Error> {
        let (mut low, mut high) = (0, self.count);
        while low < high {
            let middle = low + (high - low) / 2;
            let (found, nid, kind) = self.entry(middle)?;
            match found.cmp(name) {
                std::cmp::Ordering::Equal => return Ok(Some((nid, kind))),
                std::cmp::Ordering::Less => low = middle + 1,
                std::cmp::Ordering::Greater => high = middle,
            }
        }
        Ok(None)
    }
}
