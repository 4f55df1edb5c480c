//! Work that waits for a disk, on the threads that may wait.

use tokio::task::JoinError;

use crate::error::{ConsensusError, Result};

/// Runs it there.
///
/// # Errors
/// Those of the work, and [`ConsensusError::Unavailable`] when it panicked, or the process ends.
pub(crate) async fn blocking<T: Send + 'static>(work: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
    run_blocking(work).await.map_err(|error| ConsensusError::Unavailable(error.to_string()))?
}

/// Runs what has errors of its own on the threads that may wait.
///
/// # Errors
/// When it panicked, or the process ends.
pub async fn run_blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T, JoinError> {
    // A simulation has one thread, so that a seed has one course.
    #[cfg(test)]
    if let Some(host) = crate::simulation::Host::current() {
        let done = work();
        host.stand_still().await;
        return Ok(done);
    }
    tokio::task::spawn_blocking(work).await
}
