//! One block of a file, and the workers that have it.

use crate::fs_file::block::Replica;

/// One block of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::fs_file) struct LocatedBlock {
    pub generation: u32,
    /// The workers that have it.
    pub workers: Vec<u64>,
    /// Which replica of each of these it is; see `Extent`.
    pub joined: Vec<u32>,
    /// A worker is being given a copy: nobody writes meanwhile, unless a commit gives the copy up.
    pub is_joined: bool,
    /// The master knows it.
    pub is_committed: bool,
    /// A replica was given up, or it has taken the place of another: no write may be acknowledged before the master
    /// knows.
    pub is_urgent: bool,
    /// The block that has its place as far as the master knows, and that it began as.
    pub replaces: Option<Box<Self>>,
    /// Bytes that it took when it was committed last.
    pub allocated: Option<u64>,
}

impl LocatedBlock {
    /// One that the master does not know.
    pub(super) fn new(generation: u32, workers: Vec<u64>, joined: Vec<u32>) -> Self {
        let (is_joined, is_committed, is_urgent) = (false, false, false);
        Self { generation, workers, joined, is_joined, is_committed, is_urgent, replaces: None, allocated: None }
    }

    /// Whether these are the block's replicas.
    pub(in crate::fs_file) fn is_at(&self, generation: u32, replicas: &[Replica]) -> bool {
        let has = |(worker, joined)| replicas.iter().any(|known| (known.worker, known.joined) == (worker, joined));
        self.generation == generation && self.workers.len() == replicas.len() && self.replicas().all(has)
    }

    pub(super) fn is_open_to_writes(&self) -> bool {
        !self.is_joined && !self.is_urgent
    }

    pub(in crate::fs_file) fn replicas(&self) -> impl Iterator<Item = (u64, u32)> + '_ {
        self.workers.iter().copied().zip(self.joined.iter().copied())
    }

    /// Goes on with those replicas only that another knowledge of the block has too; false, and unchanged, when there
    /// are none.
    pub(super) fn intersect(&mut self, other: &Self) -> bool {
        let common: Vec<(u64, u32)> =
            self.replicas().filter(|own| other.replicas().any(|replica| replica == *own)).collect();
        if common.is_empty() {
            return false;
        }
        (self.workers, self.joined) = common.into_iter().unzip();
        true
    }
}
