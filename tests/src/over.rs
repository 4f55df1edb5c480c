//! A file system that is mounted over a directory for a while.

use std::path::{Path, PathBuf};
use std::process::Command;

/// A mount over a directory. Taken away again whatever happens.
pub struct MountedOver(PathBuf);

impl MountedOver {
    /// What mount(8) makes of a kind of file system and its options.
    #[track_caller]
    pub fn mount(path: &Path, kind: &str, options: &str) -> Self {
        let mounted = Command::new("mount").args(["-t", kind, "-o", options, "cavern-test"]).arg(path).status();
        assert!(mounted.unwrap().success(), "cannot mount {kind} with {options} at {}", path.display());
        Self(path.to_owned())
    }

    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for MountedOver {
    fn drop(&mut self) {
        // Lazily: the worker may still work in it.
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}
