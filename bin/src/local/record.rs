//! What a cluster consists of: `D/cluster.json`.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use cavern_conf::{Config, Effective, HostLimits};
use serde::{Deserialize, Serialize};

use super::child::{ChildName, Role, RunRecord, State, settled};
use super::files;
use crate::error::{CliError, Context as _};

#[derive(clap::Args)]
pub struct DirArgs {
    /// Directory of the cluster [default: ~/.cavern/local].
    #[arg(long, visible_alias = "local", value_name = "D")]
    pub dir: Option<PathBuf>,
}

impl DirArgs {
    pub fn path(&self) -> PathBuf {
        self.dir.clone().unwrap_or_else(default_directory)
    }

    pub fn cluster(&self) -> Result<Cluster, CliError> {
        Cluster::load(&self.path())
    }
}

/// Where a cluster lives when `--dir` is not given: `~/.cavern/local`.
pub fn default_directory() -> PathBuf {
    std::env::var_os("HOME").map_or_else(|| PathBuf::from("/var/tmp"), PathBuf::from).join(".cavern/local")
}

/// The parts of a cluster with their addresses. Written by `up` alone.
#[derive(Clone, Default, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Cluster {
    /// Absolute, without symlinks.
    pub directory: PathBuf,
    pub s3: S3,
    pub masters: Vec<Master>,
    pub workers: Vec<Worker>,
    pub fuse: Vec<Fuse>,
    pub restart: Restart,
    /// Its processes show each other certificates, which are in [`Cluster::certificates`].
    pub secure: bool,
    /// Directories that were not there before `up` needed them: its own, and mount points.
    pub made: Vec<PathBuf>,
    /// The file that `--conf` named last, absolute: that of later starts as well.
    pub given_conf: Option<PathBuf>,
}

/// What becomes of a child that ends though nobody has stopped it.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Restart {
    /// It is started again, after a pause that grows, unless its exit code is 0.
    #[default]
    OnFailure,
    /// It stays as it is.
    Never,
}

#[derive(Clone, Default, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct S3 {
    pub listen: String,
    /// Of the port for statistics and injected faults, if it has one.
    pub admin: Option<String>,
    pub access_key: String,
    pub secret_key: String,
    pub root: PathBuf,
}

impl S3 {
    /// The file of the token of its second port, if it has one.
    pub fn token(&self) -> Option<PathBuf> {
        self.admin.as_ref().map(|_| self.root.join("admin-token"))
    }
}

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Master {
    pub grpc: String,
    pub http: String,
    pub data_dir: PathBuf,
    /// It came when the cluster was there already: the others take it in.
    pub joins: bool,
}

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Worker {
    pub data: String,
    pub http: String,
    pub socket: PathBuf,
    pub dirs: Vec<WorkerDir>,
}

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct WorkerDir {
    /// As the configuration has it: `[SSD:100GB]`.
    pub tier: String,
    pub path: PathBuf,
}

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Fuse {
    pub http: String,
    pub mount_point: PathBuf,
}

impl Cluster {
    /// The cluster recorded in `directory`, if there is one.
    pub fn find(directory: &Path) -> Result<Option<Self>, CliError> {
        let path = directory.join("cluster.json");
        let Some(bytes) = files::read(&path)? else { return Ok(None) };
        let cluster = serde_json::from_slice(&bytes);
        cluster.map(Some).context(format_args!("{} is not the record of a local cluster", path.display()))
    }

    /// The cluster recorded in `directory`; `NotFound` when there is none.
    pub fn load(directory: &Path) -> Result<Self, CliError> {
        Self::find(directory)?.ok_or_else(|| {
            CliError::NotFound(format!(
                "no local cluster in {}: start one with `cv local up`, or name its directory with --dir",
                directory.display()
            ))
        })
    }

    pub fn store(&self) -> Result<(), CliError> {
        let text = serde_json::to_vec_pretty(self).context("cannot write the cluster as JSON")?;
        files::write_whole(&self.directory.join("cluster.json"), &text)
    }

    /// Every child, in the order in which they start.
    pub fn children(&self) -> Vec<ChildName> {
        Role::ALL
            .into_iter()
            .flat_map(|role| (0..self.count(role)).map(move |number| ChildName { role, number }))
            .collect()
    }

    /// Checks that the cluster has this child.
    pub fn expect(&self, name: ChildName) -> Result<(), CliError> {
        if name.number < self.count(name.role) {
            return Ok(());
        }
        let names: Vec<String> = self.children().iter().map(ToString::to_string).collect();
        Err(CliError::NotFound(format!("this cluster has no {name}: it has {}", names.join(", "))))
    }

    fn count(&self, role: Role) -> usize {
        match role {
            Role::S3 => 1,
            Role::Master => self.masters.len(),
            Role::Worker => self.workers.len(),
            Role::Fuse => self.fuse.len(),
        }
    }

    /// Where a child keeps what it stores: directories of its own, which are to be there when it starts.
    pub fn data_directories(&self, name: ChildName) -> Vec<&Path> {
        match name.role {
            Role::Master => vec![&self.masters[name.number].data_dir],
            Role::Worker => self.workers[name.number].dirs.iter().map(|dir| dir.path.as_path()).collect(),
            Role::S3 | Role::Fuse => Vec::new(),
        }
    }

    pub fn run_path(&self, name: ChildName) -> PathBuf {
        self.directory.join("run").join(format!("{name}.json"))
    }

    pub fn log_path(&self, name: ChildName) -> PathBuf {
        self.directory.join("log").join(format!("{name}.log"))
    }

    /// The configuration that every child is given, and that `cv --local D` uses.
    pub fn conf_path(&self) -> PathBuf {
        self.directory.join("cluster.toml")
    }

    /// The configuration that every child is given, whatever the environment of this process says.
    pub fn conf(&self) -> Result<Config, CliError> {
        Ok(self.effective(Vec::new())?.config)
    }

    /// The configuration of a child, with what that has in its environment, and where each value comes from.
    pub fn conf_of(&self, name: ChildName) -> Result<Effective, CliError> {
        self.effective(self.launch(name).1)
    }

    fn effective(&self, environment: Vec<(&'static str, String)>) -> Result<Effective, CliError> {
        let path = self.conf_path();
        let bytes = fs::read(&path).context(format_args!("cannot read {}", path.display()))?;
        let environment = environment.into_iter().map(|(name, value)| (OsString::from(name), OsString::from(value)));
        Ok(Effective::compose_on(HostLimits::here(), Some((path, bytes)), environment)?)
    }

    /// Where the certificates are, if it has some.
    pub fn certificates(&self) -> PathBuf {
        self.directory.join("certificates")
    }

    /// A file that is there while a child is stopped on purpose: its supervisor does not start it again.
    pub fn stop_path(&self, name: ChildName) -> PathBuf {
        self.directory.join("run").join(format!("{name}.stop"))
    }

    pub fn state(&self, name: ChildName) -> Result<State, CliError> {
        match settled(|| self.run_record(name))? {
            // Nobody has seen its end, which was asked for.
            State::Crashed(None) if self.stop_path(name).exists() => Ok(State::Stopped),
            state => Ok(state),
        }
    }

    pub fn is_running(&self, name: ChildName) -> Result<bool, CliError> {
        Ok(matches!(self.state(name)?, State::Running(_)))
    }

    /// What the supervisor of a child has written down last.
    pub fn run_record(&self, name: ChildName) -> Result<Option<RunRecord>, CliError> {
        RunRecord::load(&self.run_path(name))
    }

    /// Whether the child has a supervisor that is alive.
    pub fn is_supervised(&self, name: ChildName) -> Result<bool, CliError> {
        Ok(self.run_record(name)?.is_some_and(|record| record.is_supervised()))
    }
}
