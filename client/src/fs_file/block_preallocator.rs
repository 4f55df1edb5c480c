//! Blocks for files that are about to be made here.
//!
//! Whoever fills a directory delegated to this session makes one file after the other, each with a first block. That
//! block is asked for before the file is there: under the number that the file is going to have, so that the first
//! bytes of the file go to the worker's disk on the thread that was asked to write them, without a question. Only at
//! workers of this host, and only for files of one replica. Numbers whose blocks are there are given to files before
//! others ([`Metadata::offer_file_number`]).
//!
//! How many are asked for follows from how many are used: files that stay empty need none. What is not used for some
//! seconds goes back to the worker, if its number has gone to no file; the worker frees by itself what no file has.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use cavern_conf::Failpoint;
use cavern_net::Route;
use cavern_proto::ContentId;
use cavern_proto::data::BlockRef;
use futures::stream::{self, StreamExt as _};
use parking_lot::Mutex;
use tokio::time::Instant;

use super::block::{OpenBlock, block_name, reservation, reserve};
use super::open_file_table::{OpenFileTable, Shared};
use crate::mounts::MountView;

/// Blocks of one mount that are asked for ahead, at most.
const AHEAD_MAX: u32 = 32;
/// How many more are asked for when one was used, and how many less when one was not.
const USED: u32 = 2;
const UNUSED: u32 = 8;
/// Questions at a time.
const AT_A_TIME: usize = 4;
/// Bytes for which a first block has room.
const ROOM: u32 = 128 << 10;

/// Blocks that were reserved for files which are not made yet.
#[derive(Debug, Default)]
pub(super) struct BlockPreallocator {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// By the numbers of files that are not made yet.
    blocks: HashMap<u64, OpenBlock>,
    /// Those that are too old to be used.
    lapsed: Vec<(u64, OpenBlock)>,
    mounts: HashMap<u32, Demand>,
}

/// What a mount needs.
#[derive(Debug, Default)]
struct Demand {
    ahead: u32,
    /// Blocks that are there, or asked for.
    on_hand: u32,
    is_asking: bool,
    /// When the last of its files was made that had a block, or needed one.
    used_at: Option<Instant>,
}

impl BlockPreallocator {
    /// The block of a file that has just been made.
    pub(super) fn take(&self, inode: u64, mount: u32) -> Option<OpenBlock> {
        let mut state = self.state.lock();
        let block = state.blocks.remove(&inode)?;
        let demand = state.mounts.entry(mount).or_default();
        demand.on_hand = demand.on_hand.saturating_sub(1);
        Some(block)
    }

    /// A new file got its first block, from here or not.
    pub(super) fn used(&self, mount: u32) {
        let mut state = self.state.lock();
        let demand = state.mounts.entry(mount).or_default();
        demand.ahead = (demand.ahead + USED).min(AHEAD_MAX);
        demand.used_at = Some(Instant::now());
    }

    /// A new file has not needed the block that it had.
    pub(super) fn unused(&self, mount: u32) {
        let mut state = self.state.lock();
        let demand = state.mounts.entry(mount).or_default();
        demand.ahead = demand.ahead.saturating_sub(UNUSED);
    }

    /// How many blocks are to be asked for now, if that is worth the while; whoever gets a number asks, and says so.
    fn begin_asking(&self, mount: u32) -> Option<u32> {
        let mut state = self.state.lock();
        // What is too old to be used makes room, and is not missed by anybody.
        let lapsed: Vec<_> = state.blocks.extract_if(|_, block| !block.is_reserved()).collect();
        let count = u32::try_from(lapsed.len()).unwrap_or(u32::MAX);
        state.lapsed.extend(lapsed);
        let demand = state.mounts.entry(mount).or_default();
        demand.on_hand = demand.on_hand.saturating_sub(count);
        let lacking = demand.ahead.saturating_sub(demand.on_hand);
        if demand.is_asking || lacking == 0 || demand.on_hand > demand.ahead / 2 {
            return None;
        }
        demand.is_asking = true;
        demand.on_hand += lacking;
        Some(lacking)
    }

    fn answered(&self, mount: u32, inode: u64, block: Option<OpenBlock>) {
        let mut state = self.state.lock();
        match block {
            Some(block) => {
                state.blocks.insert(inode, block);
                Failpoint::BlockPreallocated.pass();
            }
            None => {
                let demand = state.mounts.entry(mount).or_default();
                demand.on_hand = demand.on_hand.saturating_sub(1);
            }
        }
    }

    /// Blocks that may go back to the workers, with the numbers of the files that they were for: those that have
    /// lapsed, and those of mounts in which no file has needed one for so long. Nothing is asked for there until one
    /// does.
    fn take_idle(&self, after: Duration) -> Vec<(u64, OpenBlock)> {
        let mut state = self.state.lock();
        let State { blocks, lapsed, mounts } = &mut *state;
        let mut taken = std::mem::take(lapsed);
        if blocks.is_empty() {
            return taken;
        }
        let now = Instant::now();
        let is_idle = |demand: &Demand| demand.used_at.is_none_or(|used| now.saturating_duration_since(used) >= after);
        let idle: Vec<u32> =
            mounts.iter().filter(|(_, demand)| !demand.is_asking && is_idle(demand)).map(|(mount, _)| *mount).collect();
        for mount in &idle {
            mounts.remove(mount);
        }
        taken.extend(blocks.extract_if(|_, block| idle.contains(&block.name.mount_id)));
        taken
    }

    fn end_asking(&self, mount: u32, surplus: u32) {
        let mut state = self.state.lock();
        let demand = state.mounts.entry(mount).or_default();
        demand.is_asking = false;
        demand.on_hand = demand.on_hand.saturating_sub(surplus);
    }
}

impl OpenFileTable {
    /// Sees to it that files which are about to be made in a mount find their blocks.
    pub(super) fn prepare_blocks(&self, mount: &Arc<MountView>) {
        let pool = &self.shared.pool;
        let has_local = || pool.placement().workers().iter().any(|worker| pool.known_route(worker.id) == Route::Local);
        if mount.replicas() != 1 || !has_local() {
            return;
        }
        let Some(count) = self.shared.prealloc.begin_asking(mount.id()) else { return };
        let (shared, mount) = (self.shared.clone(), mount.clone());
        self.shared.runtime.spawn(async move { shared.ask_for_blocks(&mount, count).await });
    }

    /// Gives workers back the blocks of mounts in which no file has needed one for so long. A block is named by the
    /// number of its file: only one whose number no file has, nor ever will have, can go. Where connections are secured
    /// only masters have blocks freed: workers ask them which ones no file has.
    pub(crate) async fn return_blocks(&self, after: Duration) {
        let idle = self.shared.prealloc.take_idle(after);
        if idle.is_empty() {
            return;
        }
        let numbers: HashSet<u64> = idle.iter().map(|(number, _)| *number).collect();
        let withdrawn = self.shared.metadata.withdraw_file_numbers(&numbers);
        if self.shared.pool.own_role().is_some() {
            return;
        }
        let mut at_workers: HashMap<u64, Vec<BlockRef>> = HashMap::new();
        for (_, block) in idle.iter().filter(|(number, _)| withdrawn.contains(number)) {
            for worker in block.workers() {
                at_workers.entry(worker).or_default().push(block.name.clone());
            }
        }
        for (worker, blocks) in at_workers {
            if let Err(error) = self.shared.pool.free(worker, blocks).await {
                tracing::debug!(worker, "blocks that no file has are freed later, by the worker itself: {error}");
            }
        }
    }
}

impl Shared {
    async fn ask_for_blocks(&self, mount: &Arc<MountView>, count: u32) {
        let (session, numbers) = self.metadata.take_numbers(count);
        let lacking = count.saturating_sub(u32::try_from(numbers.len()).unwrap_or(u32::MAX));
        let asked = numbers.into_iter().map(async |number| {
            let block = self.ask_for_block(mount, number).await;
            let has_block = block.is_some();
            self.prealloc.answered(mount.id(), number, block);
            // One without a block is given up: the master takes numbers for a while only, and nobody would take back
            // what has been offered for longer.
            if has_block {
                self.metadata.offer_file_number(session, mount.id(), number);
            }
        });
        stream::iter(asked).buffer_unordered(AT_A_TIME).collect::<()>().await;
        self.prealloc.end_asking(mount.id(), lacking);
    }

    async fn ask_for_block(&self, mount: &Arc<MountView>, inode: u64) -> Option<OpenBlock> {
        // The number was given out before a view that is there by now.
        if mount.is_frozen(inode, 0) {
            return None;
        }
        let name = block_name(&self.pool, mount, (inode, 0, 0));
        let content = ContentId::from_slice(&name.content_id)?;
        let worker = self.pool.placement().ranked(content, 0).into_iter().next()?;
        if self.pool.known_route(worker) != Route::Local || self.pool.rests(worker) {
            return None;
        }
        let bytes = 0..ROOM.min(u32::try_from(mount.block_size()).unwrap_or(u32::MAX));
        let replica = reserve(&self.pool, worker, reservation(&name, &bytes), self.worker_timeout()).await.ok()?;
        replica.file.is_some().then(|| OpenBlock::to_write(name, 0, vec![replica], &bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_many_are_asked_for_as_are_used() {
        let prealloc = BlockPreallocator::default();
        assert_eq!(prealloc.begin_asking(1), None, "nobody has made a file yet");
        (0..5).for_each(|_| prealloc.used(1));
        assert_eq!(prealloc.begin_asking(1), Some(10));
        assert_eq!((prealloc.begin_asking(1), prealloc.begin_asking(2)), (None, None), "they are being asked for");
        (0..4).for_each(|number| prealloc.answered(1, number, None));
        prealloc.end_asking(1, 6);
        assert_eq!(prealloc.begin_asking(1), Some(10), "none was had");
        prealloc.end_asking(1, 10);
        (0..100).for_each(|_| prealloc.used(1));
        assert_eq!(prealloc.begin_asking(1), Some(AHEAD_MAX));
        prealloc.end_asking(1, AHEAD_MAX);
        (0..4).for_each(|_| prealloc.unused(1));
        assert_eq!(prealloc.begin_asking(1), None, "files that stay empty need none");
    }

    fn block(inode: u64, mount_id: u32) -> OpenBlock {
        let name = BlockRef::of_inode("cluster", inode, 0, 0, 1 << 20, mount_id);
        OpenBlock::to_write(name, 0, Vec::new(), &(0..ROOM))
    }

    #[tokio::test(start_paused = true)]
    async fn what_nobody_needs_goes_back_to_the_workers() {
        let prealloc = BlockPreallocator::default();
        let mounts_of = |after| {
            let mut mounts: Vec<u32> = prealloc.take_idle(after).iter().map(|(_, block)| block.name.mount_id).collect();
            mounts.sort_unstable();
            mounts
        };
        let idle = Duration::from_secs(3);
        for mount in [1, 2] {
            prealloc.used(mount);
            assert_eq!(prealloc.begin_asking(mount), Some(USED));
            (0..2).for_each(|number| prealloc.answered(mount, u64::from(mount) * 10 + number, Some(block(1, mount))));
        }
        prealloc.end_asking(1, 0);
        assert!(mounts_of(idle).is_empty());
        tokio::time::advance(idle).await;
        assert!(prealloc.take(10, 1).is_some());
        assert_eq!(mounts_of(idle), [1], "of the other mount more are being asked for");
        prealloc.end_asking(2, 0);
        prealloc.used(2);
        assert!(mounts_of(idle).is_empty());
        assert_eq!(mounts_of(Duration::ZERO), [2, 2]);
        assert!(prealloc.take(20, 2).is_none() && prealloc.begin_asking(1).is_none());
    }
}
