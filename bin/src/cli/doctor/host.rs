//! What the kernel and the packages of this host give to `cv fuse`, for the user who asks.

use std::fs;
use std::io;
use std::os::unix::fs::{FileExt as _, MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use cavern_conf::schema::{Choice, Client, Fuse};
use cavern_fuse::kernel::READ_MAX;
use cavern_fuse::kernel::channel::{Channel, DEVICE};
use cavern_fuse::kernel::mount::table::{MountEntry, VIEW_TYPE, mounts, mounts_at};
use rustix::fs::{Access, Advice, fadvise};
use rustix::io::Errno;
use rustix::process::{Resource, geteuid, getrlimit};
use rustix::thread::{CapabilitySet, capabilities};

use super::finding::{Check, Finding, Level};
use crate::local::mounted::idle_automount;

/// Who is not root mounts by this program.
const HELPER: &str = "fusermount3";
const SET_USER_ID: u32 = 0o4000;
/// The FUSE protocol that is spoken begins with the first of these, passthrough and mounts that outlive their process
/// with the second.
const OLDEST: (u32, u32) = (5, 4);
const PASSTHROUGH: (u32, u32) = (6, 9);
/// EROFS reads devices past their pages.
const VIEWS: (u32, u32) = (6, 14);
/// In the path of each image of a view.
const IMAGES: &str = "/cavern-views-";
/// Names of a view that are looked at for a file to read.
const NAMES_MAX: usize = 1000;
const PAGE_BYTES: u64 = 4096;
/// With fewer, block files are opened again and again.
const DESCRIPTORS_MIN: u64 = 16_384;

/// What was seen of the host.
#[derive(Clone, Debug)]
pub struct Host {
    is_root: bool,
    /// It has CAP_SYS_ADMIN.
    is_admin: bool,
    release: String,
    /// What opening the device came to.
    device: Result<(), Errno>,
    helper: Helper,
    /// `user_allow_other` in /etc/fuse.conf; `None` where this user may not read it.
    user_allow_other: Option<bool>,
    /// Open files that a process may have at most.
    descriptors: u64,
    /// `fs.fuse.max_pages_limit`, where the kernel has it.
    request_pages: Option<u64>,
    /// Background requests that the kernel lets a mount of an ordinary user have.
    user_background: Option<u64>,
    /// The kernel has EROFS, or a module with it.
    erofs: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Helper {
    Missing,
    NotPrivileged,
    There,
}

impl Host {
    /// Looks. Needs no rights. *Blocking*.
    pub fn look() -> Self {
        let sets = capabilities(None);
        let release = rustix::system::uname().release().to_string_lossy().into_owned();
        Self {
            erofs: has_erofs(&release),
            is_root: geteuid().is_root(),
            is_admin: sets.is_ok_and(|sets| sets.effective.contains(CapabilitySet::SYS_ADMIN)),
            release,
            device: Channel::open_device().map(drop).map_err(|cause| Errno::from_io_error(&cause).unwrap_or(Errno::IO)),
            helper: helper(),
            user_allow_other: match fs::read_to_string("/etc/fuse.conf") {
                Ok(text) => Some(text.lines().any(|line| line.trim() == "user_allow_other")),
                Err(cause) if cause.kind() == io::ErrorKind::NotFound => Some(false),
                Err(_) => None,
            },
            descriptors: getrlimit(Resource::Nofile).maximum.unwrap_or(u64::MAX),
            request_pages: number("/proc/sys/fs/fuse/max_pages_limit"),
            user_background: number("/sys/module/fuse/parameters/max_user_bgreq"),
        }
    }

    /// What that means for a client with this configuration.
    pub fn judge(&self, fuse: &Fuse, client: &Client) -> Vec<Finding> {
        let mut found = vec![self.judge_device(), self.judge_kernel()];
        found.extend((!self.is_root).then(|| self.judge_helper()));
        found.extend((!self.is_root && fuse.allow_other).then(|| self.judge_allow_other()));
        found.extend(self.judge_passthrough(fuse));
        found.extend(self.judge_limits(fuse));
        found.push(self.judge_descriptors(client));
        found.push(self.judge_erofs());
        found
    }

    fn judge_erofs(&self) -> Finding {
        let what = match (self.erofs, self.is_before(VIEWS)) {
            (true, false) => return Finding::ok(Check::Erofs, "the kernel can mount views"),
            (false, _) => "the kernel has no EROFS",
            (true, true) => "the kernel reads devices of EROFS by way of their pages (Linux before 6.14)",
        };
        let why = "`cv view mount` mounts nothing here: views are below .views of the mount alone, by FUSE";
        let todo = "`modprobe erofs`, or boot Linux 6.14 or later with CONFIG_EROFS_FS_BACKED_BY_FILE, for that";
        Finding::note(Check::Erofs, what, why, todo)
    }

    fn judge_device(&self) -> Finding {
        let Err(cause) = self.device else { return Finding::ok(Check::FuseDevice, format!("{DEVICE} can be opened")) };
        let todo = match cause {
            Errno::NOENT | Errno::NXIO | Errno::NODEV => {
                "load the kernel module with `modprobe fuse`, or start the container with `--device /dev/fuse`"
            }
            _ => {
                "run as root, or give this user access to the device; a container needs `--device /dev/fuse` and \
                 `--cap-add SYS_ADMIN`"
            }
        };
        let what = format!("{DEVICE} cannot be opened: {}", io::Error::from(cause));
        Finding::error(Check::FuseDevice, what, "`cv fuse` can mount nothing", todo)
    }

    fn version(&self) -> Option<(u32, u32)> {
        let mut parts = self.release.split(|c: char| !c.is_ascii_digit());
        Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
    }

    fn is_before(&self, version: (u32, u32)) -> bool {
        self.version().is_some_and(|own| own < version)
    }

    fn judge_kernel(&self) -> Finding {
        let what = format!("the kernel is Linux {}", self.release);
        if self.is_before(OLDEST) {
            let why = "it speaks an older FUSE protocol than `cv fuse`, which needs Linux 5.4";
            return Finding::error(Check::Kernel, what, why, "boot a newer kernel; 6.9 or later has all features");
        }
        if self.is_before(PASSTHROUGH) {
            let why = "before 6.9 a mount ends with the process that serves it, and each read goes through `cv fuse`";
            return Finding::note(Check::Kernel, what, why, "boot 6.9 or later where that matters");
        }
        Finding::ok(Check::Kernel, what)
    }

    fn judge_helper(&self) -> Finding {
        let (what, todo) = match self.helper {
            Helper::There => return Finding::ok(Check::FuseHelper, format!("{HELPER} is installed")),
            Helper::Missing => (format!("{HELPER} is not in the PATH"), "install the package fuse3, or run as root"),
            Helper::NotPrivileged => (
                format!("{HELPER} is not set-user-ID root"),
                "`chmod u+s` it as root, or install the package fuse3 anew",
            ),
        };
        Finding::error(Check::FuseHelper, what, "who is not root mounts by it", todo)
    }

    fn judge_allow_other(&self) -> Finding {
        let todo = "add the line `user_allow_other` to /etc/fuse.conf, set fuse.allow_other = false, or run as root";
        match self.user_allow_other {
            Some(true) => Finding::ok(Check::FuseAllowOther, "/etc/fuse.conf has user_allow_other"),
            Some(false) => Finding::error(
                Check::FuseAllowOther,
                "fuse.allow_other is set, and /etc/fuse.conf has no user_allow_other",
                "then the kernel's helper refuses mounts that other users may enter to all but root",
                todo,
            ),
            None => {
                let why = "mounts that other users may enter are refused without user_allow_other in it";
                Finding::note(Check::FuseAllowOther, "/etc/fuse.conf may not be read by this user", why, todo)
            }
        }
    }

    fn judge_passthrough(&self, fuse: &Fuse) -> Option<Finding> {
        if fuse.direct || fuse.no_open == Choice::On || fuse.passthrough == Choice::Off {
            return None;
        }
        let cause = match (self.is_before(PASSTHROUGH), self.is_admin) {
            (true, _) => "the kernel has none (Linux 6.9 and later)",
            (false, false) => "it takes the capability CAP_SYS_ADMIN, which this user does not have",
            (false, true) => return Some(Finding::ok(Check::Passthrough, "the kernel can read block files by itself")),
        };
        let level = if fuse.passthrough == Choice::On { Level::Warning } else { Level::Note };
        let todo = "run `cv fuse` as root on Linux 6.9 or later, or set fuse.passthrough = false";
        let what = format!("no passthrough: {cause}");
        Some(Finding::new(level, Check::Passthrough, what, "reads of whole cached files go through `cv fuse`", todo))
    }

    fn judge_limits(&self, fuse: &Fuse) -> Vec<Finding> {
        let mut found = Vec::new();
        let wanted = READ_MAX as u64 / PAGE_BYTES;
        if let Some(pages) = self.request_pages.filter(|pages| *pages < wanted) {
            found.push(Finding::warning(
                Check::FuseLimits,
                format!("fs.fuse.max_pages_limit is {pages}"),
                "the kernel cuts large reads and writes into many requests",
                format!("`sysctl fs.fuse.max_pages_limit={wanted}`, and the same in /etc/sysctl.d"),
            ));
        }
        let background = u64::from(fuse.max_background);
        if let Some(limit) = self.user_background.filter(|limit| !self.is_admin && *limit < background) {
            found.push(Finding::note(
                Check::FuseLimits,
                format!("a mount of this user may have {limit} background requests, and fuse.max_background is more"),
                "read-ahead of many programs waits for its turn",
                format!("as root: echo {background} > /sys/module/fuse/parameters/max_user_bgreq"),
            ));
        }
        found
    }

    fn judge_descriptors(&self, client: &Client) -> Finding {
        let (limit, wanted) = (self.descriptors, client.descriptor_cache as u64 / 3 * 4);
        // Root raises it by itself.
        if self.is_root || limit >= wanted {
            return Finding::ok(Check::OpenFiles, "a process may have as many open files as it wants");
        }
        let level = if limit < DESCRIPTORS_MIN { Level::Warning } else { Level::Note };
        let why = "the cache of open block files (client.descriptor_cache) is made smaller, and files are opened again";
        let todo = format!("raise it to {wanted} or more: LimitNOFILE= in the unit, or /etc/security/limits.d");
        Finding::new(level, Check::OpenFiles, format!("a process may have {limit} open files"), why, todo)
    }
}

fn has_erofs(release: &str) -> bool {
    let known = fs::read_to_string("/proc/filesystems").unwrap_or_default();
    let modules = format!("/lib/modules/{release}/modules.dep");
    known.lines().any(|line| line.trim_start_matches("nodev").trim() == VIEW_TYPE)
        || fs::read_to_string(modules).unwrap_or_default().contains("/erofs.ko")
}

/// Where the kernel has mounted views.
pub fn mounted_views() -> Vec<PathBuf> {
    let is_view = |entry: &MountEntry| {
        entry.filesystem == VIEW_TYPE && entry.source.as_os_str().to_string_lossy().contains(IMAGES)
    };
    mounts().unwrap_or_default().into_iter().filter(is_view).map(|view| view.path).collect()
}

/// Whether a file of a view can be read. Waits for what serves it. *Blocking*.
pub fn look_at_view(path: &Path) -> Finding {
    judge_view(path, read_some_file(path))
}

fn judge_view(path: &Path, read: io::Result<()>) -> Finding {
    let shown = path.display();
    match read {
        Ok(()) => Finding::ok(Check::ViewMount, format!("the view at {shown} can be read")),
        Err(cause) => Finding::error(
            Check::ViewMount,
            format!("a file of the view at {shown} cannot be read: {cause}"),
            "what serves its contents has ended since it was mounted, or cannot read them",
            format!(
                "see the log of `cv fuse`; was that started anew, `cv view umount {shown}` and mount the view again"
            ),
        ),
    }
}

/// Reads a byte of the first file that is found, if there is one soon: not of what the kernel has in its pages.
fn read_some_file(top: &Path) -> io::Result<()> {
    let (mut waiting, mut left) = (vec![top.to_owned()], NAMES_MAX);
    while let Some(directory) = waiting.pop() {
        for entry in fs::read_dir(directory)?.take(left) {
            left -= 1;
            let entry = entry?;
            let (metadata, path) = (entry.metadata()?, entry.path());
            if metadata.is_dir() {
                waiting.push(path);
            } else if metadata.is_file() && metadata.len() > 0 {
                let file = fs::File::open(path)?;
                fadvise(&file, 0, None, Advice::DontNeed)?;
                return file.read_exact_at(&mut [0], metadata.len() - 1);
            }
        }
    }
    Ok(())
}

fn number(path: &str) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

fn helper() -> Helper {
    let places = std::env::var_os("PATH").unwrap_or_default();
    let mut files = std::env::split_paths(&places).filter_map(|place| fs::metadata(place.join(HELPER)).ok());
    match files.find(fs::Metadata::is_file) {
        None => Helper::Missing,
        Some(file) if file.uid() == 0 && file.permissions().mode() & SET_USER_ID != 0 => Helper::There,
        Some(_) => Helper::NotPrivileged,
    }
}

/// What is at the mount point.
#[derive(PartialEq, Eq, Debug)]
pub enum MountPoint {
    /// An automounter waits here, or on the way, and was not asked.
    Idle(PathBuf),
    Empty,
    Files,
    /// Nothing, and it can be made.
    Missing,
    /// It cannot be used, and why.
    Refused(String),
    /// A mount of ours that answers, or one whose process is gone.
    Served,
    Dead,
    /// Another file system.
    Taken(String),
}

impl MountPoint {
    /// Looks. Waits for a mount that hangs. *Blocking*.
    pub fn look(path: &Path) -> Self {
        if let Some(automount) = idle_automount(path) {
            return Self::Idle(automount);
        }
        // The parents only: of the mount point itself a dead mount says nothing.
        let parent = path.parent().and_then(|parent| parent.canonicalize().ok());
        let real = parent.zip(path.file_name()).map_or_else(|| path.to_owned(), |(parent, name)| parent.join(name));
        if let Some(top) = mounts_at(&real).unwrap_or_default().pop() {
            return match rustix::fs::statfs(path) {
                Err(Errno::NOTCONN | Errno::CONNABORTED) => Self::Dead,
                _ if top.is_ours() => Self::Served,
                _ => Self::Taken(top.filesystem),
            };
        }
        match fs::read_dir(path) {
            Ok(mut entries) => entries.next().map_or(Self::Empty, |_| Self::Files),
            Err(cause) if cause.kind() == io::ErrorKind::NotFound && can_be_made(path) => Self::Missing,
            Err(cause) => Self::Refused(cause.to_string()),
        }
    }

    pub fn judge(&self, path: &Path) -> Finding {
        let (path, check) = (path.display(), Check::MountPoint);
        let (level, what, why, todo) = match self {
            Self::Idle(automount) => {
                let what = format!("the automount at {} is idle, and is mounted on first use", automount.display());
                return Finding::ok(check, what);
            }
            Self::Empty => return Finding::ok(check, format!("{path} is an empty directory")),
            Self::Missing => return Finding::ok(check, format!("{path} is made by `cv fuse`")),
            Self::Served => return Finding::ok(check, format!("{path} is mounted, and answers")),
            Self::Files => (
                Level::Warning,
                format!("the mount point {path} has files"),
                "nobody sees them while it is mounted, and programs that run before write beside the mount",
                "move them away",
            ),
            Self::Refused(cause) => (
                Level::Error,
                format!("the mount point {path} cannot be used: {cause}"),
                "`cv fuse` does not start",
                "make it a directory of this user",
            ),
            Self::Dead => (
                Level::Error,
                format!("nobody serves the mount at {path} any more"),
                "every access fails with ENOTCONN",
                "start `cv fuse`, which clears away what it has left there itself; else `umount --lazy` it",
            ),
            Self::Taken(filesystem) => (
                Level::Warning,
                format!("a file system of type {filesystem} is mounted at {path}"),
                "`cv fuse` would be mounted over it",
                "unmount it",
            ),
        };
        Finding::new(level, check, what, why, format!("{todo}, or choose another place with fuse.mount_point"))
    }
}

/// Whether this user may make what is missing of a path.
pub fn can_be_made(path: &Path) -> bool {
    let there = path.ancestors().skip(1).find(|above| above.exists());
    there.is_some_and(|there| rustix::fs::access(there, Access::WRITE_OK | Access::EXEC_OK).is_ok())
}

#[cfg(test)]
mod tests {
    use super::super::finding::wrong;
    use super::*;

    fn good() -> Host {
        Host {
            is_root: true,
            is_admin: true,
            release: "6.14.3-arm64".to_owned(),
            device: Ok(()),
            helper: Helper::There,
            user_allow_other: Some(true),
            descriptors: 1 << 20,
            request_pages: Some(256),
            user_background: Some(1 << 12),
            erofs: true,
        }
    }

    fn user() -> Host {
        Host { is_root: false, is_admin: false, ..good() }
    }

    #[test]
    fn what_a_host_lacks_is_named() {
        use Check::{Erofs, FuseAllowOther, FuseDevice, FuseHelper, FuseLimits, Kernel, OpenFiles, Passthrough};
        use Level::{Error, Note, Warning};

        let (fuse, client) = (Fuse::default(), Client::default());
        let told = |host: Host| wrong(&host.judge(&fuse, &client));
        assert_eq!(told(good()), []);
        assert_eq!(told(Host { device: Err(Errno::NOENT), ..good() }), [(Error, FuseDevice)]);
        assert_eq!(told(Host { device: Err(Errno::PERM), ..good() }), [(Error, FuseDevice)]);
        let of = |release: &str| told(Host { release: release.to_owned(), ..good() });
        assert_eq!(of("5.3.0"), [(Error, Kernel), (Note, Passthrough), (Note, Erofs)]);
        assert_eq!(of("6.8.1"), [(Note, Kernel), (Note, Passthrough), (Note, Erofs)]);
        assert_eq!(of("6.13.0"), [(Note, Erofs)]);
        assert_eq!(told(Host { erofs: false, ..good() }), [(Note, Erofs)]);
        assert_eq!(told(Host { request_pages: Some(32), ..good() }), [(Warning, FuseLimits)]);
        // An ordinary user needs more of the host.
        assert_eq!(told(user()), [(Note, Passthrough)]);
        for helper in [Helper::Missing, Helper::NotPrivileged] {
            assert_eq!(told(Host { helper, ..user() }), [(Error, FuseHelper), (Note, Passthrough)]);
            assert_eq!(told(Host { helper, ..good() }), []);
        }
        let refused = Host { user_allow_other: Some(false), ..user() };
        assert_eq!(told(refused.clone()), [(Error, FuseAllowOther), (Note, Passthrough)]);
        let alone = Fuse { allow_other: false, passthrough: Choice::Off, ..Fuse::default() };
        assert_eq!(wrong(&refused.judge(&alone, &client)), []);
        let demanded = Fuse { passthrough: Choice::On, ..Fuse::default() };
        assert_eq!(wrong(&user().judge(&demanded, &client)), [(Warning, Passthrough)]);
        let few = Host { user_background: Some(100), descriptors: 1024, ..user() };
        assert_eq!(told(few), [(Note, Passthrough), (Note, FuseLimits), (Warning, OpenFiles)]);
    }

    #[test]
    fn a_view_is_judged_by_a_file_of_it() {
        let place = tempfile::tempdir().unwrap();
        read_some_file(place.path()).unwrap();
        fs::create_dir(place.path().join("deep")).unwrap();
        fs::write(place.path().join("deep/file"), b"content").unwrap();
        fs::write(place.path().join("empty"), b"").unwrap();
        read_some_file(place.path()).unwrap();
        assert!(read_some_file(&place.path().join("none")).is_err());
        let judged = |read| wrong(&[judge_view(place.path(), read)]);
        assert_eq!(judged(Ok(())), []);
        assert_eq!(judged(Err(Errno::NOTCONN.into())), [(Level::Error, Check::ViewMount)]);
    }

    #[test]
    fn a_mount_point_is_seen_as_it_is() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().canonicalize().unwrap();
        assert_eq!(MountPoint::look(&path), MountPoint::Empty);
        fs::write(path.join("file"), b"x").unwrap();
        assert_eq!(MountPoint::look(&path), MountPoint::Files);
        assert_eq!(MountPoint::look(&path.join("a/b")), MountPoint::Missing);
        for name in ["file", "file/below"] {
            assert!(matches!(MountPoint::look(&path.join(name)), MountPoint::Refused(_)), "{name}");
        }
        // By whatever way it is named.
        std::os::unix::fs::symlink("/", path.join("link")).unwrap();
        for mounted in [Path::new("/proc"), &path.join("link/proc")] {
            assert!(matches!(MountPoint::look(mounted), MountPoint::Taken(_)), "{mounted:?}");
        }
        let levels = [
            (MountPoint::Served, Level::Ok),
            (MountPoint::Idle("/mnt".into()), Level::Ok),
            (MountPoint::Files, Level::Warning),
            (MountPoint::Taken("ext4".to_owned()), Level::Warning),
            (MountPoint::Dead, Level::Error),
            (MountPoint::Refused("no".to_owned()), Level::Error),
        ];
        for (seen, level) in levels {
            let finding = seen.judge(Path::new("/mnt"));
            assert_eq!(
                (finding.level, wrong(std::slice::from_ref(&finding)).len()),
                (level, usize::from(level > Level::Ok))
            );
        }
    }
}
