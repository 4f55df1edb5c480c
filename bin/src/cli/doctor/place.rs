//! The directories that the configuration of a process names.

use std::path::{Path, PathBuf};

use cavern_conf::{ByteSize, DirSpec, Role, Tier};

use super::finding::{Check, Finding};
use super::process::Process;

/// What a master needs beside its log: snapshots, and what the log grows by while one is made.
const SPARE: u64 = 1 << 30;

/// What a process keeps in a directory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Holds {
    Namespace,
    Blocks(Tier),
    /// What is being written to cache-mode mounts.
    Staged,
}

/// A directory that the configuration names.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Place {
    pub key: &'static str,
    pub role: Role,
    pub path: PathBuf,
    pub holds: Holds,
    /// What it may take, where that is said; and what must be free for it.
    pub capacity: Option<u64>,
    pub wanted_free: u64,
    /// It is made if it is not there.
    pub is_made: bool,
}

impl Place {
    /// Those of a process.
    pub fn of(process: &Process) -> Vec<Self> {
        let config = process.config();
        let place = |key, path: &Path, holds| Self {
            key,
            role: process.role,
            path: path.to_owned(),
            holds,
            capacity: None,
            wanted_free: 0,
            is_made: false,
        };
        match process.role {
            Role::Master => vec![Self {
                wanted_free: config.master.log_size_max.bytes().saturating_add(SPARE),
                is_made: config.master.create_dir,
                ..place("master.data_dir", &config.master.data_dir, Holds::Namespace)
            }],
            Role::Worker => {
                let dirs = config.worker.dir_specs().unwrap_or_default().into_iter();
                let blocks = |dir: DirSpec| Self {
                    capacity: dir.capacity.map(ByteSize::bytes),
                    is_made: config.worker.create_dirs,
                    ..place("worker.dirs", &dir.path, Holds::Blocks(dir.tier))
                };
                dirs.map(blocks).collect()
            }
            Role::Fuse => vec![Self {
                wanted_free: config.client.staging_size.bytes(),
                ..place("client.staging_directory", &config.client.staging_directory, Holds::Staged)
            }],
        }
    }

    pub fn name(&self) -> String {
        format!("{} ({})", self.path.display(), self.key)
    }

    /// Whether a mount would hide it from the process that keeps something in it.
    pub fn judge_overlap(&self, mount_point: &Path) -> Option<Finding> {
        let Self { key, path, .. } = self;
        path.starts_with(mount_point).then(|| {
            Finding::error(
                Check::PathsOverlap,
                format!("{} lies in fuse.mount_point, {}", self.name(), mount_point.display()),
                "the mount hides it, and the process would keep its files in the mount that needs them",
                format!("choose another {key}, or another fuse.mount_point"),
            )
        })
    }
}
