//! Deletes objects that belong to no inode any more.
//!
//! Whether a name of the namespace has the key is looked at under the claim of the key: a file that gets the name
//! afterwards is written when the claim is given back. So is whether another inode has written an object there since:
//! that one stays until its inode, which may have another name by now, gives it up.

use std::sync::Arc;
use std::time::Duration;

use cavern_conf::Failpoint;
use cavern_consensus::LeaderLease;
use cavern_proto::master::{Kind, Mount};
use cavern_proto::record::Deleted;
use cavern_proto::record::command::Command;
use cavern_state::{PendingDeletion, Tables};
use cavern_ufs::{Precondition, Ufs, UfsError};
use tokio::time::Instant;

use super::Persistence;
use super::retry_tracker::{FailureKind, Item, Priority, WorkPermit};
use crate::background::Next;
use crate::error::{WorkError, if_there};

/// How long the owner of a key is given to be written, before it is looked at again.
const OWNER_PAUSE: Duration = Duration::from_secs(1);

/// Whose a key is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum KeyOwner {
    Nobody,
    /// An inode that will be written under it, or whose origin is there.
    Waited,
    /// An inode that has been written under it.
    Written,
}

impl Persistence {
    /// Begins to delete all objects that are due.
    pub(super) async fn delete_due(self: &Arc<Self>) -> Result<Next, WorkError> {
        let (mut reading, mut busy) = (Duration::ZERO, false);
        let mut after: Option<(u32, String)> = None;
        loop {
            let began = Instant::now();
            let page = self.prioritized_deletions(after.take()).await?;
            reading += began.elapsed();
            let Some((last, _)) = page.last() else { return Ok(self.rest(reading, busy)) };
            after = Some((last.mount_id, last.key.clone()));
            for (deletion, pace) in page {
                busy |= self.consider_deletion(deletion, pace).await;
            }
        }
    }

    async fn consider_deletion(self: &Arc<Self>, deletion: PendingDeletion, pace: Priority) -> bool {
        if pace == Priority::Normal && self.yields_to_clients() && !self.is_overdue(deletion.record.since_ns) {
            return false;
        }
        // The turn is the claim of the key.
        let item = Item::Key(deletion.mount_id, deletion.key.clone());
        let Some(turn) = self.retries.begin(&item, deletion.mount_id, pace) else { return false };
        let Ok(permit) = self.permits.clone().acquire_owned().await else { return false };
        let persistence = self.clone();
        self.tasks.spawn(async move {
            if let Err(error) = persistence.delete(&deletion, &turn).await {
                turn.failed(FailureKind::Item, &error.to_string());
            }
            drop(permit);
        });
        true
    }

    async fn delete(&self, deletion: &PendingDeletion, turn: &WorkPermit) -> Result<(), WorkError> {
        let Some(mount) = WorkError::if_found(self.lookups.mounts.get(deletion.mount_id))? else {
            turn.ended();
            return self.deleted(deletion).await;
        };
        let (seen, key) = (mount.clone(), deletion.key.clone());
        let owner = self.lookups.reader.read(move |tables| owner(tables, &seen.mount, seen.ufs.prefix(), &key)).await?;
        match owner {
            KeyOwner::Waited => {
                turn.later(OWNER_PAUSE);
                return Ok(());
            }
            KeyOwner::Written => turn.ended(),
            KeyOwner::Nobody => {
                if let Err(refusal) = mount.check_claimant() {
                    turn.failed(FailureKind::Denied, &refusal.to_string());
                    return Ok(());
                }
                match delete_object(&mount.ufs, deletion, self.lookups.reader.lease()).await {
                    Ok(()) => {
                        Failpoint::ObjectDeleted.pass();
                        mount.succeeded();
                        if let Some(pause) = self.may_still_arrive(deletion) {
                            turn.later(pause);
                            return Ok(());
                        }
                        self.metrics.deletions.inc();
                        turn.succeeded();
                    }
                    Err(WorkError::Ufs(error)) => {
                        self.metrics.failures.inc();
                        let blame = blame(&error);
                        turn.failed(blame, &error.to_string());
                        if blame.is_of_bucket() {
                            mount.failed(&WorkError::Ufs(error));
                        }
                        return Ok(());
                    }
                    // This master may lead no more.
                    Err(error) => return Err(error),
                }
            }
        }
        self.deleted(deletion).await
    }

    /// Whether the object under a key is to be written by somebody, so that it is not deleted before.
    pub(super) fn waits_for_owner(&self, tables: Tables<'_>, deletion: &PendingDeletion) -> Result<bool, WorkError> {
        let Ok(mount) = self.lookups.mounts.get(deletion.mount_id) else { return Ok(false) };
        Ok(owner(tables, &mount.mount, mount.ufs.prefix(), &deletion.key)? == KeyOwner::Waited)
    }

    /// How long the object may still come: nobody has confirmed its write, and the store may be at it.
    fn may_still_arrive(&self, deletion: &PendingDeletion) -> Option<Duration> {
        if !deletion.record.etag.is_empty() {
            return None;
        }
        let age_ns = self.lookups.reader.clock().age_ns(deletion.record.since_ns);
        let age = Duration::from_nanos(u64::try_from(age_ns).ok()?);
        self.writer.arrives_within().checked_sub(age).filter(|left| !left.is_zero())
    }

    async fn deleted(&self, deletion: &PendingDeletion) -> Result<(), WorkError> {
        let deleted =
            Deleted { mount_id: deletion.mount_id, key: deletion.key.clone(), change: deletion.record.change };
        self.proposer.propose(Command::Deleted(deleted)).await?;
        Ok(())
    }
}

fn blame(error: &UfsError) -> FailureKind {
    match error {
        UfsError::Denied { .. } | UfsError::NotAllowed { .. } | UfsError::NoBucket { .. } => FailureKind::Denied,
        error if error.is_temporary() => FailureKind::Bucket,
        _ => FailureKind::Item,
    }
}

/// Deletes the version that is known, or the one that is there instead of it, unless a master that leads by now may
/// have written that.
async fn delete_object(ufs: &Ufs, deletion: &PendingDeletion, lease: &LeaderLease) -> Result<(), WorkError> {
    Failpoint::DeletionBegun.pass();
    let known = deletion.record.etag.as_str();
    if !known.is_empty() {
        match ufs.delete(&deletion.key, Precondition::Version(known)).await {
            Err(UfsError::VersionChanged { .. }) => {}
            done => return Ok(done?),
        }
    }
    let Some(there) = if_there(ufs.head(&deletion.key).await)? else { return Ok(()) };
    // Nobody else led when that was read.
    lease.check()?;
    Ok(ufs.delete(&deletion.key, Precondition::Version(&there.etag)).await?)
}

/// Whose a key is at the moment.
fn owner(tables: Tables<'_>, mount: &Mount, prefix: &str, key: &str) -> Result<KeyOwner, WorkError> {
    let owner = named_owner(tables, mount, prefix, key)?;
    if owner != KeyOwner::Nobody {
        return Ok(owner);
    }
    if let Some(noted) = tables.noted(mount.id, key)?
        && is_written(tables, noted, key)?
    {
        return Ok(KeyOwner::Written);
    }
    Ok(if tables.origin_of(mount.id, key)?.is_some() { KeyOwner::Waited } else { KeyOwner::Nobody })
}

/// Whether an object of an inode has been written under a key.
fn is_written(tables: Tables<'_>, inode: u64, key: &str) -> Result<bool, WorkError> {
    Ok(tables.object(inode, key)?.is_some_and(|object| !object.etag.is_empty()))
}

/// Whether a name of the namespace has this key.
pub(super) fn is_named(tables: Tables<'_>, mount: &Mount, prefix: &str, key: &str) -> Result<bool, WorkError> {
    Ok(named_owner(tables, mount, prefix, key)? != KeyOwner::Nobody)
}

fn named_owner(tables: Tables<'_>, mount: &Mount, prefix: &str, key: &str) -> Result<KeyOwner, WorkError> {
    let Some(path) = key.strip_prefix(prefix) else { return Ok(KeyOwner::Nobody) };
    let (path, is_directory) = path.strip_suffix('/').map_or((path, false), |path| (path, true));
    let (mut inode, mut kind) = (mount.root_inode, Kind::Directory);
    for name in path.split('/') {
        if kind != Kind::Directory {
            return Ok(KeyOwner::Nobody);
        }
        let Some(dentry) = tables.dentry(inode, name.as_bytes())? else { return Ok(KeyOwner::Nobody) };
        (inode, kind) = (dentry.inode, dentry.kind());
    }
    if (kind == Kind::Directory) != is_directory {
        return Ok(KeyOwner::Nobody);
    }
    Ok(if is_written(tables, inode, key)? { KeyOwner::Written } else { KeyOwner::Waited })
}
