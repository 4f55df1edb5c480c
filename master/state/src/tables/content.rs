//! The content of files: their blocks, and their objects in the bucket.

use cavern_proto::master::Extent;
use cavern_proto::record::{ExtentRecord, InodeRecord, KeptRecord, ObjectRecord, Stray};

use super::{Found, Row, Tables};
use crate::error::Result;
use crate::records::{extent_at, is_truncated};
use crate::schema::{self, FileBlock, encode_key, end_of};

/// Indexes of blocks that are looked at together.
const INDEXES: u32 = 1024;

impl<'a> Tables<'a> {
    /// The blocks of a file from one index on.
    pub fn extents(&self, inode: u64, from: u32) -> Result<Vec<Extent>> {
        self.extents_of(inode, from)?.collect()
    }

    /// The blocks of a file from one index on, one by one.
    pub fn extents_of(&self, inode: u64, from: u32) -> Result<impl Iterator<Item = Result<Extent>> + use<'a>> {
        let cuts = self.inode(inode)?.unwrap_or_default().cuts;
        let is_there = move |extent: &Extent| !is_truncated(&cuts, extent.index, extent.generation);
        Ok(self.recorded_extents(inode, from).filter(move |item| item.as_ref().map_or(true, &is_there)))
    }

    /// The blocks of a file, given its record, if no more than `limit` are recorded.
    pub fn few_extents(&self, inode: u64, record: &InodeRecord, limit: usize) -> Result<Option<Vec<Extent>>> {
        let recorded = self.recorded_extents(inode, 0).take(limit + 1).collect::<Result<Vec<_>>>()?;
        let is_there = |extent: &Extent| !is_truncated(&record.cuts, extent.index, extent.generation);
        Ok((recorded.len() <= limit).then(|| recorded.into_iter().filter(is_there).collect()))
    }

    /// The records of a file's blocks from one index on, those that have been cut off among them.
    pub fn recorded_extents(&self, inode: u64, from: u32) -> impl Iterator<Item = Result<Extent>> + use<'a> {
        let after = from.checked_sub(1).map(|last| (inode, last));
        self.rows_after(schema::Extents, inode, after).map(|row| extent_of(&row?))
    }

    /// Up to `limit` of these, and the index from which on there may be more. Blocks that have just been dropped, by
    /// the hundred thousand, cost a scan as much as others, for a time: so not many are passed over at once, and there
    /// may be none among those that are given though there are more.
    pub fn some_recorded_extents(&self, inode: u64, from: u32, limit: usize) -> Result<(Vec<Extent>, Option<u32>)> {
        let Some(end) = from.checked_add(INDEXES) else {
            return Ok((self.recorded_extents(inode, from).collect::<Result<_>>()?, None));
        };
        let key = |index: u32| -> Vec<u8> { encode_key::<schema::Extents>(&(inode, index)) };
        let mut extents = Vec::new();
        for row in self.rows_between::<schema::Extents>(&key(from), Some(key(end)), self.options()) {
            let extent = extent_of(&row?)?;
            if extents.len() == limit {
                return Ok((extents, Some(extent.index)));
            }
            extents.push(extent);
        }
        let until = end_of(&encode_key::<schema::Extents>(&inode));
        let next = match self.first_unless_removed::<schema::Extents>(&key(end), until)? {
            Found::Nothing => None,
            Found::Row(row) => Some(row.key()?.1),
            Found::Removed => Some(end),
        };
        Ok((extents, next))
    }

    /// A block of a file.
    pub fn extent(&self, inode: u64, index: u32) -> Result<Option<ExtentRecord>> {
        let Some(record) = self.recorded_extent(inode, index)? else { return Ok(None) };
        let cuts = self.inode(inode)?.unwrap_or_default().cuts;
        Ok((!is_truncated(&cuts, index, record.generation)).then_some(record))
    }

    /// Up to `limit` blocks that have a replica at a worker, beyond this one.
    pub fn replicas_at(&self, worker: u64, after: Option<FileBlock>, limit: usize) -> Result<Vec<FileBlock>> {
        let after = after.map(|block| (worker, block));
        self.rows_after(schema::Replicas, worker, after).page(limit, |row| Ok(row.key()?.1))
    }

    /// Blocks that a file has lost and views have, in the order of generations and indexes.
    pub fn kept_blocks(&self, inode: u64) -> impl Iterator<Item = Result<(Stray, KeptRecord)>> + use<'a> {
        self.rows(schema::KeptBlocks, inode).map(|row| row?.entry())
    }

    /// Blocks that files have lost and views have, beyond this one, in the order of inodes, generations and indexes.
    pub fn kept_after(&self, after: Option<Stray>) -> impl Iterator<Item = Result<(Stray, KeptRecord)>> + use<'a> {
        self.rows_after(schema::KeptBlocks, (), after).map(|row| row?.entry())
    }

    /// What the bucket has, or may have, of an inode: keys and objects, in the order of the keys. There may be as many
    /// as the inode ever had names.
    pub fn objects_of(&self, inode: u64) -> impl Iterator<Item = Result<(String, ObjectRecord)>> + use<'a> {
        self.rows(schema::Objects, inode).map(|row| {
            let row = row?;
            let ((_, key), object) = row.entry()?;
            Ok((key.to_owned(), object))
        })
    }
}

fn extent_of(row: &Row<schema::Extents>) -> Result<Extent> {
    let ((_, index), record) = row.entry()?;
    Ok(extent_at(index, record))
}
