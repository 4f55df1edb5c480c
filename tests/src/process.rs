//! What the kernel knows of a child: its memory and its descriptors.

use std::fs;
use std::path::PathBuf;

use crate::cluster::Child;

/// A running process, looked at through `/proc`.
#[derive(Clone, Copy, Debug)]
pub struct Process {
    pid: i32,
}

impl Process {
    #[track_caller]
    pub fn of(child: &Child) -> Self {
        Self { pid: child.pid.expect("the child runs") }
    }

    /// Resident memory now, in bytes.
    #[track_caller]
    pub fn memory(self) -> u64 {
        self.status("VmRSS:")
    }

    /// The most resident memory since the start or the last [`Self::reset_peak`], in bytes.
    #[track_caller]
    pub fn peak_memory(self) -> u64 {
        self.status("VmHWM:")
    }

    #[track_caller]
    pub fn reset_peak(self) {
        fs::write(format!("/proc/{}/clear_refs", self.pid), "5").unwrap();
    }

    /// What its open descriptors lead to; names of deleted files end in ` (deleted)`.
    #[track_caller]
    pub fn descriptors(self) -> Vec<PathBuf> {
        let entries = fs::read_dir(format!("/proc/{}/fd", self.pid)).unwrap();
        // One that is closed meanwhile is not open.
        entries.flatten().filter_map(|entry| fs::read_link(entry.path()).ok()).collect()
    }

    /// Descriptors of files that have been deleted: they keep room on the disk that nobody sees.
    #[track_caller]
    pub fn deleted_files(self) -> usize {
        self.descriptors().iter().filter(|path| path.to_string_lossy().ends_with(" (deleted)")).count()
    }

    #[track_caller]
    fn status(self, field: &str) -> u64 {
        let status = fs::read_to_string(format!("/proc/{}/status", self.pid)).unwrap();
        let value = status.lines().find_map(|line| line.strip_prefix(field)).expect("the kernel knows the field");
        value.trim().trim_end_matches(" kB").parse::<u64>().unwrap() * 1024
    }
}
