//! Work that waits for a disk, on the threads that may wait.

use crate::MasterError;

/// Runs it there.
///
/// # Errors
/// Those of the work, and [`MasterError::Consensus`] when it panicked, or the process ends.
pub async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, MasterError> + Send + 'static,
) -> Result<T, MasterError> {
    tokio::task::spawn_blocking(work).await.map_err(|error| MasterError::Consensus(error.to_string()))?
}
