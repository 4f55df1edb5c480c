//! How much is below each directory of fs-mode mounts: files with their bytes, directories, links and the like, with
//! the extended attributes of all of them.
//!
//! Only quotas need it, so it is kept only while there are any, and nothing costs more without them. With the first
//! quota counting begins: the leader has the inode table counted in steps, in the order of the ids, and
//! `Counters.counted` says how far that has come. What has been counted is kept exact from then on, by what every
//! command makes of its inodes; an inode beyond that point is left alone, since its turn comes. So a step is as small
//! as one likes, and nothing stands still meanwhile.
//!
//! An inode counts once, however many names it has: where the name stands that its record has, which is its first one,
//! or another if that is gone.

use std::collections::{BTreeMap, HashMap};

use cavern_proto::master::{Kind, WriteType};
use cavern_proto::record::{CountUsage, InodeRecord, UsageRecord};

use crate::error::Result;
use crate::records::is_directory;
use crate::schema;
use crate::tables::{DEPTH_MAX, Tables};
use crate::transaction::Transaction;

/// In `Counters.counted`: not begun. The root of the namespace, which is first, is in no mount.
pub const NOTHING: u64 = 0;
pub const BEGUN: u64 = 1;
pub const ALL: u64 = u64::MAX;

/// How much something is, or becomes more or less.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UsageDelta {
    pub bytes: i64,
    pub inodes: i64,
}

impl std::ops::AddAssign for UsageDelta {
    fn add_assign(&mut self, other: Self) {
        self.bytes = self.bytes.saturating_add(other.bytes);
        self.inodes = self.inodes.saturating_add(other.inodes);
    }
}

impl std::ops::Sub for UsageDelta {
    type Output = Self;

    fn sub(self, other: Self) -> Self {
        Self { bytes: self.bytes.saturating_sub(other.bytes), inodes: self.inodes.saturating_sub(other.inodes) }
    }
}

impl Tables<'_> {
    /// How much has been counted below a directory.
    pub fn usage(&self, inode: u64) -> Result<UsageRecord> {
        Ok(self.get(schema::Usage, inode)?.unwrap_or_default())
    }
}

/// The bytes that an inode counts with: the length of a file, and its extended attributes.
pub fn bytes_of(record: &InodeRecord) -> u64 {
    let length = if record.kind() == Kind::File { record.size } else { 0 };
    length.saturating_add(record.xattr_bytes.into())
}

/// What an inode weighs by itself.
fn own(inode: u64, record: &InodeRecord, counted: u64) -> UsageDelta {
    if inode > counted {
        return UsageDelta::default();
    }
    UsageDelta { bytes: signed(bytes_of(record)), inodes: 1 }
}

/// What an inode weighs with all that has been counted below it.
pub fn weight(tx: &Transaction<'_>, inode: u64, record: &InodeRecord) -> Result<UsageDelta> {
    let mut weight = own(inode, record, tx.counters.counted);
    if is_directory(record) {
        let UsageRecord { bytes, inodes } = tx.before().usage(inode)?;
        weight += UsageDelta { bytes: signed(bytes), inodes: signed(inodes) };
    }
    Ok(weight)
}

/// A figure as a difference.
pub fn signed(figure: u64) -> i64 {
    i64::try_from(figure).unwrap_or(i64::MAX)
}

/// Which mounts are in fs-mode, and the roots of those, asked once each.
#[derive(Default)]
struct Roots(HashMap<u32, Option<u64>>);

impl Roots {
    fn root(&mut self, tx: &Transaction<'_>, mount_id: u32) -> Result<Option<u64>> {
        if let Some(known) = self.0.get(&mount_id) {
            return Ok(*known);
        }
        let mount = if mount_id == 0 { None } else { tx.before().mount(mount_id)? };
        let root = mount.filter(|mount| mount.write_type() == WriteType::FsMode).map(|mount| mount.root_inode);
        self.0.insert(mount_id, root);
        Ok(root)
    }

    /// The directory in which an inode counts; `None` where it does not count.
    fn place(&mut self, tx: &Transaction<'_>, inode: u64, record: Option<&InodeRecord>) -> Result<Option<u64>> {
        let Some(record) = record.filter(|record| !record.unlinked && record.parent != 0) else { return Ok(None) };
        let root = self.root(tx, record.mount_id)?;
        Ok(root.filter(|root| *root != inode).map(|_| record.parent))
    }
}

/// Keeps the figures exact: takes what a command has made of its inodes into those of the directories above.
pub fn account(tx: &mut Transaction<'_>) -> Result {
    let counted = tx.counters.counted;
    if counted == NOTHING {
        return Ok(());
    }
    let (mut roots, mut changes) = (Roots::default(), BTreeMap::new());
    for inode in tx.changed_inodes()? {
        let after = tx.inode(inode)?;
        let to = roots.place(tx, inode, after.as_ref())?;
        let is_of_mount = |record: &InodeRecord| record.mount_id != 0;
        if to.is_none() && after.as_ref().is_some_and(|record| roots.0.get(&record.mount_id) == Some(&None)) {
            continue;
        }
        let before = tx.before().inode(inode)?.filter(is_of_mount);
        let from = roots.place(tx, inode, before.as_ref())?;
        let weight_of = |record: Option<&InodeRecord>| match record {
            // What lies below a directory that stays where it is has not become another weight by that.
            Some(record) if from == to => Ok(own(inode, record, counted)),
            Some(record) => weight(tx, inode, record),
            None => Ok(UsageDelta::default()),
        };
        let (was, is) = (weight_of(before.as_ref())?, weight_of(after.as_ref())?);
        for (place, change) in [(from, UsageDelta::default() - was), (to, is)] {
            if let Some(place) = place {
                *changes.entry(place).or_default() += change;
            }
        }
    }
    spread(tx, changes)
}

/// Adds changes of directories' contents to them and to all above, up to the roots of their mounts.
fn spread(tx: &mut Transaction<'_>, changes: BTreeMap<u64, UsageDelta>) -> Result {
    let mut totals: BTreeMap<u64, UsageDelta> = BTreeMap::new();
    let mut parents: HashMap<u64, u64> = HashMap::new();
    for (directory, change) in changes.into_iter().filter(|(_, change)| *change != UsageDelta::default()) {
        let mut at = directory;
        for _ in 0..DEPTH_MAX {
            let parent = match parents.get(&at) {
                Some(parent) => *parent,
                None => {
                    let record = tx.inode(at)?.filter(|record| record.mount_id != 0);
                    let parent = record.map_or(0, |record| record.parent);
                    parents.insert(at, parent);
                    parent
                }
            };
            if parent == 0 {
                break;
            }
            *totals.entry(at).or_default() += change;
            at = parent;
        }
    }
    for (directory, change) in totals {
        let mut usage = tx.before().usage(directory)?;
        usage.bytes = usage.bytes.saturating_add_signed(change.bytes);
        usage.inodes = usage.inodes.saturating_add_signed(change.inodes);
        tx.put(schema::Usage, directory, &usage);
    }
    Ok(())
}

/// Counts the next inodes, while there are quotas; whether any are left.
pub fn count(tx: &mut Transaction<'_>, step: &CountUsage) -> Result<bool> {
    let counted = tx.counters.counted;
    if matches!(counted, NOTHING | ALL) {
        return Ok(false);
    }
    let limit = step.limit.max(1) as usize;
    let inodes = tx.before().inodes_after(counted, limit)?;
    let last = if inodes.len() == limit { inodes.last().map_or(ALL, |(inode, _)| *inode) } else { ALL };
    let (mut roots, mut changes) = (Roots::default(), BTreeMap::new());
    for (inode, record) in &inodes {
        if let Some(place) = roots.place(tx, *inode, Some(record))? {
            *changes.entry(place).or_default() += own(*inode, record, last);
        }
    }
    spread(tx, changes)?;
    tx.counters.counted = last;
    Ok(last != ALL)
}

/// Ends the quota of a directory, if it has one; with the last one the figures go.
pub fn drop_quota(tx: &mut Transaction<'_>, inode: u64) -> Result {
    if tx.counters.quotas > 0 && tx.before().has(schema::Quotas, inode)? {
        tx.delete(schema::Quotas, inode);
        tx.counters.quotas -= 1;
        if tx.counters.quotas == 0 {
            tx.counters.counted = NOTHING;
            tx.delete_all(schema::Usage, ());
        }
    }
    Ok(())
}

/// Gives up those of a directory that is deleted.
pub fn forget(tx: &mut Transaction<'_>, inode: u64) {
    if tx.counters.counted != NOTHING {
        tx.delete(schema::Usage, inode);
    }
}
