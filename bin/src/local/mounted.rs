//! Whether something is mounted at a path, asked of the kernel's mount table: a `stat` could hang on a dead mount.

use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use cavern_fuse::kernel::mount::table::{MountEntry, mounts};
use rustix::mount::{UnmountFlags, unmount};

/// The uppermost mount at a path.
fn uppermost<'t>(table: &'t [MountEntry], path: &Path) -> Option<&'t MountEntry> {
    table.iter().rev().find(|mount| mount.path == path)
}

/// True when the uppermost file system at `path` (absolute, without symlinks) is a FUSE mount. Anything else, say a
/// disk that the mount point lies on, is not ours to look at or to undo.
pub fn is_mounted(path: &Path) -> io::Result<bool> {
    let is_fuse = |mount: &MountEntry| mount.filesystem == "fuse" || mount.filesystem.starts_with("fuse.");
    Ok(uppermost(&mounts()?, path).is_some_and(is_fuse))
}

/// The nearest mount of Cavern that a path lies in, or is; symbolic links in the path are not looked through.
pub fn cavern_mount_above(path: &Path) -> Option<PathBuf> {
    let table = mounts().ok()?;
    path.ancestors().find(|above| uppermost(&table, above).is_some_and(MountEntry::is_ours)).map(Path::to_owned)
}

/// The type of the file system that a path (absolute, without symlinks) lies in: `ext4`, `fuse.cv`.
pub fn kind_of(path: &Path) -> Option<String> {
    let table = mounts().ok()?;
    path.ancestors().find_map(|above| uppermost(&table, above)).map(|mount| mount.filesystem.clone())
}

/// Mounts of any kind at one of these paths (absolute, without symlinks), or below it.
pub fn mounts_below(paths: &[PathBuf]) -> io::Result<Vec<PathBuf>> {
    let points = mounts()?.into_iter().map(|mount| mount.path);
    Ok(points.filter(|point| paths.iter().any(|path| point.starts_with(path))).collect())
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_lies_above_counts() {
        let mount = |path: &str, filesystem: &str| MountEntry {
            device: "0:1".to_owned(),
            path: path.into(),
            filesystem: filesystem.to_owned(),
            source: PathBuf::new(),
            owner: None,
            automounter: None,
        };
        let table = [mount("/", "ext4"), mount("/x", "fuse.cv"), mount("/x", "ext4"), mount("/y", "fuse.cv")];
        let kind = |path: &str| uppermost(&table, Path::new(path)).map(|mount| mount.filesystem.as_str());
        assert_eq!((kind("/x"), kind("/y"), kind("/z")), (Some("ext4"), Some("fuse.cv"), None));
        assert!(!is_mounted(Path::new("/proc")).unwrap());
        assert!(mounts_below(&["/proc".into()]).unwrap().contains(&"/proc".into()));
        assert!(mounts_below(&["/none/at/all".into()]).unwrap().is_empty());
    }
}
