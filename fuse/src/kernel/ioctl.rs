//! The ioctls of `/dev/fuse`. The only unsafe code of this crate.
#![allow(unsafe_code)]

use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use rustix::io::Errno;
use rustix::ioctl::{Setter, ioctl, opcode};

/// `_IOR(229, 0, uint32_t)`: despite its direction bits the kernel reads the number behind the pointer.
const CLONE: rustix::ioctl::Opcode = opcode::read::<u32>(229, 0);

/// Makes `fresh`, a newly opened `/dev/fuse`, another descriptor of the connection of `session`, with its own list
/// of requests being processed: what is read from one must be answered on the same one.
///
/// `EINVAL` when `fresh` belongs to a connection already, or `session` to none.
pub fn clone_device(fresh: &OwnedFd, session: &OwnedFd) -> Result<(), Errno> {
    // A descriptor is never negative.
    let number = session.as_fd().as_raw_fd().unsigned_abs();
    // SAFETY: the opcode takes a pointer to a `uint32_t`, which it only reads during the call; `Setter` passes the
    // address of a `u32` that it owns for that long. The number names a descriptor that `session` keeps open.
    unsafe { ioctl(fresh, Setter::<CLONE, u32>::new(number)) }
}
