//! What the buckets of cache-mode mounts keep of modes, owners and times, as far as they were asked.

use cavern_proto::record::KeepAttributes;

use crate::change::Change;
use crate::error::Result;
use crate::outcome::Outcome;
use crate::records::{EntryVersion, is_directory, version};
use crate::transaction::Transaction;

/// Notes what the bucket keeps with an object, unless its inode stands for another version by now.
pub fn keep(tx: &mut Transaction<'_>, keep: KeepAttributes) -> Result<Outcome> {
    let KeepAttributes { inode, etag, size, kept } = keep;
    let Some(mut record) = tx.inode(inode)? else { return Ok(Outcome::Done) };
    let is_current = is_directory(&record) || version(&record) == EntryVersion { etag, size };
    if !is_current || record.kept == kept {
        return Ok(Outcome::Done);
    }
    // What nobody knew, nobody needs to forget.
    if record.kept.is_some() {
        tx.notify(Change::Inode(inode));
    }
    record.kept = kept;
    tx.put_inode(inode, record);
    Ok(Outcome::Done)
}
