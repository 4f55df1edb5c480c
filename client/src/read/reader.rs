//! What all readers of blocks share: buffers in which a fetch is made once for all who want it, and read-ahead.
//!
//! Objects never change, and what is buffered of them is there for every handle. The bytes of an fs-mode file may: they
//! are buffered under a *version* of the file as it is read here, by read-ahead. Whatever may have changed the file,
//! here or elsewhere, ends the version ([`BlockReader::invalidate`]): nothing that was asked for before is given out
//! after it. What a reader asks for himself is read as it is then, and kept by nobody but him, unless other chunks of
//! what he reads are there or on their way.

use std::ops::Range;
use std::os::fd::AsFd;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, OnceLock};

use bytes::Bytes;
use cavern_proto::CHUNK_BYTES;
use cavern_proto::chunk::chunk_range;
use parking_lot::Mutex;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::buffers::{ChunkLookup, Purpose};
use super::descriptor::Descriptor;
use super::descriptors::BlockFile;
use super::fetch::{ChunkRequest, Fetched};
use super::local_file::{PastEnd, read_file};
use super::location::{BlockLocation, ReplicatedBlock};
use super::readahead::{Pattern, Readahead};
use super::resources::{Core, SweepOnDrop};
use super::span::{Span, spans};
use crate::error::ClientError;
use crate::memory::Charge;
use crate::stages::Stages;

/// Part that read-ahead over the network asks for at a time: small, so that a reader who catches up waits little.
pub(crate) const REMOTE_PIECE_BYTES: u64 = 1 << 20;

/// What is read of one file: its streams, and what is buffered of it if it may change. Dropping it ends its read-ahead.
pub(crate) struct BlockReader {
    core: Arc<Core>,
    readahead: Mutex<Readahead>,
    version: Mutex<Option<BufferVersion>>,
    /// There is one: spares whoever writes the lock.
    has_version: AtomicBool,
    /// Cancelled when it is dropped. Made when something is to end then: most files are closed before.
    closed: OnceLock<CancellationToken>,
}

/// A version of a file's bytes, as long as it counts.
#[derive(Clone, Debug)]
pub(crate) struct BufferVersion {
    /// Differs from that of every other version of any file.
    pub number: u64,
    counts: CancellationToken,
}

/// How far a read has come.
pub(super) enum Step {
    /// All of the span.
    Bytes(Bytes),
    /// The span can be read through this.
    Descriptor(Arc<Descriptor>),
    /// A fetch has ended, of this reader or of another: look again.
    Again,
    /// The fetch of another takes long, and a replica may be asked beside it.
    Overtake,
}

/// Whether a read has already waited for a fetch that did not bring all it needs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum ReadAttempt {
    First,
    Further,
}

/// The end of something that may have changed a file, however it ends.
#[must_use]
pub(crate) struct InvalidateOnDrop<'a>(&'a BlockReader);

impl Drop for InvalidateOnDrop<'_> {
    fn drop(&mut self) {
        self.0.invalidate();
    }
}

/// A version that counts no more. What is there of it, or on its way, goes when this is dropped: best where no lock is
/// held.
#[must_use]
pub(crate) struct EndedVersion<'a> {
    core: &'a Core,
    version: BufferVersion,
}

impl Drop for EndedVersion<'_> {
    fn drop(&mut self) {
        self.version.counts.cancel();
        self.core.buffers.forget(self.version.number);
    }
}

impl Drop for BlockReader {
    fn drop(&mut self) {
        if let Some(closed) = self.closed.get() {
            closed.cancel();
        }
        self.invalidate();
    }
}

impl BlockReader {
    pub(super) fn new(core: Arc<Core>, readahead: Readahead) -> Self {
        let (version, has_version) = (Mutex::new(None), AtomicBool::new(false));
        Self { core, readahead: Mutex::new(readahead), version, has_version, closed: OnceLock::new() }
    }

    /// A read happens in a file of `length` bytes: what to ask for now, beyond it.
    pub(crate) fn ahead_of(&self, read: Range<u64>, length: u64) -> Option<Range<u64>> {
        self.on_read(read, length).0
    }

    /// As [`Self::ahead_of`]; and how the read goes with those before it.
    pub(super) fn on_read(&self, read: Range<u64>, length: u64) -> (Option<Range<u64>>, Pattern) {
        if self.core.limits.readahead_max == 0 || length <= u64::from(CHUNK_BYTES) {
            return (None, Pattern::Streams);
        }
        let mut readahead = self.readahead.lock();
        (readahead.on_read(read, length), readahead.pattern())
    }

    /// The version under which bytes are buffered from now on. To be called with the layout at hand that they are of.
    pub(crate) fn begin_version(&self) -> BufferVersion {
        let mut version = self.version.lock();
        let begin = || BufferVersion {
            number: self.core.buffers.new_version(),
            counts: self.core.background.stop.child_token(),
        };
        let current = version.get_or_insert_with(begin).clone();
        self.has_version.store(true, SeqCst);
        current
    }

    /// The number of the version that counts; `None` while nothing is buffered.
    pub(crate) fn version(&self) -> Option<u64> {
        if self.has_version.load(SeqCst) { self.version.lock().as_ref().map(|version| version.number) } else { None }
    }

    /// The file may have changed: what was asked for before this is given to no read that begins after it. A writer
    /// calls it when the bytes are in their place, and before it is answered.
    pub(crate) fn invalidate(&self) {
        drop(self.end_version());
    }

    /// As [`Self::invalidate`], for callers that hold a lock: they drop what it gives when they have released that.
    pub(crate) fn end_version(&self) -> Option<EndedVersion<'_>> {
        if !self.has_version.load(SeqCst) {
            return None;
        }
        let ended = {
            let mut version = self.version.lock();
            self.has_version.store(false, SeqCst);
            version.take()
        };
        let version = ended?;
        self.readahead.lock().reset();
        Some(EndedVersion { core: &self.core, version })
    }

    /// Invalidates what is buffered at the end of a change.
    pub(crate) fn invalidate_on_drop(&self) -> InvalidateOnDrop<'_> {
        InvalidateOnDrop(self)
    }

    /// Bytes of a file that may change, if they are in a buffer as a whole; for event loops.
    pub(crate) fn buffered(&self, block: &ReplicatedBlock, span: &Span) -> Option<Bytes> {
        let chunks = self.core.buffers.in_one(block.key(), span.chunks())?;
        let start = (span.bytes.start % CHUNK_BYTES) as usize;
        let bytes = chunks.get(start..start + span.length()).map(|part| chunks.slice_ref(part))?;
        self.core.given(block.key(), span);
        Some(bytes)
    }

    /// All bytes of a span of a block of an fs-mode file, over the network: out of buffers where read-ahead has some of
    /// them, or is about to, else exactly these from a replica.
    pub(crate) async fn read(
        &self,
        block: &Arc<ReplicatedBlock>,
        span: &Span,
        deadline: Instant,
    ) -> Result<Bytes, ClientError> {
        let (core, at) = (&self.core, BlockLocation::Replicas(block.clone()));
        let _done = SweepOnDrop(core);
        let mut tries = ReadAttempt::First;
        // Nothing stays in buffers of a version that has ended meanwhile.
        while self.version() == Some(block.version) && !core.buffers.lack(at.key(), span.chunks()) {
            match core.next_step(&at, span, tries, deadline).await? {
                Step::Bytes(bytes) => {
                    core.given(at.key(), span);
                    return Ok(bytes);
                }
                Step::Overtake => break,
                Step::Descriptor(_) | Step::Again => {}
            }
            tries = ReadAttempt::Further;
        }
        let want = ChunkRequest { part: Some(span.bytes.clone()), ..ChunkRequest::new(at, span.chunks()) };
        match core.fetch_from_any(&want, deadline).await? {
            Fetched::Buffer(bytes) | Fetched::Parts(bytes) => Ok(bytes),
            Fetched::Local(_) => Err(ClientError::NoWorkers),
        }
    }

    /// All bytes of a span of a block of an fs-mode file, from this file on this host; `None` where that is not open
    /// here, or cannot be read.
    pub(crate) async fn read_known(
        &self,
        block: &ReplicatedBlock,
        file: &BlockFile,
        span: &Span,
        deadline: Instant,
    ) -> Result<Option<Bytes>, ClientError> {
        let known = self.core.descriptors.get(&block.id).filter(|known| known.is(file));
        let Some(known) = known else { return Ok(None) };
        known.used.touch();
        let (start, name) = (u64::from(span.bytes.start), || format!("inode {}", block.name.inode));
        match self.read_local(known.clone(), start, span.length(), PastEnd::Zeros, deadline, name).await {
            Err(ClientError::Io(error)) => {
                tracing::warn!(inode = block.name.inode, span.index, "a local block cannot be read: {error}");
                self.core.descriptors.remove(&block.id, &known);
                Ok(None)
            }
            read => read.map(Some),
        }
    }

    /// Brings a span of a block of an fs-mode file into buffers, as far as memory is free, while its version counts.
    pub(crate) fn read_ahead(&self, block: Arc<ReplicatedBlock>, span: Span, version: &BufferVersion) {
        self.core.stats.readahead_bytes.inc_by(span.length() as u64);
        self.core.fetch_ahead(BlockLocation::Replicas(block), span, version.counts.clone());
    }

    /// All bytes of a range of a file, cut at the boundaries of its blocks and at multiples of `piece` bytes; `read`
    /// gives those of one part. What comes from several is put together.
    pub(crate) async fn read_range<R>(
        &self,
        range: Range<u64>,
        (block_size, piece): (u64, u64),
        deadline: Instant,
        read: impl Fn(Span) -> R,
    ) -> Result<Bytes, ClientError>
    where
        R: Future<Output = Result<Bytes, ClientError>>,
    {
        let length = range.end - range.start;
        let mut parts = spans(range, block_size, piece).peekable();
        let Some(first) = parts.next() else { return Ok(Bytes::new()) };
        if parts.peek().is_none() {
            return read(first).await;
        }
        let charge = self.core.charge_joined(length, deadline).await?;
        let mut whole = Vec::with_capacity(length as usize);
        for span in std::iter::once(first).chain(parts) {
            whole.extend_from_slice(&read(span).await?);
        }
        Ok(charge.hold(whole))
    }

    /// Reads from the file of a block of this host. `name` is that of what is read.
    ///
    /// # Errors
    /// [`ClientError::Io`] when the file cannot be read: another way may do.
    pub(crate) async fn read_local(
        &self,
        file: impl AsFd + Send + 'static,
        offset: u64,
        length: usize,
        past_end: PastEnd,
        deadline: Instant,
        name: impl FnOnce() -> String + Send,
    ) -> Result<Bytes, ClientError> {
        let charge = self.charge(length, deadline).await?;
        let bytes = read_file(file, offset, length, past_end, deadline, name).await?;
        self.core.stats.read_by_descriptor(length);
        Ok(charge.hold(bytes))
    }

    /// Memory for bytes that are read, as soon as there is so much. Who holds some waits for none.
    pub(super) async fn charge(&self, bytes: usize, deadline: Instant) -> Result<Charge, ClientError> {
        let wait = deadline.saturating_duration_since(Instant::now());
        self.core.charge(bytes as u64, Purpose::Read, wait).await
    }

    /// What ends with the reader.
    pub(super) fn closed(&self) -> CancellationToken {
        self.closed.get_or_init(|| self.core.background.stop.child_token()).clone()
    }
}

impl Core {
    /// Brings the chunks of a span one step nearer.
    pub(super) async fn next_step(
        self: &Arc<Self>,
        at: &BlockLocation,
        span: &Span,
        tries: ReadAttempt,
        deadline: Instant,
    ) -> Result<Step, ClientError> {
        match self.buffers.gather(at.key(), span.chunks(), Purpose::Read) {
            ChunkLookup::All(chunks) => self.join_chunks(at, span, chunks, deadline).await,
            // Memory is short, and what came may have left before it was read: without its neighbours in the buffers a
            // read depends on nobody, and goes on as soon as its turn to have memory comes.
            ChunkLookup::Wait(_) | ChunkLookup::Missing(_)
                if tries == ReadAttempt::Further && self.memory.wanted_bytes() > 0 =>
            {
                self.read_alone(at, span, deadline).await
            }
            ChunkLookup::Wait(mut done) => {
                let fetch = done.borrow().clone();
                let _joined = Stages::join(fetch);
                // Read-ahead is not hedged.
                if let BlockLocation::Replicas(block) = at
                    && block.workers.len() > 1
                    && let Some(delay) = self.hedge(at).delay()
                {
                    let hedged = deadline.min(Instant::now() + delay);
                    if tokio::time::timeout_at(hedged, done.changed()).await.is_ok() {
                        return Ok(Step::Again);
                    }
                    if self.hedge(at).permit() {
                        self.stats.hedges.inc();
                        return Ok(Step::Overtake);
                    }
                }
                match tokio::time::timeout_at(deadline, done.changed()).await {
                    Ok(_ended) => Ok(Step::Again),
                    Err(_elapsed) => Err(ClientError::Read {
                        key: at.file(),
                        causes: "another read of the same bytes did not end before the deadline".to_owned(),
                    }),
                }
            }
            ChunkLookup::Missing(claim) => {
                let chunks = claim.chunks();
                let want = ChunkRequest::new(at.clone(), chunks.clone());
                match self.fetch_from_any(&want, deadline).await? {
                    Fetched::Local(descriptor) => Ok(Step::Descriptor(descriptor)),
                    Fetched::Buffer(bytes) | Fetched::Parts(bytes) => {
                        self.keep(claim, &bytes);
                        if chunks != span.chunks() {
                            return Ok(Step::Again);
                        }
                        Ok(Step::Bytes(span.of_chunks(&bytes)))
                    }
                }
            }
        }
    }

    /// Fetches a whole span for this reader only.
    async fn read_alone(
        self: &Arc<Self>,
        at: &BlockLocation,
        span: &Span,
        deadline: Instant,
    ) -> Result<Step, ClientError> {
        match self.fetch_from_any(&ChunkRequest::new(at.clone(), span.chunks()), deadline).await? {
            Fetched::Local(descriptor) => Ok(Step::Descriptor(descriptor)),
            Fetched::Buffer(bytes) | Fetched::Parts(bytes) => Ok(Step::Bytes(span.of_chunks(&bytes))),
        }
    }

    /// The bytes of a span out of its chunks: a slice when they are in one, else a copy. Chunks that left while
    /// this waited for memory are fetched once more, for this reader only.
    async fn join_chunks(
        self: &Arc<Self>,
        at: &BlockLocation,
        span: &Span,
        mut chunks: Vec<Bytes>,
        deadline: Instant,
    ) -> Result<Step, ClientError> {
        if let [chunk] = &chunks[..] {
            return Ok(Step::Bytes(span.of_chunks(chunk)));
        }
        let bytes = span.length() as u64;
        let charge = match self.memory.try_charge(bytes) {
            Some(charge) => charge,
            None => {
                // Chunks are memory: whoever waits for more lets go of them.
                drop(chunks);
                let wait = deadline.saturating_duration_since(Instant::now());
                let charge = self.charge(bytes, Purpose::Read, wait).await?;
                let again = match self.buffers.gather(at.key(), span.chunks(), Purpose::Read) {
                    ChunkLookup::All(again) => Some(again),
                    ChunkLookup::Wait(_) | ChunkLookup::Missing(_) => None,
                };
                let Some(again) = again else {
                    // Chunks and their copy together may be more than the budget: they would be fetched, and leave for
                    // the copy, again and again.
                    drop(charge);
                    return self.read_alone(at, span, deadline).await;
                };
                chunks = again;
                charge
            }
        };
        let mut whole = vec![0; span.length()];
        for (chunk, bytes) in span.chunks().zip(&chunks) {
            copy_chunk(span, chunk, at.length(), bytes, &mut whole);
        }
        Ok(Step::Bytes(charge.hold(whole)))
    }

    /// Brings the chunks of a span into buffers, as far as memory is free, unless `until` comes first.
    pub(super) fn fetch_ahead(self: &Arc<Self>, at: BlockLocation, span: Span, until: CancellationToken) {
        let core = self.clone();
        self.in_background(until, async move { core.make_ready(&at, &span).await });
    }

    /// Brings the chunks of a span into buffers, or has the worker on this host make them present, as far as memory is
    /// free.
    pub(super) async fn make_ready(self: &Arc<Self>, at: &BlockLocation, span: &Span) -> Result<(), ClientError> {
        // For readers who come to wait for it.
        let stages = Some(Stages::new());
        let fetch = async {
            let deadline = Instant::now() + self.limits.read;
            while let ChunkLookup::Missing(claim) = self.buffers.gather(at.key(), span.chunks(), Purpose::Readahead) {
                let want =
                    ChunkRequest { purpose: Purpose::Readahead, ..ChunkRequest::new(at.clone(), claim.chunks()) };
                match self.fetch_from_any(&want, deadline).await? {
                    Fetched::Buffer(bytes) | Fetched::Parts(bytes) => self.keep(claim, &bytes),
                    Fetched::Local(_) => break,
                }
            }
            Ok::<_, ClientError>(())
        };
        Stages::scope(stages, fetch).await
    }
}

/// Copies the part of a chunk that lies in the span to its place in the span's buffer.
pub(super) fn copy_chunk(span: &Span, chunk: u32, block_length: u32, bytes: &[u8], buffer: &mut [u8]) {
    let here = chunk_range(chunk, block_length);
    let (start, end) = (here.start.max(span.bytes.start), here.end.min(span.bytes.end));
    if start < end {
        let into = (start - span.bytes.start) as usize..(end - span.bytes.start) as usize;
        buffer[into].copy_from_slice(&bytes[(start - here.start) as usize..(end - here.start) as usize]);
    }
}
