//! `cv local status`: the endpoints of a cluster and what its children are doing.

use std::path::PathBuf;

use serde::Serialize;

use super::child::{ChildName, Exit, Role, RunRecord, State};
use super::masters;
use super::mounted::is_mounted;
use super::record::{Cluster, Fuse, Master, Restart, Worker, WorkerDir};
use super::supervisor::until_ms;
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
    #[serde(skip)]
    pub name: ChildName,
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
    let Cluster { s3, masters, workers, fuse, .. } = cluster.clone();
    let group = masters::group(cluster)?;
    let master = |(number, Master { grpc, http, data_dir, .. })| -> Result<MasterStatus, CliError> {
        let child = child(Role::Master, number)?;
        let role = group.as_ref().and_then(|group| masters::role(group, cluster, number));
        let role = role.filter(|_| child.pid.is_some());
        Ok(MasterStatus { child, grpc, http, data_dir, role })
    };
    let worker = |(number, Worker { data, http, socket, dirs })| -> Result<WorkerStatus, CliError> {
        let dirs = dirs.into_iter().map(|dir: WorkerDir| dir.path).collect();
        Ok(WorkerStatus { child: child(Role::Worker, number)?, data, http, socket, dirs })
    };
    let fuse_client = |(number, Fuse { http, mount_point })| -> Result<FuseStatus, CliError> {
        let mounted = is_mounted(&mount_point).context("cannot read the mount table")?;
        Ok(FuseStatus { child: child(Role::Fuse, number)?, http, mount_point, mounted })
    };
    let fuse: Vec<FuseStatus> = fuse.into_iter().enumerate().map(fuse_client).collect::<Result<_, _>>()?;
    Ok(ClusterStatus {
        directory: cluster.directory.clone(),
        conf: cluster.conf_path(),
        mount_point: fuse.first().map(|first| first.mount_point.clone()).unwrap_or_default(),
        mounted: fuse.first().is_some_and(|first| first.mounted),
        restart: cluster.restart,
        secure: cluster.secure,
        s3: S3Status {
            child: child(Role::S3, 0)?,
            endpoint: format!("http://{}", s3.listen),
            admin: s3.admin.as_ref().map(|admin| format!("http://{admin}")),
            admin_token: s3.token(),
            access_key: s3.access_key,
            secret_key: s3.secret_key,
            root: s3.root,
        },
        masters: masters.into_iter().enumerate().map(master).collect::<Result<_, _>>()?,
        workers: workers.into_iter().enumerate().map(worker).collect::<Result<_, _>>()?,
        fuse,
    })
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
        name,
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
    pub fn children(&self) -> impl Iterator<Item = &ChildStatus> {
        let masters = self.masters.iter().map(|master| &master.child);
        let workers = self.workers.iter().map(|worker| &worker.child);
        let fuse = self.fuse.iter().map(|fuse| &fuse.child);
        [&self.s3.child].into_iter().chain(masters).chain(workers).chain(fuse)
    }
}
