//! Writing to a mount's bucket.
//!
//! A write under a condition that is tried again may find what it has made itself, since only the answer of the first
//! attempt was lost. By the name in its metadata ([`named`]) it is known again. So is an object that was put together
//! although all answers were lost: its parts are gone then, and nobody could try again.
//!
//! Some stores copy nothing, or nothing of this kind: what they refuse to copy is read and written here.

use std::sync::atomic::Ordering;

use bytes::Bytes;
use cavern_conf::host;
use futures::stream::{self, StreamExt, TryStreamExt};

use crate::error::{Operation, Request, UfsError};
use crate::object::{Metadata, ObjectMeta, Precondition};
use crate::store::{Change, ChangeRequest, CopySource};
use crate::ufs::Ufs;

/// Metadata that names a write.
pub const WRITE_NAME: &str = "cavern-write";
/// Parts of a multipart upload at most; what S3 allows.
pub const PARTS_MAX: u64 = 10_000;
/// What is copied in one request at most where parts can be. S3 allows 5 GiB, and takes its time for so much.
const COPY_BYTES: u64 = 256 << 20;
/// Parts of one copy on their way at a time.
const COPIES_AT_A_TIME: usize = 8;
/// Bytes that are read and written in one piece where the store does not copy, and pieces at a time. Each is in memory.
const PIECE_BYTES: u64 = 8 << 20;
const PIECES_AT_A_TIME: usize = 2;

/// The metadata of an object with a name for the write that makes it.
pub fn named(mut metadata: Metadata) -> Metadata {
    metadata.insert(WRITE_NAME.to_owned(), host::unique_name());
    metadata
}

/// Something else is there than a write expected, or nothing.
fn is_refused(error: &UfsError) -> bool {
    matches!(error, UfsError::VersionChanged { .. } | UfsError::NotFound { .. })
}

impl Ufs {
    /// Writes an object in one request; gives its ETag, without quotes.
    ///
    /// # Errors
    /// [`UfsError::VersionChanged`] or [`UfsError::NotFound`] when something else is under the key than it replaces. If
    /// the write is not [`named`], that may be itself: an attempt whose answer was lost.
    pub async fn put(
        &self,
        key: &str,
        body: &Bytes,
        metadata: &Metadata,
        replaces: Precondition<'_>,
    ) -> Result<String, UfsError> {
        let put = self.change(key, Change::Put { body, metadata, replaces }).await;
        self.known_again(key, metadata.get(WRITE_NAME), put, is_refused).await
    }

    /// Deletes an object; one that is not there counts as deleted.
    ///
    /// # Errors
    /// [`UfsError::VersionChanged`] when another version is there than the one that is to go.
    pub async fn delete(&self, key: &str, replaces: Precondition<'_>) -> Result<(), UfsError> {
        match self.change(key, Change::Delete { replaces }).await {
            Ok(_) | Err(UfsError::NotFound { .. }) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Copies a version of an object to another key of the bucket, with its metadata; gives the copy's ETag. The bytes
    /// do not come here, unless the store refuses to copy. What is there under the key is replaced.
    ///
    /// # Errors
    /// [`UfsError::VersionChanged`] or [`UfsError::NotFound`] when that version is not there any more.
    pub async fn copy(&self, from: &ObjectMeta, to: &str) -> Result<String, UfsError> {
        self.copy_with(from, to, None).await
    }

    /// Gives a version of an object other metadata, and no others but a name of this write; gives the ETag that it has
    /// then, which may be another. The bytes do not come here, unless the store refuses to copy.
    ///
    /// # Errors
    /// As [`Ufs::copy`].
    pub async fn describe(&self, object: &ObjectMeta, metadata: &Metadata) -> Result<String, UfsError> {
        self.copy_with(object, &object.key, Some(named(metadata.clone()))).await
    }

    async fn copy_with(&self, from: &ObjectMeta, to: &str, metadata: Option<Metadata>) -> Result<String, UfsError> {
        match self.copy_there(from, to, metadata.as_ref()).await {
            Err(refusal) if refusal.refuses_copy() => {
                if !self.shared().refuses_copies.swap(true, Ordering::Relaxed) {
                    tracing::warn!("what the store does not copy is read and written by this host: {refusal}");
                }
                self.copy_here(from, to, metadata).await
            }
            copied => copied,
        }
    }

    async fn copy_there(&self, from: &ObjectMeta, to: &str, metadata: Option<&Metadata>) -> Result<String, UfsError> {
        let source = CopySource { key: &from.key, etag: &from.etag, length: from.size };
        if from.size <= COPY_BYTES || !self.capabilities().part_copies {
            let copied = self.change(to, Change::Copy { source, metadata }).await;
            let name = metadata.and_then(|metadata| metadata.get(WRITE_NAME));
            return self.known_again(to, name, copied, is_refused).await;
        }
        let metadata = self.metadata_of_copy(from, metadata.cloned()).await?;
        let upload = self.begin_multipart(to, &metadata).await?;
        let copied = async { upload.complete(&upload.copy(from).await?, Precondition::Anything).await };
        upload.or_abort(copied.await).await
    }

    /// By way of this host.
    async fn copy_here(&self, from: &ObjectMeta, to: &str, metadata: Option<Metadata>) -> Result<String, UfsError> {
        let metadata = self.metadata_of_copy(from, metadata).await?;
        let replaces = if from.key == to { Precondition::Version(from.etag.as_str()) } else { Precondition::Anything };
        let piece = |start: u64, end: u64| self.get_bytes(&from.key, &from.etag, start..end.min(from.size));
        if from.size <= PIECE_BYTES {
            return self.put(to, &piece(0, from.size).await?, &metadata, replaces).await;
        }
        let upload = self.begin_multipart(to, &metadata).await?;
        let length = from.size.div_ceil(PARTS_MAX).max(PIECE_BYTES);
        let copied = async {
            let sent = stream::iter((1..).zip(0..from.size.div_ceil(length))).map(async |(number, index)| {
                upload.part(number, &piece(index * length, (index + 1) * length).await?).await
            });
            let parts: Vec<String> = sent.buffered(PIECES_AT_A_TIME).try_collect().await?;
            upload.complete(&parts, replaces).await
        };
        upload.or_abort(copied.await).await
    }

    /// What a copy is to have that is written anew: what its source has, unless it gets other metadata.
    async fn metadata_of_copy(&self, from: &ObjectMeta, metadata: Option<Metadata>) -> Result<Metadata, UfsError> {
        if let Some(metadata) = metadata {
            return Ok(metadata);
        }
        let there = self.head(&from.key).await?;
        if there.etag == from.etag {
            return Ok(named(there.metadata));
        }
        let request = Request::new(Operation::Head, &self.shared().label, &from.key);
        Err(UfsError::version_changed(request, &from.etag, "another version has replaced it"))
    }

    /// Begins an object that is written in parts, and appears when it is completed. Whoever gives up must say so, or
    /// the store keeps the parts.
    pub async fn begin_multipart(&self, key: &str, metadata: &Metadata) -> Result<MultipartUpload, UfsError> {
        let id = self.change(key, Change::Begin { metadata }).await?;
        let name = metadata.get(WRITE_NAME).cloned();
        Ok(MultipartUpload { ufs: self.clone(), key: key.to_owned(), id, name })
    }

    /// Has the store forget the parts of an upload, which another process may have begun; one that is not there, or has
    /// become an object, counts as given up.
    pub async fn abort_multipart(&self, key: &str, upload: &str) -> Result<(), UfsError> {
        match self.change(key, Change::Abort { upload }).await {
            Ok(_) | Err(UfsError::NotFound { .. }) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// What became of a write of this name: after doubtful errors it may be there.
    async fn known_again(
        &self,
        key: &str,
        name: Option<&String>,
        written: Result<String, UfsError>,
        is_doubtful: impl Fn(&UfsError) -> bool,
    ) -> Result<String, UfsError> {
        let is_doubtful = written.as_ref().is_err_and(is_doubtful);
        let Some(name) = name.filter(|_| is_doubtful) else { return written };
        match self.head(key).await {
            Ok(there) if there.metadata.get(WRITE_NAME) == Some(name) => Ok(there.etag),
            Err(error) if error.is_temporary() => Err(error),
            _ => written,
        }
    }

    /// Whether there is what an upload is to replace, which its end does not ask the store for then.
    async fn looked_at(&self, key: &str, replaces: Precondition<'_>) -> Result<Precondition<'static>, UfsError> {
        let there = match replaces {
            Precondition::Anything => return Ok(Precondition::Anything),
            Precondition::Nothing | Precondition::Version(_) => self.head(key).await,
        };
        let etag = match (replaces, there) {
            (Precondition::Nothing, Err(UfsError::NotFound { .. })) => return Ok(Precondition::Anything),
            (Precondition::Version(etag), Ok(there)) if there.etag == etag => return Ok(Precondition::Anything),
            (_, Ok(_)) => replaces.version(),
            (_, Err(error)) => return Err(error),
        };
        let request = Request::new(Operation::Complete, &self.shared().label, key);
        Err(UfsError::version_changed(request, etag, "another version is there"))
    }

    async fn change(&self, key: &str, change: Change<'_>) -> Result<String, UfsError> {
        let change = if self.capabilities().conditional_writes { change } else { change.unconditional() };
        self.requests().change(ChangeRequest { key, change }).await
    }
}

/// An object on its way.
#[derive(Clone, Debug)]
pub struct MultipartUpload {
    ufs: Ufs,
    key: String,
    id: String,
    /// Of the write.
    name: Option<String>,
}

impl MultipartUpload {
    /// As the store names it, for [`Ufs::abort_multipart`].
    pub fn id(&self) -> &str {
        &self.id
    }

    /// Sends a part, numbered from 1; gives its ETag. All parts but the last have at least 5 MiB.
    pub async fn part(&self, number: u32, body: &Bytes) -> Result<String, UfsError> {
        self.ufs.change(&self.key, Change::Part { upload: &self.id, number, body }).await
    }

    /// Takes all bytes of a version of another object of the bucket for its parts; gives their ETags. The bytes do not
    /// come here.
    ///
    /// # Errors
    /// As [`Ufs::copy`].
    pub async fn copy(&self, from: &ObjectMeta) -> Result<Vec<String>, UfsError> {
        let source = CopySource { key: &from.key, etag: &from.etag, length: from.size };
        let part = from.size.div_ceil(PARTS_MAX).max(COPY_BYTES);
        let parts = stream::iter((1..).zip(0..from.size.div_ceil(part))).map(|(number, index)| {
            let bytes = (index * part, from.size.min((index + 1) * part) - 1);
            self.ufs.change(&self.key, Change::CopyPart { upload: &self.id, number, source, bytes })
        });
        parts.buffered(COPIES_AT_A_TIME).try_collect().await
    }

    /// Makes an object of the parts, given by their ETags in order; gives the object's. The store may take five times
    /// `io_timeout` for each part.
    ///
    /// # Errors
    /// As [`Ufs::put`].
    pub async fn complete(&self, parts: &[String], replaces: Precondition<'_>) -> Result<String, UfsError> {
        let completed = async {
            let is_conditional = self.ufs.capabilities().conditional_uploads;
            let replaces = if is_conditional { replaces } else { self.ufs.looked_at(&self.key, replaces).await? };
            self.ufs.change(&self.key, Change::Complete { upload: &self.id, parts, replaces }).await
        };
        let completed = completed.await;
        // All answers may have been lost, and with them the parts; or those to an earlier call.
        let is_doubtful = |error: &UfsError| is_refused(error) || error.is_temporary();
        self.ufs.known_again(&self.key, self.name.as_ref(), completed, is_doubtful).await
    }

    /// Given up unless it is an object by now.
    async fn or_abort(&self, completed: Result<String, UfsError>) -> Result<String, UfsError> {
        if completed.is_err() {
            // The error that led here says more than one of this.
            let _given_up = self.abort().await;
        }
        completed
    }

    /// Has the store forget the parts.
    pub async fn abort(&self) -> Result<(), UfsError> {
        self.ufs.abort_multipart(&self.key, &self.id).await
    }
}
