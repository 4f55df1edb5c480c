//! What can go wrong with the log, and what a caller sees of it.

use std::path::PathBuf;
use std::sync::Arc;

use cavern_proto::{NotLeading, StatusDetail};
use cavern_state::StateError;
use thiserror::Error;
use tonic::{Code, Status};

/// What the log gives, or why it cannot.
pub(crate) type Result<T = (), E = ConsensusError> = std::result::Result<T, E>;

/// Why the log cannot be opened, or does not do what it was asked to.
#[derive(Debug, Error)]
pub enum ConsensusError {
    #[error(transparent)]
    State(#[from] StateError),
    /// A master has worked here, but its database is gone.
    #[error(
        "{} is no database, but {} shows that a master has worked here; nothing was changed: restore the directory, or \
         move {} away to begin with an empty namespace",
        path.display(), evidence.display(), data_dir.display()
    )]
    DatabaseMissing { path: PathBuf, evidence: PathBuf, data_dir: PathBuf },
    /// Entries of the log that were acknowledged are not there.
    #[error(
        "the database in {} is not whole ({reason}): it was cut off, or replaced by an older copy; nothing was \
         changed: restore the directory from a backup, or delete {} to accept the loss of what an older copy lacks",
        path.display(), mark.display()
    )]
    DatabaseCut { path: PathBuf, reason: String, mark: PathBuf },
    /// Consensus cannot take a proposal now: another leader, or shutting down.
    #[error("the log does not accept proposals: {0}")]
    Unavailable(String),
    /// Only the leader does this; nothing was done.
    #[error("{}", .0.to_status().message())]
    NotLeading(NotLeading),
    #[error("{0}")]
    NotFound(String),
    #[error("{0}")]
    Invalid(String),
    /// Well formed, but impossible in the present state.
    #[error("{0}")]
    Refused(String),
    #[error("{0}")]
    Overloaded(String),
    #[error("{0}")]
    Deadline(String),
    /// One failure, answered to all who waited for the same thing.
    #[error(transparent)]
    Shared(#[from] Arc<ConsensusError>),
}

impl From<rocksdb::Error> for ConsensusError {
    fn from(error: rocksdb::Error) -> Self {
        StateError::from(error).into()
    }
}

impl ConsensusError {
    /// What is stored makes no sense.
    pub(crate) fn corrupt(what: String) -> Self {
        StateError::Corrupt(what).into()
    }

    /// An I/O error with the path it is about.
    pub(crate) fn io(path: impl Into<PathBuf>) -> impl FnOnce(std::io::Error) -> Self {
        let failed = StateError::io(path);
        move |source| failed(source).into()
    }

    /// Whether this master leads no more, or stops.
    pub fn is_of_master(&self) -> bool {
        match self {
            Self::Shared(shared) => shared.is_of_master(),
            Self::NotLeading(_) | Self::Unavailable(_) => true,
            _ => false,
        }
    }

    /// The gRPC status that says what a caller is to do.
    pub fn to_status(&self) -> Status {
        let code = match self {
            Self::Shared(shared) => return shared.to_status(),
            Self::NotLeading(answer) => return answer.to_status(),
            Self::Unavailable(_) => return StatusDetail::Unanswered.to_status(self.to_string()),
            Self::NotFound(_) => Code::NotFound,
            Self::Invalid(_) => Code::InvalidArgument,
            Self::Refused(_) => Code::FailedPrecondition,
            Self::Overloaded(_) => Code::ResourceExhausted,
            Self::Deadline(_) => Code::DeadlineExceeded,
            Self::State(_) | Self::DatabaseMissing { .. } | Self::DatabaseCut { .. } => Code::Internal,
        };
        Status::new(code, self.to_string())
    }
}

impl From<ConsensusError> for std::io::Error {
    fn from(error: ConsensusError) -> Self {
        Self::other(error)
    }
}

impl From<ConsensusError> for Status {
    fn from(error: ConsensusError) -> Self {
        error.to_status()
    }
}
