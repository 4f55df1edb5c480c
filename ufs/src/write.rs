//! Writing to a mount's bucket.

use bytes::Bytes;

use crate::error::UfsError;
use crate::object::{Metadata, Replaces};
use crate::store::{Change, ChangeRequest, ObjectStore};
use crate::ufs::Ufs;

/// Parts of a multipart upload at most; what S3 allows.
pub const PARTS_MAX: u64 = 10_000;

impl Ufs {
    /// Writes an object in one request; gives its ETag, without quotes.
    ///
    /// # Errors
    /// [`UfsError::VersionChanged`] or [`UfsError::NotFound`] when something else is under the key than it replaces. That may also be
    /// this very write: an attempt whose answer was lost.
    pub async fn put(
        &self,
        key: &str,
        body: &Bytes,
        metadata: &Metadata,
        replaces: Replaces<'_>,
    ) -> Result<String, UfsError> {
        self.change(key, Change::Put { body, metadata, replaces }).await
    }

    /// Deletes an object; one that is not there counts as deleted.
    ///
    /// # Errors
    /// [`UfsError::VersionChanged`] when another version is there than the one that is to go.
    pub async fn delete(&self, key: &str, replaces: Replaces<'_>) -> Result<(), UfsError> {
        match self.change(key, Change::Delete { replaces }).await {
            Ok(_) | Err(UfsError::NotFound { .. }) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Begins an object that is written in parts, and appears when it is completed. Whoever gives up must say so, or the store
    /// keeps the parts.
    pub async fn begin_multipart(&self, key: &str, metadata: &Metadata) -> Result<MultipartUpload, UfsError> {
        let id = self.change(key, Change::Begin { metadata }).await?;
        Ok(MultipartUpload { ufs: self.clone(), key: key.to_owned(), id })
    }

    async fn change(&self, key: &str, change: Change<'_>) -> Result<String, UfsError> {
        self.store().change(ChangeRequest { key, change }).await
    }
}

/// An object on its way.
#[derive(Clone, Debug)]
pub struct MultipartUpload {
    ufs: Ufs,
    key: String,
    id: String,
}

impl MultipartUpload {
    /// Sends a part, numbered from 1; gives its ETag. All parts but the last have at least 5 MiB.
    pub async fn part(&self, number: u32, body: &Bytes) -> Result<String, UfsError> {
        self.ufs.change(&self.key, Change::Part { upload: &self.id, number, body }).await
    }

    /// Makes an object of the parts, given by their ETags in order; gives the object's.
    ///
    /// # Errors
    /// As [`Ufs::put`].
    pub async fn complete(&self, parts: &[String], replaces: Replaces<'_>) -> Result<String, UfsError> {
        self.ufs.change(&self.key, Change::Complete { upload: &self.id, parts, replaces }).await
    }

    /// Has the store forget the parts.
    pub async fn abort(&self) -> Result<(), UfsError> {
        match self.ufs.change(&self.key, Change::Abort { upload: &self.id }).await {
            Ok(_) | Err(UfsError::NotFound { .. }) => Ok(()),
            Err(error) => Err(error),
        }
    }
}
