//! What the worker is to its cluster: its number, the cluster's name, who leads it, and what masters have told of their
//! log.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use cavern_proto::data::BlockRef;
use cavern_proto::master::HistoryPosition;
use parking_lot::RwLock;

/// What the worker is to its cluster, as far as it knows.
#[derive(Debug, Default)]
pub struct Membership {
    place: RwLock<(u64, String)>,
    /// A master has said so since the process started.
    is_confirmed: AtomicBool,
    /// Of the masters that were heard of, the latest in which one led.
    term: AtomicU64,
    past: RwLock<History>,
}

/// What the masters have told of their log.
#[derive(Clone, Copy, Debug, Default)]
pub struct History {
    /// The latest that they told before they did not know it any more.
    pub told: Option<HistoryPosition>,
    /// They do not know it any more: blocks that no file has are kept, since a file may have had them.
    pub is_lost: bool,
    /// So many are kept for that, with so many bytes.
    pub kept: (u64, u64),
}

impl Membership {
    /// What the worker was told before its start: 0 and empty where that was nothing.
    pub fn remembered(worker_id: u64, cluster_id: &str) -> Self {
        Self { place: RwLock::new((worker_id, cluster_id.to_owned())), ..Self::default() }
    }

    pub fn past(&self) -> History {
        *self.past.read()
    }

    /// The master that leads in this term has answered what it has applied, and whether it lacks what was told before.
    pub fn told(&self, term: u64, applied: Option<HistoryPosition>, is_lost: bool) {
        let mut past = self.past.write();
        if is_lost && !past.is_lost {
            past.is_lost = true;
            // The terms that were heard of are none of these masters'.
            self.term.store(term, Ordering::Release);
        }
        if !past.is_lost {
            past.told = applied.or(past.told);
        }
    }

    /// So many blocks are kept since the masters lack what was told, with so many bytes.
    pub fn keeps(&self, blocks: u64, bytes: u64) {
        self.past.write().kept = (blocks, bytes);
    }

    /// Whether a block is one of the file that its reference names, in this cluster.
    pub fn is_of_cluster(&self, block: &BlockRef) -> bool {
        block.is_of_inode(&self.place.read().1)
    }

    /// Worker id (0 while unknown) and cluster id (empty while unknown).
    pub fn now(&self) -> (u64, String) {
        self.place.read().clone()
    }

    /// The same for what cannot be undone: `None` until a master has said it, since masters that were restored may have
    /// another worker under the id that is remembered.
    pub fn confirmed(&self) -> Option<(u64, String)> {
        self.is_confirmed.load(Ordering::Acquire).then(|| self.now())
    }

    /// 0 while unknown.
    pub fn worker_id(&self) -> u64 {
        self.place.read().0
    }

    /// A master has said it.
    pub fn set(&self, worker_id: u64, cluster_id: &str) {
        *self.place.write() = (worker_id, cluster_id.to_owned());
        self.is_confirmed.store(true, Ordering::Release);
    }

    /// A master leads in this term: those of earlier ones have nothing done any more.
    pub fn heard_of(&self, term: u64) {
        self.term.fetch_max(term, Ordering::AcqRel);
    }

    /// Whether a master that led in this term has been succeeded by another.
    pub fn is_over(&self, term: u64) -> bool {
        term < self.term.load(Ordering::Acquire)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_remembered_is_no_word_of_a_master() {
        let membership = Membership::remembered(5, "one");
        assert_eq!((membership.now(), membership.confirmed()), ((5, "one".to_owned()), None));
        membership.set(6, "one");
        assert_eq!((membership.worker_id(), membership.confirmed()), (6, Some((6, "one".to_owned()))));
    }
}
