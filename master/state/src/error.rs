//! What can go wrong with the database, and with a command that is applied to it.

use std::path::{Path, PathBuf};

use thiserror::Error;

/// What is read or done, or why it cannot be.
pub type Result<T = (), E = StateError> = std::result::Result<T, E>;

/// Why the state cannot be opened, read or changed. What a command asks for and may not have is no error but an
/// [`Outcome`](crate::Outcome).
#[derive(Debug, Error)]
pub enum StateError {
    #[error("another master already uses the data directory {}: stop it, or choose another with \
        master.data_dir", .0.display())]
    DataDirInUse(PathBuf),
    #[error("cannot use {} ({source}): check its permissions and the disk", path.display())]
    Io { path: PathBuf, source: std::io::Error },
    #[error(
        "cannot open the database in {} ({source}); nothing was changed: check the disk, and restore the directory \
         from a backup if it is damaged",
        path.display()
    )]
    OpenDatabase { path: PathBuf, source: rocksdb::Error },
    #[error("the database failed ({0}): check the disk of master.data_dir")]
    Database(#[from] rocksdb::Error),
    /// Stored bytes make no sense.
    #[error("{0} cannot be decoded: the database is damaged, or was written by a newer version")]
    Corrupt(String),
    /// The next start may open another database than the one that is written to.
    #[error("{} could not be written: restart this master", .0.display())]
    UnknownCurrent(PathBuf),
    /// Another version of the master has put it there.
    #[error("the log has a command that this version does not know: a newer one has put it there. Upgrade this master")]
    UnknownCommand,
    /// The masters have agreed on what only later versions know.
    #[error(
        "the masters of this cluster have agreed on feature version {agreed}, and this one knows those up to {known}: \
         upgrade this master, nothing is lost"
    )]
    NewerFeatureVersion { agreed: u32, known: u32 },
    /// It has no feature version: it is of before there were any.
    #[error(
        "the state of these masters was written by an earlier commit, and this one cannot go on with it; nothing was \
         changed: go back to that commit, bring what is written to the buckets, and mount the prefixes anew with an \
         empty master.data_dir"
    )]
    FormerState,
    /// A path, or what stands for one.
    #[error("{0} is not a directory")]
    NotADirectory(String),
    /// The outcome of another command: an error of this program.
    #[error("{command} was answered by {outcome}: this is an error of the program, please report it")]
    UnexpectedOutcome { command: &'static str, outcome: String },
}

impl StateError {
    /// Whether a read of what is in memory would have had to wait for the disk.
    pub fn needs_disk(&self) -> bool {
        matches!(self, Self::Database(error) if error.kind() == rocksdb::ErrorKind::Incomplete)
    }

    /// A database that could not be opened, with its directory.
    pub fn opening(directory: &Path) -> impl FnOnce(rocksdb::Error) -> Self {
        let path = directory.to_owned();
        move |source| Self::OpenDatabase { path, source }
    }

    /// An I/O error with the path it is about.
    pub fn io(path: impl Into<PathBuf>) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.into();
        move |source| Self::Io { path, source }
    }
}
