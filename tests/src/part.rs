//! A mount of a part of the namespace.

use std::io::{BufRead as _, BufReader};
use std::path::PathBuf;
use std::process::{ChildStdout, Stdio};
use std::time::Duration;

use rustix::fs::{StatVfsMountFlags, statvfs};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;

use crate::{Child, Cluster, eventually};

const PATIENCE: Duration = Duration::from_secs(30);

/// A mount of a path of the namespace beside that of the cluster, with a client of its own.
#[derive(Debug)]
pub struct PartMount {
    /// Where it is mounted: a directory of its own in that of the cluster.
    pub path: PathBuf,
    supervisor: std::process::Child,
    client: Child,
    _output: BufReader<ChildStdout>,
}

impl PartMount {
    /// Starts it, with further settings of the environment, and waits until it can be used.
    pub fn of(cluster: &Cluster, namespace_path: &str, settings: &[(&str, &str)]) -> Self {
        let path = cluster.directory().join(format!("part{}", namespace_path.replace('/', "-")));
        let mut command = cluster.command(&["fuse"]);
        command.env("CV_FUSE__PATH", namespace_path).env("CV_FUSE__MOUNT_POINT", &path);
        command.env("CV_FUSE__HTTP_LISTEN", "127.0.0.1:0").env("CV_FUSE__SUPERVISED", "true");
        let mut supervisor = command.envs(settings.iter().copied()).stdout(Stdio::piped()).spawn().unwrap();
        let mut output = BufReader::new(supervisor.stdout.take().unwrap());
        let mut ready = String::new();
        output.read_line(&mut ready).unwrap();
        let http = ready.trim().split_once(" http=").unwrap_or_else(|| panic!("{ready}")).1;
        let client = json!({ "pid": supervisor.id(), "state": "running", "log": "", "http": http });
        Self { path, supervisor, client: serde_json::from_value(client).unwrap(), _output: output }
    }

    /// Requests of a kind that the kernel has sent.
    pub fn requests(&self, operation: &str) -> u64 {
        let sample = format!("cavern_fuse_requests_total{{operation=\"{operation}\"");
        self.client.metric(&sample).unwrap_or_default()
    }

    pub fn is_read_only(&self) -> bool {
        statvfs(&self.path).unwrap().f_flag.contains(StatVfsMountFlags::RDONLY)
    }

    /// Kills what serves the mount, and waits until another process does.
    pub fn replace_daemon(&self) {
        let daemon = || self.client.daemon();
        let before = daemon().unwrap();
        kill_process(Pid::from_raw(before).unwrap(), Signal::KILL).unwrap();
        eventually("another process serves the mount", PATIENCE, || daemon().filter(|now| *now != before));
    }
}

impl Drop for PartMount {
    fn drop(&mut self) {
        // Whatever the test has come to, nothing is left behind.
        let supervisor = Pid::from_raw(self.supervisor.id().cast_signed()).unwrap();
        let _ = kill_process(supervisor, Signal::TERM);
        let _ = self.supervisor.wait();
        let _ = rustix::mount::unmount(&self.path, rustix::mount::UnmountFlags::DETACH);
    }
}
