//! The staged bytes of a file, in a nameless file that is made for the first of them.

use std::fs::File;
use std::io;
use std::sync::Arc;

use rustix::io::Errno;

use super::file::StagedFile;
use super::staging_budget::nameless_file;
use crate::error::ClientError;

impl StagedFile {
    /// Works with the staged bytes, on a thread that may block.
    pub(super) async fn with_file<T: Send + 'static>(
        &self,
        work: impl FnOnce(&File) -> io::Result<T> + Send + 'static,
    ) -> Result<T, ClientError> {
        let file = self.file()?;
        self.blocking(move || work(&file)).await
    }

    pub(super) async fn blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> io::Result<T> + Send + 'static,
    ) -> Result<T, ClientError> {
        match tokio::task::spawn_blocking(work).await {
            Ok(done) => done.map_err(|error| self.not_staged(&error)),
            Err(_) => Err(ClientError::Shutdown),
        }
    }

    pub(super) fn file(&self) -> Result<Arc<File>, ClientError> {
        let mut file = self.file.lock();
        if let Some(file) = &*file {
            return Ok(file.clone());
        }
        let made = Arc::new(nameless_file(&self.shared.directory).map_err(|error| self.not_staged(&error))?);
        *file = Some(made.clone());
        Ok(made)
    }

    pub(super) fn not_staged(&self, error: &io::Error) -> ClientError {
        let errno = if error.kind() == io::ErrorKind::StorageFull { Errno::NOSPC } else { Errno::IO };
        let directory = self.shared.directory.display();
        let reason = format!("{}: cannot be staged in {directory} (client.staging_directory): {error}", self.node());
        ClientError::Refused { errno: errno.raw_os_error(), reason }
    }
}
