//! Answers with block content, or with descriptors: from memory and page cache at once, or from the disk.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use cavern_proto::chunk::{CHUNK_BYTES, chunks_touching, part_count, whole_chunks};
use cavern_proto::data::{FillReply, OpenReply, ReadReply, Status, open_reply, read_reply};
use cavern_proto::frame::{FrameKind, HEADER_BYTES};
use cavern_security::Tenant;
use prost::Message as _;
use tokio::time::Instant;

use super::{ChecksumUnit, ContentRequest, Fetched, Ready, Service, not_of_view};
use crate::request_error::{Refusal, on_disk};
use crate::server::frame_buffer::FrameBuffer;
use crate::server::outgoing::{FilePayload, PassedFile, Segment, append_frame};
use crate::store::{Block, CachedBlock, ReadError, ReadWait, Stores};

/// From this length on the payload of an answer is sent out of the block's file. To copy fewer bytes costs less than
/// the system calls.
const SENDFILE_BYTES: usize = 16 << 10;

/// Bytes of one item of an answer to a read, without its checksums.
const ITEM_BYTES: usize = 16;

/// A range to be read from a block, or why it cannot be.
#[derive(Clone, Copy)]
struct ReadItem<'a> {
    range: &'a Range<u32>,
    unit: ChecksumUnit,
    block: Result<&'a Block, &'a Refusal>,
    fetch_us: u32,
}

impl Service {
    /// Writes the answer to a read whose blocks are at hand; `false` when some page is not in memory, or a view that
    /// had a block is gone.
    pub(in crate::server) fn read_at_hand(
        &self,
        request: &ContentRequest,
        blocks: &[&Block],
        out: &mut FrameBuffer,
    ) -> bool {
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
    pub(in crate::server) fn answer_by_file(&self, request: &ContentRequest, blocks: &[&Block]) -> Option<Segment> {
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
    pub(in crate::server) fn open_at_hand(&self, request: &ContentRequest, blocks: &[&Block]) -> Segment {
        open_segment(request, blocks.iter().map(|block| Ok(((*block).clone(), Fetched::default()))))
    }

    /// Answers a request that has to wait, within its deadline.
    pub(in crate::server) async fn answer(
        self: Arc<Self>,
        request: ContentRequest,
        tenant: Option<Arc<Tenant>>,
    ) -> Segment {
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
