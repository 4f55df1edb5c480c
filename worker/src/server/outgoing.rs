//! What a connection has still to send, in order.
//!
//! Small answers are laid one behind the other in one buffer, payload included, so that a burst of them is one system
//! call. An answer with descriptors is a segment of its own, because they are attached to its first byte. So is one
//! whose payload the kernel takes from a block's file: in the clear nobody else has to see the bytes, and the index has
//! checksums of them.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, IoSlice};
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::Duration;

use cavern_net::Socket;
use cavern_proto::data::Failure;
use cavern_proto::frame::{FrameHeader, FrameKind, HEADER_BYTES};
use prost::Message;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tracing::debug;

use super::frame_buffer::FrameBuffer;
use crate::memory::Share;
use crate::request_error::Refusal;
use crate::store::{Block, CachedBlock};

/// A segment that has reached this size gets no further answers appended.
const SEGMENT_BYTES: usize = 256 << 10;
/// A buffer of at most this size is kept for the next answers, until the connection rests.
const SPARE_BYTES: usize = (1 << 20) + SEGMENT_BYTES;
/// Read at a time of what has left the page cache.
const PIECE_BYTES: u32 = 256 << 10;
/// For so long what was in the page cache is taken to be there still.
const STAYS: Duration = Duration::from_millis(100);
/// Segments written by one system call at most.
const MAX_SLICES: usize = 16;

/// A file whose descriptor goes with an answer.
#[derive(Debug)]
pub(super) enum PassedFile {
    /// To be read only.
    Block(Block),
    /// To be read and written.
    File(Arc<File>),
}

impl AsFd for PassedFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Block(block) => block.descriptor(),
            Self::File(file) => file.as_fd(),
        }
    }
}

/// Bytes of a block that are sent without being read, out of its file.
#[derive(Debug)]
pub(super) struct FilePayload {
    pub block: Arc<CachedBlock>,
    /// As offsets in the block.
    pub bytes: Range<u32>,
    /// When all of them were last seen in the page cache.
    pub seen: Instant,
}

/// An answer, encoded; and what must live until it is sent.
#[derive(Debug, Default)]
pub(super) struct Segment {
    pub bytes: FrameBuffer,
    /// What follows them.
    pub payload: Option<FilePayload>,
    /// Files whose descriptors go with the first byte.
    pub descriptors: Vec<PassedFile>,
    /// Share of the memory budget.
    pub memory: Option<Share>,
}

impl Segment {
    /// A segment of one frame without payload.
    pub(super) fn of(kind: FrameKind, request_id: u64, message: &impl Message) -> Self {
        let mut segment = Self::default();
        append_frame(&mut segment.bytes, kind, request_id, message, 0);
        segment
    }

    /// The answer to a request, in a message that can say why it is refused.
    pub(super) fn answer<R: Message + From<Refusal>>(
        kind: FrameKind,
        request_id: u64,
        result: Result<R, Refusal>,
    ) -> Self {
        Self::of(kind, request_id, &result.unwrap_or_else(R::from))
    }

    /// The answer to a request that cannot be served at all.
    pub(super) fn failure(request_id: u64, refusal: Refusal) -> Self {
        Self::of(FrameKind::Failure, request_id, &Failure::from(refusal))
    }

    /// Bytes that it takes on the wire.
    fn len(&self) -> usize {
        self.bytes.len() + self.payload.as_ref().map_or(0, |payload| payload.bytes.len())
    }

    /// What is left of the payload in a file, when so many bytes are sent and nothing else is left.
    fn rest_of_payload(&self, sent: usize) -> Option<(&CachedBlock, Range<u32>)> {
        let FilePayload { block, bytes, .. } = self.payload.as_ref()?;
        // A payload is no longer than a block.
        let of_payload = sent.checked_sub(self.bytes.len())? as u32;
        Some((&**block, bytes.start + of_payload..bytes.end))
    }

    /// Begins to read what comes next of the payload in a file, if some has left the page cache since it was seen: a
    /// client may have taken nothing for long, and all connections of the thread would wait for the disk.
    fn read_if_gone(&mut self, sent: usize) -> Option<JoinHandle<io::Result<Vec<u8>>>> {
        let (_, rest) = self.rest_of_payload(sent)?;
        let payload = self.payload.as_mut().filter(|payload| payload.seen.elapsed() > STAYS)?;
        if payload.block.can_be_sent(&rest) {
            payload.seen = Instant::now();
            return None;
        }
        let block = payload.block.clone();
        Some(tokio::task::spawn_blocking(move || {
            let mut bytes = vec![0; rest.len().min(PIECE_BYTES as usize)];
            block.read(rest.start, &mut bytes).map(|()| bytes)
        }))
    }
}

/// Appends header and message; the payload is to follow.
pub(super) fn append_frame(
    bytes: &mut FrameBuffer,
    kind: FrameKind,
    request_id: u64,
    message: &impl Message,
    payload_bytes: usize,
) {
    // Messages are bounded by the number of items in a request, payloads by what a connection may have in flight.
    let message_bytes = u32::try_from(message.encoded_len()).unwrap_or(u32::MAX);
    let payload_bytes = u32::try_from(payload_bytes).unwrap_or(u32::MAX);
    bytes.reserve(HEADER_BYTES + message_bytes as usize);
    bytes.extend(&FrameHeader { kind, request_id, message_bytes, payload_bytes }.encode());
    let mut into = bytes.append(message_bytes as usize);
    message.encode_raw(&mut into);
}

#[derive(Debug)]
pub(super) struct Outgoing {
    segments: VecDeque<Segment>,
    /// Bytes of the first segment that are sent.
    sent: usize,
    bytes: usize,
    /// The socket has not yet taken all that was given to it, as [`Socket::has_unsent`] says.
    has_unsent: bool,
    /// What comes next of the first segment, while it is read. It takes nothing of the memory budget: what has a share
    /// of that may wait behind it.
    reading: Option<JoinHandle<io::Result<Vec<u8>>>>,
    /// A buffer for the next answers, and its share of what connections may keep.
    spare: FrameBuffer,
    spare_share: Option<OwnedSemaphorePermit>,
    spares: Arc<Semaphore>,
    /// When something was last sent, or the queue last became non-empty.
    progress: Instant,
}

impl Outgoing {
    /// `spares`: what all connections may keep of buffers, in KiB.
    pub(super) fn new(spares: Arc<Semaphore>) -> Self {
        Self {
            segments: VecDeque::new(),
            sent: 0,
            bytes: 0,
            has_unsent: false,
            reading: None,
            spare: FrameBuffer::default(),
            spare_share: None,
            spares,
            progress: Instant::now(),
        }
    }

    /// Bytes that wait.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Whether all is sent, as of the last [`Self::flush`].
    pub(super) fn is_empty(&self) -> bool {
        self.segments.is_empty() && !self.has_unsent
    }

    /// Whether something waits for the socket to take more.
    pub(super) fn wants_socket(&self) -> bool {
        !self.is_empty() && self.reading.is_none()
    }

    /// How long nothing could be sent although something waits.
    pub(super) fn stalled(&self) -> Duration {
        if self.is_empty() { Duration::ZERO } else { self.progress.elapsed() }
    }

    pub(super) fn push(&mut self, segment: Segment) {
        if self.is_empty() {
            self.progress = Instant::now();
        }
        self.bytes += segment.len();
        self.segments.push_back(segment);
    }

    /// Lets `write` append to the last segment, or to a new one; what it returns as an error leaves nothing behind.
    pub(super) fn append<E>(
        &mut self,
        memory: Option<Share>,
        write: impl FnOnce(&mut FrameBuffer) -> Result<(), E>,
    ) -> Result<(), E> {
        let joins = self.segments.back().is_some_and(|last| {
            last.descriptors.is_empty() && last.payload.is_none() && last.bytes.len() < SEGMENT_BYTES
        });
        if !joins {
            self.spare_share = None;
            let bytes = std::mem::take(&mut self.spare);
            self.push(Segment { bytes, ..Segment::default() });
        }
        let Some(last) = self.segments.back_mut() else { return Ok(()) };
        let before = last.bytes.len();
        let result = write(&mut last.bytes);
        if result.is_err() {
            last.bytes.truncate(before);
        } else if let Some(more) = memory {
            match &mut last.memory {
                Some(held) => held.merge(more),
                None => last.memory = Some(more),
            }
        }
        self.bytes += last.bytes.len() - before;
        if let Some(empty) = self.segments.pop_back_if(|last| last.bytes.is_empty()) {
            self.keep_spare(empty.bytes);
        }
        result
    }

    /// Sends until all is sent, the socket takes no more, or [`Self::take_read`] brings what comes next. In a runtime.
    ///
    /// # Errors
    /// Those of the socket, but for `WouldBlock`.
    pub(super) fn flush(&mut self, socket: &Socket) -> io::Result<()> {
        let flushed = self.flush_segments(socket).and_then(|()| socket.flush());
        self.has_unsent = socket.has_unsent();
        match flushed {
            Ok(0) => Ok(()),
            Ok(_) => {
                self.progress = Instant::now();
                Ok(())
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(()),
            Err(error) => Err(error),
        }
    }

    fn flush_segments(&mut self, socket: &Socket) -> io::Result<()> {
        while !self.is_reading(socket)
            && let Some(first) = self.segments.front()
        {
            let in_file = first.rest_of_payload(self.sent);
            let is_in_file = in_file.is_some();
            let written = if let Some((block, rest)) = in_file {
                socket.try_send_file(block.descriptor(), u64::from(rest.start), rest.len())
            } else if self.sent == 0 && !first.descriptors.is_empty() {
                let descriptors: Vec<BorrowedFd<'_>> = first.descriptors.iter().map(PassedFile::as_fd).collect();
                socket.try_write_with(&first.bytes, &descriptors)
            } else {
                let mut slices = [IoSlice::new(&[]); MAX_SLICES];
                let (mut count, mut payload_follows) = (0, false);
                let plain = |(position, segment): &(usize, &Segment)| *position == 0 || segment.descriptors.is_empty();
                for (position, segment) in self.segments.iter().enumerate().take_while(plain).take(MAX_SLICES) {
                    slices[count] = IoSlice::new(&segment.bytes[if position == 0 { self.sent } else { 0 }..]);
                    count += 1;
                    payload_follows = segment.payload.is_some();
                    if payload_follows {
                        break;
                    }
                }
                let slices = &slices[..count];
                if payload_follows { socket.try_write_more(slices) } else { socket.try_write(slices) }
            };
            match written {
                Ok(0) if is_in_file => self.end_in_zeros(),
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(written) => self.advance(written),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Somebody has cut off the file whose turn it is, and the length of the answer is sent already. What is missing
    /// goes as zeros: they do not match the checksums, and the client reports them.
    fn end_in_zeros(&mut self) {
        let missing = self.segments.front().map_or(0, |first| first.len() - self.sent);
        self.send_instead(vec![0; missing]);
    }

    /// Has these bytes go for the next ones of the first segment's payload.
    fn send_instead(&mut self, bytes: Vec<u8>) {
        let Some(first) = self.segments.front_mut() else { return };
        let done = self.sent - first.bytes.len() + bytes.len();
        first.payload = first.payload.take().filter(|payload| payload.bytes.len() > done).map(|mut payload| {
            payload.bytes.start += done as u32;
            payload
        });
        first.bytes = bytes.into();
        self.sent = 0;
    }

    /// Whether what comes next is being read; begins to where it has to be. Not for a client that takes nothing: it
    /// would have the memory.
    fn is_reading(&mut self, socket: &Socket) -> bool {
        if self.reading.is_none()
            && socket.may_send_file()
            && let Some(first) = self.segments.front_mut()
        {
            self.reading = first.read_if_gone(self.sent);
        }
        self.reading.is_some()
    }

    /// Waits for what is read, and has it go next; for ever while nothing is. Cancel-safe.
    pub(super) async fn take_read(&mut self) {
        let Some(reading) = &mut self.reading else { return std::future::pending().await };
        let read = reading.await.unwrap_or_else(|error| Err(io::Error::other(error)));
        self.reading = None;
        self.progress = Instant::now();
        match read {
            Ok(bytes) => self.send_instead(bytes),
            Err(error) => {
                debug!(%error, "a block that is being sent cannot be read");
                self.end_in_zeros();
            }
        }
    }

    fn advance(&mut self, written: usize) {
        self.progress = Instant::now();
        self.bytes -= written;
        self.sent += written;
        while let Some(first) = self.segments.front().filter(|first| self.sent >= first.len()) {
            self.sent -= first.len();
            if let Some(done) = self.segments.pop_front() {
                self.keep_spare(done.bytes);
            }
        }
    }

    /// Gives back the buffer that is kept for the next answers, when there are none for now.
    pub(super) fn rest(&mut self) {
        if self.segments.is_empty() {
            self.spare = FrameBuffer::default();
            self.spare_share = None;
        }
    }

    fn keep_spare(&mut self, mut bytes: FrameBuffer) {
        if bytes.capacity() <= self.spare.capacity() || bytes.capacity() > SPARE_BYTES {
            return;
        }
        // At most SPARE_BYTES.
        let kib = bytes.capacity().div_ceil(1024) as u32;
        if let Ok(share) = self.spares.clone().try_acquire_many_owned(kib) {
            bytes.truncate(0);
            self.spare = bytes;
            self.spare_share = Some(share);
        }
    }
}
