//! What can go wrong between a system call and its bytes, and the one place where that becomes an errno.

use std::io;
use std::sync::Arc;

use cavern_proto::data::Status as DataStatus;
use cavern_ufs::UfsError;
use rustix::io::Errno;
use thiserror::Error;

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
    #[error("{0}…: name longer than 255 bytes")]
    NameTooLong(String),
    /// The request makes no sense; another attempt will not help.
    #[error("{0}")]
    Invalid(String),
    /// No master could be reached.
    #[error("no master of {masters} can be reached: {cause}; is `cv master` running there?")]
    MasterUnavailable { masters: String, cause: String },
    /// A master was reached but did not answer in time.
    #[error("the master did not answer {call} within {waited_ms} ms")]
    MasterDeadline { call: &'static str, waited_ms: u64 },
    /// The master answered with an error.
    #[error("{message}")]
    Master { code: tonic::Code, message: String },
    /// The master does not make a change, as POSIX has it.
    #[error("{reason}")]
    Refused { errno: i32, reason: String },
    /// The bucket has names in a directory, or below it, that the master does not know yet: it must list them first.
    #[error("directory inode {directory} is not listed yet: try again when its bucket answers")]
    Unlisted { directory: u64, below: bool },
    /// A change was sent to the master, and whether it was made will never be known.
    #[error("a change may have been made or not: {cause}")]
    OutcomeUnknown { cause: String },
    /// The session that had the locks has ended, and the locks with it.
    #[error(
        "the locks of inode {inode} ended with the session that had them: unlock or close the file, and lock it anew"
    )]
    LocksLost { inode: u64 },
    /// A worker could not be reached, or its connection broke.
    #[error("worker {worker} at {address}: {cause}")]
    WorkerConnection { worker: u64, address: String, cause: String },
    /// A worker did not answer in time.
    #[error("worker {worker} at {address} did not answer within {waited_ms} ms")]
    WorkerDeadline { worker: u64, address: String, waited_ms: u64 },
    /// A worker answered that it cannot serve this block.
    #[error("worker {worker}: {} ({message})", .status.as_str_name())]
    WorkerStatus { worker: u64, status: DataStatus, message: String },
    /// There is no live worker that could hold a new block.
    #[error("no live worker has room for a new block; `cv node list` shows the workers")]
    NoWorkers,
    /// A block of a file gets another replica, and is not written to until that has been made.
    #[error("block {index} of inode {inode} is being copied to another worker")]
    BlockHeld { inode: u64, index: u32 },
    /// All workers that have a block are lost.
    #[error(
        "block {index} of inode {inode} is at workers {workers:?} only, which are lost: start them again; `cv report` \
         lists what they keep"
    )]
    Unavailable { inode: u64, index: u32, workers: Vec<u64> },
    /// The worker table has no such worker.
    #[error("worker {0} is not in the worker table")]
    UnknownWorker(u64),
    /// Bytes that do not match their checksum arrived.
    #[error("worker {worker} sent chunk {chunk} of block {block} with a wrong checksum")]
    Corrupt { worker: u64, block: String, chunk: u32 },
    /// The bucket itself failed.
    #[error(transparent)]
    Ufs(Arc<UfsError>),
    /// The client does not know the mount, or cannot use its options.
    #[error("mount {mount}: {cause}")]
    Mount { mount: u32, cause: String },
    /// A read for which every source failed.
    #[error("{key}: no source could serve the read: {causes}")]
    Read { key: String, causes: String },
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
            Self::NameTooLong(_) => Errno::NAMETOOLONG,
            Self::Invalid(_) => Errno::INVAL,
            Self::Ufs(error) if matches!(**error, UfsError::Denied { .. }) => Errno::ACCESS,
            Self::WorkerStatus { status: DataStatus::NotFound | DataStatus::VersionChanged, .. } => Errno::STALE,
            Self::WorkerStatus { status: DataStatus::NoSpace, .. } => Errno::NOSPC,
            Self::Io(error) if error.kind() == io::ErrorKind::StorageFull => Errno::NOSPC,
            _ => Errno::IO,
        }
        .raw_os_error()
    }

    /// Whether the object has another version, or is gone: the metadata must be asked anew.
    pub fn is_version_gone(&self) -> bool {
        match self {
            Self::Stale(_) => true,
            Self::WorkerStatus { status, .. } => matches!(status, DataStatus::NotFound | DataStatus::VersionChanged),
            Self::Ufs(error) => matches!(**error, UfsError::NotFound { .. } | UfsError::VersionChanged { .. }),
            _ => false,
        }
    }

    /// Whether the same question to the master may be answered soon: none could be reached, or one says that it cannot
    /// now, since it is about to stop, or its bucket does not answer.
    pub fn may_pass(&self) -> bool {
        let is_for_now = |code| matches!(code, tonic::Code::Unavailable | tonic::Code::DeadlineExceeded);
        self.is_master_silent() || matches!(self, Self::Master { code, .. } if is_for_now(*code))
    }

    /// Whether no answer came from any master, so that what is cached may be served instead.
    pub fn is_master_silent(&self) -> bool {
        matches!(self, Self::MasterUnavailable { .. } | Self::MasterDeadline { .. })
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
        let status = |status| ClientError::WorkerStatus { worker: 1, status, message: name() };
        for (error, errno) in [
            (ClientError::NotFound(name()), Errno::NOENT),
            (ClientError::Stale(name()), Errno::STALE),
            (ClientError::NotADirectory(name()), Errno::NOTDIR),
            (ClientError::IsADirectory(name()), Errno::ISDIR),
            (ClientError::NameTooLong(name()), Errno::NAMETOOLONG),
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
            (ClientError::MasterDeadline { call: "Lookup", waited_ms: 1 }, Errno::IO),
        ] {
            assert_eq!(error.errno(), errno.raw_os_error(), "{error}");
        }
    }
}
