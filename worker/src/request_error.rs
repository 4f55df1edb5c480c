//! What a request is answered when it cannot be served: the one place where errors of the store and of buckets become
//! the status codes of the data plane.

use std::sync::Arc;

use cavern_proto::data::{
    CopyReply, Failure, InspectReply, PersistReply, ReserveReply, Status, SyncReply, WriteReply, inspect_reply,
    open_reply, read_reply,
};
use cavern_ufs::UfsError;
use thiserror::Error;
use tokio::sync::{AcquireError, Semaphore};
use tokio::time::Instant;

use crate::store::StoreError;

/// A status of `data.proto` and one sentence that names the cause.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[error("{message} ({})", .status.as_str_name())]
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

    /// There was no memory for a request in time.
    pub fn no_memory() -> Self {
        Self::new(Status::Overloaded, "the memory budget of the worker is used up")
    }

    /// The process is about to end.
    pub fn stopping() -> Self {
        Self::new(Status::Overloaded, "the worker is stopping")
    }

    /// The request's own deadline passed.
    pub fn deadline() -> Self {
        Self::new(Status::Deadline, "the deadline of the request passed")
    }
}

/// Has work done on a thread that may wait for a disk.
///
/// # Errors
/// Those of the work; or it has panicked, and `what` was being done.
pub async fn blocking<T, E>(what: &str, work: impl FnOnce() -> Result<T, E> + Send + 'static) -> Result<T, Refusal>
where
    T: Send + 'static,
    E: Into<Refusal> + Send + 'static,
{
    match tokio::task::spawn_blocking(work).await {
        Ok(done) => done.map_err(Into::into),
        Err(_) => Err(Refusal::new(Status::IoError, format!("{what} failed"))),
    }
}

/// Has work done that may wait for a disk, at a turn of its tenant. The turn is that of the work: whoever no longer
/// waits for it cannot have more done meanwhile.
///
/// # Errors
/// [`Status::Overloaded`] when there is no turn until then: nothing has been done. [`Status::IoError`] when the work
/// has failed.
pub async fn on_disk<T: Send + 'static>(
    turns: Option<&Arc<Semaphore>>,
    until: Instant,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Refusal> {
    let turn = match turns {
        Some(turns) => match tokio::time::timeout_at(until, turns.clone().acquire_owned()).await {
            // They are never closed.
            Ok(turn) => turn.ok(),
            Err(_) => {
                let message = "earlier requests of this client still wait for disks of the worker: try again";
                return Err(Refusal::new(Status::Overloaded, message));
            }
        },
        None => None,
    };
    let work = move || {
        let done = work();
        drop(turn);
        done
    };
    tokio::task::spawn_blocking(work).await.map_err(|_| Refusal::new(Status::IoError, "the request failed"))
}

/// The messages that say by themselves why something is not done.
macro_rules! refusing {
    ($($message:ty),+ $(,)?) => {$(
        impl From<Refusal> for $message {
            fn from(Refusal { status, message }: Refusal) -> Self {
                let mut refused = Self::default();
                (refused.status, refused.message) = (status.into(), message);
                refused
            }
        }
    )+};
}

refusing!(Failure, read_reply::Item, open_reply::Item, ReserveReply, WriteReply, SyncReply, PersistReply, CopyReply);
refusing!(InspectReply, inspect_reply::Block);

impl From<UfsError> for Refusal {
    fn from(error: UfsError) -> Self {
        let status = match &error {
            UfsError::NotFound { .. } => Status::NotFound,
            UfsError::VersionChanged { .. } => Status::VersionChanged,
            UfsError::Denied { .. } | UfsError::NotAllowed { .. } => Status::Denied,
            // It cannot be had of the bucket, for now.
            _ => Status::UfsUnavailable,
        };
        Self::new(status, error.to_string())
    }
}

/// Of a budget or a queue: they are closed by nobody but the end of the process.
impl From<AcquireError> for Refusal {
    fn from(_: AcquireError) -> Self {
        Self::stopping()
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
