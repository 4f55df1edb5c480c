//! Mounting and unmounting: mount(2) itself as root, `fusermount3` otherwise.
//!
//! A daemon that died leaves its mount behind, and every access to it fails with `ENOTCONN` ("Transport endpoint is not
//! connected"). Such a leftover of ours is detached before a new mount is made in its place.

mod below;
mod helper;
pub mod options;
pub mod staged;
pub mod table;

use std::ffi::CString;
use std::fs::Permissions;
use std::io::{self, Write as _};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, openat, statat};
use rustix::io::Errno;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MountFlags, UnmountFlags, fsconfig_create, fsmount, fsopen,
};
use tracing::{info, warn};

use super::channel::Channel;
use super::session::READ_MAX;
use options::{MountError, MountOptions};
use table::{FILESYSTEM_TYPE, MountEntry, may_be_topmost, mounts_at};

/// A mount whose daemon does not answer a stat for this long is alive but stuck.
const PROBE_TIMEOUT: Duration = Duration::from_secs(2);
/// Dead mounts stacked at one place that are cleared away at most.
const LEFTOVERS_MAX: usize = 16;

/// Who made a mount, and unmounts it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum MountedBy {
    Root,
    Helper,
}

/// A mount of ours. Dropping it detaches it, so that none is left behind dead.
#[derive(Debug)]
pub struct Mount {
    path: PathBuf,
    maker: MountedBy,
    /// `major:minor`; `None` where the mount table cannot be read.
    device: Option<String>,
    control: Arc<Control>,
    mounted: bool,
}

/// Whether a mount was in use when it was to be removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unmounted {
    Yes,
    /// Somebody has a file open or a working directory in it.
    Busy,
}

impl Mount {
    /// Mounts at `path`, made if it is missing, and returns the descriptor of the new connection.
    pub fn make(path: &Path, options: &MountOptions) -> Result<(Self, OwnedFd), MountError> {
        let path = prepare(path)?;
        let maker = if rustix::process::geteuid().is_root() { MountedBy::Root } else { MountedBy::Helper };
        let device = match maker {
            MountedBy::Root => mount_directly(&path, options)?,
            MountedBy::Helper => helper::mount(&path, options)?,
        };
        Ok((Self::new(path, maker, None), device))
    }

    /// A mount that a process before this one made. Without its device it is the one that is at `path` now.
    pub fn adopt(path: PathBuf, is_by_root: bool, device: Option<String>) -> Self {
        Self::new(path, if is_by_root { MountedBy::Root } else { MountedBy::Helper }, device)
    }

    fn new(path: PathBuf, maker: MountedBy, device: Option<String>) -> Self {
        let device = device.or_else(|| Self::device_at(&path));
        let control = Arc::new(Control::open(&path, device.as_deref()));
        Self { path, maker, device, control, mounted: true }
    }

    /// Whether it was made without a helper.
    pub fn is_by_root(&self) -> bool {
        self.maker == MountedBy::Root
    }

    /// `major:minor` of the topmost mount of ours at a place, which names its connection on this host.
    pub fn device_at(path: &Path) -> Option<String> {
        mount_of_ours_at(path).map(|mount| mount.device)
    }

    /// The user who has made that mount.
    pub fn owner_at(path: &Path) -> Option<u32> {
        mount_of_ours_at(path).and_then(|mount| mount.owner)
    }

    /// `major:minor`, if the mount table shows it.
    pub fn device(&self) -> Option<&str> {
        self.device.as_deref()
    }

    /// Whether this mount is the topmost at its place, as far as is known. Somebody may have unmounted it, though
    /// not for those who have files open, and mounted another.
    pub fn is_there(&self) -> bool {
        may_be_topmost(self.device(), mounts_at(&self.path))
    }

    /// What ends its connection, also when it is at its place no more.
    pub fn control(&self) -> Arc<Control> {
        Arc::clone(&self.control)
    }

    /// It is left as it is.
    pub fn leave(mut self) {
        self.mounted = false;
    }

    /// The mount point, without symlinks.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Unmounts unless the mount is in use. What others have mounted at its place stays; views that are mounted below
    /// are detached. To be called while the mount is served.
    pub fn unmount(&mut self) -> Unmounted {
        if !self.is_there() {
            self.mounted = false;
            return Unmounted::Yes;
        }
        let mut result = self.try_unmount();
        let is_busy = result.as_ref().is_err_and(|cause| cause.raw_os_error() == Some(libc::EBUSY));
        if is_busy && below::detach_views(&self.path) {
            result = self.try_unmount();
        }
        match result {
            Ok(()) => {}
            // Somebody unmounted it already.
            Err(cause) if cause.raw_os_error() == Some(libc::EINVAL) => {}
            Err(_) => return Unmounted::Busy,
        }
        self.mounted = false;
        Unmounted::Yes
    }

    fn try_unmount(&self) -> io::Result<()> {
        match self.maker {
            MountedBy::Root => rustix::mount::unmount(&self.path, UnmountFlags::NOFOLLOW).map_err(io::Error::from),
            MountedBy::Helper => helper::unmount(&self.path, helper::Lazily::No),
        }
    }

    /// Takes the mount away from whoever uses it: open files fail from now on, and the event loops end. What is mounted
    /// below goes with it. Waits for nobody who would have to serve it.
    pub fn detach(&mut self) {
        if !std::mem::replace(&mut self.mounted, false) || !self.is_there() {
            return;
        }
        let result = match self.maker {
            MountedBy::Root => {
                let flags = UnmountFlags::FORCE | UnmountFlags::DETACH | UnmountFlags::NOFOLLOW;
                rustix::mount::unmount(&self.path, flags).map_err(io::Error::from)
            }
            MountedBy::Helper => {
                // The lazy unmount does without.
                let _ = self.control.abort();
                helper::unmount(&self.path, helper::Lazily::Yes)
            }
        };
        if let Err(cause) = result
            && cause.raw_os_error() != Some(libc::EINVAL)
        {
            warn!(mount_point = %self.path.display(), %cause, "the mount could not be detached");
        }
    }

    /// Sets the kernel's read-ahead for this mount. The kernel offers 128 KiB whatever INIT asks for, so this goes
    /// through sysfs, which takes root; without it streams need eight times the requests, and work.
    pub fn set_read_ahead(&self, bytes: u64) {
        let Some(device) = &self.device else { return };
        let file = format!("/sys/class/bdi/{device}/read_ahead_kb");
        if let Err(cause) = std::fs::write(&file, (bytes / 1024).to_string()) {
            warn!(file, %cause, "the kernel's read-ahead could not be set: streams will be slower");
        }
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        self.detach();
    }
}

/// The topmost mount at a place, if it is known to be ours.
fn mount_of_ours_at(path: &Path) -> Option<MountEntry> {
    mounts_at(path).unwrap_or_default().pop().filter(MountEntry::is_ours)
}

fn mount_directly(path: &Path, options: &MountOptions) -> Result<OwnedFd, MountError> {
    let device = open_device()?;
    let mut data = format!(
        "fd={},rootmode=40000,user_id={},group_id={},default_permissions,max_read={READ_MAX}",
        device.as_raw_fd(),
        rustix::process::getuid().as_raw(),
        rustix::process::getgid().as_raw(),
    );
    if options.allow_other {
        data.push_str(",allow_other");
    }
    let data = CString::new(data).map_err(|cause| MountError::Device(cause.into()))?;
    let mut flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOATIME;
    flags.set(MountFlags::RDONLY, options.read_only);
    flags.set(MountFlags::NOEXEC, !options.exec);
    rustix::mount::mount(options.source.as_str(), path, FILESYSTEM_TYPE, flags, data.as_c_str()).map_err(|cause| {
        let hint = match cause {
            Errno::PERM => ": mounting takes the capability CAP_SYS_ADMIN",
            Errno::INVAL => ": is /dev/fuse the kernel's FUSE device?",
            Errno::NODEV => ": the kernel has no FUSE; load it with `modprobe fuse`",
            _ => "",
        };
        MountError::Refused { path: path.to_owned(), source: cause.into(), hint }
    })?;
    Ok(device)
}

fn open_device() -> Result<OwnedFd, MountError> {
    Channel::open_device().map_err(|cause| match cause.raw_os_error() {
        Some(libc::ENOENT | libc::ENXIO | libc::ENODEV) => MountError::NoDevice(cause),
        Some(libc::EACCES | libc::EPERM) => MountError::DeviceDenied(cause),
        _ => MountError::Device(cause),
    })
}

/// Makes the mount point ready: there, a directory, and free of dead mounts of ours. Returns it without symlinks.
fn prepare(path: &Path) -> Result<PathBuf, MountError> {
    let failed = |source| MountError::MountPoint { path: path.to_owned(), source };
    // The parents only: the mount point itself may be a dead mount, where no system call succeeds.
    let absolute = std::path::absolute(path).map_err(failed)?;
    let real = match (absolute.parent(), absolute.file_name()) {
        (Some(parent), Some(name)) => {
            create_for_all(parent).map_err(failed)?;
            parent.canonicalize().map_err(failed)?.join(name)
        }
        _ => absolute,
    };
    for _ in 0..LEFTOVERS_MAX {
        // Where nothing is known of it, mounting goes on with that.
        let Some(top) = mount_of_ours_at(&real) else { break };
        clear_leftover(&real, &top)?;
    }
    create_for_all(&real).map_err(failed)?;
    let real = real.canonicalize().map_err(failed)?;
    if !is_directory(&real).map_err(failed)? {
        return Err(MountError::NotADirectory { path: path.to_owned() });
    }
    Ok(real)
}

/// Whether a directory is at `path`. An automounter that waits there is not asked, as it is by `Path::is_dir`.
///
/// # Errors
/// Those of stat(2).
pub fn is_directory(path: &Path) -> io::Result<bool> {
    let found = statat(CWD, path, AtFlags::NO_AUTOMOUNT)?;
    Ok(FileType::from_raw_mode(found.st_mode) == FileType::Directory)
}

/// Creates a directory, and its parents, for everyone to look into, whatever else this process creates.
fn create_for_all(path: &Path) -> io::Result<()> {
    match std::fs::create_dir(path) {
        Ok(()) => std::fs::set_permissions(path, Permissions::from_mode(0o755)),
        Err(cause) if cause.kind() == io::ErrorKind::AlreadyExists || path.is_dir() => Ok(()),
        Err(cause) if cause.kind() == io::ErrorKind::NotFound => match path.parent() {
            Some(parent) => create_for_all(parent).and_then(|()| create_for_all(path)),
            None => Err(cause),
        },
        Err(cause) => Err(cause),
    }
}

/// Detaches a mount of ours whose daemon is gone.
fn clear_leftover(path: &Path, mount: &MountEntry) -> Result<(), MountError> {
    if !is_dead(path) {
        return Err(MountError::Busy { path: path.to_owned() });
    }
    info!(mount_point = %path.display(), device = mount.device, "a dead mount of an earlier cv fuse is detached");
    let detached = if rustix::process::geteuid().is_root() {
        rustix::mount::unmount(path, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW).map_err(io::Error::from)
    } else {
        helper::unmount(path, helper::Lazily::Yes)
    };
    detached.map_err(|source| MountError::MountPoint { path: path.to_owned(), source })
}

/// Whether nobody serves the mount at `path` any more. The kernel answers `stat` of a dead mount from its own cache for
/// as long as the attributes of the root are good, but passes each `statfs` on. A daemon that is there but stuck would
/// keep us waiting, so the question is asked by a thread that may be left behind. *Blocks* for two seconds at most.
pub fn is_dead(path: &Path) -> bool {
    let (answer, answered) = mpsc::channel();
    let probed = path.to_owned();
    let probe = std::thread::Builder::new().name("mount-probe".to_owned()).spawn(move || {
        let dead = rustix::fs::statfs(&probed).is_err_and(|cause| matches!(cause, Errno::NOTCONN | Errno::CONNABORTED));
        // Nobody listens after the timeout.
        let _ = answer.send(dead);
    });
    probe.is_ok() && answered.recv_timeout(PROBE_TIMEOUT).unwrap_or(false)
}

/// The directory of a connection in the kernel's control file system, whose files belong to the user who mounted. It is
/// empty when the connection is gone, whichever other one has the number of its device then.
#[derive(Debug)]
pub struct Control {
    directory: Result<OwnedFd, Errno>,
}

impl Control {
    /// Of the mount of a device at `path`. When another one is there, the number may be another's, too.
    fn open(path: &Path, device: Option<&str>) -> Self {
        let Some(device) = device else { return Self { directory: Err(Errno::NODEV) } };
        // The directory's name is the minor number of the mount's device.
        let minor = device.split_once(':').map_or(device, |(_, minor)| minor);
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let usual = format!("/sys/fs/fuse/connections/{minor}");
        let directory = control_nowhere()
            .and_then(|control| openat(control, minor, flags, Mode::empty()))
            .or_else(|cause| openat(CWD, usual, flags, Mode::empty()).map_err(|_| cause))
            // In the directory of a connection, this says that the connection is gone.
            .map_err(|cause| if cause == Errno::NOENT { Errno::NODEV } else { cause });
        let is_there = Mount::device_at(path).as_deref() == Some(device);
        Self { directory: if is_there { directory } else { Err(Errno::NODEV) } }
    }

    /// Ends the connection, wherever it is mounted; `false` when it is gone already. *Blocking*.
    ///
    /// # Errors
    /// The connection is another user's. Or the mount was not at its place when it was made or adopted; or the control
    /// file system was not mounted then, and this is not root.
    pub fn abort(&self) -> io::Result<bool> {
        let directory = self.directory.as_ref().map_err(|cause| *cause);
        match directory.and_then(|inner| openat(inner, c"abort", OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty())) {
            Ok(file) => std::fs::File::from(file).write_all(b"1").map(|()| true),
            Err(Errno::NOENT | Errno::NOTCONN) => Ok(false),
            Err(cause) => Err(cause.into()),
        }
    }
}

/// The control file system, mounted at no place, as root may: containers seldom have it at its own, and read-only then.
fn control_nowhere() -> Result<OwnedFd, Errno> {
    let context = fsopen(c"fusectl", FsOpenFlags::FSOPEN_CLOEXEC)?;
    fsconfig_create(&context)?;
    fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::empty())
}
