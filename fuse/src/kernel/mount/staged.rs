//! A mount that is shown at its mount point when it is served, by a directory within it.
//!
//! The kernel makes the root inode of a mount before it knows that there are access lists here, and never keeps the
//! list of that inode: whoever is not root has it asked for with every path that leads through the mount point. A
//! directory within the mount is an inode like any other. So that is what appears at the mount point, as by
//! `mount --bind`, and nobody comes by the root itself.

use std::os::fd::{AsRawFd as _, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, Mode, OFlags, openat};
use rustix::io::Errno;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MoveMountFlags, OpenTreeFlags, fsconfig_create, fsconfig_set_flag,
    fsconfig_set_string, fsmount, fsopen, move_mount, open_tree,
};
use tracing::debug;

use super::options::{MountError, MountOptions};
use super::table::{FILESYSTEM_SUBTYPE, SOURCE};
use super::{Mount, MountedBy, open_device, prepare};
use crate::kernel::session::READ_MAX;

/// A mount that is nowhere yet. Dropping it ends it.
#[derive(Debug)]
pub struct StagedMount {
    path: PathBuf,
    mount: OwnedFd,
}

impl StagedMount {
    /// Prepares a mount at `path`, with the descriptor of its connection; `None` where that cannot be: without root,
    /// and before Linux 5.2.
    ///
    /// # Errors
    /// What is wrong with the mount point, or with the device.
    pub fn make(path: &Path, options: &MountOptions) -> Result<Option<(Self, OwnedFd)>, MountError> {
        if !rustix::process::geteuid().is_root() {
            return Ok(None);
        }
        let path = prepare(path)?;
        let device = open_device()?;
        match make_nowhere(&device, options) {
            Ok(mount) => Ok(Some((Self { path, mount }, device))),
            Err(cause) => {
                debug!(%cause, "this kernel makes mounts at their mount points only");
                Ok(None)
            }
        }
    }

    /// Has a directory in the root appear at the mount point, and everything there with it; or else the root: before
    /// Linux 6.15. Whether it is the directory. *Blocks* until its name is looked up.
    ///
    /// # Errors
    /// [`MountError::Refused`].
    pub fn attach(self, directory: &[u8]) -> Result<(Mount, bool), MountError> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let clone = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC | OpenTreeFlags::AT_EMPTY_PATH;
        let inner =
            openat(&self.mount, directory, flags, Mode::empty()).and_then(|inner| open_tree(&inner, c"", clone));
        let (tree, is_inner) = match inner {
            Ok(tree) => (tree, true),
            Err(cause) => {
                debug!(%cause, "this kernel shows mounts by their roots only");
                (self.mount, false)
            }
        };
        move_mount(&tree, c"", CWD, &self.path, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)
            .map_err(|cause| MountError::Refused { path: self.path.clone(), source: cause.into(), hint: "" })?;
        Ok((Mount::new(self.path, MountedBy::Root, None), is_inner))
    }
}

fn make_nowhere(device: &OwnedFd, options: &MountOptions) -> Result<OwnedFd, Errno> {
    let context = fsopen(c"fuse", FsOpenFlags::FSOPEN_CLOEXEC)?;
    for (key, value) in [
        ("source", SOURCE.to_owned()),
        ("subtype", FILESYSTEM_SUBTYPE.to_owned()),
        ("fd", device.as_raw_fd().to_string()),
        ("rootmode", "40000".to_owned()),
        ("user_id", rustix::process::getuid().as_raw().to_string()),
        ("group_id", rustix::process::getgid().as_raw().to_string()),
        ("max_read", READ_MAX.to_string()),
    ] {
        fsconfig_set_string(&context, key, value)?;
    }
    let flags = [("default_permissions", true), ("allow_other", options.allow_other), ("ro", options.read_only)];
    for (flag, _) in flags.iter().filter(|(_, is_set)| *is_set) {
        fsconfig_set_flag(&context, *flag)?;
    }
    fsconfig_create(&context)?;
    let mut attributes =
        MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV | MountAttrFlags::MOUNT_ATTR_NOATIME;
    attributes.set(MountAttrFlags::MOUNT_ATTR_RDONLY, options.read_only);
    fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, attributes)
}
