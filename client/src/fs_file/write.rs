//! Writing: to every replica of a block, in place; where a view has the block, to one that takes its place.

use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use bytes::Bytes;
use cavern_conf::{Failpoint, backoff, host};
use cavern_proto::chunk::chunks_touching;
use cavern_proto::data::{ReserveRequest, WriteRequest};
use cavern_proto::frame::MAX_WRITE_BYTES;
use futures::future::join_all;
use rustix::io::Errno;
use tokio::time::Instant;

use super::block::{OpenBlock, Replica, reservation};
use super::file::FsFile;
use super::state::Known;
use super::write_behind::{WRITE_BYTES, WriteBehindOutcome};
use super::write_log::WriteLog;
use crate::error::ClientError;
use crate::read::fetch::wire_range;
use crate::read::span::{Span, spans};

/// As much as ext4 has it.
pub(super) const FILE_BYTES_MAX: u64 = 1 << 44;
/// Bytes that are written to a descriptor by whoever has them; more are given to a thread that may block.
const WRITE_HERE_MAX: usize = 128 << 10;
/// A file is committed when it has become longer by so many blocks.
const UNCOMMITTED_BLOCKS: u64 = 2;

/// What became of something that was written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum WriteOutcome {
    Recorded,
    /// The block has other workers by now, or is about to: it is to be written once more.
    ReplicasChanged,
}

/// What is done to a range of a block.
#[derive(Clone, Debug)]
pub(super) enum BlockOp {
    Write(Bytes),
    Zero,
    /// The file ends where the range begins.
    Cut,
    /// Room is set aside; its bytes stay what they are.
    Allocate,
}

/// What is done to the file.
#[derive(Debug)]
pub(super) enum FileOp {
    /// These bytes, at this offset.
    Write(u64, Bytes),
    /// Zeros, to which the file grows.
    Hole(Range<u64>),
    /// Zeros, up to its end.
    Zero(Range<u64>),
    /// Room; the file grows to its end if `grow`.
    Allocate { range: Range<u64>, grow: bool },
}

impl FsFile {
    /// Writes without asking anybody, for event loops: where the room is reserved already, and every replica is on this
    /// host. `None` when that is not so, and nothing (or a part, with the same bytes) was written: use `write`.
    pub fn write_now(&self, offset: u64, bytes: &[u8]) -> Option<()> {
        // Without a lease it is for the workers to say what views have frozen.
        if !self.behind.is_drained() || !self.kept.is_watched() {
            return None;
        }
        let (_writing, _in_place) = (self.gate.try_read().ok()?, self.turns.in_place.try_read().ok()?);
        let end = end_of(offset, bytes.len()).ok()?;
        let parts = self.with_known(|known| {
            // What lies between the end and the offset may have to be zeroed; and blocks that the master may know are
            // held first.
            if offset > known.layout.size() || self.open_ref.exposes(&known.layout) {
                return None;
            }
            let first = spans(offset..end, self.block_size(), u64::MAX).next();
            if let Some(first) = first.filter(|first| !known.blocks.contains_key(&first.index)) {
                self.use_preallocated(known, first.index, &first.bytes);
            }
            let Known { layout, blocks, .. } = known;
            let part = |span: Span| {
                let open = blocks.get(&span.index).filter(|open| open.is_local() && open.has_room(&span.bytes))?;
                let is_fit = layout.accepts_at(span.index, open) && !self.is_frozen(open.generation);
                is_fit.then(|| (span, open.clone()))
            };
            spans(offset..end, self.block_size(), u64::MAX).map(part).collect::<Option<Vec<_>>>()
        });
        let parts = parts??;
        let mut rest = bytes;
        for (span, open) in &parts {
            let (part, after) = rest.split_at(span.length());
            for file in open.files() {
                file.write_all_at(part, u64::from(span.bytes.start)).ok()?;
            }
            open.streamed.wrote(part.len(), open.files(), &self.shared.runtime);
            rest = after;
        }
        Failpoint::WritePlaced.pass();
        self.reader.invalidate();
        let now = host::wall_ns();
        // What has changed meanwhile may want the bytes elsewhere, too.
        let written = self.with_known(|Known { layout, .. }| {
            let is_all = parts.iter().all(|(span, open)| layout.accepts_at(span.index, open));
            is_all.then(|| parts.iter().for_each(|(span, _)| layout.wrote(span.index, end, now)))
        })?;
        self.note();
        written
    }

    /// Writes all of `bytes` at `offset`. Bounded by `client.read_timeout`. After an error a part may have been
    /// written. What was written behind comes before it, and its failure is returned now.
    pub async fn write(&self, offset: u64, bytes: Bytes) -> Result<(), ClientError> {
        self.behind.drain_checked().await?;
        self.run_op(FileOp::Write(offset, bytes)).await
    }

    /// Takes bytes to be written behind, without waiting, for event loops: to one block, over the network, where room
    /// has been reserved. When `write_now` does not do.
    pub fn write_behind(self: &Arc<Self>, offset: u64, bytes: &[u8]) -> WriteBehindOutcome {
        if bytes.len() > WRITE_BYTES {
            return WriteBehindOutcome::Refused;
        }
        let Ok(_writing) = self.gate.try_read() else { return WriteBehindOutcome::Refused };
        let Ok(end) = end_of(offset, bytes.len()) else { return WriteBehindOutcome::Refused };
        let mut parts = spans(offset..end, self.block_size(), u64::MAX);
        let (Some(span), None) = (parts.next(), parts.next()) else { return WriteBehindOutcome::Refused };
        let is_fit = self.with_known(|Known { layout, blocks, .. }| {
            // What lies between the end and the offset may have to be zeroed.
            let size = self.end_in(layout);
            let has_room = blocks.get(&span.index).is_some_and(|open| {
                let is_fit = open.has_room(&span.bytes) && !open.is_local() && !self.is_frozen(open.generation);
                is_fit && layout.accepts_at(span.index, open)
            });
            // Blocks that the master may know are held first.
            offset <= size && has_room && !self.open_ref.exposes(layout)
        });
        if is_fit != Some(true) {
            return WriteBehindOutcome::Refused;
        }
        let (inode, count) = (self.inode, &self.shared.pieces);
        let log = self.shared.metadata.journal().map(|journal| WriteLog { journal, inode, count });
        let (offer, begins) = self.behind.offer(&self.shared.behind, span.index, offset, bytes, log);
        if begins {
            let content = Arc::clone(self);
            self.shared.runtime.spawn(async move { content.send_behind().await });
        }
        offer
    }

    /// Writes all of `bytes` at `offset`, behind if they can be taken.
    ///
    /// # Errors
    /// Those of [`Self::write`].
    pub async fn write_soon(self: &Arc<Self>, offset: u64, bytes: Bytes) -> Result<(), ClientError> {
        loop {
            match self.write_behind(offset, &bytes) {
                WriteBehindOutcome::Taken => return Ok(()),
                WriteBehindOutcome::Full => self.behind.moved_on().await,
                WriteBehindOutcome::Refused => return self.write(offset, bytes).await,
            }
        }
    }

    async fn send_behind(&self) {
        while let Some((offset, bytes, noted)) = self.behind.next() {
            let length = bytes.len();
            if let Err(error) = self.run_op(FileOp::Write(offset, bytes)).await {
                tracing::debug!(inode = self.inode, offset, length, "what was written behind fails: {error}");
                self.behind.failed(error);
            }
            // Before anything that is written later: what is in the journal would come after that.
            if let Some(noted) = noted {
                noted.forget();
            }
            self.shared.stats.write_behind_requests.inc();
            self.shared.stats.write_behind_bytes.inc_by(length as u64);
        }
    }

    /// Bounded by `client.read_timeout`. Done once more when it meets with blocks that are at lost workers only, but in
    /// the bucket as well. No cut by this client runs meanwhile.
    pub(super) async fn run_op(&self, op: FileOp) -> Result<(), ClientError> {
        let deadline = Instant::now() + self.shared.timeout();
        self.prepare_to_write(deadline).await?;
        loop {
            let done = {
                let _writing = self.gate.read().await;
                Box::pin(self.run_once(&op, deadline)).await
            };
            match done {
                Err(error @ ClientError::Unavailable { .. }) => self.fall_back_to_origin(error, deadline).await?,
                done => return done,
            }
        }
    }

    async fn run_once(&self, op: &FileOp, deadline: Instant) -> Result<(), ClientError> {
        match op {
            FileOp::Write(offset, bytes) => self.write_parts(*offset, bytes, deadline).await,
            FileOp::Hole(range) => {
                let size = self.written_size().await?;
                self.zero_behind_end(range.end, deadline).await?;
                self.zero_range(range.start..range.end.min(size), deadline).await?;
                self.use_known(|known| known.layout.grew(range.end, host::wall_ns())).await?;
                self.note();
                self.commit_growth().await
            }
            FileOp::Zero(range) => {
                let size = self.written_size().await?;
                self.zero_range(range.start..range.end.min(size), deadline).await
            }
            FileOp::Allocate { range, grow } => self.allocate_range(range, *grow, deadline).await,
        }
    }

    async fn write_parts(&self, offset: u64, bytes: &Bytes, deadline: Instant) -> Result<(), ClientError> {
        let end = end_of(offset, bytes.len())?;
        self.zero_behind_end(offset, deadline).await?;
        let mut at = 0;
        for span in spans(offset..end, self.block_size(), u64::from(MAX_WRITE_BYTES)) {
            let part = bytes.slice(at..at + span.length());
            at += span.length();
            self.apply_to_block(span.index, &span.bytes, BlockOp::Write(part), offset + at as u64, deadline).await?;
            self.commit_growth().await?;
        }
        Ok(())
    }

    /// The master may refuse that the file grows (a quota): a caller that writes much gets the error now, not at the
    /// end.
    async fn commit_growth(&self) -> Result<(), ClientError> {
        if self.use_known(|known| known.layout.growth()).await? >= UNCOMMITTED_BLOCKS * self.block_size() {
            self.commit_written().await?;
        }
        Ok(())
    }

    /// Makes a range of the file zeros; the file reaches at least to its end then.
    pub(super) async fn write_hole(&self, range: Range<u64>) -> Result<(), ClientError> {
        self.behind.drain().await;
        self.run_op(FileOp::Hole(range)).await
    }

    /// Makes a range of the file zeros, up to its end; what lies behind it is not touched.
    pub async fn zero(&self, range: Range<u64>) -> Result<(), ClientError> {
        self.behind.drain().await;
        self.run_op(FileOp::Zero(range)).await
    }

    /// Makes room for a range; the file grows to its end if `grow`.
    pub async fn allocate(&self, range: Range<u64>, grow: bool) -> Result<(), ClientError> {
        self.behind.drain().await;
        if range.end > FILE_BYTES_MAX {
            return Err(too_large());
        }
        self.run_op(FileOp::Allocate { range, grow }).await
    }

    async fn allocate_range(&self, range: &Range<u64>, grow: bool, deadline: Instant) -> Result<(), ClientError> {
        if grow {
            self.zero_behind_end(range.end, deadline).await?;
        }
        for span in spans(range.clone(), self.block_size(), u64::MAX) {
            while let Err(failure) = self.try_block(span.index, &span.bytes, &BlockOp::Allocate).await {
                self.wait_after(span.index, failure, deadline).await?;
            }
            // The room is to be committed.
            self.use_known(|known| known.layout.wrote(span.index, 0, host::wall_ns())).await?;
        }
        if grow && range.end > self.written_size().await? {
            self.use_known(|known| known.layout.grew(range.end, host::wall_ns())).await?;
        }
        self.note();
        Ok(())
    }

    /// What lies behind the end of the file, in its last block, is of no content, and may be what was cut off once: it
    /// becomes zeros before the file reaches to `to`. A file that is empty may have a block, too.
    pub(super) async fn zero_behind_end(&self, to: u64, deadline: Instant) -> Result<(), ClientError> {
        let size = self.written_size().await?;
        let block = size / self.block_size();
        let end = to.min((block + 1) * self.block_size());
        let ends_with_block = size > 0 && size.is_multiple_of(self.block_size());
        if ends_with_block || end <= size { Ok(()) } else { self.zero_range(size..end, deadline).await }
    }

    async fn zero_range(&self, range: Range<u64>, deadline: Instant) -> Result<(), ClientError> {
        for span in spans(range, self.block_size(), u64::MAX) {
            let is_zero = |Known { layout, .. }: &mut Known| {
                let bytes = layout.origin_bytes(span.index, self.block_size());
                layout.block(span.index).is_none() && bytes <= span.bytes.start
            };
            if self.use_known(is_zero).await? {
                continue;
            }
            self.apply_to_block(span.index, &span.bytes, BlockOp::Zero, 0, deadline).await?;
        }
        Ok(())
    }

    /// Does it at every replica, and once more where that turns out not to be all that the block has; the file reaches
    /// at least to `end` then. Replicas that fail are given up as long as one is left.
    async fn apply_to_block(
        &self,
        index: u32,
        at: &Range<u32>,
        op: BlockOp,
        end: u64,
        deadline: Instant,
    ) -> Result<(), ClientError> {
        loop {
            let done = match self.try_block(index, at, &op).await {
                Ok((generation, workers)) => {
                    if matches!(op, BlockOp::Write(_)) {
                        Failpoint::WritePlaced.pass();
                    }
                    self.record_write(index, generation, &workers, end).await
                }
                Err(error) => Err(error),
            };
            match done {
                Ok(WriteOutcome::Recorded) => return Ok(()),
                Ok(WriteOutcome::ReplicasChanged) if Instant::now() < deadline => {}
                Ok(WriteOutcome::ReplicasChanged) => return Err(ClientError::BlockHeld { inode: self.inode, index }),
                Err(failure) => self.wait_after(index, failure, deadline).await?,
            }
        }
    }

    /// Waits a moment when another attempt may go better.
    pub(super) async fn wait_after(
        &self,
        index: u32,
        failure: ClientError,
        deadline: Instant,
    ) -> Result<(), ClientError> {
        if failure.is_version_gone() {
            return self.refresh_after_move(failure, deadline).await;
        }
        let failure = self.unavailable_if_lost(index, failure);
        if matches!(failure, ClientError::BlockHeld { .. }) && Instant::now() + self.shared.timeout() / 2 >= deadline {
            self.give_up_copy(index).await;
        }
        let no_space = failure.errno() == Errno::NOSPC.raw_os_error();
        let is_held = matches!(failure, ClientError::BlockHeld { .. }) || failure.is_frozen();
        let waits = no_space || failure.is_transient_at_worker() || is_held;
        let pauses = if no_space { backoff::SPACE } else { backoff::BLOCK };
        if waits && pauses.begin().wait_before(deadline).await { Ok(()) } else { Err(failure) }
    }

    /// A write does not fail for a copy that takes long: the copy is given up, and made again later.
    async fn give_up_copy(&self, index: u32) {
        match self.use_known(|known| known.layout.give_up_copy(index)).await {
            Ok(true) => {}
            Ok(false) => return,
            Err(error) => return tracing::debug!(inode = self.inode, index, "the block stays held: {error}"),
        }
        tracing::info!(inode = self.inode, index, "a write does not wait any longer for the copy of its block");
        // The blocks are committed even if the file may not grow.
        if let Err(error) = self.commit_in_background().await {
            tracing::debug!(inode = self.inode, index, "the copy could not be given up: {error}");
        }
    }

    /// Notes that these workers have what was written, if that is all workers of the block. What was given up of it the
    /// master knows before that: no write is acknowledged while a replica that lacks it counts as one.
    async fn record_write(
        &self,
        index: u32,
        generation: u32,
        workers: &[u64],
        end: u64,
    ) -> Result<WriteOutcome, ClientError> {
        loop {
            let look = |Known { layout, .. }: &mut Known| {
                if layout.accepts(index, generation, workers) {
                    layout.wrote(index, end, host::wall_ns());
                    return Some(WriteOutcome::Recorded);
                }
                (!layout.is_urgent(index)).then_some(WriteOutcome::ReplicasChanged)
            };
            match self.use_known(look).await? {
                Some(taken) => {
                    self.note();
                    return Ok(taken);
                }
                None => self.commit_written().await?,
            }
        }
    }

    /// The block's generation, and the workers where it was done.
    pub(super) async fn try_block(
        &self,
        index: u32,
        at: &Range<u32>,
        op: &BlockOp,
    ) -> Result<(u32, Vec<u64>), ClientError> {
        let written = match op {
            BlockOp::Write(bytes) => Some(bytes.clone()),
            BlockOp::Zero | BlockOp::Cut => Some(Bytes::new()),
            BlockOp::Allocate => None,
        };
        // When it is known who has it: whether it has failed or not, a part may be in its place.
        let _ended = self.reader.invalidate_on_drop();
        let open = self.block_to_write(index, at, written.as_ref()).await?;
        self.apply_in_place(index, &open, at, op).await
    }

    /// Applies an operation to all replicas of a block that is open to be written, unless a view has frozen it since.
    pub(super) async fn apply_in_place(
        &self,
        index: u32,
        open: &OpenBlock,
        at: &Range<u32>,
        op: &BlockOp,
    ) -> Result<(u32, Vec<u64>), ClientError> {
        let _in_place = self.turns.in_place.read().await;
        if self.is_frozen(open.generation) {
            return Err(ClientError::BlockHeld { inode: self.inode, index });
        }
        let results = join_all(open.replicas.iter().map(|replica| self.apply_to_replica(open, replica, at, op))).await;
        if let BlockOp::Write(bytes) = op {
            open.streamed.wrote(bytes.len(), open.files(), &self.shared.runtime);
        }
        let (mut written, mut failed, mut failure) = (Vec::new(), Vec::new(), None);
        for (replica, result) in open.replicas.iter().zip(results) {
            match result {
                Ok(()) => written.push(replica.worker),
                Err(error) => {
                    tracing::debug!(inode = self.inode, index, worker = replica.worker, "writing failed: {error}");
                    failed.push(replica.worker);
                    failure = failure.filter(ClientError::is_frozen).or(Some(error));
                }
            }
        }
        let Some(failure) = failure else { return Ok((open.generation, written)) };
        if written.is_empty() || failure.is_frozen() || failure.errno() == Errno::NOSPC.raw_os_error() {
            return Err(failure);
        }
        self.give_up_replicas(index, open.generation, &failed);
        Ok((open.generation, written))
    }

    async fn apply_to_replica(
        &self,
        open: &OpenBlock,
        replica: &Replica,
        at: &Range<u32>,
        op: &BlockOp,
    ) -> Result<(), ClientError> {
        let wait = self.shared.worker_timeout();
        let payload = match (op, &replica.file) {
            // Into the page cache: less than handing it to another thread costs.
            (BlockOp::Write(bytes), Some(file)) if bytes.len() <= WRITE_HERE_MAX => {
                return file.write_all_at(bytes, u64::from(at.start)).map_err(ClientError::from);
            }
            (BlockOp::Write(bytes), Some(file)) => {
                let (file, bytes, offset) = (Arc::clone(file), bytes.clone(), u64::from(at.start));
                let written = tokio::task::spawn_blocking(move || file.write_all_at(&bytes, offset)).await;
                return written.map_err(|_stopped| ClientError::Shutdown)?.map_err(ClientError::from);
            }
            (BlockOp::Write(bytes), None) => bytes.clone(),
            (BlockOp::Zero | BlockOp::Cut, _) => Bytes::new(),
            (BlockOp::Allocate, _) => {
                let request = ReserveRequest { allocate: true, ..reservation(&open.name, at) };
                let reserving = self.shared.pool.reserve(replica.worker, request, wait);
                let reserved = self.asking(replica.worker, reserving).await?;
                open.reported.set(reserved.allocated);
                return self.same(open, replica, reserved.incarnation);
            }
        };
        let mut request = WriteRequest { block: Some(open.name.clone()), offset: at.start, ..WriteRequest::default() };
        if let BlockOp::Zero | BlockOp::Cut = op {
            request.offset = 0;
            match op {
                BlockOp::Cut => request.cut = Some(wire_range(at)),
                _ => request.zero = vec![wire_range(at)],
            }
            // The room of what is zeroed wholly is given back.
            let mut reserved = open.reserved.lock();
            chunks_touching(at.start, at.len() as u32).for_each(|chunk| reserved.remove(chunk));
        }
        let writing = self.shared.pool.write(replica.worker, request, payload, wait);
        let written = self.asking(replica.worker, writing).await?;
        open.reported.set(written.allocated);
        self.same(open, replica, written.incarnation)
    }

    /// Whether the worker has done it in the file that was meant.
    fn same(&self, open: &OpenBlock, replica: &Replica, incarnation: u64) -> Result<(), ClientError> {
        if incarnation == replica.incarnation { Ok(()) } else { Err(self.lost(replica.worker, open.name.index)) }
    }
}

pub(super) fn end_of(offset: u64, length: usize) -> Result<u64, ClientError> {
    offset.checked_add(length as u64).filter(|end| *end <= FILE_BYTES_MAX).ok_or_else(too_large)
}

pub(super) fn too_large() -> ClientError {
    let reason = format!("a file has {FILE_BYTES_MAX} bytes at most");
    ClientError::Refused { errno: Errno::FBIG.raw_os_error(), reason }
}
