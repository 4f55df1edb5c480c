//! What the buckets of cache-mode mounts keep of modes, owners and times, as far as they were asked.

use cavern_proto::record::KeepAttributes;

use super::records::{EntryVersion, is_directory, version};
use super::transaction::{Change, Transaction};
use crate::Outcome;
use crate::error::StateError;

/// Notes what the bucket keeps with an object, unless its inode stands for another version by now.
pub fn keep(transaction: &mut Transaction<'_>, keep: KeepAttributes) -> Result<Outcome, StateError> {
    let KeepAttributes { inode, etag, size, kept } = keep;
    let Some(mut record) = transaction.inode(inode)? else { return Ok(Outcome::Done) };
    let is_current = is_directory(&record) || version(&record) == EntryVersion { etag, size };
    if !is_current || record.kept == kept {
        return Ok(Outcome::Done);
    }
    // What nobody knew, nobody needs to forget.
    if record.kept.is_some() {
        transaction.changes.push(Change::Inode(inode));
    }
    record.kept = kept;
    transaction.put_inode(inode, record);
    Ok(Outcome::Done)
}
