//! Whether something is mounted at a path, asked of the kernel's mount table: a `stat` could hang on a dead mount.

use std::fs;
use std::io;
use std::path::{Component, Path, PathBuf};
use std::process::{Command, Stdio};

use cavern_fuse::kernel::mount::table::{MountEntry, mounts};
use rustix::mount::{UnmountFlags, unmount};

/// Symbolic links that are followed on one way.
const LINKS_MAX: usize = 40;

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

/// Where an automounter waits on the way to `path`, or at it, and has nothing mounted yet. It is not asked, as it is by
/// whoever looks at what is there. *Blocking*.
pub fn idle_automount(path: &Path) -> Option<PathBuf> {
    idle_on_the_way(&mounts().ok()?, &std::path::absolute(path).ok()?, LINKS_MAX)
}

fn idle_on_the_way(table: &[MountEntry], path: &Path, links_left: usize) -> Option<PathBuf> {
    let (mut reached, mut parts) = (PathBuf::new(), path.components());
    while let Some(part) = parts.next() {
        if part == Component::ParentDir {
            reached.pop();
        } else {
            reached.push(part);
        }
        if table.iter().rfind(|mount| reached.starts_with(&mount.path)).is_some_and(MountEntry::is_automount) {
            return Some(reached);
        }
        if let Ok(target) = fs::read_link(&reached) {
            let led_to = reached.parent()?.join(target).join(parts.as_path());
            return idle_on_the_way(table, &led_to, links_left.checked_sub(1)?);
        }
    }
    None
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
    use std::os::unix::fs::symlink;

    use super::*;

    fn mount(path: &Path, filesystem: &str) -> MountEntry {
        MountEntry {
            device: "0:1".to_owned(),
            path: path.to_owned(),
            filesystem: filesystem.to_owned(),
            source: PathBuf::new(),
            owner: None,
            automounter: None,
        }
    }

    #[test]
    fn what_lies_above_counts() {
        let table = [("/", "ext4"), ("/x", "fuse.cv"), ("/x", "ext4"), ("/y", "fuse.cv")];
        let table = table.map(|(path, filesystem)| mount(Path::new(path), filesystem));
        let kind = |path: &str| uppermost(&table, Path::new(path)).map(|mount| mount.filesystem.as_str());
        assert_eq!((kind("/x"), kind("/y"), kind("/z")), (Some("ext4"), Some("fuse.cv"), None));
        assert!(!is_mounted(Path::new("/proc")).unwrap());
        assert!(mounts_below(&["/proc".into()]).unwrap().contains(&"/proc".into()));
        assert!(mounts_below(&["/none/at/all".into()]).unwrap().is_empty());
    }

    #[test]
    fn an_idle_automount_is_found_on_every_way_to_it() {
        let place = tempfile::tempdir().unwrap();
        let top = place.path().canonicalize().unwrap();
        let mut table = vec![mount(Path::new("/"), "ext4"), mount(&top.join("auto"), "autofs")];
        symlink("auto/data", top.join("link")).unwrap();
        symlink(top.join("link"), top.join("again")).unwrap();
        symlink("round", top.join("round")).unwrap();
        let idle = |table: &[MountEntry], name: &str| idle_on_the_way(table, &top.join(name), LINKS_MAX);
        for name in ["auto", "auto/data", "link", "again/deep", "none/../auto/x", "auto/../plain"] {
            assert_eq!(idle(&table, name), Some(top.join("auto")), "{name}");
        }
        for name in ["", "plain", "automatic", "round/x", "none/link"] {
            assert_eq!(idle(&table, name), None, "{name}");
        }
        // One over the other, and at last what they are there for.
        table.push(mount(&top.join("auto"), "autofs"));
        assert_eq!(idle(&table, "link"), Some(top.join("auto")));
        table.push(mount(&top.join("auto"), "fuse.cv"));
        assert_eq!(idle(&table, "link"), None);
    }
}
