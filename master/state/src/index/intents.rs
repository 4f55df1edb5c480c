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

use cavern_proto::record::{DeletionRecord, IntentRecord, ObjectRecord};

use crate::error::Result;
use crate::schema;
use crate::transaction::Transaction;

/// Objects of an inode that one command gives up by itself. What is beyond waits for the leader.
const AT_ONCE: usize = 256;

/// How far an inode's change reaches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reach {
    Itself,
    /// A directory's path changed, and with it the keys of all that lies below.
    Below,
}

/// Gives something that is to be seen to before a mount may go its number, which becomes that of the mount's last
/// change.
pub fn count_change(tx: &mut Transaction<'_>, mount_id: u32) {
    tx.counters.change += 1;
    let change = tx.counters.change;
    tx.put(schema::LastChanges, mount_id, &change);
}

/// Notes that the bucket lacks a change of an inode.
pub fn note(tx: &mut Transaction<'_>, inode: u64, mount_id: u32, reach: Reach, now_ns: i64) -> Result {
    let first_change = tx.counters.change + 1;
    note_since(tx, inode, mount_id, reach, (first_change, now_ns), now_ns)
}

/// Notes that the bucket lacks a change that goes back to an earlier one.
pub fn note_since(
    tx: &mut Transaction<'_>,
    inode: u64,
    mount_id: u32,
    reach: Reach,
    (first_change, first_ns): (u64, i64),
    now_ns: i64,
) -> Result {
    count_change(tx, mount_id);
    let new = IntentRecord { mount_id, first_change, first_ns, ..IntentRecord::default() };
    let mut intent = tx.before().intent(inode)?.unwrap_or(new);
    (intent.first_change, intent.first_ns) = (intent.first_change.min(first_change), intent.first_ns.min(first_ns));
    (intent.change, intent.changed_ns) = (tx.counters.change, now_ns);
    if reach == Reach::Below {
        intent.propagates = true;
        intent.propagated_after.clear();
    }
    tx.put(schema::Intents, inode, &intent);
    Ok(())
}

/// Notes what the bucket has, or may have, of an inode under a key.
pub fn put_note(tx: &mut Transaction<'_>, mount_id: u32, inode: u64, key: &str, object: &ObjectRecord) {
    tx.put(schema::Objects, (inode, key), object);
    tx.put(schema::Noted, (mount_id, key), &inode);
}

pub fn drop_note(tx: &mut Transaction<'_>, mount_id: u32, inode: u64, key: &str) -> Result {
    tx.delete(schema::Objects, (inode, key));
    // Another may have the key by now.
    if tx.before().noted(mount_id, key)? == Some(inode) {
        tx.delete(schema::Noted, (mount_id, key));
    }
    Ok(())
}

/// Somebody else has deleted an object of an inode, which has lost the name with it.
pub fn lose_object(tx: &mut Transaction<'_>, inode: u64, mount_id: u32, lost: &str, now_ns: i64) -> Result {
    drop_note(tx, mount_id, inode, lost)?;
    if tx.inode(inode)?.is_none_or(|record| record.unlinked) {
        give_up(tx, inode, mount_id, Some(lost), now_ns)?;
    }
    Ok(())
}

/// Gives up what the bucket has of an inode that has no name any more, but one object: deletions are made of them. Its
/// intent stays as long as there are more.
pub fn give_up(tx: &mut Transaction<'_>, inode: u64, mount_id: u32, but: Option<&str>, now_ns: i64) -> Result {
    let mut objects = tx.before().objects_of(inode).filter(|item| !matches!(item, Ok((key, _)) if but == Some(key)));
    for item in objects.by_ref().take(AT_ONCE) {
        let (key, object) = item?;
        drop_note(tx, mount_id, inode, &key)?;
        let first_change = tx.counters.change + 1;
        put_deletion(tx, mount_id, &key, object.etag, (first_change, now_ns))?;
    }
    match objects.next().transpose()? {
        Some(_) => note(tx, inode, mount_id, Reach::Itself, now_ns)?,
        None => tx.delete(schema::Intents, inode),
    }
    Ok(())
}

/// Forgets an inode of a mount that is gone: its bucket is no longer ours to change.
pub fn forget(tx: &mut Transaction<'_>, inode: u64) -> Result {
    tx.delete(schema::Intents, inode);
    let mut objects = tx.before().objects_of(inode);
    for item in objects.by_ref().take(AT_ONCE) {
        let (key, _) = item?;
        tx.delete(schema::Objects, (inode, key.as_str()));
    }
    if objects.next().is_some() {
        // Rare enough for a mark of the database that all later reads have to mind.
        tx.delete_all(schema::Objects, inode);
    }
    Ok(())
}

/// Has a key deleted; it has been given up since a change, made at that time.
pub fn put_deletion(
    tx: &mut Transaction<'_>,
    mount_id: u32,
    key: &str,
    etag: String,
    (first_change, since_ns): (u64, i64),
) -> Result {
    count_change(tx, mount_id);
    let known = tx.before().deletion(mount_id, key)?;
    let deletion = DeletionRecord {
        change: tx.counters.change,
        since_ns: known.as_ref().map_or(since_ns, |known| known.since_ns.min(since_ns)),
        first_change: known.map_or(first_change, |known| known.first_change.min(first_change)),
        etag,
    };
    tx.put(schema::Deletions, (mount_id, key), &deletion);
    Ok(())
}
