//! What the S3 operations work on.

use std::sync::Arc;

use crate::error::DevS3Error;
use crate::store::{Bucket, Store};

/// The store behind the S3 operations.
pub(crate) struct Backend {
    pub store: Arc<Store>,
}

impl Backend {
    pub(super) fn bucket(&self, name: &str) -> Result<Arc<Bucket>, DevS3Error> {
        self.store.bucket(name)
    }
}

/// Runs `work` off the async threads; a panic there goes on here.
pub(crate) async fn on_blocking_thread<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, DevS3Error> + Send + 'static,
) -> Result<T, DevS3Error> {
    let done = tokio::task::spawn_blocking(work).await;
    done.unwrap_or_else(|panic| std::panic::resume_unwind(panic.into_panic()))
}
