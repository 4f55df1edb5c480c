//! What can go wrong in what a leader does.

use std::path::PathBuf;
use std::sync::Arc;

use cavern_consensus::ConsensusError;
use cavern_posix::Refusal;
use cavern_state::StateError;
use cavern_ufs::{KeyError, UfsError};
use thiserror::Error;

/// Why something cannot be read, or a leader does not do what it was asked to.
#[derive(Debug, Error)]
pub enum WorkError {
    #[error(transparent)]
    State(#[from] StateError),
    #[error(transparent)]
    Consensus(#[from] ConsensusError),
    #[error(
        "the encryption key in {} is not usable: {reason}; restore the file, or mount the buckets anew",
        path.display()
    )]
    SecretKey { path: PathBuf, reason: String },
    #[error("{0}")]
    NotFound(String),
    /// An inode that no name leads to, and nobody has open, any more.
    #[error("inode {0} is no longer in the namespace")]
    Gone(u64),
    #[error("{0}")]
    AlreadyExists(String),
    #[error("{0}")]
    Invalid(String),
    /// Well formed, but impossible in the present state.
    #[error("{0}")]
    Refused(String),
    /// Whoever asks may not.
    #[error("{0}")]
    Denied(String),
    #[error("{0}")]
    Overloaded(String),
    #[error("{0}")]
    Deadline(String),
    #[error(transparent)]
    Ufs(#[from] UfsError),
    /// STS gives no keys for a mount that vends them.
    #[error("no keys of {path} can be had: {source}")]
    Keys { path: String, source: KeyError },
    /// One failure, answered to all who waited for the same thing.
    #[error(transparent)]
    Shared(#[from] Arc<WorkError>),
}

/// What a bucket has, if it has it.
pub fn if_there<T>(answer: Result<T, UfsError>) -> Result<Option<T>, UfsError> {
    match answer {
        Err(UfsError::NotFound { .. }) => Ok(None),
        answer => answer.map(Some),
    }
}

impl From<Refusal> for WorkError {
    fn from(refusal: Refusal) -> Self {
        Self::Invalid(refusal.reason)
    }
}

impl From<cavern_erofs::Error> for WorkError {
    /// What is to be frozen cannot be, or there is no room for its image.
    fn from(error: cavern_erofs::Error) -> Self {
        Self::Refused(error.to_string())
    }
}

impl WorkError {
    /// Whether a read of what is in memory would have had to wait for the disk.
    pub(crate) fn needs_disk(&self) -> bool {
        matches!(self, Self::State(error) if error.needs_disk())
    }

    /// The log takes no proposals now, or this master is about to stop.
    pub fn unavailable(reason: String) -> Self {
        ConsensusError::Unavailable(reason).into()
    }

    /// What is under way when the master stops.
    pub fn stopping() -> Self {
        Self::unavailable("the master is stopping".to_owned())
    }

    /// Whether the thing that was asked about is not there (or no longer).
    pub fn is_not_found(&self) -> bool {
        match self {
            Self::Shared(shared) => shared.is_not_found(),
            Self::NotFound(_) | Self::Gone(_) => true,
            _ => false,
        }
    }

    /// What was asked about, if it is there.
    pub fn if_found<T>(answer: Result<T, Self>) -> Result<Option<T>, Self> {
        match answer {
            Err(error) if error.is_not_found() => Ok(None),
            answer => answer.map(Some),
        }
    }

    /// Whether this master leads no more, or stops: another one is to be asked the same.
    pub(crate) fn is_of_master(&self) -> bool {
        match self {
            Self::Shared(shared) => shared.is_of_master(),
            Self::Consensus(error) => error.is_of_master(),
            _ => false,
        }
    }

    /// Whether a bucket has failed or refused.
    pub(crate) fn is_of_bucket(&self) -> bool {
        match self {
            Self::Shared(shared) => shared.is_of_bucket(),
            Self::Ufs(_) => true,
            _ => false,
        }
    }
}
