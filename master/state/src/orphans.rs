//! Directories that were taken out of the namespace. Their names vanish at once, in one step of whatever size the tree
//! below has; their records are deleted later, in commands of bounded size that the leader proposes.

use std::ops::ControlFlow;

use bytes::Bytes;
use cavern_proto::master::Kind;
use cavern_proto::record::ReapOrphans;

use super::database::Family;
use super::extent::DropProgress;
use super::records::{inode_key, links};
use super::transaction::Transaction;
use super::{intent, posix};
use crate::error::StateError;

/// Records that one step writes before it leaves the rest to the next, whatever belongs to its inodes.
const WRITES: usize = 2000;

/// What one reaping step did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepProgress {
    pub inodes: u64,
    /// Whether anything is left.
    pub more: bool,
    /// Of directories: the one that it was about, where to look for the next. Of a session: the part with which to go
    /// on.
    pub next: u64,
}

/// Queues a directory whose name is gone. Its record loses its parent, so that nothing below it has a place any more.
pub fn add(transaction: &mut Transaction<'_>, directory: u64) -> Result<(), StateError> {
    if let Some(mut record) = transaction.inode(directory)? {
        record.parent = 0;
        transaction.put_inode(directory, record);
    }
    transaction.put_bytes(Family::Orphan, &inode_key(directory), &[]);
    Ok(())
}

/// Deletes at most `limit` inodes of the first orphan from an inode on; directories below it become orphans themselves.
/// Must be the only command of its transaction that touches the orphan: it reads the tables as they were before.
pub fn reap(transaction: &mut Transaction<'_>, step: &ReapOrphans) -> Result<StepProgress, StateError> {
    let tables = transaction.before();
    let Some((orphan, after)) = tables.orphan(step.from)? else { return Ok(StepProgress::default()) };
    let limit = step.limit.max(1) as usize;
    let mut entries = Vec::new();
    let after = (!after.is_empty()).then_some(after.as_slice());
    let mut rest = tables.scan(orphan, after, |name, dentry| {
        if entries.len() == limit {
            return Ok(ControlFlow::Break(()));
        }
        entries.push((Bytes::copy_from_slice(name), dentry));
        Ok(ControlFlow::Continue(()))
    })?;
    let (mut inodes, mut last) = (0, None);
    for (name, dentry) in entries {
        if transaction.writes() >= WRITES {
            rest = Some(());
            break;
        }
        if dentry.kind() == Kind::Directory {
            add(transaction, dentry.inode)?;
        } else {
            let record = transaction.inode(dentry.inode)?;
            let has_several = record.as_ref().is_none_or(|record| links(record) > 1);
            // Unless it went with another of its names.
            if let Some(record) = record {
                if forget(transaction, dentry.inode, record.mount_id)? == DropProgress::Some {
                    rest = Some(());
                    break;
                }
                transaction.delete_inode(dentry.inode);
                inodes += 1;
            }
            if has_several {
                posix::delete_link(transaction, dentry.inode, orphan, &name);
            }
        }
        transaction.delete_dentry(orphan, &name);
        last = Some(name);
    }
    if rest.is_none() {
        if let Some(record) = transaction.inode(orphan)? {
            forget(transaction, orphan, record.mount_id)?;
        }
        transaction.delete_inode(orphan);
        transaction.delete(Family::Orphan, &inode_key(orphan));
        inodes += 1;
    } else if let Some(last) = last {
        // Names that have been deleted cost a scan as much as others, for a time.
        transaction.put_bytes(Family::Orphan, &inode_key(orphan), &last);
    }
    Ok(StepProgress { inodes, more: true, next: orphan })
}

/// What an inode of an fs-mode mount has beside its record goes with it. Its objects stay: a bucket that was detached
/// is not emptied.
fn forget(transaction: &mut Transaction<'_>, inode: u64, mount_id: u32) -> Result<DropProgress, StateError> {
    intent::forget(transaction, inode)?;
    posix::forget_content(transaction, inode, mount_id)
}
