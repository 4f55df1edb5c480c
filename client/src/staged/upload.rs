//! From staged bytes to an object: in one request where it is small, else in parts.
//!
//! Parts that were written to their end are sent while the file is still being written, a few at a time. What is
//! written over later is sent once more when the file is flushed, under the same number. The object appears with the
//! last request or not at all; parts of an upload that is given up are aborted.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use cavern_conf::host;
use cavern_ufs::{
    Metadata as ObjectMetadata, MultipartUpload, ObjectAttributes, ObjectMeta, Precondition, Ufs, UfsError, WRITE_NAME,
};
use futures::stream::{self, StreamExt, TryStreamExt};
use rustix::io::Errno;
use tokio::runtime::Handle;
use tokio::sync::{OnceCell, OwnedRwLockReadGuard};
use tokio_util::task::TaskTracker;

use super::file::{StagedFile, StagedLocation, State};
use super::layout::Base;
use super::parts::{Parts, UPLOAD_BYTES, part_count, part_range};
use super::writers::Writers;
use crate::error::ClientError;
use crate::memory::Charge;
use crate::mounts::ObjectVersion;
use crate::stats::InFlightGauge;

/// Parts of one file on their way at a time.
const PARTS_AT_A_TIME: usize = 4;
/// A part is sent ahead when the file has been written so far beyond it: what the kernel writes at the same time may
/// arrive in another order, and many formats end with a second look at what was written last.
const SLACK: u64 = 4 << 20;

/// An upload in parts, and what the bucket has of it.
#[derive(Default)]
pub(super) struct PartUpload {
    pub parts: Parts,
    ahead: EarlyParts,
    attempt: Option<Arc<MultipartAttempt>>,
}

/// Parts that are sent before the file is flushed.
#[derive(Debug, Default)]
struct EarlyParts {
    /// The next one.
    next: u64,
    running: usize,
    /// The bucket did not take one: the flush will find out why.
    has_failed: bool,
}

/// An upload in parts, begun with the first of them.
struct MultipartAttempt {
    /// And what it was begun with.
    upload: OnceCell<(MultipartUpload, ObjectMetadata)>,
    /// Names the write ([`WRITE_NAME`]).
    name: String,
    is_done: AtomicBool,
    tasks: TaskTracker,
    runtime: Handle,
}

impl MultipartAttempt {
    /// Begins with these metadata, if it has not begun yet.
    async fn upload(
        &self,
        ufs: &Ufs,
        key: &str,
        metadata: &ObjectMetadata,
    ) -> Result<&(MultipartUpload, ObjectMetadata), UfsError> {
        let begin = async || Ok((ufs.begin_multipart(key, metadata).await?, metadata.clone()));
        self.upload.get_or_try_init(begin).await
    }
}

impl Drop for MultipartAttempt {
    fn drop(&mut self) {
        let Some((upload, _)) = self.upload.take().filter(|_| !*self.is_done.get_mut()) else { return };
        let abort = async move {
            if let Err(error) = upload.abort().await {
                tracing::warn!("an upload was given up, and its parts are still at the bucket: {error}");
            }
        };
        self.tasks.spawn_on(abort, &self.runtime);
    }
}

/// An object that is to be written.
struct Plan {
    key: String,
    size: u64,
    changes: u64,
    /// The version that it replaces.
    base_etag: Option<String>,
    /// Else it may replace nothing.
    is_exclusive: bool,
    attributes: Option<ObjectAttributes>,
}

impl StagedFile {
    /// Writes the object, if the bucket lacks anything of it, and returns when the bucket has it: then all clients are
    /// notified. Nothing of the file appears after an error.
    pub async fn commit(self: &Arc<Self>) -> Result<(), ClientError> {
        if !self.is_dirty() {
            return Ok(());
        }
        let _alone = self.gate.write().await;
        // Another may have been faster.
        if !self.is_dirty() {
            return Ok(());
        }
        // What is sent ahead comes to its end, and nothing more is.
        let _quiet = self.sending.write().await;
        let plan = Plan::of(&self.state.lock());
        let stats = &self.shared.stats;
        let _under_way = InFlightGauge::new(&stats.staged_uploads);
        let written = match self.shared.ufs(&self.mount) {
            Ok(ufs) => self.write_object(&ufs, &plan).await,
            Err(error) => Err(error),
        };
        match written {
            Ok(etag) => {
                stats.uploads.inc();
                self.committed(&plan, etag).await;
            }
            Err(error) => {
                stats.upload_errors.inc();
                self.not_written(&plan);
                return Err(error);
            }
        }
        Ok(())
    }

    async fn write_object(&self, ufs: &Ufs, plan: &Plan) -> Result<String, ClientError> {
        let (replaces, attempt) = (plan.replaces(), self.attempt());
        let written = if part_count(plan.size) <= 1 {
            let _memory = self.memory(plan.size).await?;
            let bytes = self.collect(0..plan.size).await?;
            let is_plain = matches!(replaces, Precondition::Anything);
            let metadata = described(plan.attributes, (!is_plain).then_some(&attempt.name));
            let put = ufs.put(&plan.key, &bytes, &metadata, replaces).await;
            self.shared.stats.uploaded_bytes.inc_by(if put.is_ok() { plan.size } else { 0 });
            put
        } else {
            let metadata = described(plan.attributes, Some(&attempt.name));
            let (upload, begun_with) = attempt.upload(ufs, &plan.key, &metadata).await?;
            let parts = (0..part_count(plan.size)).map(|index| self.part(upload, index, plan.size));
            let etags: Vec<String> = stream::iter(parts).buffered(PARTS_AT_A_TIME).try_collect().await?;
            let completed = upload.complete(&etags, replaces).await;
            attempt.is_done.store(completed.is_ok(), Ordering::Release);
            match completed {
                // They were set when the first parts were on their way.
                Ok(etag) if *begun_with != metadata => {
                    let object = ObjectMeta { key: plan.key.clone(), size: plan.size, etag, mtime_ns: 0, metadata };
                    ufs.describe(&object, &object.metadata).await
                }
                completed => completed,
            }
        };
        match written {
            Err(error @ (UfsError::VersionChanged { .. } | UfsError::NotFound { .. })) => {
                // Who opens it next is to find what is there.
                let StagedLocation { parent, name, .. } = self.state.lock().place.clone();
                if let Err(error) = self.shared.metadata.written(parent, &name).await {
                    tracing::debug!(key = plan.key, "the master was not notified: {error}");
                }
                Err(plan.refused(error))
            }
            written => Ok(written?),
        }
    }

    /// The ETag of a part, which is sent unless the bucket has it.
    async fn part(&self, upload: &MultipartUpload, index: u64, size: u64) -> Result<String, ClientError> {
        let range = part_range(index);
        let range = range.start..range.end.min(size);
        let length = range.end - range.start;
        let changes = {
            let mut state = self.state.lock();
            if let Some(etag) = state.upload.parts.etag(index, length) {
                return Ok(etag.to_owned());
            }
            state.upload.parts.begin(index)
        };
        let _memory = self.memory(length).await?;
        let bytes = self.collect(range).await?;
        let etag = upload.part(number_of(index), &bytes).await?;
        self.shared.stats.uploaded_bytes.inc_by(length);
        self.state.lock().upload.parts.sent(index, changes, length, etag.clone());
        Ok(etag)
    }

    /// Memory for bytes on their way.
    pub(super) async fn memory(&self, bytes: u64) -> Result<Charge, ClientError> {
        self.shared.memory.charge(bytes).await
    }

    /// The upload in parts that is under way, or another.
    fn attempt(&self) -> Arc<MultipartAttempt> {
        let mut state = self.state.lock();
        let attempt = state.upload.attempt.get_or_insert_with(|| {
            Arc::new(MultipartAttempt {
                upload: OnceCell::new(),
                name: host::unique_name(),
                is_done: AtomicBool::new(false),
                tasks: self.shared.tasks.clone(),
                runtime: self.shared.runtime.clone(),
            })
        });
        attempt.clone()
    }

    /// The bucket has the object, and nobody writes: from now on that is what lies below what will be written.
    async fn committed(&self, plan: &Plan, etag: String) {
        let object = ObjectVersion::new(self.mount.clone(), &plan.key, &etag, plan.size);
        if let Ok(object) = &object {
            self.cache_written(object).await;
        }
        let node = self.node();
        // Acknowledged it is already: without the master it shows when the directory is listed again. Until then nobody
        // here may take the name for free.
        let known = self.shared.metadata.written(node.parent, &node.name).await;
        if let Err(error) = &known {
            tracing::warn!(file = %node, "written to the bucket, but the other clients are not notified: {error}");
        }
        {
            let mut state = self.state.lock();
            state.committed = plan.changes;
            state.known_as = match known {
                Ok(Some(known)) if known.etag() == etag => known.inode,
                Ok(_) => 0,
                Err(_) => u64::MAX,
            };
            state.writers = Writers::default();
            state.is_exclusive = false;
            state.upload.forget();
            state.layout.sent_away.remove(0..u64::MAX);
            state.layout.base = object.ok().map(|object| {
                let file = self.shared.files.open_object(node.clone(), object);
                Base { file, etag, valid: plan.size }
            });
        }
        if self.shared.room.is_scarce() {
            self.drop_staged(plan.size).await;
        }
    }

    /// The next attempt begins anew, unless parts of this one are all that there is of some bytes.
    fn not_written(&self, plan: &Plan) {
        let mut state = self.state.lock();
        state.failed = Some(plan.changes);
        if !state.layout.sent_away.touches(&(0..u64::MAX)) {
            state.upload.forget();
        }
    }

    /// Sends the parts that are complete.
    pub(super) fn send_ahead(self: &Arc<Self>) {
        while let Some((index, range, sending)) = self.next_ahead() {
            let file = self.clone();
            let sending = async move {
                let sent = file.send_part_ahead(index).await;
                drop(sending);
                file.was_sent_ahead(index, sent.as_ref().err());
                if sent.is_ok() && file.shared.room.is_scarce() {
                    file.send_away(index, range).await;
                }
                file.send_ahead();
            };
            self.shared.tasks.spawn_on(sending, &self.shared.runtime);
        }
    }

    /// A part that is complete, if it may be sent now.
    fn next_ahead(&self) -> Option<(u64, Range<u64>, OwnedRwLockReadGuard<()>)> {
        let range = {
            let state = self.state.lock();
            let range = part_range(state.upload.ahead.next);
            // The memory is for small parts; a large one takes all of it.
            let most = (UPLOAD_BYTES / (range.end - range.start)).clamp(1, PARTS_AT_A_TIME as u64) as usize;
            // What was written and committed may have been dropped here; then it is in the base.
            let is_written =
                state.committed > 0 && state.layout.base.as_ref().is_some_and(|base| base.valid >= range.end);
            let is_due = state.layout.size >= range.end + SLACK && (is_written || state.layout.staged.contains(&range));
            if !is_due || state.is_removed || state.upload.ahead.has_failed || state.upload.ahead.running >= most {
                return None;
            }
            range
        };
        // Refused while the file is being flushed.
        let sending = self.sending.clone().try_read_owned().ok()?;
        let mut state = self.state.lock();
        if part_range(state.upload.ahead.next) != range {
            return None;
        }
        let index = state.upload.ahead.next;
        state.upload.ahead.next += 1;
        state.upload.ahead.running += 1;
        Some((index, range, sending))
    }

    fn was_sent_ahead(&self, index: u64, error: Option<&ClientError>) {
        let mut state = self.state.lock();
        state.upload.ahead.running -= 1;
        if let Some(error) = error {
            state.upload.ahead.has_failed = true;
            tracing::debug!(key = state.place.key(), part = index, "not sent ahead: {error}");
        }
    }

    async fn send_part_ahead(&self, index: u64) -> Result<(), ClientError> {
        let attempt = self.attempt();
        let (key, attributes) = {
            let state = self.state.lock();
            (state.place.key(), state.attributes)
        };
        let metadata = described(attributes, Some(&attempt.name));
        let (upload, _) = attempt.upload(&self.shared.ufs(&self.mount)?, &key, &metadata).await?;
        self.part(upload, index, u64::MAX).await.map(drop)
    }
}

impl PartUpload {
    /// The upload in parts is over.
    pub(super) fn forget(&mut self) {
        // Those on their way count themselves off.
        let ahead = EarlyParts { running: self.ahead.running, ..EarlyParts::default() };
        *self = Self { ahead, ..Self::default() };
    }
}

impl Plan {
    fn of(state: &State) -> Self {
        // Even if nothing of it is left: who appends to an empty file must not undo what was written to it since.
        let base_etag = state.layout.base.as_ref().map(|base| base.etag.clone());
        let State { changes, is_exclusive, attributes, .. } = *state;
        Self { key: state.place.key(), size: state.layout.size, changes, base_etag, is_exclusive, attributes }
    }

    fn replaces(&self) -> Precondition<'_> {
        match &self.base_etag {
            Some(etag) => Precondition::Version(etag),
            None if self.is_exclusive => Precondition::Nothing,
            None => Precondition::Anything,
        }
    }

    /// Something else is under the key than may be replaced, or the bucket has lost the parts.
    fn refused(&self, error: UfsError) -> ClientError {
        let (errno, what) = match self.replaces() {
            Precondition::Anything => (Errno::IO, "the upload is gone"),
            Precondition::Nothing => (Errno::EXIST, "another client has made it meanwhile"),
            Precondition::Version(_) => (Errno::IO, "another client has replaced what was being changed here"),
        };
        let reason = format!("{}: {what}: {error}", self.key);
        ClientError::Refused { errno: errno.raw_os_error(), reason }
    }
}

/// The metadata of an object that is written: what it keeps, and the name of the write. Small objects that may replace
/// anything need none.
fn described(attributes: Option<ObjectAttributes>, write: Option<&String>) -> ObjectMetadata {
    let mut metadata = ObjectMetadata::new();
    if let Some(attributes) = attributes {
        attributes.write(&mut metadata);
    }
    metadata.extend(write.map(|write| (WRITE_NAME.to_owned(), write.clone())));
    metadata
}

fn number_of(index: u64) -> u32 {
    // Below PARTS_MAX.
    u32::try_from(index + 1).unwrap_or(u32::MAX)
}
