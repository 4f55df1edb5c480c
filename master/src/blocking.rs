//! Work that waits for a disk, on the threads that may wait.

use tokio::task::JoinError;

use crate::MasterError;

/// Runs it there.
///
/// # Errors
/// Those of the work, and [`MasterError::Consensus`] when it panicked, or the process ends.
pub async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, MasterError> + Send + 'static,
) -> Result<T, MasterError> {
    run_blocking(work).await.map_err(|error| MasterError::Consensus(error.to_string()))?
}

/// The same for what has errors of its own.
pub async fn run_blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T, JoinError> {
    // A simulation has one thread, so that a seed has one course.
    #[cfg(test)]
    if let Some(host) = crate::raft::simulation::Host::current() {
        let done = work();
        host.stand_still().await;
        return Ok(done);
    }
    tokio::task::spawn_blocking(work).await
}
