//! Takes the byte stream of a connection apart into frames.
//!
//! Headers and messages go through a small buffer; a payload is read straight into memory of its own, so that at
//! most one buffer's worth of it is copied. Nothing is allocated for a payload that nobody waits for.

use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;

use bytes::{Buf, Bytes, BytesMut};
use cavern_proto::frame::{FrameHeader, HEADER_BYTES};

use super::socket::Socket;

/// What is read at once while no payload is expected. Small: the part of a payload that lands here is copied.
const READ_BYTES: usize = 16 * 1024;
/// Descriptors that may have arrived without their frame being complete.
const DESCRIPTORS_MAX: usize = 1024;

/// What to do with a frame's payload, decided when its header has come.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Payload {
    Keep,
    /// Nobody waits for it any more.
    Skip,
}

/// One frame. The payload is empty when it was skipped.
#[derive(Debug)]
pub(super) struct Frame {
    pub header: FrameHeader,
    pub message: Bytes,
    pub payload: Bytes,
}

/// The receiving side of a connection.
#[derive(Debug)]
pub(super) struct FrameReader {
    buffer: BytesMut,
    descriptors: VecDeque<OwnedFd>,
    partial: Option<Partial>,
}

/// A frame whose payload is still coming.
#[derive(Debug)]
struct Partial {
    header: FrameHeader,
    message: Bytes,
    payload: BytesMut,
    missing: usize,
    fate: Payload,
}

impl FrameReader {
    pub(super) fn new() -> Self {
        Self { buffer: BytesMut::with_capacity(READ_BYTES), descriptors: VecDeque::new(), partial: None }
    }

    /// The next frame; `judge` sees each header before memory is spent on its payload, and an error of it ends the
    /// connection. Cancel-safe: what has arrived stays.
    pub(super) async fn next(
        &mut self,
        socket: &Socket,
        judge: impl Fn(&FrameHeader) -> Result<Payload, String>,
    ) -> io::Result<Frame> {
        loop {
            if let Some(frame) = self.parse(&judge)? {
                return Ok(frame);
            }
            // A peer that never pauses must not starve the other tasks of this thread.
            tokio::task::coop::consume_budget().await;
            match self.receive(socket) {
                Ok(0) => return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the worker closed the connection")),
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => socket.readable().await?,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// The oldest `count` descriptors that arrived; `None` when fewer did.
    pub(super) fn take_descriptors(&mut self, count: usize) -> Option<Vec<OwnedFd>> {
        (count <= self.descriptors.len()).then(|| self.descriptors.drain(..count).collect())
    }

    fn receive(&mut self, socket: &Socket) -> io::Result<usize> {
        let received = match &mut self.partial {
            Some(partial) if partial.fate == Payload::Keep => {
                let received = socket.try_receive(&mut partial.payload, partial.missing, &mut self.descriptors)?;
                partial.missing -= received;
                received
            }
            _ => {
                self.buffer.reserve(READ_BYTES);
                socket.try_receive(&mut self.buffer, READ_BYTES, &mut self.descriptors)?
            }
        };
        if self.descriptors.len() > DESCRIPTORS_MAX {
            return Err(io::Error::other("the worker sent descriptors that no answer claims"));
        }
        Ok(received)
    }

    fn parse(&mut self, judge: &impl Fn(&FrameHeader) -> Result<Payload, String>) -> io::Result<Option<Frame>> {
        if self.partial.is_none() {
            let Some(bytes) = self.buffer.first_chunk::<HEADER_BYTES>() else { return Ok(None) };
            let header = FrameHeader::decode(bytes).map_err(io::Error::other)?;
            let fate = judge(&header).map_err(io::Error::other)?;
            let whole = HEADER_BYTES + header.message_bytes as usize;
            if self.buffer.len() < whole {
                return Ok(None);
            }
            self.buffer.advance(HEADER_BYTES);
            let message = Bytes::copy_from_slice(&self.buffer[..header.message_bytes as usize]);
            self.buffer.advance(header.message_bytes as usize);
            let missing = header.payload_bytes as usize;
            let payload = BytesMut::with_capacity(if fate == Payload::Keep { missing } else { 0 });
            self.partial = Some(Partial { header, message, payload, missing, fate });
        }
        let Some(partial) = &mut self.partial else { return Ok(None) };
        let here = partial.missing.min(self.buffer.len());
        if partial.fate == Payload::Keep {
            partial.payload.extend_from_slice(&self.buffer[..here]);
        }
        self.buffer.advance(here);
        partial.missing -= here;
        if partial.missing > 0 {
            return Ok(None);
        }
        let frame = self.partial.take();
        Ok(frame.map(|Partial { header, message, payload, .. }| Frame { header, message, payload: payload.freeze() }))
    }
}
