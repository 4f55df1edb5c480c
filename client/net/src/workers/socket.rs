//! A stream socket of either family, with or without TLS, driven without blocking.

use std::collections::VecDeque;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};

use bytes::{BufMut, BytesMut};
use cavern_security::TlsSocket;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags};
use tokio::io::Interest;
use tokio::net::{TcpStream, UnixStream};

/// Descriptors that one message can carry (the kernel's SCM_MAX_FD).
const DESCRIPTORS_PER_MESSAGE: usize = 253;

#[derive(Debug)]
pub(super) enum Socket {
    Tcp(TcpStream),
    Tls(Box<TlsSocket>),
    Unix(UnixStream),
}

impl Socket {
    /// Whether descriptors come over it.
    pub(super) fn passes_descriptors(&self) -> bool {
        matches!(self, Self::Unix(_))
    }

    pub(super) async fn readable(&self) -> io::Result<()> {
        match self {
            Self::Tcp(stream) => stream.readable().await,
            Self::Tls(socket) => socket.ready(Interest::READABLE).await.map(drop),
            Self::Unix(stream) => stream.readable().await,
        }
    }

    pub(super) async fn writable(&self) -> io::Result<()> {
        match self {
            Self::Tcp(stream) => stream.writable().await,
            Self::Tls(socket) => socket.ready(Interest::WRITABLE).await.map(drop),
            Self::Unix(stream) => stream.writable().await,
        }
    }

    /// Sends what fits into the socket's buffer; `WouldBlock` when nothing does.
    pub(super) fn try_send(&self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        match self {
            Self::Tcp(stream) => stream.try_write_vectored(parts),
            Self::Tls(socket) => socket.try_write_vectored(parts),
            Self::Unix(stream) => stream.try_write_vectored(parts),
        }
    }

    /// Whether something that was sent has no room yet in the socket's buffer: [`Self::flush`] is to be called when
    /// there is some.
    pub(super) fn has_unsent(&self) -> bool {
        matches!(self, Self::Tls(socket) if socket.has_unsent())
    }

    /// Puts what was sent into the socket's buffer; `WouldBlock` when nothing fits.
    pub(super) fn flush(&self) -> io::Result<()> {
        match self {
            Self::Tls(socket) => socket.flush().map(drop),
            Self::Tcp(_) | Self::Unix(_) => Ok(()),
        }
    }

    /// Appends at most `limit` bytes that have arrived (0: the peer has closed), and the descriptors that came with
    /// them. `into` must have room for `limit` bytes.
    pub(super) fn try_receive(
        &self,
        into: &mut BytesMut,
        limit: usize,
        descriptors: &mut VecDeque<OwnedFd>,
    ) -> io::Result<usize> {
        match self {
            Self::Tcp(stream) => {
                let mut received = None;
                // Less than there is room for is all that has arrived: `WouldBlock` spares the read that would say so.
                // What arrives from now on is told anew.
                let outcome = stream.try_io(Interest::READABLE, || {
                    let count = stream.try_read_buf(&mut into.limit(limit))?;
                    received = Some(count);
                    if count > 0 && count < limit { Err(io::ErrorKind::WouldBlock.into()) } else { Ok(count) }
                });
                received.map_or(outcome, Ok)
            }
            Self::Tls(socket) => socket.try_read(&mut into.limit(limit)),
            Self::Unix(stream) => {
                stream.try_io(Interest::READABLE, || receive_with_descriptors(stream, into, limit, descriptors))
            }
        }
    }
}

fn receive_with_descriptors(
    stream: &UnixStream,
    into: &mut BytesMut,
    limit: usize,
    descriptors: &mut VecDeque<OwnedFd>,
) -> io::Result<usize> {
    // recvmsg wants initialized memory; what comes over a Unix socket is small messages.
    let start = into.len();
    into.resize(start + limit, 0);
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_PER_MESSAGE))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut parts = [IoSliceMut::new(&mut into[start..])];
    let received = rustix::net::recvmsg(stream.as_fd(), &mut parts, &mut control, RecvFlags::CMSG_CLOEXEC);
    into.truncate(start + received.as_ref().map_or(0, |message| message.bytes));
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(passed) = message {
            descriptors.extend(passed);
        }
    }
    let received = received?;
    if received.flags.contains(ReturnFlags::CTRUNC) {
        return Err(io::Error::other("descriptors were lost in transfer: is the limit of open files reached?"));
    }
    Ok(received.bytes)
}
