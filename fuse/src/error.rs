//! Why `cv fuse` could not begin.

use cavern_client::ClientError;
use cavern_conf::process::ProcessError;
use cavern_security::SecurityError;
use thiserror::Error;

use crate::kernel::{MountError, SessionError};

/// Each is one sentence for a person: the thing, the cause, the next step.
#[derive(Debug, Error)]
pub enum FuseError {
    #[error(transparent)]
    Process(#[from] ProcessError),
    #[error(transparent)]
    Security(#[from] SecurityError),
    /// No master, or it refused.
    #[error("the cluster cannot be used: {0}")]
    Client(#[from] ClientError),
    /// `fuse.path` leads nowhere.
    #[error(
        "the namespace has no path {path} to show: {cause}; mount a bucket there with `cv mount`, or set fuse.path"
    )]
    Path { path: String, cause: ClientError },
    /// `fuse.path` leads to a file.
    #[error("{path} of the namespace is not a directory: set fuse.path to one")]
    NotADirectory { path: String },
    #[error(transparent)]
    Mount(#[from] MountError),
    #[error("the FUSE connection could not be set up: {0}")]
    Session(#[from] SessionError),
    #[error("the supervisor of the mount cannot be understood: {0}")]
    Supervisor(#[source] std::io::Error),
    #[error("the journal of the mount cannot be used: {0}")]
    Journal(#[source] std::io::Error),
    #[error("a thread could not be started: {0}")]
    Thread(#[source] std::io::Error),
}
