//! Files that nobody has open any more, and what is known of their contents: whoever opens one again asks neither the
//! master where its bytes are nor a worker for a descriptor.
//!
//! What is known counts under the session's lease, as attributes do: an event about the inode ends it, and so does
//! everything that may have been missed. Nothing is promised for it by anybody: a file that loses its last name is
//! gone, and its descriptors are closed, which hold its space at the worker.

use std::collections::{HashSet, VecDeque};
use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use cavern_proto::BlockId;
use cavern_proto::data::BlockRef;
use parking_lot::Mutex;
use quick_cache::sync::Cache;

use super::FsFile;
use super::beside::Reading;
use super::block::{OpenBlock, Replica};
use super::layout::{KnownLayout, Layout};
use crate::metadata::ChangedContents;
use crate::read::BlockFiles;

/// Files of which something stays known.
const FILES_MAX: usize = 32_768;
/// Changes and closes that are remembered: what was asked for before all of them is not kept.
const RECENT_MAX: usize = 4096;
/// The room that open files leave for descriptors of closed ones is looked at when so many more, or fewer, are open.
const ROOM_STEP: usize = 256;

/// See the module.
#[derive(Debug)]
pub(super) struct ClosedFiles {
    files: Cache<u64, Arc<ClosedFile>>,
    descriptors: BlockFiles,
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
pub(super) struct Moment(u64);

#[derive(Debug)]
pub(super) struct ClosedFile {
    layout: KnownLayout,
    /// See `State`.
    ends_marked: bool,
    blocks: LocalBlocks,
    /// It was not open since it is known.
    ahead: Option<Arc<Reading>>,
}

/// A block of a file, and its file on this host, which nobody has opened yet.
pub(super) struct FoundBlock {
    pub block: BlockId,
    pub worker: u64,
    pub incarnation: u64,
    pub file: OwnedFd,
}

/// A file that nobody has opened yet.
pub(super) struct FoundFile {
    pub inode: u64,
    pub layout: KnownLayout,
    pub ends_marked: bool,
    pub block: Option<FoundBlock>,
}

/// Those of its blocks of which a file of this host was open.
#[derive(Debug)]
struct LocalBlocks {
    blocks: Vec<LocalBlock>,
    descriptors: BlockFiles,
}

#[derive(Clone, Copy, Debug)]
struct LocalBlock {
    block: BlockId,
    worker: u64,
    incarnation: u64,
}

/// What a file has that is opened again.
pub(super) struct Reopened {
    pub layout: Layout,
    pub ends_marked: bool,
    pub blocks: Vec<(u32, OpenBlock)>,
}

impl Drop for LocalBlocks {
    fn drop(&mut self) {
        if !self.blocks.is_empty() {
            self.descriptors.let_go(self.blocks.iter().map(|local| (local.block, local.incarnation)));
        }
    }
}

impl ClosedFiles {
    pub(super) fn new(descriptors: BlockFiles) -> Self {
        Self { files: Cache::new(FILES_MAX), descriptors, recent: Mutex::default() }
    }

    /// Where descriptors of closed files are, and what the kernel knows of blocks.
    pub(super) fn block_files(&self) -> &BlockFiles {
        &self.descriptors
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
    pub(super) fn moment(&self) -> Moment {
        Moment(self.recent.lock().count)
    }

    pub(super) fn knows(&self, inode: u64) -> bool {
        self.files.peek(&inode).is_some()
    }

    /// Keeps what was asked for at a moment, of files that nobody has open, unless something else has become known of
    /// them since then. To be called while nobody opens or closes any.
    pub(super) fn add(&self, moment: Moment, found: Vec<FoundFile>, reading: &Arc<Reading>) {
        let is_newer = self.recent.lock().since(moment);
        let mut added = Vec::with_capacity(found.len());
        for FoundFile { inode, layout, ends_marked, block } in found {
            if is_newer(inode) || self.knows(inode) {
                continue;
            }
            let local = |FoundBlock { block, worker, incarnation, file }| {
                self.descriptors.keep(block, file, worker, incarnation);
                LocalBlock { block, worker, incarnation }
            };
            let blocks =
                LocalBlocks { blocks: block.map(local).into_iter().collect(), descriptors: self.descriptors.clone() };
            let ahead = Some(reading.clone());
            reading.known();
            self.files.insert(inode, Arc::new(ClosedFile { layout, ends_marked, blocks, ahead }));
            added.push(inode);
        }
        // What was changed before it was there did not end it.
        let is_newer = self.recent.lock().since(moment);
        added.into_iter().filter(|inode| is_newer(*inode)).for_each(|inode| drop(self.files.remove(&inode)));
    }

    /// What is known of a file that is being closed: its descriptors are kept from here on.
    fn of(&self, layout: KnownLayout, ends_marked: bool, open: impl Iterator<Item = OpenBlock>) -> Arc<ClosedFile> {
        let mut blocks = Vec::new();
        for open in open {
            let Some(block) = BlockId::of(&open.name) else { continue };
            let local = open.replicas.into_iter().find_map(|replica| {
                let Replica { worker, incarnation, file, .. } = replica;
                // Somebody reads from it, or syncs it.
                let file = Arc::into_inner(file?)?;
                self.descriptors.keep(block, OwnedFd::from(file), worker, incarnation);
                Some(LocalBlock { block, worker, incarnation })
            });
            blocks.extend(local);
        }
        let blocks = LocalBlocks { blocks, descriptors: self.descriptors.clone() };
        Arc::new(ClosedFile { layout, ends_marked, blocks, ahead: None })
    }

    /// Takes out what is known of a file that is being opened. `name`: of one of its blocks, by index and generation.
    pub(super) fn take(&self, inode: u64, name: impl Fn(u32, u32) -> BlockRef) -> Option<Reopened> {
        let (_, closed) = self.files.remove(&inode)?;
        let ClosedFile { layout, ends_marked, blocks: mut local, ahead } = Arc::into_inner(closed)?;
        ahead.iter().for_each(|reading| reading.opened());
        let layout = Layout::from(layout);
        let open = |local: LocalBlock| {
            let index = local.block.index;
            let known = layout.block(index)?;
            let file = self.descriptors.take(&local.block, local.incarnation)?;
            let mut file = Some(Arc::new(File::from(file)));
            let replica = |(worker, joined)| {
                let file = if worker == local.worker { file.take() } else { None };
                let incarnation = if file.is_some() { local.incarnation } else { 0 };
                Replica { worker, joined, incarnation, file, allocated: None }
            };
            let replicas = known.replicas().map(replica).collect();
            Some((index, OpenBlock::to_read(name(index, known.generation), known.generation, replicas)))
        };
        // They are nobody's to be closed from here on.
        let blocks = std::mem::take(&mut local.blocks).into_iter().filter_map(open).collect();
        Some(Reopened { layout, ends_marked, blocks })
    }

    /// So many files are open.
    pub(super) fn others_open(&self, count: usize) {
        if count.is_multiple_of(ROOM_STEP) {
            self.descriptors.others_have(count);
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
    fn since(&self, moment: Moment) -> impl Fn(u64) -> bool + use<> {
        let count = usize::try_from(self.count - moment.0).unwrap_or(usize::MAX);
        let all = count > self.inodes.len();
        let inodes: HashSet<u64> = self.inodes.iter().rev().take(count).copied().collect();
        move |inode| all || inodes.contains(&inode)
    }
}

impl FsFile {
    /// What stays known of the file when its last owner has dropped it: nothing that the master does not know as well,
    /// or that somebody else has changed.
    fn what_stays_known(&mut self) -> Option<Arc<ClosedFile>> {
        let is_settled = self.behind.is_drained() && self.is_as_known();
        let state = self.state.get_mut();
        if !is_settled || state.lost.is_some() {
            return None;
        }
        let layout = state.layout.as_ref()?.known()?;
        let blocks = std::mem::take(&mut state.blocks).into_values().filter_map(Arc::into_inner);
        Some(self.shared.closed.of(layout, state.ends_marked, blocks))
    }

    /// Whether the file has a name, and nobody else has changed it.
    fn is_as_known(&self) -> bool {
        self.kept.is_watched() && self.is_current() && self.shared.metadata.has_name(self.inode)
    }

    /// Takes the file out of those that are open.
    pub(super) fn leave(&mut self) {
        let known = self.what_stays_known();
        let shared = Arc::clone(&self.shared);
        let mut open = shared.open.lock();
        // Another may have taken its place since its last owner let go of it, and knows better.
        if open.get(&self.inode).is_none_or(|entry| !std::ptr::eq(entry.as_ptr(), self)) {
            return;
        }
        open.remove(&self.inode);
        shared.closed.recent.lock().add(ChangedContents::Of(self.inode));
        shared.closed.others_open(open.len());
        let Some(known) = known else { return };
        shared.closed.files.insert(self.inode, known);
        // What was changed before it was there did not end it.
        if !self.is_as_known() {
            shared.closed.changed(ChangedContents::Of(self.inode));
        }
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
    fn closed(files: &ClosedFiles) {
        let extent =
            |index| Extent { index, generation: 1, workers: vec![3, 5], joined: vec![0, 2], ..Extent::default() };
        let attr = Attr { size: 2 << 20, version: 9, generation: 1, ..Attr::default() };
        let layout = Layout::new(&attr, vec![extent(0), extent(1)], None);
        let replica = |worker, joined, file| Replica { worker, joined, incarnation: 4, file, allocated: None };
        let file = Some(Arc::new(tempfile::tempfile().unwrap()));
        let open = OpenBlock::to_read(name(0, 1), 1, vec![replica(3, 0, None), replica(5, 2, file)]);
        let file = files.of(layout.known().unwrap(), true, [open].into_iter());
        files.files.insert(7, file);
    }

    #[tokio::test]
    async fn what_is_known_of_a_file_is_taken_out_once_with_its_descriptors() {
        let (descriptors, tasks) = BlockFiles::for_tests(10);
        let files = ClosedFiles::new(descriptors);
        closed(&files);
        let again = files.take(7, name).unwrap();
        let known = again.layout.block(0).unwrap();
        let [(0, open)] = &again.blocks[..] else { panic!("{} blocks", again.blocks.len()) };
        assert!(known.is_at(1, &open.replicas) && open.file().is_some() && again.ends_marked);
        assert!(files.take(7, name).is_none());

        for what in [ChangedContents::Of(7), ChangedContents::All] {
            closed(&files);
            files.changed(ChangedContents::Of(8));
            files.changed(what);
            assert!(files.take(7, name).is_none());
        }
        tasks.close();
        tasks.wait().await;
        assert!(files.descriptors.take(&BlockId::of(&name(0, 1)).unwrap(), 4).is_none(), "it is closed");

        // A descriptor may be closed at any time; the rest is known nevertheless.
        closed(&files);
        drop(files.descriptors.take(&BlockId::of(&name(0, 1)).unwrap(), 4).unwrap());
        assert!(files.take(7, name).is_some_and(|again| again.blocks.is_empty()));
    }

    #[tokio::test]
    async fn open_files_take_the_room_of_closed_ones() {
        let (descriptors, _tasks) = BlockFiles::for_tests(ROOM_STEP);
        let files = ClosedFiles::new(descriptors);
        closed(&files);
        files.others_open(ROOM_STEP);
        assert!(files.take(7, name).is_some_and(|again| again.blocks.len() <= 1));
    }

    fn found(inode: u64) -> FoundFile {
        let extent = Extent { generation: 1, workers: vec![3], ..Extent::default() };
        let attr = Attr { inode, size: 100, version: 1, generation: 1, ..Attr::default() };
        let layout = Layout::new(&attr, vec![extent], None).known().unwrap();
        let file = OwnedFd::from(tempfile::tempfile().unwrap());
        let block = BlockId::of(&BlockRef::of_inode("cluster", inode, 1, 0, 1 << 20, 1)).unwrap();
        FoundFile {
            inode,
            layout,
            ends_marked: true,
            block: Some(FoundBlock { block, worker: 3, incarnation: 4, file }),
        }
    }

    #[tokio::test]
    async fn what_was_asked_for_ahead_is_kept_unless_something_has_happened_to_it_since() {
        let (descriptors, _tasks) = BlockFiles::for_tests(10);
        let (files, reading) = (ClosedFiles::new(descriptors), Arc::new(Reading::default()));
        closed(&files);
        let moment = files.moment();
        files.changed(ChangedContents::Of(8));
        files.add(moment, vec![found(6), found(7), found(8)], &reading);
        let block_of =
            |inode: u64| move |index, generation| BlockRef::of_inode("cluster", inode, generation, index, 1 << 20, 1);
        let taken = files.take(6, block_of(6)).unwrap();
        assert!(taken.ends_marked && taken.layout.size() == 100 && taken.blocks[0].1.file().is_some());
        assert_eq!(files.take(7, name).unwrap().layout.size(), 2 << 20, "what was known already");
        assert!(files.take(8, block_of(8)).is_none());

        let moment = files.moment();
        files.changed(ChangedContents::All);
        files.add(moment, vec![found(6)], &reading);
        assert!(files.take(6, block_of(6)).is_none());
        files.add(files.moment(), vec![found(6)], &reading);
        assert!(files.take(6, block_of(6)).is_some());
    }
}
