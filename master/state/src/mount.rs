//! The mount table. Directories above a mount point are made when they are missing and go with the last mount below
//! them; they belong to no mount, have mode 0755 and owner 0:0.

use bytes::Bytes;
use cavern_proto::ROOT_INODE;
use cavern_proto::master::{Existing, Kind, Mount, WriteType};
use cavern_proto::record::{
    AttachMount, DentryRecord, RemoveMount, SealSecrets, SealedOptions, SecretsRecord, UpdateMount,
};

use super::database::Family;
use super::namespace::{detach, forget_index};
use super::records::directory_record;
use super::tables::{SECRETS_KEY, change_key};
use super::transaction::{Change, RulesChange, Transaction};
use super::{Outcome, existing, held, orphans};
use crate::error::StateError;

/// Directories of a mount that are held still when it goes: what is in them goes with it.
const HELD_MAX: usize = 1000;

/// Records a mount under a new id and makes its root directory. The path is absolute and normalized (the proposer has
/// seen to it).
fn mount(transaction: &mut Transaction<'_>, mut mount: Mount) -> Result<Outcome, StateError> {
    let names: Vec<&str> = mount.path.split('/').filter(|name| !name.is_empty()).collect();
    let Some((last, above)) = names.split_last() else {
        return Ok(Outcome::Refused("the root of the namespace cannot be a mount: choose a path such as /data".into()));
    };
    let mut parent = ROOT_INODE;
    for (depth, name) in above.iter().enumerate() {
        parent = match transaction.dentry(parent, name.as_bytes())? {
            None => make_directory(transaction, parent, name, 0, mount.created_ns),
            Some(dentry) => match mount_of(transaction, dentry.inode)? {
                0 => dentry.inode,
                _ => {
                    let outer = names[..=depth].join("/");
                    return Ok(Outcome::Refused(format!(
                        "{} lies inside the mount /{outer}: mounts cannot be nested, choose a path outside it",
                        mount.path
                    )));
                }
            },
        };
    }
    let known = transaction.dentry(parent, last.as_bytes())?;
    if let Some(dentry) = known {
        match mount_of(transaction, dentry.inode)? {
            0 if !transaction.before().is_empty(dentry.inode)? => {
                return Ok(Outcome::Refused(format!(
                    "{} is a directory with mounts below it: choose another path, or unmount those first",
                    mount.path
                )));
            }
            0 => detach(transaction, parent, last.as_bytes(), dentry)?,
            id => {
                let existing = transaction.before().mount(id)?;
                let existing = existing.ok_or_else(|| StateError::Corrupt(format!("mount {id}, which is missing,")))?;
                return Ok(Outcome::MountExists(Box::new(existing)));
            }
        }
    }
    transaction.counters.mount += 1;
    mount.id = transaction.counters.mount;
    mount.root_inode = make_directory(transaction, parent, last, mount.id, mount.created_ns);
    if mount.write_type() == WriteType::FsMode
        && let Some(mut root) = transaction.inode(mount.root_inode)?
    {
        root.btime_ns = Some(mount.created_ns);
        if mount.existing() == Existing::None {
            root.listed_ns = mount.created_ns.max(1);
        }
        transaction.put_inode(mount.root_inode, root);
        if mount.existing() != Existing::None {
            existing::begin(transaction, &mount);
        }
    }
    if !mount.clients.is_empty() {
        let (mount_id, now) = (mount.id, mount.clients.clone());
        transaction.rules.push(RulesChange { mount_id, before: None, now });
    }
    transaction.put(Family::Mount, &mount.id.to_be_bytes(), &mount);
    changed(transaction);
    Ok(Outcome::Mount(Box::new(mount)))
}

/// Records a mount, unless the mount table is another than the one that it was compared with.
pub fn attach(transaction: &mut Transaction<'_>, attach: AttachMount) -> Result<Outcome, StateError> {
    if transaction.counters.mounts_epoch != attach.mounts_epoch {
        return Ok(Outcome::OutOfDate);
    }
    mount(transaction, attach.mount.unwrap_or_default())
}

/// Gives a mount other options, unless the mount table is another by now. What it is, and what it is of, stays.
pub fn update(transaction: &mut Transaction<'_>, update: UpdateMount) -> Result<Outcome, StateError> {
    let wanted = update.mount.unwrap_or_default();
    if transaction.counters.mounts_epoch != update.mounts_epoch {
        return Ok(Outcome::OutOfDate);
    }
    let Some(mut mount) = transaction.before().mount(wanted.id)? else { return Ok(Outcome::NoSuchMount) };
    mount.options = wanted.options;
    (mount.consistency, mount.metadata_ttl_ms) = (wanted.consistency, wanted.metadata_ttl_ms);
    mount.ttl_ms = wanted.ttl_ms;
    if mount.clients != wanted.clients {
        // What clients hold, and have answered for, comes before it is no longer theirs to change.
        if transaction.counters.held > 0 && !transaction.before().held_in(mount.id, 1)?.is_empty() {
            return Ok(Outcome::OutOfDate);
        }
        let before = Some(std::mem::replace(&mut mount.clients, wanted.clients));
        transaction.rules.push(RulesChange { mount_id: mount.id, before, now: mount.clients.clone() });
        show_anew(transaction, mount.root_inode)?;
    }
    transaction.put(Family::Mount, &mount.id.to_be_bytes(), &mount);
    changed(transaction);
    Ok(Outcome::Mount(Box::new(mount)))
}

/// Has those look again who know the name of a mount, or that there is none.
fn show_anew(transaction: &mut Transaction<'_>, root: u64) -> Result<(), StateError> {
    let Some(record) = transaction.inode(root)? else { return Ok(()) };
    let (parent, name) = (record.parent, record.name);
    transaction.changes.push(Change::Entry {
        parent,
        name,
        old_inode: root,
        new_inode: root,
        first_fill: false,
        mount_id: 0,
    });
    Ok(())
}

/// Has the options of all mounts sealed with another key, unless the mount table or the key is another by now.
pub fn seal(transaction: &mut Transaction<'_>, seal: SealSecrets) -> Result<Outcome, StateError> {
    let SealSecrets { mounts_epoch, generation, key_id, sealed } = seal;
    let is_next = transaction.before().secrets()?.generation + 1 == generation;
    if transaction.counters.mounts_epoch != mounts_epoch || !is_next {
        return Ok(Outcome::OutOfDate);
    }
    for SealedOptions { mount_id, options } in sealed {
        let Some(mount) = transaction.before().mount(mount_id)? else { continue };
        transaction.put(Family::Mount, &mount_id.to_be_bytes(), &Mount { options, ..mount });
    }
    transaction.put(Family::Meta, SECRETS_KEY, &SecretsRecord { generation, key_id });
    changed(transaction);
    Ok(Outcome::Done)
}

/// Removes a mount, if nothing was changed in it since the proposer looked whether its bucket lacks something.
pub fn remove(transaction: &mut Transaction<'_>, remove: &RemoveMount) -> Result<Outcome, StateError> {
    let tables = transaction.before();
    let Some(mount) = tables.mount(remove.mount_id)? else { return Ok(Outcome::NoSuchMount) };
    let is_truth = mount.write_type() == WriteType::FsMode;
    if is_truth && !remove.discard && tables.last_change(mount.id)? > remove.change {
        return Ok(Outcome::OutOfDate);
    }
    if transaction.counters.held > 0 {
        let held = tables.held_in(mount.id, HELD_MAX + 1)?;
        // They have been made since the proposer had all of them recalled.
        if !held.is_empty() && !remove.discard || held.len() > HELD_MAX {
            return Ok(Outcome::OutOfDate);
        }
        held::let_go(transaction, &held)?;
    }
    take_out(transaction, mount)
}

/// Takes a mount's directory out of the namespace at once, what is below it by the reaper, and the directories above it
/// that hold nothing else.
fn take_out(transaction: &mut Transaction<'_>, mount: Mount) -> Result<Outcome, StateError> {
    transaction.delete(Family::Mount, &mount.id.to_be_bytes());
    transaction.delete(Family::Meta, &change_key(mount.id));
    forget_index(transaction, mount.id);
    existing::forget(transaction, mount.id);
    let mut at = mount.root_inode;
    let mut above_mount = false;
    while at != ROOT_INODE {
        let Some(record) = transaction.inode(at)? else { break };
        if above_mount && has_entries(transaction, at)? {
            break;
        }
        let (parent, name) = (record.parent, record.name);
        transaction.delete_dentry(parent, &name);
        orphans::add(transaction, at)?;
        transaction.changes.push(Change::Entry {
            parent,
            name,
            old_inode: at,
            new_inode: 0,
            first_fill: false,
            mount_id: 0,
        });
        at = parent;
        above_mount = true;
    }
    changed(transaction);
    Ok(Outcome::Mount(Box::new(mount)))
}

/// Whether a directory above mounts has an entry that this transaction has not removed.
fn has_entries(transaction: &mut Transaction<'_>, directory: u64) -> Result<bool, StateError> {
    let mut names = Vec::new();
    transaction.before().scan::<()>(directory, None, |name, _| {
        names.push(name.to_vec());
        Ok(std::ops::ControlFlow::Continue(()))
    })?;
    for name in names {
        if transaction.dentry(directory, &name)?.is_some() {
            return Ok(true);
        }
    }
    Ok(false)
}

fn mount_of(transaction: &mut Transaction<'_>, inode: u64) -> Result<u32, StateError> {
    Ok(transaction.inode(inode)?.map_or(0, |record| record.mount_id))
}

fn make_directory(transaction: &mut Transaction<'_>, parent: u64, name: &str, mount_id: u32, now_ns: i64) -> u64 {
    let name = Bytes::copy_from_slice(name.as_bytes());
    let inode = transaction.create_inode(directory_record(parent, name.clone(), mount_id, now_ns));
    transaction.put_dentry(parent, &name, DentryRecord { inode, kind: Kind::Directory as i32 });
    transaction.changes.push(Change::Entry {
        parent,
        name,
        old_inode: 0,
        new_inode: inode,
        first_fill: false,
        mount_id: 0,
    });
    inode
}

fn changed(transaction: &mut Transaction<'_>) {
    transaction.counters.mounts_epoch += 1;
    transaction.changes.push(Change::Mounts(transaction.counters.mounts_epoch));
}
