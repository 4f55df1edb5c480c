//! Messages that the file system sends unasked: what the kernel must forget.
//!
//! Each call may wait for locks of the kernel that are held by system calls which in turn wait for this file system. It
//! must therefore come from a thread that serves no request and holds no lock; only `attributes` waits for none of
//! them.

use std::sync::Arc;

use rustix::io::Errno;
use zerocopy::IntoBytes;

use super::abi::{NotifyInvalEntryOut, NotifyInvalInodeOut, notify};
use super::channel::Channel;

/// Sends notifications on one connection. `Ok(false)` means that the kernel did not know what it was to forget.
#[derive(Clone, Debug)]
pub struct Notifier {
    channel: Arc<Channel>,
}

impl Notifier {
    pub(super) fn new(channel: Arc<Channel>) -> Self {
        Self { channel }
    }

    /// The name in that directory leads elsewhere or nowhere, or for the first time somewhere; attributes and cached
    /// listing of the directory are forgotten too.
    pub fn entry(&self, parent: u64, name: &[u8]) -> Result<bool, Errno> {
        // The kernel wants a zero behind the name, which `namelen` does not count.
        let head =
            NotifyInvalEntryOut { parent, namelen: u32::try_from(name.len()).map_err(|_| Errno::INVAL)?, flags: 0 };
        let mut terminated = Vec::with_capacity(name.len() + 1);
        terminated.extend_from_slice(name);
        terminated.push(0);
        known(self.channel.send(0, notify::INVAL_ENTRY, head.as_bytes(), &terminated))
    }

    /// Attributes of an inode, and for a file its pages, for a directory its cached listing.
    pub fn inode(&self, node: u64) -> Result<bool, Errno> {
        let message = NotifyInvalInodeOut { node, off: 0, len: 0 };
        known(self.channel.send(0, notify::INVAL_INODE, message.as_bytes(), &[]))
    }

    /// Attributes of a file, and its pages of `length` bytes from `offset` on. Waits for those that are being read.
    pub fn pages(&self, node: u64, offset: u64, length: u32) -> Result<bool, Errno> {
        let off = i64::try_from(offset).map_err(|_| Errno::INVAL)?;
        let message = NotifyInvalInodeOut { node, off, len: length.into() };
        known(self.channel.send(0, notify::INVAL_INODE, message.as_bytes(), &[]))
    }

    /// Attributes of an inode, and nothing else: no page is waited for. Whether the kernel refers to it.
    pub fn attributes(&self, node: u64) -> Result<bool, Errno> {
        let message = NotifyInvalInodeOut { node, off: -1, len: 0 };
        known(self.channel.send(0, notify::INVAL_INODE, message.as_bytes(), &[]))
    }

    /// Has the kernel send again whatever a process before this one had read and not answered. `EINVAL` before Linux
    /// 6.9.
    pub fn resend(&self) -> Result<(), Errno> {
        self.channel.send(0, notify::RESEND, &[], &[])
    }

    /// Every name: the next use of each asks again. `EINVAL` before Linux 6.16.
    pub fn every_entry(&self) -> Result<(), Errno> {
        self.channel.send(0, notify::INC_EPOCH, &[], &[])
    }
}

fn known(sent: Result<(), Errno>) -> Result<bool, Errno> {
    match sent {
        Ok(()) => Ok(true),
        Err(Errno::NOENT) => Ok(false),
        Err(cause) => Err(cause),
    }
}
