//! Descriptors that travel over Unix sockets, attached to bytes. Whoever sends or receives some has the space for as
//! many as there may be: `[MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(COUNT))]`.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::io::retry_on_intr;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, RecvMsg, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};

/// Writes as much as the socket takes of `parts`, with descriptors attached to the first byte.
///
/// # Errors
/// `WouldBlock` when it takes nothing; then no descriptor was sent either.
pub fn send(
    socket: BorrowedFd<'_>,
    parts: &[IoSlice<'_>],
    descriptors: &[BorrowedFd<'_>],
    space: &mut [MaybeUninit<u8>],
) -> io::Result<usize> {
    let mut control = SendAncillaryBuffer::new(space);
    if !descriptors.is_empty() && !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "too many descriptors for one message"));
    }
    Ok(sendmsg(socket, parts, &mut control, SendFlags::DONTWAIT | SendFlags::NOSIGNAL)?)
}

/// Reads bytes, and the descriptors that came with them. Those for which there is no room are lost, and the flags of
/// the message say so.
///
/// # Errors
/// Those of the system; a signal is none.
pub fn receive(
    socket: BorrowedFd<'_>,
    bytes: &mut [u8],
    descriptors: &mut impl Extend<OwnedFd>,
    space: &mut [MaybeUninit<u8>],
) -> io::Result<RecvMsg> {
    let mut control = RecvAncillaryBuffer::new(space);
    let received =
        retry_on_intr(|| recvmsg(socket, &mut [IoSliceMut::new(bytes)], &mut control, RecvFlags::CMSG_CLOEXEC));
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(passed) = message {
            descriptors.extend(passed);
        }
    }
    Ok(received?)
}
