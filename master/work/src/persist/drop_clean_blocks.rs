//! Room at workers that are nearly full of blocks of fs-mode files: blocks that the bucket has are dropped.
//!
//! A worker says with its heartbeats how much of its disks such blocks take; cached blocks do not count, since they
//! make way by themselves. Files are dropped in the order of their inodes, which is that of their creation, beginning
//! where the last round ended: what was made long ago goes first, and what was fetched back since has its turn when all
//! others have had theirs. Of a file that is dropped all blocks go. One that the bucket lacks, or that somebody writes
//! to, stays.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::time::Duration;

use cavern_proto::master::{DiskReport, Extent, FreeFate, Worker, WorkerState};
use cavern_state::clean_object;
use cavern_state::outcome::FreeContent;

use super::Persistence;
use crate::background::Next;
use crate::error::WorkError;

/// Of a hundred bytes of a worker's disks: where dropping begins, and where it ends.
const HIGH_PERCENT: u64 = 75;
const LOW_PERCENT: u64 = 60;
/// Files looked at, and dropped, together.
const FILES: usize = 100;
pub(super) const PAUSE: Duration = Duration::from_millis(500);
/// What was dropped shows in the heartbeats when the workers have freed it.
pub(super) const SETTLE: Duration = Duration::from_secs(3);

/// Bytes that are to go, by worker.
type Excess = BTreeMap<u64, u64>;

impl Persistence {
    /// Makes room where workers are nearly full; `after` is where the last round ended.
    pub(super) async fn make_room(&self, after: &mut u64) -> Result<Next, WorkError> {
        let bytes = self.drop_clean(after).await?;
        self.metrics.dropped_bytes.inc_by(bytes);
        Ok(if bytes == 0 { Next::Rest } else { Next::RestFor(SETTLE) })
    }

    /// Drops files until no worker is too full, or all have been looked at once; gives the bytes that were dropped.
    async fn drop_clean(&self, after: &mut u64) -> Result<u64, WorkError> {
        let mut excess = excess(&self.writer.reported()?);
        self.lacks_room.store(!excess.is_empty(), Ordering::Relaxed);
        let (start, mut has_wrapped, mut dropped) = (*after, false, 0);
        while !excess.is_empty() {
            let from = *after;
            let page = self.lookups.reader.read(move |tables| {
                let mut clean = Vec::new();
                let files = tables.files_with_blocks(from, FILES)?;
                let last = files.last().map(|(inode, _)| *inode);
                for (inode, extents) in files {
                    if clean_object(tables, inode)?.is_some() {
                        clean.push((inode, extents));
                    }
                }
                Ok((clean, last))
            });
            let (clean, last) = page.await?;
            let Some(last) = last else {
                if has_wrapped {
                    break;
                }
                (*after, has_wrapped) = (0, true);
                continue;
            };
            for (inode, extents) in clean {
                if !extents.iter().any(|extent| has_excess(&excess, extent)) {
                    continue;
                }
                let freed = self.proposer.propose(FreeContent { inode, session: 0 }).await?;
                if freed.fate() == FreeFate::Freed {
                    dropped += freed.bytes;
                    deduct(&mut excess, &extents, freed.bytes);
                }
                if excess.is_empty() {
                    // The rest of the page has its turn next time.
                    *after = inode;
                    return Ok(dropped);
                }
            }
            *after = last;
            if has_wrapped && last >= start {
                break;
            }
        }
        Ok(dropped)
    }
}

/// What is too much at each worker that is live. One may say any numbers.
fn excess(workers: &[Worker]) -> Excess {
    let live = workers.iter().filter(|worker| worker.state() == WorkerState::Live);
    let of = |worker: &Worker| {
        let disks = worker.disks.iter().filter(|disk| disk.healthy);
        let sum = |of: fn(&DiskReport) -> u64| disks.clone().map(of).fold(0, u64::saturating_add);
        let (capacity, data) = (sum(|disk| disk.capacity_bytes), sum(|disk| disk.data_bytes));
        let is_full = data > capacity / 100 * HIGH_PERCENT;
        is_full.then(|| (worker.id, data - capacity / 100 * LOW_PERCENT))
    };
    live.filter_map(of).collect()
}

fn has_excess(excess: &Excess, extent: &Extent) -> bool {
    extent.workers.iter().any(|worker| excess.contains_key(worker))
}

/// So many bytes of these blocks have gone; they count evenly.
fn deduct(excess: &mut Excess, extents: &[Extent], bytes: u64) {
    let each = bytes.div_ceil(extents.len().max(1) as u64).max(1);
    for worker in extents.iter().flat_map(|extent| &extent.workers) {
        if let Some(left) = excess.get_mut(worker) {
            *left = left.saturating_sub(each);
        }
    }
    excess.retain(|_, left| *left > 0);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn worker(id: u64, data_bytes: u64, state: WorkerState) -> Worker {
        let disk = |data_bytes: u64, healthy: bool| DiskReport {
            capacity_bytes: 500,
            used_bytes: 500,
            data_bytes,
            healthy,
            ..DiskReport::default()
        };
        let disks = vec![disk(data_bytes / 2, true), disk(data_bytes - data_bytes / 2, true), disk(500, false)];
        Worker { id, state: state as i32, disks, ..Worker::default() }
    }

    #[test]
    fn only_live_workers_that_are_full_of_data_have_too_much() {
        let live = WorkerState::Live;
        let workers = [worker(1, 750, live), worker(2, 760, live), worker(3, 1000, WorkerState::Lost)];
        assert_eq!(excess(&workers), [(2, 160)].into());
        assert!(excess(&[Worker { state: live as i32, ..Worker::default() }]).is_empty());
    }

    #[test]
    fn any_numbers_of_one_worker_leave_those_of_others_as_they_are() {
        let most = u64::MAX;
        let disk = DiskReport { capacity_bytes: most, data_bytes: most, healthy: true, ..DiskReport::default() };
        let state = WorkerState::Live as i32;
        let liar = Worker { id: 1, state, disks: vec![disk; 3], ..Worker::default() };
        let excess = excess(&[liar, worker(2, 760, WorkerState::Live)]);
        assert_eq!(excess, [(1, most - most / 100 * LOW_PERCENT), (2, 160)].into());
    }

    #[test]
    fn what_goes_counts_where_it_was() {
        let extent = |index: u32, workers: &[u64]| Extent { index, workers: workers.to_vec(), ..Extent::default() };
        let mut excess: Excess = [(1, 100), (2, 250)].into();
        let extents = [extent(0, &[1, 2]), extent(1, &[2, 3])];
        assert!(has_excess(&excess, &extents[1]) && !has_excess(&excess, &extent(2, &[3])));
        deduct(&mut excess, &extents, 200);
        assert_eq!(excess, [(2, 50)].into());
    }
}
