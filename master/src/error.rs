//! What can go wrong in a master, and what a caller sees of it.
//!
//! Errors of a start are printed by `cv` and end the process; errors of a request become a gRPC status in exactly one
//! place, [`MasterError::to_status`].

use std::path::PathBuf;
use std::sync::Arc;

use cavern_conf::process::ProcessError;
use cavern_consensus::ConsensusError;
use cavern_posix::PosixError;
use cavern_proto::{NotLeading, StatusMark};
use cavern_security::SecurityError;
use cavern_state::StateError;
use cavern_ufs::{KeyError, UfsError};
use thiserror::Error;
use tonic::{Code, Status};

/// Why a master cannot start, go on, or do what it was asked to.
#[derive(Debug, Error)]
pub enum MasterError {
    #[error(transparent)]
    Process(#[from] ProcessError),
    #[error(transparent)]
    Security(#[from] SecurityError),
    #[error(transparent)]
    State(#[from] StateError),
    #[error(transparent)]
    Consensus(#[from] ConsensusError),
    #[error(
        "the encryption key in {} is not usable: {reason}; restore the file, or mount the buckets anew",
        path.display()
    )]
    SecretKey { path: PathBuf, reason: String },
    /// The cluster has this master as a member, but it has no data.
    #[error(
        "cluster {cluster_id} has the master at {address} as its master {node_id}, but {} is empty: it has lost its \
         data, and with them its votes. Restore the directory; or take this master out with `cv raft remove {node_id}` \
         and in again, as a new one, with `cv raft add {address}`",
        data_dir.display()
    )]
    LostPlace { cluster_id: String, node_id: u64, address: String, data_dir: PathBuf },
    #[error("the master at {address} cannot be reached ({cause})")]
    Unreachable { address: String, cause: String },
    #[error(
        "this master cannot go on: {0}. Do what that says, or check the disk of master.data_dir, its room \
             included"
    )]
    Failed(String),
    #[error("gRPC cannot be served: {0}")]
    Serve(#[from] tonic::transport::Error),

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
    Shared(#[from] Arc<MasterError>),
}

impl From<PosixError> for MasterError {
    fn from(error: PosixError) -> Self {
        Self::Invalid(error.to_string())
    }
}

impl MasterError {
    /// Whether a read of what is in memory would have had to wait for the disk.
    pub(crate) fn needs_disk(&self) -> bool {
        matches!(self, Self::State(error) if error.needs_disk())
    }

    /// What is stored makes no sense.
    pub(crate) fn corrupt(what: String) -> Self {
        StateError::Corrupt(what).into()
    }

    /// An I/O error with the path it is about.
    pub(crate) fn io(path: impl Into<PathBuf>) -> impl FnOnce(std::io::Error) -> Self {
        let failed = StateError::io(path);
        move |source| failed(source).into()
    }

    /// The log takes no proposals now, or this master is about to stop.
    pub(crate) fn unavailable(reason: String) -> Self {
        ConsensusError::Unavailable(reason).into()
    }

    /// What is under way when the master stops.
    pub(crate) fn stopping() -> Self {
        Self::unavailable("the master is stopping".to_owned())
    }

    /// Only the leader does this; nothing was done.
    pub(crate) fn not_leading(answer: NotLeading) -> Self {
        ConsensusError::NotLeading(answer).into()
    }

    /// Whether the thing that was asked about is not there (or no longer).
    pub(crate) fn is_not_found(&self) -> bool {
        match self {
            Self::Shared(shared) => shared.is_not_found(),
            Self::NotFound(_) | Self::Gone(_) => true,
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

    /// The gRPC status that says what a caller is to do: NOT_FOUND ([`Gone`] when it is what was asked by) and
    /// ALREADY_EXISTS as they say, INVALID_ARGUMENT for a request that can never work, FAILED_PRECONDITION for one that
    /// the present state refuses, PERMISSION_DENIED when the bucket or STS refused, or may not be reached from here,
    /// UNAVAILABLE, DEADLINE_EXCEEDED and RESOURCE_EXHAUSTED for what may work later, UNKNOWN for an answer of the
    /// bucket that makes no sense, INTERNAL for damage.
    pub(crate) fn to_status(&self) -> Status {
        let code = match self {
            Self::Shared(shared) => return shared.to_status(),
            Self::Consensus(error) => return error.to_status(),
            Self::Gone(_) => return StatusMark::Gone.to_status(self.to_string()),
            Self::Ufs(error) => match error {
                UfsError::Denied { .. } | UfsError::NotAllowed { .. } => Code::PermissionDenied,
                UfsError::NoBucket { .. }
                | UfsError::Obstructed { .. }
                | UfsError::Rejected { .. }
                | UfsError::Oversized { .. } => Code::FailedPrecondition,
                UfsError::Invalid { .. } => Code::InvalidArgument,
                UfsError::Deadline { .. } => Code::DeadlineExceeded,
                UfsError::NotFound { .. } => Code::NotFound,
                UfsError::Malformed { .. } => Code::Unknown,
                _ => Code::Unavailable,
            },
            Self::Keys { source: KeyError::Unavailable(_), .. } => Code::Unavailable,
            Self::Keys { .. } => Code::PermissionDenied,
            Self::NotFound(_) => Code::NotFound,
            Self::Denied(_) => Code::PermissionDenied,
            Self::AlreadyExists(_) => Code::AlreadyExists,
            Self::Invalid(_) => Code::InvalidArgument,
            Self::Refused(_) | Self::State(StateError::NotADirectory(_)) => Code::FailedPrecondition,
            Self::Overloaded(_) => Code::ResourceExhausted,
            Self::Deadline(_) => Code::DeadlineExceeded,
            Self::Unreachable { .. } => Code::Unavailable,
            _ => Code::Internal,
        };
        Status::new(code, self.to_string())
    }
}

impl From<MasterError> for Status {
    fn from(error: MasterError) -> Self {
        error.to_status()
    }
}
