//! Files that nobody has open any more, and what is known of their contents: whoever opens one again asks neither the
//! master where its bytes are nor a worker for a descriptor. The descriptors are among those that stay, of all files.
//!
//! What is known counts under the session's lease, as attributes do: an event about the inode ends it, and so does
//! everything that may have been missed. Nothing is promised for it by anybody: a file that loses its last name is
//! gone, and its descriptors are closed, which hold its space at the worker.

use std::collections::{HashMap, HashSet, VecDeque};
use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use cavern_proto::BlockId;
use cavern_proto::data::BlockRef;
use parking_lot::Mutex;
use quick_cache::sync::Cache;

use super::block::{OpenBlock, Replica};
use super::layout::{CompactLayout, Layout};
use super::prefetch_window::PrefetchWindow;
use super::state::Known;
use crate::metadata::ChangedContents;
use crate::read::{BlockFile, Descriptors};

/// Files of which something stays known.
const FILES_MAX: usize = 32_768;
/// Closed files of which is remembered that they are on disks.
const ON_DISKS_OF: usize = 100_000;
/// Changes and closes that are remembered: what was asked for before all of them is not kept.
const RECENT_MAX: usize = 4096;
/// The room that open files leave for descriptors of closed ones is looked at when so many more, or fewer, are open.
const ROOM_STEP: usize = 256;

/// Layouts and descriptors of files that nobody has open.
#[derive(Debug)]
pub(super) struct LayoutCache {
    files: Cache<u64, Arc<CachedLayout>>,
    /// By inode: the version of the content that is on disks.
    on_disks: Cache<u64, u64>,
    descriptors: Arc<Descriptors>,
    /// Those of which something else may have become known lately.
    recent: Mutex<Recent>,
}

/// Files that were changed, or closed, in their order.
#[derive(Debug, Default)]
struct Recent {
    /// So many in all.
    count: u64,
    inodes: VecDeque<u64>,
}

/// How many there had been.
#[derive(Clone, Copy, Debug)]
pub(super) struct ChangeCount(u64);

#[derive(Debug)]
pub(super) struct CachedLayout {
    pub layout: CompactLayout,
    /// See `State`.
    pub ends_marked: bool,
    pub blocks: LocalBlocks,
    /// It was not open since it is known.
    pub ahead: Option<Arc<PrefetchWindow>>,
}

/// Those blocks of a file of which a file of this host is open.
#[derive(Debug)]
pub(super) struct LocalBlocks {
    blocks: Vec<LocalBlock>,
    descriptors: Arc<Descriptors>,
}

#[derive(Debug)]
pub(super) struct LocalBlock {
    pub block: BlockId,
    pub worker: u64,
    pub incarnation: u64,
    /// Until it is among the descriptors that stay.
    pub file: Option<OwnedFd>,
}

impl LocalBlock {
    fn of(&self) -> BlockFile {
        BlockFile { block: self.block, worker: self.worker, incarnation: self.incarnation }
    }
}

impl LocalBlocks {
    pub(super) fn push(&mut self, block: LocalBlock) {
        self.blocks.push(block);
    }

    /// From here on the descriptors are where those of all files are.
    fn keep(&mut self) {
        for LocalBlock { block, worker, incarnation, file } in &mut self.blocks {
            if let Some(file) = file.take() {
                self.descriptors.keep(*block, file, *worker, *incarnation);
            }
        }
    }
}

impl Drop for LocalBlocks {
    fn drop(&mut self) {
        let kept = self.blocks.iter().filter(|local| local.file.is_none());
        self.descriptors.release(kept.map(LocalBlock::of));
    }
}

impl LayoutCache {
    pub(super) fn new(descriptors: Arc<Descriptors>) -> Self {
        let (files, on_disks) = (Cache::new(FILES_MAX), Cache::new(ON_DISKS_OF));
        Self { files, on_disks, descriptors, recent: Mutex::default() }
    }

    pub(super) fn no_blocks(&self) -> LocalBlocks {
        LocalBlocks { blocks: Vec::new(), descriptors: self.descriptors.clone() }
    }

    /// What somebody else has changed is not known any more.
    pub(super) fn changed(&self, what: ChangedContents) {
        // Before: what is asked for now is not kept.
        self.recent.lock().add(what);
        match what {
            ChangedContents::Of(inode) => drop(self.files.remove(&inode)),
            ChangedContents::All => self.files.clear(),
        }
    }

    /// What becomes known from now on may be newer than what is being asked for.
    pub(super) fn moment(&self) -> ChangeCount {
        ChangeCount(self.recent.lock().count)
    }

    pub(super) fn knows(&self, inode: u64) -> bool {
        self.files.peek(&inode).is_some()
    }

    /// Whether this version of a file was on disks when it was closed here.
    pub(super) fn is_on_disks(&self, inode: u64, version: u64) -> bool {
        self.on_disks.get(&inode) == Some(version)
    }

    /// A file is closed of which this version is on disks, if any.
    pub(super) fn note_on_disks(&self, inode: u64, version: Option<u64>) {
        match version {
            Some(version) => self.on_disks.insert(inode, version),
            None => drop(self.on_disks.remove(&inode)),
        }
    }

    /// Keeps what was asked for at a moment, of files that nobody has open, unless something else has become known of
    /// them since then. To be called while nobody opens or closes any.
    pub(super) fn add(&self, moment: ChangeCount, found: HashMap<u64, CachedLayout>) {
        let is_newer = self.recent.lock().since(moment);
        let mut added = Vec::with_capacity(found.len());
        for (inode, mut file) in found {
            if is_newer(inode) || self.knows(inode) {
                continue;
            }
            file.blocks.keep();
            file.ahead.iter().for_each(|window| window.known());
            self.files.insert(inode, Arc::new(file));
            added.push(inode);
        }
        // What was changed before it was there did not end it.
        let is_newer = self.recent.lock().since(moment);
        added.into_iter().filter(|inode| is_newer(*inode)).for_each(|inode| drop(self.files.remove(&inode)));
    }

    /// What stays known of a file that is being closed, if the master knows all of it: its descriptors are kept from
    /// here on.
    pub(super) fn of(&self, known: &mut Known, ends_marked: bool) -> Option<Arc<CachedLayout>> {
        let layout = known.layout.known()?;
        let mut blocks = self.no_blocks();
        for open in std::mem::take(&mut known.blocks).into_values().filter_map(Arc::into_inner) {
            let Some(block) = BlockId::of(&open.name) else { continue };
            // Unless somebody reads from it, or syncs it.
            blocks.blocks.extend(open.replicas.into_iter().find_map(|replica| {
                let Replica { worker, incarnation, file, .. } = replica;
                let file = Some(OwnedFd::from(Arc::into_inner(file?)?));
                Some(LocalBlock { block, worker, incarnation, file })
            }));
        }
        blocks.keep();
        Some(Arc::new(CachedLayout { layout, ends_marked, blocks, ahead: None }))
    }

    /// A file is closed; whether something stays known of it.
    pub(super) fn leave(&self, inode: u64, stays: Option<Arc<CachedLayout>>) -> bool {
        self.recent.lock().add(ChangedContents::Of(inode));
        let Some(stays) = stays else { return false };
        self.files.insert(inode, stays);
        true
    }

    /// Takes out what is known of a file that is being opened, and whether its ends are marked. `name`: of one of its
    /// blocks, by index and generation.
    pub(super) fn take(&self, inode: u64, name: impl Fn(u32, u32) -> BlockRef) -> Option<(Known, bool)> {
        let (_, closed) = self.files.remove(&inode)?;
        let CachedLayout { layout, ends_marked, blocks: mut local, ahead } = Arc::into_inner(closed)?;
        ahead.iter().for_each(|window| window.opened());
        let layout = Layout::from(layout);
        let open = |local: LocalBlock| {
            let index = local.block.index;
            let known = layout.block(index)?;
            let file = self.descriptors.take(&local.of())?;
            let mut file = Some(Arc::new(File::from(file)));
            let replica = |(worker, joined)| {
                let file = if worker == local.worker { file.take() } else { None };
                let incarnation = if file.is_some() { local.incarnation } else { 0 };
                Replica { worker, joined, incarnation, file, allocated: None }
            };
            let replicas = known.replicas().map(replica).collect();
            Some((index, Arc::new(OpenBlock::to_read(name(index, known.generation), known.generation, replicas))))
        };
        // They are nobody's to be closed from here on.
        let blocks = std::mem::take(&mut local.blocks).into_iter().filter_map(open).collect();
        Some((Known { layout, blocks, ..Known::default() }, ends_marked))
    }

    /// So many files are open.
    pub(super) fn others_open(&self, count: usize) {
        if count.is_multiple_of(ROOM_STEP) {
            self.descriptors.leave_room(count);
        }
    }
}

impl Recent {
    fn add(&mut self, what: ChangedContents) {
        self.count += 1;
        match what {
            ChangedContents::Of(inode) => {
                self.inodes.push_back(inode);
                if self.inodes.len() > RECENT_MAX {
                    self.inodes.pop_front();
                }
            }
            // Nothing before it is known.
            ChangedContents::All => self.inodes.clear(),
        }
    }

    /// Whether something may have become known of an inode since then.
    fn since(&self, moment: ChangeCount) -> impl Fn(u64) -> bool + use<> {
        let count = usize::try_from(self.count - moment.0).unwrap_or(usize::MAX);
        let all = count > self.inodes.len();
        let inodes: HashSet<u64> = self.inodes.iter().rev().take(count).copied().collect();
        move |inode| all || inodes.contains(&inode)
    }
}

#[cfg(test)]
mod tests {
    use cavern_proto::master::{Attr, Extent};

    use super::*;

    fn name(index: u32, generation: u32) -> BlockRef {
        BlockRef::of_inode("cluster", 7, generation, index, 1 << 20, 1)
    }

    /// A file with two blocks, of which the first is on this host.
    fn closed(files: &LayoutCache) {
        let extent =
            |index| Extent { index, generation: 1, workers: vec![3, 5], joined: vec![0, 2], ..Extent::default() };
        let attr = Attr { size: 2 << 20, version: 9, generation: 1, ..Attr::default() };
        let layout = Layout::new(&attr, vec![extent(0), extent(1)], None);
        let replica = |worker, joined, file| Replica { worker, joined, incarnation: 4, file, allocated: None };
        let file = Some(Arc::new(tempfile::tempfile().unwrap()));
        let open = OpenBlock::to_read(name(0, 1), 1, vec![replica(3, 0, None), replica(5, 2, file)]);
        let blocks = HashMap::from([(0, Arc::new(open))]);
        let file = files.of(&mut Known { layout, blocks, ..Known::default() }, true);
        files.leave(7, file);
    }

    #[tokio::test]
    async fn what_is_known_of_a_file_is_taken_out_once_with_its_descriptors() {
        let (descriptors, tasks) = Descriptors::for_tests(10);
        let files = LayoutCache::new(descriptors);
        closed(&files);
        let (again, ends_marked) = files.take(7, name).unwrap();
        let (known, open) = (again.layout.block(0).unwrap(), &again.blocks[&0]);
        assert!(known.is_at(1, &open.replicas) && open.file().is_some() && ends_marked);
        assert_eq!(again.blocks.len(), 1);
        assert!(files.take(7, name).is_none());

        for what in [ChangedContents::Of(7), ChangedContents::All] {
            closed(&files);
            files.changed(ChangedContents::Of(8));
            files.changed(what);
            assert!(files.take(7, name).is_none());
        }
        tasks.close();
        tasks.wait().await;
        let kept = BlockFile { block: BlockId::of(&name(0, 1)).unwrap(), worker: 5, incarnation: 4 };
        assert!(files.descriptors.take(&kept).is_none(), "it is closed");

        // A descriptor may be closed at any time; the rest is known nevertheless.
        closed(&files);
        drop(files.descriptors.take(&kept).unwrap());
        assert!(files.take(7, name).is_some_and(|(again, _)| again.blocks.is_empty()));
    }

    #[tokio::test]
    async fn open_files_take_the_room_of_closed_ones() {
        let (descriptors, _tasks) = Descriptors::for_tests(ROOM_STEP);
        let files = LayoutCache::new(descriptors);
        closed(&files);
        files.others_open(ROOM_STEP);
        assert!(files.take(7, name).is_some_and(|(again, _)| again.blocks.len() <= 1));
    }

    /// What was asked for of some files, each with a block on this host.
    fn found(files: &LayoutCache, window: &Arc<PrefetchWindow>, inodes: &[u64]) -> HashMap<u64, CachedLayout> {
        let file = |inode: &u64| {
            let extent = Extent { generation: 1, workers: vec![3], ..Extent::default() };
            let attr = Attr { inode: *inode, size: 100, version: 1, generation: 1, ..Attr::default() };
            let layout = Layout::new(&attr, vec![extent], None).known().unwrap();
            let file = Some(OwnedFd::from(tempfile::tempfile().unwrap()));
            let block = BlockId::of(&BlockRef::of_inode("cluster", *inode, 1, 0, 1 << 20, 1)).unwrap();
            let mut blocks = files.no_blocks();
            blocks.push(LocalBlock { block, worker: 3, incarnation: 4, file });
            (*inode, CachedLayout { layout, ends_marked: true, blocks, ahead: Some(window.clone()) })
        };
        inodes.iter().map(file).collect()
    }

    #[tokio::test]
    async fn what_was_asked_for_ahead_is_kept_unless_something_has_happened_to_it_since() {
        let (descriptors, _tasks) = Descriptors::for_tests(10);
        let (files, window) = (LayoutCache::new(descriptors), Arc::new(PrefetchWindow::default()));
        closed(&files);
        let moment = files.moment();
        files.changed(ChangedContents::Of(8));
        files.add(moment, found(&files, &window, &[6, 7, 8]));
        let block_of =
            |inode: u64| move |index, generation| BlockRef::of_inode("cluster", inode, generation, index, 1 << 20, 1);
        let (taken, ends_marked) = files.take(6, block_of(6)).unwrap();
        assert!(ends_marked && taken.layout.size() == 100 && taken.blocks[&0].file().is_some());
        assert_eq!(files.take(7, name).unwrap().0.layout.size(), 2 << 20, "what was known already");
        assert!(files.take(8, block_of(8)).is_none());

        let moment = files.moment();
        files.changed(ChangedContents::All);
        files.add(moment, found(&files, &window, &[6]));
        assert!(files.take(6, block_of(6)).is_none());
        files.add(files.moment(), found(&files, &window, &[6]));
        assert!(files.take(6, block_of(6)).is_some());
    }
}
