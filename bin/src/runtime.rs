//! The asynchronous runtime of a command.

use crate::error::{CliError, Context as _};

/// Runs a short command: one thread is enough for what waits on the network.
pub fn block_on<T>(work: impl Future<Output = Result<T, CliError>>) -> Result<T, CliError> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("cannot start the asynchronous runtime")?;
    let result = runtime.block_on(work);
    // Lookups of names may still hold a thread; nobody waits for them.
    runtime.shutdown_background();
    result
}
