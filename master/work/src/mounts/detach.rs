//! Detaching buckets from the namespace.
//!
//! What was acknowledged is in the bucket before a mount goes, or the mount stays. The bucket is brought up to date
//! first, and whether it lacks anything is found out without keeping anybody waiting: the number of the last change is
//! read, then what the bucket lacks, then whether a session holds a file. The command that removes the mount carries
//! that number, and does nothing when the mount has a later change: so what was made meanwhile is looked at again.
//! Until the command is applied, the mount is as it was, whoever is killed or gives up. A mount stays as long as there
//! are views of it, or in its bucket.

use std::time::Duration;

use cavern_conf::counted;
use cavern_proto::master::{Mount, View, WriteType};
use cavern_proto::record::RemoveMount;
use cavern_state::outcome::{MountChange, Repeatable, Requested};
use tokio::time::Instant;

use super::attach::{normalized, not_mounted};
use super::changes::{DetachPolicy, MountChanges};
use crate::error::WorkError;
use crate::persist::{Backlog, Scope};
use crate::request::Request;

/// How long the bucket is brought up to date before the mount stays.
const DRAIN: Duration = Duration::from_secs(10);
/// Not for longer than this when the bucket refuses: what fails once is often done by the next attempt.
const REFUSED: Duration = Duration::from_secs(3);
/// A file that was closed is let go of a moment later.
const CLOSE_GRACE: Duration = Duration::from_secs(3);
const PAUSE: Duration = Duration::from_millis(50);

impl MountChanges {
    /// Detaches the bucket at a path, once. It disappears at once; what was known of it is deleted in the background.
    ///
    /// # Errors
    /// [`WorkError::Refused`] when the bucket lacks changes that are not to be discarded, when files are being written,
    /// and when there are views.
    pub async fn unmount_once(
        &self,
        request: &Request,
        path: &str,
        unwritten: DetachPolicy,
    ) -> Result<Mount, WorkError> {
        let path = normalized(path)?;
        if let Some(answer) = request.answer(&self.lookups.reader).await? {
            return Ok(answer.mount.unwrap_or_default());
        }
        let began = Instant::now();
        loop {
            let looked_up = path.clone();
            let read = self.lookups.reader.read(move |tables| Ok((tables.mounts()?, tables.views()?)));
            let (mounts, views) = read.await?;
            let Some(mount) = mounts.into_iter().find(|mount| mount.path == looked_up) else {
                return Err(not_mounted(&path));
            };
            refuse_views(&mount, &views)?;
            let discard = unwritten == DetachPolicy::Discard;
            // What sessions have answered for is made before that, unless it is to be lost.
            match self.lookups.recalls.recall_mount(mount.id).await {
                Err(error) if discard => tracing::warn!(mount = path, "what is held is lost: {error}"),
                recalled => recalled?,
            }
            let change = match mount.write_type() {
                WriteType::FsMode if !discard => self.drained(&mount, began).await?,
                _ => 0,
            };
            let remove = request.command(RemoveMount { mount_id: mount.id, change, discard });
            let changes = self.clone();
            let removed = match self.tasks.to_the_end(async move { changes.remove(remove).await }).await? {
                Repeatable::First(removed) => removed,
                Repeatable::Repeated(answer) => return Ok(answer.mount.unwrap_or_default()),
            };
            match removed {
                // The answer goes to a person: without credentials.
                MountChange::Mount(removed) => {
                    return Ok(Mount { options: std::collections::HashMap::new(), ..*removed });
                }
                MountChange::OutOfDate if began.elapsed() > DRAIN => {
                    return Err(WorkError::Refused(format!(
                        "{path} is being changed all the time: end what changes it, or lose what is not in the bucket \
                         with `cv umount {path} --discard`"
                    )));
                }
                MountChange::OutOfDate => {}
                MountChange::NoSuchMount => return Err(not_mounted(&path)),
            }
        }
    }

    /// Records that a mount is gone, and lets go of its bucket.
    async fn remove(&self, remove: Requested<RemoveMount>) -> Result<Repeatable<MountChange>, WorkError> {
        let open = self.lookups.mounts.get(remove.command.mount_id);
        let removed = self.proposer.propose(remove).await?;
        if let Repeatable::First(MountChange::Mount(removed)) = &removed {
            self.lookups.mounts.forget(removed.id);
            if let Ok(open) = open {
                self.give_up_claim(&open.ufs, &open.mount).await;
            }
            tracing::info!(mount = removed.path, "a bucket is unmounted");
        }
        Ok(removed)
    }

    /// Brings the bucket of a mount up to date. Answers the number of a change up to which it lacks nothing.
    async fn drained(&self, mount: &Mount, began: Instant) -> Result<u64, WorkError> {
        let (id, path) = (mount.id, &mount.path);
        let scope = Scope { inode: mount.root_inode, mount_id: id };
        let (mut expedited, mut held_since) = (None, None);
        loop {
            let change = self.lookups.reader.read(|tables| Ok(tables.counters()?.change)).await?;
            let (backlog, _) = self.persistence.backlog(scope.clone()).await?;
            if backlog.items() > 0 {
                let expedited = expedited.get_or_insert_with(|| self.persistence.expedite(scope.clone(), u64::MAX));
                let failed = expedited.left().await?;
                let patience = if failed.last_error().is_empty() { DRAIN } else { REFUSED };
                if began.elapsed() > patience {
                    return Err(lacks_changes(path, &backlog, failed.last_error()));
                }
            } else {
                let held = self.lookups.reader.read(move |tables| Ok(tables.count_refs(id)?)).await?;
                if held == 0 {
                    return Ok(change);
                }
                if held_since.get_or_insert_with(Instant::now).elapsed() > CLOSE_GRACE {
                    return Err(WorkError::Refused(format!(
                        "{path} has open files that have been written to ({held}): close them first, or lose what is \
                         not in the bucket with `cv umount {path} --discard`"
                    )));
                }
            }
            tokio::time::sleep(PAUSE).await;
        }
    }
}

/// Refuses to detach what there are views of, and what has the object of one.
fn refuse_views(mount: &Mount, views: &[View]) -> Result<(), WorkError> {
    let is_of = |view: &&View| view.mount_id == mount.id || view.store_mount_id == mount.id;
    let names: Vec<&str> = views.iter().filter(is_of).map(|view| view.name.as_str()).collect();
    if names.is_empty() {
        return Ok(());
    }
    let (path, names) = (&mount.path, names.join(", "));
    Err(WorkError::Refused(format!("{path} has views ({names}): delete them first (cv view delete)")))
}

fn lacks_changes(path: &str, backlog: &Backlog, failure: &str) -> WorkError {
    let cause = if failure.is_empty() { String::new() } else { format!(" ({failure})") };
    let (files, objects) = (counted(backlog.files, "file"), counted(backlog.deletions, "object"));
    WorkError::Refused(format!(
        "the bucket of {path} lacks changes: {files} to write, {objects} to delete{cause}: wait for them with `cv \
         persist wait {path}`, or lose them with `cv umount {path} --discard`"
    ))
}
