//! Directories that were taken out of the namespace, and inodes without names. Their names vanish at once, in one step
//! of whatever size the tree below has; their records are deleted later, in commands of bounded size that the leader
//! proposes.

use bytes::Bytes;
use cavern_proto::master::Kind;
use cavern_proto::record::ReapOrphans;

use crate::error::Result;
use crate::index::extents::DropProgress;
use crate::index::inodes::delete_link;
use crate::index::{inodes, intents};
use crate::outcome::StepProgress;
use crate::records::links;
use crate::schema;
use crate::transaction::Transaction;

/// Records that one step writes before it leaves the rest to the next, whatever belongs to its inodes.
const WRITES: usize = 2000;

/// Queues a directory whose name is gone. Its record loses its parent, so that nothing below it has a place any more.
pub fn add(tx: &mut Transaction<'_>, directory: u64) -> Result {
    if let Some(mut record) = tx.inode(directory)? {
        record.parent = 0;
        tx.put_inode(directory, record);
    }
    tx.put(schema::Orphans, directory, &Bytes::new());
    Ok(())
}

/// Deletes at most `limit` inodes of the first orphan from an inode on; directories below it become orphans themselves.
/// Must be the only command of its transaction that touches the orphan: it reads the tables as they were before.
pub fn reap(tx: &mut Transaction<'_>, step: &ReapOrphans) -> Result<StepProgress> {
    let tables = tx.before();
    let first = tables.rows_after(schema::Orphans, (), step.from.checked_sub(1)).next().transpose()?;
    let Some(first) = first else { return Ok(StepProgress::default()) };
    let (orphan, after) = first.entry()?;
    let after = (!after.is_empty()).then_some(&*after);
    let (entries, mut is_last) = tables.entries(orphan, after, step.limit.max(1) as usize)?;
    let (mut inodes, mut last) = (0, None);
    for (name, dentry) in entries {
        if tx.writes() >= WRITES {
            is_last = false;
            break;
        }
        if dentry.kind() == Kind::Directory {
            add(tx, dentry.inode)?;
        } else {
            let record = tx.inode(dentry.inode)?;
            let has_several = record.as_ref().is_none_or(|record| links(record) > 1);
            // Unless it went with another of its names.
            if let Some(record) = record {
                if forget(tx, dentry.inode, record.mount_id)? == DropProgress::Some {
                    is_last = false;
                    break;
                }
                tx.delete_inode(dentry.inode);
                inodes += 1;
            }
            if has_several {
                delete_link(tx, dentry.inode, orphan, &name);
            }
        }
        tx.delete_dentry(orphan, &name);
        last = Some(name);
    }
    if is_last {
        if let Some(record) = tx.inode(orphan)? {
            forget(tx, orphan, record.mount_id)?;
        }
        tx.delete_inode(orphan);
        tx.delete(schema::Orphans, orphan);
        inodes += 1;
    } else if let Some(last) = last {
        // Names that have been deleted cost a scan as much as others, for a time.
        tx.put(schema::Orphans, orphan, &last);
    }
    Ok(StepProgress { inodes, more: true, next: orphan })
}

/// What an inode of an fs-mode mount has beside its record goes with it. Its objects stay: a bucket that was detached
/// is not emptied.
fn forget(tx: &mut Transaction<'_>, inode: u64, mount_id: u32) -> Result<DropProgress> {
    intents::forget(tx, inode)?;
    inodes::forget(tx, inode, mount_id)
}

/// Deletes an inode, if it has no name and nobody holds it.
pub fn reap_unlinked(tx: &mut Transaction<'_>, inode: u64) -> Result<StepProgress> {
    let (tables, nothing) = (tx.before(), StepProgress::default());
    let Some(record) = tables.inode(inode)?.filter(|record| record.unlinked) else { return Ok(nothing) };
    // Objects of it are still to be given up while it has an intent.
    if tables.is_open(inode)? || tables.intent(inode)?.is_some() {
        return Ok(nothing);
    }
    if inodes::forget(tx, inode, record.mount_id)? == DropProgress::Some {
        return Ok(StepProgress { more: true, ..nothing });
    }
    tx.delete(schema::Unlinked, inode);
    tx.delete_inode(inode);
    Ok(StepProgress { inodes: 1, ..nothing })
}
