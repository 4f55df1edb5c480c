//! Other options, credentials and freshness for a mount that is in use.
//!
//! The bucket is asked with the new options before anything is recorded. What else a mount is cannot change: blocks are
//! named by its block size and placed by its replicas, and files are open by its mode. Clients and workers learn of the
//! new mount table as of any other.

use cavern_proto::master::{Mount, UpdateMountRequest, WriteType};
use cavern_proto::record::UpdateMount;
use cavern_state::outcome::MountChange;
use cavern_ufs::{KeySpace, Ufs, changed_options};
use futures::{StreamExt, stream};

use super::attach::{complete, normalized, not_mounted};
use super::changes::MountChanges;
use super::overlap::refuse_overlap;
use crate::error::WorkError;
use crate::sessions::RECALLS;

/// Objects by which a bucket is known again, and how many are asked about at a time.
const SAMPLE: usize = 32;
const SAMPLE_AHEAD: usize = 8;

impl MountChanges {
    /// Changes a mount as far as it can be changed while it is in use.
    ///
    /// # Errors
    /// [`WorkError::Refused`] and those of the bucket: the mount is as it was then.
    pub async fn update(&self, request: UpdateMountRequest) -> Result<Mount, WorkError> {
        let path = normalized(&request.path)?;
        loop {
            let (mounts_epoch, mounts) = self.lookups.mounts.table()?;
            let Some(before) = mounts.iter().find(|mount| mount.path == path) else { return Err(not_mounted(&path)) };
            let wanted = changed(before, &request)?;
            if wanted == *before {
                // As when the request is sent again.
                return Ok(wanted);
            }
            self.check_options(before, &wanted, &mounts).await?;
            let _vendor = match wanted.options == before.options {
                true => None,
                false => self.lookups.mounts.check_vending(&wanted).await?,
            };
            self.lookups.mounts.will_be(&wanted);
            self.recall_all(before.id).await?;
            let update = UpdateMount { mount: Some(self.lookups.mounts.seal(wanted.clone())?), mounts_epoch };
            let (changes, mount) = (self.clone(), wanted.clone());
            match self.tasks.to_the_end(async move { changes.go_by(update, &mount).await }).await? {
                MountChange::Mount(_) => return Ok(wanted),
                MountChange::OutOfDate => {}
                MountChange::NoSuchMount => return Err(not_mounted(&path)),
            }
        }
    }

    /// Records what a mount is to be, and goes by that.
    async fn go_by(&self, update: UpdateMount, wanted: &Mount) -> Result<MountChange, WorkError> {
        let recorded = self.proposer.propose(update).await?;
        if let MountChange::Mount(_) = &recorded {
            self.lookups.mounts.reopen(wanted.id)?;
            if wanted.limits_users() {
                // Whoever has come to hold something meanwhile answers there by what was allowed before.
                self.recall_all(wanted.id).await?;
            }
            tracing::info!(mount = wanted.path, "a mount has got other options");
        }
        Ok(recorded)
    }

    /// Has a mount recalled for as long as it takes: a client that returns nothing loses its session before the end.
    async fn recall_all(&self, mount_id: u32) -> Result<(), WorkError> {
        for _ in 1..RECALLS {
            match self.lookups.recalls.recall_mount(mount_id).await {
                Err(WorkError::Deadline(_)) => {}
                recalled => return recalled,
            }
        }
        self.lookups.recalls.recall_mount(mount_id).await
    }

    /// Whether the new options lead to the mount's bucket, and to nobody else's keys.
    async fn check_options(&self, before: &Mount, wanted: &Mount, mounts: &[Mount]) -> Result<(), WorkError> {
        if wanted.options == before.options {
            return Ok(());
        }
        let ufs = self.lookups.mounts.open_ufs(wanted)?;
        ufs.check().await?;
        // Links of directory trees need not be followed here: they have no options.
        let place = KeySpace::of(&wanted.uri, &wanted.options)?;
        if KeySpace::of(&before.uri, &before.options).is_ok_and(|before| before.has_store_of(&place)) {
            return Ok(());
        }
        for other in mounts.iter().filter(|other| other.id != wanted.id) {
            refuse_overlap(wanted, &place, other)?;
        }
        match wanted.write_type() {
            WriteType::FsMode => self.refuse_other_bucket(wanted, &ufs).await,
            _ => Ok(()),
        }
    }

    /// Another endpoint must lead to the bucket that has what was written: some objects are looked for there.
    async fn refuse_other_bucket(&self, mount: &Mount, ufs: &Ufs) -> Result<(), WorkError> {
        let id = mount.id;
        let noted = self.lookups.reader.read(move |tables| Ok(tables.noted_objects(id, SAMPLE)?)).await?;
        let sample = noted.len();
        let is_there = stream::iter(noted).map(|(key, etag)| async move {
            let object = ufs.head(&key).await;
            object.is_ok_and(|object| object.etag == etag)
        });
        let found = is_there.buffer_unordered(SAMPLE_AHEAD).filter(|is_there| std::future::ready(*is_there));
        if sample == 0 || found.count().await > 0 {
            return Ok(());
        }
        Err(WorkError::Refused(format!(
            "the bucket that these options lead to has none of the {sample} objects of {} that were looked for: it is \
             another one. Give the endpoint of the same bucket, or unmount {} and mount the other one",
            mount.path, mount.path
        )))
    }
}

/// The mount as it is wanted.
fn changed(before: &Mount, request: &UpdateMountRequest) -> Result<Mount, WorkError> {
    let mut wanted = before.clone();
    wanted.options = changed_options(&before.options, &request.options);
    let is_fs_mode = before.write_type() == WriteType::FsMode;
    if is_fs_mode && (request.consistency.is_some() || request.metadata_ttl_ms.is_some()) {
        return Err(WorkError::Invalid(format!(
            "{} is in fs-mode, where the namespace is the truth: no listing grows old there",
            before.path
        )));
    }
    wanted.consistency = request.consistency.unwrap_or(wanted.consistency);
    wanted.metadata_ttl_ms = request.metadata_ttl_ms.unwrap_or(wanted.metadata_ttl_ms);
    wanted.ttl_ms = request.ttl_ms.unwrap_or(wanted.ttl_ms);
    if let Some(clients) = &request.clients {
        wanted.clients.clone_from(&clients.rules);
    }
    let Mount { id, root_inode, existing, .. } = *before;
    Ok(Mount { id, root_inode, existing, ..complete(wanted)? })
}
