//! Whether somebody may do something: with an inode, beside locks, and with the blocks of a file.

use cavern_posix::mode::{EXECUTE, READ, WRITE};
use cavern_proto::locks::conflicts;
use cavern_proto::master::{Lock, LockKind, Mount, User};
use cavern_proto::record::{InodeRecord, OpenRight};

use crate::error::Result;
use crate::index::origins::{is_written, whole_object};
use crate::records::has_one_name;
use crate::tables::Tables;

/// Whether a user, as he counts in a mount, may do all of this with an inode of it, or any of several. What is no
/// longer there is for others to refuse.
pub fn may_access(tables: Tables<'_>, (mount, user): (&Mount, &User), inode: u64, any_of: &[u32]) -> Result<bool> {
    let Some(record) = tables.inode(inode)?.filter(|_| !user.is_root()) else { return Ok(true) };
    let first = if inode == mount.root_inode || !has_one_name(&record) { 0 } else { record.parent };
    for item in tables.ancestors(first) {
        let (at, above) = item?;
        if above.mount_id != mount.id {
            break;
        }
        // Of a directory, to execute it is to search it.
        if !tables.permits(user, at, &above, EXECUTE)? {
            return Ok(false);
        }
        if at == mount.root_inode {
            break;
        }
    }
    for wanted in any_of {
        if tables.permits(user, inode, &record, *wanted)? {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Whether a user, as he counts in a mount, may be told where the bytes of a file are: whoever may read, run or write
/// it, its owner, and those whose session writes to it.
pub fn may_have_layout(tables: Tables<'_>, (mount, user): (&Mount, &User), inode: u64, session: u64) -> Result<bool> {
    if tables.open_ref(inode, session)? == Some(OpenRight::Commit) {
        return Ok(true);
    }
    if tables.inode(inode)?.is_some_and(|record| record.uid == user.uid) {
        return may_access(tables, (mount, user), inode, &[0]);
    }
    may_access(tables, (mount, user), inode, &[READ, EXECUTE, WRITE])
}

/// The first lock that stands in the way of another.
pub fn blocking_lock(tables: Tables<'_>, inode: u64, kind: LockKind, want: &Lock) -> Result<Option<Lock>> {
    let record = tables.locks(inode, kind)?;
    Ok(conflicts(&record.held, want).next().copied())
}

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

/// Key and version of an object that has a file as it is, while nobody may be writing to that: the blocks of the file
/// can be dropped, as far as can be seen without trying.
pub fn clean_object(tables: Tables<'_>, inode: u64) -> Result<Option<(String, String)>> {
    let Some(record) = tables.inode(inode)?.filter(|record| !record.unlinked) else { return Ok(None) };
    if tables.is_written_by_others(inode, 0)? {
        return Ok(None);
    }
    Ok(whole_object(tables, inode, &record)?.map(|(key, object)| (key, object.etag)))
}
