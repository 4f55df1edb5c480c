//! Why another process did not do what it was asked for.

use cavern_proto::data::Status;
use cavern_security::SecurityError;
use thiserror::Error;
use tonic::Code;

/// What the first answer of a process begins with that speaks TLS, to one who does not: an alert.
pub(crate) const TLS_ALERT: u8 = 21;

/// Why a call to a master or a worker failed. Cheap to clone: callers that share one call share its error.
#[derive(Clone, Debug, Error)]
pub enum NetError {
    /// An address, or a request, that makes no sense; another attempt will not help.
    #[error("{0}")]
    Invalid(String),
    /// No master could be reached, or none of them leads.
    #[error("no master of {masters} answers: {cause}; is `cv master` running there?")]
    MasterUnavailable { masters: String, cause: String },
    /// A master was reached but did not answer in time.
    #[error("the master did not answer {call} within {waited_ms} ms")]
    MasterDeadline { call: &'static str, waited_ms: u64 },
    /// The master answered that the inode by which it was asked is gone.
    #[error("{0}")]
    Gone(String),
    /// The master answered with another error.
    #[error("{message}")]
    Master { code: Code, message: String },
    /// A worker could not be reached, or its connection broke.
    #[error("worker {worker} at {address}: {cause}")]
    WorkerConnection { worker: u64, address: String, cause: String },
    /// A worker did not answer in time.
    #[error("worker {worker} at {address} did not answer within {waited_ms} ms")]
    WorkerDeadline { worker: u64, address: String, waited_ms: u64 },
    /// A worker answered that it does not do that.
    #[error("worker {worker}: {} ({message})", .status.as_str_name())]
    WorkerStatus { worker: u64, status: Status, message: String },
    /// What has arrived from a worker is not what it sent.
    #[error("worker {worker} at {address}: the bytes that arrived do not match their checksum, from byte {at} on")]
    Corrupt {
        worker: u64,
        address: String,
        /// Among those of the item, in bytes.
        at: u32,
    },
    /// The worker table has no such worker.
    #[error("worker {0} is not in the worker table")]
    UnknownWorker(u64),
}

impl From<SecurityError> for NetError {
    fn from(error: SecurityError) -> Self {
        Self::Invalid(error.to_string())
    }
}

impl NetError {
    /// Whether the same question to the master may be answered soon: none could be reached, or one says that it cannot
    /// now, since it is about to stop, or its bucket does not answer.
    pub fn is_transient(&self) -> bool {
        let is_for_now = |code| matches!(code, Code::Unavailable | Code::DeadlineExceeded);
        self.is_master_silent() || matches!(self, Self::Master { code, .. } if is_for_now(*code))
    }

    /// Whether no answer came from any master.
    pub fn is_master_silent(&self) -> bool {
        matches!(self, Self::MasterUnavailable { .. } | Self::MasterDeadline { .. })
    }
}
