//! Refusals, each with its errno.

use rustix::io::Errno;

/// Why the rules of this crate refuse something.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{reason}")]
pub struct Refusal {
    /// As the system call answers it.
    pub errno: Errno,
    /// A sentence for the one who asked.
    pub reason: String,
}

pub(crate) fn refuse<T>(errno: Errno, reason: impl Into<String>) -> Result<T, Refusal> {
    Err(Refusal { errno, reason: reason.into() })
}
