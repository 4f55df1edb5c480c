//! A descriptor of `/dev/fuse`: one message per read, one message per write.

use std::fs::{File, OpenOptions};
use std::io::{self, IoSlice};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering, fence};

use rustix::io::Errno;
use zerocopy::IntoBytes;

use super::abi::OutHeader;
use super::ioctl;

/// Path of the device.
pub const DEVICE: &str = "/dev/fuse";

/// Whether this process answers nothing any more.
static IS_SILENT: AtomicBool = AtomicBool::new(false);

/// From now on no connection of this process answers a request: whoever asked waits until another process answers, or
/// the connection ends. All that was answered has had its effect by now.
pub fn fall_silent() {
    IS_SILENT.store(true, Ordering::Relaxed);
    // See `Channel::send`: either the answer is kept back there, or its effect is seen here.
    fence(Ordering::SeqCst);
}

/// One descriptor of a connection. Requests read from it are answered on it; notifications may go through any.
#[derive(Debug)]
pub struct Channel {
    device: OwnedFd,
}

impl Channel {
    pub fn new(device: OwnedFd) -> Self {
        Self { device }
    }

    /// Opens the device anew, belonging to no connection yet.
    pub fn open_device() -> io::Result<OwnedFd> {
        // std opens with O_CLOEXEC.
        let device: File = OpenOptions::new().read(true).write(true).open(DEVICE)?;
        Ok(device.into())
    }

    /// A further descriptor of the same connection, so that event loops do not contend for one list of requests.
    pub fn another(self: &Arc<Self>) -> io::Result<Arc<Self>> {
        let fresh = Self::open_device()?;
        ioctl::clone_device(&fresh, &self.device)?;
        Ok(Arc::new(Self::new(fresh)))
    }

    pub(super) fn descriptor(&self) -> BorrowedFd<'_> {
        self.device.as_fd()
    }

    /// Waits for the next request and reads it. `ENODEV`: the file system has been unmounted.
    pub fn receive(&self, buffer: &mut [u8]) -> Result<usize, Errno> {
        rustix::io::read(&self.device, buffer)
    }

    /// Sends one message: `error` is 0 or a negative errno; with `unique` 0 it is a notification's code.
    ///
    /// Fails with `ENOENT` when the kernel no longer waits for the answer, and when a notification is about something
    /// that the kernel does not know; with `ENODEV` when the file system is unmounted, or this process silent.
    pub fn send(&self, unique: u64, error: i32, first: &[u8], second: &[u8]) -> Result<(), Errno> {
        fence(Ordering::SeqCst);
        if unique != 0 && IS_SILENT.load(Ordering::Relaxed) {
            return Err(Errno::NODEV);
        }
        let length = size_of::<OutHeader>() + first.len() + second.len();
        let len = u32::try_from(length).map_err(|_| Errno::INVAL)?;
        let header = OutHeader { len, error, unique };
        let parts = [IoSlice::new(header.as_bytes()), IoSlice::new(first), IoSlice::new(second)];
        // Fewer segments are cheaper, and most answers have two.
        let used = if second.is_empty() { &parts[..2] } else { &parts[..] };
        rustix::io::writev(&self.device, used).map(|_| ())
    }
}

/// A file that the kernel reads by itself in place of one of ours, for as long as this value lives (and while a file
/// that was opened with it is open).
#[derive(Debug)]
pub struct Backing {
    channel: Arc<Channel>,
    number: u32,
}

impl Backing {
    /// Registers an open file of another file system.
    pub fn register(channel: &Arc<Channel>, file: BorrowedFd<'_>) -> Result<Self, Errno> {
        let number = ioctl::open_backing(&channel.device, file)?;
        Ok(Self { channel: Arc::clone(channel), number })
    }

    /// One that was registered on this connection before.
    pub(super) fn registered(channel: &Arc<Channel>, number: u32) -> Self {
        Self { channel: Arc::clone(channel), number }
    }

    /// Its number on the connection.
    pub fn number(&self) -> u32 {
        self.number
    }
}

impl Drop for Backing {
    fn drop(&mut self) {
        // Fails when the connection is gone, and the number with it.
        let _ = ioctl::close_backing(&self.channel.device, self.number);
    }
}
