//! One open object: the way to its bytes by descriptors of local blocks, then as all blocks are read. Its small reads
//! at random are in `parts`.

mod parts;

use std::any::Any;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, OnceLock};

use bytes::Bytes;
use cavern_net::Route;
use cavern_proto::BlockId;
use cavern_proto::data::open_request;
use parking_lot::RwLock;
use tokio::time::Instant;

use super::buffers::{BufferKey, Purpose};
use super::descriptor::Descriptor;
use super::fetch::{ChunkRequest, wire_range};
use super::local_file::PastEnd;
use super::location::BlockLocation;
use super::readahead::{Pattern, Readahead};
use super::reader::{BlockReader, REMOTE_PIECE_BYTES, ReadAttempt, Step, copy_chunk};
use super::resources::{Core, SweepOnDrop};
use super::span::{Span, spans};
use crate::error::ClientError;
use crate::metadata::Node;
use crate::mounts::ObjectVersion;
use crate::stages::Stage;

/// Files up to this size are made present when they are opened.
pub(crate) const EAGER_BYTES: u64 = 1 << 20;
/// Part of a block that one read or one fill handles at a time.
const PIECE_BYTES: u64 = 8 << 20;
/// Windows from this size on are announced to a remote worker at once, so that its own requests are large.
const ANNOUNCE_BYTES: u64 = 4 << 20;

/// Bytes that could be had without waiting.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum CachedRead {
    /// So many were copied to where they are wanted: fewer than asked only at the end of the file.
    Copied(usize),
    /// All of them are in a buffer, and were not copied.
    Buffered(Bytes),
}

/// One open file: an immutable version of an object. Reads of one handle run concurrently. Dropping it closes it and
/// ends its read-ahead.
pub struct OpenFile {
    core: Arc<Core>,
    node: Arc<Node>,
    /// Bytes.
    size: u64,
    /// `None` for an empty file.
    object: Option<ObjectVersion>,
    /// The whole of a file of one block: set once, then used without a lock.
    whole: OnceLock<Arc<Descriptor>>,
    /// The descriptors used last, by block: spares the shared ones, and keeps an evicted block readable.
    recent: RwLock<[Option<RecentBlock>; 2]>,
    reader: BlockReader,
}

type RecentBlock = (u32, Arc<Descriptor>);

impl OpenFile {
    pub(super) fn new(core: Arc<Core>, node: Arc<Node>) -> Result<Self, ClientError> {
        let object = if node.size == 0 { None } else { Some(node.object()?) };
        Ok(Self::of(core, node, object))
    }

    /// An object, whatever file it belongs to.
    pub(super) fn of(core: Arc<Core>, node: Arc<Node>, object: Option<ObjectVersion>) -> Self {
        let size = object.as_ref().map_or(0, |object| object.length);
        let reader = BlockReader::new(core.clone(), Readahead::new(core.limits.readahead_max));
        Self { core, node, size, object, whole: OnceLock::new(), recent: RwLock::default(), reader }
    }

    /// The node it was opened from; stays readable when the inode is gone.
    pub fn node(&self) -> &Arc<Node> {
        &self.node
    }

    pub fn inode(&self) -> u64 {
        self.node.inode
    }

    /// Reads without waiting, for event loops: only bytes of a local block in the page cache, or in a buffer. `None`
    /// when that is not possible for the whole range (use `read`); else the bytes read, fewer than asked only at the
    /// end of the file.
    pub fn read_now(&self, offset: u64, buffer: &mut [u8]) -> Option<usize> {
        let range = self.clip(offset, buffer.len());
        let Some(object) = &self.object else { return Some(0) };
        let mut rest = &mut buffer[..(range.end - range.start) as usize];
        for span in spans(range.clone(), object.mount.block_size(), u64::MAX) {
            let (part, after) = rest.split_at_mut(span.length());
            if !self.read_span_now(object, &span, part) {
                return None;
            }
            rest = after;
        }
        self.read_ahead_of(object, range.clone());
        Some((range.end - range.start) as usize)
    }

    /// As `read_now`; and without a copy bytes that came in one piece and are in a buffer.
    pub fn try_read_cached(&self, offset: u64, buffer: &mut [u8]) -> Option<CachedRead> {
        match self.read_buffered(offset, buffer.len()) {
            Some(bytes) => Some(CachedRead::Buffered(bytes)),
            None => self.read_now(offset, buffer).map(CachedRead::Copied),
        }
    }

    /// `None` also where `read_now` may have them.
    fn read_buffered(&self, offset: u64, length: usize) -> Option<Bytes> {
        let range = self.clip(offset, length);
        let object = self.object.as_ref().filter(|_| !range.is_empty())?;
        let mut parts = spans(range.clone(), object.mount.block_size(), u64::MAX);
        let (Some(span), None) = (parts.next(), parts.next()) else { return None };
        if self.core.buffers.is_empty() || self.descriptor(object, &span).is_some() {
            return None;
        }
        let key = BufferKey::of_object(object, span.index);
        let bytes = span.of_chunks(&self.core.buffers.in_one(key, span.chunks())?);
        self.core.given(key, &span);
        self.read_ahead_of(object, range);
        Some(bytes)
    }

    /// Reads `length` bytes at `offset`, fewer only at the end of the file. Bounded by `client.read_timeout`. The
    /// bytes stay charged to the memory budget until dropped. `Stale` when the version is gone.
    pub async fn read(&self, offset: u64, length: usize) -> Result<Bytes, ClientError> {
        match self.read_object(offset, length).await {
            Ok(bytes) => Ok(bytes),
            Err(error) => Err(self.core.failed_read(&self.node, error).await),
        }
    }

    /// Reads for a caller that knows better what a failure means: it is neither counted nor logged, and no name is
    /// asked anew.
    pub(crate) async fn read_object(&self, offset: u64, length: usize) -> Result<Bytes, ClientError> {
        let range = self.clip(offset, length);
        let Some(object) = self.object.as_ref().filter(|_| !range.is_empty()) else { return Ok(Bytes::new()) };
        let pattern = self.read_ahead_of(object, range.clone());
        let _done = SweepOnDrop(&self.core);
        let (pieces, deadline) = ((object.mount.block_size(), PIECE_BYTES), self.core.read_deadline());
        let read = |span| self.read_span(object, span, pattern, deadline);
        self.reader.read_range(range, pieces, deadline, read).await
    }

    pub(super) fn core(&self) -> &Core {
        &self.core
    }

    /// The descriptor of the whole file, when it is one complete local block.
    pub fn local_descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.whole().map(|whole| whole.as_fd())
    }

    fn whole(&self) -> Option<&Arc<Descriptor>> {
        self.whole.get().filter(|whole| whole.is_complete())
    }

    /// What is kept of the file of the one block, when this is one complete local block, all of which is there; for
    /// passthrough. `make` makes it from the descriptor at the first time. It stays when the descriptor is closed, for
    /// as long as the worker has the block and somebody uses it.
    pub fn with_local_descriptor<T: Any + Send + Sync>(
        &self,
        make: impl FnOnce(BorrowedFd<'_>) -> Option<T>,
    ) -> Option<Arc<T>> {
        let object = self.object.as_ref().filter(|object| u64::from(object.block_length(0)) == self.size)?;
        let (block, descriptors) = (block_id(object, 0), &self.core.descriptors);
        // Finds what others have opened.
        let _found = self.descriptor(object, &first_block(object));
        if let Some(known) = descriptors.registered(&block) {
            // Somebody may have cut it off since: then it is read in the ways that notice.
            let is_cut = |whole: &Arc<Descriptor>| known.is(&whole.file_of(block)) && !whole.is_whole();
            return if self.whole().is_some_and(is_cut) { None } else { Arc::clone(&known.what).downcast().ok() };
        }
        let whole = self.whole().filter(|whole| whole.is_whole())?;
        let made = Arc::new(make(whole.as_fd())?);
        descriptors.register(block, whole, Arc::clone(&made) as _);
        Some(made)
    }

    /// Makes a small file present, and pins its descriptor where it has one.
    pub(crate) async fn make_present(&self) -> Result<(), ClientError> {
        let Some(object) = &self.object else { return Ok(()) };
        let (span, deadline) = (first_block(object), self.core.read_deadline());
        let _done = SweepOnDrop(&self.core);
        let mut tries = ReadAttempt::First;
        while self.descriptor(object, &span).is_none()
            && self.next_step(object, &span, tries, deadline).await?.is_none()
        {
            tries = ReadAttempt::Further;
        }
        Ok(())
    }

    /// Whether the whole of a small file can be read without asking anybody.
    pub(super) fn is_present(&self) -> bool {
        let Some(object) = &self.object else { return true };
        let span = first_block(object);
        self.descriptor(object, &span).is_some()
            || self.core.descriptors.is_registered(&block_id(object, 0))
            || self.core.buffers.peek(BufferKey::of_object(object, 0), span.chunks(), |_, _| {})
    }

    fn clip(&self, offset: u64, length: usize) -> Range<u64> {
        let start = offset.min(self.size);
        start..start.saturating_add(length as u64).min(self.size)
    }

    /// A descriptor through which the whole span can be read.
    fn descriptor(&self, object: &ObjectVersion, span: &Span) -> Option<Arc<Descriptor>> {
        if let Some(whole) = self.whole.get().filter(|whole| whole.contains_all(span.chunks())) {
            return Some(whole.clone());
        }
        let of_block = |slot: &Option<RecentBlock>| match slot {
            Some((index, descriptor)) if *index == span.index => Some(descriptor.clone()),
            _ => None,
        };
        let recent = self.recent.read().iter().find_map(of_block);
        if let Some(recent) = recent.filter(|recent| recent.contains_all(span.chunks())) {
            return Some(recent);
        }
        let cached = self.core.descriptors.get(&block_id(object, span.index))?;
        if !cached.contains_all(span.chunks()) {
            return None;
        }
        self.remember(span.index, &cached);
        Some(cached)
    }

    fn remember(&self, index: u32, descriptor: &Arc<Descriptor>) {
        if index == 0 && u64::from(descriptor.length) == self.size && descriptor.is_complete() {
            // Another reader may have set it already: either is as good.
            let _set = self.whole.set(descriptor.clone());
            return;
        }
        let mut recent = self.recent.write();
        let same = recent.iter().position(|slot| slot.as_ref().is_some_and(|(known, _)| *known == index));
        match same {
            Some(position) => recent[position] = Some((index, descriptor.clone())),
            None => {
                recent.rotate_right(1);
                recent[0] = Some((index, descriptor.clone()));
            }
        }
    }

    fn forget(&self, object: &ObjectVersion, index: u32, descriptor: &Arc<Descriptor>) {
        descriptor.give_up();
        self.core.descriptors.remove(&block_id(object, index), descriptor);
        for slot in self.recent.write().iter_mut() {
            if slot.as_ref().is_some_and(|(_, known)| Arc::ptr_eq(known, descriptor)) {
                *slot = None;
            }
        }
    }

    fn read_span_now(&self, object: &ObjectVersion, span: &Span, buffer: &mut [u8]) -> bool {
        let stats = &self.core.stats;
        if let Some(descriptor) = self.descriptor(object, span) {
            let read = descriptor.read_now(u64::from(span.bytes.start), buffer);
            if read {
                stats.read_by_descriptor(buffer.len());
            }
            return read;
        }
        let key = BufferKey::of_object(object, span.index);
        let here = self.core.buffers.peek(key, span.chunks(), |chunk, bytes| {
            copy_chunk(span, chunk, key.length, bytes, buffer);
        });
        if here {
            self.core.given(key, span);
        }
        here
    }

    async fn read_span(
        &self,
        object: &ObjectVersion,
        span: Span,
        pattern: Pattern,
        deadline: Instant,
    ) -> Result<Bytes, ClientError> {
        let mut tries = ReadAttempt::First;
        loop {
            if let Some(descriptor) = self.descriptor(object, &span) {
                descriptor.used.touch();
                let (file, start) = (descriptor.clone(), u64::from(span.bytes.start));
                let name = || object.key.to_string();
                match self.reader.read_local(file, start, span.length(), PastEnd::Missing, deadline, name).await {
                    Err(ClientError::Io(error)) => {
                        tracing::warn!(key = %object.key, "a local block cannot be read, trying other ways: {error}");
                        self.forget(object, span.index, &descriptor);
                        // Cut off by somebody, or on a disk that fails: the worker sees for itself.
                        let block = object.block(span.index);
                        self.core.report_corrupt(descriptor.worker, block, span.chunks().collect());
                        return self.read_past_descriptors(object, &span, deadline).await;
                    }
                    result => return result,
                }
            }
            let step = match self.parts_to_read(object, &span, pattern) {
                Some(part) => self.read_parts(object, &span, part, deadline).await,
                None => self.next_step(object, &span, tries, deadline).await,
            };
            if let Some(bytes) = step? {
                self.core.given(BufferKey::of_object(object, span.index), &span);
                return Ok(bytes);
            }
            tries = ReadAttempt::Further;
        }
    }

    /// Brings the chunks of a span one step nearer: the bytes of the span when they are in buffers; else `None` after
    /// a fetch, of this caller or of another, has ended: look again.
    async fn next_step(
        &self,
        object: &ObjectVersion,
        span: &Span,
        tries: ReadAttempt,
        deadline: Instant,
    ) -> Result<Option<Bytes>, ClientError> {
        match self.core.next_step(&BlockLocation::of_object(object, span.index), span, tries, deadline).await? {
            Step::Bytes(bytes) => Ok(Some(bytes)),
            Step::Descriptor(descriptor) => {
                self.remember(span.index, &descriptor);
                Ok(None)
            }
            Step::Again | Step::Overtake => Ok(None),
        }
    }

    /// From the bucket, for a span whose local file turned out to be unreadable.
    async fn read_past_descriptors(
        &self,
        object: &ObjectVersion,
        span: &Span,
        deadline: Instant,
    ) -> Result<Bytes, ClientError> {
        let want = ChunkRequest::new(BlockLocation::of_object(object, span.index), span.chunks());
        let wait = deadline.saturating_duration_since(Instant::now());
        let _bucket = Stage::Bucket.begin();
        match tokio::time::timeout_at(deadline, self.core.try_bucket(&want, wait)).await {
            Ok(bytes) => Ok(span.of_chunks(&bytes?)),
            Err(_elapsed) => Err(ClientError::Read {
                key: object.key.to_string(),
                causes: "the local block is unreadable and the bucket did not answer in time".to_owned(),
            }),
        }
    }

    /// Reports a read to the read-ahead, and starts what it asks for.
    fn read_ahead_of(&self, object: &ObjectVersion, read: Range<u64>) -> Pattern {
        let (wanted, pattern) = self.reader.on_read(read, object.length);
        if let Some(wanted) = wanted {
            self.read_ahead(object, wanted);
        }
        pattern
    }

    fn read_ahead(&self, object: &ObjectVersion, range: Range<u64>) {
        let placement = self.core.pool.placement();
        let block_size = object.mount.block_size();
        for span in spans(range, block_size, PIECE_BYTES) {
            if self.descriptor(object, &span).is_some() {
                continue;
            }
            let owner = placement.candidates(object.content, span.index, 1).first();
            let route = owner.map_or(Route::Remote, |owner| self.core.pool.known_route(owner));
            self.core.stats.readahead_bytes.inc_by(span.length() as u64);
            match (route, owner) {
                (Route::Local, Some(owner)) => self.fill_ahead(object, &span, owner),
                (_, owner) => {
                    let start = u64::from(span.index) * block_size;
                    let bytes = start + u64::from(span.bytes.start)..start + u64::from(span.bytes.end);
                    if let Some(owner) = owner.filter(|_| span.length() as u64 >= ANNOUNCE_BYTES) {
                        self.announce(object, &span, owner);
                    }
                    for piece in spans(bytes, block_size, REMOTE_PIECE_BYTES) {
                        self.core.fetch_ahead(
                            BlockLocation::of_object(object, piece.index),
                            piece,
                            self.reader.closed(),
                        );
                    }
                }
            }
        }
    }

    /// Has the worker on this host make a span present.
    fn fill_ahead(&self, object: &ObjectVersion, span: &Span, owner: u64) {
        let at = BlockLocation::of_object(object, span.index);
        let want = ChunkRequest { purpose: Purpose::Readahead, ..ChunkRequest::new(at, span.chunks()) };
        let core = self.core.clone();
        self.core.in_background(self.reader.closed(), async move {
            let Some(attempt) = core.pool.admit(owner) else { return Ok(()) };
            core.try_worker(&want, owner, Some(attempt), core.limits.read).await.map(drop)
        });
    }

    /// Has a worker elsewhere make a span present, so that the pieces that follow find it.
    fn announce(&self, object: &ObjectVersion, span: &Span, owner: u64) {
        let (block, want) = (Some(object.block(span.index)), vec![wire_range(&span.bytes)]);
        let item = open_request::Item { block, want };
        let core = self.core.clone();
        self.core.in_background(self.reader.closed(), async move {
            Ok(core.pool.fill(owner, vec![item], core.limits.read).await.map(drop)?)
        });
    }
}

fn block_id(object: &ObjectVersion, index: u32) -> BlockId {
    BlockId { content: object.content, index }
}

/// All of the first block.
fn first_block(object: &ObjectVersion) -> Span {
    Span { index: 0, bytes: 0..object.block_length(0) }
}
