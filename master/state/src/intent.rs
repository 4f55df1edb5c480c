//! What the bucket of an fs-mode mount is to have, against what it has.
//!
//! Every change of an inode leaves an *intent*, in the same transaction: the number of the change, and nothing about
//! what it was. The leader compares the inode with its *object* records when it works the intent off, and confirms by
//! the number: an inode that was changed meanwhile keeps its intent.
//!
//! An object record says that the bucket has, or may have, an object of an inode under a key. It is made before the
//! object is written for the first time, so that no crash can leave an object that nobody knows of. When an inode loses
//! its last name, or an object of it has been written under its new key, what is under the old key becomes a
//! *deletion*: it is carried out only while no name of the namespace has the key, and ends as well when the key's new
//! owner has been written.
//!
//! A directory that is renamed gets one intent, whatever lies below it. It is spread to the entries later, in commands
//! of bounded size. So are the objects of an inode that had many names when it lost the last one: it keeps its intent
//! until all are given up.

use std::collections::HashSet;
use std::ops::ControlFlow;

use cavern_proto::master::Kind;
use cavern_proto::record::{
    BeginObjects, BeginParking, Deleted, DeletionRecord, Freed, GarbageRecord, IntentRecord, ObjectRecord, Persisted,
    SpreadIntent,
};

use super::records::{deletion_key, inode_key, object_key};
use super::tables::change_key;
use super::{Family, Outcome, Transaction, origin};
use crate::error::StateError;

/// Objects of an inode that one command gives up by itself. What is beyond waits for the leader.
const AT_ONCE: usize = 256;

/// How far an inode's change reaches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reach {
    Itself,
    /// A directory's path changed, and with it the keys of all that lies below.
    Below,
}

/// Gives something that is to be seen to before a mount may go its number, which becomes that of the mount's last
/// change.
pub(super) fn count_change(transaction: &mut Transaction<'_>, mount_id: u32) {
    transaction.counters.change += 1;
    let change = transaction.counters.change.to_be_bytes();
    transaction.put_bytes(Family::Meta, &change_key(mount_id), &change);
}

/// Notes that the bucket lacks a change of an inode.
pub(super) fn note(
    transaction: &mut Transaction<'_>,
    inode: u64,
    mount_id: u32,
    reach: Reach,
    now_ns: i64,
) -> Result<(), StateError> {
    let first_change = transaction.counters.change + 1;
    note_since(transaction, inode, mount_id, reach, (first_change, now_ns), now_ns)
}

/// The same for a change that goes back to an earlier one.
fn note_since(
    transaction: &mut Transaction<'_>,
    inode: u64,
    mount_id: u32,
    reach: Reach,
    first: (u64, i64),
    now_ns: i64,
) -> Result<(), StateError> {
    count_change(transaction, mount_id);
    let new = IntentRecord { mount_id, first_change: first.0, first_ns: first.1, ..IntentRecord::default() };
    let mut intent = transaction.before().intent(inode)?.unwrap_or(new);
    (intent.first_change, intent.first_ns) = (intent.first_change.min(first.0), intent.first_ns.min(first.1));
    (intent.change, intent.changed_ns) = (transaction.counters.change, now_ns);
    if reach == Reach::Below {
        intent.spread = true;
        intent.spread_after.clear();
    }
    transaction.put(Family::Intent, &inode_key(inode), &intent);
    Ok(())
}

/// Notes what the bucket has, or may have, of an inode under a key.
pub(super) fn put_note(transaction: &mut Transaction<'_>, mount_id: u32, inode: u64, key: &str, object: &ObjectRecord) {
    transaction.put(Family::Object, &object_key(inode, key), object);
    transaction.put_bytes(Family::Noted, &deletion_key(mount_id, key), &inode.to_be_bytes());
}

fn drop_note(transaction: &mut Transaction<'_>, mount_id: u32, inode: u64, key: &str) -> Result<(), StateError> {
    transaction.delete(Family::Object, &object_key(inode, key));
    // Another may have the key by now.
    if transaction.before().noted(mount_id, key)? == Some(inode) {
        transaction.delete(Family::Noted, &deletion_key(mount_id, key));
    }
    Ok(())
}

/// Somebody else has deleted an object of an inode, which has lost the name with it.
pub(super) fn lose_object(
    transaction: &mut Transaction<'_>,
    inode: u64,
    mount_id: u32,
    lost: &str,
    now_ns: i64,
) -> Result<(), StateError> {
    drop_note(transaction, mount_id, inode, lost)?;
    if transaction.inode(inode)?.is_none_or(|record| record.unlinked) {
        give_up(transaction, inode, mount_id, Some(lost), now_ns)?;
    }
    Ok(())
}

/// Gives up what the bucket has of an inode that has no name any more.
pub(super) fn abandon(
    transaction: &mut Transaction<'_>,
    inode: u64,
    mount_id: u32,
    now_ns: i64,
) -> Result<(), StateError> {
    give_up(transaction, inode, mount_id, None, now_ns)
}

/// Makes deletions of the objects of an inode but one. Its intent stays as long as there are more.
fn give_up(
    transaction: &mut Transaction<'_>,
    inode: u64,
    mount_id: u32,
    but: Option<&str>,
    now_ns: i64,
) -> Result<(), StateError> {
    let mut objects =
        transaction.before().objects_of(inode).filter(|item| !matches!(item, Ok((key, _)) if but == Some(key)));
    for item in objects.by_ref().take(AT_ONCE) {
        let (key, object) = item?;
        drop_note(transaction, mount_id, inode, &key)?;
        let first_change = transaction.counters.change + 1;
        put_deletion(transaction, mount_id, &key, object.etag, (first_change, now_ns))?;
    }
    match objects.next().transpose()? {
        Some(_) => note(transaction, inode, mount_id, Reach::Itself, now_ns)?,
        None => transaction.delete(Family::Intent, &inode_key(inode)),
    }
    Ok(())
}

/// Forgets an inode of a mount that is gone: its bucket is no longer ours to change.
pub(super) fn forget(transaction: &mut Transaction<'_>, inode: u64) -> Result<(), StateError> {
    transaction.delete(Family::Intent, &inode_key(inode));
    let mut objects = transaction.before().objects_of(inode);
    for item in objects.by_ref().take(AT_ONCE) {
        transaction.delete(Family::Object, &object_key(inode, &item?.0));
    }
    if objects.next().is_some() {
        // Rare enough for a mark of the database that all later reads have to mind.
        transaction.delete_range(Family::Object, &inode_key(inode), &inode_key(inode.saturating_add(1)));
    }
    Ok(())
}

/// Has a key deleted; it has been given up since a change, made at that time.
fn put_deletion(
    transaction: &mut Transaction<'_>,
    mount_id: u32,
    key: &str,
    etag: String,
    (first_change, since_ns): (u64, i64),
) -> Result<(), StateError> {
    count_change(transaction, mount_id);
    let known = transaction.before().deletion(mount_id, key)?;
    let deletion = DeletionRecord {
        change: transaction.counters.change,
        since_ns: known.as_ref().map_or(since_ns, |known| known.since_ns.min(since_ns)),
        first_change: known.map_or(first_change, |known| known.first_change.min(first_change)),
        etag,
    };
    transaction.put(Family::Deletion, &deletion_key(mount_id, key), &deletion);
    Ok(())
}

/// Hands the change of a directory's path on to what lies in it.
pub(super) fn spread(transaction: &mut Transaction<'_>, spread: &SpreadIntent) -> Result<Outcome, StateError> {
    let tables = transaction.before();
    let Some(mut intent) = tables.intent(spread.inode)?.filter(|intent| intent.spread) else {
        return Ok(Outcome::Done);
    };
    let limit = spread.limit.max(1) as usize;
    let mut entries = Vec::new();
    let after = (!intent.spread_after.is_empty()).then_some(&*intent.spread_after);
    let more = tables.scan(spread.inode, after, |name, dentry| {
        if entries.len() == limit {
            return Ok(ControlFlow::Break(()));
        }
        entries.push((name.to_vec(), dentry));
        Ok(ControlFlow::Continue(()))
    })?;
    match (more, entries.last()) {
        (Some(()), Some((name, _))) => intent.spread_after = name.clone().into(),
        _ => {
            intent.spread = false;
            intent.spread_after.clear();
        }
    }
    for (_, dentry) in entries {
        let reach = if dentry.kind() == Kind::Directory { Reach::Below } else { Reach::Itself };
        let first = (intent.first_change, intent.first_ns);
        note_since(transaction, dentry.inode, intent.mount_id, reach, first, intent.changed_ns)?;
    }
    transaction.put(Family::Intent, &inode_key(spread.inode), &intent);
    Ok(Outcome::Done)
}

/// Notes that objects of these keys may be there from now on. What another inode has noted under such a key may be
/// written over at any time: should that inode get the name once more before it has given the object up, it is written
/// once more. [`Outcome::OutOfDate`] when such an object has become its inode's origin since the asker looked.
pub(super) fn begin(transaction: &mut Transaction<'_>, begin: &BeginObjects) -> Result<Outcome, StateError> {
    let named = transaction.inode(begin.inode)?.filter(|record| !record.unlinked);
    if let Some(record) = &named {
        let (tables, inode) = (transaction.before(), begin.inode);
        for key in &begin.keys {
            if tables.origin_of(record.mount_id, key)?.is_some_and(|owner| owner != inode) {
                return Ok(Outcome::OutOfDate);
            }
        }
        for key in &begin.keys {
            let noted = tables.noted(record.mount_id, key)?;
            if let Some(other) = noted.filter(|other| *other != inode)
                && tables.object(other, key)?.is_some()
            {
                transaction.put(Family::Object, &object_key(other, key), &ObjectRecord::default());
            }
            if noted != Some(inode) || tables.object(inode, key)?.is_none() {
                put_note(transaction, record.mount_id, inode, key, &ObjectRecord::default());
            }
        }
    }
    Ok(Outcome::Began { is_named: named.is_some() })
}

/// Takes down what was written to the bucket for an inode.
pub(super) fn persisted(transaction: &mut Transaction<'_>, persisted: Persisted) -> Result<Outcome, StateError> {
    let Persisted { inode, change, objects, gone } = persisted;
    let tables = transaction.before();
    let record = transaction.inode(inode)?;
    let mount = record.as_ref().map_or(Ok(None), |record| tables.mount(record.mount_id))?;
    let (Some(record), Some(_)) = (record, mount) else {
        forget(transaction, inode)?;
        return Ok(Outcome::Done);
    };
    let mount_id = record.mount_id;
    let intent = tables.intent(inode)?;
    let since = intent.as_ref().map_or((change, record.ctime_ns), |intent| (intent.first_change, intent.first_ns));
    // One without a name has been given up with all of its objects; an origin among them stays until nobody needs it.
    let lost = if record.unlinked { HashSet::new() } else { gone.iter().map(String::as_str).collect() };
    let kept = match &record.origin {
        Some(origin) if !origin::follow(transaction, inode, &record, &objects, &lost)? => origin.key.clone(),
        _ => String::new(),
    };
    for written in objects {
        let object = written.object.unwrap_or_default();
        if record.unlinked {
            put_deletion(transaction, mount_id, &written.key, object.etag, since)?;
        } else {
            put_note(transaction, mount_id, inode, &written.key, &object);
            transaction.delete(Family::Deletion, &deletion_key(mount_id, &written.key));
        }
    }
    for key in gone.into_iter().filter(|key| *key != kept) {
        if let Some(object) = tables.object(inode, &key)? {
            drop_note(transaction, mount_id, inode, &key)?;
            put_deletion(transaction, mount_id, &key, object.etag, since)?;
        }
    }
    match intent {
        Some(intent) if intent.change <= change => transaction.delete(Family::Intent, &inode_key(inode)),
        Some(mut intent) if intent.first_change <= change => {
            // What came after it is what the bucket lacks now.
            (intent.first_change, intent.first_ns) = (change + 1, intent.changed_ns);
            transaction.put(Family::Intent, &inode_key(inode), &intent);
        }
        Some(_) | None => {}
    }
    Ok(Outcome::Done)
}

/// Notes an object that belongs to no inode: it is deleted as soon as it is nobody's origin.
pub(super) fn begin_parking(transaction: &mut Transaction<'_>, begin: &BeginParking) -> Result<Outcome, StateError> {
    let since = (transaction.counters.change + 1, begin.now_ns);
    put_deletion(transaction, begin.mount_id, &begin.key, String::new(), since)?;
    Ok(Outcome::Done)
}

/// Ends a deletion, unless the key has been given up once more since.
pub(super) fn deleted(transaction: &mut Transaction<'_>, deleted: &Deleted) -> Result<Outcome, StateError> {
    let known = transaction.before().deletion(deleted.mount_id, &deleted.key)?;
    if known.is_some_and(|known| known.change == deleted.change) {
        transaction.delete(Family::Deletion, &deletion_key(deleted.mount_id, &deleted.key));
    }
    Ok(Outcome::Done)
}

/// Strikes workers off a garbage record; the last one ends it.
pub(super) fn freed(transaction: &mut Transaction<'_>, freed: &Freed) -> Result<Outcome, StateError> {
    let key = freed.number.to_be_bytes();
    let garbage = transaction.before().garbage_record(freed.number)?.filter(|garbage| !garbage.is_cut);
    let Some(GarbageRecord { inode, mount_id, mut extents, .. }) = garbage else { return Ok(Outcome::Done) };
    for extent in &mut extents {
        extent.workers.retain(|worker| !freed.workers.contains(worker));
    }
    extents.retain(|extent| !extent.workers.is_empty());
    if extents.is_empty() {
        transaction.delete(Family::Garbage, &key);
    } else {
        transaction.put(Family::Garbage, &key, &GarbageRecord { inode, mount_id, extents, is_cut: false });
    }
    Ok(Outcome::Done)
}
