//! Takes the byte stream of a connection apart into frames.
//!
//! Headers and messages go through a small buffer; a payload is read straight into memory of its own, so that at
//! most one buffer's worth of it is copied. Nothing is allocated for a payload that nobody waits for.

use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Buf, Bytes, BytesMut};
use cavern_proto::frame::{FrameHeader, HEADER_BYTES};
use tokio::io::Interest;
use tokio::time::Instant;

use super::receive_buffers::{ReceiveBuffer, ReceiveBuffers};
use crate::error::TLS_ALERT;
use crate::socket::Socket;

/// What is read at once while no payload is expected. Small: the part of a payload that lands here is copied.
const READ_BYTES: usize = 16 * 1024;
/// The rest of a payload that is shorter than this is copied, too: what follows it comes by the same system call.
const SHORT_BYTES: usize = 8 * 1024;
/// Of a payload of which this much is missing as much is waited for: to be woken for each packet, which has 64 KiB at
/// most, would cost half of what it costs to copy it.
const LOW_WATER_BYTES: usize = 256 * 1024;
/// Where less is missing, whatever comes is read.
const LOW_WATER_MIN_BYTES: usize = 64 * 1024;
/// Of a payload that comes more slowly, whatever comes is read. The peer may have paused, and some kernels wake nobody
/// when so many small packets have come that the buffer has no room for more.
const LOW_WATER_PATIENCE: Duration = Duration::from_millis(100);
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
    payloads: Arc<ReceiveBuffers>,
    descriptors: VecDeque<OwnedFd>,
    partial: Option<Partial>,
    /// What [`Socket::set_low_water`] was told.
    low_water: usize,
    /// When something came last.
    heard: Instant,
}

/// A frame whose payload is still coming.
#[derive(Debug)]
struct Partial {
    header: FrameHeader,
    message: Bytes,
    payload: ReceiveBuffer,
    missing: usize,
    fate: Payload,
    /// It comes slowly.
    trickles: bool,
}

impl FrameReader {
    /// Payloads go into buffers of `payloads`.
    pub(super) fn new(payloads: Arc<ReceiveBuffers>) -> Self {
        let (buffer, descriptors) = (BytesMut::with_capacity(READ_BYTES), VecDeque::new());
        Self { buffer, payloads, descriptors, partial: None, low_water: 1, heard: Instant::now() }
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
                Ok(0) => return Err(io::Error::new(io::ErrorKind::UnexpectedEof, self.end_cause())),
                Ok(_) => self.heard = Instant::now(),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.wait(socket).await?,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Waits for what is worth a wake-up, or, when nothing has come for long, for anything.
    async fn wait(&mut self, socket: &Socket) -> io::Result<()> {
        self.set_low_water(socket)?;
        if self.low_water > 1 {
            let until = self.heard + LOW_WATER_PATIENCE;
            if let Ok(ready) = tokio::time::timeout_at(until, socket.ready(Interest::READABLE)).await {
                return ready.map(drop);
            }
            if let Some(partial) = &mut self.partial {
                partial.trickles = true;
            }
            self.set_low_water(socket)?;
        }
        socket.ready(Interest::READABLE).await.map(drop)
    }

    /// Of a long payload over plain TCP enough is waited for to be worth a wake-up; of anything else, for a byte.
    fn set_low_water(&mut self, socket: &Socket) -> io::Result<()> {
        let is_long = |partial: &&Partial| !partial.trickles && partial.missing >= LOW_WATER_MIN_BYTES;
        let long = self.partial.as_ref().filter(is_long).filter(|_| matches!(socket, Socket::Tcp(_)));
        let wanted = long.map_or(1, |partial| partial.missing.min(LOW_WATER_BYTES));
        if self.low_water != wanted {
            match socket.set_low_water(wanted) {
                Ok(()) => self.low_water = wanted,
                Err(error) if self.low_water > 1 => return Err(error),
                // It has never been raised: each packet is told of.
                Err(_) => {}
            }
        }
        Ok(())
    }

    /// Why the stream may have ended here.
    fn end_cause(&self) -> &'static str {
        if self.partial.is_none() && self.buffer.first() == Some(&TLS_ALERT) {
            return "the worker speaks TLS: is [security] missing in the configuration here?";
        }
        "the worker closed the connection"
    }

    /// The oldest `count` descriptors that arrived; `None` when fewer did.
    pub(super) fn take_descriptors(&mut self, count: usize) -> Option<Vec<OwnedFd>> {
        (count <= self.descriptors.len()).then(|| self.descriptors.drain(..count).collect())
    }

    fn receive(&mut self, socket: &Socket) -> io::Result<usize> {
        let received = match &mut self.partial {
            Some(partial) if partial.fate == Payload::Keep && partial.missing >= SHORT_BYTES => {
                let into = partial.payload.bytes_mut();
                let received = socket.try_receive(into, partial.missing, &mut self.descriptors)?;
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
            let payload = self.payloads.take(if fate == Payload::Keep { missing } else { 0 });
            self.partial = Some(Partial { header, message, payload, missing, fate, trickles: false });
        }
        let Some(partial) = &mut self.partial else { return Ok(None) };
        let here = partial.missing.min(self.buffer.len());
        if partial.fate == Payload::Keep {
            partial.payload.bytes_mut().extend_from_slice(&self.buffer[..here]);
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

#[cfg(test)]
mod tests {
    use cavern_proto::data;
    use cavern_proto::frame::{FrameKind, encode_frame};
    use proptest::prelude::*;
    use tokio::io::{AsyncWrite, AsyncWriteExt};
    use tokio::net::{TcpListener, TcpStream, UnixStream};

    use super::*;
    use crate::workers::secured;

    /// What a reader makes of bytes that arrive in pieces, until the peer closes: frames, then why it ended.
    fn read_all(bytes: &[u8], piece: usize, fate: Payload) -> (Vec<Frame>, io::Error) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let (peer, stream) = UnixStream::pair().unwrap();
            read_from(peer, Socket::Unix(stream), bytes, piece, fate).await
        })
    }

    /// What a reader makes of bytes that arrive over TCP.
    fn read_all_by_tcp(bytes: &[u8], piece: usize, fate: Payload) -> (Vec<Frame>, io::Error) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let peer = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
            peer.set_nodelay(true).unwrap();
            let (stream, _) = listener.accept().await.unwrap();
            read_from(peer, Socket::Tcp(stream), bytes, piece, fate).await
        })
    }

    /// What a reader makes of bytes that arrive over TLS.
    fn read_all_by_tls(bytes: &[u8], piece: usize, fate: Payload) -> (Vec<Frame>, io::Error) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let (peer, socket) = secured::pair().await;
            let send = async move {
                for piece in bytes.chunks(piece) {
                    let mut rest = piece;
                    while !rest.is_empty() || peer.has_unsent() {
                        let outcome = match rest {
                            [] => peer.flush().map(|_| 0),
                            _ => peer.try_write_vectored(&[io::IoSlice::new(rest)]),
                        };
                        match outcome {
                            Ok(count) => rest.advance(count),
                            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                                peer.ready(tokio::io::Interest::WRITABLE).await.unwrap();
                            }
                            Err(_) => return,
                        }
                    }
                    tokio::task::yield_now().await;
                }
            };
            tokio::join!(send, receive_all(Socket::Tls(Box::new(socket)), fate)).1
        })
    }

    async fn read_from(
        mut peer: impl AsyncWrite + Unpin,
        socket: Socket,
        bytes: &[u8],
        piece: usize,
        fate: Payload,
    ) -> (Vec<Frame>, io::Error) {
        let send = async move {
            for piece in bytes.chunks(piece) {
                // A reader that has given up closes its end.
                if peer.write_all(piece).await.is_err() {
                    return;
                }
                tokio::task::yield_now().await;
            }
        };
        tokio::join!(send, receive_all(socket, fate)).1
    }

    async fn receive_all(socket: Socket, fate: Payload) -> (Vec<Frame>, io::Error) {
        let (mut reader, mut frames) = (FrameReader::new(Arc::default()), Vec::new());
        loop {
            match reader.next(&socket, |_| Ok(fate)).await {
                Ok(frame) => frames.push(frame),
                Err(error) => return (frames, error),
            }
        }
    }

    #[test]
    fn long_payloads_arrive_whole_and_the_end_comes_in_the_middle_of_one() {
        let lengths = [1 << 20, 3, 700_001, LOW_WATER_MIN_BYTES, 0, 300_000];
        let mut bytes = Vec::new();
        for (id, length) in lengths.iter().enumerate() {
            bytes.extend(encode_frame(FrameKind::Read, id as u64, &data::Hello::default(), *length as u32));
            bytes.extend(std::iter::repeat_n(id as u8, *length));
        }
        bytes.extend(encode_frame(FrameKind::Read, 6, &data::Hello::default(), 500_000));
        bytes.extend(std::iter::repeat_n(6, 100_000));
        for read in [read_all, read_all_by_tcp, read_all_by_tls] {
            for piece in [20_000, 200_000, 4 << 20] {
                let (frames, end) = read(&bytes, piece, Payload::Keep);
                assert_eq!(end.kind(), io::ErrorKind::UnexpectedEof);
                assert_eq!(frames.iter().map(|frame| frame.payload.len()).collect::<Vec<_>>(), lengths);
                for (id, frame) in frames.iter().enumerate() {
                    assert!(frame.payload.iter().all(|byte| usize::from(*byte) == id), "{id} in pieces of {piece}");
                }
            }
        }
    }

    #[tokio::test]
    async fn a_long_payload_whose_sender_pauses_is_taken_as_it_comes() {
        const SLICE: Duration = Duration::from_millis(20);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let mut peer = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let socket = Socket::Tcp(listener.accept().await.unwrap().0);
        let mut reader = FrameReader::new(Arc::default());
        let keep = |_: &FrameHeader| Ok::<_, String>(Payload::Keep);
        let read = async {
            peer.write_all(&encode_frame(FrameKind::Read, 1, &data::Hello::default(), 500_000)).await.unwrap();
            for (piece, missing) in [(20_000, 480_000), (50_000, 430_000), (100_000, 330_000)] {
                peer.write_all(&vec![7; piece]).await.unwrap();
                // Whoever is interrupted again and again is no less patient.
                while reader.partial.as_ref().is_none_or(|partial| partial.missing > missing) {
                    let next = tokio::time::timeout(SLICE, reader.next(&socket, keep)).await;
                    assert!(next.is_err(), "{missing} bytes are missing");
                }
            }
            let rest = vec![7; 330_000];
            let (sent, frame) = tokio::join!(peer.write_all(&rest), reader.next(&socket, keep));
            sent.unwrap();
            frame.unwrap()
        };
        let frame = tokio::time::timeout(Duration::from_secs(20), read).await.unwrap();
        assert!(frame.payload.len() == 500_000 && frame.payload.iter().all(|byte| *byte == 7));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn frames_survive_any_cut(
            payloads in prop::collection::vec(0usize..40_000, 1..6),
            piece in 1usize..30_000,
            skip: bool,
            way in 0usize..3,
        ) {
            let mut bytes = Vec::new();
            for (id, length) in payloads.iter().enumerate() {
                let hello = data::Hello { peer: "p".repeat(id * 100), ..data::Hello::default() };
                bytes.extend(encode_frame(FrameKind::Read, id as u64, &hello, *length as u32));
                bytes.extend(std::iter::repeat_n(id as u8, *length));
            }
            // Pieces of one byte would take long for large payloads.
            let piece = piece.max(bytes.len() / 500);
            let read = [read_all, read_all_by_tcp, read_all_by_tls][way];
            let (frames, end) = read(&bytes, piece, if skip { Payload::Skip } else { Payload::Keep });
            prop_assert_eq!(end.kind(), io::ErrorKind::UnexpectedEof);
            prop_assert_eq!(frames.len(), payloads.len());
            for (id, (frame, length)) in frames.iter().zip(payloads).enumerate() {
                prop_assert_eq!(frame.header.request_id, id as u64);
                prop_assert!(frame.message.len() >= id * 100);
                prop_assert_eq!(frame.payload.len(), if skip { 0 } else { length });
                prop_assert!(frame.payload.iter().all(|byte| *byte == id as u8));
            }
        }

        #[test]
        fn garbage_ends_the_connection(bytes in prop::collection::vec(any::<u8>(), 0..5000), piece in 1usize..5000) {
            let (frames, _end) = read_all(&bytes, piece, Payload::Keep);
            prop_assert!(frames.is_empty(), "random bytes do not begin with the magic");
        }
    }
}
