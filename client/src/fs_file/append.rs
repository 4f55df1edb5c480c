//! Appending: to where the file ends by now, whatever a kernel believes, which others have not told of what they
//! appended.
//!
//! Whoever has a lock, or has opened the file after others have closed it, appends to what they wrote. Without either
//! two clients may take the same end.

use std::sync::Arc;

use tokio::sync::OwnedMutexGuard;

use super::file::FsFile;
use crate::error::ClientError;

/// Where the next bytes go. Nobody else appends to the file here until it is dropped.
pub struct FileEnd {
    /// In the file, in bytes.
    pub offset: u64,
    _turn: OwnedMutexGuard<()>,
}

impl FsFile {
    /// The end as it is known here; `None` when others may have moved it, or another is appending: use [`Self::end`].
    pub fn end_now(&self) -> Option<FileEnd> {
        let turn = Arc::clone(&self.turns.appending).try_lock_owned().ok()?;
        let offset = self.with_known(|known| self.end_in(&known.layout))?;
        Some(FileEnd { offset, _turn: turn })
    }

    /// The end of the file, asking the master if others may have moved it; `known` when it is where bytes went whose
    /// writing is asked for once more.
    pub async fn end(&self, known: Option<u64>) -> Result<FileEnd, ClientError> {
        let turn = Arc::clone(&self.turns.appending).lock_owned().await;
        let offset = match known {
            Some(known) => known,
            None => self.use_known(|known| self.end_in(&known.layout)).await?,
        };
        Ok(FileEnd { offset, _turn: turn })
    }

    /// Somebody opens the file to append to it. What others have closed counts, whether this client was told of it or
    /// not: the master is asked, unless nobody else can have changed the file.
    pub fn opened_to_append(&self) {
        if !self.shared.metadata.is_delegated(self.inode) {
            self.forget_layout();
        }
    }
}
