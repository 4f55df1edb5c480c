//! Typed reads of the state. Every call is one or a few point reads or one bounded scan; none waits for anything but
//! the disk, so async callers run them on the blocking pool where they read more than a handful of records.

mod bucket;
mod held;
mod replica;
mod ttl;
mod unlisted;
mod usage;

pub use bucket::PendingDeletion;
pub use replica::{FileBlock, StrayReplica};

use std::collections::HashMap;
use std::ops::{ControlFlow, Deref};

use bytes::Bytes;
use cavern_proto::ROOT_INODE;
use cavern_proto::master::{CheckHoldsReply, CheckHoldsRequest, Extent, Job, Kind, LockKind, Mount, MutationResult};
use cavern_proto::record::{
    Counters, DentryRecord, ExtentRecord, IndexRecord, InodeRecord, LockRecord, RequestRecord, SecretsRecord,
    SessionRecord, WorkerRecord,
};
use cavern_security::Identity;
use prost::Message;
use rocksdb::{DBPinnableSlice, Direction, ErrorKind, IteratorMode, ReadOptions, ReadTier, Snapshot};

use super::extent::is_truncated;
use super::posix::ONLY_READS;
use super::records::{
    decode, dentry_key, extent_key, held_by_session, hold_key, inode_key, leading_id, lock_key, locked_by_session,
    parse_extent_key, result_key, xattr_key,
};
use super::unwritten::{Scan, Unwritten};
use super::{Database, Family};
use crate::error::StateError;

pub const COUNTERS_KEY: &[u8] = b"counters";
pub const CLUSTER_KEY: &[u8] = b"cluster";
pub const SECRETS_KEY: &[u8] = b"secrets";

/// Deepest nesting that a walk to the root follows. There are no loops; this ends walks should there be one.
pub const DEPTH_MAX: usize = 1 << 16;

/// Names or blocks that have been removed, passed over in search of one that is there.
const REMOVED: u64 = 1000;
/// Indexes of blocks that are looked at together.
const INDEXES: u32 = 1024;

type Pair = (Box<[u8]>, Box<[u8]>);

/// An entry of a directory: its name, its inode id and record.
pub type Listed = (Bytes, u64, InodeRecord);

/// A view of the tables. Copying it costs nothing.
#[derive(Clone, Copy)]
pub struct Tables<'a> {
    database: &'a Database,
    /// All that is read is as it was then.
    snapshot: Option<&'a Snapshot<'a>>,
    /// The disk is not asked: a read that would have to fails.
    in_memory: bool,
    /// What is read before the database.
    unwritten: Option<&'a Unwritten>,
}

/// The bytes of one record.
enum Value<'a> {
    Written(DBPinnableSlice<'a>),
    Unwritten(&'a [u8]),
}

impl Deref for Value<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Self::Written(bytes) => bytes,
            Self::Unwritten(bytes) => bytes,
        }
    }
}

/// A directory, found in the namespace.
#[derive(Clone, Debug)]
pub struct Directory {
    pub inode: u64,
    pub record: InodeRecord,
    /// 0 for directories above any mount.
    pub mount_id: u32,
    /// Names from the mount's root (or from the namespace's root, above mounts) down to this directory.
    pub path: Vec<Bytes>,
}

impl Directory {
    /// Whether this is the root of its mount.
    pub fn is_mount_root(&self) -> bool {
        self.mount_id != 0 && self.path.is_empty()
    }

    /// The key prefix of the directory's objects in a mount whose own prefix is `mount_prefix`; `None` where a name is
    /// not UTF-8, which no listing makes.
    pub fn key_prefix(&self, mount_prefix: &str) -> Option<String> {
        let mut key = mount_prefix.to_owned();
        for name in &self.path {
            key.push_str(std::str::from_utf8(name).ok()?);
            key.push('/');
        }
        Some(key)
    }
}

impl<'a> Tables<'a> {
    /// What is there at each read: for whoever writes, alone, or reads one record.
    pub fn new(database: &'a Database) -> Self {
        Self { database, snapshot: None, in_memory: false, unwritten: None }
    }

    /// All reads see the same state, so that what one finds is there for the next: a name, and the inode that it leads
    /// to.
    pub fn at(database: &'a Database, snapshot: &'a Snapshot<'a>) -> Self {
        Self { database, snapshot: Some(snapshot), in_memory: false, unwritten: None }
    }

    /// The same of what is in memory: a read that would have to wait for the disk fails with an error that
    /// [`StateError::needs_disk`] tells from others. Not for what bounds its scans by what they pass over.
    pub fn in_memory(self) -> Self {
        Self { in_memory: true, ..self }
    }

    /// What is there, and what is to be written: for whoever writes, alone.
    pub fn with(database: &'a Database, unwritten: &'a Unwritten) -> Self {
        Self { database, snapshot: None, in_memory: false, unwritten: Some(unwritten) }
    }

    pub fn database(&self) -> &'a Database {
        self.database
    }

    fn record<M: Message + Default>(&self, family: Family, key: &[u8]) -> Result<Option<M>, StateError> {
        let value = self.get(family, key)?;
        value.map(|bytes| decode(&bytes, || format!("a record of {family:?}"))).transpose()
    }

    fn get(&self, family: Family, key: &[u8]) -> Result<Option<Value<'a>>, StateError> {
        if let Some(known) = self.unwritten.and_then(|unwritten| unwritten.get(family, key)) {
            return Ok(known.map(Value::Unwritten));
        }
        let (database, family) = (self.database.raw(), self.database.family(family));
        let value = match self.snapshot {
            None => database.get_pinned_cf(family, key)?,
            Some(_) => database.get_pinned_cf_opt(family, key, &self.options())?,
        };
        Ok(value.map(Value::Written))
    }

    fn options(&self) -> ReadOptions {
        let mut options = ReadOptions::default();
        if let Some(snapshot) = self.snapshot {
            options.set_snapshot(snapshot);
        }
        if self.in_memory {
            options.set_read_tier(ReadTier::BlockCache);
        }
        options
    }

    /// The records of a family from one key on.
    fn records_from(&self, family: Family, from: &[u8]) -> Scan<'a> {
        let mode = IteratorMode::From(from, Direction::Forward);
        let written = self.database.raw().iterator_cf_opt(self.database.family(family), self.options(), mode);
        Scan::new(written, self.unwritten, family, from, None)
    }

    /// The records of a family from one key on, up to another.
    fn records_between(&self, family: Family, from: &[u8], until: &[u8]) -> Scan<'a> {
        self.records_between_with(family, self.options(), from, until)
    }

    /// The same, but ends with [`ErrorKind::Incomplete`] where too many have been removed.
    fn records_between_unless_removed(&self, family: Family, from: &[u8], until: &[u8]) -> Scan<'a> {
        let mut options = self.options();
        options.set_max_skippable_internal_keys(REMOVED);
        self.records_between_with(family, options, from, until)
    }

    fn records_between_with(&self, family: Family, mut options: ReadOptions, from: &[u8], until: &[u8]) -> Scan<'a> {
        options.set_iterate_upper_bound(until.to_vec());
        let mode = IteratorMode::From(from, Direction::Forward);
        let written = self.database.raw().iterator_cf_opt(self.database.family(family), options, mode);
        Scan::new(written, self.unwritten, family, from, Some(until))
    }

    pub fn counters(&self) -> Result<Counters, StateError> {
        Ok(self.record(Family::Meta, COUNTERS_KEY)?.unwrap_or_default())
    }

    /// The cluster's id; `None` before the first command of a new cluster.
    pub fn cluster_id(&self) -> Result<Option<String>, StateError> {
        let value = self.get(Family::Meta, CLUSTER_KEY)?;
        value
            .map(|bytes| String::from_utf8(bytes.to_vec()).map_err(|_| StateError::Corrupt("the cluster id".into())))
            .transpose()
    }

    pub fn inode(&self, inode: u64) -> Result<Option<InodeRecord>, StateError> {
        self.record(Family::Inode, &inode_key(inode))
    }

    pub fn dentry(&self, parent: u64, name: &[u8]) -> Result<Option<DentryRecord>, StateError> {
        self.record(Family::Dentry, &dentry_key(parent, name))
    }

    /// Bytes of the blocks of each of these mounts. Of one that is gone nothing says so, but workers know its blocks by
    /// name.
    pub fn block_sizes(&self, mounts: impl IntoIterator<Item = u32>) -> Result<HashMap<u32, u64>, StateError> {
        let size = |id: u32| Ok((id, self.mount(id)?.map_or(1, |mount| mount.block_size.max(1))));
        mounts.into_iter().map(size).collect()
    }

    pub fn mount(&self, id: u32) -> Result<Option<Mount>, StateError> {
        self.record(Family::Mount, &id.to_be_bytes())
    }

    pub fn mounts(&self) -> Result<Vec<Mount>, StateError> {
        self.all(Family::Mount)
    }

    pub fn workers(&self) -> Result<Vec<WorkerRecord>, StateError> {
        self.all(Family::Worker)
    }

    pub fn worker(&self, id: u64) -> Result<Option<WorkerRecord>, StateError> {
        self.record(Family::Worker, &id.to_be_bytes())
    }

    /// Which worker this was that was removed; `None` for one that was not.
    pub fn removed_worker(&self, uuid: &[u8]) -> Result<Option<u64>, StateError> {
        let value = self.get(Family::Meta, &removed_key(uuid))?;
        Ok(value.and_then(|id| leading_id(&id)))
    }

    /// Which key the credentials are sealed with.
    pub fn secrets(&self) -> Result<SecretsRecord, StateError> {
        Ok(self.record(Family::Meta, SECRETS_KEY)?.unwrap_or_default())
    }

    /// What became of the request under this id.
    pub fn request(&self, id: &[u8]) -> Result<Option<RequestRecord>, StateError> {
        self.record(Family::Meta, &request_key(id))
    }

    /// Id of the request of this number.
    pub fn requested(&self, number: u64) -> Result<Option<Vec<u8>>, StateError> {
        Ok(self.get(Family::Meta, &requested_key(number))?.map(|id| id.to_vec()))
    }

    pub fn job(&self, id: u64) -> Result<Option<Job>, StateError> {
        self.record(Family::Job, &id.to_be_bytes())
    }

    pub fn jobs(&self) -> Result<Vec<Job>, StateError> {
        self.all(Family::Job)
    }

    pub fn index(&self, mount_id: u32) -> Result<Option<IndexRecord>, StateError> {
        self.record(Family::Meta, &index_key(mount_id))
    }

    /// Number of the last change of an fs-mode mount; 0 for none that was numbered so.
    pub fn last_change(&self, mount_id: u32) -> Result<u64, StateError> {
        let number = self.get(Family::Meta, &change_key(mount_id))?;
        Ok(number.and_then(|bytes| leading_id(&bytes)).unwrap_or_default())
    }

    /// How many inodes of a mount that have a name sessions hold.
    pub fn held_of(&self, mount_id: u32) -> Result<u64, StateError> {
        let (mut held, mut last) = (0, 0);
        for key in self.keys(Family::Hold) {
            let inode = leading_id(&key?).unwrap_or_default();
            if inode != last && self.inode(inode)?.is_some_and(|record| record.mount_id == mount_id && !record.unlinked)
            {
                held += 1;
            }
            last = inode;
        }
        Ok(held)
    }

    /// The first directory from an inode on that waits to be deleted, and the last name in it that is gone already;
    /// empty for none.
    pub fn orphan(&self, from: u64) -> Result<Option<(u64, Vec<u8>)>, StateError> {
        let first = self.records_from(Family::Orphan, &inode_key(from)).next().transpose()?;
        Ok(first.and_then(|(key, after)| Some((leading_id(&key)?, after.into_vec()))))
    }

    /// Up to `limit` inodes that have lost their last name and that nobody holds.
    pub fn unheld(&self, limit: usize) -> Result<Vec<u64>, StateError> {
        let mut unheld = Vec::new();
        for key in self.keys(Family::Unlinked) {
            let inode = leading_id(&key?).unwrap_or_default();
            // The objects of one with an intent are still to be given up.
            if !self.is_held(inode)? && self.intent(inode)?.is_none() {
                unheld.push(inode);
                if unheld.len() == limit {
                    break;
                }
            }
        }
        Ok(unheld)
    }

    /// Whether a session holds an inode that has no name.
    pub fn is_held(&self, inode: u64) -> Result<bool, StateError> {
        Ok(self.keys_under(Family::Hold, &inode_key(inode)).next().transpose()?.is_some())
    }

    /// Whether another session than this one holds it, and may write to it: those who only read are notified of what
    /// changes.
    pub fn is_written_by_others(&self, inode: u64, session: u64) -> Result<bool, StateError> {
        let own = hold_key(inode, session);
        for key in self.keys_under(Family::Hold, &inode_key(inode)) {
            let key = key?;
            if *key != own[..] && self.get(Family::Hold, &key)?.is_some_and(|right| *right != *ONLY_READS) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// What there is beside the hold of a session on an inode, if there is one.
    pub fn hold(&self, inode: u64, session: u64) -> Result<Option<Vec<u8>>, StateError> {
        Ok(self.get(Family::Hold, &hold_key(inode, session))?.map(|value| value.to_vec()))
    }

    /// Up to `limit` of the inodes that a session holds, in their order.
    pub fn held_by(&self, session: u64, limit: usize) -> Result<Vec<u64>, StateError> {
        let keys = self.keys_under(Family::HoldSession, &session.to_be_bytes()).take(limit);
        keys.map(|key| {
            held_by_session(&key?).ok_or_else(|| StateError::Corrupt(format!("a hold of session {session}")))
        })
        .collect()
    }

    /// What a session must hold of the inodes that are open there and of those that it held, and which of them are
    /// gone.
    pub fn check_holds(&self, asked: &CheckHoldsRequest) -> Result<CheckHoldsReply, StateError> {
        let CheckHoldsRequest { session, open, held } = asked;
        let mut reply = CheckHoldsReply::default();
        let asked = open.iter().map(|inode| (*inode, false)).chain(held.iter().map(|inode| (*inode, true)));
        let records = self.inodes(open.iter().chain(held).copied())?;
        for ((inode, in_any_case), record) in asked.zip(records) {
            match record {
                None => reply.gone.push(inode),
                Some(record) if record.unlinked || in_any_case => {
                    if self.get(Family::Hold, &hold_key(inode, *session))?.is_none() {
                        reply.hold.push(inode);
                    }
                }
                Some(_) => {}
            }
        }
        Ok(reply)
    }

    /// The sessions that have changed something.
    pub fn session_ids(&self) -> Result<Vec<u64>, StateError> {
        self.keys(Family::Session).map(|key| Ok(leading_id(&key?).unwrap_or_default())).collect()
    }

    /// The sessions of which it is recorded whose they are.
    pub fn session_owners(&self) -> Result<Vec<(u64, Identity)>, StateError> {
        let mut owners = Vec::new();
        for id in self.session_ids()? {
            let owner = self.session(id)?.unwrap_or_default().owner;
            owners.extend(owner.parse::<Identity>().ok().map(|owner| (id, owner)));
        }
        Ok(owners)
    }

    pub fn session(&self, id: u64) -> Result<Option<SessionRecord>, StateError> {
        self.record(Family::Session, &id.to_be_bytes())
    }

    /// The result of a mutation, while it is kept.
    pub fn result(&self, session: u64, seq: u64) -> Result<Option<MutationResult>, StateError> {
        self.record(Family::Result, &result_key(session, seq))
    }

    /// The locks of one kind of a file.
    pub fn locks(&self, inode: u64, kind: LockKind) -> Result<LockRecord, StateError> {
        Ok(self.record(Family::Lock, &lock_key(inode, kind))?.unwrap_or_default())
    }

    /// Where a session has locks or waits for them, at most so many places: kind, inode, and whether it waits.
    pub fn locks_of(&self, session: u64, limit: usize) -> Result<Vec<(LockKind, u64, bool)>, StateError> {
        let items = self.under(Family::LockSession, &session.to_be_bytes()).take(limit).map(|item| {
            let (key, value) = item?;
            let (kind, inode) =
                locked_by_session(&key).ok_or_else(|| StateError::Corrupt(format!("a lock of session {session}")))?;
            Ok((kind, inode, *value == [1]))
        });
        items.collect()
    }

    /// One extended attribute.
    pub fn xattr(&self, inode: u64, name: &[u8]) -> Result<Option<Vec<u8>>, StateError> {
        Ok(self.get(Family::Xattr, &xattr_key(inode, name))?.map(|value| value.to_vec()))
    }

    /// The blocks of a file from one index on.
    pub fn extents(&self, inode: u64, from: u32) -> Result<Vec<Extent>, StateError> {
        self.extents_of(inode, from)?.collect()
    }

    /// The same one by one.
    pub fn extents_of(
        &self,
        inode: u64,
        from: u32,
    ) -> Result<impl Iterator<Item = Result<Extent, StateError>> + use<'a>, StateError> {
        let cuts = self.inode(inode)?.unwrap_or_default().cuts;
        let is_there = move |extent: &Extent| !is_truncated(&cuts, extent.index, extent.generation);
        Ok(self.recorded_extents(inode, from).filter(move |item| item.as_ref().map_or(true, &is_there)))
    }

    /// The blocks of a file, given its record, if no more than `limit` are recorded.
    pub fn few_extents(
        &self,
        inode: u64,
        record: &InodeRecord,
        limit: usize,
    ) -> Result<Option<Vec<Extent>>, StateError> {
        let recorded = self.recorded_extents(inode, 0).take(limit + 1).collect::<Result<Vec<_>, _>>()?;
        let is_there = |extent: &Extent| !is_truncated(&record.cuts, extent.index, extent.generation);
        Ok((recorded.len() <= limit).then(|| recorded.into_iter().filter(is_there).collect()))
    }

    /// The records of a file's blocks from one index on, those that have been cut off among them.
    pub fn recorded_extents(
        &self,
        inode: u64,
        from: u32,
    ) -> impl Iterator<Item = Result<Extent, StateError>> + use<'a> {
        self.extents_between(inode, from, &inode_key(inode.saturating_add(1)))
    }

    fn extents_between(
        &self,
        inode: u64,
        from: u32,
        end: &[u8],
    ) -> impl Iterator<Item = Result<Extent, StateError>> + use<'a> {
        self.records_between(Family::Extent, &extent_key(inode, from), end).map(move |item| {
            let (key, value) = item?;
            let (_, index) =
                parse_extent_key(&key).ok_or_else(|| StateError::Corrupt(format!("a block of inode {inode}")))?;
            let record: ExtentRecord = decode(&value, || format!("block {index} of inode {inode}"))?;
            Ok(super::extent::at(index, record))
        })
    }

    /// Up to `limit` of these, and the index from which on there may be more. Blocks that have just been dropped, by
    /// the hundred thousand, cost a scan as much as others, for a time: so not many are passed over at once, and there
    /// may be none among those that are given though there are more.
    pub fn some_recorded_extents(
        &self,
        inode: u64,
        from: u32,
        limit: usize,
    ) -> Result<(Vec<Extent>, Option<u32>), StateError> {
        let Some(end) = from.checked_add(INDEXES) else {
            return Ok((self.recorded_extents(inode, from).collect::<Result<_, _>>()?, None));
        };
        let mut extents = Vec::new();
        for extent in self.extents_between(inode, from, &extent_key(inode, end)) {
            let extent = extent?;
            if extents.len() == limit {
                return Ok((extents, Some(extent.index)));
            }
            extents.push(extent);
        }
        let (start, until) = (extent_key(inode, end), inode_key(inode.saturating_add(1)));
        let next = match self.records_between_unless_removed(Family::Extent, &start, &until).next() {
            None => None,
            Some(Ok((key, _))) => Some(parse_extent_key(&key).map_or(end, |(_, index)| index)),
            Some(Err(error)) if error.kind() == ErrorKind::Incomplete => Some(end),
            Some(Err(error)) => return Err(error.into()),
        };
        Ok((extents, next))
    }

    /// A block of a file.
    pub fn extent(&self, inode: u64, index: u32) -> Result<Option<ExtentRecord>, StateError> {
        let Some(record) = self.recorded_extent(inode, index)? else { return Ok(None) };
        let cuts = self.inode(inode)?.unwrap_or_default().cuts;
        Ok((!is_truncated(&cuts, index, record.generation)).then_some(record))
    }

    /// The record of a block, though it may have been cut off.
    pub fn recorded_extent(&self, inode: u64, index: u32) -> Result<Option<ExtentRecord>, StateError> {
        self.record(Family::Extent, &extent_key(inode, index))
    }

    /// All extended attributes of an inode, names and values, in the order of their names.
    pub fn xattrs(&self, inode: u64) -> Result<Vec<(Bytes, Bytes)>, StateError> {
        let prefix = inode_key(inode);
        let items = self.under(Family::Xattr, &prefix);
        items
            .map(|item| item.map(|(key, value)| (Bytes::from(key.into_vec()).slice(prefix.len()..), value.into())))
            .collect()
    }

    /// Every key of a family that begins with an id.
    pub fn keys_under(
        &self,
        family: Family,
        id: &[u8; 8],
    ) -> impl Iterator<Item = Result<Box<[u8]>, StateError>> + use<'a> {
        self.under(family, id).map(|item| item.map(|(key, _)| key))
    }

    /// Every key of a family from one on, up to another. Nothing is read before the first is asked for.
    pub fn keys_between(
        &self,
        family: Family,
        from: &[u8],
        to: &[u8],
    ) -> impl Iterator<Item = Result<Box<[u8]>, StateError>> + use<'a> {
        let (tables, from, to) = (*self, from.to_vec(), to.to_vec());
        std::iter::once(()).flat_map(move |()| tables.records_between(family, &from, &to).map(|item| Ok(item?.0)))
    }

    /// Every key of a small family, in order.
    pub fn keys(&self, family: Family) -> impl Iterator<Item = Result<Box<[u8]>, StateError>> + use<'a> {
        self.records_from(family, &[]).map(|item| Ok(item?.0))
    }

    fn under(&self, family: Family, id: &[u8; 8]) -> impl Iterator<Item = Result<Pair, StateError>> + use<'a> {
        let until = u64::from_be_bytes(*id).saturating_add(1).to_be_bytes();
        self.records_between(family, id, &until).map(|item| Ok(item?))
    }

    /// Every record of a small family, in key order.
    fn all<M: Message + Default>(&self, family: Family) -> Result<Vec<M>, StateError> {
        self.records_from(family, &[]).map(|item| decode(&item?.1, || format!("a record of {family:?}"))).collect()
    }

    /// Calls `visit` with the entries of a directory in name order, beginning after `after` (exclusive; `None` for the
    /// first), until it breaks.
    pub fn scan<B>(
        &self,
        directory: u64,
        after: Option<&[u8]>,
        mut visit: impl FnMut(&[u8], DentryRecord) -> Result<ControlFlow<B>, StateError>,
    ) -> Result<Option<B>, StateError> {
        let prefix = inode_key(directory);
        let start = dentry_key(directory, after.unwrap_or_default());
        for item in self.records_between(Family::Dentry, &start, &inode_key(directory.saturating_add(1))) {
            let (key, value) = item?;
            let Some(name) = key.strip_prefix(&prefix) else { break };
            if after.is_some_and(|after| name <= after) {
                continue;
            }
            let record = decode(&value, || format!("an entry of directory {directory}"))?;
            if let ControlFlow::Break(broken) = visit(name, record)? {
                return Ok(Some(broken));
            }
        }
        Ok(None)
    }

    /// Whether a directory has any entry.
    pub fn is_empty(&self, directory: u64) -> Result<bool, StateError> {
        Ok(self.scan(directory, None, |_, _| Ok(ControlFlow::Break(())))?.is_none())
    }

    /// The same of a directory of an fs-mode mount, whose names may just have been removed, by the hundred thousand:
    /// they cost a scan as much as others, for a time. So it is not a long one where the directory says how many names
    /// it has.
    pub fn is_empty_directory(&self, directory: u64, record: &InodeRecord) -> Result<bool, StateError> {
        let Some(entries) = record.entries else { return self.is_empty(directory) };
        let until = inode_key(directory.saturating_add(1));
        match self.records_between_unless_removed(Family::Dentry, &inode_key(directory), &until).next() {
            None => Ok(true),
            Some(Ok(_)) => Ok(false),
            Some(Err(error)) if error.kind() == ErrorKind::Incomplete => Ok(entries == 0),
            Some(Err(error)) => Err(error.into()),
        }
    }

    /// Up to `limit` entries of a directory after `after`, with their inode records, and whether these are the last.
    pub fn page(&self, directory: u64, after: Option<&[u8]>, limit: usize) -> Result<(Vec<Listed>, bool), StateError> {
        let mut names = Vec::new();
        let more = self.scan(directory, after, |name, record| {
            if names.len() == limit {
                return Ok(ControlFlow::Break(()));
            }
            names.push((Bytes::copy_from_slice(name), record.inode));
            Ok(ControlFlow::Continue(()))
        })?;
        let records = self.inodes(names.iter().map(|(_, inode)| *inode))?;
        let found = names.into_iter().zip(records);
        let page = found.filter_map(|((name, inode), record)| Some((name, inode, record?))).collect();
        Ok((page, more.is_none()))
    }

    /// Many inodes in one batched read, in the order asked for.
    pub fn inodes(&self, inodes: impl Iterator<Item = u64>) -> Result<Vec<Option<InodeRecord>>, StateError> {
        if self.unwritten.is_some() {
            return inodes.map(|inode| self.inode(inode)).collect();
        }
        let keys: Vec<[u8; 8]> = inodes.map(inode_key).collect();
        let family = self.database.family(Family::Inode);
        let values = self.database.raw().batched_multi_get_cf_opt(family, &keys, false, &self.options());
        let decode_one = |value: Option<DBPinnableSlice<'_>>| {
            value.map(|bytes| decode(&bytes, || "an inode".to_owned())).transpose()
        };
        values.into_iter().map(|value| decode_one(value?)).collect()
    }

    /// The directory of this inode id with its place in the namespace; `None` when it is gone, or cut off from the
    /// root.
    ///
    /// # Errors
    /// [`StateError::NotADirectory`] for an inode that is no directory.
    pub fn directory(&self, inode: u64) -> Result<Option<Directory>, StateError> {
        let Some(record) = self.inode(inode)? else { return Ok(None) };
        if record.kind() != Kind::Directory {
            return Err(StateError::NotADirectory(self.path(inode)?));
        }
        let mount_id = record.mount_id;
        let mut path = Vec::new();
        let mut above = record.clone();
        let mut at = inode;
        // Below the mount's root the path is collected; above it only the connection to the root is checked.
        for _ in 0..DEPTH_MAX {
            if at == ROOT_INODE {
                path.reverse();
                return Ok(Some(Directory { inode, record, mount_id, path }));
            }
            let parent = above.parent;
            let Some(parent_record) = self.inode(parent)? else { return Ok(None) };
            if parent_record.mount_id == mount_id {
                path.push(above.name.clone());
            }
            (at, above) = (parent, parent_record);
        }
        Ok(None)
    }
}

/// Key of a mount's index record in `meta`.
pub fn index_key(mount_id: u32) -> Vec<u8> {
    [b"index".as_slice(), &mount_id.to_be_bytes()].concat()
}

/// Key of the number of a mount's last change in `meta`.
pub fn change_key(mount_id: u32) -> Vec<u8> {
    [b"changed".as_slice(), &mount_id.to_be_bytes()].concat()
}

/// Key in `meta` of a worker that was removed.
pub fn removed_key(uuid: &[u8]) -> Vec<u8> {
    [b"removed".as_slice(), uuid].concat()
}

/// Key in `meta` of a request.
pub fn request_key(id: &[u8]) -> Vec<u8> {
    [b"request".as_slice(), id].concat()
}

/// Key in `meta` of the id of a request.
pub fn requested_key(number: u64) -> Vec<u8> {
    [b"requested".as_slice(), &number.to_be_bytes()].concat()
}

/// The first inode id of `orphan` and the like.
pub fn first_id(database: &Database, family: Family) -> Result<Option<u64>, StateError> {
    let mut items = database.raw().iterator_cf(database.family(family), IteratorMode::Start);
    Ok(items.next().transpose()?.and_then(|(key, _)| leading_id(&key)))
}
