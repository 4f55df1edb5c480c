//! Work that waits for a disk, on the threads that may wait.

use cavern_consensus::run_blocking;
use cavern_work::WorkError;

use crate::error::MasterError;

/// Runs it there.
///
/// # Errors
/// Those of the work, and [`WorkError::Consensus`] when it panicked, or the process ends.
pub async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, MasterError> + Send + 'static,
) -> Result<T, MasterError> {
    run_blocking(work).await.map_err(|error| WorkError::unavailable(error.to_string()))?
}
