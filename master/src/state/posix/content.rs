//! The content of files: their length, and which blocks they have.
//!
//! A block is named by inode, generation and index. Whenever blocks are dropped, the file's generation grows, so what is
//! written in their place later has other names, and dropped blocks can be freed at leisure.

use cavern_proto::master::{CommitContent, Extent, Kind};
use cavern_proto::record::{ExtentRecord, GarbageRecord, InodeRecord};
use rustix::io::Errno;

use super::{Mutating, Stop, refuse};
use crate::MasterError;
use crate::state::records::extent_key;
use crate::state::{Family, Transaction, origin};

/// 16 TiB, as ext4 has it.
const FILE_BYTES_MAX: u64 = 1 << 44;
/// Blocks of one commit.
const MADE_MAX: usize = 1024;
const WORKERS_MAX: usize = 8;

impl Mutating<'_, '_> {
    pub(super) fn commit(&mut self, commit: &CommitContent) -> Result<u64, Stop> {
        let mut record = self.inode(commit.inode)?;
        check_file(&record)?;
        check_length(commit.grow_to)?;
        let is_sound = |made: &Extent| (1..=WORKERS_MAX).contains(&made.workers.len());
        if commit.made.len() > MADE_MAX || !commit.made.iter().all(is_sound) {
            return refuse(Errno::INVAL, "a commit of too many blocks, or of a block without workers");
        }
        let tables = self.transaction.before();
        for made in &commit.made {
            // Of a block that is known, replicas may be given up. Other workers have what somebody else wrote there.
            let is_current = match tables.extent(commit.inode, made.index)? {
                Some(known) => {
                    known.generation == made.generation
                        && made.workers.iter().all(|worker| known.workers.contains(worker))
                }
                None => record.generation == made.generation,
            };
            if !is_current {
                return refuse(
                    Errno::STALE,
                    format!("block {} of inode {} is another by now", made.index, commit.inode),
                );
            }
        }
        self.check_touched(commit, &record)?;
        self.check_growth(&record, commit.grow_to)?;
        for made in &commit.made {
            let extent = ExtentRecord { generation: made.generation, workers: made.workers.clone() };
            self.transaction.put(Family::Extent, &extent_key(commit.inode, made.index), &extent);
        }
        if commit.grow_to > record.size || commit.changed || !commit.made.is_empty() {
            record.size = record.size.max(commit.grow_to);
            self.content_changed(&mut record);
            self.put(commit.inode, record);
        }
        Ok(commit.inode)
    }

    /// What was written to a block that has been dropped, since the bucket had it, would never be seen.
    fn check_touched(&mut self, commit: &CommitContent, record: &InodeRecord) -> Result<(), Stop> {
        if commit.touched.len() > MADE_MAX {
            return refuse(Errno::INVAL, "a commit of too many blocks");
        }
        let valid = record.origin.as_ref().map_or(0, |origin| origin.valid);
        if valid == 0 {
            return Ok(());
        }
        let tables = self.transaction.before();
        let block_size = tables.mount(record.mount_id)?.map_or(1, |mount| mount.block_size).max(1);
        for touched in &commit.touched {
            let known = tables.extent(commit.inode, touched.index)?;
            let is_there = known.is_some_and(|known| known.generation == touched.generation);
            if !is_there && u64::from(touched.index) * block_size < valid {
                let reason = format!("block {} of inode {} has been dropped", touched.index, commit.inode);
                return refuse(Errno::STALE, reason);
            }
        }
        Ok(())
    }

    /// Gives a file another length; the caller stores the record.
    pub(super) fn set_length(&mut self, inode: u64, record: &mut InodeRecord, length: u64) -> Result<(), Stop> {
        check_file(record)?;
        check_length(length)?;
        self.check_growth(record, length)?;
        if length < record.size {
            let mount = self.transaction.before().mount(record.mount_id)?;
            let block_size = mount.map_or(1, |mount| mount.block_size).max(1);
            let kept = u32::try_from(length.div_ceil(block_size)).unwrap_or(u32::MAX);
            drop_extents(self.transaction, inode, record.mount_id, kept)?;
            record.generation += 1;
            origin::cut(self.transaction, inode, record, length);
        }
        record.size = length;
        self.content_changed(record);
        Ok(())
    }

    fn content_changed(&self, record: &mut InodeRecord) {
        record.version += 1;
        record.mtime_ns = self.now_ns;
        record.ctime_ns = self.now_ns;
    }
}

/// Takes the blocks from an index on off a file, and notes that they are to be freed.
pub fn drop_extents(
    transaction: &mut Transaction<'_>,
    inode: u64,
    mount_id: u32,
    from: u32,
) -> Result<(), MasterError> {
    let extents: Vec<Extent> = transaction.before().extents(inode, from)?;
    for extent in &extents {
        transaction.delete(Family::Extent, &extent_key(inode, extent.index));
    }
    if !extents.is_empty() {
        transaction.counters.garbage += 1;
        let key = transaction.counters.garbage.to_be_bytes();
        transaction.put(Family::Garbage, &key, &GarbageRecord { inode, mount_id, extents });
    }
    Ok(())
}

fn check_file(record: &InodeRecord) -> Result<(), Stop> {
    match record.kind() {
        Kind::File => Ok(()),
        Kind::Directory => refuse(Errno::ISDIR, "a directory has no length"),
        _ => refuse(Errno::INVAL, "only a file has a length"),
    }
}

fn check_length(length: u64) -> Result<(), Stop> {
    if length <= FILE_BYTES_MAX {
        return Ok(());
    }
    refuse(Errno::FBIG, format!("a file of {length} bytes: {FILE_BYTES_MAX} are the most"))
}
