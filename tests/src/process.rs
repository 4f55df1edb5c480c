//! What the kernel knows of a child: the process that does its work, its memory and its descriptors.

use std::fs;
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::cluster::Child;

/// How long a stopped process may take to stand still. A thread that waits for what its own process serves never does.
const STOPPED_WITHIN: Duration = Duration::from_secs(2);

/// Sends a signal; one that stops the process has stopped its threads when this returns, if they can be.
#[track_caller]
pub(crate) fn send(pid: i32, signal: Signal) {
    kill_process(Pid::from_raw(pid).unwrap(), signal).unwrap();
    let deadline = Instant::now() + STOPPED_WITHIN;
    while signal == Signal::STOP && !stands_still(pid) && Instant::now() < deadline {
        thread::sleep(Duration::from_millis(1));
    }
}

fn stands_still(pid: i32) -> bool {
    let is_stopped = |thread: fs::DirEntry| {
        let stat = fs::read_to_string(thread.path().join("stat")).unwrap_or_default();
        stat.rsplit_once(") ").is_none_or(|(_, rest)| rest.starts_with(['T', 'Z', 'X']))
    };
    fs::read_dir(format!("/proc/{pid}/task"))
        .is_ok_and(|mut threads| threads.all(|thread| thread.is_ok_and(is_stopped)))
}

/// A running process, looked at through `/proc`.
#[derive(Clone, Copy, Debug)]
pub struct Process {
    pid: i32,
}

impl Child {
    /// The daemon of a client whose mount is kept, when there is one that lives. Only its supervisor's children are
    /// looked at: whoever reads of a process that starts a program waits for the mounts that it closes files of, which
    /// may be stopped.
    pub fn daemon(&self) -> Option<i32> {
        let threads = fs::read_dir(format!("/proc/{}/task", self.pid?)).ok()?;
        let children = |thread: fs::DirEntry| fs::read_to_string(thread.path().join("children")).ok();
        let children: String = threads.filter_map(Result::ok).filter_map(children).collect();
        // It is another program, or the supervisor once more, for a moment at its start.
        let is_daemon = |pid: &i32| {
            fs::read(format!("/proc/{pid}/cmdline"))
                .is_ok_and(|arguments| arguments.split(|byte| *byte == 0).any(|argument| argument == b"--daemon"))
        };
        children.split_ascii_whitespace().filter_map(|pid| pid.parse().ok()).find(is_daemon)
    }

    /// The process that does the work: the daemon where a mount is kept, and the child itself elsewhere.
    pub fn server(&self) -> Option<i32> {
        self.daemon().or(self.pid)
    }
}

impl Process {
    /// The one that does the work.
    #[track_caller]
    pub fn of(child: &Child) -> Self {
        Self { pid: child.server().expect("the child runs") }
    }

    /// As [`Cluster::signal`](crate::Cluster::signal).
    #[track_caller]
    pub fn signal(self, signal: Signal) {
        send(self.pid, signal);
    }

    /// The one that keeps a mount.
    #[track_caller]
    pub fn supervisor_of(child: &Child) -> Self {
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
        // Files of memory never had a name.
        let is_on_disk = |path: &str| path.ends_with(" (deleted)") && !path.starts_with("/memfd:");
        self.descriptors().iter().filter(|path| is_on_disk(&path.to_string_lossy())).count()
    }

    #[track_caller]
    fn status(self, field: &str) -> u64 {
        let status = fs::read_to_string(format!("/proc/{}/status", self.pid)).unwrap();
        let value = status.lines().find_map(|line| line.strip_prefix(field)).expect("the kernel knows the field");
        value.trim().trim_end_matches(" kB").parse::<u64>().unwrap() * 1024
    }
}
