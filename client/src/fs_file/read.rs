//! Reading: holes are zeros, blocks are read through descriptors, or over the network by the reader that objects have.
//!
//! What is read over the network is read ahead of, and found in buffers, while the file cannot have changed unnoticed:
//! the layout is what the master has, the lease would tell of every change by others, and the mount is not strict. The
//! bytes of a layout that is not committed, those that a reader asks for past the pages, and all else are read anew.

use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use cavern_conf::backoff;
use cavern_net::Route;
use cavern_proto::BlockId;
use cavern_proto::block_id::block_length;
use cavern_proto::data::BlockRef;
use tokio::time::Instant;

use super::block::{OpenBlock, seek_data, seek_hole};
use super::file::FsFile;
use super::layout::Layout;
use super::state::Known;
use crate::error::ClientError;
use crate::read::local_file::PastEnd;
use crate::read::span::{Span, spans};
use crate::read::{CachedRead, Owner, REMOTE_PIECE_BYTES, ReplicatedBlock};

/// What lseek(2) looks for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Seek {
    Data,
    Hole,
}

/// Whether what was asked for before a read will do for it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum ReadMode {
    /// As long as nobody is known to have changed the file: whoever reads keeps pages as long.
    Buffered,
    /// What the workers have now.
    Direct,
}

/// A part of a file that is on this host: of a block through its descriptor; else so many bytes of the origin, then
/// zeros.
type LocalPart = (Span, Option<Arc<OpenBlock>>, usize);

/// Where the bytes of a read are.
enum CachedPart {
    Here(Vec<LocalPart>),
    /// In a buffer: all of this range of the file.
    Buffered(Bytes, Range<u64>),
}

impl FsFile {
    /// Bytes of the file, asking the master where that is not known, with all that was written.
    pub async fn size(&self) -> Result<u64, ClientError> {
        self.behind.drain().await;
        self.written_size().await
    }

    /// Bytes of the file, with what is at its workers by now.
    pub(super) async fn written_size(&self) -> Result<u64, ClientError> {
        self.use_known(|known| known.layout.size()).await
    }

    /// Reads without waiting, for event loops: holes, and what is in the page cache of this host. `None` when that is
    /// not possible for the whole range: use `read`. Fewer bytes than asked only at the end of the file.
    pub fn read_now(&self, offset: u64, buffer: &mut [u8]) -> Option<usize> {
        match self.find_cached(offset, buffer.len(), ReadMode::Direct)? {
            CachedPart::Here(parts) => self.read_here(parts, buffer),
            CachedPart::Buffered(..) => None,
        }
    }

    /// As [`Self::read_now`]; and bytes of one block that were read ahead over the network, without a copy, where all
    /// of them are in one buffer.
    pub fn try_read_cached(&self, offset: u64, buffer: &mut [u8]) -> Option<CachedRead> {
        match self.find_cached(offset, buffer.len(), ReadMode::Buffered)? {
            CachedPart::Here(parts) => self.read_here(parts, buffer).map(CachedRead::Copied),
            CachedPart::Buffered(bytes, range) => {
                self.read_ahead_of(range);
                Some(CachedRead::Buffered(bytes))
            }
        }
    }

    /// One look at the layout for all that may be had without waiting.
    fn find_cached(&self, offset: u64, length: usize, mode: ReadMode) -> Option<CachedPart> {
        if !self.behind.is_empty() {
            return None;
        }
        let look = |known: &mut Known| {
            let Known { layout, blocks, .. } = known;
            let range = clip(layout.size(), offset, length);
            let part = |span: Span| match (blocks.get(&span.index), layout.block(span.index)) {
                (Some(open), _) => open.file().is_some().then(|| (span, Some(open.clone()), 0)),
                (None, None) => {
                    let bytes = layout.origin_bytes(span.index, self.block_size());
                    let bytes = bytes.clamp(span.bytes.start, span.bytes.end) - span.bytes.start;
                    Some((span, None, bytes as usize))
                }
                (None, Some(_)) => None,
            };
            let here = spans(range.clone(), self.block_size(), u64::MAX).map(part).collect::<Option<Vec<_>>>();
            if here.is_some() || mode == ReadMode::Direct {
                return here.map(CachedPart::Here);
            }
            self.buffered(known, range.clone()).map(|bytes| CachedPart::Buffered(bytes, range))
        };
        self.with_known(look).flatten()
    }

    /// Reads parts of the file into a buffer that has room for them.
    fn read_here(&self, parts: Vec<LocalPart>, buffer: &mut [u8]) -> Option<usize> {
        let (mut done, mut described) = (0, 0);
        for (span, block, origin_bytes) in parts {
            let part = &mut buffer[done..done + span.length()];
            done += span.length();
            if let Some(open) = block {
                open.read_now(span.bytes.start, part).then_some(())?;
                described += span.length();
                continue;
            }
            let (of_origin, zeros) = part.split_at_mut(origin_bytes);
            zeros.fill(0);
            let start = u64::from(span.index) * self.block_size() + u64::from(span.bytes.start);
            if !of_origin.is_empty() {
                let origin = self.with_known(|known| known.origin.as_ref().map(|open| open.file.clone()))??;
                (origin.read_now(start, of_origin)? == origin_bytes).then_some(())?;
            }
        }
        if described > 0 {
            self.shared.stats.read_by_descriptor(described);
        }
        Some(done)
    }

    /// What is buffered of a range, if that is of one block over the network, and in one buffer.
    fn buffered(&self, Known { layout, blocks, .. }: &Known, range: Range<u64>) -> Option<Bytes> {
        let version = self.reader.version().filter(|_| self.may_buffer(layout))?;
        let mut parts = spans(range, self.block_size(), u64::MAX);
        let (Some(span), None) = (parts.next(), parts.next()) else { return None };
        let open = blocks.get(&span.index).filter(|open| open.file().is_none())?;
        let block = self.replicated(layout, span.index, open.name.clone(), Vec::new(), version);
        self.reader.buffered(&block, &span)
    }

    /// Reads `length` bytes at `offset`, fewer only at the end of the file. Bounded by `client.read_timeout`, but for
    /// the wait for a master and for what is written behind, after which each block has one attempt at least.
    pub async fn read(&self, offset: u64, length: usize) -> Result<Bytes, ClientError> {
        self.read_as(offset, length, ReadMode::Buffered).await
    }

    /// As [`Self::read`], past what was read ahead, for readers whose kernel keeps no pages.
    pub async fn read_direct(&self, offset: u64, length: usize) -> Result<Bytes, ClientError> {
        self.read_as(offset, length, ReadMode::Direct).await
    }

    async fn read_as(&self, offset: u64, length: usize, mode: ReadMode) -> Result<Bytes, ClientError> {
        let deadline = Instant::now() + self.shared.timeout();
        loop {
            match self.try_read(offset, length, mode, deadline).await {
                Ok(bytes) => return Ok(bytes),
                Err(error @ ClientError::Unavailable { .. }) => self.fall_back_to_origin(error, deadline).await?,
                Err(error) => self.refresh_after_move(error, deadline).await?,
            }
        }
    }

    async fn try_read(
        &self,
        offset: u64,
        length: usize,
        mode: ReadMode,
        deadline: Instant,
    ) -> Result<Bytes, ClientError> {
        let range = clip(self.size().await?, offset, length);
        let read = |span| self.read_part(span, mode, deadline);
        // No part is put together itself: blocks of an origin begin where the file's begin.
        self.reader.read_range(range, (self.block_size(), u64::MAX), deadline, read).await
    }

    /// All bytes of a span.
    async fn read_part(&self, span: Span, mode: ReadMode, deadline: Instant) -> Result<Bytes, ClientError> {
        if let Some(open) = self.block_to_read(span.index, deadline).await? {
            return self.read_block(&open, &span, mode, deadline).await;
        }
        let at = self.locate_unwritten(&span).await?;
        self.reader.read_part(at, span.length(), Owner::Reader, deadline, || format!("inode {}", self.inode)).await
    }

    async fn read_block(
        &self,
        open: &Arc<OpenBlock>,
        span: &Span,
        mode: ReadMode,
        deadline: Instant,
    ) -> Result<Bytes, ClientError> {
        if let Some(file) = open.file().cloned() {
            let (start, name) = (u64::from(span.bytes.start), || format!("inode {}", self.inode));
            let until = self.attempt_deadline(deadline, 1);
            match self.reader.read_local(file, start, span.length(), PastEnd::Zeros, until, name).await {
                Err(ClientError::Io(error)) => {
                    tracing::warn!(inode = self.inode, span.index, "a local block cannot be read: {error}");
                }
                read => return read,
            }
        }
        if mode == ReadMode::Buffered {
            let start = u64::from(span.index) * self.block_size();
            self.read_ahead_of(start + u64::from(span.bytes.start)..start + u64::from(span.bytes.end));
        }
        loop {
            let block = Arc::new(self.block_over_network(open, span, mode));
            let until = self.attempt_deadline(deadline, block.workers.len());
            let failure = match self.reader.read(&block, span, until).await {
                Ok(bytes) => return Ok(bytes),
                Err(error) => self.unavailable_if_lost(span.index, error),
            };
            if !failure.is_transient_at_worker() || !backoff::BLOCK.begin().wait_before(deadline).await {
                return Err(failure);
            }
        }
    }

    /// Until when an attempt lasts that begins now: each of its workers has its time, however long the layout, or what
    /// came before in the same read, was waited for.
    fn attempt_deadline(&self, deadline: Instant, workers: usize) -> Instant {
        deadline.max(Instant::now() + self.shared.worker_timeout() * workers as u32)
    }

    /// A block at its replicas, with what is buffered of it if that will do for a read of this span. What goes into
    /// buffers comes from the workers of the layout that the version is of, whichever of them the block is open at.
    fn block_over_network(&self, open: &OpenBlock, span: &Span, mode: ReadMode) -> ReplicatedBlock {
        let index = span.index;
        let buffered = |Known { layout, .. }: &mut Known| {
            let known = layout.block(index).filter(|known| known.generation == open.generation)?;
            let is_within = span.bytes.end <= block_length(layout.size(), self.block_size(), index);
            let will_do = mode == ReadMode::Buffered && is_within && self.may_buffer(layout);
            let version = self.reader.version().filter(|_| will_do)?;
            Some(self.replicated(layout, index, open.name.clone(), known.workers.clone(), version))
        };
        self.with_known(buffered).flatten().unwrap_or_else(|| ReplicatedBlock {
            id: id_of(&open.name),
            name: open.name.clone(),
            workers: open.workers(),
            length: self.block_length(),
            version: 0,
        })
    }

    fn replicated(
        &self,
        layout: &Layout,
        index: u32,
        name: BlockRef,
        workers: Vec<u64>,
        version: u64,
    ) -> ReplicatedBlock {
        let length = block_length(layout.size(), self.block_size(), index);
        ReplicatedBlock { id: id_of(&name), name, workers, length, version }
    }

    /// Whether what is read of the layout may be kept until the file is changed: somebody would tell.
    fn may_buffer(&self, layout: &Layout) -> bool {
        !self.mount.is_strict() && layout.is_committed() && self.kept.is_watched()
    }

    /// Reports a read over the network to the read-ahead, and starts what it asks for: of blocks, and only of those
    /// that no worker of this host has.
    fn read_ahead_of(&self, read: Range<u64>) {
        let pool = &self.shared.pool;
        let ahead = self.with_known(|Known { layout, .. }| {
            if !self.may_buffer(layout) || !self.behind.is_empty() {
                return None;
            }
            let wanted = self.reader.ahead_of(read, layout.size())?;
            let version = self.reader.begin_version();
            let pieces = spans(wanted, self.block_size(), REMOTE_PIECE_BYTES).filter_map(|span| {
                let known = layout.block(span.index)?;
                let is_remote = |worker: &u64| pool.known_route(*worker) == Route::Remote;
                let name = known.workers.iter().all(is_remote).then(|| self.name_of(span.index, known.generation))?;
                let block = self.replicated(layout, span.index, name, known.workers.clone(), version.number);
                Some((Arc::new(block), span))
            });
            Some((pieces.collect::<Vec<_>>(), version))
        });
        if let Some((pieces, version)) = ahead.flatten() {
            pieces.into_iter().for_each(|(block, span)| self.reader.read_ahead(block, span, &version));
        }
    }

    /// Where data, or a hole, begins from `offset` on: as lseek(2), to the block, and finer where it is on this host.
    /// `None` behind the end, and where no data follows.
    /// Bounded as [`Self::read`].
    pub async fn seek(&self, offset: u64, what: Seek) -> Result<Option<u64>, ClientError> {
        let deadline = Instant::now() + self.shared.timeout();
        let size = self.size().await?;
        if offset >= size {
            return Ok(None);
        }
        for span in spans(offset..size, self.block_size(), u64::MAX) {
            let start = u64::from(span.index) * self.block_size();
            let found = match self.block_to_read(span.index, deadline).await? {
                None => {
                    let origin_bytes = |known: &mut Known| known.layout.origin_bytes(span.index, self.block_size());
                    let bytes = self.use_known(origin_bytes).await?;
                    match what {
                        Seek::Data => (span.bytes.start < bytes).then_some(span.bytes.start),
                        Seek::Hole => Some(span.bytes.start.max(bytes)),
                    }
                }
                Some(open) => match open.file().cloned() {
                    None => (what == Seek::Data).then_some(span.bytes.start),
                    Some(file) => {
                        let from = span.bytes.start;
                        let sought = tokio::task::spawn_blocking(move || match what {
                            Seek::Data => seek_data(&file, from),
                            Seek::Hole => seek_hole(&file, from).map(Some),
                        });
                        sought.await.map_err(|_stopped| ClientError::Shutdown)??
                    }
                },
            };
            if let Some(found) = found.filter(|found| *found < span.bytes.end) {
                return Ok(Some(start + u64::from(found)));
            }
        }
        // The end of a file counts as a hole.
        Ok((what == Seek::Hole).then_some(size))
    }
}

pub(super) fn id_of(name: &BlockRef) -> BlockId {
    BlockId::of(name).unwrap_or_else(|| unreachable!("the content id was made here"))
}

fn clip(size: u64, offset: u64, length: usize) -> Range<u64> {
    let start = offset.min(size);
    start..start.saturating_add(length as u64).min(size)
}
