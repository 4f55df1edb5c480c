//! What the S3 operations work on.

use std::sync::Arc;

use s3s::S3Result;

use crate::error::DevS3Error;
use crate::store::{Bucket, Store};

/// The store behind the S3 operations.
pub(crate) struct Backend {
    pub(super) store: Arc<Store>,
}

impl Backend {
    pub fn new(store: Arc<Store>) -> Self {
        Self { store }
    }

    pub(super) fn bucket(&self, name: &str) -> Result<Arc<Bucket>, DevS3Error> {
        self.store.bucket(name)
    }

    /// Runs file-system work of a bucket off the async threads.
    pub(super) async fn blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Store) -> Result<T, DevS3Error> + Send + 'static,
    ) -> S3Result<T> {
        let store = Arc::clone(&self.store);
        Ok(on_blocking_thread(move || work(&store)).await?)
    }
}

/// Runs `work` off the async threads; a panic there goes on here.
pub(crate) async fn on_blocking_thread<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, DevS3Error> + Send + 'static,
) -> Result<T, DevS3Error> {
    let done = tokio::task::spawn_blocking(work).await;
    done.unwrap_or_else(|panic| std::panic::resume_unwind(panic.into_panic()))
}
