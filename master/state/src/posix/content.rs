//! The content of files: their length, and which blocks they have.
//!
//! A block is named by inode, generation and index. Whenever blocks are dropped, the file's generation grows, so what
//! is written in their place later has other names, and dropped blocks can be freed at leisure. A file that is emptied
//! may keep its block instead, for those who read the block's file by themselves: see [`SetAttr`]. A block that a view
//! has is not written to: a commit says which one it is that another takes the place of.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};

use cavern_posix::{block_takes, changes_content, content_changed};
use cavern_proto::master::{CommitContent, Extent, Kind, SetAttr};
use cavern_proto::record::{ExtentRecord, InodeRecord};
use rustix::io::Errno;

use super::context::{Checked, MutationContext, refuse};
use crate::error::Result;
use crate::index::extents::{self, Block, DropProgress};
use crate::index::{origins, space, views};
use crate::records::{self, extent_at, is_truncated, next_generation};
use crate::schema;
use crate::tables::Tables;

/// 16 TiB, as ext4 has it.
const FILE_BYTES_MAX: u64 = 1 << 44;
/// Blocks of one commit.
const MADE_MAX: usize = 1024;
const WORKERS_MAX: usize = 8;
/// Cuts of a file whose blocks are still to be dropped. Each is of hundreds of blocks that somebody has written since
/// the one before.
const CUTS_MAX: usize = 1000;

impl MutationContext<'_, '_> {
    pub fn commit(&mut self, commit: &CommitContent) -> Checked<u64> {
        let mut record = self.inode(commit.inode)?;
        check_file(&record)?;
        self.check_commit(commit.inode, &record)?;
        check_length(commit.grow_to)?;
        let is_sound = |made: &Extent| {
            let joined = made.joined.len();
            (1..=WORKERS_MAX).contains(&made.workers.len()) && (joined == 0 || joined == made.workers.len())
        };
        if commit.made.len() > MADE_MAX || !commit.made.iter().all(is_sound) {
            return refuse(Errno::INVAL, "a commit of too many blocks, or of a block without workers");
        }
        if !names_each_once(&commit.made) {
            return refuse(Errno::INVAL, "a commit that names a block, or a worker of a block, twice");
        }
        let tables = self.tx.before();
        let last = self.tx.counters.worker;
        let mut registered = Registered { tables, last, known: BTreeMap::new() };
        let size = record.size.max(commit.grow_to);
        let (block_size, replicas) = (self.mount.block_size.max(1), self.mount.replicas.max(1));
        let next_generation = next_generation(&self.tx.counters, commit.inode, &record);
        let replaceable = views::replaceable_below(&self.mount, commit.inode);
        let (mut blocks, mut retired) = (Vec::new(), Vec::new());
        for made in &commit.made {
            let mut known = tables.recorded_extent(commit.inode, made.index)?;
            let is_cut_off = |known: &mut ExtentRecord| is_truncated(&record.cuts, made.index, known.generation);
            // Its record makes room for that of the next one.
            retired.extend(known.take_if(is_cut_off).map(|old| extent_at(made.index, old)));
            let there = registered.of(made, known.as_ref())?;
            let made = there.map_or(Cow::Borrowed(made), Cow::Owned);
            if made.workers.is_empty() {
                let reason =
                    format!("no worker of block {} of {} was ever there", made.index, self.shown(commit.inode)?);
                return refuse(Errno::STALE, reason);
            }
            let is_new = (record.generation..=next_generation).contains(&made.generation);
            let after = match &known {
                Some(known) if known.generation == made.generation => extents::after_commit(known, &made),
                Some(known) => extents::after_replacement(known, &made, replaceable).filter(|_| is_new),
                None if is_new && made.replaces.is_none() => {
                    let (generation, workers) = (made.generation, made.workers.clone());
                    Some(ExtentRecord { generation, workers, ..ExtentRecord::default() })
                }
                None => None,
            };
            let Some(mut after) = after else {
                let reason = format!("block {} of {} is another by now", made.index, self.shown(commit.inode)?);
                return refuse(Errno::STALE, reason);
            };
            after.allocated = block_takes(known.as_ref(), &made, block_size, size);
            space::committed(&mut record, made.index, known.as_ref(), &after, block_size);
            let replaced = known.take_if(|known| known.generation != after.generation);
            retired.extend(replaced.map(|old| extent_at(made.index, old)));
            blocks.push((made, known, after));
        }
        self.check_growth(&record, commit.grow_to)?;
        extents::retire(self.tx, commit.inode, record.mount_id, retired)?;
        for (made, known, after) in &blocks {
            let block = Block { inode: commit.inode, index: made.index, mount_id: record.mount_id, replicas };
            extents::commit(self.tx, block, known.as_ref(), after, &made.workers);
        }
        if changes_content(commit, record.size) {
            self.content_changed(&mut record, size);
            self.put(commit.inode, record);
        }
        Ok(commit.inode)
    }

    /// Gives a file the length that is set; the caller stores the record.
    pub fn set_length(&mut self, set: &SetAttr, record: &mut InodeRecord, length: u64) -> Checked {
        let inode = set.inode;
        check_file(record)?;
        check_length(length)?;
        self.check_growth(record, length)?;
        self.effects.is_alone = !self.tx.before().is_written_by_others(inode, self.caller.session)?;
        let is_emptied = length == 0 && record.size > 0;
        if is_emptied
            && set.keeps_block
            && self.effects.is_alone
            && let Some(mut only) = self.only_block(inode)?
        {
            space::cut(record, 0, self.mount.block_size, &[], Some(&mut only));
            self.tx.put(schema::Extents, (inode, 0), &only);
            origins::cut(self.tx, inode, record, 0)?;
        } else if length < record.size {
            let block_size = self.mount.block_size.max(1);
            let kept = u32::try_from(length.div_ceil(block_size)).unwrap_or(u32::MAX);
            if record.cuts.len() >= CUTS_MAX {
                return refuse(Errno::AGAIN, format!("blocks that were cut off inode {inode} are still being dropped"));
            }
            let Some(generation) = extents::generation_after(&self.tx.counters, inode, record) else {
                let reason = format!("{} has been cut as often as a file can be: copy it", self.shown(inode)?);
                return refuse(Errno::FBIG, reason);
            };
            let (dropped, rest) = extents::cut(self.tx, inode, record, kept, generation)?;
            let ends_in = kept.saturating_sub(1);
            let mut last = match length.is_multiple_of(block_size) {
                true => None,
                false => self.tx.before().extent(inode, ends_in)?,
            };
            space::cut(record, length, block_size, &dropped, last.as_mut());
            if rest == DropProgress::Some && length > 0 {
                // What the others take would have to be read.
                record.allocated = None;
            }
            if let Some(last) = last {
                self.tx.put(schema::Extents, (inode, ends_in), &last);
            }
            origins::cut(self.tx, inode, record, length)?;
        }
        self.content_changed(record, length);
        Ok(())
    }

    /// The first block of a file that has no other, unless that is being copied, or a view has it.
    fn only_block(&self, inode: u64) -> Result<Option<ExtentRecord>> {
        let (tables, frozen_below) = (self.tx.before(), views::frozen_below(self.tx, inode, self.mount.id)?);
        let is_fit = |known: &Extent| known.index == 0 && known.joining == 0 && known.generation >= frozen_below;
        match tables.some_recorded_extents(inode, 0, 1)? {
            (only, None) if only.iter().all(is_fit) => tables.extent(inode, 0),
            _ => Ok(None),
        }
    }

    fn content_changed(&self, record: &mut InodeRecord, size: u64) {
        records::change(record, |attr| content_changed(attr, size, self.caller.made_ns));
    }
}

/// Workers that somebody names, looked up once each.
struct Registered<'d> {
    tables: Tables<'d>,
    /// The last that was registered: no other has a higher number.
    last: u64,
    known: BTreeMap<u64, bool>,
}

impl Registered<'_> {
    /// A block at those of the workers named that the table has, or that have the block already; `None` when these are
    /// all. One that was removed meanwhile leaves the content to the others; where there are none, the block is at it,
    /// and lost with it, which costs the other blocks of the commit nothing.
    fn of(&mut self, made: &Extent, recorded: Option<&ExtentRecord>) -> Result<Option<Extent>> {
        let mut is_there = Vec::with_capacity(made.workers.len());
        for worker in &made.workers {
            let has_block = recorded.is_some_and(|recorded| recorded.workers.contains(worker));
            is_there.push(has_block || self.has(*worker)?);
        }
        if is_there.iter().all(|there| *there) {
            return Ok(None);
        }
        if !is_there.contains(&true) {
            is_there = made.workers.iter().map(|worker| (1..=self.last).contains(worker)).collect();
        }
        let (workers, joined) = (those(&made.workers, &is_there), those(&made.joined, &is_there));
        Ok(Some(Extent { workers, joined, ..made.clone() }))
    }

    fn has(&mut self, worker: u64) -> Result<bool> {
        if let Some(known) = self.known.get(&worker) {
            return Ok(*known);
        }
        let is_there = self.tables.worker(worker)?.is_some();
        self.known.insert(worker, is_there);
        Ok(is_there)
    }
}

/// The values in whose place it says so.
fn those<T: Copy>(values: &[T], chosen: &[bool]) -> Vec<T> {
    values.iter().zip(chosen).filter(|(_, chosen)| **chosen).map(|(value, _)| *value).collect()
}

/// Whether no block is there twice, and no worker of a block.
fn names_each_once(made: &[Extent]) -> bool {
    let mut indexes = BTreeSet::new();
    made.iter().all(|extent| {
        let mut workers = extent.workers.iter().enumerate();
        indexes.insert(extent.index) && workers.all(|(place, worker)| !extent.workers[..place].contains(worker))
    })
}

fn check_file(record: &InodeRecord) -> Checked {
    match record.kind() {
        Kind::File => Ok(()),
        Kind::Directory => refuse(Errno::ISDIR, "a directory has no length"),
        _ => refuse(Errno::INVAL, "only a file has a length"),
    }
}

fn check_length(length: u64) -> Checked {
    if length <= FILE_BYTES_MAX {
        return Ok(());
    }
    refuse(Errno::FBIG, format!("a file of {length} bytes: {FILE_BYTES_MAX} are the most"))
}
