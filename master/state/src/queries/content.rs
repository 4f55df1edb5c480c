//! Whether the bucket has the content of a file.

use cavern_proto::record::InodeRecord;

use crate::error::Result;
use crate::index::origins::{is_written, whole_object};
use crate::tables::Tables;

/// Whether an object holds the content of a file as it is.
pub fn has_content(tables: Tables<'_>, inode: u64, record: &InodeRecord) -> Result<bool> {
    for item in tables.objects_of(inode) {
        let (_, object) = item?;
        if is_written(&object) && object.version == record.version {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Whether the blocks of a file can be dropped, as far as can be seen without trying.
pub fn is_clean(tables: Tables<'_>, inode: u64) -> Result<bool> {
    let Some(record) = tables.inode(inode)?.filter(|record| !record.unlinked) else { return Ok(false) };
    Ok(!tables.is_written_by_others(inode, 0)? && whole_object(tables, inode, &record)?.is_some())
}
