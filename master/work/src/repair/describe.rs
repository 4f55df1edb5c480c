//! Files as answers list them.

use cavern_proto::master::UnavailableFile;
use cavern_state::Tables;

use crate::error::WorkError;

/// A file as it is listed; `None` when it is gone, or has no name any more.
pub(crate) fn describe(tables: Tables<'_>, inode: u64) -> Result<Option<UnavailableFile>, WorkError> {
    let Some(record) = tables.inode(inode)? else { return Ok(None) };
    let Some((parent, name)) = tables.names(inode, &record).next().transpose()? else { return Ok(None) };
    let Some(directory) = tables.directory(parent)? else { return Ok(None) };
    let mount = tables.mount(directory.mount_id)?.map_or_else(String::new, |mount| mount.path);
    let below = directory.path.iter().chain([&name]).map(|name| String::from_utf8_lossy(name));
    let path = below.fold(mount.trim_end_matches('/').to_owned(), |path, name| format!("{path}/{name}"));
    Ok(Some(UnavailableFile { inode, path, size: record.size }))
}
