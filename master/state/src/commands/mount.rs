//! The mount table. Directories above a mount point are made when they are missing and go with the last mount below
//! them; they belong to no mount, have mode 0755 and owner 0:0.

use bytes::Bytes;
use cavern_posix::xattr::UNLISTED;
use cavern_proto::ROOT_INODE;
use cavern_proto::master::{Existing, Kind, Mount, WriteType};
use cavern_proto::record::{
    AttachMount, DentryRecord, RemoveMount, SealSecrets, SealedOptions, SecretsRecord, UpdateMount,
};

use super::namespace::detach;
use super::{existing, orphans};
use crate::change::RulesChange;
use crate::error::{Result, StateError};
use crate::index::delegations;
use crate::outcome::Outcome;
use crate::records::directory_record;
use crate::schema;
use crate::transaction::Transaction;

/// Directories of a mount that are held still when it goes: what is in them goes with it.
const DELEGATIONS_MAX: usize = 1000;

/// Records a mount under a new id and makes its root directory. The path is absolute and normalized (the proposer has
/// seen to it).
fn mount(tx: &mut Transaction<'_>, mut mount: Mount) -> Result<Outcome> {
    let names: Vec<&str> = mount.path.split('/').filter(|name| !name.is_empty()).collect();
    let Some((last, above)) = names.split_last() else {
        return Outcome::refused("the root of the namespace cannot be a mount: choose a path such as /data");
    };
    let mut parent = ROOT_INODE;
    for (depth, name) in above.iter().enumerate() {
        parent = match tx.dentry(parent, name.as_bytes())? {
            None => make_directory(tx, parent, name, 0, mount.created_ns),
            Some(dentry) => match mount_of(tx, dentry.inode)? {
                0 => dentry.inode,
                _ => {
                    let outer = names[..=depth].join("/");
                    return Outcome::refused(format!(
                        "{} lies inside the mount /{outer}: mounts cannot be nested, choose a path outside it",
                        mount.path
                    ));
                }
            },
        };
    }
    let known = tx.dentry(parent, last.as_bytes())?;
    if let Some(dentry) = known {
        match mount_of(tx, dentry.inode)? {
            0 if !tx.before().is_empty(dentry.inode)? => {
                return Outcome::refused(format!(
                    "{} is a directory with mounts below it: choose another path, or unmount those first",
                    mount.path
                ));
            }
            0 => detach(tx, parent, last.as_bytes(), dentry)?,
            id => {
                let existing = tx.before().mount(id)?;
                let existing = existing.ok_or_else(|| StateError::Corrupt(format!("mount {id}, which is missing,")))?;
                return Ok(Outcome::MountExists(Box::new(existing)));
            }
        }
    }
    tx.counters.mount += 1;
    mount.id = tx.counters.mount;
    (mount.frozen_below, mount.frozen_inodes, mount.settled_below) = (0, 0, 0);
    mount.probed_xattrs = if mount.existing() == Existing::Recovered { UNLISTED } else { 0 };
    mount.root_inode = make_directory(tx, parent, last, mount.id, mount.created_ns);
    if mount.write_type() == WriteType::FsMode
        && let Some(mut root) = tx.inode(mount.root_inode)?
    {
        root.btime_ns = Some(mount.created_ns);
        if mount.existing() == Existing::None {
            root.listed_ns = mount.created_ns.max(1);
        }
        tx.put_inode(mount.root_inode, root);
        if mount.existing() != Existing::None {
            existing::begin(tx, &mount);
        }
    }
    if !mount.clients.is_empty() {
        let (mount_id, now) = (mount.id, mount.clients.clone());
        tx.changes.rules.push(RulesChange { mount_id, before: None, now });
    }
    tx.put(schema::Mounts, mount.id, &mount);
    tx.mounts_changed();
    Ok(Outcome::Mount(Box::new(mount)))
}

/// Records a mount, unless the mount table is another than the one that it was compared with.
pub fn attach(tx: &mut Transaction<'_>, attach: AttachMount) -> Result<Outcome> {
    if tx.counters.mounts_epoch != attach.mounts_epoch {
        return Ok(Outcome::OutOfDate);
    }
    mount(tx, attach.mount.unwrap_or_default())
}

/// Gives a mount other options, unless the mount table is another by now. What it is, and what it is of, stays.
pub fn update(tx: &mut Transaction<'_>, update: UpdateMount) -> Result<Outcome> {
    let wanted = update.mount.unwrap_or_default();
    if tx.counters.mounts_epoch != update.mounts_epoch {
        return Ok(Outcome::OutOfDate);
    }
    let Some(mut mount) = tx.before().mount(wanted.id)? else { return Ok(Outcome::NoSuchMount) };
    mount.options = wanted.options;
    (mount.consistency, mount.metadata_ttl_ms) = (wanted.consistency, wanted.metadata_ttl_ms);
    mount.ttl_ms = wanted.ttl_ms;
    if mount.clients != wanted.clients {
        // What clients hold, and have answered for, comes before it is no longer theirs to change.
        if tx.counters.delegations > 0 && !tx.before().delegations_in(mount.id, 1)?.is_empty() {
            return Ok(Outcome::OutOfDate);
        }
        let before = Some(std::mem::replace(&mut mount.clients, wanted.clients));
        tx.changes.rules.push(RulesChange { mount_id: mount.id, before, now: mount.clients.clone() });
        show_anew(tx, mount.root_inode)?;
    }
    tx.put(schema::Mounts, mount.id, &mount);
    tx.mounts_changed();
    Ok(Outcome::Mount(Box::new(mount)))
}

/// Other blocks of a mount are frozen, or clients go by that.
pub(super) fn put_frozen(tx: &mut Transaction<'_>, mount: &Mount) {
    tx.put(schema::Mounts, mount.id, mount);
    tx.mounts_changed();
}

/// Has those look again who know the name of a mount, or that there is none.
fn show_anew(tx: &mut Transaction<'_>, root: u64) -> Result {
    let Some(record) = tx.inode(root)? else { return Ok(()) };
    tx.name_changed(record.parent, &record.name, root, root);
    Ok(())
}

/// Has the options of all mounts sealed with another key, unless the mount table or the key is another by now.
pub fn seal(tx: &mut Transaction<'_>, seal: SealSecrets) -> Result<Outcome> {
    let SealSecrets { mounts_epoch, generation, key_id, sealed } = seal;
    let is_next = tx.before().secrets()?.generation + 1 == generation;
    if tx.counters.mounts_epoch != mounts_epoch || !is_next {
        return Ok(Outcome::OutOfDate);
    }
    for SealedOptions { mount_id, options } in sealed {
        let Some(mount) = tx.before().mount(mount_id)? else { continue };
        tx.put(schema::Mounts, mount_id, &Mount { options, ..mount });
    }
    tx.put(schema::Secrets, (), &SecretsRecord { generation, key_id });
    tx.mounts_changed();
    Ok(Outcome::Done)
}

/// Removes a mount, if nothing was changed in it since the proposer looked whether its bucket lacks something, and
/// there is no view of it, nor in its bucket.
pub fn remove(tx: &mut Transaction<'_>, remove: &RemoveMount) -> Result<Outcome> {
    let tables = tx.before();
    let Some(mount) = tables.mount(remove.mount_id)? else { return Ok(Outcome::NoSuchMount) };
    let last_change = tables.get(schema::LastChanges, mount.id)?.unwrap_or_default();
    if mount.write_type() == WriteType::FsMode && !remove.discard && last_change > remove.change {
        return Ok(Outcome::OutOfDate);
    }
    if tables.views()?.iter().any(|view| [view.mount_id, view.store_mount_id].contains(&mount.id)) {
        return Ok(Outcome::OutOfDate);
    }
    if tx.counters.delegations > 0 {
        let held = tables.delegations_in(mount.id, DELEGATIONS_MAX + 1)?;
        // They have been made since the proposer had all of them recalled.
        if !held.is_empty() && !remove.discard || held.len() > DELEGATIONS_MAX {
            return Ok(Outcome::OutOfDate);
        }
        delegations::give_back(tx, &held)?;
    }
    take_out(tx, mount)
}

/// Takes a mount's directory out of the namespace at once, what is below it by the reaper, and the directories above it
/// that hold nothing else.
fn take_out(tx: &mut Transaction<'_>, mount: Mount) -> Result<Outcome> {
    tx.delete(schema::Mounts, mount.id);
    tx.delete(schema::LastChanges, mount.id);
    tx.delete(schema::Indexes, mount.id);
    tx.delete_all(schema::IndexRanges, mount.id);
    existing::forget(tx, mount.id);
    let mut at = mount.root_inode;
    let mut above_mount = false;
    while at != ROOT_INODE {
        let Some(record) = tx.inode(at)? else { break };
        if above_mount && has_entries(tx, at)? {
            break;
        }
        let (parent, name) = (record.parent, record.name);
        tx.delete_dentry(parent, &name);
        orphans::add(tx, at)?;
        tx.name_changed(parent, &name, at, 0);
        at = parent;
        above_mount = true;
    }
    tx.mounts_changed();
    Ok(Outcome::Mount(Box::new(mount)))
}

/// Whether a directory above mounts has an entry that this transaction has not removed.
fn has_entries(tx: &Transaction<'_>, directory: u64) -> Result<bool> {
    for (name, _) in tx.before().entries(directory, None, usize::MAX)?.0 {
        if tx.dentry(directory, &name)?.is_some() {
            return Ok(true);
        }
    }
    Ok(false)
}

fn mount_of(tx: &Transaction<'_>, inode: u64) -> Result<u32> {
    Ok(tx.inode(inode)?.map_or(0, |record| record.mount_id))
}

fn make_directory(tx: &mut Transaction<'_>, parent: u64, name: &str, mount_id: u32, now_ns: i64) -> u64 {
    let name = Bytes::copy_from_slice(name.as_bytes());
    let inode = tx.create_inode(directory_record(parent, name.clone(), mount_id, now_ns));
    tx.put_dentry(parent, &name, DentryRecord { inode, kind: Kind::Directory as i32 });
    tx.name_changed(parent, &name, 0, inode);
    inode
}
