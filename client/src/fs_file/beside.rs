//! Files beside one that is opened for the first time. Whoever reads the files of a directory, in whatever order, asks
//! the master where the bytes of many are when it wants one, and the worker of this host for their descriptors: most
//! are known when they are opened.
//!
//! The files that come next in the order of names are asked for, the more of them the more were wanted. How many may be
//! known and not opened is bounded by directory: who reads a few out of millions soon asks for them alone.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use cavern_net::Route;
use cavern_proto::BlockId;
use cavern_proto::data::{BlockRef, open_request};
use cavern_proto::master;
use quick_cache::sync::Cache;

use super::blocks::block_name;
use super::closed::{FoundBlock, FoundFile, Moment};
use super::layout::{KnownLayout, Layout};
use super::{FsFile, Shared};
use crate::error::ClientError;
use crate::metadata::Mark;
use crate::mounts::MountView;
use crate::read::fetch::check_status;

/// Directories that are remembered.
const DIRECTORIES_MAX: usize = 256;
/// Files that are asked for with the second one that is wanted in a directory; with each that follows twice as many,
const FIRST: usize = 8;
/// but no more than this. Some of them are known.
const MOST: usize = 128;
/// Files of a directory that are known and were not opened.
const UNOPENED_MAX: usize = 16_384;

/// Directories whose files are read.
#[derive(Debug)]
pub(super) struct Readings(Cache<u64, Arc<Reading>>);

/// See [`Readings`].
#[derive(Debug, Default)]
pub(super) struct Reading {
    /// Files to be asked for with the next one.
    next: AtomicUsize,
    unopened: AtomicUsize,
}

/// What is being asked for beside a file.
pub(super) struct Beside {
    pub inodes: Vec<u64>,
    reading: Arc<Reading>,
    mark: Mark,
    moment: Moment,
}

impl Default for Readings {
    fn default() -> Self {
        Self(Cache::new(DIRECTORIES_MAX))
    }
}

impl Readings {
    fn of(&self, directory: u64) -> Arc<Reading> {
        self.0.get(&directory).unwrap_or_else(|| {
            let reading = Arc::<Reading>::default();
            self.0.insert(directory, reading.clone());
            reading
        })
    }
}

impl Reading {
    /// One more file is wanted: how many are to be asked for with it.
    fn wanted(&self) -> usize {
        let next = self.next.load(Relaxed);
        self.next.store((next * 2).clamp(FIRST, MOST), Relaxed);
        next.min(UNOPENED_MAX.saturating_sub(self.unopened.load(Relaxed)))
    }

    pub(super) fn known(&self) {
        self.unopened.fetch_add(1, Relaxed);
    }

    pub(super) fn opened(&self) {
        self.unopened.fetch_sub(1, Relaxed);
    }
}

impl FsFile {
    /// What is to be asked for beside this file, which is wanted for the first time.
    pub(super) fn beside(&self) -> Option<Beside> {
        let shared = &self.shared;
        let moment = shared.closed.moment();
        let mut reading = None;
        let found = shared
            .metadata
            .files_after(self.inode, |directory| reading.insert(shared.readings.of(directory)).wanted())?;
        let mut inodes = found.inodes;
        let open = shared.open.lock();
        inodes.retain(|inode| !open.contains_key(inode) && !shared.closed.knows(*inode));
        drop(open);
        Some(Beside { inodes, reading: reading?, mark: found.mark, moment }).filter(|beside| !beside.inodes.is_empty())
    }

    /// The master has answered: the rest is done by nobody who waits for it.
    pub(super) fn found_beside(&self, beside: Beside, layouts: Vec<master::Layout>) {
        if layouts.is_empty() {
            return;
        }
        let (shared, mount) = (self.shared.clone(), self.mount.clone());
        self.shared.runtime.spawn(async move { shared.take_in_beside(beside, layouts, &mount).await });
    }
}

impl Shared {
    async fn take_in_beside(&self, beside: Beside, layouts: Vec<master::Layout>, mount: &Arc<MountView>) {
        let Beside { inodes, reading, mark, moment } = beside;
        let is_wanted = |layout: &master::Layout| {
            let inode = layout.attr.map_or(0, |attr| attr.inode);
            layout.block_size == mount.block_size() && inodes.contains(&inode)
        };
        let known = |layout: master::Layout| {
            let (attr, ends_marked) = (layout.attr?, layout.ends_marked);
            Some((attr.inode, Layout::new(&attr, layout.extents, layout.origin).known()?, ends_marked))
        };
        let known: Vec<_> = layouts.into_iter().filter(is_wanted).filter_map(known).collect();
        let mut blocks = self.open_ahead(mount, &known).await;
        // From here on nobody opens or closes any.
        let open = self.open.lock();
        let has_changed = self.metadata.has_changed_since(mark);
        let found = known.into_iter().filter(|(inode, ..)| !open.contains_key(inode) && !has_changed(*inode));
        let found = found.map(|(inode, layout, ends_marked)| {
            let block = blocks.remove(&inode);
            FoundFile { inode, layout, ends_marked, block }
        });
        self.closed.add(moment, found.collect(), &reading);
    }

    /// The files of the blocks of those that have one alone, and have it on this host, by inode. What cannot be had is
    /// asked for when it is needed.
    async fn open_ahead(&self, mount: &MountView, known: &[(u64, KnownLayout, bool)]) -> HashMap<u64, FoundBlock> {
        let mut at_workers: HashMap<u64, Vec<(u64, BlockRef)>> = HashMap::new();
        for (inode, layout, _) in known {
            let Some((index, generation, workers)) = layout.only_block() else { continue };
            let local = workers.iter().find(|worker| self.pool.known_route(**worker) == Route::Local);
            let Some(local) = local else { continue };
            let name = block_name(&self.pool, mount, (*inode, generation, index));
            at_workers.entry(*local).or_default().push((*inode, name));
        }
        let mut opened = HashMap::new();
        for (worker, blocks) in at_workers {
            if let Err(error) = self.open_at(worker, blocks, &mut opened).await {
                tracing::debug!(worker, "blocks are opened when they are needed: {error}");
            }
        }
        opened
    }

    async fn open_at(
        &self,
        worker: u64,
        blocks: Vec<(u64, BlockRef)>,
        opened: &mut HashMap<u64, FoundBlock>,
    ) -> Result<(), ClientError> {
        let item = |(_, name): &(u64, BlockRef)| open_request::Item { block: Some(name.clone()), want: Vec::new() };
        let (reply, files) = self.pool.open(worker, blocks.iter().map(item).collect(), self.worker_timeout).await?;
        let mut files = files.into_iter();
        for ((inode, name), item) in blocks.into_iter().zip(reply.items) {
            if let Err(error) = check_status(worker, item.status(), &item.message) {
                tracing::debug!(inode, "a block is not opened ahead: {error}");
                continue;
            }
            let (Some(file), Some(block)) = (files.next(), BlockId::of(&name)) else { break };
            opened.insert(inode, FoundBlock { block, worker, incarnation: item.incarnation, file });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_and_more_files_are_asked_for_until_many_of_them_are_not_opened() {
        let readings = Readings::default();
        let wanted = || readings.of(5).wanted();
        assert_eq!([wanted(), wanted(), wanted(), wanted()], [0, 8, 16, 32]);
        assert_eq!((readings.of(6).wanted(), wanted(), wanted(), wanted()), (0, 64, 128, 128));
        let reading = readings.of(5);
        (0..UNOPENED_MAX - 10).for_each(|_| reading.known());
        assert_eq!(wanted(), 10);
        (0..10).for_each(|_| reading.known());
        assert_eq!(wanted(), 0);
        reading.opened();
        assert_eq!(wanted(), 1);
    }
}
