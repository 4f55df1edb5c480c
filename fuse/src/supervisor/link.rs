//! What a supervisor and its daemon say to each other: one byte, text, and descriptors in each message, over a socket
//! that the daemon has as its standard input.

use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use cavern_net::descriptors;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use tokio::io::Interest;
use tokio::net::UnixStream;

/// Descriptors of one message at most: more than there are event loops.
const DESCRIPTORS_MAX: usize = 250;
/// Bytes of one message at most.
const TEXT_MAX: usize = 4096;

/// What a message is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// To the daemon, first of all: the journal; and, if the mount is there, the port and the devices.
    Begin = b'B',
    /// To the supervisor: the port and the devices.
    Keep = b'K',
    /// To the supervisor: the mount is served.
    Ready = b'R',
    /// To the daemon: it is to be replaced. Back: it may be; the text says why it may not.
    Replace = b'P',
}

impl Kind {
    fn of(byte: u8) -> Option<Self> {
        [Self::Begin, Self::Keep, Self::Ready, Self::Replace].into_iter().find(|kind| *kind as u8 == byte)
    }
}

/// What one end of a link says to the other.
#[derive(Debug)]
pub struct Message {
    pub kind: Kind,
    pub text: String,
    pub descriptors: Vec<OwnedFd>,
}

/// One end.
#[derive(Debug)]
pub struct Link {
    /// Of packets: as a stream to the runtime only, which waits for it.
    socket: UnixStream,
}

impl Link {
    /// A link, and its other end for a process to be started.
    pub fn pair() -> io::Result<(Self, OwnedFd)> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (own, other) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        Ok((Self::of(own)?, other))
    }

    /// The end that this process was started with.
    pub fn of_standard_input() -> io::Result<Self> {
        let socket = io::stdin().as_fd().try_clone_to_owned()?;
        Self::of(socket)
    }

    fn of(socket: OwnedFd) -> io::Result<Self> {
        let socket = std::os::unix::net::UnixStream::from(socket);
        socket.set_nonblocking(true)?;
        Ok(Self { socket: UnixStream::from_std(socket)? })
    }

    pub async fn send(&self, kind: Kind, text: &str, descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
        let text = &text.as_bytes()[..text.floor_char_boundary(TEXT_MAX - 1)];
        self.socket.async_io(Interest::WRITABLE, || send(self.socket.as_fd(), kind, text, descriptors)).await
    }

    /// The next message; `None` when the other end is gone. Nothing is lost when this is dropped.
    pub async fn receive(&self) -> io::Result<Option<Message>> {
        match self.socket.async_io(Interest::READABLE, || receive(self.socket.as_fd())).await {
            Err(cause) if cause.kind() == io::ErrorKind::ConnectionReset => Ok(None),
            received => received,
        }
    }
}

fn send(socket: BorrowedFd<'_>, kind: Kind, text: &[u8], passed: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let kind = [kind as u8];
    descriptors::send(socket, &[IoSlice::new(&kind), IoSlice::new(text)], passed, &mut space).map(drop)
}

fn receive(socket: BorrowedFd<'_>) -> io::Result<Option<Message>> {
    let (mut bytes, mut passed) = ([0; TEXT_MAX], Vec::new());
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let received = descriptors::receive(socket, &mut bytes, &mut passed, &mut space)?.bytes;
    let Some((kind, text)) = bytes[..received].split_first() else { return Ok(None) };
    let kind = Kind::of(*kind).ok_or_else(|| io::Error::other("a message of another version of cv"))?;
    Ok(Some(Message { kind, text: String::from_utf8_lossy(text).into_owned(), descriptors: passed }))
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    #[tokio::test]
    async fn text_and_descriptors_arrive_and_the_end_is_seen() {
        let (own, other) = Link::pair().unwrap();
        let other = Link::of(other).unwrap();
        let (null, zero) = (File::open("/dev/null").unwrap(), File::open("/dev/zero").unwrap());
        own.send(Kind::Begin, "text", &[null.as_fd(), zero.as_fd()]).await.unwrap();
        own.send(Kind::Replace, "", &[]).await.unwrap();
        let first = other.receive().await.unwrap().unwrap();
        assert_eq!((first.kind, first.text.as_str(), first.descriptors.len()), (Kind::Begin, "text", 2));
        let second = other.receive().await.unwrap().unwrap();
        assert_eq!((second.kind, second.text.as_str(), second.descriptors.len()), (Kind::Replace, "", 0));
        drop(own);
        assert!(other.receive().await.unwrap().is_none());
    }
}
