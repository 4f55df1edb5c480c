//! Failed operations: the errno for the caller, and one log line for whoever wants to know why.

use std::fmt::Display;

use cavern_client::ClientError;
use cavern_conf::process::LogLimit;
use tracing::warn;

use crate::kernel::Reply;

/// Answers errors, and keeps a flood of them, of one errno, from flooding the log.
#[derive(Debug, Default)]
pub struct Failures(LogLimit<i32>);

impl Failures {
    /// Answers what failed in the metadata. Names that do not exist and versions that are gone are answers, not
    /// failures; reads are logged by the client, which knows what sources it tried.
    pub fn answer(&self, reply: Reply, operation: &str, error: &ClientError) {
        let errno = match error.errno() {
            // The kernel would never ask for the like again, for no file: a master of an earlier version has said so.
            libc::ENOSYS => libc::EOPNOTSUPP,
            errno => errno,
        };
        if matches!(errno, libc::EIO | libc::EACCES) {
            self.log(operation, errno, error);
        }
        reply.error(errno);
    }

    /// Logs what is answered with an errno.
    pub fn log(&self, operation: &str, errno: i32, cause: &dyn Display) {
        if let Some(suppressed) = self.0.admit(errno) {
            warn!(operation, errno, suppressed, "{cause}");
        }
    }
}
