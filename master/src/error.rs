//! What can go wrong in a master, and what a caller sees of it.
//!
//! Errors of a start are printed by `cv` and end the process; errors of a request become a gRPC status in exactly one
//! place, [`MasterError::to_status`].

use std::path::PathBuf;

use cavern_conf::process::ProcessError;
use cavern_consensus::ConsensusError;
use cavern_proto::StatusDetail;
use cavern_security::SecurityError;
use cavern_state::StateError;
use cavern_ufs::{KeyError, UfsError};
use cavern_work::WorkError;
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
    Work(#[from] WorkError),
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
}

impl From<StateError> for MasterError {
    fn from(error: StateError) -> Self {
        WorkError::from(error).into()
    }
}

impl From<ConsensusError> for MasterError {
    fn from(error: ConsensusError) -> Self {
        WorkError::from(error).into()
    }
}

impl MasterError {
    /// The gRPC status that says what a caller is to do: NOT_FOUND ([`Gone`](WorkError::Gone) when it is what was asked
    /// by) and ALREADY_EXISTS as they say, INVALID_ARGUMENT for a request that can never work, FAILED_PRECONDITION for
    /// one that the present state refuses, PERMISSION_DENIED when the bucket or STS refused, or may not be reached from
    /// here, UNAVAILABLE, DEADLINE_EXCEEDED and RESOURCE_EXHAUSTED for what may work later, UNKNOWN for an answer of
    /// the bucket that makes no sense, INTERNAL for damage.
    pub(crate) fn to_status(&self) -> Status {
        match self {
            Self::Work(error) => status_of(error),
            Self::Unreachable { .. } => Status::unavailable(self.to_string()),
            Self::Process(_) | Self::Security(_) | Self::LostPlace { .. } | Self::Failed(_) => {
                Status::internal(self.to_string())
            }
        }
    }
}

fn status_of(error: &WorkError) -> Status {
    let code = match error {
        WorkError::Shared(shared) => return status_of(shared),
        WorkError::Consensus(error) => return error.to_status(),
        WorkError::Gone(_) => return StatusDetail::Gone.to_status(error.to_string()),
        WorkError::Ufs(error) => match error {
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
        WorkError::Keys { source: KeyError::Unavailable(_), .. } => Code::Unavailable,
        WorkError::Keys { .. } => Code::PermissionDenied,
        WorkError::NotFound(_) => Code::NotFound,
        WorkError::Denied(_) => Code::PermissionDenied,
        WorkError::AlreadyExists(_) => Code::AlreadyExists,
        WorkError::Invalid(_) => Code::InvalidArgument,
        WorkError::Refused(_) | WorkError::State(StateError::NotADirectory(_)) => Code::FailedPrecondition,
        WorkError::Overloaded(_) => Code::ResourceExhausted,
        WorkError::Deadline(_) => Code::DeadlineExceeded,
        WorkError::State(_) | WorkError::SecretKey { .. } => Code::Internal,
    };
    Status::new(code, error.to_string())
}

impl From<MasterError> for Status {
    fn from(error: MasterError) -> Self {
        error.to_status()
    }
}
