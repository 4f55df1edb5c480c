//! Requests that make, change and sync blocks of fs-mode files.

use std::collections::HashSet;
use std::fs::File;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use cavern_proto::bounded::MAX_ITEMS;
use cavern_proto::chunk::CHUNK_BYTES;
use cavern_proto::data::{
    BlockRef, Range as WireRange, ReserveReply, ReserveRequest, Status, SyncReply, SyncRequest, WriteReply,
    WriteRequest,
};
use cavern_security::Tenant;
use futures::future::OptionFuture;
use tokio::time::Instant;

use super::requests::{MAX_DEADLINE, Service, deadline_of};
use crate::fill::BlockSource;
use crate::request_error::{Refusal, on_disk};
use crate::reserved::ReserveResult;
use crate::store::{DataBlock, DataTarget, Lookup, Touch};

/// Ranges of one reservation or write at most.
const MAX_RANGES: usize = 1024;
/// Blocks of one request that are synced at a time: the disk's journal takes them together.
const SYNCS_AT_A_TIME: usize = 8;

/// Share of the disks from which on writers are slowed down.
const SLOW_FROM: f64 = 0.85;
/// Before a reservation when the disks are full. A stream reserves some megabytes at a time.
const LONGEST_PAUSE: Duration = Duration::from_millis(500);

/// A write that makes sense.
#[derive(Debug)]
pub(super) struct Write {
    /// What is written to: a block of an fs-mode file, or one of an object, of which a client has the bytes.
    block: BlockSource,
    /// As it was named.
    named: BlockRef,
    offset: u32,
    zero: Vec<Range<u32>>,
    cut: Option<Range<u32>>,
    begins: bool,
    sync: bool,
    pub(super) until: Instant,
    /// For what it takes of the disks.
    pub(super) room: ReserveResult,
}

impl Write {
    /// This write with room for what it takes of the disks.
    pub(super) fn within(self, room: ReserveResult) -> Self {
        Self { room, ..self }
    }

    /// Whether the bytes are to be kept in the cache.
    pub(super) fn is_of_object(&self) -> bool {
        matches!(self.block, BlockSource::Object(_))
    }

    /// Checks a write of `payload_bytes` that has just been received.
    ///
    /// # Errors
    /// What makes no sense.
    pub(super) fn parse(request: WriteRequest, payload_bytes: u32) -> Result<Self, Refusal> {
        let named = request.block.unwrap_or_default();
        let block = BlockSource::parse(named.clone())?;
        let zero = within(&request.zero, block.length())?;
        let cut = within(request.cut.as_slice(), block.length())?.pop();
        let payload = WireRange { offset: request.offset, length: payload_bytes };
        within(&[payload], block.length())?;
        if request.begins && (request.offset > 0 || !zero.is_empty() || cut.is_some()) {
            return Err(Refusal::bad_request("a block begins with bytes at offset 0, and nothing else"));
        }
        if let BlockSource::Object(_) = block {
            let is_whole = |at: u32| at.is_multiple_of(CHUNK_BYTES) || at == block.length();
            let end = request.offset + payload_bytes;
            let is_kept = payload_bytes > 0 && request.offset.is_multiple_of(CHUNK_BYTES) && is_whole(end);
            if !is_kept || request.sync || request.begins || !zero.is_empty() || cut.is_some() {
                return Err(Refusal::bad_request("of a block of an object whole chunks are kept, and nothing else"));
            }
        }
        let until = Instant::now() + deadline_of(request.deadline_ms);
        let WriteRequest { offset, begins, sync, .. } = request;
        Ok(Self { block, named, offset, zero, cut, begins, sync, until, room: Ok(None) })
    }
}

/// The ranges, if all lie within a block of `length` bytes.
fn within(ranges: &[WireRange], length: u32) -> Result<Vec<Range<u32>>, Refusal> {
    if ranges.len() > MAX_RANGES {
        return Err(Refusal::bad_request(format!("{} ranges, {MAX_RANGES} are the most", ranges.len())));
    }
    let check = |range: &WireRange| match range.offset.checked_add(range.length) {
        Some(end) if end <= length => Ok(range.offset..end),
        _ => {
            let WireRange { offset, length: bytes } = range;
            Err(Refusal::bad_request(format!("{bytes} bytes at {offset} of a block of {length} bytes")))
        }
    };
    ranges.iter().map(check).collect()
}

/// The pause before room is made, where so much of the capacity is taken by blocks of fs-mode files.
///
/// These make way only when the bucket has them, and the master drops those long before a disk is full. What fills it
/// beyond that is what the bucket lacks: it is not reached, or is written to more slowly than the worker. So room is
/// given ever more slowly, and whoever writes finds out by waiting, not by an error.
fn pause(data: u64, capacity: u64) -> Duration {
    if capacity == 0 {
        return Duration::ZERO;
    }
    let excess = ((data as f64 / capacity as f64 - SLOW_FROM) / (1.0 - SLOW_FROM)).clamp(0.0, 1.0);
    LONGEST_PAUSE.mul_f64(excess * excess)
}

impl Service {
    /// A block of an fs-mode file that is here.
    pub(super) async fn open_data(
        &self,
        target: DataTarget,
        touch: Touch,
        until: Instant,
        tenant: Option<&Tenant>,
    ) -> Result<Arc<DataBlock>, Refusal> {
        let data = self.parts.stores.data.clone();
        let turns = tenant.map(|tenant| &tenant.disk_turns);
        let found = on_disk(turns, until, move || data.find(&target, touch));
        let found = tokio::time::timeout_at(until, found).await.unwrap_or_else(|_| Err(Refusal::deadline()));
        found?.map_err(Refusal::from)
    }

    /// Makes the block of a reservation that begins with what the bucket has, or an earlier block of the file.
    pub(super) async fn begin_with_origin(
        &self,
        request: &ReserveRequest,
        tenant: Option<&Tenant>,
    ) -> Result<(), Refusal> {
        let Some(named) = request.origin.clone() else { return Ok(()) };
        let block = request.block.clone().unwrap_or_default();
        let target = BlockSource::parse_data(block.clone())?;
        within(&request.ranges, target.length)?;
        let is_earlier = self.is_earlier(&named, &block);
        let origin = BlockSource::parse(named)?;
        if matches!(origin, BlockSource::Data(_)) && !is_earlier {
            return Err(Refusal::bad_request(
                "an origin is a block of an object, or the same of an earlier generation",
            ));
        }
        let until = Instant::now() + deadline_of(request.deadline_ms);
        let begun = async {
            let _turn = OptionFuture::from(tenant.map(|tenant| tenant.turns.acquire())).await.transpose()?;
            let turns = (tenant.map(|tenant| &tenant.disk_turns), until);
            match origin {
                BlockSource::Object(origin) => {
                    self.fills.begin_with_origin(target, &origin, request.origin_bytes, turns).await
                }
                BlockSource::Data(origin) => {
                    self.fills.begin_with_block(target, origin, request.origin_bytes, turns).await
                }
            }
        };
        tokio::time::timeout_at(until, Box::pin(begun)).await.unwrap_or_else(|_| Err(Refusal::deadline()))
    }

    /// Whether a block was at the place of another one in the same file before. Names are looked at whoever asks: what
    /// is copied is shown to whoever may read the file.
    fn is_earlier(&self, origin: &BlockRef, block: &BlockRef) -> bool {
        let place = |block: &BlockRef| (block.mount_id, block.inode, block.index, block.block_size);
        let is_named = |block: &BlockRef| self.parts.membership.is_of_cluster(block);
        place(origin) == place(block)
            && origin.generation < block.generation
            && [origin, block].into_iter().all(is_named)
    }

    /// Refuses to change what views have, and nobody else writes to: a client that was cut off has not heard of that.
    fn check_not_frozen(&self, block: &BlockRef) -> Result<(), Refusal> {
        let BlockRef { mount_id, inode, generation, index, .. } = *block;
        if !self.parts.mounts.is_frozen(mount_id, inode, generation) {
            return Ok(());
        }
        let message = format!("a view has block {index} of inode {inode} as it is: another one takes its place");
        Err(Refusal::new(Status::Frozen, message))
    }

    /// How long a writer who wants room is to wait.
    pub(super) fn pressure(&self) -> Duration {
        let (data, capacity) = self.parts.stores.table.data_share();
        pause(data, capacity)
    }

    /// Makes room; with the answer goes the file, for those who can take it. *Blocking*.
    pub(super) fn reserve(
        &self,
        request: ReserveRequest,
        with_file: bool,
    ) -> Result<(ReserveReply, Option<Arc<File>>), Refusal> {
        let block = request.block.unwrap_or_default();
        self.check_not_frozen(&block)?;
        let target = BlockSource::parse_data(block)?;
        let ranges = within(&request.ranges, target.length)?;
        let data = &self.parts.stores.data;
        let block = data.reserve(&target, &ranges)?;
        if request.allocate {
            data.allocate(&block, &ranges)?;
        }
        // From here on a client holds a descriptor, and is notified when the block goes.
        let file = if with_file { Some(data.share(&block)?) } else { None };
        let (incarnation, allocated) = (block.incarnation(), block.allocated_bytes().ok());
        let reply = ReserveReply { status: Status::Ok.into(), message: String::new(), incarnation, allocated };
        Ok((reply, file))
    }

    /// Carries out a write. *Blocking*.
    pub(super) fn write(&self, write: &Write, payload: &[u8]) -> Result<WriteReply, Refusal> {
        if Instant::now() > write.until {
            return Err(Refusal::deadline());
        }
        let BlockSource::Data(target) = &write.block else {
            return Err(Refusal::bad_request("a block of an object is not written, but kept"));
        };
        self.check_not_frozen(&write.named)?;
        let data = &self.parts.stores.data;
        if write.begins
            && let Some(draft) = data.begin_draft(target, payload.len() as u32)?
        {
            data.write_draft(&draft, 0, payload)?;
            data.publish_draft_if(&draft, || true)?;
        }
        if let Some(range) = &write.cut {
            data.cut(target, range)?;
        }
        // Once more where it has just begun so: another may have made it meanwhile.
        let block = data.write(target, write.offset, payload, &write.zero)?;
        self.parts.metrics.written_bytes.inc_by(payload.len() as u64);
        if write.sync {
            data.sync_blocks(std::slice::from_ref(&block))?;
        }
        let (incarnation, allocated) = (block.incarnation(), block.allocated_bytes().ok());
        Ok(WriteReply { status: Status::Ok.into(), message: String::new(), incarnation, allocated })
    }

    /// Keeps bytes of an object in the cache.
    pub(super) async fn populate(&self, write: &Write, payload: Bytes) -> Result<WriteReply, Refusal> {
        let BlockSource::Object(object) = &write.block else {
            return Err(Refusal::bad_request("a block of an fs-mode file is written, not kept"));
        };
        let keeping = Box::pin(self.fills.populate(object, write.offset / CHUNK_BYTES, payload));
        tokio::time::timeout_at(write.until, keeping).await.unwrap_or_else(|_| Err(Refusal::deadline()))?;
        Ok(kept())
    }

    /// Answers when the blocks are on disk.
    pub(super) async fn sync(&self, request: SyncRequest, tenant: Option<&Tenant>) -> Result<SyncReply, Refusal> {
        let blocks = request.blocks.len() + request.failed.len();
        if blocks > MAX_ITEMS {
            return Err(Refusal::bad_request(format!("{blocks} blocks in one request")));
        }
        let (targets, failed) = (distinct(request.blocks)?, distinct(request.failed)?);
        // Clients cancel what they no longer wait for.
        let (turns, until) = (tenant.map(|tenant| &tenant.sync_turns), Instant::now() + MAX_DEADLINE);
        if !failed.is_empty() {
            self.fail_syncs(failed, tenant, until).await?;
        }
        let share = targets.len().div_ceil(SYNCS_AT_A_TIME).max(1);
        let syncs: Vec<_> = targets
            .chunks(share)
            .map(|targets| {
                let (data, targets) = (self.parts.stores.data.clone(), targets.to_vec());
                on_disk(turns, until, move || data.sync(&targets))
            })
            .collect();
        for synced in futures::future::join_all(syncs).await {
            synced??;
        }
        Ok(SyncReply { status: Status::Ok.into(), message: String::new() })
    }

    /// From now on these blocks cannot be synced. Syncs that wait for a sick disk, perhaps all that may, keep nobody
    /// from being told that: later ones would be answered as if nothing were lost.
    async fn fail_syncs(
        &self,
        failed: Vec<DataTarget>,
        tenant: Option<&Tenant>,
        until: Instant,
    ) -> Result<(), Refusal> {
        let data = self.parts.stores.data.clone();
        // Those that are open are told of it in memory.
        let is_closed = |target: &DataTarget| matches!(data.get(&target.id, Touch::None), Lookup::Closed);
        let turns = tenant.filter(|_| failed.iter().any(is_closed)).map(|tenant| &tenant.disk_turns);
        let tell = {
            let data = data.clone();
            move || failed.iter().map(|target| data.sync_failed_elsewhere(target)).collect::<Vec<_>>()
        };
        let told = on_disk(turns, until, tell).await?;
        let suspects: Vec<Arc<DataBlock>> = told.iter().flatten().flatten().cloned().collect();
        if !suspects.is_empty() {
            let ask = move || suspects.iter().for_each(|block| data.ask_disk_of(block));
            on_disk(tenant.map(|tenant| &tenant.sync_turns), until, ask).await?;
        }
        told.into_iter().try_for_each(|told| told.map(drop).map_err(Refusal::from))
    }
}

/// The blocks that these name, each once: a disk does no more for whoever names one a thousand times.
fn distinct(blocks: Vec<BlockRef>) -> Result<Vec<DataTarget>, Refusal> {
    let (mut seen, mut targets) = (HashSet::with_capacity(blocks.len()), Vec::with_capacity(blocks.len()));
    for block in blocks {
        let target = BlockSource::parse_data(block)?;
        if seen.insert(target) {
            targets.push(target);
        }
    }
    Ok(targets)
}

/// The answer to bytes of an object: whether they are kept or not, the cache can do without.
pub(super) fn kept() -> WriteReply {
    WriteReply { status: Status::Ok.into(), ..WriteReply::default() }
}

#[cfg(test)]
mod tests;
