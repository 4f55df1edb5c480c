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
use tokio::time::Instant;

use super::limits::on_disk;
use super::pressure;
use super::requests::{MAX_DEADLINE, Service, deadline_of};
use crate::fill::BlockSource;
use crate::request_error::Refusal;
use crate::reserved::Room;
use crate::store::{DataBlock, DataTarget, Lookup, Touch};

/// Ranges of one reservation or write at most.
const MAX_RANGES: usize = 1024;
/// Blocks of one request that are synced at a time: the disk's journal takes them together.
const SYNCS_AT_A_TIME: usize = 8;

/// Who asks for room.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum PeerLocality {
    /// It takes a descriptor.
    SameHost,
    Elsewhere,
}

/// A write that makes sense.
#[derive(Debug)]
pub(super) struct Write {
    /// What is written to: a block of an fs-mode file, or one of an object, of which a client has the bytes.
    block: BlockSource,
    offset: u32,
    zero: Vec<Range<u32>>,
    cut: Option<Range<u32>>,
    begins: bool,
    sync: bool,
    pub(super) until: Instant,
    /// For what it takes of the disks.
    pub(super) room: Room,
}

impl Write {
    /// The same with room for what it takes of the disks.
    pub(super) fn within(self, room: Room) -> Self {
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
        let block = BlockSource::parse(request.block.unwrap_or_default())?;
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
        Ok(Self { block, offset, zero, cut, begins, sync, until, room: Ok(None) })
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

impl Service {
    /// A block of an fs-mode file that is here.
    pub(super) async fn open_data(
        &self,
        target: DataTarget,
        touch: Touch,
        until: Instant,
        tenant: Option<&Tenant>,
    ) -> Result<Arc<DataBlock>, Refusal> {
        let data = self.stores.data.clone();
        let turns = tenant.map(|tenant| &tenant.disk_turns);
        let found = on_disk(turns, until, move || data.find(&target, touch));
        let found = tokio::time::timeout_at(until, found).await.unwrap_or_else(|_| Err(Refusal::deadline()));
        found?.map_err(Refusal::from)
    }

    /// Makes the block of a reservation that begins with what the bucket has.
    pub(super) async fn begin_with_origin(&self, request: &ReserveRequest) -> Result<(), Refusal> {
        let Some(origin) = request.origin.clone() else { return Ok(()) };
        let target = BlockSource::parse_data(request.block.clone().unwrap_or_default())?;
        within(&request.ranges, target.length)?;
        let BlockSource::Object(origin) = BlockSource::parse(origin)? else {
            return Err(Refusal::bad_request("an origin is a block of an object"));
        };
        let begun = self.fills.begin_with_origin(target, &origin, request.origin_bytes);
        let begun = tokio::time::timeout(deadline_of(request.deadline_ms), begun);
        begun.await.unwrap_or_else(|_| Err(Refusal::deadline()))
    }

    /// How long a writer who wants room is to wait.
    pub(super) fn pressure(&self) -> Duration {
        let (data, capacity) = self.stores.table.data_share();
        pressure::pause(data, capacity)
    }

    /// Makes room; with the answer goes the file, for those who can take it. *Blocking*.
    pub(super) fn reserve(&self, request: ReserveRequest, asker: PeerLocality) -> (ReserveReply, Option<Arc<File>>) {
        match self.try_reserve(request, asker) {
            Ok((block, file)) => {
                let (incarnation, allocated) = (block.incarnation(), block.allocated_bytes().ok());
                (ReserveReply { status: Status::Ok.into(), message: String::new(), incarnation, allocated }, file)
            }
            Err(refusal) => (refused_reserve(refusal), None),
        }
    }

    fn try_reserve(
        &self,
        request: ReserveRequest,
        asker: PeerLocality,
    ) -> Result<(Arc<DataBlock>, Option<Arc<File>>), Refusal> {
        let target = BlockSource::parse_data(request.block.unwrap_or_default())?;
        let ranges = within(&request.ranges, target.length)?;
        let data = &self.stores.data;
        let block = data.reserve(&target, &ranges)?;
        if request.allocate {
            data.allocate(&block, &ranges)?;
        }
        // From here on a client holds a descriptor, and is notified when the block goes.
        let file = if asker == PeerLocality::SameHost { Some(data.share(&block)?) } else { None };
        Ok((block, file))
    }

    /// Carries out a write. *Blocking*.
    pub(super) fn write(&self, write: &Write, payload: &[u8]) -> WriteReply {
        match self.try_write(write, payload) {
            Ok(block) => {
                let (incarnation, allocated) = (block.incarnation(), block.allocated_bytes().ok());
                WriteReply { status: Status::Ok.into(), message: String::new(), incarnation, allocated }
            }
            Err(refusal) => refused_write(refusal),
        }
    }

    fn try_write(&self, write: &Write, payload: &[u8]) -> Result<Arc<DataBlock>, Refusal> {
        if Instant::now() > write.until {
            return Err(Refusal::deadline());
        }
        let BlockSource::Data(target) = &write.block else {
            return Err(Refusal::bad_request("a block of an object is not written, but kept"));
        };
        let data = &self.stores.data;
        if write.begins
            && let Some(draft) = data.begin_draft(target, payload.len() as u32)?
        {
            data.write_draft(&draft, 0, payload)?;
            data.publish_draft(&draft)?;
        }
        if let Some(range) = &write.cut {
            data.cut(target, range)?;
        }
        // Once more where it has just begun so: another may have made it meanwhile.
        let block = data.write(target, write.offset, payload, &write.zero)?;
        self.metrics.written_bytes.inc_by(payload.len() as u64);
        if write.sync {
            data.sync_blocks(std::slice::from_ref(&block))?;
        }
        Ok(block)
    }

    /// Keeps bytes of an object in the cache.
    pub(super) async fn keep(&self, write: &Write, payload: Bytes) -> WriteReply {
        let BlockSource::Object(object) = &write.block else {
            return refused_write(Refusal::bad_request("a block of an fs-mode file is written, not kept"));
        };
        let keeping = self.fills.keep(object, write.offset / CHUNK_BYTES, payload);
        match tokio::time::timeout_at(write.until, keeping).await {
            Ok(Ok(())) => WriteReply { status: Status::Ok.into(), ..WriteReply::default() },
            Ok(Err(refusal)) => refused_write(refusal),
            Err(_) => refused_write(Refusal::deadline()),
        }
    }

    /// Answers when the blocks are on disk.
    pub(super) async fn sync(self: Arc<Self>, request: SyncRequest, tenant: Option<Arc<Tenant>>) -> SyncReply {
        match self.try_sync(request, tenant.as_deref()).await {
            Ok(()) => SyncReply { status: Status::Ok.into(), message: String::new() },
            Err(Refusal { status, message }) => SyncReply { status: status.into(), message },
        }
    }

    async fn try_sync(&self, request: SyncRequest, tenant: Option<&Tenant>) -> Result<(), Refusal> {
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
                let (data, targets) = (self.stores.data.clone(), targets.to_vec());
                on_disk(turns, until, move || data.sync(&targets))
            })
            .collect();
        futures::future::join_all(syncs).await.into_iter().try_for_each(|synced| synced?.map_err(Refusal::from))
    }

    /// From now on these blocks cannot be synced. Syncs that wait for a sick disk, perhaps all that may, keep nobody
    /// from being told that: later ones would be answered as if nothing were lost.
    async fn fail_syncs(
        &self,
        failed: Vec<DataTarget>,
        tenant: Option<&Tenant>,
        until: Instant,
    ) -> Result<(), Refusal> {
        let data = self.stores.data.clone();
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

/// The answer to a reservation that is not made.
pub(super) fn refused_reserve(refusal: Refusal) -> ReserveReply {
    ReserveReply { status: refusal.status.into(), message: refusal.message, ..ReserveReply::default() }
}

/// The answer to bytes of an object that the cache can do without.
pub(super) fn not_kept() -> WriteReply {
    WriteReply { status: Status::Ok.into(), ..WriteReply::default() }
}

/// The answer to a write that is not carried out.
pub(super) fn refused_write(refusal: Refusal) -> WriteReply {
    WriteReply { status: refusal.status.into(), message: refusal.message, ..WriteReply::default() }
}

#[cfg(test)]
mod tests;
