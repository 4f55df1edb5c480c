//! What clients may have in a cache and a command has changed, in the order in which it was made.

use std::collections::HashMap;

use bytes::Bytes;
use cavern_proto::master::ClientRule;
use cavern_proto::record::InodeRecord;

use crate::records::{is_directory, links};

/// Something that clients may hold in a cache has changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// A name leads elsewhere. `first_fill` is set for a name that appears in a directory whose listing was never
    /// complete: nobody can have seen more of that directory than its beginning.
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

impl Change {
    /// The directory of the name, and the inodes, that it is about; 0 for none.
    pub fn inodes(&self) -> [u64; 3] {
        match self {
            Self::Entry { parent, old_inode, new_inode, .. } => [*parent, *old_inode, *new_inode],
            Self::Inode(inode) | Self::Layout(inode) | Self::Unlinked(inode) => [0, *inode, 0],
            Self::LockGranted { .. } | Self::Workers(_) | Self::Mounts(_) => [0; 3],
        }
    }
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
    /// The strict mount that they are of: whoever asked is answered when nobody whom that is there for has anything
    /// cached that they made untrue.
    pub strict_mount: Option<u32>,
    /// Where the inodes are that they are about, and that were deleted.
    pub inodes: HashMap<u64, InodeLocation>,
    /// Directories delegated to a session from now on, or no longer. They have no numbers: clients are not told of
    /// them.
    pub delegations: Vec<DelegationChange>,
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

/// A directory delegated to a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DirectoryDelegation {
    pub mount_id: u32,
    pub directory: u64,
    pub session: u64,
}

/// What became of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DelegationChange {
    Granted(DirectoryDelegation),
    Returned(DirectoryDelegation),
    /// Whether a session holds this directory, which was there before, is decided: the others say how.
    Decided(u64),
    /// Others are told by the last of the changes to forget this directory, which the session that asked wants to hold.
    Announced(u64),
}

/// Where an inode can be found after a transaction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum InodeLocation {
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

impl InodeLocation {
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
