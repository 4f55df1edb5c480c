//! A handle of a file that is being written to a bucket: who has it open keeps it under its name.

use std::ops::Deref;
use std::sync::Arc;

use super::Effects;
use crate::error::ClientError;
use crate::staged::{StagedFile, StagedFiles};

/// Counted as open until it is dropped.
pub(super) struct StagedHandle {
    pub(super) files: StagedFiles,
    pub(super) file: Arc<StagedFile>,
}

impl StagedHandle {
    /// Opened by a thread.
    pub(super) fn open(files: StagedFiles, file: Arc<StagedFile>, thread: u32) -> Self {
        files.opened(&file, thread);
        Self { files, file }
    }

    /// Has the bucket take the file.
    pub(super) async fn commit(&self) -> Result<Effects, ClientError> {
        self.file.commit().await?;
        Ok(Effects { listing: Some(self.file.node().parent) })
    }
}

impl Deref for StagedHandle {
    type Target = StagedFile;

    fn deref(&self) -> &StagedFile {
        &self.file
    }
}

impl Drop for StagedHandle {
    fn drop(&mut self) {
        self.files.closed(&self.file);
    }
}
