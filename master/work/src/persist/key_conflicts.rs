//! Stores where of the keys `a` and `a/b` there can be one only, as of those that keep objects in a tree of files.
//!
//! Elsewhere a file's new object is written before its old key is given up. Here the old object of one file may be in
//! the way of another's new one, or of its own: after `mv m t; mkdir m; mv t m/m`, and after a file and a directory
//! have been exchanged. So the store's refusal is the sign to look for objects of ours above and below the key, under
//! names that the namespace does not have any more, and to give these up first.
//!
//! - A file is written again from its blocks: each must be at a worker. What only the object has is copied out of the
//!   way before (see [`origins`](super::origins)).
//! - One that can be written first is left to do so. Only a file that has failed as well is given up: the two may wait
//!   for each other. Directories and symlinks have no content that could be lost, and do not wait.

use std::time::Duration;

use cavern_proto::master::Kind;
use cavern_proto::record::Persisted;
use cavern_proto::record::command::Command;
use cavern_state::Tables;
use futures::future::BoxFuture;

use super::deletions::is_named;
use super::intents::PersistOutcome;
use super::retry_tracker::{FailureKind, Item, Priority};
use super::{PAGE, Persistence};
use crate::error::WorkError;
use crate::mounts::OpenMount;

/// What is given up is deleted meanwhile.
const PAUSE: Duration = Duration::from_millis(100);

/// An object that is in the way.
#[derive(Debug)]
struct KeyConflict {
    key: String,
    owner: u64,
    holder: Holder,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Holder {
    /// The object is the only place of some of the owner's content.
    Origin,
    /// A file that is to be written under another key.
    File,
    /// An inode whose objects are made of nothing but the namespace, or that needs none any more.
    Contentless,
}

/// What is in the way of a key.
#[derive(Debug, Default)]
struct KeyConflicts {
    found: Vec<KeyConflict>,
    /// Some are being deleted already.
    are_deleted: bool,
}

impl Persistence {
    /// The store has refused to write an object, perhaps since another is above or below it. Sees to it that what has
    /// lost its name goes.
    ///
    /// Boxed, since what is copied out of the way is written as well.
    pub(super) fn clear_the_way<'a>(
        &'a self,
        mount: &'a OpenMount,
        inode: u64,
        key: &'a str,
        refusal: &'a str,
    ) -> BoxFuture<'a, Result<PersistOutcome, WorkError>> {
        Box::pin(async move {
            Ok(match self.give_up_conflicts(mount, inode, key).await? {
                true => PersistOutcome::Later(PAUSE),
                false => PersistOutcome::Failed(FailureKind::Item, refusal.to_owned()),
            })
        })
    }

    /// Says whether something in the way goes.
    async fn give_up_conflicts(&self, mount: &OpenMount, inode: u64, key: &str) -> Result<bool, WorkError> {
        let (seen, wanted) = (mount.mount.clone(), key.to_owned());
        let prefix = mount.ufs.prefix().to_owned();
        let read = self.lookups.reader.read(move |tables| {
            // A name that has changed meanwhile has another key.
            if !is_named(tables, &seen, &prefix, &wanted)? {
                return Ok(KeyConflicts::default());
            }
            let mut key_conflicts = key_conflicts(tables, seen.id, &prefix, &wanted)?;
            let mut found = Vec::new();
            for key_conflict in key_conflicts.found {
                if !is_named(tables, &seen, &prefix, &key_conflict.key)? {
                    found.push(key_conflict);
                }
            }
            key_conflicts.found = found;
            Ok(key_conflicts)
        });
        let KeyConflicts { found, are_deleted } = read.await?;
        let mut goes = are_deleted;
        for KeyConflict { key, owner, holder } in found {
            goes |= match holder {
                Holder::Origin => {
                    let moved = self.relocate_origin(mount, inode, &key, owner, Priority::Normal).await?;
                    !matches!(moved, PersistOutcome::Failed(..))
                }
                Holder::File => {
                    let has_failed = owner == inode || self.retries.error(&Item::Inode(owner)).is_some();
                    has_failed
                        && self.has_all_blocks(owner, mount.mount.id).await?
                        && self.give_up(mount.mount.id, owner, key).await?
                }
                Holder::Contentless => self.give_up(mount.mount.id, owner, key).await?,
            };
        }
        Ok(goes)
    }

    /// Gives up a key before its inode has another one.
    async fn give_up(&self, mount_id: u32, owner: u64, key: String) -> Result<bool, WorkError> {
        // It is just being written, under a name that it has had.
        let Some(_claim) = self.retries.claim(mount_id, &key) else { return Ok(true) };
        tracing::debug!(inode = owner, mount = mount_id, key, "an object is given up that is in the way of another");
        let persisted = Persisted { inode: owner, change: 0, objects: Vec::new(), gone: vec![key] };
        self.proposer.propose(Command::Persisted(persisted)).await?;
        Ok(true)
    }
}

/// Objects above and below a key.
fn key_conflicts(tables: Tables<'_>, mount_id: u32, prefix: &str, key: &str) -> Result<KeyConflicts, WorkError> {
    let mut key_conflicts = KeyConflicts::default();
    let path = key.strip_prefix(prefix).unwrap_or(key);
    for (at, _) in path.match_indices('/') {
        let above = &key[..key.len() - path.len() + at];
        let owner =
            tables.noted(mount_id, above)?.map_or_else(|| tables.origin_of(mount_id, above), |it| Ok(Some(it)))?;
        match owner {
            Some(owner) => key_conflicts.found.extend(key_conflict(tables, mount_id, above.to_owned(), owner)?),
            None => key_conflicts.are_deleted |= tables.deletion(mount_id, above)?.is_some(),
        }
    }
    if !key.ends_with('/') {
        let below = format!("{key}/");
        for (below, owner) in tables.noted_below(mount_id, &below, PAGE)? {
            key_conflicts.found.extend(key_conflict(tables, mount_id, below, owner)?);
        }
        let first = tables.deletions(Some((mount_id, &below)), 1)?;
        key_conflicts.are_deleted |= tables.deletion(mount_id, &below)?.is_some()
            || first.iter().any(|next| next.mount_id == mount_id && next.key.starts_with(&below));
    }
    Ok(key_conflicts)
}

/// The object of an inode, if that can be written anew, or needs none.
fn key_conflict(tables: Tables<'_>, mount_id: u32, key: String, owner: u64) -> Result<Option<KeyConflict>, WorkError> {
    if let Some(owner) = tables.origin_of(mount_id, &key)? {
        return Ok(Some(KeyConflict { key, owner, holder: Holder::Origin }));
    }
    let Some(record) = tables.inode(owner)? else { return Ok(None) };
    let holder = match record.kind() {
        _ if record.unlinked => Holder::Contentless,
        // It has not been handed the path that it has now.
        _ if tables.intent(owner)?.is_none() => return Ok(None),
        Kind::File => Holder::File,
        _ => Holder::Contentless,
    };
    Ok(Some(KeyConflict { key, owner, holder }))
}
