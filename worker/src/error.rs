//! Why a worker cannot start or go on. Each sentence names the thing, the cause and the next step, because the
//! command line prints it as it is.

use std::io;
use std::path::{Path, PathBuf};

use cavern_net::NetError;
use cavern_security::SecurityError;
use thiserror::Error;

/// What ends a worker, or keeps it from starting.
#[derive(Debug, Error)]
pub enum WorkerError {
    /// A configuration value that makes no sense for a worker.
    #[error("{key} = \"{value}\": {reason}")]
    Config { key: &'static str, value: String, reason: String },
    /// No way to a master can be made of the configuration.
    #[error(transparent)]
    Master(#[from] NetError),
    /// Connections cannot be secured as the configuration wants.
    #[error(transparent)]
    Security(#[from] SecurityError),
    /// A data directory that cannot be made, locked, read or written.
    #[error("cannot {action} {}: {source}", path.display())]
    Directory { action: &'static str, path: PathBuf, source: io::Error },
    /// It was one of the worker, and has nothing of it any more.
    #[error(
        "{} is empty, and this worker had blocks there: mount its disk; where that was replaced, \
         worker.create_dirs = true, for one start, has the directory begun anew",
        .0.display()
    )]
    DirectoryEmptied(PathBuf),
    /// Another process works on the directory.
    #[error("{} is in use by another worker: give each worker its own worker.dirs", .0.display())]
    DirectoryInUse(PathBuf),
    /// The directory was written by a version of another format.
    #[error("{} has format {found}, this version reads {known}: use a matching version of cv, or another \
        directory", path.display())]
    DirectoryFormat { path: PathBuf, found: u32, known: u32 },
    /// Its blocks are encrypted, and there is no key for that.
    #[error(
        "the blocks in {} are encrypted: name the file with the key for that in worker.key_encryption_key, or another \
         directory in worker.dirs",
        .0.display()
    )]
    DirectoryEncrypted(PathBuf),
    /// Its blocks are not encrypted, and are to be.
    #[error(
        "{} has {blocks} blocks that are not encrypted, and worker.key_encryption_key is set: name an empty directory \
         in worker.dirs, or let what this one holds reach the buckets (`cv persist wait`) and empty it",
        path.display()
    )]
    DirectoryInClear { path: PathBuf, blocks: usize },
    /// The key of a directory cannot be read, or made.
    #[error("the key in {} cannot be used: {reason}", path.display())]
    DirectoryKey { path: PathBuf, reason: String },
    /// It is gone.
    #[error(
        "the blocks in {} are encrypted, and their key, the file \"key\" there, is gone: restore it; without it the \
         blocks cannot be read, and another directory is to be named in worker.dirs",
        .0.display()
    )]
    DirectoryKeyLost(PathBuf),
    /// `worker.json` is not what a worker writes.
    #[error(
        "{} is damaged ({reason}): delete it to start with the blocks of this directory, or restore it",
        path.display()
    )]
    DirectoryIdentity { path: PathBuf, reason: String },
    /// Directory and master belong to different clusters, or two directories do.
    #[error(
        "{} belongs to cluster {found}, not to {expected}: its directory may hold the only copy of files of that \
         cluster, so see first that cluster.masters names the right master; for a worker of another cluster, name \
         other directories in worker.dirs",
        path.display()
    )]
    ForeignCluster { path: PathBuf, found: String, expected: String },
    /// The block index of a directory cannot be opened, for a reason that setting it aside would not cure.
    #[error(
        "cannot open the block index {} ({source}): check its permissions and the disk, or move it away to begin with \
         an empty cache",
        path.display()
    )]
    Index { path: PathBuf, source: rocksdb::Error },
    /// A port or socket that cannot be taken.
    #[error("cannot listen on {address}: {source}; is another worker running, or the address of another host?")]
    Listen { address: String, source: io::Error },
    /// Unix socket paths are limited by the kernel.
    #[error(
        "worker.socket {} has {length} bytes, the kernel allows 107: set worker.socket to a shorter path",
        path.display()
    )]
    SocketPath { path: PathBuf, length: usize },
    /// Another live worker answers on the Unix socket.
    #[error("{} is served by another worker: stop it, or set worker.socket to another path", .0.display())]
    SocketInUse(PathBuf),
    /// The threads that serve connections cannot be started.
    #[error("cannot start a thread: {0}; is a limit of threads or of descriptors reached?")]
    Threads(io::Error),
    /// The HTTP port or another part of the process's plumbing.
    #[error(transparent)]
    Process(#[from] cavern_conf::process::ProcessError),
    /// The master does not take this worker in.
    #[error("the master refuses this worker: {reason}")]
    Refused { reason: String },
    /// A background task panicked; the reason is in the log.
    #[error("a task of the worker failed: {0}")]
    Task(#[from] tokio::task::JoinError),
}

impl WorkerError {
    /// Why an operation on a data directory, or on something in it, has failed.
    pub(crate) fn directory(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self + use<> {
        let path = path.to_owned();
        move |source| Self::Directory { action, path, source }
    }
}
