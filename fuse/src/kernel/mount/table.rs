//! The mount table of this process, `/proc/self/mountinfo`: read instead of calling statfs, because a dead or stuck
//! mount answers no system call.

use std::ffi::OsString;
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

/// File system type in the mount table. (`fuse.` and a subtype, so that `df` and `findmnt` distinguish it from others.)
pub(super) const FILESYSTEM_TYPE: &str = "fuse.cv";
/// The part of it that is ours.
pub(super) const FILESYSTEM_SUBTYPE: &str = "cv";
/// That of the kernel's mounts of views.
pub const VIEW_TYPE: &str = "erofs";
/// Of the places at which an automounter waits (`x-systemd.automount`).
const AUTOMOUNTER_TYPE: &str = "autofs";

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
}

impl MountEntry {
    /// Whether a cv fuse made it.
    pub fn is_ours(&self) -> bool {
        self.filesystem == FILESYSTEM_TYPE
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
        let owner = options.split(',').find_map(|option| option.strip_prefix("user_id=")?.parse().ok());
        Some(Self { device, path, filesystem, source, owner })
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

/// Whether an automounter has mounts made at `path`. While there is none, the kernel lets pass to that place who is in
/// the automounter's process group, and nobody else: who mounts there stays in the group of whoever has started him.
pub fn is_automounted(path: &Path) -> bool {
    mounts_at(path).is_ok_and(|mounts| mounts.iter().any(|mount| mount.filesystem == AUTOMOUNTER_TYPE))
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
            }
        );
        assert!(entry.is_ours());
    }

    #[test]
    fn a_mount_is_gone_only_where_the_table_says_so() {
        let entry = |device: &str, filesystem: &str| MountEntry {
            device: device.to_owned(),
            path: PathBuf::from("/mnt"),
            filesystem: filesystem.to_owned(),
            source: PathBuf::new(),
            owner: None,
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
