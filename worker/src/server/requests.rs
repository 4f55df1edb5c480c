//! The requests of the data plane, apart from the connections that carry them.
//!
//! A request for block content is first *prepared*: decoded, checked, its blocks looked up and their use counted. If
//! all of it can be answered from memory and page cache, that is done on the spot, without a task; else the rest is a
//! future that waits for the disk or the bucket.

mod answer;
mod control;
mod prepare;

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use cavern_conf::process::LogLimit;
use cavern_conf::schema;
use cavern_net::WorkerPool;
use cavern_proto::chunk::{CHUNK_BYTES, chunk_range};
use cavern_proto::data::{BlockRef, Status};
use cavern_proto::frame::FrameKind;
use cavern_security::Tenant;
use futures::StreamExt;
use futures::future::OptionFuture;
use futures::stream::FuturesOrdered;
use tokio::sync::Semaphore;
use tokio::time::Instant;

use crate::fill::{BlockSource, Fills, ObjectBlock};
use crate::memory::{Budget, kib_for_requests};
use crate::orphan_blocks::OrphanCollector;
use crate::parts::WorkerParts;
use crate::persist::{UploadPacing, Uploads};
use crate::request_error::Refusal;
use crate::reserved::ReservedBlocks;
use crate::store::{Block, Touch};

/// Bytes that one connection may have in flight: asked for and not yet sent. Announced to clients in the hello.
pub(super) const MAX_INFLIGHT_BYTES: u32 = 32 << 20;
/// Buffers that all connections together keep for their next answers, beside the memory budget.
const SPARES_KIB: usize = 16 << 10;
/// Items of one request that are worked on at a time.
const ITEMS_AT_A_TIME: usize = 64;
/// A request that names no deadline gets this one.
const DEFAULT_DEADLINE: Duration = Duration::from_secs(30);
/// No request waits longer.
pub(super) const MAX_DEADLINE: Duration = Duration::from_secs(600);

/// What requests work with.
pub struct Service {
    pub parts: WorkerParts,
    pub fills: Arc<Fills>,
    pub uploads: Arc<Uploads>,
    /// What clients have made and not committed.
    pub reserved: Arc<ReservedBlocks>,
    /// Beside the memory for buffers, for requests that wait.
    pub requests: Budget,
    /// For buffers that connections keep for their next answers; in KiB.
    pub spares: Arc<Semaphore>,
    /// Chunks that were reported as corrupt and cannot be checked.
    pub unchecked: LogLimit<()>,
    /// Bytes of fs-mode files that arrived otherwise than they were sent.
    pub damaged_sends: LogLimit<()>,
    /// Finds blocks that no file has, where anybody looks for them.
    pub orphans: Option<Arc<OrphanCollector>>,
}

/// A block whose wanted chunks can be read, and the bytes that had to be fetched for that.
type Ready = Result<(Block, Fetched), Refusal>;

/// What had to be fetched from the bucket for an item.
#[derive(Clone, Copy, Default)]
struct Fetched {
    /// By this item itself, and not by others that want the same.
    bytes: u64,
    /// How long it was waited for.
    us: u32,
}

/// What has a checksum in the answer to a read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum ChecksumUnit {
    /// Every chunk that is sent wholly.
    Chunk,
    /// Every part; what is sent are whole parts.
    Part,
    /// Every 128 KiB that are sent: of a block of an fs-mode file nothing else is known of its bytes.
    Sent,
}

/// A block of an fs-mode file that is wanted as views have it.
#[derive(Clone, Copy)]
struct ViewBlock {
    mount_id: u32,
    inode: u64,
    generation: u32,
}

impl ViewBlock {
    fn of(block: &BlockRef) -> Option<Self> {
        let BlockRef { mount_id, inode, generation, .. } = *block;
        (block.data && block.pinned).then_some(Self { mount_id, inode, generation })
    }
}

/// One item after its preparation.
pub(super) struct Prepared {
    source: Result<BlockSource, Refusal>,
    of_view: Option<ViewBlock>,
    /// Chunks that must be readable.
    wanted: Vec<Range<u32>>,
    /// Bytes of the block that are to be sent (reads only).
    range: Range<u32>,
    unit: ChecksumUnit,
    /// The block, when it was open.
    block: Option<Block>,
    touch: Touch,
}

/// A request for block content: a read, an open, or a fill.
pub(super) struct ContentRequest {
    pub kind: FrameKind,
    pub request_id: u64,
    pub items: Vec<Prepared>,
    pub deadline: Duration,
}

impl Prepared {
    /// The block, if all that is wanted of it can be had at once.
    fn block_at_hand(&self) -> Option<&Block> {
        let (source, block) = (self.source.as_ref().ok()?, self.block.as_ref()?);
        let is_meant = match source {
            BlockSource::Data(target) => block.mount_id() == target.mount_id,
            BlockSource::Object(_) => true,
        };
        let all =
            is_meant && block.length() == source.length() && self.wanted.iter().all(|chunks| block.has(chunks.clone()));
        all.then_some(block)
    }

    fn wanted_bytes(&self) -> u64 {
        match (&self.source, self.range.is_empty()) {
            (_, false) => self.range.len() as u64,
            (Ok(source), true) => {
                let bytes = |chunks: &Range<u32>| chunk_range(chunks.end.saturating_sub(1), source.length()).end;
                let start = |chunks: &Range<u32>| chunk_range(chunks.start, source.length()).start;
                self.wanted.iter().map(|chunks| u64::from(bytes(chunks).saturating_sub(start(chunks)))).sum()
            }
            (Err(_), true) => 0,
        }
    }
}

impl ContentRequest {
    /// Bytes of payload that the answer will have at most.
    pub(super) fn payload_bytes(&self) -> usize {
        if self.kind == FrameKind::Read { self.items.iter().map(|item| item.range.len()).sum() } else { 0 }
    }
}

pub(super) fn deadline_of(deadline_ms: u32) -> Duration {
    if deadline_ms == 0 { DEFAULT_DEADLINE } else { Duration::from_millis(u64::from(deadline_ms)).min(MAX_DEADLINE) }
}

impl Service {
    /// Requests that wait have a quarter as much memory as there is for buffers.
    pub fn new(parts: WorkerParts, conf: &schema::Worker, pool: Arc<WorkerPool>) -> Self {
        let pacing = UploadPacing::new(conf.background_upload_rate.bytes());
        Self {
            fills: Arc::new(Fills::new(parts.clone(), conf)),
            uploads: Arc::new(Uploads::new(parts.clone(), pool, pacing)),
            reserved: Arc::new(ReservedBlocks::new(parts.clone(), conf)),
            requests: Budget::new(kib_for_requests(parts.memory.kib)),
            spares: Arc::new(Semaphore::new(SPARES_KIB)),
            unchecked: LogLimit::default(),
            damaged_sends: LogLimit::default(),
            orphans: None,
            parts,
        }
    }

    /// The blocks of a request, if all of it is at hand.
    pub(super) fn all_at_hand<'a>(&self, request: &'a ContentRequest) -> Option<Vec<&'a Block>> {
        request.items.iter().map(|item| item.block_at_hand().filter(|_| self.is_as_frozen(item))).collect()
    }

    /// Whether views have the block of an item, as far as is known here, if it is wanted as they have it: a write over
    /// a connection is refused for as long as this holds.
    fn is_as_frozen(&self, item: &Prepared) -> bool {
        let is_of_view = |block: ViewBlock| self.parts.mounts.is_of_view(block.mount_id, block.inode, block.generation);
        item.of_view.is_none_or(is_of_view)
    }

    /// Refuses an item that is wanted as views have it where none has it. A view that has just been made may not have
    /// been heard of here.
    async fn check_frozen(&self, item: &Prepared, until: Instant) -> Result<(), Refusal> {
        if !self.is_as_frozen(item) {
            let _late = tokio::time::timeout_at(until, Box::pin(self.parts.mounts.renew())).await;
            if !self.is_as_frozen(item) {
                return Err(not_of_view());
            }
        }
        Ok(())
    }

    /// Counts the items of a request that was answered at once.
    pub(super) fn count_hits(&self, request: &ContentRequest) {
        self.parts.metrics.fast_requests.inc();
        if request.kind != FrameKind::Fill {
            request.items.iter().for_each(|item| self.count_hit(item));
        }
    }

    /// Counts an item that was here.
    fn count_hit(&self, item: &Prepared) {
        self.parts.metrics.hits.inc();
        self.count_served(item, item.wanted_bytes(), 0);
    }

    /// Counts bytes of an item that were here, and that were fetched for it.
    fn count_served(&self, item: &Prepared, hit_bytes: u64, missed_bytes: u64) {
        self.parts.metrics.hit_bytes.inc_by(hit_bytes);
        self.parts.metrics.miss_bytes.inc_by(missed_bytes);
        if let Ok(source) = &item.source {
            self.parts.mounts.hits.count(source.mount_id(), hit_bytes, missed_bytes);
        }
    }

    /// What the connections of a tenant have of the memory budget, or those of others.
    pub(super) fn budget(&self, tenant: Option<&Tenant>) -> Budget {
        self.parts.memory.within(tenant.map(|tenant| (&tenant.room, tenant.limits().room)))
    }

    /// What the requests of a tenant have of the memory for requests, or those of others.
    pub(super) fn budget_of_requests(&self, tenant: Option<&Tenant>) -> Budget {
        self.requests.within(tenant.map(|tenant| (&tenant.requests, tenant.limits().requests)))
    }

    async fn make_all_ready(&self, request: &ContentRequest, until: Instant, tenant: Option<&Tenant>) -> Vec<Ready> {
        // Futures are made as they are needed: those of thousands of items take megabytes.
        let (mut items, mut under_way) = (request.items.iter(), FuturesOrdered::new());
        let mut ready = Vec::with_capacity(request.items.len());
        loop {
            while under_way.len() < ITEMS_AT_A_TIME
                && let Some(item) = items.next()
            {
                under_way.push_back(self.make_ready(item, until, tenant));
            }
            match under_way.next().await {
                Some(item) => ready.push(item),
                None => return ready,
            }
        }
    }

    /// Makes the wanted chunks of one item readable; gives the block and what had to be fetched.
    async fn make_ready(&self, item: &Prepared, until: Instant, tenant: Option<&Tenant>) -> Ready {
        let source = item.source.as_ref().map_err(Clone::clone)?;
        self.check_frozen(item, until).await?;
        let block = match (item.block_at_hand(), source) {
            (Some(block), _) => block.clone(),
            (None, BlockSource::Data(target)) => Block::Data(self.open_data(*target, item.touch, until, tenant).await?),
            (None, BlockSource::Object(object)) => return self.fetch(item, object, until, tenant).await,
        };
        if item.touch != Touch::Refresh {
            self.count_hit(item);
        }
        Ok((block, Fetched::default()))
    }

    /// Makes the wanted chunks of a block of an object readable.
    async fn fetch(
        &self,
        item: &Prepared,
        object: &Arc<ObjectBlock>,
        until: Instant,
        tenant: Option<&Tenant>,
    ) -> Ready {
        let began = Instant::now();
        let fill = async {
            // Disks and buckets have queues that all share: what a tenant asks for beyond its turns waits here.
            let _turn = OptionFuture::from(tenant.map(|tenant| tenant.turns.acquire())).await.transpose()?;
            let turns = (tenant.map(|tenant| &tenant.disk_turns), until);
            self.fills.ensure(object, &item.wanted, item.touch, turns).await
        };
        let filled =
            tokio::time::timeout_at(until, Box::pin(fill)).await.unwrap_or_else(|_| Err(Refusal::deadline()))?;
        if item.touch != Touch::Refresh {
            let missed = filled.fetched_bytes.min(item.wanted_bytes());
            let items = if filled.fetched_bytes > 0 { &self.parts.metrics.misses } else { &self.parts.metrics.hits };
            items.inc();
            self.count_served(item, item.wanted_bytes() - missed, missed);
        }
        let us = u32::try_from(began.elapsed().as_micros()).unwrap_or(u32::MAX);
        Ok((Block::Cached(filled.block), Fetched { bytes: filled.fetched_bytes, us }))
    }
}

fn not_of_view() -> Refusal {
    Refusal::new(Status::NoSuchBlock, "no view has the block as it is, as far as this worker knows")
}

/// Chunks are what reads are cut into, and no chunk may exceed what one connection has in flight.
const _: () = assert!(CHUNK_BYTES < MAX_INFLIGHT_BYTES);
