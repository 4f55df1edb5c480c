//! What is stored: column families, the tables in them, how their keys are written, and what their records are.
//!
//! A key is its parts one behind the other. Numbers are big-endian, so that keys sort as what they stand for; a name, a
//! path or the key of an object comes last and is as long as it is. A record is a message; one that is a single number,
//! text or string of bytes is a message of that field alone, as the wrappers of `google.protobuf` are.

use bytes::Bytes;
use cavern_proto::master::LockKind;
use cavern_proto::{master, record};
use prost::{DecodeError, Message};

use crate::error::{Result, StateError};
use crate::records::compact::{decode_dentry, decode_inode, encode_dentry, encode_inode};

macro_rules! families {
    ($($family:ident = $name:literal,)+) => {
        /// Column families. Those of the log come first.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Family {
            $($family,)+
        }

        impl Family {
            pub const ALL: [Self; [$($name),+].len()] = [$(Self::$family),+];

            /// Its name in the database.
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$family => $name,)+
                }
            }
        }
    };
}

families! {
    RaftLog = "raft_log",
    RaftMeta = "raft_meta",
    Inode = "inode",
    Dentry = "dentry",
    Orphan = "orphan",
    Mount = "mount",
    Worker = "worker",
    Job = "job",
    Meta = "meta",
    Link = "link",
    Xattr = "xattr",
    Unlinked = "unlinked",
    Session = "session",
    Result = "result",
    OpenRef = "open_ref",
    OpenRefSession = "open_ref_session",
    Extent = "extent",
    Garbage = "garbage",
    Intent = "intent",
    Object = "object",
    Deletion = "deletion",
    Lock = "lock",
    LockSession = "lock_session",
    Replica = "replica",
    Repair = "repair",
    Stray = "stray",
    Origin = "origin",
    Quota = "quota",
    Usage = "usage",
    Ttl = "ttl",
    Unlisted = "unlisted",
    Noted = "noted",
    Recovered = "recovered",
    Kept = "kept",
}

impl Family {
    /// Those of the log, which are of one master. The others are its state, which all masters have.
    pub const LOG: [Self; 2] = [Self::RaftLog, Self::RaftMeta];
    /// Those of the state.
    pub const STATE: &[Self] = Self::ALL.split_at(Self::LOG.len()).1;
}

/// A block of a file: inode and index.
pub type FileBlock = (u64, u32);

/// Records of one kind: where they are, what finds them, and what they say.
pub trait Table: Copy {
    const FAMILY: Family;
    /// What all of its keys begin with: not empty where it shares its family with others.
    const PREFIX: &'static [u8];
    type Key<'k>: TableKey<'k>;
    type Value: Message + Default;

    /// A record as it is stored.
    fn encode(record: &Self::Value) -> Vec<u8> {
        record.encode_to_vec()
    }

    /// A record that is stored so.
    ///
    /// # Errors
    /// The bytes are none.
    fn decode(bytes: &[u8]) -> std::result::Result<Self::Value, DecodeError> {
        Self::Value::decode(bytes)
    }
}

macro_rules! tables {
    ($life:lifetime; $(
        $(#[$doc:meta])*
        $table:ident = $family:ident $prefix:literal, $key:ty => $value:ty $(, $encode:ident, $decode:ident)?;
    )+) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug)]
        pub struct $table;

        impl Table for $table {
            const FAMILY: Family = Family::$family;
            const PREFIX: &'static [u8] = $prefix;
            type Key<$life> = $key;
            type Value = $value;

            $(
                fn encode(record: &Self::Value) -> Vec<u8> {
                    $encode(record)
                }

                fn decode(bytes: &[u8]) -> std::result::Result<Self::Value, DecodeError> {
                    $decode(bytes)
                }
            )?
        }
    )+};
}

tables! { 'k;
    /// By id.
    Inodes = Inode b"", u64 => record::InodeRecord, encode_inode, decode_inode;
    /// By directory and name.
    Dentries = Dentry b"", (u64, &'k [u8]) => record::DentryRecord, encode_dentry, decode_dentry;
    /// Every name (directory, name) of an inode that has several.
    Links = Link b"", (u64, (u64, &'k [u8])) => ();
    /// By inode and name.
    Xattrs = Xattr b"", (u64, &'k [u8]) => Bytes;
    /// Inodes of fs-mode mounts that have no name any more.
    Unlinked = Unlinked b"", u64 => ();
    /// Directories that are out of the namespace and wait to be deleted, with the last name in each that is gone.
    Orphans = Orphan b"", u64 => Bytes;
    /// By directory.
    Quotas = Quota b"", u64 => record::QuotaRecord;
    /// By directory.
    Usage = Usage b"", u64 => record::UsageRecord;
    /// By directory.
    Ttls = Ttl b"", u64 => record::TtlRecord;
    /// Directories of which the bucket has names that the namespace lacks: by mount and path below its root.
    Unlisted = Unlisted b"", (u32, &'k [u8]) => u64;
    /// Inodes by mount and identity, while a mount is being recovered.
    Recovered = Recovered b"", (u32, &'k str) => u64;

    /// Blocks of files.
    Extents = Extent b"", FileBlock => record::ExtentRecord;
    /// By worker and block, for every replica of an extent.
    Replicas = Replica b"", (u64, FileBlock) => ();
    /// Blocks that lack replicas, or have a copy under way.
    Repairs = Repair b"", FileBlock => ();
    /// What a worker may have of a block that it is no part of any more; the mount that it is of.
    Strays = Stray b"", (u64, record::Stray) => u32;
    /// Blocks that no file has any more, by number.
    Garbage = Garbage b"", u64 => record::GarbageRecord;
    /// Blocks that no file has any more, and views have.
    KeptBlocks = Kept b"", record::Stray => record::KeptRecord;

    /// Changes that the bucket lacks, by inode.
    Intents = Intent b"", u64 => record::IntentRecord;
    /// What the bucket has, or may have, of an inode: by inode and key.
    Objects = Object b"", (u64, &'k str) => record::ObjectRecord;
    /// The inode that has a note of the object of a key, by mount and key.
    Noted = Noted b"", (u32, &'k str) => u64;
    /// The inode whose origin the object of a key is, by mount and key.
    Origins = Origin b"", (u32, &'k str) => u64;
    /// Objects that are to be deleted, by mount and key.
    Deletions = Deletion b"", (u32, &'k str) => record::DeletionRecord;

    /// By id.
    Sessions = Session b"", u64 => record::SessionRecord;
    /// Results of mutations, by session and number.
    Results = Result b"", (u64, u64) => master::MutationResult;
    /// By inode and session.
    OpenRefs = OpenRef b"", (u64, u64) => record::OpenRefRecord;
    /// Open references by session and inode.
    SessionOpenRefs = OpenRefSession b"", (u64, u64) => ();
    /// By inode and kind.
    Locks = Lock b"", (u64, LockKind) => record::LockRecord;
    /// Where a session has locks, and whether it waits there: by session, kind and inode.
    SessionLocks = LockSession b"", (u64, (LockKind, u64)) => bool;

    /// By id.
    Mounts = Mount b"", u32 => master::Mount;
    /// By id.
    Workers = Worker b"", u64 => record::WorkerRecord;
    /// By id.
    Jobs = Job b"", u64 => master::Job;
    /// By id.
    Views = Meta b"view", u32 => master::View;
    /// Views that are no more, of which the bucket may have something, by id.
    GoneViews = Meta b"gone-view", u32 => master::View;

    Counters = Meta b"counters", () => record::Counters;
    ClusterId = Meta b"cluster", () => String;
    /// Which key the credentials are sealed with.
    Secrets = Meta b"secrets", () => record::SecretsRecord;
    /// By mount.
    Indexes = Meta b"index", u32 => record::IndexRecord;
    /// Parts of the keys of a mount that is being indexed, by mount and number.
    IndexRanges = Meta b"ranges", (u32, u32) => record::IndexRange;
    /// Number of the last change of an fs-mode mount, by mount.
    LastChanges = Meta b"changed", u32 => u64;
    /// Ids of workers that were removed, by uuid.
    RemovedWorkers = Meta b"removed", &'k [u8] => u64;
    /// What became of commands, by the ids that their callers have given them.
    Requests = Meta b"request", &'k [u8] => record::RequestRecord;
    /// These ids by their numbers.
    RequestIds = Meta b"numbered", u64 => Bytes;
    /// The session that holds a directory, by mount and directory.
    DirectoryDelegations = Meta b"delegation", (u32, u64) => u64;
    /// The mount of a directory delegated to a session, by session and directory.
    SessionDelegations = Meta b"of-session", (u64, u64) => u32;
    /// How many directories a session holds.
    DelegationCounts = Meta b"session-delegations", u64 => u64;
}

/// A key of a table, or a part of one.
pub trait TableKey<'k>: Sized {
    /// Adds it to what a key begins with.
    fn write(&self, key: &mut Vec<u8>);

    /// Takes it off the beginning of a key; with the rest of that.
    fn read(key: &'k [u8]) -> Option<(Self, &'k [u8])>;
}

impl<'k> TableKey<'k> for () {
    fn write(&self, _key: &mut Vec<u8>) {}

    fn read(key: &'k [u8]) -> Option<(Self, &'k [u8])> {
        Some(((), key))
    }
}

impl<'k> TableKey<'k> for u32 {
    fn write(&self, key: &mut Vec<u8>) {
        key.extend(self.to_be_bytes());
    }

    fn read(key: &'k [u8]) -> Option<(Self, &'k [u8])> {
        key.split_first_chunk().map(|(number, rest)| (Self::from_be_bytes(*number), rest))
    }
}

impl<'k> TableKey<'k> for u64 {
    fn write(&self, key: &mut Vec<u8>) {
        key.extend(self.to_be_bytes());
    }

    fn read(key: &'k [u8]) -> Option<(Self, &'k [u8])> {
        key.split_first_chunk().map(|(number, rest)| (Self::from_be_bytes(*number), rest))
    }
}

impl<'k> TableKey<'k> for LockKind {
    fn write(&self, key: &mut Vec<u8>) {
        key.push(*self as u8);
    }

    fn read(key: &'k [u8]) -> Option<(Self, &'k [u8])> {
        let (kind, rest) = key.split_first()?;
        Some((Self::try_from(i32::from(*kind)).ok()?, rest))
    }
}

impl<'k> TableKey<'k> for record::Stray {
    fn write(&self, key: &mut Vec<u8>) {
        (self.inode, (self.generation, self.index)).write(key);
    }

    fn read(key: &'k [u8]) -> Option<(Self, &'k [u8])> {
        let ((inode, (generation, index)), rest) = TableKey::read(key)?;
        Some((Self { inode, generation, index }, rest))
    }
}

impl<'k> TableKey<'k> for &'k [u8] {
    fn write(&self, key: &mut Vec<u8>) {
        key.extend_from_slice(self);
    }

    fn read(key: &'k [u8]) -> Option<(Self, &'k [u8])> {
        Some((key, &[]))
    }
}

impl<'k> TableKey<'k> for &'k str {
    fn write(&self, key: &mut Vec<u8>) {
        key.extend_from_slice(self.as_bytes());
    }

    fn read(key: &'k [u8]) -> Option<(Self, &'k [u8])> {
        Some((std::str::from_utf8(key).ok()?, &[]))
    }
}

impl<'k, A: TableKey<'k>, B: TableKey<'k>> TableKey<'k> for (A, B) {
    fn write(&self, key: &mut Vec<u8>) {
        self.0.write(key);
        self.1.write(key);
    }

    fn read(key: &'k [u8]) -> Option<(Self, &'k [u8])> {
        let (first, rest) = A::read(key)?;
        let (second, rest) = B::read(rest)?;
        Some(((first, second), rest))
    }
}

/// A key of a table as it is stored, or what all keys begin with that have this part.
pub fn encode_key<'k, T: Table>(key: &impl TableKey<'k>) -> Vec<u8> {
    let mut bytes = T::PREFIX.to_vec();
    key.write(&mut bytes);
    bytes
}

/// A key of a table.
///
/// # Errors
/// [`StateError::Corrupt`] for what is none.
pub fn decode_key<T: Table>(bytes: &[u8]) -> Result<T::Key<'_>> {
    let read: Option<(T::Key<'_>, &[u8])> = bytes.strip_prefix(T::PREFIX).and_then(TableKey::read);
    match read {
        Some((key, [])) => Ok(key),
        _ => Err(StateError::Corrupt(format!("a key of {:?}", T::FAMILY))),
    }
}

/// A record of a table.
///
/// # Errors
/// [`StateError::Corrupt`] for what is none.
pub fn decode_record<T: Table>(bytes: &[u8]) -> Result<T::Value> {
    T::decode(bytes).map_err(|_| StateError::Corrupt(format!("a record of {:?}", T::FAMILY)))
}

/// The first key behind all that begin so; `None` where there is none.
pub fn end_of(prefix: &[u8]) -> Option<Vec<u8>> {
    let last = prefix.iter().rposition(|byte| *byte != u8::MAX)?;
    let mut end = prefix[..=last].to_vec();
    end[last] += 1;
    Some(end)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_read_as_they_were_written_and_sort_as_what_they_stand_for() {
        let stray = record::Stray { inode: 2, generation: 3, index: 4 };
        let key = encode_key::<Strays>(&(1_u64, stray));
        assert_eq!((key.len(), decode_key::<Strays>(&key).unwrap()), (24, (1, stray)));
        let link = encode_key::<Links>(&(1_u64, (2_u64, &b"name"[..])));
        assert_eq!(decode_key::<Links>(&link).unwrap(), (1, (2, &b"name"[..])));
        let lock = encode_key::<SessionLocks>(&(7_u64, (LockKind::Flock, 9_u64)));
        assert_eq!((lock.len(), decode_key::<SessionLocks>(&lock).unwrap()), (17, (7, (LockKind::Flock, 9))));
        let held = encode_key::<DirectoryDelegations>(&(1_u32, 300_u64));
        assert!(held.starts_with(b"delegation") && held > encode_key::<DirectoryDelegations>(&(1_u32, 2_u64)));
        assert_eq!(decode_key::<DirectoryDelegations>(&held).unwrap(), (1, 300));
        for broken in [&held[..held.len() - 1], &held[1..], &[&held[..], &[0]].concat()[..]] {
            assert!(matches!(decode_key::<DirectoryDelegations>(broken), Err(StateError::Corrupt(_))), "{broken:?}");
        }
        let all = [encode_key::<Extents>(&(1_u64, 0_u32)), encode_key::<Extents>(&(1_u64, u32::MAX))];
        let end = end_of(&encode_key::<Extents>(&1_u64)).unwrap();
        assert!(all.iter().all(|key| *key < end) && end == 2_u64.to_be_bytes());
        assert_eq!((end_of(&[1, u8::MAX]), end_of(&[u8::MAX]), end_of(&[])), (Some(vec![2]), None, None));
    }

    #[test]
    fn a_record_of_one_number_is_read_as_it_was_written() {
        for inode in [0, 1, u64::MAX] {
            assert_eq!(decode_record::<Noted>(&inode.encode_to_vec()).unwrap(), inode);
        }
        assert_eq!(decode_record::<Orphans>(&Bytes::from_static(b"a").encode_to_vec()).unwrap(), "a");
        assert!(decode_record::<Noted>(b"\xff").is_err());
    }
}
