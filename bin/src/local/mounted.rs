//! Whether something is mounted at a path, asked of the kernel's mount table: a `stat` could hang on a dead mount.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use rustix::mount::{UnmountFlags, unmount};

/// Type of a mount of Cavern in the kernel's table.
const CAVERN: &[u8] = b"fuse.cv";

/// True when the uppermost file system at `path` (absolute, without symlinks) is a FUSE mount. Anything else, say a
/// disk that the mount point lies on, is not ours to look at or to undo.
pub fn is_mounted(path: &Path) -> io::Result<bool> {
    Ok(is_fuse_on_top(&fs::read("/proc/self/mountinfo")?, path))
}

/// The nearest mount of Cavern that a path lies in, or is; symbolic links in the path are not looked through.
pub fn cavern_mount_above(path: &Path) -> Option<PathBuf> {
    let table = fs::read("/proc/self/mountinfo").ok()?;
    let is_ours = |above: &&Path| kind_on_top(&table, above).is_some_and(|kind| kind == CAVERN);
    path.ancestors().find(is_ours).map(Path::to_owned)
}

/// The type of the file system that a path (absolute, without symlinks) lies in: `ext4`, `fuse.cv`.
pub fn kind_of(path: &Path) -> Option<String> {
    let table = fs::read("/proc/self/mountinfo").ok()?;
    let kind = path.ancestors().find_map(|above| kind_on_top(&table, above))?;
    Some(String::from_utf8_lossy(kind).into_owned())
}

fn is_fuse_on_top(table: &[u8], path: &Path) -> bool {
    kind_on_top(table, path).is_some_and(|kind| kind == b"fuse" || kind.starts_with(b"fuse."))
}

/// The type of the uppermost file system that is mounted at a path.
fn kind_on_top<'t>(table: &'t [u8], path: &Path) -> Option<&'t [u8]> {
    let wanted = path.as_os_str().as_bytes();
    let mut top = None;
    for line in table.split(|byte| *byte == b'\n') {
        // 36 35 98:0 /root /mount\040point rw,noatime master:1 - fuse.cv cavern rw
        let mut fields = line.split(|byte| *byte == b' ');
        if fields.nth(4).is_some_and(|field| unescape(field) == wanted) {
            top = fields.skip_while(|field| *field != b"-").nth(1);
        }
    }
    top
}

/// Mounts of any kind at one of these paths (absolute, without symlinks), or below it.
pub fn mounts_below(paths: &[PathBuf]) -> io::Result<Vec<PathBuf>> {
    Ok(below(&fs::read("/proc/self/mountinfo")?, paths))
}

fn below(table: &[u8], paths: &[PathBuf]) -> Vec<PathBuf> {
    let points = table.split(|byte| *byte == b'\n').filter_map(|line| line.split(|byte| *byte == b' ').nth(4));
    let points = points.map(|field| PathBuf::from(OsString::from_vec(unescape(field))));
    points.filter(|point| paths.iter().any(|path| point.starts_with(path))).collect()
}

/// Detaches whatever is mounted at `path`; opened files stay usable until they are closed.
pub fn detach(path: &Path) -> io::Result<()> {
    match unmount(path, UnmountFlags::DETACH) {
        Ok(()) => Ok(()),
        Err(rustix::io::Errno::PERM) => {
            let status = Command::new("fusermount3").arg("-uz").arg(path).stderr(Stdio::null()).status()?;
            if status.success() { Ok(()) } else { Err(io::Error::other("fusermount3 -uz failed")) }
        }
        Err(error) => Err(error.into()),
    }
}

/// Space, tab, newline and backslash are written as `\ooo` (octal).
fn unescape(field: &[u8]) -> Vec<u8> {
    let mut plain = Vec::with_capacity(field.len());
    let mut rest = field;
    while let [first, tail @ ..] = rest {
        match tail {
            [a @ b'0'..=b'3', b @ b'0'..=b'7', c @ b'0'..=b'7', after @ ..] if *first == b'\\' => {
                plain.push((a - b'0') << 6 | (b - b'0') << 3 | (c - b'0'));
                rest = after;
            }
            _ => {
                plain.push(*first);
                rest = tail;
            }
        }
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mount_table_is_read_with_its_escapes() {
        let table = b"22 1 8:1 / / rw - ext4 /dev/sda rw\n\
            23 22 8:2 / /my\\040data rw shared:2 - xfs /dev/sdb rw\n\
            24 23 0:40 / /my\\040data rw - fuse.cv cavern ro\n\
            25 22 0:41 / /x rw - fuse.cv cavern ro\n\
            26 25 8:3 / /x rw - ext4 /dev/sdc rw\n";
        assert!(is_fuse_on_top(table, Path::new("/my data")));
        assert!(!is_fuse_on_top(table, Path::new("/x")), "a disk lies above");
        assert!(!is_fuse_on_top(table, Path::new("/")));
        assert!(!is_fuse_on_top(table, Path::new("/my")));
        assert_eq!(kind_on_top(table, Path::new("/my data")), Some(CAVERN));
        assert_eq!(below(table, &["/my data".into()]), [Path::new("/my data"), Path::new("/my data")]);
        assert!(below(table, &["/my".into(), "/y".into()]).is_empty());
        assert!(!is_mounted(Path::new("/proc")).unwrap());
        assert_eq!(unescape(br"/a\040b\134c"), br"/a b\c");
        assert_eq!(unescape(br"/a\"), br"/a\");
    }
}
