//! What one command changes: what it writes, inodes and names as they are after that, and the changes that clients must
//! be notified of, in the order in which they were made.

use std::collections::hash_map::Entry as Slot;

use bytes::Bytes;
use cavern_proto::record::{Counters, DentryRecord, InodeRecord};

pub use crate::change::Changes;
use crate::change::{Change, InodeLocation};
use crate::database::Database;
use crate::error::Result;
use crate::feature_version::FEATURE_VERSION;
use crate::schema::{self, Family, Table, TableKey, decode_key, encode_key, end_of};
use crate::tables::Tables;
use crate::write_batch_overlay::WriteBatchOverlay;

/// The changes of one command, not yet written.
pub struct Transaction<'a> {
    before: Tables<'a>,
    writes: WriteBatchOverlay,
    /// The feature version up to which this replica knows commands.
    pub known: u32,
    pub counters: Counters,
    /// What sessions are notified of; where the inodes are is seen to at the end.
    pub changes: Changes,
}

impl<'a> Transaction<'a> {
    /// An empty transaction on top of what the database holds.
    pub fn new(database: &'a Database) -> Result<Self> {
        Self::on(Tables::new(database))
    }

    /// An empty transaction on top of these tables.
    pub fn on(before: Tables<'a>) -> Result<Self> {
        let (writes, counters) = (WriteBatchOverlay::default(), before.counters()?);
        Ok(Self { before, writes, known: FEATURE_VERSION, counters, changes: Changes::default() })
    }

    /// The tables as they were before this transaction, for what it has not touched.
    pub fn before(&self) -> Tables<'a> {
        self.before
    }

    /// The tables as they were, with single records as they are by now.
    pub fn now(&self) -> Tables<'_> {
        self.before.changed_by(&self.writes)
    }

    pub fn inode(&self, inode: u64) -> Result<Option<InodeRecord>> {
        self.now().inode(inode)
    }

    /// Stores an inode under a new id, which it returns.
    pub fn create_inode(&mut self, record: InodeRecord) -> u64 {
        self.counters.inode += 1;
        self.create_inode_as(self.counters.inode, record);
        self.counters.inode
    }

    /// Stores an inode under an id that was taken from the counter before, and that no inode has.
    pub fn create_inode_as(&mut self, inode: u64, record: InodeRecord) {
        self.counters.inodes += 1;
        self.put_inode(inode, record);
    }

    pub fn put_inode(&mut self, inode: u64, record: InodeRecord) {
        self.put(schema::Inodes, inode, &record);
    }

    /// Stores an inode whose attributes changed, and has the sessions notified.
    pub fn update_inode(&mut self, inode: u64, record: InodeRecord) {
        self.put_inode(inode, record);
        self.notify(Change::Inode(inode));
    }

    pub fn delete_inode(&mut self, inode: u64) {
        self.counters.inodes = self.counters.inodes.saturating_sub(1);
        self.delete(schema::Inodes, inode);
    }

    /// The inodes that this transaction has stored or deleted, in the order of their ids.
    pub fn changed_inodes(&self) -> Result<Vec<u64>> {
        self.writes.records(Family::Inode).keys().map(|key| decode_key::<schema::Inodes>(key)).collect()
    }

    pub fn dentry(&self, parent: u64, name: &[u8]) -> Result<Option<DentryRecord>> {
        self.now().dentry(parent, name)
    }

    pub fn put_dentry(&mut self, parent: u64, name: &[u8], record: DentryRecord) {
        self.put(schema::Dentries, (parent, name), &record);
    }

    pub fn delete_dentry(&mut self, parent: u64, name: &[u8]) {
        self.delete(schema::Dentries, (parent, name));
    }

    /// Writes a record.
    pub fn put<T: Table>(&mut self, _: T, key: T::Key<'_>, record: &T::Value) {
        self.writes.insert(T::FAMILY, encode_key::<T>(&key), Some(T::encode(record)));
    }

    pub fn delete<T: Table>(&mut self, _: T, key: T::Key<'_>) {
        self.writes.insert(T::FAMILY, encode_key::<T>(&key), None);
    }

    /// Deletes every record of a table whose key begins so; with `()` all of them.
    pub fn delete_all<'k, T: Table>(&mut self, _: T, within: impl TableKey<'k>) {
        let start = encode_key::<T>(&within);
        let end = end_of(&start).unwrap_or_else(|| vec![u8::MAX; 8]);
        self.writes.delete_range(T::FAMILY, start, end);
    }

    /// Records written and deleted so far.
    pub fn writes(&self) -> usize {
        self.writes.len()
    }

    /// Has the sessions notified of a change.
    pub fn notify(&mut self, change: Change) {
        self.changes.list.push(change);
    }

    /// Has everybody ask for the mount table again.
    pub fn mounts_changed(&mut self) {
        self.counters.mounts_epoch += 1;
        self.notify(Change::Mounts(self.counters.mounts_epoch));
    }

    /// Has them notified that a name leads to another inode; 0 for none.
    pub fn name_changed(&mut self, parent: u64, name: &Bytes, old_inode: u64, new_inode: u64) {
        let name = name.clone();
        self.notify(Change::Entry { parent, name, old_inode, new_inode, first_fill: false, mount_id: 0 });
    }

    /// What to write, counters included, and the changes to notify clients of.
    pub fn finish(mut self) -> Result<(WriteBatchOverlay, Changes)> {
        let counters = self.counters;
        self.put(schema::Counters, (), &counters);
        let mut changes = std::mem::take(&mut self.changes);
        for inode in self.changed_inodes()? {
            if self.inode(inode)?.is_none() {
                changes.inodes.insert(inode, InodeLocation::Gone);
            }
        }
        for change in &mut changes.list {
            if let Change::Entry { old_inode, new_inode, mount_id, .. } = change {
                let inode = if *new_inode == 0 { *old_inode } else { *new_inode };
                let record = match self.inode(inode)? {
                    // What is gone now was there before.
                    None => self.before.inode(inode)?,
                    record => record,
                };
                *mount_id = record.map_or(0, |record| record.mount_id);
            }
            for inode in change.inodes().into_iter().skip(1).filter(|inode| *inode != 0) {
                if let Slot::Vacant(slot) = changes.inodes.entry(inode) {
                    let record = self.inode(inode)?;
                    slot.insert(record.as_ref().map_or(InodeLocation::Gone, InodeLocation::of));
                }
            }
        }
        Ok((self.writes, changes))
    }
}
