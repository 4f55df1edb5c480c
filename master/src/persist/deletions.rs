//! Deletes objects that belong to no inode any more.
//!
//! Whether a name of the namespace has the key is looked at under the claim of the key: a file that gets the name
//! afterwards is written when the claim is given back.

use std::sync::Arc;
use std::time::{Duration, Instant};

use cavern_conf::Failpoint;
use cavern_proto::master::{Kind, Mount};
use cavern_proto::record::Deleted;
use cavern_proto::record::command::Command;
use cavern_ufs::{Replaces, Ufs, UfsError};

use super::Persistence;
use super::ledger::{Blame, Item, Pace, Turn};
use crate::MasterError;
use crate::state::{Doomed, Tables};

/// How long the owner of a key is given to be written, before it is looked at again.
const OWNER_PAUSE: Duration = Duration::from_secs(1);

/// Whose a key is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Owner {
    Nobody,
    /// An inode that will be written under it, or whose origin is there.
    Waited,
    /// An inode that has been written under it.
    Written,
}

impl Persistence {
    pub(super) async fn keep_deleting(self: &Arc<Self>) {
        let mut hurries = self.hurries.subscribe();
        loop {
            let (mut reading, mut busy) = (Duration::ZERO, false);
            let mut after: Option<(u32, String)> = None;
            loop {
                let began = Instant::now();
                let page = self.paced_deletions(after.take()).await.unwrap_or_else(|error| {
                    tracing::warn!("what is to be deleted from buckets cannot be read: {error}");
                    Vec::new()
                });
                reading += began.elapsed();
                let Some((last, _)) = page.last() else { break };
                after = Some((last.mount_id, last.key.clone()));
                for (doomed, pace) in page {
                    busy |= self.consider_deletion(doomed, pace).await;
                }
            }
            self.rest(reading, busy, &mut hurries).await;
        }
    }

    async fn consider_deletion(self: &Arc<Self>, doomed: Doomed, pace: Pace) -> bool {
        if pace == Pace::Usual && self.makes_way() && !self.is_overdue(doomed.record.since_ns) {
            return false;
        }
        // The turn is the claim of the key.
        let item = Item::Key(doomed.mount_id, doomed.key.clone());
        let Some(turn) = self.ledger.begin(&item, doomed.mount_id, pace) else { return false };
        let Ok(permit) = self.permits.clone().acquire_owned().await else { return false };
        let persistence = self.clone();
        self.tasks.spawn(self.clone().keep(async move |_| {
            if let Err(error) = persistence.delete(&doomed, &turn).await {
                turn.failed(Blame::Item, &error.to_string());
            }
            drop(permit);
        }));
        true
    }

    async fn delete(&self, doomed: &Doomed, turn: &Turn) -> Result<(), MasterError> {
        let mount = match self.lookups.mounts.get(doomed.mount_id) {
            Ok(mount) => mount,
            Err(error) if error.is_not_found() => {
                turn.ended();
                return self.deleted(doomed).await;
            }
            Err(error) => return Err(error),
        };
        let (seen, key) = (mount.clone(), doomed.key.clone());
        let owner =
            self.lookups.listings.read(move |tables| owner(tables, &seen.mount, seen.ufs.prefix(), &key)).await?;
        match owner {
            Owner::Waited => {
                turn.later(OWNER_PAUSE);
                return Ok(());
            }
            Owner::Written => turn.ended(),
            Owner::Nobody => match delete_object(&mount.ufs, doomed).await {
                Ok(()) => {
                    Failpoint::ObjectDeleted.pass();
                    self.metrics.deletions.inc();
                    mount.succeeded();
                    turn.succeeded();
                }
                Err(error) => {
                    self.metrics.failures.inc();
                    let blame = blame(&error);
                    turn.failed(blame, &error.to_string());
                    if blame.is_of_bucket() {
                        mount.failed(&MasterError::Ufs(error));
                    }
                    return Ok(());
                }
            },
        }
        self.deleted(doomed).await
    }

    /// Whether the object under a key is to be written by somebody, so that it is not deleted before.
    pub(super) fn waits_for_owner(&self, tables: Tables<'_>, doomed: &Doomed) -> Result<bool, MasterError> {
        let Ok(mount) = self.lookups.mounts.get(doomed.mount_id) else { return Ok(false) };
        Ok(owner(tables, &mount.mount, mount.ufs.prefix(), &doomed.key)? == Owner::Waited)
    }

    async fn deleted(&self, doomed: &Doomed) -> Result<(), MasterError> {
        let deleted = Deleted { mount_id: doomed.mount_id, key: doomed.key.clone(), change: doomed.record.change };
        self.proposer.propose(Command::Deleted(deleted)).await.map(drop)
    }
}

fn blame(error: &UfsError) -> Blame {
    match error {
        UfsError::Denied { .. } | UfsError::NoBucket { .. } => Blame::Denied,
        error if error.is_temporary() => Blame::Bucket,
        _ => Blame::Item,
    }
}

/// Deletes the version that is known, or the one that is there instead of it.
async fn delete_object(ufs: &Ufs, doomed: &Doomed) -> Result<(), UfsError> {
    Failpoint::DeletionBegun.pass();
    let known = doomed.record.etag.as_str();
    if !known.is_empty() {
        match ufs.delete(&doomed.key, Replaces::Version(known)).await {
            Err(UfsError::VersionChanged { .. }) => {}
            done => return done,
        }
    }
    match ufs.head(&doomed.key).await {
        Ok(there) => ufs.delete(&doomed.key, Replaces::Version(&there.etag)).await,
        Err(UfsError::NotFound { .. }) => Ok(()),
        Err(error) => Err(error),
    }
}

/// Whose a key is at the moment.
fn owner(tables: Tables<'_>, mount: &Mount, prefix: &str, key: &str) -> Result<Owner, MasterError> {
    let origin_of = tables.origin_of(mount.id, key)?;
    let owner = named_owner(tables, mount, prefix, key)?;
    Ok(if origin_of.is_some() && owner == Owner::Nobody { Owner::Waited } else { owner })
}

fn named_owner(tables: Tables<'_>, mount: &Mount, prefix: &str, key: &str) -> Result<Owner, MasterError> {
    let Some(path) = key.strip_prefix(prefix) else { return Ok(Owner::Nobody) };
    let (path, is_directory) = path.strip_suffix('/').map_or((path, false), |path| (path, true));
    let (mut inode, mut kind) = (mount.root_inode, Kind::Directory);
    for name in path.split('/') {
        if kind != Kind::Directory {
            return Ok(Owner::Nobody);
        }
        let Some(dentry) = tables.dentry(inode, name.as_bytes())? else { return Ok(Owner::Nobody) };
        (inode, kind) = (dentry.inode, dentry.kind());
    }
    if (kind == Kind::Directory) != is_directory {
        return Ok(Owner::Nobody);
    }
    let is_written = tables.object(inode, key)?.is_some_and(|object| !object.etag.is_empty());
    Ok(if is_written { Owner::Written } else { Owner::Waited })
}
