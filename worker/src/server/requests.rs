//! The requests of the data plane, apart from the connections that carry them.
//!
//! A request for block content is first *prepared*: decoded, checked, its blocks looked up and their use counted. If
//! all of it can be answered from memory and page cache, that is done on the spot, without a task; else the rest is a
//! future that waits for the disk or the bucket.

use std::collections::BTreeSet;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use cavern_conf::process::LogLimit;
use cavern_conf::schema;
use cavern_net::{MAX_DESCRIPTORS, WorkerPool};
use cavern_proto::bounded::MAX_ITEMS;
use cavern_proto::chunk::{
    CHUNK_BYTES, chunk_count, chunk_range, chunks_touching, is_whole_parts, part_count, whole_chunks,
};
use cavern_proto::data::open_request::Item;
use cavern_proto::data::{
    BlockRef, CorruptReply, CorruptRequest, FillReply, FreeReply, FreeRequest, OpenReply, QueryReply, QueryRequest,
    ReadReply, ReadRequest, Status, open_reply, query_reply, read_reply,
};
use cavern_proto::frame::{FrameKind, HEADER_BYTES};
use cavern_proto::{BlockId, ChunkMap, ContentId};
use cavern_security::Tenant;
use futures::StreamExt;
use futures::future::OptionFuture;
use futures::stream::FuturesOrdered;
use prost::Message as _;
use tokio::sync::Semaphore;
use tokio::time::Instant;

use super::frame_buffer::FrameBuffer;
use super::outgoing::{FilePayload, PassedFile, Segment, append_frame};
use crate::fill::{BlockSource, Fills, ObjectBlock};
use crate::memory::{Budget, kib_for_requests};
use crate::orphan_blocks::OrphanCollector;
use crate::parts::WorkerParts;
use crate::persist::{UploadPacing, Uploads};
use crate::request_error::{Refusal, on_disk};
use crate::reserved::ReservedBlocks;
use crate::store::{Block, CachedBlock, ReadError, ReadWait, Stores, Touch};

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
/// A block no longer than this is made present as a whole when an open asks for nothing in particular; of a longer one,
/// the first chunk.
const SMALL_BLOCK_BYTES: u32 = 1 << 20;

/// From this length on the payload of an answer is sent out of the block's file. To copy fewer bytes costs less than
/// the system calls.
const SENDFILE_BYTES: usize = 16 << 10;

/// Bytes of one item of an answer to a read, without its checksums.
const ITEM_BYTES: usize = 16;

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

/// A range to be read from a block, or why it cannot be.
#[derive(Clone, Copy)]
struct ReadItem<'a> {
    range: &'a Range<u32>,
    unit: ChecksumUnit,
    block: Result<&'a Block, &'a Refusal>,
    fetch_us: u32,
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

    /// Decodes and looks up a read.
    ///
    /// # Errors
    /// The request as a whole cannot be served.
    pub(super) fn prepare_read(&self, request_id: u64, request: ReadRequest) -> Result<ContentRequest, Refusal> {
        if request.items.len() > MAX_ITEMS {
            return Err(Refusal::bad_request(format!("{} items in one request", request.items.len())));
        }
        let mut payload = 0u64;
        let mut items = Vec::with_capacity(request.items.len());
        for item in request.items {
            let named = item.block.unwrap_or_default();
            let (of_view, source) = (ViewBlock::of(&named), BlockSource::parse(named));
            let (asked, part) = (item.range.unwrap_or_default(), item.part);
            let (mut range, mut unit) = (0..0, ChecksumUnit::Chunk);
            let source = source.and_then(|source| {
                if asked.offset > source.length() {
                    let message = format!("offset {} in a block of {} bytes", asked.offset, source.length());
                    return Err(Refusal::bad_request(message));
                }
                let is_data = matches!(source, BlockSource::Data(_));
                let all = asked.offset..asked.offset.saturating_add(asked.length).min(source.length());
                match part.map(|part| part.offset..part.offset.saturating_add(part.length)) {
                    None => {
                        range = all;
                        if is_data {
                            unit = ChecksumUnit::Sent;
                        }
                    }
                    Some(part) => {
                        let is_within = all.start <= part.start && part.end <= all.end;
                        if is_data || !is_within || !is_whole_parts(&part, source.length()) {
                            let message = format!("{part:?} are no whole parts of {all:?} in a cached block");
                            return Err(Refusal::bad_request(message));
                        }
                        (range, unit) = (part, ChecksumUnit::Part);
                    }
                }
                Ok(source)
            });
            payload += range.len() as u64;
            let wanted = vec![chunks_touching(range.start, range.len() as u32)];
            let touch = Touch::Read(range.len() as u32);
            items.push(Prepared { range, unit, of_view, ..self.look_up(source, wanted, touch) });
        }
        if payload > u64::from(MAX_INFLIGHT_BYTES) {
            let message = format!("{payload} bytes asked for in one request, {MAX_INFLIGHT_BYTES} are the most");
            return Err(Refusal::bad_request(message));
        }
        Ok(ContentRequest { kind: FrameKind::Read, request_id, items, deadline: deadline_of(request.deadline_ms) })
    }

    /// Decodes and looks up an open or a fill.
    ///
    /// # Errors
    /// As [`Self::prepare_read`].
    pub(super) fn prepare(
        &self,
        kind: FrameKind,
        request_id: u64,
        items: Vec<Item>,
        deadline_ms: u32,
    ) -> Result<ContentRequest, Refusal> {
        let (most, touch) = match kind {
            FrameKind::Open => (MAX_DESCRIPTORS, Touch::Open),
            _ => (MAX_ITEMS, Touch::Refresh),
        };
        if items.len() > most {
            return Err(Refusal::bad_request(format!("{} blocks in one request, {most} are the most", items.len())));
        }
        let items = items.into_iter().map(|item| self.prepare_item(item, touch)).collect();
        Ok(ContentRequest { kind, request_id, items, deadline: deadline_of(deadline_ms) })
    }

    fn prepare_item(&self, item: Item, touch: Touch) -> Prepared {
        let named = item.block.unwrap_or_default();
        let (of_view, source) = (ViewBlock::of(&named), BlockSource::parse(named));
        let length = source.as_ref().map_or(0, |source| source.length());
        let mut wanted: Vec<Range<u32>> = (item.want.iter())
            .map(|range| range.offset.min(length)..range.offset.saturating_add(range.length).min(length))
            .filter(|range| !range.is_empty())
            .map(|range| chunks_touching(range.start, range.len() as u32))
            .collect();
        if item.want.is_empty() && length > 0 {
            wanted.push(if length <= SMALL_BLOCK_BYTES { 0..chunk_count(length) } else { 0..1 });
        }
        join(&mut wanted);
        Prepared { of_view, ..self.look_up(source, wanted, touch) }
    }

    fn look_up(&self, source: Result<BlockSource, Refusal>, wanted: Vec<Range<u32>>, touch: Touch) -> Prepared {
        let block = source.as_ref().ok().and_then(|source| match source {
            BlockSource::Object(object) => self.parts.stores.cache.get(&object.id, touch).open().map(Block::Cached),
            BlockSource::Data(target) => self.parts.stores.data.get(&target.id, touch).open().map(Block::Data),
        });
        Prepared { source, of_view: None, wanted, range: 0..0, unit: ChecksumUnit::Chunk, block, touch }
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

    /// Writes the answer to a read whose blocks are at hand; `false` when some page is not in memory, or a view that
    /// had a block is gone.
    pub(super) fn read_at_hand(&self, request: &ContentRequest, blocks: &[&Block], out: &mut FrameBuffer) -> bool {
        let items = request.items.iter().zip(blocks).map(|(item, block)| ReadItem {
            range: &item.range,
            unit: item.unit,
            block: Ok(*block),
            fetch_us: 0,
        });
        // An error is met again, and dealt with, on the slow path.
        let is_read = compose_read(&self.parts.stores, request.request_id, items, ReadWait::Never, out).is_ok();
        is_read && request.items.iter().all(|item| self.is_as_frozen(item))
    }

    /// The answer to a read whose bytes the kernel can send out of the block's file: chunks of one block in the page
    /// cache, all of which have checksums in the index. `None` where they have to be read.
    pub(super) fn answer_by_file(&self, request: &ContentRequest, blocks: &[&Block]) -> Option<Segment> {
        let ([item], [of_item]) = (&request.items[..], blocks) else { return None };
        let Block::Cached(block) = of_item else { return None };
        let bytes = item.range.clone();
        if item.unit != ChecksumUnit::Chunk || bytes.len() < SENDFILE_BYTES {
            return None;
        }
        let read = ReadItem { range: &bytes, unit: item.unit, block: Ok(*of_item), fetch_us: 0 };
        let described = read_reply_item(&self.parts.stores, read, ReadWait::Never).ok()?;
        let is_checked = described.chunk_crcs.len() == chunks_touching(bytes.start, described.length).len();
        if !is_checked || !block.can_be_sent(&bytes) {
            return None;
        }
        let mut segment = Segment::default();
        let reply = ReadReply { items: vec![described] };
        append_frame(&mut segment.bytes, FrameKind::ReadReply, request.request_id, &reply, bytes.len());
        self.parts.metrics.sendfile_bytes.inc_by(bytes.len() as u64);
        segment.payload = Some(FilePayload { block: block.clone(), bytes, seen: Instant::now() });
        Some(segment)
    }

    /// The answer to an open or a fill whose blocks are at hand.
    pub(super) fn open_at_hand(&self, request: &ContentRequest, blocks: &[&Block]) -> Segment {
        open_segment(request, blocks.iter().map(|block| Ok(((*block).clone(), Fetched::default()))))
    }

    /// Answers a request that has to wait, within its deadline.
    pub(super) async fn answer(self: Arc<Self>, request: ContentRequest, tenant: Option<Arc<Tenant>>) -> Segment {
        let started = Instant::now();
        let until = started + request.deadline;
        let segment = match request.kind {
            FrameKind::Read => self.answer_read(&request, until, tenant.as_deref()).await,
            _ => open_segment(&request, self.make_all_ready(&request, until, tenant.as_deref()).await),
        };
        self.parts.metrics.slow_requests.observe(started.elapsed().as_secs_f64());
        segment
    }

    async fn answer_read(&self, request: &ContentRequest, until: Instant, tenant: Option<&Tenant>) -> Segment {
        let filled = self.make_all_ready(request, until, tenant).await;
        let share = self.budget(tenant).take(request.payload_bytes());
        let memory = match tokio::time::timeout_at(until, share).await {
            Ok(Ok(memory)) => memory,
            Ok(Err(_)) | Err(_) => return refused_read(request, &Refusal::no_memory()),
        };
        let ranges = request.items.iter().map(|item| (item.range.clone(), item.unit));
        let items: Vec<_> = ranges.zip(filled).collect();
        let (stores, request_id) = (self.parts.stores.clone(), request.request_id);
        let room = room_for_read(request);
        // The memory is that of the work, whether or not anybody still waits for it.
        let compose = move || (answer_from_disk(&stores, request_id, items, room), memory);
        let composed = on_disk(tenant.map(|tenant| &tenant.disk_turns), until, compose);
        match tokio::time::timeout_at(until, composed).await.unwrap_or_else(|_| Err(Refusal::deadline())) {
            Ok(_) if !request.items.iter().all(|item| self.is_as_frozen(item)) => refused_read(request, &not_of_view()),
            Ok((bytes, memory)) => Segment { bytes, memory: Some(memory), ..Segment::default() },
            Err(refusal) => refused_read(request, &refusal),
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

    /// Which chunks are here; and in which files, for whoever may know of them. *Blocking*.
    pub(super) fn query(&self, request: QueryRequest, with_paths: bool) -> QueryReply {
        if let Some(read) = &request.held {
            return self.confirm(&request.blocks, read);
        }
        let items = request.blocks.into_iter().map(|block| {
            let (block, modified_ns, end) = match BlockSource::parse(block).ok()? {
                BlockSource::Object(object) => {
                    (Block::Cached(self.parts.stores.cache.find(&object.id, Touch::None)?), 0, 0)
                }
                BlockSource::Data(target) => {
                    let block = self.parts.stores.data.find(&target, Touch::None).ok()?;
                    let (modified_ns, end) = (block.modified_ns().ok()?, block.end().ok()?);
                    (Block::Data(block), modified_ns, end)
                }
            };
            Some(query_reply::Item {
                known: true,
                present: block.present_bytes().into(),
                length: block.length(),
                path: if with_paths { block.path().display().to_string() } else { String::new() },
                incarnation: block.incarnation(),
                modified_ns,
                end,
            })
        });
        QueryReply { items: items.map(Option::unwrap_or_default).collect() }
    }

    /// Which of these blocks are here; those that were read count as used.
    fn confirm(&self, blocks: &[BlockRef], read: &[u8]) -> QueryReply {
        let read = ChunkMap::from_bytes(read);
        let files = (0..).zip(blocks).map(|(position, block)| {
            let is_read = read.contains(position);
            (ContentId::from_slice(&block.content_id).map(|content| BlockId { content, index: block.index }), is_read)
        });
        let files: Vec<_> = files.collect();
        let items = self.parts.stores.table.confirm(&files).into_iter().map(|incarnation| query_reply::Item {
            known: incarnation.is_some(),
            incarnation: incarnation.unwrap_or_default(),
            ..query_reply::Item::default()
        });
        QueryReply { items: items.collect() }
    }

    /// Drops blocks. *Blocking*.
    pub(super) fn free(&self, request: FreeRequest) -> FreeReply {
        let sources = request.blocks.into_iter().filter_map(|block| BlockSource::parse(block).ok());
        let free = |source: BlockSource| match source {
            BlockSource::Object(object) => self.parts.stores.cache.remove(&object.id),
            BlockSource::Data(target) => {
                self.uploads.give_up_copy(&target.id);
                self.parts.stores.data.free_of(&target)
            }
        };
        let freed: Vec<u64> = sources.filter_map(free).collect();
        FreeReply { blocks: freed.len() as u64, bytes: freed.iter().sum() }
    }

    /// Does what can be done about bytes that a client found to be wrong. *Blocking*.
    pub(super) fn corrupt(&self, request: CorruptRequest) -> CorruptReply {
        match request.block.and_then(|block| BlockSource::parse(block).ok()) {
            Some(BlockSource::Object(object)) => self.check_reported(&object.id, request.chunks),
            // Of these nothing was kept to compare with.
            Some(BlockSource::Data(target)) if self.parts.stores.data.get(&target.id, Touch::None).is_here() => {
                self.parts.metrics.corrupt_chunks.inc();
                if let Some(suppressed) = self.damaged_sends.admit(()) {
                    tracing::warn!(block = %target.id, suppressed, chunk = ?request.chunks.first(),
                        "what was sent of a block did not arrive as it was: look at memory and network of both hosts");
                }
            }
            Some(BlockSource::Data(_)) | None => {}
        }
        CorruptReply {}
    }

    /// Checks chunks of a cached block that a client found to be wrong. *Blocking*.
    fn check_reported(&self, id: &BlockId, chunks: Vec<u32>) {
        if let Some(block) = self.parts.stores.cache.find(id, Touch::None) {
            let count = chunk_count(block.length());
            // Each once, however often it is named.
            let chunks: BTreeSet<u32> = chunks.into_iter().filter(|index| *index < count).collect();
            let chunks: Vec<u32> = chunks.into_iter().collect();
            if let Err(error) = self.parts.stores.cache.recheck(&block, &chunks)
                && let Some(suppressed) = self.unchecked.admit(())
            {
                tracing::warn!(block = %block.id(), suppressed, %error,
                    "cannot check chunks that a client reported as corrupt");
            }
        }
    }
}

/// Sorts ranges and joins those that touch: a request that names the whole block a million times means it once.
fn join(ranges: &mut Vec<Range<u32>>) {
    ranges.sort_unstable_by_key(|range| range.start);
    ranges.dedup_by(|next, last| {
        let touches = next.start <= last.end;
        if touches {
            last.end = last.end.max(next.end);
        }
        touches
    });
    ranges.shrink_to_fit();
}

/// What the answer says of an item.
fn read_reply_item(stores: &Stores, item: ReadItem<'_>, wait: ReadWait) -> Result<read_reply::Item, ReadError> {
    let ReadItem { range, unit, block, fetch_us } = item;
    let block = match block {
        Ok(block) => block,
        Err(refusal) => return Ok(refusal.clone().into()),
    };
    let length = range.len() as u32;
    let mut item = read_reply::Item { status: Status::Ok.into(), length, fetch_us, ..read_reply::Item::default() };
    match (block, unit) {
        (Block::Cached(block), ChecksumUnit::Part) => {
            item.part_crcs = stores.cache.part_checksums(block, range, wait)?
        }
        // What they are is known when the bytes have been read.
        (_, ChecksumUnit::Sent) => item.sent_crcs = vec![0; range.len().div_ceil(CHUNK_BYTES as usize)],
        (Block::Cached(block), ChecksumUnit::Chunk) => {
            let (state, whole) = (block.state(), whole_chunks(range, block.length()));
            item.chunk_crcs = whole.filter_map(|index| state.crcs.get(index as usize).copied()).collect();
        }
        // Blocks of fs-mode files have no checksums.
        (Block::Data(_), _) => {}
    }
    Ok(item)
}

fn open_reply_item(block: &Block, fetched: Fetched) -> open_reply::Item {
    open_reply::Item {
        status: Status::Ok.into(),
        message: String::new(),
        incarnation: block.incarnation(),
        present: block.verified_bytes().into(),
        length: block.length(),
        fetched_bytes: fetched.bytes,
        fetch_us: fetched.us,
    }
}

/// The answer to an open or a fill; to an open with descriptors of the blocks.
fn open_segment(request: &ContentRequest, blocks: impl IntoIterator<Item = Ready>) -> Segment {
    let (mut items, mut descriptors) = (Vec::new(), Vec::new());
    for block in blocks {
        match block {
            Ok((block, fetched)) => {
                items.push(open_reply_item(&block, fetched));
                if request.kind == FrameKind::Open {
                    descriptors.push(PassedFile::Block(block));
                }
            }
            Err(refusal) => items.push(refusal.into()),
        }
    }
    let mut segment = match request.kind {
        FrameKind::Open => Segment::of(FrameKind::OpenReply, request.request_id, &OpenReply { items }),
        _ => Segment::of(FrameKind::FillReply, request.request_id, &FillReply { items }),
    };
    segment.descriptors = descriptors;
    segment
}

fn not_of_view() -> Refusal {
    Refusal::new(Status::NoSuchBlock, "no view has the block as it is, as far as this worker knows")
}

fn refused_read(request: &ContentRequest, refusal: &Refusal) -> Segment {
    let reply = ReadReply { items: vec![refusal.clone().into(); request.items.len()] };
    Segment::of(FrameKind::ReadReply, request.request_id, &reply)
}

/// Room for the answer to a read, for [`answer_from_disk`] to fill. Made by the async threads: a thread that waits for
/// the disk now and then would keep the memory that it has allocated and that others have freed.
fn room_for_read(request: &ContentRequest) -> FrameBuffer {
    let checksums = request.items.iter().map(|item| match item.unit {
        ChecksumUnit::Chunk | ChecksumUnit::Sent => item.range.len() / CHUNK_BYTES as usize + 1,
        ChecksumUnit::Part => part_count(&item.range),
    });
    let described = request.items.len() * ITEM_BYTES + checksums.sum::<usize>() * size_of::<u32>();
    FrameBuffer::with_capacity(HEADER_BYTES + described + request.payload_bytes())
}

/// Reads the ranges from the disk into the frame of the answer. *Blocking*.
fn answer_from_disk(
    stores: &Stores,
    request_id: u64,
    mut items: Vec<((Range<u32>, ChecksumUnit), Ready)>,
    mut frame: FrameBuffer,
) -> FrameBuffer {
    loop {
        let views = items.iter().map(|((range, unit), ready)| ReadItem {
            range,
            unit: *unit,
            block: ready.as_ref().map(|(block, _)| block),
            fetch_us: ready.as_ref().map_or(0, |(_, fetched)| fetched.us),
        });
        match compose_read(stores, request_id, views, ReadWait::Disk, &mut frame) {
            Ok(()) => return frame,
            // The checksums come before the bytes. An item that turns out to be unreadable becomes one that is refused,
            // and the answer is begun anew.
            Err((position, error)) => {
                let ((range, _), ready) = &mut items[position];
                if let Ok((block, _)) = ready {
                    *ready = Err(unreadable(stores, block, range, error));
                }
                frame.truncate(0);
            }
        }
    }
}

/// Appends the answer to a read. Checksums of what is sent are those of the bytes that have been read: they take as
/// much room in the message as what stands in for them.
///
/// # Errors
/// The first item that cannot be read, and why.
fn compose_read<'a>(
    stores: &Stores,
    request_id: u64,
    items: impl Iterator<Item = ReadItem<'a>> + Clone,
    wait: ReadWait,
    frame: &mut FrameBuffer,
) -> Result<(), (usize, ReadError)> {
    let described = items.clone().enumerate().map(|(position, item)| {
        // Nothing has been read yet but what checksums take.
        read_reply_item(stores, item, wait).map_err(|error| (position, error))
    });
    let mut reply = ReadReply { items: described.collect::<Result<_, _>>()? };
    let message = frame.len() + HEADER_BYTES;
    let payload = reply.items.iter().map(|item| item.length as usize).sum();
    frame.reserve(HEADER_BYTES + reply.encoded_len() + payload);
    append_frame(frame, FrameKind::ReadReply, request_id, &reply, payload);
    let mut is_changed = false;
    for (position, (item, described)) in items.zip(&mut reply.items).enumerate() {
        // What is refused has none.
        let Ok(block) = item.block else { continue };
        let into = frame.append(described.length as usize);
        block.read_by(wait, item.range.start, into).map_err(|error| (position, error))?;
        if !described.sent_crcs.is_empty() {
            described.sent_crcs = into.chunks(CHUNK_BYTES as usize).map(crc32c::crc32c).collect();
            is_changed = true;
        }
    }
    if is_changed {
        let mut into = &mut frame[message..message + reply.encoded_len()];
        reply.encode_raw(&mut into);
    }
    Ok(())
}

/// A read failed that should not have. What is wrong of a cached block is dropped, to be fetched the next time.
fn unreadable(stores: &Stores, block: &Block, range: &Range<u32>, error: ReadError) -> Refusal {
    let recheck = |block: &CachedBlock, chunks: &[u32], message: &str| match stores.cache.recheck(block, chunks) {
        Ok(()) => Refusal::new(Status::IoError, message),
        Err(error) => error.into(),
    };
    match (error, block) {
        (ReadError::Damaged(chunk), Block::Cached(block)) => {
            recheck(block, &[chunk], "a chunk of the block is damaged; it will be fetched again")
        }
        // A file that somebody cut off is no fault of the disk.
        (ReadError::Io(source), Block::Cached(block)) if source.kind() == io::ErrorKind::UnexpectedEof => {
            let chunks: Vec<u32> = chunks_touching(range.start, range.len() as u32).collect();
            recheck(block, &chunks, "the file of the block is too short; it will be fetched again")
        }
        (ReadError::Io(source), _) => stores.table.disk_failed(block, "reading", source).into(),
        (ReadError::NotCached | ReadError::Damaged(_), _) => {
            Refusal::new(Status::IoError, "the block is not in memory")
        }
    }
}

/// Chunks are what reads are cut into, and no chunk may exceed what one connection has in flight.
const _: () = assert!(CHUNK_BYTES < MAX_INFLIGHT_BYTES);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_that_touch_become_one() {
        let joined = |ranges: &[Range<u32>]| {
            let mut ranges = ranges.to_vec();
            join(&mut ranges);
            ranges.into_iter().map(|range| (range.start, range.end)).collect::<Vec<_>>()
        };
        assert_eq!(joined(&[]), []);
        assert_eq!(joined(&[5..6, 0..2, 1..4, 4..5]), [(0, 6)]);
        assert_eq!(joined(&[7..9, 0..2, 1..1]), [(0, 2), (7, 9)]);
        assert_eq!(joined(&vec![0..512; 100_000]), [(0, 512)]);
    }
}
