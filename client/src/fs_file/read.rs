//! Reading: holes are zeros, blocks are read through descriptors or over the network.

use std::ops::Range;
use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use cavern_conf::backoff;
use cavern_net::NetError;
use cavern_proto::data::{Status, read_request};
use tokio::time::Instant;

use super::FsFile;
use super::block::{OpenBlock, read_blocking, seek_data, seek_hole};
use crate::error::ClientError;
use crate::read::fetch::{check_status, only_item, wire_range};
use crate::read::span::{Span, spans};
use crate::stages::Stage;

/// What lseek(2) looks for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Seek {
    Data,
    Hole,
}

impl FsFile {
    /// Bytes of the file, asking the master where that is not known, with all that was written.
    pub async fn size(&self) -> Result<u64, ClientError> {
        self.behind.drain().await;
        self.written_size().await
    }

    /// The same with what is at its workers by now.
    pub(super) async fn written_size(&self) -> Result<u64, ClientError> {
        self.use_layout(|layout, _| layout.size()).await
    }

    /// Reads without waiting, for event loops: holes, and what is in the page cache of this host. `None` when that is
    /// not possible for the whole range: use `read`. Fewer bytes than asked only at the end of the file.
    pub fn read_now(&self, offset: u64, buffer: &mut [u8]) -> Option<usize> {
        if !self.behind.is_empty() {
            return None;
        }
        let parts = self.with_layout(|layout, blocks| {
            let range = clip(layout.size(), offset, buffer.len());
            let part = |span: Span| match (blocks.get(&span.index), layout.block(span.index)) {
                (Some(open), _) => Some((span, Some(open.clone()), 0)),
                (None, None) => {
                    let bytes = layout.origin_bytes(span.index, self.block_size());
                    let bytes = bytes.clamp(span.bytes.start, span.bytes.end) - span.bytes.start;
                    Some((span, None, bytes as usize))
                }
                (None, Some(_)) => None,
            };
            spans(range, self.block_size(), u64::MAX).map(part).collect::<Option<Vec<_>>>()
        });
        let (mut done, mut described) = (0, 0);
        for (span, block, origin_bytes) in parts?? {
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
            if !of_origin.is_empty() && self.known_origin()?.read_now(start, of_origin)? < origin_bytes {
                return None;
            }
        }
        if described > 0 {
            self.shared.stats.read_by_descriptor(described);
        }
        Some(done)
    }

    /// Reads `length` bytes at `offset`, fewer only at the end of the file. Bounded by `client.read_timeout`.
    pub async fn read(&self, offset: u64, length: usize) -> Result<Bytes, ClientError> {
        let deadline = Instant::now() + self.shared.timeout;
        loop {
            match self.try_read(offset, length, deadline).await {
                Ok(bytes) => return Ok(bytes),
                Err(error @ ClientError::Unavailable { .. }) => self.fall_back_to_origin(error, deadline).await?,
                Err(error) => self.refresh_after_move(error, deadline).await?,
            }
        }
    }

    async fn try_read(&self, offset: u64, length: usize, deadline: Instant) -> Result<Bytes, ClientError> {
        let range = clip(self.size().await?, offset, length);
        let length = range.end - range.start;
        let mut parts = spans(range, self.block_size(), u64::MAX).peekable();
        let Some(first) = parts.next() else { return Ok(Bytes::new()) };
        if parts.peek().is_none() {
            return self.read_part(&first, deadline).await;
        }
        // No part is put together itself: blocks of an origin begin where the file's begin.
        let charge = self.shared.files.charge_joined(length, deadline).await?;
        let mut whole = Vec::with_capacity(length as usize);
        for span in std::iter::once(first).chain(parts) {
            whole.extend_from_slice(&self.read_part(&span, deadline).await?);
        }
        Ok(charge.hold(whole))
    }

    /// All bytes of a span.
    async fn read_part(&self, span: &Span, deadline: Instant) -> Result<Bytes, ClientError> {
        if let Some(open) = self.block_to_read(span.index, deadline).await? {
            return self.read_block(&open, span, deadline).await;
        }
        let start = u64::from(span.index) * self.block_size();
        let range = start + u64::from(span.bytes.start)..start + u64::from(span.bytes.end);
        let bytes = self.read_origin(range).await?;
        if bytes.len() == span.length() {
            return Ok(bytes);
        }
        if bytes.is_empty() {
            let charge = self.shared.files.charge(span.length() as u64, deadline).await?;
            return Ok(charge.hold(vec![0; span.length()]));
        }
        // The end of the origin. Nobody waits for memory who holds some.
        let mut padded = BytesMut::from(bytes);
        padded.resize(span.length(), 0);
        Ok(padded.freeze())
    }

    async fn read_block(&self, open: &Arc<OpenBlock>, span: &Span, deadline: Instant) -> Result<Bytes, ClientError> {
        let charge = self.shared.files.charge(span.length() as u64, deadline).await?;
        let stats = &self.shared.stats;
        if let Some(file) = open.file().cloned() {
            let mut buffer = vec![0; span.length()];
            if open.read_now(span.bytes.start, &mut buffer) {
                stats.read_by_descriptor(buffer.len());
                return Ok(charge.hold(buffer));
            }
            let offset = span.bytes.start;
            let disk = Stage::Disk.begin();
            let read = tokio::task::spawn_blocking(move || read_blocking(&file, offset, buffer)).await;
            drop(disk);
            match read {
                Ok(Ok(bytes)) => {
                    stats.read_by_descriptor(bytes.len());
                    return Ok(charge.hold(bytes));
                }
                Ok(Err(error)) => {
                    tracing::warn!(inode = self.inode, span.index, "a local block cannot be read: {error}")
                }
                Err(_stopped) => return Err(ClientError::Shutdown),
            }
        }
        let _worker = Stage::Network.begin();
        loop {
            let mut failure = None;
            for replica in &open.replicas {
                match self.asking(replica.worker, self.read_remote(replica.worker, open, &span.bytes)).await {
                    Ok(bytes) => return Ok(charge.hold(bytes)),
                    Err(error) => failure = Some(error),
                }
            }
            let failure = self.unavailable_if_lost(span.index, failure.unwrap_or(ClientError::NoWorkers));
            if !is_transient(&failure) || !backoff::BLOCK.begin().wait_before(deadline).await {
                return Err(failure);
            }
        }
    }

    async fn read_remote(&self, worker: u64, open: &OpenBlock, bytes: &Range<u32>) -> Result<Bytes, ClientError> {
        let range = wire_range(bytes);
        let item = read_request::Item { block: Some(open.name.clone()), range: Some(range), part: None };
        let (reply, payload) = self.shared.pool.read(worker, vec![item], self.shared.worker_timeout).await?;
        let item = only_item(reply.items, worker)?;
        check_status(worker, item.status(), &item.message)?;
        if payload.len() != bytes.len() {
            let message = "the answer has fewer bytes than were asked for".to_owned();
            return Err(ClientError::Net(NetError::WorkerStatus { worker, status: Status::IoError, message }));
        }
        self.shared.stats.remote_reads.inc();
        self.shared.stats.remote_bytes.inc_by(payload.len() as u64);
        Ok(payload)
    }

    /// Where data, or a hole, begins from `offset` on: as lseek(2), to the block, and finer where it is on this host.
    /// `None` behind the end, and where no data follows.
    /// Bounded as [`Self::read`].
    pub async fn seek(&self, offset: u64, what: Seek) -> Result<Option<u64>, ClientError> {
        let deadline = Instant::now() + self.shared.timeout;
        let size = self.size().await?;
        if offset >= size {
            return Ok(None);
        }
        for span in spans(offset..size, self.block_size(), u64::MAX) {
            let start = u64::from(span.index) * self.block_size();
            let found = match self.block_to_read(span.index, deadline).await? {
                None => {
                    let has_bytes =
                        |layout: &mut super::Layout, _: &mut _| layout.origin_bytes(span.index, self.block_size());
                    let bytes = self.use_layout(has_bytes).await?;
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
                            Seek::Hole => seek_hole(&file, from),
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

/// Whether a failure may pass soon: the worker could not be reached, or cannot now, but is not lost; or the bucket
/// could not.
pub(super) fn is_transient(failure: &ClientError) -> bool {
    match failure {
        ClientError::Net(NetError::WorkerConnection { .. } | NetError::WorkerDeadline { .. }) => true,
        ClientError::Net(NetError::WorkerStatus { status, .. }) => {
            matches!(status, Status::Overloaded | Status::UfsUnavailable)
        }
        _ => false,
    }
}

fn clip(size: u64, offset: u64, length: usize) -> Range<u64> {
    let start = offset.min(size);
    start..start.saturating_add(length as u64).min(size)
}
