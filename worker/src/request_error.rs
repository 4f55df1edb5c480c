//! What a request is answered when it cannot be served: the one place where errors of the store and of buckets become
//! the status codes of the data plane.

use std::fmt;

use cavern_proto::data::Status;
use cavern_ufs::UfsError;

use crate::store::StoreError;

/// A status of `data.proto` and one sentence that names the cause.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Refusal {
    pub status: Status,
    pub message: String,
}

impl Refusal {
    pub fn new(status: Status, message: impl Into<String>) -> Self {
        Self { status, message: message.into() }
    }

    pub fn bad_request(message: impl Into<String>) -> Self {
        Self::new(Status::BadRequest, message)
    }

    /// The request's own deadline passed.
    pub fn deadline() -> Self {
        Self::new(Status::Deadline, "the deadline of the request passed")
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.message, self.status.as_str_name())
    }
}

impl From<UfsError> for Refusal {
    fn from(error: UfsError) -> Self {
        let status = match &error {
            UfsError::NotFound { .. } => Status::NotFound,
            UfsError::VersionChanged { .. } => Status::VersionChanged,
            UfsError::Denied { .. } | UfsError::NotAllowed { .. } => Status::Denied,
            UfsError::NoBucket { .. }
            | UfsError::Unavailable { .. }
            | UfsError::Deadline { .. }
            | UfsError::ShortBody { .. }
            | UfsError::Malformed { .. }
            | UfsError::Obstructed { .. }
            | UfsError::Rejected { .. }
            | UfsError::Oversized { .. }
            | UfsError::Invalid { .. } => Status::UfsUnavailable,
        };
        Self::new(status, error.to_string())
    }
}

impl From<StoreError> for Refusal {
    fn from(error: StoreError) -> Self {
        let status = match &error {
            StoreError::Full | StoreError::Dropped => Status::Overloaded,
            StoreError::NoSpace => Status::NoSpace,
            StoreError::NoSuchBlock => Status::NoSuchBlock,
            StoreError::Mismatch(_) => Status::BadRequest,
            StoreError::NoDirectory | StoreError::Io { .. } => Status::IoError,
        };
        Self::new(status, error.to_string())
    }
}
