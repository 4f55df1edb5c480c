//! What can go wrong between a system call and its bytes, and the one place where that becomes an errno.

use std::io;
use std::sync::Arc;

use cavern_net::NetError;
use cavern_posix::Refusal;
use cavern_proto::data::Status as DataStatus;
use cavern_ufs::UfsError;
use rustix::io::Errno;
use thiserror::Error;
use tonic::Code;

/// Why a call of this crate failed. Cheap to clone: callers that share one flight share its error.
#[derive(Clone, Debug, Error)]
pub enum ClientError {
    /// The name, or a component of the path, does not exist.
    #[error("{0}: no such file or directory")]
    NotFound(String),
    /// The inode or the object version is gone: look the name up again.
    #[error("{0}: this version is gone; look the name up again")]
    Stale(String),
    #[error("{0}: not a directory")]
    NotADirectory(String),
    #[error("{0}: is a directory")]
    IsADirectory(String),
    /// No name, kind or attribute that POSIX knows.
    #[error(transparent)]
    Posix(#[from] Refusal),
    /// The request makes no sense; another attempt will not help.
    #[error("{0}")]
    Invalid(String),
    /// A master or a worker did not do what it was asked for.
    #[error(transparent)]
    Net(NetError),
    /// The master does not make a change, as POSIX has it.
    #[error("{reason}")]
    Refused { errno: i32, reason: String },
    /// The bucket has names in a directory, or below it, that the master does not know yet: it must list them first.
    #[error("directory inode {directory} is not listed yet: try again when its bucket answers")]
    Unlisted { directory: u64, below: bool },
    /// A directory is delegated to another client, which is to return it first.
    #[error("directory inode {directory} is delegated to another client, which does not return it")]
    DelegatedElsewhere { directory: u64 },
    /// A change was sent to the master, and whether it was made will never be known.
    #[error("a change may have been made or not: {cause}")]
    OutcomeUnknown { cause: String },
    /// The session that had the locks has ended, and the locks with it.
    #[error(
        "the locks of inode {inode} ended with the session that had them: unlock or close the file, and lock it anew"
    )]
    LocksLost { inode: u64 },
    /// There is no live worker that could hold a new block.
    #[error("no live worker has room for a new block; `cv node list` shows the workers")]
    NoWorkers,
    /// A block of a file is not written to for now: until another replica of it has been made, or all clients have
    /// heard that a view has it.
    #[error(
        "block {index} of inode {inode} is being copied to another worker, or a view is being made of it: try again"
    )]
    BlockHeld { inode: u64, index: u32 },
    /// All workers that have a block are lost.
    #[error(
        "block {index} of inode {inode} is at workers {workers:?} only, which are lost: start them again; `cv report` \
         lists what they keep"
    )]
    Unavailable { inode: u64, index: u32, workers: Vec<u64> },
    /// Bytes that do not match their checksum arrived.
    #[error("worker {worker} sent chunk {chunk} of block {block} with a wrong checksum")]
    Corrupt { worker: u64, block: String, chunk: u32 },
    /// The bucket itself failed.
    #[error(transparent)]
    Ufs(Arc<UfsError>),
    /// While no master answers, the bucket was asked, and did not answer either.
    #[error("{key}: no master answers, nor did the bucket within {waited_ms} ms")]
    BucketSilent { key: String, waited_ms: u64 },
    /// The client does not know the mount, or cannot use its options.
    #[error("mount {mount}: {cause}")]
    Mount { mount: u32, cause: String },
    /// A read for which every source failed.
    #[error("{key}: no source could serve the read: {causes}")]
    Read { key: String, causes: String },
    /// A view cannot be read here, or a part of it.
    #[error("view {view}: {cause}")]
    View { view: String, cause: String },
    /// The memory budget stayed exhausted until the read's deadline.
    #[error("no memory of the budget (client.memory_budget) became free within {waited_ms} ms")]
    Memory { waited_ms: u64 },
    /// A local block file could not be read.
    #[error("reading a local block: {0}")]
    Io(Arc<io::Error>),
    /// The client is shutting down.
    #[error("the client is shutting down")]
    Shutdown,
}

impl ClientError {
    /// The errno that a system call answers.
    pub fn errno(&self) -> i32 {
        match self {
            Self::Refused { errno, .. } => return *errno,
            Self::NotFound(_) => Errno::NOENT,
            Self::Stale(_) => Errno::STALE,
            Self::NotADirectory(_) => Errno::NOTDIR,
            Self::IsADirectory(_) => Errno::ISDIR,
            Self::Posix(refusal) => refusal.errno,
            Self::Invalid(_) => Errno::INVAL,
            Self::Ufs(error) => match **error {
                UfsError::Denied { .. } | UfsError::NotAllowed { .. } => Errno::ACCESS,
                _ => Errno::IO,
            },
            Self::Net(NetError::WorkerStatus { status, .. }) => match status {
                DataStatus::NotFound | DataStatus::VersionChanged => Errno::STALE,
                DataStatus::NoSpace => Errno::NOSPC,
                _ => Errno::IO,
            },
            Self::Io(error) if error.kind() == io::ErrorKind::StorageFull => Errno::NOSPC,
            Self::Net(_)
            | Self::Unlisted { .. }
            | Self::DelegatedElsewhere { .. }
            | Self::OutcomeUnknown { .. }
            | Self::LocksLost { .. }
            | Self::NoWorkers
            | Self::BlockHeld { .. }
            | Self::Unavailable { .. }
            | Self::Corrupt { .. }
            | Self::BucketSilent { .. }
            | Self::Mount { .. }
            | Self::Read { .. }
            | Self::View { .. }
            | Self::Memory { .. }
            | Self::Io(_)
            | Self::Shutdown => Errno::IO,
        }
        .raw_os_error()
    }

    /// What happened, for another error that says what became of a change because of it.
    pub(crate) fn cause(&self) -> String {
        match self {
            Self::OutcomeUnknown { cause } => cause.clone(),
            error => error.to_string(),
        }
    }

    /// Whether the object has another version, or is gone: the metadata must be asked anew.
    pub fn is_version_gone(&self) -> bool {
        match self {
            Self::Stale(_) => true,
            Self::Net(NetError::WorkerStatus { status, .. }) => {
                matches!(status, DataStatus::NotFound | DataStatus::VersionChanged)
            }
            Self::Ufs(error) => matches!(**error, UfsError::NotFound { .. } | UfsError::VersionChanged { .. }),
            _ => false,
        }
    }

    /// Whether the same question to the master may be answered soon: see [`NetError::is_transient`].
    pub fn is_transient(&self) -> bool {
        matches!(self, Self::Net(error) if error.is_transient())
    }

    /// Whether the same question to the workers of a block may be answered soon: one could not be reached, or cannot
    /// answer now, but is not lost; the bucket could not be reached; or what was sent was damaged on its way.
    pub(crate) fn is_transient_at_worker(&self) -> bool {
        match self {
            Self::Net(NetError::WorkerConnection { .. } | NetError::WorkerDeadline { .. }) | Self::Corrupt { .. } => {
                true
            }
            Self::Net(NetError::WorkerStatus { status, .. }) => {
                matches!(status, DataStatus::Overloaded | DataStatus::UfsUnavailable)
            }
            _ => false,
        }
    }

    /// Whether a worker says that a view has the block that was to be changed. This client has not heard of that: its
    /// lease may have ended.
    pub(crate) fn is_frozen(&self) -> bool {
        matches!(self, Self::Net(NetError::WorkerStatus { status: DataStatus::Frozen, .. }))
    }

    /// Whether no answer came from any master, so that what is cached may be served instead.
    pub fn is_master_silent(&self) -> bool {
        matches!(self, Self::Net(error) if error.is_master_silent())
    }
}

impl From<NetError> for ClientError {
    /// What the master says of names and requests is said as this crate says it.
    fn from(error: NetError) -> Self {
        match error {
            NetError::Gone(message) => Self::Stale(message),
            NetError::Master { code: Code::NotFound, message } => Self::NotFound(message),
            NetError::Master { code: Code::InvalidArgument, message } | NetError::Invalid(message) => {
                Self::Invalid(message)
            }
            error => Self::Net(error),
        }
    }
}

impl From<UfsError> for ClientError {
    fn from(error: UfsError) -> Self {
        Self::Ufs(Arc::new(error))
    }
}

impl From<io::Error> for ClientError {
    fn from(error: io::Error) -> Self {
        Self::Io(Arc::new(error))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_of_failure_has_its_errno() {
        let name = || String::from("a");
        let status = |status| ClientError::Net(NetError::WorkerStatus { worker: 1, status, message: name() });
        for (error, errno) in [
            (ClientError::NotFound(name()), Errno::NOENT),
            (ClientError::Stale(name()), Errno::STALE),
            (ClientError::NotADirectory(name()), Errno::NOTDIR),
            (ClientError::IsADirectory(name()), Errno::ISDIR),
            (cavern_posix::check_name(&[b'x'; 300]).unwrap_err().into(), Errno::NAMETOOLONG),
            (ClientError::Invalid(name()), Errno::INVAL),
            (status(DataStatus::VersionChanged), Errno::STALE),
            (status(DataStatus::NotFound), Errno::STALE),
            (status(DataStatus::UfsUnavailable), Errno::IO),
            (status(DataStatus::NoSpace), Errno::NOSPC),
            (status(DataStatus::NoSuchBlock), Errno::IO),
            (ClientError::Refused { errno: Errno::NOTEMPTY.raw_os_error(), reason: name() }, Errno::NOTEMPTY),
            (ClientError::OutcomeUnknown { cause: name() }, Errno::IO),
            (ClientError::LocksLost { inode: 1 }, Errno::IO),
            (ClientError::Memory { waited_ms: 1 }, Errno::IO),
            (ClientError::View { view: name(), cause: name() }, Errno::IO),
            (ClientError::Net(NetError::MasterDeadline { call: "Lookup", waited_ms: 1 }), Errno::IO),
        ] {
            assert_eq!(error.errno(), errno.raw_os_error(), "{error}");
        }
    }

    #[test]
    fn what_a_worker_may_answer_soon_is_asked_again() {
        let status = |status| ClientError::Net(NetError::WorkerStatus { worker: 1, status, message: String::new() });
        for (error, is_transient) in [
            (ClientError::Corrupt { worker: 1, block: String::from("b"), chunk: 0 }, true),
            (status(DataStatus::Overloaded), true),
            (status(DataStatus::UfsUnavailable), true),
            (status(DataStatus::NoSuchBlock), false),
            (status(DataStatus::IoError), false),
            (ClientError::NoWorkers, false),
        ] {
            assert_eq!(error.is_transient_at_worker(), is_transient, "{error}");
        }
    }

    #[test]
    fn the_cause_of_an_error_that_is_told_again_is_said_once() {
        let unknown = ClientError::OutcomeUnknown { cause: "the session has ended".to_owned() };
        let again = ClientError::OutcomeUnknown { cause: unknown.cause() };
        assert_eq!(again.to_string(), "a change may have been made or not: the session has ended");
        let refused = ClientError::Refused { errno: 13, reason: "it is not yours".to_owned() };
        assert_eq!(refused.cause(), "it is not yours");
    }
}
