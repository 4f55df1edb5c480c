//! How much has to arrive before a socket is told of. The only unsafe code of this crate.

#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd};

/// Has a TCP socket told of as readable when so many bytes are there, or the stream has ended. The kernel takes less
/// where its buffer cannot have that much.
///
/// # Errors
/// Those of the system.
pub(crate) fn set_low_water(socket: BorrowedFd<'_>, bytes: usize) -> io::Result<()> {
    let bytes = libc::c_int::try_from(bytes).unwrap_or(libc::c_int::MAX);
    let length = size_of::<libc::c_int>() as libc::socklen_t;
    let value = &raw const bytes;
    // SAFETY: the kernel reads as many bytes as a number of this type has. The descriptor is open.
    let answer =
        unsafe { libc::setsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, libc::SO_RCVLOWAT, value.cast(), length) };
    if answer == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
