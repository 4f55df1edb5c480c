//! Files of blocks on this host that stay when nobody has them open: the second of two levels (decision 42), below
//! what an open file has itself.
//!
//! A file whose block was evicted keeps its space as long as it is open, or the kernel knows it. So it goes when the
//! worker says that it evicted the block, on a thread that may wait: the last descriptor of an unlinked file gives its
//! space back, which can take as long as the file system's journal does, for thousands of blocks at once when a cache
//! is freed. Until its turn comes a descriptor stays, where it can be read as before and counts against the limit.
//!
//! A notice can get lost: with a connection, or with a worker, or it is faster than the answer that hands out the file.
//! So the worker is asked now and then which files are those of its blocks still, and told at the same time which of
//! them were used, since it does not see how they are read. What is held of a worker that has left the table goes then,
//! too: its directories may be emptied, or unmounted.

use std::any::Any;
use std::collections::HashMap;
use std::fs::File;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use cavern_proto::{BlockId, ChunkMap};
use parking_lot::Mutex;
use quick_cache::UnitWeighter;
use quick_cache::sync::Cache;
use tokio::runtime::Handle;
use tokio_util::task::TaskTracker;

use super::descriptor::{Descriptor, LastUse};
use crate::stats::Stats;

/// A descriptor that nobody used for this long is closed.
const IDLE: Duration = Duration::from_secs(30);
/// What the kernel knows and nobody used for this long goes.
const REGISTERED_IDLE: Duration = Duration::from_secs(30 * 60);
/// How often workers are asked about the files that are held.
pub(super) const CONFIRM_EVERY: Duration = Duration::from_secs(30);
/// About as many as a small data set has.
const REGISTERED_USUAL: usize = 1024;
/// No content of a file has this version.
const NO_VERSION: u64 = u64::MAX;

/// Descriptors of block files on this host, by block, bounded; the least useful go first.
#[derive(Debug)]
pub(crate) struct Descriptors {
    descriptors: Cache<BlockId, Arc<Descriptor>>,
    capacity: usize,
    registered: Cache<BlockId, Arc<Registered>>,
    evicted: Mutex<Evicted>,
    tasks: TaskTracker,
    runtime: Handle,
    stats: Arc<Stats>,
}

/// What is kept of a file beyond its descriptor: for passthrough, that the kernel knows it.
#[derive(Debug)]
pub(super) struct Registered {
    pub what: Arc<dyn Any + Send + Sync>,
    worker: u64,
    /// Of a block of an fs-mode file: which of the replicas that it ever had there; see `Extent`.
    joined: u32,
    pub incarnation: u64,
    /// Of a block of an fs-mode file: the version of that file that ended where this file did; else 0.
    version: AtomicU64,
    used: LastUse,
}

/// One of the files that a block has had at a worker.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct BlockFile {
    pub block: BlockId,
    pub worker: u64,
    pub incarnation: u64,
}

/// The block that all bytes of an fs-mode file are in.
pub(crate) struct WholeFile<'f> {
    pub block: BlockId,
    /// Of that file's content; `None` of content that has none yet.
    pub version: Option<u64>,
    /// Of that file, in bytes: those of the block's file, unless something was not done, or is being done.
    pub size: u64,
    /// The block's replicas: the worker, and which of those that there ever were it is.
    pub replicas: &'f [(u64, u32)],
    /// As it is open here, if it is; at one of these.
    pub local: Option<(&'f File, (u64, u32), u64)>,
}

/// What is kept of such a block, and whose it is.
pub(crate) struct RetainedWhole<T> {
    pub what: Arc<T>,
    pub replica: (u64, u32),
    pub incarnation: u64,
}

/// Files of blocks that are to be closed. About as many as there are descriptors: notices of others are not kept.
#[derive(Debug, Default)]
struct Evicted {
    files: Vec<BlockFile>,
    is_closing: bool,
}

/// A file that is held in whatever way.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct RetainedFile {
    pub file: BlockFile,
    /// Somebody has used it in the last [`CONFIRM_EVERY`].
    pub is_read: bool,
}

impl Registered {
    fn new(what: Arc<dyn Any + Send + Sync>, (worker, joined): (u64, u32), incarnation: u64, version: u64) -> Self {
        Self { what, worker, joined, incarnation, version: AtomicU64::new(version), used: LastUse::now() }
    }

    pub(super) fn is(&self, file: &BlockFile) -> bool {
        (self.worker, self.incarnation) == (file.worker, file.incarnation)
    }

    fn has(&self, version: u64) -> bool {
        self.version.load(Ordering::Relaxed) == version
    }

    /// It has been looked at.
    fn found_with(&self, version: u64) {
        self.version.store(version, Ordering::Relaxed);
    }
}

impl Descriptors {
    /// Room for so many descriptors, and for so many files that the kernel knows.
    pub(super) fn new(
        (capacity, registered): (usize, usize),
        stats: Arc<Stats>,
        tasks: TaskTracker,
        runtime: Handle,
    ) -> Arc<Self> {
        let usual = registered.min(REGISTERED_USUAL);
        Arc::new(Self {
            descriptors: Cache::new(capacity.max(1)),
            capacity,
            registered: Cache::with_weighter(usual, registered as u64, UnitWeighter),
            evicted: Mutex::default(),
            tasks,
            runtime,
            stats,
        })
    }

    #[cfg(test)]
    pub(crate) fn for_tests(capacity: usize) -> (Arc<Self>, TaskTracker) {
        let tasks = TaskTracker::new();
        (Self::new((capacity, 100), Arc::default(), tasks.clone(), Handle::current()), tasks)
    }

    pub(super) fn get(&self, block: &BlockId) -> Option<Arc<Descriptor>> {
        self.descriptors.get(block)
    }

    pub(super) fn insert(&self, block: BlockId, descriptor: Arc<Descriptor>) {
        // There is another file of the block.
        let file = descriptor.file_of(block);
        let others = self.registered.remove_if(&block, |known| !known.is(&file));
        self.descriptors.insert(block, descriptor);
        match others {
            Some(_) => self.count(),
            None => _ = self.stats.descriptors.set(self.descriptors.len() as i64),
        }
    }

    /// Keeps the file of a block open all of which is there, and whose length may become another.
    pub(crate) fn keep(&self, block: BlockId, file: OwnedFd, worker: u64, incarnation: u64) {
        let descriptor = Descriptor::new(file, worker, incarnation, 0, &ChunkMap::new());
        self.insert(block, Arc::new(descriptor));
    }

    /// Takes out that file of the block, unless somebody reads from it.
    pub(crate) fn take(&self, file: &BlockFile) -> Option<OwnedFd> {
        let (_, taken) = self.descriptors.remove_if(&file.block, |known| known.is(file))?;
        Arc::into_inner(taken).map(Descriptor::into_file)
    }

    /// Forgets this very descriptor, and what is kept of its file: reading from it failed.
    pub(super) fn remove(&self, block: &BlockId, descriptor: &Arc<Descriptor>) {
        let file = descriptor.file_of(*block);
        self.descriptors.remove_if(block, |known| Arc::ptr_eq(known, descriptor));
        self.registered.remove_if(block, |known| known.is(&file));
        self.count();
    }

    /// Files that are open have about so many descriptors besides: there is less room for those that are not.
    pub(crate) fn leave_room(&self, descriptors: usize) {
        self.descriptors.set_capacity(self.capacity.saturating_sub(descriptors).max(1) as u64);
    }

    /// Keeps what belongs to the file of a descriptor, for as long as the worker has the block and somebody uses it.
    pub(super) fn register(&self, block: BlockId, descriptor: &Descriptor, what: Arc<dyn Any + Send + Sync>) {
        self.enter(block, Registered::new(what, (descriptor.worker, 0), descriptor.incarnation, 0));
    }

    fn enter(&self, block: BlockId, file: Registered) {
        self.registered.insert(block, Arc::new(file));
        self.count();
    }

    /// What is kept of the block's file.
    pub(super) fn registered(&self, block: &BlockId) -> Option<Arc<Registered>> {
        let known = self.registered.get(block)?;
        known.used.touch();
        Some(known)
    }

    /// What is kept of a file that ends where it should; `make` makes it where there is nothing yet.
    pub(crate) fn registered_whole<T: Any + Send + Sync>(
        &self,
        whole: &WholeFile<'_>,
        make: impl FnOnce(BorrowedFd<'_>) -> Option<T>,
    ) -> Option<RetainedWhole<T>> {
        let WholeFile { block, version, size, replicas, local } = *whole;
        let Some((file, replica, incarnation)) = local else {
            let known = self.registered(&block).filter(|known| version.is_some_and(|version| known.has(version)))?;
            let (replica, incarnation) = ((known.worker, known.joined), known.incarnation);
            let what = Arc::clone(&known.what).downcast().ok().filter(|_| replicas.contains(&replica))?;
            return Some(RetainedWhole { what, replica, incarnation });
        };
        if file.metadata().ok()?.len() != size {
            return None;
        }
        let of = BlockFile { block, worker: replica.0, incarnation };
        if let Some(known) = self.registered(&block).filter(|known| known.is(&of) && known.joined == replica.1) {
            known.found_with(version.unwrap_or(NO_VERSION));
            return Some(RetainedWhole { what: Arc::clone(&known.what).downcast().ok()?, replica, incarnation });
        }
        let what = Arc::new(make(file.as_fd())?);
        let version = version.unwrap_or(NO_VERSION);
        self.enter(block, Registered::new(Arc::clone(&what) as _, replica, incarnation, version));
        Some(RetainedWhole { what, replica, incarnation })
    }

    /// Whether something is kept of a block that had all of a file of this version.
    pub(crate) fn has_whole(&self, block: &BlockId, version: u64) -> bool {
        self.registered(block).is_some_and(|known| known.has(version))
    }

    pub(super) fn is_registered(&self, block: &BlockId) -> bool {
        self.registered.contains_key(block)
    }

    /// Whether that file of the block is here; counts as no use.
    fn holds(&self, file: &BlockFile) -> bool {
        self.descriptors.peek(&file.block).is_some_and(|known| known.is(file))
            || self.registered.peek(&file.block).is_some_and(|known| known.is(file))
    }

    /// Takes note of files of blocks that are evicted, or not wanted any more; they are closed soon.
    pub(crate) fn release(self: &Arc<Self>, files: impl Iterator<Item = BlockFile>) {
        let held: Vec<_> = files.filter(|file| self.holds(file)).collect();
        if held.is_empty() {
            return;
        }
        let mut evicted = self.evicted.lock();
        evicted.files.extend(held);
        if !std::mem::replace(&mut evicted.is_closing, true) {
            let this = self.clone();
            self.tasks.spawn_blocking_on(move || this.close_evicted(), &self.runtime);
        }
    }

    /// *Blocking*.
    fn close_evicted(&self) {
        loop {
            let files = {
                let mut evicted = self.evicted.lock();
                evicted.is_closing = !evicted.files.is_empty();
                std::mem::take(&mut evicted.files)
            };
            if files.is_empty() {
                return;
            }
            for file in files {
                drop(self.descriptors.remove_if(&file.block, |known| known.is(&file)));
                drop(self.registered.remove_if(&file.block, |known| known.is(&file)));
                self.count();
            }
        }
    }

    /// Closes what is idle. Returns when that is done.
    pub(super) async fn sweep(self: &Arc<Self>) {
        let this = self.clone();
        // Without a lock that readers need.
        let swept = self.tasks.spawn_blocking_on(
            move || {
                remove_idle(&this.descriptors, |descriptor| descriptor.used.ago() >= IDLE);
                remove_idle(&this.registered, |known| known.used.ago() >= REGISTERED_IDLE);
                this.count();
            },
            &self.runtime,
        );
        if let Err(error) = swept.await {
            tracing::warn!("idle descriptors could not be closed: {error}");
        }
    }

    /// All that is here, by worker.
    pub(super) fn retained(&self) -> HashMap<u64, Vec<RetainedFile>> {
        let mut held: HashMap<u64, Vec<RetainedFile>> = HashMap::new();
        let mut add = |file: BlockFile, used: &LastUse| {
            let is_read = used.ago() < CONFIRM_EVERY;
            held.entry(file.worker).or_default().push(RetainedFile { file, is_read });
        };
        for (block, known) in self.registered.iter() {
            add(BlockFile { block, worker: known.worker, incarnation: known.incarnation }, &known.used);
        }
        for (block, known) in self.descriptors.iter() {
            let file = known.file_of(block);
            if !self.registered.peek(&block).is_some_and(|other| other.is(&file)) {
                add(file, &known.used);
            }
        }
        held
    }

    pub(super) fn clear(&self) {
        self.descriptors.clear();
        self.registered.clear();
        self.count();
    }

    fn count(&self) {
        self.stats.descriptors.set(self.descriptors.len() as i64);
        self.stats.backing_files.set(self.registered.len() as i64);
    }
}

/// Takes out what is idle, and drops it without a lock that readers need.
fn remove_idle<T>(cache: &Cache<BlockId, Arc<T>>, is_idle: impl Fn(&T) -> bool) {
    let idle: Vec<_> = cache.iter().filter(|(_, known)| is_idle(known)).collect();
    for (block, found) in idle {
        drop(cache.remove_if(&block, |known| Arc::ptr_eq(known, &found)));
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use cavern_proto::ContentId;

    use super::*;

    fn block(index: u32) -> BlockId {
        BlockId { content: ContentId::of_object("s", "k", "e", 1, 1), index }
    }

    #[tokio::test]
    async fn only_the_file_that_was_evicted_is_closed() {
        let (descriptors, tasks) = Descriptors::for_tests(1000);
        let mut readers = Vec::new();
        for index in 0..100 {
            let (reader, writer) = std::io::pipe().unwrap();
            descriptors.keep(block(index), OwnedFd::from(writer), 1, 7);
            readers.push((block(index), reader));
        }
        let file = |block| BlockFile { block, worker: 1, incarnation: 7 };
        let (first, rest) = readers.split_first_mut().unwrap();
        let others = [BlockFile { incarnation: 6, ..file(first.0) }, BlockFile { worker: 2, ..file(first.0) }];
        descriptors.release(others.into_iter());
        for (block, _) in rest.iter() {
            descriptors.release([file(*block)].into_iter());
        }
        descriptors.sweep().await;
        tasks.close();
        tasks.wait().await;
        for (_, reader) in rest {
            // The end of a pipe shows once its writer is closed.
            assert_eq!(reader.read(&mut [0]).unwrap(), 0);
        }
        assert!(descriptors.get(&first.0).is_some());
        assert!(!descriptors.evicted.lock().is_closing);
    }

    fn descriptor(incarnation: u64) -> Descriptor {
        Descriptor::new(tempfile::tempfile().unwrap().into(), 3, incarnation, 0, &ChunkMap::new())
    }

    #[tokio::test(start_paused = true)]
    async fn one_incarnation_of_a_block_is_kept_while_it_is_used() {
        let (descriptors, _tasks) = Descriptors::for_tests(10);
        let what: Arc<dyn Any + Send + Sync> = Arc::new(7);
        descriptors.register(block(1), &descriptor(5), Arc::clone(&what));
        descriptors.register(block(2), &descriptor(6), Arc::clone(&what));
        let found = descriptors.registered(&block(1)).unwrap();
        assert!(Arc::ptr_eq(&found.what, &what) && (found.worker, found.incarnation) == (3, 5));
        assert!(found.has(0) && !found.has(7));
        found.found_with(7);
        assert!(descriptors.has_whole(&block(1), 7) && !descriptors.has_whole(&block(1), 0));
        drop(found);
        tokio::time::advance(REGISTERED_IDLE / 2).await;
        assert!(descriptors.registered(&block(2)).is_some() && descriptors.is_registered(&block(1)));
        let file = |index, incarnation| BlockFile { block: block(index), worker: 3, incarnation };
        assert!(descriptors.holds(&file(1, 5)) && !descriptors.holds(&file(1, 6)));
        assert!(!descriptors.holds(&BlockFile { worker: 4, ..file(1, 5) }));
        descriptors.insert(block(2), Arc::new(descriptor(6)));
        let mut held = descriptors.retained().remove(&3).unwrap();
        held.sort_by_key(|held| held.file.block.index);
        let expected = [(1, 5, false), (2, 6, true)];
        assert_eq!(held, expected.map(|(index, of, is_read)| RetainedFile { file: file(index, of), is_read }));
        tokio::time::advance(REGISTERED_IDLE / 2).await;
        remove_idle(&descriptors.registered, |known| known.used.ago() >= REGISTERED_IDLE);
        assert!(!descriptors.is_registered(&block(1)), "idle, as being looked for is no use");
        descriptors.insert(block(2), Arc::new(descriptor(6)));
        assert!(descriptors.is_registered(&block(2)));
        descriptors.insert(block(2), Arc::new(descriptor(7)));
        assert!(!descriptors.is_registered(&block(2)) && Arc::strong_count(&what) == 1);
    }

    #[tokio::test]
    async fn a_whole_file_is_that_of_its_replica_and_of_no_other() {
        let (descriptors, _tasks) = Descriptors::for_tests(10);
        let file = tempfile::tempfile().unwrap();
        file.set_len(9).unwrap();
        let whole = |version, replicas, local| WholeFile { block: block(1), version, size: 9, replicas, local };
        let found = |whole: &WholeFile<'_>, made| descriptors.registered_whole(whole, |_| made);
        let (first, again) = (&[(3, 0)], &[(3, 1)]);
        assert_eq!(*found(&whole(Some(7), first, Some((&file, (3, 0), 5))), Some(1)).unwrap().what, 1);
        let known = found(&whole(Some(7), first, None), None).unwrap();
        assert_eq!((*known.what, known.replica, known.incarnation), (1, (3, 0), 5));
        let others: [(_, &[(u64, u32)]); 4] = [(Some(8), first), (None, first), (Some(7), again), (Some(7), &[(4, 0)])];
        assert!(others.iter().all(|(version, replicas)| found(&whole(*version, replicas, None), None).is_none()));
        // Another worker's file of the same number.
        let elsewhere = whole(Some(7), &[(4, 0)], Some((&file, (4, 0), 5)));
        assert_eq!(*found(&elsewhere, Some(2)).unwrap().what, 2);
        // Of what is not committed nothing is said of a version.
        let written = whole(None, &[(4, 0)], Some((&file, (4, 0), 5)));
        assert_eq!(*found(&written, None).unwrap().what, 2);
        assert!(found(&whole(Some(7), &[(4, 0)], None), None).is_none());
        let longer = WholeFile { size: 8, ..elsewhere };
        assert!(found(&longer, Some(3)).is_none());
    }

    #[tokio::test]
    async fn there_are_no_more_than_wanted() {
        let (descriptors, tasks) = Descriptors::for_tests(10);
        (0..1000).for_each(|index| descriptors.register(block(index), &descriptor(1), Arc::new(index)));
        assert!(descriptors.retained()[&3].len() <= 100);
        let none = Descriptors::new((10, 0), Arc::default(), tasks, Handle::current());
        none.register(block(1), &descriptor(1), Arc::new(1));
        assert!(!none.is_registered(&block(1)));
    }
}
