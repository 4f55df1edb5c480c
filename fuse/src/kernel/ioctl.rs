//! The ioctls of `/dev/fuse`. The only unsafe code of this crate.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::ioctl::{Ioctl, IoctlOutput, Opcode, Setter, ioctl, opcode};

use super::abi::BackingMap;

/// `_IOR(229, 0, uint32_t)`: despite its direction bits the kernel reads the number behind the pointer.
const CLONE: Opcode = opcode::read::<u32>(229, 0);

/// `_IOW(229, 1, struct fuse_backing_map)`.
const BACKING_OPEN: Opcode = opcode::write::<BackingMap>(229, 1);
/// `_IOW(229, 2, uint32_t)`.
const BACKING_CLOSE: Opcode = opcode::write::<u32>(229, 2);

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

/// Registers an open file that the kernel may read by itself in place of one of ours; returns its number on this
/// connection. The kernel keeps the file open until the number is closed and no file uses it.
///
/// `EPERM` without CAP_SYS_ADMIN, or when passthrough was not agreed on; `ELOOP` for a file on a stacked file system.
pub fn open_backing(device: &OwnedFd, file: BorrowedFd<'_>) -> Result<u32, Errno> {
    let map = BackingMap { fd: file.as_raw_fd(), flags: 0, padding: 0 };
    // SAFETY: the opcode takes a pointer to a `BackingMap`, which it only reads during the call; `OpenBacking` owns
    // the one whose address it passes. The number in it names a descriptor that `file` keeps open.
    unsafe { ioctl(device, OpenBacking(map)) }
}

/// Gives a number of [`open_backing`] back.
pub fn close_backing(device: &OwnedFd, number: u32) -> Result<(), Errno> {
    // SAFETY: the opcode takes a pointer to a `uint32_t`, which it only reads during the call; `Setter` passes the
    // address of a `u32` that it owns for that long.
    unsafe { ioctl(device, Setter::<BACKING_CLOSE, u32>::new(number)) }
}

struct OpenBacking(BackingMap);

// SAFETY: opcode and operand belong together, the kernel writes nothing to the operand, and the output is made from
// the call's return value alone.
unsafe impl Ioctl for OpenBacking {
    type Output = u32;

    const IS_MUTATING: bool = false;

    fn opcode(&self) -> Opcode {
        BACKING_OPEN
    }

    fn as_ptr(&mut self) -> *mut c_void {
        (&raw mut self.0).cast()
    }

    unsafe fn output_from_ptr(out: IoctlOutput, _operand: *mut c_void) -> Result<u32, Errno> {
        u32::try_from(out).map_err(|_| Errno::INVAL)
    }
}
