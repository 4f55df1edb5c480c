//! Files as answers list them.

use cavern_proto::ROOT_INODE;
use cavern_proto::master::UnavailableFile;
use cavern_state::Tables;

use crate::error::WorkError;

/// A file as it is listed; `None` when it is gone, or has no name any more.
pub(crate) fn describe(tables: Tables<'_>, inode: u64) -> Result<Option<UnavailableFile>, WorkError> {
    let Some(record) = tables.inode(inode)? else { return Ok(None) };
    let Some((parent, name)) = tables.names(inode, &record).next().transpose()? else { return Ok(None) };
    let Some(directory) = tables.path_below(parent, ROOT_INODE)? else { return Ok(None) };
    let path = format!("/{}{}", String::from_utf8_lossy(&directory), String::from_utf8_lossy(&name));
    Ok(Some(UnavailableFile { inode, path, size: record.size }))
}
