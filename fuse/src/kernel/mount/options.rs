//! How to mount, and why that failed.

use std::io;
use std::path::PathBuf;

use crate::kernel::channel::DEVICE;

/// How to mount.
#[derive(Clone, Debug)]
pub struct MountOptions {
    /// Other users than the mounting one may enter.
    pub allow_other: bool,
    /// The kernel refuses every change by itself.
    pub read_only: bool,
}

/// Why a mount was not made.
#[derive(Debug, thiserror::Error)]
pub enum MountError {
    #[error(
        "{DEVICE} is missing: load the kernel module with `modprobe fuse`, or start the container with `--device \
         {DEVICE}`"
    )]
    NoDevice(#[source] io::Error),
    #[error("{DEVICE} may not be opened ({0}): run as root, or give this user access to the device")]
    DeviceDenied(#[source] io::Error),
    #[error("{DEVICE} cannot be opened: {0}")]
    Device(#[source] io::Error),
    #[error("the mount point {} cannot be used: {source}", path.display())]
    MountPoint { path: PathBuf, source: io::Error },
    #[error("the mount point {} is not a directory: choose another one with fuse.mount_point", path.display())]
    NotADirectory { path: PathBuf },
    #[error("another cv fuse serves {} already: unmount it with `umount {0}`, or choose another \
        fuse.mount_point", path.display())]
    Busy { path: PathBuf },
    #[error("mounting at {} failed: {source}{hint}", path.display())]
    Refused { path: PathBuf, source: io::Error, hint: &'static str },
    #[error("fusermount3 could not be run ({0}): install the package fuse3, or run as root")]
    NoHelper(#[source] io::Error),
    #[error("fusermount3 refused to mount at {}: {message}", path.display())]
    Helper { path: PathBuf, message: String },
}
