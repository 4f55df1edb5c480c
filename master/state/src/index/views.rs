//! Which blocks of fs-mode files views have.
//!
//! A view has the blocks of its mount that are of an earlier generation than the one that began with it, of files whose
//! numbers were given out before; all of them while it is not frozen yet. Of several views of a mount the latest has
//! all that any has of what files have now. What a file loses of that is not freed, but kept: under its name, with the
//! workers that have it, and with the last view that there was then. Views that begin later do not have it. When views
//! go, the leader has those blocks freed that none has any more (`ReleaseKept`).
//!
//! Another block takes the place of one that a view has when all clients have said that they write to no such block
//! ([`replaceable_below`]), and as long as a view has it: else what somebody writes to it meanwhile would be missing in
//! the other one.

use cavern_proto::master::{Extent, Mount, View};
use cavern_proto::record::{KeptRecord, Stray};

use crate::error::Result;
use crate::schema;
use crate::transaction::Transaction;

/// Of a view that is not frozen yet: it has whatever its mount has. No block is of so late a generation.
pub const UNFROZEN: u32 = u32::MAX;
/// The last id of a view.
pub const ID_MAX: u32 = (1 << 23) - 2;

/// Whether blocks are kept for a view: it is of an fs-mode mount, and was made here.
pub fn keeps_blocks(view: &View) -> bool {
    view.generation != 0
}

/// Blocks of a file that are of an earlier generation than this are those of views; 0 where there are none.
pub fn frozen_below(tx: &Transaction<'_>, inode: u64, mount_id: u32) -> Result<u32> {
    if tx.counters.frozen_views == 0 {
        return Ok(0);
    }
    let tables = tx.before();
    let is_unfrozen = |view: &View| view.mount_id == mount_id && view.generation == UNFROZEN;
    if tx.counters.unfrozen_views > 0 && tables.views()?.iter().any(is_unfrozen) {
        return Ok(UNFROZEN);
    }
    let mount = tables.mount(mount_id)?.unwrap_or_default();
    Ok(if inode <= mount.frozen_inodes { mount.frozen_below } else { 0 })
}

/// Blocks of a file that are of an earlier generation than this may be replaced by others that are not: nobody writes
/// to them; 0 where there are none.
pub fn replaceable_below(mount: &Mount, inode: u64) -> u32 {
    let is_settled = mount.settled_below >= mount.frozen_below && inode <= mount.frozen_inodes;
    if is_settled { mount.frozen_below } else { 0 }
}

/// A file has lost a block that a view has. A copy that is under way may lack some of it: it is none of the replicas.
pub fn keep(tx: &mut Transaction<'_>, inode: u64, mount_id: u32, extent: Extent) -> Result {
    let Extent { index, generation, workers, joining, .. } = extent;
    let block = Stray { inode, generation, index };
    if joining != 0 {
        tx.put(schema::Strays, (joining, block), &mount_id);
    }
    let is_new = !tx.now().has(schema::KeptBlocks, block)?;
    tx.counters.kept += u64::from(is_new);
    let last_view = tx.counters.view;
    tx.put(schema::KeptBlocks, block, &KeptRecord { mount_id, last_view, workers });
    Ok(())
}

/// Whether a view has a block that no file has any more.
pub fn has(view: &View, block: &Stray, kept: &KeptRecord) -> bool {
    view.mount_id == kept.mount_id
        && view.id <= kept.last_view
        && block.generation < view.generation
        && block.inode <= view.last_inode
}
