//! What users keep of the files of local blocks beyond their descriptors: for passthrough, that the kernel knows them.
//!
//! As long as it is kept, so is the space of a file whose block was evicted. So it goes when the worker says that it
//! evicted the block. Such a notice can get lost: with a connection, or with a worker, or it is faster than the answer
//! that hands out the file. So the worker is asked now and then which files are those of its blocks still, and told
//! at the same time which of them were used, since it does not see how they are read.

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use cavern_proto::BlockId;
use quick_cache::UnitWeighter;
use quick_cache::sync::Cache;
use tokio::time::Instant;

use crate::stats::Stats;

/// What nobody used for this long goes.
const IDLE: Duration = Duration::from_secs(30 * 60);
/// How often workers are asked about the files that are held.
pub(super) const CONFIRM_EVERY: Duration = Duration::from_secs(30);
/// About as many as a small data set has.
const USUAL: usize = 1024;

/// When something was used last, in seconds: cheap to set again and again.
#[derive(Debug)]
pub(super) struct LastUse {
    epoch: Instant,
    /// Seconds since `epoch`.
    seconds: AtomicU32,
}

impl LastUse {
    pub(super) fn now() -> Self {
        Self { epoch: Instant::now(), seconds: AtomicU32::new(0) }
    }

    pub(super) fn touch(&self) {
        let now = self.epoch.elapsed().as_secs() as u32;
        if self.seconds.load(Ordering::Relaxed) != now {
            self.seconds.store(now, Ordering::Relaxed);
        }
    }

    /// In the last [`CONFIRM_EVERY`].
    pub(super) fn is_of_late(&self) -> bool {
        self.ago() < CONFIRM_EVERY
    }

    pub(super) fn ago(&self) -> Duration {
        self.epoch.elapsed().saturating_sub(Duration::from_secs(u64::from(self.seconds.load(Ordering::Relaxed))))
    }
}

/// A file that is held in whatever way.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Held {
    pub block: BlockId,
    pub incarnation: u64,
    /// Somebody has used it in the last [`CONFIRM_EVERY`].
    pub is_read: bool,
}

/// What is kept of one file of a block.
#[derive(Debug)]
pub(super) struct KeptFile {
    pub what: Arc<dyn Any + Send + Sync>,
    pub worker: u64,
    pub incarnation: u64,
    /// Of a block of an fs-mode file: the version of that file that ended where this file did; else 0.
    version: AtomicU64,
    used: LastUse,
}

impl KeptFile {
    pub(super) fn new(what: Arc<dyn Any + Send + Sync>, worker: u64, incarnation: u64) -> Self {
        Self { what, worker, incarnation, version: AtomicU64::new(0), used: LastUse::now() }
    }

    pub(super) fn has(&self, version: u64) -> bool {
        self.version.load(Ordering::Relaxed) == version
    }

    /// It has been looked at.
    pub(super) fn found_with(&self, version: u64) {
        self.version.store(version, Ordering::Relaxed);
    }
}

/// See the module. By block, bounded; the least useful go first.
#[derive(Debug)]
pub(super) struct KeptFiles {
    kept: Cache<BlockId, Arc<KeptFile>>,
    stats: Arc<Stats>,
}

impl KeptFiles {
    pub(super) fn new(capacity: usize, stats: Arc<Stats>) -> Self {
        let usual = capacity.min(USUAL);
        Self { kept: Cache::with_weighter(usual, capacity as u64, UnitWeighter), stats }
    }

    pub(super) fn insert(&self, block: BlockId, file: KeptFile) {
        self.kept.insert(block, Arc::new(file));
        self.count();
    }

    /// What is kept of the block's file.
    pub(super) fn get(&self, block: &BlockId) -> Option<Arc<KeptFile>> {
        let kept = self.kept.get(block)?;
        kept.used.touch();
        Some(kept)
    }

    pub(super) fn contains(&self, block: &BlockId) -> bool {
        self.kept.contains_key(block)
    }

    /// Whether it is of that incarnation; counts as no use.
    pub(super) fn holds(&self, block: &BlockId, incarnation: u64) -> bool {
        self.kept.peek(block).is_some_and(|kept| kept.incarnation == incarnation)
    }

    /// *Blocking*, as closing the last descriptor of an unlinked file is.
    pub(super) fn forget(&self, block: &BlockId, incarnation: u64) {
        self.kept.remove_if(block, |kept| kept.incarnation == incarnation);
        self.count();
    }

    /// There is another file of the block.
    pub(super) fn forget_others(&self, block: &BlockId, incarnation: u64) {
        if self.kept.remove_if(block, |kept| kept.incarnation != incarnation).is_some() {
            self.count();
        }
    }

    /// All, with their workers.
    pub(super) fn held(&self) -> impl Iterator<Item = (u64, Held)> + '_ {
        self.kept.iter().map(|(block, kept)| {
            (kept.worker, Held { block, incarnation: kept.incarnation, is_read: kept.used.is_of_late() })
        })
    }

    /// Lets go of what is idle. *Blocking*, but without a lock that readers need.
    pub(super) fn sweep(&self) {
        remove_idle(&self.kept, |kept| kept.used.ago() >= IDLE);
        self.count();
    }

    pub(super) fn clear(&self) {
        self.kept.clear();
        self.count();
    }

    fn count(&self) {
        self.stats.kept_files.set(self.kept.len() as i64);
    }
}

/// Takes out what is idle, and drops it without a lock that readers need.
pub(super) fn remove_idle<T>(cache: &Cache<BlockId, Arc<T>>, is_idle: impl Fn(&T) -> bool) {
    let idle: Vec<_> = cache.iter().filter(|(_, cached)| is_idle(cached)).collect();
    for (block, found) in idle {
        drop(cache.remove_if(&block, |cached| Arc::ptr_eq(cached, &found)));
    }
}

#[cfg(test)]
mod tests {
    use cavern_proto::ContentId;

    use super::*;

    fn block(index: u32) -> BlockId {
        BlockId { content: ContentId::of_object("s", "k", "e", 1, 1), index }
    }

    #[tokio::test(start_paused = true)]
    async fn one_incarnation_of_a_block_is_kept_while_it_is_used() {
        let kept = KeptFiles::new(10, Arc::default());
        let what: Arc<dyn Any + Send + Sync> = Arc::new(7);
        kept.insert(block(1), KeptFile::new(Arc::clone(&what), 3, 5));
        kept.insert(block(2), KeptFile::new(Arc::clone(&what), 3, 6));
        let found = kept.get(&block(1)).unwrap();
        assert!(Arc::ptr_eq(&found.what, &what) && (found.worker, found.incarnation) == (3, 5));
        assert!(found.has(0) && !found.has(7));
        found.found_with(7);
        assert!(kept.get(&block(1)).unwrap().has(7));
        drop(found);
        tokio::time::advance(IDLE / 2).await;
        assert!(kept.get(&block(2)).is_some() && kept.contains(&block(1)) && kept.holds(&block(1), 5));
        let mut held: Vec<_> = kept.held().collect();
        held.sort_by_key(|(_, held)| held.block.index);
        let expected = [(1, 5, false), (2, 6, true)];
        assert_eq!(
            held,
            expected.map(|(index, incarnation, is_read)| (3, Held { block: block(index), incarnation, is_read }))
        );
        tokio::time::advance(IDLE / 2).await;
        kept.sweep();
        assert!(!kept.contains(&block(1)), "idle, as being looked for is no use");
        kept.forget(&block(2), 5);
        kept.forget_others(&block(2), 6);
        assert!(kept.contains(&block(2)));
        kept.forget_others(&block(2), 7);
        assert!(!kept.contains(&block(2)) && Arc::strong_count(&what) == 1);
    }

    #[test]
    fn there_are_no_more_than_wanted() {
        let kept = KeptFiles::new(100, Arc::default());
        (0..1000).for_each(|index| kept.insert(block(index), KeptFile::new(Arc::new(index), 1, 1)));
        assert!(kept.held().count() <= 100);
        let none = KeptFiles::new(0, Arc::default());
        none.insert(block(1), KeptFile::new(Arc::new(1), 1, 1));
        assert!(!none.contains(&block(1)));
    }
}
