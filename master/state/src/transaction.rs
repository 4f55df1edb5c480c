//! What one command changes: what it writes, inodes and names as they are after that, and the changes that clients must
//! be notified of, in the order in which they were made.

use std::collections::hash_map::Entry as Slot;
use std::collections::{BTreeMap, HashMap};

use bytes::Bytes;
use cavern_proto::master::ClientRule;
use cavern_proto::record::{Counters, DentryRecord, InodeRecord};
use prost::Message;

use super::feature_version::FEATURE_VERSION;
use super::held::HeldChange;
use super::records::{dentry_key, inode_key, is_directory, links};
use super::tables::{COUNTERS_KEY, Tables};
use super::unwritten::{Write, Writes};
use super::{Database, Family};
use crate::error::StateError;

/// Something that clients may hold in a cache has changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// A name leads elsewhere. `first_fill` is set for a name that appears in a directory whose listing was never
    /// complete: nobody can have seen that directory whole.
    Entry {
        parent: u64,
        name: Bytes,
        old_inode: u64,
        new_inode: u64,
        first_fill: bool,
        /// The mount of what it leads or led to; 0 for what is above mounts. Seen to when the transaction is finished.
        mount_id: u32,
    },
    /// The attributes of an inode changed, its content did not.
    Inode(u64),
    /// The replicas of blocks of a file, or who may write to them; nothing else.
    Layout(u64),
    /// An inode has lost its last name.
    Unlinked(u64),
    /// A session has got the lock that it waited for under this number.
    LockGranted {
        session: u64,
        waiter: u64,
    },
    Workers(u64),
    Mounts(u64),
}

/// What a transaction changed, as sessions are to be notified of it.
#[derive(Debug, Default)]
pub struct Changes {
    /// Place in the log: see [`Changes::numbered`].
    pub position: u64,
    /// The session that asked for them, which knows of them by their result; 0 for none.
    pub origin: u64,
    pub list: Vec<Change>,
    /// Names that whoever asked has just learnt of, though they are not changed by this.
    pub seen: Vec<(u64, Bytes)>,
    /// They are of a strict mount: whoever asked is answered when nobody has anything cached that they made untrue.
    pub are_strict: bool,
    /// Where the inodes are that they are about, and that were deleted.
    pub inodes: HashMap<u64, Whereabouts>,
    /// Directories that a session holds from now on, or no longer. They have no numbers: clients are not told of them.
    pub held: Vec<HeldChange>,
    /// Mounts that are there for other clients from now on.
    pub rules: Vec<RulesChange>,
}

/// For whom a mount is there, as [`cavern_proto::master::Mount::clients`] has it.
#[derive(Clone, Debug)]
pub struct RulesChange {
    pub mount_id: u32,
    /// `None` of a new one.
    pub before: Option<Vec<ClientRule>>,
    pub now: Vec<ClientRule>,
}

/// Where an inode can be found after a transaction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Whereabouts {
    /// Under its only name.
    Named { parent: u64, name: Bytes, is_directory: bool },
    /// Under one of several names.
    Several,
    /// It has lost its last name, or never had one.
    Nameless,
    /// It is no longer there.
    Gone,
}

/// Bits of the number of a change that count within its command, and of those that count commands within their entry.
const CHANGE_BITS: u32 = 16;
const COMMAND_BITS: u32 = 12;

impl Changes {
    /// The place of a command's changes: the entry's index, and the number of the command in it.
    pub fn position(index: u64, command: u64) -> u64 {
        (index << (COMMAND_BITS + CHANGE_BITS)) | (command.min((1 << COMMAND_BITS) - 1) << CHANGE_BITS)
    }

    /// The index of the entry that a change of this number is of.
    pub fn index_of(seq: u64) -> u64 {
        seq >> (COMMAND_BITS + CHANGE_BITS)
    }

    /// The changes with their numbers, which grow with the log and are the same on all masters. (Beyond 65,535 changes
    /// of one command they share the last.)
    pub fn numbered(&self) -> impl ExactSizeIterator<Item = (u64, &Change)> {
        let within = |number: usize| (number as u64 + 1).min((1 << CHANGE_BITS) - 1);
        self.list.iter().enumerate().map(move |(number, change)| (self.position + within(number), change))
    }
}

impl Whereabouts {
    /// Of an inode that is there.
    pub fn of(record: &InodeRecord) -> Self {
        let is_directory = is_directory(record);
        match links(record) {
            _ if record.unlinked => Self::Nameless,
            2.. if !is_directory => Self::Several,
            _ => Self::Named { parent: record.parent, name: record.name.clone(), is_directory },
        }
    }
}

/// The changes of one command, not yet written.
pub struct Transaction<'a> {
    tables: Tables<'a>,
    writes: Writes,
    inodes: HashMap<u64, Option<InodeRecord>>,
    dentries: HashMap<Vec<u8>, Option<DentryRecord>>,
    /// The feature version up to which this replica knows commands.
    pub known: u32,
    pub counters: Counters,
    pub changes: Vec<Change>,
    /// The session that asked for the changes, which knows of them by their result; 0 for none.
    pub origin: u64,
    /// See [`Changes`].
    pub is_strict: bool,
    /// See [`Changes`].
    pub seen: Vec<(u64, Bytes)>,
    /// See [`Changes`].
    pub held: Vec<HeldChange>,
    /// See [`Changes`].
    pub rules: Vec<RulesChange>,
}

impl<'a> Transaction<'a> {
    /// An empty transaction on top of what the database holds.
    pub fn new(database: &'a Database) -> Result<Self, StateError> {
        Self::on(Tables::new(database))
    }

    /// An empty transaction on top of these tables.
    pub fn on(tables: Tables<'a>) -> Result<Self, StateError> {
        Ok(Self {
            tables,
            writes: Writes::default(),
            inodes: HashMap::new(),
            dentries: HashMap::new(),
            known: FEATURE_VERSION,
            counters: tables.counters()?,
            changes: Vec::new(),
            origin: 0,
            is_strict: false,
            seen: Vec::new(),
            held: Vec::new(),
            rules: Vec::new(),
        })
    }

    /// The tables as they were before this transaction, for what it has not touched.
    pub fn before(&self) -> Tables<'a> {
        self.tables
    }

    pub fn inode(&mut self, inode: u64) -> Result<Option<InodeRecord>, StateError> {
        match self.inodes.entry(inode) {
            Slot::Occupied(known) => Ok(known.get().clone()),
            Slot::Vacant(_) => self.tables.inode(inode),
        }
    }

    /// Stores an inode under a new id, which it returns.
    pub fn create_inode(&mut self, record: InodeRecord) -> u64 {
        self.counters.inode += 1;
        self.create_inode_as(self.counters.inode, record);
        self.counters.inode
    }

    /// The same under an id that was taken from the counter before, and that no inode has.
    pub fn create_inode_as(&mut self, inode: u64, record: InodeRecord) {
        self.counters.inodes += 1;
        self.put_inode(inode, record);
    }

    pub fn put_inode(&mut self, inode: u64, record: InodeRecord) {
        self.put(Family::Inode, &inode_key(inode), &record);
        self.inodes.insert(inode, Some(record));
    }

    pub fn delete_inode(&mut self, inode: u64) {
        self.counters.inodes = self.counters.inodes.saturating_sub(1);
        self.delete(Family::Inode, &inode_key(inode));
        self.inodes.insert(inode, None);
    }

    /// The inodes that this transaction has stored or deleted, as they are now, by id.
    pub fn changed_inodes(&self) -> BTreeMap<u64, Option<InodeRecord>> {
        self.inodes.iter().map(|(inode, record)| (*inode, record.clone())).collect()
    }

    pub fn dentry(&mut self, parent: u64, name: &[u8]) -> Result<Option<DentryRecord>, StateError> {
        let key = dentry_key(parent, name);
        match self.dentries.get(&key) {
            Some(known) => Ok(*known),
            None => self.tables.dentry(parent, name),
        }
    }

    pub fn put_dentry(&mut self, parent: u64, name: &[u8], record: DentryRecord) {
        let key = dentry_key(parent, name);
        self.put(Family::Dentry, &key, &record);
        self.dentries.insert(key, Some(record));
    }

    pub fn delete_dentry(&mut self, parent: u64, name: &[u8]) {
        let key = dentry_key(parent, name);
        self.delete(Family::Dentry, &key);
        self.dentries.insert(key, None);
    }

    /// Writes a record of any family.
    pub fn put(&mut self, family: Family, key: &[u8], record: &impl Message) {
        self.writes.push(Write::Put(family, key.to_vec(), record.encode_to_vec()));
    }

    /// Writes bytes of any family.
    pub fn put_bytes(&mut self, family: Family, key: &[u8], value: &[u8]) {
        self.writes.push(Write::Put(family, key.to_vec(), value.to_vec()));
    }

    pub fn delete(&mut self, family: Family, key: &[u8]) {
        self.writes.push(Write::Delete(family, key.to_vec()));
    }

    /// Deletes every record of a family, whose keys begin with inode ids.
    pub fn delete_all(&mut self, family: Family) {
        self.delete_range(family, &[0; 8], &[u8::MAX; 8]);
    }

    /// Deletes the records of a family from one key on, up to another.
    pub fn delete_range(&mut self, family: Family, from: &[u8], to: &[u8]) {
        self.writes.push(Write::DeleteRange(family, from.to_vec(), to.to_vec()));
    }

    /// Records written and deleted so far.
    pub fn writes(&self) -> usize {
        self.writes.len()
    }

    /// What to write, counters included, and the changes to notify clients of.
    pub fn finish(mut self) -> Result<(Writes, Changes), StateError> {
        let counters = self.counters;
        self.put(Family::Meta, COUNTERS_KEY, &counters);
        let whereabouts = |record: Option<&InodeRecord>| record.map_or(Whereabouts::Gone, Whereabouts::of);
        let deleted = self.inodes.iter().filter(|(_, record)| record.is_none());
        let mut inodes: HashMap<u64, Whereabouts> = deleted.map(|(inode, _)| (*inode, Whereabouts::Gone)).collect();
        for change in &mut self.changes {
            if let Change::Entry { old_inode, new_inode, mount_id, .. } = change {
                let inode = if *new_inode == 0 { *old_inode } else { *new_inode };
                *mount_id = match self.inodes.get(&inode) {
                    Some(Some(record)) => record.mount_id,
                    // What is gone now was there before.
                    _ => self.tables.inode(inode)?.map_or(0, |record| record.mount_id),
                };
            }
            let concerned = match change {
                Change::Inode(inode) | Change::Layout(inode) | Change::Unlinked(inode) => [*inode, 0],
                Change::Entry { old_inode, new_inode, .. } => [*old_inode, *new_inode],
                Change::LockGranted { .. } | Change::Workers(_) | Change::Mounts(_) => continue,
            };
            for inode in concerned.into_iter().filter(|inode| *inode != 0) {
                if let Slot::Vacant(slot) = inodes.entry(inode) {
                    slot.insert(match self.inodes.get(&inode) {
                        Some(known) => whereabouts(known.as_ref()),
                        None => whereabouts(self.tables.inode(inode)?.as_ref()),
                    });
                }
            }
        }
        Ok((
            self.writes,
            Changes {
                position: 0,
                seen: self.seen,
                origin: self.origin,
                list: self.changes,
                are_strict: self.is_strict,
                inodes,
                held: self.held,
                rules: self.rules,
            },
        ))
    }
}
