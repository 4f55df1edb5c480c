//! Writing objects to the buckets of fs-mode mounts, from the blocks of files.
//!
//! An object is written whole from one version of its file, or not at all. Clients of this host write through
//! descriptors without a word to the worker, so the blocks' files are asked when they were last written to, before the
//! first byte is read and after the last; the object is made only if none has been touched in between. What the bucket
//! gets the disk has: a loss of power would leave the file with other bytes otherwise. A small object
//! is read, checked and sent in one request. The parts of a large one are read and sent several at a time, within the
//! memory budget, while the disk gets what it has not. The check comes before the parts become an object, and before
//! each part is sent, as far as it is cheap: an upload that is in vain ends then.
//!
//! [`copy`] reads a block of another worker in the same way, to have it here.
//!
//! Large content that the bucket has already, of a file that got another name or other attributes, is copied there.
//!
//! Whoever asks, an object is written within the prefix of an fs-mode mount, and of nothing that lies elsewhere.
//!
//! What nobody waits for makes way for clients ([`pacing`]).
//!
//! What is given up (the asker is gone, the deadline is over, a part failed, the file changed) is aborted at the store
//! too.

mod copy;
mod pacing;
mod peers;
mod plan;
mod source;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use cavern_conf::Failpoint;
use cavern_net::WorkerPool;
use cavern_proto::data::{PersistReply, PersistRequest, Status};
use cavern_ufs::{MultipartUpload, ObjectMeta, PARTS_MAX, Precondition, Ufs, UfsError};
use futures::future::try_join;
use futures::{StreamExt, TryStreamExt, stream};
use tokio_util::task::TaskTracker;

use self::copy::BlockCopies;
pub use self::pacing::UploadPacing;
use self::peers::Peers;
use self::plan::{Content, Plan};
use self::source::Source;
use crate::memory::Share;
use crate::parts::WorkerParts;
use crate::request_error::Refusal;

/// Objects up to this size are sent in one request, larger ones in parts of at least this size.
const PART_BYTES: u64 = 8 << 20;
/// Parts have whole MiB, as some stores want it: all but the last of one size.
const PART_GRAIN: u64 = 1 << 20;
/// Parts of one object in flight.
const PARTS_AT_A_TIME: usize = 4;

/// Writes objects.
pub struct Uploads {
    parts: WorkerParts,
    peers: Peers,
    /// Uploads that are being given up.
    tasks: TaskTracker,
    copies: BlockCopies,
    pub pacing: UploadPacing,
}

/// Why an object was not written.
enum UploadError {
    Refused(Refusal),
    /// Something else is under the key than was expected.
    Occupied,
}

impl From<Refusal> for UploadError {
    fn from(refusal: Refusal) -> Self {
        Self::Refused(refusal)
    }
}

/// A condition that failed is the asker's business; all else is an error.
fn stopped(error: UfsError) -> UploadError {
    match error {
        UfsError::VersionChanged { .. } | UfsError::NotFound { .. } | UfsError::Obstructed { .. } => {
            UploadError::Occupied
        }
        error => UploadError::Refused(error.into()),
    }
}

impl Uploads {
    /// With the way to the other workers.
    pub fn new(parts: WorkerParts, pool: Arc<WorkerPool>, pacing: UploadPacing) -> Self {
        let peers = Peers::new(pool, parts.clone());
        Self { parts, peers, tasks: TaskTracker::new(), copies: BlockCopies::default(), pacing }
    }

    /// Writes an object, within the request's deadline.
    ///
    /// # Errors
    /// It was not written. What is under the key in place of what was expected is no error, but an answer that says so,
    /// and so is a file that was written to meanwhile.
    pub async fn persist(&self, request: PersistRequest) -> Result<PersistReply, Refusal> {
        let deadline = Duration::from_millis(u64::from(request.deadline_ms));
        let length = request.length;
        let written = tokio::time::timeout(deadline, Box::pin(self.try_persist(request))).await;
        let written = written.unwrap_or_else(|_| Err(Refusal::deadline()));
        let metrics = &self.parts.metrics;
        if written.as_ref().is_ok_and(|reply| reply.status() == Status::Ok) {
            metrics.persisted.inc();
            metrics.persisted_bytes.inc_by(length);
        } else {
            metrics.persist_failures.inc();
        }
        written
    }

    /// Waits until what was given up is aborted, after the last request has ended.
    pub async fn finish(&self) {
        self.tasks.close();
        self.tasks.wait().await;
        self.peers.pool.shutdown().await;
    }

    async fn try_persist(&self, request: PersistRequest) -> Result<PersistReply, Refusal> {
        let plan = Plan::parse(request, &self.parts.membership.now().1)?;
        let ufs = self.parts.mounts.ufs_to_write(plan.mount_id).await?;
        plan.check_keys(ufs.prefix())?;
        let sent_bytes = AtomicU64::new(0);
        match self.write(&ufs, &plan, &sent_bytes).await {
            Ok(etag) => Ok(PersistReply { status: Status::Ok.into(), etag, ..PersistReply::default() }),
            Err(UploadError::Refused(refusal)) if refusal.status == Status::Changed => {
                Ok(PersistReply { sent_bytes: sent_bytes.load(Ordering::Relaxed), ..PersistReply::from(refusal) })
            }
            Err(UploadError::Refused(refusal)) => Err(refusal),
            Err(UploadError::Occupied) => {
                let etag = match ufs.head(&plan.key).await {
                    Ok(there) => there.etag,
                    Err(UfsError::NotFound { .. }) => String::new(),
                    Err(error) => return Err(error.into()),
                };
                let message = format!("another object is under the key \"{}\"", plan.key.escape_debug());
                Ok(PersistReply { status: Status::VersionChanged.into(), message, etag, ..PersistReply::default() })
            }
        }
    }

    /// Writes the object; gives its ETag. Bytes of parts are counted before they are sent.
    async fn write(&self, ufs: &Ufs, plan: &Plan, sent_bytes: &AtomicU64) -> Result<String, UploadError> {
        let blocks = match &plan.content {
            Content::Inline(bytes) => {
                return ufs.put(&plan.key, bytes, &plan.metadata, plan.replaces()).await.map_err(stopped);
            }
            Content::Blocks(blocks) => blocks,
        };
        if plan.length > PART_BYTES
            && ufs.capabilities().part_copies
            && let Some(same) = &plan.same
            && let Some(etag) = self.copy_there(ufs, plan, same).await?
        {
            return Ok(etag);
        }
        let source = Source::find(self, ufs, plan, blocks)?;
        if plan.length <= PART_BYTES {
            self.make_way(plan, plan.length).await;
            let (bytes, _memory) = self.read_whole(source, plan.length).await?;
            Failpoint::UploadRead.pass();
            let put = ufs.put(&plan.key, &bytes, &plan.metadata, plan.replaces()).await;
            Failpoint::UploadPut.pass();
            return put.map_err(stopped);
        }
        let source = source.settled().await?;
        let upload = self.begin_upload(ufs, plan).await?;
        let sending = self.send_parts(&upload.parts, &source, plan, sent_bytes);
        let (etags, ()) = try_join(sending, source.sync()).await?;
        source.check_untouched().await?;
        upload.complete(&etags, plan).await
    }

    async fn begin_upload(&self, ufs: &Ufs, plan: &Plan) -> Result<PendingUpload, UploadError> {
        let parts = ufs.begin_multipart(&plan.key, &plan.metadata).await.map_err(stopped)?;
        Failpoint::UploadBegun.pass();
        Ok(PendingUpload { parts, is_done: false, tasks: self.tasks.clone() })
    }

    /// Makes the object of one that has the same content; `None` when that is not there any more, or the store does not
    /// copy it.
    async fn copy_there(&self, ufs: &Ufs, plan: &Plan, same: &ObjectMeta) -> Result<Option<String>, UploadError> {
        let upload = self.begin_upload(ufs, plan).await?;
        let etags = match upload.parts.copy(same).await {
            Ok(etags) => etags,
            Err(UfsError::VersionChanged { .. } | UfsError::NotFound { .. }) => return Ok(None),
            Err(refusal) if refusal.refuses_copy() => {
                tracing::debug!("the store does not copy, so the blocks are sent: {refusal}");
                return Ok(None);
            }
            Err(error) => return Err(Refusal::from(error).into()),
        };
        upload.complete(&etags, plan).await.map(Some)
    }

    async fn send_parts(
        &self,
        upload: &MultipartUpload,
        source: &Source<'_>,
        plan: &Plan,
        sent_bytes: &AtomicU64,
    ) -> Result<Vec<String>, Refusal> {
        let (length, part) = (plan.length, part_bytes(plan.length));
        let parts_per_look = source.parts_per_look();
        let send = async |(number, start): (u32, u64)| {
            let bytes = part.min(length - start);
            self.make_way(plan, bytes).await;
            let (bytes, _memory) = self.read(source, start, bytes).await?;
            if number.is_multiple_of(parts_per_look) {
                source.check_meanwhile().await?;
            }
            sent_bytes.fetch_add(bytes.len() as u64, Ordering::Relaxed);
            let sent = upload.part(number, &bytes).await;
            Failpoint::UploadPartSent.pass();
            sent.map(|etag| (number, etag)).map_err(Refusal::from)
        };
        let starts = (0..length.div_ceil(part)).map(|index| index * part);
        // In any order: one that fails ends those in flight, whichever came before it.
        let sent = stream::iter((1..).zip(starts)).map(send).buffer_unordered(PARTS_AT_A_TIME);
        let mut sent: Vec<(u32, String)> = sent.try_collect().await?;
        sent.sort_unstable_by_key(|(number, _)| *number);
        Ok(sent.into_iter().map(|(_, etag)| etag).collect())
    }

    /// Waits for its turn to send so many bytes, if nobody waits for them.
    async fn make_way(&self, plan: &Plan, bytes: u64) {
        let wait = if plan.is_background { self.pacing.take(bytes) } else { Duration::ZERO };
        if !wait.is_zero() {
            self.parts.metrics.persist_waits.inc();
            tokio::time::sleep(wait).await;
        }
    }

    /// All bytes of a small file in one version, which the disks have.
    async fn read_whole(&self, source: Source<'_>, length: u64) -> Result<(Bytes, Share), Refusal> {
        let (taken, memory) = source.take_at_once(length, self.room(length).await?).await?;
        if let Some(bytes) = taken {
            return Ok((bytes, memory));
        }
        let source = source.settled().await?;
        source.sync().await?;
        let bytes = source.read(0, length).await?;
        source.check_untouched().await?;
        Ok((bytes, memory))
    }

    /// Memory for so many bytes.
    async fn room(&self, bytes: u64) -> Result<Share, Refusal> {
        Ok(self.parts.memory.clone().take(usize::try_from(bytes).unwrap_or(usize::MAX)).await?)
    }

    /// Bytes of the file, as soon as there is memory for them.
    async fn read(&self, source: &Source<'_>, start: u64, length: u64) -> Result<(Bytes, Share), Refusal> {
        let memory = self.room(length).await?;
        Ok((source.read(start, length).await?, memory))
    }
}

impl Plan {
    fn replaces(&self) -> Precondition<'_> {
        if self.replaces.is_empty() { Precondition::Nothing } else { Precondition::Version(&self.replaces) }
    }
}

/// Bytes of all parts but the last of an object: as few as there may be parts for.
fn part_bytes(length: u64) -> u64 {
    length.div_ceil(PARTS_MAX).next_multiple_of(PART_GRAIN).max(PART_BYTES)
}

/// An upload of several parts: complete, or given up when it is dropped.
struct PendingUpload {
    parts: MultipartUpload,
    is_done: bool,
    tasks: TaskTracker,
}

impl PendingUpload {
    /// Makes the object of its parts; gives its ETag.
    async fn complete(mut self, etags: &[String], plan: &Plan) -> Result<String, UploadError> {
        Failpoint::UploadSent.pass();
        let etag = self.parts.complete(etags, plan.replaces()).await.map_err(stopped)?;
        Failpoint::UploadCompleted.pass();
        self.is_done = true;
        Ok(etag)
    }
}

impl Drop for PendingUpload {
    fn drop(&mut self) {
        if !self.is_done {
            let parts = self.parts.clone();
            self.tasks.spawn(async move {
                if let Err(error) = parts.abort().await {
                    tracing::warn!(%error, "an upload was given up, and its parts are still at the store");
                }
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_object_has_more_parts_than_there_may_be() {
        assert_eq!(part_bytes(1), PART_BYTES);
        for gib in [9u64, 78, 79, 1000, 5 << 10, 48 << 10] {
            let length = (gib << 30) + 1;
            let part = part_bytes(length);
            assert!(length.div_ceil(part) <= PARTS_MAX && part.is_multiple_of(PART_GRAIN), "{gib} GiB: {part}");
            assert!(part == PART_BYTES || (part - PART_GRAIN) * PARTS_MAX < length, "{gib} GiB: {part}");
        }
    }
}
