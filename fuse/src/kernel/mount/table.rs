//! The mount table of this process, `/proc/self/mountinfo`: read instead of calling statfs, because a dead or stuck
//! mount answers no system call.

use std::ffi::OsString;
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use rustix::process::{Pid, getpgrp};

/// File system type in the mount table. (`fuse.` and a subtype, so that `df` and `findmnt` distinguish it from others.)
pub(super) const FILESYSTEM_TYPE: &str = "fuse.cv";
/// The part of it that is ours.
pub(super) const FILESYSTEM_SUBTYPE: &str = "cv";
/// That of the kernel's mounts of views.
pub const VIEW_TYPE: &str = "erofs";
/// Of the places at which an automounter waits (`x-systemd.automount`).
const AUTOMOUNT_TYPE: &str = "autofs";

/// One line of the table.
#[derive(Debug, PartialEq, Eq)]
pub struct MountEntry {
    /// `major:minor` of the device.
    pub device: String,
    pub path: PathBuf,
    pub filesystem: String,
    /// What is mounted: of a view its image.
    pub source: PathBuf,
    /// The user who has mounted it, as FUSE says.
    pub owner: Option<u32>,
    /// The process group of an automounter; `None` also where this process cannot see it.
    pub automounter: Option<Pid>,
}

impl MountEntry {
    /// Whether a cv fuse made it.
    pub fn is_ours(&self) -> bool {
        self.filesystem == FILESYSTEM_TYPE
    }

    /// Whether an automounter waits here.
    pub fn is_automount(&self) -> bool {
        self.filesystem == AUTOMOUNT_TYPE
    }

    /// `36 35 98:0 / /mnt rw,noatime shared:1 - ext4 /dev/root rw`: the optional fields end with a hyphen.
    fn parse(line: &str) -> Option<Self> {
        let (before, after) = line.split_once(" - ")?;
        let mut fields = before.split(' ');
        let device = fields.nth(2)?.to_owned();
        let path = unescape(fields.nth(1)?);
        let mut fields = after.split(' ');
        let filesystem = fields.next()?.to_owned();
        let source = unescape(fields.next().unwrap_or_default());
        let options = fields.next().unwrap_or_default();
        let number = |key: &str| options.split(',').find_map(|option| option.strip_prefix(key)?.parse::<u32>().ok());
        let group = number("pgrp=").and_then(|group| i32::try_from(group).ok());
        Some(Self {
            device,
            path,
            filesystem,
            source,
            owner: number("user_id="),
            // 0 is a group of another namespace.
            automounter: group.and_then(Pid::from_raw),
        })
    }
}

/// All mounts; what lies above another one comes later.
///
/// # Errors
/// The table cannot be read: there is no /proc, or the process has too many files open.
pub fn mounts() -> io::Result<Vec<MountEntry>> {
    let table = std::fs::read("/proc/self/mountinfo")?;
    Ok(String::from_utf8_lossy(&table).lines().filter_map(MountEntry::parse).collect())
}

/// The mounts at exactly `path`, the topmost last.
///
/// # Errors
/// As [`mounts`].
pub fn mounts_at(path: &Path) -> io::Result<Vec<MountEntry>> {
    Ok(mounts()?.into_iter().filter(|entry| entry.path == path).collect())
}

/// Whether this process mounts for the automounter at `path`, whose process group it is in. Until the mount is made the
/// kernel lets that group pass, and has all others wait: whoever looks at the place has to stay in it. Who mounts by
/// hand has another group.
pub fn mounts_for_automounter(path: &Path) -> bool {
    mounts().is_ok_and(|table| automounter_of(&table, path).is_some_and(|group| group == getpgrp()))
}

/// The process group of the automounter at `path` or above it: of several, the one that came last.
fn automounter_of(table: &[MountEntry], path: &Path) -> Option<Pid> {
    table.iter().rfind(|entry| entry.is_automount() && path.starts_with(&entry.path))?.automounter
}

/// Whether a mount of ours may be the topmost of these, which are at its place. `device`: its own; `None` where that is
/// not known.
pub fn may_be_topmost(device: Option<&str>, mounts: io::Result<Vec<MountEntry>>) -> bool {
    let Ok(mounts) = mounts else { return true };
    match device {
        Some(device) => mounts.last().is_some_and(|top| top.is_ours() && top.device == device),
        None => mounts.last().is_none_or(MountEntry::is_ours),
    }
}

/// Space, tab, newline and backslash are written as a backslash and three octal digits.
fn unescape(field: &str) -> PathBuf {
    let mut bytes = Vec::with_capacity(field.len());
    let mut rest = field.as_bytes();
    while let Some((first, tail)) = rest.split_first() {
        let escaped = (*first == b'\\')
            .then(|| tail.get(..3))
            .flatten()
            .and_then(|digits| std::str::from_utf8(digits).ok())
            .and_then(|digits| u8::from_str_radix(digits, 8).ok());
        match escaped {
            Some(byte) => {
                bytes.push(byte);
                rest = &tail[3..];
            }
            None => {
                bytes.push(*first);
                rest = tail;
            }
        }
    }
    PathBuf::from(OsString::from_vec(bytes))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_line_with_optional_fields_and_escapes_is_read() {
        let line = r"36 35 0:52 / /mnt/my\040data rw,noatime master:1 shared:7 - fuse.cv cavern rw,user_id=0";
        let entry = MountEntry::parse(line).unwrap();
        assert_eq!(
            entry,
            MountEntry {
                device: "0:52".to_owned(),
                path: PathBuf::from("/mnt/my data"),
                filesystem: "fuse.cv".to_owned(),
                source: PathBuf::from("cavern"),
                owner: Some(0),
                automounter: None,
            }
        );
        assert!(entry.is_ours());
    }

    #[test]
    fn the_last_automounter_of_a_place_says_who_mounts_for_it() {
        let group_at = |path: &str, lines: &[&str]| {
            let table: Vec<MountEntry> = lines.iter().map(|line| MountEntry::parse(line).unwrap()).collect();
            automounter_of(&table, Path::new(path)).map(|group| group.as_raw_nonzero().get())
        };
        let first = "40 28 0:38 / /mnt/my\\040data rw,relatime shared:9 - autofs systemd-1 \
                     rw,fd=52,pgrp=1,timeout=0,minproto=5,maxproto=5,direct,pipe_ino=4711";
        let second = r"41 40 0:39 / /mnt/my\040data rw - autofs  rw,fd=7,pgrp=77,timeout=300,direct";
        let mounted = r"42 41 0:52 / /mnt/my\040data rw,noatime - fuse.cv s3://b rw,user_id=0,pgrp=5";
        let at = |lines: &[&str]| group_at("/mnt/my data", lines);
        assert_eq!(at(&[first]), Some(1));
        assert_eq!(at(&[first, second]), Some(77));
        assert_eq!(at(&[first, second, mounted]), Some(77), "what it has mounted is above it");
        assert_eq!(at(&[mounted]), None);
        // One of another namespace, and one that does not say.
        let [other, mute] = ["0", ""].map(|group| second.replace("pgrp=77", &format!("pgrp={group}")));
        assert_eq!((at(&[first, other.as_str()]), at(&[first, mute.as_str()])), (None, None));
        // Of all names in a directory.
        let names = "43 28 0:40 / /misc rw - autofs auto.misc rw,fd=7,pgrp=9,timeout=300,indirect";
        assert_eq!((group_at("/misc/disk", &[names]), group_at("/miscellany", &[names])), (Some(9), None));
    }

    #[test]
    fn a_mount_is_gone_only_where_the_table_says_so() {
        let entry = |device: &str, filesystem: &str| MountEntry {
            device: device.to_owned(),
            path: PathBuf::from("/mnt"),
            filesystem: filesystem.to_owned(),
            source: PathBuf::new(),
            owner: None,
            automounter: None,
        };
        let (own, another) = (|| entry("0:52", FILESYSTEM_TYPE), || entry("0:53", FILESYSTEM_TYPE));
        let is_there = |mounts| may_be_topmost(Some("0:52"), Ok(mounts));
        assert!(is_there(vec![own()]) && is_there(vec![another(), own()]));
        assert!(!is_there(Vec::new()) && !is_there(vec![own(), another()]));
        assert!(!is_there(vec![own(), entry("0:52", "ext4")]));
        // Too many open files; and a mount whose device was not to be learned.
        assert!(may_be_topmost(Some("0:52"), Err(io::Error::from_raw_os_error(libc::EMFILE))));
        assert!(may_be_topmost(None, Ok(Vec::new())) && may_be_topmost(None, Ok(vec![another()])));
        assert!(!may_be_topmost(None, Ok(vec![own(), entry("8:1", "ext4")])));
    }

    proptest! {
        #[test]
        fn garbage_never_panics(line in ".{0,120}") {
            let _ = MountEntry::parse(&line);
            let _ = unescape(&line);
        }
    }
}
