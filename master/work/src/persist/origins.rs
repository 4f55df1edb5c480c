//! Objects that have what no block of a file has.
//!
//! **Known again.** An upload can write over the origin of its own file. If its confirmation is lost, the state names
//! an object that is no more. The one that is there is known by its [`tag`], and takes its place.
//!
//! **Out of the way.** A key may be wanted for another file while the object there still is somebody's origin: that of
//! a file that has been renamed and not been written yet, or that is only open, without a name. The first writes itself
//! in a moment; for the second, and for those who wait for each other, the object is written once more under a key of
//! its own, beside all names. It is a deletion from the beginning, which is carried out when nobody's origin is there
//! any more.

use std::time::Duration;

use cavern_proto::master::Origin;
use cavern_proto::record::command::Command;
use cavern_proto::record::{MoveOrigin, Persisted, PersistedObject, PreserveObject};
use cavern_proto::reserved::PRESERVED;
use cavern_ufs::UfsError;

use super::intents::PersistOutcome;
use super::plan::{Content, Work, Write};
use super::retry_tracker::{FailureKind, Priority};
use super::{Persistence, object_tag};
use crate::error::{WorkError, if_there};
use crate::mounts::OpenMount;

/// Pause before a file that waits for another is looked at again, and how long it waits before it does something about
/// it.
const PAUSE: Duration = Duration::from_millis(100);
const PATIENCE: Duration = Duration::from_secs(2);

impl Persistence {
    /// A worker has not found the origin of a file that is to be written.
    pub(super) async fn recognize_own_upload(
        &self,
        mount: &OpenMount,
        work: &Work,
        missing: &str,
    ) -> Result<PersistOutcome, WorkError> {
        let Some(origin) = &work.content.origin else {
            return Ok(PersistOutcome::Failed(FailureKind::Item, missing.to_owned()));
        };
        let there = match if_there(mount.ufs.head(&origin.key).await) {
            Ok(there) => there.and_then(|there| object_tag::read(&there, &self.cluster_id, work.inode)),
            Err(error) => return Ok(PersistOutcome::Failed(FailureKind::Bucket, error.to_string())),
        };
        let known = |object: &cavern_proto::record::ObjectRecord| {
            (origin.version..=work.content.version).contains(&object.version) && object.etag != origin.etag
        };
        let Some(object) = there.filter(known) else {
            let error = format!(
                "{missing}: the object \"{}\" has been deleted or replaced by somebody else, and content of this file \
                 with it: restore its version {}",
                origin.key.escape_debug(),
                origin.etag
            );
            return Ok(PersistOutcome::Failed(FailureKind::NeedsOperator, error));
        };
        tracing::info!(inode = work.inode, key = origin.key, "an upload is known again whose confirmation was lost");
        let objects = vec![PersistedObject { key: origin.key.clone(), object: Some(object) }];
        let found = Persisted { inode: work.inode, change: 0, objects, gone: Vec::new() };
        self.proposer.propose(Command::Persisted(found)).await?;
        Ok(PersistOutcome::Again)
    }

    /// Whether the bucket has lost what an origin had.
    async fn is_lost(&self, mount: &OpenMount, origin: &Origin, owner: u64) -> bool {
        match mount.ufs.head(&origin.key).await {
            Ok(there) => there.etag != origin.etag && object_tag::read(&there, &self.cluster_id, owner).is_none(),
            Err(error) => matches!(error, UfsError::NotFound { .. }),
        }
    }

    /// Waits until the object under a key is not `owner`'s origin any more, or sees to it.
    pub(super) async fn relocate_origin(
        &self,
        mount: &OpenMount,
        inode: u64,
        key: &str,
        owner: u64,
        pace: Priority,
    ) -> Result<PersistOutcome, WorkError> {
        let read = self.lookups.reader.read(move |tables| {
            let waits_since = tables.intent(inode)?.map_or(0, |intent| intent.changed_ns);
            let will_move = tables.intent(owner)?.is_some();
            Ok((tables.inode(owner)?, will_move, waits_since, tables.counters()?.change))
        });
        let (record, will_move, waits_since, change) = read.await?;
        let Some(origin) = record.and_then(|record| record.origin) else { return Ok(PersistOutcome::Again) };
        let clock = self.lookups.reader.clock();
        let now_ns = clock.now_ns();
        let waited = Duration::from_nanos(u64::try_from(clock.age_ns(waits_since)).unwrap_or(u64::MAX));
        let usual = if pace == Priority::Normal { self.delay } else { Duration::ZERO };
        if origin.key != key || will_move && waited < usual + PATIENCE {
            return Ok(PersistOutcome::Later(PAUSE));
        }
        let preserved = format!("{}{PRESERVED}{}-{owner}-{change}", mount.ufs.prefix(), self.cluster_id);
        let Some(_claim) = self.retries.claim(mount.mount.id, &preserved) else {
            return Ok(PersistOutcome::Later(PAUSE));
        };
        let begin = PreserveObject { mount_id: mount.mount.id, key: preserved.clone(), now_ns };
        self.proposer.propose(Command::PreserveObject(begin)).await?;
        let content = Content {
            length: origin.valid,
            version: origin.version,
            block_size: mount.mount.block_size,
            same: (origin.valid == origin.length).then(|| (origin.key.clone(), origin.etag.clone())),
            tag: object_tag::of(&self.cluster_id, owner, origin.version, 0),
            origin: Some(origin.clone()),
            ..Content::default()
        };
        let work = Work { inode: owner, mount_id: mount.mount.id, content, ..Work::default() };
        let write = Write { key: preserved.clone(), is_new: true, replaces: String::new() };
        let etag = match self.write(mount, &work, write).await {
            Ok(etag) => etag,
            // Nothing is left to be kept, so nobody waits for it: reading it fails under the other key as well.
            Err(PersistOutcome::Failed(FailureKind::Item | FailureKind::NeedsOperator, error))
                if self.is_lost(mount, &origin, owner).await =>
            {
                tracing::warn!(inode = owner, key, "{error}");
                origin.etag.clone()
            }
            Err(end) => return Ok(end),
        };
        let Origin { key, etag: from, valid, version, .. } = origin;
        let to = Origin { key: preserved, etag, length: valid, valid, version };
        self.proposer.propose(Command::MoveOrigin(MoveOrigin { inode: owner, key, etag: from, to: Some(to) })).await?;
        Ok(PersistOutcome::Again)
    }
}
