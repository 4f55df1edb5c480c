//! Failed operations: the errno for the caller, and one log line for whoever wants to know why.

use std::time::Duration;

use cavern_client::ClientError;
use parking_lot::Mutex;
use tokio::time::Instant;
use tracing::warn;

use crate::kernel::Reply;

/// One line in this time at most; the line says how many it stands for.
const QUIET: Duration = Duration::from_secs(1);

/// Answers errors, and keeps a flood of them from flooding the log.
#[derive(Debug, Default)]
pub struct Failures {
    last: Mutex<Last>,
}

#[derive(Debug, Default)]
struct Last {
    logged: Option<Instant>,
    unlogged: u64,
}

impl Failures {
    /// Answers what failed in the metadata. Names that do not exist and versions that are gone are answers, not
    /// failures; reads are logged by the client, which knows what sources it tried.
    pub fn answer(&self, reply: Reply, operation: &str, error: &ClientError) {
        let errno = match error.errno() {
            // The kernel would never ask for the like again, for no file: a master of an earlier version has said so.
            libc::ENOSYS => libc::EOPNOTSUPP,
            errno => errno,
        };
        if matches!(errno, libc::EIO | libc::EACCES)
            && let Some(unlogged) = self.turn(Instant::now())
        {
            warn!(operation, errno, unlogged, "{error}");
        }
        reply.error(errno);
    }

    /// How many went unlogged before this one; `None` when it goes unlogged itself.
    fn turn(&self, now: Instant) -> Option<u64> {
        let mut last = self.last.lock();
        if last.logged.is_some_and(|logged| now.saturating_duration_since(logged) < QUIET) {
            last.unlogged += 1;
            return None;
        }
        last.logged = Some(now);
        Some(std::mem::take(&mut last.unlogged))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_becomes_a_line_a_second() {
        let failures = Failures::default();
        let start = Instant::now();
        assert_eq!(failures.turn(start), Some(0));
        assert_eq!(failures.turn(start), None);
        assert_eq!(failures.turn(start + QUIET / 2), None);
        assert_eq!(failures.turn(start + QUIET), Some(2));
    }
}
