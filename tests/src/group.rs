//! A control group with limits of its own, as a container has one.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use cavern_conf::control_groups;

use crate::wait::eventually;

/// Names begin with it, and end with the number of the test's process.
const PREFIX: &str = "cavern-test-";
const PERIOD_US: u64 = 100_000;
/// For processes that have ended to leave it.
const PATIENCE: Duration = Duration::from_secs(10);

/// Processes that start in it, and all that they start, have no more than it. It goes when it is dropped, which must be
/// after everything in it has ended.
pub struct ControlGroup {
    /// One for memory, and one for processors; the same one with version 2.
    directories: Vec<PathBuf>,
}

impl ControlGroup {
    /// Below the group of this process, which goes on to bound it; with version 2 below the topmost, since a group with
    /// processes has no such groups below it. Needs root, and of a container that it may write to control groups; with
    /// version 2 also that none of its processes is in the topmost.
    #[track_caller]
    pub fn make(cpus: u64, memory: u64) -> Self {
        let mut made = Self { directories: Vec::new() };
        let (memory, quota) = (memory.to_string(), (cpus * PERIOD_US).to_string());
        let of_version_2 = format!("{quota} {PERIOD_US}");
        for (controller, files) in [
            ("memory", [("memory.limit_in_bytes", &memory), ("memory.max", &memory)]),
            ("cpu", [("cpu.cfs_quota_us", &quota), ("cpu.max", &of_version_2)]),
        ] {
            if let Err(error) = made.limit(controller, files) {
                panic!(
                    "no control group that limits {controller} can be made: {error}. Run this on a host, or leave out \
                     what needs one: -E 'not test(/^budget::a_cluster/)'"
                );
            }
        }
        made
    }

    /// Makes a directory for a controller, and writes to whichever of these files it has.
    fn limit(&mut self, controller: &str, files: [(&str, &String); 2]) -> io::Result<()> {
        let groups = control_groups(controller);
        let (Some(own), Some(top)) = (groups.first(), groups.last()) else {
            return Err(io::Error::other("this process is in none"));
        };
        let is_version_2 = top.join("cgroup.controllers").exists();
        if is_version_2 {
            // Refused where it is on already, or cannot be: what counts is whether there is a file to write to.
            let _ = fs::write(top.join("cgroup.subtree_control"), format!("+{controller}"));
        }
        let above = if is_version_2 { top } else { own };
        remove_leftovers(above);
        let directory = above.join(format!("{PREFIX}{}", std::process::id()));
        if !self.directories.contains(&directory) {
            fs::create_dir(&directory)
                .map_err(|error| io::Error::other(format!("{}: {error}", directory.display())))?;
            self.directories.push(directory.clone());
        }
        let is_limited = files.into_iter().any(|(file, value)| fs::write(directory.join(file), value).is_ok());
        let refused = || io::Error::other(format!("{} takes no limit", directory.display()));
        is_limited.then_some(()).ok_or_else(refused)
    }

    pub fn directories(&self) -> &[PathBuf] {
        &self.directories
    }

    /// Processes that were killed since it has no more memory.
    #[track_caller]
    pub fn killed(&self) -> u64 {
        let counted = |directory: &PathBuf| {
            let files = ["memory.oom_control", "memory.events"].map(|file| directory.join(file));
            let text = files.iter().find_map(|file| fs::read_to_string(file).ok())?;
            text.lines().find_map(|line| line.strip_prefix("oom_kill "))?.trim().parse().ok()
        };
        self.directories.iter().find_map(counted).expect("the kernel counts them")
    }
}

impl Drop for ControlGroup {
    fn drop(&mut self) {
        for directory in &self.directories {
            let gone = || fs::remove_dir(directory).is_ok().then_some(());
            if std::thread::panicking() {
                let _ = gone();
            } else {
                eventually(&format!("{} is empty", directory.display()), PATIENCE, gone);
            }
        }
    }
}

/// Removes those of test processes that are no more.
fn remove_leftovers(above: &Path) {
    for entry in fs::read_dir(above).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let process = name.to_str().and_then(|name| name.strip_prefix(PREFIX));
        if process.is_some_and(|process| !Path::new("/proc").join(process).exists()) {
            let _ = fs::remove_dir(entry.path());
        }
    }
}
