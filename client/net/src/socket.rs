//! A connected stream between a client and a worker, TCP, TLS over TCP, or Unix, used without waiting: what cannot be
//! read or written now is tried again when the socket says so. Descriptors travel over the Unix one.

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use bytes::{BufMut, BytesMut};
use cavern_security::TlsSocket;
use rustix::fs::sendfile;
use rustix::net::{ReturnFlags, SendAncillaryBuffer, SendFlags, connect_unspec, sendmsg};
use tokio::io::{Interest, Ready};
use tokio::net::{TcpStream, UnixStream};

use crate::descriptors::{receive, send};
use crate::low_water::set_low_water;

/// Descriptors that one message may carry.
pub const MAX_DESCRIPTORS: usize = 250;

/// Descriptors that one message can carry (the kernel's SCM_MAX_FD).
const DESCRIPTORS_PER_MESSAGE: usize = 253;

#[derive(Debug)]
pub enum Socket {
    Tcp(TcpStream),
    Tls(Box<TlsSocket>),
    Unix(UnixStream),
}

impl Socket {
    /// This connection, whose events come to the runtime of the caller.
    ///
    /// # Errors
    /// Those of the system.
    pub fn into_current_runtime(self) -> io::Result<Self> {
        Ok(match self {
            Self::Tcp(stream) => Self::Tcp(TcpStream::from_std(stream.into_std()?)?),
            Self::Tls(socket) => Self::Tls(Box::new(socket.into_current_runtime()?)),
            Self::Unix(stream) => Self::Unix(UnixStream::from_std(stream.into_std()?)?),
        })
    }

    /// Where it leads, for a person.
    pub fn peer(&self) -> String {
        match self {
            Self::Tcp(stream) => stream.peer_addr().map(|address| address.to_string()).unwrap_or_default(),
            Self::Tls(_) | Self::Unix(_) => String::new(),
        }
    }

    /// Whether descriptors can be sent over it.
    pub fn passes_descriptors(&self) -> bool {
        matches!(self, Self::Unix(_))
    }

    /// Completes when it may be read or written, as is asked.
    ///
    /// # Errors
    /// Those of the system; the certificate of the other side does not hold any more.
    pub async fn ready(&self, interest: Interest) -> io::Result<Ready> {
        match self {
            Self::Tcp(stream) => stream.ready(interest).await,
            Self::Tls(socket) => socket.ready(interest).await,
            Self::Unix(stream) => stream.ready(interest).await,
        }
    }

    /// For whoever waits for something else than the socket.
    ///
    /// # Errors
    /// The certificate of the other side does not hold any more.
    pub fn check(&self) -> io::Result<()> {
        match self {
            Self::Tls(socket) => socket.check(),
            Self::Tcp(_) | Self::Unix(_) => Ok(()),
        }
    }

    /// Appends what has arrived; `Ok(0)` is the end of the stream.
    ///
    /// # Errors
    /// `WouldBlock` when nothing has.
    pub fn try_read(&self, buffer: &mut impl BufMut) -> io::Result<usize> {
        let room = buffer.chunk_mut().len();
        let mut received = None;
        // Less than there is room for is all that has arrived: `WouldBlock` spares the read that would say so. What
        // arrives from now on is told anew.
        let mut read = || {
            let count = match self {
                Self::Tcp(stream) => stream.try_read_buf(buffer),
                Self::Tls(socket) => socket.try_read(buffer),
                Self::Unix(stream) => stream.try_read_buf(buffer),
            }?;
            received = Some(count);
            if count > 0 && count < room { Err(io::ErrorKind::WouldBlock.into()) } else { Ok(count) }
        };
        let outcome = match self {
            Self::Tcp(stream) => stream.try_io(Interest::READABLE, read),
            Self::Tls(_) => read(),
            Self::Unix(stream) => stream.try_io(Interest::READABLE, read),
        };
        received.map_or(outcome, Ok)
    }

    /// Appends at most `limit` bytes that have arrived, as [`Self::try_read`] does, and the descriptors that came with
    /// them. `into` must have room for `limit` bytes.
    pub(crate) fn try_receive(
        &self,
        into: &mut BytesMut,
        limit: usize,
        descriptors: &mut VecDeque<OwnedFd>,
    ) -> io::Result<usize> {
        match self {
            Self::Tcp(_) | Self::Tls(_) => self.try_read(&mut into.limit(limit)),
            Self::Unix(stream) => {
                stream.try_io(Interest::READABLE, || receive_with_descriptors(stream, into, limit, descriptors))
            }
        }
    }

    /// Has [`Self::ready`] tell of a plain TCP connection that can be read when so many bytes have arrived.
    ///
    /// # Errors
    /// Those of the system.
    pub(crate) fn set_low_water(&self, bytes: usize) -> io::Result<()> {
        match self {
            Self::Tcp(stream) => set_low_water(stream.as_fd(), bytes),
            Self::Tls(_) | Self::Unix(_) => Ok(()),
        }
    }

    /// Writes as much as the socket takes.
    ///
    /// # Errors
    /// `WouldBlock` when it takes nothing.
    pub fn try_write(&self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        match self {
            Self::Tcp(stream) => stream.try_write_vectored(slices),
            Self::Tls(socket) => socket.try_write_vectored(slices),
            Self::Unix(stream) => stream.try_write_vectored(slices),
        }
    }

    /// As [`Self::try_write`], for what the rest of follows at once: the kernel keeps a packet that is not full for it.
    ///
    /// # Errors
    /// As [`Self::try_write`].
    pub fn try_write_more(&self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        let Self::Tcp(stream) = self else { return self.try_write(slices) };
        let flags = SendFlags::MORE | SendFlags::NOSIGNAL;
        stream.try_io(Interest::WRITABLE, || Ok(sendmsg(stream, slices, &mut SendAncillaryBuffer::default(), flags)?))
    }

    /// Whether [`Self::try_send_file`] can be used: bytes are neither encrypted nor passed in memory.
    pub fn sends_files(&self) -> bool {
        matches!(self, Self::Tcp(_))
    }

    /// Whether [`Self::try_send_file`] is likely to send something now. Asks nobody.
    pub fn may_send_file(&self) -> bool {
        matches!(self, Self::Tcp(stream) if stream.try_io(Interest::WRITABLE, || Ok(())).is_ok())
    }

    /// Writes as much as the socket takes of so many bytes of a file, from `offset` on, without anybody copying them;
    /// 0 where the file ends. They are read as they are when the other side receives them. May wait for the disk for
    /// those that are not in the page cache.
    ///
    /// # Errors
    /// `WouldBlock` when it takes nothing. Those of the file; `Unsupported` where [`Self::sends_files`] is false.
    pub fn try_send_file(&self, file: BorrowedFd<'_>, mut offset: u64, bytes: usize) -> io::Result<usize> {
        let Self::Tcp(stream) = self else {
            return Err(io::Error::new(io::ErrorKind::Unsupported, "files are sent over plain TCP only"));
        };
        stream.try_io(Interest::WRITABLE, || Ok(sendfile(stream, file, Some(&mut offset), bytes)?))
    }

    /// Whether the socket has not yet taken all that was written: [`Self::flush`] is to be called when it takes more.
    pub fn has_unsent(&self) -> bool {
        matches!(self, Self::Tls(socket) if socket.has_unsent())
    }

    /// Sends what was written earlier; how many bytes the socket took.
    ///
    /// # Errors
    /// `WouldBlock` when it takes nothing although there is something.
    pub fn flush(&self) -> io::Result<usize> {
        match self {
            Self::Tls(socket) => socket.flush(),
            Self::Tcp(_) | Self::Unix(_) => Ok(0),
        }
    }

    /// Ends a TCP connection at once: what was written and has not arrived never will. Does nothing to a Unix socket,
    /// where all has arrived.
    ///
    /// # Errors
    /// Those of the system.
    pub fn abort(&self) -> io::Result<()> {
        match self {
            Self::Tcp(stream) => Ok(connect_unspec(stream)?),
            Self::Tls(socket) => socket.abort(),
            Self::Unix(_) => Ok(()),
        }
    }

    /// Writes as much as the socket takes of `bytes`, with descriptors attached to the first byte.
    ///
    /// # Errors
    /// `WouldBlock` when it takes nothing; then no descriptor was sent either.
    pub fn try_write_with(&self, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> io::Result<usize> {
        let Self::Unix(stream) = self else {
            return Err(io::Error::new(io::ErrorKind::Unsupported, "descriptors travel over Unix sockets only"));
        };
        stream.try_io(Interest::WRITABLE, || {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
            send(stream.as_fd(), &[IoSlice::new(bytes)], descriptors, &mut space)
        })
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
    let received = receive(stream.as_fd(), &mut into[start..], descriptors, &mut space);
    into.truncate(start + received.as_ref().map_or(0, |message| message.bytes));
    let received = received?;
    if received.flags.contains(ReturnFlags::CTRUNC) {
        return Err(io::Error::other("descriptors were lost in transfer: is the limit of open files reached?"));
    }
    Ok(received.bytes)
}
