//! What clients have taken of the disks for blocks of fs-mode files that no file is known to have yet.
//!
//! A client makes blocks first, and commits them to a file a moment later. One that makes blocks and commits none would
//! take all that there is. So what a client of another host makes is noted until the masters say that a file has it,
//! and there is a bound for each client (`worker.client_reserved`) and for all of them in a mount
//! (`worker.mount_reserved`). The masters are asked when a bound is met, for a moment again and again: whoever writes
//! goes on as soon as it has committed. What no file has after `worker.reservation_timeout` is freed.
//!
//! Not noted are blocks that were here before (of a start, all of them), and those of processes of this host. Of these
//! `orphan_blocks` frees what no file has.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use cavern_conf::{ByteSize, schema};
use cavern_net::NetError;
use cavern_proto::chunk::CHUNK_BYTES;
use cavern_proto::data::{BlockRef, Status};
use cavern_proto::master::{Claim, ListClaimsRequest};
use cavern_proto::{BlockId, ContentId};
use parking_lot::Mutex;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::debug;

use crate::journals::Journals;
use crate::orphan_blocks::{OrphanCandidate, free_orphans, list_claims, order};
use crate::parts::WorkerParts;
use crate::request_error::Refusal;

/// Between two questions to the masters.
const ASK_INTERVAL: Duration = Duration::from_secs(1);
/// One of them takes so long at most.
const ASK_TIMEOUT: Duration = Duration::from_secs(2);
/// Pages of claims that one question takes at most: the numbers of made-up files may lie anywhere.
const PAGES_MAX: usize = 256;
/// A request that meets a bound waits for commits this long: clients commit every three seconds at least, and wait for
/// a worker for five.
const PATIENCE: Duration = Duration::from_millis(3500);
/// Between two looks for what is to be freed, at least.
const SHORTEST_LOOK: Duration = Duration::from_millis(500);
/// A block counts with as much at least: there is a file of it, and an entry in memory.
const LEAST_BYTES: u64 = CHUNK_BYTES as u64;
/// Bounds that follow the capacity are no less, so that blocks of any usual size are written.
const LEAST_BOUND: u64 = 256 << 20;
/// What a request was to make is there after so long, or is not made any more.
const MAKING: Duration = Duration::from_secs(60);

/// The blocks of which no file is known, and what each client and mount has of them.
#[derive(Debug)]
pub struct ReservedBlocks {
    parts: WorkerParts,
    /// Bytes of one client; 0 for a quarter of the capacity.
    client_most: u64,
    /// Bytes of all clients in one mount; 0 for half of the capacity.
    mount_most: u64,
    /// For how long something may be noted.
    after: Duration,
    noted: Mutex<Reservations>,
    /// Of what the masters were asked last, and when. Held while they are, so that one asks for all.
    asked: tokio::sync::Mutex<Option<(Scope, Instant)>>,
}

#[derive(Debug, Default)]
struct Reservations {
    /// Under which the blocks were made.
    worker_id: u64,
    blocks: HashMap<BlockId, ReservedBlock>,
    /// Bytes of their blocks.
    clients: HashMap<Arc<str>, u64>,
    mounts: HashMap<u32, u64>,
}

#[derive(Debug)]
struct ReservedBlock {
    client: Arc<str>,
    mount_id: u32,
    inode: u64,
    /// 0 as long as it is being made.
    incarnation: u64,
    bytes: u64,
    /// When more was asked for last.
    since: Instant,
    /// An earlier look has found that no file has it, and nothing was asked for since.
    is_suspect: bool,
}

/// Of which blocks the masters are asked.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Scope {
    Client(Arc<str>),
    Mount(u32),
    All,
}

/// Room for a request, which is carried out while this is there.
#[derive(Debug)]
pub struct Reservation {
    reserved: Arc<ReservedBlocks>,
    id: BlockId,
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.reserved.settle(&self.id);
    }
}

/// A request that would exceed a bound, as far as it is known.
#[derive(Debug)]
pub struct ExcessRequest {
    reserved: Arc<ReservedBlocks>,
    client: Arc<str>,
    block: BlockRef,
    bytes: u64,
    /// What is exceeded.
    scope: Scope,
    most: u64,
}

/// What a request that takes room may do: nothing is noted of some.
pub type ReserveResult = Result<Option<Reservation>, Box<ExcessRequest>>;

impl ReservedBlocks {
    pub fn new(parts: WorkerParts, conf: &schema::Worker) -> Self {
        let (client_most, mount_most) = (conf.client_reserved.bytes(), conf.mount_reserved.bytes());
        let (noted, asked) = (Mutex::default(), tokio::sync::Mutex::default());
        Self { parts, client_most, mount_most, after: conf.reservation_timeout.get(), noted, asked }
    }

    /// Room for up to so many bytes more of a block, if the client may have as much.
    pub fn take(self: &Arc<Self>, client: Option<&Arc<str>>, block: &BlockRef, bytes: u64) -> ReserveResult {
        let (Some(client), Some(id), true) = (client, BlockId::of(block), block.data) else { return Ok(None) };
        let worker_id = self.parts.membership.worker_id();
        let capacity = self.parts.stores.table.capacity_bytes();
        let mut noted = self.noted.lock();
        noted.begin_as(worker_id);
        let (owner, more) = match noted.blocks.get(&id) {
            Some(known) => (known.client.clone(), bytes),
            None if self.parts.stores.data.usage(&id).is_some() => return Ok(None),
            None => (client.clone(), bytes.max(LEAST_BYTES)),
        };
        for (scope, has, most) in [
            (Scope::Client(owner.clone()), noted.clients.get(&owner), bound(self.client_most, capacity / 4)),
            (Scope::Mount(block.mount_id), noted.mounts.get(&block.mount_id), bound(self.mount_most, capacity / 2)),
        ] {
            if has.copied().unwrap_or_default().saturating_add(more) > most {
                let (reserved, client, block) = (self.clone(), client.clone(), block.clone());
                return Err(Box::new(ExcessRequest { reserved, client, block, bytes, scope, most }));
            }
        }
        noted.add(id, more, || ReservedBlock {
            client: owner,
            mount_id: block.mount_id,
            inode: block.inode,
            incarnation: 0,
            bytes: 0,
            since: Instant::now(),
            is_suspect: false,
        });
        Ok(Some(Reservation { reserved: self.clone(), id }))
    }

    /// A request has been carried out: what is noted of its block is what that takes.
    fn settle(&self, id: &BlockId) {
        let used = self.parts.stores.data.usage(id);
        self.noted.lock().done(id, used);
    }

    /// Frees what no file has, until `stop`.
    pub async fn run(self: Arc<Self>, journals: Arc<Journals>, stop: CancellationToken) {
        let pause = (self.after / 4).max(SHORTEST_LOOK);
        while stop.run_until_cancelled(tokio::time::sleep(pause)).await.is_some() {
            // What a dead mount has written is about to be some file's; masters that were restored do not know all.
            if journals.are_replayed() || self.parts.membership.past().is_lost {
                continue;
            }
            match stop.run_until_cancelled(self.reclaim()).await {
                Some(Ok(())) => {}
                Some(Err(error)) => {
                    // Clients could not commit either: they have until the look after the next.
                    self.noted.lock().blocks.values_mut().for_each(|block| block.is_suspect = false);
                    debug!(%error, "cannot look for reserved blocks that no file has");
                }
                None => return,
            }
        }
    }

    async fn reclaim(&self) -> Result<(), NetError> {
        let after = self.after;
        if !self.noted.lock().blocks.values().any(|block| block.since.elapsed() > after) {
            return Ok(());
        }
        let orphans = self.confirm(&Scope::All).await?;
        let suspect = |id: BlockId| {
            let mut noted = self.noted.lock();
            let block = noted.blocks.get_mut(&id).filter(|block| block.since.elapsed() > after)?;
            std::mem::replace(&mut block.is_suspect, true).then_some((id, block.incarnation))
        };
        let due: Vec<OrphanCandidate> = orphans.into_iter().filter_map(suspect).collect();
        if due.is_empty() {
            return Ok(());
        }
        let freed = free_orphans(&self.parts, due, after).await;
        freed.iter().for_each(|id| self.noted.lock().settle(id, None, None));
        Ok(())
    }

    /// Asks the masters about blocks, unless they have been asked since `since`. Without an answer all is as it was.
    async fn ask(&self, scope: &Scope, since: Instant) {
        let mut asked = self.asked.lock().await;
        let mut scope = scope.clone();
        if let Some((of, at)) = &*asked {
            if (*of == scope || *of == Scope::All) && *at >= since {
                return;
            }
            // Several wait: one question does for all of them.
            if *of != scope && at.elapsed() < ASK_INTERVAL {
                scope = Scope::All;
            }
            tokio::time::sleep_until(*at + ASK_INTERVAL).await;
        }
        // Before the question: one that is given up counts as well.
        *asked = Some((scope.clone(), Instant::now()));
        match tokio::time::timeout(ASK_TIMEOUT, self.confirm(&scope)).await {
            Ok(Ok(_)) => {}
            Ok(Err(error)) => debug!(%error, "cannot ask which blocks files have"),
            Err(_) => debug!("the masters do not say in time which blocks files have"),
        }
    }

    /// Forgets blocks that files have, or views, and gives those that were asked about and that nobody has.
    async fn confirm(&self, scope: &Scope) -> Result<Vec<BlockId>, NetError> {
        let Some((worker_id, cluster_id)) = self.parts.membership.confirmed() else { return Ok(Vec::new()) };
        let mut pending = self.pending(scope, worker_id);
        // In this order: a file may lose a block to a view meanwhile.
        for kept in [false, true] {
            let told = self.confirm_in(&pending, kept, (worker_id, &cluster_id)).await?;
            let noted = self.noted.lock();
            pending.truncate(told);
            pending.retain(|(_, id)| noted.blocks.contains_key(id));
        }
        Ok(pending.into_iter().map(|(_, id)| id).collect())
    }

    /// Asks which of these blocks files have, or which views keep; and for how many of them that is known then.
    async fn confirm_in(
        &self,
        pending: &[((u64, u32), BlockId)],
        kept: bool,
        (worker_id, cluster_id): (u64, &str),
    ) -> Result<usize, NetError> {
        let (mut at, mut last): (usize, Option<Claim>) = (0, None);
        for _ in 0..PAGES_MAX {
            let Some(((inode, index), _)) = pending.get(at) else { break };
            // Of those that views keep the generations of a file are not known: all of them are asked for.
            let place = if kept { before(worker_id, *inode, 0) } else { before(worker_id, *inode, *index) };
            let place = Claim { kept, generation: u32::MAX, ..place };
            let after = last.filter(|last| order(last) > order(&place)).unwrap_or(place);
            let request = ListClaimsRequest { worker_id, cluster_id: cluster_id.to_owned(), after: Some(after) };
            let list = list_claims(&self.parts, request).await?;
            self.forget(cluster_id, &list.claims);
            last = list.claims.last().copied();
            at = match &last {
                Some(last) if !list.is_last && last.kept == kept && last.worker_id == worker_id => {
                    let is_told = |(place, _): &((u64, u32), BlockId)| match kept {
                        true => place.0 < last.inode,
                        false => *place <= (last.inode, last.index),
                    };
                    let told = pending.partition_point(is_told);
                    if kept { told.max(at) } else { told.max(at + 1) }
                }
                // There are more, and none is told: nothing is known of the rest.
                None if !list.is_last => break,
                _ => pending.len(),
            };
        }
        Ok(at)
    }

    /// Files have these, or views.
    fn forget(&self, cluster_id: &str, claims: &[Claim]) {
        let mut noted = self.noted.lock();
        for claim in claims {
            let content = ContentId::of_inode(cluster_id, claim.mount_id, claim.inode, claim.generation);
            noted.settle(&BlockId { content, index: claim.index }, None, None);
        }
    }

    /// The noted blocks of a scope in the order of claims, by inode and index, with what they take by now.
    fn pending(&self, scope: &Scope, worker_id: u64) -> Vec<((u64, u32), BlockId)> {
        let mut noted = self.noted.lock();
        noted.begin_as(worker_id);
        let is_meant = |block: &ReservedBlock| match scope {
            Scope::Client(client) => block.client == *client,
            Scope::Mount(mount_id) => block.mount_id == *mount_id,
            Scope::All => true,
        };
        // Those that are being made have their turn with the request that makes them, or when it must have ended.
        let is_made = |block: &ReservedBlock| block.incarnation != 0 || block.since.elapsed() > MAKING;
        let meant = noted.blocks.iter().filter(|(_, block)| is_meant(block) && is_made(block));
        let mut pending: Vec<_> = meant.map(|(id, block)| ((block.inode, id.index), *id)).collect();
        for (_, id) in &pending {
            let used = self.parts.stores.data.usage(id);
            noted.settle(id, used, None);
        }
        drop(noted);
        pending.sort_unstable();
        pending
    }
}

impl ExcessRequest {
    /// Room for the request, as soon as files have enough of what is noted.
    ///
    /// # Errors
    /// `NO_SPACE` when that does not come to be soon: nothing was changed.
    pub async fn wait(self: Box<Self>) -> Result<Option<Reservation>, Refusal> {
        let until = Instant::now() + PATIENCE;
        let mut wanted = self;
        loop {
            let reserved = wanted.reserved.clone();
            // A client waits for no longer, whoever is asked before, and however long the masters take.
            let _late = tokio::time::timeout_at(until, reserved.ask(&wanted.scope, Instant::now())).await;
            wanted = match reserved.take(Some(&wanted.client), &wanted.block, wanted.bytes) {
                Ok(taken) => return Ok(taken),
                Err(over) if Instant::now() >= until => return Err(over.refusal()),
                Err(over) => over,
            };
        }
    }

    fn refusal(&self) -> Refusal {
        let most = ByteSize::from_bytes(self.most);
        let (who, setting) = match &self.scope {
            Scope::Client(client) => (format!("the client \"{client}\" has"), "worker.client_reserved"),
            Scope::Mount(_) | Scope::All => {
                (format!("clients have in mount {}", self.block.mount_id), "worker.mount_reserved")
            }
        };
        let message = format!(
            "{who} {most} of blocks at this worker that no file has yet, as much as {setting} allows: what is written \
             has to be committed first, or raise {setting}"
        );
        Refusal::new(Status::NoSpace, message)
    }
}

impl Reservations {
    /// A worker that has got another number is asked about other blocks.
    fn begin_as(&mut self, worker_id: u64) {
        if self.worker_id != worker_id {
            *self = Self { worker_id, ..Self::default() };
        }
    }

    fn add(&mut self, id: BlockId, bytes: u64, new: impl FnOnce() -> ReservedBlock) {
        let block = self.blocks.entry(id).or_insert_with(new);
        let used = (block.incarnation, block.bytes + bytes);
        self.settle(&id, Some(used), Some(Instant::now()));
    }

    /// A request for a block has ended. What is not there may be about to be made by another one, or by what goes on of
    /// this one: it stays noted.
    fn done(&mut self, id: &BlockId, used: Option<(u64, u64)>) {
        self.settle(id, Some(used.unwrap_or((0, LEAST_BYTES))), Some(Instant::now()));
    }

    /// Notes what a block takes, by its incarnation and bytes; `None` forgets it.
    fn settle(&mut self, id: &BlockId, used: Option<(u64, u64)>, since: Option<Instant>) {
        let Some(block) = self.blocks.get_mut(id) else { return };
        let (incarnation, bytes) = used.map_or((0, 0), |(incarnation, bytes)| (incarnation, bytes.max(LEAST_BYTES)));
        let before = std::mem::replace(&mut block.bytes, bytes);
        block.incarnation = incarnation;
        block.since = since.unwrap_or(block.since);
        block.is_suspect &= since.is_none();
        let (client, mount_id) = (block.client.clone(), block.mount_id);
        if used.is_none() {
            self.blocks.remove(id);
        }
        change(&mut self.clients, &client, before, bytes);
        change(&mut self.mounts, &mount_id, before, bytes);
    }
}

/// What has nothing left is forgotten.
fn change<K: std::hash::Hash + Eq + Clone>(sums: &mut HashMap<K, u64>, of: &K, before: u64, after: u64) {
    let sum = sums.entry(of.clone()).or_default();
    *sum = sum.saturating_sub(before) + after;
    if *sum == 0 {
        sums.remove(of);
    }
}

/// A bound as it is set, or a share of the capacity.
fn bound(set: u64, share: u64) -> u64 {
    if set == 0 { share.max(LEAST_BOUND) } else { set }
}

/// The last place before that of a block.
fn before(worker_id: u64, inode: u64, index: u32) -> Claim {
    let (inode, index) = match index.checked_sub(1) {
        Some(index) => (inode, index),
        None => (inode.saturating_sub(1), u32::MAX),
    };
    Claim { worker_id, inode, index, ..Claim::default() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(index: u32) -> BlockId {
        BlockId { content: ContentId::of_inode("c", 1, 7, 1), index }
    }

    #[test]
    fn sums_are_those_of_the_blocks() {
        let mut noted = Reservations::default();
        let of = |client: &str| {
            let client: Arc<str> = client.into();
            move || ReservedBlock {
                client,
                mount_id: 1,
                inode: 7,
                incarnation: 0,
                bytes: 0,
                since: Instant::now(),
                is_suspect: false,
            }
        };
        noted.add(id(0), 5 << 20, of("a"));
        noted.add(id(1), 1 << 20, of("b"));
        // Another client's request counts with whoever has made the block.
        noted.add(id(0), 1 << 20, of("b"));
        let sums = |noted: &Reservations| {
            (noted.clients.get("a").copied(), noted.clients.get("b").copied(), noted.mounts.get(&1).copied())
        };
        assert_eq!(sums(&noted), (Some(6 << 20), Some(1 << 20), Some(7 << 20)));
        noted.settle(&id(0), Some((3, 2 << 20)), None);
        noted.settle(&id(1), Some((4, 0)), None);
        assert_eq!(sums(&noted), (Some(2 << 20), Some(LEAST_BYTES), Some((2 << 20) + LEAST_BYTES)));
        // Of two requests for a block, one fails before the other one has made it.
        noted.done(&id(0), None);
        assert_eq!(sums(&noted).0, Some(LEAST_BYTES));
        noted.settle(&id(0), None, None);
        noted.settle(&id(0), None, None);
        noted.settle(&id(9), Some((1, 1)), None);
        assert_eq!(sums(&noted), (None, Some(LEAST_BYTES), Some(LEAST_BYTES)));
        noted.begin_as(8);
        assert_eq!(sums(&noted), (None, None, None));
    }

    #[test]
    fn the_place_before_a_block_is_that_of_no_other() {
        let place = |inode, index| {
            let Claim { inode, index, .. } = before(3, inode, index);
            (inode, index)
        };
        assert_eq!([place(7, 2), place(7, 0), place(0, 0)], [(7, 1), (6, u32::MAX), (0, u32::MAX)]);
    }

    #[test]
    fn what_views_keep_comes_behind_all_that_files_have() {
        let file =
            |worker_id, inode, generation, index| Claim { worker_id, inode, generation, index, ..Claim::default() };
        let kept =
            |worker_id, inode, generation, index| Claim { kept: true, ..file(worker_id, inode, generation, index) };
        let all = [
            file(3, 7, 2, 0),
            file(3, 7, 1, 1),
            file(3, 8, 0, 0),
            file(4, 1, 0, 0),
            kept(3, 2, 1, 9),
            kept(3, 2, 2, 0),
            kept(3, 2, 2, 1),
            kept(3, 3, 0, 0),
        ];
        assert!(all.is_sorted_by(|a, b| order(a) < order(b)));
        // Before all generations of a file.
        let place = Claim { kept: true, generation: u32::MAX, ..before(3, 2, 0) };
        assert!(order(&all[3]) < order(&place) && order(&place) < order(&all[4]));
        assert!(order(&kept(3, 1, u32::MAX - 1, u32::MAX)) < order(&place));
    }

    #[test]
    fn bounds_follow_the_capacity_where_none_is_set() {
        assert_eq!([bound(5, 1 << 40), bound(0, 1 << 40), bound(0, 1 << 20)], [5, 1 << 40, LEAST_BOUND]);
    }
}
