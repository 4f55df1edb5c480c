//! Who has the space of a directory: for a test that waits in vain until it is free.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use crate::cluster::Cluster;

/// Bytes of what `stat` counts as one block.
const STAT_BLOCK_BYTES: u64 = 512;
/// What processes say of blocks, and of the files that they hold.
const SAID: [&str; 9] = [
    "cavern_worker_blocks{",
    "cavern_worker_used_bytes{",
    "cavern_worker_fills_running ",
    "cavern_worker_connections ",
    "cavern_client_descriptors ",
    "cavern_client_backing_files ",
    "cavern_fuse_open_files ",
    "cavern_fuse_registered_files",
    "cavern_fuse_passthrough_opens",
];

impl Cluster {
    /// What is taken of the file system that a worker's directory is on, by files below it, and by deleted ones that
    /// processes of the cluster have open; and what these and the master say. The rest is with the kernel: files that
    /// are registered with it, or mapped.
    pub fn space_of(&self, directory: &Path) -> String {
        let mut lines = vec![format!("of {}:", directory.display())];
        if let Ok(status) = rustix::fs::statvfs(directory) {
            lines.push(format!("{} bytes are taken", (status.f_blocks - status.f_bfree) * status.f_frsize));
        }
        for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
            lines.push(format!("{}: {}", entry.file_name().display(), told(below(&entry.path()))));
        }
        let status = self.status();
        for child in status.workers.iter().chain(&status.fuse) {
            let name = child.log.file_stem().unwrap_or_default().display();
            for pid in [child.pid, child.daemon()].into_iter().flatten() {
                lines.push(format!("{name}, process {pid}: {} deleted and open", told(deleted(pid, directory))));
            }
            let page = child.page("/metrics").map(|page| page.body).unwrap_or_default();
            let said = page.lines().filter(|line| SAID.iter().any(|begins| line.starts_with(begins)));
            lines.extend(said.map(|line| format!("{name}: {line}")));
        }
        let report = self.try_cv(&["report"]);
        lines.extend([report.stdout, report.stderr]);
        lines.join("\n")
    }
}

fn told((files, bytes): (u64, u64)) -> String {
    format!("{files} files of {bytes} bytes")
}

/// Files that are there, and the bytes that they take.
fn below(path: &Path) -> (u64, u64) {
    let Ok(file) = fs::symlink_metadata(path) else { return (0, 0) };
    if !file.is_dir() {
        return (1, file.blocks() * STAT_BLOCK_BYTES);
    }
    let entries = fs::read_dir(path).into_iter().flatten().flatten().map(|entry| below(&entry.path()));
    entries.fold((0, 0), |(files, bytes), (more, taken)| (files + more, bytes + taken))
}

/// Files that a process has open and that are in the directory no longer, and the bytes that they take.
fn deleted(pid: i32, directory: &Path) -> (u64, u64) {
    let mut found = BTreeMap::new();
    for entry in fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten() {
        let is_deleted = |link: &Path| link.starts_with(directory) && link.to_string_lossy().ends_with(" (deleted)");
        // The link leads to the file, whatever has become of the name.
        if fs::read_link(entry.path()).is_ok_and(|link| is_deleted(&link))
            && let Ok(file) = fs::metadata(entry.path())
        {
            found.insert(file.ino(), file.blocks() * STAT_BLOCK_BYTES);
        }
    }
    (found.len() as u64, found.values().sum())
}
