//! Which of the attributes that programs ask each file for ([`cavern_posix::xattr::probed`]) inodes of a mount may
//! have. Clients are told in the mount table, and say that no file has the others. What is noted stays: nobody counts.

use cavern_posix::xattr::UNLISTED;
use cavern_proto::master::Mount;

use crate::error::Result;
use crate::schema;
use crate::transaction::Transaction;

/// An inode gets attributes with these bits.
pub fn note(tx: &mut Transaction<'_>, mount_id: u32, probed: u32) -> Result {
    update(tx, mount_id, |known| known | probed)
}

/// The bucket has said of all inodes of a recovered mount what they have.
pub fn all_listed(tx: &mut Transaction<'_>, mount_id: u32) -> Result {
    update(tx, mount_id, |known| known & !UNLISTED)
}

fn update(tx: &mut Transaction<'_>, mount_id: u32, after: impl FnOnce(u32) -> u32) -> Result {
    let recorded = tx.now().mount(mount_id)?;
    let Some(mount) = recorded else { return Ok(()) };
    let probed_xattrs = after(mount.probed_xattrs);
    if probed_xattrs != mount.probed_xattrs {
        tx.put(schema::Mounts, mount_id, &Mount { probed_xattrs, ..mount });
        tx.mounts_changed();
    }
    Ok(())
}
