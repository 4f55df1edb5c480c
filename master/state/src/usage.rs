//! How much is below each directory of fs-mode mounts: files with their bytes, directories, links and the like.
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

use super::records::{inode_key, is_directory};
use super::tables::DEPTH_MAX;
use super::{Family, Outcome, Transaction};
use crate::error::StateError;

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

impl std::ops::Neg for UsageDelta {
    type Output = Self;

    fn neg(self) -> Self {
        Self { bytes: -self.bytes, inodes: -self.inodes }
    }
}

impl std::ops::Sub for UsageDelta {
    type Output = Self;

    fn sub(mut self, other: Self) -> Self {
        self += -other;
        self
    }
}

/// What an inode weighs by itself.
fn own(inode: u64, record: &InodeRecord, counted: u64) -> UsageDelta {
    if inode > counted {
        return UsageDelta::default();
    }
    let bytes = if record.kind() == Kind::File { record.size } else { 0 };
    UsageDelta { bytes: i64::try_from(bytes).unwrap_or(i64::MAX), inodes: 1 }
}

/// What an inode weighs with all that has been counted below it.
pub fn weight(transaction: &Transaction<'_>, inode: u64, record: &InodeRecord) -> Result<UsageDelta, StateError> {
    let mut weight = own(inode, record, transaction.counters.counted);
    if is_directory(record) {
        weight += below(&transaction.before().usage(inode)?);
    }
    Ok(weight)
}

fn below(usage: &UsageRecord) -> UsageDelta {
    let signed = |figure: u64| i64::try_from(figure).unwrap_or(i64::MAX);
    UsageDelta { bytes: signed(usage.bytes), inodes: signed(usage.inodes) }
}

/// Which mounts are in fs-mode, and the roots of those, asked once each.
#[derive(Default)]
struct Roots(HashMap<u32, Option<u64>>);

impl Roots {
    fn root(&mut self, transaction: &Transaction<'_>, mount_id: u32) -> Result<Option<u64>, StateError> {
        if let Some(known) = self.0.get(&mount_id) {
            return Ok(*known);
        }
        let mount = if mount_id == 0 { None } else { transaction.before().mount(mount_id)? };
        let root = mount.filter(|mount| mount.write_type() == WriteType::FsMode).map(|mount| mount.root_inode);
        self.0.insert(mount_id, root);
        Ok(root)
    }

    /// The directory in which an inode counts; `None` where it does not count.
    fn place(
        &mut self,
        transaction: &Transaction<'_>,
        inode: u64,
        record: Option<&InodeRecord>,
    ) -> Result<Option<u64>, StateError> {
        let Some(record) = record.filter(|record| !record.unlinked && record.parent != 0) else { return Ok(None) };
        let root = self.root(transaction, record.mount_id)?;
        Ok(root.filter(|root| *root != inode).map(|_| record.parent))
    }
}

/// Keeps the figures exact: takes what a command has made of its inodes into those of the directories above.
pub fn account(transaction: &mut Transaction<'_>) -> Result<(), StateError> {
    let counted = transaction.counters.counted;
    if counted == NOTHING {
        return Ok(());
    }
    let (mut roots, mut changes) = (Roots::default(), BTreeMap::new());
    for (inode, after) in transaction.changed_inodes() {
        let to = roots.place(transaction, inode, after.as_ref())?;
        let is_of_mount = |record: &InodeRecord| record.mount_id != 0;
        if to.is_none() && after.as_ref().is_some_and(|record| roots.0.get(&record.mount_id) == Some(&None)) {
            continue;
        }
        let before = transaction.before().inode(inode)?.filter(is_of_mount);
        let from = roots.place(transaction, inode, before.as_ref())?;
        let weight_of = |record: Option<&InodeRecord>| match record {
            // What lies below a directory that stays where it is has not become another weight by that.
            Some(record) if from == to => Ok(own(inode, record, counted)),
            Some(record) => weight(transaction, inode, record),
            None => Ok(UsageDelta::default()),
        };
        let (was, is) = (weight_of(before.as_ref())?, weight_of(after.as_ref())?);
        if let Some(from) = from {
            *changes.entry(from).or_default() += -was;
        }
        if let Some(to) = to {
            *changes.entry(to).or_default() += is;
        }
    }
    spread(transaction, changes)
}

/// Adds changes of directories' contents to them and to all above, up to the roots of their mounts.
fn spread(transaction: &mut Transaction<'_>, changes: BTreeMap<u64, UsageDelta>) -> Result<(), StateError> {
    let mut totals: BTreeMap<u64, UsageDelta> = BTreeMap::new();
    let mut parents: HashMap<u64, u64> = HashMap::new();
    for (directory, change) in changes.into_iter().filter(|(_, change)| *change != UsageDelta::default()) {
        let mut at = directory;
        for _ in 0..DEPTH_MAX {
            let parent = match parents.get(&at) {
                Some(parent) => *parent,
                None => {
                    let record = transaction.inode(at)?.filter(|record| record.mount_id != 0);
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
        let mut usage = transaction.before().usage(directory)?;
        usage.bytes = usage.bytes.saturating_add_signed(change.bytes);
        usage.inodes = usage.inodes.saturating_add_signed(change.inodes);
        transaction.put(Family::Usage, &inode_key(directory), &usage);
    }
    Ok(())
}

/// Counts the next inodes, while there are quotas. The answer says whether any are left.
pub fn count(transaction: &mut Transaction<'_>, step: &CountUsage) -> Result<Outcome, StateError> {
    let counted = transaction.counters.counted;
    if matches!(counted, NOTHING | ALL) {
        return Ok(Outcome::Counted { more: false });
    }
    let limit = step.limit.max(1) as usize;
    let inodes = transaction.before().inodes_after(counted, limit)?;
    let last = if inodes.len() == limit { inodes.last().map_or(ALL, |(inode, _)| *inode) } else { ALL };
    let (mut roots, mut changes) = (Roots::default(), BTreeMap::new());
    for (inode, record) in &inodes {
        if let Some(place) = roots.place(transaction, *inode, Some(record))? {
            *changes.entry(place).or_default() += own(*inode, record, last);
        }
    }
    spread(transaction, changes)?;
    transaction.counters.counted = last;
    Ok(Outcome::Counted { more: last != ALL })
}

/// Gives up all figures: there is no quota any more.
pub fn forget_all(transaction: &mut Transaction<'_>) {
    transaction.counters.counted = NOTHING;
    transaction.delete_all(Family::Usage);
}

/// Gives up those of a directory that is deleted.
pub fn forget(transaction: &mut Transaction<'_>, inode: u64) {
    if transaction.counters.counted != NOTHING {
        transaction.delete(Family::Usage, &inode_key(inode));
    }
}
