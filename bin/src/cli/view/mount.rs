//! `cv view mount` and `umount`: a view as a file system of the kernel.
//!
//! The image is a file of this host, and its devices are files of the mount of Cavern: no master is asked. mount(2) by
//! its parts, since a view may have more devices than one page of options names. Devices are read past the kernel's
//! pages of them, which would give a part of a read that fails, and zeros for the rest.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use cavern_fuse::kernel::mount::table::{VIEW_TYPE, mounts_at};
use cavern_proto::view_file::DEVICES_MAX;
use clap::Args;
use rustix::fs::CWD;
use rustix::io::Errno;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MoveMountFlags, UnmountFlags, fsconfig_create, fsconfig_set_flag,
    fsconfig_set_string, fsmount, fsopen, move_mount, unmount,
};
use serde_json::json;

use crate::cli::connect::ResultArgs;
use crate::console;
use crate::error::{CliError, Context as _};
use crate::local::mounted;

/// Of a value of fsconfig(2).
const PATH_BYTES_MAX: usize = 255;

const NO_EROFS: &str = "; this kernel has no EROFS: load it with `modprobe erofs`, or take one that is built with \
    CONFIG_EROFS_FS and CONFIG_EROFS_FS_BACKED_BY_FILE";
const NO_DIRECT_IO: &str = "; reading its devices safely (directio) takes Linux 6.14 or later";
const NOT_FROM_FILE: &str = "; the kernel mounts no image from there: it must have CONFIG_EROFS_FS_BACKED_BY_FILE, and \
    client.staging_directory must be on a local disk, not on overlayfs or another file system that lies on one";
const NOT_ROOT: &str = "; mounting takes root (CAP_SYS_ADMIN)";

#[derive(Args)]
pub struct ViewMountArgs {
    /// Name of the view.
    name: String,
    /// Directory that is to show it [default: .views/NAME in the mount of Cavern].
    directory: Option<PathBuf>,
    /// Mount of Cavern that has its contents, if it is not that of the configuration.
    #[arg(long, value_name = "DIR")]
    mount_point: Option<PathBuf>,
}

#[derive(Args)]
pub struct ViewUmountArgs {
    /// Name of the view, where it is mounted in the mount of Cavern; or the directory that shows it, with a slash.
    #[arg(value_name = "NAME|DIRECTORY")]
    what: PathBuf,
    /// That mount of Cavern, if it is not that of the configuration.
    #[arg(long, value_name = "DIR")]
    mount_point: Option<PathBuf>,
}

/// The directory of the views in the mount of Cavern that is meant.
fn views_of(mount_point: Option<PathBuf>, result: &ResultArgs) -> Result<PathBuf, CliError> {
    let mount_point = match mount_point {
        Some(mount_point) => mount_point,
        None => result.cluster.config()?.fuse.mount_point,
    };
    let real = mount_point.canonicalize().context(format_args!("cannot look at {}", mount_point.display()))?;
    if mounted::cavern_mount_above(&real).is_none() {
        return Err(CliError::Failed(format!(
            "nothing of Cavern is mounted at {}: start `cv fuse`, or name its mount with --mount-point",
            mount_point.display()
        )));
    }
    Ok(real.join(".views"))
}

/// Whether the kernel has a view mounted there, as far as can be seen.
fn is_mounted(path: &Path) -> bool {
    let top = mounts_at(path).unwrap_or_default().pop();
    top.is_some_and(|top| top.filesystem == VIEW_TYPE)
}

impl ViewMountArgs {
    pub fn run(self, result: &ResultArgs) -> Result<(), CliError> {
        let Self { name, directory, mount_point } = self;
        if name.contains(['/', '@']) || name.starts_with('.') {
            return Err(CliError::Usage(format!("{name} is no name of a view: `cv view list` shows them")));
        }
        let views = views_of(mount_point, result)?;
        let of_view = |which: &str| views.join(format!("{name}{which}"));
        let image = std::fs::read_link(of_view("@image")).map_err(|cause| match Errno::from_io_error(&cause) {
            Some(Errno::NOENT) => {
                CliError::NotFound(format!("there is no view {name} in {}: see `cv view list`", views.display()))
            }
            _ => CliError::Failed(format!("cannot find the image of {name} in {}: {cause}", views.display())),
        })?;
        let mut devices = Vec::new();
        for number in 1..=DEVICES_MAX {
            let device = of_view(&format!("@{number}"));
            if !device.try_exists().context(format_args!("cannot look at {}", device.display()))? {
                break;
            }
            devices.push(device);
        }
        let (shown, is_within) = (of_view(""), directory.is_none());
        let target = directory.unwrap_or_else(|| shown.clone());
        let target = target.canonicalize().context(format_args!("cannot mount at {}", target.display()))?;
        if is_mounted(&target) {
            return Err(CliError::Failed(format!("a view is mounted at {} already", target.display())));
        }
        mount(&image, &devices, &target).map_err(|cause| {
            let (target, shown) = (target.display(), shown.display());
            CliError::Failed(format!(
                "cannot mount {name} at {target}: {cause}; {shown} shows it by FUSE, without that"
            ))
        })?;
        if is_within && !result.json {
            console::remark(
                "it stays until `cv fuse` is replaced or loses its session, and `cv fuse` shows the view from then on: \
                 name a directory for one that stays",
            );
        }
        let view = json!({"name": name, "directory": target, "image": image, "devices": devices});
        result.show(&view, || console::line(format_args!("{name} is mounted at {}", target.display())))
    }
}

impl ViewUmountArgs {
    pub fn run(self, result: &ResultArgs) -> Result<(), CliError> {
        let Self { what, mount_point } = self;
        let target = if what.as_os_str().as_encoded_bytes().contains(&b'/') {
            // A mount whose contents nobody serves any more is as good.
            let real = what.canonicalize().or_else(|_unreadable| std::path::absolute(&what));
            real.context(format_args!("cannot find {}", what.display()))?
        } else {
            views_of(mount_point, result)?.join(&what)
        };
        let shown = target.display();
        if !is_mounted(&target) {
            return Err(CliError::Failed(format!("no view is mounted at {shown}")));
        }
        unmount(target.as_path(), UnmountFlags::NOFOLLOW).map_err(|cause| {
            let hint = match cause {
                Errno::BUSY => ": close its files first, or `umount --lazy` it",
                Errno::PERM => NOT_ROOT,
                _ => "",
            };
            CliError::Failed(format!("cannot unmount {shown}: {cause}{hint}"))
        })?;
        result.show(&json!({"directory": target}), || console::line(format_args!("{shown} is unmounted")))
    }
}

/// The error is a clause, with what to do about it.
fn mount(image: &Path, devices: &[PathBuf], target: &Path) -> Result<(), String> {
    let mut paths = devices.iter().map(PathBuf::as_path).chain([image]);
    if let Some(long) = paths.find(|path| path.as_os_str().len() > PATH_BYTES_MAX) {
        let shorter = "choose a shorter fuse.mount_point, or client.staging_directory";
        return Err(format!("the kernel takes paths of {PATH_BYTES_MAX} bytes, and not {}; {shorter}", long.display()));
    }
    let context = fsopen(VIEW_TYPE, FsOpenFlags::FSOPEN_CLOEXEC).map_err(|cause| match cause {
        Errno::NODEV | Errno::NOENT => format!("{cause}{NO_EROFS}"),
        Errno::PERM => format!("{cause}{NOT_ROOT}"),
        _ => cause.to_string(),
    })?;
    fsconfig_set_string(&context, "source", image).map_err(|cause| told(cause, &context))?;
    for device in devices {
        fsconfig_set_string(&context, "device", device.as_path()).map_err(|cause| told(cause, &context))?;
    }
    fsconfig_set_flag(&context, "directio").map_err(|cause| match cause {
        Errno::INVAL => format!("{}{NO_DIRECT_IO}", told(cause, &context)),
        _ => told(cause, &context),
    })?;
    fsconfig_create(&context).map_err(|cause| match cause {
        Errno::NOTBLK => format!("{}{NOT_FROM_FILE}", told(cause, &context)),
        _ => told(cause, &context),
    })?;
    let attributes =
        MountAttrFlags::MOUNT_ATTR_RDONLY | MountAttrFlags::MOUNT_ATTR_NODEV | MountAttrFlags::MOUNT_ATTR_NOSUID;
    let made = fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, attributes).map_err(|cause| told(cause, &context))?;
    move_mount(&made, c"", CWD, target, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH).map_err(|cause| cause.to_string())
}

/// An error, and what the kernel says about it.
fn told(cause: Errno, context: &OwnedFd) -> String {
    let (mut text, mut message) = (cause.to_string(), [0; 512]);
    // Each is read once; there are few.
    while let Ok(length) = rustix::io::read(context, &mut message) {
        text.push_str(&format!(" ({})", String::from_utf8_lossy(&message[..length]).trim()));
        if length == 0 || text.len() > 2048 {
            break;
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_keeps_the_kernel_from_mounting_is_said_with_what_to_do() {
        let directory = tempfile::tempdir().unwrap();
        let image = directory.path().join("image");
        std::fs::write(&image, [0; 8192]).unwrap();
        let refused = mount(&image, &[], directory.path()).unwrap_err();
        let is_root = rustix::process::geteuid().is_root();
        // No image at all; or the host has no EROFS, or too old a kernel for it.
        let known = [NO_EROFS, NO_DIRECT_IO, NOT_FROM_FILE, NOT_ROOT].iter().any(|hint| refused.contains(hint));
        assert!(known || is_root && refused.contains("nvalid"), "{refused}");
        assert!(!is_mounted(directory.path()));
    }
}
