//! What root has mounted within a mount of ours: views, whose devices are files of it.

use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::Duration;

use rustix::mount::{UnmountFlags, unmount};
use tracing::{debug, info};

use super::table::{MountEntry, VIEW_TYPE, mounts};

/// How long that may take.
const PATIENCE: Duration = Duration::from_secs(5);

/// Detaches the views that are mounted below a mount point, so that it can be unmounted; whether there was one. Files
/// of them that are open can be read for as long as their devices. Needs root: for others it does nothing. *Blocks* for
/// five seconds at most: the way to where they are leads through the mount, which is to be served meanwhile.
pub fn detach_views(mount_point: &Path) -> bool {
    let views = views_below(&mounts().unwrap_or_default(), mount_point);
    if views.is_empty() {
        return false;
    }
    let (done, is_done) = mpsc::channel();
    let work = move || {
        let detached = views.iter().filter(|path| detach(path)).count();
        // Nobody listens after the timeout.
        let _ = done.send(detached > 0);
    };
    let thread = std::thread::Builder::new().name("detach-views".to_owned()).spawn(work);
    thread.is_ok() && is_done.recv_timeout(PATIENCE).unwrap_or(false)
}

fn detach(path: &Path) -> bool {
    match unmount(path, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW) {
        Ok(()) => info!(path = %path.display(), "a view is detached with the mount that it lies in"),
        Err(cause) => {
            debug!(path = %path.display(), %cause, "a view stays mounted");
            return false;
        }
    }
    true
}

/// The uppermost first.
fn views_below(table: &[MountEntry], mount_point: &Path) -> Vec<PathBuf> {
    let is_below = |entry: &&MountEntry| entry.path != mount_point && entry.path.starts_with(mount_point);
    let views = table.iter().rev().filter(|entry| entry.filesystem == VIEW_TYPE).filter(is_below);
    views.map(|entry| entry.path.clone()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn views_below_a_mount_are_found_and_nothing_else() {
        let entry = |path: &str, filesystem: &str| MountEntry {
            device: String::new(),
            path: path.into(),
            filesystem: filesystem.to_owned(),
            source: "/image".into(),
            owner: None,
            automounter: None,
        };
        let table = [
            entry("/mnt", "erofs"),
            entry("/mnt/cv", "fuse.cv"),
            entry("/mnt/cv/.views/a", "erofs"),
            entry("/mnt/cv/.views/a/b", "erofs"),
            entry("/mnt/cv/data/disk", "ext4"),
            entry("/mnt/cv2/.views/a", "erofs"),
        ];
        let below = ["/mnt/cv/.views/a/b", "/mnt/cv/.views/a"].map(Path::new);
        assert_eq!(views_below(&table, Path::new("/mnt/cv")), below);
    }
}
