//! `cv local status`: the endpoints of a cluster and what its children are doing.

use std::path::PathBuf;

use serde::Serialize;

use super::child::{ChildName, Exit, Role, RunRecord, State};
use super::masters;
use super::mounted::is_mounted;
use super::record::{Cluster, Restart};
use super::supervisor::until_ms;
use crate::console;
use crate::error::{CliError, Context as _};
use crate::group::MasterRole;

/// `cv local status --json`.
#[derive(Debug, Serialize)]
pub struct ClusterStatus {
    pub directory: PathBuf,
    /// The configuration of this cluster's processes, for `--conf`.
    pub conf: PathBuf,
    pub mount_point: PathBuf,
    pub mounted: bool,
    /// Whether what ends by itself is started again.
    pub restart: Restart,
    /// Whether its processes show each other certificates.
    pub secure: bool,
    pub s3: S3Status,
    pub masters: Vec<MasterStatus>,
    pub workers: Vec<WorkerStatus>,
    pub fuse: Vec<FuseStatus>,
}

/// State of one child, part of each object below.
#[derive(Clone, Debug, Serialize)]
pub struct ChildStatus {
    /// `null` unless running.
    pub pid: Option<i32>,
    /// `running`, `stopped` or `crashed`.
    pub state: &'static str,
    /// How it ended, when it crashed and its keeper saw it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub exit: Option<Exit>,
    /// How often it was started again by itself since `up` or `start`, and how the run before this one ended.
    pub restarts: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_exit: Option<Exit>,
    /// How long it is until it is started again; absent when it is not.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub next_try_ms: Option<u64>,
    /// Somebody would start it again: its keeper is alive.
    pub supervised: bool,
    pub log: PathBuf,
}

#[derive(Debug, Serialize)]
pub struct S3Status {
    #[serde(flatten)]
    pub child: ChildStatus,
    pub endpoint: String,
    /// The port for statistics and injected faults, if it has one, and the file with its token.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub admin: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub admin_token: Option<PathBuf>,
    pub access_key: String,
    pub secret_key: String,
    pub root: PathBuf,
}

#[derive(Debug, Serialize)]
pub struct MasterStatus {
    #[serde(flatten)]
    pub child: ChildStatus,
    pub grpc: String,
    pub http: String,
    pub data_dir: PathBuf,
    /// What it does among several, if it runs: `leader`, `follower` and others.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub role: Option<MasterRole>,
}

#[derive(Debug, Serialize)]
pub struct WorkerStatus {
    #[serde(flatten)]
    pub child: ChildStatus,
    pub data: String,
    pub http: String,
    pub socket: PathBuf,
    pub dirs: Vec<PathBuf>,
}

#[derive(Debug, Serialize)]
pub struct FuseStatus {
    #[serde(flatten)]
    pub child: ChildStatus,
    pub http: String,
    pub mount_point: PathBuf,
    pub mounted: bool,
}

/// Looks at every child. Asks none of them anything, so that it answers at once however they are, but for several
/// masters: which of them leads they say within half a second, or not at all.
pub fn status(cluster: &Cluster) -> Result<ClusterStatus, CliError> {
    let child = |role, number| child_status(cluster, ChildName { role, number });
    let mut status = ClusterStatus {
        directory: cluster.directory.clone(),
        conf: cluster.conf_path(),
        mount_point: PathBuf::new(),
        mounted: false,
        restart: cluster.restart,
        secure: cluster.secure,
        s3: S3Status {
            child: child(Role::S3, 0)?,
            endpoint: format!("http://{}", cluster.s3.listen),
            admin: cluster.s3.admin.as_ref().map(|admin| format!("http://{admin}")),
            admin_token: cluster.s3.token(),
            access_key: cluster.s3.access_key.clone(),
            secret_key: cluster.s3.secret_key.clone(),
            root: cluster.s3.root.clone(),
        },
        masters: vec![],
        workers: vec![],
        fuse: vec![],
    };
    let group = masters::group(cluster)?;
    for (number, master) in cluster.masters.iter().enumerate() {
        let child = child(Role::Master, number)?;
        let role = group.as_ref().and_then(|group| masters::role(group, cluster, number));
        status.masters.push(MasterStatus {
            role: role.filter(|_| child.pid.is_some()),
            child,
            grpc: master.grpc.clone(),
            http: master.http.clone(),
            data_dir: master.data_dir.clone(),
        });
    }
    for (number, worker) in cluster.workers.iter().enumerate() {
        status.workers.push(WorkerStatus {
            child: child(Role::Worker, number)?,
            data: worker.data.clone(),
            http: worker.http.clone(),
            socket: worker.socket.clone(),
            dirs: worker.dirs.iter().map(|dir| dir.path.clone()).collect(),
        });
    }
    for (number, fuse) in cluster.fuse.iter().enumerate() {
        status.fuse.push(FuseStatus {
            child: child(Role::Fuse, number)?,
            http: fuse.http.clone(),
            mount_point: fuse.mount_point.clone(),
            mounted: is_mounted(&fuse.mount_point).context("cannot read the mount table")?,
        });
    }
    if let Some(first) = status.fuse.first() {
        status.mount_point.clone_from(&first.mount_point);
        status.mounted = first.mounted;
    }
    Ok(status)
}

fn child_status(cluster: &Cluster, name: ChildName) -> Result<ChildStatus, CliError> {
    let (pid, state, exit) = match cluster.state(name)? {
        State::Running(process) => (Some(process.pid), "running", None),
        State::Stopped => (None, "stopped", None),
        State::Crashed(exit) => (None, "crashed", exit),
    };
    let record = cluster.run_record(name)?;
    let supervised = record.as_ref().is_some_and(RunRecord::is_kept) && cluster.restart == Restart::OnFailure;
    let next_try = record.as_ref().and_then(|record| record.next_try_ms).filter(|_| supervised);
    Ok(ChildStatus {
        pid,
        state,
        exit,
        restarts: record.as_ref().map_or(0, |record| record.restarts),
        last_exit: record.and_then(|record| record.last_exit),
        next_try_ms: next_try.map(until_ms),
        supervised,
        log: cluster.log_path(name),
    })
}

impl ClusterStatus {
    fn children(&self) -> impl Iterator<Item = &ChildStatus> {
        let masters = self.masters.iter().map(|master| &master.child);
        let workers = self.workers.iter().map(|worker| &worker.child);
        let fuse = self.fuse.iter().map(|fuse| &fuse.child);
        [&self.s3.child].into_iter().chain(masters).chain(workers).chain(fuse)
    }

    /// For people.
    pub fn print(&self) -> Result<(), CliError> {
        let admin = self.s3.admin.as_ref().map_or_else(String::new, |admin| format!(" admin={admin}"));
        let mut rows = vec![row("s3", &self.s3.child, format!("{}{admin}", self.s3.endpoint))];
        for (number, master) in self.masters.iter().enumerate() {
            let endpoints = format!("grpc={} http={}", master.grpc, master.http);
            let mut row = row(&format!("master{number}"), &master.child, endpoints);
            if let Some(role) = master.role {
                row[1].push_str(&format!(", {}", role.as_str()));
            }
            rows.push(row);
        }
        for (number, worker) in self.workers.iter().enumerate() {
            let endpoints = format!("data={} http={}", worker.data, worker.http);
            rows.push(row(&format!("worker{number}"), &worker.child, endpoints));
        }
        for (number, fuse) in self.fuse.iter().enumerate() {
            let mounted = if fuse.mounted { "" } else { " (not mounted)" };
            let endpoints = format!("{}{mounted} http={}", fuse.mount_point.display(), fuse.http);
            rows.push(row(&format!("fuse{number}"), &fuse.child, endpoints));
        }
        console::table(["CHILD", "STATE", "PID", "ENDPOINTS"], &rows)?;
        if self.children().any(|child| child.pid.is_some() && !child.supervised) && self.restart == Restart::OnFailure {
            console::line(
                "the keeper of a child is gone: `cv local up` gives it another, which starts the child again if it \
                 ends",
            )?;
        }
        console::line(format_args!("mount point    {}", self.mount_point.display()))?;
        console::line(format_args!("S3 access key  {}  secret key {}", self.s3.access_key, self.s3.secret_key))?;
        console::line(format_args!("configuration  {}", self.conf.display()))?;
        if self.secure {
            console::line("connections    mutual TLS: the configuration has the certificate of an admin")?;
        }
        Ok(())
    }
}

fn row(name: &str, child: &ChildStatus, endpoints: String) -> [String; 4] {
    let pid = child.pid.map_or_else(|| "–".to_owned(), |pid| pid.to_string());
    [name.to_owned(), child.describe(), pid, endpoints]
}

impl ChildStatus {
    fn describe(&self) -> String {
        let mut text = self.state.to_owned();
        if let Some(exit) = self.exit {
            text = format!("{text} ({exit})");
        }
        if let Some(next) = self.next_try_ms {
            text = format!("{text}, next try in {:.1} s", next as f64 / 1000.0);
        }
        if self.restarts > 0 {
            let last = self.last_exit.map_or_else(String::new, |exit| format!(", last: {exit}"));
            text = format!("{text}, restarts: {}{last}", self.restarts);
        }
        text
    }
}
